//! The folder that a run writes to: one owner at a time, and where in it a run begins.
//!
//! The owner holds a lock on a file in the folder. The system drops the lock when the process ends, however it ends, so
//! that a killed run keeps nobody out. A folder that was made for a run and is still empty at the end is removed.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Read, Seek, Write};
use std::path::{Path, PathBuf};

use plimsoll_disk::MadeFolders;
use plimsoll_plan::hardware::host;

use crate::checkpoint::{Checkpoint, TrainerState, put_back};
use crate::{Report, TrainError};

/// The file in a run's folder that the run locks, before it writes anything else. It holds the owner's process id, the name of its
/// machine and which numbering of processes the id is of.
pub const LOCK: &str = ".plimsoll.lock";

/// How often a lock is tried for whose file the owner before has just removed.
const TRIES: u32 = 100;

/// A folder that belongs to this value until it is dropped.
#[derive(Debug)]
pub struct OutputFolder {
    path: PathBuf,
    /// The folders that were made for it. They go before the lock does.
    _made: MadeFolders,
    /// The locked file; `None` where the file system has no locks.
    lock: Option<File>,
    /// Whether it is removed with all that is in it.
    passes: bool,
}

impl OutputFolder {
    /// Makes the folder where it is missing, and takes it.
    ///
    /// # Errors
    /// [`TrainError::FolderTaken`] with the process that has it; [`TrainError::Io`] where it cannot be made or written to.
    pub fn take(path: &Path) -> Result<OutputFolder, TrainError> {
        let _made = MadeFolders::missing(path);
        let mut folder = OutputFolder { path: path.to_owned(), _made, lock: None, passes: false };
        for _ in 0..TRIES {
            std::fs::create_dir_all(path).map_err(|e| match e.kind() {
                io::ErrorKind::AlreadyExists | io::ErrorKind::NotADirectory => {
                    TrainError::NoFolder { path: path.to_owned() }
                }
                _ => TrainError::io("create", path, e),
            })?;
            match folder.try_lock() {
                Ok(Attempt::Locked(file)) => {
                    folder.lock = Some(file);
                    return Ok(folder);
                }
                Ok(Attempt::Gone) => {}
                Ok(Attempt::Taken(owner)) => {
                    return Err(TrainError::FolderTaken { path: path.to_owned(), owner });
                }
                Ok(Attempt::Unlockable) => return Ok(folder),
                Err(error) => return Err(TrainError::io("lock", &path.join(LOCK), error)),
            }
        }
        let owner = "processes that come and go".to_owned();
        Err(TrainError::FolderTaken { path: path.to_owned(), owner })
    }

    fn try_lock(&self) -> io::Result<Attempt> {
        let path = self.path.join(LOCK);
        let opened = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path);
        let mut file = match opened {
            Ok(file) => file,
            // The owner before has just removed the folder that it had made.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Attempt::Gone),
            Err(error) => return Err(error),
        };
        match file.try_lock() {
            Ok(()) if !is_at(&file, &path) => Ok(Attempt::Gone),
            Ok(()) => {
                // The lock holds whether or not there is room to say whose it is.
                let _ = note_owner(&mut file);
                Ok(Attempt::Locked(file))
            }
            Err(TryLockError::WouldBlock) => {
                let mut owner = String::new();
                let _ = file.read_to_string(&mut owner);
                Ok(Attempt::Taken(described(&owner)))
            }
            // Some file systems of clusters have no locks: a run there goes without.
            Err(TryLockError::Error(_)) => {
                let _ = std::fs::remove_file(&path);
                Ok(Attempt::Unlockable)
            }
        }
    }

    /// The same for a folder that is removed in the end, with all that is in it.
    ///
    /// # Errors
    /// As of [`take`](Self::take).
    pub(crate) fn passing(path: &Path) -> Result<OutputFolder, TrainError> {
        let mut folder = OutputFolder::take(path)?;
        folder.passes = true;
        Ok(folder)
    }

    /// Removes folders of ranks that were killed, whose names begin so. Those that are somebody's stay.
    pub(crate) fn sweep_passing(run: &Path, prefix: &str) {
        let Ok(entries) = std::fs::read_dir(run) else { return };
        for entry in entries.flatten() {
            let is_old = entry.file_name().to_str().is_some_and(|name| name.starts_with(prefix));
            if is_old && entry.path().is_dir() {
                // What cannot be taken or removed is in nobody's way until a rank needs the name.
                drop(OutputFolder::passing(&entry.path()));
            }
        }
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The checkpoint that a run begins at: the last one, if the run before is to be continued and has left one.
    ///
    /// # Errors
    /// [`TrainError::OutputInUse`] where the folder holds a run that is not to be continued, or that has come to its end and
    /// left no checkpoint.
    pub(crate) fn beginning(&self, resume: bool) -> Result<Option<(Checkpoint, TrainerState)>, TrainError> {
        put_back(&self.path)?;
        let last = Checkpoint::list(&self.path)?.pop();
        match last {
            Some(checkpoint) if resume => {
                let state = checkpoint.state()?;
                Ok(Some((checkpoint, state)))
            }
            // A run that ended before its first checkpoint has left nothing to lose.
            None if !Report::has_finished(&self.path) => Ok(None),
            last => Err(TrainError::OutputInUse { path: self.path.clone(), resumable: last.is_some() }),
        }
    }
}

