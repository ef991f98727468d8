//! A model that is to answer: its files, what it is planned to need, and a session with its weights.

use plimsoll_device::{Cpu, DType, Device, Dry};
use plimsoll_generate::Session;
use plimsoll_memory::ByteSize;
use plimsoll_model::tokenizer::Tokenizer;
use plimsoll_model::{ModelFiles, ModelSpec, Parameter};
use plimsoll_plan::DryRun;
use plimsoll_step::{DecodeSettings, Decoder, Precision};
use plimsoll_train::TrainError;

use crate::args::InferenceArgs;
use crate::failure::Failure;
use crate::session::{Engine, cache_type, inference_precision, model_with_weights, resident_bytes};

/// Tokens of a prompt that are taken in one pass.
const PROMPT_CHUNK_TOKENS: u64 = 512;

/// A model's files and how it is to be computed.
pub struct Inference {
    files: Box<ModelFiles>,
    pub tokenizer: Tokenizer,
    precision: Precision,
    cache: DType,
    memory: Option<ByteSize>,
    threads: Option<usize>,
    /// What `--context` says.
    asked_context: Option<usize>,
}

impl Inference {
    /// Reads everything but the weights. `purpose` says what they are for.
    pub fn open(args: &InferenceArgs, purpose: &'static str) -> Result<Inference, Failure> {
        let precision = inference_precision(&args.dtype)?;
        let cache = cache_type(args.kv_cache.as_deref())?.unwrap_or(precision.activations);
        let files = model_with_weights(&args.model, purpose)?;
        let tokenizer = files.tokenizer()?;
        let inference = Inference {
            files,
            tokenizer,
            precision,
            cache,
            memory: args.memory,
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
        self.files.spec()
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

    /// Whether there is nothing that a position beyond the trained context could be.
    pub fn has_learned_positions(&self) -> bool {
        self.spec().attention.rope.is_none()
    }

    /// The machine, its threads started and measured.
    pub fn start(&self) -> Result<Engine, Failure> {
        Engine::start(self.threads)
    }

    /// What a session of `context` tokens needs for prompts of up to `longest`, found by taking the passes of such a
    /// prompt, and a token after it, on a device without memory. Shorter passes need less.
    pub fn plan(&self, context: usize, longest: usize) -> Result<DryRun, Failure> {
        let dry = Dry::new();
        let mut session = Session::new(self.decoder(&dry, context)?, &self.settings(context));
        session.prefill(&vec![0; longest], &|| false)?;
        let mut tally = dry.take_tally();
        if longest < context {
            session.append(&[0])?;
            tally = dry.take_tally();
        }
        Ok(DryRun { ledger: dry.arena().ledger(), tally })
    }

    /// A device with the memory that was planned, if that is allowed.
    pub fn device(&self, engine: &Engine, plan: &DryRun) -> Result<Cpu, Failure> {
        engine.device(plan, self.memory)
    }

    /// Memory that the plan may take, beside what the process has already.
    pub fn room(&self, engine: &Engine) -> u64 {
        self.memory.unwrap_or_else(|| engine.memory_limit()).0.saturating_sub(resident_bytes())
    }

    /// A session with the model's weights.
    pub fn session<'d>(&self, device: &'d Cpu, context: usize) -> Result<Session<'d, Cpu>, Failure> {
        let mut decoder = self.decoder(device, context)?;
        decoder.load::<TrainError>(|p, dtype, out| Ok(self.files.weights().read_into(p, dtype, out)?))?;
        Ok(Session::new(decoder, &self.settings(context)))
    }

    fn decoder<'d, D: Device>(&self, device: &'d D, context: usize) -> Result<Decoder<'d, D>, Failure> {
        let weight_types = |p: &Parameter| self.files.weights().inference_dtype(p, self.precision.weights);
        let settings = self.settings(context);
        Ok(Decoder::with_weight_types(device, self.spec().clone(), settings, &weight_types)?)
    }

    fn settings(&self, context: usize) -> DecodeSettings {
        DecodeSettings {
            precision: self.precision,
            cache: self.cache,
            context: context as u64,
            prompt_chunk_tokens: PROMPT_CHUNK_TOKENS,
        }
    }
}
