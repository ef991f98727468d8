//! What ends an answer: texts and tokens. Texts are found across the borders of tokens. Text that may be the
//! beginning of a stop string is held back until it is known not to be.

/// An empty stop string, which would stop everything.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a stop string is empty; give at least one character")]
pub struct EmptyStopString;

/// Texts that end an answer. The first stop string to be complete counts; of several that are complete at once, the
/// longest. So the result does not depend on how the text is cut into pieces.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StopStrings {
    strings: Vec<String>,
}

impl StopStrings {
    /// From texts that are not empty.
    ///
    /// # Errors
    /// One is empty.
    pub fn new(strings: Vec<String>) -> Result<StopStrings, EmptyStopString> {
        match strings.iter().any(String::is_empty) {
            true => Err(EmptyStopString),
            false => Ok(StopStrings { strings }),
        }
    }

    /// The texts.
    pub fn strings(&self) -> &[String] {
        &self.strings
    }

    /// Looks for them in a text that comes in pieces.
    pub fn stream(&self) -> StopStream<'_> {
        StopStream { stops: self, held: String::new(), found: None }
    }

    /// The first one to be complete in `text`, and where it begins.
    fn find(&self, text: &str) -> Option<(usize, &str)> {
        let places = self.strings.iter().filter_map(|stop| Some((text.find(stop.as_str())?, stop.as_str())));
        places.min_by_key(|(start, stop)| (start + stop.len(), *start))
    }

    /// Where the longest end of `text` begins that is the beginning of one of them.
    fn may_begin_at(&self, text: &str) -> usize {
        let most = self.strings.iter().map(String::len).max().unwrap_or(0).saturating_sub(1);
        let first = text.len().saturating_sub(most);
        let mut ends = text.char_indices().map(|(at, _)| at).filter(|at| *at >= first);
        let begins = |at: &usize| {
            text.get(*at..).is_some_and(|end| self.strings.iter().any(|stop| stop.starts_with(end)))
        };
        ends.find(begins).unwrap_or(text.len())
    }
}

/// A text that comes in pieces, up to the first stop string.
#[derive(Clone, Debug)]
pub struct StopStream<'s> {
    stops: &'s StopStrings,
    /// What may be the beginning of a stop string.
    held: String,
    found: Option<&'s str>,
}

impl<'s> StopStream<'s> {
    /// The text that this piece makes certain; empty once a stop string was found.
    pub fn push(&mut self, piece: &str) -> String {
        if self.found.is_some() {
            return String::new();
        }
        self.held.push_str(piece);
        let certain = match self.stops.find(&self.held) {
            Some((start, stop)) => {
                self.found = Some(stop);
                start
            }
            None => self.stops.may_begin_at(&self.held),
        };
        let rest = self.held.split_off(certain);
        std::mem::replace(&mut self.held, rest)
    }

    /// The stop string that was found.
    pub fn found(&self) -> Option<&'s str> {
        self.found
    }

    /// Text that was held back and is no stop string after all; empty where a stop string was found.
    pub fn finish(self) -> String {
        if self.found.is_some() { String::new() } else { self.held }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// By the definition: the shortest beginning of the text that ends with a stop string, without the longest such.
    fn up_to_first_stop<'t>(text: &'t str, stops: &[String]) -> (&'t str, bool) {
        for end in (1..=text.len()).filter(|end| text.is_char_boundary(*end)) {
            let longest =
                stops.iter().filter(|stop| text[..end].ends_with(stop.as_str())).map(String::len).max();
            if let Some(longest) = longest {
                return (&text[..end - longest], true);
            }
        }
        (text, false)
    }

    fn streamed(pieces: &[&str], stops: &StopStrings) -> (String, bool) {
        let mut stream = stops.stream();
        let mut out: String = pieces.iter().map(|piece| stream.push(piece)).collect();
        let found = stream.found().is_some();
        out.push_str(&stream.finish());
        (out, found)
    }

    fn stops(strings: &[&str]) -> StopStrings {
        StopStrings::new(strings.iter().map(|s| (*s).to_owned()).collect()).unwrap()
    }

    #[test]
    fn a_part_of_a_stop_string_is_held_and_given_back() {
        let stops = stops(&["\nUser:", "END"]);
        let mut stream = stops.stream();
        assert_eq!(stream.push("yes\nUs"), "yes");
        assert_eq!(stream.push("er"), "");
        assert_eq!(stream.push("s E"), "\nUsers ");
        assert_eq!(stream.push("N"), "");
        assert_eq!(stream.clone().finish(), "EN");
        assert_eq!(stream.push("D and more"), "");
        assert_eq!((stream.found(), stream.push("more")), (Some("END"), String::new()));
        assert_eq!(stream.finish(), "");
    }

    #[test]
    fn the_first_to_be_complete_counts_however_the_text_comes() {
        let stops = stops(&["abcd", "bc"]);
        for pieces in [&["xabcd"][..], &["xa", "bcd"], &["x", "a", "b", "c", "d"]] {
            assert_eq!(streamed(pieces, &stops), ("xa".to_owned(), true), "{pieces:?}");
        }
    }

    #[test]
    fn an_empty_stop_string_is_refused_and_none_stop_nothing() {
        assert_eq!(StopStrings::new(vec!["a".into(), String::new()]), Err(EmptyStopString));
        assert_eq!(streamed(&["a", "b"], &StopStrings::default()), ("ab".to_owned(), false));
    }

    proptest! {
        #[test]
        fn every_split_gives_the_text_up_to_the_first_stop(
            text in "[abé]{0,40}",
            strings in proptest::collection::vec("[abé]{1,5}", 0..4),
            cuts in proptest::collection::vec(any::<proptest::sample::Index>(), 0..20),
        ) {
            let mut borders: Vec<usize> = text.char_indices().map(|(at, _)| at).chain([text.len()]).collect();
            let chosen: Vec<usize> = cuts.iter().map(|cut| *cut.get(&borders)).collect();
            borders.retain(|border| chosen.contains(border) || *border == 0 || *border == text.len());
            let pieces: Vec<&str> = borders.windows(2).map(|pair| &text[pair[0]..pair[1]]).collect();
            let (wanted, found) = up_to_first_stop(&text, &strings);
            let stops = StopStrings::new(strings).unwrap();
            prop_assert_eq!(streamed(&pieces, &stops), (wanted.to_owned(), found));
        }

        #[test]
        fn all_that_is_given_out_early_stays_right(text in "[ab]{0,20}", stop in "[ab]{1,4}", more in "[ab]{0,8}") {
            let stops = StopStrings::new(vec![stop.clone()]).unwrap();
            let mut stream = stops.stream();
            let early = stream.push(&text);
            let whole = text + &more;
            prop_assert!(up_to_first_stop(&whole, &[stop]).0.starts_with(&early));
        }
    }
}
