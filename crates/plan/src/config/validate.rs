//! Checks of a whole configuration: ranges, what this version does not have, and keys that contradict each other.
//! Whether files exist and models fit is left to those who open and plan them.

use plimsoll_step::{AttentionKind, BlockSparse};

use super::{
    Auto, ConfigError, ConflictingKey, Entry, GradientDtype, LearningRateScaling, MasterWeights, Method,
    MixedPrecision, Paths, RawConfig, availability, is_unset,
};

/// The keys of a batch.
const BATCH_KEYS: [&str; 3] =
    ["training.batch_size", "training.gradient_accumulation_steps", "training.effective_batch_size"];

impl RawConfig {
    /// Refuses what cannot work whatever the model and the machine.
    ///
    /// # Errors
    /// Everything that is wrong, [`ConfigError::Several`] if there is more than one thing.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let mut errors = Vec::new();
        self.check_values(&mut errors);
        self.check_model(&mut errors);
        self.check_data(&mut errors);
        self.check_training(&mut errors);
        self.check_memory(&mut errors);
        self.check_output(&mut errors);
        ConfigError::collect(errors)
    }

    /// The training data.
    ///
    /// # Errors
    /// [`ConfigError::Missing`] if there is none.
    pub fn training_data(&self) -> Result<&Paths, ConfigError> {
        self.data.train.as_ref().ok_or_else(|| ConfigError::Missing {
            key: "data.train",
            remedy: "name the files to train on, for example data: {train: corpus.txt}".to_owned(),
        })
    }

    /// Each value by itself.
    fn check_values(&self, errors: &mut Vec<ConfigError>) {
        self.visit(&mut |entry: Entry| {
            let Some(value) = entry.value else { return };
            let place = self.place(entry.path).cloned();
            if let (Some(bounds), Some(number)) = (entry.bounds, value.number)
                && !(bounds.hold)(number)
            {
                errors.push(ConfigError::OutOfRange {
                    place,
                    key: entry.path,
                    value: value.text,
                    range: bounds.words,
                });
            } else if let Some(refusal) = availability::refusal(entry.path, &value.text) {
                errors.push(ConfigError::Unavailable {
                    place,
                    key: entry.path.to_owned(),
                    value: value.text,
                    reason: refusal.reason,
                    instead: refusal.instead,
                });
            }
        });
    }

    fn check_model(&self, errors: &mut Vec<ConfigError>) {
        let model = &self.model;
        let scratch = &model.from_scratch;
        if is_unset(scratch) {
            if model.path.is_none() {
                errors.push(ConfigError::Missing {
                    key: "model",
                    remedy:
                        "name a model (model: PATH) or give the sizes of one (model: {from_scratch: ...})"
                            .to_owned(),
                });
            }
            return;
        }
        if let Some(path) = &model.path {
            errors.push(ConfigError::Conflict {
                keys: vec![self.conflicting("model.path", path)],
                reason: "model.path and model.from_scratch exclude each other".to_owned(),
                remedy: "remove one of them".to_owned(),
            });
        }
        for (key, value) in [
            ("model.from_scratch.hidden_size", scratch.hidden_size),
            ("model.from_scratch.intermediate_size", scratch.intermediate_size),
            ("model.from_scratch.num_hidden_layers", scratch.num_hidden_layers),
            ("model.from_scratch.num_attention_heads", scratch.num_attention_heads),
        ] {
            if value.is_none() {
                errors.push(ConfigError::Missing {
                    key,
                    remedy:
                        "a model from scratch needs hidden_size, intermediate_size, num_hidden_layers and \
                             num_attention_heads"
                            .to_owned(),
                });
            }
        }
        let (Some(hidden), Some(heads)) = (scratch.hidden_size, scratch.num_attention_heads) else { return };
        if scratch.head_dim.is_none() && heads > 0 && !hidden.is_multiple_of(heads) {
            errors.push(ConfigError::Conflict {
                keys: vec![
                    self.conflicting("model.from_scratch.hidden_size", hidden),
                    self.conflicting("model.from_scratch.num_attention_heads", heads),
                ],
                reason: "hidden_size is not a multiple of num_attention_heads".to_owned(),
                remedy: match hidden.checked_next_multiple_of(heads) {
                    Some(nearest) => format!("set hidden_size to {nearest}, or set head_dim"),
                    None => "set head_dim".to_owned(),
                },
            });
        }
        if let Some(kv_heads) = scratch.num_key_value_heads
            && kv_heads > 0
            && !heads.is_multiple_of(kv_heads)
        {
            errors.push(ConfigError::Conflict {
                keys: vec![
                    self.conflicting("model.from_scratch.num_attention_heads", heads),
                    self.conflicting("model.from_scratch.num_key_value_heads", kv_heads),
                ],
                reason: "num_key_value_heads does not divide num_attention_heads".to_owned(),
                remedy: format!("{heads} always does, and 1"),
            });
        }
    }

    fn check_data(&self, errors: &mut Vec<ConfigError>) {
        let data = &self.data;
        let format = self.conflicting("data.format", data.format());
        if data.has_samples() {
            if data.document_mask == Some(false) && data.packing() {
                errors.push(ConfigError::Conflict {
                    keys: vec![self.conflicting("data.document_mask", false), format],
                    reason: "samples that share a sequence are always told apart".to_owned(),
                    remedy: "remove data.document_mask, or set data.packing to false".to_owned(),
                });
            }
        } else if !data.packing() {
            errors.push(ConfigError::Conflict {
                keys: vec![self.conflicting("data.packing", false), format],
                reason: "running text is always joined and cut into full sequences".to_owned(),
                remedy: "leave data.packing true; data.document_mask tells documents apart".to_owned(),
            });
        }
    }

    fn check_training(&self, errors: &mut Vec<ConfigError>) {
        let training = &self.training;
        if let (Some(steps), Some(epochs)) = (training.steps, training.epochs) {
            errors.push(ConfigError::Conflict {
                keys: vec![
                    self.conflicting("training.steps", steps),
                    self.conflicting("training.epochs", epochs),
                ],
                reason: "training.steps and training.epochs exclude each other".to_owned(),
                remedy: "remove one of them".to_owned(),
            });
        }
        if let (Some(steps), Some(ratio)) = (training.warmup_steps, training.warmup_ratio) {
            errors.push(ConfigError::Conflict {
                keys: vec![
                    self.conflicting("training.warmup_steps", steps),
                    self.conflicting("training.warmup_ratio", ratio),
                ],
                reason: "training.warmup_steps and training.warmup_ratio exclude each other".to_owned(),
                remedy: "remove one of them".to_owned(),
            });
        }
        if training.learning_rate_scaling() != LearningRateScaling::None
            && training.reference_batch_size.is_none()
        {
            errors.push(ConfigError::Missing {
                key: "training.reference_batch_size",
                remedy:
                    "with learning_rate_scaling, name the effective batch that the learning rate is meant for"
                        .to_owned(),
            });
        }
        self.check_optimizer(errors);
        self.check_lora(errors);
        // A number out of its range is said already, and does not go with others either.
        let is_refused = errors.iter().any(|error| BATCH_KEYS.iter().any(|key| error.is_range_of(key)));
        if let (Err(error), false) = (self.batch_settings(), is_refused) {
            errors.push(error);
        }
        self.check_in_backward(errors);
        self.check_fp16(errors);
        self.check_block_sparse(errors);
        self.check_chunks(errors);
        self.check_dynamic_batching(errors);
        self.check_mesh(errors);
        if training.mixed_precision() != Auto::Set(MixedPrecision::F32) {
            return;
        }
        let precision = self.conflicting("training.mixed_precision", MixedPrecision::F32);
        if let Some(Auto::Set(master @ MasterWeights::F32)) = training.master_weights {
            errors.push(ConfigError::Conflict {
                keys: vec![precision.clone(), self.conflicting("training.master_weights", master)],
                reason: "f32 weights need no f32 master weights behind them".to_owned(),
                remedy: "set training.master_weights to none or auto".to_owned(),
            });
        }
        if let Some(Auto::Set(gradients @ GradientDtype::Bf16)) = training.gradient_dtype {
            errors.push(ConfigError::Conflict {
                keys: vec![precision, self.conflicting("training.gradient_dtype", gradients)],
                reason: "gradients are kept in bf16 only where weights and activations are".to_owned(),
                remedy: "set training.gradient_dtype to f32 or auto, or training.mixed_precision to bf16"
                    .to_owned(),
            });
        }
    }

    fn check_fp16(&self, errors: &mut Vec<ConfigError>) {
        let training = &self.training;
        if training.mixed_precision() != Auto::Set(MixedPrecision::Fp16) {
            return;
        }
        let precision = self.conflicting("training.mixed_precision", MixedPrecision::Fp16);
        if training.optimizer_in_backward() {
            errors.push(ConfigError::Conflict {
                keys: vec![precision.clone(), self.conflicting("training.optimizer_in_backward", true)],
                reason: "a step whose scaled gradients overflow is skipped, which is known only when all are there".to_owned(),
                remedy: "set training.mixed_precision to bf16, which needs no scale, or training.optimizer_in_backward to false".to_owned(),
            });
        }
        // Adapters are in f32 themselves, and what is frozen has no masters.
        let lora = &training.lora;
        let saves = lora.modules_to_save.as_ref().is_some_and(|names| !names.0.is_empty());
        let trains_weights = training.method() == Method::Full || saves;
        if let Some(Auto::Set(masters @ MasterWeights::None)) = training.master_weights
            && trains_weights
        {
            errors.push(ConfigError::Conflict {
                keys: vec![precision, self.conflicting("training.master_weights", masters)],
                reason: "fp16 weights are updated behind f32 master weights".to_owned(),
                remedy: "set training.master_weights to f32 or auto, or training.mixed_precision to bf16"
                    .to_owned(),
            });
        }
    }

    fn check_block_sparse(&self, errors: &mut Vec<ConfigError>) {
        let length = self.data.sequence_length();
        let Auto::Set(attention) = self.training.attention() else { return };
        let AttentionKind::BlockSparse(BlockSparse { block, .. }) = attention.0 else { return };
        if block == 0 || length.is_multiple_of(block) {
            return;
        }
        let below = length / block * block;
        let nearest = match below.checked_add(block) {
            Some(above) if below == 0 || above - length < length - below => above,
            _ => below,
        };
        let divisor = (1..=block.min(length)).rev().find(|block| length.is_multiple_of(*block)).unwrap_or(1);
        errors.push(ConfigError::Conflict {
            keys: vec![
                self.conflicting("training.attention", attention),
                self.conflicting("data.sequence_length", length),
            ],
            reason: format!("a sequence of {length} tokens is not whole blocks of {block}"),
            remedy: format!("set data.sequence_length to {nearest}, or the block to {divisor}"),
        });
    }

    fn check_in_backward(&self, errors: &mut Vec<ConfigError>) {
        let training = &self.training;
        let clip = training.max_gradient_norm();
        match (training.optimizer_in_backward(), training.in_backward_clipping) {
            (true, None) if clip > 0.0 => errors.push(ConfigError::Conflict {
                keys: vec![
                    self.conflicting("training.optimizer_in_backward", true),
                    self.conflicting("training.max_gradient_norm", clip),
                ],
                reason: "a block is updated before the norm of all gradients is known, so that clipping needs a norm from elsewhere".to_owned(),
                remedy: "set training.in_backward_clipping to previous_norm (the step before's) or to second_backward (exact, for twice the time), or training.max_gradient_norm to 0".to_owned(),
            }),
            (false, Some(mode)) => errors.push(ConfigError::Conflict {
                keys: vec![
                    self.conflicting("training.in_backward_clipping", mode),
                    self.conflicting("training.optimizer_in_backward", false),
                ],
                reason: "gradients are clipped by their own norm unless the optimizer works in the backward pass".to_owned(),
                remedy: "set training.optimizer_in_backward to true, or remove training.in_backward_clipping".to_owned(),
            }),
            _ => {}
        }
    }

    fn check_memory(&self, errors: &mut Vec<ConfigError>) {
        let [_, warning, critical, emergency] = self.memory.shares();
        let rising = [
            ("memory.warning_threshold", warning),
            ("memory.critical_threshold", critical),
            ("memory.emergency_threshold", emergency),
        ];
        if !rising.is_sorted_by(|(_, lower), (_, higher)| lower <= higher) {
            errors.push(ConfigError::Conflict {
                keys: rising.into_iter().map(|(key, value)| self.conflicting(key, value)).collect(),
                reason: "the thresholds do not rise from warning to critical to emergency".to_owned(),
                remedy: "put them in that order".to_owned(),
            });
        }
    }

    fn check_output(&self, errors: &mut Vec<ConfigError>) {
        if self.output.eval_steps() > 0 && self.data.validation.is_none() {
            errors.push(ConfigError::Conflict {
                keys: vec![self.conflicting("output.eval_steps", self.output.eval_steps())],
                reason: "there is nothing to validate on".to_owned(),
                remedy: "set data.validation, or remove output.eval_steps".to_owned(),
            });
        }
    }

    pub(super) fn conflicting(&self, key: &'static str, value: impl ToString) -> ConflictingKey {
        ConflictingKey { key, value: value.to_string(), place: self.place(key).cloned() }
    }
}
