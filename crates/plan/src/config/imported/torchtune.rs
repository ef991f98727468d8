//! Configurations of torchtune's recipes.

use super::leaves::NULL;
use super::words::{Entry, among, same, steps, when_true};

pub const ENTRIES: [Entry; 30] = [
    ("checkpointer.checkpoint_dir", "model.path", same),
    ("model._component_", "training.method", |v| {
        let builder = v.rsplit('.').next().unwrap_or(v);
        let method = if builder.starts_with("qlora_") {
            "qlora"
        } else if builder.starts_with("lora_") {
            "lora"
        } else {
            "full"
        };
        Some(method.to_owned())
    }),
    ("model.quantize_base", "training.quantization", |v| when_true(v, "nf4")),
    ("model.lora_rank", "training.lora.rank", same),
    ("model.lora_alpha", "training.lora.alpha", same),
    ("model.lora_dropout", "training.lora.dropout", same),
    ("model.use_dora", "training.lora.use_dora", |v| when_true(v, "true")),
    ("model.lora_attn_modules", "training.lora.target_modules", |v| Some(v.replace("output_proj", "o_proj"))),
    ("tokenizer.max_seq_len", "data.sequence_length", same),
    ("dataset.packed", "data.packing", same),
    ("seed", "training.seed", same),
    ("batch_size", "training.batch_size", same),
    ("gradient_accumulation_steps", "training.gradient_accumulation_steps", same),
    ("epochs", "training.epochs", same),
    ("max_steps_per_epoch", "training.steps", steps),
    ("optimizer._component_", "training.optimizer", |v| {
        let class = v.rsplit('.').next().unwrap_or(v);
        let known = [
            ("adamw", "adamw"),
            ("adamw8bit", "adamw_8bit"),
            ("pagedadamw", "adamw"),
            ("pagedadamw8bit", "adamw_8bit"),
            ("adafactor", "adafactor"),
            ("lion", "lion"),
            ("lion8bit", "lion_8bit"),
            ("sgd", "sgd"),
        ];
        among(class, &known)
    }),
    ("optimizer.lr", "training.learning_rate", same),
    ("optimizer.betas.0", "training.adam_beta1", same),
    ("optimizer.betas.1", "training.adam_beta2", same),
    ("optimizer.eps", "training.adam_epsilon", same),
    ("optimizer.weight_decay", "training.weight_decay", same),
    ("lr_scheduler._component_", "training.lr_schedule", |v| {
        among(v.rsplit('.').next().unwrap_or(v), &[("get_cosine_schedule_with_warmup", "cosine")])
    }),
    ("lr_scheduler.num_warmup_steps", "training.warmup_steps", same),
    ("clip_grad_norm", "training.max_gradient_norm", |v| among(v, &[(NULL, "0")]).or_else(|| same(v))),
    ("dtype", "training.mixed_precision", |v| among(v, &[("bf16", "bf16"), ("fp32", "f32")])),
    // Weights of two bytes, and nothing of four behind them.
    ("dtype", "training.master_weights", |v| among(v, &[("bf16", "none")])),
    ("enable_activation_checkpointing", "training.gradient_checkpointing", super::words::checkpointing),
    ("enable_activation_offloading", "memory.offload.activations", |v| when_true(v, "host")),
    ("optimizer_in_bwd", "training.optimizer_in_backward", |v| when_true(v, "true")),
    ("tensor_parallel_dim", "parallel.tensor_parallel", same),
];

/// What the recipes' own FSDP takes to the host: all three together.
pub const OFFLOADED: [Entry; 4] = [
    ("fsdp_cpu_offload", "memory.offload.parameters", |v| when_true(v, "host")),
    ("fsdp_cpu_offload", "memory.offload.gradients", |v| when_true(v, "host")),
    ("fsdp_cpu_offload", "memory.offload.optimizer", |v| when_true(v, "host")),
    ("fsdp_reshard_after_forward", "parallel.zero_stage", |v| among(v, &[("true", "3"), ("false", "2")])),
];
