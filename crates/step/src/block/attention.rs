//! The attention part: projections, norms of heads, rotation, attention itself.

use plimsoll_device::{Attention, AttentionShape, DType, DeviceExt, Position, RotatedHeads, Tensor};
use plimsoll_memory::Tag;
use plimsoll_model::Role;

use super::parts::{activation_tensor, zeroed};
use super::saved::{Attended, Qkv, Raw};
use super::{latent, sinks};
use crate::StepError;
use crate::context::Context;
use crate::gradients::Gradients;
use crate::head::reshaped;
use crate::norm::{Norm, Normed};
use crate::rope::RopeTable;
use crate::settings::AttentionKind;
use crate::store::BlockWeights;

/// Queries, keys and values of the normed input.
pub(super) fn project_qkv(
    ctx: &Context<'_>,
    weights: &BlockWeights,
    normed: &Tensor,
) -> Result<Qkv, StepError> {
    if let Some(absorbed) = ctx.absorbed {
        return absorbed.project(ctx, weights, normed);
    }
    if let Some(heads) = latent::Heads::of(ctx) {
        return heads.project(ctx, weights, normed);
    }
    let project = |weight, bias, name| project(ctx, weights, (weight, Some(bias)), normed, name);
    let mut q = project(Role::QProj, Role::QBias, "q")?;
    let mut k = project(Role::KProj, Role::KBias, "k")?;
    let v = project(Role::VProj, Role::VBias, "v")?;
    let (mut raw_q, mut raw_k) = (None, None);
    if ctx.spec.attention.qk_norm.is_some() {
        let (normed_q, saw_q) = normalise_heads(ctx, weights, Role::QNorm, q)?;
        let (normed_k, saw_k) = normalise_heads(ctx, weights, Role::KNorm, k)?;
        (q, k, raw_q, raw_k) = (normed_q, normed_k, Some(saw_q), Some(saw_k));
    }
    let heads = RotatedHeads::from_first(ctx.attention.head_dim);
    rotate(ctx, &q, heads, false)?;
    rotate(ctx, &k, heads, false)?;
    Ok(Qkv { q, k, v, raw_q, raw_k })
}

/// What a linear of attention gives.
pub(super) fn project(
    ctx: &Context<'_>,
    weights: &BlockWeights,
    (weight, bias): (Role, Option<Role>),
    x: &Tensor,
    name: &'static str,
) -> Result<Tensor, StepError> {
    let linear = weights.linear(weight, bias)?;
    let out = ctx.device.alloc(ctx.activations, &[x.rows(), linear.outputs()], Tag::Attention, name)?;
    linear.forward(ctx, x, &out, false)?;
    Ok(out)
}

/// The gradients of such a linear's weights from `dout`, and that of its input: into `dx`, or added to it where it is there.
pub(super) fn project_backward(
    ctx: &Context<'_>,
    weights: &BlockWeights,
    (weight, bias): (Role, Option<Role>),
    (x, dout): (&Tensor, &Tensor),
    dx: Option<Tensor>,
    gradients: &mut Gradients<'_>,
) -> Result<Tensor, StepError> {
    let linear = weights.linear(weight, bias)?;
    let through = linear.backward_weight(ctx, gradients, dout, x)?;
    let (out, accumulate) = match dx {
        Some(out) => (out, true),
        None => (activation_tensor(ctx, dout.rows(), linear.inputs(), "dnorm")?, false),
    };
    linear.backward_input(ctx, through, dout, &out, accumulate)?;
    Ok(out)
}

/// x [N, heads * D] with every head, or all heads of a token, normalised; and x itself.
fn normalise_heads(
    ctx: &Context<'_>,
    weights: &BlockWeights,
    role: Role,
    x: Tensor,
) -> Result<(Tensor, Raw), StepError> {
    let norm = weights.norm(role, None, &ctx.spec.norm)?;
    let rows = in_rows(&x, &norm)?;
    let Normed { out, statistics } = norm.forward(ctx.device, &rows)?;
    let missing = StepError::MissingWeight { block: norm.block, role };
    Ok((reshaped(&out, x.shape().dims())?, Raw { x, statistics: statistics.ok_or(missing)? }))
}

