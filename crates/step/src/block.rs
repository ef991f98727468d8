//! One transformer block, forward and backward, as a row of stages.
//!
//! `forward` keeps of each stage's output what the save policy says; `Saved::restore` runs the stages whose outputs
//! were dropped, by the same functions; `backward` then has everything. Shapes: N tokens, H hidden, Q and KV widths of
//! queries and keys, I inner width.

use plimsoll_device::{DType, Device, Op, Rounding, Tensor};
use plimsoll_memory::Tag;
use plimsoll_model::Role;

use crate::StepError;
use crate::context::Context;
use crate::gradients::Gradients;
use crate::head::reshaped;
use crate::linear::Linear;
use crate::norm::{Norm, Normed, Statistics};
use crate::policy::LayerPolicy;
use crate::rope::RopeTable;
use crate::store::BlockWeights;

/// What the backward pass will need; what is `None` is recomputed first.
pub(crate) struct Saved {
    /// The block's input [N, H].
    input: Tensor,
    attention_norm: Option<Normed>,
    qkv: Option<Qkv>,
    attention: Option<Attended>,
    /// The residual stream after attention.
    middle: Option<Summed>,
    mlp_norm: Option<Normed>,
    inner: Option<Inner>,
    /// The input of the down projection [N, I].
    activation: Option<Tensor>,
    /// What the norm after the feed-forward part saw.
    mlp_out: Option<Raw>,
}

/// Queries [N, Q], keys and values [N, KV], normalised and rotated.
#[derive(Clone)]
pub(crate) struct Qkv {
    pub q: Tensor,
    pub k: Tensor,
    pub v: Tensor,
    /// What the norms of queries and keys saw, where there are any.
    raw: Option<[Raw; 2]>,
}

/// The input of a norm that is not the residual stream, and its statistics.
#[derive(Clone)]
struct Raw {
    x: Tensor,
    statistics: Statistics,
}

/// The residual stream [N, H] after a part was added, and what the norm after the part saw.
#[derive(Clone)]
struct Summed {
    stream: Tensor,
    raw: Option<Raw>,
}

/// The attention's output [N, Q] and log-sum-exp [batch, heads, q_len].
#[derive(Clone)]
struct Attended {
    out: Tensor,
    lse: Tensor,
}

/// Outputs of the gate (where there is one) and up projections [N, I].
#[derive(Clone)]
struct Inner {
    gate: Option<Tensor>,
    up: Tensor,
}

/// x [N, H] through the block; the result and what was kept of the way.
pub(crate) fn forward<D: Device>(
    ctx: &Context<'_, D>,
    weights: &BlockWeights,
    policy: LayerPolicy,
    input: Tensor,
) -> Result<(Tensor, Saved), StepError> {
    let normed = before(ctx, attention_norm(ctx, weights)?, &input)?;
    let qkv = project_qkv(ctx, weights, &normed.out)?;
    let attention_norm = policy.norms.hold(normed);
    let attended = attend(ctx, &qkv)?;
    let qkv = policy.qkv.hold(qkv);
    let summed = add_attention(ctx, weights, &input, &attended.out)?;
    let attention = policy.attention.hold(attended);

    let normed = before(ctx, mlp_norm(ctx, weights)?, &summed.stream)?;
    let inner = project_inner(ctx, weights, &normed.out)?;
    let mlp_norm = policy.norms.hold(normed);
    let (inner, activation) = match policy.gate_up.hold(inner.clone()) {
        Some(kept) => (Some(kept), activate(ctx, &inner)?),
        None => (None, activate_in_place(ctx, inner)?),
    };
    let (stream, middle) = match policy.middle.hold(summed.clone()) {
        Some(kept) => (None, Some(kept)),
        None => (Some(summed.stream.clone()), None),
    };
    let out = add_mlp(ctx, weights, &summed.stream, stream, &activation)?;
    let mlp_out = out.raw.and_then(|raw| policy.norms.hold(raw));
    let activation = policy.activation.hold(activation);
    let saved = Saved { input, attention_norm, qkv, attention, middle, mlp_norm, inner, activation, mlp_out };
    Ok((out.stream, saved))
}

