//! The shape of a model that is trained from scratch: its family, by the words of a `config.json` with the sizes that
//! the user gives, and its tokenizer.

mod experts;

use std::path::Path;

use plimsoll_model::hf_config::parse_config;
use plimsoll_model::tokenizer::{BPE_END_OF_TEXT, Tokenizer};
use plimsoll_model::{ModelSpec, SpecError};
use serde_json::{Value, json};

use crate::OriginError;
use crate::config::{Architecture, FromScratchConfig, RawConfig, TokenizerSource};

/// The tokenizer of a model from scratch.
#[derive(Clone, Debug)]
pub enum ScratchTokenizer {
    /// One that is there.
    Ready(Box<Tokenizer>),
    /// One that is trained on the data before the model is: byte-level BPE with this many tokens at most.
    Train {
        /// Tokens at most.
        vocab_size: u64,
    },
}

impl ScratchTokenizer {
    fn find(source: TokenizerSource) -> Result<ScratchTokenizer, OriginError> {
        let ready = match source {
            TokenizerSource::ByteLevel => Tokenizer::byte_level()?,
            TokenizerSource::Train { vocab_size } => return Ok(ScratchTokenizer::Train { vocab_size }),
            TokenizerSource::Path(file) if file.is_file() => Tokenizer::from_gguf_file(&file)?,
            TokenizerSource::Path(folder) => Tokenizer::from_hf_dir(&folder)?,
        };
        Ok(ScratchTokenizer::Ready(Box::new(ready)))
    }

    /// Its tokens, or how many it has at most.
    fn vocab_size(&self) -> u64 {
        match self {
            ScratchTokenizer::Ready(tokenizer) => tokenizer.vocab_size() as u64,
            ScratchTokenizer::Train { vocab_size } => *vocab_size,
        }
    }

    /// The tokens that begin and end a text.
    fn ends(&self) -> (Option<u32>, Option<u32>) {
        match self {
            ScratchTokenizer::Ready(tokenizer) => (tokenizer.bos_token(), tokenizer.eos_token()),
            ScratchTokenizer::Train { .. } => (Some(BPE_END_OF_TEXT), Some(BPE_END_OF_TEXT)),
        }
    }
}

/// The model that `model.from_scratch` describes.
pub(crate) fn model(config: &RawConfig) -> Result<(ModelSpec, ScratchTokenizer), OriginError> {
    let sizes = &config.model.from_scratch;
    let tokenizer = ScratchTokenizer::find(sizes.tokenizer())?;
    let vocab_size = sizes.vocab_size.unwrap_or(tokenizer.vocab_size());
    if vocab_size < tokenizer.vocab_size() {
        let reason = format!("{vocab_size} is smaller than the tokenizer's {}", tokenizer.vocab_size());
        return Err(SpecError { key: "vocab_size", reason }.into());
    }
    let keys = keys(sizes, vocab_size, config.data.sequence_length())?;
    let path = Path::new("model.from_scratch");
    let mut spec = parse_config(path, &keys.to_string(), "from scratch".to_owned())?;
    let (begin, end) = tokenizer.ends();
    spec.bos_token = begin;
    spec.eos_tokens = end.into_iter().collect();
    if let Some(experts) = &mut spec.experts {
        experts.router.balance_loss = experts::balance_loss(sizes);
    }
    spec.check()?;
    Ok((spec, tokenizer))
}

/// The sizes as the family's `config.json` has them; what they leave open is the family's own.
fn keys(sizes: &FromScratchConfig, vocab_size: u64, sequence_length: u64) -> Result<Value, OriginError> {
    let need = |value: Option<u64>, key| value.ok_or(OriginError::MissingSize { key });
    let architecture = sizes.architecture();
    let hidden_size = need(sizes.hidden_size, "hidden_size")?;
    let heads = need(sizes.num_attention_heads, "num_attention_heads")?;
    let layers = need(sizes.num_hidden_layers, "num_hidden_layers")?;
    let intermediate_size = need(sizes.intermediate_size, "intermediate_size")?;
    let wrong = |key, reason: String| Err(SpecError { key, reason }.into());
    if sizes.head_dim.is_none() && (heads == 0 || !hidden_size.is_multiple_of(heads)) {
        let remedy = if architecture.has_head_dim() { "; set head_dim" } else { "" };
        return wrong(
            "num_attention_heads",
            format!("{heads} does not divide hidden_size {hidden_size}{remedy}"),
        );
    }
    let head_dim = sizes.head_dim.unwrap_or(hidden_size / heads.max(1));
    if !architecture.has_head_dim() && head_dim.saturating_mul(heads) != hidden_size {
        return wrong(
            "head_dim",
            format!("in {} heads are hidden_size / num_attention_heads wide", architecture.name()),
        );
    }
    let kv_heads = sizes.num_key_value_heads.unwrap_or(heads);
    let positions = sizes.max_position_embeddings.unwrap_or(sequence_length);
    let tied = sizes.tie_word_embeddings.unwrap_or(architecture.ties_embeddings());
    if architecture == Architecture::Gpt2 {
        if kv_heads != heads {
            return wrong(
                "num_key_value_heads",
                "in gpt2 every head has keys and values of its own".to_owned(),
            );
        }
        return Ok(json!({
            "model_type": "gpt2",
            "vocab_size": vocab_size,
            "n_embd": hidden_size,
            "n_head": heads,
            "n_layer": layers,
            "n_inner": intermediate_size,
            "n_positions": positions,
            "layer_norm_epsilon": sizes.rms_norm_eps(),
            "tie_word_embeddings": tied,
            "initializer_range": sizes.initializer_range(),
        }));
    }
    let mut keys = json!({
        "model_type": architecture.model_type(),
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        // The scale of Gemma's scores goes with the width of its heads.
        "query_pre_attn_scalar": head_dim,
        "max_position_embeddings": positions,
        "rope_theta": sizes.rope_theta(),
        "rms_norm_eps": sizes.rms_norm_eps(),
        "tie_word_embeddings": tied,
        "initializer_range": sizes.initializer_range(),
    });
    let latent = latent_keys(sizes, head_dim, hidden_size)?;
    for (key, value) in experts::keys(sizes, intermediate_size, layers)?.into_iter().chain(latent) {
        keys[key] = value;
    }
    Ok(keys)
}

