//! Requests to the hub: the listing of a repository, what is known of a file, its bytes from some place on.
//!
//! URLs are `hf-hub`'s. Redirections are followed here, since the hub tells a file's content, size and commit on the
//! way to where the bytes are, and since the token must not go to anybody else.

use std::time::Duration;

use hf_hub::api::sync::{ApiBuilder, ApiRepo};
use hf_hub::{Cache, Repo, RepoType};
use ureq::http::{HeaderMap, StatusCode, Uri};
use ureq::{Agent, Body};

use crate::error::HubError;
use crate::id::HubId;
use crate::listing::{Listed, Listing, is_plain_name};
use crate::settings::{HubSettings, Login, without_logins};

/// Redirections on the way to a file; the hub needs one or two.
const MAX_REDIRECTS: usize = 8;

/// Room for the listing of a repository with a hundred thousand files.
const MAX_LISTING: u64 = 32 << 20;

/// The longest pause that a server may ask for.
const MAX_RETRY_AFTER: Duration = Duration::from_secs(60);

/// A request that failed.
#[derive(Debug)]
pub(crate) enum Attempt {
    /// It may do so when made again.
    Transient {
        /// What happened.
        reason: String,
        /// When the server wants to be asked again.
        pause: Option<Duration>,
    },
    /// Nobody answers.
    NoConnection {
        /// What happened.
        reason: String,
    },
    /// It never will.
    Fatal(HubError),
}

impl From<HubError> for Attempt {
    fn from(error: HubError) -> Attempt {
        Attempt::Fatal(error)
    }
}

/// A file on the hub.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RemoteFile {
    /// Its name in the repository.
    pub name: String,
    /// Its bytes.
    pub size: u64,
    /// The name of its blob; for large files its SHA-256.
    pub etag: String,
    /// The commit that it belongs to, where the hub says so.
    pub commit: Option<String>,
}

/// The final answer and what was said on the way to it.
struct Reply {
    url: String,
    status: StatusCode,
    headers: HeaderMap,
    body: Body,
    commit: Option<String>,
    linked_etag: Option<String>,
    linked_size: Option<u64>,
}

/// Bytes of a file from some place on.
pub(crate) struct Bytes {
    /// The bytes.
    pub body: Body,
    /// Whether the bytes begin at the offset that was asked for; else they begin at the file's start.
    pub resumed: bool,
}

/// The hub, asked for one repository.
pub(crate) struct Remote {
    id: HubId,
    api: ApiRepo,
    agent: Agent,
    authorization: Option<String>,
    had_token: bool,
    endpoint: Uri,
    patience: Duration,
}

impl Remote {
    pub(crate) fn new(settings: &HubSettings, id: &HubId) -> Result<Remote, HubError> {
        let wrong = |reason: String| HubError::Setting { key: "HF_ENDPOINT", reason };
        let endpoint: Uri = settings.endpoint.parse().map_err(|e| wrong(format!("is no address: {e}")))?;
        let api = ApiBuilder::from_cache(Cache::new(settings.cache.clone()))
            .with_endpoint(settings.endpoint.clone())
            .with_token(settings.token.as_ref().map(|token| token.secret().to_owned()))
            .with_user_agent("plimsoll", env!("CARGO_PKG_VERSION"))
            .with_progress(false)
            .build()
            .map_err(|e| wrong(format!("cannot be used: {e}")))?
            .repo(Repo::with_revision(id.repo().to_owned(), RepoType::Model, id.revision().to_owned()));
        let agent = Agent::config_builder()
            .max_redirects(0)
            .http_status_as_error(false)
            .timeout_connect(Some(settings.patience))
            .timeout_per_read(Some(settings.patience))
            .timeout_per_write(Some(settings.patience))
            .user_agent(concat!("plimsoll/", env!("CARGO_PKG_VERSION")))
            // A compressed answer would have another length than the file.
            .accept_encoding("identity")
            .build()
            .into();
        Ok(Remote {
            id: id.clone(),
            api,
            agent,
            // There is one such header: a token goes before a login.
            authorization: match (&settings.token, &settings.login) {
                (Some(token), _) => Some(format!("Bearer {}", token.secret())),
                (None, login) => login.as_ref().map(Login::authorization),
            },
            had_token: settings.token.is_some(),
            endpoint,
            patience: settings.patience,
        })
    }

