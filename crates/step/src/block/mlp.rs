//! The feed-forward part: gate and up projections, activation, down projection; whole or in chunks of tokens. Experts are such parts
//! too, which their file sends tokens to.

use plimsoll_device::{Activation, DeviceExt, Tensor};
use plimsoll_model::{FeedForwardRoles, LinearRoles};

use super::experts;
use super::mover::Mover;
use super::parts::activation_tensor;
use super::saved::{Held, Inner};
use crate::StepError;
use crate::context::{Context, NonLinearity};
use crate::gradients::Gradients;
use crate::head::{for_each_range, rows};
use crate::linear::{Linear, Through, Weight};
use crate::norm::Normed;
use crate::policy::{LayerPolicy, Save};
use crate::store::{BlockWeights, ExpertVisit};

/// What the backward pass will need of the part.
pub(crate) struct SavedMlp {
    pub norm: Held<Normed>,
    pub within: SavedWithin,
}

/// What it will need of what lies between the part's norm and its output. Of a part of experts `[N * k, I]` in the place of `[N, I]`, in
/// the order of the experts.
pub(crate) struct SavedWithin {
    pub inner: Held<Inner>,
    /// The input of the down projection `[N, I]`.
    pub activation: Held<Tensor>,
    /// What the router gave `[N, E]`, of a part of experts.
    pub logits: Held<Tensor>,
    /// The same of the shared expert, `[N, I]`.
    pub shared_inner: Held<Inner>,
    pub shared_activation: Held<Tensor>,
}

impl SavedMlp {
    /// Everything is computed again.
    pub fn dropped() -> SavedMlp {
        SavedMlp { norm: Held::Dropped, within: SavedWithin::dropped() }
    }

    /// Begins to bring back what is away.
    pub fn fetch(&mut self, away: Option<&Mover<'_>>) -> Result<(), StepError> {
        self.norm.fetch(away)?;
        self.within.fetch(away)
    }
}

impl SavedWithin {
    pub fn dropped() -> SavedWithin {
        SavedWithin {
            inner: Held::Dropped,
            activation: Held::Dropped,
            logits: Held::Dropped,
            shared_inner: Held::Dropped,
            shared_activation: Held::Dropped,
        }
    }

    fn fetch(&mut self, away: Option<&Mover<'_>>) -> Result<(), StepError> {
        self.inner.fetch(away)?;
        self.activation.fetch(away)?;
        self.logits.fetch(away)?;
        self.shared_inner.fetch(away)?;
        self.shared_activation.fetch(away)
    }
}

/// The linears of a feed-forward part: a layer's own, a shared expert's, or those of all experts.
#[derive(Clone, Copy)]
pub(super) struct FeedForward<'w> {
    pub weights: &'w BlockWeights,
    pub roles: FeedForwardRoles,
    /// The rows of each expert.
    pub offsets: Option<&'w Tensor>,
    /// Where experts come by themselves.
    pub visit: Option<&'w ExpertVisit<'w>>,
}

impl<'w> FeedForward<'w> {
    fn of_layer(weights: &'w BlockWeights) -> FeedForward<'w> {
        FeedForward { weights, roles: FeedForwardRoles::DENSE, offsets: None, visit: None }
    }

    fn linear(self, LinearRoles { weight, bias }: LinearRoles) -> Result<Linear<'w>, StepError> {
        let linear = match self.visit {
            Some(visit) => self.weights.linear_of(weight, bias, Weight::Coming(visit))?,
            None => self.weights.linear(weight, bias)?,
        };
        Ok(linear.grouped(self.offsets))
    }

    pub fn gate(self) -> Result<Linear<'w>, StepError> {
        self.linear(self.roles.gate)
    }

    pub fn up(self) -> Result<Linear<'w>, StepError> {
        self.linear(self.roles.up)
    }

    pub fn down(self) -> Result<Linear<'w>, StepError> {
        self.linear(self.roles.down)
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
    if let Some(experts) = ctx.experts {
        let (out, within) = experts::forward(ctx, weights, experts, policy, &all, add)?;
        drop(all);
        return Ok((out, SavedMlp { norm: Held::new(ctx, of_norm, normed)?, within }));
    }
    let part = FeedForward::of_layer(weights);
    if let Some(chunk) = ctx.mlp_chunk(all.rows()) {
        let out = add(&|out, accumulate| in_chunks(ctx, part, chunk, &all, out, accumulate))?;
        let norm = Held::new(ctx, of_norm, normed)?;
        return Ok((out, SavedMlp { norm, ..SavedMlp::dropped() }));
    }
    let projected = project_inner(ctx, part, &all)?;
    drop(all);
    let norm = Held::new(ctx, of_norm, normed)?;
    let inner = Held::new(ctx, policy.gate_up, projected.clone())?;
    let activated = match policy.gate_up {
        Save::Keep => activate(ctx, &projected)?,
        Save::Int8 { .. } | Save::Recompute => activate_in_place(ctx, projected)?,
    };
    let out = add(&|out, accumulate| part.down()?.forward(ctx, &activated, out, accumulate))?;
    let activation = Held::new(ctx, policy.activation, activated)?;
    Ok((out, SavedMlp { norm, within: SavedWithin { inner, activation, ..SavedWithin::dropped() } }))
}

