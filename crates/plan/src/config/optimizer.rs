//! `training.optimizer_options` and `training.parameter_groups`: what the optimizers have beyond Adam's three numbers,
//! and parameters with numbers of their own.

use glob::Pattern;
use serde::Serialize;

use super::document::{Input, Yaml};
use super::section::section;
use super::value::{ConfigValue, Mismatch, choice};
use super::{ConfigError, Entry, RawConfig};

choice! {
    /// The optimizer.
    pub enum Optimizer {
        /// Adam with decoupled weight decay (Loshchilov and Hutter 2019).
        AdamW = "adamw",
        /// AdamW with bf16 states, rounded stochastically.
        AdamWBf16 = "adamw_bf16",
        /// AdamW with block-wise 8-bit states (Dettmers et al. 2022).
        AdamW8bit = "adamw_8bit" | "adamw_bnb_8bit",
        /// Adam-mini: a second moment for each head or row (Zhang et al. 2024).
        AdamMini = "adam_mini",
        /// Steps by the sign of a momentum (Chen et al. 2023).
        Lion = "lion",
        /// Lion with a block-wise 8-bit momentum.
        Lion8bit = "lion_8bit",
        /// A factored second moment (Shazeer and Stern 2018).
        Adafactor = "adafactor",
        /// Adafactor's second moment without momentum (Lv et al. 2023).
        AdaLomo = "adalomo",
        /// Stochastic gradient descent, with or without momentum.
        Sgd = "sgd",
        /// Adam in the space of the gradient's largest singular vectors (Zhao et al. 2024).
        GaLore = "galore",
        /// Gradients scaled as Adam would in a random space (Zhu et al. 2024).
        Apollo = "apollo",
    }
}

choice! {
    /// What APOLLO scales as one.
    pub enum ScaleType {
        /// Each row of a tall matrix, each column of a wide one.
        Channel = "channel",
        /// The whole tensor: APOLLO-Mini.
        Tensor = "tensor",
    }
}

section! {
    /// What the optimizer has beyond Adam's numbers. An option that it does not know is refused.
    pub struct OptimizerOptions at "training.optimizer_options" {
        /// Lion: share of the momentum in the sign. Adafactor: decay of a momentum over updates.
        beta1: f64, "Lion 0.9; Adafactor none: no momentum", BELOW_ONE;
        /// Lion: decay of the momentum.
        beta2: f64, "0.99", BELOW_ONE;
        /// SGD: decay of the momentum buffer; 0: there is none.
        momentum: f64, "0", BELOW_ONE;
        /// SGD: share of the gradient that the momentum buffer does not get.
        dampening: f64, "0", FRACTION;
        /// SGD: whether a step looks ahead by the momentum.
        nesterov: bool, "false";
        /// Adafactor: whether the learning rate is min(0.01, 1 / sqrt(step)) instead of the schedule's.
        relative_step: bool, "true, unless training.learning_rate is set";
        /// Adafactor: whether the learning rate is multiplied by the parameter's root mean square.
        scale_parameter: bool, "true";
        /// Adafactor: whether the relative step begins with 1e-6 x step.
        warmup_init: bool, "false";
        /// Adafactor, AdaLomo: the root mean square that an update has at most.
        clip_threshold: f64, "1", POSITIVE;
        /// Adafactor, AdaLomo: the second moment's decay at step t is 1 - t^this.
        decay_rate: f64, "-0.8", NEGATIVE;
        /// GaLore, APOLLO: dimensions of the projected gradient.
        rank: u64, "GaLore 128, APOLLO 256, with scale_type tensor 1", COUNT;
        /// GaLore, APOLLO: steps from one projection to the next.
        update_proj_gap: u64, "200", AT_LEAST_ONE;
        /// GaLore: factor on the update. APOLLO: its root is.
        scale: f64, "GaLore 0.25, APOLLO 1, with scale_type tensor 128", POSITIVE;
        /// APOLLO: what is scaled as one.
        scale_type: ScaleType, "channel";
        /// 8-bit optimizers: bits of the states of embeddings.
        embedding_bits: u64, "32", BITS_8_OR_32;
    }
}

impl Optimizer {
    /// The options that it knows.
    pub fn options(self) -> &'static [&'static str] {
        match self {
            Optimizer::AdamW | Optimizer::AdamWBf16 | Optimizer::AdamMini => &[],
            Optimizer::AdamW8bit => &["embedding_bits"],
            Optimizer::Lion => &["beta1", "beta2"],
            Optimizer::Lion8bit => &["beta1", "beta2", "embedding_bits"],
            Optimizer::Adafactor => {
                &["beta1", "relative_step", "scale_parameter", "warmup_init", "clip_threshold", "decay_rate"]
            }
            Optimizer::AdaLomo => &["clip_threshold", "decay_rate"],
            Optimizer::Sgd => &["momentum", "dampening", "nesterov"],
            Optimizer::GaLore => &["rank", "update_proj_gap", "scale"],
            Optimizer::Apollo => &["rank", "update_proj_gap", "scale", "scale_type"],
        }
    }
}

/// Parameters, by name, with numbers of their own.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ParameterGroup {
    /// Which names: `*` stands for any text, `?` for a character.
    pub pattern: String,
    /// Peak learning rate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub learning_rate: Option<f64>,
    /// The same as a multiple of `training.learning_rate`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub learning_rate_scale: Option<f64>,
    /// Weight decay.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weight_decay: Option<f64>,
}

/// The groups, in order: of several that a parameter is in, the first counts.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(transparent)]
pub struct ParameterGroups {
    groups: Vec<ParameterGroup>,
}

impl ParameterGroups {
    /// Groups in order.
    pub fn new(groups: Vec<ParameterGroup>) -> ParameterGroups {
        ParameterGroups { groups }
    }