    /// Where a file is asked for.
    pub(crate) fn url(&self, file: &str) -> String {
        self.api.url(&percent_encoded(file))
    }

    /// Where the listing is asked for.
    pub(crate) fn listing_url(&self) -> String {
        format!("{}/api/models/{}", self.endpoint.to_string().trim_end_matches('/'), self.id.repo())
    }

    /// The files of the repository; `None` where the server knows files but no listings, as a plain mirror does.
    pub(crate) fn listing(&self) -> Result<Option<Listing>, Attempt> {
        let url = self.listing_url();
        let mut request = self.api.info_request().query("blobs", "true");
        // The token is sent by hf-hub.
        if let Some(secret) = self.authorization.as_ref().filter(|_| !self.had_token) {
            request = request.header("Authorization", secret);
        }
        let mut response = request
            .config()
            .http_status_as_error(false)
            .timeout_connect(Some(self.patience))
            .timeout_per_read(Some(self.patience))
            .build()
            .call()
            .map_err(|e| self.failed(&url, e))?;
        let (status, headers) = (response.status(), response.headers());
        if matches!(status.as_u16(), 404 | 405 | 501) && header(headers, "x-error-code").is_none() {
            return Ok(None);
        }
        if !status.is_success() {
            return Err(self.refused(&url, status, headers, None));
        }
        let body = response.body_mut().with_config().limit(MAX_LISTING).read_to_vec();
        let body = body.map_err(|e| match e {
            ureq::Error::BodyExceedsLimit(limit) => {
                self.answer(&url, format!("longer than {limit} bytes")).into()
            }
            other => self.failed(&url, other),
        })?;
        Ok(Some(Listing::parse(&body).map_err(|reason| self.answer(&url, reason))?))
    }

    /// What the hub says of a file; `listed` is what its listing said. `None` where there is no such file.
    pub(crate) fn describe(&self, file: &str, listed: &Listed) -> Result<Option<RemoteFile>, Attempt> {
        let reply = self.get(file, Some("bytes=0-0".to_owned()))?;
        let Reply { url, status, headers, .. } = &reply;
        let size = match status.as_u16() {
            206 => match content_range(headers) {
                Some((_, Some(total))) => total,
                _ => return Err(self.answer(url, "it has no size in Content-Range".to_owned()).into()),
            },
            // Nothing can be asked for of an empty file.
            416 => match content_range(headers) {
                Some((None, Some(0))) => 0,
                _ => return Err(self.answer(url, "it has no first byte".to_owned()).into()),
            },
            200 => match header(headers, "content-length").and_then(|text| text.parse().ok()) {
                Some(length) => length,
                None => return Err(self.answer(url, "it has no Content-Length".to_owned()).into()),
            },
            404 if header(headers, "x-error-code").is_none_or(|code| code == "EntryNotFound") => {
                return Ok(None);
            }
            _ => return Err(self.refused(url, *status, headers, Some(file))),
        };
        for (said, from) in [(listed.size, "the hub's listing"), (reply.linked_size, "X-Linked-Size")] {
            if let Some(said) = said.filter(|said| *said != size) {
                return Err(self
                    .sizes(file, (said, from), (size.to_string(), "the server of the bytes"))
                    .into());
            }
        }
        let etag = reply.linked_etag.clone().or_else(|| header(headers, "etag").map(unquoted));
        let Some(etag) = etag.or_else(|| listed.etag.clone()) else {
            return Err(self.answer(url, "it has no ETag".to_owned()).into());
        };
        if !is_plain_name(&etag) {
            return Err(self.answer(url, format!("ETag {etag:?} is no name of a content")).into());
        }
        if let Some(commit) = reply.commit.as_deref().filter(|commit| !is_plain_name(commit)) {
            return Err(self.answer(url, format!("{commit:?} is no commit")).into());
        }
        Ok(Some(RemoteFile { name: file.to_owned(), size, etag, commit: reply.commit }))
    }

