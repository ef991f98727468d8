//! The records of a file, one at a time: the lines of JSONL, the items of a JSON list, the rows of Parquet and CSV. Every one
//! becomes a JSON object; a file is never held as a whole.

mod footer;
mod json;
mod metered;
mod parquet;
mod table;

pub use parquet::panics_are_caught;

use std::fmt;
use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::DataError;
use crate::documents::lines;
use crate::files::{DataFile, FileKind, check_regular, kind};

/// The largest record that is read; a larger one is no record but a mistake.
pub const LARGEST_RECORD: u64 = 256 << 20;

/// A record's fields.
pub type Record = Map<String, Value>;

/// Where a record is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordPlace {
    /// The file.
    pub path: PathBuf,
    /// What is counted: lines, records or rows.
    pub unit: &'static str,
    /// Its number, from 1.
    pub number: u64,
}

impl fmt::Display for RecordPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} {}", self.path.display(), self.unit, self.number)
    }
}

/// Calls `each` with every record of a file, in order, or with why one is none. The file's name says what it holds:
/// `.jsonl`, `.json`, `.parquet`, `.csv` or `.tsv`.
///
/// # Errors
/// The file cannot be read on: the message names it and the place; or whatever `each` answers.
pub fn for_each_record(
    path: &Path,
    buffer_bytes: usize,
    each: &mut dyn FnMut(RecordPlace, Result<Record, String>) -> Result<(), DataError>,
) -> Result<(), DataError> {
    check_regular(path)?;
    let kind = kind(path).ok_or_else(|| DataError::UnknownKind { path: path.to_owned() })?;
    for_each(&DataFile { path: path.to_owned(), kind }, buffer_bytes, each)
}

/// The same of a file whose kind is known.
pub fn for_each(
    file: &DataFile,
    buffer_bytes: usize,
    each: &mut dyn FnMut(RecordPlace, Result<Record, String>) -> Result<(), DataError>,
) -> Result<(), DataError> {
    let place = |unit, number| RecordPlace { path: file.path.clone(), unit, number };
    let open = || File::open(&file.path).map_err(DataError::io("open", &file.path));
    match file.kind {
        FileKind::Text => Err(DataError::NoRecords { path: file.path.clone() }),
        FileKind::JsonLines => {
            let mut reader = BufReader::with_capacity(buffer_bytes.max(1), open()?);
            lines(&mut reader, &file.path, &mut |number, line| {
                let value =
                    line.and_then(|line| serde_json::from_str(line).map_err(|e| format!("not JSON: {e}")));
                each(place("line", number), value.and_then(object))
            })
        }
        FileKind::Json => {
            let mut reader = BufReader::with_capacity(buffer_bytes.max(16), open()?);
            json::for_each(&mut reader, &file.path, &mut |number, value| {
                each(place("record", number), object(value))
            })
        }
        FileKind::Parquet => parquet::for_each(open()?, &file.path, &mut |number, value| {
            each(place("row", number), object(value))
        }),
        FileKind::Csv | FileKind::Tsv => {
            let delimiter = if file.kind == FileKind::Csv { b',' } else { b'\t' };
            let size = buffer_bytes.max(16);
            table::for_each(open()?, (&file.path, delimiter, size), &mut |number, record| {
                each(place("row", number), record)
            })
        }
    }
}

fn object(value: Value) -> Result<Record, String> {
    match value {
        Value::Object(record) => Ok(record),
        _ => Err("not an object with fields".to_owned()),
    }
}

/// An error at a place.
pub fn broken(place: &RecordPlace, reason: String) -> DataError {
    DataError::Record { place: place.clone(), reason }
}

