//! Parquet files, row by row. Lists of structs become lists of objects; what is null is left out.

use std::cell::Cell;
use std::fs::File;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use parquet::file::reader::{FileReader, SerializedFileReader};
use serde_json::Value;

use super::{footer, unreadable};
use crate::DataError;

/// Calls `each` with every row and its number, from 1.
pub fn for_each(
    mut file: File,
    path: &Path,
    each: &mut dyn FnMut(u64, Value) -> Result<(), DataError>,
) -> Result<(), DataError> {
    let refused = |reason: String| unreadable(path, format!("not readable as Parquet: {reason}"));
    footer::check(&mut file).map_err(|e| unreadable(path, e.to_string()))?.map_err(refused)?;
    let reader = guarded(|| SerializedFileReader::new(file)).map_err(refused)?;
    let mut rows = guarded(|| reader.get_row_iter(None)).map_err(refused)?;
    for number in 1.. {
        let row = guarded(|| rows.next().transpose())
            .map_err(|reason| unreadable(path, format!("row {number}: {reason}")))?;
        let Some(row) = row else { break };
        let mut value = row.to_json_value();
        drop_nulls(&mut value);
        each(number, value)?;
    }
    Ok(())
}

/// Fields that a row does not have are null in its struct.
fn drop_nulls(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            fields.retain(|_, field| !field.is_null());
            fields.values_mut().for_each(drop_nulls);
        }
        Value::Array(items) => items.iter_mut().for_each(drop_nulls),
        _ => {}
    }
}

thread_local! {
    static CAUGHT: Cell<bool> = const { Cell::new(false) };
}

/// Whether a panic of this thread would now be caught and become an error. A program's panic hook asks, so that it prints
/// no panic that the program survives.
pub fn panics_are_caught() -> bool {
    CAUGHT.get()
}

/// The reader trusts what a file says of itself: a panic in it becomes an error.
fn guarded<T>(call: impl FnOnce() -> parquet::errors::Result<T>) -> Result<T, String> {
    let before = CAUGHT.replace(true);
    let outcome = catch_unwind(AssertUnwindSafe(call));
    CAUGHT.set(before);
    match outcome {
        Ok(answer) => answer.map_err(|error| error.to_string()),
        Err(_) => Err("the file contradicts itself".to_owned()),
    }
}
