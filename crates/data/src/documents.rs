//! The documents of a file: the whole of a text file, or a field of every record of a JSONL, JSON or Parquet file.

use std::io::{BufRead, Read};
use std::path::Path;

use plimsoll_model::tokenizer::Tokenizer;
use serde_json::Value;

use crate::DataError;
use crate::chat::{Skip, SkipReason, Skipped, check_share, count};
use crate::files::{DataFile, FileKind, check_regular};
use crate::records::{self, LARGEST_RECORD, RecordPlace};

const BYTE_ORDER_MARK: &str = "\u{feff}";

/// A document, or why a record is none.
pub type Document<'a> = Result<&'a str, (&'a RecordPlace, Skip)>;

/// Calls `each` with every document of a file, in order, and with the records that are none. Empty documents are passed
/// over. Files with a document a line are read through a buffer of `buffer_bytes`.
pub fn for_each(
    file: &DataFile,
    text_field: &str,
    buffer_bytes: usize,
    each: &mut dyn FnMut(Document<'_>) -> Result<(), DataError>,
) -> Result<(), DataError> {
    if file.kind == FileKind::Text {
        let text = read_text(&file.path)?;
        return if text.is_empty() { Ok(()) } else { each(Ok(&text)) };
    }
    records::for_each(file, buffer_bytes, &mut |place, record| {
        let unreadable = |reason| Skip::new(SkipReason::Unreadable, reason);
        let text = record.map_err(unreadable).and_then(|record| {
            text_of(record, text_field).map_err(|reason| Skip::new(SkipReason::OtherFields, reason))
        });
        match text {
            Ok(text) if text.is_empty() => Ok(()),
            Ok(text) => each(Ok(&text)),
            Err(skip) => each(Err((&place, skip))),
        }
    })
}

/// Calls `append` with the tokens of every document of some files, and with the end-of-text token between them. The records that are no
/// documents, of which more than a share of `max_invalid_share` is an error, and so is no document at all.
pub fn tokens(
    files: &[DataFile],
    text_field: &str,
    buffer_bytes: usize,
    max_invalid_share: f64,
    tokenizer: &Tokenizer,
    append: &mut dyn FnMut(&[u32]) -> Result<(), DataError>,
) -> Result<Vec<Skipped>, DataError> {
    let end = tokenizer.eos_token();
    let (mut documents, mut records, mut left_out) = (0u64, 0u64, Vec::new());
    for file in files {
        for_each(file, text_field, buffer_bytes, &mut |document| {
            records += 1;
            let text = match document {
                Ok(text) => text,
                Err((place, skip)) => {
                    count(&mut left_out, place, skip);
                    return Ok(());
                }
            };
            if documents > 0 {
                append(&[end.ok_or(DataError::NoEndOfText)?])?;
            }
            documents += 1;
            tokenizer.encode_document(text, append)
        })?;
    }
    check_share(&left_out, records, max_invalid_share)?;
    if documents == 0 {
        let path = files.first().map(|f| f.path.clone()).unwrap_or_default();
        return Err(DataError::Empty { path });
    }
    Ok(left_out)
}

/// A text file, without a byte-order mark.
pub fn read_text(path: &Path) -> Result<String, DataError> {
    check_regular(path)?;
    let bytes = std::fs::read(path).map_err(DataError::io("read", path))?;
    let mut text = String::from_utf8(bytes).map_err(|e| DataError::NotUtf8 {
        path: path.to_owned(),
        offset: e.utf8_error().valid_up_to() as u64,
    })?;
    if text.starts_with(BYTE_ORDER_MARK) {
        text.drain(..BYTE_ORDER_MARK.len());
    }
    Ok(text)
}

/// Calls `each` with the text of every line of JSON Lines, in order: a line is an object with the text in its field
/// `text_field`. Empty lines and empty texts are passed over, and so is a byte-order mark at the start. Holds one line
/// in memory.
///
/// # Errors
/// [`DataError`] with `path`, which is only for messages, and the line or byte: a line that is not JSON, has no such
/// text, is not UTF-8 or longer than 256 MiB; or whatever `each` answers.
pub fn json_lines(
    reader: &mut dyn BufRead,
    path: &Path,
    text_field: &str,
    each: &mut dyn FnMut(&str) -> Result<(), DataError>,
) -> Result<(), DataError> {
    lines(reader, path, &mut |line, text| {
        let fail = |reason: String| DataError::Line { path: path.to_owned(), line, reason };
        let document = text.and_then(|text| document(text, text_field)).map_err(fail)?;
        if document.is_empty() { Ok(()) } else { each(&document) }
    })
}

/// What is done with a line of some number, or with why it is no text.
type EachLine<'a> = &'a mut dyn FnMut(u64, Result<&str, String>) -> Result<(), DataError>;

/// Calls `each` with every line that is not empty and its number, from 1, or with why it is no text. Holds one line in
/// memory.
pub fn lines(reader: &mut dyn BufRead, path: &Path, each: EachLine<'_>) -> Result<(), DataError> {
    let mut bytes = Vec::new();
    let mut before = 0u64;
    for line in 1.. {
        bytes.clear();
        let read = (&mut *reader)
            .take(LARGEST_RECORD + 1)
            .read_until(b'\n', &mut bytes)
            .map_err(DataError::io("read", path))?;
        if read == 0 {
            return Ok(());
        }
        let fail = |reason: String| DataError::Line { path: path.to_owned(), line, reason };
        if read as u64 > LARGEST_RECORD {
            return Err(fail(format!("longer than {} MiB", LARGEST_RECORD >> 20)));
        }
        let text = std::str::from_utf8(&bytes).map_err(|e| {
            let offset = before + e.valid_up_to() as u64;
            format!("not UTF-8 at byte {offset} of the file; convert it to UTF-8")
        });
        before += read as u64;
        let text = text.map(|text| if line == 1 { text.trim_start_matches(BYTE_ORDER_MARK) } else { text });
        if text.as_ref().map_or(true, |text| !text.trim().is_empty()) {
            each(line, text)?;
        }
    }
    Ok(())
}

/// The text of one line.
fn document(line: &str, text_field: &str) -> Result<String, String> {
    let value: Value = serde_json::from_str(line).map_err(|e| format!("not JSON: {e}"))?;
    match value {
        Value::Object(object) => text_of(object, text_field),
        _ => Err(format!("not an object with a {text_field:?} field")),
    }
}

/// The text of a record.
fn text_of(mut object: records::Record, text_field: &str) -> Result<String, String> {
    match object.remove(text_field) {
        Some(Value::String(text)) => Ok(text),
        Some(_) => Err(format!("the field {text_field:?} is not a text")),
        None => {
            let keys: Vec<String> = object.keys().take(12).map(|k| format!("{k:?}")).collect();
            Err(format!(
                "no field {text_field:?}; it has {}; set data.text_field to one of them",
                keys.join(", ")
            ))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn documents(content: &[u8], kind: FileKind) -> Result<Vec<String>, String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("data");
        std::fs::write(&path, content).unwrap();
        let mut all = Vec::new();
        let outcome = for_each(&DataFile { path, kind }, "text", 7, &mut |document| {
            let text = document.map_err(|(place, skip)| records::broken(place, skip.detail))?;
            all.push(text.to_owned());
            Ok(())
        });
        match outcome {
            Ok(()) => Ok(all),
            Err(e) => Err(e.to_string().rsplit_once("data: ").unwrap().1.to_owned()),
        }
    }

    #[test]
    fn a_text_file_is_one_document() {
        assert_eq!(documents("\u{feff}a\r\nb".as_bytes(), FileKind::Text).unwrap(), ["a\r\nb"]);
        assert_eq!(documents(b"", FileKind::Text).unwrap(), [""; 0]);
        assert_eq!(
            documents(b"ab\xff", FileKind::Text).unwrap_err(),
            "not UTF-8 at byte 2; convert the file to UTF-8"
        );
    }

    #[test]
    fn every_line_is_a_document() {
        let good = b"{\"text\":\"one\"}\n\n{\"x\":1,\"text\":\"two\\n\"}\r\n{\"text\":\"\"}";
        assert_eq!(documents(good, FileKind::JsonLines).unwrap(), ["one", "two\n"]);
        for (bad, words) in [
            (
                &b"{\"text\":\"one\"}\n{\"text\":"[..],
                "line 2: not JSON: EOF while parsing a value at line 1 column 8",
            ),
            (b"[1]", "line 1: not an object with fields"),
            (b"{\"text\":3}", "line 1: the field \"text\" is not a text"),
            (
                b"{\"content\":\"x\"}",
                "line 1: no field \"text\"; it has \"content\"; set data.text_field to one of them",
            ),
            (b"{\"text\":\"a\"}\n\xff\n", "line 2: not UTF-8 at byte 13 of the file; convert it to UTF-8"),
        ] {
            assert_eq!(documents(bad, FileKind::JsonLines).unwrap_err(), words);
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_documents_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = documents(&bytes, FileKind::JsonLines);
        }

        #[test]
        fn texts_survive_json(texts in prop::collection::vec(".{1,20}", 1..6)) {
            let lines: String = texts.iter().map(|t| format!("{}\n", serde_json::json!({ "text": t }))).collect();
            prop_assert_eq!(documents(lines.as_bytes(), FileKind::JsonLines).unwrap(), texts);
        }
    }
}
