//! A model that is to answer: its files, what it is planned to need, and a session with its weights.

use std::ops::RangeInclusive;

use plimsoll_device::{Cpu, DType};
use plimsoll_generate::Session;
use plimsoll_memory::{ByteSize, release_free_heap};
use plimsoll_model::tokenizer::Tokenizer;
use plimsoll_model::{ModelFiles, ModelSpec, Parameter};
use plimsoll_plan::{GenerationPlan, GenerationRequest};
use plimsoll_step::{Decoder, Precision};
use plimsoll_train::TrainError;

use crate::args::InferenceArgs;
use crate::failure::Failure;
use crate::models;
use crate::session::{Engine, cache_type, inference_precision, quantized_type, resident_bytes, weight_type};

/// A model's files and how it is to be computed.
pub struct Inference {
    files: Box<ModelFiles>,
    pub tokenizer: Tokenizer,
    precision: Precision,
    /// What `--quantize` says.
    quantized: Option<DType>,
    /// What `--kv-cache` says.
    cache: Option<DType>,
    memory: Option<ByteSize>,
    threads: Option<usize>,
    /// What `--context` says.
    asked_context: Option<usize>,
}

impl Inference {
    /// Reads everything but the weights. `purpose` says what they are for; a model of the hub is
    /// fetched without a word where `quiet`.
    pub fn open(args: &InferenceArgs, purpose: &'static str, quiet: bool) -> Result<Inference, Failure> {
        let precision = inference_precision(&args.dtype)?;
        let quantized = quantized_type(args.quantize.as_deref())?;
        let cache = cache_type(args.kv_cache.as_deref())?;
        let files = models::with_weights(&args.model, purpose, quiet)?;
        let tokenizer = files.tokenizer()?;
        let inference = Inference {
            files,
            tokenizer,
            precision,
            quantized,
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

    /// What a session needs for a context in the range, and for prompts of up to `longest` tokens where that is known:
    /// the largest context that fits. Shorter passes need less.
    pub fn plan(
        &self,
        engine: &Engine,
        context: RangeInclusive<usize>,
        longest: Option<usize>,
    ) -> Result<GenerationPlan, Failure> {
        // What the tokenizer's building left over is no part of what generation needs.
        release_free_heap();
        let request = GenerationRequest {
            spec: self.spec(),
            precision: self.precision,
            weight_types: &|p| self.weight_type(p),
            prompt_tokens: longest.map(|n| n as u64),
            context: *context.start() as u64..=*context.end() as u64,
            cache: self.cache,
            room: self.memory.unwrap_or_else(|| engine.memory_limit()).0.saturating_sub(resident_bytes()),
        };
        Ok(GenerationPlan::resolve(&request)?)
    }

    /// A device with the memory that was planned.
    pub fn device(&self, engine: &Engine, plan: &GenerationPlan) -> Result<Cpu, Failure> {
        engine.device(&plan.dry_run, self.memory)
    }

    /// A session with the model's weights.
    pub fn session<'d>(&self, device: &'d Cpu, plan: &GenerationPlan) -> Result<Session<'d, Cpu>, Failure> {
        let types = |p: &Parameter| self.weight_type(p);
        let mut decoder = Decoder::with_weight_types(device, self.spec().clone(), plan.settings, &types)?;
        decoder.load::<TrainError>(|p, dtype, out| Ok(self.files.weights().read_into(p, dtype, out)?))?;
        Ok(Session::new(decoder, &plan.settings))
    }

    fn weight_type(&self, parameter: &Parameter) -> DType {
        weight_type(&self.files, parameter, self.precision.weights, self.quantized)
    }
}
