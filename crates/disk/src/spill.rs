//! Spill files: private room on a disk for what does not fit in memory.
//!
//! A spill file has no name, so that it is gone with the process, however that ends. Where a file system has no such files
//! one is made with a name, which is taken away at once; a name that a kill between the two left behind is taken away by
//! the next run that uses the folder.

use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use crate::error::is_full;
use crate::file::DiskFile;
use crate::request::lock;
use crate::system::{is_in_memory, nameless_file, take_room};
use crate::{ALIGNMENT, DiskError};

/// What spill files are called while they have a name.
const PREFIX: &str = ".plimsoll-spill-";

/// Where a spill file is, and how large it may get.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpillSettings {
    /// The folder, which is made if it is not there.
    pub folder: PathBuf,
    /// Bytes that may be used; all that the disk has where `None`.
    pub budget: Option<u64>,
    /// Whether to write past the page cache where that is possible.
    pub direct: bool,
}

/// A file of this process's own. What is taken from it is never given back before its end.
#[derive(Debug)]
pub struct SpillFile {
    file: Arc<DiskFile>,
    folder: PathBuf,
    budget: Option<u64>,
    used: Mutex<u64>,
}

impl SpillFile {
    /// Makes an empty one, and takes away what killed runs left in the folder.
    pub fn create(settings: &SpillSettings) -> Result<SpillFile, DiskError> {
        let SpillSettings { folder, budget, direct } = settings;
        let fail = |source: io::Error| DiskError::NoSpill { folder: folder.clone(), source };
        std::fs::create_dir_all(folder).map_err(|source| match source.kind() {
            // Something else is there under that name.
            io::ErrorKind::AlreadyExists => fail(io::ErrorKind::NotADirectory.into()),
            _ => fail(source),
        })?;
        remove_left_over(folder);
        let file = nameless_file(folder, PREFIX).map_err(fail)?;
        let file = Arc::new(DiskFile::owned(folder, file, *direct));
        Ok(SpillFile { file, folder: folder.clone(), budget: *budget, used: Mutex::new(0) })
    }

    /// Takes room for `bytes` bytes, from a whole page on.
    ///
    /// # Errors
    /// The budget or the disk is used up; what was taken before stays good.
    pub fn allocate(&self, bytes: u64) -> Result<Range<u64>, DiskError> {
        let mut used = lock(&self.used);
        let start = *used;
        let most = self.budget.unwrap_or(u64::MAX);
        let over = |needed| DiskError::OverBudget { needed, budget: most };
        let room = bytes.checked_next_multiple_of(ALIGNMENT).ok_or(over(u64::MAX))?;
        let end = start.checked_add(room).ok_or(over(u64::MAX))?;
        if end > most {
            return Err(over(end));
        }
        if room > 0 {
            take_room(self.file.handle(), start, room).map_err(|source| match is_full(&source) {
                true => DiskError::Full { folder: self.folder.clone(), bytes: room, source },
                false => DiskError::open(&self.folder, source),
            })?;
        }
        *used = end;
        Ok(start..start + bytes)
    }

    /// Bytes taken so far, in whole pages.
    pub fn used(&self) -> u64 {
        *lock(&self.used)
    }

    /// The file, to read and write through an engine.
    pub fn file(&self) -> &Arc<DiskFile> {
        &self.file
    }

    /// Its folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }
}

