//! PEFT's `adapter_config.json`.

use super::words::{Entry, among, same, when_true};

pub const ENTRIES: [Entry; 10] = [
    ("base_model_name_or_path", "model.path", same),
    // Other kinds of adapters are refused where the file is read.
    ("peft_type", "training.method", |v| among(v, &[("lora", "lora")])),
    ("r", "training.lora.rank", same),
    ("lora_alpha", "training.lora.alpha", same),
    ("lora_dropout", "training.lora.dropout", same),
    ("target_modules", "training.lora.target_modules", same),
    ("modules_to_save", "training.lora.modules_to_save", same),
    ("use_dora", "training.lora.use_dora", |v| when_true(v, "true")),
    ("use_rslora", "training.lora.use_rslora", |v| when_true(v, "true")),
    ("init_lora_weights", "training.lora.init_lora_weights", |v| {
        v.starts_with("pissa").then(|| v.to_owned())
    }),
];
