//! Configurations of other programs in our keys: DeepSpeed's JSON, transformers' `TrainingArguments`, axolotl's YAML. Each key that is
//! understood becomes an assignment, which is read and checked as one of the command line is. The rest is listed.

use std::path::Path;

use super::document::{Input, Node, Yaml, shortened};
use super::load::{Document, NodeKind, read_file};
use super::{ConfigError, Override};

/// What a file of another program says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Imported {
    /// Ours, to be applied before the command line's own.
    pub overrides: Vec<Override>,
    /// What is not understood, or says nothing of a step here: its place, key and value.
    pub left: Vec<String>,
}

/// A value as it is written in YAML, or that it has no meaning here.
type Meaning = fn(&str) -> Option<String>;

/// Their key, ours, and what a value becomes.
type Entry = (&'static str, &'static str, Meaning);

fn same(value: &str) -> Option<String> {
    Some(value.to_owned())
}

/// One of some words.
fn among(value: &str, words: &[(&str, &str)]) -> Option<String> {
    let wanted = value.to_ascii_lowercase();
    words.iter().find(|(theirs, _)| *theirs == wanted).map(|(_, ours)| (*ours).to_owned())
}

fn place(value: &str) -> Option<String> {
    among(value, &[("none", "device"), ("cpu", "host"), ("nvme", "disk")])
}

fn optimizer(value: &str) -> Option<String> {
    let words = [
        ("adamw", "adamw"),
        ("adamw_torch", "adamw"),
        ("adamw_torch_fused", "adamw"),
        ("adamw_hf", "adamw"),
        ("adamw_8bit", "adamw_8bit"),
        ("adamw_bnb_8bit", "adamw_8bit"),
        ("paged_adamw_8bit", "adamw_8bit"),
        ("paged_adamw_32bit", "adamw"),
        ("adafactor", "adafactor"),
        ("lion", "lion"),
        ("lion_32bit", "lion"),
        ("lion_8bit", "lion_8bit"),
        ("paged_lion_32bit", "lion"),
        ("paged_lion_8bit", "lion_8bit"),
        ("sgd", "sgd"),
        ("adalomo", "adalomo"),
        ("galore_adamw", "galore"),
        ("apollo_adamw", "apollo"),
    ];
    among(value, &words)
}

fn schedule(value: &str) -> Option<String> {
    let words = [
        ("linear", "linear"),
        ("cosine", "cosine"),
        ("cosine_with_min_lr", "cosine"),
        ("constant", "constant"),
        ("constant_with_warmup", "constant"),
        ("inverse_sqrt", "inverse_sqrt"),
        ("warmup_stable_decay", "wsd"),
        ("warmuplr", "constant"),
        ("warmupdecaylr", "linear"),
        ("warmupcosinelr", "cosine"),
    ];
    among(value, &words)
}

fn when_true(value: &str, ours: &str) -> Option<String> {
    (value.eq_ignore_ascii_case("true")).then(|| ours.to_owned())
}

fn checkpointing(value: &str) -> Option<String> {
    among(value, &[("true", "full"), ("false", "none")])
}

/// Steps of a warm-up; transformers 5 takes a number below 1 for a share.
fn warmup_steps(value: &str) -> Option<String> {
    value
        .parse::<f64>()
        .ok()
        .filter(|steps| *steps == 0.0 || *steps >= 1.0)
        .map(|steps| format!("{steps:.0}"))
}

fn warmup_share(value: &str) -> Option<String> {
    value.parse::<f64>().ok().filter(|share| *share > 0.0 && *share < 1.0).map(|share| share.to_string())
}

/// Steps, where they are not left to the epochs.
fn steps(value: &str) -> Option<String> {
    value.parse::<i64>().ok().filter(|steps| *steps > 0).map(|steps| steps.to_string())
}