/// The same for inference: nothing is kept, and attention reads keys and values where `cache` says.
pub(crate) fn infer<D: Device>(
    ctx: &Context<'_, D>,
    weights: &BlockWeights,
    input: Tensor,
    cache: impl FnOnce(&Qkv) -> Result<(Tensor, Tensor), StepError>,
) -> Result<Tensor, StepError> {
    let normed = before(ctx, attention_norm(ctx, weights)?, &input)?;
    let mut qkv = project_qkv(ctx, weights, &normed.out)?;
    drop(normed);
    qkv.raw = None;
    let (k, v) = cache(&qkv)?;
    let attended = attend(ctx, &Qkv { k, v, ..qkv })?;
    let o_proj = weights.linear(Role::OProj, Role::OBias)?;
    let stream = add_part(ctx, &o_proj, attention_out_norm(ctx, weights)?, &attended.out, input)?.stream;
    drop(attended);
    let normed = before(ctx, mlp_norm(ctx, weights)?, &stream)?;
    let inner = project_inner(ctx, weights, &normed.out)?;
    drop(normed);
    let activation = activate_in_place(ctx, inner)?;
    let down = weights.linear(Role::DownProj, Role::DownBias)?;
    Ok(add_part(ctx, &down, mlp_out_norm(ctx, weights)?, &activation, stream)?.stream)
}

impl Saved {
    /// Runs the stages whose outputs were dropped.
    fn restore<D: Device>(&mut self, ctx: &Context<'_, D>, weights: &BlockWeights) -> Result<(), StepError> {
        if self.attention_norm.is_none() {
            self.attention_norm = Some(before(ctx, attention_norm(ctx, weights)?, &self.input)?);
        }
        if let (None, Some(normed)) = (&self.qkv, &self.attention_norm) {
            self.qkv = Some(project_qkv(ctx, weights, &normed.out)?);
        }
        if let (None, Some(qkv)) = (&self.attention, &self.qkv) {
            self.attention = Some(attend(ctx, qkv)?);
        }
        if let (None, Some(attended)) = (&self.middle, &self.attention) {
            self.middle = Some(add_attention(ctx, weights, &self.input, &attended.out)?);
        }
        if let (None, Some(middle)) = (&self.mlp_norm, &self.middle) {
            self.mlp_norm = Some(before(ctx, mlp_norm(ctx, weights)?, &middle.stream)?);
        }
        if let (None, Some(normed)) = (&self.inner, &self.mlp_norm) {
            self.inner = Some(project_inner(ctx, weights, &normed.out)?);
        }
        if let (None, Some(inner)) = (&self.activation, &self.inner) {
            self.activation = Some(activate(ctx, inner)?);
        }
        if let (None, Some(activation), Some(norm)) =
            (&self.mlp_out, &self.activation, mlp_out_norm(ctx, weights)?)
        {
            let down = weights.linear(Role::DownProj, Role::DownBias)?;
            self.mlp_out = Some(project_raw(ctx, &down, &norm, activation)?.1);
        }
        Ok(())
    }
}

/// dx [N, H] holds the gradient of the block's output and becomes that of its input; weight gradients are added.
pub(crate) fn backward<D: Device>(
    ctx: &Context<'_, D>,
    weights: &BlockWeights,
    mut saved: Saved,
    dx: &Tensor,
    gradients: &mut Gradients,
) -> Result<(), StepError> {
    saved.restore(ctx, weights)?;
    let Saved {
        input,
        attention_norm: Some(attention_normed),
        qkv: Some(qkv),
        attention: Some(attended),
        middle: Some(middle),
        mlp_norm: Some(mlp_normed),
        inner: Some(inner),
        activation: Some(activation),
        mlp_out,
    } = saved
    else {
        // `restore` fills everything from the input on; were it not so, a weight would be missing.
        return Err(StepError::MissingWeight { block: weights.block(), role: Role::AttentionNorm });
    };
    let norm = mlp_out_norm(ctx, weights)?;
    let dout = after_backward(ctx, norm, mlp_out, dx, gradients)?;
    let dnormed = mlp_backward(ctx, weights, inner, activation, &mlp_normed, &dout, gradients)?;
    drop(dout);
    let norm = mlp_norm(ctx, weights)?;
    before_backward(ctx, norm, &middle.stream, mlp_normed, dnormed, dx, gradients)?;

    let norm = attention_out_norm(ctx, weights)?;
    let dout = after_backward(ctx, norm, middle.raw, dx, gradients)?;
    drop(middle.stream);
    let dnormed = attention_backward(ctx, weights, qkv, attended, &attention_normed, &dout, gradients)?;
    drop(dout);
    let norm = attention_norm(ctx, weights)?;
    before_backward(ctx, norm, &input, attention_normed, dnormed, dx, gradients)
}

