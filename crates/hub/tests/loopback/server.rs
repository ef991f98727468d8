//! A hub on loopback: answers as the real one does, and misbehaves where it is told to.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// How a file is served.
#[derive(Clone, Debug, Default)]
pub struct Served {
    pub bytes: Vec<u8>,
    /// Its ETag; by default one made from the bytes.
    pub etag: Option<String>,
    /// The size that the listing says.
    pub listed: Option<u64>,
    /// The size that the headers say.
    pub said: Option<u64>,
    /// Connections break off after so many bytes.
    pub breaks_after: Option<usize>,
    /// Whether ranges are answered with the whole.
    pub ignores_ranges: bool,
    /// Sent as it is, with neither length nor ranges, until the connection closes.
    pub unmeasured: bool,
    /// A redirection on the way, to a path or an address, with the hub's word about the file.
    pub redirect: Option<String>,
    /// Statuses to answer before anything else.
    pub statuses: Vec<u16>,
}

/// A request as it came.
#[derive(Clone, Debug)]
pub struct Request {
    pub path: String,
    pub range: Option<String>,
    pub authorization: Option<String>,
}

#[derive(Default)]
pub struct State {
    pub files: HashMap<String, Served>,
    pub requests: Vec<Request>,
    /// The answer to every listing; else it is made from the files.
    pub listing: Option<(u16, String)>,
    /// Statuses to answer to listings first.
    pub listing_statuses: Vec<u16>,
    pub error_code: Option<&'static str>,
    /// Without it every request is answered 401.
    pub token: Option<String>,
    /// The whole header that is wanted.
    pub authorization: Option<String>,
}

pub struct Server {
    pub address: String,
    state: Arc<Mutex<State>>,
}

impl Server {
    pub fn start() -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let state = Arc::new(Mutex::new(State::default()));
        let shared = Arc::clone(&state);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let shared = Arc::clone(&shared);
                // A client that goes away in the middle is part of the tests.
                std::thread::spawn(move || drop(answer(stream, &shared)));
            }
        });
        Server { address, state }
    }

    pub fn file(&self, name: &str, bytes: &[u8]) {
        self.serve(name, Served { bytes: bytes.to_vec(), ..Served::default() });
    }

    pub fn serve(&self, name: &str, served: Served) {
        self.with(|state| state.files.insert(name.to_owned(), served));
    }

    pub fn with<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        change(&mut self.state.lock().unwrap())
    }

    /// Requests whose path contains a text.
    pub fn requests(&self, part: &str) -> Vec<Request> {
        self.with(|state| state.requests.iter().filter(|r| r.path.contains(part)).cloned().collect())
    }
}

