//! The description at the end of a Parquet file, checked before the library reads it. The library reserves memory for as
//! many elements as a list claims to have, which may be more than any machine holds.
//!
//! The description is a struct of Thrift's compact protocol (Apache Thrift, `thrift-compact-protocol.md`), followed by its
//! length in four bytes and `PAR1`.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};

/// Structs inside one another at most; a schema needs a handful.
const DEPTH: usize = 32;

/// Whether every list and text of a file's description is as long as it says. Other errors are left to the library.
/// Afterwards the file is at its beginning.
pub fn check(file: &mut File) -> io::Result<Result<(), String>> {
    let length = file.seek(SeekFrom::End(0))?;
    let outcome = match described(file, length)? {
        Some(bytes) => {
            let mut rest = Rest(&bytes);
            rest.skip_struct(DEPTH).ok_or_else(|| {
                "the description at its end is cut off, or says that it is longer than it is".to_owned()
            })
        }
        None => Ok(()),
    };
    file.seek(SeekFrom::Start(0))?;
    Ok(outcome)
}

/// The bytes of the description, if the file ends as one with a plain description does.
fn described(file: &mut File, length: u64) -> io::Result<Option<Vec<u8>>> {
    const END: u64 = 8;
    if length < END {
        return Ok(None);
    }
    let mut end = [0; END as usize];
    file.seek(SeekFrom::Start(length - END))?;
    file.read_exact(&mut end)?;
    let [a, b, c, d, magic @ ..] = end;
    let bytes = u64::from(u32::from_le_bytes([a, b, c, d]));
    if magic != *b"PAR1" || bytes > length - END {
        return Ok(None);
    }
    let mut description = Vec::new();
    file.seek(SeekFrom::Start(length - END - bytes))?;
    file.by_ref().take(bytes).read_to_end(&mut description)?;
    Ok(Some(description))
}

/// What has not been looked through yet. `None` of every method: it ends before it should.
struct Rest<'a>(&'a [u8]);

impl Rest<'_> {
    fn byte(&mut self) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    fn skip(&mut self, bytes: u64) -> Option<()> {
        self.0 = self.0.get(usize::try_from(bytes).ok()?..)?;
        Some(())
    }

    fn varint(&mut self) -> Option<u64> {
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            value |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Some(value);
            }
        }
        None
    }

    fn skip_struct(&mut self, depth: usize) -> Option<()> {
        let depth = depth.checked_sub(1)?;
        loop {
            let header = self.byte()?;
            if header == 0 {
                return Some(());
            }
            if header >> 4 == 0 {
                // The field's number in full.
                self.varint()?;
            }
            match header & 15 {
                // The header is the value.
                1 | 2 => {}
                kind => self.skip_value(kind, depth)?,
            }
        }
    }

    fn skip_value(&mut self, kind: u8, depth: usize) -> Option<()> {
        match kind {
            1..=3 => self.skip(1),
            4..=6 => self.varint().map(drop),
            7 => self.skip(8),
            8 => {
                let bytes = self.varint()?;
                self.skip(bytes)
            }
            9 | 10 => {
                let header = self.byte()?;
                let count = if header >> 4 == 15 { self.varint()? } else { u64::from(header >> 4) };
                self.skip_all(&[header & 15], count, depth)
            }
            11 => {
                let count = self.varint()?;
                let kinds = if count == 0 { 0 } else { self.byte()? };
                self.skip_all(&[kinds >> 4, kinds & 15], count, depth)
            }
            12 => self.skip_struct(depth),
            13 => self.skip(16),
            _ => None,
        }
    }

    /// `count` times a value of each kind. Every value takes a byte at least.
    fn skip_all(&mut self, kinds: &[u8], count: u64, depth: usize) -> Option<()> {
        let depth = depth.checked_sub(1)?;
        if count > self.0.len() as u64 {
            return None;
        }
        for _ in 0..count {
            kinds.iter().try_for_each(|kind| self.skip_value(*kind, depth))?;
        }
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    /// A file with this description.
    fn file(description: &[u8]) -> File {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"PAR1").unwrap();
        file.write_all(description).unwrap();
        file.write_all(&(description.len() as u32).to_le_bytes()).unwrap();
        file.write_all(b"PAR1").unwrap();
        file
    }

    #[test]
    fn lists_and_texts_are_as_long_as_they_say() {
        // Field 1 a number, 2 a list of two texts, 3 a struct with a truth, 20 a map of a byte to a number.
        let whole = [0x15, 0x04, 0x19, 0x28, 1, b'a', 0, 0x1c, 0x11, 0, 0x0b, 40, 1, 0x35, 7, 0x04, 0];
        assert_eq!(check(&mut file(&whole)).unwrap(), Ok(()));
        for end in 0..whole.len() {
            assert!(check(&mut file(&whole[..end])).unwrap().is_err(), "{end}");
        }
        // A list of 2^31 - 1 structs in a few bytes.
        let list = [0x19, 0xfc, 0xff, 0xff, 0xff, 0xff, 0x07, 0, 0];
        assert!(check(&mut file(&list)).unwrap().is_err());
        let text = [0x18, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01, 0];
        assert!(check(&mut file(&text)).unwrap().is_err());
        assert!(check(&mut file(&[0x1c; 100])).unwrap().is_err(), "structs for ever");
    }

    #[test]
    fn other_ends_are_for_the_library() {
        for bytes in [&b""[..], b"PAR1", b"PAR1\xff\xff\xff\xffPAR1", b"PAR1\x01\0\0\0PARE"] {
            let mut file = tempfile::tempfile().unwrap();
            file.write_all(bytes).unwrap();
            assert_eq!(check(&mut file).unwrap(), Ok(()));
            assert_eq!(file.stream_position().unwrap(), 0);
        }
    }
}
