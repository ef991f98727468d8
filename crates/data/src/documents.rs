//! The documents of a file: the whole of a text file, or a field of every record of a JSONL, JSON or Parquet file.

use std::fs::File;
use std::io::{BufRead, ErrorKind, Read};
use std::path::Path;

use plimsoll_model::tokenizer::{DocumentEncoder, Tokenizer};
use serde_json::Value;

use crate::DataError;
use crate::chat::{Skip, SkipReason, Skipped, check_share, count};
use crate::files::{DataFile, FileKind, check_regular};
use crate::records::{self, LARGEST_RECORD, RecordPlace};

const BYTE_ORDER_MARK: &str = "\u{feff}";

/// A character takes as many bytes at most.
const LONGEST_CHARACTER: usize = 4;

/// What comes next of a file.
pub enum Part<'a> {
    /// More of a document, of which perhaps this is the beginning.
    Text {
        /// Not empty.
        text: &'a str,
        /// Whether the document begins with it.
        begins: bool,
    },
    /// The end of the document.
    End,
    /// A record that is no document, and why.
    LeftOut(&'a RecordPlace, Skip),
}

/// Calls `each` with every document of a file, in order, and with the records that are none. Empty documents are passed
/// over. Texts and files with a document a line are read through a buffer of `buffer_bytes`.
pub fn for_each(
    file: &DataFile,
    text_field: &str,
    buffer_bytes: usize,
    each: &mut dyn FnMut(Part<'_>) -> Result<(), DataError>,
) -> Result<(), DataError> {
    if file.kind == FileKind::Text {
        let mut begins = true;
        for_each_piece(&file.path, buffer_bytes, &mut |text| {
            each(Part::Text { text, begins: std::mem::take(&mut begins) })
        })?;
        return if begins { Ok(()) } else { each(Part::End) };
    }
    records::for_each(file, buffer_bytes, &mut |place, record| {
        let unreadable = |reason| Skip::new(SkipReason::Unreadable, reason);
        let text = record.map_err(unreadable).and_then(|record| {
            text_of(record, text_field).map_err(|reason| Skip::new(SkipReason::OtherFields, reason))
        });
        match text {
            Ok(text) if text.is_empty() => Ok(()),
            Ok(text) => {
                each(Part::Text { text: &text, begins: true })?;
                each(Part::End)
            }
            Err(skip) => each(Part::LeftOut(&place, skip)),
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
    let mut encoder: Option<DocumentEncoder<'_>> = None;
    for file in files {
        for_each(file, text_field, buffer_bytes, &mut |part| match part {
            Part::Text { text, begins } => {
                if begins {
                    if documents > 0 {
                        append(&[end.ok_or(DataError::NoEndOfText)?])?;
                    }
                    (documents, records) = (documents + 1, records + 1);
                }
                encoder.get_or_insert_with(|| tokenizer.document()).push(text, append)
            }
            Part::End => encoder.take().map_or(Ok(()), |encoder| encoder.finish(append)),
            Part::LeftOut(place, skip) => {
                records += 1;
                count(&mut left_out, place, skip);
                Ok(())
            }
        })?;
    }
    check_share(&left_out, records, max_invalid_share)?;
    if documents == 0 {
        let path = files.first().map(|f| f.path.clone()).unwrap_or_default();
        return Err(DataError::Empty { path });
    }
    Ok(left_out)
}

/// Calls `each` with a text file piece by piece, without a byte-order mark, through a buffer of `buffer_bytes`.
pub fn for_each_piece(
    path: &Path,
    buffer_bytes: usize,
    each: &mut dyn FnMut(&str) -> Result<(), DataError>,
) -> Result<(), DataError> {
    check_regular(path)?;
    let mut file = File::open(path).map_err(DataError::io("read", path))?;
    let mut buffer = vec![0; buffer_bytes.max(2 * LONGEST_CHARACTER)];
    // Of the bytes in the buffer the first may belong to a character whose others are still to come.
    let (mut held, mut offset) = (0, 0u64);
    loop {
        let read = match file.read(buffer.get_mut(held..).unwrap_or_default()) {
            Err(e) if e.kind() == ErrorKind::Interrupted => continue,
            read => read.map_err(DataError::io("read", path))?,
        };
        let filled = held + read;
        let bytes = buffer.get(..filled).unwrap_or_default();
        let (text, ends_within) = match std::str::from_utf8(bytes) {
            Ok(text) => (text, false),
            Err(e) => {
                let whole = bytes.get(..e.valid_up_to()).unwrap_or_default();
                (std::str::from_utf8(whole).unwrap_or_default(), e.error_len().is_none() && read > 0)
            }
        };
        let place = offset + text.len() as u64;
        if text.len() < filled && !ends_within {
            return Err(DataError::NotUtf8 { path: path.to_owned(), offset: place });
        }
        let written = if offset == 0 { text.strip_prefix(BYTE_ORDER_MARK).unwrap_or(text) } else { text };
        if !written.is_empty() {
            each(written)?;
        }
        if read == 0 {
            return Ok(());
        }
        let done = text.len();
        buffer.copy_within(done..filled, 0);
        (held, offset) = (filled - done, place);
    }
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
            let remedy = match format_of(&object) {
                Some(format) => {
                    format!("read such records with data.format={format} (of eval: --format {format})")
                }
                None => "set data.text_field to one of them".to_owned(),
            };
            Err(format!("no field {text_field:?}; it has {}; {remedy}", keys.join(", ")))
        }
    }
}

/// The format of a record that is no text by its fields.
fn format_of(object: &records::Record) -> Option<&'static str> {
    let is_list = |key: &str| object.get(key).is_some_and(Value::is_array);
    let has = |key: &str| object.contains_key(key);
    if ["messages", "conversations", "conversation"].into_iter().any(is_list) {
        return Some("chat");
    }
    (has("instruction") && has("output") || has("prompt") && has("completion")).then_some("instruction")
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
        let mut open = String::new();
        let outcome = for_each(&DataFile { path, kind }, "text", 7, &mut |part| {
            match part {
                Part::Text { text, begins } => {
                    assert_eq!(begins, open.is_empty());
                    open.push_str(text);
                }
                Part::End => all.push(std::mem::take(&mut open)),
                Part::LeftOut(place, skip) => return Err(records::broken(place, skip.detail)),
            }
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
            (
                b"{\"messages\":[]}",
                "line 1: no field \"text\"; it has \"messages\"; read such records with data.format=chat (of eval: --format chat)",
            ),
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
        fn a_text_comes_in_pieces_of_whole_characters(
            text in "\\PC{0,60}",
            marked in any::<bool>(),
            bytes in prop::collection::vec(any::<u8>(), 0..3),
        ) {
            let mark = if marked { BYTE_ORDER_MARK } else { "" };
            let mut content = format!("{mark}{text}").into_bytes();
            let written = |content: &[u8]| documents(content, FileKind::Text).map(|all| all.concat());
            prop_assert_eq!(written(&content).unwrap(), text.as_str());
            content.extend(bytes);
            match String::from_utf8(content.clone()) {
                Ok(all) => prop_assert_eq!(written(&content).unwrap(), &all[mark.len()..]),
                Err(e) => {
                    let offset = e.utf8_error().valid_up_to();
                    let words = format!("not UTF-8 at byte {offset}; convert the file to UTF-8");
                    prop_assert_eq!(written(&content).unwrap_err(), words);
                }
            }
        }

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
