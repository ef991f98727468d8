//! Jinja's operators, filters and methods, each with a count of what it makes before it makes it.
//!
//! Operators reach these as filters, by the names of [`operator`]: see `rewrite`. A filter of Jinja that makes no more than
//! some times what it is given is called as it is, and its result counted; those that can make much out of little
//! (`indent`, `replace`, `batch`, ...) are counted by what they are about to make.

use std::sync::LazyLock;

use minijinja::value::{Rest, Tuple, Value, ValueKind, ValueOrKwargs};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Output, State, escape_formatter, filters};
use minijinja_contrib::pycompat::unknown_method_callback;

use super::functions::to_json;
use super::meter::{ITEM, Meter};

/// The filters that stand for operators.
pub mod operator {
    /// `a + b + ...`
    pub const ADD: &str = "plimsoll_add";
    /// `a * b * ...`
    pub const MULTIPLY: &str = "plimsoll_multiply";
    /// `a ~ b ~ ...`
    pub const CONCATENATE: &str = "plimsoll_concatenate";
    /// A list, mapping or part of a value that was just made.
    pub const MADE: &str = "plimsoll_made";
    /// A value that is compared.
    pub const SEEN: &str = "plimsoll_seen";
    /// A value of which an item is taken, or that says which.
    pub const INDEXED: &str = "plimsoll_indexed";
    /// A value that a namespace keeps.
    pub const KEPT: &str = "plimsoll_kept";
}

/// The most that a character takes when it is escaped, or in another case.
const ESCAPED: u64 = 6;

/// Filters of texts, which do not go over the characters of a text as items.
const OF_TEXTS: [&str; 30] = [
    "abs",
    "attr",
    "bool",
    "capitalize",
    "count",
    "d",
    "default",
    "e",
    "escape",
    "first",
    "float",
    "format",
    "indent",
    "int",
    "join",
    "last",
    "length",
    "lines",
    "lower",
    "pprint",
    "replace",
    "reverse",
    "round",
    "safe",
    "split",
    "string",
    "title",
    "tojson",
    "trim",
    "upper",
];

/// Puts the metered forms into an environment.
pub fn install(environment: &mut Environment<'static>) {
    environment.set_formatter(emit);
    environment.set_unknown_method_callback(method);
    // Whatever is not set, it would print.
    environment.remove_global("debug");
    environment.add_function("dict", constructor(Value::from_function(minijinja::functions::dict)));
    environment.add_function("namespace", constructor(Value::from_function(minijinja::functions::namespace)));
    add_operators(environment);
    for (name, filter) in jinja_filters() {
        environment.add_filter(name, move |state: &mut State, args: Rest<ValueOrKwargs>| {
            let (meter, args) = (Meter::of(state)?, args.into_values());
            before(&meter, name, &args)?;
            let made = filter.call(state, &args)?;
            meter.made(made)
        });
    }
}

/// A function that makes a mapping.
fn constructor(function: Value) -> impl Fn(&mut State, Rest<ValueOrKwargs>) -> Result<Value, Error> {
    move |state, args| {
        let made = function.call(state, &args.into_values())?;
        Meter::of(state)?.made(made)
    }
}

