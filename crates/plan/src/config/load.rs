//! From texts to a configuration, layer over layer. A file and a command-line assignment are read alike: each
//! sets keys, and a later one sets over an earlier one.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::Read;
use std::path::Path;

use serde_saphyr::{Error as YamlError, Location};

use super::document::{self, Input, MAX_BYTES, Node, Yaml, shortened};
use super::place::{Place, shortened_origin};
use super::{ConfigError, RawConfig, availability, keys};

/// Errors that are collected before reading stops.
const MOST_ERRORS: usize = 20;

/// Keys and sections of which only one can be set: setting one on the command line unsets the other that a file
/// has set.
const RIVALS: &[(&str, &str)] = &[
    ("training.steps", "training.epochs"),
    ("training.warmup_steps", "training.warmup_ratio"),
    ("model.path", "model.from_scratch"),
];

impl RawConfig {
    /// Reads a YAML or JSON file of at most 1 MiB.
    ///
    /// # Errors
    /// All that is wrong with the file: see [`ConfigError`]. Whether the values go together is left to
    /// [`validate`](RawConfig::validate).
    pub fn from_file(path: &Path) -> Result<RawConfig, ConfigError> {
        RawConfig::from_file_with(path, &[])
    }

    /// Reads YAML or JSON in bytes; `origin` is what errors call it.
    ///
    /// # Errors
    /// As [`from_file`](RawConfig::from_file).
    pub fn from_slice(bytes: &[u8], origin: &str) -> Result<RawConfig, ConfigError> {
        let origin = shortened_origin(origin);
        RawConfig::from_str(utf8(bytes, &origin)?, &origin)
    }

    /// Reads a YAML or JSON text; `origin` is what errors call it.
    ///
    /// # Errors
    /// As [`from_file`](RawConfig::from_file).
    pub fn from_str(text: &str, origin: &str) -> Result<RawConfig, ConfigError> {
        RawConfig::from_str_with(text, origin, &[])
    }

    /// Reads a file and applies what the command line says over it. What is wrong with a value of the file is no error
    /// where the command line sets another.
    ///
    /// # Errors
    /// As [`from_file`](RawConfig::from_file) and [`apply_set`](RawConfig::apply_set).
    pub fn from_file_with(path: &Path, overrides: &[Override]) -> Result<RawConfig, ConfigError> {
        let (text, origin) = read_file(path)?;
        RawConfig::from_str_with(&text, &origin, overrides)
    }

    /// As [`from_file_with`](RawConfig::from_file_with) of a text; `origin` is what errors call it.
    ///
    /// # Errors
    /// As [`from_file_with`](RawConfig::from_file_with).
    pub fn from_str_with(text: &str, origin: &str, overrides: &[Override]) -> Result<RawConfig, ConfigError> {
        let (mut config, wrong) = match layer_of(text, origin) {
            // Every key may be left out of a file, and so may all of them.
            Err(ConfigError::Empty { .. }) if !overrides.is_empty() => (RawConfig::default(), Vec::new()),
            layer => layer?,
        };
        let (said, errors) = config.applied(overrides);
        let repaired = |path: &str| {
            let rival = |one: &str, other: &str| {
                is_within(path, one)
                    && said.iter().any(|key| is_within(key, other) && config.place(key).is_some())
            };
            said.contains(path) || RIVALS.iter().any(|(one, other)| rival(one, other) || rival(other, one))
        };
        let left = wrong.into_iter().filter(|(path, _)| !path.as_deref().is_some_and(repaired));
        ConfigError::collect(errors.into_iter().chain(left.map(|(_, error)| error)).collect())?;
        Ok(config)
    }

    /// A configuration of what the command line says alone.
    ///
    /// # Errors
    /// All that is wrong with it, as of [`apply_set`](RawConfig::apply_set).
    pub fn of_command_line(overrides: &[Override]) -> Result<RawConfig, ConfigError> {
        let mut config = RawConfig::default();
        let (_, errors) = config.applied(overrides);
        ConfigError::collect(errors)?;
        Ok(config)
    }

