//! Rotary embedding in `config.json`: `rope_theta` with `rope_scaling`, or both in `rope_parameters`.
//!
//! Kinds and defaults are those of transformers' `modeling_rope_utils`.

use serde_json::{Map, Value, json};

use super::ConfigError;
use super::keys::Keys;
use crate::spec::{ModelSpec, RopeScaling, RopeSpec};

const DEFAULT_THETA: f64 = 10_000.0;

/// Of Gemma 3's layers without a window, and of Mixtral.
const LARGE_THETA: f64 = 1_000_000.0;

const GPT_OSS_THETA: f64 = 150_000.0;

/// The factors of a Llama 3.1 or 3.2 model: (low, high, original context).
const LLAMA3: (f64, f64, f64) = (1.0, 4.0, 8192.0);

/// The rotation of all layers, and of Gemma 3 that of layers with a window, whose base is in `rope_local_base_freq`, or in an
/// object for either kind of layer in `rope_parameters`.
pub(super) fn read(
    config: &Keys,
    family: &str,
    head_dim: u64,
    max_positions: u64,
) -> Result<(RopeSpec, Option<RopeSpec>), ConfigError> {
    let parameters = parameters(config)?;
    let (global, sliding) = match &parameters {
        Some(both) => (both.object("full_attention")?, both.object("sliding_attention")?),
        None => (None, None),
    };
    let usual = Usual {
        theta: match family {
            "gemma3_text" | "mixtral" => LARGE_THETA,
            "gpt_oss" => GPT_OSS_THETA,
            _ => DEFAULT_THETA,
        },
        partial: usual_partial(family),
    };
    let global = global.or(parameters);
    let is_silent = global.is_none();
    let mut global = read_one(config, global.as_ref(), "rope_theta", usual, head_dim, max_positions)?;
    if family == "gpt_oss" && is_silent {
        global.scaling = RopeScaling::Yarn {
            factor: 32.0,
            attention_factor: yarn_scale(32.0, 1.0),
            beta_fast: 32.0,
            beta_slow: 1.0,
            original_max_position_embeddings: 4096.0,
            truncate: false,
        };
    }
    if family != "gemma3_text" {
        return Ok((global, None));
    }
    let (key, usual) = ("rope_local_base_freq", Usual { theta: DEFAULT_THETA, ..usual });
    let local = read_one(config, sliding.as_ref(), key, usual, head_dim, max_positions)?;
    Ok((global, Some(local)))
}

/// The object of the rotation, in whichever of both keys it is.
fn parameters(config: &Keys) -> Result<Option<Keys>, ConfigError> {
    match config.object("rope_parameters")? {
        Some(parameters) => Ok(Some(parameters)),
        None => config.object("rope_scaling"),
    }
}

/// The kind of scaling; new files without one mean the plain one.
fn kind(rope: &Keys) -> Result<&str, ConfigError> {
    match rope.str("rope_type")? {
        Some(kind) => Ok(kind),
        // The key of files before 2024.
        None => Ok(rope.str("type")?.unwrap_or("default")),
    }
}

/// What a family's configuration means where it says nothing.
#[derive(Clone, Copy)]
struct Usual {
    theta: f64,
    /// The part of a head that is rotated.
    partial: f64,
}

/// The part of a head that a family rotates where its configuration does not say it.
pub(super) fn usual_partial(family: &str) -> f64 {
    if family == "glm4_moe" { 0.5 } else { 1.0 }
}

/// A rotation by its object, if there is one, and the key of its base outside.
fn read_one(
    config: &Keys,
    parameters: Option<&Keys>,
    theta_key: &str,
    usual: Usual,
    head_dim: u64,
    max_positions: u64,
) -> Result<RopeSpec, ConfigError> {
    let nested_theta = match parameters {
        Some(parameters) => parameters.f64("rope_theta")?,
        None => None,
    };
    let theta = match nested_theta {
        Some(theta) => theta,
        None => config.f64(theta_key)?.unwrap_or(usual.theta),
    };
    let mut partial = usual.partial;
    for keys in [Some(config), parameters].into_iter().flatten() {
        partial = keys.f64("partial_rotary_factor")?.unwrap_or(partial);
    }
    let dims = (head_dim as f64 * partial) as u64;
    let scaling = match parameters {
        Some(parameters) => read_scaling(config, parameters, max_positions as f64)?,
        None => RopeScaling::None,
    };
    Ok(RopeSpec { dims, theta, scaling })
}

