//! The YAML of Ava's training: sections `model`, `training`, `data`, `output`, `performance`.

use super::words::{Entry, among, checkpointing, optimizer, same, when_true};

pub const ENTRIES: [Entry; 31] = [
    ("model.hidden_size", "model.from_scratch.hidden_size", same),
    ("model.num_layers", "model.from_scratch.num_hidden_layers", same),
    ("model.num_attention_heads", "model.from_scratch.num_attention_heads", same),
    ("model.vocab_size", "model.from_scratch.vocab_size", same),
    ("model.use_flash_attention", "training.attention", |v| {
        among(v, &[("true", "flash"), ("false", "standard")])
    }),
    ("model.deepspeed_activation_checkpointing", "training.gradient_checkpointing", |v| when_true(v, "full")),
    ("training.batch_size", "training.batch_size", same),
    ("training.gradient_accumulation_steps", "training.gradient_accumulation_steps", same),
    ("training.mixed_precision", "training.mixed_precision", same),
    ("training.bf16", "training.mixed_precision", |v| when_true(v, "bf16")),
    ("training.fp16", "training.mixed_precision", |v| when_true(v, "fp16")),
    ("training.gradient_checkpointing", "training.gradient_checkpointing", checkpointing),
    ("training.optimizer", "training.optimizer", optimizer),
    ("training.learning_rate", "training.learning_rate", same),
    ("training.max_steps", "training.steps", same),
    ("training.deepspeed.zero_stage", "parallel.zero_stage", same),
    ("training.deepspeed.cpu_offload", "memory.offload.optimizer", |v| when_true(v, "host")),
    ("training.deepspeed.nvme_offload", "memory.offload.optimizer", |v| when_true(v, "disk")),
    ("training.deepspeed.activation_checkpointing", "training.gradient_checkpointing", |v| {
        when_true(v, "full")
    }),
    ("training.memory.target_utilization", "memory.target_utilization", same),
    ("training.memory.warning_threshold", "memory.warning_threshold", same),
    ("training.memory.critical_threshold", "memory.critical_threshold", same),
    ("training.memory.emergency_threshold", "memory.emergency_threshold", same),
    ("training.memory.silent_mode", "memory.silent_mode", same),
    ("training.memory.enable_cpu_offload", "memory.offload.optimizer", |v| when_true(v, "host")),
    ("training.memory.pool_size_gb", "memory.device_budget", |v| Some(format!("{v}GiB"))),
    ("data.max_length", "data.sequence_length", same),
    ("data.prefetch_factor", "data.prefetch_factor", same),
    ("data.num_workers", "data.num_workers", same),
    ("data.buffer_size", "data.buffer_size", same),
    ("output.gradient_checkpointing", "training.gradient_checkpointing", checkpointing),
];
