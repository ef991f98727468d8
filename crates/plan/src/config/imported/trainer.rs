//! transformers' `TrainingArguments` and TRL's, as JSON, YAML or on a command line.

use super::words::{
    Entry, among, checkpointing, optimizer, same, schedule, steps, warmup_share, warmup_steps, when_true,
};

pub const ENTRIES: [Entry; 34] = [
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
    // axolotl's `offload`: what is kept goes to the host.
    ("gradient_checkpointing", "memory.offload.activations", |v| among(v, &[("offload", "host")])),
    ("activation_checkpointing", "training.gradient_checkpointing", checkpointing),
    ("seed", "training.seed", same),
    ("data_seed", "data.seed", same),
    ("output_dir", "output.dir", same),
    ("logging_steps", "output.logging_steps", same),
    ("save_steps", "output.save_steps", same),
    ("save_total_limit", "output.save_total_limit", same),
    ("eval_steps", "output.eval_steps", same),
    ("report_to", "output.tensorboard", |v| {
        among(v, &[("tensorboard", "true"), ("all", "true"), ("none", "false")])
    }),
    ("max_length", "data.sequence_length", same),
    ("max_seq_length", "data.sequence_length", same),
    ("packing", "data.packing", same),
    ("loraplus_lr_ratio", "training.lora.loraplus_lr_ratio", same),
];
