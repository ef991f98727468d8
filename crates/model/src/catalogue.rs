//! The dimensions of well-known models, from their published `config.json`, so that plans can be made with no file at
//! hand. Each becomes the configuration that it has and is read as that. Weights are not here.

use std::path::Path;

use serde_json::{Map, Value, json};

use crate::hf_config::{missing_of, parse_config};
use crate::spec::ModelSpec;

/// Models of one family.
struct Group {
    /// Hugging Face's `model_type`.
    model_type: &'static str,
    /// What else their `config.json` says, a JSON object.
    extra: &'static str,
    entries: &'static [Entry],
}

/// One model: sizes as `config.json` has them.
struct Entry {
    name: &'static str,
    vocab: u64,
    hidden: u64,
    inner: u64,
    layers: u64,
    heads: u64,
    kv_heads: u64,
    context: u64,
    theta: f64,
    traits: u8,
}

/// Head tied to the embedding.
const TIED: u8 = 1;
/// Heads of 128, whatever hidden / heads is.
const HEAD_128: u8 = 2;
/// Heads of 256.
const HEAD_256: u8 = 4;

const LLAMA_3_1: &str = r#"{"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}}"#;
const LLAMA_3_2: &str = r#"{"rope_scaling": {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}}"#;
const GEMMA_3_LARGE: &str = r#"{"rms_norm_eps": 1e-6, "sliding_window": 1024,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0}}"#;

const GPT_OSS_20B: &str =
    r#"{"head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128}"#;
const GPT_OSS_120B: &str =
    r#"{"head_dim": 64, "num_local_experts": 128, "num_experts_per_tok": 4, "sliding_window": 128}"#;

#[allow(clippy::too_many_arguments)]
const fn entry(
    name: &'static str,
    [vocab, hidden, inner, layers]: [u64; 4],
    [heads, kv_heads]: [u64; 2],
    context: u64,
    theta: f64,
    traits: u8,
) -> Entry {
    Entry { name, vocab, hidden, inner, layers, heads, kv_heads, context, theta, traits }
}

