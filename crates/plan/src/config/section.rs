//! Sections of the document. A key is defined once, with its type, default, range and help; `section!` makes of
//! it a field, a default, a way to set it and an entry of the listing.

use super::document::Input;
use super::value::Mismatch;

/// A key of the document, described for people.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct KeyDoc {
    /// The dotted path: `training.batch_size`.
    pub path: &'static str,
    /// The legal values, in words.
    #[serde(rename = "type")]
    pub values: String,
    /// The value that a key has when it is left out, or in words what happens then.
    pub default: String,
    /// What it is for.
    pub help: String,
}

impl std::fmt::Display for KeyDoc {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}  (default: {})\n    {}", self.path, self.values, self.default, self.help)
    }
}

/// The range that a number must be in.
pub(super) struct Bounds {
    pub words: &'static str,
    pub hold: fn(f64) -> bool,
}

/// Dimensions of models and of batches: large enough for any, small enough for products of two in 64 bits.
const LARGEST_COUNT: f64 = (1u64 << 24) as f64;

pub(super) static AT_LEAST_ONE: Bounds = Bounds { words: "at least 1", hold: |v| v >= 1.0 };
pub(super) static RANKS: Bounds = Bounds { words: "1 to 65536", hold: |v| (1.0..=65536.0).contains(&v) };
pub(super) static ZERO_STAGES: Bounds = Bounds { words: "0 to 3", hold: |v| (0.0..=3.0).contains(&v) };
pub(super) static COUNT: Bounds =
    Bounds { words: "1 to 16777216", hold: |v| (1.0..=LARGEST_COUNT).contains(&v) };
pub(super) static LAYERS: Bounds = Bounds { words: "1 to 65536", hold: |v| (1.0..=65536.0).contains(&v) };
pub(super) static LAYERS_OR_NONE: Bounds =
    Bounds { words: "0 to 65536", hold: |v| (0.0..=65536.0).contains(&v) };
pub(super) static EXPERTS: Bounds = Bounds { words: "1 to 2048", hold: |v| (1.0..=2048.0).contains(&v) };
pub(super) static TOKEN_EXPERTS: Bounds = Bounds { words: "1 to 64", hold: |v| (1.0..=64.0).contains(&v) };
pub(super) static SHARED_EXPERTS: Bounds = Bounds { words: "0 to 64", hold: |v| (0.0..=64.0).contains(&v) };
pub(super) static WORKERS: Bounds = Bounds { words: "0 to 256", hold: |v| (0.0..=256.0).contains(&v) };
/// A plan runs every micro-batch of a pass, all of which are in memory at once.
pub(super) static MICRO_BATCHES: Bounds = Bounds { words: "1 to 256", hold: |v| (1.0..=256.0).contains(&v) };
pub(super) static TWO_TOKENS: Bounds =
    Bounds { words: "2 to 16777216", hold: |v| (2.0..=LARGEST_COUNT).contains(&v) };
pub(super) static POSITIVE: Bounds = Bounds { words: "above 0", hold: |v| v > 0.0 };
pub(super) static NOT_NEGATIVE: Bounds = Bounds { words: "0 or more", hold: |v| v >= 0.0 };
pub(super) static BELOW_ONE: Bounds =
    Bounds { words: "0 or more and below 1", hold: |v| (0.0..1.0).contains(&v) };
pub(super) static NEGATIVE: Bounds = Bounds { words: "below 0", hold: |v| v < 0.0 };
pub(super) static BITS_8_OR_32: Bounds = Bounds { words: "8 or 32", hold: |v| v == 8.0 || v == 32.0 };
pub(super) static FRACTION: Bounds = Bounds { words: "0 to 1", hold: |v| (0.0..=1.0).contains(&v) };
pub(super) static SHARE: Bounds = Bounds { words: "above 0, at most 1", hold: |v| v > 0.0 && v <= 1.0 };

