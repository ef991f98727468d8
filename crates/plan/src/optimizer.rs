//! From the optimizer that the user wrote to the one that runs, with the defaults of the package that made each known.

use glob::Pattern;
use plimsoll_step::{
    AdafactorSettings, AdamSettings, ApolloChannels, EightBit, LionSettings, LowRankSettings, OptimizerKind,
    OptimizerSettings, ParameterGroup, SgdSettings,
};

use crate::config::{Optimizer, OptimizerOptions, ScaleType, TrainingConfig};

/// The least root mean square that a parameter counts with (transformers' Adafactor, `eps[1]`).
const LEAST_SCALE: f64 = 1e-3;

/// The optimizer of a configuration.
pub fn optimizer_settings(training: &TrainingConfig) -> OptimizerSettings {
    let groups = training.parameter_groups.as_ref().map_or(&[][..], |groups| groups.groups());
    // LoRA+ (Hayou et al. 2024): B learns faster.
    let ratio = training.lora.loraplus_lr_ratio();
    let faster = Pattern::new("*lora*_B*").ok().filter(|_| ratio != 1.0);
    let faster = faster.map(|pattern| ParameterGroup { pattern, lr_scale: ratio, weight_decay: None });
    OptimizerSettings {
        kind: kind(training),
        weight_decay: training.weight_decay(),
        decay_norms_and_biases: training.decay_norms_and_biases(),
        groups: groups
            .iter()
            .filter_map(|group| {
                let of_the_rate = group.learning_rate.map(|lr| lr / training.learning_rate());
                Some(ParameterGroup {
                    // The configuration was only read with patterns that are.
                    pattern: Pattern::new(&group.pattern).ok()?,
                    lr_scale: group.learning_rate_scale.or(of_the_rate).unwrap_or(1.0),
                    weight_decay: group.weight_decay,
                })
            })
            .chain(faster)
            .collect(),
    }
}

fn kind(training: &TrainingConfig) -> OptimizerKind {
    let options = &training.optimizer_options;
    let adam = |epsilon: f64| AdamSettings {
        beta1: training.adam_beta1(),
        beta2: training.adam_beta2(),
        epsilon: training.adam_epsilon.unwrap_or(epsilon),
    };
    let bits = EightBit { embeddings: options.embedding_bits == Some(8) };
    let lion = LionSettings { beta1: options.beta1.unwrap_or(0.9), beta2: options.beta2.unwrap_or(0.99) };
    match training.optimizer() {
        Optimizer::AdamW => OptimizerKind::AdamW(adam(1e-8)),
        Optimizer::AdamWBf16 => OptimizerKind::AdamWBf16(adam(1e-8)),
        Optimizer::AdamW8bit => OptimizerKind::AdamW8bit(adam(1e-8), bits),
        Optimizer::AdamMini => OptimizerKind::AdamMini(adam(1e-8)),
        Optimizer::Lion => OptimizerKind::Lion(lion),
        Optimizer::Lion8bit => OptimizerKind::Lion8bit(lion, bits),
        Optimizer::Adafactor => {
            let scaled = options.scale_parameter.unwrap_or(true);
            OptimizerKind::Adafactor(AdafactorSettings {
                scale_by_parameter: scaled.then_some(LEAST_SCALE),
                beta1: options.beta1,
                ..adafactor(options)
            })
        }
        Optimizer::AdaLomo => OptimizerKind::AdaLomo(adafactor(options)),
        Optimizer::Sgd => OptimizerKind::Sgd(SgdSettings {
            momentum: options.momentum.unwrap_or(0.0),
            dampening: options.dampening.unwrap_or(0.0),
            nesterov: options.nesterov.unwrap_or(false),
        }),
        Optimizer::GaLore => OptimizerKind::GaLore(low_rank(options, adam(1e-6), 128, 0.25)),
        Optimizer::Apollo => match options.scale_type.unwrap_or(ScaleType::Channel) {
            ScaleType::Channel => {
                OptimizerKind::Apollo(low_rank(options, adam(1e-6), 256, 1.0), ApolloChannels::Channel)
            }
            ScaleType::Tensor => {
                OptimizerKind::Apollo(low_rank(options, adam(1e-6), 1, 128.0), ApolloChannels::Tensor)
            }
        },
    }
}

fn adafactor(options: &OptimizerOptions) -> AdafactorSettings {
    AdafactorSettings {
        epsilon: 1e-30,
        scale_by_parameter: Some(LEAST_SCALE),
        clip_threshold: options.clip_threshold.unwrap_or(1.0),
        decay_rate: options.decay_rate.unwrap_or(-0.8),
        beta1: None,
    }
}

fn low_rank(options: &OptimizerOptions, adam: AdamSettings, rank: u64, scale: f64) -> LowRankSettings {
    LowRankSettings {
        rank: options.rank.unwrap_or(rank),
        update_proj_gap: options.update_proj_gap.unwrap_or(200),
        scale: options.scale.unwrap_or(scale),
        adam,
    }
}
