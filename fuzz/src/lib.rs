//! What the targets share: bytes as a file, since the readers map files.

#![forbid(unsafe_code)]

use std::io::Write;

use tempfile::NamedTempFile;

/// A file with these bytes, whose name ends in `suffix`; it goes away with the value.
pub fn file(suffix: &str, bytes: &[u8]) -> NamedTempFile {
    let mut file = tempfile::Builder::new().suffix(suffix).tempfile().expect("a temporary file");
    file.write_all(bytes).expect("room for a temporary file");
    file
}

/// Fails unless an error says which file it is about.
pub fn names_file(error: &dyn std::error::Error, file: &NamedTempFile) {
    let (error, name) = (error.to_string(), file.path().display().to_string());
    assert!(error.contains(&name), "{error:?} does not name {name:?}");
}
