//! DeepSpeed's JSON.

use super::words::{Entry, among, optimizer, place, same, schedule, steps, warmup_steps, when_true};

pub const ENTRIES: [Entry; 26] = [
    ("train_micro_batch_size_per_gpu", "training.batch_size", same),
    ("gradient_accumulation_steps", "training.gradient_accumulation_steps", same),
    ("train_batch_size", "training.effective_batch_size", same),
    ("gradient_clipping", "training.max_gradient_norm", same),
    ("bf16.enabled", "training.mixed_precision", |v| when_true(v, "bf16")),
    ("fp16.enabled", "training.mixed_precision", |v| when_true(v, "fp16")),
    ("zero_optimization.stage", "parallel.zero_stage", same),
    ("zero_optimization.overlap_comm", "parallel.overlap_communication", |v| {
        among(v, &[("true", "true"), ("false", "false")])
    }),
    ("zero_optimization.offload_optimizer.device", "memory.offload.optimizer", place),
    // Gradients go where the optimizer is.
    ("zero_optimization.offload_optimizer.device", "memory.offload.gradients", place),
    ("zero_optimization.offload_optimizer.nvme_path", "memory.disk_path", same),
    ("zero_optimization.offload_param.device", "memory.offload.parameters", place),
    ("zero_optimization.offload_param.nvme_path", "memory.disk_path", same),
    // Its Adam decays weights as AdamW does, unless adam_w_mode is off.
    ("optimizer.type", "training.optimizer", |v| among(v, &[("adam", "adamw")]).or_else(|| optimizer(v))),
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
