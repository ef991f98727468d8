//! What can go wrong between an id and files on disk.

use std::io;
use std::path::PathBuf;

use plimsoll_memory::ByteSize;

/// Why a text is no hub id.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IdError {
    /// Not two parts.
    #[error("a hub id is org/name, org/name@revision or org/name:file.gguf")]
    Form,
    /// A half of it has characters that no id has.
    #[error("{0:?} is no half of a hub id, which has letters, digits, '-', '_' and '.' only")]
    Part(String),
    /// It is the name of a file.
    #[error("no model of the hub has a name that ends in {0}; a file of one is org/name:file{0}")]
    File(&'static str),
    /// The revision cannot be one.
    #[error("{0:?} is no revision: a branch, a tag or a commit")]
    Revision(String),
    /// The file's name leads out of the repository or is none.
    #[error("{0:?} is no file of a repository")]
    FileName(String),
}

/// A model that could not be fetched. Names the model, the file and what to do.
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    /// An environment variable is wrong.
    #[error("{key} {reason}")]
    Setting {
        /// The variable.
        key: &'static str,
        /// What is wrong.
        reason: String,
    },
    /// The hub does not let this user in.
    #[error("{id}: the hub answers {status} at {url}{}; {}", said(.message), access_remedy(*.had_token))]
    Access {
        /// The model.
        id: String,
        /// 401 or 403.
        status: u16,
        /// What was asked for.
        url: String,
        /// What the hub says.
        message: Option<String>,
        /// Whether a token was sent.
        had_token: bool,
    },
    /// There is no such model.
    #[error(
        "{id}: there is no such file or folder here, and the hub has no such model (404 at {url}{}); \
         check the spelling of org/name, or give a folder or file that exists", said(.message)
    )]
    NoSuchModel {
        /// The model.
        id: String,
        /// What was asked for.
        url: String,
        /// What the hub says.
        message: Option<String>,
    },
    /// The model has no such revision.
    #[error(
        "{id}: the model has no revision {revision:?} (404 at {url}); leave it out for main, or look at the branches on the hub"
    )]
    NoSuchRevision {
        /// The model.
        id: String,
        /// The revision.
        revision: String,
        /// What was asked for.
        url: String,
    },
    /// The model has no such file.
    #[error("{id}: the model has no file {file:?}{}", candidates(.others))]
    NoSuchFile {
        /// The model.
        id: String,
        /// The file.
        file: String,
        /// Files of the same kind that it has, the nearest first.
        others: Vec<String>,
    },
    /// Several GGUF files and none is named.
    #[error("{id}: the model is there as several GGUF files; name one of them: {}", files.iter().map(|f| format!("{id}:{f}")).collect::<Vec<_>>().join(", "))]
    SeveralGguf {
        /// The model.
        id: String,
        /// The files.
        files: Vec<String>,
    },
    /// Nothing that can be read.
    #[error("{id}: the repository holds neither safetensors nor GGUF files{}", if *.pickles { "; its weights are in PyTorch's pickle format, which can run code when it is read: take a conversion of it to safetensors" } else { "; it is no language model's" })]
    NoWeights {
        /// The model.
        id: String,
        /// Whether it has weights as pickles.
        pickles: bool,
    },
    /// The cache does not have it and nobody may be asked.
    #[error(
        "{id}: there is no such file or folder here, HF_HUB_OFFLINE is set, and the cache {} lacks {}; fetch it once \
         without HF_HUB_OFFLINE", .cache.display(), .missing.join(", ")
    )]
    NotCached {
        /// The model.
        id: String,
        /// The cache.
        cache: PathBuf,
        /// What it lacks.
        missing: Vec<String>,
    },
    /// The hub cannot be reached, and the cache does not have the model.
    #[error(
        "{id}: there is no such file or folder here, and {url} cannot be reached: {reason}; the cache {} lacks {}. \
         Check the network and HF_ENDPOINT, or give a folder or file", .cache.display(), .missing.join(", ")
    )]
    Unreachable {
        /// The model.
        id: String,
        /// What was asked for.
        url: String,
        /// Why.
        reason: String,
        /// The cache.
        cache: PathBuf,
        /// What it lacks.
        missing: Vec<String>,
    },
    /// A request failed again and again; what has come is kept.
    #[error("{id}: {file}: {reason}, {attempts} times without progress; {} of {} are kept and the next fetch goes on from there", ByteSize(*.have), ByteSize(*.size))]
    BrokenOff {
        /// The model.
        id: String,
        /// The file.
        file: String,
        /// What the last attempt ended with.
        reason: String,
        /// How many there were.
        attempts: u32,
        /// Bytes on disk.
        have: u64,
        /// Bytes of the file.
        size: u64,
    },
    /// A status that says nothing else.
    #[error("{id}: the hub answers {status} at {url}{}", said(.message))]
    Status {
        /// The model.
        id: String,
        /// The status.
        status: u16,
        /// What was asked for.
        url: String,
        /// What the hub says.
        message: Option<String>,
    },
    /// The server says two different sizes, or sends another number of bytes than it says.
    #[error(
        "{id}: {file}: {first} bytes by {first_from}, but {second} by {second_from}; nothing of it is kept. Fetch it again, or from another HF_ENDPOINT"
    )]
    Sizes {
        /// The model.
        id: String,
        /// The file.
        file: String,
        /// One size.
        first: u64,
        /// Who says so.
        first_from: &'static str,
        /// The other.
        second: String,
        /// Who says so.
        second_from: &'static str,
    },
    /// The content is not what its name says.
    #[error(
        "{id}: {file}: its SHA-256 is {found}, but the hub says {expected}; nothing of it is kept. Fetch it again"
    )]
    Content {
        /// The model.
        id: String,
        /// The file.
        file: String,
        /// By the bytes.
        found: String,
        /// By the hub.
        expected: String,
    },
    /// An answer that makes no sense, or that would lead out of the cache.
    #[error("{id}: the answer of {url} is wrong: {reason}; is HF_ENDPOINT a hub?")]
    Answer {
        /// The model.
        id: String,
        /// What was asked for.
        url: String,
        /// What is wrong.
        reason: String,
    },
    /// The model changed between two requests.
    #[error("{id}: the model changed while it was fetched, from commit {before} to {after}; fetch it again")]
    Changed {
        /// The model.
        id: String,
        /// First.
        before: String,
        /// Then.
        after: String,
    },
    /// The disk is too small.
    #[error("{id}: {} more are needed in {}, which has {} free; make room, or set HF_HOME to a folder on another disk", ByteSize(*.need), .cache.display(), ByteSize(*.free))]
    Space {
        /// The model.
        id: String,
        /// Bytes to come.
        need: u64,
        /// The cache.
        cache: PathBuf,
        /// Bytes that may be written.
        free: u64,
    },
    /// The system refused.
    #[error("could not {verb} {}: {source}", .path.display())]
    Io {
        /// What was done.
        verb: &'static str,
        /// To what.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
}

impl HubError {
    pub(crate) fn io(verb: &'static str, path: &std::path::Path) -> impl FnOnce(io::Error) -> HubError {
        move |source| HubError::Io { verb, path: path.to_owned(), source }
    }
}

/// What the hub says, on one line and not too long.
fn said(message: &Option<String>) -> String {
    message.as_ref().map_or_else(String::new, |text| format!(": {text}"))
}

fn access_remedy(had_token: bool) -> &'static str {
    if had_token {
        "the token that was sent does not open it: accept the model's terms on its page, or set HF_TOKEN to a token that may read it"
    } else {
        "it is private, gated or does not exist: check the spelling, accept the model's terms on its page, and give a token in HF_TOKEN or with `hf auth login`"
    }
}

fn candidates(others: &[String]) -> String {
    const SHOWN: usize = 8;
    let shown = others.iter().take(SHOWN).map(String::as_str).collect::<Vec<_>>().join(", ");
    match others.len() {
        0 => "; it has none of that kind".to_owned(),
        n if n > SHOWN => format!("; it has {shown} and {} more", n - SHOWN),
        _ => format!("; it has {shown}"),
    }
}
