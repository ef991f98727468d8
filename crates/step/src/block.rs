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
use crate::norm::{Norm, Normed};
use crate::policy::LayerPolicy;
use crate::store::BlockWeights;

/// What the backward pass will need; what is `None` is recomputed first.
pub(crate) struct Saved {
    /// The block's input [N, H].
    input: Tensor,
    attention_norm: Option<Normed>,
    qkv: Option<Qkv>,
    attention: Option<Attended>,
    /// The residual stream after attention [N, H].
    middle: Option<Tensor>,
    mlp_norm: Option<Normed>,
    inner: Option<Inner>,
    /// The input of the down projection [N, I].
    activation: Option<Tensor>,
}

/// Queries [N, Q], keys and values [N, KV], rotated.
#[derive(Clone)]
pub(crate) struct Qkv {
    pub q: Tensor,
    pub k: Tensor,
    pub v: Tensor,
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
    let normed = attention_norm(ctx, weights)?.forward(ctx.device, &input)?;
    let qkv = project_qkv(ctx, weights, &normed.out)?;
    let attention_norm = policy.norms.hold(normed);
    let attended = attend(ctx, &qkv)?;
    let qkv = policy.qkv.hold(qkv);
    let middle = add_attention(ctx, weights, &input, &attended.out)?;
    let attention = policy.attention.hold(attended);

    let normed = mlp_norm(ctx, weights)?.forward(ctx.device, &middle)?;
    let inner = project_inner(ctx, weights, &normed.out)?;
    let mlp_norm = policy.norms.hold(normed);
    let (inner, activation) = match policy.gate_up.hold(inner.clone()) {
        Some(kept) => (Some(kept), activate(ctx, &inner)?),
        None => (None, activate_in_place(ctx, inner)?),
    };
    let (out, middle) = match policy.middle.hold(middle.clone()) {
        Some(kept) => (copy(ctx, &kept, "residual")?, Some(kept)),
        None => (middle, None),
    };
    let down = weights.linear(Role::DownProj, Role::DownBias)?;
    down.forward(ctx.device, &activation, &out, true, ctx.compute)?;
    let activation = policy.activation.hold(activation);
    Ok((out, Saved { input, attention_norm, qkv, attention, middle, mlp_norm, inner, activation }))
}

/// The same for inference: nothing is kept, and attention reads keys and values where `attend` says.
pub(crate) fn infer<D: Device>(
    ctx: &Context<'_, D>,
    weights: &BlockWeights,
    input: Tensor,
    cache: impl FnOnce(&Qkv) -> Result<(Tensor, Tensor), StepError>,
) -> Result<Tensor, StepError> {
    let normed = attention_norm(ctx, weights)?.forward(ctx.device, &input)?;
    let Qkv { q, k, v } = project_qkv(ctx, weights, &normed.out)?;
    drop(normed);
    let qkv = Qkv { q, k, v };
    let (k, v) = cache(&qkv)?;
    let attended = attend(ctx, &Qkv { q: qkv.q, k, v })?;
    let stream = input;
    let o_proj = weights.linear(Role::OProj, Role::OBias)?;
    o_proj.forward(ctx.device, &attended.out, &stream, true, ctx.compute)?;
    drop(attended);
    let normed = mlp_norm(ctx, weights)?.forward(ctx.device, &stream)?;
    let inner = project_inner(ctx, weights, &normed.out)?;
    drop(normed);
    let activation = activate_in_place(ctx, inner)?;
    let down = weights.linear(Role::DownProj, Role::DownBias)?;
    down.forward(ctx.device, &activation, &stream, true, ctx.compute)?;
    Ok(stream)
}

