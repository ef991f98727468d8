//! Where a value was written: a place in a file, or a command-line assignment.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use serde_saphyr::Location;

use super::document::shortened;

/// Where a value was written. Shown as `config.yaml:3:15`, or as the command-line argument itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place(Arc<Written>);

#[derive(Debug, PartialEq, Eq)]
enum Written {
    File { origin: String, line: usize, column: usize, excerpt: String },
    Argument(String),
}

impl Place {
    pub(super) fn argument(argument: &str) -> Place {
        Place(Arc::new(Written::Argument(shortened(argument))))
    }

    pub(super) fn in_text(origin: &str, text: &str, location: Location) -> Place {
        let line = usize::try_from(location.line()).unwrap_or(0);
        let column = usize::try_from(location.column()).unwrap_or(0);
        let length = usize::try_from(location.span().len()).unwrap_or(0);
        let excerpt = excerpt(text, line, column, length);
        Place(Arc::new(Written::File { origin: shortened_origin(origin), line, column, excerpt }))
    }

    /// Whether it is a command-line argument, which is applied over every file.
    pub fn is_argument(&self) -> bool {
        matches!(*self.0, Written::Argument(_))
    }

    /// Line and column in the file, from 1, in characters; `None` on the command line.
    pub fn line_and_column(&self) -> Option<(usize, usize)> {
        match *self.0 {
            Written::File { line, column, .. } => Some((line, column)),
            Written::Argument(_) => None,
        }
    }

    /// The line of the file with a caret under the place, each line indented and begun on a new one; empty for
    /// the command line.
    pub fn snippet(&self) -> &str {
        match &*self.0 {
            Written::File { excerpt, .. } => excerpt,
            Written::Argument(_) => "",
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &*self.0 {
            Written::File { origin, line: 0, .. } => f.write_str(origin),
            Written::File { origin, line, column, .. } => write!(f, "{origin}:{line}:{column}"),
            Written::Argument(argument) => f.write_str(argument),
        }
    }
}

/// A file's name on one line.
pub(super) fn shortened_origin(origin: &str) -> String {
    origin.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

/// A line of the text with a caret under `column` (from 1), cut where it is long.
fn excerpt(text: &str, line: usize, column: usize, length: usize) -> String {
    /// Characters that are kept on either side of the caret.
    const CONTEXT: usize = 50;
    let Some(content) = line.checked_sub(1).and_then(|index| text.lines().nth(index)) else {
        return String::new();
    };
    let before = column.saturating_sub(1);
    let skipped = before.saturating_sub(CONTEXT);
    let shown: String = content
        .chars()
        .skip(skipped)
        .take(2 * CONTEXT)
        .map(|c| if c.is_control() { ' ' } else { c })
        .collect();
    let width = shown.chars().count();
    let caret = (before - skipped).min(width);
    let carets = length.clamp(1, width.saturating_sub(caret).max(1));
    let number = line.to_string();
    let margin = " ".repeat(number.len());
    format!(
        "\n {margin} |\n {number} | {}\n {margin} | {}{}",
        shown.trim_end(),
        " ".repeat(caret),
        "^".repeat(carets)
    )
}

/// Where each key that is set was written.
///
/// Any two are equal: where a value was written is no part of what it says.
#[derive(Clone, Debug, Default)]
pub(super) struct Origins(BTreeMap<String, Place>);

impl PartialEq for Origins {
    fn eq(&self, _: &Origins) -> bool {
        true
    }
}

impl Origins {
    pub(super) fn get(&self, path: &str) -> Option<&Place> {
        self.0.get(path)
    }

    pub(super) fn insert(&mut self, path: &str, place: Place) {
        self.0.insert(path.to_owned(), place);
    }

    pub(super) fn remove(&mut self, path: &str) {
        self.0.remove(path);
    }

    /// Keys that were set in a file.
    pub(super) fn in_files(&self) -> impl Iterator<Item = &str> {
        self.0.iter().filter(|(_, place)| !place.is_argument()).map(|(path, _)| path.as_str())
    }
}