/// Keys of latent attention; none for a family without it.
fn latent_keys(
    sizes: &FromScratchConfig,
    head_dim: u64,
    hidden_size: u64,
) -> Result<Vec<(&'static str, Value)>, OriginError> {
    let architecture = sizes.architecture();
    let given = [
        ("qk_rope_head_dim", sizes.qk_rope_head_dim),
        ("v_head_dim", sizes.v_head_dim),
        ("kv_lora_rank", sizes.kv_lora_rank),
        ("q_lora_rank", sizes.q_lora_rank),
    ];
    let wrong = |key, reason: String| Err(SpecError { key, reason }.into());
    if architecture != Architecture::DeepseekV3 {
        return match given.into_iter().find(|(_, size)| size.is_some()) {
            None => Ok(Vec::new()),
            Some((key, _)) => {
                wrong(key, format!("{} has none; deepseek_v3 has: set architecture", architecture.name()))
            }
        };
    }
    if sizes.num_key_value_heads.is_some_and(|heads| Some(heads) != sizes.num_attention_heads) {
        let reason = "in deepseek_v3 every head has keys and values of its own".to_owned();
        return wrong("num_key_value_heads", reason);
    }
    let rotated = sizes.qk_rope_head_dim.unwrap_or(head_dim.div_ceil(2).next_multiple_of(2));
    if sizes.qk_rope_head_dim.is_none() && rotated >= head_dim {
        return wrong("head_dim", format!("heads of {head_dim} are too narrow to be rotated in part"));
    }
    if rotated >= head_dim {
        let reason = format!("{rotated} of the {head_dim} values of a head leave none that is not rotated");
        return wrong("qk_rope_head_dim", reason);
    }
    Ok(vec![
        ("qk_rope_head_dim", json!(rotated)),
        ("qk_nope_head_dim", json!(head_dim - rotated)),
        ("v_head_dim", json!(sizes.v_head_dim.unwrap_or(head_dim))),
        ("kv_lora_rank", json!(sizes.kv_lora_rank.unwrap_or(hidden_size.div_ceil(4)))),
        ("q_lora_rank", json!(sizes.q_lora_rank)),
    ])
}

#[cfg(test)]
mod tests {
    use plimsoll_model::LatentAttention;

    use super::*;

    fn found(more: &str) -> Result<ModelSpec, String> {
        let text = format!(
            "model: {{from_scratch: {{hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, num_attention_heads: 4, {more}}}}}"
        );
        model(&RawConfig::from_str(&text, "test").unwrap()).map(|(spec, _)| spec).map_err(|e| e.to_string())
    }

    #[test]
    fn every_family_has_its_own_parts() {
        for architecture in Architecture::ALL {
            let experts = if architecture.has_experts() { ", num_experts: 4" } else { "" };
            let spec = found(&format!("architecture: {}{experts}", architecture.name())).unwrap();
            assert_eq!(spec.experts.is_some(), architecture.has_experts());
            assert_eq!((spec.hidden_size, spec.num_layers, spec.vocab_size), (32, 2, 257));
            assert_eq!((spec.attention.head_dim, spec.max_position_embeddings), (8, 512));
            assert_eq!(spec.architecture, architecture.model_type());
            assert_eq!(spec.tie_word_embeddings, architecture.ties_embeddings());
            assert_eq!(spec.attention.scale, None);
        }
        let gemma =
            found("architecture: gemma3, num_key_value_heads: 2, tie_word_embeddings: false").unwrap();
        assert!(
            gemma.attention.qk_norm.is_some() && gemma.norm.one_plus_weight && !gemma.tie_word_embeddings
        );
        let latent = "architecture: deepseek_v3, num_experts: 4, head_dim: 10, q_lora_rank: 6, v_head_dim: 7";
        let attention = found(latent).unwrap().attention;
        let widths = LatentAttention { query_rank: Some(6), kv_rank: 8, value_dim: 7 };
        assert_eq!((attention.latent, attention.rotated_dim()), (Some(widths), 6));
        let llama = found("head_dim: 16, rope_theta: 5e5, rms_norm_eps: 1e-6, vocab_size: 300").unwrap();
        assert_eq!((llama.q_size(), llama.vocab_size, llama.norm.epsilon), (64, 300, 1e-6));
    }