/// The gradient of the part's normed input `[N, H]`; weight gradients are added. `dout` makes the gradient of the part's
/// output, and is given what computes that output again.
pub(super) fn backward(
    ctx: &Context<'_>,
    weights: &BlockWeights,
    within: SavedWithin,
    normed: &Tensor,
    gradients: &mut Gradients<'_>,
    dout: impl FnOnce(
        &dyn Fn(&Tensor, bool) -> Result<(), StepError>,
        &mut Gradients<'_>,
    ) -> Result<Tensor, StepError>,
) -> Result<Tensor, StepError> {
    if let Some(experts) = ctx.experts {
        return experts::backward(ctx, weights, experts, within, normed, gradients, dout);
    }
    let part = FeedForward::of_layer(weights);
    if let Some(chunk) = ctx.mlp_chunk(normed.rows()) {
        let again = |out: &Tensor, accumulate| in_chunks(ctx, part, chunk, normed, out, accumulate);
        let dout = dout(&again, gradients)?;
        return backward_in_chunks(ctx, part, chunk, normed, &dout, gradients);
    }
    let inner = within.inner.restore(ctx, || project_inner(ctx, part, normed))?;
    let activation = within.activation.restore(ctx, || activate(ctx, &inner))?;
    let again = |out: &Tensor, accumulate| part.down()?.forward(ctx, &activation, out, accumulate);
    let dout = dout(&again, gradients)?;
    let place = || activation_tensor(ctx, normed.rows(), normed.columns(), "dnorm");
    backward_into(ctx, part, inner, activation, normed, &dout, place, gradients)
}

/// Gate and up projections of the normed input.
pub(super) fn project_inner(
    ctx: &Context<'_>,
    part: FeedForward<'_>,
    normed: &Tensor,
) -> Result<Inner, StepError> {
    let project = |linear: Linear<'_>, name| -> Result<Tensor, StepError> {
        let out = activation_tensor(ctx, normed.rows(), linear.outputs(), name)?;
        linear.forward(ctx, normed, &out, false)?;
        Ok(out)
    };
    let gate = match ctx.mlp.gated {
        true => Some(project(part.gate()?, "gate")?),
        false => None,
    };
    Ok(Inner { gate, up: project(part.up()?, "up")? })
}

/// The activation in memory of its own, as it is multiplied.
fn activate(ctx: &Context<'_>, inner: &Inner) -> Result<Tensor, StepError> {
    ctx.linears.input(ctx.device, &activated(ctx, inner)?)
}

/// The activation in the memory of its input, as it is multiplied.
fn activate_in_place(ctx: &Context<'_>, inner: Inner) -> Result<Tensor, StepError> {
    ctx.linears.input(ctx.device, &activated_in_place(ctx, inner)?)
}

/// The activation in memory of its own.
pub(super) fn activated(ctx: &Context<'_>, inner: &Inner) -> Result<Tensor, StepError> {
    let out = activation_tensor(ctx, inner.up.rows(), inner.up.columns(), "activation")?;
    activate_into(ctx, inner, &out)?;
    Ok(out)
}

/// The activation in the memory of its input.
pub(super) fn activated_in_place(ctx: &Context<'_>, inner: Inner) -> Result<Tensor, StepError> {
    activate_into(ctx, &inner, &inner.up)?;
    Ok(inner.up)
}

const NO_GATE: StepError = StepError::Invariant { what: "a clamped activation has a gate" };

fn activate_into(ctx: &Context<'_>, inner: &Inner, out: &Tensor) -> Result<(), StepError> {
    let up = &inner.up;
    Ok(ctx.device.run(match (&inner.gate, ctx.activation()) {
        (Some(gate), NonLinearity::Plain(activation)) => Activation::Gated { gate, up, out, activation },
        (None, NonLinearity::Plain(activation)) => Activation::Activate { x: up, out, activation },
        (Some(gate), NonLinearity::Clamped { alpha, limit }) => {
            Activation::ClampedSwiglu { gate, up, out, alpha, limit }
        }
        (None, NonLinearity::Clamped { .. }) => return Err(NO_GATE),
    })?)
}

/// out (+)= the whole part, of which nothing is kept: only a chunk of tokens is `[., I]` wide at a time.
fn in_chunks(
    ctx: &Context<'_>,
    part: FeedForward<'_>,
    chunk: u64,
    normed: &Tensor,
    out: &Tensor,
    accumulate: bool,
) -> Result<(), StepError> {
    for_each_chunk(ctx, normed.rows(), chunk, |ctx, start, end| {
        let normed = ctx.linears.input(ctx.device, &rows(normed, start, end)?)?;
        let inner = project_inner(ctx, part, &normed)?;
        let activation = activate_in_place(ctx, inner)?;
        part.down()?.forward(ctx, &activation, &rows(out, start, end)?, accumulate)
    })
}

