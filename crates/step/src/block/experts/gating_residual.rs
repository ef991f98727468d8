//! Gating residuals (MoE++, Jin et al. 2024): a router sees what that of the layer with experts before said. Its logits are
//! W x + G l, where l are the logits of that layer. So logits stay until the layer behind has gone back through them, and gradients
//! come from there.

use plimsoll_device::{DType, DeviceExt, Elementwise, Tensor};
use plimsoll_memory::Tag;
use plimsoll_model::Role;

use super::Experts;
use crate::StepError;
use crate::gradients::Gradients;
use crate::linear::Linear;
use crate::routes::Routes;

/// A layer whose router reads that of a layer before has come out of order.
const NO_LOGITS_BEFORE: StepError =
    StepError::Invariant { what: "a router reads logits that no layer before has left" };

impl<'e> Experts<'e, '_> {
    /// What carries logits from layer to layer, where routers read them.
    pub(super) fn carried(&self) -> Option<&'e Routes>
    where
        Self: 'e,
    {
        let residuals = self.spec.zero_computation.is_some_and(|own| own.gating_residuals);
        self.ctx.routes.filter(|_| residuals)
    }

    /// What the router of the layer before said, and what it is multiplied with; `None` for the first layer with experts.
    fn residual(&self) -> Result<Option<(u32, Tensor, Linear<'e>)>, StepError> {
        let own = self.weights.block().layer();
        let Some(before) = own.and_then(|layer| self.ctx.spec.gating_residual_of(layer)) else {
            return Ok(None);
        };
        let logits = self.carried().and_then(|routes| routes.logits(before)).ok_or(NO_LOGITS_BEFORE)?;
        Ok(Some((before, logits, self.weights.linear(Role::RouterResidual, None)?)))
    }

    /// logits += what comes from the layer before.
    pub(super) fn add_residual(&self, logits: &Tensor) -> Result<(), StepError> {
        match self.residual()? {
            Some((_, before, linear)) => linear.forward(self.ctx, &before, logits, true),
            None => Ok(()),
        }
    }

    /// dlogits += what the layer behind has sent. Sends the layer before its gradient, and adds to that of the matrix.
    pub(super) fn residual_backward(
        &self,
        dlogits: &Tensor,
        gradients: &mut Gradients<'_>,
    ) -> Result<(), StepError> {
        let (Some(routes), Some(layer)) = (self.carried(), self.weights.block().layer()) else {
            return Ok(());
        };
        let device = self.ctx.device;
        if let Some(from_behind) = routes.take_gradient(layer) {
            device.run(Elementwise::Add { a: dlogits, b: &from_behind, out: dlogits })?;
        }
        let Some((before, logits, linear)) = self.residual()? else { return Ok(()) };
        let through = linear.backward_weight(self.ctx, gradients, dlogits, &logits)?;
        let dims = logits.shape();
        let sent = device.alloc(DType::F32, dims.dims(), Tag::Activations, "drouter.before")?;
        linear.backward_input(self.ctx, through, dlogits, &sent, false)?;
        routes.send_gradient(before, sent);
        Ok(())
    }
}
