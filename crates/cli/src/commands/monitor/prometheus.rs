//! The last sample as Prometheus reads it: its text format 0.0.4.

use std::fmt::Write as _;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};

use plimsoll_monitor::{Judgement, Sample};

use crate::failure::Failure;
use crate::http::{self, Access, Answer};

/// What is served.
#[derive(Clone, Default)]
pub struct Page(Arc<Mutex<String>>);

impl Page {
    /// Serves a page until the program ends; where it listens.
    pub fn serve(&self, address: SocketAddr) -> Result<SocketAddr, Failure> {
        let page = self.clone();
        let served = http::serve(address, Access::Anybody, move |request| match request.path.as_str() {
            "/metrics" | "/" => {
                let text = page.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
                Answer::new("text/plain; version=0.0.4", text)
            }
            _ => Answer::error("404 Not Found", "GET /metrics"),
        });
        served.map_err(|error| {
            Failure::other(format!("--prometheus {address}: {error}; name a port that is free"))
        })
    }

    /// Replaces what is served.
    pub fn show(&self, sample: &Sample, judged: &Judgement) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = metrics(sample, judged);
    }
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
