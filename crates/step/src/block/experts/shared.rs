//! The shared expert: a feed-forward part that every token goes through beside its experts, with a gate or without (DeepSeek-MoE, Dai
//! et al. 2024; the gate is Qwen2-MoE's).

use plimsoll_device::{DType, DeviceExt, Router, Routing, Tensor};
use plimsoll_memory::Tag;
use plimsoll_model::{FeedForwardRoles, Role};

use super::super::mlp::{
    FeedForward, activation_backward, down_backward, input_backward, project_inner, weights_backward,
};
use super::super::saved::Inner;
use super::{Experts, Factors, scaled_backward};
use crate::StepError;
use crate::context::Context;
use crate::gradients::Gradients;
use crate::linear::Linear;

/// A gate is the sigmoid of a logit.
const GATE: Router = Router { sigmoid: true, normalise: false, scale: 1.0, groups: None };

/// What every token goes through beside its experts.
pub(super) struct Shared<'w> {
    pub part: FeedForward<'w>,
    gate: Option<Gate<'w>>,
}

/// What the output of a shared expert is multiplied with.
struct Gate<'w> {
    linear: Linear<'w>,
    /// f32 `[N, 1]`
    logits: Tensor,
    /// Their sigmoids.
    values: Tensor,
}

impl Shared<'_> {
    pub fn factors(&self) -> Option<Factors<'_>> {
        self.gate.as_ref().map(|gate| Factors { values: &gate.values, order: None })
    }

    pub fn inner(&self, ctx: &Context<'_>, normed: &Tensor) -> Result<Inner, StepError> {
        project_inner(ctx, self.part, normed)
    }

    /// dnormed += what comes through it; adds to the gradients of its matrices.
    pub fn backward(
        &self,
        experts: &Experts<'_, '_>,
        inner: Inner,
        activation: Tensor,
        normed: &Tensor,
        dout: &Tensor,
        dnormed: &Tensor,
        gradients: &mut Gradients<'_>,
    ) -> Result<(), StepError> {
        let (ctx, device) = (experts.ctx, experts.ctx.device);
        let dactivation = down_backward(ctx, self.part, activation, dout, gradients)?;
        if let (Some(gate), Some(factors)) = (&self.gate, self.factors()) {
            let alloc = |name| device.alloc(DType::F32, &[normed.rows(), 1], Tag::Activations, name);
            let (dvalues, dlogits) = (alloc("dshared.factor")?, alloc("dshared.gate")?);
            scaled_backward(ctx, &inner, &dactivation, &factors, &dvalues)?;
            ctx.products.map_or(Ok(()), |products| products.sum(device, &dvalues))?;
            let (logits, choice, router) = (&gate.logits, None, GATE);
            let (dweights, dlogits) = (&dvalues, &dlogits);
            device.run(Routing::WeighBackward { logits, choice, router, dweights, dlogits })?;
            let through = gate.linear.backward_weight(ctx, gradients, dlogits, normed)?;
            experts.once(|| gate.linear.backward_input(ctx, through, dlogits, dnormed, true))?;
        }
        let dinner = activation_backward(ctx, inner, &dactivation)?;
        drop(dactivation);
        let through = weights_backward(ctx, self.part, &dinner, normed, gradients)?;
        input_backward(ctx, self.part, through, &dinner, dnormed, true)
    }
}

impl<'e> Experts<'e, '_> {
    /// The shared expert, where there is one, with its gate for these tokens.
    pub(super) fn shared(&self, normed: &Tensor) -> Result<Option<Shared<'e>>, StepError> {
        let Some(spec) = self.spec.shared else { return Ok(None) };
        let part = FeedForward {
            weights: self.weights,
            roles: FeedForwardRoles::SHARED,
            offsets: None,
            visit: None,
        };
        if !spec.gated {
            return Ok(Some(Shared { part, gate: None }));
        }
        let device = self.ctx.device;
        let alloc = |name| device.alloc(DType::F32, &[normed.rows(), 1], Tag::Activations, name);
        let (logits, values) = (alloc("shared.gate")?, alloc("shared.factor")?);
        let linear = self.weights.linear(Role::SharedRouter, None)?;
        linear.forward(self.ctx, normed, &logits, false)?;
        device.run(Routing::Weigh { logits: &logits, choice: None, router: GATE, weights: &values })?;
        Ok(Some(Shared { part, gate: Some(Gate { linear, logits, values }) }))
    }
}
