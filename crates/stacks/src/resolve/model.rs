//! A model by a name of the catalogue, a folder, or a `config.json`.

use std::path::Path;

use plimsoll_model::{ModelSpec, catalogue, hf_config};

use crate::request::RequestError;

/// The shape of a model. What exists on disk goes before names.
pub fn model(name: &str) -> Result<ModelSpec, RequestError> {
    let path = Path::new(name);
    let title =
        || path.file_stem().map_or_else(|| name.to_owned(), |stem| stem.to_string_lossy().into_owned());
    let read = |error: hf_config::ConfigError| RequestError::Model(error.to_string());
    if path.is_dir() {
        return hf_config::read_config(path, title()).map_err(read);
    }
    if path.extension().is_some_and(|ending| ending == "json") {
        return config_file(path);
    }
    // A copy under another organisation has the same shape.
    let short = name.rsplit('/').next().unwrap_or(name);
    catalogue::find(name).or_else(|_| catalogue::find(short)).map_err(|near| {
        RequestError::Model(format!(
            "{name}: there is no such file or folder, and the catalogue has no such model; its config.json describes any other{}",
            catalogue::not_there(name, &near)
        ))
    })
}

/// The shape in a `config.json`, wherever it lies; it is called after its folder.
fn config_file(path: &Path) -> Result<ModelSpec, RequestError> {
    let folder = path.parent().and_then(Path::file_name).map(|name| name.to_string_lossy().into_owned());
    let name = folder.filter(|name| !name.is_empty()).unwrap_or_else(|| "config.json".to_owned());
    hf_config::read_config_file(path, name).map_err(|error| RequestError::Model(error.to_string()))
}
