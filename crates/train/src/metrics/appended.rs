//! A file that grows by whole pieces, one for each step.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use crate::TrainError;

/// The file, open for appending.
#[derive(Debug)]
pub(super) struct Appended {
    path: PathBuf,
    file: File,
    /// Bytes of whole pieces.
    length: u64,
    /// The last step that it has.
    last: u64,
}

impl Appended {
    /// The file at `path` with nothing in it but `kept`.
    pub fn after(path: PathBuf, kept: &[u8]) -> Result<Appended, TrainError> {
        crate::write_whole(&path, kept)?;
        let file =
            OpenOptions::new().append(true).open(&path).map_err(|e| TrainError::io("open", &path, e))?;
        Ok(Appended { path, file, length: kept.len() as u64, last: 0 })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Appends what is said of a step, whole or not at all. What it has been told of a step is not told again: where another file of
    /// the same step could not be written, all are tried once more.
    pub fn append(&mut self, step: u64, piece: &[u8]) -> Result<(), TrainError> {
        if step == self.last {
            return Ok(());
        }
        if let Err(error) = self.file.write_all(piece) {
            // Part of it may have been written.
            let _ = self.file.set_len(self.length);
            return Err(TrainError::io("write", &self.path, error));
        }
        self.length += piece.len() as u64;
        self.last = step;
        Ok(())
    }

    /// Makes what was written outlive a power cut.
    pub fn sync(&self) -> Result<(), TrainError> {
        self.file.sync_data().map_err(|e| TrainError::io("sync", &self.path, e))
    }
}

#[cfg(test)]
impl Appended {
    pub fn length(&self) -> u64 {
        self.length
    }

    /// Part of a piece, as a run leaves it that is killed.
    pub fn write(&mut self, part: &[u8]) -> std::io::Result<()> {
        self.file.write_all(part)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Nothing of `/dev/null` outlives anything, and the system says so.
    #[test]
    #[cfg(target_os = "linux")]
    fn what_cannot_be_made_to_last_is_an_error() {
        let path = PathBuf::from("/dev/null");
        let file = OpenOptions::new().append(true).open(&path).unwrap();
        let error = Appended { path, file, length: 0, last: 0 }.sync().unwrap_err();
        assert!(error.to_string().contains("/dev/null"), "{error}");
    }

    #[test]
    fn a_step_is_told_once() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let mut file = Appended::after(path.clone(), b"0").unwrap();
        [(1, b"1"), (1, b"1"), (2, b"2")]
            .iter()
            .for_each(|(step, piece)| file.append(*step, *piece).unwrap());
        assert_eq!(std::fs::read(path).unwrap(), b"012");
    }
}
