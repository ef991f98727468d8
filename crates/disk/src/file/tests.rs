//! Reads of files that give less than they are asked for, and errors on the way.

use std::cell::RefCell;

use super::*;

/// A file that gives at most `most` bytes at a time, and errors before.
struct Faulty {
    bytes: Vec<u8>,
    most: usize,
    errors: RefCell<Vec<io::ErrorKind>>,
    asked: RefCell<Vec<(u64, usize)>>,
}

fn faulty(length: usize, most: usize, errors: &[io::ErrorKind]) -> Faulty {
    let bytes = (0..length).map(|i| (i / 7) as u8).collect();
    Faulty { bytes, most, errors: RefCell::new(errors.to_vec()), asked: RefCell::default() }
}

impl FileExt for Faulty {
    fn read_at(&self, out: &mut [u8], offset: u64) -> io::Result<usize> {
        self.asked.borrow_mut().push((offset, out.len()));
        if let Some(kind) = self.errors.borrow_mut().pop() {
            return Err(kind.into());
        }
        let left = self.bytes.get(offset as usize..).unwrap_or_default();
        let count = left.len().min(out.len()).min(self.most);
        out[..count].copy_from_slice(&left[..count]);
        Ok(count)
    }

    fn write_at(&self, _: &[u8], _: u64) -> io::Result<usize> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

#[test]
fn a_read_that_gives_less_goes_on_behind_it() {
    for (most, direct) in
        [(1, false), (1000, false), (4096, false), (4096, true), (8192, true), (1 << 20, true)]
    {
        let file = faulty(40_000, most, &[io::ErrorKind::Interrupted; 2]);
        let mut out = vec![0xff; 16_384];
        assert_eq!(read_from(&file, 8192, &mut out, direct).unwrap(), 16_384, "{most} {direct}");
        assert!(out == file.bytes[8192..][..16_384]);
        // Each part once, one behind the other.
        let asked = file.asked.borrow();
        let parts = 16_384usize.div_ceil(most.min(16_384));
        assert_eq!((asked.len(), asked[2]), (2 + parts, (8192, 16_384)));
        assert!(asked[2..].windows(2).all(|pair| pair[1].0 == pair[0].0 + most as u64));
    }
}

#[test]
fn the_end_of_a_file_is_where_the_reading_ends() {
    for (length, expected) in [(8192, 0), (8193, 1), (10_000, 1808), (12_288, 4096), (30_000, 16_384)] {
        for direct in [false, true] {
            let file = faulty(length, 1 << 20, &[]);
            let mut out = vec![0; 16_384];
            assert_eq!(read_from(&file, 8192, &mut out, direct).unwrap(), expected, "{length} {direct}");
            assert!(out[..expected] == file.bytes[8192.min(length)..][..expected]);
        }
    }
    // A direct read may not begin within a page: after a part of one there is nothing more.
    let file = faulty(40_000, 5000, &[]);
    assert_eq!(read_from(&file, 0, &mut [0; 16_384], true).unwrap(), 5000);
    assert_eq!(file.asked.borrow().len(), 1);
}

#[test]
fn other_errors_end_the_reading() {
    let file = faulty(40_000, 4096, &[io::ErrorKind::PermissionDenied]);
    let error = read_from(&file, 0, &mut [0; 8192], false).unwrap_err();
    assert_eq!((error.kind(), file.asked.borrow().len()), (io::ErrorKind::PermissionDenied, 1));
    assert!(
        [io::ErrorKind::InvalidInput, io::ErrorKind::Unsupported].iter().all(|k| is_refusal(&(*k).into()))
    );
    assert!(!is_refusal(&io::ErrorKind::PermissionDenied.into()));
}

#[test]
fn pages_of_which_too_few_bytes_are_there_are_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    let bytes: Vec<u8> = (0..30_000).map(|i| (i / 7) as u8).collect();
    std::fs::write(&path, &bytes).unwrap();
    for direct in [true, false] {
        let file = DiskFile::open(&path, direct).unwrap();
        // Memory that direct reads take.
        let mut region = plimsoll_memory::Region::new(3 * ALIGNMENT).unwrap();
        let out = region.bytes_mut();
        for needed in [0, 1, 5424] {
            file.read_pages(24_576, out, needed).unwrap();
            assert!(out[..needed] == bytes[24_576..][..needed]);
        }
        let error = file.read_pages(24_576, out, 5425).unwrap_err();
        assert!(
            matches!(error, DiskError::EndOfFile { length: 30_000, start: 24_576, end: 30_001, .. }),
            "{error:?}"
        );
        assert_eq!(file.mode() == IoMode::Buffered, file.direct().is_none());
        // Once refused, never asked again, and the file is read all the same.
        file.refused.store(true, Ordering::Relaxed);
        assert_eq!(file.mode(), IoMode::Buffered);
        file.read_pages(4096, out, 8192).unwrap();
        assert!(out[..8192] == bytes[4096..][..8192]);
    }
}

