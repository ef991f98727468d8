//! Prompts and tokens run dry.

use std::sync::Arc;

use plimsoll_device::{Clock, Device, DeviceTraits, Dry, Transferred};
use plimsoll_disk::LowerTiers;
use plimsoll_model::ModelSpec;
use plimsoll_step::{DecodeSettings, Decoder, StepError, WeightStorage};

use super::{DryRun, nothing};
use crate::{PassFootprint, Rates};

impl DryRun {
    /// A prompt of `prompt_tokens` in each sequence and a token after it in all of them, with weights as `storage` says; the tally
    /// is that of the token.
    pub fn generation(
        spec: &ModelSpec,
        settings: DecodeSettings,
        storage: WeightStorage<'_>,
        prompt_tokens: u64,
    ) -> Result<DryRun, StepError> {
        DryRun::generation_for(DeviceTraits::CPU, spec, settings, storage, prompt_tokens)
    }

    /// The same on a device of these traits.
    pub fn generation_for(
        device: DeviceTraits,
        spec: &ModelSpec,
        settings: DecodeSettings,
        storage: WeightStorage<'_>,
        prompt_tokens: u64,
    ) -> Result<DryRun, StepError> {
        let dry = Dry::new().standing_for(device);
        let tiers = Arc::new(LowerTiers::dry());
        let mut decoder = dry_decoder(&dry, &tiers, spec, settings, storage)?;
        let prompt = prompt_tokens.clamp(1, settings.context.max(1));
        append_prompts(&mut decoder, settings, prompt, prompt)?;
        let (mut tally, mut moved) = (dry.take_tally(), dry.moved());
        if prompt < settings.context {
            append_tokens(&mut decoder, settings)?;
            (tally, moved) = (dry.take_tally(), dry.moved().less(moved));
        }
        Ok(DryRun::of(&dry, &tiers, tally, moved))
    }

    /// The peak of [`generation_for`](Self::generation_for) and what a token brings, in a time that does not grow with the prompt:
    /// passes of one length take the same memory.
    pub fn generation_footprint(
        device: DeviceTraits,
        spec: &ModelSpec,
        settings: DecodeSettings,
        storage: WeightStorage<'_>,
        prompt_tokens: u64,
    ) -> Result<PassFootprint, StepError> {
        let dry = Dry::new().standing_for(device);
        let tiers = Arc::new(LowerTiers::dry());
        let mut decoder = dry_decoder(&dry, &tiers, spec, settings, storage)?;
        let prompt = prompt_tokens.clamp(1, settings.context.max(1));
        let passes = tokens_that_tell(prompt, settings.prompt_chunk_tokens);
        append_prompts(&mut decoder, settings, passes, passes)?;
        let mut before = Transferred::default();
        if prompt < settings.context {
            before = dry.moved();
            append_tokens(&mut decoder, settings)?;
        }
        let Transferred { read, copied_in, .. } = dry.moved().less(before);
        Ok(PassFootprint {
            peak_bytes: dry.arena().high_water(),
            read_bytes: read.max(copied_in),
            host_bytes: tiers.host().high_water(),
            disk_bytes: tiers.disk().high_water(),
        })
    }

    /// What a prompt of so many tokens takes that finds an empty cache, and what a token of all sequences takes after prompts of so many,
    /// on a machine of these rates; the peaks are those of a device that does nothing else.
    pub fn timed_generation(
        rates: &Rates,
        spec: &ModelSpec,
        settings: DecodeSettings,
        storage: WeightStorage<'_>,
        prompt_tokens: u64,
    ) -> Result<[DryRun; 2], StepError> {
        let prompt = prompt_tokens.clamp(1, settings.context.max(1));
        let timed = |run: &dyn Fn(&mut Decoder<'_>) -> Result<(), StepError>, warm: bool| {
            let dry = Dry::new().standing_for(rates.wiring.device).timed(Clock::new(*rates));
            let tiers = Arc::new(LowerTiers::dry());
            let mut decoder = dry_decoder(&dry, &tiers, spec, settings, storage)?;
            let times = || dry.clock().map(Clock::times).unwrap_or_default();
            if warm {
                // A pass begins to bring what the next one begins with.
                run(&mut decoder)?;
            }
            let (before, moved) = (times(), dry.moved());
            dry.take_tally();
            run(&mut decoder)?;
            let times = times().since(before);
            let (tally, moved) = (dry.take_tally(), dry.moved().less(moved));
            Ok::<_, StepError>(DryRun { times: Some(times), ..DryRun::of(&dry, &tiers, tally, moved) })
        };
        let run_prompt = |decoder: &mut Decoder<'_>| append_prompts(decoder, settings, prompt, 0);
        let run_token = |decoder: &mut Decoder<'_>| {
            let before = prompt.min(settings.context.saturating_sub(1));
            (0..sequences(settings)).try_for_each(|sequence| decoder.suppose(sequence, before))?;
            append_tokens(decoder, settings)
        };
        Ok([timed(&run_prompt, false)?, timed(&run_token, true)?])
    }
}

/// A decoder that computes nothing.
pub(super) fn dry_decoder<'d>(
    dry: &'d Dry,
    tiers: &Arc<LowerTiers>,
    spec: &ModelSpec,
    settings: DecodeSettings,
    storage: WeightStorage<'_>,
) -> Result<Decoder<'d>, StepError> {
    let mut decoder = Decoder::new(dry, tiers, spec.clone(), settings, storage)?;
    decoder.load(nothing)?;
    Ok(decoder)
}

fn sequences(settings: DecodeSettings) -> u32 {
    u32::try_from(settings.sequences.max(1)).unwrap_or(u32::MAX)
}

/// Tokens of a prompt that take as much memory as all of it, in passes of `chunk`: those of a whole pass and of what is left after the
/// last whole one. Passes of one length take the same, and logits come after the last pass alone.
pub(crate) fn tokens_that_tell(prompt: u64, chunk: u64) -> u64 {
    let chunk = chunk.max(1);
    if prompt > chunk { chunk + prompt % chunk } else { prompt }
}

/// A prompt in the first sequence; the others have so many tokens by then, from passes that take the same, or as many as the pages
/// allow that all share.
fn append_prompts(
    decoder: &mut Decoder<'_>,
    settings: DecodeSettings,
    prompt: u64,
    others: u64,
) -> Result<(), StepError> {
    decoder.append(&vec![0; prompt as usize])?;
    for sequence in 1..sequences(settings) {
        let later = (sequence + 1..sequences(settings)).map(|later| (later, 1));
        let fits = |tokens: u64| {
            let all: Vec<(u32, u64)> = later.clone().chain([(sequence, tokens + 1), (0, 1)]).collect();
            decoder.has_pages_for(&all)
        };
        let own = if fits(others) { others } else { 0 };
        decoder.suppose(sequence, own)?;
    }
    Ok(())
}

/// A token in every sequence, with as many behind it as are verified at once.
fn append_tokens(decoder: &mut Decoder<'_>, settings: DecodeSettings) -> Result<(), StepError> {
    let tokens = vec![0; settings.drafted_tokens.saturating_add(1).min(settings.context) as usize];
    let most = settings.context.saturating_sub(tokens.len() as u64);
    for sequence in (0..sequences(settings)).filter(|_| settings.drafted_tokens > 0) {
        decoder.suppose(sequence, decoder.len_of(sequence).min(most))?;
    }
    let runs: Vec<(u32, &[u32])> =
        (0..sequences(settings)).map(|sequence| (sequence, tokens.as_slice())).collect();
    decoder.decode(&runs).map(drop)
}
