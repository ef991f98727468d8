//! A line of a log, of any length: it is read in windows, so that its memory is bounded.

use std::io::{self, BufRead};

use super::message::Message;
use super::scene;

/// Bytes of a line that are looked at together; a progress bar may write a line of any length.
const WINDOW: usize = 16 << 10;

/// Bytes that a window has in common with the one before it: more than any message has.
const SHARED: usize = 4 << 10;

/// What is kept of a line.
pub struct Line {
    /// How it begins, lossy: all of it, where it is not long.
    pub text: String,
    /// What it says of memory that ran out, wherever that stands in it.
    pub message: Option<Message>,
    /// Processes that it says train together.
    pub ranks: u32,
}

impl Line {
    /// The next line without its end; `None` at the end of the log.
    pub fn next(log: &mut dyn BufRead) -> io::Result<Option<Line>> {
        let mut window = Vec::new();
        let Some(mut goes_on) = fill(log, &mut window)? else { return Ok(None) };
        let mut finding = Finding::default();
        finding.see(&window, goes_on);
        let text = String::from_utf8_lossy(&window).into_owned();
        let mut ranks = scene::ranks_of(&text);
        while goes_on {
            window.drain(..window.len().saturating_sub(SHARED));
            goes_on = fill(log, &mut window)?.unwrap_or(false);
            finding.see(&window, goes_on);
            ranks = ranks.max(scene::ranks_of(&String::from_utf8_lossy(&window)));
        }
        Ok(Some(Line { text, message: finding.message, ranks }))
    }
}

/// The message of a line that is looked through a window at a time.
#[derive(Default)]
struct Finding {
    message: Option<Message>,
    /// Whether the end of it may be in the next window only.
    is_cut: bool,
}

impl Finding {
    /// Of several messages in a line the one that says most counts, and the first of those.
    fn see(&mut self, window: &[u8], goes_on: bool) {
        let of = |bytes: &[u8]| Message::of(&String::from_utf8_lossy(bytes));
        let found = of(window);
        let weight = |message: &Message| message.source.weight();
        let is_better = match (&self.message, &found) {
            (_, None) => false,
            (None, Some(_)) => true,
            (Some(known), Some(found)) if self.is_cut => weight(found) >= weight(known),
            (Some(known), Some(found)) => weight(found) > weight(known),
        };
        self.is_cut = false;
        if is_better {
            let (before, shared) = window.split_at(window.len().saturating_sub(SHARED));
            // The next window has it whole where it begins in what the two share.
            self.is_cut = goes_on && of(before).is_none() && of(shared).is_some();
            self.message = found;
        }
    }
}

/// Reads on until a line ends or a window is full, and says whether the line goes on; `None` where the log has ended before anything was
/// read.
fn fill(log: &mut dyn BufRead, window: &mut Vec<u8>) -> io::Result<Option<bool>> {
    let mut any = false;
    loop {
        let buffer = log.fill_buf()?;
        if buffer.is_empty() {
            return Ok(any.then_some(false));
        }
        any = true;
        // Progress bars go back to the beginning of a line.
        let end = buffer.iter().position(|byte| matches!(byte, b'\n' | b'\r'));
        let piece = &buffer[..end.unwrap_or(buffer.len())];
        let room = WINDOW.saturating_sub(window.len());
        if piece.len() > room {
            window.extend_from_slice(&piece[..room]);
            log.consume(room);
            return Ok(Some(true));
        }
        window.extend_from_slice(piece);
        let used = end.map_or(buffer.len(), |end| end + 1);
        log.consume(used);
        if end.is_some() {
            return Ok(Some(false));
        }
    }
}
