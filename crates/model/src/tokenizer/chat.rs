//! The chat templates that come with a tokenizer: a default one and named ones, as Jinja sources.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::TokenizerError;

/// Jinja sources, unread. [`crate::chat_template`] renders them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ChatTemplates {
    all: Vec<ChatTemplateSource>,
}

/// A Jinja source, unread.
#[derive(Clone, Debug, PartialEq)]
pub struct ChatTemplateSource {
    /// The template that is used where none is named is called `default`.
    pub name: String,
    /// The Jinja text.
    pub source: String,
    /// What errors call the file that it is in.
    pub origin: String,
}

const DEFAULT: &str = "default";

impl ChatTemplates {
    /// From a default template and named ones, all of one file.
    pub fn new(default: Option<String>, named: &[(String, String)], origin: &str) -> ChatTemplates {
        let default = default.map(|source| (DEFAULT.to_owned(), source));
        let all = default.into_iter().chain(named.iter().cloned());
        let template = |(name, source)| ChatTemplateSource { name, source, origin: origin.to_owned() };
        ChatTemplates { all: all.map(template).collect() }
    }

    /// As `transformers` finds them: `chat_template.jinja` and `additional_chat_templates/NAME.jinja`, else
    /// `chat_template` of `tokenizer_config.json`, which is a source or a list of objects with `name` and
    /// `template`.
    pub(super) fn from_hf_dir(folder: &Path, config: &Value) -> Result<ChatTemplates, TokenizerError> {
        let default = from_file(DEFAULT, &folder.join("chat_template.jinja"))?;
        let mut all: Vec<ChatTemplateSource> = default.into_iter().collect();
        for path in jinja_files(&folder.join("additional_chat_templates"))? {
            let name = path.file_stem().and_then(|stem| stem.to_str());
            all.extend(name.map(|name| from_file(name, &path)).transpose()?.flatten());
        }
        if !all.is_empty() {
            return Ok(ChatTemplates { all });
        }
        let origin = folder.join("tokenizer_config.json").display().to_string();
        let wrong = |reason: &str| TokenizerError::Field {
            origin: origin.clone(),
            key: "chat_template",
            reason: reason.to_owned(),
        };
        match config.get("chat_template") {
            None | Some(Value::Null) => Ok(ChatTemplates::default()),
            Some(Value::String(source)) => Ok(ChatTemplates::new(Some(source.clone()), &[], &origin)),
            Some(Value::Array(list)) => {
                let entry = |entry: &Value| {
                    let text = |key| Some(entry.get(key)?.as_str()?.to_owned());
                    Some((text("name")?, text("template")?))
                };
                let named: Option<Vec<_>> = list.iter().map(entry).collect();
                let named =
                    named.ok_or_else(|| wrong("an entry has no `name` or no `template` that is a text"))?;
                Ok(ChatTemplates::new(None, &named, &origin))
            }
            Some(_) => Err(wrong("is neither a text nor a list")),
        }
    }

    /// The template of a name; without one the template called `default`, or the only one.
    pub fn get(&self, name: Option<&str>) -> Option<&ChatTemplateSource> {
        match (name, self.all.as_slice()) {
            (None, [only]) => Some(only),
            (name, all) => all.iter().find(|template| template.name == name.unwrap_or(DEFAULT)),
        }
    }

    /// All of them, in the files' order.
    pub fn iter(&self) -> impl Iterator<Item = &ChatTemplateSource> {
        self.all.iter()
    }

    /// As `tokenizer_config.json` has them; `None` where there are none.
    pub(super) fn to_config(&self) -> Option<Value> {
        match self.all.as_slice() {
            [] => None,
            [only] if only.name == DEFAULT => Some(only.source.as_str().into()),
            all => Some(all.iter().map(|t| json!({ "name": t.name, "template": t.source })).collect()),
        }
    }
}

/// The Jinja files of a folder by name; none where there is no folder.
fn jinja_files(folder: &Path) -> Result<Vec<PathBuf>, TokenizerError> {
    if !folder.is_dir() {
        return Ok(Vec::new());
    }
    let io = |source| TokenizerError::Io { path: folder.to_owned(), source };
    let entries: Result<Vec<_>, _> = std::fs::read_dir(folder).map_err(io)?.collect();
    let mut files: Vec<PathBuf> = entries.map_err(io)?.into_iter().map(|entry| entry.path()).collect();
    files.retain(|path| path.extension().is_some_and(|extension| extension == "jinja"));
    files.sort();
    Ok(files)
}

/// A template in a file of its own; `None` where there is no file.
fn from_file(name: &str, path: &Path) -> Result<Option<ChatTemplateSource>, TokenizerError> {
    match std::fs::read_to_string(path) {
        Ok(source) => {
            let origin = path.display().to_string();
            Ok(Some(ChatTemplateSource { name: name.to_owned(), source, origin }))
        }
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(TokenizerError::Io { path: path.to_owned(), source }),
    }
}
