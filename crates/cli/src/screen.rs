//! The terminal as a whole: taken for pictures, read for keys, and given back on every way out.

use std::io::{self, IsTerminal, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use plimsoll_watch::terminal::Colours;
use ratatui::backend::CrosstermBackend;
use ratatui::crossterm::cursor::Show;
use ratatui::crossterm::event::{self, Event, KeyEvent};
use ratatui::crossterm::execute;
use ratatui::crossterm::terminal::{
    EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode, enable_raw_mode,
};
use ratatui::{Frame, Terminal};

/// Whether there is a terminal that shows pictures: off one, and on one that cannot move its cursor, lines are what is left.
pub fn is_there() -> bool {
    let term = std::env::var("TERM").unwrap_or_default();
    io::stdout().is_terminal() && io::stdin().is_terminal() && !term.is_empty() && term != "dumb"
}

/// The colours that it says it has.
pub fn colours() -> Colours {
    let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    let (term, colorterm) = (variable("TERM"), variable("COLORTERM"));
    Colours::of(term.as_deref(), colorterm.as_deref(), variable("NO_COLOR").is_some())
}

/// Gives a terminal back, from any thread and as often as one likes.
#[derive(Clone, Debug, Default)]
pub struct Restorer(Arc<AtomicBool>);

impl Restorer {
    /// The terminal as it was, if it is taken.
    pub fn restore(&self) {
        if self.0.swap(false, Ordering::SeqCst) {
            // Whoever has closed the terminal needs nothing more of it.
            let _ = disable_raw_mode();
            let _ = execute!(io::stdout(), LeaveAlternateScreen, Show);
        }
    }

    /// Whether the terminal is taken.
    pub fn is_taken(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}

/// A terminal that is taken; given back when this is dropped.
pub struct Screen {
    terminal: Terminal<CrosstermBackend<io::Stdout>>,
    restorer: Restorer,
}

impl Screen {
    /// Takes the terminal. `restorer` gives it back from elsewhere: where the program ends without a chance to drop anything.
    pub fn take(restorer: &Restorer) -> io::Result<Screen> {
        enable_raw_mode()?;
        restorer.0.store(true, Ordering::SeqCst);
        let taken = execute!(io::stdout(), EnterAlternateScreen)
            .and_then(|()| Terminal::new(CrosstermBackend::new(io::stdout())));
        let terminal = taken.inspect_err(|_| restorer.restore())?;
        let (usual, of_panic) = (std::panic::take_hook(), restorer.clone());
        std::panic::set_hook(Box::new(move |panic| {
            // What is said of a panic is to be read where it stays.
            if !plimsoll_data::panics_are_caught() {
                of_panic.restore();
            }
            usual(panic);
        }));
        Ok(Screen { terminal, restorer: restorer.clone() })
    }

    /// Draws a picture, unless the terminal was given back meanwhile.
    pub fn draw(&mut self, picture: impl FnOnce(&mut Frame<'_>)) -> io::Result<()> {
        match self.restorer.is_taken() {
            true => self.terminal.draw(picture).map(drop),
            false => Ok(()),
        }
    }

    /// The keys of the next while: none, or those pressed so far as soon as there is one. Whether the picture has to be drawn again
    /// for another reason, such as another size.
    pub fn keys(&mut self, patience: Duration) -> io::Result<(Vec<KeyEvent>, bool)> {
        let (mut keys, mut other, mut wait) = (Vec::new(), false, patience);
        while event::poll(wait)? {
            match event::read()? {
                Event::Key(key) => keys.push(key),
                _ => other = true,
            }
            wait = Duration::ZERO;
        }
        Ok((keys, other))
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        self.restorer.restore();
        let _ = io::stdout().flush();
    }
}
