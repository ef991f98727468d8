//! Colours of a terminal: as many as it has.

use plimsoll_monitor::Status;
use plimsoll_plan::Colour;
use ratatui::style::{Color, Modifier, Style};

use crate::event::Kind;

/// What a terminal can show.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Colours {
    /// Any colour.
    True,
    /// Those of xterm's table of 256.
    #[default]
    Table,
    /// None: what is apart in colour is apart in its pattern.
    None,
}

impl Colours {
    /// What the usual variables say: `TERM`, `COLORTERM` and `NO_COLOR` (<https://no-color.org>).
    pub fn of(term: Option<&str>, colorterm: Option<&str>, no_color: bool) -> Colours {
        match (term, colorterm) {
            _ if no_color => Colours::None,
            (Some(term), _) if term.starts_with("vt") => Colours::None,
            (_, Some("truecolor" | "24bit")) => Colours::True,
            _ => Colours::Table,
        }
    }

    /// A colour of pictures.
    pub fn paint(self, [red, green, blue]: Colour) -> Option<Color> {
        let level = |part: u8| match part {
            0..48 => 0u8,
            48..115 => 1,
            part => (part - 35) / 40,
        };
        match self {
            Colours::True => Some(Color::Rgb(red, green, blue)),
            Colours::Table => Some(Color::Indexed(16 + 36 * level(red) + 6 * level(green) + level(blue))),
            Colours::None => None,
        }
    }

    fn named(self, colour: Color) -> Style {
        if self == Colours::None { Style::new() } else { Style::new().fg(colour) }
    }

    /// Curves and bars.
    pub fn accent(self) -> Style {
        self.named(Color::Cyan)
    }

    /// What is beside something.
    pub fn second(self) -> Style {
        self.named(Color::Magenta)
    }

    /// Rules and labels.
    pub fn faint(self) -> Style {
        Style::new().add_modifier(Modifier::DIM)
    }

    /// The load line.
    pub fn line(self) -> Style {
        self.named(Color::Red).add_modifier(Modifier::BOLD)
    }

    /// How near to the line memory is.
    pub fn of_status(self, status: Status) -> Style {
        match status {
            Status::Normal => self.named(Color::Green),
            Status::Warning => self.named(Color::Yellow).add_modifier(Modifier::BOLD),
            Status::Critical | Status::Emergency => self.line(),
        }
    }

    /// An event.
    pub fn of_event(self, kind: Kind) -> Style {
        match kind {
            Kind::Begin | Kind::End => Style::new(),
            Kind::Evaluation => self.named(Color::Magenta),
            Kind::Saved => self.named(Color::Green),
            Kind::Plan => self.named(Color::Cyan),
            Kind::Warning => self.named(Color::Yellow),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_terminal_has_the_colours_that_it_says() {
        assert_eq!(Colours::of(Some("xterm-256color"), Some("truecolor"), false), Colours::True);
        assert_eq!(Colours::of(Some("screen"), None, false), Colours::Table);
        assert_eq!(Colours::of(Some("vt100"), Some("truecolor"), false), Colours::None);
        assert_eq!(Colours::of(Some("xterm"), Some("truecolor"), true), Colours::None);
    }

    #[test]
    fn colours_of_the_table_are_the_nearest() {
        let index = |colour| Colours::Table.paint(colour);
        assert_eq!(index([0, 0, 0]), Some(Color::Indexed(16)));
        assert_eq!(index([255, 255, 255]), Some(Color::Indexed(231)));
        // 0, 95, 135, 175, 215 and 255 are the levels.
        assert_eq!(index([0, 114, 178]), Some(Color::Indexed(16 + 6 + 3)));
        assert_eq!(index([230, 159, 0]), Some(Color::Indexed(16 + 36 * 4 + 6 * 3)));
    }
}
