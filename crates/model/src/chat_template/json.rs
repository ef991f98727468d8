//! JSON as Python's `json.dumps` writes it: a space after commas and colons, floats with a point.

use serde_json::Value;

/// How it is laid out.
#[derive(Clone, Debug, Default)]
pub struct Layout {
    /// Spaces a level, each item on a line of its own; none for one line.
    pub indent: Option<usize>,
    /// Between items, and between key and value.
    pub separators: Option<(String, String)>,
    /// Whether keys are in order.
    pub sort_keys: bool,
    /// Whether what is not ASCII is escaped.
    pub ascii: bool,
}

/// The document as text.
pub fn dumps(value: &Value, layout: &Layout) -> String {
    let comma = if layout.indent.is_some() { "," } else { ", " };
    let (item, key) = match &layout.separators {
        Some((item, key)) => (item.as_str(), key.as_str()),
        None => (comma, ": "),
    };
    let mut writer = Writer { out: String::new(), layout, item, key };
    writer.value(value, 0);
    writer.out
}

struct Writer<'a> {
    out: String,
    layout: &'a Layout,
    item: &'a str,
    key: &'a str,
}

impl Writer<'_> {
    fn value(&mut self, value: &Value, depth: usize) {
        match value {
            Value::Null => self.out.push_str("null"),
            Value::Bool(value) => self.out.push_str(if *value { "true" } else { "false" }),
            Value::Number(number) => self.out.push_str(&number.to_string()),
            Value::String(text) => self.string(text),
            Value::Array(items) => self.list('[', ']', items, depth, |w, item| w.value(item, depth + 1)),
            Value::Object(map) => {
                let mut entries: Vec<(&String, &Value)> = map.iter().collect();
                if self.layout.sort_keys {
                    entries.sort_by_key(|(name, _)| *name);
                }
                self.list('{', '}', &entries, depth, |w, (name, value)| {
                    w.string(name);
                    w.out.push_str(w.key);
                    w.value(value, depth + 1);
                });
            }
        }
    }

    fn list<T>(
        &mut self,
        open: char,
        close: char,
        items: &[T],
        depth: usize,
        mut each: impl FnMut(&mut Self, &T),
    ) {
        self.out.push(open);
        for (number, item) in items.iter().enumerate() {
            if number > 0 {
                self.out.push_str(self.item);
            }
            self.line(depth + 1);
            each(self, item);
        }
        if !items.is_empty() {
            self.line(depth);
        }
        self.out.push(close);
    }

    fn line(&mut self, depth: usize) {
        if let Some(width) = self.layout.indent {
            self.out.push('\n');
            self.out.extend(std::iter::repeat_n(' ', width * depth));
        }
    }

    fn string(&mut self, text: &str) {
        self.out.push('"');
        for c in text.chars() {
            match c {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{c}' => self.out.push_str("\\f"),
                c if c < ' ' || (self.layout.ascii && !c.is_ascii()) => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        self.out.push_str(&format!("\\u{unit:04x}"));
                    }
                }
                c => self.out.push(c),
            }
        }
        self.out.push('"');
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn documents_are_written_as_python_does() {
        let document = json!({ "b": [1, 2.0, -0.5], "a": { "é\n\"": null, "x": [] }, "t": true });
        let check = |layout: Layout, expected: &str| assert_eq!(dumps(&document, &layout), expected);
        check(Layout::default(), r#"{"b": [1, 2.0, -0.5], "a": {"é\n\"": null, "x": []}, "t": true}"#);
        check(
            Layout { sort_keys: true, ascii: true, ..Layout::default() },
            r#"{"a": {"x": [], "\u00e9\n\"": null}, "b": [1, 2.0, -0.5], "t": true}"#,
        );
        check(
            Layout { separators: Some((",".into(), ":".into())), ..Layout::default() },
            r#"{"b":[1,2.0,-0.5],"a":{"é\n\"":null,"x":[]},"t":true}"#,
        );
        let lines = dumps(&json!({ "a": [1, {}], "b": 2 }), &Layout { indent: Some(2), ..Layout::default() });
        assert_eq!(lines, "{\n  \"a\": [\n    1,\n    {}\n  ],\n  \"b\": 2\n}");
    }
}