impl Drop for OutputFolder {
    fn drop(&mut self) {
        if self.passes {
            // With everything in it.
            let _ = std::fs::remove_dir_all(&self.path);
        }
        if self.lock.is_some() {
            // Removed while it is locked: whoever waits for it sees that it is gone, and makes another.
            let _ = std::fs::remove_file(self.path.join(LOCK));
        }
    }
}

/// Which numbering of processes this process is in: containers have their own.
fn numbering() -> Option<String> {
    Some(std::fs::read_link("/proc/self/ns/pid").ok()?.display().to_string())
}

/// Whether the run in a folder was killed, as far as this machine can tell: its lock names a process of this machine and of our numbering,
/// and there is none of that number. Nothing is locked to find it out.
pub fn was_killed(folder: &Path) -> bool {
    let Ok(owner) = std::fs::read_to_string(folder.join(LOCK)) else { return false };
    let mut words = owner.split_whitespace();
    let process = words.next().and_then(|id| id.parse::<u32>().ok());
    let is_here = words.next().is_some_and(|name| host().as_deref() == Some(name));
    let is_ours = words.next().is_some_and(|name| numbering().as_deref() == Some(name));
    is_here && is_ours && process.is_some_and(|id| !Path::new("/proc").join(id.to_string()).exists())
}

/// What came of an attempt to lock.
enum Attempt {
    Locked(File),
    /// The file was removed meanwhile.
    Gone,
    /// Somebody else has it.
    Taken(String),
    /// The file system has no locks.
    Unlockable,
}

fn note_owner(file: &mut File) -> io::Result<()> {
    file.set_len(0)?;
    file.rewind()?;
    let parts = [Some(std::process::id().to_string()), host(), numbering()];
    let parts: Vec<String> = parts.into_iter().map_while(|part| part).collect();
    writeln!(file, "{}", parts.join(" "))
}

/// The owner that a lock's file names, in words.
fn described(owner: &str) -> String {
    let mut words = owner.split_whitespace();
    let Some(process) = words.next().and_then(|id| id.parse::<u32>().ok()) else {
        return "another process".to_owned();
    };
    let elsewhere = words.next().filter(|name| host().as_deref() != Some(*name));
    elsewhere.map_or(format!("process {process}"), |name| format!("process {process} on {name}"))
}

/// Whether a path still leads to this file.
#[cfg(unix)]
fn is_at(file: &File, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let place = |metadata: std::fs::Metadata| (metadata.dev(), metadata.ino());
    let here = file.metadata().map(place);
    std::fs::metadata(path).map(place).is_ok_and(|there| here.is_ok_and(|here| here == there))
}

