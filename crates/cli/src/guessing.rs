//! Who guesses what comes next for a model that answers: its own text, or a smaller model beside it.

use plimsoll_device::Device;
use plimsoll_generate::{Draft, DraftModel, Lookup};
use plimsoll_model::tokenizer::Tokenizer;
use plimsoll_parallel::Communicator;
use plimsoll_plan::{GenerationPlan, GenerationPlanError};

use crate::args::{InferenceArgs, SpeculationArgs, WeightArgs};
use crate::failure::Failure;
use crate::inference::Inference;
use crate::session::Engine;

/// The flags that are about the model that answers, with the other model in its place.
pub struct DraftArgs(Option<InferenceArgs>);

impl DraftArgs {
    pub fn new(speculation: &SpeculationArgs, answering: &InferenceArgs) -> DraftArgs {
        DraftArgs(speculation.draft_model.as_ref().map(|model| InferenceArgs {
            weights: WeightArgs {
                model: model.clone(),
                dtype: answering.weights.dtype.clone(),
                quantize_activations: answering.weights.quantize_activations,
                adapter: Vec::new(),
                quantize: None,
            },
            context: None,
            kv_cache: answering.kv_cache.clone(),
            memory: answering.memory,
            disk: answering.disk.clone(),
            device: answering.device,
            threads: answering.threads,
        }))
    }
}

/// Who guesses.
pub enum Guessing<'a> {
    Nobody,
    Lookup,
    Model(Box<Inference<'a>>),
}

/// What a model that guesses computes in.
pub struct DraftMemory {
    plan: GenerationPlan,
    device: Box<dyn Device>,
}

/// Refuses guesses on several ranks, before any of them starts.
///
/// # Errors
/// They are asked for.
pub fn check_ranks(speculation: &SpeculationArgs, ranks: Option<u32>) -> Result<(), Failure> {
    match speculation.is_wanted() && ranks.is_some_and(|ranks| ranks > 1) {
        true => Err(Failure::usage("--speculative and --draft-model go with one process; leave out --ranks")),
        false => Ok(()),
    }
}

impl<'a> Guessing<'a> {
    /// Reads everything but the weights, and tells `model` what is verified.
    ///
    /// # Errors
    /// The models have different vocabularies, or layers are divided among ranks.
    pub fn open(
        speculation: &SpeculationArgs,
        draft: &'a DraftArgs,
        model: &mut Inference<'_>,
        ranks: &dyn Communicator,
        quiet: bool,
    ) -> Result<Guessing<'a>, Failure> {
        speculation.check()?;
        if !speculation.is_wanted() {
            return Ok(Guessing::Nobody);
        }
        check_ranks(speculation, Some(ranks.size()))?;
        model.verify(speculation.draft_tokens());
        let Some(args) = &draft.0 else { return Ok(Guessing::Lookup) };
        let draft = Inference::open(args, "guess with", quiet)?;
        same_vocabulary(&args.weights.model, &draft.tokenizer, &model.tokenizer)?;
        Ok(Guessing::Model(Box::new(draft)))
    }

    /// Plans the model that guesses for a context, and makes room for it beside `model`.
    pub fn prepare(
        &self,
        engine: &Engine,
        model: &mut Inference<'_>,
        context: usize,
    ) -> Result<Option<DraftMemory>, Failure> {
        let Guessing::Model(draft) = self else { return Ok(None) };
        let context =
            if draft.has_learned_positions() { context.min(draft.trained_context()) } else { context };
        let plan = draft.plan_in_memory(engine, context).map_err(|error| match error {
            GenerationPlanError::DoesNotFit(error) => model.no_room_with(engine, error.needed, context),
            GenerationPlanError::Step(error) => error.into(),
        })?;
        let bytes = plan.dry_run.peak_bytes();
        let device = engine.arena(bytes)?;
        // A card says itself what is taken of it.
        if engine.card.is_none() {
            model.make_room(bytes);
        }
        Ok(Some(DraftMemory { plan, device }))
    }

    /// Loads what guesses.
    pub fn draft<'d>(
        &self,
        ranks: &'d dyn Communicator,
        memory: Option<&'d DraftMemory>,
    ) -> Result<Option<Box<dyn Draft + 'd>>, Failure> {
        Ok(match (self, memory) {
            (Guessing::Lookup, _) => Some(Box::new(Lookup)),
            (Guessing::Model(draft), Some(DraftMemory { plan, device })) => {
                let (session, _) = draft.session_of(ranks, &**device, plan)?;
                Some(Box::new(DraftModel::new(session, draft.tokenizer.vocab_size())))
            }
            _ => None,
        })
    }
}

/// Refuses a model whose tokens stand for something else.
fn same_vocabulary(name: &str, draft: &Tokenizer, model: &Tokenizer) -> Result<(), Failure> {
    let (own, wanted) = (draft.vocab_size(), model.vocab_size());
    let remedy = "a model that guesses needs the vocabulary of the model that answers";
    if own != wanted {
        return Err(Failure::usage(format!(
            "--draft-model {name}: its vocabulary has {own} tokens and that of the model {wanted}; {remedy}"
        )));
    }
    let differs = |id: &u32| draft.id_to_token(*id) != model.id_to_token(*id);
    let last = u32::try_from(own).unwrap_or(u32::MAX);
    match (0..last).find(differs) {
        None => Ok(()),
        Some(id) => Err(Failure::usage(format!(
            "--draft-model {name}: token {id} is {:?} there and {:?} in the model; {remedy}",
            draft.id_to_token(id).unwrap_or_default(),
            model.id_to_token(id).unwrap_or_default()
        ))),
    }
}
