//! The cache's layout, shared with Python's `huggingface_hub`: `models--org--name/` has `blobs/`, a file for each content;
//! `snapshots/COMMIT/`, links to blobs by the files' names; and `refs/`, the commit of each branch. Locks are in `.locks/`.
//!
//! A blob gets its name once it is whole and checked; before that it is `NAME.incomplete`.

use std::fs::{self, File, TryLockError};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use hf_hub::{Cache, CacheRepo, Repo, RepoType};

use crate::error::HubError;
use crate::id::HubId;
use crate::listing::is_plain_name;
use crate::remote::RemoteFile;

/// One repository in the cache.
pub(crate) struct RepoCache {
    folder: PathBuf,
    locks: PathBuf,
    revision: String,
    layout: CacheRepo,
}

/// A blob that no other process fetches as long as this value lives.
pub(crate) struct Locked {
    _file: File,
}

impl RepoCache {
    pub(crate) fn new(cache: &Path, id: &HubId) -> RepoCache {
        let repo = Repo::with_revision(id.repo().to_owned(), RepoType::Model, id.revision().to_owned());
        let name = repo.folder_name();
        RepoCache {
            folder: cache.join(&name),
            locks: cache.join(".locks").join(&name),
            revision: id.revision().to_owned(),
            layout: Cache::new(cache.to_owned()).repo(repo),
        }
    }

    /// The commit that the revision was when a whole model was last fetched.
    pub(crate) fn commit(&self) -> Option<String> {
        let known = fs::read_to_string(self.reference()).ok().map(|text| text.trim().to_owned());
        // A revision may be a commit itself.
        let known = known.or_else(|| is_plain_name(&self.revision).then(|| self.revision.clone()));
        known.filter(|commit| is_plain_name(commit) && self.snapshot(commit).is_dir())
    }

    /// The folder of a commit's files.
    pub(crate) fn snapshot(&self, commit: &str) -> PathBuf {
        self.layout.pointer_path(commit)
    }

    /// The path of a blob.
    pub(crate) fn blob(&self, etag: &str) -> PathBuf {
        self.layout.blob_path(etag)
    }

    /// The path of a blob that is not whole yet.
    pub(crate) fn incomplete(&self, etag: &str) -> PathBuf {
        self.layout.blob_path(&format!("{etag}.incomplete"))
    }

    fn reference(&self) -> PathBuf {
        self.folder.join("refs").join(&self.revision)
    }

    /// Locks a blob for this process; `wait` is called where another process has it.
    pub(crate) fn lock(&self, etag: &str, wait: impl FnOnce()) -> Result<Locked, HubError> {
        make_folder(&self.locks)?;
        let path = self.locks.join(format!("{etag}.lock"));
        let open = File::options().create(true).truncate(false).write(true).open(&path);
        let file = open.map_err(HubError::io("open", &path))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                wait();
                file.lock().map_err(HubError::io("lock", &path))?;
            }
            Err(TryLockError::Error(e)) => return Err(HubError::io("lock", &path)(e)),
        }
        Ok(Locked { _file: file })
    }

    /// Whether a blob is there with all its bytes; a blob of another size is removed.
    pub(crate) fn has(&self, file: &RemoteFile) -> Result<bool, HubError> {
        let path = self.blob(&file.etag);
        match fs::metadata(&path) {
            Ok(found) if found.len() == file.size => Ok(true),
            Ok(_) => fs::remove_file(&path).map(|()| false).map_err(HubError::io("remove", &path)),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(e) => Err(HubError::io("look at", &path)(e)),
        }
    }

    /// Makes the folder of the blobs.
    pub(crate) fn make_blobs(&self) -> Result<(), HubError> {
        make_folder(&self.folder.join("blobs"))
    }

    /// Gives a whole blob its name.
    pub(crate) fn keep(&self, file: &RemoteFile) -> Result<(), HubError> {
        let (from, to) = (self.incomplete(&file.etag), self.blob(&file.etag));
        fs::rename(&from, &to).map_err(HubError::io("rename a file to", &to))
    }

    /// Links a blob into a commit's folder under the file's name.
    pub(crate) fn link(&self, commit: &str, file: &RemoteFile) -> Result<(), HubError> {
        let path = self.snapshot(commit).join(&file.name);
        if let Some(folder) = path.parent() {
            make_folder(folder)?;
        }
        match fs::remove_file(&path) {
            Ok(()) => {}
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) => return Err(HubError::io("replace", &path)(e)),
        }
        let up = "../".repeat(2 + file.name.matches('/').count());
        let target = PathBuf::from(format!("{up}blobs/{}", file.etag));
        match link_file(&target, &self.blob(&file.etag), &path) {
            // Another process was faster.
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            other => other.map_err(HubError::io("link", &path)),
        }
    }

    /// Remembers which commit the revision is.
    pub(crate) fn set_commit(&self, commit: &str) -> Result<(), HubError> {
        if self.revision == commit {
            return Ok(());
        }
        let path = self.reference();
        let folder = path.parent().unwrap_or(&self.folder);
        make_folder(folder)?;
        let write = || -> io::Result<()> {
            let mut aside = tempfile::NamedTempFile::new_in(folder)?;
            aside.write_all(commit.as_bytes())?;
            aside.persist(&path)?;
            Ok(())
        };
        write().map_err(HubError::io("write", &path))
    }
}

fn make_folder(path: &Path) -> Result<(), HubError> {
    fs::create_dir_all(path).map_err(HubError::io("make the folder", path))
}

#[cfg(unix)]
fn link_file(target: &Path, _: &Path, path: &Path) -> io::Result<()> {
    std::os::unix::fs::symlink(target, path)
}

/// Symbolic links need a privilege on other systems; a hard link, or a copy, serves as well.
#[cfg(not(unix))]
fn link_file(_: &Path, blob: &Path, path: &Path) -> io::Result<()> {
    fs::hard_link(blob, path).or_else(|_| fs::copy(blob, path).map(drop))
}
