//! Decoding with a key-value cache: tokens in, the next token's logits out. Sampling is somebody else's affair.

use plimsoll_device::{DType, Device, Op, Rounding, Tensor};
use plimsoll_memory::{Phase, Tag};
use plimsoll_model::{BlockId, ModelSpec, Parameter};

use crate::StepError;
use crate::block;
use crate::context::{Context, attention_shape};
use crate::embedding;
use crate::head::{Head, rows};
use crate::inputs::{check_tokens, positions};
use crate::rope::RopeTables;
use crate::settings::Precision;
use crate::store::{ResidentStore, WeightStore};

/// What decoding needs to know beforehand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DecodeSettings {
    /// Storage types.
    pub precision: Precision,
    /// Type of the cache: f32 or bf16. Keys and values are rounded to it, to nearest.
    pub cache: DType,
    /// Tokens that the cache holds.
    pub context: u64,
    /// Tokens of the prompt that are taken in one pass.
    pub prompt_chunk_tokens: u64,
}

/// A model with a key-value cache for one sequence.
pub struct Decoder<'a, D: Device> {
    device: &'a D,
    spec: ModelSpec,
    settings: DecodeSettings,
    weights: ResidentStore,
    ropes: RopeTables,
    /// Keys and values of every layer, [context, KV] each.
    cache: Vec<(Tensor, Tensor)>,
    length: u64,
}

impl<'a, D: Device> Decoder<'a, D> {
    /// Takes memory for the weights and the cache.
    pub fn new(device: &'a D, spec: ModelSpec, settings: DecodeSettings) -> Result<Self, StepError> {
        Self::with_weight_types(device, spec, settings, &|_| settings.precision.weights)
    }

    /// The same with a type for each weight, as by [`ResidentStore::allocate_typed`].
    pub fn with_weight_types(
        device: &'a D,
        spec: ModelSpec,
        settings: DecodeSettings,
        weight_types: &dyn Fn(&Parameter) -> DType,
    ) -> Result<Self, StepError> {
        let weights = ResidentStore::allocate_typed(device, &spec, weight_types, Tag::Weights)?;
        let sizes = [settings.context, spec.kv_size()];
        let mut cache = Vec::new();
        for layer in 0..spec.num_layers {
            device.arena().enter(Phase::Setup, Some(layer));
            let alloc = |name| device.alloc(settings.cache, &sizes, Tag::KvCache, name);
            cache.push((alloc("k")?, alloc("v")?));
        }
        device.arena().enter(Phase::Setup, None);
        let ropes = RopeTables::new(device, &spec, settings.context)?;
        Ok(Decoder { device, spec, settings, weights, ropes, cache, length: 0 })
    }

    /// Sets every weight; `fill` writes a parameter's values in the given type and is not called on a dry device.
    pub fn load<E: From<StepError>>(
        &mut self,
        fill: impl FnMut(&Parameter, DType, &mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        self.weights.load(self.device, &self.spec, fill)
    }

    /// Tokens in the cache.
    pub fn len(&self) -> u64 {
        self.length
    }

    /// Whether the cache is empty.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Forgets all tokens but the first `length`.
    pub fn truncate(&mut self, length: u64) {
        self.length = self.length.min(length);
    }

    /// Appends `tokens` (at least one) and returns the logits `[V]` of what follows the last of them.
    pub fn append(&mut self, tokens: &[u32]) -> Result<Vec<f32>, StepError> {
        check_tokens(&self.spec, tokens)?;
        let wanted = self.length + tokens.len() as u64;
        if wanted > self.settings.context {
            return Err(StepError::ContextFull { wanted, capacity: self.settings.context });
        }
        let mut logits = Vec::new();
        let mut chunks = tokens.chunks(self.settings.prompt_chunk_tokens.max(1) as usize).peekable();
        while let Some(chunk) = chunks.next() {
            let x = self.forward(chunk)?;
            if chunks.peek().is_none() {
                logits = self.logits(&x)?;
            }
        }
        Ok(logits)
    }

    /// The residual stream [n, H] after the last block, for `n` tokens that are put into the cache.
    fn forward(&mut self, tokens: &[u32]) -> Result<Tensor, StepError> {
        let device = self.device;
        let (past, n) = (self.length, tokens.len() as u64);
        let arena = device.arena();
        arena.enter(Phase::Generate, None);
        let ids = device.alloc(DType::U32, &[n], Tag::Data, "tokens")?;
        device.write_u32(&ids, tokens)?;
        let positions = positions(device, 1, n, past)?;
        let ctx = Context {
            device,
            spec: &self.spec,
            activations: self.settings.precision.activations,
            compute: self.settings.precision.compute(),
            ropes: &self.ropes,
            rope: self.ropes.of(false),
            positions: &positions,
            attention: attention_shape(&self.spec, 1, n, past, self.settings.context),
            mlp_chunk_tokens: None,
        };
        let mut x = embedding::forward(&ctx, &mut self.weights, &ids)?;
        for (layer, (keys, values)) in (0..).zip(&self.cache) {
            arena.enter(Phase::Generate, Some(layer));
            let weights = self.weights.gather(BlockId::Layer(layer))?;
            x = block::infer(&ctx.layer(layer), &weights, x, |qkv| {
                for (new, cache) in [(&qkv.k, keys), (&qkv.v, values)] {
                    let out = rows(cache, past, past + n)?;
                    device.run(Op::Cast { x: new, out: &out, rounding: Rounding::Nearest })?;
                }
                Ok((keys.clone(), values.clone()))
            })?;
            self.weights.release(BlockId::Layer(layer));
        }
        self.length += n;
        Ok(x)
    }

    fn logits(&mut self, x: &Tensor) -> Result<Vec<f32>, StepError> {
        self.device.arena().enter(Phase::Generate, None);
        let last = rows(x, x.rows() - 1, x.rows())?;
        let head = Head::gather(&mut self.weights, self.spec.tie_word_embeddings)?;
        let normed = head.norm(&self.spec.norm)?.forward(self.device, &last)?;
        let logits = self.device.alloc(DType::F32, &[1, self.spec.vocab_size], Tag::Logits, "logits")?;
        head.linear()?.forward(
            self.device,
            &normed.out,
            &logits,
            false,
            self.settings.precision.compute(),
        )?;
        head.release(&mut self.weights);
        let mut logits = self.device.read_f32(&logits)?;
        if let Some(cap) = self.spec.logit_soft_cap {
            logits.iter_mut().for_each(|x| *x = (cap * (f64::from(*x) / cap).tanh()) as f32);
        }
        Ok(logits)
    }
}