/// An error of a whole file.
pub fn unreadable(path: &Path, reason: String) -> DataError {
    DataError::Unreadable { path: path.to_owned(), reason }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn read(content: &[u8], kind: FileKind) -> Result<Vec<(u64, String)>, String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("data");
        std::fs::write(&path, content).unwrap();
        let mut all = Vec::new();
        for_each(&DataFile { path, kind }, 7, &mut |place, record| {
            let record = record.map_err(|reason| broken(&place, reason))?;
            all.push((place.number, Value::Object(record).to_string()));
            Ok(())
        })
        .map_err(|e| e.to_string().rsplit_once("data: ").unwrap().1.to_owned())?;
        Ok(all)
    }

    #[test]
    fn lists_lines_and_objects_in_a_row_are_records() {
        let two = vec![(1, "{\"a\":1}".to_owned()), (2, "{\"b\":[2]}".to_owned())];
        for (content, kind) in [
            ("[{\"a\": 1}, {\"b\": [2]}]\n", FileKind::Json),
            ("\u{feff} [{\"a\": 1},\n{\"b\": [2]}]", FileKind::Json),
            ("{\"a\": 1}\n{\"b\": [2]}\n", FileKind::Json),
            ("{\n\"a\": 1}{\"b\":\n[2]}", FileKind::Json),
            ("{\"a\": 1}\n{\"b\": [2]}\n", FileKind::JsonLines),
        ] {
            assert_eq!(read(content.as_bytes(), kind).unwrap(), two, "{content}");
        }
        assert_eq!(read(b"[]", FileKind::Json).unwrap(), []);
        assert_eq!(read(b"", FileKind::Json).unwrap(), []);
    }

    #[test]
    fn what_is_no_record_is_an_error_with_its_place() {
        for (content, kind, words) in [
            ("[{\"a\": 1}, 3]", FileKind::Json, "record 2: not an object with fields"),
            (
                "[{\"a\": 1}, {\"b\" 2}]",
                FileKind::Json,
                "record 2: not JSON: expected `:` at line 1 column 17",
            ),
            (
                "[{\"a\": 1}",
                FileKind::Json,
                "record 2: not JSON: EOF while parsing a list at line 1 column 9",
            ),
            ("[] {}", FileKind::Json, "record 1: not JSON: trailing characters at line 1 column 4"),
            ("7", FileKind::Json, "record 1: not an object with fields"),
            ("[1]\n", FileKind::JsonLines, "line 1: not an object with fields"),
            (
                "{}\n{",
                FileKind::JsonLines,
                "line 2: not JSON: EOF while parsing an object at line 1 column 1",
            ),
        ] {
            assert_eq!(read(content.as_bytes(), kind).unwrap_err(), words, "{content}");
        }
        let deep = "[".repeat(100_000);
        assert!(read(deep.as_bytes(), FileKind::Json).unwrap_err().contains("recursion limit"));
        assert!(read(b"PAR1", FileKind::Parquet).unwrap_err().contains("not readable as Parquet"));
    }

    #[test]
    fn rows_of_tables_are_records_of_texts() {
        let rows = |content: &[u8], kind| read(content, kind);
        let two = vec![
            (1, "{\"text\":\"a, \\\"b\\\"\\nc\",\"n\":\"1\"}".to_owned()),
            (2, "{\"text\":\"d\",\"n\":\"\"}".to_owned()),
        ];
        assert_eq!(rows(b"text,n\n\"a, \"\"b\"\"\nc\",1\nd,\n", FileKind::Csv).unwrap(), two);
        let marked = "\u{feff}text,n\r\n\"a, \"\"b\"\"\nc\",1\r\nd,";
        assert_eq!(rows(marked.as_bytes(), FileKind::Csv).unwrap(), two);
        assert_eq!(
            rows(b"text\tn\na, b\t1", FileKind::Tsv).unwrap(),
            [(1, "{\"text\":\"a, b\",\"n\":\"1\"}".to_owned())]
        );
        assert_eq!(rows(b"", FileKind::Csv).unwrap(), []);
        assert_eq!(rows(b"text,n\n", FileKind::Csv).unwrap(), []);
        for (content, words) in [
            (&b"text,n\na,1\nb"[..], "row 2: 1 fields, where the first row names 2"),
            (b"text,n\n\xff,1", "row 1: text is not UTF-8"),
            (b"text,text\na,1", "two of its columns are called \"text\"; rename one"),
        ] {
            assert_eq!(rows(content, FileKind::Csv).unwrap_err(), words);
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_records_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            for kind in [FileKind::Json, FileKind::JsonLines, FileKind::Parquet, FileKind::Csv, FileKind::Tsv] {
                let _ = read(&bytes, kind);
            }
        }

        #[test]
        fn texts_survive(texts in prop::collection::vec(".{0,20}", 0..6)) {
            let list: Vec<Value> = texts.iter().map(|t| serde_json::json!({ "t": t })).collect();
            let read = read(Value::Array(list.clone()).to_string().as_bytes(), FileKind::Json).unwrap();
            let expected: Vec<String> = list.iter().map(Value::to_string).collect();
            prop_assert_eq!(read.into_iter().map(|(_, text)| text).collect::<Vec<_>>(), expected);
        }
    }
}
