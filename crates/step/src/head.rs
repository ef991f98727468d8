//! The end of the model: final norm, head, and the loss, taken in chunks of tokens, forward and backward together.
//! Logits of one chunk exist at a time; their gradients overwrite them.

mod pieces;

use plimsoll_device::{DType, Device, DeviceExt, Elementwise, Loss, Op, Tensor};
use plimsoll_memory::Tag;
use plimsoll_model::{BlockId, NormSpec, Role};

use crate::StepError;
use crate::context::Context;
use crate::gradients::Gradients;
use crate::inputs::Labels;
use crate::linear::{Linear, Weight};
use crate::norm::{Norm, Statistics};
use crate::store::{BlockWeights, WeightStore};
use crate::tier::Unit;

/// The weights of the head: its own norm and either its own matrix or the embedding's.
pub(crate) struct Head {
    own: BlockWeights,
    tied: Option<BlockWeights>,
}

pub(crate) use pieces::{HeadPiece, PiecedLoss};

impl Head {
    /// Gathers the head's block and, where the head is tied, the embedding's.
    pub fn gather(store: &mut WeightStore<'_>, tied: bool) -> Result<Head, StepError> {
        let own = store.gather(BlockId::Head)?;
        let tied = if tied { Some(store.gather(BlockId::Embedding)?) } else { None };
        Ok(Head { own, tied })
    }

    /// Gives the blocks back.
    pub fn release(self, store: &mut WeightStore<'_>) {
        drop(self.own);
        store.release(Unit::of_matrices(BlockId::Head, 0), false);
        if self.tied.is_some() {
            drop(self.tied);
            store.release(Unit::of_matrices(BlockId::Embedding, 0), false);
        }
    }

    /// Which table it is.
    pub fn table(tied: bool) -> (BlockId, Role) {
        if tied { (BlockId::Embedding, Role::TokenEmbedding) } else { (BlockId::Head, Role::LmHead) }
    }

    /// The final norm.
    pub fn norm(&self, spec: &NormSpec) -> Result<Norm<'_>, StepError> {
        self.own.norm(Role::FinalNorm, Some(Role::FinalNormBias), spec)
    }

    /// The projection to logits.
    pub fn linear(&self) -> Result<Linear<'_>, StepError> {
        let (weights, role) = match &self.tied {
            Some(embedding) => (embedding, Role::TokenEmbedding),
            None => (&self.own, Role::LmHead),
        };
        // An embedding's adapter is none of the head's.
        let adapter = if self.tied.is_some() { None } else { weights.adapter(role)? };
        let (block, weight) = (weights.block(), weights.get(role)?);
        let weight = Weight::Here(weight);
        Ok(Linear { block, role, weight, bias: None, adapter, offsets: None })
    }
}

/// The losses of x [N, H] against its labels, whether the head's table is there as a whole or comes in pieces. Nothing is
/// kept.
pub(crate) fn loss_of(
    ctx: &Context<'_>,
    store: &mut WeightStore<'_>,
    x: &Tensor,
    labels: &Labels,
    chunk_tokens: u64,
) -> Result<(), StepError> {
    let tied = ctx.spec.tie_word_embeddings;
    let (block, role) = Head::table(tied);
    let Some(pieces) = store.pieces(block, role) else {
        let head = Head::gather(store, tied)?;
        if ctx.tables().is_some() {
            let (norm, weight) = (head.norm(&ctx.spec.norm)?, head.linear()?.whole()?);
            let (piece, rows) = (0, 0..weight.rows());
            let pieces = std::slice::from_ref(&rows);
            let loss = PiecedLoss::begin(ctx, norm, x.clone(), labels, chunk_tokens, pieces)?;
            loss.add(ctx, HeadPiece { block, role, piece, rows: &rows, weight })?;
            loss.losses(ctx)?;
            drop(loss);
            head.release(store);
            return Ok(());
        }
        let normed = ctx.of_all_rows(&head.norm(&ctx.spec.norm)?.forward(ctx.device, x)?.out)?;
        for_each_chunk(ctx, &head.linear()?, &normed, labels, chunk_tokens, |chunk| {
            Ok(ctx.device.run(chunk.cross_entropy(ctx.logit_soft_cap(), None))?)
        })?;
        drop(normed);
        head.release(store);
        return Ok(());
    };
    let own = store.gather(BlockId::Head)?;
    let norm = own.norm(Role::FinalNorm, Some(Role::FinalNormBias), &ctx.spec.norm)?;
    let loss = PiecedLoss::begin(ctx, norm, x.clone(), labels, chunk_tokens, &pieces)?;
    for (piece, rows) in (0..).zip(&pieces) {
        let weight = &store.gather_piece(block, role, piece)?;
        loss.add(ctx, HeadPiece { block, role, piece, rows, weight })?;
        store.release(Unit::Piece(block, piece), false);
    }
    loss.losses(ctx)
}

/// The losses, and the backward pass with them: returns the gradient of x, for a loss multiplied by `scale`.
pub(crate) fn loss_and_backward(
    ctx: &Context<'_>,
    head: &Head,
    x: &Tensor,
    labels: &Labels,
    chunk_tokens: u64,
    scale: f32,
    gradients: &mut Gradients<'_>,
) -> Result<Tensor, StepError> {
    let norm = head.norm(&ctx.spec.norm)?;
    let linear = head.linear()?;
    let normed = norm.forward(ctx.device, x)?;
    let all = ctx.of_all_rows(&normed.out)?;
    for_each_chunk(ctx, &linear, &all, labels, chunk_tokens, |chunk| {
        ctx.device.run(chunk.cross_entropy(ctx.logit_soft_cap(), Some(scale)))?;
        let ctx = &ctx.at_row(chunk.first_row);
        let through = linear.backward_weight(ctx, gradients, &chunk.logits, &chunk.normed)?;
        // The normed chunk has served; its gradient takes its place.
        linear.backward_input(ctx, through, &chunk.logits, &chunk.normed, false)
    })?;
    through_norm(ctx, &norm, x, &ctx.of_stream(&all)?, normed.statistics.as_ref(), gradients)
}