/// A key of a section, with the value that it has.
pub(super) struct Entry {
    pub path: &'static str,
    pub help: &'static str,
    /// The type in words.
    pub values: fn() -> String,
    /// The default in words.
    pub default: fn() -> String,
    pub bounds: Option<&'static Bounds>,
    pub value: Option<Shown>,
}

/// A value as the checks see it.
pub(super) struct Shown {
    pub text: String,
    pub number: Option<f64>,
}

pub(super) trait Section {
    /// Sets a key, given without the section's own name; a null unsets it. `None`: there is no such key.
    fn set(&mut self, key: &str, input: Input<'_>) -> Option<Result<(), Mismatch>>;

    /// Goes over every key, set or not, in the order of their definition.
    fn visit(&self, visitor: &mut dyn FnMut(Entry));
}

/// Whether nothing of a section is set.
pub(super) fn is_unset<T: Default + PartialEq>(section: &T) -> bool {
    *section == T::default()
}

/// Defines a section. A key is `name: Type = default, BOUNDS;` or, if there is no value that stands for it when
/// it is left out, `name: Type, "what happens then", BOUNDS;`. Sections within follow after `sections`.
macro_rules! section {
    (
        $(#[$attribute:meta])*
        pub struct $name:ident at $path:literal {
            $(
                $(#[doc = $help:literal])+
                $key:ident: $type:ty $(= $default:expr)? $(, $unset:literal)? $(, $bounds:ident)?;
            )*
        }
        $(sections {
            $($(#[doc = $about:literal])+ $inner:ident: $inner_type:ty;)+
        })?
    ) => {
        $(#[$attribute])*
        #[derive(Clone, Debug, Default, PartialEq, serde::Serialize)]
        pub struct $name {
            $(
                $(#[doc = $help])+
                #[serde(skip_serializing_if = "Option::is_none")]
                pub $key: Option<$type>,
            )*
            $($(
                $(#[doc = $about])+
                #[serde(skip_serializing_if = "super::section::is_unset")]
                pub $inner: $inner_type,
            )+)?
        }

        impl $name {
            $($(
                #[doc = concat!("`", stringify!($key), "` as it was set, or its default, `", stringify!($default), "`.")]
                pub fn $key(&self) -> $type {
                    self.$key.clone().unwrap_or_else(|| $default)
                }
            )?)*
        }

        impl $crate::config::section::Section for $name {
            fn set(
                &mut self,
                key: &str,
                input: $crate::config::document::Input<'_>,
            ) -> Option<Result<(), $crate::config::value::Mismatch>> {
                match key {
                    $(stringify!($key) => {
                        return Some($crate::config::value::read(input).map(|value| self.$key = value));
                    })*
                    _ => {}
                }
                $($(
                    if let Some(key) = key.strip_prefix(concat!(stringify!($inner), ".")) {
                        return self.$inner.set(key, input);
                    }
                )+)?
                None
            }

            fn visit(&self, visitor: &mut dyn FnMut($crate::config::section::Entry)) {
                $(visitor($crate::config::section::Entry {
                    path: concat!($path, ".", stringify!($key)),
                    help: concat!($($help),+),
                    values: <$type as $crate::config::value::ConfigValue>::describe,
                    default: $crate::config::section::default_words!($type $(= $default)? $(, $unset)?),
                    bounds: [$(&$crate::config::section::$bounds,)? ].first().copied(),
                    value: self.$key.as_ref().map($crate::config::value::show),
                });)*
                $($(self.$inner.visit(visitor);)+)?
            }
        }

        #[cfg(test)]
        impl $crate::config::sample::Sample for $name {
            fn sample(source: &mut $crate::config::sample::Source) -> Self {
                $name {
                    $($key: $crate::config::sample::Sample::sample(source),)*
                    $($($inner: $crate::config::sample::Sample::sample(source),)+)?
                }
            }
        }
    };
}
pub(super) use section;

macro_rules! default_words {
    ($type:ty = $default:expr) => {
        || $crate::config::value::show::<$type>(&$default).text
    };
    ($type:ty, $unset:literal) => {
        || $unset.to_owned()
    };
}
pub(super) use default_words;
