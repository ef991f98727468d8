//! What transformers' `Trainer` calls optimizers and schedules. LLaMA-Factory takes the same names, axolotl the same words under
//! names of its own.

use plimsoll_step::{ApolloChannels, LowRankSettings, OptimizerKind};

use super::sheet::{Page, Sheet, Warmup};
use crate::config::LrSchedule;

/// An optimizer of `Trainer`.
pub(super) struct TrainerOptimizer {
    /// `optim`.
    pub name: &'static str,
    /// `optim_args`: names and values.
    pub args: Vec<(&'static str, String)>,
    /// `optim_target_modules`.
    pub targets: Option<&'static str>,
    /// `adam_beta1`, `adam_beta2`.
    pub betas: Option<[f64; 2]>,
    /// `adam_epsilon`.
    pub epsilon: Option<f64>,
}

impl TrainerOptimizer {
    fn named(name: &'static str) -> TrainerOptimizer {
        TrainerOptimizer { name, args: Vec::new(), targets: None, betas: None, epsilon: None }
    }

    /// `optim_args` as `Trainer` reads them: `rank=128,scale=0.25`.
    pub fn joined_args(&self) -> Option<String> {
        let pairs: Vec<String> = self.args.iter().map(|(key, value)| format!("{key}={value}")).collect();
        (!pairs.is_empty()).then(|| pairs.join(","))
    }
}

fn low_rank(name: &'static str, settings: &LowRankSettings) -> TrainerOptimizer {
    let LowRankSettings { rank, update_proj_gap, scale, adam } = settings;
    TrainerOptimizer {
        args: vec![
            ("rank", rank.to_string()),
            ("update_proj_gap", update_proj_gap.to_string()),
            ("scale", scale.to_string()),
        ],
        targets: Some("all-linear"),
        betas: Some([adam.beta1, adam.beta2]),
        epsilon: Some(adam.epsilon),
        ..TrainerOptimizer::named(name)
    }
}

/// The optimizer, by the name that `Trainer` has for it.
pub(super) fn optimizer(sheet: &mut Sheet<'_>) -> TrainerOptimizer {
    let key = "training.optimizer";
    sheet.carry(&[key, "training.optimizer_options.", "training.adam_beta1", "training.adam_beta2"]);
    sheet.carry(&["training.adam_epsilon"]);
    let named = TrainerOptimizer::named;
    match &sheet.settings().optimizer.kind {
        OptimizerKind::AdamW(adam)
        | OptimizerKind::AdamW8bit(adam, _)
        | OptimizerKind::AdamWBf16(adam)
        | OptimizerKind::AdamMini(adam) => {
            let name = match &sheet.settings().optimizer.kind {
                OptimizerKind::AdamW8bit(_, bits) => {
                    if bits.embeddings {
                        let key = "training.optimizer_options.embedding_bits";
                        sheet.note(key, "Trainer keeps the states of embeddings in 32 bits.");
                    }
                    "adamw_bnb_8bit"
                }
                OptimizerKind::AdamWBf16(_) => {
                    sheet.note(key, "the file says adamw_torch, whose states have the type of the weights: 4 bytes a parameter if the model is loaded in bfloat16 (and then no rounding is stochastic), else 8.");
                    "adamw_torch"
                }
                OptimizerKind::AdamMini(_) => {
                    sheet.note(key, "Trainer has no name for it; the file says adamw_torch, with 8 bytes of states a parameter and not 4. Pass an optimizer of the package adam-mini to Trainer(optimizers=...).");
                    "adamw_torch"
                }
                _ => "adamw_torch",
            };
            TrainerOptimizer {
                betas: Some([adam.beta1, adam.beta2]),
                epsilon: Some(adam.epsilon),
                ..named(name)
            }
        }
        OptimizerKind::Lion(lion) => {
            TrainerOptimizer { betas: Some([lion.beta1, lion.beta2]), ..named("lion_32bit") }
        }
        OptimizerKind::Lion8bit(lion, bits) => {
            if bits.embeddings {
                let key = "training.optimizer_options.embedding_bits";
                sheet.note(key, "Trainer keeps the states of embeddings in 32 bits.");
            }
            TrainerOptimizer { betas: Some([lion.beta1, lion.beta2]), ..named("lion_8bit") }
        }
        OptimizerKind::Adafactor(adafactor) => {
            if adafactor.scale_by_parameter.is_some() || sheet.config().relative_step() {
                sheet.note(key, "Trainer sets scale_parameter and relative_step to false: give a learning rate, or pass the optimizer to Trainer(optimizers=...).");
            }
            if adafactor.beta1.is_some() {
                sheet.note("training.optimizer_options.beta1", "Trainer's Adafactor has no momentum.");
            }
            named("adafactor")
        }
        OptimizerKind::AdaLomo(_) => {
            sheet.say("training.optimizer (adalomo) needs the package lomo-optim.");
            named("adalomo")
        }
        OptimizerKind::Sgd(sgd) => {
            let mut args = Vec::new();
            if sgd.momentum != 0.0 {
                args = vec![
                    ("momentum", sgd.momentum.to_string()),
                    ("dampening", sgd.dampening.to_string()),
                    ("nesterov", sgd.nesterov.to_string()),
                ];
            }
            TrainerOptimizer { args, ..named("sgd") }
        }
        OptimizerKind::GaLore(settings) => {
            sheet.say("training.optimizer (galore) needs the package galore-torch, which runs without DeepSpeed and FSDP.");
            low_rank("galore_adamw", settings)
        }
        OptimizerKind::Apollo(settings, channels) => {
            sheet.say("training.optimizer (apollo) needs the package apollo-torch, which runs without DeepSpeed and FSDP.");
            let mut apollo = low_rank("apollo_adamw", settings);
            let by = match channels {
                ApolloChannels::Channel => "channel",
                ApolloChannels::Tensor => "tensor",
            };
            apollo.args.push(("scale_type", by.to_owned()));
            apollo
        }
    }
}

/// A schedule of `Trainer`: its name and its further numbers.
pub(super) fn schedule(sheet: &mut Sheet<'_>) -> (&'static str, Page) {
    let key = "training.lr_schedule";
    sheet.carry(&[key, "training.min_lr_ratio", "training.decay_ratio"]);
    let (peak, warmup) = (sheet.learning_rate(), sheet.warmup());
    let (least, steps, share) =
        (sheet.training().min_lr_ratio(), sheet.steps(), sheet.training().decay_ratio());
    let mut further = Page::default();
    let steady = if warmup.is_any() { "constant_with_warmup" } else { "constant" };
    let name = match sheet.training().lr_schedule() {
        LrSchedule::Constant => steady,
        LrSchedule::Linear if least > 0.0 => {
            further.put("lr_end", peak * least);
            further.put("power", 1.0);
            "polynomial"
        }
        LrSchedule::Linear => "linear",
        LrSchedule::Cosine if least > 0.0 => {
            further.put("min_lr_rate", least);
            "cosine_with_min_lr"
        }
        LrSchedule::Cosine => "cosine",
        LrSchedule::InverseSqrt => {
            if least > 0.0 {
                sheet.note("training.min_lr_ratio", "the inverse square root falls without end there.");
            }
            "inverse_sqrt"
        }
        LrSchedule::Wsd => match steps {
            Some(steps) => {
                further.put("num_decay_steps", (share * steps as f64).ceil() as u64);
                further.put("decay_type", "linear");
                further.put("min_lr_ratio", least);
                "warmup_stable_decay"
            }
            None => {
                sheet.note(key, "its end needs the number of steps, and training.epochs does not say it; the file has the learning rate stay. Set training.steps.");
                steady
            }
        },
    };
    (name, further)
}

/// `warmup_steps`: steps, or below 1 a share of all steps (transformers 5).
pub(super) fn put_warmup(sheet: &mut Sheet<'_>, page: &mut Page) {
    match sheet.warmup() {
        Warmup::Steps(steps) => page.put("warmup_steps", steps),
        Warmup::Share(share) => {
            page.put("warmup_steps", share);
            sheet.say("warmup_steps below 1 is a share of all steps in transformers 5; transformers 4 calls it warmup_ratio.");
        }
    }
}
