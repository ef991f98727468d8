//! What a repository holds, as the hub's API lists it.

use std::collections::BTreeMap;

use serde::Deserialize;

use crate::id::is_relative_file;

/// A file in a listing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Listed {
    /// Its bytes, where the listing says so.
    pub size: Option<u64>,
    /// The name of its blob, where the listing says so.
    pub etag: Option<String>,
}

/// A revision of a repository.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Listing {
    /// The commit.
    pub commit: String,
    /// The files by name.
    pub files: BTreeMap<String, Listed>,
}

#[derive(Deserialize)]
struct Answer {
    sha: String,
    #[serde(default)]
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Sibling {
    #[serde(rename = "rfilename")]
    name: String,
    #[serde(default)]
    size: Option<u64>,
    #[serde(default)]
    blob_id: Option<String>,
    #[serde(default)]
    lfs: Option<Lfs>,
}

#[derive(Deserialize)]
struct Lfs {
    #[serde(default)]
    sha256: Option<String>,
    #[serde(default)]
    size: Option<u64>,
}

impl Listing {
    /// Reads `GET /api/models/org/name/revision/main?blobs=true`. Names that lead out of the repository are refused.
    pub(crate) fn parse(json: &[u8]) -> Result<Listing, String> {
        let answer: Answer = serde_json::from_slice(json).map_err(|e| format!("no listing of files: {e}"))?;
        if !is_plain_name(&answer.sha) {
            return Err(format!("{:?} is no commit", answer.sha));
        }
        let mut files = BTreeMap::new();
        for Sibling { name, size, blob_id, lfs } in answer.siblings {
            if !is_relative_file(&name) {
                return Err(format!("{name:?} is no file of a repository"));
            }
            let (sha256, lfs_size) = lfs.map_or((None, None), |lfs| (lfs.sha256, lfs.size));
            let etag = sha256.or(blob_id).filter(|etag| is_plain_name(etag));
            files.insert(name, Listed { size: lfs_size.or(size), etag });
        }
        Ok(Listing { commit: answer.sha, files })
    }
}

/// Whether a commit or the name of a blob may be a file's name in the cache.
pub(crate) fn is_plain_name(text: &str) -> bool {
    (1..=128).contains(&text.len())
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b))
        && !text.starts_with('.')
        // What the cache itself adds to the name of a content.
        && !text.ends_with(".incomplete")
        && !text.ends_with(".lock")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn sizes_and_contents_are_those_of_the_large_file_store_where_there_are_any() {
        let json = br#"{"sha":"abc","siblings":[{"rfilename":"config.json","size":7,"blobId":"b1"},
            {"rfilename":"m.gguf","size":130,"blobId":"b2","lfs":{"sha256":"ff","size":9000,"pointerSize":130}},
            {"rfilename":"old"}],"gated":false}"#;
        let listing = Listing::parse(json).unwrap();
        assert_eq!(listing.files["m.gguf"], Listed { size: Some(9000), etag: Some("ff".to_owned()) });
        assert_eq!(listing.files["config.json"], Listed { size: Some(7), etag: Some("b1".to_owned()) });
        assert_eq!(listing.files["old"], Listed::default());
    }

    #[test]
    fn names_that_lead_out_are_refused() {
        for name in ["../x", "/etc/passwd", "a/../../x", "a\\\\b", "c:x", "", "a//b", "a\\u0000"] {
            let json = format!(r#"{{"sha":"abc","siblings":[{{"rfilename":"{name}"}}]}}"#);
            assert!(Listing::parse(json.as_bytes()).is_err(), "{name}");
        }
        for sha in ["../..", "/x", ".", "", "a/b"] {
            assert!(Listing::parse(format!(r#"{{"sha":"{sha}"}}"#).as_bytes()).is_err(), "{sha}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_listing_or_none(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = Listing::parse(&bytes);
        }
    }
}
