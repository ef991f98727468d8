//! Mixtures of experts in `config.json`: the keys of each family and what they mean where they are absent, both ways.

use std::collections::HashSet;

use serde_json::{Map, Value, json};

use super::keys::Keys;
use super::{ConfigError, OWN_MIXTURE, latent};
use crate::shown::Shown;
use crate::spec::{
    ExpertGroups, ExpertsSpec, ModelSpec, RouterSpec, Scoring, SharedExpert, ZeroComputationSpec,
};

/// The experts of a family that has any.
pub(super) fn read(config: &Keys, family: &str, num_layers: u32) -> Result<Option<ExpertsSpec>, ConfigError> {
    let number = |key: &str, usual: u64| Ok(config.u64(key)?.unwrap_or(usual));
    let layers: Vec<bool> = match family {
        "mixtral" | "olmoe" | "gpt_oss" => vec![true; num_layers as usize],
        "qwen2_moe" | "qwen3_moe" | OWN_MIXTURE => {
            let step = number("decoder_sparse_step", 1)?;
            let dense: HashSet<u64> = config.numbers("mlp_only_layers")?.into_iter().flatten().collect();
            let sparse = |layer: u64| (layer + 1).checked_rem(step) == Some(0) && !dense.contains(&layer);
            (0..u64::from(num_layers)).map(sparse).collect()
        }
        "glm4_moe_lite" if config.strings(LAYER_TYPES)?.is_some() => layer_types(config, num_layers)?,
        "glm4_moe" | "glm4_moe_lite" | "deepseek" | "deepseek_v2" | "deepseek_v3" => {
            let usual = match family {
                "glm4_moe" | "glm4_moe_lite" => 1,
                "deepseek_v3" => 3,
                _ => 0,
            };
            let first = number("first_k_dense_replace", usual)?;
            let step = if family == "glm4_moe" { 1 } else { number("moe_layer_freq", 1)? };
            if latent::has(family) && step != 1 {
                return Err(config.refuse("moe_layer_freq", format!("is {step}; 1 is supported")));
            }
            let sparse = |layer: u64| layer >= first && layer.checked_rem(step) == Some(0);
            (0..u64::from(num_layers)).map(sparse).collect()
        }
        _ => return Ok(None),
    };
    // transformers reads either name for each family.
    let count = |key: &str, other: &str, usual: u64| match config.u64(key)? {
        Some(count) => Ok(count),
        None => number(other, usual),
    };
    let shared = |width: u64, gated| (width > 0).then_some(SharedExpert { intermediate_size: width, gated });
    let inner = |usual| number("moe_intermediate_size", usual);
    let (count, per_token, intermediate_size, shared) = match family {
        "mixtral" => {
            (count("num_local_experts", "num_experts", 8)?, 2, config.require_u64("intermediate_size")?, None)
        }
        "gpt_oss" => (
            count("num_local_experts", "num_experts", 128)?,
            4,
            config.require_u64("intermediate_size")?,
            None,
        ),
        "olmoe" => (
            count("num_experts", "num_local_experts", 64)?,
            8,
            config.require_u64("intermediate_size")?,
            None,
        ),
        "qwen2_moe" => {
            let width = number("shared_expert_intermediate_size", 5632)?;
            (count("num_experts", "num_local_experts", 60)?, 4, inner(1408)?, shared(width, true))
        }
        "qwen3_moe" => (count("num_experts", "num_local_experts", 128)?, 8, inner(768)?, None),
        OWN_MIXTURE => {
            let width = number("shared_expert_intermediate_size", 0)?;
            let own = config.require_u64("moe_intermediate_size")?;
            (config.require_u64("num_experts")?, 2, own, shared(width, false))
        }
        "deepseek_v2" | "deepseek_v3" | "glm4_moe_lite" => {
            let (usual, beside, width, per_token) = match family {
                "deepseek_v2" => (64, 2, config.require_u64("moe_intermediate_size")?, 6),
                "glm4_moe_lite" => (64, 1, inner(1536)?, 4),
                _ => (256, 1, inner(2048)?, 8),
            };
            let beside = number("n_shared_experts", beside)?.saturating_mul(width);
            (count("n_routed_experts", "num_local_experts", usual)?, per_token, width, shared(beside, false))
        }
        _ => {
            let (glm, width) = (family == "glm4_moe", inner(1408)?);
            let beside = number("n_shared_experts", u64::from(glm))?.saturating_mul(width);
            let count = match glm {
                true => count("n_routed_experts", "num_local_experts", 128)?,
                false => config.require_u64("n_routed_experts")?,
            };
            (count, 8, width, shared(beside, false))
        }
    };
    let per_token = number("num_experts_per_tok", per_token)?;
    let router = router(config, family)?;
    Ok(Some(ExpertsSpec {
        count,
        per_token,
        intermediate_size,
        shared,
        zero_computation: if family == OWN_MIXTURE { zero_computation(config)? } else { None },
        router,
        layers,
        stacked_files: family == "gpt_oss",
    }))
}

