//! The plain texts of data files, for a tokenizer that is trained on them: documents, or whatever is text in samples.

use serde_json::Value;

use crate::files::{Wanted, expand};
use crate::{DataError, documents, records};

/// Bytes of a piece, which ends with a line.
const PIECE: usize = 64 << 10;

/// Which files, and what in them is text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TextOptions {
    /// Files, folders, patterns.
    pub patterns: Vec<String>,
    /// The field of a record that holds its text; none: all texts in it.
    pub text_field: Option<String>,
    /// Bytes between a file of records and its reader.
    pub buffer_bytes: usize,
}

/// Calls `each` with the texts of the files in pieces, in order. Records without a text are passed over.
///
/// # Errors
/// A file cannot be read; or whatever `each` answers.
pub fn for_each_text(
    options: &TextOptions,
    each: &mut dyn FnMut(String) -> Result<(), DataError>,
) -> Result<(), DataError> {
    let wanted = if options.text_field.is_some() { Wanted::Texts } else { Wanted::Records };
    for file in expand(&options.patterns, wanted)? {
        match &options.text_field {
            Some(field) => documents::for_each(&file, field, options.buffer_bytes, &mut |document| {
                document.map_or(Ok(()), |text| pieces(text, each))
            })?,
            None => records::for_each(&file, options.buffer_bytes, &mut |_, record| {
                record.map_or(Ok(()), |record| record.values().try_for_each(|value| within(value, each)))
            })?,
        }
    }
    Ok(())
}

/// The texts of a value.
fn within(value: &Value, each: &mut dyn FnMut(String) -> Result<(), DataError>) -> Result<(), DataError> {
    match value {
        Value::String(text) => pieces(text, each),
        Value::Array(items) => items.iter().try_for_each(|item| within(item, each)),
        Value::Object(fields) => fields.values().try_for_each(|field| within(field, each)),
        _ => Ok(()),
    }
}

fn pieces(text: &str, each: &mut dyn FnMut(String) -> Result<(), DataError>) -> Result<(), DataError> {
    let mut piece = String::new();
    for line in text.split_inclusive('\n') {
        piece.push_str(line);
        if piece.len() >= PIECE {
            each(std::mem::take(&mut piece))?;
        }
    }
    if piece.is_empty() { Ok(()) } else { each(piece) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_text_comes_in_order() {
        let folder = tempfile::tempdir().unwrap();
        let texts = |name: &str, content: &str, text_field: Option<&str>| {
            let path = folder.path().join(name);
            std::fs::write(&path, content).unwrap();
            let patterns = vec![path.to_str().unwrap().to_owned()];
            let options =
                TextOptions { patterns, text_field: text_field.map(str::to_owned), buffer_bytes: 8 };
            let mut all = Vec::new();
            for_each_text(&options, &mut |text| {
                all.push(text);
                Ok(())
            })
            .unwrap();
            all
        };
        assert_eq!(texts("a.txt", "one\ntwo", Some("text")), ["one\ntwo"]);
        let long = "line\n".repeat(20_000);
        let pieces = texts("b.txt", &long, Some("text"));
        assert!(pieces.len() == 2 && pieces.concat() == long && pieces[0].ends_with('\n'));
        assert_eq!(
            texts("c.jsonl", "{\"text\":\"a\"}\n{\"x\":1}\n7\n{\"text\":\"b\"}", Some("text")),
            ["a", "b"]
        );
        let chat = "{\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}],\"n\":1}";
        assert_eq!(texts("d.jsonl", chat, None), ["user", "hi"]);
    }
}
