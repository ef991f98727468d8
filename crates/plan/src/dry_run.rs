//! Runs the step program dry: the exact memory of a job and its arithmetic, in milliseconds.

use plimsoll_device::{DType, Device, Dry, IGNORED_TARGET, Tally};
use plimsoll_memory::{AtPeak, Ledger, TagBytes};
use plimsoll_model::{ModelSpec, Parameter};
use plimsoll_parallel::Solo;
use plimsoll_step::{
    DecodeSettings, Decoder, Evaluator, MicroBatch, Precision, StepError, StepSettings, Trainer,
};

/// What a dry run found out.
#[derive(Clone, Debug)]
pub struct DryRun {
    /// The device arena's ledger after the job: peak, breakdown, every event.
    pub ledger: Ledger,
    /// Arithmetic of one step, evaluation pass or generated token.
    pub tally: Tally,
}

impl DryRun {
    /// One optimizer step of `accumulation` micro-batches.
    pub fn training(
        spec: &ModelSpec,
        settings: &StepSettings,
        accumulation: u64,
    ) -> Result<DryRun, StepError> {
        let dry = Dry::new();
        let mut trainer = Trainer::new(&dry, spec.clone(), settings.clone(), &Solo)?;
        let n = (settings.batch_size * settings.sequence_length) as usize;
        let (tokens, targets) = (vec![0; n], vec![IGNORED_TARGET; n]);
        let micro_batch = MicroBatch { tokens: &tokens, targets: &targets };
        dry.take_tally();
        // The second micro-batch adds to the gradients where the first one wrote them; all later ones are like it.
        trainer.accumulate(&[micro_batch])?;
        let first = dry.take_tally();
        let mut step = first;
        if accumulation > 1 {
            trainer.accumulate(&[micro_batch, micro_batch])?;
            let later = dry.take_tally().less(first);
            (1..accumulation).for_each(|_| step = step.plus(later));
        }
        // What some optimizers do at the first step and seldom again counts for memory, but not for time.
        trainer.step(&[micro_batch], 0.0)?;
        dry.take_tally();
        trainer.step(&[micro_batch], 0.0)?;
        let step = step.plus(dry.take_tally().less(first));
        Ok(DryRun { ledger: dry.arena().ledger(), tally: step })
    }

    /// One evaluation pass over `batch_size` sequences of `length` tokens, with a type for each weight.
    pub fn evaluation(
        spec: &ModelSpec,
        precision: Precision,
        weight_types: &dyn Fn(&Parameter) -> DType,
        batch_size: u64,
        length: u64,
        loss_chunk_tokens: u64,
    ) -> Result<DryRun, StepError> {
        let dry = Dry::new();
        let mut evaluator = Evaluator::with_weight_types(
            &dry,
            spec.clone(),
            precision,
            weight_types,
            length,
            loss_chunk_tokens,
        )?;
        let n = (batch_size * length) as usize;
        let (tokens, targets) = (vec![0; n], vec![IGNORED_TARGET; n]);
        dry.take_tally();
        evaluator.losses(batch_size, &MicroBatch { tokens: &tokens, targets: &targets })?;
        Ok(DryRun { ledger: dry.arena().ledger(), tally: dry.tally() })
    }

    /// A prompt of `prompt_tokens` and a token after it, with a type for each weight; the tally is that of the token.
    pub fn generation(
        spec: &ModelSpec,
        settings: DecodeSettings,
        weight_types: &dyn Fn(&Parameter) -> DType,
        prompt_tokens: u64,
    ) -> Result<DryRun, StepError> {
        let dry = Dry::new();
        let mut decoder = Decoder::with_weight_types(&dry, spec.clone(), settings, weight_types)?;
        let prompt = prompt_tokens.clamp(1, settings.context.max(1));
        decoder.append(&vec![0; prompt as usize])?;
        let mut tally = dry.take_tally();
        if prompt < settings.context {
            decoder.append(&[0])?;
            tally = dry.take_tally();
        }
        Ok(DryRun { ledger: dry.arena().ledger(), tally })
    }

    /// Bytes of arena that the job needs.
    pub fn peak_bytes(&self) -> u64 {
        self.ledger.at_peak().peak
    }

    /// What was live at the peak.
    pub fn at_peak(&self) -> &AtPeak {
        self.ledger.at_peak()
    }

    /// Live bytes by tag at the peak.
    pub fn tags_at_peak(&self) -> TagBytes {
        self.at_peak().by_tag
    }
}
