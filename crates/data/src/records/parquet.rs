//! Parquet files, row by row. Lists of structs become lists of objects. Fields that are null are left out, and bytes that are no text
//! count as null, as do numbers that the reader has no words for.

use std::cell::Cell;
use std::fs::File;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::{Field, Row};
use serde_json::{Map, Value};

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
        each(number, object(&row))?;
    }
    Ok(())
}

/// The fields that a row has; those that it does not have are null in its struct.
fn object(row: &Row) -> Value {
    let fields = row.get_column_iter().map(|(name, field)| (name.clone(), value(field)));
    Value::Object(fields.filter(|(_, value)| !value.is_null()).collect())
}

/// Some writers do not say of text that it is.
fn value(field: &Field) -> Value {
    match field {
        Field::Bytes(bytes) => std::str::from_utf8(bytes.data()).map_or(Value::Null, Value::from),
        Field::Group(row) => object(row),
        Field::ListInternal(list) => list.elements().iter().map(value).collect(),
        Field::MapInternal(map) => {
            let key = |field: &Field| match value(field) {
                Value::String(key) => key,
                other => other.to_string(),
            };
            let named = map.entries().iter().filter(|(name, _)| !value(name).is_null());
            let entries = named.map(|(name, field)| (key(name), value(field)));
            Value::Object(entries.filter(|(_, value)| !value.is_null()).collect::<Map<String, Value>>())
        }
        // It panics at decimals without digits before the point, and at dates of other eras.
        plain => guarded(|| Ok(plain.to_json_value())).unwrap_or(Value::Null),
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

/// Characters of a reason, at most: the reader may show the bytes that it does not like, all of them.
const REASON: usize = 200;

fn shortened(mut reason: String) -> String {
    if let Some((end, _)) = reason.char_indices().nth(REASON) {
        reason.truncate(end);
        reason.push_str("...");
    }
    reason
}

/// The reader trusts what a file says of itself: a panic in it becomes an error.
fn guarded<T>(call: impl FnOnce() -> parquet::errors::Result<T>) -> Result<T, String> {
    let before = CAUGHT.replace(true);
    let outcome = catch_unwind(AssertUnwindSafe(call));
    CAUGHT.set(before);
    match outcome {
        Ok(answer) => answer.map_err(|error| shortened(error.to_string())),
        Err(_) => Err("the file contradicts itself".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use parquet::data_type::{ByteArray, ByteArrayType};
    use parquet::file::writer::SerializedFileWriter;
    use parquet::schema::parser::parse_message_type;
    use serde_json::json;

    use super::*;

    /// Rows with these bytes in columns of a schema, one value a row and column.
    fn written(schema: &str, columns: &[&[&[u8]]]) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        let schema = Arc::new(parse_message_type(schema).unwrap());
        let mut writer = SerializedFileWriter::new(file.reopen().unwrap(), schema, Arc::default()).unwrap();
        let mut group = writer.next_row_group().unwrap();
        let mut columns = columns.iter();
        while let Some(mut column) = group.next_column().unwrap() {
            let values: Vec<ByteArray> = columns.next().unwrap().iter().map(|v| v.to_vec().into()).collect();
            let levels = vec![1; values.len()];
            column.typed::<ByteArrayType>().write_batch(&values, Some(&levels), None).unwrap();
            column.close().unwrap();
        }
        group.close().unwrap();
        writer.close().unwrap();
        file
    }

    #[test]
    fn bytes_are_text_where_they_can_be_read_as_such_and_else_left_out() {
        let schema = "message m { optional binary text; optional binary image; }";
        let file = written(schema, &[&[b"the sea", b"a hat"], &[b"\xff\xd8", b"ok"]]);
        let mut rows = Vec::new();
        for_each(file.reopen().unwrap(), file.path(), &mut |_, row| {
            rows.push(row);
            Ok(())
        })
        .unwrap();
        assert_eq!(rows, [json!({"text": "the sea"}), json!({"text": "a hat", "image": "ok"})]);
    }

    #[test]
    fn an_error_does_not_show_the_whole_document() {
        let long = [[b'x'; 100_000].as_slice(), b"\xff"].concat();
        let file = written("message m { optional binary text (UTF8); }", &[&[&long]]);
        let error =
            for_each(file.reopen().unwrap(), file.path(), &mut |_, _| Ok(())).unwrap_err().to_string();
        assert!(error.contains("row 1") && error.len() < 600, "{}", error.len());
    }
}
