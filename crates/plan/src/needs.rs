//! What a model needs at a glance: a dry run of each thing that is commonly done with it.

use plimsoll_device::DType;
use plimsoll_device::cpu::at_once;
use plimsoll_memory::Tier;
use plimsoll_model::{ModelSpec, Parameter};
use plimsoll_step::{Checkpointing, DecodeSettings, Precision, StepError, TrainingMethod, WeightStorage};
use serde::Serialize;

use crate::config::{Method, RawConfig};
use crate::dry_run::{DryRun, tokens_that_tell};
use crate::method::{Layouts, method_among};
use crate::resolve::step_settings;
use crate::runs::threads;

/// Tokens of a sequence, or of a context, unless the model is made for fewer.
const TOKENS: u64 = 2048;

/// Tokens of a prompt that are taken in one pass.
const PROMPT_CHUNK_TOKENS: u64 = 512;

/// The memory of one use of a model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Need {
    /// What is done.
    pub what: &'static str,
    /// In which settings.
    pub settings: String,
    /// Tokens of a sequence or of the context.
    pub tokens: u64,
    /// High-water mark of the device arena.
    pub peak_bytes: u64,
    /// Bytes of it that hold weights.
    pub weight_bytes: u64,
}

/// What each use needs. `weight_types` are those of inference.
///
/// # Errors
/// The model cannot be run: its sizes overflow or contradict each other.
pub fn needs(
    spec: &ModelSpec,
    weight_types: &(dyn Fn(&Parameter) -> DType + Sync),
) -> Result<Vec<Need>, StepError> {
    let bf16 =
        Precision { weights: DType::Bf16, activations: DType::Bf16, master_weights: true, ..Precision::F32 };
    let tokens = TOKENS.min(spec.max_position_embeddings).max(2);
    let mut config = RawConfig::default();
    config.data.sequence_length = Some(tokens);
    let full = |precision, checkpointing| {
        let method = &TrainingMethod::Full;
        DryRun::training(spec, &step_settings(&config, spec, method, precision, checkpointing, 1), 1)
    };
    let layouts = Layouts::default();
    let adapters = |method| {
        let mut config = config.clone();
        config.training.method = Some(method);
        let method = method_among(&layouts, &config, spec, None)?;
        let precision = Precision { master_weights: false, ..bf16 };
        let settings = step_settings(&config, spec, &method, precision, Checkpointing::Full, 1);
        DryRun::training(spec, &settings, 1)
    };
    let inference = |cache| {
        let precision = Precision::F32;
        let settings = DecodeSettings {
            precision,
            cache,
            cache_tier: Tier::Device,
            context: tokens,
            prompt_chunk_tokens: PROMPT_CHUNK_TOKENS,
            sequences: 1,
            pages: None,
            drafted_tokens: 0,
        };
        let prompt = tokens_that_tell(tokens - 1, PROMPT_CHUNK_TOKENS);
        DryRun::generation(spec, settings, WeightStorage::new(weight_types), prompt)
    };
    type Run<'a> = &'a (dyn Fn() -> Result<DryRun, StepError> + Sync);
    let list: [(&str, &str, Run<'_>); 6] = [
        ("full fine-tune", "f32", &|| full(Precision::F32, Checkpointing::None)),
        ("full fine-tune", "bf16, f32 master weights, checkpointing", &|| full(bf16, Checkpointing::Full)),
        ("LoRA", "bf16, rank 16, all linears, checkpointing", &|| adapters(Method::Lora)),
        ("QLoRA", "4-bit NF4, rank 16, all linears, checkpointing", &|| adapters(Method::Qlora)),
        ("inference", "weights as stored, f32 cache", &|| inference(DType::F32)),
        ("inference", "weights as stored, bf16 cache", &|| inference(DType::Bf16)),
    ];
    let needs = at_once(&list, threads(), |(what, settings, run)| {
        let dry_run = run()?;
        Ok(Need {
            what,
            settings: (*settings).to_owned(),
            tokens,
            peak_bytes: dry_run.peak_bytes(),
            weight_bytes: dry_run.tags_at_peak().get(plimsoll_memory::Tag::Weights),
        })
    });
    needs.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_model::catalogue;

    #[test]
    fn narrower_settings_need_less() {
        let spec = catalogue::find("smollm2-135m").unwrap();
        let needs = needs(&spec, &|_| DType::Bf16).unwrap();
        let peaks: Vec<u64> = needs.iter().map(|need| need.peak_bytes).collect();
        let (training, inference) = peaks.split_at(4);
        assert!(training.is_sorted_by(|a, b| a > b) && inference.is_sorted_by(|a, b| a > b), "{peaks:?}");
        assert!(needs.iter().all(|need| need.tokens == 2048 && need.weight_bytes > 0));
    }
}