const DEEPSPEED: [Entry; 25] = [
    ("train_micro_batch_size_per_gpu", "training.batch_size", same),
    ("gradient_accumulation_steps", "training.gradient_accumulation_steps", same),
    ("train_batch_size", "training.effective_batch_size", same),
    ("gradient_clipping", "training.max_gradient_norm", same),
    ("bf16.enabled", "training.mixed_precision", |v| when_true(v, "bf16")),
    ("fp16.enabled", "training.mixed_precision", |v| when_true(v, "fp16")),
    ("zero_optimization.stage", "parallel.zero_stage", same),
    ("zero_optimization.offload_optimizer.device", "memory.offload.optimizer", place),
    // Gradients go where the optimizer is.
    ("zero_optimization.offload_optimizer.device", "memory.offload.gradients", place),
    ("zero_optimization.offload_optimizer.nvme_path", "memory.disk_path", same),
    ("zero_optimization.offload_param.device", "memory.offload.parameters", place),
    ("zero_optimization.offload_param.nvme_path", "memory.disk_path", same),
    ("optimizer.type", "training.optimizer", optimizer),
    ("optimizer.params.lr", "training.learning_rate", same),
    ("optimizer.params.betas.0", "training.adam_beta1", same),
    ("optimizer.params.betas.1", "training.adam_beta2", same),
    ("optimizer.params.eps", "training.adam_epsilon", same),
    ("optimizer.params.weight_decay", "training.weight_decay", same),
    ("scheduler.type", "training.lr_schedule", schedule),
    ("scheduler.params.warmup_num_steps", "training.warmup_steps", warmup_steps),
    ("scheduler.params.total_num_steps", "training.steps", steps),
    ("scheduler.params.cos_min_ratio", "training.min_lr_ratio", same),
    ("data_types.grad_accum_dtype", "training.gradient_dtype", |v| {
        among(v, &[("fp32", "f32"), ("bf16", "bf16")])
    }),
    ("bf16.bf16_master_weights_and_grads", "training.master_weights", |v| when_true(v, "none")),
    ("tensor_parallel.autotp_size", "parallel.tensor_parallel", same),
];

const TRAINER: [Entry; 32] = [
    ("per_device_train_batch_size", "training.batch_size", same),
    ("gradient_accumulation_steps", "training.gradient_accumulation_steps", same),
    ("num_train_epochs", "training.epochs", same),
    ("max_steps", "training.steps", steps),
    ("learning_rate", "training.learning_rate", same),
    ("lr_scheduler_type", "training.lr_schedule", schedule),
    ("lr_scheduler_kwargs.min_lr_rate", "training.min_lr_ratio", same),
    ("lr_scheduler_kwargs.min_lr_ratio", "training.min_lr_ratio", same),
    ("warmup_steps", "training.warmup_steps", warmup_steps),
    ("warmup_steps", "training.warmup_ratio", warmup_share),
    ("warmup_ratio", "training.warmup_ratio", warmup_share),
    ("optim", "training.optimizer", optimizer),
    ("weight_decay", "training.weight_decay", same),
    ("adam_beta1", "training.adam_beta1", same),
    ("adam_beta2", "training.adam_beta2", same),
    ("adam_epsilon", "training.adam_epsilon", same),
    ("max_grad_norm", "training.max_gradient_norm", same),
    ("bf16", "training.mixed_precision", |v| when_true(v, "bf16")),
    ("fp16", "training.mixed_precision", |v| when_true(v, "fp16")),
    ("gradient_checkpointing", "training.gradient_checkpointing", checkpointing),
    ("activation_checkpointing", "training.gradient_checkpointing", checkpointing),
    ("seed", "training.seed", same),
    ("data_seed", "data.seed", same),
    ("output_dir", "output.dir", same),
    ("logging_steps", "output.logging_steps", same),
    ("save_steps", "output.save_steps", same),
    ("save_total_limit", "output.save_total_limit", same),
    ("eval_steps", "output.eval_steps", same),
    ("max_length", "data.sequence_length", same),
    ("max_seq_length", "data.sequence_length", same),
    ("packing", "data.packing", same),
    ("loraplus_lr_ratio", "training.lora.loraplus_lr_ratio", same),
];

const AXOLOTL: [Entry; 24] = [
    ("base_model", "model.path", same),
    ("adapter", "training.method", |v| among(v, &[("lora", "lora"), ("qlora", "qlora")])),
    ("lora_r", "training.lora.rank", same),
    ("lora_alpha", "training.lora.alpha", same),
    ("lora_dropout", "training.lora.dropout", same),
    ("lora_target_modules", "training.lora.target_modules", same),
    ("lora_target_linear", "training.lora.target_modules", |v| when_true(v, "all-linear")),
    ("lora_modules_to_save", "training.lora.modules_to_save", same),
    ("peft_use_dora", "training.lora.use_dora", |v| when_true(v, "true")),
    ("peft_use_rslora", "training.lora.use_rslora", |v| when_true(v, "true")),
    ("load_in_8bit", "training.quantization", |v| when_true(v, "int8")),
    ("load_in_4bit", "training.quantization", |v| when_true(v, "nf4")),
    ("bnb_config_kwargs.bnb_4bit_quant_type", "training.quantization", |v| {
        among(v, &[("nf4", "nf4"), ("fp4", "fp4")])
    }),
    ("activation_offloading", "memory.offload.activations", |v| {
        among(v, &[("true", "host"), ("disk", "disk")])
    }),
    ("flash_attention", "training.attention", |v| when_true(v, "flash")),
    ("eager_attention", "training.attention", |v| when_true(v, "standard")),
    ("sequence_len", "data.sequence_length", same),
    ("sample_packing", "data.packing", same),
    ("micro_batch_size", "training.batch_size", same),
    ("num_epochs", "training.epochs", same),
    ("optimizer", "training.optimizer", optimizer),
    ("lr_scheduler", "training.lr_schedule", schedule),
    ("cosine_min_lr_ratio", "training.min_lr_ratio", same),
    ("tensor_parallel_size", "parallel.tensor_parallel", same),
];

