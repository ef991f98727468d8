//! Which GGUF tensors hold the parameters of a block.
//!
//! Converters for llama.cpp reorder the rows of q and k of `llama` models, which Mistral's are too, and of DeepSeek's within every head,
//! because it rotates neighbouring pairs (2i, 2i + 1) of these where Hugging Face rotates (i, i + dims / 2); and they
//! store the norms of Gemma as 1 + weight. They store `kv_b_proj` of latent attention in halves: that of keys transposed, `[heads, kv_rank,
//! D - R]`, and that of values, `[heads, V, kv_rank]`. Files of before April 2025 have it whole.

use std::ops::Range;

use crate::layout::{StoredPart, StoredTensor, fuse};
use crate::parameters::{BlockId, Parameter, ParameterKind, Role};
use crate::source::RowOrder;
use crate::spec::ModelSpec;

/// What a token is multiplied with for the weight of the shared expert, a vector.
pub(crate) const SHARED_ROUTER: &str = "ffn_gate_inp_shexp.weight";

/// The matrix of both halves, in files that have it whole.
pub(crate) const WHOLE_KV_UP: &str = "attn_kv_b.weight";

/// Its halves for keys and for values.
pub(crate) const KV_UP_HALVES: [&str; 2] = ["attn_k_b.weight", "attn_v_b.weight"];

/// What a GGUF file stores of a block.
pub(crate) fn gguf_block(spec: &ModelSpec, block: BlockId) -> Vec<StoredTensor> {
    let halved = |tensor: StoredTensor| match tensor.is_of(|role| role == Role::KvUpProj) {
        true => halves(spec, tensor),
        false => vec![tensor],
    };
    gguf_block_with_whole_kv_up(spec, block).into_iter().flat_map(halved).collect()
}

/// The halves of a matrix that makes keys and values of heads.
fn halves(spec: &ModelSpec, whole: StoredTensor) -> Vec<StoredTensor> {
    let attention = &spec.attention;
    let plain = attention.head_dim.saturating_sub(attention.rotated_dim());
    let of_head = plain + attention.value_dim();
    let Some(parameter) = whole.parts.into_iter().next().map(|part| part.parameter) else {
        return Vec::new();
    };
    let half = |name: &str, own: Range<u64>, rows| {
        let parts = (0..attention.heads).map(|head| StoredPart {
            parameter: parameter.clone(),
            rows: head * of_head + own.start..head * of_head + own.end,
        });
        let tensor = StoredTensor::of_rows(in_layer(&parameter, name), parts.collect());
        StoredTensor { rows, stack: Some(attention.heads), ..tensor }
    };
    let [keys, values] = KV_UP_HALVES;
    vec![
        half(keys, 0..plain, RowOrder::Transposed { total: plain, first: 0, step: 1 }),
        half(values, plain..of_head, RowOrder::Natural),
    ]
}

/// The same of a file that has the matrix of keys and values of latent attention whole.
pub(crate) fn gguf_block_with_whole_kv_up(spec: &ModelSpec, block: BlockId) -> Vec<StoredTensor> {
    let parameters = spec.block_parameters(block);
    let mut tensors = match spec.architecture.as_str() {
        "gpt2" | "phi3" => fuse(parameters, fused_name, false),
        "glm4_moe" | "gpt_oss" => fuse(parameters, glm_name, false),
        _ if spec.attention.latent.is_some() => fuse(parameters, latent_name, false),
        _ => fuse(parameters, plain_name, false),
    };
    for tensor in &mut tensors {
        let is = |roles: &[Role]| tensor.is_of(|role| roles.contains(&role));
        if matches!(spec.architecture.as_str(), "llama" | "mistral" | "mixtral" | "deepseek")
            && is(&[Role::QProj, Role::KProj, Role::QBias, Role::KBias])
        {
            tensor.rows = RowOrder::Interleaved { head_dim: spec.attention.head_dim };
        }
        tensor.plus_one =
            spec.norm.one_plus_weight && tensor.is_of(|role| role.kind() == ParameterKind::Norm);
    }
    tensors
}

fn fused_name(parameter: &Parameter) -> String {
    let part = match parameter.role {
        Role::QProj | Role::KProj | Role::VProj => "attn_qkv.weight",
        Role::QBias | Role::KBias | Role::VBias => "attn_qkv.bias",
        Role::GateProj | Role::UpProj => "ffn_up.weight",
        _ => return plain_name(parameter),
    };
    in_layer(parameter, part)
}

