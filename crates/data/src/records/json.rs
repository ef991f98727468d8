//! JSON files: a list of records, or one record after the other. One record is in memory at a time.

use std::cell::Cell;
use std::fmt;
use std::io::{self, BufRead};
use std::path::Path;

use serde::Deserializer as _;
use serde::de::{Error as _, SeqAccess, Visitor};
use serde_json::{Deserializer, Value};

use super::metered::Metered;
use super::{RecordPlace, broken};
use crate::DataError;

type Each<'a> = &'a mut dyn FnMut(u64, Value) -> Result<(), DataError>;

/// Calls `each` with every record and its number, from 1.
pub fn for_each(reader: &mut dyn BufRead, path: &Path, each: Each<'_>) -> Result<(), DataError> {
    let first = first_byte(reader).map_err(DataError::io("read", path))?;
    let read = Cell::new(0);
    let metered = Metered::new(reader, &read);
    let mut number = 0;
    let mut refused = None;
    let mut take = |value| {
        number += 1;
        read.set(0);
        each(number, value).map_err(|error| refused = Some(error))
    };
    let parsed = match first {
        None => return Ok(()),
        Some(b'[') => {
            let mut document = Deserializer::from_reader(metered);
            document.deserialize_seq(Items { take: &mut take }).and_then(|()| document.end())
        }
        Some(_) => Deserializer::from_reader(metered)
            .into_iter()
            .try_for_each(|value| take(value?).map_err(|()| serde_json::Error::custom("refused"))),
    };
    match (refused, parsed) {
        (Some(error), _) => Err(error),
        (None, Ok(())) => Ok(()),
        (None, Err(error)) => {
            let place = RecordPlace { path: path.to_owned(), unit: "record", number: number + 1 };
            Err(broken(&place, format!("not JSON: {error}")))
        }
    }
}

/// The first byte that is no white space, after a byte-order mark.
fn first_byte(reader: &mut dyn BufRead) -> io::Result<Option<u8>> {
    const MARK: &[u8] = "\u{feff}".as_bytes();
    if reader.fill_buf()?.starts_with(MARK) {
        reader.consume(MARK.len());
    }
    loop {
        let bytes = reader.fill_buf()?;
        if bytes.is_empty() {
            return Ok(None);
        }
        let spaces = bytes.iter().take_while(|byte| byte.is_ascii_whitespace()).count();
        match bytes.get(spaces) {
            Some(byte) => return Ok(Some(*byte)),
            None => reader.consume(spaces),
        }
    }
}

/// Takes the items of a list as they come.
struct Items<'a> {
    take: &'a mut dyn FnMut(Value) -> Result<(), ()>,
}

impl<'de> Visitor<'de> for Items<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of records")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<(), A::Error> {
        while let Some(value) = items.next_element()? {
            (self.take)(value).map_err(|()| A::Error::custom("refused"))?;
        }
        Ok(())
    }
}