#[rustfmt::skip]
const GROUPS: &[Group] = &[
    Group {
        model_type: "llama",
        extra: "{}",
        entries: &[
            entry("huggingfacetb/smollm-135m",             [ 49152,   576,  1536,  30], [  9,  3],   2048, 1e4, TIED),
            entry("huggingfacetb/smollm-360m",             [ 49152,   960,  2560,  32], [ 15,  5],   2048, 1e4, TIED),
            entry("huggingfacetb/smollm-1.7b",             [ 49152,  2048,  8192,  24], [ 32, 32],   2048, 1e4, TIED),
            entry("huggingfacetb/smollm2-135m",            [ 49152,   576,  1536,  30], [  9,  3],   8192, 1e5, TIED),
            entry("huggingfacetb/smollm2-360m",            [ 49152,   960,  2560,  32], [ 15,  5],   8192, 1e5, TIED),
            entry("huggingfacetb/smollm2-1.7b",            [ 49152,  2048,  8192,  24], [ 32, 32],   8192, 1.3e5, TIED),
            entry("tinyllama/tinyllama-1.1b",              [ 32000,  2048,  5632,  22], [ 32,  4],   2048, 1e4, 0),
            entry("huggyllama/llama-7b",                  [ 32000,  4096, 11008,  32], [ 32, 32],   2048, 1e4, 0),
            entry("huggyllama/llama-13b",                 [ 32000,  5120, 13824,  40], [ 40, 40],   2048, 1e4, 0),
            entry("huggyllama/llama-65b",                 [ 32000,  8192, 22016,  80], [ 64, 64],   2048, 1e4, 0),
            entry("meta-llama/llama-1-7b",                 [ 32000,  4096, 11008,  32], [ 32, 32],   2048, 1e4, 0),
            entry("meta-llama/llama-1-13b",                [ 32000,  5120, 13824,  40], [ 40, 40],   2048, 1e4, 0),
            entry("meta-llama/llama-1-30b",                [ 32000,  6656, 17920,  60], [ 52, 52],   2048, 1e4, 0),
            entry("meta-llama/llama-1-65b",                [ 32000,  8192, 22016,  80], [ 64, 64],   2048, 1e4, 0),
            entry("meta-llama/llama-2-7b",                 [ 32000,  4096, 11008,  32], [ 32, 32],   4096, 1e4, 0),
            entry("meta-llama/llama-2-13b",                [ 32000,  5120, 13824,  40], [ 40, 40],   4096, 1e4, 0),
            entry("meta-llama/llama-2-70b",                [ 32000,  8192, 28672,  80], [ 64,  8],   4096, 1e4, 0),
            entry("meta-llama/meta-llama-3-8b",            [128256,  4096, 14336,  32], [ 32,  8],   8192, 5e5, 0),
            entry("meta-llama/meta-llama-3-70b",           [128256,  8192, 28672,  80], [ 64,  8],   8192, 5e5, 0),
            entry("codellama/codellama-7b",                [ 32016,  4096, 11008,  32], [ 32, 32],  16384, 1e6, 0),
            entry("codellama/codellama-13b",               [ 32016,  5120, 13824,  40], [ 40, 40],  16384, 1e6, 0),
            entry("codellama/codellama-34b",               [ 32000,  8192, 22016,  48], [ 64,  8],  16384, 1e6, 0),
            entry("codellama/codellama-70b",              [ 32016,  8192, 28672,  80], [ 64,  8],  16384, 1e6, 0),
            entry("lmsys/vicuna-7b-v1.5",                  [ 32000,  4096, 11008,  32], [ 32, 32],   4096, 1e4, 0),
            entry("lmsys/vicuna-13b-v1.5",                 [ 32000,  5120, 13824,  40], [ 40, 40],   4096, 1e4, 0),
            entry("openlm-research/open_llama_3b",         [ 32000,  3200,  8640,  26], [ 32, 32],   2048, 1e4, 0),
            entry("01-ai/yi-6b",                           [ 64000,  4096, 11008,  32], [ 32,  4],   4096, 5e6, 0),
            entry("01-ai/yi-9b",                           [ 64000,  4096, 11008,  48], [ 32,  4],   4096, 1e4, 0),
            entry("01-ai/yi-34b",                          [ 64000,  7168, 20480,  60], [ 56,  8],   4096, 5e6, 0),
            entry("01-ai/yi-1.5-6b",                      [ 64000,  4096, 11008,  32], [ 32,  4],   4096, 5e6, 0),
            entry("01-ai/yi-1.5-9b",                      [ 64000,  4096, 11008,  48], [ 32,  4],   4096, 5e6, 0),
            entry("01-ai/yi-1.5-34b",                     [ 64000,  7168, 20480,  60], [ 56,  8],   4096, 5e6, 0),
            entry("deepseek-ai/deepseek-llm-7b",           [102400,  4096, 11008,  30], [ 32, 32],   4096, 1e4, 0),
            entry("deepseek-ai/deepseek-llm-67b",          [102400,  8192, 22016,  95], [ 64,  8],   4096, 1e4, 0),
            entry("tiiuae/falcon3-1b",                     [131072,  2048,  8192,  18], [  8,  4],   4096, 1e6, HEAD_256),
            entry("tiiuae/falcon3-7b",                     [131072,  3072, 23040,  28], [ 12,  4],  32768, 1e6, HEAD_256),
            entry("tiiuae/falcon3-10b",                    [131072,  3072, 23040,  40], [ 12,  4],  32768, 1e6, HEAD_256),
            entry("upstage/solar-10.7b",                   [ 32000,  4096, 14336,  48], [ 32,  8],   4096, 1e4, 0),
        ],
    },
    Group {
        model_type: "llama",
        extra: LLAMA_3_1,
        entries: &[
            entry("meta-llama/llama-3.1-8b",               [128256,  4096, 14336,  32], [ 32,  8], 131072, 5e5, 0),
            entry("meta-llama/llama-3.1-70b",              [128256,  8192, 28672,  80], [ 64,  8], 131072, 5e5, 0),
            entry("meta-llama/llama-3.1-405b",             [128256, 16384, 53248, 126], [128,  8], 131072, 5e5, 0),
            entry("meta-llama/llama-3.3-70b",              [128256,  8192, 28672,  80], [ 64,  8], 131072, 5e5, 0),
            entry("deepseek-ai/deepseek-r1-distill-llama-8b",[128256,  4096, 14336,  32], [ 32,  8], 131072, 5e5, 0),
            entry("deepseek-ai/deepseek-r1-distill-llama-70b",[128256,  8192, 28672,  80], [ 64,  8], 131072, 5e5, 0),
        ],
    },
    Group {
        model_type: "llama",
        extra: LLAMA_3_2,
        entries: &[
            entry("meta-llama/llama-3.2-1b",               [128256,  2048,  8192,  16], [ 32,  8], 131072, 5e5, TIED),
            entry("meta-llama/llama-3.2-3b",               [128256,  3072,  8192,  28], [ 24,  8], 131072, 5e5, TIED),
        ],
    },
    Group {
        model_type: "llama",
        extra: r#"{"rope_scaling": {"type": "linear", "factor": 4.0}}"#,
        entries: &[
            entry("deepseek-ai/deepseek-coder-1.3b",       [ 32256,  2048,  5504,  24], [ 16, 16],  16384, 1e5, 0),
            entry("deepseek-ai/deepseek-coder-6.7b",       [ 32256,  4096, 11008,  32], [ 32, 32],  16384, 1e5, 0),
            entry("deepseek-ai/deepseek-coder-33b",        [ 32256,  7168, 19200,  62], [ 56,  8],  16384, 1e5, 0),
        ],
    },
    Group {
        model_type: "mistral",
        extra: r#"{"sliding_window": 4096}"#,
        entries: &[
            entry("mistralai/mistral-7b-v0.1",             [ 32000,  4096, 14336,  32], [ 32,  8],  32768, 1e4, 0),
            entry("mistralai/mistral-7b",                 [ 32000,  4096, 14336,  32], [ 32,  8],  32768, 1e4, 0),
            entry("huggingfaceh4/zephyr-7b-beta",         [ 32000,  4096, 14336,  32], [ 32,  8],  32768, 1e4, 0),
        ],
    },
    Group {
        model_type: "mistral",
        extra: r#"{"sliding_window": null}"#,
        entries: &[
            entry("mistralai/mistral-7b-v0.3",             [ 32768,  4096, 14336,  32], [ 32,  8],  32768, 1e6, 0),
            entry("mistralai/mistral-7b-v0.2",            [ 32000,  4096, 14336,  32], [ 32,  8],  32768, 1e6, 0),
            entry("mistralai/mistral-small-22b",          [ 32768,  6144, 16384,  56], [ 48,  8],  32768, 1e6, HEAD_128),
            entry("mistralai/mistral-nemo-12b",            [131072,  5120, 14336,  40], [ 32,  8], 131072, 1e6, HEAD_128),
            entry("mistralai/mistral-small-24b",           [131072,  5120, 32768,  40], [ 32,  8],  32768, 1e8, HEAD_128),
            entry("mistralai/mistral-large-123b",          [ 32768, 12288, 28672,  88], [ 96,  8], 131072, 1e6, 0),
        ],
    },
    Group {
        model_type: "qwen2",
        extra: r#"{"rms_norm_eps": 1e-6}"#,
        entries: &[
            entry("qwen/qwen2-0.5b",                       [151936,   896,  4864,  24], [ 14,  2], 131072, 1e6, TIED),
            entry("qwen/qwen2-1.5b",                       [151936,  1536,  8960,  28], [ 12,  2], 131072, 1e6, TIED),
            entry("qwen/qwen2-7b",                         [152064,  3584, 18944,  28], [ 28,  4], 131072, 1e6, 0),
            entry("qwen/qwen2-72b",                        [152064,  8192, 29568,  80], [ 64,  8], 131072, 1e6, 0),
            entry("qwen/qwen2.5-0.5b",                     [151936,   896,  4864,  24], [ 14,  2],  32768, 1e6, TIED),
            entry("qwen/qwen2.5-1.5b",                     [151936,  1536,  8960,  28], [ 12,  2],  32768, 1e6, TIED),
            entry("qwen/qwen2.5-3b",                       [151936,  2048, 11008,  36], [ 16,  2],  32768, 1e6, TIED),
            entry("qwen/qwen2.5-7b",                       [152064,  3584, 18944,  28], [ 28,  4], 131072, 1e6, 0),
            entry("qwen/qwen2.5-14b",                      [152064,  5120, 13824,  48], [ 40,  8], 131072, 1e6, 0),
            entry("qwen/qwen2.5-32b",                      [152064,  5120, 27648,  64], [ 40,  8], 131072, 1e6, 0),
            entry("qwen/qwen2.5-72b",                      [152064,  8192, 29568,  80], [ 64,  8], 131072, 1e6, 0),
            entry("qwen/qwen2.5-coder-0.5b",              [151936,   896,  4864,  24], [ 14,  2],  32768, 1e6, TIED),
            entry("qwen/qwen2.5-coder-1.5b",              [151936,  1536,  8960,  28], [ 12,  2],  32768, 1e6, TIED),
            entry("qwen/qwen2.5-coder-3b",                [151936,  2048, 11008,  36], [ 16,  2],  32768, 1e6, TIED),
            entry("qwen/qwen2.5-coder-7b",                [152064,  3584, 18944,  28], [ 28,  4],  32768, 1e6, 0),
            entry("qwen/qwen2.5-coder-14b",               [152064,  5120, 13824,  48], [ 40,  8],  32768, 1e6, 0),
            entry("qwen/qwen2.5-coder-32b",               [152064,  5120, 27648,  64], [ 40,  8],  32768, 1e6, 0),
            entry("qwen/qwen2.5-math-1.5b",               [151936,  1536,  8960,  28], [ 12,  2],   4096, 1e4, TIED),
            entry("qwen/qwen2.5-math-7b",                 [152064,  3584, 18944,  28], [ 28,  4],   4096, 1e4, 0),
            entry("deepseek-ai/deepseek-r1-distill-qwen-1.5b",[151936,  1536,  8960,  28], [ 12,  2], 131072, 1e4, 0),
            entry("deepseek-ai/deepseek-r1-distill-qwen-7b",[152064,  3584, 18944,  28], [ 28,  4], 131072, 1e4, 0),
            entry("deepseek-ai/deepseek-r1-distill-qwen-14b",[152064,  5120, 13824,  48], [ 40,  8], 131072, 1e6, 0),
            entry("deepseek-ai/deepseek-r1-distill-qwen-32b",[152064,  5120, 27648,  64], [ 40,  8], 131072, 1e6, 0),
        ],
    },
    // The first Qwen has the shapes of Qwen 2 under other names (c_attn is q, k and v; w2, w1 and c_proj are gate, up and down), and half
    // the intermediate_size that its config.json says.
    Group {
        model_type: "qwen2",
        extra: r#"{"rms_norm_eps": 1e-6}"#,
        entries: &[
            entry("qwen/qwen-1.8b",                       [151936,  2048,  5504,  24], [ 16, 16],   8192, 1e4, 0),
            entry("qwen/qwen-7b",                         [151936,  4096, 11008,  32], [ 32, 32],   8192, 1e4, 0),
            entry("qwen/qwen-14b",                        [152064,  5120, 13696,  40], [ 40, 40],   8192, 1e4, 0),
            entry("qwen/qwen-72b",                        [152064,  8192, 24576,  80], [ 64, 64],   8192, 1e4, 0),
            entry("qwen/qwen1.5-0.5b",                    [151936,  1024,  2816,  24], [ 16, 16],  32768, 1e6, TIED),
            entry("qwen/qwen1.5-1.8b",                    [151936,  2048,  5504,  24], [ 16, 16],  32768, 1e6, 0),
            entry("qwen/qwen1.5-4b",                      [151936,  2560,  6912,  40], [ 20, 20],  32768, 1e6, 0),
            entry("qwen/qwen1.5-7b",                      [151936,  4096, 11008,  32], [ 32, 32],  32768, 1e6, 0),
            entry("qwen/qwen1.5-14b",                     [152064,  5120, 13696,  40], [ 40, 40],  32768, 1e6, 0),
            entry("qwen/qwen1.5-32b",                     [152064,  5120, 27392,  64], [ 40,  8],  32768, 1e6, 0),
            entry("qwen/qwen1.5-72b",                     [152064,  8192, 24576,  80], [ 64, 64],  32768, 1e6, 0),
        ],
    },
    Group {
        model_type: "phi3",
        extra: r#"{"sliding_window": 2047}"#,
        entries: &[
            entry("microsoft/phi-3-mini",                  [ 32064,  3072,  8192,  32], [ 32, 32],   4096, 1e4, 0),
            entry("microsoft/phi-3-medium",                [ 32064,  5120, 17920,  40], [ 40, 10],   4096, 1e4, 0),
            entry("microsoft/phi-3-mini-4k",              [ 32064,  3072,  8192,  32], [ 32, 32],   4096, 1e4, 0),
            entry("microsoft/phi-3-medium-4k",            [ 32064,  5120, 17920,  40], [ 40, 10],   4096, 1e4, 0),
        ],
    },
    Group {
        model_type: "phi3",
        extra: r#"{"sliding_window": null}"#,
        entries: &[
            entry("microsoft/phi-4",                      [100352,  5120, 17920,  40], [ 40, 10],  16384, 2.5e5, 0),
        ],
    },
    Group {
        model_type: "qwen3",
        extra: r#"{"rms_norm_eps": 1e-6}"#,
        entries: &[
            entry("qwen/qwen3-0.6b",                       [151936,  1024,  3072,  28], [ 16,  8],  40960, 1e6, TIED | HEAD_128),
            entry("qwen/qwen3-1.7b",                       [151936,  2048,  6144,  28], [ 16,  8],  40960, 1e6, TIED | HEAD_128),
            entry("qwen/qwen3-4b",                         [151936,  2560,  9728,  36], [ 32,  8],  40960, 1e6, TIED | HEAD_128),
            entry("qwen/qwen3-8b",                         [151936,  4096, 12288,  36], [ 32,  8],  40960, 1e6, HEAD_128),
            entry("qwen/qwen3-14b",                        [151936,  5120, 17408,  40], [ 40,  8],  40960, 1e6, HEAD_128),
            entry("qwen/qwen3-32b",                        [151936,  5120, 25600,  64], [ 64,  8],  40960, 1e6, HEAD_128),
        ],
    },
    Group {
        model_type: "gemma",
        extra: r#"{"rms_norm_eps": 1e-6}"#,
        entries: &[
            entry("google/gemma-2b",                       [256000,  2048, 16384,  18], [  8,  1],   8192, 1e4, TIED | HEAD_256),
            entry("google/gemma-7b",                       [256000,  3072, 24576,  28], [ 16, 16],   8192, 1e4, TIED | HEAD_256),
        ],
    },
    Group {
        model_type: "gemma2",
        extra: r#"{"rms_norm_eps": 1e-6}"#,
        entries: &[
            entry("google/gemma-2-2b",                     [256000,  2304,  9216,  26], [  8,  4],   8192, 1e4, TIED | HEAD_256),
            entry("google/gemma-2-9b",                     [256000,  3584, 14336,  42], [ 16,  8],   8192, 1e4, TIED | HEAD_256),
        ],
    },
    Group {
        model_type: "gemma2",
        extra: r#"{"rms_norm_eps": 1e-6, "query_pre_attn_scalar": 144}"#,
        entries: &[
            entry("google/gemma-2-27b",                    [256000,  4608, 36864,  46], [ 32, 16],   8192, 1e4, TIED | HEAD_128),
        ],
    },
    Group {
        model_type: "gemma3_text",
        extra: r#"{"rms_norm_eps": 1e-6, "sliding_window": 512}"#,
        entries: &[
            entry("google/gemma-3-270m",                   [262144,   640,  2048,  18], [  4,  1],  32768, 1e6, TIED | HEAD_256),
            entry("google/gemma-3-1b",                     [262144,  1152,  6912,  26], [  4,  1],  32768, 1e6, TIED | HEAD_256),
        ],
    },
    Group {
        model_type: "gemma3_text",
        extra: GEMMA_3_LARGE,
        entries: &[
            entry("google/gemma-3-4b",                     [262208,  2560, 10240,  34], [  8,  4], 131072, 1e6, TIED | HEAD_256),
            entry("google/gemma-3-12b",                    [262208,  3840, 15360,  48], [ 16,  8], 131072, 1e6, TIED | HEAD_256),
        ],
    },
    Group {
        model_type: "gpt2",
        extra: "{}",
        entries: &[
            entry("openai-community/gpt2",                 [ 50257,   768,  3072,  12], [ 12, 12],   1024, 1e4, TIED),
            entry("openai-community/gpt2-medium",          [ 50257,  1024,  4096,  24], [ 16, 16],   1024, 1e4, TIED),
            entry("openai-community/gpt2-large",           [ 50257,  1280,  5120,  36], [ 20, 20],   1024, 1e4, TIED),
            entry("openai-community/gpt2-xl",              [ 50257,  1600,  6400,  48], [ 25, 25],   1024, 1e4, TIED),
        ],
    },
    Group {
        model_type: "olmo2",
        extra: r#"{"rms_norm_eps": 1e-6}"#,
        entries: &[
            entry("allenai/olmo-2-1b",                     [100352,  2048,  8192,  16], [ 16, 16],   4096, 5e5, 0),
            entry("allenai/olmo-2-7b",                     [100352,  4096, 11008,  32], [ 32, 32],   4096, 5e5, 0),
            entry("allenai/olmo-2-13b",                    [100352,  5120, 13824,  40], [ 40, 40],   4096, 5e5, 0),
        ],
    },
    Group {
        model_type: "mixtral",
        extra: r#"{"num_local_experts": 8, "num_experts_per_tok": 2}"#,
        entries: &[
            entry("mistralai/mixtral-8x7b",                [ 32000,  4096, 14336,  32], [ 32,  8],  32768, 1e6, 0),
            entry("mistralai/mixtral-8x7b-v0.1",           [ 32000,  4096, 14336,  32], [ 32,  8],  32768, 1e6, 0),
            entry("mistralai/mixtral-8x22b",               [ 32000,  6144, 16384,  56], [ 48,  8],  65536, 1e6, 0),
            entry("mistralai/mixtral-8x22b-v0.1",          [ 32000,  6144, 16384,  56], [ 48,  8],  65536, 1e6, 0),
        ],
    },
    Group {
        model_type: "qwen2_moe",
        extra: r#"{"rms_norm_eps": 1e-6, "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632}"#,
        entries: &[
            entry("qwen/qwen1.5-moe-a2.7b",                [151936,  2048,  5632,  24], [ 16, 16],   8192, 1e6, 0),
        ],
    },
    Group {
        model_type: "qwen2_moe",
        extra: r#"{"rms_norm_eps": 1e-6, "num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 2560,
            "shared_expert_intermediate_size": 20480}"#,
        entries: &[
            entry("qwen/qwen2-57b-a14b",                   [151936,  3584, 18944,  28], [ 28,  4],  32768, 1e6, 0),
        ],
    },
    Group {
        model_type: "qwen3_moe",
        extra: r#"{"rms_norm_eps": 1e-6, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
            "norm_topk_prob": true}"#,
        entries: &[
            entry("qwen/qwen3-30b-a3b",                    [151936,  2048,  6144,  48], [ 32,  4],  40960, 1e6, HEAD_128),
        ],
    },
    Group {
        model_type: "qwen3_moe",
        extra: r#"{"rms_norm_eps": 1e-6, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1536,
            "norm_topk_prob": true}"#,
        entries: &[
            entry("qwen/qwen3-235b-a22b",                  [151936,  4096, 12288,  94], [ 64,  4],  40960, 1e6, HEAD_128),
        ],
    },
    Group {
        model_type: "olmoe",
        extra: r#"{"num_experts": 64, "num_experts_per_tok": 8}"#,
        entries: &[
            entry("allenai/olmoe-1b-7b",                   [ 50304,  2048,  1024,  16], [ 16, 16],   4096, 1e4, 0),
            entry("allenai/olmoe-1b-7b-0924",              [ 50304,  2048,  1024,  16], [ 16, 16],   4096, 1e4, 0),
        ],
    },
    Group {
        model_type: "glm4_moe",
        extra: r#"{"n_routed_experts": 160, "num_experts_per_tok": 8, "moe_intermediate_size": 1536, "n_shared_experts": 1,
            "first_k_dense_replace": 3, "routed_scaling_factor": 2.5, "norm_topk_prob": true, "use_qk_norm": true,
            "attention_bias": true, "partial_rotary_factor": 0.5}"#,
        entries: &[
            entry("zai-org/glm-4.5",                       [151552,  5120, 12288,  92], [ 96,  8], 131072, 1e6, HEAD_128),
        ],
    },
    Group {
        model_type: "glm4_moe",
        extra: r#"{"n_routed_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1408, "n_shared_experts": 1,
            "first_k_dense_replace": 1, "routed_scaling_factor": 1.0, "norm_topk_prob": true, "use_qk_norm": false,
            "attention_bias": true, "partial_rotary_factor": 0.5}"#,
        entries: &[
            entry("zai-org/glm-4.5-air",                   [151552,  4096, 10944,  46], [ 96,  8], 131072, 1e6, HEAD_128),
        ],
    },
    Group {
        model_type: "glm4_moe_lite",
        extra: r#"{"n_routed_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 1536, "n_shared_experts": 1,
            "first_k_dense_replace": 1, "routed_scaling_factor": 1.8, "norm_topk_prob": true}"#,
        entries: &[
            entry("zai-org/glm-4.7-flash",                 [154880,  2048, 10240,  47], [ 20, 20], 202752, 1e6, 0),
        ],
    },
    Group {
        model_type: "gpt_oss",
        extra: GPT_OSS_20B,
        entries: &[
            entry("openai/gpt-oss-20b",                    [201088,  2880,  2880,  24], [ 64,  8], 131072, 1.5e5, 0),
        ],
    },
    Group {
        model_type: "gpt_oss",
        extra: GPT_OSS_120B,
        entries: &[
            entry("openai/gpt-oss-120b",                   [201088,  2880,  2880,  36], [ 64,  8], 131072, 1.5e5, 0),
        ],
    },
    Group {
        model_type: "deepseek",
        extra: r#"{"rms_norm_eps": 1e-6, "n_routed_experts": 64, "num_experts_per_tok": 6, "moe_intermediate_size": 1408,
            "n_shared_experts": 2, "first_k_dense_replace": 1, "norm_topk_prob": false}"#,
        entries: &[
            entry("deepseek-ai/deepseek-moe-16b",          [102400,  2048, 10944,  28], [ 16, 16],   4096, 1e4, 0),
        ],
    },
    Group {
        model_type: "deepseek_v2",
        extra: r#"{"rms_norm_eps": 1e-6, "n_routed_experts": 64, "num_experts_per_tok": 6, "moe_intermediate_size": 1408,
            "n_shared_experts": 2, "first_k_dense_replace": 1, "topk_method": "greedy", "q_lora_rank": null,
            "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
            "mscale": 0.707, "mscale_all_dim": 0.707}}"#,
        entries: &[
            entry("deepseek-ai/deepseek-v2-lite",          [102400,  2048, 10944,  27], [ 16, 16], 163840, 1e4, 0),
            entry("deepseek-ai/deepseek-coder-v2-lite",    [102400,  2048, 10944,  27], [ 16, 16], 163840, 1e4, 0),
        ],
    },
    Group {
        model_type: "deepseek_v2",
        extra: r#"{"rms_norm_eps": 1e-6, "n_routed_experts": 160, "num_experts_per_tok": 6, "moe_intermediate_size": 1536,
            "n_shared_experts": 2, "first_k_dense_replace": 1, "topk_method": "group_limited_greedy", "n_group": 8,
            "topk_group": 3, "routed_scaling_factor": 16.0,
            "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
            "mscale": 0.707, "mscale_all_dim": 0.707}}"#,
        entries: &[
            entry("deepseek-ai/deepseek-v2",               [102400,  5120, 12288,  60], [128,128], 163840, 1e4, 0),
            entry("deepseek-ai/deepseek-coder-v2",         [102400,  5120, 12288,  60], [128,128], 163840, 1e4, 0),
        ],
    },
    Group {
        model_type: "deepseek_v3",
        extra: r#"{"rms_norm_eps": 1e-6, "n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
            "n_shared_experts": 1, "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5,
            "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
            "mscale": 1.0, "mscale_all_dim": 1.0}}"#,
        entries: &[
            entry("deepseek-ai/deepseek-v3",               [129280,  7168, 18432,  61], [128,128], 163840, 1e4, 0),
            entry("deepseek-ai/deepseek-v3.1",             [129280,  7168, 18432,  61], [128,128], 163840, 1e4, 0),
            entry("deepseek-ai/deepseek-r1",               [129280,  7168, 18432,  61], [128,128], 163840, 1e4, 0),
        ],
    },
    Group {
        model_type: "deepseek_v3",
        extra: r#"{"rms_norm_eps": 1e-6, "n_routed_experts": 384, "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
            "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827,
            "rope_scaling": {"type": "yarn", "factor": 32, "original_max_position_embeddings": 4096, "beta_fast": 1, "beta_slow": 1,
            "mscale": 1.0, "mscale_all_dim": 1.0}}"#,
        entries: &[
            entry("moonshotai/kimi-k2",                    [163840,  7168, 18432,  61], [ 64, 64], 131072, 5e4, 0),
        ],
    },
];

