//! Byte sizes as people write them: `24GiB`, `512MB`, or a bare number of bytes.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// A number of bytes. Parses `1.5GiB`, `512MB`, `64k`, `1024`; prints with a binary unit.
///
/// `KB`, `MB`, `GB`, `TB` are powers of 1000; `KiB`, `MiB`, `GiB`, `TiB` and the bare letters
/// `K`, `M`, `G`, `T` are powers of 1024.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ByteSize(pub u64);

/// A size that could not be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("'{text}' is not a size: {reason} (write for example 24GiB, 512MB or a number of bytes)")]
pub struct ParseByteSizeError {
    /// What was written.
    pub text: String,
    /// What is wrong with it.
    pub reason: &'static str,
}

const UNITS: &[(&str, u64)] = &[
    ("b", 1),
    ("k", 1 << 10),
    ("kib", 1 << 10),
    ("kb", 1_000),
    ("m", 1 << 20),
    ("mib", 1 << 20),
    ("mb", 1_000_000),
    ("g", 1 << 30),
    ("gib", 1 << 30),
    ("gb", 1_000_000_000),
    ("t", 1 << 40),
    ("tib", 1 << 40),
    ("tb", 1_000_000_000_000),
];

impl FromStr for ByteSize {
    type Err = ParseByteSizeError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let fail = |reason| ParseByteSizeError { text: text.to_owned(), reason };
        let trimmed = text.trim();
        let split =
            trimmed.find(|c: char| !(c.is_ascii_digit() || c == '.' || c == '_')).unwrap_or(trimmed.len());
        let (number, unit) = trimmed.split_at(split);
        let number = number.replace('_', "");
        if number.is_empty() {
            return Err(fail("it does not start with a number"));
        }
        let unit = unit.trim().to_ascii_lowercase();
        let scale = if unit.is_empty() {
            1
        } else {
            UNITS.iter().find(|(name, _)| *name == unit).ok_or_else(|| fail("unknown unit"))?.1
        };
        if let Ok(whole) = number.parse::<u64>() {
            return whole.checked_mul(scale).map(ByteSize).ok_or_else(|| fail("it is too large"));
        }
        let value: f64 = number.parse().map_err(|_| fail("the number is malformed"))?;
        let bytes = value * scale as f64;
        if bytes.is_finite() && bytes < u64::MAX as f64 {
            Ok(ByteSize(bytes.round() as u64))
        } else {
            Err(fail("it is too large"))
        }
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = match self.0 {
            0..1024 => format!("{} B", self.0),
            n => {
                let mut value = n as f64;
                let mut unit = "";
                for name in ["KiB", "MiB", "GiB", "TiB"] {
                    if value < 1023.95 {
                        break;
                    }
                    value /= 1024.0;
                    unit = name;
                }
                let digits = if value < 10.0 { 2 } else { 1 };
                format!("{value:.digits$} {unit}")
            }
        };
        f.pad(&text)
    }
}

impl Serialize for ByteSize {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u64(self.0)
    }
}

impl<'de> Deserialize<'de> for ByteSize {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl de::Visitor<'_> for Visitor {
            type Value = ByteSize;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a size such as 24GiB, 512MB or a number of bytes")
            }
            fn visit_u64<E: de::Error>(self, v: u64) -> Result<ByteSize, E> {
                Ok(ByteSize(v))
            }
            fn visit_i64<E: de::Error>(self, v: i64) -> Result<ByteSize, E> {
                u64::try_from(v).map(ByteSize).map_err(|_| E::custom("a size cannot be negative"))
            }
            fn visit_f64<E: de::Error>(self, v: f64) -> Result<ByteSize, E> {
                v.to_string().parse().map_err(E::custom)
            }
            fn visit_str<E: de::Error>(self, v: &str) -> Result<ByteSize, E> {
                v.parse().map_err(E::custom)
            }
        }
        deserializer.deserialize_any(Visitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn sizes_are_read() {
        for (text, bytes) in [
            ("0", 0),
            ("1024", 1024),
            ("24GiB", 24 << 30),
            ("24 gib", 24 << 30),
            ("512MB", 512_000_000),
            ("1.5k", 1536),
            ("2_000", 2000),
        ] {
            assert_eq!(text.parse(), Ok(ByteSize(bytes)), "{text}");
        }
    }

    #[test]
    fn nonsense_is_refused_with_a_reason() {
        for (text, reason) in [
            ("", "it does not start with a number"),
            ("-1", "it does not start with a number"),
            ("3 parsecs", "unknown unit"),
            ("1.2.3GiB", "the number is malformed"),
            ("99999999999999GiB", "it is too large"),
        ] {
            assert_eq!(text.parse::<ByteSize>().unwrap_err().reason, reason, "{text}");
        }
    }

    #[test]
    fn sizes_are_printed_with_three_figures() {
        assert_eq!(ByteSize(1000).to_string(), "1000 B");
        assert_eq!(ByteSize(4_617_089_843).to_string(), "4.30 GiB");
        assert_eq!(ByteSize(98_362_432).to_string(), "93.8 MiB");
    }

    proptest! {
        #[test]
        fn any_text_parses_or_fails_without_panic(text in ".{0,24}") {
            let _ = text.parse::<ByteSize>();
        }

        #[test]
        fn whole_bytes_round_trip(n in any::<u64>()) {
            prop_assert_eq!(n.to_string().parse(), Ok(ByteSize(n)));
        }
    }
}
