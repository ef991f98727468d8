//! The metadata: keys with typed values, read in place and asked for by key and type.
//!
//! Scalars are read at once. Strings and arrays stay in the file and are read, and checked, when asked for.

use std::collections::HashMap;
use std::fmt;
use std::path::Path;

use super::GgufError;
use super::cursor::{Cursor, Reading};
use crate::shown::Shown;

/// Longest key that the format allows.
const MAX_KEY: usize = u16::MAX as usize;

/// More keys than any model has; bounds what a hostile file can make a reader allocate.
const MAX_ENTRIES: u64 = 1 << 20;

/// Alignment of data where `general.alignment` is absent.
const DEFAULT_ALIGNMENT: u64 = 32;

/// The types of values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum ValueType {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    String,
    Array,
    U64,
    I64,
    F64,
}

impl ValueType {
    fn from_id(id: u32) -> Option<ValueType> {
        use ValueType::*;
        [U8, I8, U16, I16, U32, I32, F32, Bool, String, Array, U64, I64, F64].get(id as usize).copied()
    }

    /// Bytes that a value takes at least: a string has its length, an array its type and length.
    fn min_bytes(self) -> u64 {
        match self {
            ValueType::U8 | ValueType::I8 | ValueType::Bool => 1,
            ValueType::U16 | ValueType::I16 => 2,
            ValueType::U32 | ValueType::I32 | ValueType::F32 => 4,
            ValueType::U64 | ValueType::I64 | ValueType::F64 | ValueType::String => 8,
            ValueType::Array => 12,
        }
    }
}

impl fmt::Display for ValueType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", format!("{self:?}").to_lowercase())
    }
}

/// A value, or where it is in the file.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// An integer of an unsigned type.
    Unsigned(u64),
    /// An integer of a signed type.
    Signed(i64),
    /// A number of type f32, as the f64 with the same shortest decimal form; or an f64.
    Float(f64),
    /// True or false.
    Bool(bool),
    /// A string; its bytes are in the file.
    String,
    /// `count` values of one type; their bytes are in the file.
    Array {
        /// The elements' type.
        element: ValueType,
        /// How many.
        count: u64,
    },
}

/// A key and its value.
#[derive(Clone, Debug, PartialEq)]
pub struct MetadataEntry {
    /// The key: `llama.block_count`.
    pub key: String,
    /// The value's type.
    pub kind: ValueType,
    /// The value, as far as it is not left in the file.
    pub value: Value,
    /// Where the value is in the file; of an array, its first element.
    pub offset: usize,
}

/// The metadata of an open file.
#[derive(Clone, Copy)]
pub struct Metadata<'a> {
    path: &'a Path,
    bytes: &'a [u8],
    entries: &'a [MetadataEntry],
    by_key: &'a HashMap<String, usize>,
}

/// Reads all entries and steps over the contents of strings and arrays.
pub(super) fn read(
    cursor: &mut Cursor<'_>,
    count: u64,
) -> Result<(Vec<MetadataEntry>, HashMap<String, usize>), GgufError> {
    // A key's length, a type, and a value of at least one byte.
    cursor.check_count(count, 8 + 4 + 1, Reading::Header("metadata"), MAX_ENTRIES)?;
    let mut entries = Vec::new();
    let mut by_key = HashMap::new();
    for index in 0..count {
        let start = cursor.position();
        let key = cursor.string(Reading::Key(index))?;
        if key.is_empty() || key.len() > MAX_KEY {
            let reason = format!("has {} bytes; the format allows 1 to {MAX_KEY}", key.len());
            return Err(cursor.malformed(start, Reading::Key(index), reason));
        }
        let entry = read_entry(cursor, key)?;
        if by_key.insert(key.to_owned(), entries.len()).is_some() {
            return Err(cursor.malformed(start, Reading::Key(index), format!("repeats {}", Shown(key))));
        }
        entries.push(entry);
    }
    Ok((entries, by_key))
}