/// Known models that are not here, by how their names begin, and the `model_type` that says what is missing for them.
const MISSING: [(&str, &str); 1] = [("deepseek-v3.2", "deepseek_v32")];

/// What a known model has that is missing here, if that is why the catalogue does not have it: `; NAME has ...`, or nothing.
fn what_is_missing(name: &str) -> String {
    let short = name.rsplit('/').next().unwrap_or(name);
    let wanted = plain(&short.to_ascii_lowercase());
    let known = MISSING.iter().find(|(begins, _)| wanted.starts_with(&plain(begins)));
    let what = known.and_then(|(_, model_type)| missing_of(model_type));
    what.map_or_else(String::new, |what| format!("; {short} {what}"))
}

/// Endings that say what a model was tuned for; its dimensions are the same.
const SUFFIXES: &[&str] = &["-instruct", "-chat", "-base", "-it", "-pt", "-hf", "-v1.0", "-v1.1", "-v0.2"];

impl Entry {
    fn short_name(&self) -> &'static str {
        self.name.rsplit('/').next().unwrap_or(self.name)
    }

    /// The `config.json` that the model has, as far as it matters.
    fn config(&self, group: &Group) -> Map<String, Value> {
        let has = |flag| self.traits & flag != 0;
        let sizes = if group.model_type == "gpt2" {
            json!({
                "n_embd": self.hidden,
                "n_inner": self.inner,
                "n_layer": self.layers,
                "n_head": self.heads,
                "n_positions": self.context,
            })
        } else {
            json!({
                "hidden_size": self.hidden,
                "intermediate_size": self.inner,
                "num_hidden_layers": self.layers,
                "num_attention_heads": self.heads,
                "num_key_value_heads": self.kv_heads,
                "head_dim": match () {
                    () if has(HEAD_128) => 128,
                    () if has(HEAD_256) => 256,
                    () => self.hidden / self.heads,
                },
                "max_position_embeddings": self.context,
                "rope_theta": self.theta,
                "rms_norm_eps": 1e-5,
            })
        };
        let common = json!({
            "model_type": group.model_type,
            "vocab_size": self.vocab,
            "tie_word_embeddings": has(TIED),
        });
        let extra = serde_json::from_str(group.extra).unwrap_or_default();
        [sizes, common, extra].into_iter().filter_map(|part| part.as_object().cloned()).flatten().collect()
    }

    /// The shape; a test makes every one.
    fn spec(&self, group: &Group) -> Option<ModelSpec> {
        let text = Value::Object(self.config(group)).to_string();
        parse_config(Path::new(self.name), &text, self.short_name().to_owned()).ok()
    }
}

