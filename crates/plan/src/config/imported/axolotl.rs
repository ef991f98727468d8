//! Axolotl's YAML, beside what it hands to the trainer.

use super::words::{Entry, among, optimizer, same, schedule, when_true};

pub const ENTRIES: [Entry; 28] = [
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
    ("float32", "training.mixed_precision", |v| when_true(v, "f32")),
    ("float16", "training.mixed_precision", |v| when_true(v, "fp16")),
    ("bfloat16", "training.mixed_precision", |v| when_true(v, "bf16")),
    ("bfloat16", "training.master_weights", |v| when_true(v, "none")),
    ("sequence_len", "data.sequence_length", same),
    ("sample_packing", "data.packing", same),
    ("micro_batch_size", "training.batch_size", same),
    ("num_epochs", "training.epochs", same),
    ("optimizer", "training.optimizer", optimizer),
    ("lr_scheduler", "training.lr_schedule", schedule),
    ("cosine_min_lr_ratio", "training.min_lr_ratio", same),
    ("tensor_parallel_size", "parallel.tensor_parallel", same),
];
