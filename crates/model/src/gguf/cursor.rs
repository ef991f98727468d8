//! A bounded reader over the header's bytes: every length is checked before anything is taken or allocated.

use std::fmt;
use std::path::Path;

use super::GgufError;
use crate::shown::Shown;

/// What is being read, for errors.
#[derive(Clone, Copy)]
pub(super) enum Reading<'a> {
    Header(&'static str),
    Key(u64),
    Value(&'a str),
    TensorName(u64),
    TensorInfo(&'a str),
}

impl fmt::Display for Reading<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Reading::Header(field) => write!(f, "the header's {field}"),
            Reading::Key(index) => write!(f, "metadata key number {index}"),
            Reading::Value(key) => write!(f, "the value of metadata key {}", Shown(key)),
            Reading::TensorName(index) => write!(f, "the name of tensor number {index}"),
            Reading::TensorInfo(name) => write!(f, "the description of tensor {}", Shown(name)),
        }
    }
}

pub(super) struct Cursor<'a> {
    path: &'a Path,
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(path: &'a Path, bytes: &'a [u8]) -> Cursor<'a> {
        Cursor { path, bytes, at: 0 }
    }

    /// A reader of a part of the file that was seen before.
    pub(super) fn at(path: &'a Path, bytes: &'a [u8], at: usize) -> Cursor<'a> {
        Cursor { path, bytes, at: at.min(bytes.len()) }
    }

    pub(super) fn path(&self) -> &'a Path {
        self.path
    }

    /// Bytes of the whole file.
    pub(super) fn file_len(&self) -> usize {
        self.bytes.len()
    }

    /// Where the next byte is.
    pub(super) fn position(&self) -> usize {
        self.at
    }

    pub(super) fn malformed(&self, offset: usize, place: Reading<'_>, reason: String) -> GgufError {
        GgufError::Malformed { path: self.path.to_owned(), offset, place: place.to_string(), reason }
    }

    /// Refuses a count of things of at least `each` bytes that cannot fit in what is left of the file, or that is
    /// above `most`.
    pub(super) fn check_count(
        &self,
        count: u64,
        each: u64,
        place: Reading<'_>,
        most: u64,
    ) -> Result<(), GgufError> {
        let available = (self.bytes.len() - self.at) as u64;
        if count > available / each {
            let needed = count.saturating_mul(each);
            return Err(self.truncated(place, needed, available));
        }
        if count > most {
            let reason = format!("has {count} entries, beyond any model (at most {most})");
            return Err(self.malformed(self.at, place, reason));
        }
        Ok(())
    }

    pub(super) fn take(&mut self, length: u64, place: Reading<'_>) -> Result<&'a [u8], GgufError> {
        let rest = &self.bytes[self.at..];
        match usize::try_from(length).ok().and_then(|length| rest.get(..length)) {
            Some(taken) => {
                self.at += taken.len();
                Ok(taken)
            }
            None => Err(self.truncated(place, length, rest.len() as u64)),
        }
    }

    pub(super) fn array<const N: usize>(&mut self, place: Reading<'_>) -> Result<[u8; N], GgufError> {
        match self.bytes[self.at..].first_chunk::<N>() {
            Some(taken) => {
                self.at += N;
                Ok(*taken)
            }
            None => Err(self.truncated(place, N as u64, (self.bytes.len() - self.at) as u64)),
        }
    }

    pub(super) fn u32(&mut self, place: Reading<'_>) -> Result<u32, GgufError> {
        self.array(place).map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self, place: Reading<'_>) -> Result<u64, GgufError> {
        self.array(place).map(u64::from_le_bytes)
    }

    /// A length and that many bytes.
    pub(super) fn string_bytes(&mut self, place: Reading<'_>) -> Result<&'a [u8], GgufError> {
        let length = self.u64(place)?;
        self.take(length, place)
    }

    /// A length and that many bytes of UTF-8.
    pub(super) fn string(&mut self, place: Reading<'_>) -> Result<&'a str, GgufError> {
        let bytes = self.string_bytes(place)?;
        std::str::from_utf8(bytes).map_err(|error| {
            let offset = self.at - bytes.len() + error.valid_up_to();
            self.malformed(offset, place, "is not valid UTF-8".to_owned())
        })
    }

    fn truncated(&self, place: Reading<'_>, needed: u64, available: u64) -> GgufError {
        GgufError::Truncated {
            path: self.path.to_owned(),
            offset: self.at,
            place: place.to_string(),
            needed,
            available,
        }
    }
}
