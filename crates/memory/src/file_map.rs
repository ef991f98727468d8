//! A file seen as bytes through a read-only memory map.
//!
//! Pages that were read stay in the process's resident set until they are given back, so readers call
//! [`FileMap::release`] behind themselves. What the bytes mean is left to the formats.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

use memmap2::{Advice, Mmap, MmapOptions, UncheckedAdvice};

/// The kernel maps neighbouring bytes along with a page that is touched: 64 KiB (its "fault-around" window), or the whole piece of the
/// page cache that the page lies in, of at most this many bytes. So releasing takes them along.
const MAPPED_AT_ONCE: usize = 2 << 20;

/// A file mapped read-only and privately. An empty file is an empty map.
///
/// # Files that change meanwhile
/// The map keeps the file open in effect: it can be renamed or removed, and another can take its name, as writers
/// that write aside and rename do; the map goes on showing the old one. A file that is overwritten in place may
/// show old bytes, new ones, or some of both. One that is cut short in place ends the process with SIGBUS when the
/// missing part is read, as with every memory map; no reader can prevent that without copying the file.
#[derive(Debug)]
pub struct FileMap {
    path: PathBuf,
    /// None for an empty file, which cannot be mapped.
    map: Option<Mmap>,
}

impl FileMap {
    /// Maps a regular file; `path` may be a link to one.
    ///
    /// # Errors
    /// The system refuses to open or map it, or it is a folder, a pipe, a device or a socket
    /// ([`io::ErrorKind::InvalidInput`]).
    pub fn open(path: &Path) -> io::Result<FileMap> {
        // Asked before opening: to open a pipe would wait for a writer.
        if !std::fs::metadata(path)?.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "is not a regular file"));
        }
        let file = File::open(path)?;
        if file.metadata()?.len() == 0 {
            return Ok(FileMap { path: path.to_owned(), map: None });
        }
        // SAFETY: the map is private and read-only, so this process never writes to it. Its contents are only ever
        // used as plain bytes, which have no invalid values, and every offset taken from them is checked where it
        // is used; so a file that another process overwrites can give wrong numbers or an error, but no access
        // outside the map.
        let map = unsafe { MmapOptions::new().map_copy_read_only(&file)? };
        // Advice: a kernel that does not take it reads just as well, only slower.
        let _ = map.advise(Advice::Sequential);
        Ok(FileMap { path: path.to_owned(), map: Some(map) })
    }

    /// The file, as it was called when it was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// All of its bytes, as many as it had when it was opened.
    pub fn bytes(&self) -> &[u8] {
        self.map.as_deref().unwrap_or_default()
    }

    /// Gives the pages of `range`, in bytes from the file's start, back to the system; what is touched again is read
    /// again. Pages around the range go too, and what lies beyond the file is no error.
    pub fn release(&self, range: Range<usize>) {
        let Some(map) = &self.map else { return };
        let start = range.start.saturating_sub(MAPPED_AT_ONCE).min(map.len());
        let end = range.end.saturating_add(MAPPED_AT_ONCE).min(map.len());
        if start < end {
            // SAFETY: nothing ever writes to the map, so it holds no page of its own: a dropped page comes back from
            // the file with the file's contents, and no reference is invalidated. The range lies within the map.
            let _ = unsafe { map.unchecked_advise_range(UncheckedAdvice::DontNeed, start, end - start) };
        }
    }

    /// Gives all pages back to the system.
    pub fn release_all(&self) {
        self.release(0..self.bytes().len());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(bytes: &[u8]) -> (tempfile::TempDir, FileMap) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, bytes).unwrap();
        let map = FileMap::open(&path).unwrap();
        (folder, map)
    }

    #[test]
    fn released_bytes_come_back() {
        let bytes: Vec<u8> = (0..300_000u32).map(|i| (i * 7 % 251) as u8).collect();
        let (folder, map) = map(&bytes);
        for range in [0..1, 0..300_000, 100_000..100_001, 299_999..usize::MAX, usize::MAX..usize::MAX] {
            assert_eq!(map.bytes(), bytes);
            map.release(range);
        }
        map.release_all();
        assert_eq!(map.bytes(), bytes);
        // A file of the same name written aside and renamed is another file.
        std::fs::write(folder.path().join("new"), b"other").unwrap();
        std::fs::rename(folder.path().join("new"), map.path()).unwrap();
        map.release_all();
        assert_eq!(map.bytes(), bytes);
    }

    /// Systems whose page cache has large pieces map the whole of one when a page is touched, far beyond what was read.
    #[cfg(target_os = "linux")]
    #[test]
    fn nothing_that_was_read_and_released_stays_resident() {
        let (_folder, map) = map(&vec![1; 24 << 20]);
        let [mut start, end] = [(5 << 20) + 777, (9 << 20) + 777];
        while start < end {
            let range = start..start + (256 << 10);
            assert_eq!(map.bytes()[range.clone()].iter().map(|x| u64::from(*x)).sum::<u64>(), 256 << 10);
            map.release(range.clone());
            start = range.end;
        }
        let name = map.path().to_str().unwrap();
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mut own = maps.lines().skip_while(|line| !line.ends_with(name));
        let resident = own.find_map(|line| line.strip_prefix("Rss:")).unwrap();
        assert_eq!(resident.trim(), "0 kB");
    }

    #[test]
    fn an_empty_file_is_an_empty_map() {
        let (_folder, map) = map(b"");
        assert_eq!(map.bytes(), b"");
        map.release(0..10);
        map.release_all();
    }

    #[test]
    fn what_is_no_file_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(FileMap::open(folder.path()).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        let missing = folder.path().join("missing");
        assert_eq!(FileMap::open(&missing).unwrap_err().kind(), io::ErrorKind::NotFound);
        #[cfg(unix)]
        assert_eq!(FileMap::open(Path::new("/dev/null")).unwrap_err().kind(), io::ErrorKind::InvalidInput);
    }
}
