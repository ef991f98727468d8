//! Every memory technique that `bench memory` compares, as data: a new technique is one entry here.

use serde::Serialize;

/// A technique: what is set to switch it on, over [`baseline`].
#[derive(Debug)]
pub struct Technique {
    /// Its name in tables, pictures, JSON and `--only`.
    pub name: &'static str,
    /// What it works on.
    pub group: Group,
    /// What it does, in a sentence.
    pub what: &'static str,
    /// `KEY=VALUE`, as `--set` takes them.
    pub set: &'static [&'static str],
    /// Whether it is a rung of the ladder, on top of all rungs before it, besides being tried alone.
    pub rung: bool,
}

/// What a technique works on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Group {
    Baseline,
    Logits,
    Checkpointing,
    Activations,
    Attention,
    Batch,
    Update,
    Precision,
    Optimizer,
}

/// What every technique is compared with: all kept, nothing narrow, the whole batch at once. It decides each key that a
/// technique sets, so that nothing is left to the planner.
pub fn baseline(batch_size: u64, sequence_length: u64) -> Vec<String> {
    /// The most that the key takes.
    const ALL_TOKENS: u64 = 16_777_216;
    let tokens = batch_size.saturating_mul(sequence_length).min(ALL_TOKENS);
    let mut set = vec![
        format!("data.sequence_length={sequence_length}"),
        format!("training.batch_size={batch_size}"),
        format!("training.effective_batch_size={batch_size}"),
        format!("training.loss_chunk_tokens={tokens}"),
    ];
    set.extend(
        [
            "training.gradient_accumulation_steps=auto",
            "training.gradient_checkpointing=none",
            "training.activation_compression=none",
            "training.attention=flash",
            "training.mlp_chunk_tokens=",
            "training.mixed_precision=f32",
            "training.master_weights=auto",
            "training.gradient_dtype=auto",
            "training.optimizer=adamw",
            "training.learning_rate=5e-5",
            "training.max_gradient_norm=1.0",
            "training.optimizer_in_backward=false",
            "training.in_backward_clipping=",
        ]
        .map(str::to_owned),
    );
    set
}

/// What the baseline is, in a sentence.
pub const BASELINE: &str =
    "AdamW in f32; every activation kept, all logits at once, the update after the backward pass.";