fn models() -> impl Iterator<Item = (&'static Group, &'static Entry)> {
    GROUPS.iter().flat_map(|group| group.entries.iter().map(move |entry| (group, entry)))
}

/// The names of all models, `organisation/model`, in lower case.
pub fn names() -> impl Iterator<Item = &'static str> {
    models().map(|(_, entry)| entry.name)
}

/// What a message about a name that is not there ends with: what is missing for the model, or names like it.
pub fn not_there(name: &str, nearest: &[String]) -> String {
    let missing = what_is_missing(name);
    if missing.is_empty() { did_you_mean(nearest) } else { missing }
}

/// What a message about an unknown name ends with: `; did you mean a or b?`, or nothing.
pub fn did_you_mean(names: &[String]) -> String {
    if names.is_empty() { String::new() } else { format!("; did you mean {}?", names.join(" or ")) }
}

/// The model of that name: with or without its organisation, in any case, with or without an ending such as `-Instruct`.
///
/// # Errors
/// There is none: names that are like it.
pub fn find(name: &str) -> Result<ModelSpec, Vec<String>> {
    let mut wanted = name.trim().to_ascii_lowercase();
    // mistral-7b-instruct-v0.3
    for tuned in ["-instruct-v", "-chat-v"] {
        wanted = wanted.replace(tuned, "-v");
    }
    loop {
        let found = models().find(|(_, e)| e.name == wanted || plain(e.short_name()) == plain(&wanted));
        if let Some(spec) = found.and_then(|(group, entry)| entry.spec(group)) {
            return Ok(spec);
        }
        match SUFFIXES.iter().find_map(|suffix| wanted.strip_suffix(suffix)) {
            Some(shorter) => wanted = shorter.to_owned(),
            None => break,
        }
    }
    let wanted = plain(wanted.rsplit('/').next().unwrap_or(&wanted));
    let mut ranked: Vec<(usize, &str)> =
        models().map(|(_, e)| (distance(&plain(e.short_name()), &wanted), e.short_name())).collect();
    ranked.sort();
    Err(ranked.into_iter().take(3).filter(|(d, _)| *d <= 4).map(|(_, name)| name.to_owned()).collect())
}

