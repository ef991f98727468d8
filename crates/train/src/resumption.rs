//! A run that is resumed: which choices may have changed since, and which changes would make it another run.

use std::path::Path;

use plimsoll_plan::config::{Auto, KeyChange, RawConfig};

use crate::TrainError;
use crate::checkpoint::{Checkpoint, TrainerState};

/// What became of the configuration since the run was begun.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Resumption {
    /// Optimizer steps done.
    pub step: u64,
    /// Keys that have another value from here on.
    pub changes: Vec<KeyChange>,
    /// Whether the file that says how the run was begun is missing or cannot be read, so that changes are unknown.
    pub unknown: bool,
}

/// What a key is to a run that is continued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum KeyKind {
    /// A choice that may be made anew.
    Choice,
    /// Part of what the run is: its model, its windows and their order, the states of its optimizer.
    Fixed,
    /// A file or folder that is part of it, whatever its name is written like.
    FixedPath,
    /// What the data is, which is compared itself; or where the run is, which needs no word.
    Elsewhere,
}

fn kind(key: &str) -> KeyKind {
    match key {
        "model.path" | "model.from_scratch.tokenizer" => KeyKind::FixedPath,
        "data.format"
        | "data.append_eos"
        | "data.train_on"
        | "data.truncation"
        | "data.sequence_length"
        | "data.packing"
        | "data.document_mask"
        | "data.shuffle" => KeyKind::Fixed,
        "training.method"
        | "training.quantization"
        | "training.mixed_precision"
        | "training.master_weights"
        | "training.optimizer"
        | "training.optimizer_options.rank"
        | "training.optimizer_options.scale_type"
        | "training.optimizer_options.embedding_bits"
        | "training.seed" => KeyKind::Fixed,
        "training.lora.dropout" | "training.lora.loraplus_lr_ratio" => KeyKind::Choice,
        "data.validation"
        | "data.num_workers"
        | "data.prefetch_factor"
        | "data.buffer_size"
        | "data.persistent_workers" => KeyKind::Choice,
        "output.dir" => KeyKind::Elsewhere,
        key if key.starts_with("model.") || key.starts_with("training.lora.") => KeyKind::Fixed,
        key if key.starts_with("data.") => KeyKind::Elsewhere,
        _ => KeyKind::Choice,
    }
}

impl Resumption {
    /// Compares a configuration with the one that the run was begun with, which `saved` holds. What the run's states depend on
    /// and the configuration leaves to the planner is set to what the planner chose then.
    ///
    /// # Errors
    /// [`TrainError::NotTheSameRun`] with every change that cannot be made on the way; [`TrainError::OtherOptimizer`]
    /// where the optimizer is another one.
    pub(crate) fn of(
        config: &mut RawConfig,
        saved: &Path,
        checkpoint: &Checkpoint,
        state: &TrainerState,
    ) -> Result<Resumption, TrainError> {
        let optimizer = config.training.optimizer().name();
        if state.optimizer != optimizer {
            return Err(TrainError::OtherOptimizer {
                path: checkpoint.path.clone(),
                saved: state.optimizer.clone(),
                optimizer: optimizer.to_owned(),
            });
        }
        let step = state.step;
        let Ok(earlier) = RawConfig::from_file(saved) else {
            return Ok(Resumption { step, changes: Vec::new(), unknown: true });
        };
        let changes = config.changes_since(&earlier);
        let (refused, others): (Vec<_>, Vec<_>) =
            changes.into_iter().partition(|change| match kind(change.key) {
                KeyKind::Fixed => true,
                KeyKind::FixedPath => !is_one_place(&change.before, &change.after),
                KeyKind::Choice | KeyKind::Elsewhere => false,
            });
        if !refused.is_empty() {
            return Err(TrainError::NotTheSameRun { changes: refused, config: saved.to_owned() });
        }
        keep_automatic(config, &earlier);
        let changes = others.into_iter().filter(|change| kind(change.key) == KeyKind::Choice).collect();
        Ok(Resumption { step, changes, unknown: false })
    }
}

/// Sets what is left to the planner, and is part of what the run is, to what it was before.
fn keep_automatic(config: &mut RawConfig, earlier: &RawConfig) {
    let (now, before) = (&mut config.training, &earlier.training);
    if now.mixed_precision().set().is_none() {
        now.mixed_precision = before.mixed_precision;
    }
    if now.master_weights().set().is_none() {
        now.master_weights = before.master_weights;
    }
    let batch = [now.batch_size, now.gradient_accumulation_steps, now.effective_batch_size];
    if batch.iter().all(|part| part.and_then(Auto::set).is_none()) {
        now.effective_batch_size = before.effective_batch_size;
    }
}