fn read_entry(cursor: &mut Cursor<'_>, key: &str) -> Result<MetadataEntry, GgufError> {
    let place = Reading::Value(key);
    let kind = read_type(cursor, place)?;
    let mut offset = cursor.position();
    let value = match kind {
        ValueType::String => {
            cursor.string_bytes(place)?;
            Value::String
        }
        ValueType::Array => {
            let element = read_type(cursor, place)?;
            let count = cursor.u64(place)?;
            cursor.check_count(count, element.min_bytes(), place, u64::MAX)?;
            offset = cursor.position();
            match element {
                ValueType::Array => {
                    let reason = "is an array of arrays, which no known key has".to_owned();
                    return Err(cursor.malformed(offset, place, reason));
                }
                ValueType::String => {
                    for _ in 0..count {
                        cursor.string_bytes(place)?;
                    }
                }
                // Bounded by `check_count`, so the product cannot overflow.
                scalar => drop(cursor.take(count * scalar.min_bytes(), place)?),
            }
            Value::Array { element, count }
        }
        scalar => read_scalar(cursor, scalar, place)?,
    };
    Ok(MetadataEntry { key: key.to_owned(), kind, value, offset })
}

fn read_type(cursor: &mut Cursor<'_>, place: Reading<'_>) -> Result<ValueType, GgufError> {
    let offset = cursor.position();
    let id = cursor.u32(place)?;
    ValueType::from_id(id)
        .ok_or_else(|| cursor.malformed(offset, place, format!("has the unknown type {id}")))
}

fn read_scalar(cursor: &mut Cursor<'_>, kind: ValueType, place: Reading<'_>) -> Result<Value, GgufError> {
    Ok(match kind {
        ValueType::U8 => Value::Unsigned(u8::from_le_bytes(cursor.array(place)?).into()),
        ValueType::U16 => Value::Unsigned(u16::from_le_bytes(cursor.array(place)?).into()),
        ValueType::U32 => Value::Unsigned(u32::from_le_bytes(cursor.array(place)?).into()),
        ValueType::U64 => Value::Unsigned(u64::from_le_bytes(cursor.array(place)?)),
        ValueType::I8 => Value::Signed(i8::from_le_bytes(cursor.array(place)?).into()),
        ValueType::I16 => Value::Signed(i16::from_le_bytes(cursor.array(place)?).into()),
        ValueType::I32 => Value::Signed(i32::from_le_bytes(cursor.array(place)?).into()),
        ValueType::I64 => Value::Signed(i64::from_le_bytes(cursor.array(place)?)),
        ValueType::F32 => Value::Float(shortest(f32::from_le_bytes(cursor.array(place)?))),
        ValueType::F64 => Value::Float(f64::from_le_bytes(cursor.array(place)?)),
        ValueType::Bool => {
            let offset = cursor.position();
            match cursor.array(place)? {
                [0] => Value::Bool(false),
                [1] => Value::Bool(true),
                [other] => {
                    return Err(cursor.malformed(offset, place, format!("is no truth value: {other}")));
                }
            }
        }
        ValueType::String | ValueType::Array => {
            return Err(cursor.malformed(cursor.position(), place, "is no plain number".to_owned()));
        }
    })
}

/// The f64 that a person would have written for this f32: 1e-5 rather than 9.999999747378752e-6.
fn shortest(value: f32) -> f64 {
    value.to_string().parse().unwrap_or(f64::from(value))
}

