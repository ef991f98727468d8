//! What is found out about files; `--json` prints it as it is.

use std::collections::BTreeMap;

use plimsoll_plan::Need;
use serde::Serialize;
use serde_json::Value;

/// What the files are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    Model,
    Checkpoint,
    Run,
    Adapter,
    /// Tensors without a shape that they belong to, or of a model that cannot be run.
    Tensors,
    /// A GGUF without weights.
    Vocabulary,
    Tokenizer,
    /// Dimensions of a known model, no files.
    Catalogue,
}

#[derive(Debug, Serialize)]
pub struct Report {
    pub path: String,
    pub kind: Kind,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub format: Option<&'static str>,
    #[serde(flatten)]
    pub model: Option<Model>,
    #[serde(flatten)]
    pub storage: Option<Storage>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tensors: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stored_tensors: Option<Vec<StoredTensor>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub adapter: Option<Adapter>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub checkpoint: Option<Checkpoint>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub run: Option<Run>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokenizer: Option<TokenizerReport>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub chat_templates: Vec<ChatTemplate>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub metadata: BTreeMap<String, Value>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub needs: Vec<Need>,
    /// What is wrong or missing.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}

impl Report {
    pub fn new(path: String, kind: Kind) -> Report {
        Report {
            path,
            kind,
            format: None,
            model: None,
            storage: None,
            tensors: Vec::new(),
            stored_tensors: None,
            adapter: None,
            checkpoint: None,
            run: None,
            tokenizer: None,
            chat_templates: Vec::new(),
            metadata: BTreeMap::new(),
            needs: Vec::new(),
            notes: Vec::new(),
        }
    }
}

/// A shape, in the words of Hugging Face's `config.json`.
#[derive(Debug, Serialize)]
pub struct Model {
    pub name: String,
    pub architecture: String,
    pub parameters: u64,
    /// Those that one token meets, in a mixture of experts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub active_parameters: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub experts: Option<Experts>,
    pub parameters_by_group: BTreeMap<&'static str, u64>,
    pub vocab_size: u64,
    pub hidden_size: u64,
    pub intermediate_size: u64,
    pub num_hidden_layers: u32,
    pub num_attention_heads: u64,
    pub num_key_value_heads: u64,
    pub head_dim: u64,
    /// The widths of latent attention, where a model has it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub latent_attention: Option<Latent>,
    pub rope_theta: Option<f64>,
    pub max_position_embeddings: u64,
    pub tie_word_embeddings: bool,
    pub eos_tokens: Vec<u32>,
}

/// Latent attention, in the words of `config.json`.
#[derive(Debug, Serialize)]
pub struct Latent {
    pub q_lora_rank: Option<u64>,
    pub kv_lora_rank: u64,
    pub qk_rope_head_dim: u64,
    pub v_head_dim: u64,
}

/// The experts of a mixture.
#[derive(Debug, Serialize)]
pub struct Experts {
    pub num_experts: u64,
    pub num_experts_per_tok: u64,
    pub moe_intermediate_size: u64,
    pub shared_expert_intermediate_size: Option<u64>,
    pub layers_with_experts: usize,
    pub scoring_func: &'static str,
    pub norm_topk_prob: bool,
    pub routed_scaling_factor: f64,
    /// Groups, and how many of them a token's experts are in.
    pub groups: Option<[u64; 2]>,
    /// Whether a vector corrects the choice.
    pub correction_bias: bool,
    /// Zero, copy and constant experts beside those with matrices.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub without_matrices: Option<[u64; 3]>,
}

/// How the tensors are stored.
#[derive(Debug, Serialize)]
pub struct Storage {
    pub files: usize,
    pub file_bytes: u64,
    pub stored_bytes: u64,
    pub parameters_by_dtype: BTreeMap<String, u64>,
    pub dtypes: Vec<DTypeBytes>,
}

#[derive(Debug, Serialize)]
pub struct DTypeBytes {
    pub dtype: String,
    pub tensors: u64,
    pub parameters: u64,
    pub bytes: u64,
    pub bits_per_parameter: f64,
}

#[derive(Clone, Debug, Serialize)]
pub struct StoredTensor {
    pub name: String,
    pub dtype: String,
    pub shape: Vec<u64>,
    pub bytes: u64,
    pub file: String,
}

/// A PEFT adapter.
#[derive(Debug, Serialize)]
pub struct Adapter {
    pub base_model: Option<String>,
    pub kind: Option<String>,
    pub rank: Option<u64>,
    pub alpha: Option<f64>,
    pub target_modules: Vec<String>,
}

#[derive(Debug, Serialize)]
pub struct Checkpoint {
    pub step: u64,
    pub tokens: u64,
    pub windows: u64,
    pub optimizer_bytes: Option<u64>,
}

#[derive(Debug, Serialize)]
pub struct Run {
    pub steps: Option<u64>,
    pub last_loss: Option<f64>,
    pub finished: Option<bool>,
    pub checkpoints: Vec<u64>,
}

#[derive(Debug, Serialize)]
pub struct TokenizerReport {
    pub kind: String,
    /// `tokenizer.ggml.model` and `pre` of a GGUF.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ggml: Option<String>,
    pub vocab_size: usize,
    pub bos: Option<Token>,
    pub eos: Vec<Token>,
    pub pad: Option<Token>,
    pub special_tokens: Vec<Token>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Token {
    pub id: u32,
    pub text: String,
}

#[derive(Debug, Serialize)]
pub struct ChatTemplate {
    pub name: String,
    pub source: String,
}
