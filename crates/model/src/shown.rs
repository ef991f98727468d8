//! Names and reasons from files in error messages: quoted, control characters escaped, and never long.

use std::fmt;

/// Characters of a name that are shown; real names are shorter.
const MOST: usize = 120;

/// A name from a file as errors show it; the alternate form `{:#}` has no quotation marks.
pub(crate) struct Shown<'a>(pub &'a str);

impl fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (start, cut) = head(self.0, MOST);
        let more = if cut { "..." } else { "" };
        if f.alternate() { write!(f, "{}{more}", start.escape_debug()) } else { write!(f, "{start:?}{more}") }
    }
}

/// A parser's reason, which may quote any length of the file: its start and its end, which has the place.
pub(crate) fn short_reason(reason: &str) -> String {
    let (start, cut) = head(reason, 2 * MOST);
    if !cut {
        return reason.to_owned();
    }
    let end = reason.ceil_char_boundary(reason.len().saturating_sub(MOST).max(start.len()));
    format!("{start} ... {}", &reason[end..])
}

/// The first `most` characters, and whether there are more.
fn head(text: &str, most: usize) -> (&str, bool) {
    match text.char_indices().nth(most) {
        Some((at, _)) => (&text[..at], true),
        None => (text, false),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_texts_are_cut_between_characters() {
        assert_eq!(format!("{} {:#}", Shown("a\n"), Shown("a\n")), r#""a\n" a\n"#);
        assert_eq!(Shown(&"ü".repeat(5000)).to_string().chars().count(), MOST + 2 + 3);
        assert_eq!(short_reason("invalid type at line 1"), "invalid type at line 1");
        let long = short_reason(&format!("invalid {} at line 1", "ü".repeat(5000)));
        assert!(
            long.starts_with("invalid ü") && long.ends_with("ü at line 1") && long.len() < 1000,
            "{long}"
        );
    }
}
