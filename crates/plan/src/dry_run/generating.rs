//! Prompts and tokens run dry.

use std::ops::Range;
use std::sync::Arc;

use plimsoll_device::{Clock, Device, DeviceTraits, Dry, Tally, Times, Transferred};
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
        let chunk = settings.prompt_chunk_tokens;
        let is_long = prompt.div_ceil(chunk.max(1)) > MOST_PASSES;
        let passes = if is_long { tokens_that_tell(prompt, chunk) } else { prompt };
        append_prompts(&mut decoder, settings, passes, prompt)?;
        decoder.suppose(0, prompt)?;
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
        DryRun::timed_in_passes(rates, spec, settings, storage, prompt_tokens, MOST_PASSES)
    }

    /// The same, with at most so many passes of the prompt run: of more, one in the middle of each of so many parts stands for its part.
    fn timed_in_passes(
        rates: &Rates,
        spec: &ModelSpec,
        settings: DecodeSettings,
        storage: WeightStorage<'_>,
        prompt_tokens: u64,
        most: u64,
    ) -> Result<[DryRun; 2], StepError> {
        let prompt = prompt_tokens.clamp(1, settings.context.max(1));
        let timed = |runs: &[Timed<'_>], warm: bool| {
            let dry = Dry::new().standing_for(rates.wiring.device).timed(Clock::new(*rates));
            let tiers = Arc::new(LowerTiers::dry());
            let mut decoder = dry_decoder(&dry, &tiers, spec, settings, storage)?;
            let now = || dry.clock().map(Clock::times).unwrap_or_default();
            let mut took = |run: &Run<'_>| {
                let (before, moved) = (now(), dry.moved());
                dry.take_tally();
                run(&mut decoder)?;
                Ok::<_, StepError>((now().since(before), dry.take_tally(), dry.moved().less(moved)))
            };
            let (mut times, mut tally, mut moved) = Default::default();
            for Timed { run, without, count } in runs {
                if warm {
                    // A pass begins to bring what the next one begins with.
                    took(run)?;
                }
                let mut own = took(run)?;
                if let Some(without) = without {
                    let less = took(without)?;
                    own = (own.0.since(less.0), own.1.less(less.1), own.2.less(less.2));
                }
                times = Times::plus(times, own.0, *count as f64);
                tally = Tally::plus(tally, own.1.times(*count));
                moved = Transferred::plus(moved, own.2.times(*count));
            }
            Ok::<_, StepError>(DryRun { times: Some(times), ..DryRun::of(&dry, &tiers, tally, moved) })
        };
        // Tokens of the prompt behind others.
        let part = |tokens: Range<u64>| -> Run<'_> {
            let ids = vec![0; tokens.end.min(prompt).saturating_sub(tokens.start) as usize];
            Box::new(move |decoder| {
                decoder.suppose(0, tokens.start)?;
                decoder.append(&ids).map(drop)
            })
        };
        let chunk = settings.prompt_chunk_tokens.max(1);
        let before_last = prompt.div_ceil(chunk) - 1;
        let prompts: Vec<Timed<'_>> = if before_last < most {
            vec![Timed::once(Box::new(|decoder| append_prompts(decoder, settings, prompt, 0)))]
        } else {
            let some = (0..most).map(|nth| {
                let (first, end) = (nth * before_last / most, (nth + 1) * before_last / most);
                let start = first.midpoint(end) * chunk;
                // Logits come behind the last pass alone.
                let run = part(start..start + 2 * chunk);
                let without = Some(part(start + chunk..start + 2 * chunk));
                Timed { run, without, count: end - first }
            });
            some.chain([Timed::once(part(before_last * chunk..prompt))]).collect()
        };
        let token = |decoder: &mut Decoder<'_>| {
            let before = prompt.min(settings.context.saturating_sub(1));
            (0..sequences(settings)).try_for_each(|sequence| decoder.suppose(sequence, before))?;
            append_tokens(decoder, settings)
        };
        Ok([timed(&prompts, false)?, timed(&[Timed::once(Box::new(token))], true)?])
    }
}

/// Something that a decoder does.
type Run<'r> = Box<dyn Fn(&mut Decoder<'_>) -> Result<(), StepError> + 'r>;

/// Something that is timed, less a part of it, and how often it is done.
struct Timed<'r> {
    run: Run<'r>,
    without: Option<Run<'r>>,
    count: u64,
}