/// The gradient of what a norm saw, whole or in rows of the norm's width, from that of what came out.
pub(super) fn raw_backward(
    ctx: &Context<'_>,
    norm: &Norm<'_>,
    raw: &Raw,
    dout: &Tensor,
    name: &'static str,
    gradients: &mut Gradients<'_>,
) -> Result<Tensor, StepError> {
    let dx = zeroed(ctx, &raw.x, name)?;
    let [x, dout, dx_rows] = [in_rows(&raw.x, norm)?, in_rows(dout, norm)?, in_rows(&dx, norm)?];
    norm.backward(ctx.device, gradients, &x, &raw.statistics, &dout, &dx_rows)?;
    Ok(dx)
}

/// A tensor as rows of the norm's width.
fn in_rows(x: &Tensor, norm: &Norm<'_>) -> Result<Tensor, StepError> {
    let width = norm.weight.elements().max(1);
    reshaped(x, &[x.elements() / width, width])
}

/// Turns heads to where their tokens stand, or back.
pub(super) fn rotate(
    ctx: &Context<'_>,
    x: &Tensor,
    heads: RotatedHeads,
    inverse: bool,
) -> Result<(), StepError> {
    let Some(RopeTable { cos, sin }) = ctx.rope else { return Ok(()) };
    let positions = ctx.ropes.rows().unwrap_or(ctx.positions);
    ctx.device.run(Position::Rope { x, positions, cos, sin, heads, inverse })?;
    Ok(())
}

/// Attention of the queries over the keys and values, beside the sinks of heads where there are any.
pub(crate) fn attend(ctx: &Context<'_>, qkv: &Qkv, sinks: Option<&Tensor>) -> Result<Attended, StepError> {
    let attended = match (ctx.chunk, ctx.around) {
        (Some(chunk), _) => chunk.keys.attend(chunk.turn, ctx, (qkv, sinks))?,
        (None, Some(around)) => around.attend(ctx, qkv, sinks)?,
        (None, None) => attend_whole(ctx, qkv, sinks)?,
    };
    Ok(Attended { out: latent::narrowed(ctx, attended.out)?, ..attended })
}

/// The same of sequences that are there as a whole.
fn attend_whole(ctx: &Context<'_>, qkv: &Qkv, sinks: Option<&Tensor>) -> Result<Attended, StepError> {
    let out = attended(ctx, qkv)?;
    let (lse, probabilities) = attend_into(ctx, [&qkv.q, &qkv.k, &qkv.v], sinks, &out, ctx.attention)?;
    Ok(Attended { out, lse, probabilities })
}

/// Memory for what attention gives.
pub(crate) fn attended(ctx: &Context<'_>, qkv: &Qkv) -> Result<Tensor, StepError> {
    let sizes = [qkv.q.rows(), qkv.q.columns()];
    Ok(ctx.device.alloc(ctx.activations, &sizes, Tag::Attention, "attention")?)
}

/// The same of queries, keys and values of another shape than the pass, into `out`: its log-sum-exps, and its probabilities where they
/// are written out.
pub(crate) fn attend_into(
    ctx: &Context<'_>,
    [q, k, v]: [&Tensor; 3],
    sinks: Option<&Tensor>,
    out: &Tensor,
    shape: AttentionShape,
) -> Result<(Tensor, Option<Tensor>), StepError> {
    let lse =
        ctx.device.alloc(DType::F32, &[shape.batch, shape.heads, shape.q_len], Tag::Attention, "lse")?;
    let probabilities = match ctx.attention_kind {
        AttentionKind::Standard => {
            let sizes = [shape.batch, shape.heads, shape.q_len, shape.kv_len];
            Some(ctx.device.alloc(DType::F32, &sizes, Tag::Attention, "probabilities")?)
        }
        _ => None,
    };
    ctx.device.run(Attention::Forward {
        q,
        k,
        v,
        documents: ctx.documents,
        out,
        lse: &lse,
        probabilities: probabilities.as_ref(),
        shape,
        compute: ctx.compute,
    })?;
    sinks::apply(ctx, sinks, out, &lse, probabilities.as_ref(), shape)?;
    Ok((lse, probabilities))
}

/// out (+)= output projection of what attention gave.
pub(super) fn project_out(
    ctx: &Context<'_>,
    weights: &BlockWeights,
    attended: &Tensor,
    out: &Tensor,
    accumulate: bool,
) -> Result<(), StepError> {
    let o_proj = weights.linear(Role::OProj, Some(Role::OBias))?;
    o_proj.forward(ctx, attended, out, accumulate)
}

