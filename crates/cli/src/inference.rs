//! A model that is to answer: its files, what it is planned to need, and a session with its weights.

use std::ops::RangeInclusive;

use plimsoll_device::{DType, Device, DeviceTraits};
use plimsoll_generate::Session;
use plimsoll_memory::{ByteSize, release_free_heap};
use plimsoll_model::tokenizer::Tokenizer;
use plimsoll_model::{ModelSpec, Parameter};
use plimsoll_parallel::{Collectives, Communicator};
use plimsoll_plan::{
    Apart, GenerationPlan, GenerationPlanError, GenerationRequest, LoadLine, streaming_overhead_bytes,
};
use plimsoll_step::{DecodeSettings, Decoder};

use crate::args::{DiskArgs, InferenceArgs};
use crate::card::{self, DeviceChoice};
use crate::failure::Failure;
use crate::load_line::{PlannedProcess, PlanningRoom, beside_the_model, load_line};
use crate::ranks::everybody;
use crate::session::{Engine, cache_type};
use crate::streaming::{self, Streaming};
use crate::weights::Weights;

/// Types of a cache, from the widest to the narrowest.
const CACHES: [DType; 5] = [DType::F32, DType::F16, DType::Bf16, DType::Q8_0, DType::Q4_1];

/// A model's files and how it is to be computed.
pub struct Inference<'a> {
    weights: Weights,
    disk: &'a DiskArgs,
    pub tokenizer: Tokenizer,
    /// What `--kv-cache` says.
    cache: Option<DType>,
    /// What the process may take, or has of a card.
    stated: Option<ByteSize>,
    device: DeviceChoice,
    threads: Option<usize>,
    /// What `--context` says.
    asked_context: Option<usize>,
}

