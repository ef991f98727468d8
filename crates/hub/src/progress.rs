//! What a fetch tells while it goes on.

use std::path::Path;
use std::time::Duration;

/// Something that happened.
#[derive(Debug)]
pub enum FetchEvent<'a> {
    /// Files are to be fetched.
    Started {
        /// How many.
        files: usize,
        /// Bytes of all of them.
        bytes: u64,
        /// Those that an earlier fetch left behind.
        already: u64,
    },
    /// A file's turn has come.
    File {
        /// Its name.
        name: &'a str,
    },
    /// More bytes are on disk; negative where bytes had to be given up.
    Bytes(i64),
    /// Another process fetches the same file; this one waits for it.
    Waiting {
        /// The file.
        name: &'a str,
    },
    /// A request failed and is made again.
    Retrying {
        /// The file.
        name: &'a str,
        /// Why.
        reason: &'a str,
        /// After this time.
        pause: Duration,
    },
    /// The hub cannot be reached; what the cache holds is used.
    Unreachable {
        /// Why.
        reason: &'a str,
        /// What is used.
        snapshot: &'a Path,
    },
    /// All files of this batch are whole.
    Done,
}

/// Whoever shows them.
pub trait Progress {
    /// Takes an event.
    fn event(&mut self, event: FetchEvent<'_>);
}

/// Nobody.
impl Progress for () {
    fn event(&mut self, _: FetchEvent<'_>) {}
}
