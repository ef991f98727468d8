//! Mixtures of experts in GGUF's metadata, both ways: llama.cpp's keys, and what its families mean where no key says it.

use super::families::Keys;
use super::write::GgufValue;
use super::{GgufError, GgufFile};
use crate::hf_config::is_corrected;
use crate::spec::{ExpertGroups, ExpertsSpec, ModelSpec, RouterSpec, Scoring, SharedExpert};

/// A layer's tensor that only experts have.
const ROUTER: &str = "ffn_gate_inp.weight";

/// Whether the weights of a token's experts are divided by their sum in files of a family that do not say it.
fn normalises(family: &str) -> bool {
    matches!(family, "mixtral" | "qwen3_moe" | "gpt_oss")
}

fn scoring(family: &str) -> Scoring {
    if is_corrected(family) { Scoring::Sigmoid } else { Scoring::Softmax }
}

/// Whether files of a family may say other than that, and how many layers before the first one with experts have none.
fn says_routing(family: &str) -> bool {
    matches!(family, "glm4_moe" | "glm4_moe_lite" | "deepseek" | "deepseek_v2" | "deepseek_v3")
}

/// Whether a family of files can have experts.
fn has_experts(family: &str) -> bool {
    normalises(family) || says_routing(family) || matches!(family, "qwen2_moe" | "olmoe")
}

/// The experts of a file's model.
pub(super) fn read(
    file: &GgufFile,
    keys: &Keys<'_>,
    family: &str,
    num_layers: u32,
) -> Result<Option<ExpertsSpec>, GgufError> {
    let Some(count) = keys.u64("expert_count")?.filter(|count| *count > 0) else { return Ok(None) };
    if !has_experts(family) {
        let reason = format!("says a mixture of experts, which is not supported for {}", keys.prefix);
        return Err(keys.refuse("expert_count", reason));
    }
    let shape = |tensor: &str| file.tensor(tensor).map(|tensor| tensor.shape.as_slice());
    let layers: Vec<bool> = (0..num_layers.min(1 << 16))
        .map(|layer| file.tensor(&format!("blk.{layer}.{ROUTER}")).is_some())
        .collect();
    let Some(first) = layers.iter().position(|sparse| *sparse) else {
        let reason = format!("is {count}, but no layer has a {ROUTER:?}");
        return Err(keys.refuse("expert_count", reason));
    };
    let intermediate_size = match keys.u64("expert_feed_forward_length")?.filter(|size| *size > 0) {
        Some(size) => size,
        None => keys.require_u64("feed_forward_length")?,
    };
    let shared = match shape(&format!("blk.{first}.ffn_up_shexp.weight")) {
        Some([width, _]) => {
            let gated = shape(&format!("blk.{first}.ffn_gate_inp_shexp.weight")).is_some();
            Some(SharedExpert { intermediate_size: *width, gated })
        }
        _ => None,
    };
    // The softmax of the chosen logits is that of all, normalised.
    let function = keys.u64("expert_gating_func")?;
    let of_chosen = function == Some(3);
    let scoring = match function {
        None | Some(0) => scoring(family),
        Some(1 | 3) => Scoring::Softmax,
        Some(2) => Scoring::Sigmoid,
        Some(other) => {
            let reason =
                format!("is {other}; 1 (softmax), 2 (sigmoid) and 3 (softmax of the chosen) are supported");
            return Err(keys.refuse("expert_gating_func", reason));
        }
    };
    let groups = match keys.u64("expert_group_count")?.filter(|count| *count > 1) {
        Some(count) => {
            let chosen = keys.require_u64("expert_group_used_count")?;
            Some(ExpertGroups { count, chosen, by_two: family != "deepseek_v2" })
        }
        None => None,
    };
    Ok(Some(ExpertsSpec {
        count,
        per_token: keys.require_u64("expert_used_count")?,
        intermediate_size,
        shared,
        zero_computation: None,
        router: RouterSpec {
            scoring,
            normalise: of_chosen || keys.bool("expert_weights_norm")?.unwrap_or(normalises(family)),
            // Files without a factor have 0.
            scale: keys.f64("expert_weights_scale")?.filter(|scale| *scale != 0.0).unwrap_or(1.0),
            groups,
            correction: shape(&format!("blk.{first}.exp_probs_b.bias")).is_some(),
            bias: shape(&format!("blk.{first}.ffn_gate_inp.bias")).is_some(),
            balance_loss: 0.0,
        },
        layers,
        stacked_files: family == "gpt_oss",
    }))
}

/// Keys and values of a model's experts, without the architecture's prefix.
pub(super) fn describe(spec: &ModelSpec) -> Vec<(&'static str, GgufValue)> {
    let Some(experts) = &spec.experts else { return Vec::new() };
    let ExpertsSpec { count, per_token, intermediate_size, shared, router, layers, .. } = experts;
    let number = |value: u64| GgufValue::U32(value.min(u64::from(u32::MAX)) as u32);
    let mut entries = vec![
        ("expert_count", number(*count)),
        ("expert_used_count", number(*per_token)),
        ("expert_feed_forward_length", number(*intermediate_size)),
    ];
    if let Some(shared) = shared {
        entries.push(("expert_shared_feed_forward_length", number(shared.intermediate_size)));
    }
    if says_routing(&spec.architecture) {
        let beside = shared.map_or(0, |shared| shared.intermediate_size / (*intermediate_size).max(1));
        let dense = layers.iter().take_while(|sparse| !**sparse).count() as u64;
        let function = match router.scoring {
            Scoring::Softmax => 1,
            Scoring::Sigmoid => 2,
        };
        entries.extend([
            ("expert_shared_count", number(beside)),
            ("leading_dense_block_count", number(dense)),
            ("expert_gating_func", number(function)),
            ("expert_weights_scale", GgufValue::F32(router.scale as f32)),
            ("expert_weights_norm", GgufValue::Bool(router.normalise)),
        ]);
    }
    if let Some(groups) = router.groups {
        entries.push(("expert_group_count", number(groups.count)));
        entries.push(("expert_group_used_count", number(groups.chosen)));
    }
    entries
}

/// What a family's files have no words for, if the experts have such a trait.
pub(super) fn unsaid(spec: &ModelSpec) -> Option<String> {
    let experts = spec.experts.as_ref()?;
    let (family, router) = (spec.architecture.as_str(), &experts.router);
    if !has_experts(family) {
        return Some(format!("experts of a {family:?} model have no words there"));
    }
    let sparse = |layers: &[bool]| layers.iter().all(|sparse| *sparse);
    let dense = experts.layers.iter().take_while(|sparse| !**sparse).count();
    if !says_routing(family) {
        if !sparse(&experts.layers) {
            return Some("layers without experts have no words there".to_owned());
        }
        if router.normalise != normalises(family) || router.scoring != scoring(family) || router.scale != 1.0
        {
            return Some("its router weighs experts in another way than its family's files".to_owned());
        }
        if router.bias != (family == "gpt_oss") {
            return Some("its router's bias is not its family's".to_owned());
        }
        let shared = experts.shared.is_some_and(|shared| shared.gated);
        if shared != (family == "qwen2_moe") {
            return Some("its shared expert is not its family's".to_owned());
        }
        return None;
    }
    if !sparse(&experts.layers[dense..]) {
        return Some(
            "layers without experts behind the first one that has some have no words there".to_owned(),
        );
    }
    if matches!(family, "deepseek" | "deepseek_v2") && router.normalise {
        return Some("its router weighs experts in another way than its family's files".to_owned());
    }
    None
}