/// What says nothing when it is off.
const OFF: [&str; 4] = ["false", "none", "0", "-1"];

impl Imported {
    /// Reads a file of DeepSpeed, transformers or axolotl; which one is known by its keys.
    ///
    /// # Errors
    /// As [`RawConfig::from_file`](super::RawConfig::from_file), where the file is none.
    pub fn from_file(path: &Path) -> Result<Imported, ConfigError> {
        let (text, origin) = read_file(path)?;
        Imported::from_text(&text, &origin)
    }

    fn from_text(text: &str, origin: &str) -> Result<Imported, ConfigError> {
        let document = Document { text, kind: NodeKind::File(origin) };
        let node = document.parse()?;
        let mut leaves = Vec::new();
        flatten(String::new(), Input { node: &node, source: text }, &mut leaves);
        if leaves.is_empty() || !matches!(node.value, Yaml::Map(_)) {
            return Err(ConfigError::Empty { origin: origin.to_owned() });
        }
        let has = |key: &str| leaves.iter().any(|leaf| leaf.key.starts_with(key));
        let (own, nested) = match () {
            () if has("base_model") || has("micro_batch_size") => (&AXOLOTL[..], "deepspeed."),
            () if has("zero_optimization") || has("train_micro_batch_size_per_gpu") => (&DEEPSPEED[..], ""),
            () => (&TRAINER[..], "deepspeed."),
        };
        let mut imported = Imported::default();
        for leaf in &leaves {
            let entries = match leaf.key.strip_prefix(nested).filter(|_| !nested.is_empty()) {
                Some(inner) => meanings(&DEEPSPEED, inner),
                None if nested.is_empty() => meanings(own, &leaf.key),
                // Axolotl hands what it does not name itself to the trainer.
                None => Some(meanings(own, &leaf.key))
                    .filter(|found| !found.is_empty())
                    .unwrap_or_else(|| meanings(&TRAINER, &leaf.key)),
            };
            imported.take(leaf, &entries, &document);
        }
        if imported.overrides.is_empty() {
            let place = document.place(node.referenced);
            let reason = "no key of DeepSpeed's JSON, of TrainingArguments or of axolotl is in it".to_owned();
            return Err(ConfigError::Syntax { place, reason });
        }
        imported.settle();
        Ok(imported)
    }

    fn take(&mut self, leaf: &Leaf, entries: &[Entry], document: &Document<'_>) {
        if leaf.value == "auto" {
            return;
        }
        let place = document.place(leaf.node_location);
        let shown = shortened(&leaf.value);
        let meant: Vec<(&str, String)> =
            entries.iter().filter_map(|(_, ours, meaning)| Some((*ours, meaning(&leaf.value)?))).collect();
        let is_off = OFF.contains(&leaf.value.to_ascii_lowercase().as_str());
        if meant.is_empty() && (!is_off || entries.is_empty()) {
            self.left.push(format!("{place}: {} ({shown})", leaf.key));
        }
        for (ours, value) in meant {
            if !self.overrides.iter().any(|one| one.key == ours && one.value == value) {
                let argument = format!("{place}: {} {shown}", leaf.key);
                self.overrides.push(Override { key: ours.to_owned(), value, argument });
            }
        }
    }

