//! Where a command's model is: a path, a name of the catalogue, or an id of the hub, which is fetched.

use std::path::{Path, PathBuf};

use plimsoll_hub::{Hub, HubId, HubSettings};
use plimsoll_model::{ModelFiles, catalogue};
use plimsoll_plan::config::RawConfig;
use plimsoll_plan::hardware::disk_space;
use plimsoll_plan::{ModelOrigin, OriginError};

use crate::failure::Failure;
use crate::progress::FetchProgress;

/// What of a model is needed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Need {
    /// Its dimensions, for which the catalogue is enough.
    Shape,
    /// Its files.
    Files,
}

/// The model that a configuration names.
pub fn origin(config: &RawConfig, need: Need, quiet: bool) -> Result<ModelOrigin, Failure> {
    match &config.model.path {
        Some(model) => find(model, need, quiet),
        None => Ok(ModelOrigin::find(config)?),
    }
}

/// Whether a model is one of the hub: no path that is there, and no name of the catalogue.
pub fn is_of_hub(model: &str) -> bool {
    !Path::new(model).exists() && model.parse::<HubId>().is_ok()
}

/// A model with weights, to be used for `purpose`.
pub fn with_weights(model: &str, purpose: &'static str, quiet: bool) -> Result<Box<ModelFiles>, Failure> {
    match find(model, Need::Files, quiet)? {
        ModelOrigin::Files(files) => Ok(files),
        ModelOrigin::Catalogue(spec) | ModelOrigin::Scratch(spec, _) => {
            Err(OriginError::NoWeights { name: spec.name.clone(), purpose }.into())
        }
    }
}

fn find(model: &str, need: Need, quiet: bool) -> Result<ModelOrigin, Failure> {
    match locate(model, need, quiet)? {
        Some(path) => Ok(ModelOrigin::Files(Box::new(ModelFiles::open(&path).map_err(OriginError::from)?))),
        None => Ok(ModelOrigin::from_path_or_name(model)?),
    }
}

/// The files of a model, fetched if they have to be; `None` for a name of the catalogue. What exists on disk wins.
pub fn locate(model: &str, need: Need, quiet: bool) -> Result<Option<PathBuf>, Failure> {
    if Path::new(model).exists() {
        return Ok(Some(PathBuf::from(model)));
    }
    let known = catalogue::find(model);
    if need == Need::Shape && known.is_ok() {
        return Ok(None);
    }
    match model.parse::<HubId>() {
        Ok(id) => fetch(&id, quiet).map(Some),
        Err(_) if known.is_ok() => Ok(None),
        Err(reason) => {
            let nearest = known.err().unwrap_or_default();
            let hint = match nearest.as_slice() {
                [] => String::new(),
                names => format!("; did you mean {} of the catalogue?", names.join(" or ")),
            };
            Err(Failure::usage(format!(
                "{model}: there is no such file or folder here and no such name in the catalogue, \
                 and it is no hub id: {reason}{hint}"
            )))
        }
    }
}

fn fetch(id: &HubId, quiet: bool) -> Result<PathBuf, Failure> {
    let settings = HubSettings::from_variables(&|key| std::env::var_os(key))?;
    let hub = Hub::new(settings, |folder| disk_space(folder).map(|space| space.available.0));
    let mut progress = FetchProgress::new(id, quiet);
    Ok(hub.fetch(id, &mut progress)?)
}
