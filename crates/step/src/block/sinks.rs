//! Sinks of attention: one more score of each head, which takes part in the softmax and has no value. They come behind attention of any
//! kind, and leave what its backward pass needs.

use plimsoll_device::{AttentionShape, DeviceExt, Sink, Tensor};
use plimsoll_model::Role;

use super::saved::Attended;
use crate::StepError;
use crate::context::Context;
use crate::gradients::{Gradients, Target};
use crate::head::rows;
use crate::store::BlockWeights;

/// What attention gave, beside sinks; nothing where there are none.
pub(crate) fn apply(
    ctx: &Context<'_>,
    sinks: Option<&Tensor>,
    out: &Tensor,
    lse: &Tensor,
    probabilities: Option<&Tensor>,
    shape: AttentionShape,
) -> Result<(), StepError> {
    let Some(sinks) = sinks else { return Ok(()) };
    Ok(ctx.device.run(Sink::Apply { sinks, out, lse, probabilities, shape })?)
}

/// Adds to the gradient of sinks, from that of what attention gave.
pub(super) fn backward(
    ctx: &Context<'_>,
    weights: &BlockWeights,
    attended: &Attended,
    dout: &Tensor,
    gradients: &mut Gradients<'_>,
) -> Result<(), StepError> {
    let (block, role) = (weights.block(), Role::Sinks);
    let Some(sinks) = weights.find(role).filter(|_| gradients.wants(block, role)) else { return Ok(()) };
    let Target { tensor: dsinks, mut accumulate, .. } = gradients.target(block, role)?;
    let dsinks = &dsinks;
    let Some(around) = ctx.around else {
        let (out, lse, shape) = (&attended.out, &attended.lse, ctx.attention);
        return Ok(ctx.device.run(Sink::Backward { sinks, out, lse, dout, dsinks, accumulate, shape })?);
    };
    for (own, shape) in around.own_queries(ctx) {
        let part = |x: &Tensor| rows(x, own.start, own.end);
        let (out, lse, dout) = (&part(&attended.out)?, &part(&attended.lse)?, &part(dout)?);
        ctx.device.run(Sink::Backward { sinks, out, lse, dout, dsinks, accumulate, shape })?;
        accumulate = true;
    }
    Ok(())
}
