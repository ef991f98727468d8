//! Attention over a cache of narrow vectors, for generation (DeepSeek-V2, 2024, section 2.1.2).
//!
//! The cache has `(c, r)` alone: `q k = q (W_k c) + q_r r = (q W_k) c + q_r r`. Queries that took in their heads' half of the matrix
//! see the vectors as the keys of one head. What they gather of them as values goes through the other half behind attention.

use plimsoll_device::{AttentionShape, Device, DeviceExt, Elementwise, MAX_HEAD_DIM, Routing, Tensor};
use plimsoll_model::{Adapted, AdapterLayout, ModelSpec, Role};

use super::{Heads, Vectors, columns, narrowed, new};
use crate::StepError;
use crate::block::Qkv;
use crate::context::Context;
use crate::head::reshaped;
use crate::inputs::numbers;
use crate::matrices::Matrices;
use crate::store::{BlockWeights, WeightStorage};

/// How a cache of narrow vectors is read: as one head of keys `[kv_rank + R]`, whose first columns are the values too.
#[derive(Clone, Copy)]
pub(crate) struct LatentCache {
    heads: Heads,
}

impl LatentCache {
    /// That of a model with latent attention, unless its vectors are wider than attention's heads, or the matrix that is taken in has an
    /// adapter, or a type in which its heads are not apart.
    pub fn of(spec: &ModelSpec, storage: &WeightStorage<'_>) -> Option<LatentCache> {
        let own = LatentCache::of_model(spec)?;
        let is_adapted = |adapters: &AdapterLayout| {
            adapters.trained().any(|p| matches!(p.role, Role::Lora(_, Adapted::KvUpProj)))
        };
        let matrix = own.heads.of_vector() * own.heads.latent.kv_rank;
        let mut parameters = spec.parameters().into_iter().filter(|p| p.role == Role::KvUpProj);
        let apart = parameters.all(|p| {
            let dtype = (storage.types)(&p);
            matrix.is_multiple_of(dtype.run_elements()) && !dtype.is_fp8()
        });
        (apart && !storage.adapters.is_some_and(is_adapted)).then_some(own)
    }

    /// The same for all that the model says.
    fn of_model(spec: &ModelSpec) -> Option<LatentCache> {
        let own = LatentCache { heads: Heads::of_model(spec)? };
        (own.width() <= MAX_HEAD_DIM).then_some(own)
    }

    /// The widest row that a head has in a cache of the model.
    pub fn widest_head(spec: &ModelSpec) -> u64 {
        let own = LatentCache::of_model(spec).map_or(0, |own| own.width());
        own.max(spec.attention.head_dim)
    }

    /// Values of a position.
    pub fn width(&self) -> u64 {
        self.heads.latent.kv_rank + self.heads.rotated
    }

    /// The shape of attention over it, from that over keys and values of all heads.
    pub fn shape(&self, of_heads: AttentionShape) -> AttentionShape {
        AttentionShape { kv_heads: 1, head_dim: self.width(), ..of_heads }
    }

    /// What a pass of so many tokens needs beside its tokens.
    pub fn absorbed(self, device: &dyn Device, tokens: u64) -> Result<Absorbed, StepError> {
        let heads = self.heads.heads;
        let offsets = numbers(device, heads + 1, (0..=heads).map(|head| head * tokens), "heads.offsets")?;
        // Row j of column i of a matrix of so many rows and columns.
        let order = |rows: u64, columns: u64, name| {
            let places = (0..columns).flat_map(|i| (0..rows).map(move |j| j * columns + i));
            numbers(device, rows * columns, places, name)
        };
        let orders = match tokens {
            1 => None,
            _ => Some([order(tokens, heads, "heads.first")?, order(heads, tokens, "tokens.first")?]),
        };
        Ok(Absorbed { cache: self, offsets, orders })
    }
}

/// What the tokens of a pass need to take in the matrix: rows of tokens become rows of heads, so that each head is multiplied with its own
/// part.
pub(crate) struct Absorbed {
    cache: LatentCache,
    /// u32 `[heads + 1]`: the first row of each head.
    offsets: Tensor,
    /// u32 `[N * heads]`: rows of tokens by head, and rows of heads by token; of one token both are the same.
    orders: Option<[Tensor; 2]>,
}

