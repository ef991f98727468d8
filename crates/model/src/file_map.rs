//! A file seen as bytes through a read-only memory map.
//!
//! The one place in this crate with `unsafe`. Pages that were read stay in the process's resident set until
//! they are given back, so readers call [`FileMap::release`] behind themselves. What the bytes mean is left to
//! the formats.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

use memmap2::{Advice, Mmap, UncheckedAdvice};

/// The kernel maps up to this many neighbouring bytes along with a page that is touched (its "fault-around"
/// window), so releasing takes them along.
const FAULT_AROUND: usize = 64 << 10;

/// A file mapped read-only.
///
/// A file that is cut short by somebody else while it is mapped ends the process with SIGBUS when the missing
/// part is read, as with every memory map. Files of a model are written aside and renamed, which is safe.
#[derive(Debug)]
pub struct FileMap {
    path: PathBuf,
    /// None for an empty file, which cannot be mapped.
    map: Option<Mmap>,
}

impl FileMap {
    /// Maps a regular file.
    pub fn open(path: &Path) -> io::Result<FileMap> {
        // Asked before opening: to open a pipe would wait for a writer.
        if !std::fs::metadata(path)?.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "is not a regular file"));
        }
        let file = File::open(path)?;
        if file.metadata()?.len() == 0 {
            return Ok(FileMap { path: path.to_owned(), map: None });
        }
        // SAFETY: the map is read-only. Its contents are only ever used as plain bytes, which have no invalid
        // values, and every offset taken from them is checked where it is used; so a file that another process
        // overwrites can give wrong numbers or an error, but no access outside the map.
        let map = unsafe { Mmap::map(&file)? };
        // Advice: a kernel that does not take it reads just as well, only slower.
        let _ = map.advise(Advice::Sequential);
        Ok(FileMap { path: path.to_owned(), map: Some(map) })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// All of its bytes.
    pub fn bytes(&self) -> &[u8] {
        self.map.as_deref().unwrap_or_default()
    }

    /// Gives the pages of `range` back to the system; they are read again when they are touched again.
    pub fn release(&self, range: Range<usize>) {
        let Some(map) = &self.map else { return };
        let start = range.start.saturating_sub(FAULT_AROUND).min(map.len());
        let end = range.end.saturating_add(FAULT_AROUND).min(map.len());
        if start < end {
            // SAFETY: the map is a shared map of a file and nobody writes to it, so that a dropped page comes back
            // from the file with the same contents; no reference is invalidated. The range lies within the map.
            let _ = unsafe { map.unchecked_advise_range(UncheckedAdvice::DontNeed, start, end - start) };
        }
    }

    /// Gives all pages back to the system.
    pub fn release_all(&self) {
        self.release(0..self.bytes().len());
    }
}