    /// Keys that follow from others, and those that exclude each other.
    fn settle(&mut self) {
        let number = |all: &[Override], key: &str| -> Option<u64> {
            all.iter().rev().find(|one| one.key == key)?.value.parse().ok()
        };
        let drop = |all: &mut Vec<Override>, key: &str| all.retain(|one| one.key != key);
        if number(&self.overrides, "training.steps").is_some() {
            drop(&mut self.overrides, "training.epochs");
        }
        let product = number(&self.overrides, "training.batch_size")
            .zip(number(&self.overrides, "training.gradient_accumulation_steps"))
            .and_then(|(micro, accumulation)| micro.checked_mul(accumulation))
            .filter(|product| *product > 0);
        if let (Some(product), Some(whole)) =
            (product, number(&self.overrides, "training.effective_batch_size"))
            && whole.is_multiple_of(product)
        {
            // What is left of the batch are ranks.
            if let Some(one) =
                self.overrides.iter_mut().find(|one| one.key == "training.effective_batch_size")
            {
                one.key = "parallel.data_parallel".to_owned();
                one.value = (whole / product).to_string();
            }
        }
        // Of a full fine-tuning, what belongs to adapters and to the weights beside them has no effect.
        if !self.overrides.iter().any(|one| one.key == "training.method") {
            let of_adapters =
                |one: &Override| one.key.starts_with("training.lora.") || one.key == "training.quantization";
            let without = self.overrides.iter().filter(|one| of_adapters(one));
            self.left.extend(without.map(|one| format!("{} (without adapters)", one.argument)));
            self.overrides.retain(|one| !of_adapters(one));
        }
        let momenta = ["training.adam_beta1", "training.adam_beta2"];
        let optimizer = self.overrides.iter().find(|one| one.key == "training.optimizer");
        let (lion, sgd) = match optimizer.map(|one| one.value.as_str()) {
            Some("lion" | "lion_8bit") => (true, false),
            Some("sgd" | "adafactor" | "adalomo") => (false, true),
            _ => (false, false),
        };
        for (theirs, ours) in momenta.into_iter().zip(["beta1", "beta2"]) {
            if sgd {
                drop(&mut self.overrides, theirs);
            }
            for one in self.overrides.iter_mut().filter(|one| lion && one.key == theirs) {
                one.key = format!("training.optimizer_options.{ours}");
            }
        }
    }
}

fn meanings(entries: &[Entry], key: &str) -> Vec<Entry> {
    entries.iter().filter(|(theirs, ..)| *theirs == key).copied().collect()
}

/// A scalar, or a list of them, with the keys that lead to it.
struct Leaf {
    key: String,
    value: String,
    node_location: serde_saphyr::Location,
}

/// Everything that a document says. The document's depth is limited where it is read.
fn flatten(key: String, input: Input<'_>, leaves: &mut Vec<Leaf>) {
    let joined = |name: &str| if key.is_empty() { name.to_owned() } else { format!("{key}.{name}") };
    let node_location = input.node.referenced;
    match &input.node.value {
        Yaml::Null => {}
        Yaml::Map(entries) => {
            for (name, node) in entries {
                flatten(joined(&name.value), Input { node, ..input }, leaves);
            }
        }
        // A pair of betas is two numbers, anything else one value.
        Yaml::List(items) if key.ends_with("betas") => {
            for (place, node) in items.iter().enumerate() {
                flatten(joined(&place.to_string()), Input { node, ..input }, leaves);
            }
        }
        Yaml::List(items) => {
            let words: Vec<String> = items.iter().map(|node| quoted(node, input.source)).collect();
            leaves.push(Leaf { key, value: format!("[{}]", words.join(", ")), node_location });
        }
        Yaml::Text(text) => leaves.push(Leaf { key, value: text.clone(), node_location }),
        _ => {
            let value = input.written().unwrap_or_default().to_owned();
            leaves.push(Leaf { key, value, node_location });
        }
    }
}