    /// The bytes of a file from `start` on, or from the file's beginning where the server knows no ranges.
    pub(crate) fn bytes(&self, file: &RemoteFile, start: u64) -> Result<Bytes, Attempt> {
        let Reply { url, status, headers, body, .. } =
            self.get(&file.name, (start > 0).then(|| format!("bytes={start}-")))?;
        let (says, from) = match status.as_u16() {
            206 => match content_range(&headers) {
                Some((Some(first), total)) if first == start => (total, "Content-Range"),
                _ => return Err(self.answer(&url, format!("it does not begin at byte {start}")).into()),
            },
            200 => (header(&headers, "content-length").and_then(|text| text.parse().ok()), "Content-Length"),
            _ => return Err(self.refused(&url, status, &headers, Some(&file.name))),
        };
        if let Some(says) = says.filter(|says| *says != file.size) {
            let first = (file.size, "what the hub said of the file");
            return Err(self.sizes(&file.name, first, (says.to_string(), from)).into());
        }
        Ok(Bytes { body, resumed: status == StatusCode::PARTIAL_CONTENT })
    }

    pub(crate) fn sizes(
        &self,
        file: &str,
        (first, first_from): (u64, &'static str),
        (second, second_from): (String, &'static str),
    ) -> HubError {
        HubError::Sizes {
            id: self.id.to_string(),
            file: file.to_owned(),
            first,
            first_from,
            second,
            second_from,
        }
    }

    /// Asks for a file, from one server to the next.
    fn get(&self, file: &str, range: Option<String>) -> Result<Reply, Attempt> {
        let mut url = self.url(file);
        let (mut commit, mut linked_etag, mut linked_size) = (None, None, None);
        for _ in 0..=MAX_REDIRECTS {
            let here: Uri = url.parse().map_err(|e| self.answer(&url, format!("no address: {e}")))?;
            let mut request = self.agent.get(&url);
            if let Some(range) = &range {
                request = request.header("Range", range);
            }
            if let Some(secret) = self.authorization.as_ref().filter(|_| self.is_hub(&here)) {
                request = request.header("Authorization", secret);
            }
            let (parts, body) = request.call().map_err(|e| self.failed(&url, e))?.into_parts();
            let (status, headers) = (parts.status, parts.headers);
            // Only the hub's own word counts, and its first one.
            if self.is_hub(&here) {
                commit = commit.or_else(|| header(&headers, "x-repo-commit").map(str::to_owned));
                linked_etag = linked_etag.or_else(|| header(&headers, "x-linked-etag").map(unquoted));
                linked_size = linked_size
                    .or_else(|| header(&headers, "x-linked-size").and_then(|text| text.parse().ok()));
            }
            if !matches!(status.as_u16(), 301 | 302 | 303 | 307 | 308) {
                return Ok(Reply { url, status, headers, body, commit, linked_etag, linked_size });
            }
            let next = header(&headers, "location").and_then(|location| resolved(&here, location));
            let Some(next) = next else {
                return Err(self.answer(&url, format!("{status} without a usable Location")).into());
            };
            if here.scheme_str() == Some("https") && !next.starts_with("https://") {
                return Err(self.answer(&url, format!("it leads from https to {next}")).into());
            }
            url = next;
        }
        Err(self.answer(&url, format!("more than {MAX_REDIRECTS} redirections")).into())
    }

    /// Whether an address is the hub's own, which may see the token.
    fn is_hub(&self, uri: &Uri) -> bool {
        uri.scheme() == self.endpoint.scheme() && uri.authority() == self.endpoint.authority()
    }

    fn answer(&self, url: &str, reason: String) -> HubError {
        HubError::Answer {
            id: self.id.to_string(),
            url: without_logins(url),
            reason: without_logins(&reason),
        }
    }

    /// A request without an answer.
    fn failed(&self, url: &str, error: ureq::Error) -> Attempt {
        use std::io::ErrorKind::{ConnectionRefused, HostUnreachable, NetworkUnreachable, NotConnected};
        let reason = without_logins(&error.to_string());
        match error {
            ureq::Error::HostNotFound | ureq::Error::ConnectionFailed => Attempt::NoConnection { reason },
            ureq::Error::Timeout(ureq::Timeout::Connect | ureq::Timeout::Resolve) => {
                Attempt::NoConnection { reason }
            }
            ureq::Error::Io(e)
                if matches!(
                    e.kind(),
                    ConnectionRefused | HostUnreachable | NetworkUnreachable | NotConnected
                ) =>
            {
                Attempt::NoConnection { reason }
            }
            ureq::Error::Io(_) | ureq::Error::Timeout(_) => Attempt::Transient { reason, pause: None },
            _ => self.answer(url, reason).into(),
        }
    }

    /// An answer that is none.
    fn refused(&self, url: &str, status: StatusCode, headers: &HeaderMap, file: Option<&str>) -> Attempt {
        let message = header(headers, "x-error-message").map(one_line).filter(|text| !text.is_empty());
        let code = header(headers, "x-error-code").unwrap_or_default();
        let (id, url, status) = (self.id.to_string(), without_logins(url), status.as_u16());
        let error = match (status, code) {
            (408 | 425 | 429 | 500..=599, _) => {
                let pause = header(headers, "retry-after").and_then(|text| text.trim().parse().ok());
                let pause = pause.map(|seconds| Duration::from_secs(seconds).min(MAX_RETRY_AFTER));
                return Attempt::Transient { reason: format!("the server answers {status}"), pause };
            }
            (401 | 403, _) => HubError::Access { id, status, url, message, had_token: self.had_token },
            (404, "RevisionNotFound") => {
                HubError::NoSuchRevision { id, revision: self.id.revision().to_owned(), url }
            }
            (404, "EntryNotFound") => {
                HubError::NoSuchFile { id, file: file.unwrap_or_default().to_owned(), others: Vec::new() }
            }
            (404, _) => HubError::NoSuchModel { id, url, message },
            _ => HubError::Status { id, status, url, message },
        };
        Attempt::Fatal(error)
    }
}

fn header<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name).and_then(|value| value.to_str().ok())
}

