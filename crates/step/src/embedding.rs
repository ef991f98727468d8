//! The beginning of the residual stream: token embeddings, scaled where the family does so, and learned positions where
//! it has them.

use plimsoll_device::{DeviceExt, Elementwise, Embedding, Tensor};
use plimsoll_memory::Tag;
use plimsoll_model::{BlockId, Role};

use crate::StepError;
use crate::context::Context;
use crate::gradients::Gradients;
use crate::head::reshaped;
use crate::products::Products;
use crate::store::{BlockWeights, WeightStore};
use crate::tier::Unit;

/// The embeddings [N, H] of `tokens` at the context's positions. `ids` are the tokens as the host knows them; a dry run need
/// not.
pub(crate) fn forward(
    ctx: &Context<'_>,
    store: &mut WeightStore<'_>,
    (tokens, ids): (&Tensor, &[u32]),
) -> Result<Tensor, StepError> {
    let pieces: Vec<_> = store.embedding_pieces().map(|(unit, rows)| (unit.piece(), rows.start)).collect();
    let (block, role) = (BlockId::Embedding, Role::TokenEmbedding);
    if !pieces.is_empty() {
        let out = begin(ctx, tokens)?;
        for (piece, first_row) in pieces {
            let table = store.gather_piece(block, role, piece)?;
            look_up_piece(ctx, &BlockWeights::new(block, vec![(role, table)]), tokens, first_row, &out)?;
            store.release(Unit::Piece(block, piece), false);
        }
        return finish(ctx, &store.resident().gather(block)?, tokens, out);
    }
    let (weights, rows) = store.gather_embedding(tokens, ids)?;
    let out = begin(ctx, tokens)?;
    match ctx.tables() {
        Some(_) => look_up_piece(ctx, &weights, tokens, 0, &out)?,
        None => {
            ctx.device.run(Embedding::Lookup { tokens: &rows, table: weights.get(role)?, out: &out })?;
        }
    }
    drop(rows);
    let out = finish(ctx, &weights, tokens, out)?;
    drop(weights);
    store.release(Unit::of_matrices(BlockId::Embedding, 0), false);
    Ok(out)
}

/// Room for the embeddings of `tokens`; zeros where other ranks have some of the rows.
pub(crate) fn begin(ctx: &Context<'_>, tokens: &Tensor) -> Result<Tensor, StepError> {
    let out = residual(ctx, tokens.elements())?;
    if ctx.tables().is_some() {
        ctx.device.run(Elementwise::Fill { out: &out, value: 0.0 })?;
    }
    Ok(out)
}

/// Room for so many rows of the residual stream.
pub(crate) fn residual(ctx: &Context<'_>, rows: u64) -> Result<Tensor, StepError> {
    let sizes = [rows, ctx.spec.hidden_size];
    Ok(ctx.device.alloc(ctx.activations, &sizes, Tag::Activations, "residual")?)
}

/// Writes the rows of those tokens that a piece of this rank's rows of the table has, from its first row on.
pub(crate) fn look_up_piece(
    ctx: &Context<'_>,
    piece: &BlockWeights,
    tokens: &Tensor,
    first_row: u64,
    out: &Tensor,
) -> Result<(), StepError> {
    let table = piece.get(Role::TokenEmbedding)?;
    let first_row = first_row + ctx.tables().map_or(0, Products::first_row);
    Ok(ctx.device.run(Embedding::LookupPiece { tokens, table, first_row, out })?)
}

/// The residual stream: the rows of all ranks' tables, and what is added to them.
pub(crate) fn finish(
    ctx: &Context<'_>,
    weights: &BlockWeights,
    tokens: &Tensor,
    out: Tensor,
) -> Result<Tensor, StepError> {
    let out = match ctx.tables() {
        Some(_) => ctx.sum(out, "residual")?,
        None => ctx.of_stream(&out)?,
    };
    if let Some(adapter) = weights.adapter(Role::TokenEmbedding)? {
        adapter.embed(ctx, tokens, &out)?;
    }
    if let Some(factor) = ctx.spec.embedding_scale {
        ctx.device.run(Elementwise::Scale { x: &out, factor: factor as f32 })?;
    }
    if let Some(table) = weights.find(Role::PositionEmbedding) {
        let sizes = out.shape();
        let positions = ctx.device.alloc(ctx.activations, sizes.dims(), Tag::Activations, "positions")?;
        let column = reshaped(ctx.positions, &[ctx.positions.elements(), 1])?;
        let tokens = reshaped(&ctx.of_stream(&column)?, &[out.rows()])?;
        ctx.device.run(Embedding::Lookup { tokens: &tokens, table, out: &positions })?;
        ctx.device.run(Elementwise::Add { a: &out, b: &positions, out: &out })?;
    }
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
