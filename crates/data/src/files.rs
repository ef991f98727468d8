//! From what the user wrote (files, folders, patterns) to a list of files, always in the same order.

use std::path::{Path, PathBuf};

use crate::DataError;

/// What a file holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileKind {
    /// One document.
    Text,
    /// One JSON document a line.
    JsonLines,
    /// A list of JSON records, or one after the other.
    Json,
    /// A table of the Apache Parquet format.
    Parquet,
    /// Rows below one of names, with commas between their fields.
    Csv,
    /// The same with tabs.
    Tsv,
}

/// Which files of a folder are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// Those of texts; `.json`, `.csv` and `.tsv` are mostly something else there.
    Texts,
    /// Those of records.
    Records,
}

impl Wanted {
    fn takes(self, kind: FileKind) -> bool {
        match self {
            Wanted::Texts => matches!(kind, FileKind::Text | FileKind::JsonLines | FileKind::Parquet),
            Wanted::Records => kind != FileKind::Text,
        }
    }
}

/// A file to read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DataFile {
    pub path: PathBuf,
    pub kind: FileKind,
}

/// Bytes of the files that the patterns stand for; of records where `records`, else of texts.
pub fn bytes_of(patterns: &[String], records: bool) -> Result<u64, DataError> {
    let files = expand(patterns, if records { Wanted::Records } else { Wanted::Texts })?;
    // A file that cannot be looked at is one that cannot be read: its reader says why.
    let sizes = files.iter().filter_map(|file| Some(std::fs::metadata(&file.path).ok()?.len()));
    Ok(sizes.sum())
}

/// The files that the patterns stand for: in the order of the patterns, within a folder or a pattern by name.
pub fn expand(patterns: &[String], wanted: Wanted) -> Result<Vec<DataFile>, DataError> {
    let mut files = Vec::new();
    for pattern in patterns {
        let path = Path::new(pattern);
        let before = files.len();
        if path.is_dir() {
            folder(path, wanted, &mut files)?;
        } else if path.exists() {
            check_regular(path)?;
            // A file that was named is text unless its name says otherwise.
            files.push(DataFile { path: path.to_owned(), kind: kind(path).unwrap_or(FileKind::Text) });
        } else {
            matches(pattern, &mut files)?;
        }
        if files.len() == before {
            return Err(DataError::NothingFound { pattern: pattern.clone() });
        }
    }
    Ok(files)
}

/// Refuses files that have no end or can be read only once, such as pipes and devices.
pub fn check_regular(path: &Path) -> Result<(), DataError> {
    let kind = std::fs::metadata(path).map_err(DataError::io("open", path))?.file_type();
    match what(kind) {
        Some(what) => Err(DataError::NotAFile { path: path.to_owned(), what }),
        None => Ok(()),
    }
}

/// What it is, if it is no file of data.
fn what(kind: std::fs::FileType) -> Option<&'static str> {
    #[cfg(unix)]
    {
        use std::os::unix::fs::FileTypeExt;
        if kind.is_fifo() {
            return Some("a pipe");
        }
        if kind.is_char_device() || kind.is_block_device() {
            return Some("a device");
        }
        if kind.is_socket() {
            return Some("a socket");
        }
    }
    kind.is_dir().then_some("a folder")
}

fn matches(pattern: &str, files: &mut Vec<DataFile>) -> Result<(), DataError> {
    let fail = |reason: String| DataError::Pattern { pattern: pattern.to_owned(), reason };
    let mut found = Vec::new();
    let as_in_shells = glob::MatchOptions { require_literal_leading_dot: true, ..Default::default() };
    for entry in glob::glob_with(pattern, as_in_shells).map_err(|e| fail(e.to_string()))? {
        let path = entry.map_err(|e| fail(e.to_string()))?;
        if path.is_file() {
            found.push(path);
        }
    }
    found.sort();
    for path in found {
        let kind = kind(&path).ok_or_else(|| DataError::UnknownKind { path: path.clone() })?;
        files.push(DataFile { path, kind });
    }
    Ok(())
}

