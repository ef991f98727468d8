//! What both parts of a block have in common: a norm before or after, and the addition to the residual stream.

use plimsoll_device::{DeviceExt, Elementwise, Rounding, Tensor};
use plimsoll_memory::Tag;

use super::saved::{Raw, Summed};
use crate::StepError;
use crate::context::Context;
use crate::gradients::Gradients;
use crate::norm::{Norm, Normed};

/// What a part of the block multiplies: the stream normalised, or as it is where no norm stands before the part.
pub(super) fn before(
    ctx: &Context<'_>,
    norm: Option<Norm<'_>>,
    stream: &Tensor,
) -> Result<Normed, StepError> {
    let Normed { out, statistics } = normalise(ctx, norm, stream)?;
    Ok(Normed { out: ctx.linears.input(ctx.device, &out)?, statistics })
}

/// The same for the feed-forward part, whose chunks or experts each multiply a tensor of their own.
pub(super) fn before_mlp(
    ctx: &Context<'_>,
    norm: Option<Norm<'_>>,
    stream: &Tensor,
) -> Result<Normed, StepError> {
    let in_parts = ctx.experts.is_some() || ctx.mlp_chunk(ctx.tokens(stream.rows())).is_some();
    if in_parts { normalise(ctx, norm, stream) } else { before(ctx, norm, stream) }
}

fn normalise(ctx: &Context<'_>, norm: Option<Norm<'_>>, stream: &Tensor) -> Result<Normed, StepError> {
    match norm {
        Some(norm) => norm.forward(ctx.device, stream),
        None => Ok(Normed { out: stream.clone(), statistics: None }),
    }
}

/// dx += the gradient of the stream through [`before`].
pub(super) fn before_backward(
    ctx: &Context<'_>,
    norm: Option<Norm<'_>>,
    stream: &Tensor,
    normed: Normed,
    dnormed: Tensor,
    dx: &Tensor,
    gradients: &mut Gradients<'_>,
) -> Result<(), StepError> {
    let dnormed = ctx.sum(dnormed, "dnorm")?;
    match (norm, normed.statistics) {
        (Some(norm), Some(statistics)) => {
            drop(normed.out);
            norm.backward(ctx.device, gradients, stream, &statistics, &dnormed, dx)
        }
        _ => Ok(ctx.device.run(Elementwise::Add { a: dx, b: &dnormed, out: dx })?),
    }
}

/// Writes a part's output to a tensor, or adds it where the flag says so.
pub(super) trait Project: FnOnce(&Tensor, bool) -> Result<(), StepError> {}

impl<F: FnOnce(&Tensor, bool) -> Result<(), StepError>> Project for F {}

/// A part whose output is normalised: the normed output and what the norm saw, both of the shape of `like`.
pub(super) fn project_raw(
    ctx: &Context<'_>,
    norm: &Norm<'_>,
    like: &Tensor,
    project: impl Project,
) -> Result<(Tensor, Raw), StepError> {
    let raw = project_sum(ctx, like, project)?;
    let Normed { out, statistics } = norm.forward(ctx.device, &raw)?;
    let missing = StepError::MissingWeight { block: norm.block, role: norm.role };
    Ok((out, Raw { x: raw, statistics: statistics.ok_or(missing)? }))
}

/// A part's output, of all ranks: of the shape of `like`.
fn project_sum(ctx: &Context<'_>, like: &Tensor, project: impl Project) -> Result<Tensor, StepError> {
    let part = activation_tensor(ctx, ctx.tokens(like.rows()), like.columns(), "part")?;
    project(&part, false)?;
    ctx.sum(part, "part")
}

/// Where the sum of stream and part goes.
pub(super) enum Stream<'a> {
    /// Into the stream's own memory.
    Own(Tensor),
    /// Into memory of its own: the stream is still needed.
    Shared(&'a Tensor),
}

/// The sum of the residual stream and a part's output, normalised first where there is a norm for it.
pub(super) fn add_part(
    ctx: &Context<'_>,
    norm: Option<Norm<'_>>,
    stream: Stream<'_>,
    name: &'static str,
    project: impl Project,
) -> Result<Summed, StepError> {
    match norm {
        None => {
            let stream = match stream {
                Stream::Own(stream) => stream,
                Stream::Shared(stream) => copy(ctx, stream, name)?,
            };
            if ctx.products.is_some() {
                let part = project_sum(ctx, &stream, project)?;
                ctx.device.run(Elementwise::Add { a: &stream, b: &part, out: &stream })?;
                return Ok(Summed { stream, raw: None });
            }
            project(&stream, true)?;
            Ok(Summed { stream, raw: None })
        }
        Some(norm) => {
            let stream = match &stream {
                Stream::Own(stream) => stream,
                Stream::Shared(stream) => *stream,
            };
            let (normed, raw) = project_raw(ctx, &norm, stream, project)?;
            ctx.device.run(Elementwise::Add { a: stream, b: &normed, out: &normed })?;
            Ok(Summed { stream: normed, raw: Some(raw) })
        }
    }
}

/// The gradient of what a norm after a part saw, or dx itself where there is none.
pub(super) fn after_backward(
    ctx: &Context<'_>,
    norm: Option<Norm<'_>>,
    raw: Option<Raw>,
    dx: &Tensor,
    gradients: &mut Gradients<'_>,
) -> Result<Tensor, StepError> {
    let (Some(norm), Some(Raw { x, statistics })) = (norm, raw) else { return Ok(dx.clone()) };
    let draw = zeroed(ctx, &x, "dpart")?;
    norm.backward(ctx.device, gradients, &x, &statistics, dx, &draw)?;
    Ok(draw)
}

/// Zeros of the shape and type of `like`.
pub(super) fn zeroed(ctx: &Context<'_>, like: &Tensor, name: &'static str) -> Result<Tensor, StepError> {
    let out = ctx.device.alloc(like.dtype(), like.shape().dims(), Tag::Activations, name)?;
    ctx.device.run(Elementwise::Fill { out: &out, value: 0.0 })?;
    Ok(out)
}

/// Room for activations `[rows, columns]`.
pub(super) fn activation_tensor(
    ctx: &Context<'_>,
    rows: u64,
    columns: u64,
    name: &'static str,
) -> Result<Tensor, StepError> {
    Ok(ctx.device.alloc(ctx.activations, &[rows, columns], Tag::Activations, name)?)
}

fn copy(ctx: &Context<'_>, x: &Tensor, name: &'static str) -> Result<Tensor, StepError> {
    let out = activation_tensor(ctx, x.rows(), x.columns(), name)?;
    ctx.device.run(Elementwise::Cast { x, out: &out, rounding: Rounding::Nearest })?;
    Ok(out)
}
