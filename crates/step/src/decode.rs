//! Decoding with a key-value cache: tokens in, the next token's logits out, or their losses. Sampling is somebody else's
//! affair.

mod cache;
mod follow;
mod pages;

use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;

use plimsoll_device::{Collective, DType, Device, DeviceExt, FEW_ROWS, Product, Tensor, page_positions};
use plimsoll_disk::LowerTiers;
use plimsoll_memory::{Phase, Tag, Tier};
use plimsoll_model::{BlockId, ModelSpec, Parameter, Role};
use plimsoll_parallel::{Collectives, Communicator};

use crate::StepError;
use crate::block::{self, LatentCache};
use crate::context::{Context, attention_shape};
use crate::embedding;
use crate::head::{self, Head, reshaped, rows};
use crate::inputs::{Labels, check_tokens, positions, sum};
use crate::rope::RopeTables;
use crate::routes::Routes;
use crate::settings::{MicroBatch, Precision};
use crate::store::{ExpertTraffic, WeightStorage, WeightStore};
use crate::tier::Unit;
use cache::{KvCache, Run};

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
    /// Sequences that are decoded beside each other; at least one.
    pub sequences: u64,
    /// Pages that the sequences share for the keys and values of layers that see everything, on the device: a sequence has as many as
    /// its tokens need. Where `None`, each has room for the whole context.
    pub pages: Option<u64>,
    /// Tokens that may follow a sequence's next one in a decoding pass, to be verified.
    pub drafted_tokens: u64,
}

impl DecodeSettings {
    /// Positions of a page.
    pub fn page_tokens(&self, spec: &ModelSpec) -> u64 {
        page_positions(self.cache, LatentCache::widest_head(spec)).min(self.context.max(1))
    }

    /// Pages with which no sequence has to wait for another.
    pub fn most_pages(&self, spec: &ModelSpec) -> u64 {
        self.context.div_ceil(self.page_tokens(spec)).saturating_mul(self.sequences.max(1))
    }

    /// Pages without which there is no room for a sequence of the whole context beside others that have just begun.
    pub fn least_pages(&self, spec: &ModelSpec) -> u64 {
        self.context.div_ceil(self.page_tokens(spec)) + self.sequences.max(1) - 1
    }
}

/// A model with a key-value cache for some sequences; or a stage of one, beside ranks that have the other layers.
pub struct Decoder<'a> {
    device: &'a dyn Device,
    spec: ModelSpec,
    settings: DecodeSettings,
    weights: WeightStore<'a>,
    ropes: RopeTables,
    cache: KvCache<'a>,
    /// How the cache is read where it has narrow vectors.
    latent: Option<LatentCache>,
    /// The ranks that have the other layers, in their order.
    stages: Option<Box<dyn Communicator + 'a>>,
    /// Whether the others append what this one tells them.
    leads: bool,
    sequences: Vec<Sequence>,
}