impl Saved {
    /// Runs the stages whose outputs were dropped.
    fn restore<D: Device>(&mut self, ctx: &Context<'_, D>, weights: &BlockWeights) -> Result<(), StepError> {
        if self.attention_norm.is_none() {
            self.attention_norm = Some(attention_norm(ctx, weights)?.forward(ctx.device, &self.input)?);
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
            self.mlp_norm = Some(mlp_norm(ctx, weights)?.forward(ctx.device, middle)?);
        }
        if let (None, Some(normed)) = (&self.inner, &self.mlp_norm) {
            self.inner = Some(project_inner(ctx, weights, &normed.out)?);
        }
        if let (None, Some(inner)) = (&self.activation, &self.inner) {
            self.activation = Some(activate(ctx, inner)?);
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
    } = saved
    else {
        // `restore` fills everything from the input on; were it not so, a weight would be missing.
        return Err(StepError::MissingWeight { block: weights.block(), role: Role::AttentionNorm });
    };
    let dnormed = mlp_backward(ctx, weights, inner, activation, &mlp_normed, dx, gradients)?;
    mlp_norm(ctx, weights)?.backward(ctx.device, gradients, &middle, &mlp_normed.statistics, &dnormed, dx)?;
    drop((mlp_normed, middle, dnormed));
    let dnormed = attention_backward(ctx, weights, qkv, attended, &attention_normed, dx, gradients)?;
    let statistics = &attention_normed.statistics;
    attention_norm(ctx, weights)?.backward(ctx.device, gradients, &input, statistics, &dnormed, dx)
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
    drop((delta, sums, dout, attended, qkv));
    rotate(ctx, &dq, true)?;
    rotate(ctx, &dk, true)?;
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

fn attention_norm<'w, D: Device>(
    ctx: &Context<'_, D>,
    weights: &'w BlockWeights,
) -> Result<Norm<'w>, StepError> {
    weights.norm(Role::AttentionNorm, Role::AttentionNormBias, ctx.spec.norm.epsilon)
}

fn mlp_norm<'w, D: Device>(ctx: &Context<'_, D>, weights: &'w BlockWeights) -> Result<Norm<'w>, StepError> {
    weights.norm(Role::MlpNorm, Role::MlpNormBias, ctx.spec.norm.epsilon)
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
    let q = project(Role::QProj, Role::QBias, "q")?;
    let k = project(Role::KProj, Role::KBias, "k")?;
    let v = project(Role::VProj, Role::VBias, "v")?;
    rotate(ctx, &q, false)?;
    rotate(ctx, &k, false)?;
    Ok(Qkv { q, k, v })
}

fn rotate<D: Device>(ctx: &Context<'_, D>, x: &Tensor, inverse: bool) -> Result<(), StepError> {
    let (cos, sin) = (&ctx.rope.cos, &ctx.rope.sin);
    ctx.device.run(Op::Rope { x, positions: ctx.positions, cos, sin, inverse })?;
    Ok(())
}

fn attend<D: Device>(ctx: &Context<'_, D>, qkv: &Qkv) -> Result<Attended, StepError> {
    let shape = ctx.attention;
    let out =
        ctx.device.alloc(ctx.activations, &[qkv.q.rows(), qkv.q.columns()], Tag::Attention, "attention")?;
    let lse =
        ctx.device.alloc(DType::F32, &[shape.batch, shape.heads, shape.q_len], Tag::Attention, "lse")?;
    let Qkv { q, k, v } = qkv;
    ctx.device.run(Op::Attention { q, k, v, out: &out, lse: &lse, shape, compute: ctx.compute })?;
    Ok(Attended { out, lse })
}

/// The residual stream after attention: input + o_proj(attended).
fn add_attention<D: Device>(
    ctx: &Context<'_, D>,
    weights: &BlockWeights,
    input: &Tensor,
    attended: &Tensor,
) -> Result<Tensor, StepError> {
    let middle = copy(ctx, input, "middle")?;
    let o_proj = weights.linear(Role::OProj, Role::OBias)?;
    o_proj.forward(ctx.device, attended, &middle, true, ctx.compute)?;
    Ok(middle)
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