/// An item of a list, as YAML reads it back.
fn quoted(node: &Node, source: &str) -> String {
    match &node.value {
        Yaml::Text(text) => serde_json::Value::from(text.as_str()).to_string(),
        _ => Input { node, source }.written().unwrap_or("...").to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::RawConfig;

    fn config(text: &str) -> (RawConfig, Imported) {
        let imported = Imported::from_text(text, "theirs").unwrap();
        let mut config = RawConfig::default();
        for Override { key, value, argument } in &imported.overrides {
            config.apply_override(key, value, argument).unwrap();
        }
        let mut whole = config.clone();
        whole.model.path.get_or_insert_with(|| "m".to_owned());
        whole.validate().unwrap();
        (config, imported)
    }

    #[track_caller]
    fn check(text: &str, settings: &[&str], left: &[&str]) {
        let (found, imported) = config(text);
        let wanted = RawConfig::from_overrides(settings.iter().copied()).unwrap();
        assert_eq!(found, wanted, "{imported:#?}");
        assert_eq!(imported.left, left);
    }

    #[test]
    fn deepspeed_is_understood_and_auto_stays_open() {
        let text = r#"{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4,
  "gradient_clipping": "auto", "bf16": {"enabled": true}, "fp16": {"enabled": false},
  "zero_optimization": {"stage": 3, "reduce_bucket_size": 5e8,
    "offload_optimizer": {"device": "nvme", "nvme_path": "/fast"}, "offload_param": {"device": "none"}},
  "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95]}},
  "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 10, "total_num_steps": 100}}}"#;
        let settings = [
            "training.batch_size=2",
            "training.gradient_accumulation_steps=4",
            "parallel.data_parallel=8",
            "training.mixed_precision=bf16",
            "parallel.zero_stage=3",
            "memory.offload={optimizer: disk, gradients: disk, parameters: device}",
            "memory.disk_path=/fast",
            "training.optimizer=adamw",
            "training.learning_rate=1e-4",
            "training.adam_beta1=0.9",
            "training.adam_beta2=0.95",
            "training.lr_schedule=cosine",
            "training.warmup_steps=10",
            "training.steps=100",
        ];
        check(text, &settings, &["theirs:3:59: zero_optimization.reduce_bucket_size (5e8)"]);
    }

    #[test]
    fn arguments_of_the_trainer_are_understood() {
        let text = r#"{"per_device_train_batch_size": 4, "max_steps": -1, "num_train_epochs": 3, "warmup_steps": 0.03,
  "optim": "lion_8bit", "adam_beta2": 0.95, "fp16": true, "gradient_checkpointing": true, "report_to": ["wandb"]}"#;
        let settings = [
            "training.batch_size=4",
            "training.epochs=3",
            "training.warmup_ratio=0.03",
            "training.optimizer=lion_8bit",
            "training.optimizer_options.beta2=0.95",
            "training.mixed_precision=fp16",
            "training.gradient_checkpointing=full",
        ];
        check(text, &settings, &["theirs:2:104: report_to ([\"wandb\"])"]);
    }

    #[test]
    fn axolotl_is_understood_with_deepspeed_inside() {
        let text = "base_model: org/m\nadapter: qlora\nload_in_4bit: true\nlora_r: 8\npeft_use_dora: false\nactivation_offloading: true\nlora_target_modules: [q_proj, v_proj]\n\
                    sequence_len: 1024\nmicro_batch_size: 2\noptimizer: adamw_bnb_8bit\nlearning_rate: 2e-4\n\
                    deepspeed: {zero_optimization: {stage: 2}}\nwandb_project: x\n";
        let settings = [
            "model.path=org/m",
            "training.method=qlora",
            "training.quantization=nf4",
            "training.lora.rank=8",
            "training.lora.target_modules=[q_proj, v_proj]",
            "data.sequence_length=1024",
            "training.batch_size=2",
            "training.optimizer=adamw_8bit",
            "training.learning_rate=2e-4",
            "parallel.zero_stage=2",
            "memory.offload.activations=host",
        ];
        check(text, &settings, &["theirs:13:16: wandb_project (x)"]);
    }

    #[test]
    fn adapters_without_adapters_are_listed() {
        check("base_model: m\nlora_r: 8\n", &["model.path=m"], &["theirs:2:9: lora_r 8 (without adapters)"]);
    }

    #[test]
    fn files_of_strangers_are_refused_with_their_place() {
        let error = |text: &str| Imported::from_text(text, "theirs").unwrap_err().to_string();
        for text in [
            "{\"zero_optimization\": {\"stage\": 3, ",
            &"[".repeat(100_000),
            &format!("{}1{}", "{\"a\": ".repeat(500), "}".repeat(500)),
            "{\"a\": 1, \"a\": 2}",
            "{\"some\": {\"thing\": \"else\"}}",
        ] {
            assert!(error(text).starts_with("theirs:"), "{}", error(text));
        }
        for text in ["", "[]", "3", "null"] {
            assert!(error(text).starts_with("theirs"), "{}", error(text));
        }
        let wrong = Imported::from_text(r#"{"zero_optimization": {"stage": 9}}"#, "theirs").unwrap();
        let Override { key, value, argument } = &wrong.overrides[0];
        let mut config = RawConfig::default();
        let refused = config.apply_override(key, value, argument).and_then(|()| config.validate());
        let refused = refused.unwrap_err().to_string();
        assert!(refused.contains("theirs:1:33: zero_optimization.stage 9"), "{refused}");
    }
}
