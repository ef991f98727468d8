//! The chat templates that come with a tokenizer: a default one and named ones, as Jinja sources.

use std::path::Path;

use serde_json::{Map, Value, json};

use super::TokenizerError;

/// Jinja sources, unread. `crate::chat_template` renders them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ChatTemplates {
    /// Name and source. The template that is used where none is named is called `default`.
    named: Vec<(String, String)>,
}

const DEFAULT: &str = "default";

impl ChatTemplates {
    /// From a default template and named ones.
    pub fn new(default: Option<String>, named: Vec<(String, String)>) -> ChatTemplates {
        let default = default.map(|source| (DEFAULT.to_owned(), source));
        ChatTemplates { named: default.into_iter().chain(named).collect() }
    }

    /// As `transformers` finds them: `chat_template.jinja` and `additional_chat_templates/NAME.jinja`, else `chat_template` of
    /// `tokenizer_config.json`, which is a source or a list of objects with `name` and `template`.
    pub(super) fn from_hf_dir(folder: &Path, config: &Value) -> Result<ChatTemplates, TokenizerError> {
        let default = optional_text(&folder.join("chat_template.jinja"))?;
        let mut named = Vec::new();
        let folder_of_named = folder.join("additional_chat_templates");
        if folder_of_named.is_dir() {
            let io = |source| TokenizerError::Io { path: folder_of_named.clone(), source };
            for entry in std::fs::read_dir(&folder_of_named).map_err(io)? {
                let path = entry.map_err(io)?.path();
                let name = path.file_stem().and_then(|stem| stem.to_str()).map(str::to_owned);
                if let (Some(name), true) = (name, path.extension().is_some_and(|e| e == "jinja")) {
                    named.extend(optional_text(&path)?.map(|source| (name, source)));
                }
            }
        }
        named.sort();
        if default.is_some() || !named.is_empty() {
            return Ok(ChatTemplates::new(default, named));
        }
        let wrong = |reason: &str| TokenizerError::Field {
            origin: folder.join("tokenizer_config.json").display().to_string(),
            key: "chat_template",
            reason: reason.to_owned(),
        };
        match config.get("chat_template") {
            None | Some(Value::Null) => Ok(ChatTemplates::default()),
            Some(Value::String(source)) => Ok(ChatTemplates::new(Some(source.clone()), Vec::new())),
            Some(Value::Array(list)) => {
                let entry = |entry: &Value| {
                    let text = |key| Some(entry.get(key)?.as_str()?.to_owned());
                    Some((text("name")?, text("template")?))
                };
                let named: Option<Vec<_>> = list.iter().map(entry).collect();
                let named =
                    named.ok_or_else(|| wrong("an entry has no `name` or no `template` that is a text"))?;
                Ok(ChatTemplates { named })
            }
            Some(_) => Err(wrong("is neither a text nor a list")),
        }
    }

    /// The template that is used where none is named: `default`, or the only one.
    pub fn default_source(&self) -> Option<&str> {
        match self.named.as_slice() {
            [(_, only)] => Some(only),
            _ => self.source(DEFAULT),
        }
    }

    /// The template of a name.
    pub fn source(&self, name: &str) -> Option<&str> {
        self.named.iter().find(|(known, _)| known == name).map(|(_, source)| source.as_str())
    }

    /// The names, in the files' order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.named.iter().map(|(name, _)| name.as_str())
    }

    /// As `tokenizer_config.json` has them; `None` where there are none.
    pub(super) fn to_config(&self) -> Option<Value> {
        match self.named.as_slice() {
            [] => None,
            [(name, source)] if name == DEFAULT => Some(source.as_str().into()),
            all => {
                let entry = |(name, source): &(String, String)| -> Map<String, Value> {
                    [("name".to_owned(), json!(name)), ("template".to_owned(), json!(source))]
                        .into_iter()
                        .collect()
                };
                Some(all.iter().map(entry).collect::<Vec<_>>().into())
            }
        }
    }
}

fn optional_text(path: &Path) -> Result<Option<String>, TokenizerError> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(TokenizerError::Io { path: path.to_owned(), source }),
    }
}