/// The gradient of x from that of its norm.
fn through_norm(
    ctx: &Context<'_>,
    norm: &Norm<'_>,
    x: &Tensor,
    dnormed: &Tensor,
    statistics: Option<&Statistics>,
    gradients: &mut Gradients<'_>,
) -> Result<Tensor, StepError> {
    let dx = ctx.device.alloc(ctx.activations, &[x.rows(), x.columns()], Tag::Activations, "dresidual")?;
    ctx.device.run(Elementwise::Fill { out: &dx, value: 0.0 })?;
    if let Some(statistics) = statistics {
        norm.backward(ctx.device, gradients, x, statistics, dnormed, &dx)?;
    }
    Ok(dx)
}

struct Chunk {
    first_row: u64,
    /// [n, H]
    normed: Tensor,
    /// f32 [n, V]
    logits: Tensor,
    targets: Tensor,
    losses: Tensor,
    weights: Option<Tensor>,
}

impl Chunk {
    fn cross_entropy(&self, soft_cap: Option<f32>, gradient_scale: Option<f32>) -> Op<'_> {
        Loss::CrossEntropy {
            logits: &self.logits,
            targets: &self.targets,
            weights: self.weights.as_ref(),
            losses: &self.losses,
            soft_cap,
            gradient_scale,
        }
        .into()
    }
}

fn for_each_chunk(
    ctx: &Context<'_>,
    linear: &Linear<'_>,
    normed: &Tensor,
    labels: &Labels,
    chunk_tokens: u64,
    mut body: impl FnMut(&Chunk) -> Result<(), StepError>,
) -> Result<(), StepError> {
    let tokens = normed.rows();
    let chunk_tokens = chunk_tokens.clamp(1, tokens.max(1));
    let buffer = ctx.device.alloc(DType::F32, &[chunk_tokens, linear.outputs()], Tag::Logits, "logits")?;
    let targets = column(&labels.targets)?;
    let losses = column(&labels.losses)?;
    let weights = labels.weights.as_ref().map(column).transpose()?;
    for_each_range(ctx.device, tokens, chunk_tokens, |start, end, _| {
        let chunk = Chunk {
            first_row: start,
            normed: rows(normed, start, end)?,
            logits: rows(&buffer, 0, end - start)?,
            targets: rows(&targets, start, end)?,
            losses: rows(&losses, start, end)?,
            weights: weights.as_ref().map(|weights| rows(weights, start, end)).transpose()?,
        };
        linear.forward(&ctx.at_row(start), &chunk.normed, &chunk.logits, false)?;
        body(&chunk)
    })
}

/// Calls `body` with the first token of every chunk, the one behind its last and its number. Chunks are alike but for the last
/// one.
pub(crate) fn for_each_range(
    device: &dyn Device,
    tokens: u64,
    chunk: u64,
    mut body: impl FnMut(u64, u64, u64) -> Result<(), StepError>,
) -> Result<(), StepError> {
    let chunk = chunk.max(1);
    let (whole, rest) = (tokens / chunk, tokens % chunk);
    device.repeat(whole, |i| body(i * chunk, (i + 1) * chunk, i))?;
    match rest {
        0 => Ok(()),
        _ => body(tokens - rest, tokens, whole),
    }
}

/// Rows `start..end` of a tensor.
pub(crate) fn rows(x: &Tensor, start: u64, end: u64) -> Result<Tensor, StepError> {
    x.slice_rows(start..end).ok_or_else(|| mismatch("slice_rows", x))
}

fn column(x: &Tensor) -> Result<Tensor, StepError> {
    reshaped(x, &[x.elements(), 1])
}

/// The same memory in another shape.
pub(crate) fn reshaped(x: &Tensor, sizes: &[u64]) -> Result<Tensor, StepError> {
    x.reshape(sizes).ok_or_else(|| mismatch("reshape", x))
}

fn mismatch(op: &'static str, x: &Tensor) -> StepError {
    plimsoll_device::DeviceError::Mismatch { op, reason: format!("{x:?} cannot be cut so") }.into()
}

#[cfg(test)]
mod tests {
    use plimsoll_device::{Cpu, CpuOptions};

    use super::*;

    #[test]
    fn chunks_are_alike_but_for_the_last_one() {
        let device = Cpu::new(1 << 12, CpuOptions { threads: Some(1), isa: None }).unwrap();
        let ranges = |tokens, chunk| {
            let mut ranges = Vec::new();
            let body = |start, end, nth| {
                ranges.push((start, end, nth));
                Ok(())
            };
            for_each_range(&device, tokens, chunk, body).unwrap();
            ranges
        };
        assert_eq!(ranges(8, 4), [(0, 4, 0), (4, 8, 1)]);
        assert_eq!(ranges(9, 4), [(0, 4, 0), (4, 8, 1), (8, 9, 2)]);
        assert_eq!(ranges(3, 4), [(0, 3, 0)]);
        assert_eq!(ranges(2, 0), [(0, 1, 0), (1, 2, 1)]);
        assert_eq!(ranges(0, 4), []);
    }
}