/// The techniques; those of the ladder in its order.
pub static TECHNIQUES: &[Technique] = &[
    Technique {
        name: "loss_chunks",
        group: Group::Logits,
        what: "Logits of 128 tokens exist at once, and their gradients are made there and then.",
        set: &["training.loss_chunk_tokens=128"],
        rung: true,
    },
    Technique {
        name: "checkpoint_norms_swiglu",
        group: Group::Checkpointing,
        what: "Norms and the product in the feed-forward part are computed again: much memory for little work.",
        set: &["training.gradient_checkpointing={selective: [norms, swiglu]}"],
        rung: true,
    },
    Technique {
        name: "checkpoint_ffn",
        group: Group::Checkpointing,
        what: "The feed-forward part is computed again, with the norms.",
        set: &["training.gradient_checkpointing={selective: [norms, swiglu, ffn]}"],
        rung: false,
    },
    Technique {
        name: "checkpoint_ffn_qkv",
        group: Group::Checkpointing,
        what: "Queries, keys and values are computed again too; attention's output is kept.",
        set: &["training.gradient_checkpointing={selective: [norms, swiglu, ffn, qkv]}"],
        rung: false,
    },
    Technique {
        name: "checkpoint_half",
        group: Group::Checkpointing,
        what: "Half of the blocks keep their input alone, the others keep everything.",
        set: &["training.gradient_checkpointing={ratio: 0.5}"],
        rung: false,
    },
    Technique {
        name: "checkpoint_full",
        group: Group::Checkpointing,
        what: "Each block keeps its input and computes the rest again.",
        set: &["training.gradient_checkpointing=full"],
        rung: true,
    },
    Technique {
        name: "checkpoint_every_2",
        group: Group::Checkpointing,
        what: "One input is kept for two blocks.",
        set: &["training.gradient_checkpointing={every: 2}"],
        rung: false,
    },
    Technique {
        name: "checkpoint_every_4",
        group: Group::Checkpointing,
        what: "One input is kept for four blocks.",
        set: &["training.gradient_checkpointing={every: 4}"],
        rung: false,
    },
    Technique {
        name: "checkpoint_sqrt",
        group: Group::Checkpointing,
        what: "One input is kept for about as many blocks as the root of their number.",
        set: &["training.gradient_checkpointing=sqrt"],
        rung: false,
    },
    Technique {
        name: "mlp_chunks",
        group: Group::Activations,
        what: "The feed-forward parts take 128 tokens at a time and compute them again in the backward pass.",
        set: &["training.mlp_chunk_tokens=128"],
        rung: true,
    },
    Technique {
        name: "attention_standard",
        group: Group::Attention,
        what: "Scores are written out, in f32, and kept: what tiles of attention save.",
        set: &["training.attention=standard"],
        rung: false,
    },
    Technique {
        name: "attention_window",
        group: Group::Attention,
        what: "A token sees 128 tokens; less work, as much memory as with tiles over all.",
        set: &["training.attention={sliding_window: 128}"],
        rung: false,
    },
    Technique {
        name: "attention_block_sparse",
        group: Group::Attention,
        what: "A token sees the 32 blocks of 4 tokens before it and the first block.",
        set: &["training.attention={block_sparse: {block: 4, local_blocks: 32, global_blocks: 1}}"],
        rung: false,
    },
    Technique {
        name: "micro_batches",
        group: Group::Batch,
        what: "One sequence at a time, gradients accumulated over the batch.",
        set: &["training.batch_size=1"],
        rung: false,
    },
    Technique {
        name: "in_backward",
        group: Group::Update,
        what: "A block is updated as soon as its gradients are known, which are then given back; clipped by the norm of the step before.",
        set: &["training.optimizer_in_backward=true", "training.in_backward_clipping=previous_norm"],
        rung: true,
    },
    Technique {
        name: "in_backward_exact",
        group: Group::Update,
        what: "The same, clipped by this step's norm, which a backward pass of its own finds.",
        set: &["training.optimizer_in_backward=true", "training.in_backward_clipping=second_backward"],
        rung: false,
    },
    Technique {
        name: "in_backward_unclipped",
        group: Group::Update,
        what: "The same without clipping.",
        set: &["training.optimizer_in_backward=true", "training.max_gradient_norm=0"],
        rung: false,
    },
    Technique {
        name: "int8_activations",
        group: Group::Activations,
        what: "What is kept for the backward pass is kept in 8 bits, with a scale for each 256 elements.",
        set: &["training.activation_compression=int8"],
        rung: true,
    },
    Technique {
        name: "int8_activations_tensor",
        group: Group::Activations,
        what: "The same with one scale for a whole tensor, for comparison.",
        set: &["training.activation_compression={int8: tensor}"],
        rung: false,
    },
    Technique {
        name: "bf16",
        group: Group::Precision,
        what: "bf16 weights and activations, with f32 master weights and f32 gradients.",
        set: &["training.mixed_precision=bf16", "training.master_weights=f32"],
        rung: false,
    },
    Technique {
        name: "bf16_gradients",
        group: Group::Precision,
        what: "The same with bf16 gradients.",
        set: &[
            "training.mixed_precision=bf16",
            "training.master_weights=f32",
            "training.gradient_dtype=bf16",
        ],
        rung: false,
    },
    Technique {
        name: "fp16",
        group: Group::Precision,
        what: "fp16 weights and activations, with f32 master weights and a scaled loss.",
        set: &["training.mixed_precision=fp16"],
        rung: false,
    },
    Technique {
        name: "fp8",
        group: Group::Precision,
        what: "Linear layers in 8-bit floats, made of f32 weights and bf16 activations just in time; f32 gradients.",
        set: &["training.mixed_precision=fp8", "training.master_weights=f32"],
        rung: false,
    },
    Technique {
        name: "fp8_pure",
        group: Group::Precision,
        what: "The same over bf16 weights and gradients without master weights.",
        set: &[
            "training.mixed_precision=fp8",
            "training.master_weights=none",
            "training.gradient_dtype=bf16",
        ],
        rung: false,
    },
    Technique {
        name: "bf16_pure",
        group: Group::Precision,
        what: "bf16 weights, activations and gradients without master weights; updates are rounded stochastically.",
        set: &[
            "training.mixed_precision=bf16",
            "training.master_weights=none",
            "training.gradient_dtype=bf16",
        ],
        rung: true,
    },
    Technique {
        name: "adamw_8bit",
        group: Group::Optimizer,
        what: "Both moments in 8 bits, with a scale for each 256 elements; embeddings' in f32.",
        set: &["training.optimizer=adamw_8bit"],
        rung: true,
    },
    Technique {
        name: "adamw_8bit_embeddings",
        group: Group::Optimizer,
        what: "The same with the embeddings' moments in 8 bits too.",
        set: &["training.optimizer=adamw_8bit", "training.optimizer_options.embedding_bits=8"],
        rung: true,
    },
    Technique {
        name: "adamw_bf16",
        group: Group::Optimizer,
        what: "Both moments in bf16, rounded stochastically.",
        set: &["training.optimizer=adamw_bf16"],
        rung: false,
    },
    Technique {
        name: "adam_mini",
        group: Group::Optimizer,
        what: "One second moment for a block of parameters instead of one for each.",
        set: &["training.optimizer=adam_mini"],
        rung: false,
    },
    Technique {
        name: "lion",
        group: Group::Optimizer,
        what: "One moment, and updates by its sign alone, at a tenth of the learning rate.",
        set: &["training.optimizer=lion", "training.learning_rate=5e-6"],
        rung: false,
    },
    Technique {
        name: "lion_8bit",
        group: Group::Optimizer,
        what: "The same with the moment in 8 bits.",
        set: &["training.optimizer=lion_8bit", "training.learning_rate=5e-6"],
        rung: false,
    },
    Technique {
        name: "adafactor",
        group: Group::Optimizer,
        what: "A second moment by rows and columns, and no first one.",
        set: &["training.optimizer=adafactor", "training.optimizer_options.scale_parameter=false"],
        rung: false,
    },
    Technique {
        name: "adalomo",
        group: Group::Optimizer,
        what: "A factored second moment and the update in the backward pass.",
        set: &[
            "training.optimizer=adalomo",
            "training.optimizer_in_backward=true",
            "training.max_gradient_norm=0",
        ],
        rung: false,
    },
    Technique {
        name: "galore",
        group: Group::Optimizer,
        what: "Both moments in a subspace of 128 dimensions of each matrix's gradient.",
        set: &["training.optimizer=galore"],
        rung: false,
    },
    Technique {
        name: "apollo",
        group: Group::Optimizer,
        what: "Moments of a random projection, which only scale the gradient.",
        set: &["training.optimizer=apollo"],
        rung: false,
    },
    Technique {
        name: "sgd",
        group: Group::Optimizer,
        what: "No moments at all, at a learning rate of its own.",
        set: &["training.optimizer=sgd", "training.learning_rate=0.1"],
        rung: false,
    },
];

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use plimsoll_plan::config::RawConfig;

    use super::*;

    fn key(assignment: &str) -> &str {
        assignment.split_once('=').unwrap().0
    }

    #[test]
    fn names_are_unique_and_every_technique_is_a_configuration() {
        let names: BTreeSet<_> = TECHNIQUES.iter().map(|t| t.name).collect();
        assert_eq!(names.len(), TECHNIQUES.len());
        assert!(!names.contains("baseline"));
        for technique in TECHNIQUES {
            let mut config = RawConfig::default();
            config.apply_set("model.path=smollm2-135m").unwrap();
            let set = baseline(4, 512);
            set.iter().map(String::as_str).chain(technique.set.iter().copied()).for_each(|assignment| {
                config.apply_set(assignment).unwrap();
            });
            config.validate().unwrap_or_else(|e| panic!("{}: {e}", technique.name));
        }
    }

    #[test]
    fn the_baseline_decides_all_that_techniques_set() {
        let decided = baseline(4, 512);
        let decided: BTreeSet<&str> = decided.iter().map(|assignment| key(assignment)).collect();
        for technique in TECHNIQUES {
            // Options belong to the technique's own optimizer, which knows no others.
            let own = |assignment: &&&str| !assignment.starts_with("training.optimizer_options.");
            for assignment in technique.set.iter().filter(own) {
                assert!(decided.contains(key(assignment)), "{}: {assignment}", technique.name);
            }
        }
    }
}
