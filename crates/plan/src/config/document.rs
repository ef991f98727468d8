//! A YAML text as a tree of located values. The limits on what a text from a stranger may cost are here; what
//! the keys mean is not.

use std::fmt;

use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_saphyr::{NonFiniteFloatPolicy, Spanned};

/// The longest text that is read, in bytes.
pub(super) const MAX_BYTES: u64 = 1 << 20;
/// Nesting of lists and mappings; the document itself needs four.
const MAX_DEPTH: usize = 32;
/// Scalars, lists and mappings, those repeated by aliases included.
const MAX_NODES: usize = 50_000;

/// A value and where it stands.
pub(super) type Node = Spanned<Yaml>;

/// A value of YAML 1.2's core schema.
#[derive(Debug)]
pub(super) enum Yaml {
    Null,
    Bool(bool),
    Unsigned(u64),
    Negative(i64),
    Float(f64),
    Text(String),
    List(Vec<Node>),
    Map(Vec<(Spanned<String>, Node)>),
}

/// A value to be read, with the text it stands in.
#[derive(Clone, Copy)]
pub(super) struct Input<'a> {
    pub node: &'a Node,
    pub source: &'a str,
}

impl<'a> Input<'a> {
    /// The characters of a number or a boolean as they were written: a folder may be called `2024`.
    pub fn written(&self) -> Option<&'a str> {
        let span = self.node.defined.span();
        let start = usize::try_from(span.byte_offset()?).ok()?;
        let length = usize::try_from(span.byte_len()?).ok()?;
        let written = self.source.get(start..start.checked_add(length)?)?.trim();
        (!written.is_empty() && !written.starts_with(['"', '\''])).then_some(written)
    }

    /// The word that stands for the value: a scalar's characters, or the first key of a mapping.
    pub fn word(&self) -> Option<&'a str> {
        match &self.node.value {
            Yaml::Text(text) => Some(text),
            Yaml::Map(entries) => entries.first().map(|(key, _)| key.value.as_str()),
            Yaml::Bool(_) | Yaml::Unsigned(_) | Yaml::Negative(_) | Yaml::Float(_) => self.written(),
            Yaml::Null | Yaml::List(_) => None,
        }
    }

    /// What the value is, for a message.
    pub fn describe(&self) -> String {
        match &self.node.value {
            Yaml::Null => "nothing".to_owned(),
            Yaml::Bool(value) => value.to_string(),
            Yaml::Unsigned(value) => format!("the number {value}"),
            Yaml::Negative(value) => format!("the number {value}"),
            Yaml::Float(value) => format!("the number {value:?}"),
            Yaml::Text(text) => format!("'{}'", shortened(text)),
            Yaml::List(items) => format!("a list of {}", items.len()),
            Yaml::Map(_) => "a mapping".to_owned(),
        }
    }
}

/// Parses one document.
pub(super) fn parse(text: &str) -> Result<Node, serde_saphyr::Error> {
    let options = serde_saphyr::options! {
        budget: serde_saphyr::budget! {
            max_depth: MAX_DEPTH,
            max_nodes: MAX_NODES,
            max_events: 4 * MAX_NODES,
            max_aliases: 1_000,
            max_anchors: 1_000,
            max_recorded_anchor_events: 4 * MAX_NODES,
        },
        alias_limits: serde_saphyr::alias_limits! {
            max_total_replayed_events: MAX_NODES,
        },
        strict_booleans: true,
        non_finite_float_policy: NonFiniteFloatPolicy::PassThrough,
        with_snippet: false,
    };
    serde_saphyr::from_str_with_options(text, options)
}

/// A text on one line, without control characters, cut where it is long.
pub(super) fn shortened(text: &str) -> String {
    const LONGEST: usize = 60;
    let mut shown: String = text.chars().take(LONGEST).flat_map(visible).collect();
    if text.chars().nth(LONGEST).is_some() {
        shown.push_str("...");
    }
    shown
}

/// A character, or its escape if it would change what the terminal shows.
fn visible(c: char) -> impl Iterator<Item = char> {
    let escaped = c.is_control()
        || matches!(c, '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    let escape = escaped.then(|| c.escape_default()).into_iter().flatten();
    escape.chain((!escaped).then_some(c))
}

impl<'de> Deserialize<'de> for Yaml {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct YamlVisitor;

        impl<'de> Visitor<'de> for YamlVisitor {
            type Value = Yaml;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a text, number, boolean, list or mapping")
            }
            fn visit_unit<E>(self) -> Result<Yaml, E> {
                Ok(Yaml::Null)
            }
            fn visit_none<E>(self) -> Result<Yaml, E> {
                Ok(Yaml::Null)
            }
            fn visit_bool<E>(self, value: bool) -> Result<Yaml, E> {
                Ok(Yaml::Bool(value))
            }
            fn visit_u64<E>(self, value: u64) -> Result<Yaml, E> {
                Ok(Yaml::Unsigned(value))
            }
            fn visit_i64<E>(self, value: i64) -> Result<Yaml, E> {
                Ok(u64::try_from(value).map_or(Yaml::Negative(value), Yaml::Unsigned))
            }
            fn visit_f64<E>(self, value: f64) -> Result<Yaml, E> {
                Ok(Yaml::Float(value))
            }
            fn visit_str<E>(self, value: &str) -> Result<Yaml, E> {
                Ok(Yaml::Text(value.to_owned()))
            }
            fn visit_string<E>(self, value: String) -> Result<Yaml, E> {
                Ok(Yaml::Text(value))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<Yaml, A::Error> {
                let mut items = Vec::new();
                while let Some(item) = access.next_element()? {
                    items.push(item);
                }
                Ok(Yaml::List(items))
            }
            fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Yaml, A::Error> {
                let mut entries = Vec::new();
                while let Some(entry) = access.next_entry()? {
                    entries.push(entry);
                }
                Ok(Yaml::Map(entries))
            }
        }
        deserializer.deserialize_any(YamlVisitor)
    }
}
