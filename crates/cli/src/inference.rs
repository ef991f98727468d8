//! A model that is to answer: its files, what it is planned to need, and a session with its weights.

use std::ops::RangeInclusive;

use plimsoll_device::{DType, Device, FEW_ROWS};
use plimsoll_generate::{Batch, Session};
use plimsoll_memory::{ByteSize, release_free_heap};
use plimsoll_model::tokenizer::Tokenizer;
use plimsoll_model::{ModelSpec, Parameter};
use plimsoll_parallel::{Collectives, Communicator};
use plimsoll_plan::{
    CACHES, GenerationPlan, GenerationPlanError, GenerationRequest, streaming_overhead_bytes,
};
use plimsoll_step::{DecodeSettings, Decoder};

use crate::args::{DiskArgs, InferenceArgs};
use crate::card::DeviceArgs;
use crate::failure::Failure;
use crate::load_line::{PlannedProcess, PlanningRoom, beside_the_model};
use crate::ranks::everybody;
use crate::session::{Engine, cache_type};
use crate::streaming::{self, Streaming};
use crate::weights::Weights;

/// A model's files and how it is to be computed.
pub struct Inference<'a> {
    weights: Weights,
    disk: &'a DiskArgs,
    pub tokenizer: Tokenizer,
    /// What `--kv-cache` says.
    cache: Option<DType>,
    /// What the process may take, or has of a card.
    stated: Option<ByteSize>,
    device: DeviceArgs,
    threads: Option<usize>,
    /// What `--context` says.
    asked_context: Option<usize>,
    /// Tokens of a guess.
    drafted_tokens: u64,
    /// Sequences at once at most, and whether somebody asked for so many.
    parallel: Option<(u64, bool)>,
    /// Bytes that another model takes.
    others_bytes: u64,
}

/// What ranks have to agree on.
#[derive(Clone, Copy)]
struct Decided {
    pass_tokens: u64,
    cache: DType,
    sequences: u64,
    pages: u64,
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
            drafted_tokens: 0,
            parallel: None,
            others_bytes: 0,
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

    /// From here on guesses of so many tokens are verified.
    pub fn verify(&mut self, drafted_tokens: u64) {
        self.drafted_tokens = drafted_tokens;
    }

    /// From here on several sequences are planned, up to `most`, which somebody `asked` for or not.
    pub fn answer_at_once(&mut self, most: u64, asked: bool) {
        self.parallel = Some((most, asked));
    }

    /// From here on another model has so many bytes of the memory.
    pub fn make_room(&mut self, bytes: u64) {
        self.others_bytes = bytes;
    }

