//! The experts of a model from scratch, in the words of its family's `config.json`.

use plimsoll_model::SpecError;
use serde_json::{Value, json};

use crate::OriginError;
use crate::config::{Architecture, FromScratchConfig};

/// The usual factor on the load-balancing loss (Fedus et al. 2021).
const BALANCE_LOSS: f64 = 0.01;

/// The factor on the load-balancing loss. Routers of GLM and DeepSeek are balanced by their correction instead.
pub(super) fn balance_loss(sizes: &FromScratchConfig) -> f64 {
    let corrected = matches!(sizes.architecture(), Architecture::Glm4Moe | Architecture::DeepseekV3);
    let usual = if corrected { 0.0 } else { BALANCE_LOSS };
    sizes.router_aux_loss_coef.unwrap_or(usual)
}

/// Keys of the family's configuration; none for a family without experts.
pub(super) fn keys(
    sizes: &FromScratchConfig,
    intermediate_size: u64,
    layers: u64,
) -> Result<Vec<(&'static str, Value)>, OriginError> {
    use Architecture::{DeepseekV3, Glm4Moe, Mixtral, Moe, Olmoe, Qwen2Moe, Qwen3Moe};
    let (family, name) = (sizes.architecture(), sizes.architecture().name());
    let wrong = |key, reason: String| Err(SpecError { key, reason }.into());
    let without = [
        ("zero_experts", sizes.zero_experts),
        ("copy_experts", sizes.copy_experts),
        ("constant_experts", sizes.constant_experts),
    ];
    if family != Moe {
        let own = without.map(|(key, count)| (key, count.is_some()));
        let residuals = ("gating_residuals", sizes.gating_residuals.is_some());
        let given = own.into_iter().chain([residuals, ("tau", sizes.tau.is_some())]);
        if let Some((key, _)) = given.into_iter().find(|(_, given)| *given) {
            return wrong(key, format!("{name} has none; moe has: set architecture"));
        }
    }
    if !family.has_experts() {
        let given = [
            ("num_experts", sizes.num_experts.is_some()),
            ("num_experts_per_token", sizes.num_experts_per_token.is_some()),
            ("expert_intermediate_size", sizes.expert_intermediate_size.is_some()),
            ("shared_experts", sizes.shared_experts.is_some()),
            ("dense_layers", sizes.dense_layers.is_some()),
            ("norm_topk_prob", sizes.norm_topk_prob.is_some()),
            ("router_aux_loss_coef", sizes.router_aux_loss_coef.is_some()),
        ];
        return match given.into_iter().find(|(_, given)| *given) {
            None => Ok(Vec::new()),
            Some((key, _)) => {
                let have = Architecture::ALL.iter().filter(|one| one.has_experts());
                let have: Vec<&str> = have.map(|one| one.name()).collect();
                wrong(key, format!("{name} has no experts; {} have: set architecture", have.join(", ")))
            }
        };
    }
    let Some(count) = sizes.num_experts else {
        return Err(OriginError::MissingSize { key: "num_experts" });
    };
    let width = sizes.expert_intermediate_size.unwrap_or(intermediate_size);
    if matches!(family, Mixtral | Olmoe) && width != intermediate_size {
        let reason = format!(
            "is {width}; in {name} it is intermediate_size, {intermediate_size}, for no block is dense"
        );
        return wrong("expert_intermediate_size", reason);
    }
    let usual_shared = u64::from(matches!(family, Qwen2Moe | Glm4Moe | DeepseekV3));
    let shared = sizes.shared_experts.unwrap_or(usual_shared);
    if usual_shared == 0 && shared > 0 && family != Moe {
        return wrong(
            "shared_experts",
            format!("{name} has none; qwen2_moe, glm4_moe, deepseek_v3 and moe have"),
        );
    }
    if family == Mixtral && sizes.norm_topk_prob == Some(false) {
        return wrong("norm_topk_prob", "in mixtral weights are always divided by their sum".to_owned());
    }
    let normalise =
        sizes.norm_topk_prob.unwrap_or(matches!(family, Mixtral | Qwen3Moe | Glm4Moe | DeepseekV3));
    let dense = sizes.dense_layers();
    if dense > 0 && matches!(family, Mixtral | Olmoe) {
        return wrong("dense_layers", format!("in {name} every block has experts"));
    }
    if dense >= layers {
        return wrong("dense_layers", format!("{dense} of {layers} blocks leave none with experts"));
    }
    let mut keys = vec![
        ("num_experts_per_tok", json!(sizes.num_experts_per_token())),
        ("norm_topk_prob", json!(normalise)),
    ];
    match family {
        Mixtral => keys.push(("num_local_experts", json!(count))),
        Glm4Moe | DeepseekV3 => keys.extend([
            ("n_group", json!(1)),
            ("topk_group", json!(1)),
            ("routed_scaling_factor", json!(1.0)),
            ("n_routed_experts", json!(count)),
            ("n_shared_experts", json!(shared)),
            ("moe_intermediate_size", json!(width)),
            ("first_k_dense_replace", json!(dense)),
        ]),
        _ => keys.extend([
            ("num_experts", json!(count)),
            ("moe_intermediate_size", json!(width)),
            ("shared_expert_intermediate_size", json!(shared.saturating_mul(width))),
            ("mlp_only_layers", json!((0..dense).collect::<Vec<u64>>())),
        ]),
    }
    if family == Moe {
        let has_any = without.into_iter().any(|(_, count)| count.unwrap_or(0) > 0);
        keys.extend([
            ("num_zero_experts", json!(sizes.zero_experts())),
            ("num_copy_experts", json!(sizes.copy_experts())),
            ("num_constant_experts", json!(sizes.constant_experts())),
            ("gating_residuals", json!(sizes.gating_residuals.unwrap_or(has_any))),
            ("moe_tau", json!(sizes.tau())),
        ]);
    }
    Ok(keys)
}