/// Returns the gradient of the attention's normed input `[N, H]`.
pub(super) fn backward(
    ctx: &Context<'_>,
    weights: &BlockWeights,
    qkv: Qkv,
    attended: Attended,
    normed: &Tensor,
    dx: &Tensor,
    gradients: &mut Gradients<'_>,
) -> Result<Tensor, StepError> {
    let rows = dx.rows();
    let device = ctx.device;
    let alloc =
        |like: &Tensor, name| device.alloc(ctx.activations, &[rows, like.columns()], Tag::Attention, name);
    let o_proj = weights.linear(Role::OProj, Some(Role::OBias))?;
    let through = o_proj.backward_weight(ctx, gradients, dx, &attended.out)?;
    let dout = alloc(&attended.out, "dattention")?;
    o_proj.backward_input(ctx, through, dx, &dout, false)?;
    sinks::backward(ctx, weights, &attended, &dout, gradients)?;
    let (dout, attended) = latent::widened_attended(ctx, dout, attended)?;
    let (raw_q, raw_k) = (qkv.raw_q.clone(), qkv.raw_k.clone());
    let [dq, dk, dv] = match (ctx.chunk, ctx.around) {
        (Some(chunk), _) => chunk.keys.backward(chunk.turn, ctx, &qkv, &attended, &dout)?,
        (None, Some(around)) => around.backward(ctx, &qkv, &attended, &dout)?,
        (None, None) => whole_backward(ctx, &qkv, &attended, &dout)?,
    };
    drop((dout, attended, qkv));
    if let Some(heads) = latent::Heads::of(ctx) {
        return heads.backward(ctx, weights, [raw_q, raw_k], [dq, dk, dv], normed, gradients);
    }
    let heads = RotatedHeads::from_first(ctx.attention.head_dim);
    rotate(ctx, &dq, heads, true)?;
    rotate(ctx, &dk, heads, true)?;
    let mut through_norm = |role, raw: Option<Raw>, gradient: Tensor| match raw {
        None => Ok(gradient),
        Some(raw) => {
            let norm = weights.norm(role, None, &ctx.spec.norm)?;
            raw_backward(ctx, &norm, &raw, &gradient, "dheads", gradients)
        }
    };
    let (dq, dk) = (through_norm(Role::QNorm, raw_q, dq)?, through_norm(Role::KNorm, raw_k, dk)?);
    let mut dnormed = None;
    for (gradient, weight, bias) in
        [(dq, Role::QProj, Role::QBias), (dk, Role::KProj, Role::KBias), (dv, Role::VProj, Role::VBias)]
    {
        let own = (normed, &gradient);
        let out = project_backward(ctx, weights, (weight, Some(bias)), own, dnormed.take(), gradients)?;
        dnormed = Some(out);
    }
    dnormed.ok_or(StepError::MissingWeight { block: weights.block(), role: Role::QProj })
}

/// The gradients of queries, keys and values, of sequences that are there as a whole.
fn whole_backward(
    ctx: &Context<'_>,
    qkv: &Qkv,
    attended: &Attended,
    dout: &Tensor,
) -> Result<[Tensor; 3], StepError> {
    let device = ctx.device;
    let alloc = |like: &Tensor, name| {
        device.alloc(ctx.activations, &[like.rows(), like.columns()], Tag::Attention, name)
    };
    let (dq, dk, dv) = (alloc(&qkv.q, "dq")?, alloc(&qkv.k, "dk")?, alloc(&qkv.v, "dv")?);
    let delta = device.alloc(DType::F32, attended.lse.shape().dims(), Tag::Attention, "delta")?;
    let sums = match ctx.activations {
        DType::F32 => None,
        _ => {
            let elements = dq.elements() + dk.elements() + dv.elements();
            Some(device.alloc(DType::F32, &[elements], Tag::Workspace, "dqkv.sums")?)
        }
    };
    device.run(Attention::Backward {
        q: &qkv.q,
        k: &qkv.k,
        v: &qkv.v,
        documents: ctx.documents,
        out: &attended.out,
        lse: &attended.lse,
        probabilities: attended.probabilities.as_ref(),
        dout,
        delta: &delta,
        sums: sums.as_ref(),
        dq: &dq,
        dk: &dk,
        dv: &dv,
        shape: ctx.attention,
        compute: ctx.compute,
    })?;
    Ok([dq, dk, dv])
}
