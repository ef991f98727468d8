//! From a model's id to its folder in the cache: which files it consists of, which of them are there, and fetching
//! the others.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use crate::cache::RepoCache;
use crate::error::HubError;
use crate::id::HubId;
use crate::listing::{Listed, Listing};
use crate::progress::{FetchEvent, Progress};
use crate::remote::{Attempt, Remote, RemoteFile};
use crate::settings::HubSettings;
use crate::transfer::{GaveUp, fetch_content, with_retries};
use crate::wanted::{self, COMPANIONS, INDEX, TEMPLATES, WEIGHTS, Weights};

/// Free bytes beyond the files that must remain.
const SPARE_BYTES: u64 = 16 << 20;

/// The hub and its cache.
pub struct Hub {
    settings: HubSettings,
    free_space: fn(&Path) -> io::Result<u64>,
}

/// One fetch.
struct Fetch<'a> {
    hub: &'a Hub,
    id: &'a HubId,
    remote: Remote,
    cache: RepoCache,
    /// What the hub lists; `None` on a server without listings.
    listing: Option<Listing>,
    commit: Option<String>,
}

impl Hub {
    /// A hub; `free_space` says how many bytes may be written to the disk of a folder, which need not exist yet.
    pub fn new(settings: HubSettings, free_space: fn(&Path) -> io::Result<u64>) -> Hub {
        Hub { settings, free_space }
    }

    /// The model's folder, or its GGUF file, in the cache; what is missing of it is fetched first.
    ///
    /// Where the hub cannot be reached, a model that is there as a whole is taken as it is. Files of the returned
    /// folder are whole: nothing gets its name before its size, and its SHA-256 where the hub has one, are checked.
    pub fn fetch(&self, id: &HubId, progress: &mut dyn Progress) -> Result<PathBuf, HubError> {
        let cache = RepoCache::new(&self.settings.cache, id);
        if self.settings.offline {
            return self.cached(id, &cache).map_err(|missing| HubError::NotCached {
                id: id.to_string(),
                cache: self.settings.cache.clone(),
                missing,
            });
        }
        let remote = Remote::new(&self.settings, id)?;
        let listing = match self.listing(&remote, progress) {
            Ok(listing) => listing,
            Err(Attempt::Fatal(error)) => return Err(error),
            Err(Attempt::Transient { reason, .. } | Attempt::NoConnection { reason }) => {
                let unreachable = |missing| HubError::Unreachable {
                    id: id.to_string(),
                    url: remote.listing_url(),
                    reason: reason.clone(),
                    cache: self.settings.cache.clone(),
                    missing,
                };
                let path = self.cached(id, &cache).map_err(unreachable)?;
                progress.event(FetchEvent::Unreachable { reason: &reason, snapshot: &path });
                return Ok(path);
            }
        };
        let commit = listing.as_ref().map(|listing| listing.commit.clone());
        Fetch { hub: self, id, remote, cache, listing, commit }.run(progress)
    }

    /// The listing, asked for again where the server fails, but not where there is none.
    fn listing(&self, remote: &Remote, progress: &mut dyn Progress) -> Result<Option<Listing>, Attempt> {
        let listing =
            with_retries(&self.settings, "the list of files", progress, |_| match remote.listing() {
                Err(failed @ Attempt::NoConnection { .. }) => (Ok(Err(failed)), false),
                other => (other.map(Ok), false),
            });
        match listing {
            Ok(outcome) => outcome,
            Err(GaveUp::Fatal(error)) => Err(error.into()),
            Err(GaveUp::Exhausted { reason, .. }) => Err(Attempt::NoConnection { reason }),
        }
    }

    /// The model as the cache has it, or what it lacks.
    fn cached(&self, id: &HubId, cache: &RepoCache) -> Result<PathBuf, Vec<String>> {
        let Some(commit) = cache.commit() else {
            return Err(vec![format!("revision {} of {}", id.revision(), id.repo())]);
        };
        let snapshot = cache.snapshot(&commit);
        let only = id.file().map(str::to_owned).or_else(|| only_gguf(&snapshot));
        let missing = wanted::missing(&snapshot, only.as_deref());
        if !missing.is_empty() {
            return Err(missing);
        }
        Ok(only.map_or(snapshot.clone(), |file| snapshot.join(file)))
    }
}

