//! What this version does not have: one table of settings that are refused, each with the reason and the nearest
//! legal setting.

/// Settings that are refused.
pub(super) struct Refusal {
    keys: &'static [&'static str],
    values: Values,
    pub reason: &'static str,
    pub instead: &'static str,
}

enum Values {
    /// These words.
    Words(&'static [&'static str]),
    /// Every value but this one.
    AllBut(&'static str),
}

use Values::{AllBut, Words};

static REFUSALS: &[Refusal] = &[
    Refusal {
        keys: &["model.from_scratch.architecture"],
        values: Words(&["gpt_neox", "mixtral"]),
        reason: "models of this family cannot be read either",
        instead: "llama",
    },
    Refusal {
        keys: &["data.format"],
        values: Words(&["sharegpt", "chatml", "messages", "openai", "conversational"]),
        reason: "the shape of a chat is found by its fields",
        instead: "chat",
    },
    Refusal {
        keys: &["data.format"],
        values: Words(&["alpaca", "prompt_completion", "completion"]),
        reason: "the shape of a sample is found by its fields",
        instead: "instruction",
    },
    Refusal {
        keys: &["data.format"],
        values: Words(&["json", "jsonl", "parquet", "csv"]),
        reason: "what a file is says its name, .jsonl, .json or .parquet; the format is what it holds",
        instead: "text, chat or instruction",
    },
    Refusal {
        keys: &["data.format"],
        values: Words(&["tokens"]),
        reason: "data are texts, which are tokenised here",
        instead: "text",
    },
    Refusal {
        keys: &["training.method"],
        values: Words(&["dora", "adapter", "adalora", "prefix", "ia3"]),
        reason: "adapters are LoRA's",
        instead: "lora or qlora",
    },
    Refusal {
        keys: &["training.mixed_precision"],
        values: Words(&["e4m3", "e5m2"]),
        reason: "both formats are used: E4M3 for weights and activations, E5M2 for gradients",
        instead: "fp8",
    },
    Refusal {
        keys: &["training.gradient_dtype"],
        values: Words(&["fp16", "f16", "float16", "fp8", "int8"]),
        reason: "gradients are kept in 32-bit floats or bfloat16",
        instead: "bf16 or f32",
    },
    Refusal {
        keys: &["training.optimizer"],
        values: Words(&["adam", "muon", "adagrad", "rmsprop", "lamb"]),
        reason: "it is not among the optimizers",
        instead: "adamw",
    },
    Refusal {
        keys: &["training.optimizer"],
        values: Words(&["paged_adamw_8bit", "paged_lion_8bit", "paged_adamw"]),
        reason: "states are not paged",
        instead: "adamw_8bit or lion_8bit",
    },
    Refusal {
        keys: &["training.optimizer"],
        values: Words(&["lomo"]),
        reason: "of the two, AdaLomo is the one that trains well",
        instead: "adalomo, or sgd, which keeps no states either",
    },
    Refusal {
        keys: &["training.optimizer"],
        values: Words(&["apollo_mini", "apollo_adamw", "galore_adamw"]),
        reason: "forms of an optimizer are options of it",
        instead: "apollo (with optimizer_options.scale_type: tensor) or galore",
    },
    Refusal {
        keys: &["training.optimizer"],
        values: Words(&["adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused"]),
        reason: "there is one AdamW and it is fused",
        instead: "adamw",
    },
    Refusal {
        keys: &["training.lr_schedule"],
        values: Words(&["constant_with_warmup"]),
        reason: "every schedule has a warm-up",
        instead: "constant with training.warmup_steps",
    },
    Refusal {
        keys: &["training.lr_schedule"],
        values: Words(&["cosine_with_min_lr"]),
        reason: "every schedule has a minimum",
        instead: "cosine with training.min_lr_ratio",
    },
    Refusal {
        keys: &["training.lr_schedule"],
        values: Words(&["cosine_with_restarts", "polynomial"]),
        reason: "the schedules are constant, linear, cosine, inverse_sqrt and wsd",
        instead: "cosine",
    },
    Refusal {
        keys: &["training.gradient_checkpointing"],
        values: Words(&["every", "ratio", "selective"]),
        reason: "it has an argument",
        instead: "{every: 4}, {ratio: 0.5} or {selective: [norms, swiglu]}",
    },
    Refusal {
        keys: &["training.gradient_checkpointing"],
        values: Words(&["true", "unsloth"]),
        reason: "the form of checkpointing is given by name",
        instead: "full",
    },
    Refusal {
        keys: &["training.gradient_checkpointing"],
        values: Words(&["false"]),
        reason: "the form of checkpointing is given by name",
        instead: "none",
    },
    Refusal {
        keys: &["training.activation_compression"],
        values: Words(&["int4", "fp8", "bf16", "8bit"]),
        reason: "activations are kept as they are or as 8-bit codes",
        instead: "int8",
    },
    Refusal {
        keys: &["training.attention"],
        values: Words(&["sliding_window", "block_sparse"]),
        reason: "it has an argument",
        instead: "{sliding_window: 256} or {block_sparse: {block: 64, local_blocks: 4, global_blocks: 1}}",
    },
    Refusal {
        keys: &["training.attention"],
        values: Words(&["eager", "math"]),
        reason: "scores that are written out are asked for by another name",
        instead: "standard",
    },
    Refusal {
        keys: &["training.attention"],
        values: Words(&["sdpa", "flash_attention_2", "flash_attention_3", "xformers"]),
        reason: "there is one tiled attention",
        instead: "flash",
    },
    Refusal {
        keys: &["parallel.sharding_strategy"],
        values: Words(&["hybrid_shard"]),
        reason: "weights are shared by all ranks or by none",
        instead: "full_shard",
    },
    Refusal {
        keys: &["parallel.sharding_strategy"],
        values: Words(&["zero1"]),
        reason: "FSDP has no name for it",
        instead: "none with parallel.zero_stage: 1",
    },
    Refusal {
        keys: &["parallel.pipeline_schedule"],
        values: Words(&["interleaved"]),
        reason: "a stage is one run of layers",
        instead: "1f1b or gpipe",
    },
    Refusal {
        keys: &["parallel.tensor_parallel"],
        values: AllBut("1"),
        reason: "ranks share batches, sequences, layers, states and weights",
        instead: "1",
    },
];

/// Why a value, written as `word`, is refused for a key; `None` if it is not in the table.
pub(super) fn refusal(key: &str, word: &str) -> Option<&'static Refusal> {
    REFUSALS.iter().filter(|refusal| refusal.keys.contains(&key)).find(|refusal| match refusal.values {
        Words(words) => words.iter().any(|refused| refused.eq_ignore_ascii_case(word)),
        AllBut(legal) => word != legal,
    })
}

/// Every key and word of the table that is a word.
#[cfg(test)]
pub(super) fn refused_words() -> impl Iterator<Item = (&'static str, &'static str)> {
    REFUSALS.iter().flat_map(|refusal| {
        let words = match refusal.values {
            Words(words) => words,
            AllBut(_) => &[],
        };
        refusal.keys.iter().flat_map(move |key| words.iter().map(move |word| (*key, *word)))
    })
}
