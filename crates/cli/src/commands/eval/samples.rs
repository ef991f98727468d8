//! Evaluation on chats and instructions: the mean loss of the tokens that training would train, in the windows and with
//! the weights that its validation has.

use plimsoll_data::Dataset;
use plimsoll_parallel::Collectives;
use plimsoll_plan::config::{ConfigError, RawConfig};
use plimsoll_train::{micro_batch, sample_encoder};

use super::passes::{Passes, Windows};
use super::{Evaluated, Task};
use crate::args::EvalArgs;
use crate::failure::Failure;
use crate::progress;
use crate::session::Engine;
use crate::weights::Weights;

/// What all keys begin with that `--set` may change here.
const DATA: &str = "data.";

/// How the command line says that data are read.
pub(super) fn configured(args: &EvalArgs, length: u64, format: &str) -> Result<RawConfig, Failure> {
    let mut config = RawConfig::default();
    config.apply_override("data.format", format, &format!("--format {format}"))?;
    let said = format!("--sequence-length {length}");
    config.apply_override("data.sequence_length", &length.to_string(), &said)?;
    for assignment in &args.set {
        if !assignment.trim_start().starts_with(DATA) {
            return Err(Failure::usage(format!(
                "--set {assignment}: only keys of {DATA}* say how data are read"
            )));
        }
        config.apply_set(assignment)?;
    }
    Ok(config)
}

/// Reads the samples of `--data`, in windows of `length` tokens.
pub(super) fn read(args: &EvalArgs, model: &Weights, length: u64, format: &str) -> Result<Dataset, Failure> {
    let config = configured(args, length, format)?;
    let tokenizer = model.files.tokenizer()?;
    let Some(encoder) = sample_encoder(&config, &tokenizer)? else {
        return Err(ConfigError::Missing {
            key: "data.format",
            remedy: "set it to chat or instruction; a text is measured without --format".to_owned(),
        }
        .into());
    };
    let patterns = [args.data.to_string_lossy().into_owned()];
    let folder = args.disk.disk_path.clone().unwrap_or_else(std::env::temp_dir);
    Ok(Dataset::open_samples(&patterns, &encoder, None, &folder)?)
}

/// The sum of the losses, each by its weight, and of the weights.
pub(super) fn measure(task: &Task<'_>, engine: &Engine, samples: &Dataset) -> Result<Evaluated, Failure> {
    let lengths = Windows { count: samples.windows(), longest: samples.sequence_length(), samples: true };
    let passes = Passes::of_windows(task, engine, lengths)?;
    let device = engine.device(&passes.dry_run, engine.line(task.args.memory))?;
    let most = passes.together;
    let (mut evaluator, streaming) = passes.evaluator(task, &*device, lengths)?;
    let bar = progress::counter(samples.windows(), "windows", task.quiet());
    let (mut loss, mut weight, mut next) = (0.0, 0.0, 0);
    while next < samples.windows() {
        let count = most.min(samples.windows() - next);
        let batch = samples.batch(next, count)?;
        let micro_batch = micro_batch(&batch);
        loss += evaluator.losses(count, &micro_batch)?.0;
        weight += micro_batch.target_weight();
        next += count;
        bar.inc(count);
    }
    bar.finish_and_clear();
    let loss = task.ranks.sum(loss)?;
    Ok(Evaluated { loss, targets: weight, streaming, planned: passes.planned })
}
