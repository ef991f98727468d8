//! A document as keys with values.

use std::path::{Path, PathBuf};

use crate::config::document::{Input, Node, Yaml, shortened};
use crate::config::load::Document;

/// The value of a key that is set to nothing.
pub const NULL: &str = "null";

/// A key of another program's file: `zero_optimization.stage`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leaf {
    /// With dots where it is nested.
    pub key: String,
    /// As it is written; a list in brackets, as JSON.
    pub value: String,
    /// File, line and column.
    pub place: String,
}

impl Leaf {
    /// For a list of what is not understood.
    pub fn shown(&self) -> String {
        format!("{}: {} ({})", self.place, self.key, shortened(&self.value))
    }

    /// For what it sets, and for an error.
    pub fn argument(&self) -> String {
        format!("{}: {} {}", self.place, self.key, shortened(&self.value))
    }

    /// The file that it names, where that is read too: DeepSpeed's, or accelerate's in a script. It is looked for from the folder of the
    /// file that names it on, and from where the command runs.
    pub fn named_file(&self, folder: &Path) -> Option<PathBuf> {
        if !self.names_a_file() {
            return None;
        }
        let (own, here) = (folder.join(&self.value), PathBuf::from(&self.value));
        Some(if !own.exists() && here.exists() { here } else { own })
    }

    pub(super) fn names_a_file(&self) -> bool {
        let is = |ends: &[&str]| ends.iter().any(|end| self.value.ends_with(end));
        match self.key.as_str() {
            "deepspeed" | "deepspeed_config" | "deepspeed_config.deepspeed_config_file" => is(&[".json"]),
            _ => self.names_its_launchers() && is(&[".yaml", ".yml", ".json"]),
        }
    }

    /// Whether the file that it names is accelerate's, which the command that names it goes over.
    pub fn names_its_launchers(&self) -> bool {
        self.key == "config_file"
    }
}

/// Everything that a document says. The document's depth is limited where it is read.
pub fn flatten(key: String, input: Input<'_>, document: &Document<'_>, leaves: &mut Vec<Leaf>) {
    let joined = |name: &str| if key.is_empty() { name.to_owned() } else { format!("{key}.{name}") };
    let place = || document.place(input.node.referenced).to_string();
    match &input.node.value {
        // torchtune's way to say that it does not clip; anywhere else it says nothing.
        Yaml::Null if key == "clip_grad_norm" => {
            let place = place();
            leaves.push(Leaf { key, value: NULL.to_owned(), place });
        }
        Yaml::Null => {}
        Yaml::Map(entries) => {
            for (name, node) in entries {
                flatten(joined(&name.value), Input { node, ..input }, document, leaves);
            }
        }
        // A pair of betas is two numbers, anything else one value.
        Yaml::List(items) if key.ends_with("betas") => {
            for (place, node) in items.iter().enumerate() {
                flatten(joined(&place.to_string()), Input { node, ..input }, document, leaves);
            }
        }
        Yaml::List(items) => {
            let words: Vec<String> = items.iter().map(|node| quoted(node, input.source)).collect();
            let (value, place) = (format!("[{}]", words.join(", ")), place());
            leaves.push(Leaf { key, value, place });
        }
        Yaml::Text(text) => {
            let place = place();
            leaves.push(Leaf { key, value: text.clone(), place });
        }
        _ => {
            let (value, place) = (input.written().unwrap_or_default().to_owned(), place());
            leaves.push(Leaf { key, value, place });
        }
    }
}

/// An item of a list, as YAML reads it back.
fn quoted(node: &Node, source: &str) -> String {
    match &node.value {
        Yaml::Text(text) => serde_json::Value::from(text.as_str()).to_string(),
        _ => Input { node, source }.written().unwrap_or("...").to_owned(),
    }
}
