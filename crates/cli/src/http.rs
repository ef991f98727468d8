//! Answers to a browser or a program on the same machine: HTTP/1.1, GET alone, a connection for each request. Requests may come from
//! anybody: they are small, or refused; they take a bounded time and a bounded number of threads; and no path in them is a file's.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{TrySendError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use subtle::ConstantTimeEq;

/// How long a client may take for its request, and then for the answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// Bytes of a request at most.
const LONGEST_REQUEST: usize = 16 << 10;
/// Threads that answer, and connections that wait for one.
const THREADS: usize = 4;
const WAITING: usize = 32;
/// Bytes that are written between two looks at the clock.
const PIECE: usize = 64 << 10;

/// Who may ask.
#[derive(Clone, Debug)]
pub enum Access {
    /// Whoever reaches the port.
    Anybody,
    /// Whoever reaches the port under a name of this machine alone: pages of other names that lead here are refused.
    Loopback,
    /// Whoever knows the token, as `?token=` or as `Authorization: Bearer`.
    Token(String),
}

/// What was asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// The path as it was written, with nothing decoded.
    pub path: String,
    query: String,
    host: Option<String>,
    bearer: Option<String>,
}

impl Request {
    /// The value of a parameter, as it was written.
    pub fn parameter(&self, name: &str) -> Option<&str> {
        let pairs = self.query.split('&').filter_map(|pair| pair.split_once('='));
        pairs.into_iter().find(|(own, _)| *own == name).map(|(_, value)| value)
    }
}

/// What is answered.
#[derive(Clone, Debug, Default)]
pub struct Answer {
    status: &'static str,
    kind: &'static str,
    policy: Option<String>,
    body: Vec<u8>,
}

impl Answer {
    /// What was asked for, of this type.
    pub fn new(kind: &'static str, body: impl Into<Vec<u8>>) -> Answer {
        Answer { status: "200 OK", kind, policy: None, body: body.into() }
    }

    /// The same with a policy for whoever shows it.
    pub fn with_policy(self, policy: String) -> Answer {
        Answer { policy: Some(policy), ..self }
    }

    /// An error, in words.
    pub fn error(status: &'static str, words: &str) -> Answer {
        let body = format!("{words}\n").into_bytes();
        Answer { status, kind: "text/plain; charset=utf-8", policy: None, body }
    }
}

/// Answers requests at an address until the program ends. Where it listens: port 0 is any that is free.
pub fn serve(
    address: SocketAddr,
    access: Access,
    answer: impl Fn(&Request) -> Answer + Send + Sync + 'static,
) -> io::Result<SocketAddr> {
    let listener = TcpListener::bind(address)?;
    let bound = listener.local_addr()?;
    let (give, take) = sync_channel::<TcpStream>(WAITING);
    let (take, answer) = (Arc::new(Mutex::new(take)), Arc::new(answer));
    for number in 0..THREADS {
        let (take, answer, access) = (Arc::clone(&take), Arc::clone(&answer), access.clone());
        let work = move || {
            loop {
                let next = take.lock().unwrap_or_else(PoisonError::into_inner).recv();
                let Ok(client) = next else { return };
                // A client that goes away gets nothing.
                let _ = respond(client, &access, &*answer);
            }
        };
        std::thread::Builder::new().name(format!("http {number}")).spawn(work)?;
    }
    let accept = move || {
        for client in listener.incoming() {
            match client.map(|client| give.try_send(client)) {
                // Whoever comes when all are busy is turned away, so that nothing piles up.
                Ok(Err(TrySendError::Full(client))) => drop(client),
                Ok(Err(TrySendError::Disconnected(_))) => return,
                Ok(Ok(())) => {}
                // Out of descriptors, for example: there may be some again.
                Err(_) => std::thread::sleep(Duration::from_millis(50)),
            }
        }
    };
    std::thread::Builder::new().name("http".to_owned()).spawn(accept)?;
    Ok(bound)
}