    /// The machine, its threads started and measured.
    pub fn start(&self, ranks: &dyn Communicator) -> Result<Engine, Failure> {
        Engine::of_rank(ranks, self.threads, self.device)
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
            let DecodeSettings { context, prompt_chunk_tokens, cache, sequences, pages, .. } =
                planned.0.settings;
            let place = CACHES.iter().position(|known| *known == cache).unwrap_or(0);
            let pages = pages.unwrap_or(0) as f64;
            let own = [context as f64, prompt_chunk_tokens as f64, -(place as f64), sequences as f64, pages];
            let all = ranks.gather_numbers(&own)?;
            if all.iter().all(|other| other[..] == own) {
                return Ok(planned);
            }
            let least =
                |nth: usize| all.iter().filter_map(|of| of.get(nth).copied()).fold(f64::MAX, f64::min);
            let context = least(0) as usize;
            let cache = CACHES.get(-least(2) as usize).copied().unwrap_or(cache);
            let [pass_tokens, sequences, pages] = [1, 3, 4].map(|nth| least(nth) as u64);
            let decided = Some(Decided { pass_tokens, cache, sequences, pages });
            planned = self.plan_with(engine, context..=context, longest, context, decided)?;
        }
    }

    fn plan_with(
        &self,
        engine: &Engine,
        context: RangeInclusive<usize>,
        longest: Option<usize>,
        enough: usize,
        decided: Option<Decided>,
    ) -> Result<(GenerationPlan, PlannedProcess), Failure> {
        let line = engine.line(self.stated);
        let mut room = PlanningRoom::below(line);
        let apart = engine.apart();
        loop {
            // What the tokenizer's building and planning left over is no part of what generation needs.
            release_free_heap();
            let types = |p: &Parameter| self.weights.weight_type(p);
            let request = GenerationRequest {
                prompt_tokens: longest.map(|n| n as u64),
                cache: decided.map_or(self.cache, |decided| Some(decided.cache)),
                room: room.bytes(engine.overhead_of_what_computes()?.saturating_add(self.others_bytes)),
                enough_context: enough as u64,
                pass_tokens: decided.map(|decided| decided.pass_tokens),
                apart,
                ..self.request(&types, &context)
            };
            let plan = GenerationPlan::resolve(&request).map_err(|error| match error {
                GenerationPlanError::DoesNotFit(error) => {
                    let overhead = engine.overhead_of_what_computes().unwrap_or(0);
                    let beside = beside_the_model(line, overhead);
                    Failure::does_not_fit(match error.hopeless() {
                        // What is over the line already comes on top of what is missing for the model.
                        Some(reason) => {
                            let others = self.others_bytes.saturating_add(self.logits_bytes(1));
                            let line = room.enough(error.needed.saturating_add(others), overhead);
                            format!(
                                "{reason}. Beside that it takes {beside}; {line}, or take a model of a smaller type or size"
                            )
                        }
                        None => format!("{error}. Beside that it takes {beside}"),
                    })
                }
                GenerationPlanError::Step(error) => error.into(),
            })?;
            let plan = match self.parallel {
                None => plan,
                Some((most, asked)) => {
                    let most = decided.map_or(most, |decided| decided.sequences);
                    let pages = decided.map(|decided| decided.pages);
                    let room = request.room.saturating_sub(self.logits_bytes(most));
                    plan.with_sequences(&GenerationRequest { room, ..request }, most, asked, pages)?
                }
            };
            release_free_heap();
            let streams = if apart.is_some() { 0 } else { self.stream_bytes(&plan) };
            let others = self.others_bytes.saturating_add(self.logits_bytes(plan.settings.sequences));
            let models = plan.dry_run.peak_bytes().saturating_add(streams).saturating_add(others);
            if let Some(planned) = room.settle(models, engine.overhead_of_what_computes()?)? {
                return Ok((plan, planned));
            }
        }
    }

    /// What is asked of a plan, with prompts as long as the context and no room at all.
    fn request<'r>(
        &'r self,
        types: &'r dyn Fn(&Parameter) -> DType,
        context: &RangeInclusive<usize>,
    ) -> GenerationRequest<'r> {
        GenerationRequest {
            spec: self.weights.own_spec(),
            precision: self.weights.precision,
            storage: self.weights.storage(types, None),
            prompt_tokens: None,
            context: *context.start() as u64..=*context.end() as u64,
            cache: self.cache,
            room: 0,
            in_files: self.weights.can_stream().then_some(self.weights.in_files()),
            enough_context: *context.end() as u64,
            pass_tokens: None,
            sequences: 1,
            drafted_tokens: self.drafted_tokens,
            apart: None,
            // Whether the disk has room is asked where its file is opened.
            disk_room: u64::MAX,
        }
    }

    /// What the logits of a pass take beside the arena, where it has those of several tokens.
    fn logits_bytes(&self, sequences: u64) -> u64 {
        match sequences.saturating_mul(self.drafted_tokens + 1).min(FEW_ROWS as u64) {
            0..=1 => 0,
            // As they are read, and a row at a time.
            rows => rows.saturating_mul(2 * size_of::<f32>() as u64).saturating_mul(self.spec().vocab_size),
        }
    }

    /// What this model takes that guesses for another: all of its weights are in memory.
    ///
    /// # Errors
    /// There is not as much.
    pub fn plan_in_memory(
        &self,
        engine: &Engine,
        context: usize,
    ) -> Result<GenerationPlan, GenerationPlanError> {
        let types = |p: &Parameter| self.weights.weight_type(p);
        // A card that does not say what is taken has no room.
        let overhead = engine.overhead_of_what_computes().unwrap_or(u64::MAX);
        GenerationPlan::resolve(&GenerationRequest {
            room: engine.line(self.stated).bytes.saturating_sub(overhead),
            in_files: None,
            apart: engine.apart(),
            ..self.request(&types, &(context..=context))
        })
    }

    /// What is enough for this model beside one that guesses for it and needs so many bytes, which there are not.
    pub fn no_room_with(&self, engine: &Engine, guesses: u64, context: usize) -> Failure {
        let types = |p: &Parameter| self.weights.weight_type(p);
        let request =
            GenerationRequest { apart: engine.apart(), ..self.request(&types, &(context..=context)) };
        let own = match GenerationPlan::resolve(&request) {
            Err(GenerationPlanError::DoesNotFit(error)) => error.needed,
            Err(GenerationPlanError::Step(error)) => return error.into(),
            Ok(plan) => plan.dry_run.peak_bytes(),
        };
        let overhead = engine.overhead_of_what_computes().unwrap_or_else(|_| engine.overhead_bytes());
        let line = engine.line(self.stated);
        let own = own.saturating_add(self.logits_bytes(1));
        let both = own.saturating_add(guesses);
        Failure::does_not_fit(format!(
            "the models need {}: {} for the one that guesses, whose weights are all in memory, and {} at least for the one that answers. \
             Beside that it takes {}; {}",
            ByteSize(both),
            ByteSize(guesses),
            ByteSize(own),
            beside_the_model(line, overhead),
            PlanningRoom::below(line).enough(both, overhead)
        ))
    }

    /// What streaming takes beside the arena, where the plan has it.
    fn stream_bytes(&self, plan: &GenerationPlan) -> u64 {
        let types = |p: &Parameter| self.weights.weight_type(p);
        let storage = self.weights.storage(&types, None);
        plan.residency.map_or(0, |_| streaming_overhead_bytes(self.weights.own_spec(), storage))
    }

    /// A device with the memory that was planned.
    pub fn device(&self, engine: &Engine, plan: &GenerationPlan) -> Result<Box<dyn Device>, Failure> {
        engine.device(&plan.dry_run, engine.line(self.stated))
    }

    /// A session with the weights of this rank's layers, and what is streamed of them.
    pub fn session_of<'d>(
        &self,
        ranks: &'d dyn Communicator,
        device: &'d dyn Device,
        plan: &GenerationPlan,
    ) -> Result<(Session<'d>, Option<Streaming>), Failure> {
        let (decoder, streaming) = self.decoder_of(ranks, device, plan)?;
        Ok((Session::new(decoder, &plan.settings), streaming))
    }

    /// The same for many prompts.
    pub fn batch_of<'d>(
        &self,
        ranks: &'d dyn Communicator,
        device: &'d dyn Device,
        plan: &GenerationPlan,
    ) -> Result<(Batch<'d>, Option<Streaming>), Failure> {
        let (decoder, streaming) = self.decoder_of(ranks, device, plan)?;
        Ok((Batch::new(decoder, &plan.settings, self.spec().vocab_size), streaming))
    }

    fn decoder_of<'d>(
        &self,
        ranks: &'d dyn Communicator,
        device: &'d dyn Device,
        plan: &GenerationPlan,
    ) -> Result<(Decoder<'d>, Option<Streaming>), Failure> {
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
        Ok((decoder, streaming))
    }
}