#[test]
fn what_cannot_be_written_says_where() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    std::fs::write(&path, [7; 8192]).unwrap();
    // Opened to be read alone.
    let file = DiskFile::open(&path, false).unwrap();
    let error = file.write_pages(4096, &[0; 4096]).unwrap_err();
    assert!(matches!(&error, DiskError::Io { offset: 4096, bytes: 4096, write: true, .. }), "{error:?}");
    assert!(error.to_string().contains("4096 bytes at offset 4096 could not be written"), "{error}");
    assert!(std::fs::read(&path).unwrap() == [7; 8192]);
    let full = |write| file.io_error(0, 10, write, io::ErrorKind::StorageFull.into());
    assert!(matches!(full(true), DiskError::Full { bytes: 10, .. }));
    assert!(matches!(full(false), DiskError::Io { write: false, .. }));
    assert_eq!([IoMode::Direct, IoMode::Buffered].map(|mode| mode.to_string()), ["direct", "buffered"]);
}

/// Direct I/O refuses memory that begins within a page, as some file systems refuse it altogether when it is tried.
#[test]
fn what_is_refused_directly_goes_through_the_page_cache() {
    // The build folder is on a disk where temporary folders may be in memory.
    let program = std::env::current_exe().unwrap();
    let folder = tempfile::tempdir_in(program.parent().unwrap()).unwrap();
    let path = folder.path().join("file");
    let bytes: Vec<u8> = (0..16_384).map(|i| (i / 7) as u8).collect();
    std::fs::write(&path, &bytes).unwrap();
    let file = DiskFile::open(&path, true).unwrap();
    if file.mode() == IoMode::Buffered {
        println!("skipped: no direct I/O here");
        return;
    }
    let mut region = plimsoll_memory::Region::new(3 * ALIGNMENT).unwrap();
    let crooked = &mut region.bytes_mut()[1..=8192];
    file.read_pages(4096, crooked, 8192).unwrap();
    assert!(*crooked == bytes[4096..12_288] && file.mode() == IoMode::Buffered);

    let writable = std::fs::File::options().read(true).write(true).open(&path).unwrap();
    let owned = DiskFile::owned(folder.path(), writable, true);
    assert_eq!(owned.mode(), IoMode::Direct);
    crooked.fill(9);
    owned.write_pages(4096, &crooked[..4096]).unwrap();
    assert_eq!(owned.mode(), IoMode::Buffered);
    let written = std::fs::read(&path).unwrap();
    assert!(written[4096..8192] == [9; 4096] && written[8192..] == bytes[8192..]);
}

/// An error of another kind is no reason to try again.
#[test]
fn a_direct_read_or_write_that_fails_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    std::fs::write(&path, [7; 8192]).unwrap();
    let both = || std::fs::File::options().read(true).write(true).open(&path).unwrap();
    let write_only = std::fs::File::options().write(true).open(&path).unwrap();
    let with = |direct| DiskFile { direct: Some(direct), ..DiskFile::owned(folder.path(), both(), false) };
    let error = with(write_only).read_pages(0, &mut [0; 4096], 4096).unwrap_err();
    assert!(matches!(error, DiskError::Io { write: false, offset: 0, .. }), "{error:?}");
    let read_only = std::fs::File::open(&path).unwrap();
    let error = with(read_only).write_pages(0, &[0; 4096]).unwrap_err();
    assert!(matches!(error, DiskError::Io { write: true, offset: 0, .. }), "{error:?}");
}
