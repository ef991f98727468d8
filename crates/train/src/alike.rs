//! What all ranks must have alike: they compare it with what rank 0 has before they train.
//!
//! Rank 0 tells the others what it has. The first rank that has something else says so, and that ends all. Which of the weights a rank
//! keeps, and in which folder the files are, is its own affair.

use std::path::PathBuf;

use plimsoll_model::ModelSpec;
use plimsoll_parallel::{Collectives, Communicator};
use plimsoll_plan::config::RawConfig;
use plimsoll_plan::{ModelOrigin, ScratchTokenizer};
use serde::{Deserialize, Serialize};

use crate::checkpoint::Checkpoint;
use crate::identity::FileIdentity;
use crate::{OutputFolder, TrainError};

const SAME_MODEL: &str = "every machine needs the same files of the model: copy them from the machine of rank 0, or put them on a folder that all mount";
const SAME_CHECKPOINT: &str = "all ranks go on from the same checkpoint: copy its folder from the machine of rank 0, or put output.dir on a folder that all mount";
const SAME_DATA: &str = "the files, the tokenizer and its chat template must be the same on every machine: copy them from that of rank 0";
const SAME_PROGRAM: &str = "install the same version of Plimsoll on every machine";

/// What a rank has before it reads its data.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Beginning {
    /// What the user wrote, as YAML.
    config: String,
    /// Whether the tokenizer is trained at the beginning of the run.
    trains_tokenizer: bool,
    /// The model's shape, a line for each value.
    spec: Vec<String>,
    /// The model's files.
    model: Vec<FileIdentity>,
    /// Those of the checkpoint that the run goes on from.
    checkpoint: Vec<FileIdentity>,
}

/// Compares what ranks have before they read their data.
///
/// # Errors
/// [`TrainError::OtherConfiguration`] or [`TrainError::OtherFiles`] on the first rank that has something else than rank 0, and
/// [`TrainError::OfOtherRank`] on the others.
pub(crate) fn compare_beginnings(
    ranks: &dyn Communicator,
    config: &RawConfig,
    origin: &ModelOrigin,
    checkpoint: Option<&Checkpoint>,
) -> Result<(), TrainError> {
    if ranks.is_alone() {
        return Ok(());
    }
    let own = Beginning::of(config, origin, checkpoint)?;
    // What could not be written nobody could read.
    let told = serde_json::to_vec(&own).unwrap_or_default();
    compare(ranks, told, |first| match serde_json::from_slice(first) {
        Ok(first) => own.difference(&first, config, checkpoint),
        Err(_) => Some(other_files("rank 0 tells what this program cannot read".to_owned(), SAME_PROGRAM)),
    })
}

/// Compares what ranks have read: each a key, and what its data hold.
///
/// # Errors
/// As of [`compare_beginnings`].
pub(crate) fn compare_data(ranks: &dyn Communicator, own: &[(&str, String)]) -> Result<(), TrainError> {
    let told: Vec<&str> = own.iter().map(|(_, identity)| identity.as_str()).collect();
    let told = told.join("\n");
    compare(ranks, told.into_bytes(), |first| {
        let first = String::from_utf8_lossy(first);
        let (key, here, there) = own
            .iter()
            .zip(first.split('\n'))
            .map(|((key, here), there)| (key, here.as_str(), there))
            .find(|(_, here, there)| here != there)?;
        let shown = |identity: &str| if identity.is_empty() { "nothing" } else { identity }.to_owned();
        let (here, there) = (shown(here), shown(there));
        Some(other_files(
            format!("{key} is other data here than on rank 0 ({here}; there {there})"),
            SAME_DATA,
        ))
    })
}

/// Tells all ranks what rank 0 has, and asks each for what it has otherwise. The first that has, says so.
fn compare(
    ranks: &dyn Communicator,
    own: Vec<u8>,
    difference: impl FnOnce(&[u8]) -> Option<TrainError>,
) -> Result<(), TrainError> {
    let first = ranks.broadcast(own)?;
    let other = if ranks.rank() == 0 { None } else { difference(&first) };
    let unlike = ranks.first_unlike(0, &[f64::from(u8::from(other.is_some()))])?;
    match (unlike, other) {
        (None, _) => Ok(()),
        (Some((rank, _)), Some(other)) if rank == ranks.rank() => Err(other),
        (Some((rank, _)), _) => Err(TrainError::OfOtherRank { rank }),
    }
}

/// Where ranks have found that they are not alike: the one that says so ends when the folders of all are gone, and the others with it.
pub(crate) fn part(ranks: &dyn Communicator, error: &TrainError, own: OutputFolder) {
    let speaks = match error {
        TrainError::OtherConfiguration { .. } | TrainError::OtherFiles { .. } => true,
        TrainError::OfOtherRank { .. } => false,
        _ => return,
    };
    // Folders of ranks lie in that of rank 0, which goes last. Whether they hear it or are gone, all end.
    let of_run = match ranks.rank() {
        0 => Some(own),
        _ => {
            drop(own);
            None
        }
    };
    let _ = ranks.barrier();
    drop(of_run);
    let _ = ranks.barrier();
    if !speaks {
        let _ = ranks.barrier();
    }
}

