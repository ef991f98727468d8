//! How much is written.

use std::io::{self, Write};

/// Counts the bytes that go to another writer.
pub(crate) struct Counting<W> {
    pub inner: W,
    pub written: u64,
}

impl<W: Write> Write for Counting<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let count = self.inner.write(bytes)?;
        self.written += count as u64;
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}