    #[test]
    fn experts_are_as_they_are_asked_for() {
        let of = |more: &str| found(more).unwrap().experts.unwrap();
        let mixtral = of("architecture: mixtral, num_experts: 8");
        assert_eq!((mixtral.count, mixtral.per_token, mixtral.intermediate_size), (8, 2, 48));
        assert!(mixtral.router.normalise && mixtral.router.balance_loss == 0.01);
        let qwen2 = of(
            "architecture: qwen2_moe, num_experts: 6, num_experts_per_token: 3, expert_intermediate_size: 16, shared_experts: 2, router_aux_loss_coef: 0.001, dense_layers: 1",
        );
        assert_eq!((qwen2.per_token, qwen2.shared.unwrap().intermediate_size), (3, 32));
        assert_eq!(qwen2.layers, [false, true]);
        assert!(!qwen2.router.normalise && qwen2.router.balance_loss == 0.001);
        let qwen3 = of("architecture: qwen3_moe, num_experts: 4, norm_topk_prob: false");
        assert!(!qwen3.router.normalise && qwen3.shared.is_none());
        let moe = of(
            "architecture: moe, num_experts: 4, zero_experts: 1, constant_experts: 2, expert_intermediate_size: 16",
        );
        assert_eq!((moe.count, moe.total(), moe.shared, moe.tau()), (4, 7, None, 0.75));
        assert!(moe.zero_computation.unwrap().gating_residuals && !moe.router.normalise);
        assert_eq!(of("architecture: moe, num_experts: 4").zero_computation, None);
        let glm = of("architecture: glm4_moe, num_experts: 4, expert_intermediate_size: 16, dense_layers: 1");
        assert_eq!((glm.shared.unwrap().intermediate_size, &glm.layers[..]), (16, &[false, true][..]));
        assert!(glm.router.correction && glm.router.balance_loss == 0.0);
    }

    #[test]
    fn what_a_family_does_not_have_is_refused() {
        for (more, words) in [
            ("architecture: gpt2, num_key_value_heads: 2", "model.from_scratch.num_key_value_heads: in gpt2"),
            ("architecture: gpt2, head_dim: 16", "model.from_scratch.head_dim: in gpt2"),
            ("architecture: phi3, head_dim: 16", "model.from_scratch.head_dim: in phi3"),
            ("vocab_size: 100", "model.from_scratch.vocab_size: 100 is smaller than the tokenizer's 257"),
            ("num_key_value_heads: 3", "model.from_scratch"),
            ("architecture: mixtral", "model.from_scratch.num_experts is missing"),
            ("num_experts: 4", "model.from_scratch.num_experts: llama has no experts; mixtral, "),
            ("dense_layers: 1", "model.from_scratch.dense_layers: llama has no experts"),
            ("architecture: mixtral, num_experts: 4, expert_intermediate_size: 8", "intermediate_size"),
            ("architecture: mixtral, num_experts: 4, shared_experts: 1", "shared_experts: mixtral has none"),
            (
                "architecture: mixtral, num_experts: 4, zero_experts: 1",
                "zero_experts: mixtral has none; moe has",
            ),
            ("tau: 0.5", "tau: llama has none; moe has"),
            ("kv_lora_rank: 8", "kv_lora_rank: llama has none; deepseek_v3 has"),
            ("architecture: deepseek_v3, num_experts: 4, qk_rope_head_dim: 8", "8 of the 8 values of a head"),
            (
                "architecture: deepseek_v3, num_experts: 4, v_head_dim: 9",
                "values of 9 are wider than keys of 8",
            ),
            (
                "architecture: deepseek_v3, num_experts: 4, num_key_value_heads: 2",
                "keys and values of its own",
            ),
            ("architecture: mixtral, num_experts: 4, norm_topk_prob: false", "norm_topk_prob"),
            ("architecture: olmoe, num_experts: 4, dense_layers: 1", "dense_layers: in olmoe"),
            ("architecture: olmoe, num_experts: 4, num_experts_per_token: 5", "5 of 4 experts"),
            ("architecture: qwen3_moe, num_experts: 4, dense_layers: 3", "dense_layers: 3 of 2"),
            (
                "tokenizer: {train: bpe, vocab_size: 500}, vocab_size: 400",
                "is smaller than the tokenizer's 500",
            ),
        ] {
            let error = found(more).unwrap_err();
            assert!(error.contains(words), "{more}: {error}");
        }
    }
}
