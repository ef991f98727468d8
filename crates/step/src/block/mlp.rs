//! The feed-forward part: gate and up projections, activation, down projection; whole or in chunks of tokens. Nobody else
//! knows of chunks.

use plimsoll_device::{Activation, DeviceExt, Tensor};
use plimsoll_model::Role;

use super::mover::Mover;
use super::parts::activation_tensor;
use super::saved::{Held, Inner};
use crate::StepError;
use crate::context::Context;
use crate::gradients::Gradients;
use crate::head::{for_each_range, rows};
use crate::norm::Normed;
use crate::policy::{LayerPolicy, Save};
use crate::store::BlockWeights;

/// What the backward pass will need of the part.
pub(crate) struct SavedMlp {
    pub norm: Held<Normed>,
    pub inner: Held<Inner>,
    /// The input of the down projection `[N, I]`.
    pub activation: Held<Tensor>,
}

impl SavedMlp {
    /// Everything is computed again.
    pub fn dropped() -> SavedMlp {
        SavedMlp { norm: Held::Dropped, inner: Held::Dropped, activation: Held::Dropped }
    }

    /// Begins to bring back what is away.
    pub fn fetch(&mut self, away: Option<&Mover<'_>>) -> Result<(), StepError> {
        self.norm.fetch(away)?;
        self.inner.fetch(away)?;
        self.activation.fetch(away)
    }
}

/// The part forward, whole or in chunks of tokens. `add` is given what writes the part's output to a tensor, or adds it there.
pub(super) fn forward<R>(
    ctx: &Context<'_>,
    weights: &BlockWeights,
    policy: LayerPolicy,
    normed: Normed,
    add: impl FnOnce(&dyn Fn(&Tensor, bool) -> Result<(), StepError>) -> Result<R, StepError>,
) -> Result<(R, SavedMlp), StepError> {
    // Where there is no norm, its output is the stream itself.
    let of_norm = if normed.statistics.is_some() { policy.norms } else { Save::Recompute };
    let all = ctx.of_all_rows(&normed.out)?;
    if let Some(chunk) = ctx.mlp_chunk(all.rows()) {
        let out = add(&|out, accumulate| in_chunks(ctx, weights, chunk, &all, out, accumulate))?;
        let norm = Held::new(ctx, of_norm, normed)?;
        return Ok((out, SavedMlp { norm, ..SavedMlp::dropped() }));
    }
    let projected = project_inner(ctx, weights, &all)?;
    drop(all);
    let norm = Held::new(ctx, of_norm, normed)?;
    let inner = Held::new(ctx, policy.gate_up, projected.clone())?;
    let activated = match policy.gate_up {
        Save::Keep => activate(ctx, &projected)?,
        Save::Int8 { .. } | Save::Recompute => activate_in_place(ctx, projected)?,
    };
    let out = add(&|out, accumulate| project_down(ctx, weights, &activated, out, accumulate))?;
    let activation = Held::new(ctx, policy.activation, activated)?;
    Ok((out, SavedMlp { norm, inner, activation }))
}

/// The gradient of the part's normed input `[N, H]`; weight gradients are added. `dout` makes the gradient of the part's
/// output, and is given what computes that output again.
pub(super) fn backward(
    ctx: &Context<'_>,
    weights: &BlockWeights,
    (inner, activation): (Held<Inner>, Held<Tensor>),
    normed: &Tensor,
    gradients: &mut Gradients<'_>,
    dout: impl FnOnce(
        &dyn Fn(&Tensor, bool) -> Result<(), StepError>,
        &mut Gradients<'_>,
    ) -> Result<Tensor, StepError>,
) -> Result<Tensor, StepError> {
    if let Some(chunk) = ctx.mlp_chunk(normed.rows()) {
        let again = |out: &Tensor, accumulate| in_chunks(ctx, weights, chunk, normed, out, accumulate);
        let dout = dout(&again, gradients)?;
        return backward_in_chunks(ctx, weights, chunk, normed, &dout, gradients);
    }
    let inner = inner.restore(ctx, || project_inner(ctx, weights, normed))?;
    let activation = activation.restore(ctx, || activate(ctx, &inner))?;
    let again = |out: &Tensor, accumulate| project_down(ctx, weights, &activation, out, accumulate);
    let dout = dout(&again, gradients)?;
    let place = || activation_tensor(ctx, normed.rows(), normed.columns(), "dnorm");
    backward_into(ctx, weights, inner, activation, normed, &dout, place, gradients)
}

/// Gate and up projections of the normed input.
fn project_inner(ctx: &Context<'_>, weights: &BlockWeights, normed: &Tensor) -> Result<Inner, StepError> {
    let project = |weight, bias, name| -> Result<Tensor, StepError> {
        let linear = weights.linear(weight, bias)?;
        let out = activation_tensor(ctx, normed.rows(), linear.outputs(), name)?;
        linear.forward(ctx, normed, &out, false)?;
        Ok(out)
    };
    let gate = match ctx.mlp.gated {
        true => Some(project(Role::GateProj, Role::GateBias, "gate")?),
        false => None,
    };
    Ok(Inner { gate, up: project(Role::UpProj, Role::UpBias, "up")? })
}

/// The activation in memory of its own.
fn activate(ctx: &Context<'_>, inner: &Inner) -> Result<Tensor, StepError> {
    let out = activation_tensor(ctx, inner.up.rows(), inner.up.columns(), "activation")?;
    activate_into(ctx, inner, &out)
}

