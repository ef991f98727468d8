//! One transformer block, forward and backward, as a row of stages.
//!
//! `forward` keeps of each stage's output what the save policy says; `backward` restores the stages in order, computing
//! again by the same functions what was dropped, half a block at a time. Shapes: N tokens, H hidden, Q and KV widths of
//! queries and keys, I inner width. Where ranks share the rows of the residual stream, it has a part of the N rows, and so has
//! what is kept of it and of its norms.

mod attention;
mod experts;
mod keys;
mod latent;
mod mlp;
mod mover;
mod parts;
mod ring;
mod saved;
mod sinks;

use plimsoll_device::Tensor;
use plimsoll_model::Role;

use crate::StepError;
use crate::context::Context;
use crate::gradients::Gradients;
use crate::norm::Norm;
use crate::policy::{LayerPolicy, Save};
use crate::store::BlockWeights;

pub(crate) use mlp::SavedMlp;
use parts::{Stream, add_part, after_backward, before, before_backward, before_mlp, project_raw};

pub(crate) use attention::{attend, attend_into, attended};
pub(crate) use keys::{Attend, Chunk, Keys, Turn, Visit, chunks};
pub(crate) use latent::{Absorbed, LatentCache, values_of_cache};
pub(crate) use mover::Mover;
pub(crate) use ring::{Around, Ring};
pub(crate) use saved::{Held, Qkv, Saved};
pub(crate) use sinks::apply as apply_sinks;

/// x `[N, H]` through the block; the result and what was kept of the way.
pub(crate) fn forward(
    ctx: &Context<'_>,
    weights: &BlockWeights,
    policy: LayerPolicy,
    x: Tensor,
) -> Result<(Tensor, Saved), StepError> {
    let norms = Norms::of(ctx, weights)?;
    let normed = before(ctx, norms.attention, &x)?;
    let input = Held::new(ctx, policy.input, x.clone())?;
    let qkv = attention::project_qkv(ctx, weights, &ctx.of_all_rows(&normed.out)?)?;
    // Where there is no norm, its output is the stream itself.
    let kept = |save, has_norm: bool| if has_norm { save } else { Save::Recompute };
    let attention_norm = Held::new(ctx, kept(policy.norms, normed.statistics.is_some()), normed)?;
    let attended = attention::attend(ctx, &qkv, weights.find(Role::Sinks))?;
    let qkv = Held::new(ctx, policy.qkv, qkv)?;
    let stream = match policy.input {
        // An input that the block does not keep is its caller's.
        Save::Recompute => Stream::Shared(&x),
        save => own_or_shared(save, &x),
    };
    let summed = add_part(ctx, norms.attention_out, stream, "middle", |out, accumulate| {
        attention::project_out(ctx, weights, &attended.out, out, accumulate)
    })?;
    drop(x);
    let attention = Held::new(ctx, policy.attention, attended)?;

    let normed = before_mlp(ctx, norms.mlp, &summed.stream)?;
    let middle = Held::new(ctx, policy.middle, summed.clone())?;
    let stream = summed.stream;
    let shared = own_or_shared(policy.middle, &stream);
    let (out, mlp) = mlp::forward(ctx, weights, policy, normed, |project| {
        add_part(ctx, norms.mlp_out, shared, "residual", project)
    })?;
    let mlp_out = match out.raw {
        Some(raw) => Held::new(ctx, policy.norms, raw)?,
        None => Held::Dropped,
    };
    let saved = Saved { input, attention_norm, qkv, attention, middle, mlp, mlp_out };
    Ok((out.stream, saved))
}

/// The stream may be overwritten unless it is kept as it is.
fn own_or_shared(save: Save, stream: &Tensor) -> Stream<'_> {
    match save {
        Save::Keep => Stream::Shared(stream),
        Save::Int8 { .. } | Save::Recompute => Stream::Own(stream.clone()),
    }
}

/// The same for inference: nothing is kept. `attend` makes what attention gives of queries, keys and values, beside the sinks of heads if
/// there are any, `[N, Q]`, and what lives as long as that.
pub(crate) fn infer<K>(
    ctx: &Context<'_>,
    weights: &BlockWeights,
    input: Tensor,
    attend: impl FnOnce(&Qkv, Option<&Tensor>) -> Result<(Tensor, K), StepError>,
) -> Result<Tensor, StepError> {
    let norms = Norms::of(ctx, weights)?;
    let normed = before(ctx, norms.attention, &input)?;
    let mut qkv = attention::project_qkv(ctx, weights, &ctx.of_all_rows(&normed.out)?)?;
    drop(normed);
    (qkv.raw_q, qkv.raw_k) = (None, None);
    let attended = attend(&qkv, weights.find(Role::Sinks))?;
    drop(qkv.q);
    let summed = add_part(ctx, norms.attention_out, Stream::Own(input), "middle", |out, accumulate| {
        attention::project_out(ctx, weights, &attended.0, out, accumulate)
    })?;
    drop(attended);
    let normed = before_mlp(ctx, norms.mlp, &summed.stream)?;
    let stream = Stream::Own(summed.stream);
    let (out, _) = mlp::forward(ctx, weights, LayerPolicy::nothing(), normed, |project| {
        add_part(ctx, norms.mlp_out, stream, "residual", project)
    })?;
    Ok(out.stream)
}