impl Fetch<'_> {
    fn run(mut self, progress: &mut dyn Progress) -> Result<PathBuf, HubError> {
        let weights = match self.id.file() {
            Some(file) => Weights::Gguf(self.named_file(file)?),
            None => self.weights(progress)?,
        };
        let last = match &weights {
            Weights::Gguf(file) => {
                self.get_all(&[file.as_str()], progress)?;
                Some(file.clone())
            }
            Weights::File(file) => {
                self.get_companions(progress)?;
                self.get_all(&[file], progress)?;
                None
            }
            Weights::Sharded => {
                self.get_companions(progress)?;
                self.get_all(&[INDEX], progress)?;
                let index = self.snapshot()?.join(INDEX);
                let shards = wanted::shards(&index).map_err(|reason| HubError::Answer {
                    id: self.id.to_string(),
                    url: self.remote.url(INDEX),
                    reason,
                })?;
                self.get_all(&shards.iter().map(String::as_str).collect::<Vec<_>>(), progress)?;
                None
            }
        };
        let snapshot = self.snapshot()?;
        if let Some(commit) = &self.commit {
            self.cache.set_commit(commit)?;
        }
        Ok(last.map_or(snapshot.clone(), |file| snapshot.join(file)))
    }

    /// The folder of the commit's files.
    fn snapshot(&self) -> Result<PathBuf, HubError> {
        match &self.commit {
            Some(commit) => Ok(self.cache.snapshot(commit)),
            None => Err(HubError::Answer {
                id: self.id.to_string(),
                url: self.remote.listing_url(),
                reason: "no answer names a commit (X-Repo-Commit)".to_owned(),
            }),
        }
    }

    /// The file that was asked for, if the repository has it.
    fn named_file(&self, file: &str) -> Result<String, HubError> {
        match &self.listing {
            Some(listing) if !listing.files.contains_key(file) => Err(self.no_such_file(file)),
            _ => Ok(file.to_owned()),
        }
    }

    fn no_such_file(&self, file: &str) -> HubError {
        let extension = file.rsplit_once('.').map_or("", |(_, extension)| extension);
        let names = self.listing.iter().flat_map(|listing| listing.files.keys());
        let mut others: Vec<String> = names.filter(|name| name.ends_with(extension)).cloned().collect();
        others.sort_by_key(|name| !name.eq_ignore_ascii_case(file));
        HubError::NoSuchFile { id: self.id.to_string(), file: file.to_owned(), others }
    }

    /// What the model's weights are in.
    fn weights(&mut self, progress: &mut dyn Progress) -> Result<Weights, HubError> {
        for (name, weights) in WEIGHTS {
            let there = match &self.listing {
                Some(listing) => listing.files.contains_key(name),
                None => self.describe(name, progress)?.is_some(),
            };
            if there {
                return Ok(weights);
            }
        }
        let id = self.id.to_string();
        let Some(listing) = &self.listing else {
            let (url, message) = (self.remote.url(wanted::SINGLE), None);
            return Err(HubError::NoSuchModel { id, url, message });
        };
        let with = |extension| listing.files.keys().filter(move |name| name.ends_with(extension)).cloned();
        let files: Vec<String> = with(".gguf").collect();
        match files.as_slice() {
            [] => {
                let pickles = [".bin", ".pt", ".pth", ".ckpt"].into_iter().any(|e| with(e).next().is_some());
                Err(HubError::NoWeights { id, pickles })
            }
            [only] => Ok(Weights::Gguf(only.clone())),
            _ => Err(HubError::SeveralGguf { id, files }),
        }
    }

    /// Everything beside the weights.
    fn get_companions(&mut self, progress: &mut dyn Progress) -> Result<(), HubError> {
        let mut names: Vec<String> = Vec::new();
        for name in COMPANIONS {
            let there = match &self.listing {
                Some(listing) => listing.files.contains_key(name),
                None => self.describe(name, progress)?.is_some(),
            };
            names.extend(there.then(|| name.to_owned()));
        }
        let listed = self.listing.iter().flat_map(|listing| listing.files.keys());
        names.extend(listed.filter(|name| name.starts_with(TEMPLATES) && name.ends_with(".jinja")).cloned());
        self.get_all(&names.iter().map(String::as_str).collect::<Vec<_>>(), progress)
    }

    /// What the hub says of a file now.
    fn describe(&mut self, name: &str, progress: &mut dyn Progress) -> Result<Option<RemoteFile>, HubError> {
        let listed = self.listing.as_ref().and_then(|listing| listing.files.get(name)).cloned();
        let listed = listed.unwrap_or_default();
        let remote = &self.remote;
        let described =
            with_retries(&self.hub.settings, name, progress, |_| (remote.describe(name, &listed), false));
        let described = described.map_err(|gave_up| {
            let (id, url) = (self.id.to_string(), remote.url(name));
            gave_up.error(|reason, n| HubError::Answer { id, url, reason: format!("{reason}, {n} times") })
        })?;
        if let Some(after) = described.as_ref().and_then(|file| file.commit.clone()) {
            let before = self.commit.get_or_insert_with(|| after.clone());
            if *before != after {
                let (id, before) = (self.id.to_string(), before.clone());
                return Err(HubError::Changed { id, before, after });
            }
        }
        Ok(described)
    }

    /// Fetches those of the files that are not there yet.
    fn get_all(&mut self, names: &[&str], progress: &mut dyn Progress) -> Result<(), HubError> {
        // Files of one content are fetched once.
        let mut contents: BTreeMap<String, RemoteFile> = BTreeMap::new();
        let mut links = Vec::new();
        for &name in names {
            if self.is_there(name) {
                continue;
            }
            let file = self.describe(name, progress)?.ok_or_else(|| self.no_such_file(name))?;
            if !self.cache.has(&file)? {
                contents.insert(file.etag.clone(), file.clone());
            }
            links.push(file);
        }
        let bytes = contents.values().map(|file| file.size).fold(0, u64::saturating_add);
        let already = contents.values().map(|file| self.already(file)).fold(0, u64::saturating_add);
        self.check_space(bytes - already.min(bytes))?;
        if !contents.is_empty() {
            progress.event(FetchEvent::Started { files: contents.len(), bytes, already });
            for file in contents.values() {
                fetch_content(&self.hub.settings, self.id, &self.remote, &self.cache, file, progress)?;
            }
            progress.event(FetchEvent::Done);
        }
        let commit = self.commit.clone();
        for file in &links {
            if let Some(commit) = &commit {
                self.cache.link(commit, file)?;
            }
        }
        Ok(())
    }

    /// Whether a file is in the commit's folder, with the size that the listing says.
    fn is_there(&self, name: &str) -> bool {
        let Some(Listing { commit, files }) = &self.listing else { return false };
        let Some(Listed { size: Some(size), .. }) = files.get(name) else { return false };
        let found = std::fs::metadata(self.cache.snapshot(commit).join(name));
        found.is_ok_and(|found| found.is_file() && found.len() == *size)
    }

    /// Bytes that an earlier fetch left behind.
    fn already(&self, file: &RemoteFile) -> u64 {
        let found = std::fs::metadata(self.cache.incomplete(&file.etag)).map_or(0, |found| found.len());
        if found > file.size { 0 } else { found }
    }

    fn check_space(&self, need: u64) -> Result<(), HubError> {
        let cache = &self.hub.settings.cache;
        // Where the system does not say, writing shows it.
        let Ok(free) = (self.hub.free_space)(cache) else { return Ok(()) };
        if need > 0 && need.saturating_add(SPARE_BYTES) > free {
            return Err(HubError::Space { id: self.id.to_string(), need, cache: cache.clone(), free });
        }
        Ok(())
    }
}

/// The GGUF of a folder that has nothing else.
fn only_gguf(snapshot: &Path) -> Option<String> {
    if snapshot.join("config.json").exists() {
        return None;
    }
    let entries = std::fs::read_dir(snapshot).ok()?.flatten();
    let mut files = entries.filter_map(|e| e.file_name().into_string().ok()).filter(|n| n.ends_with(".gguf"));
    files.next().filter(|_| files.next().is_none())
}
