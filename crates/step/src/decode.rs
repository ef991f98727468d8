//! Decoding with a key-value cache: tokens in, the next token's logits out, or their losses. Sampling is somebody else's
//! affair.

mod cache;
mod follow;

use std::ops::Range;
use std::sync::Arc;

use plimsoll_device::{AttentionShape, Collective, DType, Device, DeviceExt, Product, Tensor};
use plimsoll_disk::LowerTiers;
use plimsoll_memory::{Phase, Tag, Tier};
use plimsoll_model::{BlockId, ModelSpec, Parameter, Role};
use plimsoll_parallel::{Collectives, Communicator};

use crate::StepError;
use crate::block;
use crate::context::{Context, attention_shape};
use crate::embedding;
use crate::head::{self, Head, reshaped, rows};
use crate::inputs::{Labels, check_tokens, positions, sum};
use crate::rope::RopeTables;
use crate::settings::{MicroBatch, Precision};
use crate::store::{WeightStorage, WeightStore};
use crate::tier::Unit;
use cache::KvCache;

/// What decoding needs to know beforehand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DecodeSettings {
    /// Storage types.
    pub precision: Precision,
    /// Type of the cache: f32, bf16, f16, Q8_0, Q4_0 or Q4_1. Keys and values are rounded to it, to nearest.
    pub cache: DType,
    /// Where the cache lives.
    pub cache_tier: Tier,
    /// Positions of a sequence at most.
    pub context: u64,
    /// Tokens of the prompt that are taken in one pass. Layers with a sliding window hold their window and these.
    pub prompt_chunk_tokens: u64,
}

/// A model with a key-value cache for one sequence; or a stage of one, beside ranks that have the other layers.
pub struct Decoder<'a> {
    device: &'a dyn Device,
    spec: ModelSpec,
    settings: DecodeSettings,
    weights: WeightStore<'a>,
    ropes: RopeTables,
    cache: KvCache<'a>,
    /// The ranks that have the other layers, in their order.
    stages: Option<Box<dyn Communicator + 'a>>,
    /// Whether the others append what this one tells them.
    leads: bool,
    length: u64,
    /// The longest that the sequence has been since it was empty: older positions of a window are gone.
    written: u64,
}

impl<'a> Decoder<'a> {
    /// Takes memory for the weights and the cache, on the device and on the tiers below it. Where the model is a stage
    /// ([`Stage::part`](crate::Stage::part)), [`Decoder::join`] says where the others are.
    pub fn new(
        device: &'a dyn Device,
        tiers: &Arc<LowerTiers>,
        spec: ModelSpec,
        settings: DecodeSettings,
        storage: WeightStorage<'_>,
    ) -> Result<Self, StepError> {
        let weights = WeightStore::new(device, tiers, &spec, storage, None)?;
        let positions = (settings.context, settings.prompt_chunk_tokens);
        let cache = KvCache::new(device, &spec, settings.cache, positions, (tiers, settings.cache_tier))?;
        let ropes = RopeTables::new(device, &spec, settings.context)?;
        Ok(Decoder {
            device,
            spec,
            settings,
            weights,
            ropes,
            cache,
            stages: None,
            leads: false,
            length: 0,
            written: 0,
        })
    }

    /// Joins the ranks that have the other layers: rank n has stage n. All of them append the same tokens, and all get the logits.
    pub fn join(&mut self, stages: Box<dyn Communicator + 'a>) {
        self.stages = Some(stages);
    }

