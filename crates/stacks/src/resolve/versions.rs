//! Versions of libraries: those that were named, and of the others those of the same time.

use std::collections::BTreeMap;

use crate::request::RequestError;
use crate::run::Versions;

/// A version, `(major, minor)`.
pub type Version = (u32, u32);

/// What was current in the middle of a month, and until the next row: release dates of the package index. The last row is the newest that
/// the programs here were written against.
const RELEASES: [(&str, Versions); 49] = [
    ("2022-10", of((1, 12), (4, 23), (0, 1), (0, 35), (0, 7))),
    ("2022-11", of((1, 13), (4, 24), (0, 1), (0, 35), (0, 7))),
    ("2022-12", of((1, 13), (4, 25), (0, 1), (0, 35), (0, 7))),
    ("2023-01", of((1, 13), (4, 25), (0, 1), (0, 36), (0, 7))),
    ("2023-02", of((1, 13), (4, 26), (0, 1), (0, 37), (0, 8))),
    ("2023-03", of((2, 0), (4, 27), (0, 2), (0, 37), (0, 8))),
    ("2023-04", of((2, 0), (4, 28), (0, 2), (0, 38), (0, 9))),
    ("2023-05", of((2, 0), (4, 29), (0, 3), (0, 38), (0, 9))),
    ("2023-06", of((2, 0), (4, 30), (0, 3), (0, 39), (0, 9))),
    ("2023-07", of((2, 0), (4, 30), (0, 3), (0, 40), (0, 9))),
    ("2023-08", of((2, 0), (4, 31), (0, 4), (0, 41), (0, 10))),
    ("2023-09", of((2, 0), (4, 33), (0, 5), (0, 41), (0, 10))),
    ("2023-10", of((2, 1), (4, 34), (0, 5), (0, 41), (0, 11))),
    ("2023-11", of((2, 1), (4, 35), (0, 6), (0, 41), (0, 12))),
    ("2023-12", of((2, 1), (4, 36), (0, 7), (0, 41), (0, 12))),
    ("2024-01", of((2, 1), (4, 36), (0, 7), (0, 42), (0, 12))),
    ("2024-02", of((2, 2), (4, 37), (0, 8), (0, 42), (0, 13))),
    ("2024-03", of((2, 2), (4, 38), (0, 9), (0, 43), (0, 14))),
    ("2024-04", of((2, 2), (4, 39), (0, 10), (0, 43), (0, 14))),
    ("2024-05", of((2, 3), (4, 40), (0, 10), (0, 43), (0, 14))),
    ("2024-06", of((2, 3), (4, 41), (0, 11), (0, 43), (0, 14))),
    ("2024-07", of((2, 3), (4, 42), (0, 11), (0, 43), (0, 14))),
    ("2024-08", of((2, 4), (4, 44), (0, 12), (0, 43), (0, 14))),
    ("2024-09", of((2, 4), (4, 44), (0, 12), (0, 43), (0, 15))),
    ("2024-10", of((2, 4), (4, 45), (0, 13), (0, 44), (0, 15))),
    ("2024-11", of((2, 5), (4, 46), (0, 13), (0, 44), (0, 15))),
    ("2024-12", of((2, 5), (4, 47), (0, 14), (0, 45), (0, 16))),
    ("2025-01", of((2, 5), (4, 48), (0, 14), (0, 45), (0, 16))),
    ("2025-02", of((2, 6), (4, 48), (0, 14), (0, 45), (0, 16))),
    ("2025-03", of((2, 6), (4, 49), (0, 14), (0, 45), (0, 16))),
    ("2025-04", of((2, 6), (4, 51), (0, 15), (0, 45), (0, 16))),
    ("2025-05", of((2, 7), (4, 51), (0, 15), (0, 45), (0, 16))),
    ("2025-06", of((2, 7), (4, 52), (0, 15), (0, 46), (0, 17))),
    ("2025-07", of((2, 7), (4, 53), (0, 16), (0, 46), (0, 17))),
    ("2025-08", of((2, 8), (4, 55), (0, 17), (0, 47), (0, 17))),
    ("2025-09", of((2, 8), (4, 56), (0, 17), (0, 47), (0, 17))),
    ("2025-10", of((2, 9), (4, 57), (0, 17), (0, 48), (0, 18))),
    ("2025-11", of((2, 9), (4, 57), (0, 18), (0, 48), (0, 18))),
    ("2025-12", of((2, 9), (4, 57), (0, 18), (0, 49), (0, 18))),
    ("2026-02", of((2, 10), (5, 1), (0, 18), (0, 49), (0, 18))),
    ("2026-03", of((2, 10), (5, 3), (0, 18), (0, 49), (0, 18))),
    ("2026-04", of((2, 11), (5, 5), (0, 19), (0, 49), (0, 18))),
    ("2026-05", of((2, 12), (5, 8), (0, 19), (0, 49), (0, 19))),
    ("2026-06", of((2, 12), (5, 12), (0, 19), (0, 49), (0, 19))),
    ("2026-07", of((2, 13), (5, 14), (0, 19), (0, 49), (0, 19))),
    ("2026-08", of((2, 13), (5, 15), (0, 20), (0, 50), (0, 19))),
    ("2026-09", of((2, 14), (5, 17), (0, 21), (0, 50), (0, 19))),
    ("2026-10", of((2, 14), (5, 20), (0, 21), (0, 50), (0, 19))),
    ("2026-11", of((2, 15), (5, 23), (0, 21), (0, 50), (0, 19))),
];

