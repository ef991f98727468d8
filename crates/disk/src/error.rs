//! What can go wrong between memory and a disk.

use std::io;
use std::path::{Path, PathBuf};

use plimsoll_memory::{ByteSize, CopyError, OutOfMemory, ReservationError};

/// A file that could not be opened, read or written. Names the file and the place.
#[derive(Debug, thiserror::Error)]
pub enum DiskError {
    /// The system refused to open or make it.
    #[error("{}: {source}", path.display())]
    Open {
        /// The file, or the folder of one without a name.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// A spill file cannot be made.
    #[error("no file can be made in {}: {source}; name a folder that can be written to", folder.display())]
    NoSpill {
        /// Its folder.
        folder: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// The disk failed, or the system refused.
    #[error("{}: {bytes} bytes at offset {offset} could not be {}: {source}", path.display(), if *.write { "written" } else { "read" })]
    Io {
        /// The file.
        path: PathBuf,
        /// Where in it.
        offset: u64,
        /// How many bytes.
        bytes: usize,
        /// Whether they were to be written.
        write: bool,
        /// The system's answer.
        source: io::Error,
    },
    /// The file is shorter than what was asked of it.
    #[error(
        "{} ends after {length} bytes, but bytes {start} to {end} of it are needed; was it cut short meanwhile?",
        path.display()
    )]
    EndOfFile {
        /// The file.
        path: PathBuf,
        /// Its length.
        length: u64,
        /// The first byte asked for.
        start: u64,
        /// The end of what was asked for.
        end: u64,
    },
    /// There is no room on the disk, or a limit on files' sizes is reached.
    #[error(
        "the disk of {} has no room for {} more ({source}); free some there, or name a folder on another disk",
        folder.display(), ByteSize(*.bytes)
    )]
    Full {
        /// The spill file's folder.
        folder: PathBuf,
        /// Bytes that were to be added.
        bytes: u64,
        /// The system's answer.
        source: io::Error,
    },
    /// More was to be spilled than may be.
    #[error("{} on disk are needed and {} may be used; raise the disk budget", ByteSize(*.needed), ByteSize(*.budget))]
    OverBudget {
        /// Bytes with what was asked for.
        needed: u64,
        /// Bytes allowed.
        budget: u64,
    },
    /// A buffer that does not hold what is to go through it: a programming error.
    #[error("a buffer of {has} aligned bytes was given for {needed} bytes")]
    Buffer {
        /// Bytes from its first aligned one on.
        has: u64,
        /// Bytes needed.
        needed: u64,
    },
    /// A tier holds no more.
    #[error(transparent)]
    Tier(Box<OutOfMemory>),
    /// The device failed to copy.
    #[error(transparent)]
    Copy(#[from] CopyError),
    /// The engine was stopped before it came to this request.
    #[error("the disk engine was stopped")]
    Stopped,
    /// There is no memory for buffers.
    #[error(transparent)]
    Reservation(#[from] ReservationError),
    /// The system starts no more threads.
    #[error("a thread for the disk could not be started: {0}")]
    Thread(io::Error),
}

impl From<OutOfMemory> for DiskError {
    fn from(full: OutOfMemory) -> DiskError {
        DiskError::Tier(Box::new(full))
    }
}

impl DiskError {
    /// An error of opening.
    pub(crate) fn open(path: &Path, source: impl Into<io::Error>) -> DiskError {
        DiskError::Open { path: path.to_owned(), source: source.into() }
    }
}

/// Whether the system means that there is no room: on the disk, in the user's quota, under a limit on files' sizes.
pub(crate) fn is_full(error: &io::Error) -> bool {
    use io::ErrorKind::{FileTooLarge, QuotaExceeded, StorageFull};
    matches!(error.kind(), StorageFull | QuotaExceeded | FileTooLarge)
}
