//! Types of values: how each is read from YAML, shown, and described in words. Which key has which type is left
//! to the sections.

use std::fmt;
use std::path::PathBuf;

use plimsoll_memory::ByteSize;
use serde::{Serialize, Serializer};

use super::document::{Input, Yaml, shortened};
use super::section::Shown;

/// A value, or the planner's choice. Written as `auto` or as the value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Auto<T> {
    /// The planner decides.
    #[default]
    Auto,
    /// The user has decided.
    Set(T),
}

impl<T> Auto<T> {
    /// The user's value, if there is one.
    pub fn set(self) -> Option<T> {
        match self {
            Auto::Auto => None,
            Auto::Set(value) => Some(value),
        }
    }
}

impl<T: Serialize> Serialize for Auto<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Auto::Auto => serializer.serialize_str("auto"),
            Auto::Set(value) => value.serialize(serializer),
        }
    }
}

/// One or more paths, globs or folders. Written as one text or as a list of them; never empty.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Paths {
    patterns: Vec<String>,
}

impl Paths {
    /// One path, glob or folder.
    pub fn one(pattern: impl Into<String>) -> Paths {
        Paths { patterns: vec![pattern.into()] }
    }

    /// Several, in order; `None` if there are none.
    pub fn several(patterns: Vec<String>) -> Option<Paths> {
        (!patterns.is_empty()).then_some(Paths { patterns })
    }

    /// What was written, in order.
    pub fn patterns(&self) -> &[String] {
        &self.patterns
    }
}

impl Serialize for Paths {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.patterns.as_slice() {
            [one] => one.serialize(serializer),
            several => several.serialize(serializer),
        }
    }
}

impl fmt::Display for Paths {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.patterns.join(", "))
    }
}

/// A value of the wrong type.
#[derive(Debug)]
pub(super) struct Mismatch {
    pub expected: String,
    pub got: String,
    /// The value that is wrong: the key's own, or an item of its list.
    pub location: serde_saphyr::Location,
}