fn read_scaling(config: &Keys, rope: &Keys, max_positions: f64) -> Result<RopeScaling, ConfigError> {
    let kind = kind(rope)?;
    let original = match rope.f64("original_max_position_embeddings")? {
        Some(original) => Some(original),
        None => config.f64("original_max_position_embeddings")?,
    };
    match kind {
        "default" => Ok(RopeScaling::None),
        "linear" => Ok(RopeScaling::Linear { factor: rope.require_f64("factor")? }),
        "dynamic" => Ok(RopeScaling::Dynamic {
            factor: rope.require_f64("factor")?,
            max_position_embeddings: original.unwrap_or(max_positions),
        }),
        "llama3" => Ok(RopeScaling::Llama3 {
            factor: rope.require_f64("factor")?,
            low_freq_factor: rope.require_f64("low_freq_factor")?,
            high_freq_factor: rope.require_f64("high_freq_factor")?,
            original_max_position_embeddings: rope.require("original_max_position_embeddings", original)?,
        }),
        "yarn" => read_yarn(rope, original.unwrap_or(max_positions)),
        "longrope" | "su" => {
            let original = original.unwrap_or(max_positions);
            let factor = match rope.f64("factor")? {
                Some(factor) => factor,
                None => max_positions / original,
            };
            let stretched = if factor <= 1.0 { 1.0 } else { (1.0 + factor.ln() / original.ln()).sqrt() };
            Ok(RopeScaling::LongRope {
                short_factor: rope.require("short_factor", rope.f64s("short_factor")?)?,
                long_factor: rope.require("long_factor", rope.f64s("long_factor")?)?,
                attention_factor: rope.f64("attention_factor")?.unwrap_or(stretched),
                original_max_position_embeddings: original,
            })
        }
        other => {
            let reason = format!(
                "{other:?} is not supported; supported: default, linear, dynamic, llama3, yarn, longrope"
            );
            Err(rope.refuse("rope_type", reason))
        }
    }
}

fn read_yarn(rope: &Keys, original: f64) -> Result<RopeScaling, ConfigError> {
    let factor = rope.require_f64("factor")?;
    let scale = |weight: f64| yarn_scale(factor, weight);
    let attention_factor =
        match (rope.f64("attention_factor")?, rope.f64("mscale")?, rope.f64("mscale_all_dim")?) {
            (Some(given), _, _) => given,
            (None, Some(mscale), Some(all)) if mscale != 0.0 && all != 0.0 => scale(mscale) / scale(all),
            _ => scale(1.0),
        };
    Ok(RopeScaling::Yarn {
        factor,
        attention_factor,
        beta_fast: rope.f64("beta_fast")?.unwrap_or(32.0),
        beta_slow: rope.f64("beta_slow")?.unwrap_or(1.0),
        original_max_position_embeddings: original,
        truncate: rope.bool("truncate")?.unwrap_or(true),
    })
}

/// The factor on the scores of latent attention with heads of a width, where it is not the usual one: YaRN's `mscale_all_dim` makes it
/// larger.
pub(super) fn latent_scale(config: &Keys, head_dim: u64) -> Result<Option<f64>, ConfigError> {
    let Some(rope) = parameters(config)? else { return Ok(None) };
    let numbers = (rope.f64("mscale_all_dim")?, rope.f64("factor")?);
    let ("yarn", (Some(weight), Some(factor))) = (kind(&rope)?, numbers) else { return Ok(None) };
    if weight < 0.0 {
        return Err(rope.refuse("mscale_all_dim", format!("is {weight}; it is 0 or more")));
    }
    Ok((weight > 0.0 && factor > 1.0).then(|| latent_scale_of(head_dim, factor, weight)))
}

/// The same by the factor of YaRN and `mscale_all_dim`.
pub(crate) fn latent_scale_of(head_dim: u64, factor: f64, weight: f64) -> f64 {
    (head_dim as f64).powf(-0.5) * yarn_scale(factor, weight).powi(2)
}