/// What a part of the block reads: the stream normalised, or as it is where no norm stands before the part.
fn before<D: Device>(
    ctx: &Context<'_, D>,
    norm: Option<Norm<'_>>,
    stream: &Tensor,
) -> Result<Normed, StepError> {
    match norm {
        Some(norm) => norm.forward(ctx.device, stream),
        None => Ok(Normed { out: stream.clone(), statistics: None }),
    }
}

/// dx += the gradient of the stream through [`before`].
fn before_backward<D: Device>(
    ctx: &Context<'_, D>,
    norm: Option<Norm<'_>>,
    stream: &Tensor,
    normed: Normed,
    dnormed: Tensor,
    dx: &Tensor,
    gradients: &mut Gradients,
) -> Result<(), StepError> {
    match (norm, normed.statistics) {
        (Some(norm), Some(statistics)) => {
            drop(normed.out);
            norm.backward(ctx.device, gradients, stream, &statistics, &dnormed, dx)
        }
        _ => Ok(ctx.device.run(Op::Add { a: dx, b: &dnormed, out: dx })?),
    }
}

/// A projection whose output is normalised: the normed output and what the norm saw.
fn project_raw<D: Device>(
    ctx: &Context<'_, D>,
    linear: &Linear<'_>,
    norm: &Norm<'_>,
    x: &Tensor,
) -> Result<(Tensor, Raw), StepError> {
    let raw = activation_tensor(ctx, x.rows(), linear.outputs(), "part")?;
    linear.forward(ctx.device, x, &raw, false, ctx.compute)?;
    let Normed { out, statistics } = norm.forward(ctx.device, &raw)?;
    let missing = StepError::MissingWeight { block: norm.block, role: norm.role };
    Ok((out, Raw { x: raw, statistics: statistics.ok_or(missing)? }))
}

/// The sum of the residual stream and `linear` of x, normalised first where there is a norm for it. `stream` is the
/// stream in memory that may be overwritten.
fn add_part<D: Device>(
    ctx: &Context<'_, D>,
    linear: &Linear<'_>,
    norm: Option<Norm<'_>>,
    x: &Tensor,
    stream: Tensor,
) -> Result<Summed, StepError> {
    match norm {
        None => {
            linear.forward(ctx.device, x, &stream, true, ctx.compute)?;
            Ok(Summed { stream, raw: None })
        }
        Some(norm) => {
            let (normed, raw) = project_raw(ctx, linear, &norm, x)?;
            ctx.device.run(Op::Add { a: &stream, b: &normed, out: &normed })?;
            Ok(Summed { stream: normed, raw: Some(raw) })
        }
    }
}

/// The gradient of what a norm after a part saw, or dx itself where there is none.
fn after_backward<D: Device>(
    ctx: &Context<'_, D>,
    norm: Option<Norm<'_>>,
    raw: Option<Raw>,
    dx: &Tensor,
    gradients: &mut Gradients,
) -> Result<Tensor, StepError> {
    let (Some(norm), Some(Raw { x, statistics })) = (norm, raw) else { return Ok(dx.clone()) };
    let draw = zeroed(ctx, &x, "dpart")?;
    norm.backward(ctx.device, gradients, &x, &statistics, dx, &draw)?;
    Ok(draw)
}

fn zeroed<D: Device>(ctx: &Context<'_, D>, like: &Tensor, name: &'static str) -> Result<Tensor, StepError> {
    let out = ctx.device.alloc(like.dtype(), like.shape().dims(), Tag::Activations, name)?;
    ctx.device.run(Op::Fill { out: &out, value: 0.0 })?;
    Ok(out)
}

