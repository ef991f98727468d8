//! The beginning of the residual stream: token embeddings, scaled where the family does so, and learned positions where
//! it has them.

use plimsoll_device::{DeviceExt, Elementwise, Embedding, Tensor};
use plimsoll_memory::Tag;
use plimsoll_model::{BlockId, Role};

use crate::StepError;
use crate::context::Context;
use crate::gradients::Gradients;
use crate::store::{BlockWeights, WeightStore};
use crate::tier::Unit;

/// The embeddings [N, H] of `tokens` at the context's positions. `ids` are the tokens as the host knows them; a dry run need
/// not.
pub(crate) fn forward(
    ctx: &Context<'_>,
    store: &mut WeightStore<'_>,
    (tokens, ids): (&Tensor, &[u32]),
) -> Result<Tensor, StepError> {
    let (weights, rows) = store.gather_embedding(tokens, ids)?;
    let sizes = [tokens.elements(), ctx.spec.hidden_size];
    let alloc = |name| ctx.device.alloc(ctx.activations, &sizes, Tag::Activations, name);
    let out = alloc("residual")?;
    ctx.device.run(Embedding::Lookup {
        tokens: &rows,
        table: weights.get(Role::TokenEmbedding)?,
        out: &out,
    })?;
    drop(rows);
    if let Some(adapter) = weights.adapter(Role::TokenEmbedding)? {
        adapter.embed(ctx, tokens, &out)?;
    }
    if let Some(factor) = ctx.spec.embedding_scale {
        ctx.device.run(Elementwise::Scale { x: &out, factor: factor as f32 })?;
    }
    if let Some(table) = weights.find(Role::PositionEmbedding) {
        let positions = alloc("positions")?;
        ctx.device.run(Embedding::Lookup { tokens: ctx.positions, table, out: &positions })?;
        ctx.device.run(Elementwise::Add { a: &out, b: &positions, out: &out })?;
    }
    drop(weights);
    store.release(Unit::of_matrices(BlockId::Embedding, 0), false);
    Ok(out)
}

/// Adds the gradient of the embeddings, dx [N, H], to that of their tables and adapter, where these are trained; dx is
/// scaled on the way.
pub(crate) fn backward(
    ctx: &Context<'_>,
    weights: &BlockWeights,
    tokens: &Tensor,
    dx: &Tensor,
    gradients: &mut Gradients<'_>,
) -> Result<(), StepError> {
    let adapter = weights.adapter(Role::TokenEmbedding)?;
    let scatter = |gradients: &mut Gradients<'_>, tokens: &Tensor, role| -> Result<(), StepError> {
        // One that is written in pieces is the caller's affair.
        let in_pieces = gradients.is_in_pieces(BlockId::Embedding, role);
        if in_pieces || !gradients.wants(BlockId::Embedding, role) {
            return Ok(());
        }
        gradients.scatter(BlockId::Embedding, role, tokens, dx)
    };
    if ctx.spec.attention.rope.is_none() {
        scatter(gradients, ctx.positions, Role::PositionEmbedding)?;
    }
    if let Some(factor) = ctx.spec.embedding_scale {
        ctx.device.run(Elementwise::Scale { x: dx, factor: factor as f32 })?;
    }
    scatter(gradients, tokens, Role::TokenEmbedding)?;
    match adapter {
        Some(adapter) => adapter.embed_backward(ctx, gradients, tokens, dx),
        None => Ok(()),
    }
}