/// The weights `mscale` and `mscale_all_dim` of a YaRN rotation in latent attention.
pub(crate) fn latent_yarn_weights(
    spec: &ModelSpec,
    factor: f64,
    attention_factor: f64,
) -> Option<(f64, f64)> {
    spec.attention.latent?;
    let head_dim = spec.attention.head_dim;
    // To the digits that somebody may have written.
    let weight_of = |scale: f64| ((scale - 1.0) / (0.1 * factor.ln()) * 1e9).round() / 1e9;
    let all = weight_of((spec.attention.scale? * (head_dim as f64).sqrt()).sqrt());
    Some((weight_of(attention_factor * yarn_scale(factor, all)), all))
}

/// The factor of YaRN on cos and sin, with this weight (`mscale`), usually 1.
pub(crate) fn yarn_scale(factor: f64, weight: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * weight * factor.ln() + 1.0 }
}

/// The `rope_scaling` object, or null.
pub(super) fn write_scaling(spec: &ModelSpec, rope: &RopeSpec) -> Value {
    match &rope.scaling {
        // Where it says nothing, it means YaRN.
        RopeScaling::None if spec.architecture == "gpt_oss" => json!({ "rope_type": "default" }),
        RopeScaling::None => Value::Null,
        RopeScaling::Linear { factor } => json!({ "rope_type": "linear", "factor": factor }),
        RopeScaling::Dynamic { factor, max_position_embeddings } => {
            let mut object = Map::new();
            object.insert("rope_type".into(), "dynamic".into());
            object.insert("factor".into(), json!(factor));
            if *max_position_embeddings != spec.max_position_embeddings as f64 {
                object.insert("original_max_position_embeddings".into(), whole(*max_position_embeddings));
            }
            Value::Object(object)
        }
        RopeScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_max_position_embeddings,
        } => json!({
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low_freq_factor,
            "high_freq_factor": high_freq_factor,
            "original_max_position_embeddings": whole(*original_max_position_embeddings),
        }),
        RopeScaling::Yarn {
            factor,
            attention_factor,
            beta_fast,
            beta_slow,
            original_max_position_embeddings,
            truncate,
        } => {
            let mut yarn = json!({
                "rope_type": "yarn",
                "factor": factor,
                "attention_factor": attention_factor,
                "beta_fast": beta_fast,
                "beta_slow": beta_slow,
                "original_max_position_embeddings": whole(*original_max_position_embeddings),
                "truncate": truncate,
            });
            if let Some((mscale, all)) = latent_yarn_weights(spec, *factor, *attention_factor) {
                yarn["mscale"] = json!(mscale);
                yarn["mscale_all_dim"] = json!(all);
            }
            yarn
        }
        RopeScaling::LongRope {
            short_factor,
            long_factor,
            attention_factor,
            original_max_position_embeddings,
        } => json!({
            "rope_type": "longrope",
            "short_factor": short_factor,
            "long_factor": long_factor,
            "factor": spec.max_position_embeddings as f64 / original_max_position_embeddings,
            "attention_factor": attention_factor,
            "original_max_position_embeddings": whole(*original_max_position_embeddings),
        }),
        RopeScaling::PerFrequency { factors } => per_frequency(spec, rope, factors),
    }
}

/// Factors by frequency are Llama 3's where they follow its rule; any others are LongRoPE with the same factors
/// for short and long contexts and attention left alone.
fn per_frequency(spec: &ModelSpec, rope: &RopeSpec, factors: &[f64]) -> Value {
    let (low, high, original) = LLAMA3;
    let factor = factors.iter().copied().fold(1.0, f64::max).round();
    let theta = rope.theta;
    let rule = |i: usize| {
        let wavelength = std::f64::consts::TAU * theta.powf(2.0 * i as f64 / rope.dims as f64);
        let smooth = ((original / wavelength - low) / (high - low)).clamp(0.0, 1.0);
        1.0 / ((1.0 - smooth) / factor + smooth)
    };
    let follows = |(i, given): (usize, &f64)| (given / rule(i) - 1.0).abs() < 1e-4;
    if factor > 1.0 && factors.iter().enumerate().all(follows) {
        return json!({
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": whole(original),
        });
    }
    json!({
        "rope_type": "longrope",
        "short_factor": factors,
        "long_factor": factors,
        "factor": 1.0,
        "attention_factor": 1.0,
        "original_max_position_embeddings": spec.max_position_embeddings,
    })
}

/// Lengths are written as whole numbers, which is what readers expect.
fn whole(value: f64) -> Value {
    if value.fract() == 0.0 && (0.0..1e15).contains(&value) { json!(value as u64) } else { json!(value) }
}
