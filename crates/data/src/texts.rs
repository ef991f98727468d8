//! The plain texts of data files, for a tokenizer that is trained on them: documents, or whatever is text in samples.

use serde_json::Value;

use crate::documents::Part;
use crate::files::{Wanted, expand};
use crate::{DataError, documents, records};

/// Bytes of a piece, which ends with a line.
const PIECE: usize = 64 << 10;

/// Bytes of a piece where no line ends.
const LONGEST_PIECE: usize = 2 * PIECE;

/// What is longer than so many bytes without a change between letters, space and signs is cut: a tokenizer learns nothing from it, and
/// takes time that grows with its square.
const LONGEST_WORD: usize = 1 << 10;

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
            Some(field) => {
                let mut pieces = Pieces { each: &mut *each, held: String::new() };
                documents::for_each(&file, field, options.buffer_bytes, &mut |part| match part {
                    Part::Text { text, .. } => pieces.push(text),
                    Part::End => pieces.end(),
                    Part::LeftOut(..) => Ok(()),
                })?;
            }
            None => {
                let mut pieces = Pieces { each: &mut *each, held: String::new() };
                records::for_each(&file, options.buffer_bytes, &mut |_, record| {
                    let texts = |record: records::Record| {
                        record.values().try_for_each(|value| pieces.push_all(value))
                    };
                    record.map_or(Ok(()), texts)
                })?;
            }
        }
    }
    Ok(())
}

/// Texts on their way to whoever takes them in pieces.
struct Pieces<'a> {
    each: &'a mut dyn FnMut(String) -> Result<(), DataError>,
    held: String,
}

impl Pieces<'_> {
    /// The texts of a value.
    fn push_all(&mut self, value: &Value) -> Result<(), DataError> {
        match value {
            Value::String(text) => {
                self.push(text)?;
                self.end()
            }
            Value::Array(items) => items.iter().try_for_each(|item| self.push_all(item)),
            Value::Object(fields) => fields.values().try_for_each(|field| self.push_all(field)),
            _ => Ok(()),
        }
    }

    /// More of a text.
    fn push(&mut self, text: &str) -> Result<(), DataError> {
        for line in text.split_inclusive('\n') {
            let mut rest = line;
            while self.held.len() + rest.len() > LONGEST_PIECE {
                let room = rest.floor_char_boundary(LONGEST_PIECE.saturating_sub(self.held.len()));
                let (more, after) = rest.split_at(room);
                self.held.push_str(more);
                rest = after;
                // Before a space, which belongs to the word behind it.
                let space = self.held.rfind(char::is_whitespace).filter(|at| *at > 0);
                let next = self.held.split_off(space.unwrap_or(self.held.len()));
                self.end()?;
                self.held = next;
            }
            self.held.push_str(rest);
            if line.ends_with('\n') && self.held.len() >= PIECE {
                self.end()?;
            }
        }
        Ok(())
    }

    /// Hands on what is left of a text.
    fn end(&mut self) -> Result<(), DataError> {
        let piece = std::mem::take(&mut self.held);
        let (mut begun, mut since, mut before) = (0, 0, None);
        for (place, c) in piece.char_indices() {
            let class = Some((c.is_alphanumeric(), c.is_whitespace()));
            if class != before {
                (before, since) = (class, place);
            } else if place - since >= LONGEST_WORD {
                (self.each)(piece.get(begun..place).unwrap_or_default().to_owned())?;
                (begun, since) = (place, place);
            }
        }
        match piece.get(begun..) {
            None | Some("") => Ok(()),
            Some(_) if begun == 0 => (self.each)(piece),
            Some(rest) => (self.each)(rest.to_owned()),
        }
    }
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
        // Lines and words without an end are cut, the former between words, however they come.
        let line = "words ".repeat(50_000);
        let pieces = texts("line.txt", &line, Some("text"));
        assert!(pieces.len() == 3 && pieces.concat() == line);
        assert!(pieces.iter().all(|piece| piece.len() <= LONGEST_PIECE && piece.contains("words")));
        let record = format!("{{\"text\":\"{line}\"}}");
        assert_eq!(texts("line.jsonl", &record, Some("text")), pieces);
        let word = format!("a {}", "é".repeat(1000));
        let pieces = texts("word.txt", &word, Some("text"));
        assert_eq!((pieces.len(), pieces[0].len()), (2, 2 + LONGEST_WORD));
        assert_eq!(pieces.concat(), word);
        assert_eq!(
            texts("c.jsonl", "{\"text\":\"a\"}\n{\"x\":1}\n7\n{\"text\":\"b\"}", Some("text")),
            ["a", "b"]
        );
        let chat = "{\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}],\"n\":1}";
        assert_eq!(texts("d.jsonl", chat, None), ["user", "hi"]);
    }
}
