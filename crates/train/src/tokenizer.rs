//! The tokenizer of a run: the model's own, or one that is trained on the data before the model is.

use std::path::Path;
use std::sync::mpsc::sync_channel;

use plimsoll_data::{DataError, TextOptions, for_each_text};
use plimsoll_memory::run_on_all_cores;
use plimsoll_model::tokenizer::Tokenizer;
use plimsoll_plan::config::RawConfig;
use plimsoll_plan::{ModelOrigin, OriginError, ScratchTokenizer};

use crate::TrainError;
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
    if !matches!(origin, ModelOrigin::Scratch(_, ScratchTokenizer::Train { .. })) {
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