/// A type that a key may have.
pub(super) trait ConfigValue: Sized {
    fn read(input: Input<'_>) -> Result<Self, Mismatch>;

    /// The legal values, in words.
    fn describe() -> String;

    /// The value as it would be written.
    fn text(&self) -> String;

    /// The value if it is a number, for the checks of ranges.
    fn number(&self) -> Option<f64> {
        None
    }
}

/// Reads a value; a null is one that was left out.
pub(super) fn read<T: ConfigValue>(input: Input<'_>) -> Result<Option<T>, Mismatch> {
    match input.node.value {
        Yaml::Null => Ok(None),
        _ => T::read(input).map(Some),
    }
}

pub(super) fn show<T: ConfigValue>(value: &T) -> Shown {
    Shown { text: value.text(), number: value.number() }
}

pub(super) fn mismatch<T: ConfigValue>(input: Input<'_>) -> Mismatch {
    because::<T>(input, input.describe())
}

pub(super) fn because<T: ConfigValue>(input: Input<'_>, got: String) -> Mismatch {
    Mismatch { expected: T::describe(), got, location: input.node.referenced }
}

impl<T: ConfigValue> ConfigValue for Auto<T> {
    fn read(input: Input<'_>) -> Result<Self, Mismatch> {
        match &input.node.value {
            Yaml::Text(text) if text.eq_ignore_ascii_case("auto") => Ok(Auto::Auto),
            _ => T::read(input)
                .map(Auto::Set)
                .map_err(|inner| Mismatch { expected: Self::describe(), ..inner }),
        }
    }
    fn describe() -> String {
        format!("{} | auto", T::describe())
    }
    fn text(&self) -> String {
        match self {
            Auto::Auto => "auto".to_owned(),
            Auto::Set(value) => value.text(),
        }
    }
    fn number(&self) -> Option<f64> {
        match self {
            Auto::Auto => None,
            Auto::Set(value) => value.number(),
        }
    }
}

impl ConfigValue for u64 {
    fn read(input: Input<'_>) -> Result<Self, Mismatch> {
        /// Whole floats up to here are exact: `1e5` may be written for 100000.
        const EXACT: f64 = (1u64 << 53) as f64;
        match input.node.value {
            Yaml::Unsigned(value) => Ok(value),
            Yaml::Float(value) if value.fract() == 0.0 && (0.0..=EXACT).contains(&value) => Ok(value as u64),
            _ => Err(mismatch::<Self>(input)),
        }
    }
    fn describe() -> String {
        "whole number".to_owned()
    }
    fn text(&self) -> String {
        self.to_string()
    }
    fn number(&self) -> Option<f64> {
        Some(*self as f64)
    }
}

impl ConfigValue for f64 {
    fn read(input: Input<'_>) -> Result<Self, Mismatch> {
        match input.node.value {
            Yaml::Unsigned(value) => Ok(value as f64),
            Yaml::Negative(value) => Ok(value as f64),
            Yaml::Float(value) if value.is_finite() => Ok(value),
            _ => Err(mismatch::<Self>(input)),
        }
    }
    fn describe() -> String {
        "number".to_owned()
    }
    fn text(&self) -> String {
        format!("{self:?}")
    }
    fn number(&self) -> Option<f64> {
        Some(*self)
    }
}

impl ConfigValue for bool {
    fn read(input: Input<'_>) -> Result<Self, Mismatch> {
        match input.node.value {
            Yaml::Bool(value) => Ok(value),
            _ => Err(mismatch::<Self>(input)),
        }
    }
    fn describe() -> String {
        "true | false".to_owned()
    }
    fn text(&self) -> String {
        self.to_string()
    }
}

impl ConfigValue for ByteSize {
    fn read(input: Input<'_>) -> Result<Self, Mismatch> {
        let written = match &input.node.value {
            Yaml::Unsigned(bytes) => return Ok(ByteSize(*bytes)),
            Yaml::Float(bytes) => bytes.to_string(),
            Yaml::Text(text) => text.clone(),
            _ => return Err(mismatch::<Self>(input)),
        };
        written.parse().map_err(|e: plimsoll_memory::ParseByteSizeError| {
            because::<Self>(input, format!("'{}': {}", shortened(&e.text), e.reason))
        })
    }
    fn describe() -> String {
        "size (24GiB, 512MB, or a number of bytes)".to_owned()
    }
    fn text(&self) -> String {
        self.to_string()
    }
    fn number(&self) -> Option<f64> {
        Some(self.0 as f64)
    }
}

impl ConfigValue for String {
    fn read(input: Input<'_>) -> Result<Self, Mismatch> {
        let text = match &input.node.value {
            Yaml::Text(text) => text,
            Yaml::Unsigned(_) | Yaml::Negative(_) | Yaml::Float(_) | Yaml::Bool(_) => {
                return input.written().map(str::to_owned).ok_or_else(|| mismatch::<Self>(input));
            }
            Yaml::Null | Yaml::List(_) | Yaml::Map(_) => return Err(mismatch::<Self>(input)),
        };
        if text.is_empty() {
            return Err(because::<Self>(input, "an empty text".to_owned()));
        }
        if text.contains('\0') {
            return Err(because::<Self>(input, "a text with a NUL character".to_owned()));
        }
        Ok(text.clone())
    }
    fn describe() -> String {
        "text".to_owned()
    }
    fn text(&self) -> String {
        self.clone()
    }
}

impl ConfigValue for PathBuf {
    fn read(input: Input<'_>) -> Result<Self, Mismatch> {
        let path = String::read(input).map_err(|inner| Mismatch { expected: Self::describe(), ..inner })?;
        Ok(PathBuf::from(path))
    }
    fn describe() -> String {
        "path".to_owned()
    }
    fn text(&self) -> String {
        self.display().to_string()
    }
}

impl ConfigValue for Paths {
    fn read(input: Input<'_>) -> Result<Self, Mismatch> {
        let one =
            |input| String::read(input).map_err(|inner| Mismatch { expected: Self::describe(), ..inner });
        match &input.node.value {
            Yaml::List(items) => {
                let patterns: Result<Vec<String>, Mismatch> =
                    items.iter().map(|node| one(Input { node, ..input })).collect();
                Paths::several(patterns?).ok_or_else(|| because::<Self>(input, "an empty list".to_owned()))
            }
            _ => one(input).map(Paths::one),
        }
    }
    fn describe() -> String {
        "path, glob or folder, or a list of them".to_owned()
    }
    fn text(&self) -> String {
        self.to_string()
    }
}

/// Defines an enum whose variants are written as words. Words after the first are read as well, never written.
macro_rules! choice {
    (
        $(#[$attribute:meta])*
        pub enum $name:ident {
            $($(#[$variant_attribute:meta])* $variant:ident = $word:literal $(| $alias:literal)*,)+
        }
    ) => {
        $(#[$attribute])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum $name {
            $($(#[$variant_attribute])* $variant,)+
        }

        impl $name {
            /// Every choice, in the order in which they are listed to users.
            pub const ALL: &'static [$name] = &[$($name::$variant),+];

            /// The word that it is written as.
            pub fn name(self) -> &'static str {
                match self {
                    $($name::$variant => $word,)+
                }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(self.name())
            }
        }

        impl serde::Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(self.name())
            }
        }

        impl $crate::config::value::ConfigValue for $name {
            fn read(
                input: $crate::config::document::Input<'_>,
            ) -> Result<Self, $crate::config::value::Mismatch> {
                let words: &[(&str, $name)] =
                    &[$(($word, $name::$variant), $(($alias, $name::$variant),)*)+];
                $crate::config::value::choose(input, words)
            }
            fn describe() -> String {
                [$($word),+].join(" | ")
            }
            fn text(&self) -> String {
                self.name().to_owned()
            }
        }

        #[cfg(test)]
        impl $crate::config::sample::Sample for $name {
            fn sample(source: &mut $crate::config::sample::Source) -> Self {
                source.pick($name::ALL)
            }
        }
    };
}
pub(super) use choice;

/// The choice that a word stands for, upper case or lower.
pub(super) fn choose<T: ConfigValue + Copy>(input: Input<'_>, words: &[(&str, T)]) -> Result<T, Mismatch> {
    let Yaml::Text(text) = &input.node.value else { return Err(mismatch::<T>(input)) };
    let chosen = words.iter().find(|(word, _)| word.eq_ignore_ascii_case(text));
    chosen.map(|(_, choice)| *choice).ok_or_else(|| mismatch::<T>(input))
}