impl Absorbed {
    /// Queries `[N, heads * (kv_rank + R)]`, and the rows of the cache as keys and as values, `[N, kv_rank + R]`.
    pub fn project(
        &self,
        ctx: &Context<'_>,
        weights: &BlockWeights,
        normed: &Tensor,
    ) -> Result<Qkv, StepError> {
        let own = self.cache.heads;
        let (plain, rank, width) = (own.plain(), own.latent.kv_rank, self.cache.width());
        let (q, _) = own.project_queries(ctx, weights, normed)?;
        let rows = q.rows() * own.heads;
        let alloc = |columns, name| new(ctx, rows, columns, name);
        let of_tokens = reshaped(&q, &[rows, own.dim])?;
        drop(q);
        let q = self.by_head(ctx, of_tokens)?;
        // The matrix has rows for values behind those for keys: zeros pass them over.
        let plain_q = alloc(own.of_vector(), "q.plain")?;
        ctx.device.run(Elementwise::Fill { out: &plain_q, value: 0.0 })?;
        columns(ctx, (&q, 0), (&plain_q, 0), plain)?;
        let absorbed = alloc(rank, "q.absorbed")?;
        self.matrices(weights)?.backward_input(ctx.device, &plain_q, &absorbed, false, ctx.compute)?;
        drop(plain_q);
        let wide = alloc(width, "q.wide")?;
        columns(ctx, (&absorbed, 0), (&wide, 0), rank)?;
        columns(ctx, (&q, plain), (&wide, rank), own.rotated)?;
        drop((absorbed, q));
        let wide = self.by_token(ctx, wide)?;
        let q = reshaped(&wide, &[normed.rows(), own.heads * width])?;
        drop(wide);

        let Vectors { normed, common, .. } = own.project_vectors(ctx, weights, normed)?;
        let k = new(ctx, normed.rows(), width, "kv")?;
        columns(ctx, (&normed, 0), (&k, 0), rank)?;
        columns(ctx, (&common, 0), (&k, rank), own.rotated)?;
        Ok(Qkv { q, v: k.clone(), k, raw_q: None, raw_k: None })
    }

    /// Values of heads `[N, heads * V]` from what attention gave.
    fn values(&self, ctx: &Context<'_>, weights: &BlockWeights, out: Tensor) -> Result<Tensor, StepError> {
        let own = self.cache.heads;
        let (tokens, width) = (out.rows(), own.latent.value_dim);
        let rows = tokens * own.heads;
        let alloc = |columns, name| new(ctx, rows, columns, name);
        let gathered = reshaped(&out, &[rows, self.cache.width()])?;
        drop(out);
        let gathered = self.by_head(ctx, gathered)?;
        let vectors = alloc(own.latent.kv_rank, "attention.latent")?;
        columns(ctx, (&gathered, 0), (&vectors, 0), own.latent.kv_rank)?;
        drop(gathered);
        let up = alloc(own.of_vector(), "attention.up")?;
        self.matrices(weights)?.forward(ctx.device, &vectors, None, &up, false, ctx.compute)?;
        drop(vectors);
        let values = alloc(width, "attention.values")?;
        columns(ctx, (&up, own.plain()), (&values, 0), width)?;
        drop(up);
        reshaped(&self.by_token(ctx, values)?, &[tokens, own.heads * width])
    }

    /// The matrix of each head: rows for its keys, and for its values behind them.
    fn matrices<'t>(&'t self, weights: &'t BlockWeights) -> Result<Matrices<'t>, StepError> {
        let all = weights.linear(Role::KvUpProj, None)?.whole()?;
        Ok(Matrices { all, offsets: Some(&self.offsets) })
    }

    fn by_head(&self, ctx: &Context<'_>, x: Tensor) -> Result<Tensor, StepError> {
        self.in_order(ctx, x, 0)
    }

    fn by_token(&self, ctx: &Context<'_>, x: Tensor) -> Result<Tensor, StepError> {
        self.in_order(ctx, x, 1)
    }

    fn in_order(&self, ctx: &Context<'_>, x: Tensor, which: usize) -> Result<Tensor, StepError> {
        let Some(sources) = self.orders.as_ref().and_then(|orders| orders.get(which)) else { return Ok(x) };
        let out = new(ctx, x.rows(), x.columns(), "heads")?;
        ctx.device.run(Routing::Gather { x: &x, sources, each: 1, out: &out })?;
        Ok(out)
    }
}

/// Values of heads from what attention over a cache gave.
pub(crate) fn values_of_cache(
    ctx: &Context<'_>,
    weights: &BlockWeights,
    out: Tensor,
) -> Result<Tensor, StepError> {
    match ctx.absorbed {
        Some(absorbed) => absorbed.values(ctx, weights, out),
        None => narrowed(ctx, out),
    }
}