/// A name for bytes: what they are, so that equal files share it.
pub fn etag_of(bytes: &[u8]) -> String {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for byte in bytes {
        hash = (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
    }
    format!("{hash:016x}{:08x}", bytes.len())
}

fn answer(stream: TcpStream, state: &Mutex<State>) -> std::io::Result<()> {
    let mut lines = BufReader::new(stream.try_clone()?).lines();
    let first = lines.next().unwrap_or(Ok(String::new()))?;
    let path = first.split(' ').nth(1).unwrap_or_default().to_owned();
    let mut headers = HashMap::new();
    for line in lines {
        let line = line?;
        let Some((name, value)) = line.split_once(':') else { break };
        headers.insert(name.to_ascii_lowercase(), value.trim().to_owned());
    }
    let range = headers.get("range").cloned();
    let authorization = headers.get("authorization").cloned();
    let mut stream = stream;
    let mut state = state.lock().unwrap();
    state.requests.push(Request {
        path: path.clone(),
        range: range.clone(),
        authorization: authorization.clone(),
    });
    let wanted = state.token.as_ref().map(|token| format!("Bearer {token}")).or(state.authorization.clone());
    if wanted.is_some() && authorization != wanted {
        return send(
            &mut stream,
            401,
            "X-Error-Message: Access is restricted.\r\nX-Error-Code: GatedRepo\r\n",
            b"",
        );
    }
    if path.starts_with("/api/models/") {
        if !state.listing_statuses.is_empty() {
            let status = state.listing_statuses.remove(0);
            return send(&mut stream, status, "", b"");
        }
        let code = state.error_code.map_or(String::new(), |code| format!("X-Error-Code: {code}\r\n"));
        let (status, body) = state.listing.clone().unwrap_or_else(|| (200, listing(&state.files)));
        return send(&mut stream, status, &code, body.as_bytes());
    }
    let name = match path.split_once("/resolve/") {
        Some((_, rest)) => rest.split_once('/').map_or("", |(_, name)| name).to_owned(),
        None => path.trim_start_matches("/cdn/").to_owned(),
    }
    .replace("%20", " ");
    let Some(served) = state.files.get_mut(&name) else {
        return send(&mut stream, 404, "X-Error-Code: EntryNotFound\r\n", b"");
    };
    if !served.statuses.is_empty() {
        let status = served.statuses.remove(0);
        return send(&mut stream, status, "", b"busy");
    }
    let served = served.clone();
    drop(state);
    file(&mut stream, &served, &path, range.as_deref())
}

fn listing(files: &HashMap<String, Served>) -> String {
    let siblings: Vec<String> = files
        .iter()
        .map(|(name, served)| {
            let size = served.listed.unwrap_or(served.bytes.len() as u64);
            format!(r#"{{"rfilename":"{name}","size":{size}}}"#)
        })
        .collect();
    format!(r#"{{"sha":"{COMMIT}","siblings":[{}]}}"#, siblings.join(","))
}

fn file(stream: &mut TcpStream, served: &Served, path: &str, range: Option<&str>) -> std::io::Result<()> {
    let total = served.said.unwrap_or(served.bytes.len() as u64);
    let etag = served.etag.clone().unwrap_or_else(|| etag_of(&served.bytes));
    if let Some(to) = served.redirect.as_ref().filter(|_| path.contains("/resolve/")) {
        let headers = format!(
            "Location: {to}\r\nX-Linked-Etag: \"{etag}\"\r\nX-Linked-Size: {total}\r\nX-Repo-Commit: {COMMIT}\r\n"
        );
        return send(stream, 302, &headers, b"");
    }
    let etag = if served.redirect.is_some() { "another".to_owned() } else { etag };
    let commit =
        if served.redirect.is_some() { String::new() } else { format!("X-Repo-Commit: {COMMIT}\r\n") };
    let (from, to) = match range.and_then(|range| range.strip_prefix("bytes=")?.split_once('-')) {
        Some((from, to)) => (from.parse().unwrap_or(0), to.parse().unwrap_or(usize::MAX)),
        None => (0, usize::MAX),
    };
    let describes = to == 0;
    if served.unmeasured && !describes {
        write!(stream, "HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")?;
        return stream.write_all(&served.bytes);
    }
    let ranged = range.is_some() && (describes || !served.ignores_ranges);
    if ranged && from as u64 >= total {
        return send(
            stream,
            416,
            &format!("Content-Range: bytes */{total}\r\n{commit}ETag: \"{etag}\"\r\n"),
            b"",
        );
    }
    let begin = if ranged { from.min(served.bytes.len()) } else { 0 };
    let end =
        if ranged { to.saturating_add(1).min(served.bytes.len()).max(begin) } else { served.bytes.len() };
    let body = &served.bytes[begin..end];
    let length = if describes { 1 } else { total - begin as u64 };
    let status = if ranged {
        let last = begin as u64 + length - 1;
        format!("206 Partial Content\r\nContent-Range: bytes {begin}-{last}/{total}")
    } else {
        "200 OK".to_owned()
    };
    write!(
        stream,
        "HTTP/1.1 {status}\r\nETag: \"{etag}\"\r\n{commit}Content-Length: {length}\r\nConnection: close\r\n\r\n"
    )?;
    let most = if describes { 1 } else { served.breaks_after.unwrap_or(usize::MAX) };
    stream.write_all(&body[..body.len().min(most)])
}

fn send(stream: &mut TcpStream, status: u16, headers: &str, body: &[u8]) -> std::io::Result<()> {
    write!(
        stream,
        "HTTP/1.1 {status} X\r\n{headers}Content-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    )?;
    stream.write_all(body)
}