/// Returns the gradient of the feed-forward part's normed input [N, H].
fn mlp_backward<D: Device>(
    ctx: &Context<'_, D>,
    weights: &BlockWeights,
    inner: Inner,
    activation: Tensor,
    normed: &Normed,
    dx: &Tensor,
    gradients: &mut Gradients,
) -> Result<Tensor, StepError> {
    let down = weights.linear(Role::DownProj, Role::DownBias)?;
    down.backward_weight(ctx.device, gradients, dx, &activation, ctx.compute)?;
    // The activation has served; its gradient takes its place.
    let dactivation = activation;
    down.backward_input(ctx.device, dx, &dactivation, false, ctx.compute)?;
    let Inner { gate, up } = inner;
    let up_proj = weights.linear(Role::UpProj, Role::UpBias)?;
    let dnormed;
    match gate {
        Some(gate) => {
            // The gradients overwrite the activations that they are the gradients of.
            ctx.device.run(Op::GatedBackward {
                gate: &gate,
                up: &up,
                dout: &dactivation,
                dgate: &gate,
                dup: &up,
                activation: ctx.activation(),
            })?;
            drop(dactivation);
            let gate_proj = weights.linear(Role::GateProj, Role::GateBias)?;
            gate_proj.backward_weight(ctx.device, gradients, &gate, &normed.out, ctx.compute)?;
            up_proj.backward_weight(ctx.device, gradients, &up, &normed.out, ctx.compute)?;
            dnormed = activation_tensor(ctx, gate.rows(), gate_proj.inputs(), "dnorm")?;
            gate_proj.backward_input(ctx.device, &gate, &dnormed, false, ctx.compute)?;
            drop(gate);
            up_proj.backward_input(ctx.device, &up, &dnormed, true, ctx.compute)?;
        }
        None => {
            ctx.device.run(Op::ActivateBackward {
                x: &up,
                dout: &dactivation,
                dx: &up,
                activation: ctx.activation(),
            })?;
            drop(dactivation);
            up_proj.backward_weight(ctx.device, gradients, &up, &normed.out, ctx.compute)?;
            dnormed = activation_tensor(ctx, up.rows(), up_proj.inputs(), "dnorm")?;
            up_proj.backward_input(ctx.device, &up, &dnormed, false, ctx.compute)?;
        }
    }
    Ok(dnormed)
}

/// Returns the gradient of the attention's normed input [N, H].
fn attention_backward<D: Device>(
    ctx: &Context<'_, D>,
    weights: &BlockWeights,
    qkv: Qkv,
    attended: Attended,
    normed: &Normed,
    dx: &Tensor,
    gradients: &mut Gradients,
) -> Result<Tensor, StepError> {
    let rows = dx.rows();
    let device = ctx.device;
    let alloc =
        |like: &Tensor, name| device.alloc(ctx.activations, &[rows, like.columns()], Tag::Attention, name);
    let o_proj = weights.linear(Role::OProj, Role::OBias)?;
    o_proj.backward_weight(device, gradients, dx, &attended.out, ctx.compute)?;
    let dout = alloc(&attended.out, "dattention")?;
    o_proj.backward_input(device, dx, &dout, false, ctx.compute)?;
    let (dq, dk, dv) = (alloc(&qkv.q, "dq")?, alloc(&qkv.k, "dk")?, alloc(&qkv.v, "dv")?);
    let delta = device.alloc(DType::F32, attended.lse.shape().dims(), Tag::Attention, "delta")?;
    let sums = match ctx.activations {
        DType::F32 => None,
        _ => {
            let elements = dq.elements() + dk.elements() + dv.elements();
            Some(device.alloc(DType::F32, &[elements], Tag::Workspace, "dqkv.sums")?)
        }
    };
    device.run(Op::AttentionBackward {
        q: &qkv.q,
        k: &qkv.k,
        v: &qkv.v,
        out: &attended.out,
        lse: &attended.lse,
        dout: &dout,
        delta: &delta,
        sums: sums.as_ref(),
        dq: &dq,
        dk: &dk,
        dv: &dv,
        shape: ctx.attention,
        compute: ctx.compute,
    })?;
    let raw = qkv.raw;
    drop((delta, sums, dout, attended, qkv.q, qkv.k, qkv.v));
    rotate(ctx, &dq, true)?;
    rotate(ctx, &dk, true)?;
    let [dq, dk] = match raw {
        None => [dq, dk],
        Some([q, k]) => [
            heads_norm_backward(ctx, weights, Role::QNorm, q, &dq, gradients)?,
            heads_norm_backward(ctx, weights, Role::KNorm, k, &dk, gradients)?,
        ],
    };
    let mut dnormed = None;
    for (gradient, weight, bias) in
        [(dq, Role::QProj, Role::QBias), (dk, Role::KProj, Role::KBias), (dv, Role::VProj, Role::VBias)]
    {
        let linear = weights.linear(weight, bias)?;
        linear.backward_weight(device, gradients, &gradient, &normed.out, ctx.compute)?;
        let (out, accumulate) = match dnormed.take() {
            Some(out) => (out, true),
            None => (activation_tensor(ctx, rows, linear.inputs(), "dnorm")?, false),
        };
        linear.backward_input(device, &gradient, &out, accumulate, ctx.compute)?;
        dnormed = Some(out);
    }
    dnormed.ok_or(StepError::MissingWeight { block: weights.block(), role: Role::QProj })
}

