//! Readers that refuse records that are too large.

use std::cell::Cell;
use std::io::{self, Read};

use super::LARGEST_RECORD;

/// A reader that fails where too much is read at once.
pub struct Metered<'a, R> {
    inner: R,
    /// Bytes since the last record.
    read: &'a Cell<u64>,
}

impl<'a, R: Read> Metered<'a, R> {
    /// The same reader; whoever takes a record sets `read` to 0.
    pub fn new(inner: R, read: &'a Cell<u64>) -> Metered<'a, R> {
        Metered { inner, read }
    }
}

impl<R: Read> Read for Metered<'_, R> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        if self.read.get() > LARGEST_RECORD {
            return Err(io::Error::other(format!("larger than {} MiB", LARGEST_RECORD >> 20)));
        }
        let read = self.inner.read(out)?;
        self.read.set(self.read.get() + read as u64);
        Ok(read)
    }
}
