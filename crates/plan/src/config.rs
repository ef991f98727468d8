//! The raw configuration: what the user wrote, in a YAML file and in `--set` assignments.
//!
//! Every key may be left out, and `auto` is legal where the planner can decide. What a key means, its
//! default, its range and its help stand together where its section is defined; reading, writing,
//! validating and suggesting all go over those definitions. Layers are applied in order: the defaults, the
//! file, the command line. Deciding every `auto` is left to the resolved configuration.
//!
//! Relative paths are relative to the current directory, whether they stand in a file or on the command
//! line; `~` is not expanded.

mod around;
mod attention;
mod availability;
mod batch;
mod changes;
mod chunks;
mod data;
mod division;
mod document;
mod dynamic_batching;
mod error;
mod imported;
mod keys;
mod load;
mod lora;
mod memory;
mod model;
mod optimizer;
mod output;
mod parallel;
mod place;
mod planning;
mod policies;
mod section;
mod training;
mod validate;
mod value;

#[cfg(test)]
mod sample;
#[cfg(test)]
mod tests;

pub(crate) use around::{Shaping, Takes};
pub use attention::Attention;
pub use batch::BatchSettings;
pub use changes::KeyChange;
pub use data::{ColumnsConfig, DataConfig, DataFormat, TrainOn, Truncation};
pub use division::Started;
pub use dynamic_batching::DynamicBatching;
pub use error::{ConfigError, ConflictingKey};
pub use imported::{ACCELERATE, DEEPSPEED, ForeignFile, ForeignKey, Imported, NAMED_FILES, SixteenBits};
pub use keys::keys;
pub use load::Override;
pub use lora::{LoraBias, LoraInit, LoraOptions, Names, Patterns, Quantization, Targets};
pub use memory::{KeptLayersConfig, MemoryConfig, OffloadConfig, OffloadTarget, ThresholdProfile};
pub use model::{Architecture, FromScratchConfig, ModelConfig, TokenizerSource};
pub use optimizer::{Optimizer, OptimizerOptions, ParameterGroup, ParameterGroups, ScaleType};
pub use output::OutputConfig;
pub use parallel::{ParallelConfig, ShardingStrategy};
pub use place::Place;
pub use planning::{Goal, PlanningConfig, Quality};
pub use policies::{ActivationCompression, GradientCheckpointing};
pub use section::KeyDoc;
pub use training::{
    GradientDtype, InBackwardClipping, LearningRateScaling, LrSchedule, MasterWeights, Method,
    MixedPrecision, NotFinite, TrainingConfig, TrainingLength,
};
pub use value::{Auto, Paths};

use document::Input;
use place::Origins;
use section::{Entry, Section, is_unset};
use value::Mismatch;

/// What the user wrote. A `None` is a key that was left out; the method of the same name gives its default.
///
/// Two configurations are equal if they say the same, wherever each value was written.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize)]
pub struct RawConfig {
    /// The model.
    #[serde(skip_serializing_if = "is_unset")]
    pub model: ModelConfig,
    /// Texts, and how they become batches.
    #[serde(skip_serializing_if = "is_unset")]
    pub data: DataConfig,
    /// How the model is trained.
    #[serde(skip_serializing_if = "is_unset")]
    pub training: TrainingConfig,
    /// Budgets, and what may leave the device.
    #[serde(skip_serializing_if = "is_unset")]
    pub memory: MemoryConfig,
    /// Ranks.
    #[serde(skip_serializing_if = "is_unset")]
    pub parallel: ParallelConfig,
    /// What the planner looks for, and among what.
    #[serde(skip_serializing_if = "is_unset")]
    pub planning: PlanningConfig,
    /// What is written, where, and how often.
    #[serde(skip_serializing_if = "is_unset")]
    pub output: OutputConfig,
    /// Which of the ranks this process is. Each is another one: it is no part of the document.
    #[serde(skip)]
    pub rank: u32,
    /// The ranks that there are, where they have been counted; no part of the document either.
    #[serde(skip)]
    pub started: Option<Started>,
    #[serde(skip)]
    origins: Origins,
}

/// A key that is set.
pub(crate) struct Said {
    /// The dotted path.
    pub key: &'static str,
    /// What it is set to.
    pub value: String,
    /// Whether that is what it would be without.
    pub is_default: bool,
}

impl RawConfig {
    /// Where the value of `key` (dotted: `training.batch_size`) was written; `None` if it was not, or not by the user.
    pub fn place(&self, key: &str) -> Option<&Place> {
        self.origins.get(key)
    }

    /// The document in YAML: only the keys that are set. Reads back as the same configuration.
    ///
    /// # Errors
    /// [`ConfigError::Write`] if the YAML writer refuses a value.
    pub fn to_yaml(&self) -> Result<String, ConfigError> {
        serde_saphyr::to_string(self).map_err(|e| ConfigError::Write { reason: e.to_string() })
    }

    /// The document in JSON, indented. It is YAML too: [`from_str`](Self::from_str) reads it back as the same
    /// configuration.
    ///
    /// # Errors
    /// [`ConfigError::Write`] if the JSON writer refuses a value.
    pub fn to_json(&self) -> Result<String, ConfigError> {
        let json =
            serde_json::to_string_pretty(self).map_err(|e| ConfigError::Write { reason: e.to_string() })?;
        Ok(escape_for_yaml(&json))
    }

    fn set(&mut self, path: &str, input: Input<'_>) -> Option<Result<(), Mismatch>> {
        let (section, key) = path.split_once('.')?;
        match section {
            "model" => self.model.set(key, input),
            "data" => self.data.set(key, input),
            "training" => self.training.set(key, input),
            "memory" => self.memory.set(key, input),
            "parallel" => self.parallel.set(key, input),
            "planning" => self.planning.set(key, input),
            "output" => self.output.set(key, input),
            _ => None,
        }
    }

    /// Every key that is set, in the order of their definition.
    pub(crate) fn said(&self) -> Vec<Said> {
        let mut all = Vec::new();
        self.visit(&mut |entry: Entry| {
            if let Some(shown) = entry.value {
                let is_default = shown.text == (entry.default)();
                all.push(Said { key: entry.path, value: shown.text, is_default });
            }
        });
        all
    }

    /// Goes over every key of the document, set or not.
    fn visit(&self, visitor: &mut dyn FnMut(Entry)) {
        self.model.visit(visitor);
        self.data.visit(visitor);
        self.training.visit(visitor);
        self.memory.visit(visitor);
        self.parallel.visit(visitor);
        self.planning.visit(visitor);
        self.output.visit(visitor);
    }
}

/// Escapes what may stand in a JSON string as it is, but not in YAML.
fn escape_for_yaml(json: &str) -> String {
    let mut text = String::with_capacity(json.len());
    for c in json.chars() {
        match c {
            '\u{7f}'..='\u{9f}' | '\u{2028}' | '\u{2029}' | '\u{feff}' | '\u{fffe}' | '\u{ffff}' => {
                text.push_str(&format!("\\u{:04x}", u32::from(c)));
            }
            _ => text.push(c),
        }
    }
    text
}
