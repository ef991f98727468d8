//! What tells files from others without reading the whole of large ones.
//!
//! Files of up to 16 MiB together are read whole. Of larger ones 256 KiB of the beginning of each, where formats have their headers, the
//! last 4 KiB, and about 4096 blocks of 4 KiB at even distances of all: in a model of 800 GB a block in every 200 MB. Training changes
//! nearly every byte, so two models are told apart by any block. A few bytes that somebody has changed by hand may not be seen.
//! Neither the folder of a file counts nor when it was written.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use plimsoll_memory::splitmix64;
use serde::{Deserialize, Serialize};

/// Bytes that are read at once.
const BLOCK: u64 = 4 << 10;
/// Blocks of all files together, about.
const BLOCKS: u64 = 4 << 10;
/// The beginning of each file, which is read whole.
const HEAD: u64 = 256 << 10;

/// A file, by what is in it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileIdentity {
    /// Its name, without its folder.
    pub name: String,
    /// How long it is.
    pub bytes: u64,
    /// A hash of the blocks that are looked at.
    pub hash: u64,
}

impl FileIdentity {
    /// Of files that belong together: the larger they are together, the less of each is read.
    ///
    /// # Errors
    /// The file that cannot be read, and why.
    pub fn of_all(paths: &[PathBuf]) -> Result<Vec<FileIdentity>, (PathBuf, io::Error)> {
        let bytes = |path: &PathBuf| std::fs::metadata(path).map(|file| file.len());
        let failed = |path: &PathBuf| {
            let path = path.clone();
            move |error| (path, error)
        };
        let mut total = 0u64;
        for path in paths {
            total = total.saturating_add(bytes(path).map_err(failed(path))?);
        }
        let step = (total / BLOCKS / BLOCK).max(1) * BLOCK;
        paths.iter().map(|path| FileIdentity::of(path, step).map_err(failed(path))).collect()
    }

    /// Of a file of which a block is read in every `step` bytes.
    fn of(path: &Path, step: u64) -> io::Result<FileIdentity> {
        let mut file = File::open(path)?;
        let bytes = file.metadata()?.len();
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let last = bytes.saturating_sub(BLOCK);
        let (mut hash, mut at) = (bytes, 0);
        let mut block = vec![0; BLOCK as usize];
        while at < bytes {
            file.seek(SeekFrom::Start(at))?;
            let length = usize::try_from((bytes - at).min(BLOCK)).unwrap_or(0).min(block.len());
            let read = block.split_at_mut(length).0;
            file.read_exact(read)?;
            hash = splitmix64(hash, u64::from(crc32c::crc32c(read)));
            let next = at + if at < HEAD { BLOCK } else { step };
            at = if at < last { next.min(last) } else { bytes };
        }
        Ok(FileIdentity { name, bytes, hash })
    }

    /// The first of some files, each with that of rank 0, that is another one, and why. How much of a file is read depends on the
    /// lengths of all: only where these are alike do hashes say anything.
    pub(crate) fn first_other<'f>(
        pairs: &[(&'f FileIdentity, &FileIdentity)],
    ) -> Option<(&'f FileIdentity, String)> {
        let by_length = pairs.iter().find(|(here, there)| here.bytes != there.bytes);
        let other = by_length.or_else(|| pairs.iter().find(|(here, there)| here.hash != there.hash));
        other.and_then(|(here, there)| Some((*here, here.differs_from(there)?)))
    }

    /// Why this file is another one than `there`, in words; `None` where it is the same.
    pub(crate) fn differs_from(&self, there: &FileIdentity) -> Option<String> {
        if self.bytes != there.bytes {
            return Some(format!("has {} bytes here and {} on rank 0", self.bytes, there.bytes));
        }
        (self.hash != there.hash).then(|| "has other contents here than on rank 0".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(path: &Path) -> FileIdentity {
        FileIdentity::of_all(&[path.to_owned()]).unwrap().remove(0)
    }

    #[test]
    fn small_files_are_read_whole_and_their_folder_does_not_count() {
        let folder = tempfile::tempdir().unwrap();
        let place = |name: &str| folder.path().join(name);
        std::fs::create_dir(place("other")).unwrap();
        let mut bytes: Vec<u8> = (0..9_999u32).map(|i| (i % 251) as u8).collect();
        std::fs::write(place("a"), &bytes).unwrap();
        std::fs::write(place("other/a"), &bytes).unwrap();
        assert_eq!(of(&place("a")), of(&place("other/a")));
        for at in [0, 5_000, 9_998] {
            bytes[at] ^= 1;
            std::fs::write(place("other/a"), &bytes).unwrap();
            let said = of(&place("other/a")).differs_from(&of(&place("a")));
            assert_eq!(said.as_deref(), Some("has other contents here than on rank 0"), "{at}");
            bytes[at] ^= 1;
        }
        bytes.pop();
        std::fs::write(place("other/a"), &bytes).unwrap();
        let said = of(&place("other/a")).differs_from(&of(&place("a"))).unwrap();
        assert_eq!(said, "has 9998 bytes here and 9999 on rank 0");
        std::fs::write(place("none"), "").unwrap();
        assert_eq!(of(&place("none")).differs_from(&of(&place("none"))), None);
        assert!(FileIdentity::of_all(&[place("gone")]).is_err_and(|(path, _)| path == place("gone")));
    }

    /// The beginning, the end, and a block in every step of what is between.
    #[test]
    fn of_large_files_parts_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("large");
        let length = (8 * HEAD + 100) as usize;
        let mut bytes = vec![7u8; length];
        let seen = |at: usize, bytes: &mut Vec<u8>| {
            std::fs::write(&path, &*bytes).unwrap();
            let before = FileIdentity::of(&path, HEAD).unwrap();
            bytes[at] ^= 1;
            std::fs::write(&path, &*bytes).unwrap();
            before != FileIdentity::of(&path, HEAD).unwrap()
        };
        let head = HEAD as usize;
        for at in [0, head - 1, 2 * head + 1, length - 1] {
            assert!(seen(at, &mut bytes), "{at}");
        }
        assert!(!seen(2 * head + 5_000, &mut bytes));
    }
}