/// tau of the authors' models.
const USUAL_TAU: f64 = 0.75;

/// Experts without matrices, where there are any, or what routers have for them.
fn zero_computation(config: &Keys) -> Result<Option<ZeroComputationSpec>, ConfigError> {
    let number = |key| Ok::<_, ConfigError>(config.u64(key)?.unwrap_or(0));
    let own = ZeroComputationSpec {
        zero: number("num_zero_experts")?,
        copy: number("num_copy_experts")?,
        constant: number("num_constant_experts")?,
        gating_residuals: config.bool("gating_residuals")?.unwrap_or(false),
        tau: config.f64("moe_tau")?.unwrap_or(USUAL_TAU),
    };
    let is_any = own.gating_residuals || [own.zero, own.copy, own.constant].iter().any(|count| *count > 0);
    Ok(is_any.then_some(own))
}

fn router(config: &Keys, family: &str) -> Result<RouterSpec, ConfigError> {
    let corrected = is_corrected(family);
    let known: &[(&str, &[&str])] = match family {
        "deepseek" => &[("scoring_func", &["softmax"])],
        "deepseek_v2" => &[("scoring_func", &["softmax"]), ("topk_method", &[GREEDY, GROUP_LIMITED])],
        "deepseek_v3" | "glm4_moe_lite" => &[("scoring_func", &["sigmoid"]), ("topk_method", &[CORRECTED])],
        _ => &[],
    };
    for (key, names) in known {
        if let Some(other) = config.str(key)?.filter(|name| !names.contains(name)) {
            let reason = format!("is {other:?}; {} is supported", names.join(" or "));
            return Err(config.refuse(key, reason));
        }
    }
    if family == "deepseek_v2" && config.bool("norm_topk_prob")? == Some(true) {
        let reason = "is true, which is computed in more than one way and not supported".to_owned();
        return Err(config.refuse("norm_topk_prob", reason));
    }
    let (usual_groups, usual_chosen, usual_scale) = match family {
        "deepseek_v3" => (8, 4, 2.5),
        "glm4_moe_lite" => (1, 1, 1.8),
        _ => (1, 1, 1.0),
    };
    let has_groups = match family {
        "deepseek_v2" => config.str("topk_method")? == Some(GROUP_LIMITED),
        _ => corrected,
    };
    let count = config.u64("n_group")?.unwrap_or(usual_groups);
    let groups = match has_groups && count > 1 {
        true => Some(ExpertGroups {
            count,
            chosen: config.u64("topk_group")?.unwrap_or(usual_chosen),
            by_two: corrected,
        }),
        false => None,
    };
    let scale = match family {
        "glm4_moe" | "glm4_moe_lite" | "deepseek_v2" | "deepseek_v3" => {
            config.f64("routed_scaling_factor")?.unwrap_or(usual_scale)
        }
        _ => 1.0,
    };
    // transformers adds the loss where the router's logits are asked for.
    let usual_loss = if family == "olmoe" { 0.01 } else { 0.001 };
    let balance_loss = match config.bool("output_router_logits")? {
        Some(true) if has_balance_loss(family) => config.f64("router_aux_loss_coef")?.unwrap_or(usual_loss),
        _ => 0.0,
    };
    Ok(RouterSpec {
        scoring: if corrected { Scoring::Sigmoid } else { Scoring::Softmax },
        // gpt-oss takes the softmax of the chosen logits, which is that of all, normalised.
        normalise: matches!(family, "mixtral" | "gpt_oss")
            || config.bool("norm_topk_prob")?.unwrap_or(corrected),
        scale,
        groups,
        correction: corrected,
        bias: family == "gpt_oss",
        balance_loss,
    })
}

/// Ways of DeepSeek to choose experts: the best of all, the best of the best groups, and those with corrected scores.
const GREEDY: &str = "greedy";
const GROUP_LIMITED: &str = "group_limited_greedy";
const CORRECTED: &str = "noaux_tc";

/// Whether routers of a family correct their scores, which are sigmoids.
pub(crate) fn is_corrected(family: &str) -> bool {
    matches!(family, "glm4_moe" | "glm4_moe_lite" | "deepseek_v3")
}

fn has_balance_loss(family: &str) -> bool {
    !matches!(family, "glm4_moe" | "glm4_moe_lite" | "deepseek" | "deepseek_v2" | "deepseek_v3")
}

