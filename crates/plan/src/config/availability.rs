//! What this version does not have: one table of settings that are refused, each with the reason and the nearest
//! legal setting.

/// Settings that are refused.
pub(super) struct Refusal {
    keys: &'static [&'static str],
    values: &'static [&'static str],
    pub reason: &'static str,
    pub instead: &'static str,
}

static REFUSALS: &[Refusal] = &[
    Refusal {
        keys: &["model.from_scratch.architecture"],
        values: &["gpt_neox"],
        reason: "models of this family cannot be read either",
        instead: "llama",
    },
    Refusal {
        keys: &["model.from_scratch.architecture"],
        values: &["gpt_oss"],
        reason: "models of this family are fine-tuned, converted and run, and none begins from nothing",
        instead: "qwen3_moe",
    },
    Refusal {
        keys: &["data.format"],
        values: &["sharegpt", "chatml", "messages", "openai", "conversational"],
        reason: "the shape of a chat is found by its fields",
        instead: "chat",
    },
    Refusal {
        keys: &["data.format"],
        values: &["alpaca", "prompt_completion", "completion"],
        reason: "the shape of a sample is found by its fields",
        instead: "instruction",
    },
    Refusal {
        keys: &["data.format"],
        values: &["json", "jsonl", "parquet", "csv"],
        reason: "what a file is says its name, .jsonl, .json or .parquet; the format is what it holds",
        instead: "text, chat or instruction",
    },
    Refusal {
        keys: &["data.format"],
        values: &["tokens"],
        reason: "data are texts, which are tokenised here",
        instead: "text",
    },
    Refusal {
        keys: &["training.method"],
        values: &["dora", "adapter", "adalora", "prefix", "ia3"],
        reason: "adapters are LoRA's",
        instead: "lora or qlora",
    },
    Refusal {
        keys: &["training.mixed_precision"],
        values: &["e4m3", "e5m2"],
        reason: "both formats are used: E4M3 for weights and activations, E5M2 for gradients",
        instead: "fp8",
    },
    Refusal {
        keys: &["training.gradient_dtype"],
        values: &["fp16", "f16", "float16", "fp8", "int8"],
        reason: "gradients are kept in 32-bit floats or bfloat16",
        instead: "bf16 or f32",
    },
    Refusal {
        keys: &["training.optimizer"],
        values: &["adam", "muon", "adagrad", "rmsprop", "lamb"],
        reason: "it is not among the optimizers",
        instead: "adamw",
    },
    Refusal {
        keys: &["training.optimizer"],
        values: &["paged_adamw_8bit", "paged_lion_8bit", "paged_adamw"],
        reason: "states are not paged",
        instead: "adamw_8bit or lion_8bit",
    },
    Refusal {
        keys: &["training.optimizer"],
        values: &["lomo"],
        reason: "of the two, AdaLomo is the one that trains well",
        instead: "adalomo, or sgd, which keeps no states either",
    },
    Refusal {
        keys: &["training.optimizer"],
        values: &["apollo_mini", "apollo_adamw", "galore_adamw"],
        reason: "forms of an optimizer are options of it",
        instead: "apollo (with optimizer_options.scale_type: tensor) or galore",
    },
    Refusal {
        keys: &["training.optimizer"],
        values: &["adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused"],
        reason: "there is one AdamW and it is fused",
        instead: "adamw",
    },
    Refusal {
        keys: &["training.lr_schedule"],
        values: &["constant_with_warmup"],
        reason: "every schedule has a warm-up",
        instead: "constant with training.warmup_steps",
    },
    Refusal {
        keys: &["training.lr_schedule"],
        values: &["cosine_with_min_lr"],
        reason: "every schedule has a minimum",
        instead: "cosine with training.min_lr_ratio",
    },
    Refusal {
        keys: &["training.lr_schedule"],
        values: &["cosine_with_restarts", "polynomial"],
        reason: "the schedules are constant, linear, cosine, inverse_sqrt and wsd",
        instead: "cosine",
    },
    Refusal {
        keys: &["training.gradient_checkpointing"],
        values: &["every", "ratio", "selective"],
        reason: "it has an argument",
        instead: "{every: 4}, {ratio: 0.5} or {selective: [norms, swiglu]}",
    },
    Refusal {
        keys: &["training.gradient_checkpointing"],
        values: &["true", "unsloth"],
        reason: "the form of checkpointing is given by name",
        instead: "full",
    },
    Refusal {
        keys: &["training.gradient_checkpointing"],
        values: &["false"],
        reason: "the form of checkpointing is given by name",
        instead: "none",
    },
    Refusal {
        keys: &["training.activation_compression"],
        values: &["int4", "fp8", "bf16", "8bit"],
        reason: "activations are kept as they are or as 8-bit codes",
        instead: "int8",
    },
    Refusal {
        keys: &["training.attention"],
        values: &["sliding_window", "block_sparse"],
        reason: "it has an argument",
        instead: "{sliding_window: 256} or {block_sparse: {block: 64, local_blocks: 4, global_blocks: 1}}",
    },
    Refusal {
        keys: &["training.attention"],
        values: &["eager", "math"],
        reason: "scores that are written out are asked for by another name",
        instead: "standard",
    },
    Refusal {
        keys: &["training.attention"],
        values: &["sdpa", "flash_attention_2", "flash_attention_3", "xformers"],
        reason: "there is one tiled attention",
        instead: "flash",
    },
    Refusal {
        keys: &["parallel.sharding_strategy"],
        values: &["zero1"],
        reason: "FSDP has no name for it",
        instead: "none with parallel.zero_stage: 1",
    },
];

/// Why a value, written as `word`, is refused for a key; `None` if it is not in the table.
pub(super) fn refusal(key: &str, word: &str) -> Option<&'static Refusal> {
    let refused =
        |refusal: &&Refusal| refusal.values.iter().any(|refused| refused.eq_ignore_ascii_case(word));
    REFUSALS.iter().filter(|refusal| refusal.keys.contains(&key)).find(refused)
}

/// Every key and word of the table.
#[cfg(test)]
pub(super) fn refused_words() -> impl Iterator<Item = (&'static str, &'static str)> {
    REFUSALS.iter().flat_map(|refusal| {
        refusal.keys.iter().flat_map(|key| refusal.values.iter().map(move |word| (*key, *word)))
    })
}
