//! The YAML of the Ava MoE++ framework: sections `model`, `training`, `data`, `output`, `performance`. Each of its keys has a meaning here
//! or an answer.

use super::words::{Answer, Entry, among, checkpointing, optimizer, same, when_true};

/// Beginnings of keys that a file has which is its own and not ours.
pub const MARKS: [&str; 5] =
    ["training.deepspeed.", "training.memory.", "model.num_layers", "model.num_experts", "performance."];

/// Keys without a meaning here, by how they begin, and why that is so.
pub const ANSWERS: [Answer; 12] = [
    ("model.expert", "all experts are feed-forward parts, without a capacity"),
    ("model.router", "the router is Mixtral's; model.from_scratch.router_aux_loss_coef is its loss"),
    ("model.sparse_block_size", "it counts where attention_type is sparse"),
    ("model.num_local_blocks", "it counts where attention_type is sparse"),
    ("model.window_size", "it counts where attention_type is sliding_window"),
    (
        "training.clear_cache_frequency",
        "there is no cache to clear: a step's memory is one arena, taken once",
    ),
    (
        "training.memory.pool_size_gb",
        "the arena has just the size that the plan needs; memory.device_budget is what limits it",
    ),
    (
        "training.deepspeed.use_deepspeed",
        "sharding and offload are built in: the section's other keys say what is used of them",
    ),
    (
        "data.buffer_size",
        "a buffer of samples to shuffle in is not needed: data.shuffle draws from all of the data, by number",
    ),
    ("performance.torch_compile", "there is no PyTorch to compile: kernels are compiled with the program"),
    (
        "performance.float32_matmul_precision",
        "products in f32 are computed in f32; training.mixed_precision is what makes them narrower",
    ),
    ("performance.", "it is a setting of PyTorch, which does not run here"),
];

pub const ENTRIES: [Entry; 42] = [
    ("model.hidden_size", "model.from_scratch.hidden_size", same),
    ("model.num_layers", "model.from_scratch.num_hidden_layers", same),
    ("model.num_attention_heads", "model.from_scratch.num_attention_heads", same),
    ("model.vocab_size", "model.from_scratch.vocab_size", same),
    ("model.num_experts", "model.from_scratch.num_experts", |v| several(v).then(|| v.to_owned())),
    // One expert is a dense model.
    ("model.num_experts", "model.from_scratch.architecture", |v| several(v).then(|| "mixtral".to_owned())),
    ("model.num_experts_per_token", "model.from_scratch.num_experts_per_token", same),
    ("model.use_flash_attention", "training.attention", |v| {
        among(v, &[("true", "flash"), ("false", "standard")])
    }),
    ("model.attention_type", "training.attention", |v| {
        among(v, &[("flash", "flash"), ("standard", "standard"), ("full", "flash")])
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
    ("training.memory.profile", "memory.threshold_profile", same),
    ("training.eval_batch_size", "training.eval_batch_size", same),
    ("training.dynamic_batching.enabled", "training.dynamic_batching.enabled", same),
    ("training.dynamic_batching.min_batch_size", "training.dynamic_batching.min_batch_size", same),
    ("training.dynamic_batching.max_batch_size", "training.dynamic_batching.max_batch_size", same),
    (
        "training.dynamic_batching.target_memory_utilization",
        "training.dynamic_batching.target_memory_utilization",
        same,
    ),
    (
        "training.dynamic_batching.adjustment_frequency",
        "training.dynamic_batching.adjustment_frequency",
        same,
    ),
    ("training.dynamic_batching.smooth_transitions", "training.dynamic_batching.smooth_transitions", same),
    ("data.max_length", "data.sequence_length", same),
    ("data.prefetch_factor", "data.prefetch_factor", same),
    ("data.num_workers", "data.num_workers", same),
    ("data.persistent_workers", "data.persistent_workers", same),
    ("output.gradient_checkpointing", "training.gradient_checkpointing", checkpointing),
];

/// Whether so many experts are more than one.
fn several(experts: &str) -> bool {
    experts != "1" && experts != "0"
}
