//! Folders that are made for something and go with it.

use std::io;
use std::path::{Path, PathBuf};

/// Folders that were not there before. Those that are empty are removed when this value is dropped.
#[derive(Debug, Default)]
pub struct MadeFolders(Vec<PathBuf>);

impl MadeFolders {
    /// Those that are missing of a folder and what it lies in, the innermost first: they are about to be made.
    pub fn missing(folder: &Path) -> MadeFolders {
        let named = folder.ancestors().take_while(|part| !part.as_os_str().is_empty());
        MadeFolders(named.take_while(|part| !part.exists()).map(Path::to_owned).collect())
    }
}

impl Drop for MadeFolders {
    fn drop(&mut self) {
        for folder in &self.0 {
            // A folder that holds anything stays, with all that it lies in; one may be gone already.
            match std::fs::remove_dir(folder) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => break,
                _ => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_that_were_made_go_unless_something_is_in_them() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        std::fs::create_dir(at("own")).unwrap();
        for (inner, file) in [("own", None), ("new/below", None), ("other/below", Some("other/file"))] {
            let made = MadeFolders::missing(&at(inner));
            std::fs::create_dir_all(at(inner)).unwrap();
            file.iter().for_each(|file| std::fs::write(at(file), "").unwrap());
            drop(made);
        }
        assert!(at("own").is_dir(), "it was there before");
        assert!(!at("new").exists());
        assert!(at("other/file").exists() && !at("other/below").exists());
    }
}