    /// Sets every weight that no file holds as it is computed with; `fill` writes the values of some rows of a parameter in the given type
    /// and is not called on a dry device.
    pub fn load<E: From<StepError>>(
        &mut self,
        fill: impl FnMut(&Parameter, Range<u64>, DType, &mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        self.weights.load(&|_| Vec::new(), fill)
    }

    /// Tokens in the cache.
    pub fn len(&self) -> u64 {
        self.length
    }

    /// Whether the cache is empty.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Forgets tokens from the end until at most `length` are left, and returns how many are. It forgets them all where
    /// what the next token would see of them is gone, which only happens to layers with a sliding window.
    pub fn truncate(&mut self, length: u64) -> u64 {
        if length < self.length {
            self.length = if self.cache.holds(length, self.written) { length } else { 0 };
        }
        if self.length == 0 {
            self.written = 0;
        }
        self.length
    }

    /// Appends `tokens` (at least one) and returns the logits `[V]` of what follows the last of them.
    pub fn append(&mut self, tokens: &[u32]) -> Result<Vec<f32>, StepError> {
        self.check_room(tokens)?;
        self.tell(tokens)?;
        let mut logits = Vec::new();
        let mut chunks = tokens.chunks(self.chunk_tokens()).peekable();
        while let Some(chunk) = chunks.next() {
            let last = chunks.peek().is_none();
            let x = self.forward(chunk, last)?;
            if last {
                let own = x.map(|x| self.logits(&x)).transpose()?;
                logits = self.everybodys(own)?;
            }
        }
        Ok(logits)
    }

    /// Appends the tokens of one sequence and returns the sum of their losses against the targets and the number of
    /// targets. Logits of `loss_chunk_tokens` tokens exist at a time.
    pub fn append_losses(
        &mut self,
        sequence: &MicroBatch<'_>,
        loss_chunk_tokens: u64,
    ) -> Result<(f64, u64), StepError> {
        let MicroBatch { tokens, targets, .. } = *sequence;
        if targets.len() != tokens.len() {
            let (got, sequence_length) = (targets.len(), tokens.len() as u64);
            return Err(StepError::BatchShape { got, batch_size: 1, sequence_length });
        }
        self.check_room(tokens)?;
        check_tokens(&self.spec, targets)?;
        let mut sum = 0.0;
        let chunk = self.chunk_tokens();
        for (tokens, targets) in tokens.chunks(chunk).zip(targets.chunks(chunk)) {
            let x = self.forward(tokens, true)?;
            if let Some(x) = x {
                sum += self.losses(&x, targets, loss_chunk_tokens)?;
            }
        }
        if let Some(stages) = &self.stages {
            sum = stages.sum(sum)?;
        }
        Ok((sum, sequence.target_count()))
    }

    fn check_room(&self, tokens: &[u32]) -> Result<(), StepError> {
        check_tokens(&self.spec, tokens)?;
        let wanted = self.length + tokens.len() as u64;
        if wanted > self.settings.context {
            return Err(StepError::ContextFull { wanted, capacity: self.settings.context });
        }
        Ok(())
    }

    fn chunk_tokens(&self) -> usize {
        self.settings.prompt_chunk_tokens.max(1) as usize
    }

    /// The logits of the last stage, on all ranks.
    fn everybodys(&self, own: Option<Vec<f32>>) -> Result<Vec<f32>, StepError> {
        let Some(stages) = &self.stages else { return Ok(own.unwrap_or_default()) };
        let last = stages.size().saturating_sub(1);
        if let Some(logits) = own {
            let bytes = bytemuck::cast_slice(&logits);
            (0..last).try_for_each(|to| stages.send_bytes(to, bytes))?;
            return Ok(logits);
        }
        let mut logits = vec![0.0f32; self.spec.vocab_size as usize];
        stages.receive_bytes(last, bytemuck::cast_slice_mut(&mut logits))?;
        Ok(logits)
    }

    /// What comes to a stage that does not begin with the embedding.
    fn received(&self, ctx: &Context<'_>, tokens: &Tensor) -> Result<Tensor, StepError> {
        let x = embedding::residual(ctx, tokens.elements())?;
        if let Some(stages) = &self.stages {
            let from = stages.rank().checked_sub(1).map(|from| (from, &x));
            stages.send_receive(self.device, Collective::Send, None, from)?;
        }
        Ok(x)
    }

    /// The residual stream [n, H] after the last block, for `n` tokens that are put into the cache; `with_head` where the
    /// head comes next. `None` where it has gone to the next stage.
    fn forward(&mut self, tokens: &[u32], with_head: bool) -> Result<Option<Tensor>, StepError> {
        let device = self.device;
        let (past, n) = (self.length, tokens.len() as u64);
        device.enter(Phase::Generate, None);
        let ids = device.alloc(DType::U32, &[n], Tag::Data, "tokens")?;
        device.write_u32(&ids, tokens)?;
        let positions = positions(device, n, past..)?;
        let ctx = context(device, &self.spec, &self.settings, &self.ropes, &positions, past);
        let part = self.spec.part.clone();
        self.weights.announce_forward(&self.spec, with_head && part.head)?;
        let mut x = match part.embedding {
            true => embedding::forward(&ctx, &mut self.weights, (&ids, tokens))?,
            false => self.received(&ctx, &ids)?,
        };
        self.cache.begin(past, n)?;
        for (place, layer) in (0..).zip(self.spec.layers()) {
            device.enter(Phase::Generate, Some(layer));
            let weights = self.weights.gather(BlockId::Layer(layer))?;
            let mut ctx = ctx.layer(layer);
            let cache = &mut self.cache;
            ctx.attention = AttentionShape { kv_capacity: cache.capacity(place), ..ctx.attention };
            x = block::infer(&ctx, &weights, x, |qkv| cache.write(place, &qkv.k, &qkv.v, past))?;
            cache.leave(place)?;
            drop(weights);
            self.weights.release(Unit::Layer(layer), false);
        }
        self.cache.settle()?;
        self.length += n;
        self.written = self.written.max(self.length);
        if part.head {
            return Ok(Some(x));
        }
        if let Some(stages) = &self.stages {
            let next = Some((stages.rank() + 1, &x));
            stages.send_receive(device, Collective::Send, next, None)?;
        }
        Ok(None)
    }

    /// The sum of the losses of a chunk whose residual stream is `x`.
    fn losses(&mut self, x: &Tensor, targets: &[u32], loss_chunk_tokens: u64) -> Result<f64, StepError> {
        let device = self.device;
        device.enter(Phase::Loss, None);
        let wanted = device.alloc(DType::U32, &[x.rows()], Tag::Data, "targets")?;
        device.write_u32(&wanted, targets)?;
        let losses = device.alloc(DType::F32, &[x.rows()], Tag::Data, "losses")?;
        let labels = Labels { targets: wanted, losses, weights: None };
        let past = self.length - x.rows();
        let positions = positions(device, x.rows(), past..)?;
        let ctx = context(device, &self.spec, &self.settings, &self.ropes, &positions, past);
        head::loss_of(&ctx, &mut self.weights, x, &labels, loss_chunk_tokens)?;
        sum(device, &labels.losses)
    }

    fn logits(&mut self, x: &Tensor) -> Result<Vec<f32>, StepError> {
        self.device.enter(Phase::Generate, None);
        let last = rows(x, x.rows() - 1, x.rows())?;
        let own = self.weights.resident().gather(BlockId::Head)?;
        let norm = own.norm(Role::FinalNorm, Some(Role::FinalNormBias), &self.spec.norm)?;
        let normed = norm.forward(self.device, &last)?;
        let logits = self.device.alloc(DType::F32, &[1, self.spec.vocab_size], Tag::Logits, "logits")?;
        let last = self.length.saturating_sub(1);
        let positions = positions(self.device, 1, [last])?;
        let ctx = context(self.device, &self.spec, &self.settings, &self.ropes, &positions, last);
        let (block, role) = Head::table(self.spec.tie_word_embeddings);
        match self.weights.pieces(block, role) {
            None => {
                let head = Head::gather(&mut self.weights, self.spec.tie_word_embeddings)?;
                head.linear()?.forward(&ctx, &normed.out, &logits, false)?;
                head.release(&mut self.weights);
            }
            Some(pieces) => {
                let column = reshaped(&logits, &[self.spec.vocab_size, 1])?;
                for (piece, range) in (0..).zip(pieces) {
                    let weight = &self.weights.gather_piece(block, role, piece)?;
                    let out = &reshaped(&rows(&column, range.start, range.end)?, &[1, weight.rows()])?;
                    let (x, compute) = (&normed.out, ctx.compute);
                    let bias = None;
                    self.device.run(Product::Linear { x, weight, bias, out, accumulate: false, compute })?;
                    self.weights.release(Unit::Piece(block, piece), false);
                }
            }
        }
        let mut logits = self.device.read_f32(&logits)?;
        if let Some(cap) = self.spec.logit_soft_cap {
            logits.iter_mut().for_each(|x| *x = (cap * (f64::from(*x) / cap).tanh()) as f32);
        }
        Ok(logits)
    }
}

/// What blocks need to know of the tokens at `positions`, which come after `past` others.
fn context<'c>(
    device: &'c dyn Device,
    spec: &'c ModelSpec,
    settings: &DecodeSettings,
    ropes: &'c RopeTables,
    positions: &'c Tensor,
    past: u64,
) -> Context<'c> {
    let shape = attention_shape(spec, 1, positions.elements(), past, settings.context);
    Context::new(device, spec, settings.precision, ropes, positions, shape)
}