fn respond(mut client: TcpStream, access: &Access, answer: &dyn Fn(&Request) -> Answer) -> io::Result<()> {
    let asked = head_of(&mut client)?.and_then(|head| parsed(&head));
    let answer = match asked {
        Ok(request) => match refusal(&request, access) {
            None => answer(&request),
            Some(refusal) => refusal,
        },
        Err(refusal) => refusal,
    };
    let mut bytes = format!(
        "HTTP/1.1 {}\r\nContent-Type: {}\r\nContent-Length: {}\r\nConnection: close\r\nCache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\nReferrer-Policy: no-referrer\r\n",
        answer.status,
        answer.kind,
        answer.body.len()
    );
    if let Some(policy) = &answer.policy {
        bytes.push_str(&format!("Content-Security-Policy: {policy}\r\n"));
    }
    bytes.push_str("\r\n");
    let mut bytes = bytes.into_bytes();
    bytes.extend(&answer.body);
    let end = Instant::now() + PATIENCE;
    for piece in bytes.chunks(PIECE) {
        client.set_write_timeout(Some(left(end)?))?;
        client.write_all(piece)?;
    }
    client.shutdown(std::net::Shutdown::Write)
}

/// The time until a moment that must not have come yet.
fn left(end: Instant) -> io::Result<Duration> {
    let left = end.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
}

/// A request's head, which may come in pieces, or why there is none.
fn head_of(client: &mut TcpStream) -> io::Result<Result<Vec<u8>, Answer>> {
    let (mut head, mut piece, end) = (Vec::new(), [0; 2048], Instant::now() + PATIENCE);
    loop {
        if let Some(length) = head.windows(4).position(|end| end == b"\r\n\r\n") {
            head.truncate(length);
            return Ok(Ok(head));
        }
        if head.len() > LONGEST_REQUEST {
            return Ok(Err(Answer::error("431 Request Header Fields Too Large", "the request is too long")));
        }
        let Ok(wait) = left(end) else {
            return Ok(Err(Answer::error("408 Request Timeout", "the request is slow")));
        };
        client.set_read_timeout(Some(wait))?;
        match client.read(&mut piece) {
            Ok(0) => return Ok(Err(bad("the request is not whole"))),
            Ok(length) => head.extend(piece.iter().take(length)),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                return Ok(Err(Answer::error("408 Request Timeout", "the request is slow")));
            }
            Err(error) => return Err(error),
        }
    }
}

fn bad(words: &str) -> Answer {
    Answer::error("400 Bad Request", words)
}

/// A request by its head.
fn parsed(head: &[u8]) -> Result<Request, Answer> {
    let text = std::str::from_utf8(head).map_err(|_| bad("the request is no text"))?;
    let mut lines = text.split("\r\n");
    let mut words = lines.next().unwrap_or_default().split(' ');
    let (method, target, version) = (words.next(), words.next(), words.next());
    let (Some(method), Some(target), Some("HTTP/1.1" | "HTTP/1.0"), None) =
        (method, target, version, words.next())
    else {
        return Err(bad("the first line is none of HTTP/1.1"));
    };
    if method != "GET" {
        return Err(Answer::error("405 Method Not Allowed", "GET alone is answered"));
    }
    if !target.starts_with('/') || target.chars().any(char::is_control) {
        return Err(bad("the target is no path"));
    }
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let mut request = Request { path: path.to_owned(), query: query.to_owned(), host: None, bearer: None };
    for line in lines {
        let (name, value) = line.split_once(':').ok_or_else(|| bad("a header has no colon"))?;
        let value = value.trim().to_owned();
        match name.to_ascii_lowercase().as_str() {
            "host" if request.host.is_some() => return Err(bad("there are two hosts")),
            "host" => request.host = Some(value),
            "authorization" => request.bearer = value.strip_prefix("Bearer ").map(str::to_owned),
            _ => {}
        }
    }
    Ok(request)
}

