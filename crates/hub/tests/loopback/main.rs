//! Fetching from a hub on loopback that also breaks off, lies and refuses.

mod refused;
mod server;
mod transfers;
mod whole;

use std::path::{Path, PathBuf};
use std::time::Duration;

use plimsoll_hub::{FetchEvent, Hub, HubError, HubSettings, Progress};
use server::Server;
use tempfile::TempDir;

/// A server and an empty cache.
struct Setup {
    server: Server,
    cache: TempDir,
    settings: HubSettings,
}

impl Setup {
    fn new() -> Setup {
        let (server, cache) = (Server::start(), TempDir::new().unwrap());
        let mut settings = HubSettings::new(cache.path().join("hub"));
        settings.endpoint = server.address.clone();
        settings.retry_pause = Duration::from_millis(1);
        settings.patience = Duration::from_secs(5);
        Setup { server, cache, settings }
    }

    /// With a small model.
    fn with_model() -> Setup {
        let setup = Setup::new();
        setup.server.file("config.json", b"{}");
        setup.server.file("tokenizer.json", b"tokens");
        setup.server.file("README.md", b"nobody needs this");
        setup.server.file("pytorch_model.bin", b"nor this");
        setup.server.file("model.safetensors", &weights(100_000));
        setup
    }

    fn fetch(&self, id: &str) -> Result<PathBuf, HubError> {
        self.fetch_with(id, &mut ())
    }

    fn fetch_with(&self, id: &str, progress: &mut dyn Progress) -> Result<PathBuf, HubError> {
        Hub::new(self.settings.clone(), plenty).fetch(&id.parse().unwrap(), progress)
    }

    fn blobs(&self) -> Vec<String> {
        names(&self.settings.cache.join("models--org--name/blobs"))
    }
}

fn plenty(_: &Path) -> std::io::Result<u64> {
    Ok(1 << 40)
}

/// Bytes that differ from place to place.
fn weights(n: usize) -> Vec<u8> {
    (0..n).map(|i| (i * i / 7 + i) as u8).collect()
}

fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).map(|entries| entries.flatten().collect::<Vec<_>>());
    let mut names: Vec<String> =
        entries.unwrap_or_default().iter().map(|e| e.file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Keeps what was told.
#[derive(Default)]
struct Told {
    bytes: i64,
    total: u64,
    retries: usize,
    unreachable: bool,
    waited: bool,
}

impl Progress for Told {
    fn event(&mut self, event: FetchEvent<'_>) {
        match event {
            FetchEvent::Started { bytes, .. } => self.total += bytes,
            FetchEvent::Bytes(n) => self.bytes += n,
            FetchEvent::Retrying { .. } => self.retries += 1,
            FetchEvent::Unreachable { .. } => self.unreachable = true,
            FetchEvent::Waiting { .. } => self.waited = true,
            FetchEvent::File { .. } | FetchEvent::Done => {}
        }
    }
}