    /// Applies what can be, in order: the keys that the command line is about, and what is wrong with its values.
    fn applied(&mut self, overrides: &[Override]) -> (BTreeSet<String>, Vec<ConfigError>) {
        let (mut said, mut errors) = (BTreeSet::new(), Vec::new());
        for Override { key, value, argument } in overrides {
            match self.applied_override(key, value, argument) {
                Ok(keys) => said.extend(keys),
                Err(error) => {
                    said.insert(key.clone());
                    errors.push(error);
                }
            }
        }
        (said, errors)
    }

    /// A configuration of `KEY=VALUE` assignments alone, the later over the earlier.
    ///
    /// # Errors
    /// As [`apply_set`](RawConfig::apply_set).
    pub fn from_overrides<'a>(
        assignments: impl IntoIterator<Item = &'a str>,
    ) -> Result<RawConfig, ConfigError> {
        let mut config = RawConfig::default();
        for assignment in assignments {
            config.apply_set(assignment)?;
        }
        Ok(config)
    }

    /// Applies the argument of a `--set`: `training.batch_size=4`. The value is YAML; an empty one, or `null`,
    /// unsets the key. Steps unset epochs that a file has set, and the other way round; so do `model.path` and
    /// `model.from_scratch`.
    ///
    /// # Errors
    /// [`ConfigError`]; the configuration is then as it was.
    pub fn apply_set(&mut self, assignment: &str) -> Result<(), ConfigError> {
        let Override { key, value, argument } = Override::set(assignment)?;
        self.apply_override(&key, &value, &argument)
    }

    /// Sets a key from the command line, over what files have set. `argument` is what errors call it:
    /// `--batch-size 4`.
    ///
    /// # Errors
    /// As [`apply_set`](RawConfig::apply_set).
    pub fn apply_override(&mut self, key: &str, value: &str, argument: &str) -> Result<(), ConfigError> {
        self.applied_override(key, value, argument).map(drop)
    }

    /// The same, with the keys that were set.
    fn applied_override(
        &mut self,
        key: &str,
        value: &str,
        argument: &str,
    ) -> Result<BTreeSet<String>, ConfigError> {
        let document = Document { text: value, kind: NodeKind::Argument(argument) };
        if value.len() as u64 > MAX_BYTES {
            return Err(ConfigError::TooLarge { origin: shortened(argument), limit: MAX_BYTES });
        }
        let node = match document.parse() {
            Ok(node) => node,
            Err(error) => {
                // What is no YAML may be a path all the same: `*.txt` reads as an alias.
                let node = unlocated(Yaml::Text(value.trim().to_owned()));
                match self.clone().set(key, Input { node: &node, source: value }) {
                    Some(Ok(())) => node,
                    _ => return Err(error),
                }
            }
        };
        let mut layer = Layer::over(self.clone(), &document);
        layer.apply(key, &node, node.referenced);
        let (mut config, applied) = layer.finish()?;
        for path in &applied {
            config.unset_rivals(path);
        }
        *self = config;
        Ok(applied)
    }

    /// Unsets what files say against a key that the command line has set.
    fn unset_rivals(&mut self, path: &str) {
        if self.origins.get(path).is_none() {
            return;
        }
        for (one, other) in RIVALS {
            for (winner, loser) in [(one, other), (other, one)] {
                if is_within(path, winner) {
                    let losing = self.origins.in_files().filter(|path| is_within(path, loser));
                    for path in losing.map(str::to_owned).collect::<Vec<_>>() {
                        self.set(&path, Input { node: &unlocated(Yaml::Null), source: "" });
                        self.origins.remove(&path);
                    }
                }
            }
        }
    }
}

/// What the command line says of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Override {
    /// The dotted path.
    pub key: String,
    /// The value, in YAML.
    pub value: String,
    /// What errors call it: `--batch-size 4`.
    pub argument: String,
}

impl Override {
    /// The argument of a `--set`.
    ///
    /// # Errors
    /// It is no `KEY=VALUE`.
    pub fn set(assignment: &str) -> Result<Override, ConfigError> {
        let malformed = |reason| ConfigError::MalformedAssignment { argument: shortened(assignment), reason };
        let (key, value) = assignment.split_once('=').ok_or_else(|| malformed("there is no '=' in it"))?;
        if key.trim().is_empty() {
            return Err(malformed("there is no key before the '='"));
        }
        let (key, value) = (key.trim().to_owned(), value.to_owned());
        Ok(Override { key, value, argument: format!("--set {assignment}") })
    }
}