/// The filters that Jinja has and templates use.
fn jinja_filters() -> Vec<(&'static str, Value)> {
    let of = Value::from_function::<fn(&Value) -> Result<usize, Error>, _, _>;
    let length = of(filters::length);
    let default = Value::from_function(filters::default);
    let escape = Value::from_function(filters::escape);
    vec![
        ("abs", Value::from_function(filters::abs)),
        ("attr", Value::from_function(filters::attr)),
        ("batch", Value::from_function(filters::batch)),
        ("bool", Value::from_function(filters::bool)),
        ("capitalize", Value::from_function(filters::capitalize)),
        ("chain", Value::from_function(filters::chain)),
        ("count", length.clone()),
        ("d", default.clone()),
        ("default", default),
        ("dictsort", Value::from_function(filters::dictsort)),
        ("e", escape.clone()),
        ("escape", escape),
        ("first", Value::from_function(filters::first)),
        ("float", Value::from_function(filters::float)),
        ("format", Value::from_function(filters::format)),
        ("groupby", Value::from_function(filters::groupby)),
        ("indent", Value::from_function(filters::indent)),
        ("int", Value::from_function(filters::int)),
        ("items", Value::from_function(filters::items)),
        ("join", Value::from_function(filters::join)),
        ("last", Value::from_function(filters::last)),
        ("length", length),
        ("lines", Value::from_function(filters::lines)),
        ("list", Value::from_function(filters::list)),
        ("lower", Value::from_function(filters::lower)),
        ("map", Value::from_function(filters::map)),
        ("max", Value::from_function(filters::max)),
        ("min", Value::from_function(filters::min)),
        ("pprint", Value::from_function(filters::pprint)),
        ("reject", Value::from_function(filters::reject)),
        ("rejectattr", Value::from_function(filters::rejectattr)),
        ("replace", Value::from_function(filters::replace)),
        ("reverse", Value::from_function(filters::reverse)),
        ("round", Value::from_function(filters::round)),
        ("safe", Value::from_function(filters::safe)),
        ("select", Value::from_function(filters::select)),
        ("selectattr", Value::from_function(filters::selectattr)),
        ("slice", Value::from_function(filters::slice)),
        ("sort", Value::from_function(filters::sort)),
        ("split", Value::from_function(filters::split)),
        ("string", Value::from_function(filters::string)),
        ("sum", Value::from_function(filters::sum)),
        ("title", Value::from_function(filters::title)),
        ("tojson", Value::from_function(to_json)),
        ("trim", Value::from_function(filters::trim)),
        ("unique", Value::from_function(filters::unique)),
        ("upper", Value::from_function(filters::upper)),
        ("zip", Value::from_function(filters::zip)),
    ]
}

/// Counts what a filter is about to make of its arguments.
fn before(meter: &Meter, name: &str, args: &[Value]) -> Result<(), Error> {
    let Some((value, rest)) = args.split_first() else { return Ok(()) };
    let text = value.as_str();
    let number = |value: Option<&Value>| value.and_then(Value::as_usize).unwrap_or(0) as u64;
    for arg in args {
        match arg.kind() {
            ValueKind::String if OF_TEXTS.contains(&name) => meter.work(length(arg))?,
            ValueKind::String => meter.make(length(arg).saturating_mul(ITEM))?,
            ValueKind::Seq | ValueKind::Iterable => meter.work(ITEM * arg.len().unwrap_or(0) as u64)?,
            _ => {}
        }
    }
    match (name, text) {
        ("indent", Some(text)) => {
            let width = keyword(rest, "width").or_else(|| rest.first().cloned());
            let lines = text.split('\n').count() as u64;
            meter.make(number(width.as_ref()).saturating_mul(lines.max(1)))
        }
        ("replace", Some(text)) => replaced(meter, text, rest),
        ("split" | "lines", Some(text)) => pieces(meter, text, name == "lines", rest.first()),
        // A batch is filled up; slices are made even where there is nothing to put into them.
        ("batch" | "slice", _) => meter.make(number(rest.first()).saturating_mul(ITEM)),
        ("format", Some(text)) => formatted(meter, text, rest),
        ("join", _) => {
            let joiner = rest.first().filter(|value| value.as_str().is_some()).cloned();
            let joiner = joiner.or_else(|| keyword(rest, "d")).as_ref().map_or(0, length);
            joined(meter, value, joiner)
        }
        ("string" | "pprint", None) => {
            // What is printed for reading has its items on lines of their own.
            let size = meter.size(value)?;
            meter.make(size.items.saturating_mul(ITEM + 4 * size.depth as u64))?;
            (0..ESCAPED).try_for_each(|_| meter.measure(value))
        }
        ("e" | "escape", _) => (0..ESCAPED).try_for_each(|_| meter.measure(value)),
        ("tojson", _) => as_json(meter, value, rest),
        _ => Ok(()),
    }
}

fn length(value: &Value) -> u64 {
    value.as_str().map_or(0, str::len) as u64
}

/// An argument that was given by its name.
fn keyword(args: &[Value], name: &str) -> Option<Value> {
    let last = args.last().filter(|value| value.is_kwargs())?;
    last.get_attr(name).ok().filter(|value| !value.is_undefined())
}

/// Counts a text in which one thing is replaced by another.
fn replaced(meter: &Meter, text: &str, args: &[Value]) -> Result<(), Error> {
    let (old, new) = (args.first().and_then(Value::as_str), args.get(1).map_or(0, length));
    let count = old.map_or(0, |old| text.matches(old).count()) as u64;
    meter.make(count.saturating_mul(new))
}

/// Counts the pieces of a text.
fn pieces(meter: &Meter, text: &str, lines: bool, separator: Option<&Value>) -> Result<(), Error> {
    let count = match separator.and_then(Value::as_str) {
        _ if lines => text.matches('\n').count(),
        Some(separator) => text.matches(separator).count(),
        None => text.split_whitespace().count(),
    };
    meter.make_items(count + 1)
}