/// A name without what people leave out: `meta-` before llama, and all marks.
fn plain(name: &str) -> String {
    name.strip_prefix("meta-llama-")
        .map_or(name.to_owned(), |rest| format!("llama-{rest}"))
        .chars()
        .filter(char::is_ascii_alphanumeric)
        .collect()
}

/// Levenshtein's distance.
fn distance(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.bytes().enumerate() {
        let mut before = row[0];
        row[0] = i + 1;
        for (j, y) in b.bytes().enumerate() {
            let replaced = before + usize::from(x != y);
            before = row[j + 1];
            row[j + 1] = replaced.min(before + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_entry_is_a_possible_model_of_about_the_size_in_its_name() {
        assert!(models().count() >= 80);
        for (group, entry) in models() {
            assert!(serde_json::from_str::<Map<String, Value>>(group.extra).is_ok(), "{}", group.extra);
            let spec = entry.spec(group).unwrap_or_else(|| panic!("{}", entry.name));
            assert_eq!(spec.architecture, group.model_type);
            let size = entry
                .name
                .split(['-', '_'])
                .filter_map(|part| {
                    let scale = match part.as_bytes().last()? {
                        b'b' => 1e9,
                        b'm' => 1e6,
                        _ => return None,
                    };
                    Some(part[..part.len() - 1].parse::<f64>().ok()? * scale)
                })
                .next_back();
            if let Some(size) = size {
                let ratio = spec.parameter_count() as f64 / size;
                assert!(
                    (0.85..1.7).contains(&ratio),
                    "{}: {} parameters",
                    entry.name,
                    spec.parameter_count()
                );
            }
        }
    }

    #[test]
    fn published_parameter_counts_are_met_exactly() {
        for (name, count) in [
            ("smollm2-135m", 134_515_008),
            ("smollm2-360m", 361_821_120),
            ("smollm2-1.7b", 1_711_376_384),
            ("tinyllama-1.1b", 1_100_048_384),
            ("llama-2-7b", 6_738_415_616),
            ("llama-2-13b", 13_015_864_320),
            ("llama-2-70b", 68_976_648_192),
            ("llama-3.1-8b", 8_030_261_248),
            ("llama-3.1-70b", 70_553_706_496),
            ("llama-3.1-405b", 405_853_388_800),
            ("llama-3.2-1b", 1_235_814_400),
            ("llama-3.2-3b", 3_212_749_824),
            ("mistral-7b-v0.1", 7_241_732_096),
            ("mistral-nemo-12b", 12_247_782_400),
            ("qwen2.5-0.5b", 494_032_768),
            ("qwen2.5-1.5b", 1_543_714_304),
            ("qwen2.5-3b", 3_085_938_688),
            ("qwen2.5-7b", 7_615_616_512),
            ("qwen2.5-14b", 14_770_033_664),
            ("qwen2.5-32b", 32_763_876_352),
            ("qwen2.5-72b", 72_706_203_648),
            ("qwen-1.8b", 1_836_828_672),
            ("qwen-7b", 7_721_324_544),
            ("qwen-14b", 14_167_290_880),
            ("yi-34b", 34_388_917_248),
            ("codellama-34b", 33_743_970_304),
            ("phi-4", 14_659_507_200),
            ("phi-3-mini", 3_821_079_552),
            ("gpt2", 124_439_808),
            ("gpt2-medium", 354_823_168),
            ("gpt2-large", 774_030_080),
            ("gpt2-xl", 1_557_611_200),
            ("gemma-2b", 2_506_172_416),
            ("gemma-7b", 8_537_680_896),
            ("gemma-2-2b", 2_614_341_888),
            ("gemma-2-9b", 9_241_705_984),
            ("gemma-2-27b", 27_227_128_320),
            ("gemma-3-270m", 268_098_176),
            ("gemma-3-1b", 999_885_952),
            ("qwen3-0.6b", 596_049_920),
            ("qwen3-1.7b", 1_720_574_976),
            ("qwen3-4b", 4_022_468_096),
            ("qwen3-8b", 8_190_735_360),
            ("qwen3-14b", 14_768_307_200),
            ("qwen3-32b", 32_762_123_264),
            ("mixtral-8x7b", 46_702_792_704),
            ("mixtral-8x22b", 140_620_634_112),
            ("qwen1.5-moe-a2.7b", 14_315_784_192),
            ("qwen3-30b-a3b", 30_532_122_624),
            ("qwen3-235b-a22b", 235_093_634_560),
            ("olmoe-1b-7b", 6_919_161_856),
            ("deepseek-moe-16b", 16_375_728_128),
            ("deepseek-v2-lite", 15_706_484_224),
            ("deepseek-v2", 235_741_434_880),
            ("deepseek-v3", 671_026_419_200),
            ("kimi-k2", 1_026_408_232_448),
            ("gpt-oss-20b", 20_914_757_184),
            ("gpt-oss-120b", 116_829_156_672),
        ] {
            assert_eq!(find(name).unwrap().parameter_count(), count, "{name}");
        }
    }

    /// The numbers that names and model cards give, in billions.
    #[test]
    fn active_parameters_are_about_those_published() {
        for (name, all, active) in [
            ("mixtral-8x7b", 46.7, 12.9),
            ("mixtral-8x22b", 140.6, 39.1),
            ("qwen1.5-moe-a2.7b", 14.3, 2.7),
            ("qwen2-57b-a14b", 57.4, 14.2),
            ("qwen3-30b-a3b", 30.5, 3.3),
            ("qwen3-235b-a22b", 235.1, 22.2),
            ("olmoe-1b-7b", 6.9, 1.3),
            ("glm-4.5", 352.8, 32.0),
            ("glm-4.5-air", 106.8, 12.0),
            ("glm-4.7-flash", 29.9, 3.6),
            ("deepseek-moe-16b", 16.4, 2.8),
            ("deepseek-v2", 235.7, 21.0),
            ("deepseek-v3", 671.0, 37.0),
            ("kimi-k2", 1026.4, 32.0),
        ] {
            let spec = find(name).unwrap();
            let found = [spec.parameter_count(), spec.active_parameter_count()].map(|n| n as f64 / 1e9);
            assert!((found[0] / all - 1.0).abs() < 0.005, "{name}: {found:?}");
            // GLM-4.5-Air's is said to be 12 billion in round numbers, GLM-4.7-Flash's 3.6 without the embedding.
            let near = if matches!(name, "glm-4.5-air" | "glm-4.7-flash") { 0.12 } else { 0.06 };
            assert!((found[1] / active - 1.0).abs() < near, "{name}: {found:?}");
        }
    }

    #[test]
    fn what_known_models_lack_here_is_said() {
        let name = "deepseek-ai/DeepSeek-V3.2";
        assert!(find(name).is_err() && what_is_missing(name).contains("by an indexer"), "{name}");
        assert_eq!(find("deepseek-r1-distill-qwen-7b").unwrap().num_layers, 28);
        assert_eq!(what_is_missing("llama-9"), "");
    }

    #[test]
    fn names_are_found_however_they_are_written() {
        for name in ["smollm2-135m", "SmolLM2-135M-Instruct", "HuggingFaceTB/SmolLM2-135M", "smollm2_135m"] {
            assert_eq!(find(name).unwrap().hidden_size, 576, "{name}");
        }
        assert_eq!(find("meta-llama/Llama-3.1-8B-Instruct").unwrap().vocab_size, 128_256);
        for name in ["TinyLlama/TinyLlama-1.1B-Chat-v1.0", "tinyllama-1.1b"] {
            assert_eq!(find(name).unwrap().num_layers, 22, "{name}");
        }
        assert_eq!(find("mistralai/Mistral-7B-Instruct-v0.3").unwrap().vocab_size, 32_768);
        assert_eq!(find("mistralai/Mistral-7B-Instruct-v0.2").unwrap().vocab_size, 32_000);
        assert_eq!(find("Qwen/Qwen2.5-Coder-1.5B-Instruct").unwrap().hidden_size, 1536);
        assert_eq!(find("llama-3-8b").unwrap().max_position_embeddings, 8192);
        assert_eq!(find("smollm2-153m").unwrap_err()[0], "smollm2-135m");
        assert!(find("something else altogether").unwrap_err().is_empty());
    }
}
