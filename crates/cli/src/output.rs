//! Standard output, where a failed write is an error with an exit code (`println!` would panic); standard error, where a
//! failed write is ignored; and files that were asked for by name.

use std::fmt;
use std::io::{self, Write};
use std::path::Path;

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

/// Writes a file that was asked for by its name, whole or not at all.
pub fn write_file(what: &str, file: &Path, bytes: &[u8]) -> Result<(), Failure> {
    write_whole(file, bytes).map_err(|error| match error {
        // The remedies of other files are those of a run's folder.
        TrainError::Io { source, .. } => Failure::other(format!(
            "{what} could not be written to {}: {source}; name a file in a folder that you may write to and that has room",
            file.display()
        )),
        other => other.into(),
    })
}