/// The norms of a block, where it has them.
fn attention_norm<'w, D: Device>(
    ctx: &Context<'_, D>,
    weights: &'w BlockWeights,
) -> Result<Option<Norm<'w>>, StepError> {
    weights.optional_norm(Role::AttentionNorm, Some(Role::AttentionNormBias), &ctx.spec.norm)
}

fn mlp_norm<'w, D: Device>(
    ctx: &Context<'_, D>,
    weights: &'w BlockWeights,
) -> Result<Option<Norm<'w>>, StepError> {
    weights.optional_norm(Role::MlpNorm, Some(Role::MlpNormBias), &ctx.spec.norm)
}

fn attention_out_norm<'w, D: Device>(
    ctx: &Context<'_, D>,
    weights: &'w BlockWeights,
) -> Result<Option<Norm<'w>>, StepError> {
    weights.optional_norm(Role::PostAttentionNorm, None, &ctx.spec.norm)
}

fn mlp_out_norm<'w, D: Device>(
    ctx: &Context<'_, D>,
    weights: &'w BlockWeights,
) -> Result<Option<Norm<'w>>, StepError> {
    weights.optional_norm(Role::PostMlpNorm, None, &ctx.spec.norm)
}

fn project_qkv<D: Device>(
    ctx: &Context<'_, D>,
    weights: &BlockWeights,
    normed: &Tensor,
) -> Result<Qkv, StepError> {
    let project = |weight, bias, name| -> Result<Tensor, StepError> {
        let linear = weights.linear(weight, bias)?;
        let out =
            ctx.device.alloc(ctx.activations, &[normed.rows(), linear.outputs()], Tag::Attention, name)?;
        linear.forward(ctx.device, normed, &out, false, ctx.compute)?;
        Ok(out)
    };
    let mut q = project(Role::QProj, Role::QBias, "q")?;
    let mut k = project(Role::KProj, Role::KBias, "k")?;
    let v = project(Role::VProj, Role::VBias, "v")?;
    let mut raw = None;
    if ctx.spec.attention.qk_norm.is_some() {
        let (normed_q, raw_q) = normalise_heads(ctx, weights, Role::QNorm, q)?;
        let (normed_k, raw_k) = normalise_heads(ctx, weights, Role::KNorm, k)?;
        (q, k, raw) = (normed_q, normed_k, Some([raw_q, raw_k]));
    }
    rotate(ctx, &q, false)?;
    rotate(ctx, &k, false)?;
    Ok(Qkv { q, k, v, raw })
}