/// The key of a word for each layer: whether it has experts.
const LAYER_TYPES: &str = "mlp_layer_types";

/// Which layers have experts, by a word for each.
fn layer_types(config: &Keys, num_layers: u32) -> Result<Vec<bool>, ConfigError> {
    let words = config.strings(LAYER_TYPES)?.unwrap_or_default();
    if let Some(other) = words.iter().find(|word| !matches!(**word, "sparse" | "dense")) {
        return Err(config.refuse(LAYER_TYPES, format!("{} is neither sparse nor dense", Shown(other))));
    }
    if words.len() as u64 != u64::from(num_layers) {
        return Err(config.refuse(LAYER_TYPES, format!("has {} words for {num_layers} layers", words.len())));
    }
    Ok(words.iter().map(|word| *word == "sparse").collect())
}

/// Whether two models have the same experts. The balance loss is a matter of training, and files may be in either form.
pub(super) fn same(spec: &ModelSpec, other: &ModelSpec) -> bool {
    let strip = |spec: &ModelSpec| {
        let mut experts = spec.experts.clone();
        if let Some(experts) = &mut experts {
            (experts.router.balance_loss, experts.stacked_files) = (0.0, false);
        }
        experts
    };
    strip(spec) == strip(other)
}

/// A family's keys.
pub(super) fn write(family: &str, experts: &ExpertsSpec) -> Map<String, Value> {
    let ExpertsSpec { count, per_token, intermediate_size: inner, shared, router, layers, .. } = experts;
    let first = layers.iter().take_while(|sparse| !**sparse).count();
    let dense = layers.iter().enumerate().filter(|(_, sparse)| !**sparse).map(|(layer, _)| layer);
    let width = shared.map_or(0, |shared| shared.intermediate_size);
    let mut own = match family {
        "mixtral" | "gpt_oss" => json!({ "num_local_experts": count }),
        "olmoe" => json!({ "num_experts": count, "norm_topk_prob": router.normalise, "clip_qkv": null }),
        "qwen2_moe" | "qwen3_moe" | OWN_MIXTURE => json!({
            "num_experts": count,
            "moe_intermediate_size": inner,
            "norm_topk_prob": router.normalise,
            "decoder_sparse_step": 1,
            "mlp_only_layers": dense.collect::<Vec<_>>(),
        }),
        _ => json!({
            "n_routed_experts": count,
            "moe_intermediate_size": inner,
            "n_shared_experts": width / inner.max(&1),
            "first_k_dense_replace": first,
            "norm_topk_prob": router.normalise,
        }),
    };
    own["num_experts_per_tok"] = json!(per_token);
    match family {
        "qwen2_moe" => own["shared_expert_intermediate_size"] = json!(width),
        OWN_MIXTURE => {
            own["shared_expert_intermediate_size"] = json!(width);
            if let Some(without) = experts.zero_computation {
                own["num_zero_experts"] = json!(without.zero);
                own["num_copy_experts"] = json!(without.copy);
                own["num_constant_experts"] = json!(without.constant);
                own["gating_residuals"] = json!(without.gating_residuals);
                own["moe_tau"] = json!(without.tau);
            }
        }
        "glm4_moe" | "glm4_moe_lite" | "deepseek_v2" | "deepseek_v3" => {
            own["routed_scaling_factor"] = json!(router.scale);
            own["n_group"] = json!(router.groups.map_or(1, |groups| groups.count));
            own["topk_group"] = json!(router.groups.map_or(1, |groups| groups.chosen));
        }
        _ => {}
    }
    if family == "glm4_moe_lite" {
        let word = |sparse: &bool| if *sparse { "sparse" } else { "dense" };
        own[LAYER_TYPES] = json!(layers.iter().map(word).collect::<Vec<_>>());
    }
    if family.starts_with("deepseek") {
        own["moe_layer_freq"] = json!(1);
        own["scoring_func"] = json!(if is_corrected(family) { "sigmoid" } else { "softmax" });
        match family {
            "deepseek_v2" if router.groups.is_some() => own["topk_method"] = json!(GROUP_LIMITED),
            "deepseek_v2" => own["topk_method"] = json!(GREEDY),
            "deepseek_v3" => own["topk_method"] = json!(CORRECTED),
            _ => {}
        }
    }
    if has_balance_loss(family) {
        own["output_router_logits"] = json!(router.balance_loss > 0.0);
        if router.balance_loss > 0.0 {
            own["router_aux_loss_coef"] = json!(router.balance_loss);
        }
    }
    match own {
        Value::Object(keys) => keys,
        _ => Map::new(),
    }
}