/// The part of [`infer`] that leaves keys and values, where nothing else is asked for.
pub(crate) fn infer_keys(
    ctx: &Context<'_>,
    weights: &BlockWeights,
    input: &Tensor,
    keep: impl FnOnce(&Qkv) -> Result<(), StepError>,
) -> Result<(), StepError> {
    let normed = before(ctx, Norms::of(ctx, weights)?.attention, input)?;
    keep(&attention::project_qkv(ctx, weights, &ctx.of_all_rows(&normed.out)?)?)
}

/// dx `[N, H]` holds the gradient of the block's output and becomes that of its input; weight gradients are added.
pub(crate) fn backward(
    ctx: &Context<'_>,
    weights: &BlockWeights,
    saved: Saved,
    dx: &Tensor,
    gradients: &mut Gradients<'_>,
) -> Result<(), StepError> {
    let Saved { input, attention_norm, qkv, attention, middle, mlp, mlp_out } = saved;
    let SavedMlp { norm: mlp_norm, within } = mlp;
    let norms = || Norms::of(ctx, weights);
    let missing = || Err(StepError::MissingWeight { block: weights.block(), role: Role::AttentionNorm });
    let input = input.restore(ctx, missing)?;

    // What is computed again for the queries alone waits for the second half as it waited for the first: dropped.
    let mut attention_norm = attention_norm;
    let qkv = qkv.restore(ctx, || {
        let recomputed = attention_norm.is_dropped();
        let held = std::mem::replace(&mut attention_norm, Held::Dropped);
        let normed = held.restore(ctx, || before(ctx, norms()?.attention, &input))?;
        let qkv = attention::project_qkv(ctx, weights, &ctx.of_all_rows(&normed.out)?)?;
        if !recomputed {
            attention_norm = Held::plain(normed);
        }
        Ok(qkv)
    })?;
    let attended = attention.restore(ctx, || attention::attend(ctx, &qkv, weights.find(Role::Sinks)))?;
    let middle = middle.restore(ctx, || {
        add_part(ctx, norms()?.attention_out, Stream::Shared(&input), "middle", |out, accumulate| {
            attention::project_out(ctx, weights, &attended.out, out, accumulate)
        })
    })?;
    let normed = mlp_norm.restore(ctx, || before_mlp(ctx, norms()?.mlp, &middle.stream))?;

    let all = ctx.of_all_rows(&normed.out)?;
    let dnormed = mlp::backward(ctx, weights, within, &all, gradients, |again, gradients| {
        let mlp_out = restore_raw(ctx, norms()?.mlp_out, mlp_out, dx, again)?;
        ctx.of_all_rows(&after_backward(ctx, norms()?.mlp_out, mlp_out, dx, gradients)?)
    })?;
    drop(all);
    before_backward(ctx, norms()?.mlp, &middle.stream, normed, dnormed, dx, gradients)?;

    let dout = after_backward(ctx, norms()?.attention_out, middle.raw, dx, gradients)?;
    drop(middle.stream);
    let normed = attention_norm.restore(ctx, || before(ctx, norms()?.attention, &input))?;
    let (all, dout) = (ctx.of_all_rows(&normed.out)?, ctx.of_all_rows(&dout)?);
    let dnormed = attention::backward(ctx, weights, qkv, attended, &all, &dout, gradients)?;
    drop((all, dout));
    before_backward(ctx, norms()?.attention, &input, normed, dnormed, dx, gradients)
}

/// What the norm after the feed-forward part saw, where there is one.
fn restore_raw(
    ctx: &Context<'_>,
    norm: Option<Norm<'_>>,
    held: Held<saved::Raw>,
    like: &Tensor,
    project: impl parts::Project,
) -> Result<Option<saved::Raw>, StepError> {
    let Some(norm) = norm else { return Ok(None) };
    held.restore(ctx, || Ok(project_raw(ctx, &norm, like, project)?.1)).map(Some)
}

/// The norms of a block, where it has them.
struct Norms<'w> {
    attention: Option<Norm<'w>>,
    attention_out: Option<Norm<'w>>,
    mlp: Option<Norm<'w>>,
    mlp_out: Option<Norm<'w>>,
}

impl<'w> Norms<'w> {
    fn of(ctx: &Context<'_>, weights: &'w BlockWeights) -> Result<Norms<'w>, StepError> {
        let of = |role, bias| weights.norm(role, bias, &ctx.spec.norm);
        let norm = |role, bias| weights.find(role).map(|_| of(role, bias)).transpose();
        Ok(Norms {
            attention: norm(Role::AttentionNorm, Some(Role::AttentionNormBias))?,
            attention_out: norm(Role::PostAttentionNorm, None)?,
            mlp: norm(Role::MlpNorm, Some(Role::MlpNormBias))?,
            mlp_out: norm(Role::PostMlpNorm, None)?,
        })
    }
}
