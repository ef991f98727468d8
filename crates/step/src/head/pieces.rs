//! The loss where the head's table comes a piece at a time: logits are made twice, once for the loss and once for the
//! gradients, and never of more than some tokens and a piece of the vocabulary. The bits are those of the whole table.

use std::ops::Range;

use plimsoll_device::{DType, DeviceExt, Elementwise, Loss, PIECE_ROWS, Product, Tensor};
use plimsoll_memory::Tag;
use plimsoll_model::{BlockId, Role};

use super::{column, rows};
use crate::StepError;
use crate::context::Context;
use crate::gradients::Gradients;
use crate::inputs::Labels;
use crate::norm::{Norm, Normed};
use crate::products::Products;

/// A loss under way.
pub(crate) struct PiecedLoss<'a> {
    norm: Norm<'a>,
    x: Tensor,
    labels: Labels,
    /// Of all ranks.
    normed: Normed,
    chunk_tokens: u64,
    /// f32 `[N, 2 R]`
    runs: Tensor,
    /// f32 `[N, 1]`
    target_logits: Tensor,
    /// The number of the first of this rank's rows of the table.
    first_row: u64,
    /// f32 `[chunk, P]`
    logits: Tensor,
    /// The gradient of the normed tokens of all ranks, f32 `[N, H]`.
    dnormed: Option<Tensor>,
}

/// A piece of the head's table.
#[derive(Clone, Copy)]
pub(crate) struct HeadPiece<'p> {
    pub block: BlockId,
    pub role: Role,
    pub piece: u32,
    pub rows: &'p Range<u64>,
    /// `[P, H]`
    pub weight: &'p Tensor,
}