impl<'r> Timed<'r> {
    fn once(run: Run<'r>) -> Timed<'r> {
        Timed { run, without: None, count: 1 }
    }
}

/// Passes of a prompt that are all run.
const MOST_PASSES: u64 = 64;

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
        // Each of the others begins with a page of its own, whether it has tokens by now or not.
        let others_too = (1..sequences(settings)).filter(|other| *other != sequence).map(|other| (other, 1));
        let fits = |tokens: u64| {
            let all: Vec<(u32, u64)> = others_too.clone().chain([(sequence, tokens + 1), (0, 1)]).collect();
            decoder.has_pages_for(&all)
        };
        let own = if fits(others) { others } else { 0 };
        decoder.suppose(sequence, own)?;
    }
    Ok(())
}

/// A token in every sequence, with as many behind it as are verified at once, after many that went to any experts alike.
fn append_tokens(decoder: &mut Decoder<'_>, settings: DecodeSettings) -> Result<(), StepError> {
    decoder.suppose_even_use();
    let tokens = vec![0; settings.drafted_tokens.saturating_add(1).min(settings.context) as usize];
    let most = settings.context.saturating_sub(tokens.len() as u64);
    for sequence in (0..sequences(settings)).filter(|_| settings.drafted_tokens > 0) {
        decoder.suppose(sequence, decoder.len_of(sequence).min(most))?;
    }
    let runs: Vec<(u32, &[u32])> =
        (0..sequences(settings)).map(|sequence| (sequence, tokens.as_slice())).collect();
    decoder.decode(&runs).map(drop)
}

#[cfg(test)]
mod tests {
    use plimsoll_device::DType;
    use plimsoll_memory::Tier;
    use plimsoll_model::{Parameter, catalogue};
    use plimsoll_step::Precision;

    use super::*;

    /// One sequence.
    fn settings(context: u64, prompt_chunk_tokens: u64) -> DecodeSettings {
        DecodeSettings {
            precision: Precision::F32,
            cache: DType::F32,
            cache_tier: Tier::Device,
            context,
            prompt_chunk_tokens,
            sequences: 1,
            pages: None,
            drafted_tokens: 0,
        }
    }

    /// However few pages many sequences share, it is known what they take: some wait, and nothing fails.
    #[test]
    fn any_number_of_pages_is_enough_to_plan_with() {
        let spec = ModelSpec { num_layers: 1, ..catalogue::find("smollm2-135m").unwrap() };
        let settings = DecodeSettings { sequences: 16, ..settings(400, 64) };
        let types = |_: &Parameter| DType::F32;
        let mut last = 0;
        for pages in settings.least_pages(&spec)..=settings.most_pages(&spec) {
            let settings = DecodeSettings { pages: Some(pages), ..settings };
            for prompt in [1, 100, 350] {
                let storage = WeightStorage::new(&types);
                let found = DryRun::generation_footprint(DeviceTraits::CPU, &spec, settings, storage, prompt)
                    .unwrap();
                assert!(prompt < 350 || found.peak_bytes > last, "{pages}");
                last = if prompt < 350 { last } else { found.peak_bytes };
            }
        }
    }

    /// A prompt of many passes takes what some of them say.
    #[test]
    fn some_passes_of_a_prompt_stand_for_all() {
        let spec = ModelSpec { num_layers: 2, ..catalogue::find("smollm2-135m").unwrap() };
        let settings = settings(4001, 16);
        let types = |_: &Parameter| DType::F32;
        let rates = Rates::of_cpu([1e11, 2e11], 1e10, 1e9);
        let timed = |most| {
            DryRun::timed_in_passes(&rates, &spec, settings, WeightStorage::new(&types), 4000, most).unwrap()
        };
        let ([all, token], [some, same_token]) = (timed(u64::MAX), timed(20));
        let seconds = |run: &DryRun| run.times.unwrap().elapsed;
        let near = |one: f64, other: f64| (one / other - 1.0).abs() < 5e-3;
        assert!(near(seconds(&some), seconds(&all)), "{} and {}", seconds(&some), seconds(&all));
        assert!(near(some.tally.flops() as f64, all.tally.flops() as f64));
        assert_eq!(some.peak_bytes(), all.peak_bytes());
        assert_eq!((token.times, token.tally), (same_token.times, same_token.tally));
    }
}