impl<'a> Inference<'a> {
    /// Reads everything but the weights. `purpose` says what they are for; a model of the hub is
    /// fetched without a word where `quiet`.
    pub fn open(
        args: &'a InferenceArgs,
        purpose: &'static str,
        quiet: bool,
    ) -> Result<Inference<'a>, Failure> {
        let cache = cache_type(args.kv_cache.as_deref())?;
        let weights = Weights::open(&args.weights, purpose, quiet)?;
        let tokenizer = weights.files.tokenizer()?;
        let inference = Inference {
            disk: &args.disk,
            weights,
            tokenizer,
            cache,
            stated: args.memory,
            device: args.device,
            threads: args.threads,
            asked_context: args.context,
        };
        match args.context {
            Some(0) => Err(Failure::usage("--context must be at least 1")),
            Some(asked) if inference.has_learned_positions() && asked > inference.trained_context() => {
                Err(Failure::usage(format!(
                    "--context {asked}: {} has learned {} positions and none beyond",
                    inference.spec().name,
                    inference.trained_context()
                )))
            }
            _ => Ok(inference),
        }
    }

    pub fn spec(&self) -> &ModelSpec {
        self.weights.spec()
    }

    /// Takes this rank's part of the layers.
    pub fn divide(&mut self, ranks: &dyn Communicator) -> Result<(), Failure> {
        self.weights.divide(ranks)
    }

    /// All tokens that end a sequence, as the model's and its tokenizer's files have them.
    pub fn end_tokens(&self) -> Vec<u32> {
        [&self.spec().eos_tokens, self.tokenizer.eos_tokens()].concat()
    }

    /// What `--context` says, if it was given.
    pub fn asked_context(&self) -> Option<usize> {
        self.asked_context
    }

    /// The longest sequence that the model was made for.
    pub fn trained_context(&self) -> usize {
        usize::try_from(self.spec().max_position_embeddings).unwrap_or(usize::MAX)
    }

    /// Whether positions are learned, so that there is none beyond the trained context.
    pub fn has_learned_positions(&self) -> bool {
        self.spec().attention.rope.is_none()
    }

    /// The machine, its threads started and measured.
    pub fn start(&self, ranks: &dyn Communicator) -> Result<Engine, Failure> {
        Ok(Engine::start(self.threads)?.with_card(card::open(self.device, ranks)?))
    }

    /// What the process may take; of a card, where one computes.
    fn line(&self, engine: &Engine) -> LoadLine {
        engine.card.as_ref().map_or_else(|| load_line(self.stated), |card| card::line(card, self.stated))
    }

    /// What is taken of that beside the arena.
    fn overhead_bytes(&self, engine: &Engine) -> Result<u64, Failure> {
        engine.card.as_ref().map_or_else(|| Ok(engine.overhead_bytes()), |card| card::overhead_bytes(card))
    }

    /// What a session needs for a context in the range, and for prompts of up to `longest` tokens where that is known:
    /// the largest context that fits. Shorter passes need less. Weights are left on disk where no context of `enough` fits
    /// beside them. And what the process takes with it.
    fn plan(
        &self,
        engine: &Engine,
        context: RangeInclusive<usize>,
        longest: Option<usize>,
        enough: usize,
    ) -> Result<(GenerationPlan, PlannedProcess), Failure> {
        self.plan_with(engine, context, longest, enough, None)
    }

    /// The same on every rank: all have the least context that any has, and passes of as many tokens.
    pub fn plan_together(
        &self,
        ranks: &dyn Communicator,
        engine: &Engine,
        context: RangeInclusive<usize>,
        longest: Option<usize>,
        enough: usize,
    ) -> Result<(GenerationPlan, PlannedProcess), Failure> {
        let mut planned = self.plan(engine, context, longest, enough)?;
        loop {
            let DecodeSettings { context, prompt_chunk_tokens, cache, .. } = planned.0.settings;
            let place = CACHES.iter().position(|known| *known == cache).unwrap_or(0);
            let own = [context as f64, prompt_chunk_tokens as f64, -(place as f64)];
            let all = ranks.gather_numbers(&own).map_err(|error| Failure::other(error.to_string()))?;
            if all.iter().all(|other| other[..] == own) {
                return Ok(planned);
            }
            let least =
                |nth: usize| all.iter().filter_map(|of| of.get(nth).copied()).fold(f64::MAX, f64::min);
            let (context, tokens) = (least(0) as usize, least(1) as u64);
            let cache = CACHES.get(-least(2) as usize).copied().unwrap_or(cache);
            planned = self.plan_with(engine, context..=context, longest, context, Some((tokens, cache)))?;
        }
    }

    fn plan_with(
        &self,
        engine: &Engine,
        context: RangeInclusive<usize>,
        longest: Option<usize>,
        enough: usize,
        decided: Option<(u64, DType)>,
    ) -> Result<(GenerationPlan, PlannedProcess), Failure> {
        let line = self.line(engine);
        let mut room = PlanningRoom::below(line);
        let apart = engine.card.as_ref().map(|_| Apart {
            device: DeviceTraits::CUDA,
            host_room: card::host_room(engine.overhead_bytes()),
        });
        loop {
            // What the tokenizer's building and planning left over is no part of what generation needs.
            release_free_heap();
            let types = |p: &Parameter| self.weights.weight_type(p);
            let request = GenerationRequest {
                spec: self.weights.own_spec(),
                precision: self.weights.precision,
                storage: self.weights.storage(&types, None),
                prompt_tokens: longest.map(|n| n as u64),
                context: *context.start() as u64..=*context.end() as u64,
                cache: decided.map_or(self.cache, |(_, cache)| Some(cache)),
                room: room.bytes(self.overhead_bytes(engine)?),
                in_files: self.weights.can_stream().then_some(self.weights.in_files()),
                enough_context: enough as u64,
                pass_tokens: decided.map(|(tokens, _)| tokens),
                sequences: 1,
                apart,
                // Whether the disk has room is asked where its file is opened.
                disk_room: u64::MAX,
            };
            let plan = GenerationPlan::resolve(&request).map_err(|error| match error {
                GenerationPlanError::DoesNotFit(_) => Failure::does_not_fit(format!(
                    "{error}. Beside that it takes {}",
                    beside_the_model(line, self.overhead_bytes(engine).unwrap_or(0))
                )),
                GenerationPlanError::Step(error) => error.into(),
            })?;
            release_free_heap();
            let streams = if apart.is_some() { 0 } else { self.stream_bytes(&plan) };
            let beside = self.overhead_bytes(engine)?.saturating_add(streams);
            if let Some(planned) = room.settle(plan.dry_run.peak_bytes(), beside)? {
                return Ok((plan, planned));
            }
        }
    }

    /// What streaming takes beside the arena, where the plan has it.
    fn stream_bytes(&self, plan: &GenerationPlan) -> u64 {
        let types = |p: &Parameter| self.weights.weight_type(p);
        let storage = self.weights.storage(&types, None);
        plan.residency.map_or(0, |_| streaming_overhead_bytes(self.weights.own_spec(), storage))
    }

    /// A device with the memory that was planned.
    pub fn device(&self, engine: &Engine, plan: &GenerationPlan) -> Result<Box<dyn Device>, Failure> {
        engine.device(&plan.dry_run, self.line(engine))
    }

    /// A session with the weights of this rank's layers, and what is streamed of them.
    pub fn session_of<'d>(
        &self,
        ranks: &'d dyn Communicator,
        device: &'d dyn Device,
        plan: &GenerationPlan,
    ) -> Result<(Session<'d>, Option<Streaming>), Failure> {
        let layers = self.weights.own_spec().num_layers;
        let (tiers, streaming) =
            streaming::open(device, &plan.dry_run, plan.residency, self.disk, (layers, ranks.rank() > 0))?;
        let types = |p: &Parameter| self.weights.weight_type(p);
        let storage = self.weights.storage(&types, plan.residency);
        let mut decoder =
            Decoder::new(device, &tiers, self.weights.own_spec().clone(), plan.settings, storage)?;
        streaming::report_buffered(&tiers);
        decoder.load(|p, rows, dtype, out| self.weights.read_rows_into(p, rows, dtype, out))?;
        if !ranks.is_alone() {
            decoder.join(everybody(ranks)?);
        }
        Ok((Session::new(decoder, &plan.settings), streaming))
    }
}