/// How far a sequence is.
#[derive(Clone, Copy, Debug, Default)]
struct Sequence {
    length: u64,
    /// The longest that it has been since it was empty: older positions of a window are gone.
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
        let latent = LatentCache::of(&spec, &storage);
        let cache = KvCache::new(device, &spec, &settings, latent, tiers)?;
        let ropes = RopeTables::new(device, &spec, settings.context)?;
        Ok(Decoder {
            device,
            spec,
            settings,
            weights,
            ropes,
            cache,
            latent,
            stages: None,
            leads: false,
            sequences: (0..settings.sequences.max(1)).map(|_| Sequence::default()).collect(),
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

    /// Tokens of the first sequence.
    pub fn len(&self) -> u64 {
        self.sequences.first().map_or(0, |sequence| sequence.length)
    }

    /// Whether the first sequence is empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Tokens of any sequence.
    pub fn len_of(&self, sequence: u32) -> u64 {
        self.length(sequence)
    }

    /// Forgets tokens from the end of the first sequence until at most `length` are left, and returns how many are. It forgets
    /// them all where what the next token would see of them is gone, which only happens to layers with a sliding window.
    pub fn truncate(&mut self, length: u64) -> u64 {
        self.truncate_one(0, length)
    }

    /// The same of any sequence.
    pub fn truncate_one(&mut self, sequence: u32, length: u64) -> u64 {
        let Some(own) = self.sequences.get_mut(sequence as usize) else { return 0 };
        if length < own.length {
            own.length = if self.cache.holds(length, own.written) { length } else { 0 };
        }
        if own.length == 0 {
            own.written = 0;
        }
        self.cache.keep(sequence, own.length);
        own.length
    }

    /// Appends `tokens` (at least one) to the first sequence and returns the logits `[V]` of what follows the last of them.
    pub fn append(&mut self, tokens: &[u32]) -> Result<Vec<f32>, StepError> {
        self.append_to(0, tokens)
    }

    /// The same of any sequence, in passes of its own.
    pub fn append_to(&mut self, sequence: u32, tokens: &[u32]) -> Result<Vec<f32>, StepError> {
        self.check_room(sequence, tokens)?;
        self.tell(sequence, tokens)?;
        let mut logits = Vec::new();
        let mut chunks = tokens.chunks(self.chunk_tokens()).peekable();
        while let Some(chunk) = chunks.next() {
            let last = chunks.peek().is_none();
            let x = self.forward(chunk, &[self.run(sequence, chunk)], last)?;
            if last {
                let place = self.length(sequence).saturating_sub(1);
                let last_row = |x: Tensor| rows(&x, x.rows() - 1, x.rows());
                let own = x.map(|x| self.logits(last_row(x)?, &[place])).transpose()?;
                logits = self.everybodys(own, 1)?;
            }
        }
        Ok(logits)
    }

    /// Appends a token to each of some sequences in one pass, and returns the logits `[V]` of what follows each of them.
    ///
    /// # Errors
    /// As of [`decode`](Self::decode).
    pub fn append_each(&mut self, tokens: &[(u32, u32)]) -> Result<Vec<Vec<f32>>, StepError> {
        let runs: Vec<(u32, &[u32])> =
            tokens.iter().map(|(sequence, token)| (*sequence, std::slice::from_ref(token))).collect();
        let logits = self.decode(&runs)?;
        Ok(logits.chunks(self.spec.vocab_size.max(1) as usize).map(<[f32]>::to_vec).collect())
    }

    /// Appends tokens to some sequences in passes that they share, and returns the logits `[N, V]` of what follows each token, in their
    /// order. Each token is attended to by itself, and on a CPU a pass has at most [`FEW_ROWS`] of them: the logits have the bits of
    /// tokens that were appended one after the other, in passes of their own.
    ///
    /// # Errors
    /// There is no such sequence, or it is named twice, or its context is full, or there are too few pages. Ranks that
    /// [`follow`](Self::follow) are told of one sequence alone.
    pub fn decode(&mut self, runs: &[(u32, &[u32])]) -> Result<Vec<f32>, StepError> {
        if self.leads && self.stages.is_some() {
            return Err(StepError::Invariant { what: "ranks that follow are told of one sequence alone" });
        }
        let mut named = HashSet::new();
        for (sequence, tokens) in runs {
            self.check_room(*sequence, tokens)?;
            if !named.insert(*sequence) {
                return Err(self.no_such(*sequence));
            }
        }
        let lengths = runs.iter().map(|(own, tokens)| (*own, self.length(*own) + tokens.len() as u64));
        self.cache.check_pages(lengths)?;
        let singles: Vec<(u32, u32)> = runs
            .iter()
            .flat_map(|(sequence, tokens)| tokens.iter().map(|token| (*sequence, *token)))
            .collect();
        let mut logits = Vec::new();
        // What weights cost that come to a device is worth no bits.
        let most = if self.device.traits().unified { FEW_ROWS } else { singles.len().max(1) };
        for pass in singles.chunks(most) {
            let own: Vec<Run> = (pass.chunk_by(|a, b| a.0 == b.0))
                .filter_map(|run| {
                    let (sequence, tokens) = (run.first()?.0, run.len() as u64);
                    Some(Run { sequence, past: self.length(sequence), tokens, singly: true })
                })
                .collect();
            let ids: Vec<u32> = pass.iter().map(|(_, token)| *token).collect();
            let x = self.forward(&ids, &own, true)?;
            let places: Vec<u64> = own.iter().flat_map(|run| run.past..run.past + run.tokens).collect();
            let own = x.map(|x| self.logits(x, &places)).transpose()?;
            let all = self.everybodys(own, pass.len())?;
            if logits.is_empty() {
                logits = all;
            } else {
                logits.extend_from_slice(&all);
            }
        }
        Ok(logits)
    }

    /// Whether there are pages for so many more tokens of some sequences. There always are where sequences have room for the whole
    /// context.
    pub fn has_pages_for(&self, more: &[(u32, u64)]) -> bool {
        let wanted = more.iter().map(|(sequence, tokens)| (*sequence, self.length(*sequence) + tokens));
        self.cache.has_pages_for(wanted)
    }

    /// How often experts that come by themselves were used, and read for it; `None` where they do not.
    pub fn expert_traffic(&self) -> Option<ExpertTraffic> {
        self.weights.expert_traffic()
    }

    /// Takes tokens from now on for such that go to any experts alike, on a device without memory: of each layer as many experts are here.
    pub fn suppose_even_use(&self) {
        self.weights.suppose_even_use();
    }

    /// Takes a sequence for one of so many tokens, on a device without memory: what a pass takes does not depend on what the tokens
    /// before it were.
    ///
    /// # Errors
    /// The device has memory, or there is no such sequence.
    pub fn suppose(&mut self, sequence: u32, length: u64) -> Result<(), StepError> {
        if !self.device.is_dry() {
            return Err(StepError::Invariant { what: "a cache with memory holds what was written there" });
        }
        let no_such = self.no_such(sequence);
        let own = self.sequences.get_mut(sequence as usize).ok_or(no_such)?;
        *own = Sequence { length, written: length };
        self.cache.keep(sequence, length);
        self.cache.reserve(sequence, length)
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
        self.check_room(0, tokens)?;
        check_tokens(&self.spec, targets)?;
        let mut sum = 0.0;
        let chunk = self.chunk_tokens();
        for (tokens, targets) in tokens.chunks(chunk).zip(targets.chunks(chunk)) {
            let x = self.forward(tokens, &[self.run(0, tokens)], true)?;
            if let Some(x) = x {
                sum += self.losses(&x, targets, loss_chunk_tokens)?;
            }
        }
        if let Some(stages) = &self.stages {
            sum = stages.sum(sum)?;
        }
        Ok((sum, sequence.target_count()))
    }

    fn no_such(&self, sequence: u32) -> StepError {
        StepError::NoSuchSequence { sequence, sequences: self.sequences.len() as u64 }
    }

    fn length(&self, sequence: u32) -> u64 {
        self.sequences.get(sequence as usize).map_or(0, |own| own.length)
    }

    /// The tokens that come next in a sequence.
    fn run(&self, sequence: u32, tokens: &[u32]) -> Run {
        Run { sequence, past: self.length(sequence), tokens: tokens.len() as u64, singly: false }
    }

    fn check_room(&self, sequence: u32, tokens: &[u32]) -> Result<(), StepError> {
        check_tokens(&self.spec, tokens)?;
        let own = self.sequences.get(sequence as usize).ok_or_else(|| self.no_such(sequence))?;
        let wanted = own.length + tokens.len() as u64;
        if wanted > self.settings.context {
            return Err(StepError::ContextFull { wanted, capacity: self.settings.context });
        }
        Ok(())
    }

    fn chunk_tokens(&self) -> usize {
        self.settings.prompt_chunk_tokens.max(1) as usize
    }

    /// The logits of the last stage, of so many tokens, on all ranks.
    fn everybodys(&self, own: Option<Vec<f32>>, count: usize) -> Result<Vec<f32>, StepError> {
        let Some(stages) = &self.stages else { return Ok(own.unwrap_or_default()) };
        let last = stages.size().saturating_sub(1);
        if let Some(logits) = own {
            let bytes = bytemuck::cast_slice(&logits);
            (0..last).try_for_each(|to| stages.send_bytes(to, bytes))?;
            return Ok(logits);
        }
        let mut logits = vec![0.0f32; (self.spec.vocab_size as usize).saturating_mul(count)];
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

    /// The residual stream [n, H] after the last block, for the `n` tokens of some runs, which are put into the cache; `with_head`
    /// where the head comes next. `None` where it has gone to the next stage, or nobody asks for it.
    fn forward(
        &mut self,
        tokens: &[u32],
        runs: &[Run],
        with_head: bool,
    ) -> Result<Option<Tensor>, StepError> {
        let device = self.device;
        let n = tokens.len() as u64;
        device.enter(Phase::Generate, None);
        let ids = device.alloc(DType::U32, &[n], Tag::Data, "tokens")?;
        device.write_u32(&ids, tokens)?;
        let places = runs.iter().flat_map(|run| run.past..run.past + run.tokens);
        let positions = positions(device, n, places)?;
        let ctx = context(device, &self.spec, &self.settings, &self.ropes, &positions);
        let absorbed = self.latent.map(|latent| latent.absorbed(device, n)).transpose()?;
        let attention = self.latent.map_or(ctx.attention, |latent| latent.shape(ctx.attention));
        let ctx = Context { absorbed: absorbed.as_ref(), attention, ..ctx };
        let part = self.spec.part.clone();
        let experts = self.weights.expert_weights();
        let routes = Routes::default();
        let ctx = Context { expert_weights: experts.as_deref(), routes: Some(&routes), ..ctx };
        self.weights.announce_forward(&self.spec, with_head && part.head)?;
        let mut x = match part.embedding {
            true => embedding::forward(&ctx, &mut self.weights, (&ids, tokens))?,
            false => self.received(&ctx, &ids)?,
        };
        self.cache.begin(runs)?;
        let layers = self.spec.layers().count() as u32;
        for (place, layer) in (0..).zip(self.spec.layers()) {
            device.enter(Phase::Generate, Some(layer));
            let weights = self.weights.gather(BlockId::Layer(layer))?;
            let (ctx, cache) = (ctx.layer(layer), &mut self.cache);
            if part.head && !with_head && place + 1 == layers {
                // Nobody asks what comes out of the last layer: later tokens see its keys and values alone.
                block::infer_keys(&ctx, &weights, &x, |qkv| cache.put(place, runs, qkv))?;
            } else {
                x = block::infer(&ctx, &weights, x, |qkv, sinks| {
                    let (out, sums) = cache.attend(&ctx, place, runs, (qkv, sinks))?;
                    Ok((block::values_of_cache(&ctx, &weights, out)?, sums))
                })?;
            }
            drop(weights);
            self.weights.release(Unit::Layer(layer), false);
        }
        self.cache.settle()?;
        for run in runs {
            if let Some(own) = self.sequences.get_mut(run.sequence as usize) {
                own.length += run.tokens;
                own.written = own.written.max(own.length);
            }
        }
        if part.head {
            return Ok(with_head.then_some(x));
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
        let past = self.len() - x.rows();
        let positions = positions(device, x.rows(), past..)?;
        let ctx = context(device, &self.spec, &self.settings, &self.ropes, &positions);
        head::loss_of(&ctx, &mut self.weights, x, &labels, loss_chunk_tokens)?;
        sum(device, &labels.losses)
    }

    /// The logits `[n, V]` of what follows the tokens at `places` of their sequences, whose residual stream is `x` `[n, H]`.
    fn logits(&mut self, x: Tensor, places: &[u64]) -> Result<Vec<f32>, StepError> {
        self.device.enter(Phase::Generate, None);
        let own = self.weights.resident().gather(BlockId::Head)?;
        let norm = own.norm(Role::FinalNorm, Some(Role::FinalNormBias), &self.spec.norm)?;
        let normed = norm.forward(self.device, &x)?;
        let sizes = [x.rows(), self.spec.vocab_size];
        let logits = self.device.alloc(DType::F32, &sizes, Tag::Logits, "logits")?;
        let positions = positions(self.device, x.rows(), places.iter().copied())?;
        let ctx = context(self.device, &self.spec, &self.settings, &self.ropes, &positions);
        let (block, role) = Head::table(self.spec.tie_word_embeddings);
        match self.weights.pieces(block, role) {
            None => {
                let head = Head::gather(&mut self.weights, self.spec.tie_word_embeddings)?;
                head.linear()?.forward(&ctx, &normed.out, &logits, false)?;
                head.release(&mut self.weights);
            }
            Some(pieces) => {
                for (piece, range) in (0..).zip(pieces) {
                    let weight = &self.weights.gather_piece(block, role, piece)?;
                    for row in 0..x.rows() {
                        let own = rows(&logits, row, row + 1)?;
                        let column = reshaped(&own, &[self.spec.vocab_size, 1])?;
                        let out = &reshaped(&rows(&column, range.start, range.end)?, &[1, weight.rows()])?;
                        let (x, compute) =
                            (&rows(&normed.out, row, row + 1)?, ctx.linears.of_rows(ctx.compute));
                        let bias = None;
                        self.device.run(Product::Linear {
                            x,
                            weight,
                            bias,
                            out,
                            accumulate: false,
                            compute,
                        })?;
                    }
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

/// What blocks need to know of the tokens at `positions`.
fn context<'c>(
    device: &'c dyn Device,
    spec: &'c ModelSpec,
    settings: &DecodeSettings,
    ropes: &'c RopeTables,
    positions: &'c Tensor,
) -> Context<'c> {
    let shape = attention_shape(spec, 1, positions.elements(), 0, settings.context);
    Context::new(device, spec, settings.precision, ropes, positions, shape)
}
