//! The last sample as Prometheus reads it: its text format 0.0.4 over HTTP, one request at a time.

use std::fmt::Write as _;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use plimsoll_monitor::{Judgement, Sample};

use crate::failure::Failure;

/// How long a client may take for a piece of its request.
const PATIENCE: Duration = Duration::from_secs(1);

/// Bytes of a request at most.
const LONGEST_REQUEST: usize = 16 << 10;

/// What is served.
#[derive(Clone, Default)]
pub struct Page(Arc<Mutex<String>>);

impl Page {
    /// Serves a page from a thread of its own until the program ends; where it listens.
    pub fn serve(&self, address: SocketAddr) -> Result<SocketAddr, Failure> {
        let refused = |error: std::io::Error| {
            Failure::other(format!("--prometheus {address}: {error}; name a port that is free"))
        };
        let listener = TcpListener::bind(address).map_err(refused)?;
        let bound = listener.local_addr().map_err(refused)?;
        let page = self.clone();
        let serve = move || {
            for client in listener.incoming().flatten() {
                // A client that goes away gets nothing.
                let _ = page.answer(client);
            }
        };
        std::thread::Builder::new().name("prometheus".to_owned()).spawn(serve).map_err(refused)?;
        Ok(bound)
    }

    /// Replaces what is served.
    pub fn show(&self, sample: &Sample, judged: &Judgement) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = metrics(sample, judged);
    }

    fn answer(&self, mut client: TcpStream) -> std::io::Result<()> {
        client.set_read_timeout(Some(PATIENCE))?;
        client.set_write_timeout(Some(PATIENCE))?;
        let request = request_of(&mut client)?;
        let is_ours = [&b"GET /metrics "[..], b"GET / "].iter().any(|own| request.starts_with(own));
        let (status, body) = match is_ours {
            true => ("200 OK", self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()),
            false => ("404 Not Found", "GET /metrics\n".to_owned()),
        };
        write!(
            client,
            "HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
            body.len()
        )
    }
}

/// A request with its headers, which may come in pieces, up to a limit.
fn request_of(client: &mut impl Read) -> std::io::Result<Vec<u8>> {
    let (mut request, mut piece) = (Vec::new(), [0; 1024]);
    while !request.windows(4).any(|end| end == b"\r\n\r\n") && request.len() < LONGEST_REQUEST {
        match client.read(&mut piece)? {
            0 => break,
            length => request.extend(piece.iter().take(length)),
        }
    }
    Ok(request)
}

/// A sample in Prometheus' words.
fn metrics(sample: &Sample, judged: &Judgement) -> String {
    let mut text = String::new();
    let mut gauge = |name: &str, help: &str, value: f64| {
        let _ = write!(
            text,
            "# HELP plimsoll_{name} {help}\n# TYPE plimsoll_{name} gauge\nplimsoll_{name} {value}\n"
        );
    };
    gauge("rss_bytes", "Resident sets of the watched processes.", sample.rss_bytes as f64);
    gauge("anonymous_bytes", "Memory of no file.", sample.anonymous_bytes as f64);
    gauge("file_bytes", "Pages of files.", sample.file_bytes as f64);
    gauge("swap_bytes", "Pages in swap.", sample.swap_bytes as f64);
    gauge("major_faults", "Page faults so far that needed a disk.", sample.major_faults as f64);
    gauge("status", "0 normal, 1 warning, 2 critical, 3 emergency.", f64::from(judged.status as u8));
    if let Some(room) = sample.room {
        gauge("limit_bytes", "The nearest limit.", room.limit_bytes as f64);
        gauge("used_bytes", "What is used of it.", room.used_bytes as f64);
    }
    let until = judged.forecast.map_or(f64::INFINITY, |forecast| forecast.remaining);
    let until = if until.is_finite() { until } else { -1.0 };
    gauge("forecast", "Seconds or steps until the limit at the present trend; -1: none.", until);
    if !sample.gpu.is_empty() {
        text.push_str(
            "# HELP plimsoll_gpu_used_bytes Memory of a GPU in use.\n# TYPE plimsoll_gpu_used_bytes gauge\n",
        );
    }
    for gpu in &sample.gpu {
        let _ = writeln!(text, "plimsoll_gpu_used_bytes{{index=\"{}\"}} {}", gpu.index, gpu.used_bytes);
    }
    text
}