/// The text of a file, and its name.
pub(super) fn read_file(path: &Path) -> Result<(String, String), ConfigError> {
    let fail = |source| ConfigError::Read { path: path.to_owned(), source };
    let mut bytes = Vec::new();
    File::open(path).map_err(fail)?.take(MAX_BYTES + 1).read_to_end(&mut bytes).map_err(fail)?;
    let origin = shortened_origin(&path.display().to_string());
    Ok((utf8(&bytes, &origin)?.to_owned(), origin))
}

fn utf8<'a>(bytes: &'a [u8], origin: &str) -> Result<&'a str, ConfigError> {
    if bytes.len() as u64 > MAX_BYTES {
        return Err(ConfigError::TooLarge { origin: origin.to_owned(), limit: MAX_BYTES });
    }
    std::str::from_utf8(bytes).map_err(|e| {
        let valid = String::from_utf8_lossy(bytes.get(..e.valid_up_to()).unwrap_or_default());
        let column = valid.chars().rev().take_while(|c| *c != '\n').count() + 1;
        ConfigError::NotUtf8 { origin: origin.to_owned(), line: valid.matches('\n').count() + 1, column }
    })
}

/// What a file says, and what is wrong with it: errors in values with their keys.
fn layer_of(text: &str, origin: &str) -> Result<(RawConfig, Vec<Wrong>), ConfigError> {
    let origin = shortened_origin(origin);
    if text.len() as u64 > MAX_BYTES {
        return Err(ConfigError::TooLarge { origin, limit: MAX_BYTES });
    }
    let document = Document { text, kind: NodeKind::File(&origin) };
    let node = document.parse()?;
    if matches!(node.value, Yaml::Null) {
        return Err(ConfigError::Empty { origin });
    }
    let mut layer = Layer::over(RawConfig::default(), &document);
    layer.apply_section("", &node, node.referenced);
    Ok((layer.config, layer.errors))
}

/// There is no key of this name; `argument` is what named it. Of a section, its first key is what was probably meant.
pub(super) fn unknown_key(key: &str, argument: &str) -> ConfigError {
    let first = keys::members(key).first().map(|name| format!("{key}.{name}"));
    let nearest = first.or_else(|| keys::suggest(key));
    ConfigError::UnknownKey { place: Place::argument(argument), key: shortened(key), nearest }
}

/// Whether a path is `section` or a key in it.
fn is_within(path: &str, section: &str) -> bool {
    path.strip_prefix(section).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

fn unlocated(value: Yaml) -> Node {
    Node::new(value, Location::UNKNOWN, Location::UNKNOWN)
}

/// A text with its name.
pub(super) struct Document<'a> {
    pub text: &'a str,
    pub kind: NodeKind<'a>,
}

pub(super) enum NodeKind<'a> {
    File(&'a str),
    Argument(&'a str),
}

impl Document<'_> {
    pub fn place(&self, location: Location) -> Place {
        match self.kind {
            NodeKind::File(origin) => Place::in_text(origin, self.text, location),
            NodeKind::Argument(argument) => Place::argument(argument),
        }
    }

    pub fn parse(&self) -> Result<Node, ConfigError> {
        document::parse(self.text).map_err(|error| {
            let error = error.without_snippet();
            let place = self.place(error.location().unwrap_or(Location::UNKNOWN));
            match error {
                YamlError::DuplicateMappingKey { key, .. } => {
                    ConfigError::DuplicateKey { place, key: shortened(key.as_deref().unwrap_or("a key")) }
                }
                _ => ConfigError::Syntax { place, reason: reason(error) },
            }
        })
    }
}

/// What is wrong with a text that is no YAML, and what to do about it.
fn reason(error: &YamlError) -> String {
    match error {
        YamlError::MultipleDocuments { .. } => {
            "a second document begins here; a configuration is one document".to_owned()
        }
        YamlError::UnknownAnchor { .. } => {
            "'*' refers to an anchor that does not exist; put text that starts with '*' in quotes".to_owned()
        }
        YamlError::Budget { .. }
        | YamlError::AliasReplayLimitExceeded { .. }
        | YamlError::AliasReplayStackDepthExceeded { .. }
        | YamlError::AliasExpansionLimitExceeded { .. } => {
            "nested deeper, or larger, than any configuration; is this a configuration file?".to_owned()
        }
        other => {
            let message = other.to_string();
            let end = message.rfind(" at line ").unwrap_or(message.len());
            format!("not valid YAML: {}", message.get(..end).unwrap_or(&message))
        }
    }
}