/// Files of runs that were killed before they could take the name away. Nobody reaches a spill file by its name, so that
/// the name of a living run's is as good as left over.
fn remove_left_over(folder: &Path) {
    let Ok(entries) = std::fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        let ours = entry.file_name().to_str().is_some_and(|name| name.starts_with(PREFIX));
        if ours && entry.file_type().is_ok_and(|kind| kind.is_file()) {
            // Another user's stays.
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

/// Where spill files go that nobody named a folder for: the system's folders for temporary files, the one for larger ones
/// first, that lie on a disk; the current one where none does.
pub fn default_folder() -> PathBuf {
    let candidates = [PathBuf::from("/var/tmp"), std::env::temp_dir()];
    let good = |folder: &PathBuf| folder.is_dir() && !is_in_memory(folder);
    candidates.into_iter().find(good).unwrap_or_else(|| PathBuf::from("."))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::system::unlinked_file;
    use rustix::fs::{FallocateFlags, fallocate};
    use std::os::unix::fs::MetadataExt;

    fn settings(folder: &Path, budget: Option<u64>) -> SpillSettings {
        SpillSettings { folder: folder.to_owned(), budget, direct: true }
    }

    #[test]
    fn a_spill_file_is_private_and_has_no_name() {
        let folder = tempfile::tempdir().unwrap();
        let inner = folder.path().join("a/b");
        let spill = SpillFile::create(&settings(&inner, None)).unwrap();
        let unlinked = unlinked_file(&inner, PREFIX).unwrap();
        for file in [spill.file().handle(), &unlinked] {
            let found = file.metadata().unwrap();
            assert_eq!((found.mode() & 0o777, found.nlink()), (0o600, 0));
        }
        assert_eq!(std::fs::read_dir(&inner).unwrap().count(), 0);
    }

    #[test]
    fn a_name_that_is_taken_is_left_to_its_file() {
        let folder = tempfile::tempdir().unwrap();
        let taken = folder.path().join(format!("{PREFIX}{}-0", std::process::id()));
        std::fs::write(&taken, b"x").unwrap();
        assert_eq!(unlinked_file(folder.path(), PREFIX).unwrap().metadata().unwrap().len(), 0);
        assert_eq!(std::fs::read(&taken).unwrap(), b"x");
        let nowhere = unlinked_file(&folder.path().join("none"), PREFIX).unwrap_err();
        assert_eq!(nowhere.kind(), std::io::ErrorKind::NotFound);
    }

    #[test]
    fn names_that_killed_runs_left_are_taken_away() {
        let folder = tempfile::tempdir().unwrap();
        let left = folder.path().join(format!("{PREFIX}123-0"));
        let other = folder.path().join("model.gguf");
        std::fs::write(&left, b"x").unwrap();
        std::fs::write(&other, b"y").unwrap();
        SpillFile::create(&settings(folder.path(), None)).unwrap();
        assert!(!left.exists() && other.exists());
    }

    #[test]
    fn room_is_counted_against_the_budget() {
        let folder = tempfile::tempdir().unwrap();
        let spill = SpillFile::create(&settings(folder.path(), Some(3 * ALIGNMENT))).unwrap();
        assert_eq!(spill.allocate(5000).unwrap(), 0..5000);
        let error = spill.allocate(4097).unwrap_err();
        assert_eq!(
            error.to_string(),
            "16.0 KiB on disk are needed and 12.0 KiB may be used; raise the disk budget"
        );
        assert_eq!(spill.allocate(4096).unwrap(), 8192..12288);
        assert_eq!(spill.used(), 12288);
        assert_eq!(spill.allocate(0).unwrap(), 12288..12288);
        assert!(matches!(spill.allocate(u64::MAX), Err(DiskError::OverBudget { .. })));
    }

    /// As far as the file system can.
    #[test]
    fn room_is_taken_when_it_is_asked_for() {
        let folder = tempfile::tempdir().unwrap();
        let spill = SpillFile::create(&settings(folder.path(), None)).unwrap();
        let plain = unlinked_file(folder.path(), "plain").unwrap();
        for (bytes, end) in [(5000, 8192), (0, 8192), (1, 12_288)] {
            spill.allocate(bytes).unwrap();
            take_room(&plain, 0, end).unwrap();
            let length = |file: &std::fs::File| file.metadata().unwrap().len();
            assert_eq!(length(spill.file().handle()), length(&plain), "{bytes}");
            let (other, flags) = (tempfile::tempfile_in(folder.path()).unwrap(), FallocateFlags::empty());
            let taken = fallocate(&other, flags, 0, end).is_ok();
            assert_eq!(length(&plain), if taken { end } else { 0 }, "{bytes}");
        }
        assert_eq!(spill.folder(), folder.path());
    }

    #[test]
    fn a_folder_that_cannot_be_is_an_error_that_names_it() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        std::fs::write(&file, b"").unwrap();
        let error = SpillFile::create(&settings(&file.join("x"), None)).unwrap_err().to_string();
        assert!(error.contains("file/x") && error.contains("name a folder"), "{error}");
        let error = SpillFile::create(&settings(&file, None)).unwrap_err().to_string();
        assert!(error.contains("not a directory"), "{error}");
    }
}