impl<'a> PiecedLoss<'a> {
    /// Begins with x `[N, H]`, for pieces of a vocabulary of `vocab_size` tokens.
    pub fn begin(
        ctx: &Context<'_>,
        norm: Norm<'a>,
        x: Tensor,
        labels: &Labels,
        chunk_tokens: u64,
        pieces: &[Range<u64>],
    ) -> Result<PiecedLoss<'a>, StepError> {
        let device = ctx.device;
        let Normed { out, statistics } = norm.forward(device, &x)?;
        let normed = Normed { out: ctx.of_all_rows(&out)?, statistics };
        drop(out);
        let tokens = normed.out.rows();
        let chunk_tokens = chunk_tokens.clamp(1, tokens.max(1));
        let cut = ctx.tables();
        let runs: u64 = match cut {
            // Of all ranks.
            Some(_) => ctx.spec.vocab_size.div_ceil(PIECE_ROWS),
            None => pieces.iter().map(|piece| (piece.end - piece.start).div_ceil(PIECE_ROWS)).sum(),
        };
        let widest = pieces.iter().map(|piece| piece.end - piece.start).max().unwrap_or(1);
        let alloc = |sizes: &[u64], tag, name| device.alloc(DType::F32, sizes, tag, name);
        let runs = alloc(&[tokens, 2 * runs], Tag::Logits, "logits.runs")?;
        let target_logits = alloc(&[tokens, 1], Tag::Logits, "logits.targets")?;
        device.run(Elementwise::Fill { out: &target_logits, value: 0.0 })?;
        if cut.is_some() {
            device.run(Elementwise::Fill { out: &runs, value: 0.0 })?;
        }
        let first_row = cut.map_or(0, Products::first_row);
        let logits = alloc(&[chunk_tokens, widest], Tag::Logits, "logits")?;
        let (dnormed, labels) = (None, labels.clone());
        Ok(PiecedLoss {
            norm,
            x,
            labels,
            normed,
            chunk_tokens,
            runs,
            target_logits,
            first_row,
            logits,
            dnormed,
        })
    }

    /// The logits of a piece, for every chunk of tokens.
    fn for_each_chunk(
        &self,
        ctx: &Context<'_>,
        weight: &Tensor,
        mut body: impl FnMut(&PieceChunk) -> Result<(), StepError>,
    ) -> Result<(), StepError> {
        let tokens = self.normed.out.rows();
        let (targets, weights) = (column(&self.labels.targets)?, self.labels.weights.as_ref());
        let weights = weights.map(column).transpose()?;
        let flat = column(&self.logits)?;
        super::for_each_range(ctx.device, tokens, self.chunk_tokens, |start, end, nth| {
            let (n, width) = (end - start, weight.rows());
            let logits = super::reshaped(&rows(&flat, 0, n * width)?, &[n, width])?;
            let chunk = PieceChunk {
                nth,
                normed: rows(&self.normed.out, start, end)?,
                logits,
                targets: super::reshaped(&rows(&targets, start, end)?, &[n])?,
                weights: weights.as_ref().map(|weights| rows(weights, start, end)).transpose()?,
                runs: rows(&self.runs, start, end)?,
                target_logits: rows(&self.target_logits, start, end)?,
                range: start..end,
            };
            let (x, out, compute) = (&chunk.normed, &chunk.logits, ctx.compute);
            ctx.device.run(Product::Linear { x, weight, bias: None, out, accumulate: false, compute })?;
            body(&chunk)
        })
    }

    /// Takes what a piece adds to the losses.
    pub fn add(&self, ctx: &Context<'_>, piece: HeadPiece<'_>) -> Result<(), StepError> {
        self.for_each_chunk(ctx, piece.weight, |chunk| {
            Ok(ctx.device.run(Loss::LogitRuns {
                logits: &chunk.logits,
                first_column: self.first_row + piece.rows.start,
                targets: &chunk.targets,
                soft_cap: ctx.logit_soft_cap(),
                runs: &chunk.runs,
                target_logits: &chunk.target_logits,
            })?)
        })
    }

    /// Writes the losses, when all pieces were added.
    pub fn losses(&self, ctx: &Context<'_>) -> Result<(), StepError> {
        // Where one rank has written, the others have zeros.
        if let Some(products) = ctx.tables() {
            products.sum(ctx.device, &self.runs)?;
            products.sum(ctx.device, &self.target_logits)?;
        }
        Ok(ctx.device.run(Loss::LossOfRuns {
            runs: &self.runs,
            target_logits: &self.target_logits,
            targets: &self.labels.targets,
            weights: self.labels.weights.as_ref(),
            losses: &self.labels.losses,
        })?)
    }

    /// The gradients of a piece and of its part of the input, for a loss multiplied by `scale`; the pieces in order.
    /// `first` additions were made to the gradients of each piece in this pass before.
    pub fn backward(
        &mut self,
        ctx: &Context<'_>,
        gradients: &mut Gradients<'_>,
        piece: HeadPiece<'_>,
        scale: f32,
        first: u64,
    ) -> Result<(), StepError> {
        let HeadPiece { block, role, rows: range, .. } = piece;
        let dnormed = match &self.dnormed {
            Some(dnormed) => dnormed.clone(),
            None => {
                let sizes = [self.normed.out.rows(), self.normed.out.columns()];
                ctx.device.alloc(DType::F32, &sizes, Tag::Activations, "dnormed")?
            }
        };
        let wanted = gradients.wants(block, role);
        self.for_each_chunk(ctx, piece.weight, |chunk| {
            let (device, compute, logits) = (ctx.device, ctx.compute, &chunk.logits);
            device.run(Loss::GradientOfRuns {
                logits,
                first_column: self.first_row + range.start,
                targets: &chunk.targets,
                weights: chunk.weights.as_ref(),
                runs: &chunk.runs,
                soft_cap: ctx.logit_soft_cap(),
                gradient_scale: scale,
            })?;
            if wanted {
                let target = gradients.rows_target((block, role), piece.piece, range, first + chunk.nth)?;
                target.add_product(device, logits, &chunk.normed, None, compute)?;
            }
            let dx = &rows(&dnormed, chunk.range.start, chunk.range.end)?;
            let (dout, weight, accumulate) = (logits, piece.weight, range.start > 0);
            Ok(device.run(Product::LinearBackwardInput { dout, weight, dx, accumulate, compute })?)
        })?;
        self.dnormed = Some(dnormed);
        Ok(())
    }

    /// Times that the backward pass adds to the gradient of a piece.
    pub fn additions(&self) -> u64 {
        self.normed.out.rows().div_ceil(self.chunk_tokens)
    }

    /// The gradient of x, when the backward pass has seen all pieces.
    pub fn finish(self, ctx: &Context<'_>, gradients: &mut Gradients<'_>) -> Result<Tensor, StepError> {
        let PiecedLoss { norm, x, normed, dnormed, runs, logits, target_logits, .. } = self;
        drop((runs, logits, target_logits));
        let Normed { out, statistics, .. } = normed;
        let out = ctx.of_stream(&out)?;
        if let Some(dnormed) = dnormed {
            let dnormed = match ctx.tables() {
                Some(_) => ctx.sum(dnormed, "dnormed")?,
                None => ctx.of_stream(&dnormed)?,
            };
            let rounding = plimsoll_device::Rounding::Nearest;
            ctx.device.run(Elementwise::Cast { x: &dnormed, out: &out, rounding })?;
        }
        super::through_norm(ctx, &norm, &x, &out, statistics.as_ref(), gradients)
    }
}

/// Some tokens and a piece of the vocabulary.
struct PieceChunk {
    nth: u64,
    /// `[n, H]`
    normed: Tensor,
    /// f32 `[n, P]`
    logits: Tensor,
    targets: Tensor,
    weights: Option<Tensor>,
    runs: Tensor,
    target_logits: Tensor,
    range: Range<u64>,
}