/// Whether two paths lead to one file or folder.
fn is_one_place(one: &str, other: &str) -> bool {
    let place = |path: &str| std::fs::canonicalize(path).ok();
    place(one).is_some_and(|one| place(other).is_some_and(|other| one == other))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resumed(earlier: &str, now: &str) -> Result<(RawConfig, Resumption), TrainError> {
        let folder = tempfile::tempdir().unwrap();
        let saved = folder.path().join("plimsoll.yaml");
        std::fs::write(&saved, earlier).unwrap();
        let checkpoint = Checkpoint { path: folder.path().join("checkpoint-7"), step: 7 };
        let state = TrainerState {
            version: crate::checkpoint::VERSION,
            step: 7,
            updates: 7,
            grad_norm: None,
            loss_scale: None,
            windows: 0,
            tokens: 0,
            data: String::new(),
            optimizer: "adamw".to_owned(),
        };
        let mut config = RawConfig::from_str(now, "now").unwrap();
        let resumption = Resumption::of(&mut config, &saved, &checkpoint, &state)?;
        Ok((config, resumption))
    }

    fn words(changes: &[KeyChange]) -> Vec<String> {
        changes.iter().map(KeyChange::to_string).collect()
    }

    #[test]
    fn choices_are_accepted_and_named() {
        let earlier = "
data: {train: a.txt}
training: {learning_rate: 1e-3, steps: 10, weight_decay: 0, batch_size: 4, gradient_accumulation_steps: 2, effective_batch_size: 8}
output: {dir: out, save_steps: 5}";
        let now = "
data: {train: moved/a.txt, validation: b.txt}
training: {learning_rate: 5e-4, steps: 20, lr_schedule: cosine, batch_size: 2}
output: {dir: ./out, save_total_limit: 9}";
        let (_, resumption) = resumed(earlier, now).unwrap();
        assert_eq!(
            words(&resumption.changes),
            [
                "data.validation: none; no validation -> b.txt",
                "training.steps: 10 -> 20",
                "training.batch_size: 4 -> 2",
                "training.learning_rate: 0.001 -> 0.0005",
                "training.weight_decay: 0.0 -> 0.01",
                "training.lr_schedule: linear -> cosine",
                "output.save_steps: 5 -> 500",
                "output.save_total_limit: 2 -> 9",
            ]
        );
        assert_eq!((resumption.step, resumption.unknown), (7, false));
    }

    #[test]
    fn what_makes_it_another_run_is_refused_by_name() {
        let earlier = "model: {path: a}\ntraining: {mixed_precision: f32, method: lora}";
        let now = "
model: {path: b}
data: {sequence_length: 64, shuffle: false}
training: {mixed_precision: bf16, method: lora, seed: 7, lora: {rank: 4, dropout: 0.1}, learning_rate: 1.0}";
        let refused = resumed(earlier, now).unwrap_err();
        let TrainError::NotTheSameRun { changes, .. } = &refused else { panic!("{refused}") };
        let keys: Vec<&str> = changes.iter().map(|change| change.key).collect();
        assert_eq!(
            keys,
            [
                "model.path",
                "data.sequence_length",
                "data.shuffle",
                "training.mixed_precision",
                "training.seed",
                "training.lora.rank"
            ]
        );
        let said = refused.to_string();
        assert!(said.contains("data.sequence_length: 512 -> 64") && said.contains("plimsoll.yaml"), "{said}");
    }

    #[test]
    fn what_is_left_to_the_planner_stays_what_it_chose() {
        let earlier = "training: {mixed_precision: bf16, master_weights: f32, batch_size: 4, gradient_accumulation_steps: 4, effective_batch_size: 16}";
        let (config, resumption) = resumed(earlier, "training: {steps: 5, epochs: }").unwrap();
        assert_eq!(words(&resumption.changes), ["training.steps: none; epochs decide -> 5"]);
        let (now, before) = (config.training, RawConfig::from_str(earlier, "earlier").unwrap().training);
        assert_eq!(now.mixed_precision, before.mixed_precision);
        assert_eq!(now.master_weights, before.master_weights);
        assert_eq!(now.effective_batch_size, before.effective_batch_size);
        assert_eq!(now.batch_size, None);
    }

    #[test]
    fn one_model_may_be_written_in_two_ways() {
        let folder = tempfile::tempdir().unwrap();
        let model = folder.path().join("model");
        std::fs::create_dir(&model).unwrap();
        let config = |path: &Path| format!("model: {{path: '{}'}}", path.display());
        let other = folder.path().join("model/../model");
        assert_eq!(resumed(&config(&model), &config(&other)).unwrap().1.changes, []);
    }

    #[test]
    fn a_run_that_does_not_say_how_it_was_begun_is_continued_and_that_is_noted() {
        assert!(resumed("model: [", "training: {steps: 3}").unwrap().1.unknown);
    }
}
