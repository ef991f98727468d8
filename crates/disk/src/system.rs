//! What the operating system is asked for: files past the page cache, files without a name, room for them.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Opens an existing file past the page cache, for reading and, where `write`, for writing.
pub(crate) fn open_direct(path: &Path, write: bool) -> io::Result<File> {
    #[cfg(target_os = "linux")]
    {
        let direct = rustix::fs::OFlags::DIRECT.bits() as i32;
        OpenOptions::new().read(true).write(write).custom_flags(direct).open(path)
    }
    #[cfg(not(target_os = "linux"))]
    {
        let _ = (path, write);
        Err(io::ErrorKind::Unsupported.into())
    }
}

/// A second handle of an open file, past the page cache.
pub(crate) fn reopened_direct(file: &File) -> io::Result<File> {
    // A file without a name can be reached through the process's own list of them.
    open_direct(Path::new(&format!("/proc/self/fd/{}", file.as_raw_fd())), true)
}

/// Makes a file without a name in `folder`, for this user alone.
pub(crate) fn nameless_file(folder: &Path, prefix: &str) -> io::Result<File> {
    #[cfg(target_os = "linux")]
    {
        use rustix::fs::{Mode, OFlags};
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        if let Ok(file) = rustix::fs::open(folder, flags, Mode::RUSR | Mode::WUSR) {
            return Ok(File::from(file));
        }
    }
    unlinked_file(folder, prefix)
}

/// The same where the file system has no such files: one whose name is taken away at once.
pub(crate) fn unlinked_file(folder: &Path, prefix: &str) -> io::Result<File> {
    for attempt in 0..100u32 {
        let path = folder.join(format!("{prefix}{}-{attempt}", std::process::id()));
        let made = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path);
        match made {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
            made => {
                let file = made?;
                std::fs::remove_file(&path)?;
                return Ok(file);
            }
        }
    }
    Err(io::ErrorKind::AlreadyExists.into())
}

/// Takes room for bytes of a file, where the file system can; others find out when they are written.
pub(crate) fn take_room(file: &File, offset: u64, bytes: u64) -> io::Result<()> {
    #[cfg(target_os = "linux")]
    {
        use rustix::io::Errno;
        match rustix::fs::fallocate(file, rustix::fs::FallocateFlags::empty(), offset, bytes) {
            Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::NODEV | Errno::INVAL) | Ok(()) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
    #[cfg(not(target_os = "linux"))]
    {
        let _ = (file, offset, bytes);
        Ok(())
    }
}

/// Lets the page cache forget bytes of a file; those that were written are on the disk first.
pub(crate) fn forget_cached(file: &File, offset: u64, bytes: u64, written: bool) -> io::Result<()> {
    if written {
        file.sync_data()?;
    }
    #[cfg(target_os = "linux")]
    {
        use std::num::NonZeroU64;
        // Advice: a file system that does not take it is as good as its cache.
        let _ = rustix::fs::fadvise(file, offset, NonZeroU64::new(bytes), rustix::fs::Advice::DontNeed);
    }
    #[cfg(not(target_os = "linux"))]
    let _ = (offset, bytes);
    Ok(())
}

/// Whether what is written into a folder stays in memory: on tmpfs and ramfs.
pub fn is_in_memory(folder: &Path) -> bool {
    #[cfg(target_os = "linux")]
    {
        /// `TMPFS_MAGIC` and `RAMFS_MAGIC` of the kernel's `linux/magic.h`.
        const IN_MEMORY: [u64; 2] = [0x0102_1994, 0x8584_58f6];
        rustix::fs::statfs(folder).is_ok_and(|found| IN_MEMORY.contains(&(found.f_type as u64)))
    }
    #[cfg(not(target_os = "linux"))]
    {
        let _ = folder;
        false
    }
}