/// Files below a folder whose names say that they hold what is wanted; others, and hidden ones, are left alone.
fn folder(path: &Path, wanted: Wanted, files: &mut Vec<DataFile>) -> Result<(), DataError> {
    let mut entries = std::fs::read_dir(path)
        .and_then(|entries| entries.map(|e| e.map(|e| e.path())).collect::<Result<Vec<_>, _>>())
        .map_err(DataError::io("list", path))?;
    entries.sort();
    for entry in entries {
        let hidden = entry.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"."));
        if hidden {
            continue;
        }
        // A link to a folder could lead back here.
        if entry.is_dir() && !entry.is_symlink() {
            folder(&entry, wanted, files)?;
        } else if let (true, Some(kind)) = (entry.is_file(), kind(&entry).filter(|kind| wanted.takes(*kind)))
        {
            files.push(DataFile { path: entry, kind });
        }
    }
    Ok(())
}

/// What a file holds by its name.
pub fn kind(path: &Path) -> Option<FileKind> {
    match path.extension()?.to_str()?.to_ascii_lowercase().as_str() {
        "txt" | "text" | "md" => Some(FileKind::Text),
        "jsonl" | "ndjson" => Some(FileKind::JsonLines),
        "json" => Some(FileKind::Json),
        "parquet" => Some(FileKind::Parquet),
        "csv" => Some(FileKind::Csv),
        "tsv" => Some(FileKind::Tsv),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(unix)]
    #[test]
    fn devices_and_sockets_are_no_data() {
        let read = |path: &Path| crate::documents::for_each_piece(path, 64, &mut |_| Ok(()));
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("data.txt");
        let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        for (path, what) in [("/dev/zero", "a device"), (socket.to_str().unwrap(), "a socket")] {
            let error = expand(&[path.to_owned()], Wanted::Texts).unwrap_err().to_string();
            assert!(error.starts_with(&format!("{path}: {what}, not a file")), "{error}");
            assert!(read(Path::new(path)).is_err());
        }
        let error = read(folder.path()).unwrap_err().to_string();
        assert!(error.contains("a folder, not a file"), "{error}");
    }

    #[test]
    fn patterns_stand_for_files_in_a_fixed_order() {
        let root = tempfile::tempdir().unwrap();
        for name in ["b.txt", "a.jsonl", "sub/c.md", "image.png", ".hidden.txt", "plain"] {
            let path = root.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, "x").unwrap();
        }
        let check = |patterns: &[&str], expected: &[&str]| {
            let patterns: Vec<String> =
                patterns.iter().map(|p| root.path().join(p).to_str().unwrap().to_owned()).collect();
            let files = expand(&patterns, Wanted::Texts).unwrap();
            let names: Vec<String> = files
                .iter()
                .map(|f| f.path.strip_prefix(root.path()).unwrap().display().to_string())
                .collect();
            assert_eq!(names, expected);
        };
        check(&[""], &["a.jsonl", "b.txt", "sub/c.md"]);
        check(&["*.txt", "sub"], &["b.txt", "sub/c.md"]);
        check(&["plain", "a.jsonl"], &["plain", "a.jsonl"]);
        std::fs::write(root.path().join("c.json"), "[]").unwrap();
        check(&[""], &["a.jsonl", "b.txt", "sub/c.md"]);
        let all = [root.path().to_str().unwrap().to_owned()];
        let kinds: Vec<FileKind> = expand(&all, Wanted::Records).unwrap().iter().map(|f| f.kind).collect();
        assert_eq!(kinds, [FileKind::JsonLines, FileKind::Json]);
        let missing = root.path().join("*.csv").to_str().unwrap().to_owned();
        assert!(matches!(expand(&[missing], Wanted::Texts), Err(DataError::NothingFound { .. })));
    }
}
