//! What lets a session be planned by its longest prompt alone: a shorter pass never needs more memory.

use std::sync::Arc;

use plimsoll_device::{DType, Device, Dry};
use plimsoll_generate::Session;
use plimsoll_memory::Tier;
use plimsoll_model::catalogue;
use plimsoll_step::{DecodeSettings, Decoder, Precision, WeightStorage};

#[test]
fn a_shorter_pass_never_needs_more_memory() {
    for name in ["smollm2-135m", "qwen2.5-0.5b", "gemma-3-1b", "gpt2"] {
        let spec = catalogue::find(name).unwrap();
        let settings = DecodeSettings {
            cache_tier: Tier::Device,
            precision: Precision::F32,
            cache: DType::F32,
            context: 1024,
            prompt_chunk_tokens: 512,
            sequences: 1,
            pages: None,
            drafted_tokens: 0,
        };
        let peak = |tokens: usize| {
            let dry = Dry::new();
            let decoder = Decoder::new(
                &dry,
                &Arc::default(),
                spec.clone(),
                settings,
                WeightStorage::new(&|_| settings.precision.weights),
            )
            .unwrap();
            Session::new(decoder, &settings).append(&vec![0; tokens]).unwrap();
            dry.arena().ledger().at_peak().peak
        };
        let peaks: Vec<u64> = (1..=512).step_by(7).chain([512]).map(peak).collect();
        assert!(peaks.is_sorted(), "{name}: {peaks:?}");
    }
}