    /// In the order in which they were written.
    pub fn groups(&self) -> &[ParameterGroup] {
        &self.groups
    }
}

impl ConfigValue for ParameterGroups {
    fn read(input: Input<'_>) -> Result<Self, Mismatch> {
        let Yaml::List(items) = &input.node.value else { return Err(mismatch(input, input.describe())) };
        let groups = items.iter().map(|node| group(Input { node, ..input }));
        Ok(ParameterGroups { groups: groups.collect::<Result<_, _>>()? })
    }
    fn describe() -> String {
        "list of {pattern, learning_rate or learning_rate_scale, weight_decay}".to_owned()
    }
    fn text(&self) -> String {
        let patterns: Vec<&str> = self.groups.iter().map(|group| group.pattern.as_str()).collect();
        format!("[{}]", patterns.join(", "))
    }
}

fn group(input: Input<'_>) -> Result<ParameterGroup, Mismatch> {
    let Yaml::Map(entries) = &input.node.value else { return Err(mismatch(input, input.describe())) };
    let (mut pattern, mut rate, mut scale, mut decay) = (None, None, None, None);
    for (key, node) in entries {
        let value = Input { node, ..input };
        let number = |least: fn(f64) -> bool| {
            let number = f64::read(value)?;
            let fits = least(number);
            if fits { Ok(Some(number)) } else { Err(mismatch(value, format!("{} {number}", key.value))) }
        };
        match key.value.as_str() {
            "pattern" => {
                let text = String::read(value)?;
                if let Err(error) = Pattern::new(&text) {
                    return Err(mismatch(value, format!("the pattern '{text}': {}", error.msg)));
                }
                pattern = Some(text);
            }
            "learning_rate" => rate = number(|v| v > 0.0)?,
            "learning_rate_scale" => scale = number(|v| v >= 0.0)?,
            "weight_decay" => decay = number(|v| v >= 0.0)?,
            other => return Err(mismatch(value, format!("the key '{}'", super::document::shortened(other)))),
        }
    }
    if rate.is_some() && scale.is_some() {
        return Err(mismatch(input, "both learning_rate and learning_rate_scale".to_owned()));
    }
    let pattern = pattern.ok_or_else(|| mismatch(input, "a group without a pattern".to_owned()))?;
    Ok(ParameterGroup { pattern, learning_rate: rate, learning_rate_scale: scale, weight_decay: decay })
}

fn mismatch(input: Input<'_>, got: String) -> Mismatch {
    Mismatch { expected: ParameterGroups::describe(), got, location: input.node.referenced }
}

impl RawConfig {
    /// Whether Adafactor takes its own relative steps.
    pub fn relative_step(&self) -> bool {
        let training = &self.training;
        let default = training.learning_rate.is_none();
        training.optimizer() == Optimizer::Adafactor
            && training.optimizer_options.relative_step.unwrap_or(default)
    }

    /// Options that the optimizer does not know, and those that contradict each other.
    pub(super) fn check_optimizer(&self, errors: &mut Vec<ConfigError>) {
        let training = &self.training;
        let (optimizer, options) = (training.optimizer(), &training.optimizer_options);
        let known = optimizer.options();
        super::Section::visit(options, &mut |entry: Entry| {
            let name = entry.path.rsplit('.').next().unwrap_or(entry.path);
            if let Some(value) = entry.value
                && !known.contains(&name)
            {
                errors.push(ConfigError::Conflict {
                    keys: vec![
                        self.conflicting("training.optimizer", optimizer),
                        self.conflicting(entry.path, value.text),
                    ],
                    reason: format!("{optimizer} has no option {name}"),
                    remedy: if known.is_empty() {
                        "remove it; its numbers are training.adam_beta1, adam_beta2 and adam_epsilon"
                            .to_owned()
                    } else {
                        format!("remove it; {optimizer} knows {}", known.join(", "))
                    },
                });
            }
        });
        let mut conflict = |keys, reason: &str, remedy: &str| {
            errors.push(ConfigError::Conflict { keys, reason: reason.to_owned(), remedy: remedy.to_owned() });
        };
        if options.nesterov == Some(true)
            && (options.momentum.unwrap_or(0.0) == 0.0 || options.dampening.unwrap_or(0.0) != 0.0)
        {
            let keys = vec![self.conflicting("training.optimizer_options.nesterov", true)];
            conflict(
                keys,
                "Nesterov's step needs a momentum and no dampening",
                "set momentum: 0.9, for example",
            );
        }
        if options.warmup_init == Some(true) && !self.relative_step() {
            let keys = vec![self.conflicting("training.optimizer_options.warmup_init", true)];
            conflict(keys, "it is a part of the relative step", "set relative_step: true, or warmup_steps");
        }
        if self.relative_step() {
            let mut keys = vec![self.conflicting("training.optimizer_options.relative_step", true)];
            keys.extend(training.learning_rate.map(|v| self.conflicting("training.learning_rate", v)));
            keys.extend(training.lr_schedule.map(|v| self.conflicting("training.lr_schedule", v)));
            keys.extend(training.warmup_steps.map(|v| self.conflicting("training.warmup_steps", v)));
            keys.extend(training.warmup_ratio.map(|v| self.conflicting("training.warmup_ratio", v)));
            let groups = training.parameter_groups.as_ref().map_or(&[][..], |groups| groups.groups());
            if let Some(lr) = groups.iter().find_map(|group| group.learning_rate) {
                keys.push(self.conflicting("training.parameter_groups", format!("learning_rate: {lr}")));
            }
            if keys.len() > 1 {
                conflict(
                    keys,
                    "with relative steps Adafactor has a learning rate of its own",
                    "set training.optimizer_options.relative_step to false, or remove the others",
                );
            }
        }
    }
}
