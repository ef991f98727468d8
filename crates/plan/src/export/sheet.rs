//! A plan on its way into another program's words: facts that several formats need, and what became of each key.

use std::collections::BTreeSet;
use std::path::Path;

use plimsoll_memory::ByteSize;
use plimsoll_model::adapter::AdapterConfig;
use plimsoll_step::{Adapters, AttentionKind, Checkpointing, GradientClipping, StepSettings, ZeroStage};
use serde::Serialize;
use serde_json::{Map, Value};

use super::{ExportError, ExportFormat};
use crate::config::{MixedPrecision, RawConfig, TrainingConfig, TrainingLength};
use crate::resolve::loss_chunk_tokens;
use crate::run_needs::steps_in;
use crate::training_plan::TrainingPlan;

/// Values that the planner writes down and that ask for nothing.
const PLAIN: [(&str, &str); 7] = [
    ("training.attention", "flash"),
    ("training.micro_batches_per_pass", "1"),
    ("training.gradient_checkpointing", "none"),
    ("training.mixed_precision", "f32"),
    ("training.gradient_dtype", "f32"),
    ("training.master_weights", "f32"),
    ("training.method", "full"),
];

/// Where tensors are to be, which no program says as this one does.
pub(super) const PLACES: [&str; 4] =
    ["memory.offload.", "memory.kept_layers.", "memory.expert_slots", "memory.prefetch"];

/// Keys that follow from others, or say nothing of a step: the product of a batch's parts, and how memory is watched.
const FOLLOWING: [&str; 2] = ["training.effective_batch_size", "memory.target_utilization"];

/// Entries in the order in which they were put.
#[derive(Default)]
pub(super) struct Page(pub Map<String, Value>);

impl Page {
    /// Sets a key.
    pub fn put(&mut self, key: &str, value: impl Serialize) {
        // What is put are numbers, texts, lists and pages, which are all JSON.
        self.0.insert(key.to_owned(), serde_json::to_value(value).unwrap_or(Value::Null));
    }

    /// Sets a key if there is something to set it to.
    pub fn put_some(&mut self, key: &str, value: Option<impl Serialize>) {
        if let Some(value) = value {
            self.put(key, value);
        }
    }
}

impl Serialize for Page {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.0.serialize(serializer)
    }
}

/// A number, as a whole one where it is one.
pub(super) fn whole(number: f64) -> Value {
    if number.fract() == 0.0 && number.abs() < 1e15 {
        Value::from(number as i64)
    } else {
        Value::from(number)
    }
}

/// How long the learning rate rises.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Warmup {
    Steps(u64),
    /// A share of steps of which nobody knows the number yet.
    Share(f64),
}

impl Warmup {
    /// Whether there is one.
    pub fn is_any(self) -> bool {
        !matches!(self, Warmup::Steps(0) | Warmup::Share(0.0))
    }
}

/// A plan, and what became of its configuration.
pub(super) struct Sheet<'a> {
    pub plan: &'a TrainingPlan,
    pub format: ExportFormat,
    /// Machines that the ranks are spread over.
    pub machines: u64,
    carried: BTreeSet<String>,
    heading: Vec<String>,
    notes: Vec<String>,
}

impl<'a> Sheet<'a> {
    pub fn new(plan: &'a TrainingPlan, format: ExportFormat, machines: u64) -> Sheet<'a> {
        let of_device = ByteSize(plan.bytes_under_the_line());
        let heading = vec![format!(
            "{}, planned by Plimsoll and exported for {format}. Plimsoll's own step takes {of_device} of the device; another program takes what its own kernels and its allocator take.",
            plan.spec.name
        )];
        Sheet { plan, format, machines, carried: BTreeSet::new(), heading, notes: Vec::new() }
    }

    /// The configuration with every `auto` decided.
    pub fn config(&self) -> &'a RawConfig {
        &self.plan.config
    }

