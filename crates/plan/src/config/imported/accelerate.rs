//! What `accelerate config` writes.

use super::words::{Entry, among, place, same, when_true, word_of};

pub const ENTRIES: [Entry; 14] = [
    ("num_processes", "parallel.data_parallel", same),
    ("mixed_precision", "training.mixed_precision", |v| {
        among(v, &[("no", "f32"), ("bf16", "bf16"), ("fp16", "fp16"), ("fp8", "fp8")])
    }),
    ("gradient_accumulation_steps", "training.gradient_accumulation_steps", same),
    ("deepspeed_config.zero_stage", "parallel.zero_stage", same),
    ("deepspeed_config.offload_optimizer_device", "memory.offload.optimizer", place),
    ("deepspeed_config.offload_optimizer_device", "memory.offload.gradients", place),
    ("deepspeed_config.offload_optimizer_nvme_path", "memory.disk_path", same),
    ("deepspeed_config.offload_param_device", "memory.offload.parameters", place),
    ("deepspeed_config.offload_param_nvme_path", "memory.disk_path", same),
    ("deepspeed_config.gradient_accumulation_steps", "training.gradient_accumulation_steps", same),
    ("deepspeed_config.gradient_clipping", "training.max_gradient_norm", same),
    ("parallelism_config.parallelism_config_tp_size", "parallel.tensor_parallel", same),
    ("parallelism_config.parallelism_config_cp_size", "parallel.context_parallel", same),
    ("parallelism_config.parallelism_config_dp_shard_size", "parallel.shard_size", same),
];

/// FSDP's section, which the trainer and axolotl have too, there with or without `fsdp_` before each key, and their key `fsdp`: a
/// strategy and more, in words.
pub const FSDP: [Entry; 10] = [
    ("fsdp", "parallel.sharding_strategy", |v| {
        word_of(v, &["full_shard", "shard_grad_op", "no_shard", "hybrid_shard"])
    }),
    ("fsdp", "memory.offload.parameters", |v| word_of(v, &["offload"]).map(|_| "host".to_owned())),
    ("fsdp", "memory.offload.gradients", |v| word_of(v, &["offload"]).map(|_| "host".to_owned())),
    ("fsdp", "memory.offload.optimizer", |v| word_of(v, &["offload"]).map(|_| "host".to_owned())),
    ("fsdp_config.fsdp_sharding_strategy", "parallel.sharding_strategy", |v| {
        let strategies = [
            ("1", "full_shard"),
            ("2", "shard_grad_op"),
            ("3", "no_shard"),
            ("4", "hybrid_shard"),
            ("full_shard", "full_shard"),
            ("shard_grad_op", "shard_grad_op"),
            ("no_shard", "no_shard"),
            ("hybrid_shard", "hybrid_shard"),
        ];
        among(v, &strategies)
    }),
    ("fsdp_config.fsdp_reshard_after_forward", "parallel.zero_stage", |v| {
        among(v, &[("true", "3"), ("false", "2")])
    }),
    ("fsdp_config.fsdp_offload_params", "memory.offload.parameters", |v| when_true(v, "host")),
    ("fsdp_config.fsdp_offload_params", "memory.offload.gradients", |v| when_true(v, "host")),
    ("fsdp_config.fsdp_offload_params", "memory.offload.optimizer", |v| when_true(v, "host")),
    ("fsdp_config.fsdp_activation_checkpointing", "training.gradient_checkpointing", |v| {
        when_true(v, "full")
    }),
];
