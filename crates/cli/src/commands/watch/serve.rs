//! Runs as a page for a browser.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use plimsoll_watch::View;
use plimsoll_watch::page::{Page, page, runs};
use serde_json::json;

use super::followed::Followed;
use super::wait;
use crate::failure::Failure;
use crate::http::{self, Access, Answer, Request};
use crate::output::{errln, outln};
use crate::signals::StopSignals;

/// From one look at the files to the next.
const EVERY: Duration = Duration::from_millis(500);
/// Bytes of a token.
const TOKEN: usize = 16;

const HTML: &str = "text/html; charset=utf-8";

/// Serves until somebody asks to stop.
pub fn serve(mut followed: Vec<Followed>, address: SocketAddr, signals: &StopSignals) -> Result<(), Failure> {
    let views: Vec<View> = followed.iter().map(|run| run.view.clone()).collect();
    let views = Arc::new(Mutex::new(views));
    let shell = page().map_err(|error| Failure::other(error.to_string()))?;
    // Who is elsewhere has to know something that only this terminal says.
    let token = (!address.ip().is_loopback()).then(token).transpose()?;
    let access = token.clone().map_or(Access::Loopback, Access::Token);
    let shown = Arc::clone(&views);
    let bound = http::serve(address, access, move |request| answer(request, &shell, &shown));
    let bound = bound.map_err(|error| {
        Failure::other(format!(
            "--serve {address}: {error}; name an address of this machine and a port that is free"
        ))
    })?;
    let token = token.map_or(String::new(), |token| format!("?token={token}"));
    outln!("http://{bound}/{token}")?;
    errln!("open this address in a browser; Ctrl-C ends this and no run");
    while !signals.flag().is_raised() {
        followed.iter_mut().for_each(Followed::look);
        let now: Vec<View> = followed.iter().map(|run| run.view.clone()).collect();
        *views.lock().unwrap_or_else(PoisonError::into_inner) = now;
        wait(EVERY, signals);
    }
    Err(Failure::stopped(signals.exit_code()))
}

fn answer(request: &Request, shell: &Page, views: &Mutex<Vec<View>>) -> Answer {
    // What is shown is made of a copy, so that a slow client holds nobody up.
    let now = || views.lock().unwrap_or_else(PoisonError::into_inner).clone();
    match request.path.as_str() {
        "/" => Answer::new(HTML, shell.html.as_str()).with_policy(shell.policy.clone()),
        "/runs" => {
            let window = request.parameter("window").map(str::parse::<u64>).transpose();
            let Ok(window) = window else {
                return Answer::error("400 Bad Request", "window is a number of steps");
            };
            match runs(&now(), window) {
                Ok(text) => Answer::new(HTML, text),
                Err(error) => Answer::error("500 Internal Server Error", &error.to_string()),
            }
        }
        "/runs.json" => {
            let all: Vec<serde_json::Value> = now().iter().map(View::to_json).collect();
            Answer::new("application/json", json!({ "runs": all }).to_string())
        }
        _ => Answer::error("404 Not Found", "there is /, /runs and /runs.json"),
    }
}

/// Something that nobody can guess.
fn token() -> Result<String, Failure> {
    let mut bytes = [0u8; TOKEN];
    getrandom::fill(&mut bytes).map_err(|error| Failure::other(format!("no random numbers: {error}")))?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}