/// Counts what a format makes of its arguments: they, and the widths that it fills up.
fn formatted(meter: &Meter, format: &str, args: &[Value]) -> Result<(), Error> {
    let numbers = format.split(|c: char| !c.is_ascii_digit()).filter(|digits| !digits.is_empty());
    let widths = numbers.map(|digits| digits.parse::<u64>().unwrap_or(u64::MAX));
    meter.make(widths.fold(format.len() as u64, u64::saturating_add))?;
    // A width may be an argument, and an argument written several times.
    let fields = format.matches(['%', '{']).count() as u64;
    let is_width = format.contains('*') || format.matches('{').count() > format.matches('}').count().min(1);
    for arg in args {
        if is_width && let Some(width) = arg.as_usize() {
            meter.make((width as u64).saturating_mul(fields))?;
        }
        let size = meter.size(arg)?;
        meter.make(fields.saturating_mul(size.bytes.saturating_add(size.items.saturating_mul(ITEM))))?;
    }
    Ok(())
}

/// Counts items with a joiner between them.
fn joined(meter: &Meter, items: &Value, joiner: u64) -> Result<(), Error> {
    let Ok(items) = items.try_iter() else { return Ok(()) };
    for item in items.checked() {
        meter.make(joiner)?;
        meter.measure(&item?)?;
    }
    Ok(())
}

/// Counts a value as JSON: first it is copied, then written, with each item on a line where it is indented.
fn as_json(meter: &Meter, value: &Value, args: &[Value]) -> Result<(), Error> {
    let size = meter.size(value)?;
    let indent = keyword(args, "indent").or_else(|| args.first().cloned());
    let indent = indent.as_ref().and_then(Value::as_usize).unwrap_or(0) as u64;
    let separators = keyword(args, "separators").map_or(Ok(0), |s| meter.size(&s).map(|size| size.bytes))?;
    let item = (2 * ITEM).saturating_add(separators).saturating_add(indent * (size.depth as u64 + 1));
    meter.make(size.items.saturating_mul(item).saturating_add(size.bytes.saturating_mul(ESCAPED)))
}

/// Writes a value into the text.
fn emit(out: &mut Output, state: &mut State, value: &Value) -> Result<(), Error> {
    let meter = Meter::of(state)?;
    let times = if matches!(state.auto_escape(), AutoEscape::None) { 1 } else { ESCAPED };
    (0..times).try_for_each(|_| meter.measure(value))?;
    escape_formatter(out, state, value)
}

/// Python's methods of texts, lists and mappings.
fn method(state: &mut State, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    let meter = Meter::of(state)?;
    for arg in args {
        meter.look_at(arg)?;
    }
    if let Some(text) = value.as_str() {
        meter.work(text.len() as u64)?;
        match name {
            "replace" => replaced(&meter, text, args)?,
            "split" | "splitlines" => pieces(&meter, text, name == "splitlines", args.first())?,
            "format" => formatted(&meter, text, args)?,
            "join" => {
                if let Some(items) = args.first() {
                    joined(&meter, items, text.len() as u64)?;
                }
            }
            _ => {}
        }
    } else if name == "count" || name == "index" {
        meter.look_at(value)?;
    }
    let made = unknown_method_callback(state, value, name, args)?;
    meter.made(made)
}

fn add_operators(environment: &mut Environment<'static>) {
    environment.add_filter(operator::ADD, |state: &State, first: Value, rest: Rest<Value>| {
        let meter = Meter::of(state)?;
        rest.iter().try_fold(first, |left, right| add(&meter, left, right))
    });
    environment.add_filter(operator::MULTIPLY, |state: &State, first: Value, rest: Rest<Value>| {
        let meter = Meter::of(state)?;
        rest.iter().try_fold(first, |left, right| multiply(&meter, left, right))
    });
    environment.add_filter(operator::CONCATENATE, |state: &State, first: Value, rest: Rest<Value>| {
        let meter = Meter::of(state)?;
        let mut text = String::new();
        for value in std::iter::once(&first).chain(rest.iter()) {
            meter.write(&mut text, value)?;
        }
        Ok::<_, Error>(Value::from(text))
    });
    environment.add_filter(operator::MADE, |state: &State, value: Value| Meter::of(state)?.made(value));
    environment.add_filter(operator::SEEN, |state: &State, value: Value| {
        Meter::of(state)?.look_at(&value)?;
        Ok::<_, Error>(value)
    });
    environment.add_filter(operator::INDEXED, |state: &State, value: Value| {
        Meter::of(state)?.work(length(&value))?;
        Ok::<_, Error>(value)
    });
    environment.add_filter(operator::KEPT, |state: &State, value: Value| {
        Meter::of(state)?.look_at(&value)?;
        match holds_namespace(&value) {
            true => Err(Error::new(ErrorKind::InvalidOperation, "a namespace cannot be kept in a namespace")),
            false => Ok(value),
        }
    });
}

