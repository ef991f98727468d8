//! What `transformers` adds to Jinja for chat templates.

use std::time::SystemTime;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, UndefinedBehavior};

use super::clock::format_time;
use super::error::Raised;
use super::json::{Layout, dumps};

/// How templates are written.
pub fn syntax() -> SyntaxConfig {
    // Only delimiters can be wrong, and these are Jinja's own.
    SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().unwrap_or_default()
}

/// Jinja as templates expect it; what `rewrite` prints has no text between its tags.
pub fn environment(fuel: u64) -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_undefined_behavior(UndefinedBehavior::Lenient);
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_fuel(Some(fuel));
    environment.add_function("raise_exception", raise_exception);
    environment.add_test("iterable", is_iterable);
    environment.add_test("sequence", is_sequence);
    environment
}

/// As in Python: nothing can be taken from `none`, characters from a text, keys from a mapping.
fn is_iterable(value: &Value) -> bool {
    use ValueKind::{Iterable, Map, Seq, String, Undefined};
    matches!(value.kind(), Undefined | String | Seq | Map | Iterable)
}

/// As in Python: what has a length and items, so that texts and mappings are sequences, too.
fn is_sequence(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::String | ValueKind::Seq | ValueKind::Map)
}

fn raise_exception(message: String) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, "raise_exception").with_source(Raised(message)))
}

/// `strftime_now(format)` for a given time.
pub fn strftime_now(now: SystemTime) -> Value {
    Value::from_function(move |format: &str| {
        format_time(format, now).map_err(|reason| Error::new(ErrorKind::InvalidOperation, reason))
    })
}

/// Python's `json.dumps` as `transformers` calls it: nothing escaped for HTML, nor beyond ASCII.
pub fn to_json(value: Value, indent: Option<Value>, options: Kwargs) -> Result<String, Error> {
    let indent: Option<Value> = match indent {
        Some(indent) => Some(indent),
        None => options.get("indent")?,
    };
    let indent = indent.filter(|indent| !indent.is_none());
    let separators: Option<Vec<String>> = options.get("separators")?;
    let layout = Layout {
        indent: match indent {
            Some(indent) => {
                let width = indent.as_usize().filter(|width| *width <= 64);
                let wrong =
                    || Error::new(ErrorKind::InvalidOperation, "tojson: indent is no number up to 64");
                Some(width.ok_or_else(wrong)?)
            }
            None => None,
        },
        separators: match separators.as_deref() {
            Some([item, key]) => Some((item.clone(), key.clone())),
            Some(_) => {
                return Err(Error::new(ErrorKind::InvalidOperation, "tojson: separators are two texts"));
            }
            None => None,
        },
        sort_keys: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
        ascii: options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
    };
    options.assert_all_used()?;
    let document = serde_json::to_value(&value)
        .map_err(|e| Error::new(ErrorKind::BadSerialization, "tojson").with_source(e))?;
    Ok(dumps(&document, &layout))
}

/// The variables that stand where a generation block begins and ends.
pub const GENERATION_MARKS: [&str; 2] = ["generation_begins_here", "generation_ends_here"];

/// `{% generation %}` and its end are tags of `transformers`' own, around what the assistant says. They become
/// conditions that always hold, two each with one of [`GENERATION_MARKS`] between them: the outer one keeps the tag's
/// white space on its left, the inner one that on its right, and where the marks are empty texts nothing is changed.
/// Also says whether there were any.
pub fn mark_generation(source: &str) -> (String, bool) {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    let mut any = false;
    while let Some(at) = rest.find("{%") {
        let (before, tag) = rest.split_at(at);
        out.push_str(before);
        let Some(length) = tag.find("%}").map(|end| end + 2) else {
            rest = tag;
            break;
        };
        let (tag, after) = tag.split_at(length);
        let inside = tag.get(2..length - 2).unwrap_or_default();
        let [begins, ends] = GENERATION_MARKS;
        let (mark, condition) = match inside.trim_matches(['-', '+']).trim() {
            "generation" => (begins, "if true"),
            "endgeneration" => (ends, "endif"),
            _ => {
                out.push_str(tag);
                rest = after;
                continue;
            }
        };
        any = true;
        let control = |end: Option<char>| end.filter(|c| matches!(c, '-' | '+')).map(String::from);
        let left = control(inside.chars().next()).unwrap_or_default();
        let right = control(inside.chars().next_back()).unwrap_or_default();
        out.push_str(&format!("{{%{left} {condition} %}}{{{{ {mark} }}}}{{% {condition} {right}%}}"));
        rest = after;
    }
    out.push_str(rest);
    (out, any)
}