/// The activation in the memory of its input.
fn activate_in_place(ctx: &Context<'_>, inner: Inner) -> Result<Tensor, StepError> {
    activate_into(ctx, &inner, &inner.up)
}

fn activate_into(ctx: &Context<'_>, inner: &Inner, out: &Tensor) -> Result<Tensor, StepError> {
    let activation = ctx.activation();
    ctx.device.run(match &inner.gate {
        Some(gate) => Activation::Gated { gate, up: &inner.up, out, activation },
        None => Activation::Activate { x: &inner.up, out, activation },
    })?;
    ctx.linears.input(ctx.device, out)
}

/// out (+)= down projection of the activation.
fn project_down(
    ctx: &Context<'_>,
    weights: &BlockWeights,
    activation: &Tensor,
    out: &Tensor,
    accumulate: bool,
) -> Result<(), StepError> {
    let down = weights.linear(Role::DownProj, Role::DownBias)?;
    down.forward(ctx, activation, out, accumulate)
}

/// out (+)= the whole part, of which nothing is kept: only a chunk of tokens is `[., I]` wide at a time.
fn in_chunks(
    ctx: &Context<'_>,
    weights: &BlockWeights,
    chunk: u64,
    normed: &Tensor,
    out: &Tensor,
    accumulate: bool,
) -> Result<(), StepError> {
    for_each_chunk(ctx, normed.rows(), chunk, |ctx, start, end| {
        let normed = ctx.linears.input(ctx.device, &rows(normed, start, end)?)?;
        let inner = project_inner(ctx, weights, &normed)?;
        let activation = activate_in_place(ctx, inner)?;
        project_down(ctx, weights, &activation, &rows(out, start, end)?, accumulate)
    })
}

/// As [`backward`], a chunk of tokens at a time, each computed again first.
fn backward_in_chunks(
    ctx: &Context<'_>,
    weights: &BlockWeights,
    chunk: u64,
    normed: &Tensor,
    dout: &Tensor,
    gradients: &mut Gradients<'_>,
) -> Result<Tensor, StepError> {
    let dnormed = activation_tensor(ctx, normed.rows(), normed.columns(), "dnorm")?;
    for_each_chunk(ctx, normed.rows(), chunk, |ctx, start, end| {
        let normed = ctx.linears.input(ctx.device, &rows(normed, start, end)?)?;
        let inner = project_inner(ctx, weights, &normed)?;
        let activation = activate(ctx, &inner)?;
        let dout = rows(dout, start, end)?;
        let place = || rows(&dnormed, start, end);
        backward_into(ctx, weights, inner, activation, &normed, &dout, place, gradients)?;
        Ok(())
    })?;
    Ok(dnormed)
}

/// Calls `body` with the context, the first and the last row of every chunk.
fn for_each_chunk(
    ctx: &Context<'_>,
    tokens: u64,
    chunk: u64,
    mut body: impl FnMut(&Context<'_>, u64, u64) -> Result<(), StepError>,
) -> Result<(), StepError> {
    for_each_range(ctx.device, tokens, chunk, |start, end, _| body(&ctx.at_row(start), start, end))
}

fn backward_into(
    ctx: &Context<'_>,
    weights: &BlockWeights,
    inner: Inner,
    activation: Tensor,
    normed: &Tensor,
    dout: &Tensor,
    dnormed: impl FnOnce() -> Result<Tensor, StepError>,
    gradients: &mut Gradients<'_>,
) -> Result<Tensor, StepError> {
    let down = weights.linear(Role::DownProj, Role::DownBias)?;
    let through = down.backward_weight(ctx, gradients, dout, &activation)?;
    // The activation has served; its gradient takes its place, if that is wide enough.
    let dactivation = if activation.dtype() == ctx.activations {
        activation
    } else {
        drop(activation);
        activation_tensor(ctx, dout.rows(), down.inputs(), "dactivation")?
    };
    down.backward_input(ctx, through, dout, &dactivation, false)?;
    let Inner { gate, up } = inner;
    // The gradients overwrite the activations that they are the gradients of.
    ctx.device.run(match &gate {
        Some(gate) => Activation::GatedBackward {
            gate,
            up: &up,
            dout: &dactivation,
            dgate: gate,
            dup: &up,
            activation: ctx.activation(),
        },
        None => {
            Activation::ActivateBackward { x: &up, dout: &dactivation, dx: &up, activation: ctx.activation() }
        }
    })?;
    drop(dactivation);
    let up_proj = weights.linear(Role::UpProj, Role::UpBias)?;
    let gated = match gate {
        Some(dgate) => {
            let gate_proj = weights.linear(Role::GateProj, Role::GateBias)?;
            let through = gate_proj.backward_weight(ctx, gradients, &dgate, normed)?;
            Some((gate_proj, dgate, through))
        }
        None => None,
    };
    let through_up = up_proj.backward_weight(ctx, gradients, &up, normed)?;
    let dnormed = dnormed()?;
    let accumulate = gated.is_some();
    if let Some((gate_proj, dgate, through)) = gated {
        gate_proj.backward_input(ctx, through, &dgate, &dnormed, false)?;
    }
    up_proj.backward_input(ctx, through_up, &up, &dnormed, accumulate)?;
    Ok(dnormed)
}
