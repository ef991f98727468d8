//! Filling columns of a tensor's matrices from rows that come one after the other. A matrix at a time is in memory: what other
//! columns of it hold is read back from the file.

use std::io::{self, Read, Seek, SeekFrom, Write};

use super::write::Placed;
use crate::layout::Columns;
use crate::save_error::SaveError;

impl Placed<'_> {
    /// Fills columns of matrices of a tensor, one part after the other, with the rows that `write` writes, of elements of `size` bytes:
    /// just as many bytes.
    pub fn fill_columns(
        &mut self,
        tensor: usize,
        parts: &[Columns],
        size: u64,
        write: impl FnOnce(&mut dyn Write) -> io::Result<()>,
    ) -> Result<(), SaveError> {
        let wanted = parts.iter().map(|part| part.elements() * size).sum();
        let path = self.path.to_owned();
        let mut turned =
            Turned { file: self, tensor, parts, size, rows: Vec::new(), left: wanted, exceeded: false };
        let filled = write(&mut turned);
        let (left, exceeded) = (turned.left, turned.exceeded);
        self.filled += wanted - left;
        if exceeded || (filled.is_ok() && left > 0) {
            let tensor = self.order.get(tensor).map_or_else(String::new, |tensor| tensor.name.clone());
            let missing = if exceeded { 0 } else { left };
            return Err(SaveError::Length { path, tensor, expected: wanted, missing });
        }
        filled.map_err(|source| SaveError::io("write", &path, source))
    }

    /// Bytes of the file as far as it is written, zeros behind that.
    fn read_back(&mut self, at: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.out.flush()?;
        let file = self.out.get_mut();
        file.seek(SeekFrom::Start(at))?;
        let mut rest = bytes;
        while !rest.is_empty() {
            match file.read(rest)? {
                0 => break,
                count => rest = &mut std::mem::take(&mut rest)[count..],
            }
        }
        rest.fill(0);
        Ok(())
    }
}

/// Rows on their way to columns.
struct Turned<'s, 'a> {
    file: &'s mut Placed<'a>,
    tensor: usize,
    /// Parts that are not full; rows are of the first.
    parts: &'s [Columns],
    size: u64,
    rows: Vec<u8>,
    left: u64,
    exceeded: bool,
}

impl Turned<'_, '_> {
    /// Puts the rows of a part in their columns.
    fn settle(&mut self, part: Columns) -> io::Result<()> {
        let size = self.size as usize;
        let length = part.matrix_elements() * self.size;
        let (begin, _) = self.file.places.get(self.tensor).copied().unwrap_or_default();
        let at = begin + part.matrix * length;
        let mut matrix = vec![0; length as usize];
        if part.rows < part.total {
            self.file.read_back(at, &mut matrix)?;
        }
        let row_bytes = (part.total as usize * size).max(1);
        for (row, values) in self.rows.chunks_exact((part.length as usize * size).max(1)).enumerate() {
            let column = (part.first as usize + row * part.step as usize) * size;
            for (line, value) in matrix.chunks_exact_mut(row_bytes).zip(values.chunks_exact(size)) {
                if let Some(place) = line.get_mut(column..column + size) {
                    place.copy_from_slice(value);
                }
            }
        }
        self.file.out.seek(SeekFrom::Start(at))?;
        self.file.out.write_all(&matrix)?;
        self.file.at = at + length;
        self.rows.clear();
        Ok(())
    }
}

impl Write for Turned<'_, '_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if bytes.len() as u64 > self.left {
            self.exceeded = true;
            return Err(io::Error::other("more bytes than the tensor has"));
        }
        let [part, rest @ ..] = self.parts else { return Ok(0) };
        let room = (part.elements() * self.size) as usize - self.rows.len();
        let count = room.min(bytes.len());
        self.rows.extend_from_slice(&bytes[..count]);
        if count == room {
            self.settle(*part)?;
            self.parts = rest;
        }
        self.left -= count as u64;
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