impl<'a> Metadata<'a> {
    pub(super) fn new(
        path: &'a Path,
        bytes: &'a [u8],
        entries: &'a [MetadataEntry],
        by_key: &'a HashMap<String, usize>,
    ) -> Metadata<'a> {
        Metadata { path, bytes, entries, by_key }
    }

    /// All entries, in the file's order.
    pub fn entries(&self) -> &'a [MetadataEntry] {
        self.entries
    }

    /// One entry.
    pub fn get(&self, key: &str) -> Option<&'a MetadataEntry> {
        self.entries.get(*self.by_key.get(key)?)
    }

    /// A non-negative integer of any integer type.
    pub fn u64(&self, key: &str) -> Result<Option<u64>, GgufError> {
        self.typed(key, "an integer of at least 0", |value| match value {
            Value::Unsigned(n) => Some(*n),
            Value::Signed(n) => u64::try_from(*n).ok(),
            _ => None,
        })
    }

    /// A number of any type.
    pub fn f64(&self, key: &str) -> Result<Option<f64>, GgufError> {
        self.typed(key, "a number", |value| match value {
            Value::Float(x) => Some(*x),
            Value::Unsigned(n) => Some(*n as f64),
            Value::Signed(n) => Some(*n as f64),
            _ => None,
        })
    }

    /// True or false.
    pub fn bool(&self, key: &str) -> Result<Option<bool>, GgufError> {
        self.typed(key, "true or false", |value| match value {
            Value::Bool(b) => Some(*b),
            _ => None,
        })
    }

    /// A string.
    pub fn str(&self, key: &str) -> Result<Option<&'a str>, GgufError> {
        let Some(entry) = self.get(key) else { return Ok(None) };
        match entry.value {
            Value::String => {
                Cursor::at(self.path, self.bytes, entry.offset).string(Reading::Value(key)).map(Some)
            }
            _ => Err(self.wrong_type(entry, "a string")),
        }
    }

    /// A list of strings.
    pub fn strings(&self, key: &str) -> Result<Option<Vec<&'a str>>, GgufError> {
        self.array(key, "a list of strings", |cursor, element, place| match element {
            ValueType::String => cursor.string(place).map(Some),
            _ => Ok(None),
        })
    }

    /// A list of integers of any integer type that fit an i64.
    pub fn integers(&self, key: &str) -> Result<Option<Vec<i64>>, GgufError> {
        self.array(key, "a list of integers", |cursor, element, place| {
            Ok(match element {
                ValueType::String | ValueType::Array => None,
                scalar => match read_scalar(cursor, scalar, place)? {
                    Value::Signed(n) => Some(n),
                    Value::Unsigned(n) => i64::try_from(n).ok(),
                    _ => None,
                },
            })
        })
    }

    /// A list of f32.
    pub fn f32s(&self, key: &str) -> Result<Option<Vec<f32>>, GgufError> {
        self.array(key, "a list of f32", |cursor, element, place| match element {
            ValueType::F32 => cursor.array(place).map(|bytes| Some(f32::from_le_bytes(bytes))),
            _ => Ok(None),
        })
    }

    /// The value, or an error that says that it is missing.
    pub fn require<T>(&self, key: &str, value: Option<T>) -> Result<T, GgufError> {
        value.ok_or_else(|| GgufError::MissingKey { path: self.path.to_owned(), key: key.to_owned() })
    }

    /// An error about a key's value.
    pub fn refuse(&self, key: &str, reason: String) -> GgufError {
        let offset = self.get(key).map_or(0, |entry| entry.offset);
        GgufError::Key { path: self.path.to_owned(), offset, key: key.to_owned(), reason }
    }

    /// `general.alignment`, or the default.
    pub(super) fn alignment(&self) -> Result<u64, GgufError> {
        const KEY: &str = "general.alignment";
        match self.u64(KEY)? {
            None => Ok(DEFAULT_ALIGNMENT),
            Some(alignment) if alignment.is_power_of_two() && alignment <= 1 << 30 => Ok(alignment),
            Some(other) => Err(self.refuse(KEY, format!("is {other}, which is no power of two below 2^30"))),
        }
    }

    fn typed<T>(
        &self,
        key: &str,
        wanted: &str,
        read: impl FnOnce(&Value) -> Option<T>,
    ) -> Result<Option<T>, GgufError> {
        let Some(entry) = self.get(key) else { return Ok(None) };
        read(&entry.value).map(Some).ok_or_else(|| self.wrong_type(entry, wanted))
    }

    /// `read` takes one element, and says `None` where the element's type is not the wanted one.
    fn array<T>(
        &self,
        key: &str,
        wanted: &str,
        mut read: impl FnMut(&mut Cursor<'a>, ValueType, Reading<'_>) -> Result<Option<T>, GgufError>,
    ) -> Result<Option<Vec<T>>, GgufError> {
        let Some(entry) = self.get(key) else { return Ok(None) };
        let Value::Array { element, count } = entry.value else { return Err(self.wrong_type(entry, wanted)) };
        let mut cursor = Cursor::at(self.path, self.bytes, entry.offset);
        let mut values = Vec::new();
        for _ in 0..count {
            match read(&mut cursor, element, Reading::Value(key))? {
                Some(value) => values.push(value),
                None => return Err(self.wrong_type(entry, wanted)),
            }
        }
        Ok(Some(values))
    }

    fn wrong_type(&self, entry: &MetadataEntry, wanted: &str) -> GgufError {
        let found = match &entry.value {
            Value::Array { element, count } => format!("a list of {count} {element}"),
            Value::String => "a string".to_owned(),
            Value::Unsigned(n) => format!("{n} ({})", entry.kind),
            Value::Signed(n) => format!("{n} ({})", entry.kind),
            Value::Float(x) => format!("{x} ({})", entry.kind),
            Value::Bool(b) => b.to_string(),
        };
        self.refuse(&entry.key, format!("is {found} instead of {wanted}"))
    }
}
