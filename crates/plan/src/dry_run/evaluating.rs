//! Evaluations run dry: passes over whole sequences, and sequences that are read from a cache.

use std::sync::Arc;

use plimsoll_device::{DeviceTraits, Dry, IGNORED_TARGET, Transferred};
use plimsoll_disk::LowerTiers;
use plimsoll_model::ModelSpec;
use plimsoll_parallel::{Communicator, DryRanks};
use plimsoll_step::{
    DecodeSettings, EvaluateSettings, Evaluator, MicroBatch, Precision, Stage, StepError, WeightStorage,
};

use super::DryRun;
use super::generating::dry_decoder;

/// What an evaluation takes at a time, and where.
#[derive(Clone, Copy)]
pub struct EvaluationPass<'a> {
    /// What the device is like.
    pub device: DeviceTraits,
    /// Types of weights and activations.
    pub precision: Precision,
    /// How the weights are held.
    pub storage: WeightStorage<'a>,
    /// Sequences.
    pub batch_size: u64,
    /// Tokens of each.
    pub length: u64,
    /// Tokens whose logits exist at once.
    pub loss_chunk_tokens: u64,
    /// Whether sequences are windows of samples: targets have weights, and samples see nothing of each other.
    pub samples: bool,
}

impl DryRun {
    /// One evaluation pass through the layers that a rank has of the model.
    pub fn evaluation(
        spec: &ModelSpec,
        ranks: DryRanks,
        pass: EvaluationPass<'_>,
    ) -> Result<DryRun, StepError> {
        let EvaluationPass { precision, storage, batch_size, length, loss_chunk_tokens, .. } = pass;
        let (dry, tiers) = (Dry::new().standing_for(pass.device), Arc::new(LowerTiers::dry()));
        let settings = EvaluateSettings { precision, longest: length, loss_chunk_tokens };
        let own = Stage::part(spec, ranks.rank(), ranks.size());
        let mut evaluator = Evaluator::new(&dry, &tiers, own, settings, storage)?;
        evaluator.join(Box::new(ranks), spec);
        let micro_batch = MicroBatch {
            weights: pass.samples.then_some(&[]),
            document_starts: pass.samples.then_some(&[]),
            ..MicroBatch::new(&[], &[])
        };
        let mut before = Transferred::default();
        if storage.offload.is_some() {
            // What a pass reads once the one before it has prefetched its beginning.
            evaluator.losses(batch_size, &micro_batch)?;
            before = dry.moved();
        }
        dry.take_tally();
        evaluator.losses(batch_size, &micro_batch)?;
        Ok(DryRun::of(&dry, &tiers, dry.tally(), dry.moved().less(before)))
    }

    /// The losses of a sequence as long as the context, in chunks that read each other from the cache.
    pub fn cached_evaluation(
        device: DeviceTraits,
        spec: &ModelSpec,
        settings: DecodeSettings,
        storage: WeightStorage<'_>,
        loss_chunk_tokens: u64,
    ) -> Result<DryRun, StepError> {
        let (dry, tiers) = (Dry::new().standing_for(device), Arc::new(LowerTiers::dry()));
        let mut decoder = dry_decoder(&dry, &tiers, spec, settings, storage)?;
        let n = settings.context as usize;
        let (tokens, targets) = (vec![0; n], vec![IGNORED_TARGET; n]);
        dry.take_tally();
        decoder.append_losses(&MicroBatch::new(&tokens, &targets), loss_chunk_tokens)?;
        Ok(DryRun::of(&dry, &tiers, dry.tally(), dry.moved()))
    }
}