impl Beginning {
    fn of(
        config: &RawConfig,
        origin: &ModelOrigin,
        checkpoint: Option<&Checkpoint>,
    ) -> Result<Beginning, TrainError> {
        let mut model: Vec<PathBuf> = match origin.weights() {
            Some(weights) => weights.paths().map(PathBuf::from).collect(),
            None => Vec::new(),
        };
        model.sort_by(|one, other| one.file_name().cmp(&other.file_name()));
        let checkpoint = checkpoint.map(Checkpoint::files).transpose()?.unwrap_or_default();
        let read = |paths: &[PathBuf]| {
            FileIdentity::of_all(paths).map_err(|(path, e)| TrainError::io("read", &path, e))
        };
        Ok(Beginning {
            config: config.to_yaml()?,
            trains_tokenizer: trains_tokenizer(origin),
            spec: lines_of(origin.spec()),
            model: read(&model)?,
            checkpoint: read(&checkpoint)?,
        })
    }

    /// What is otherwise here than on rank 0.
    fn difference(
        &self,
        first: &Beginning,
        config: &RawConfig,
        checkpoint: Option<&Checkpoint>,
    ) -> Option<TrainError> {
        let Ok(there) = RawConfig::from_str(&first.config, "the configuration of rank 0") else {
            let what = "this program cannot read the configuration of rank 0".to_owned();
            return Some(other_files(what, SAME_PROGRAM));
        };
        if let Some(change) = config.changes_since(&there).into_iter().find(|change| is_alike(change.key)) {
            let (here, there) = (change.after, change.before);
            return Some(TrainError::OtherConfiguration { key: change.key, here, there });
        }
        if self.trains_tokenizer != first.trains_tokenizer {
            let shown =
                |trains: bool| if trains { "one to be trained" } else { "one that is there" }.to_owned();
            return Some(TrainError::OtherConfiguration {
                key: "model.from_scratch.tokenizer",
                here: shown(self.trains_tokenizer),
                there: shown(first.trains_tokenizer),
            });
        }
        if self.spec != first.spec {
            let mut pairs = self.spec.iter().zip(&first.spec);
            let (here, there) = pairs.find(|(here, there)| here != there)?;
            return Some(other_files(
                format!("the model has another shape here than on rank 0 ({here}; there {there})"),
                SAME_MODEL,
            ));
        }
        if self.model.len() != first.model.len() {
            let (here, there) = (self.model.len(), first.model.len());
            let what = format!("the model has {here} files of weights here and {there} on rank 0");
            return Some(other_files(what, SAME_MODEL));
        }
        let pairs: Vec<_> = self.model.iter().zip(&first.model).collect();
        if let Some((file, why)) = FileIdentity::first_other(&pairs) {
            return Some(other_files(format!("the model's {} {why}", file.name), SAME_MODEL));
        }
        let path = checkpoint.map(|checkpoint| checkpoint.path.display().to_string()).unwrap_or_default();
        // How much of a file is read depends on all of them.
        let is_there = |name: &str| first.checkpoint.iter().any(|there| there.name == name);
        if let Some(more) = self.checkpoint.iter().find(|here| !is_there(&here.name)) {
            let what = format!("{path}: {} is there, which rank 0 has not", more.name);
            return Some(other_files(what, SAME_CHECKPOINT));
        }
        let here = |name: &str| self.checkpoint.iter().find(|here| here.name == name);
        let missing = first.checkpoint.iter().find(|there| here(&there.name).is_none());
        let missing = missing.map(|there| (there, "is not there".to_owned()));
        let pairs = first.checkpoint.iter().filter_map(|there| Some((here(&there.name)?, there)));
        let pairs: Vec<_> = pairs.collect();
        let (file, why) = missing.or_else(|| FileIdentity::first_other(&pairs))?;
        Some(other_files(format!("{path}: {} {why}", file.name), SAME_CHECKPOINT))
    }
}

fn other_files(what: String, remedy: &'static str) -> TrainError {
    TrainError::OtherFiles { what, remedy }
}

/// Whether the tokenizer is trained where the run begins.
pub(crate) fn trains_tokenizer(origin: &ModelOrigin) -> bool {
    matches!(origin, ModelOrigin::Scratch(_, ScratchTokenizer::Train { .. }))
}

/// A model's shape in lines, whatever its folder is called.
fn lines_of(spec: &ModelSpec) -> Vec<String> {
    let nameless = ModelSpec { name: String::new(), ..spec.clone() };
    let shown = format!("{nameless:#?}");
    shown.lines().map(|line| line.trim().trim_end_matches(',').to_owned()).collect()
}

/// Whether a key has one value on all ranks. What the others have otherwise, rank 0 decides; files are compared themselves.
fn is_alike(key: &str) -> bool {
    match key {
        "model.path" | "model.from_scratch.tokenizer" => false,
        "data.train" | "data.validation" | "data.chat_template" => false,
        "data.num_workers" | "data.prefetch_factor" | "data.buffer_size" | "data.persistent_workers" => false,
        "training.seed" => true,
        key => key.starts_with("model.") || key.starts_with("data."),
    }
}