/// One text being applied over a configuration.
struct Layer<'a> {
    config: RawConfig,
    document: &'a Document<'a>,
    /// Paths that this text has set.
    applied: BTreeSet<String>,
    errors: Vec<Wrong>,
}

/// An error, with its key where another value would mend it.
type Wrong = (Option<String>, ConfigError);

impl<'a> Layer<'a> {
    fn over(config: RawConfig, document: &'a Document<'a>) -> Layer<'a> {
        Layer { config, document, applied: BTreeSet::new(), errors: Vec::new() }
    }

    fn finish(self) -> Result<(RawConfig, BTreeSet<String>), ConfigError> {
        ConfigError::collect(self.errors.into_iter().map(|(_, error)| error).collect())?;
        Ok((self.config, self.applied))
    }

    /// Sets the key or section at `path` to a value; `key` is where the key stands.
    fn apply(&mut self, path: &str, node: &Node, key: Location) {
        if self.errors.len() >= MOST_ERRORS {
            return;
        }
        let input = Input { node, source: self.document.text };
        let outcome = match self.config.set(path, input) {
            Some(outcome) => outcome,
            None if path.is_empty() => return self.unknown(path, key),
            None => return self.apply_section(path, node, key),
        };
        if let Err(mismatch) = outcome {
            let place = self.document.place(mismatch.location);
            // A mapping has an argument: what is wrong is that, and not the word.
            let word = input.word().filter(|_| !matches!(node.value, Yaml::Map(_)));
            let refusal = word.and_then(|word| Some((word, availability::refusal(path, word)?)));
            let error = match refusal {
                Some((word, refusal)) => ConfigError::Unavailable {
                    place: Some(place),
                    key: path.to_owned(),
                    value: shortened(word),
                    reason: refusal.reason,
                    instead: refusal.instead,
                },
                None => ConfigError::WrongValue {
                    place,
                    key: path.to_owned(),
                    nearest: input.word().and_then(|word| keys::suggest_word(&mismatch.expected, word)),
                    expected: mismatch.expected,
                    got: mismatch.got,
                },
            };
            self.errors.push((Some(path.to_owned()), error));
            return;
        }
        if !self.applied.insert(path.to_owned()) {
            let error = ConfigError::DuplicateKey { place: self.document.place(key), key: path.to_owned() };
            self.errors.push((None, error));
        }
        if matches!(node.value, Yaml::Null) {
            self.config.origins.remove(path);
        } else {
            self.config.origins.insert(path, self.document.place(node.referenced));
        }
    }

    /// Goes over the keys of the section at `path`, which is empty for the whole document.
    fn apply_section(&mut self, path: &str, node: &Node, key: Location) {
        let members = keys::members(path);
        if members.is_empty() {
            return self.unknown(path, key);
        }
        match &node.value {
            Yaml::Map(entries) => {
                for (name, value) in entries {
                    let inner =
                        if path.is_empty() { name.value.clone() } else { format!("{path}.{}", name.value) };
                    self.apply(&inner, value, name.referenced);
                }
            }
            Yaml::Null => {}
            Yaml::Text(_) | Yaml::Unsigned(_) | Yaml::Float(_) if path == "model" => {
                self.apply("model.path", node, key);
            }
            _ => {
                let got = Input { node, source: self.document.text }.describe();
                let error = ConfigError::WrongValue {
                    place: self.document.place(node.referenced),
                    key: if path.is_empty() { "the document".to_owned() } else { path.to_owned() },
                    expected: format!("a mapping of {}", members.join(", ")),
                    got,
                    nearest: None,
                };
                self.errors.push((None, error));
            }
        }
    }

    fn unknown(&mut self, path: &str, key: Location) {
        let (place, nearest) = (self.document.place(key), keys::suggest(path));
        self.errors.push((None, ConfigError::UnknownKey { place, key: shortened(path), nearest }));
    }
}