/// x [N, heads * D] with every head, or all heads of a token, normalised; and x itself.
fn normalise_heads<D: Device>(
    ctx: &Context<'_, D>,
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

/// The gradient of x from that of [`normalise_heads`].
fn heads_norm_backward<D: Device>(
    ctx: &Context<'_, D>,
    weights: &BlockWeights,
    role: Role,
    raw: Raw,
    dout: &Tensor,
    gradients: &mut Gradients,
) -> Result<Tensor, StepError> {
    let norm = weights.norm(role, None, &ctx.spec.norm)?;
    let dx = zeroed(ctx, &raw.x, "dheads")?;
    let [x, dout, dx_rows] = [in_rows(&raw.x, &norm)?, in_rows(dout, &norm)?, in_rows(&dx, &norm)?];
    norm.backward(ctx.device, gradients, &x, &raw.statistics, &dout, &dx_rows)?;
    Ok(dx)
}

/// A tensor as rows of the norm's width.
fn in_rows(x: &Tensor, norm: &Norm<'_>) -> Result<Tensor, StepError> {
    let width = norm.weight.elements().max(1);
    reshaped(x, &[x.elements() / width, width])
}

fn rotate<D: Device>(ctx: &Context<'_, D>, x: &Tensor, inverse: bool) -> Result<(), StepError> {
    let Some(RopeTable { cos, sin }) = ctx.rope else { return Ok(()) };
    let head_dim = ctx.attention.head_dim;
    ctx.device.run(Op::Rope { x, positions: ctx.positions, cos, sin, head_dim, inverse })?;
    Ok(())
}

fn attend<D: Device>(ctx: &Context<'_, D>, qkv: &Qkv) -> Result<Attended, StepError> {
    let shape = ctx.attention;
    let out =
        ctx.device.alloc(ctx.activations, &[qkv.q.rows(), qkv.q.columns()], Tag::Attention, "attention")?;
    let lse =
        ctx.device.alloc(DType::F32, &[shape.batch, shape.heads, shape.q_len], Tag::Attention, "lse")?;
    let Qkv { q, k, v, .. } = qkv;
    ctx.device.run(Op::Attention { q, k, v, out: &out, lse: &lse, shape, compute: ctx.compute })?;
    Ok(Attended { out, lse })
}

/// The residual stream after attention: input + o_proj(attended), in memory of its own.
fn add_attention<D: Device>(
    ctx: &Context<'_, D>,
    weights: &BlockWeights,
    input: &Tensor,
    attended: &Tensor,
) -> Result<Summed, StepError> {
    let norm = attention_out_norm(ctx, weights)?;
    let stream = if norm.is_some() { input.clone() } else { copy(ctx, input, "middle")? };
    add_part(ctx, &weights.linear(Role::OProj, Role::OBias)?, norm, attended, stream)
}

/// The residual stream after the feed-forward part, in the memory of `own` or else in memory of its own.
fn add_mlp<D: Device>(
    ctx: &Context<'_, D>,
    weights: &BlockWeights,
    stream: &Tensor,
    own: Option<Tensor>,
    activation: &Tensor,
) -> Result<Summed, StepError> {
    let norm = mlp_out_norm(ctx, weights)?;
    let stream = match (own, &norm) {
        (Some(own), _) => own,
        (None, Some(_)) => stream.clone(),
        (None, None) => copy(ctx, stream, "residual")?,
    };
    add_part(ctx, &weights.linear(Role::DownProj, Role::DownBias)?, norm, activation, stream)
}

fn project_inner<D: Device>(
    ctx: &Context<'_, D>,
    weights: &BlockWeights,
    normed: &Tensor,
) -> Result<Inner, StepError> {
    let project = |weight, bias, name| -> Result<Tensor, StepError> {
        let linear = weights.linear(weight, bias)?;
        let out = activation_tensor(ctx, normed.rows(), linear.outputs(), name)?;
        linear.forward(ctx.device, normed, &out, false, ctx.compute)?;
        Ok(out)
    };
    let gate = match ctx.spec.mlp.gated {
        true => Some(project(Role::GateProj, Role::GateBias, "gate")?),
        false => None,
    };
    Ok(Inner { gate, up: project(Role::UpProj, Role::UpBias, "up")? })
}

fn activate<D: Device>(ctx: &Context<'_, D>, inner: &Inner) -> Result<Tensor, StepError> {
    let out = activation_tensor(ctx, inner.up.rows(), inner.up.columns(), "activation")?;
    activate_into(ctx, inner, &out)?;
    Ok(out)
}

/// The activation in the memory of its input.
fn activate_in_place<D: Device>(ctx: &Context<'_, D>, inner: Inner) -> Result<Tensor, StepError> {
    activate_into(ctx, &inner, &inner.up)?;
    Ok(inner.up)
}

fn activate_into<D: Device>(ctx: &Context<'_, D>, inner: &Inner, out: &Tensor) -> Result<(), StepError> {
    let activation = ctx.activation();
    ctx.device.run(match &inner.gate {
        Some(gate) => Op::Gated { gate, up: &inner.up, out, activation },
        None => Op::Activate { x: &inner.up, out, activation },
    })?;
    Ok(())
}

fn activation_tensor<D: Device>(
    ctx: &Context<'_, D>,
    rows: u64,
    columns: u64,
    name: &'static str,
) -> Result<Tensor, StepError> {
    Ok(ctx.device.alloc(ctx.activations, &[rows, columns], Tag::Activations, name)?)
}

fn copy<D: Device>(ctx: &Context<'_, D>, x: &Tensor, name: &'static str) -> Result<Tensor, StepError> {
    let out = activation_tensor(ctx, x.rows(), x.columns(), name)?;
    ctx.device.run(Op::Cast { x, out: &out, rounding: Rounding::Nearest })?;
    Ok(out)
}
