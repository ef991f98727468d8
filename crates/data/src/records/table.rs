//! CSV and TSV files (RFC 4180): the first row has the names of the fields, every other one is a record of texts.

use std::cell::Cell;
use std::collections::HashSet;
use std::fs::File;
use std::path::Path;

use csv::{ByteRecord, ReaderBuilder};
use serde_json::Value;

use super::metered::Metered;
use super::{Record, RecordPlace, broken, unreadable};
use crate::DataError;

type Each<'a> = &'a mut dyn FnMut(u64, Result<Record, String>) -> Result<(), DataError>;

/// Calls `each` with every record and its number, from 1; the names are not counted. A row with more or fewer fields than names, or with
/// bytes that are no UTF-8, is none.
pub fn for_each(
    file: File,
    (path, delimiter, buffer_bytes): (&Path, u8, usize),
    each: Each<'_>,
) -> Result<(), DataError> {
    let read = Cell::new(0);
    let mut rows = ReaderBuilder::new()
        .delimiter(delimiter)
        .flexible(true)
        .buffer_capacity(buffer_bytes)
        .from_reader(Metered::new(file, &read));
    let failed = |number: u64, error: csv::Error| match error.into_kind() {
        csv::ErrorKind::Io(error) => {
            let place = RecordPlace { path: path.to_owned(), unit: "row", number };
            broken(&place, error.to_string())
        }
        csv::ErrorKind::Utf8 { .. } => {
            unreadable(path, "the names in its first row are not UTF-8; convert the file to UTF-8".to_owned())
        }
        other => unreadable(path, format!("not readable as a table: {other:?}")),
    };
    let names = rows.headers().map_err(|error| failed(0, error))?.clone();
    let names: Vec<&str> = names.iter().map(|name| name.trim_start_matches('\u{feff}')).collect();
    let mut known = HashSet::new();
    if let Some(name) = names.iter().find(|name| !known.insert(**name)) {
        return Err(unreadable(path, format!("two of its columns are called {name:?}; rename one")));
    }
    let mut row = ByteRecord::new();
    for number in 1.. {
        read.set(0);
        if !rows.read_byte_record(&mut row).map_err(|error| failed(number, error))? {
            break;
        }
        each(number, record(&names, &row))?;
    }
    Ok(())
}

/// A row as a record.
fn record(names: &[&str], row: &ByteRecord) -> Result<Record, String> {
    if row.len() != names.len() {
        return Err(format!("{} fields, where the first row names {}", row.len(), names.len()));
    }
    let fields = names.iter().zip(row).map(|(name, field)| {
        let text = std::str::from_utf8(field).map_err(|_| format!("{name} is not UTF-8"))?;
        Ok(((*name).to_owned(), Value::String(text.to_owned())))
    });
    fields.collect()
}
