//! What can be wrong with a configuration. Each error names the place, the key and the remedy.

use std::path::PathBuf;

use super::place::Place;

/// A configuration that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("{}: the configuration cannot be read: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
    /// The text is longer than any configuration.
    #[error("{origin}: longer than {limit} bytes; is this a configuration file?")]
    TooLarge {
        /// The file.
        origin: String,
        /// The most that is read, in bytes.
        limit: u64,
    },
    /// The bytes are not UTF-8.
    #[error("{origin}:{line}:{column}: not valid UTF-8; save the file as UTF-8 text")]
    NotUtf8 {
        /// The file.
        origin: String,
        /// Line of the first bad byte, from 1.
        line: usize,
        /// Its column in characters, from 1.
        column: usize,
    },
    /// There is nothing in the file.
    #[error("{origin}: the configuration is empty; it needs at least 'model: PATH'")]
    Empty {
        /// The file.
        origin: String,
    },
    /// The text is not YAML, or goes beyond the limits.
    #[error("{place}: {reason}{}", place.snippet())]
    Syntax {
        /// Where.
        place: Place,
        /// What is wrong and what to do.
        reason: String,
    },
    /// A key is written twice.
    #[error("{place}: '{key}' is set a second time; remove one of the two{}", place.snippet())]
    DuplicateKey {
        /// The second one.
        place: Place,
        /// The key.
        key: String,
    },
    /// There is no such key.
    #[error("{place}: unknown key '{key}'{}{}", suggestion(nearest), place.snippet())]
    UnknownKey {
        /// Where.
        place: Place,
        /// The key as it was written, with its section.
        key: String,
        /// What was probably meant.
        nearest: Option<String>,
    },
    /// The value is of the wrong type or not one of the choices.
    #[error("{place}: {key}: expected {expected}, got {got}{}{}", suggestion(nearest), place.snippet())]
    WrongValue {
        /// Where.
        place: Place,
        /// The key.
        key: String,
        /// The legal values.
        expected: String,
        /// What was written.
        got: String,
        /// What was probably meant.
        nearest: Option<String>,
    },
    /// The value is a good one that this version does not have.
    #[error(
        "{}{key}: {value} is not available in this version: {reason}; use {instead}{}",
        prefix(place),
        snippet(place)
    )]
    Unavailable {
        /// Where, if it was written.
        place: Option<Place>,
        /// The key.
        key: String,
        /// The value.
        value: String,
        /// What is missing.
        reason: &'static str,
        /// The nearest legal setting.
        instead: &'static str,
    },
    /// The number is outside its range.
    #[error("{}{key}: must be {range}, got {value}{}", prefix(place), snippet(place))]
    OutOfRange {
        /// Where, if it was written.
        place: Option<Place>,
        /// The key.
        key: &'static str,
        /// The value.
        value: String,
        /// The range in words.
        range: &'static str,
    },
    /// A key that is needed is not set.
    #[error("'{key}' is not set: {remedy}")]
    Missing {
        /// The key.
        key: &'static str,
        /// What to write.
        remedy: String,
    },
    /// Keys contradict each other.
    #[error("{reason}; {remedy}{}", keys.iter().map(|key| format!("\n  {key}")).collect::<String>())]
    Conflict {
        /// The keys that do not go together.
        keys: Vec<ConflictingKey>,
        /// Why.
        reason: String,
        /// What to do.
        remedy: String,
    },
    /// An assignment on the command line that is none.
    #[error("--set {argument}: {reason}; write KEY=VALUE, for example --set training.batch_size=4")]
    MalformedAssignment {
        /// What was written.
        argument: String,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// The configuration cannot be written as text.
    #[error("the configuration cannot be written: {reason}")]
    Write {
        /// Why not.
        reason: String,
    },
    /// Several of these at once.
    #[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n\n"))]
    Several(Vec<ConfigError>),
}

/// A key that does not go with others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConflictingKey {
    /// The dotted path.
    pub key: &'static str,
    /// Its value.
    pub value: String,
    /// Where it was written; `None` for a default.
    pub place: Option<Place>,
}

impl std::fmt::Display for ConflictingKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.key, self.value)?;
        match &self.place {
            Some(place) => write!(f, "  ({place})"),
            None => Ok(()),
        }
    }
}

impl ConfigError {
    /// Whether it says that this key is outside its range.
    pub(super) fn is_range_of(&self, path: &str) -> bool {
        matches!(self, ConfigError::OutOfRange { key, .. } if *key == path)
    }

    /// Nothing, the one error, or all of them.
    pub(super) fn collect(mut errors: Vec<ConfigError>) -> Result<(), ConfigError> {
        match errors.pop() {
            None => Ok(()),
            Some(only) if errors.is_empty() => Err(only),
            Some(last) => {
                errors.push(last);
                Err(ConfigError::Several(errors))
            }
        }
    }
}

fn suggestion(nearest: &Option<String>) -> String {
    nearest.as_ref().map_or_else(String::new, |nearest| format!("; did you mean '{nearest}'?"))
}

fn prefix(place: &Option<Place>) -> String {
    place.as_ref().map_or_else(String::new, |place| format!("{place}: "))
}

fn snippet(place: &Option<Place>) -> &str {
    place.as_ref().map_or("", Place::snippet)
}

/// Notes what does not go with a key: the other key, why, and what would.
pub(super) fn conflicts(
    own: ConflictingKey,
    errors: &mut Vec<ConfigError>,
) -> impl FnMut(ConflictingKey, &str, &str) {
    move |key, reason, remedy| {
        let keys = vec![own.clone(), key];
        errors.push(ConfigError::Conflict { keys, reason: reason.to_owned(), remedy: remedy.to_owned() });
    }
}
