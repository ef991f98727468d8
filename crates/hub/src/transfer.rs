//! One file from the hub to the disk: begun or continued, tried again where the transfer breaks off, checked, and
//! only then given its name.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::Path;
use std::time::Duration;

use sha2::{Digest, Sha256};

use crate::cache::RepoCache;
use crate::error::HubError;
use crate::id::HubId;
use crate::progress::{FetchEvent, Progress};
use crate::remote::{Attempt, Remote, RemoteFile};
use crate::settings::HubSettings;

/// Bytes between the network and the disk.
const BUFFER: usize = 256 << 10;

/// The longest pause between two attempts.
const MAX_PAUSE: Duration = Duration::from_secs(20);

/// Why a request is not tried again.
pub(crate) enum GaveUp {
    /// The request would fail every time.
    Fatal(HubError),
    /// The request failed too often without any progress in between.
    Exhausted {
        /// How it failed last.
        reason: String,
        /// How often.
        attempts: u32,
    },
}

impl GaveUp {
    /// The error; `exhausted` makes the one of a request that failed too often.
    pub(crate) fn error(self, exhausted: impl FnOnce(String, u32) -> HubError) -> HubError {
        match self {
            GaveUp::Fatal(error) => error,
            GaveUp::Exhausted { reason, attempts } => exhausted(reason, attempts),
        }
    }
}

/// Tries a request again as long as its errors may pass. The request also says whether it made progress before it
/// failed.
pub(crate) fn with_retries<T>(
    settings: &HubSettings,
    name: &str,
    progress: &mut dyn Progress,
    mut request: impl FnMut(&mut dyn Progress) -> (Result<T, Attempt>, bool),
) -> Result<T, GaveUp> {
    let mut attempts = 0;
    loop {
        let (outcome, progressed) = request(progress);
        let (reason, asked) = match outcome {
            Ok(value) => return Ok(value),
            Err(Attempt::Fatal(error)) => return Err(GaveUp::Fatal(error)),
            Err(Attempt::Transient { reason, pause }) => (reason, pause),
            Err(Attempt::NoConnection { reason }) => (reason, None),
        };
        attempts = if progressed { 1 } else { attempts + 1 };
        if attempts > settings.retries {
            return Err(GaveUp::Exhausted { reason, attempts });
        }
        let doubled = settings.retry_pause.saturating_mul(1 << (attempts - 1).min(16)).min(MAX_PAUSE);
        let pause = asked.unwrap_or(doubled);
        progress.event(FetchEvent::Retrying { name, reason: &reason, pause });
        std::thread::sleep(pause);
    }
}

/// Fetches a file's content into the cache, unless it is there.
pub(crate) fn fetch_content(
    settings: &HubSettings,
    id: &HubId,
    remote: &Remote,
    cache: &RepoCache,
    file: &RemoteFile,
    progress: &mut dyn Progress,
) -> Result<(), HubError> {
    cache.make_blobs()?;
    let _lock = cache.lock(&file.etag, || progress.event(FetchEvent::Waiting { name: &file.name }))?;
    if cache.has(file)? {
        progress.event(FetchEvent::Bytes(file.size as i64));
        return Ok(());
    }
    progress.event(FetchEvent::File { name: &file.name });
    let path = cache.incomplete(&file.etag);
    let opened = File::options().create(true).truncate(false).read(true).write(true).open(&path);
    let mut out = opened.map_err(HubError::io("open", &path))?;
    let download = receive(settings, id, remote, file, &mut out, &path, progress);
    let checked = download.and_then(|()| check_content(id, file, &mut out, &path));
    if let Err(error) = checked {
        if matches!(error, HubError::Sizes { .. } | HubError::Content { .. }) {
            std::fs::remove_file(&path).map_err(HubError::io("remove", &path))?;
        }
        return Err(error);
    }
    out.sync_all().map_err(HubError::io("write", &path))?;
    cache.keep(file)
}

/// Fills the file up to its size.
fn receive(
    settings: &HubSettings,
    id: &HubId,
    remote: &Remote,
    file: &RemoteFile,
    out: &mut File,
    path: &Path,
    progress: &mut dyn Progress,
) -> Result<(), HubError> {
    let mut have = out.metadata().map_err(HubError::io("look at", path))?.len();
    if have > file.size {
        out.set_len(0).map_err(HubError::io("shorten", path))?;
        have = 0;
    }
    progress.event(FetchEvent::Bytes(have as i64));
    let mut furthest = have;
    let received = with_retries(settings, &file.name, progress, |progress| {
        let before = furthest;
        let outcome = receive_once(remote, file, out, path, &mut have, progress);
        // A server that begins at the start each time makes no progress until it gets further than ever.
        furthest = furthest.max(have);
        (outcome, furthest > before)
    });
    received.map_err(|gave_up| {
        let (id, size, file) = (id.to_string(), file.size, file.name.clone());
        gave_up.error(|reason, attempts| HubError::BrokenOff { id, file, reason, attempts, have, size })
    })
}

/// One request, as far as it goes.
fn receive_once(
    remote: &Remote,
    file: &RemoteFile,
    out: &mut File,
    path: &Path,
    have: &mut u64,
    progress: &mut dyn Progress,
) -> Result<(), Attempt> {
    if *have == file.size {
        return Ok(());
    }
    let bytes = remote.bytes(file, *have)?;
    if !bytes.resumed && *have > 0 {
        out.set_len(0).map_err(HubError::io("shorten", path))?;
        progress.event(FetchEvent::Bytes(-(*have as i64)));
        *have = 0;
    }
    out.seek(SeekFrom::Start(*have)).map_err(HubError::io("write", path))?;
    let mut body = bytes.body.into_reader();
    let mut buffer = vec![0; BUFFER];
    loop {
        let n = match body.read(&mut buffer) {
            Ok(n) => n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
            Err(e) => {
                let reason = format!("it broke off after {have} of {} bytes: {e}", file.size);
                return Err(Attempt::Transient { reason, pause: None });
            }
        };
        if n == 0 && *have == file.size {
            return Ok(());
        }
        if n == 0 {
            let reason = format!("it ended after {have} of {} bytes", file.size);
            return Err(Attempt::Transient { reason, pause: None });
        }
        if *have + n as u64 > file.size {
            let first = (file.size, "what the hub said of the file");
            return Err(remote.sizes(&file.name, first, ("more".to_owned(), "what was sent")).into());
        }
        out.write_all(&buffer[..n]).map_err(HubError::io("write", path))?;
        *have += n as u64;
        progress.event(FetchEvent::Bytes(n as i64));
    }
}

/// Large files are named by their SHA-256 on the hub; the others' names say nothing that is checked here.
fn check_content(id: &HubId, file: &RemoteFile, out: &mut File, path: &Path) -> Result<(), HubError> {
    if file.etag.len() != 64 || !file.etag.bytes().all(|b| b.is_ascii_hexdigit()) {
        return Ok(());
    }
    let mut hash = Sha256::new();
    let mut buffer = vec![0; BUFFER];
    out.seek(SeekFrom::Start(0)).map_err(HubError::io("read", path))?;
    loop {
        match out.read(&mut buffer).map_err(HubError::io("read", path))? {
            0 => break,
            n => hash.update(&buffer[..n]),
        }
    }
    let found: String = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
    if found.eq_ignore_ascii_case(&file.etag) {
        return Ok(());
    }
    let (file, expected) = (file.name.clone(), file.etag.clone());
    Err(HubError::Content { id: id.to_string(), file, found, expected })
}
