//! The tokenizer of a run: the model's own, or one that is trained on the data before the model is.

use std::path::Path;
use std::sync::mpsc::sync_channel;

use plimsoll_data::{DataError, TextOptions, for_each_text};
use plimsoll_memory::run_on_all_cores;
use plimsoll_model::tokenizer::Tokenizer;
use plimsoll_plan::config::RawConfig;
use plimsoll_plan::{ModelOrigin, OriginError, ScratchTokenizer};

use crate::TrainError;
use crate::alike::trains_tokenizer;
use crate::prepared::buffer_bytes;

/// Where a run keeps the tokenizer that it has trained, within its folder.
const FOLDER: &str = "tokenizer";

/// Pieces of text that wait between the files and the training.
const WAITING: usize = 4;

/// The tokenizer of the model that a configuration names; one that is to be trained is trained.
///
/// # Errors
/// The model is known by its dimensions alone, its tokenizer cannot be read, or the data cannot.
pub fn tokenizer(config: &RawConfig, origin: &ModelOrigin) -> Result<Tokenizer, TrainError> {
    match origin {
        ModelOrigin::Files(files) => Ok(files.tokenizer()?),
        ModelOrigin::Scratch(_, ScratchTokenizer::Ready(tokenizer)) => Ok((**tokenizer).clone()),
        ModelOrigin::Scratch(_, ScratchTokenizer::Train { vocab_size }) => trained(config, *vocab_size),
        ModelOrigin::Catalogue(spec) => {
            Err(OriginError::NoWeights { name: spec.name.clone(), purpose: "train" }.into())
        }
    }
}

/// The tokenizer of a run in a folder: one that is to be trained is trained where the run begins, and kept.
pub(crate) fn tokenizer_of_run(
    config: &RawConfig,
    origin: &ModelOrigin,
    output: &Path,
    resumed: bool,
) -> Result<Tokenizer, TrainError> {
    if !trains_tokenizer(origin) {
        return tokenizer(config, origin);
    }
    let folder = output.join(FOLDER);
    if resumed {
        return Ok(Tokenizer::from_hf_dir(&folder)?);
    }
    let tokenizer = tokenizer(config, origin)?;
    std::fs::create_dir_all(&folder).map_err(|e| TrainError::io("create", &folder, e))?;
    tokenizer.save(&folder)?;
    Ok(tokenizer)
}

/// What the first rank has kept of a tokenizer that was trained, for ranks that do not see its folder; nothing of any other.
pub(crate) fn kept_of_run(origin: &ModelOrigin, output: &Path) -> Result<Vec<u8>, TrainError> {
    let folder = output.join(FOLDER);
    let mut files: Vec<(String, String)> = Vec::new();
    if trains_tokenizer(origin) {
        let failed = |e| TrainError::io("list", &folder, e);
        for entry in std::fs::read_dir(&folder).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let (path, name) = (entry.path(), entry.file_name().to_string_lossy().into_owned());
            if path.is_file() {
                let text = std::fs::read_to_string(&path).map_err(|e| TrainError::io("read", &path, e))?;
                files.push((name, text));
            }
        }
    }
    serde_json::to_vec(&files).map_err(|e| TrainError::io("read", &folder, e.into()))
}

/// The tokenizer on a rank that is not the first one, which has told what it has `kept`; `own` is this rank's folder.
pub(crate) fn tokenizer_of_first_rank(
    config: &RawConfig,
    origin: &ModelOrigin,
    kept: &[u8],
    own: &Path,
) -> Result<Tokenizer, TrainError> {
    if !trains_tokenizer(origin) {
        return tokenizer(config, origin);
    }
    let folder = own.join(FOLDER);
    let files: Vec<(String, String)> =
        serde_json::from_slice(kept).map_err(|e| TrainError::io("write", &folder, e.into()))?;
    std::fs::create_dir_all(&folder).map_err(|e| TrainError::io("create", &folder, e))?;
    // Names of files alone: nothing is written elsewhere.
    for (name, text) in files.iter().filter_map(|(name, text)| Some((Path::new(name).file_name()?, text))) {
        let path = folder.join(name);
        std::fs::write(&path, text).map_err(|e| TrainError::io("write", &path, e))?;
    }
    Ok(Tokenizer::from_hf_dir(&folder)?)
}

fn trained(config: &RawConfig, vocab_size: u64) -> Result<Tokenizer, TrainError> {
    let options = TextOptions {
        patterns: config.training_data()?.patterns().to_vec(),
        text_field: (!config.data.has_samples()).then(|| config.data.text_field()),
        buffer_bytes: buffer_bytes(config),
    };
    let (sender, receiver) = sync_channel(WAITING);
    // The library takes texts, the files give them.
    let (read, trained) = std::thread::scope(|scope| {
        let reading = scope.spawn(move || {
            run_on_all_cores();
            for_each_text(&options, &mut |text| sender.send(text).map_err(|_| DataError::WorkerGone))
        });
        let trained = Tokenizer::train_bpe(vocab_size, receiver.into_iter());
        (reading.join().unwrap_or(Err(DataError::WorkerGone)), trained)
    });
    // Texts that nobody takes any more are no error of the files.
    let trained = trained?;
    read?;
    Ok(trained)
}
