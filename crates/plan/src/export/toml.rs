//! A document of tables, in TOML: values of a table first, then its tables, each under its whole name.

use serde_json::{Map, Value};

/// The text. Keys are bare ones: letters, digits and underscores. A null has no form in TOML, so that its key is left out.
pub(super) fn text(document: &Map<String, Value>) -> String {
    let mut out = String::new();
    table(document, "", &mut out);
    out
}

fn table(entries: &Map<String, Value>, path: &str, out: &mut String) {
    let plain = entries.iter().filter(|(_, value)| !value.is_object() && !value.is_null());
    for (key, value) in plain {
        out.push_str(&format!("{key} = {}\n", inline(value)));
    }
    for (key, value) in entries {
        if let Value::Object(inner) = value {
            let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
            let gap = if out.is_empty() { "" } else { "\n" };
            out.push_str(&format!("{gap}[{path}]\n"));
            table(inner, &path, out);
        }
    }
}

fn inline(value: &Value) -> String {
    match value {
        Value::Array(items) => format!("[{}]", items.iter().map(inline).collect::<Vec<_>>().join(", ")),
        // JSON escapes what TOML escapes, in the same way, but for DEL.
        Value::String(text) => Value::from(text.as_str()).to_string().replace('\u{7f}', "\\u007f"),
        other => other.to_string(),
    }
}