/// First byte and size of the whole in `bytes 10-99/100` or `bytes */100`.
fn content_range(headers: &HeaderMap) -> Option<(Option<u64>, Option<u64>)> {
    let (range, total) = header(headers, "content-range")?.trim().strip_prefix("bytes ")?.split_once('/')?;
    let first = range.split_once('-').and_then(|(first, _)| first.trim().parse().ok());
    Some((first, total.trim().parse().ok()))
}

/// An ETag without its quotes and its mark of weakness.
fn unquoted(etag: &str) -> String {
    etag.trim().trim_start_matches("W/").trim_matches('"').to_owned()
}

/// What a server says, as it may be shown.
fn one_line(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(200).collect()
}

/// A redirection's target, seen from `base`.
fn resolved(base: &Uri, location: &str) -> Option<String> {
    let (scheme, authority) = (base.scheme_str()?, base.authority()?);
    Some(if location.starts_with("http://") || location.starts_with("https://") {
        location.to_owned()
    } else if location.starts_with("//") {
        format!("{scheme}:{location}")
    } else if location.starts_with('/') {
        format!("{scheme}://{authority}{location}")
    } else if location.is_empty() || location.contains("://") {
        return None;
    } else {
        let folder = base.path().rsplit_once('/').map_or("", |(folder, _)| folder);
        format!("{scheme}://{authority}{folder}/{location}")
    })
}

/// A file's path with what has a meaning in URLs escaped (RFC 3986, 2.3).
fn percent_encoded(path: &str) -> String {
    let mut out = String::with_capacity(path.len());
    for byte in path.bytes() {
        match byte {
            b'/' | b'-' | b'_' | b'.' | b'~' => out.push(byte as char),
            _ if byte.is_ascii_alphanumeric() => out.push(byte as char),
            _ => out.push_str(&format!("%{byte:02X}")),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn redirections_are_seen_from_where_they_are() {
        let base: Uri = "http://hub:80/org/name/resolve/main/x".parse().unwrap();
        let to = |location| resolved(&base, location);
        assert_eq!(to("/cdn?a=b").unwrap(), "http://hub:80/cdn?a=b");
        assert_eq!(to("y").unwrap(), "http://hub:80/org/name/resolve/main/y");
        assert_eq!(to("//other/y").unwrap(), "http://other/y");
        assert_eq!(to("https://other/y").unwrap(), "https://other/y");
        assert_eq!((to("file:///etc/passwd"), to("")), (None, None));
    }

    #[test]
    fn names_are_escaped() {
        assert_eq!(percent_encoded("a b/ü?#.gguf"), "a%20b/%C3%BC%3F%23.gguf");
    }
}
