//! Standard output, where a failed write is an error with an exit code (`println!` would panic); standard error, where a
//! failed write is ignored; and files that were asked for by name.

use std::fmt;
use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use plimsoll_train::{TrainError, write_whole};

use crate::failure::Failure;

/// Prints like `print!`; an error where standard output is closed or its disk is full.
macro_rules! out {
    ($($argument:tt)*) => { $crate::output::write(format_args!($($argument)*)) };
}

/// Prints a line like `println!`; an error as in [`out!`].
macro_rules! outln {
    () => { $crate::output::write(format_args!("\n")) };
    ($($argument:tt)*) => { $crate::output::write(format_args!("{}\n", format_args!($($argument)*))) };
}

/// Prints a line like `eprintln!`; nothing where standard error is closed.
macro_rules! errln {
    ($($argument:tt)*) => { $crate::output::write_error(format_args!("{}\n", format_args!($($argument)*))) };
}

pub(crate) use {errln, out, outln};

pub fn write(text: fmt::Arguments<'_>) -> Result<(), Failure> {
    let mut stdout = io::stdout().lock();
    stdout.write_fmt(text).and_then(|()| stdout.flush()).map_err(|error| match error.kind() {
        // `plimsoll config | head`: whoever read has seen enough.
        io::ErrorKind::BrokenPipe => Failure::silent(),
        _ => Failure::other(format!("could not write to standard output: {error}")),
    })
}

pub fn write_error(text: fmt::Arguments<'_>) {
    // At once, so that whoever reads it gets a line and no piece of one. Nobody is left to be told of a failure.
    let _ = io::stderr().lock().write_all(text.to_string().as_bytes());
}

/// Links that are followed one after the other, at most: as many as the system follows.
const MOST_LINKS: usize = 40;

/// What an output's name leads to.
#[derive(Debug, PartialEq, Eq)]
pub enum Place {
    /// A file, which may not be there yet: what the name says, or what the links say that it is.
    File(PathBuf),
    /// A device, a pipe or a socket, which must stay what it is.
    Stream,
}

impl Place {
    /// What `name` leads to.
    pub fn of(name: &Path) -> Place {
        if fs::metadata(name).is_ok_and(|found| !found.is_file() && !found.is_dir()) {
            return Place::Stream;
        }
        let mut place = name.to_owned();
        for _ in 0..MOST_LINKS {
            let Ok(next) = fs::read_link(&place) else { break };
            place = place.parent().unwrap_or(Path::new("")).join(next);
        }
        Place::File(place)
    }
}

/// Writes a file that was asked for by its name, whole or not at all. A link leads to its file; devices and pipes get the bytes.
pub fn write_file(what: &str, file: &Path, bytes: &[u8]) -> Result<(), Failure> {
    let failed = |source: io::Error| {
        Failure::other(format!(
            "{what} could not be written to {}: {source}; name a file in a folder that you may write to and that has room",
            file.display()
        ))
    };
    match Place::of(file) {
        Place::Stream => {
            OpenOptions::new().write(true).open(file).and_then(|mut out| out.write_all(bytes)).map_err(failed)
        }
        Place::File(place) => write_whole(&place, bytes).map_err(|error| match error {
            // The remedies of other files are those of a run's folder.
            TrainError::Io { source, .. } => failed(source),
            other => other.into(),
        }),
    }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    #[test]
    fn links_are_followed_and_devices_are_written_to() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::create_dir(at("below")).unwrap();
        for (link, to) in [("first", "below/second"), ("below/second", "file"), ("loop", "loop")] {
            std::os::unix::fs::symlink(to, at(link)).unwrap();
        }
        // The file need not be there yet.
        for text in ["new", "other"] {
            write_file("it", &at("first"), text.as_bytes()).unwrap();
            assert_eq!(fs::read_to_string(at("below/file")).unwrap(), text);
            assert!(fs::symlink_metadata(at("first")).unwrap().is_symlink());
        }
        assert_eq!(Place::of(Path::new("/dev/null")), Place::Stream);
        write_file("it", Path::new("/dev/null"), b"text").unwrap();
        assert_eq!(Place::of(Path::new("/dev/null")), Place::Stream);
        assert!(write_file("it", Path::new("/dev/full"), b"text").is_err());
        assert_eq!(Place::of(&at("none")), Place::File(at("none")));
    }
}
