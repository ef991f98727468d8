//! LLaMA-Factory's YAML and arguments, beside those of the trainer.

use super::words::{Entry, among, same, when_true};

pub const ENTRIES: [Entry; 24] = [
    ("model_name_or_path", "model.path", same),
    ("finetuning_type", "training.method", |v| among(v, &[("full", "full"), ("lora", "lora")])),
    ("lora_rank", "training.lora.rank", same),
    ("lora_alpha", "training.lora.alpha", same),
    ("lora_dropout", "training.lora.dropout", same),
    ("lora_target", "training.lora.target_modules", |v| match v {
        "all" => Some("all-linear".to_owned()),
        names => list(names),
    }),
    ("additional_target", "training.lora.modules_to_save", list),
    ("use_rslora", "training.lora.use_rslora", |v| when_true(v, "true")),
    ("use_dora", "training.lora.use_dora", |v| when_true(v, "true")),
    ("pissa_init", "training.lora.init_lora_weights", |v| when_true(v, "pissa")),
    ("quantization_bit", "training.quantization", |v| among(v, &[("4", "nf4"), ("8", "int8")])),
    ("quantization_type", "training.quantization", |v| among(v, &[("nf4", "nf4"), ("fp4", "fp4")])),
    ("cutoff_len", "data.sequence_length", same),
    ("packing", "data.packing", same),
    ("train_on_prompt", "data.train_on", |v| when_true(v, "all")),
    ("flash_attn", "training.attention", |v| {
        among(v, &[("fa2", "flash"), ("fa3", "flash"), ("sdpa", "flash"), ("disabled", "standard")])
    }),
    ("disable_gradient_checkpointing", "training.gradient_checkpointing", |v| {
        among(v, &[("true", "none"), ("false", "full")])
    }),
    ("pure_bf16", "training.mixed_precision", |v| when_true(v, "bf16")),
    ("pure_bf16", "training.master_weights", |v| when_true(v, "none")),
    ("use_galore", "training.optimizer", |v| when_true(v, "galore")),
    ("use_apollo", "training.optimizer", |v| when_true(v, "apollo")),
    ("use_adam_mini", "training.optimizer", |v| when_true(v, "adam_mini")),
    ("galore_rank", "training.optimizer_options.rank", same),
    ("apollo_rank", "training.optimizer_options.rank", same),
];

/// Names with commas between them, or a list as it is.
fn list(names: &str) -> Option<String> {
    if names.starts_with('[') {
        return Some(names.to_owned());
    }
    let names: Vec<String> =
        names.split(',').map(|name| serde_json::Value::from(name.trim()).to_string()).collect();
    Some(format!("[{}]", names.join(", ")))
}
