//! Which files of a repository a model is.

use std::collections::BTreeSet;
use std::path::Path;

use serde::Deserialize;
use serde::de::IgnoredAny;

use crate::id::is_relative_file;

/// Files of the shape and the tokenizer; a repository has some of them.
pub(crate) const COMPANIONS: [&str; 9] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "adapter_config.json",
];
/// Templates beside the one that is meant where none is named.
pub(crate) const TEMPLATES: &str = "additional_chat_templates/";

/// All weights in one file.
pub(crate) const SINGLE: &str = "model.safetensors";
/// The list of the files that the weights are in.
pub(crate) const INDEX: &str = "model.safetensors.index.json";
/// The weights of an adapter.
pub(crate) const ADAPTER: &str = "adapter_model.safetensors";

/// Which file holds the weights; the first that a repository has counts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Weights {
    /// One safetensors file.
    File(&'static str),
    /// As many as the index says.
    Sharded,
    /// One GGUF file, which has everything else in it.
    Gguf(String),
}

/// The ways to have weights.
pub(crate) const WEIGHTS: [(&str, Weights); 3] =
    [(SINGLE, Weights::File(SINGLE)), (INDEX, Weights::Sharded), (ADAPTER, Weights::File(ADAPTER))];

/// An index longer than this is none.
const MAX_INDEX: u64 = 64 << 20;

#[derive(Deserialize)]
struct Index {
    weight_map: std::collections::HashMap<String, String>,
    #[serde(default, rename = "metadata")]
    _metadata: IgnoredAny,
}

/// The files that an index names.
pub(crate) fn shards(index: &Path) -> Result<BTreeSet<String>, String> {
    let length = std::fs::metadata(index).map_err(|e| e.to_string())?.len();
    if length > MAX_INDEX {
        return Err(format!("{length} bytes are too long for an index"));
    }
    let bytes = std::fs::read(index).map_err(|e| e.to_string())?;
    let index: Index = serde_json::from_slice(&bytes).map_err(|e| e.to_string())?;
    let shards: BTreeSet<String> = index.weight_map.into_values().collect();
    if let Some(shard) = shards.iter().find(|shard| !is_relative_file(shard) || shard.contains('/')) {
        return Err(format!("shard {shard:?} lies outside its folder"));
    }
    if shards.is_empty() {
        return Err("it names no shards".to_owned());
    }
    Ok(shards)
}

/// What a commit's folder lacks to be a model, or nothing.
pub(crate) fn missing(snapshot: &Path, file: Option<&str>) -> Vec<String> {
    let has = |name: &str| snapshot.join(name).is_file();
    if let Some(file) = file {
        return if has(file) { Vec::new() } else { vec![file.to_owned()] };
    }
    let mut missing = Vec::new();
    if !has("config.json") && !has("adapter_config.json") {
        missing.push("config.json".to_owned());
    }
    if has(SINGLE) || has(ADAPTER) {
        return missing;
    }
    if !has(INDEX) {
        missing.push(format!("{SINGLE} (or {INDEX} and its shards)"));
        return missing;
    }
    match shards(&snapshot.join(INDEX)) {
        Ok(shards) => missing.extend(shards.into_iter().filter(|shard| !has(shard))),
        Err(reason) => missing.push(format!("a usable {INDEX} ({reason})")),
    }
    missing
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_a_model_once_all_shards_are_there() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
        assert_eq!(missing(folder.path(), None).len(), 2);
        write("config.json", "{}");
        write(
            INDEX,
            r#"{"metadata": {"total_size": 1}, "weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}"#,
        );
        write("1.safetensors", "");
        assert_eq!(missing(folder.path(), None), ["2.safetensors"]);
        write("2.safetensors", "");
        assert!(missing(folder.path(), None).is_empty());
        assert_eq!(missing(folder.path(), Some("q4/x.gguf")), ["q4/x.gguf"]);
    }

    #[test]
    fn shards_outside_the_folder_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(INDEX);
        for shard in ["../x", "/etc/passwd", "a/b", "", "..", "c:x"] {
            std::fs::write(&path, format!(r#"{{"weight_map": {{"a": "{shard}"}}}}"#)).unwrap();
            assert!(shards(&path).unwrap_err().contains("outside"), "{shard:?}");
        }
    }
}