#[cfg(not(unix))]
fn is_at(_: &File, path: &Path) -> bool {
    path.exists()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(path: &Path) -> String {
        OutputFolder::take(path).unwrap_err().to_string()
    }

    #[test]
    fn a_folder_has_one_owner_at_a_time_and_a_refusal_names_it() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("runs/1");
        let owner = OutputFolder::take(&path).unwrap();
        assert!(refused(&path).contains(&format!("process {}", std::process::id())));
        assert!(path.join(LOCK).exists(), "a refusal leaves the lock to its owner");
        drop(owner);
        assert!(OutputFolder::take(&path).is_ok());
    }

    #[test]
    fn a_lock_file_that_a_killed_process_left_keeps_nobody_out() {
        let root = tempfile::tempdir().unwrap();
        std::fs::write(root.path().join(LOCK), "1 elsewhere\n").unwrap();
        let owner = OutputFolder::take(root.path()).unwrap();
        let own = std::fs::read_to_string(root.path().join(LOCK)).unwrap();
        assert!(own.starts_with(&format!("{} ", std::process::id())), "{own}");
        drop(owner);
        assert_eq!(std::fs::read_dir(root.path()).unwrap().count(), 0);
    }

    #[test]
    fn folders_that_were_made_and_got_nothing_go_away_and_others_stay() {
        let root = tempfile::tempdir().unwrap();
        drop(OutputFolder::take(&root.path().join("a/b/c")).unwrap());
        assert!(!root.path().join("a").exists());
        std::fs::create_dir(root.path().join("a")).unwrap();
        drop(OutputFolder::take(&root.path().join("a/b")).unwrap());
        assert!(root.path().join("a").exists() && !root.path().join("a/b").exists());
        let folder = OutputFolder::take(&root.path().join("a/b")).unwrap();
        std::fs::write(folder.path().join("metrics.jsonl"), "").unwrap();
        drop(folder);
        assert_eq!(std::fs::read_dir(root.path().join("a/b")).unwrap().count(), 1);
    }

    /// With the folders that were made for it, unless they hold something else.
    #[test]
    fn a_folder_that_passes_goes_away_with_all_that_was_made_for_it() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("a/out/.rank-1");
        for kept in [None, Some("a/file")] {
            let folder = OutputFolder::passing(&path).unwrap();
            std::fs::create_dir(path.join("tokenizer")).unwrap();
            if let Some(kept) = kept {
                std::fs::write(root.path().join(kept), "").unwrap();
            }
            drop(folder);
            assert!(!root.path().join("a/out").exists());
            assert_eq!(root.path().join("a").exists(), kept.is_some());
        }
    }

    #[test]
    fn folders_of_killed_ranks_are_swept_and_those_of_living_ones_stay() {
        let root = tempfile::tempdir().unwrap();
        for name in [".rank-1", ".rank-2", "checkpoint-1"] {
            std::fs::create_dir(root.path().join(name)).unwrap();
        }
        std::fs::write(root.path().join(".rank-1").join(LOCK), "1 elsewhere\n").unwrap();
        let lives = OutputFolder::passing(&root.path().join(".rank-2")).unwrap();
        OutputFolder::sweep_passing(root.path(), ".rank-");
        let exists = |name: &str| root.path().join(name).exists();
        assert_eq!([".rank-1", ".rank-2", "checkpoint-1"].map(exists), [false, true, true]);
        drop(lives);
        assert!(!exists(".rank-2"));
    }

    #[test]
    fn an_owner_is_named_with_its_machine_where_that_is_another() {
        assert_eq!(described("17 far-away\n"), "process 17 on far-away");
        assert_eq!(described(&format!("17 {}", host().unwrap_or_default())), "process 17");
        assert_eq!([described(""), described("nobody")], ["another process"; 2]);
    }

    /// The owner before may remove the folder, or the lock's file, at any moment.
    #[test]
    fn a_folder_that_has_just_gone_is_made_again_and_one_that_cannot_be_is_an_error() {
        let root = tempfile::tempdir().unwrap();
        let folder =
            |path: PathBuf| OutputFolder { path, _made: MadeFolders::default(), lock: None, passes: false };
        assert!(matches!(folder(root.path().join("gone")).try_lock(), Ok(Attempt::Gone)));
        std::fs::write(root.path().join("file"), "").unwrap();
        let error = folder(root.path().join("file")).try_lock().err().unwrap();
        assert_eq!(error.kind(), io::ErrorKind::NotADirectory);
    }

    #[test]
    fn a_file_is_at_its_path_until_another_one_is() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join(LOCK);
        let file = File::create(&path).unwrap();
        assert!(is_at(&file, &path));
        std::fs::remove_file(&path).unwrap();
        assert!(!is_at(&file, &path));
        let other = File::create(&path).unwrap();
        assert!(!is_at(&file, &path) && is_at(&other, &path));
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn the_machine_has_the_name_that_the_system_shows() {
        let shown = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
        assert_eq!(host().unwrap_or_default(), shown.trim_end());
        assert_eq!(described(&format!("17 {}", shown.trim_end())), "process 17");
    }
}
