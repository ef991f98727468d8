//! A file that the engine reads or writes: directly where that is allowed, else through the page cache, which is emptied
//! of it again.

use std::fmt;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use crate::ALIGNMENT;
use crate::error::{DiskError, is_full};
use crate::system::{forget_cached, open_direct, reopened_direct};

/// How a file is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum IoMode {
    /// Past the page cache.
    Direct,
    /// Through the page cache, from which each piece is dropped after its use: direct I/O was refused, or not wanted.
    Buffered,
}

impl fmt::Display for IoMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            IoMode::Direct => "direct",
            IoMode::Buffered => "buffered",
        })
    }
}

/// An open file.
#[derive(Debug)]
pub struct DiskFile {
    /// Of a file without a name its folder.
    path: PathBuf,
    buffered: File,
    direct: Option<File>,
    /// A file system may take the flag and refuse the first request.
    refused: AtomicBool,
    /// Length when it was opened; of one that is written there is none to keep to.
    length: Option<u64>,
}

impl DiskFile {
    /// Opens a file for reading, past the page cache where `direct` and possible.
    ///
    /// # Errors
    /// The system refuses, or it is no regular file.
    pub fn open(path: &Path, direct: bool) -> Result<DiskFile, DiskError> {
        let fail = |source| DiskError::open(path, source);
        // Asked before opening: to open a pipe would wait for a writer.
        if !std::fs::metadata(path).map_err(fail)?.is_file() {
            return Err(fail(io::Error::new(io::ErrorKind::InvalidInput, "is not a regular file")));
        }
        let buffered = File::open(path).map_err(fail)?;
        let length = buffered.metadata().map_err(fail)?.len();
        let direct = if direct { open_direct(path, false).ok() } else { None };
        let refused = AtomicBool::new(false);
        let file = DiskFile { path: path.to_owned(), buffered, direct, refused, length: Some(length) };
        Ok(file)
    }

    /// A file of this process's own, to read and write.
    pub(crate) fn owned(folder: &Path, file: File, direct: bool) -> DiskFile {
        let direct = if direct { reopened_direct(&file).ok() } else { None };
        let refused = AtomicBool::new(false);
        DiskFile { path: folder.to_owned(), buffered: file, direct, refused, length: None }
    }

    /// The file's path; of a spill file its folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Length in bytes when it was opened, of a file that is only read.
    pub fn length(&self) -> Option<u64> {
        self.length
    }

    /// How it is reached, as far as is known: some file systems refuse direct I/O only when it is tried.
    pub fn mode(&self) -> IoMode {
        if self.direct().is_some() { IoMode::Direct } else { IoMode::Buffered }
    }

    pub(crate) fn handle(&self) -> &File {
        &self.buffered
    }

    fn direct(&self) -> Option<&File> {
        self.direct.as_ref().filter(|_| !self.refused.load(Ordering::Relaxed))
    }

    /// Reads from `offset`, a multiple of [`ALIGNMENT`], on; `out`, aligned memory, has whole pages, of which the last may
    /// lie partly behind the end of the file. The first `needed` bytes have to be there.
    pub(crate) fn read_pages(&self, offset: u64, out: &mut [u8], needed: usize) -> Result<(), DiskError> {
        let asked = out.len();
        let fail = |source| self.io_error(offset, asked, false, source);
        let mut done = 0;
        if let Some(file) = self.direct() {
            done = match read_from(file, offset, out, true) {
                Ok(done) => done,
                Err(error) if is_refusal(&error) => {
                    self.refused.store(true, Ordering::Relaxed);
                    0
                }
                Err(error) => return Err(fail(error)),
            };
        }
        if self.direct().is_none() {
            let out = &mut out[..needed];
            done = read_from(&self.buffered, offset, out, false).map_err(fail)?;
            forget_cached(&self.buffered, offset, done as u64, false).map_err(fail)?;
        }
        if done < needed {
            let (path, length) = (self.path.clone(), offset + done as u64);
            return Err(DiskError::EndOfFile { path, length, start: offset, end: offset + needed as u64 });
        }
        Ok(())
    }

    /// Writes whole pages of aligned memory to `offset`, a multiple of [`ALIGNMENT`].
    pub(crate) fn write_pages(&self, offset: u64, bytes: &[u8]) -> Result<(), DiskError> {
        let fail = |source| self.io_error(offset, bytes.len(), true, source);
        if let Some(file) = self.direct() {
            match file.write_all_at(bytes, offset) {
                Ok(()) => return Ok(()),
                Err(error) if is_refusal(&error) => self.refused.store(true, Ordering::Relaxed),
                Err(error) => return Err(fail(error)),
            }
        }
        self.buffered.write_all_at(bytes, offset).map_err(fail)?;
        forget_cached(&self.buffered, offset, bytes.len() as u64, true).map_err(fail)
    }

    fn io_error(&self, offset: u64, bytes: usize, write: bool, source: io::Error) -> DiskError {
        let path = self.path.clone();
        if write && is_full(&source) {
            return DiskError::Full { folder: path, bytes: bytes as u64, source };
        }
        DiskError::Io { path, offset, bytes, write, source }
    }
}

/// Fills `out` from `offset` on; how much there was.
fn read_from(file: &impl FileExt, offset: u64, out: &mut [u8], direct: bool) -> io::Result<usize> {
    let mut done = 0;
    while done < out.len() {
        match file.read_at(&mut out[done..], offset + done as u64) {
            Ok(0) => break,
            Ok(n) => done += n,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        }
        // Past a part of a page there is nothing more, and it would be no place for a direct read to begin.
        if direct && !(done as u64).is_multiple_of(ALIGNMENT) {
            break;
        }
    }
    Ok(done)
}

/// Whether direct I/O is not possible here, while other I/O may be.
fn is_refusal(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported)
}

#[cfg(test)]
mod tests;
