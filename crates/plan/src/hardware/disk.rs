//! Free space on the disk of a folder.

use std::io;
use std::path::{Path, PathBuf};

use plimsoll_memory::ByteSize;

/// The space of the file system that holds a folder.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct DiskSpace {
    /// The folder that was looked at: the one asked for, or the nearest above it that exists.
    pub folder: PathBuf,
    /// Size of the file system.
    pub total: ByteSize,
    /// What this user may still write.
    pub available: ByteSize,
}

/// The space of the file system that holds `folder`, which need not exist yet.
///
/// # Errors
/// What the system says, or [`io::ErrorKind::Unsupported`] where it cannot be asked.
pub fn disk_space(folder: &Path) -> io::Result<DiskSpace> {
    let here = Path::new(".");
    let exists = folder.ancestors().filter(|folder| !folder.as_os_str().is_empty()).find(|f| f.exists());
    let folder = exists.unwrap_or(if folder.has_root() { folder } else { here });
    let (total, available) = file_system_space(folder)?;
    Ok(DiskSpace { folder: folder.to_owned(), total: ByteSize(total), available: ByteSize(available) })
}

/// Whether two folders, which need not exist yet, are on one file system.
#[cfg(unix)]
pub fn on_one_disk(one: &Path, other: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let device = |folder: &Path| {
        let folder = disk_space(folder).ok()?.folder;
        Some(std::fs::metadata(folder).ok()?.dev())
    };
    device(one).is_some_and(|one| device(other) == Some(one))
}

/// Whether two folders, which need not exist yet, are on one file system.
#[cfg(not(unix))]
pub fn on_one_disk(one: &Path, other: &Path) -> bool {
    other.starts_with(one)
}

/// Bytes of the file system, and those that may be written.
#[cfg(unix)]
fn file_system_space(folder: &Path) -> io::Result<(u64, u64)> {
    let found = rustix::fs::statvfs(folder)?;
    let bytes = |blocks: u64| blocks.saturating_mul(found.f_frsize);
    Ok((bytes(found.f_blocks), bytes(found.f_bavail)))
}

#[cfg(not(unix))]
fn file_system_space(_: &Path) -> io::Result<(u64, u64)> {
    Err(io::Error::new(io::ErrorKind::Unsupported, "disk space cannot be asked for on this system"))
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    #[test]
    fn space_is_that_of_the_nearest_folder_that_exists() {
        let root = tempfile::tempdir().unwrap();
        let space = disk_space(&root.path().join("runs/7")).unwrap();
        assert_eq!(space.folder, root.path());
        assert!(space.available <= space.total && space.total.0 > 0);
        assert_eq!(disk_space(Path::new("no-such-folder/run")).unwrap().folder, Path::new("."));
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn folders_are_on_one_disk_or_on_two() {
        let root = tempfile::tempdir().unwrap();
        assert!(on_one_disk(root.path(), root.path()));
        assert!(on_one_disk(&root.path().join("not/yet"), &root.path().join("neither")));
        assert!(!on_one_disk(root.path(), Path::new("/proc")));
        assert!(!on_one_disk(Path::new("/proc/no/such/folder"), root.path()));
    }
}