/// Whether there is a namespace in a value: kept in itself it would have no end.
fn holds_namespace(value: &Value) -> bool {
    // The type is not public.
    let is_namespace = value.as_object().is_some_and(|object| object.type_name().ends_with("::Namespace"));
    is_namespace
        || match value.kind() {
            ValueKind::Seq | ValueKind::Iterable => {
                value.try_iter().is_ok_and(|mut items| items.any(|item| holds_namespace(&item)))
            }
            ValueKind::Map => value.try_iter().is_ok_and(|mut keys| {
                keys.any(|key| value.get_item(&key).is_ok_and(|item| holds_namespace(&item)))
            }),
            _ => false,
        }
}

fn is_list(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable)
}

fn add(meter: &Meter, left: Value, right: &Value) -> Result<Value, Error> {
    if let (Some(a), Some(b)) = (left.as_str(), right.as_str()) {
        meter.make((a.len() + b.len()) as u64)?;
        return Ok(Value::from([a, b].concat()));
    }
    if is_list(&left) && is_list(right) && left.is_tuple() == right.is_tuple() {
        let mut items = Vec::new();
        meter.extend(&mut items, &left)?;
        meter.extend(&mut items, right)?;
        return Ok(if left.is_tuple() { Value::from(Tuple::from(items)) } else { Value::from(items) });
    }
    match (integer(&left), integer(right)) {
        (Some(a), Some(b)) if a.checked_add(b).is_some() => Ok(Value::from(a + b)),
        _ => arithmetic("left + right", left, right),
    }
}

fn multiply(meter: &Meter, left: Value, right: &Value) -> Result<Value, Error> {
    let repeated = |value: &Value, times: &Value| match times.as_usize() {
        Some(times) if value.as_str().is_some() => {
            meter.make(length(value).saturating_mul(times as u64))?;
            Ok(value.as_str().map(|text| Value::from(text.repeat(times))))
        }
        Some(times) if is_list(value) && value.len().is_some() => {
            meter.make_items(value.len().unwrap_or(0).saturating_mul(times))?;
            let mut items = Vec::new();
            (0..times).try_for_each(|_| meter.extend(&mut items, value))?;
            let made = if value.is_tuple() { Value::from(Tuple::from(items)) } else { Value::from(items) };
            Ok(Some(made))
        }
        _ => Ok::<_, Error>(None),
    };
    if let Some(made) = repeated(&left, right)? {
        return Ok(made);
    }
    if let Some(made) = repeated(right, &left)? {
        return Ok(made);
    }
    match (integer(&left), integer(right)) {
        (Some(a), Some(b)) if a.checked_mul(b).is_some() => Ok(Value::from(a * b)),
        _ => arithmetic("left * right", left, right),
    }
}

fn integer(value: &Value) -> Option<i64> {
    value.as_i64().filter(|_| value.is_integer())
}

/// Jinja's own operator, for numbers and for what it refuses.
fn arithmetic(expression: &str, left: Value, right: &Value) -> Result<Value, Error> {
    static JINJA: LazyLock<Environment<'static>> = LazyLock::new(Environment::empty);
    let variables = Value::from_pairs([("left", left), ("right", right.clone())]);
    let value = JINJA.compile_expression(expression)?.eval(variables);
    // Without its line, which is that of the expression here.
    value.map_err(|e| Error::new(e.kind(), e.detail().unwrap_or_default().to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_filter_of_jinja_is_metered() {
        let environment = format!("{:?}", Environment::new());
        let filters =
            environment.split_once("filters: [").and_then(|(_, rest)| rest.split_once(']')).unwrap().0;
        let metered: Vec<String> = jinja_filters().iter().map(|(name, _)| format!("{name:?}")).collect();
        for filter in filters.split(", ") {
            assert!(metered.iter().any(|name| name == filter), "{filter} in {environment}");
        }
    }
}