    pub fn training(&self) -> &'a TrainingConfig {
        &self.plan.config.training
    }

    pub fn settings(&self) -> &'a StepSettings {
        &self.plan.choice.settings
    }

    pub fn adapters(&self) -> Option<&'a Adapters> {
        self.settings().method.adapters()
    }

    /// What adapters are, or why there are none.
    pub fn adapter_config(&self) -> Result<&'a AdapterConfig, ExportError> {
        let none = ExportError::NoAdapters { format: self.format };
        self.adapters().map(|adapters| adapters.layout.config()).ok_or(none)
    }

    /// Ranks in all.
    pub fn ranks(&self) -> u32 {
        self.settings().ranks.count()
    }

    /// Ranks that each take their own micro-batches.
    pub fn data_ranks(&self) -> u32 {
        self.settings().ranks.mesh.data.max(1)
    }

    pub fn stage(&self) -> ZeroStage {
        self.settings().sharding.stage
    }

    /// The peak learning rate, scaled as the batch asks for it.
    pub fn learning_rate(&mut self) -> f64 {
        let training = self.training();
        let sequences = self.plan.choice.sequences();
        let reference = training.reference_batch_size.unwrap_or(sequences);
        let factor = training.learning_rate_scaling().factor(sequences, reference);
        let keys = ["learning_rate", "learning_rate_scaling", "reference_batch_size"];
        keys.iter().for_each(|key| self.carry(&[&format!("training.{key}")]));
        if factor != 1.0 {
            let (lr, scaling) = (training.learning_rate(), training.learning_rate_scaling());
            self.say(format!(
                "training.learning_rate {lr} is meant for a batch of {reference}; the file has it scaled ({scaling}) to {sequences}."
            ));
        }
        training.learning_rate() * factor
    }

    /// The steps of the run, where they are known.
    pub fn steps(&self) -> Option<u64> {
        steps_in(self.config())
    }

    pub fn length(&mut self) -> TrainingLength {
        self.carry(&["training.steps", "training.epochs"]);
        self.training().length()
    }

    pub fn warmup(&mut self) -> Warmup {
        self.carry(&["training.warmup_steps", "training.warmup_ratio"]);
        let training = self.training();
        match (training.warmup_ratio, self.steps()) {
            (Some(share), Some(steps)) => Warmup::Steps((share * steps as f64).ceil() as u64),
            (Some(share), None) => Warmup::Share(share),
            (None, _) => Warmup::Steps(training.warmup_steps()),
        }
    }

    /// Sequences of a batch of validation data, where there are any.
    pub fn evaluated(&mut self) -> Option<u64> {
        self.carry(&["training.eval_batch_size"]);
        self.config().data.validation.is_some().then(|| self.settings().evaluated())
    }

    /// The norm that gradients are clipped to; 0: they are not.
    pub fn clipping(&mut self) -> f64 {
        self.carry(&["training.max_gradient_norm"]);
        match self.settings().clipping {
            GradientClipping::None => 0.0,
            GradientClipping::GlobalNorm(norm) => norm,
        }
    }

    /// The type that products are computed in.
    pub fn precision(&mut self) -> MixedPrecision {
        self.carry(&["training.mixed_precision"]);
        self.training().mixed_precision().set().unwrap_or(MixedPrecision::F32)
    }

    /// Whether layers keep no more than their input; another form becomes that one, with a note.
    pub fn full_checkpointing(&mut self) -> bool {
        let key = "training.gradient_checkpointing";
        self.carry(&[key]);
        let form = self.settings().checkpointing;
        let words = match form {
            Checkpointing::None => return false,
            Checkpointing::Full => return true,
            Checkpointing::Ratio(share) if share * f64::from(self.plan.spec.num_layers) < 0.5 => {
                return false;
            }
            Checkpointing::Every(_) | Checkpointing::Sqrt => {
                "the file says full, which keeps the input of every layer: more memory, less time."
            }
            Checkpointing::Ratio(_) | Checkpointing::Selective(_) | Checkpointing::Mixed { .. } => {
                "the file says full: less memory, more time."
            }
        };
        self.note(key, words);
        true
    }

    /// Logits of how many tokens exist at once, where that is not all of a micro-batch. Other programs hold them several times over, so
    /// that they get no more than about 32 MiB of them where nobody says how many.
    fn chunk_of_loss(&self) -> Option<u64> {
        let StepSettings { batch_size, sequence_length, loss_chunk_tokens: own, .. } = *self.settings();
        let all = batch_size.saturating_mul(sequence_length);
        let chunk = match self.plan.asked.training.loss_chunk_tokens().set() {
            Some(_) => own,
            None => own.min(loss_chunk_tokens(self.plan.spec.vocab_size, all)),
        };
        (chunk < all).then_some(chunk)
    }

    /// The same, said in the document.
    pub fn loss_chunk(&mut self) -> Option<u64> {
        self.carry(&["training.loss_chunk_tokens"]);
        self.chunk_of_loss()
    }

    /// Of a micro-batch whose logits are made in pieces: that the other program makes them at once, and what helps.
    pub fn whole_logits(&mut self, remedy: &str) {
        if let Some(tokens) = self.loss_chunk() {
            let StepSettings { batch_size, sequence_length, .. } = *self.settings();
            let all = batch_size.saturating_mul(sequence_length).saturating_mul(self.plan.spec.vocab_size);
            self.note(
                "training.loss_chunk_tokens",
                &format!(
                    "Plimsoll can do with logits of {tokens} tokens at once; all of a micro-batch are {} in f32. {remedy}",
                    ByteSize(all.saturating_mul(4))
                ),
            );
        }
    }

    /// The model's folder, file or name. What is made from scratch has none.
    pub fn model_path(&mut self, remedy: &'static str) -> Result<String, ExportError> {
        self.carry(&["model.path"]);
        let path = self.config().model.path.clone();
        let path = path.ok_or(ExportError::Scratch { format: self.format, remedy })?;
        if !Path::new(&path).exists() && !path.contains('/') {
            self.say(format!("model.path ({path}): name the folder, or the hub id with its organisation."));
        }
        if path.ends_with(".gguf") {
            self.note("model.path", "a GGUF file, which the other program does not train from; name the folder of the same model.");
        }
        Ok(path)
    }

    /// Keys that the document says, or whole sections, with a dot at their end.
    pub fn carry(&mut self, keys: &[&str]) {
        self.carried.extend(keys.iter().map(|key| (*key).to_owned()));
    }

    /// A sentence of the heading.
    pub fn head(&mut self, text: impl Into<String>) {
        self.heading.push(text.into());
    }

    /// A note on no key by itself. What is asked for twice is said once.
    pub fn say(&mut self, text: impl Into<String>) {
        let text = text.into();
        if !self.notes.contains(&text) {
            self.notes.push(text);
        }
    }

    /// On how many processes the file is to be started, where it does not say it.
    pub fn say_ranks(&mut self) {
        if self.ranks() > 1 {
            let (ranks, machines, sequences) = (self.ranks(), self.machines, self.plan.choice.sequences());
            let of_machines = if machines > 1 { format!(" on {machines} machines") } else { String::new() };
            self.say(format!(
                "ranks: the file is for {ranks} processes{of_machines}, with {sequences} sequences in a step; the launcher says how many there are."
            ));
        }
    }

    /// Takes back what was said of a key.
    pub fn drop_notes(&mut self, key: &str) {
        self.notes
            .retain(|note| !note.starts_with(&format!("{key} ")) && !note.starts_with(&format!("{key}:")));
    }

    /// What became of a key that was not carried over as it is.
    pub fn note(&mut self, key: &str, words: &str) {
        let said = self.config().said();
        let value = said.iter().find(|said| said.key == key).map(|said| said.value.clone());
        let value = value.map(|value| format!(" ({value})")).unwrap_or_default();
        self.carry(&[key]);
        self.notes.push(format!("{key}{value}: {words}"));
    }

    /// Notes what was asked for in these sections and of the places of tensors, and was neither carried over nor noted.
    pub fn leave(&mut self, sections: &[&str]) {
        for said in self.config().said() {
            let (key, value) = (said.key, said.value.as_str());
            let is_within =
                |section: &&str| key == *section || section.ends_with('.') && key.starts_with(*section);
            let is_carried = self.carried.iter().any(|carried| is_within(&carried.as_str()));
            let is_plain = PLAIN.contains(&(key, value))
                || FOLLOWING.contains(&key)
                || key == "training.loss_chunk_tokens" && self.chunk_of_loss().is_none()
                || key.starts_with("memory.offload.") && value == "device"
                || key == "memory.prefetch" && value == "true"
                || (key.starts_with("memory.kept_layers.") || key == "memory.expert_slots") && value == "0";
            if sections.iter().chain(&PLACES).any(is_within) && !is_carried && !said.is_default && !is_plain {
                self.notes.push(format!("{key} ({value}): there is no such setting."));
            }
        }
    }

    /// The heading and the notes.
    pub fn finish(self) -> (Vec<String>, Vec<String>) {
        (self.heading, self.notes)
    }
}

impl Sheet<'_> {
    /// How long sequences are, where the program's file does not say it.
    pub fn note_sequence(&mut self, words: &str) {
        let tokens = self.settings().sequence_length;
        self.say(format!("data.sequence_length ({tokens}): {words}"));
    }

    /// Attention that is not flash, and where the program is told of it.
    pub fn note_attention(&mut self, place: &str) {
        let key = "training.attention";
        self.carry(&[key]);
        match self.settings().attention {
            AttentionKind::Flash => self.say(format!("{key} (flash): {place} = flash_attention_2 or sdpa.")),
            AttentionKind::Standard => self.note(key, &format!("{place} = eager.")),
            AttentionKind::SlidingWindow(_) | AttentionKind::BlockSparse(_) => {
                self.note(key, "the pattern is not carried over; the model's own attention takes more time.");
            }
        }
    }

    /// Options of adapters that the program does not have, where they are set.
    pub fn leave_lora(&mut self, options: &[&str], words: &str) {
        for said in self.config().said() {
            let option = said.key.strip_prefix("training.lora.");
            if !said.is_default && option.is_some_and(|option| options.contains(&option)) {
                self.note(said.key, words);
            }
        }
    }
}
