//! What `plan --inference` plans: the flags that `generate` has for the same.

use clap::Args;

use super::inference::tokens;

#[derive(Debug, Args)]
pub struct PlanInferenceArgs {
    /// Plan running the model instead of training it
    #[arg(long, conflicts_with_all = ["import", "compare", "find", "tokens", "price", "timeline", "zero_table", "waterfall", "explain", "goal", "quality", "pareto", "breakdown", "activations", "batch_size",
        "sequence_length", "mixed_precision", "gradient_checkpointing"])]
    pub inference: bool,
    /// Tokens that a prompt and its answer may have together; by default 4096, or as many as the model was made for
    #[arg(long, value_name = "N", requires = "inference", value_parser = tokens)]
    pub context: Option<usize>,
    /// Sequences that are answered beside each other, each of so many tokens; by default 1
    #[arg(long, value_name = "N", requires = "inference", value_parser = clap::value_parser!(u64).range(1..=1024))]
    pub parallel: Option<u64>,
    /// Type of activations, f32 or bf16; matrices stay as they are stored unless this takes less room. By default bf16 with
    /// --hardware and f32 here
    #[arg(long, value_name = "TYPE", requires = "inference")]
    pub dtype: Option<String>,
    /// Quantise the linears: nf4, fp4, int8, q8_0, q5_0, q5_1, q4_0, q4_1, q4_k or q6_k; or groups of them:
    /// experts=q4_k,attention=q8_0
    #[arg(long, value_name = "TYPE", requires = "inference")]
    pub quantize: Option<String>,
    /// Round the inputs of linears to 8-bit integers where they meet weights of integer types, as generate does. What is kept is the
    /// same; the speeds that are named are those without it
    #[arg(long, requires = "inference")]
    pub quantize_activations: bool,
    /// Type of the key-value cache: f32, bf16, f16, int8 or int4. By default as the activations are, f16 for f32 and more than 32 MiB,
    /// and int8 where only that fits
    #[arg(long, value_name = "TYPE", requires = "inference")]
    pub kv_cache: Option<String>,
}
