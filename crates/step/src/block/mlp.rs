//! The feed-forward part: gate and up projections, activation, down projection; whole or in chunks of tokens.

use plimsoll_device::{Activation, Device, DeviceExt, Tensor};
use plimsoll_model::Role;

use super::parts::activation_tensor;
use super::saved::Inner;
use crate::StepError;
use crate::context::Context;
use crate::gradients::Gradients;
use crate::head::{for_each_range, rows};
use crate::store::BlockWeights;

/// Gate and up projections of the normed input.
pub(super) fn project_inner<D: Device>(
    ctx: &Context<'_, D>,
    weights: &BlockWeights,
    normed: &Tensor,
) -> Result<Inner, StepError> {
    let project = |weight, bias, name| -> Result<Tensor, StepError> {
        let linear = weights.linear(weight, bias)?;
        let out = activation_tensor(ctx, normed.rows(), linear.outputs(), name)?;
        linear.forward(ctx, normed, &out, false)?;
        Ok(out)
    };
    let gate = match ctx.spec.mlp.gated {
        true => Some(project(Role::GateProj, Role::GateBias, "gate")?),
        false => None,
    };
    Ok(Inner { gate, up: project(Role::UpProj, Role::UpBias, "up")? })
}

/// The activation in memory of its own.
pub(super) fn activate<D: Device>(ctx: &Context<'_, D>, inner: &Inner) -> Result<Tensor, StepError> {
    let out = activation_tensor(ctx, inner.up.rows(), inner.up.columns(), "activation")?;
    activate_into(ctx, inner, &out)?;
    ctx.linears.input(ctx.device, &out)
}

/// The activation in the memory of its input.
pub(super) fn activate_in_place<D: Device>(ctx: &Context<'_, D>, inner: Inner) -> Result<Tensor, StepError> {
    activate_into(ctx, &inner, &inner.up)?;
    ctx.linears.input(ctx.device, &inner.up)
}

fn activate_into<D: Device>(ctx: &Context<'_, D>, inner: &Inner, out: &Tensor) -> Result<(), StepError> {
    let activation = ctx.activation();
    ctx.device.run(match &inner.gate {
        Some(gate) => Activation::Gated { gate, up: &inner.up, out, activation },
        None => Activation::Activate { x: &inner.up, out, activation },
    })?;
    Ok(())
}

/// out (+)= down projection of the activation.
pub(super) fn project_down<D: Device>(
    ctx: &Context<'_, D>,
    weights: &BlockWeights,
    activation: &Tensor,
    out: &Tensor,
    accumulate: bool,
) -> Result<(), StepError> {
    let down = weights.linear(Role::DownProj, Role::DownBias)?;
    down.forward(ctx, activation, out, accumulate)
}

/// out (+)= the whole part, of which nothing is kept: only a chunk of tokens is `[., I]` wide at a time.
pub(super) fn in_chunks<D: Device>(
    ctx: &Context<'_, D>,
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

/// Returns the gradient of the part's normed input `[N, H]`; weight gradients are added.
pub(super) fn backward<D: Device>(
    ctx: &Context<'_, D>,
    weights: &BlockWeights,
    inner: Inner,
    activation: Tensor,
    normed: &Tensor,
    dout: &Tensor,
    gradients: &mut Gradients<'_, D>,
) -> Result<Tensor, StepError> {
    let place = || activation_tensor(ctx, normed.rows(), normed.columns(), "dnorm");
    backward_into(ctx, weights, inner, activation, normed, dout, place, gradients)
}

/// As [`backward`], a chunk of tokens at a time, each computed again first.
pub(super) fn backward_in_chunks<D: Device>(
    ctx: &Context<'_, D>,
    weights: &BlockWeights,
    chunk: u64,
    normed: &Tensor,
    dout: &Tensor,
    gradients: &mut Gradients<'_, D>,
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
fn for_each_chunk<D: Device>(
    ctx: &Context<'_, D>,
    tokens: u64,
    chunk: u64,
    mut body: impl FnMut(&Context<'_, D>, u64, u64) -> Result<(), StepError>,
) -> Result<(), StepError> {
    for_each_range(ctx.device, tokens, chunk, |start, end, _| body(&ctx.at_row(start), start, end))
}

fn backward_into<D: Device>(
    ctx: &Context<'_, D>,
    weights: &BlockWeights,
    inner: Inner,
    activation: Tensor,
    normed: &Tensor,
    dout: &Tensor,
    dnormed: impl FnOnce() -> Result<Tensor, StepError>,
    gradients: &mut Gradients<'_, D>,
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
        Some(gate) => Some((weights.linear(Role::GateProj, Role::GateBias)?, gate)),
        None => None,
    };
    let gated = match gated {
        Some((gate_proj, dgate)) => {
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
