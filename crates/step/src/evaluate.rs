//! The loss of given tokens, forward only.

use std::ops::Range;
use std::sync::Arc;

use plimsoll_device::{DType, Device};
use plimsoll_disk::LowerTiers;
use plimsoll_memory::Phase;
use plimsoll_model::{BlockId, ModelSpec, Parameter};
use plimsoll_parallel::Communicator;

use crate::StepError;
use crate::block::{self, Around, Ring};
use crate::context::Context;
use crate::embedding;
use crate::head;
use crate::inputs::{Inputs, Places, sum};
use crate::products::Products;
use crate::rope::RopeTables;
use crate::routes::Routes;
use crate::settings::{MicroBatch, Precision};
use crate::stage::Stage;
use crate::store::{WeightStorage, WeightStore};
use crate::tier::Unit;
use crate::trainer::{Flow, Stages};

/// What measuring needs to know beforehand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EvaluateSettings {
    /// Storage types.
    pub precision: Precision,
    /// Tokens of the longest sequence: what a plan without contents is made for.
    pub longest: u64,
    /// Logits of at most this many tokens exist at once.
    pub loss_chunk_tokens: u64,
}

/// A forward pass over whole sequences, whatever holds the weights.
pub(crate) struct Evaluation<'a> {
    pub device: &'a dyn Device,
    pub spec: &'a ModelSpec,
    pub ropes: Option<&'a RopeTables>,
    /// The ranks that have the rest of the sequences, where they have parts of them.
    pub ring: Option<&'a Ring<'a>>,
    /// Where the residual stream comes from and goes to.
    pub flow: Flow<'a>,
    /// The ranks that share every product, where there are several.
    pub products: Option<&'a Products<'a>>,
    pub settings: EvaluateSettings,
    pub mlp_chunk_tokens: Option<u64>,
}

impl Evaluation<'_> {
    /// Sum of token losses, each by its weight, and number of targets of `batch_size` sequences of equal length. Of losses, those
    /// of the tokens that this rank has.
    pub fn run(
        &self,
        store: &mut WeightStore<'_>,
        batch_size: u64,
        micro_batch: &MicroBatch<'_>,
    ) -> Result<(f64, u64), StepError> {
        self.device.enter(Phase::Forward, None);
        let length = match micro_batch.tokens.len() as u64 {
            0 if self.device.is_dry() => self.settings.longest,
            tokens => tokens / batch_size.max(1),
        };
        let places = match self.ring {
            None => Places::whole(batch_size, length),
            Some(ring) => ring.own_places(batch_size, length),
        };
        let inputs = Inputs::upload(self.device, self.spec, &places, None, micro_batch)?;
        let (own_ropes, ropes);
        match self.ropes {
            Some(shared) => ropes = shared,
            None => {
                own_ropes = inputs.ropes(self.device, self.spec, &places)?;
                ropes = &own_ropes;
            }
        }
        let ctx = inputs.context(self.device, self.spec, self.settings.precision, ropes);
        let around = self.ring.map(|ring| Around { ring, length });
        let products = self.products;
        let ctx = Context { mlp_chunk_tokens: self.mlp_chunk_tokens, around, ..ctx };
        let ctx = ctx.sharing(products, places.rows());
        let experts = store.expert_weights();
        let routes = Routes::default();
        let ctx = Context { expert_weights: experts.as_deref(), routes: Some(&routes), ..ctx };
        store.announce_forward(self.spec, self.spec.part.head)?;
        let tokens = (&inputs.tokens, &*inputs.ids);
        let (runs, mut out) = (self.spec.runs(), None);
        let last = runs.len().saturating_sub(1) as u32;
        for (round, layers) in (0..).zip(runs) {
            let mut x = self.flow.enter(&ctx, round, tokens.0, || embedding::forward(&ctx, store, tokens))?;
            for layer in layers {
                self.device.enter(Phase::Forward, Some(layer));
                let weights = store.gather(BlockId::Layer(layer))?;
                let ctx = ctx.layer(layer);
                x = block::infer(&ctx, &weights, x, |qkv, sinks| {
                    let attended = block::attend(&ctx, qkv, sinks)?;
                    Ok((attended.out.clone(), attended))
                })?;
                drop(weights);
                store.release(Unit::Layer(layer), false);
            }
            self.device.enter(if round == last { Phase::Loss } else { Phase::Forward }, None);
            out = self.flow.leave(&ctx, round, x)?;
        }
        let Some(x) = out else { return Ok((0.0, micro_batch.target_count())) };
        head::loss_of(&ctx, store, &x, &inputs.labels, self.settings.loss_chunk_tokens)?;
        let losses = sum(self.device, &inputs.labels.losses)?;
        // Ranks that share products have found the same.
        let counts = products.is_none_or(Products::is_first);
        Ok((if counts { losses } else { 0.0 }, micro_batch.target_count()))
    }
}

/// A model that is only measured: weights and nothing else. Or a stage of one, beside ranks that have the other layers.
pub struct Evaluator<'a> {
    device: &'a dyn Device,
    spec: ModelSpec,
    settings: EvaluateSettings,
    weights: WeightStore<'a>,
    ropes: RopeTables,
    /// The ranks that have the other layers.
    stages: Option<Stages<'a>>,
}

impl<'a> Evaluator<'a> {
    /// Takes memory for the weights, on the device and on the tiers below it. Where the model is a stage
    /// ([`Stage::part`]), [`Evaluator::join`] says where the others are.
    pub fn new(
        device: &'a dyn Device,
        tiers: &Arc<LowerTiers>,
        spec: ModelSpec,
        settings: EvaluateSettings,
        storage: WeightStorage<'_>,
    ) -> Result<Self, StepError> {
        let weights = WeightStore::new(device, tiers, &spec, storage, None)?;
        device.enter(Phase::Setup, None);
        let ropes = RopeTables::new(device, &spec, settings.longest)?;
        Ok(Evaluator { device, spec, settings, weights, ropes, stages: None })
    }

    /// Joins the ranks that have the other layers of the whole model: rank n has stage n. All of them measure the same sequences.
    pub fn join(&mut self, ranks: Box<dyn Communicator + 'a>, whole: &ModelSpec) {
        let stage = Stage::measured(whole, ranks.rank(), ranks.size());
        self.stages = (stage.count > 1).then_some(Stages { ranks, stage });
    }

    /// Sets every weight that no file holds as it is computed with; `fill` writes the values of some rows of a parameter in the given type
    /// and is not called on a dry device.
    pub fn load<E: From<StepError>>(
        &mut self,
        fill: impl FnMut(&Parameter, Range<u64>, DType, &mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        self.weights.load(&|_| Vec::new(), fill)
    }

    /// Sum of token losses and number of targets of `batch_size` sequences of equal length. Of several ranks the last one has the
    /// losses, and the others none.
    pub fn losses(&mut self, batch_size: u64, micro_batch: &MicroBatch<'_>) -> Result<(f64, u64), StepError> {
        let Evaluator { device, spec, settings, weights, ropes, stages } = self;
        let (device, settings) = (*device, *settings);
        let ropes = Some(&*ropes);
        let (flow, ring, products) = (Flow::through(stages.as_ref()), None, None);
        let pass = Evaluation { device, spec, ropes, ring, flow, products, settings, mlp_chunk_tokens: None };
        pass.run(weights, batch_size, micro_batch)
    }
}