/// The norm of GLM and gpt-oss before the feed-forward part is called after what is before it.
fn glm_name(parameter: &Parameter) -> String {
    match parameter.role {
        Role::MlpNorm => in_layer(parameter, "post_attention_norm.weight"),
        _ => plain_name(parameter),
    }
}

/// The norms of latent attention are those of its narrow vectors.
fn latent_name(parameter: &Parameter) -> String {
    let part = match parameter.role {
        Role::QDownProj => "attn_q_a.weight",
        Role::QNorm => "attn_q_a_norm.weight",
        Role::QUpProj => "attn_q_b.weight",
        Role::KvDownProj => "attn_kv_a_mqa.weight",
        Role::KNorm => "attn_kv_a_norm.weight",
        Role::KvUpProj => WHOLE_KV_UP,
        _ => return plain_name(parameter),
    };
    in_layer(parameter, part)
}

fn plain_name(parameter: &Parameter) -> String {
    let part = match parameter.role {
        Role::TokenEmbedding => return "token_embd.weight".into(),
        Role::PositionEmbedding => return "position_embd.weight".into(),
        Role::FinalNorm => return "output_norm.weight".into(),
        Role::FinalNormBias => return "output_norm.bias".into(),
        Role::LmHead => return "output.weight".into(),
        Role::AttentionNorm => "attn_norm.weight",
        Role::AttentionNormBias => "attn_norm.bias",
        Role::QProj => "attn_q.weight",
        Role::KProj => "attn_k.weight",
        Role::VProj => "attn_v.weight",
        Role::OProj => "attn_output.weight",
        Role::QBias => "attn_q.bias",
        Role::KBias => "attn_k.bias",
        Role::VBias => "attn_v.bias",
        Role::OBias => "attn_output.bias",
        Role::QNorm => "attn_q_norm.weight",
        Role::KNorm => "attn_k_norm.weight",
        Role::Sinks => "attn_sinks.weight",
        Role::PostAttentionNorm => "post_attention_norm.weight",
        Role::MlpNorm => "ffn_norm.weight",
        Role::MlpNormBias => "ffn_norm.bias",
        Role::GateProj if parameter.is_of_experts() => "ffn_gate_exps.weight",
        Role::GateProj => "ffn_gate.weight",
        Role::UpProj if parameter.is_of_experts() => "ffn_up_exps.weight",
        Role::UpProj => "ffn_up.weight",
        Role::DownProj if parameter.is_of_experts() => "ffn_down_exps.weight",
        Role::DownProj => "ffn_down.weight",
        Role::GateBias if parameter.is_of_experts() => "ffn_gate_exps.bias",
        Role::GateBias => "ffn_gate.bias",
        Role::UpBias if parameter.is_of_experts() => "ffn_up_exps.bias",
        Role::UpBias => "ffn_up.bias",
        Role::DownBias if parameter.is_of_experts() => "ffn_down_exps.bias",
        Role::DownBias => "ffn_down.bias",
        Role::PostMlpNorm => "post_ffw_norm.weight",
        Role::Router => "ffn_gate_inp.weight",
        Role::RouterBias => "ffn_gate_inp.bias",
        Role::RouterCorrection => "exp_probs_b.bias",
        Role::SharedGateProj => "ffn_gate_shexp.weight",
        Role::SharedUpProj => "ffn_up_shexp.weight",
        Role::SharedDownProj => "ffn_down_shexp.weight",
        Role::SharedRouter => SHARED_ROUTER,
        // Adapters have files of their own, and loads none; models with experts without matrices are not written.
        Role::QDownProj
        | Role::QUpProj
        | Role::KvDownProj
        | Role::KvUpProj
        | Role::RouterLoad
        | Role::RouterResidual
        | Role::ConstantGate
        | Role::ConstantVectors
        | Role::Lora(..) => return parameter.name.clone(),
    };
    in_layer(parameter, part)
}

fn in_layer(parameter: &Parameter, part: &str) -> String {
    match parameter.block {
        BlockId::Layer(i) => format!("blk.{i}.{part}"),
        BlockId::Embedding | BlockId::Head => part.to_owned(),
    }
}