/// As [`backward`], a chunk of tokens at a time, each computed again first.
fn backward_in_chunks(
    ctx: &Context<'_>,
    part: FeedForward<'_>,
    chunk: u64,
    normed: &Tensor,
    dout: &Tensor,
    gradients: &mut Gradients<'_>,
) -> Result<Tensor, StepError> {
    let dnormed = activation_tensor(ctx, normed.rows(), normed.columns(), "dnorm")?;
    for_each_chunk(ctx, normed.rows(), chunk, |ctx, start, end| {
        let normed = ctx.linears.input(ctx.device, &rows(normed, start, end)?)?;
        let inner = project_inner(ctx, part, &normed)?;
        let activation = activate(ctx, &inner)?;
        let dout = rows(dout, start, end)?;
        let place = || rows(&dnormed, start, end);
        backward_into(ctx, part, inner, activation, &normed, &dout, place, gradients)?;
        Ok(())
    })?;
    Ok(dnormed)
}

/// Calls `body` with the context, the first and the last row of every chunk.
pub(super) fn for_each_chunk(
    ctx: &Context<'_>,
    tokens: u64,
    chunk: u64,
    mut body: impl FnMut(&Context<'_>, u64, u64) -> Result<(), StepError>,
) -> Result<(), StepError> {
    for_each_range(ctx.device, tokens, chunk, |start, end, _| body(&ctx.at_row(start), start, end))
}

fn backward_into(
    ctx: &Context<'_>,
    part: FeedForward<'_>,
    inner: Inner,
    activation: Tensor,
    normed: &Tensor,
    dout: &Tensor,
    dnormed: impl FnOnce() -> Result<Tensor, StepError>,
    gradients: &mut Gradients<'_>,
) -> Result<Tensor, StepError> {
    let dactivation = down_backward(ctx, part, activation, dout, gradients)?;
    let dinner = activation_backward(ctx, inner, &dactivation)?;
    drop(dactivation);
    let through = weights_backward(ctx, part, &dinner, normed, gradients)?;
    let dnormed = dnormed()?;
    input_backward(ctx, part, through, &dinner, &dnormed, false)?;
    Ok(dnormed)
}

/// The gradient of the down projection's input, in the memory of that if it is wide enough.
pub(super) fn down_backward(
    ctx: &Context<'_>,
    part: FeedForward<'_>,
    activation: Tensor,
    dout: &Tensor,
    gradients: &mut Gradients<'_>,
) -> Result<Tensor, StepError> {
    let down = part.down()?;
    let through = down.backward_weight(ctx, gradients, dout, &activation)?;
    let dactivation = if activation.dtype() == ctx.activations {
        activation
    } else {
        drop(activation);
        activation_tensor(ctx, dout.rows(), down.inputs(), "dactivation")?
    };
    down.backward_input(ctx, through, dout, &dactivation, false)?;
    Ok(dactivation)
}

/// The gradients of the gate and up projections' outputs, in their memory.
pub(super) fn activation_backward(
    ctx: &Context<'_>,
    inner: Inner,
    dactivation: &Tensor,
) -> Result<Inner, StepError> {
    let (up, dout) = (&inner.up, dactivation);
    ctx.device.run(match (&inner.gate, ctx.activation()) {
        (Some(gate), NonLinearity::Plain(activation)) => {
            Activation::GatedBackward { gate, up, dout, dgate: gate, dup: up, activation }
        }
        (None, NonLinearity::Plain(activation)) => {
            Activation::ActivateBackward { x: up, dout, dx: up, activation }
        }
        (Some(gate), NonLinearity::Clamped { alpha, limit }) => {
            Activation::ClampedSwigluBackward { gate, up, dout, dgate: gate, dup: up, alpha, limit }
        }
        (None, NonLinearity::Clamped { .. }) => return Err(NO_GATE),
    })?;
    Ok(inner)
}

/// What the gradient of the input needs of those of gate and up projections.
pub(super) struct ThroughInner {
    gate: Option<Through>,
    up: Through,
}

/// Adds to the gradients of the gate and up projections' weights.
pub(super) fn weights_backward(
    ctx: &Context<'_>,
    part: FeedForward<'_>,
    dinner: &Inner,
    normed: &Tensor,
    gradients: &mut Gradients<'_>,
) -> Result<ThroughInner, StepError> {
    let gate = match &dinner.gate {
        Some(dgate) => Some(part.gate()?.backward_weight(ctx, gradients, dgate, normed)?),
        None => None,
    };
    Ok(ThroughInner { gate, up: part.up()?.backward_weight(ctx, gradients, &dinner.up, normed)? })
}

/// dnormed (+)= what comes through the gate and up projections.
pub(super) fn input_backward(
    ctx: &Context<'_>,
    part: FeedForward<'_>,
    through: ThroughInner,
    dinner: &Inner,
    dnormed: &Tensor,
    accumulate: bool,
) -> Result<(), StepError> {
    let mut accumulate = accumulate;
    if let (Some(dgate), Some(through)) = (&dinner.gate, through.gate) {
        part.gate()?.backward_input(ctx, through, dgate, dnormed, accumulate)?;
        accumulate = true;
    }
    part.up()?.backward_input(ctx, through.up, &dinner.up, dnormed, accumulate)
}
