//! Hub ids: `org/name`, a revision after `@`, one file after `:`.

use std::fmt;
use std::str::FromStr;

use crate::error::IdError;

/// The revision that an id without one means.
const DEFAULT_REVISION: &str = "main";

/// The hub's own limit for each half of an id.
const MAX_PART: usize = 96;

/// A model of the hub: `org/name[@revision][:file.gguf]`; the file may also come before the revision.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct HubId {
    repo: String,
    revision: Option<String>,
    file: Option<String>,
}

impl HubId {
    /// `org/name`.
    pub fn repo(&self) -> &str {
        &self.repo
    }

    /// A branch, a tag or a commit.
    pub fn revision(&self) -> &str {
        self.revision.as_deref().unwrap_or(DEFAULT_REVISION)
    }

    /// The one file that is asked for.
    pub fn file(&self) -> Option<&str> {
        self.file.as_deref()
    }
}

impl FromStr for HubId {
    type Err = IdError;

    fn from_str(text: &str) -> Result<HubId, IdError> {
        let end = text.find(['@', ':']).unwrap_or(text.len());
        let (repo, mut rest) = text.split_at(end);
        let mut parts = repo.split('/');
        let (Some(org), Some(name), None) = (parts.next(), parts.next(), parts.next()) else {
            return Err(IdError::Form);
        };
        if let Some(part) = [org, name].into_iter().find(|part| !is_repo_part(part)) {
            return Err(IdError::Part(part.to_owned()));
        }
        if let Some(extension) = file_extension(name) {
            return Err(IdError::File(extension));
        }
        let mut id = HubId { repo: repo.to_owned(), revision: None, file: None };
        while let Some(mark) = rest.chars().next() {
            let after = &rest[mark.len_utf8()..];
            // Only a mark that is still to come ends a part, so that a file's name may hold one.
            let open = |c: char| {
                (mark == '@' && c == ':' && id.file.is_none())
                    || (mark == ':' && c == '@' && id.revision.is_none())
            };
            let end = after.find(open).unwrap_or(after.len());
            let (value, next) = after.split_at(end);
            let (slot, fine) = match mark {
                '@' => (&mut id.revision, is_revision(value)),
                _ => (&mut id.file, is_relative_file(value)),
            };
            if !fine {
                return Err(if mark == '@' { IdError::Revision } else { IdError::FileName }(
                    value.to_owned(),
                ));
            }
            if slot.replace(value.to_owned()).is_some() {
                return Err(IdError::Form);
            }
            rest = next;
        }
        Ok(id)
    }
}

impl fmt::Display for HubId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.repo)?;
        if let Some(revision) = &self.revision {
            write!(f, "@{revision}")?;
        }
        if let Some(file) = &self.file {
            write!(f, ":{file}")?;
        }
        Ok(())
    }
}

/// Letters, digits, `-`, `_` and `.`, neither `-` nor `.` at an end and none of them twice in a row.
fn is_repo_part(part: &str) -> bool {
    (1..=MAX_PART).contains(&part.len())
        && part.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b))
        && !part.starts_with(['-', '.'])
        && !part.ends_with(['-', '.'])
        && !part.contains("--")
        && !part.contains("..")
}

/// What the name of a file on disk ends in, and no model's on the hub does.
fn file_extension(name: &str) -> Option<&'static str> {
    [".gguf", ".safetensors", ".json"].into_iter().find(|extension| name.ends_with(extension))
}

/// Whether a branch, tag or commit may be put into a URL and a path as it is.
pub(crate) fn is_revision(text: &str) -> bool {
    text.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_./+".contains(&b)) && is_relative_file(text)
}

/// Whether a name is a file's below some folder: no way out of it, and nothing that a system reads otherwise.
pub(crate) fn is_relative_file(name: &str) -> bool {
    (1..=1024).contains(&name.len())
        && !name.contains(['\\', ':'])
        && !name.contains(char::is_control)
        && name.split('/').all(|part| !part.is_empty() && part != "." && part != "..")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn ids_have_a_revision_and_a_file_in_either_order() {
        let id: HubId = "org/name".parse().unwrap();
        assert_eq!((id.repo(), id.revision(), id.file()), ("org/name", "main", None));
        for text in ["o/n@refs/pr/1:q4/a@b.gguf", "o/n:x.gguf@v1.0"] {
            let id: HubId = text.parse().unwrap();
            assert!(id.file().is_some() && id.revision() != "main", "{text}");
            assert_eq!(id.to_string().parse::<HubId>().unwrap(), id);
        }
    }

    #[test]
    fn what_is_no_id_is_refused() {
        for text in [
            "",
            "name",
            "a/b/c",
            "/b",
            "a/",
            "./name",
            "../name",
            "a/..",
            "a b/c",
            "a/b@",
            "a/b:",
            "a/b@..",
            "a/b:../x.gguf",
            "a/b:/etc/passwd",
            "a/b:x\\y",
            "a/b:c:d",
            "a--b/c",
            "dir/file.gguf",
            "~/x",
            "a/b@x@y",
            "a/b:x@r:y",
            "a/b@%2e%2e",
        ] {
            assert!(text.parse::<HubId>().is_err(), "{text:?}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_an_id_that_reads_back_or_none(text in "[a-c./:@\\\\ -]{0,12}|\\PC{0,12}") {
            if let Ok(id) = text.parse::<HubId>() {
                prop_assert!(!id.revision().contains("..") || id.revision().split('/').all(|p| p != ".."));
                prop_assert_eq!(id.to_string().parse::<HubId>().unwrap(), id);
            }
        }
    }
}
