//! How a view is looked at, and what keys do to that.

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};

use super::Colours;

/// A part of the picture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Panel {
    /// The loss, and that of validations.
    Loss,
    /// Tokens in a second.
    Speed,
    /// The learning rate.
    LearningRate,
    /// Memory by owner against the load line.
    Memory,
    /// Memory through the planned step.
    Step,
    /// Tiers, their I/O, and ranks.
    Tiers,
    /// What happened.
    Events,
}

impl Panel {
    const ALL: [Panel; 7] = [
        Panel::Loss,
        Panel::Speed,
        Panel::LearningRate,
        Panel::Memory,
        Panel::Step,
        Panel::Tiers,
        Panel::Events,
    ];

    /// The key that shows it alone.
    pub fn key(self) -> char {
        match self {
            Panel::Loss => '1',
            Panel::Speed => '2',
            Panel::LearningRate => '3',
            Panel::Memory => '4',
            Panel::Step => '5',
            Panel::Tiers => '6',
            Panel::Events => '7',
        }
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Panel::Loss => "loss",
            Panel::Speed => "tokens/s",
            Panel::LearningRate => "lr",
            Panel::Memory => "memory",
            Panel::Step => "step",
            Panel::Tiers => "tiers",
            Panel::Events => "events",
        }
    }
}

/// The last steps that are shown, from far to near; `None`: all.
const ZOOMS: [Option<u64>; 6] = [None, Some(1000), Some(300), Some(100), Some(30), Some(10)];

/// How a view is looked at.
#[derive(Clone, Debug, Default)]
pub struct Look {
    /// Which run.
    pub run: usize,
    /// Whether the picture stands still.
    pub paused: bool,
    /// Whether the keys are explained.
    pub help: bool,
    /// The panel that is shown alone.
    pub panel: Option<Panel>,
    /// Whether it is being asked what is to become of the run.
    pub asks: bool,
    /// Whether whoever looks trains: leaving is no matter of looking then.
    pub trains: bool,
    /// What the terminal can show.
    pub colours: Colours,
    zoom: usize,
}

/// What a key asks of whoever shows the picture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wish {
    /// Nothing but another picture.
    Look,
    /// To show nothing more. The run goes on.
    Leave,
    /// To end the run as Ctrl-C does.
    Stop,
}

impl Look {
    /// A run that is watched from elsewhere, or by the process that trains.
    pub fn new(colours: Colours, trains: bool) -> Look {
        Look { colours, trains, ..Look::default() }
    }

    /// The last steps that are shown; `None`: all.
    pub fn window(&self) -> Option<u64> {
        ZOOMS.get(self.zoom).copied().flatten()
    }

    /// A key was pressed, while so many runs are shown.
    pub fn press(&mut self, key: KeyEvent, runs: usize) -> Wish {
        if key.kind == KeyEventKind::Release {
            return Wish::Look;
        }
        if key.modifiers.contains(KeyModifiers::CONTROL) {
            return match key.code {
                KeyCode::Char('c') if self.trains => Wish::Stop,
                KeyCode::Char('c') => Wish::Leave,
                _ => Wish::Look,
            };
        }
        if self.asks {
            self.asks = false;
            return match key.code {
                KeyCode::Char('s') => Wish::Stop,
                KeyCode::Char('l') => Wish::Leave,
                _ => Wish::Look,
            };
        }
        if self.help {
            self.help = false;
            return Wish::Look;
        }
        match key.code {
            KeyCode::Char('q') if self.trains => self.asks = true,
            KeyCode::Char('q') => return Wish::Leave,
            KeyCode::Char('p' | ' ') => self.paused = !self.paused,
            KeyCode::Char('+' | '=') | KeyCode::Up => self.zoom = (self.zoom + 1).min(ZOOMS.len() - 1),
            KeyCode::Char('-') | KeyCode::Down => self.zoom = self.zoom.saturating_sub(1),
            KeyCode::Char('?' | 'h') => self.help = true,
            KeyCode::Esc | KeyCode::Char('0') => self.panel = None,
            KeyCode::Tab | KeyCode::Right => self.run = (self.run + 1) % runs.max(1),
            KeyCode::BackTab | KeyCode::Left => self.run = (self.run + runs.max(1) - 1) % runs.max(1),
            KeyCode::Char(key) => {
                let named = Panel::ALL.into_iter().find(|panel| panel.key() == key);
                // The same key again goes back.
                self.panel = if named == self.panel { None } else { named.or(self.panel) };
            }
            _ => {}
        }
        Wish::Look
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pressed(look: &mut Look, keys: &str) -> Vec<Wish> {
        keys.chars().map(|key| look.press(KeyEvent::from(KeyCode::Char(key)), 2)).collect()
    }

    fn ctrl_c() -> KeyEvent {
        KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL)
    }

    #[test]
    fn keys_change_how_a_run_is_looked_at() {
        let mut look = Look::new(Colours::True, false);
        pressed(&mut look, "p++4");
        assert!(look.paused && look.window() == Some(300) && look.panel == Some(Panel::Memory));
        pressed(&mut look, "p-4?");
        assert!(!look.paused && look.window() == Some(1000) && look.panel.is_none() && look.help);
        pressed(&mut look, "x-----");
        assert!(!look.help && look.window().is_none());
        pressed(&mut look, "+++++++++");
        assert_eq!(look.window(), Some(10));
        look.press(KeyEvent::from(KeyCode::Tab), 2);
        assert_eq!(look.run, 1);
        look.press(KeyEvent::from(KeyCode::Tab), 2);
        look.press(KeyEvent::from(KeyCode::BackTab), 2);
        assert_eq!(look.run, 1);
    }

    #[test]
    fn whoever_watches_never_ends_the_run() {
        let mut look = Look::new(Colours::True, false);
        assert_eq!(pressed(&mut look, "q"), [Wish::Leave]);
        assert_eq!(look.press(ctrl_c(), 1), Wish::Leave);
    }

    #[test]
    fn whoever_trains_is_asked() {
        let mut look = Look::new(Colours::True, true);
        assert_eq!(pressed(&mut look, "qx"), [Wish::Look, Wish::Look]);
        assert!(!look.asks);
        assert_eq!(pressed(&mut look, "ql"), [Wish::Look, Wish::Leave]);
        assert_eq!(pressed(&mut look, "qs"), [Wish::Look, Wish::Stop]);
        assert_eq!(look.press(ctrl_c(), 1), Wish::Stop);
    }
}