const fn of(
    torch: Version,
    transformers: Version,
    peft: Version,
    bitsandbytes: Version,
    deepspeed: Version,
) -> Versions {
    Versions { torch, transformers, peft, bitsandbytes, deepspeed }
}

/// A library of [`Versions`].
type Library = (&'static str, fn(&mut Versions) -> &mut Version);

const LIBRARIES: [Library; 5] = [
    ("torch", |versions| &mut versions.torch),
    ("transformers", |versions| &mut versions.transformers),
    ("peft", |versions| &mut versions.peft),
    ("bitsandbytes", |versions| &mut versions.bitsandbytes),
    ("deepspeed", |versions| &mut versions.deepspeed),
];

/// The versions of a run.
pub fn versions(named: &BTreeMap<String, String>) -> Result<Versions, RequestError> {
    let mut row = named.is_empty().then_some(RELEASES.len() - 1);
    let mut fixed = Vec::new();
    for (name, text) in named {
        let at = if name == "date" {
            dated(text)?
        } else {
            let (_, field) = LIBRARIES.iter().find(|(library, _)| library == name).ok_or_else(|| {
                let known = LIBRARIES.map(|(library, _)| library).join(", ");
                RequestError::Value {
                    key: "versions",
                    value: name.clone(),
                    expected: format!("{known}, or date for the versions of a month"),
                }
            })?;
            let version = parsed(text).ok_or_else(|| wrong(name, text, "a version such as 4.44"))?;
            fixed.push((field, version));
            let later = RELEASES.iter().position(|(_, all)| *field(&mut all.clone()) >= version);
            later.unwrap_or(RELEASES.len() - 1)
        };
        row = row.max(Some(at));
    }
    let (_, mut versions) = RELEASES[row.unwrap_or(RELEASES.len() - 1)];
    for (field, version) in fixed {
        *field(&mut versions) = version;
    }
    Ok(versions)
}

/// The row of a month: the last that is not later.
fn dated(text: &str) -> Result<usize, RequestError> {
    let is_month = text.len() >= 7
        && text.bytes().take(7).enumerate().all(|(at, byte)| match at {
            4 => byte == b'-',
            _ => byte.is_ascii_digit(),
        });
    if !is_month || !("01"..="12").contains(&&text[5..7]) {
        return Err(wrong("date", text, "a month such as 2024-03"));
    }
    Ok(RELEASES.iter().rposition(|(since, _)| *since <= text).unwrap_or(0))
}

fn wrong(name: &str, text: &str, expected: &str) -> RequestError {
    RequestError::Value { key: "versions", value: format!("{name} {text:?}"), expected: expected.to_owned() }
}

/// `4.44`, `4.44.2`, `2.7.1+cu128`, `5`.
fn parsed(text: &str) -> Option<Version> {
    let mut parts = text.trim().trim_start_matches('v').split('.');
    let major = parts.next()?.parse().ok()?;
    let minor = match parts.next() {
        None => 0,
        Some(part) => {
            let digits = part.find(|c: char| !c.is_ascii_digit()).unwrap_or(part.len());
            part[..digits].parse().ok()?
        }
    };
    Some((major, minor))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_names(named: &[(&str, &str)]) -> Result<Versions, RequestError> {
        versions(&named.iter().map(|(name, text)| ((*name).to_owned(), (*text).to_owned())).collect())
    }

    /// torch and transformers of some requests.
    #[test]
    fn what_was_not_named_is_of_the_same_time() {
        for (named, torch, transformers) in [
            (&[][..], (2, 15), (5, 23)),
            (&[("transformers", "4.44.2")], (2, 4), (4, 44)),
            (&[("torch", "2.7.1+cu128")], (2, 7), (4, 51)),
            (&[("torch", "2.5"), ("transformers", "4.40")], (2, 5), (4, 40)),
            (&[("peft", "0.10")], (2, 2), (4, 39)),
            (&[("date", "2024-03")], (2, 2), (4, 38)),
            (&[("date", "2024-04-17")], (2, 2), (4, 39)),
            (&[("date", "2026-01")], (2, 9), (4, 57)),
            (&[("date", "2019-01")], (1, 12), (4, 23)),
            (&[("transformers", "9.1")], (2, 15), (9, 1)),
        ] {
            let found = of_names(named).unwrap();
            assert_eq!((found.torch, found.transformers), (torch, transformers), "{named:?}");
        }
    }

    #[test]
    fn what_is_no_version_is_refused_by_name() {
        for (name, text) in [
            ("torch", "new"),
            ("numpy", "1.0"),
            ("date", "March"),
            ("torch", ""),
            ("date", "2024-13"),
            ("date", "2024-00"),
        ] {
            let error = of_names(&[(name, text)]).unwrap_err().to_string();
            assert!(error.starts_with("versions: "), "{error}");
            assert!(error.contains(name), "{error}");
        }
    }
}