/// Why a request is not answered, if it is not.
fn refusal(request: &Request, access: &Access) -> Option<Answer> {
    match access {
        Access::Anybody => None,
        Access::Loopback => {
            let host = request.host.as_deref().unwrap_or_default();
            (!is_loopback(host)).then(|| {
                Answer::error("421 Misdirected Request", "this is answered under names of this machine alone")
            })
        }
        Access::Token(token) => {
            let said = request.bearer.as_deref().or_else(|| request.parameter("token")).unwrap_or_default();
            let is_right = bool::from(said.as_bytes().ct_eq(token.as_bytes()));
            (!is_right).then(|| Answer::error("401 Unauthorized", "the token is missing or wrong"))
        }
    }
}

/// Whether a host, with or without its port, is this machine by a name that nobody else can give it.
fn is_loopback(host: &str) -> bool {
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split_once(']').map_or("", |(name, _)| name),
        None => host.split_once(':').map_or(host, |(name, _)| name),
    };
    let address = name.parse::<std::net::IpAddr>();
    name.eq_ignore_ascii_case("localhost") || address.is_ok_and(|address| address.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(head: &str, access: &Access) -> &'static str {
        match parsed(head.as_bytes()) {
            Ok(request) => refusal(&request, access).map_or("200 OK", |answer| answer.status),
            Err(answer) => answer.status,
        }
    }

    #[test]
    fn a_request_has_a_path_and_parameters() {
        let request =
            parsed(b"GET /runs?window=30&token=x HTTP/1.1\r\nHost: a\r\nauthorization:  Bearer y").unwrap();
        assert_eq!(request.path, "/runs");
        assert_eq!([request.parameter("window"), request.parameter("token")], [Some("30"), Some("x")]);
        assert_eq!((request.parameter("no"), request.bearer.as_deref()), (None, Some("y")));
    }

    #[test]
    fn what_is_no_request_is_refused() {
        for (head, said) in [
            ("", "400"),
            ("GET", "400"),
            ("GET / HTTP/2", "400"),
            ("GET / HTTP/1.1 x", "400"),
            ("GET http://a/ HTTP/1.1", "400"),
            ("GET * HTTP/1.1", "400"),
            ("GET / HTTP/1.1\r\nno colon", "400"),
            ("GET / HTTP/1.1\r\nHost: localhost\r\nHost: a", "400"),
            ("POST / HTTP/1.1", "405"),
            ("get / HTTP/1.1", "405"),
            ("GET / HTTP/1.0", "200"),
        ] {
            assert!(status(head, &Access::Anybody).starts_with(said), "{head:?}");
        }
        assert_eq!(parsed(b"GET /\xff HTTP/1.1").unwrap_err().status, "400 Bad Request");
    }

    #[test]
    fn other_names_of_this_machine_are_refused_on_the_loopback() {
        let asked = |host: &str| status(&format!("GET / HTTP/1.1\r\nHost: {host}"), &Access::Loopback);
        for host in ["localhost", "LOCALHOST:80", "127.0.0.1:9", "127.1.2.3", "[::1]:80", "[::1]"] {
            assert_eq!(asked(host), "200 OK", "{host}");
        }
        for host in [
            "",
            "evil.example",
            "localhost.evil.example",
            "127.0.0.1.evil.example:80",
            "10.0.0.1",
            "[::1",
            "[::2]",
        ] {
            assert!(asked(host).starts_with("421"), "{host}");
        }
        assert!(status("GET / HTTP/1.1", &Access::Loopback).starts_with("421"));
    }

    #[test]
    fn a_token_opens_what_it_is_for() {
        let access = Access::Token("secret".to_owned());
        for head in ["GET /?token=secret HTTP/1.1", "GET / HTTP/1.1\r\nAuthorization: Bearer secret"] {
            assert_eq!(status(head, &access), "200 OK");
        }
        for head in [
            "GET / HTTP/1.1",
            "GET /?token= HTTP/1.1",
            "GET /?token=secre HTTP/1.1",
            "GET /?token=secrets HTTP/1.1",
            "GET /?token=secret HTTP/1.1\r\nAuthorization: Bearer other",
            "GET / HTTP/1.1\r\nAuthorization: secret",
        ] {
            assert!(status(head, &access).starts_with("401"), "{head}");
        }
    }
}
