//! Noise on what routers see in training (Fedus et al. 2021): each element times a number near 1, a function of a seed and the
//! element's place, so that what is computed again sees the same.

use plimsoll_device::{DeviceExt, Routing, Tensor};
use plimsoll_memory::{Tag, splitmix64};
use plimsoll_model::Role;

use super::Experts;
use crate::StepError;
use crate::linear::{Linear, Through};
use crate::routes::Jitter;

impl Experts<'_, '_> {
    fn jitter(&self) -> Option<Jitter> {
        let jitter = self.ctx.routes?.training()?.jitter?;
        let seed = splitmix64(jitter.seed, self.weights.block().parameter_number(Role::Router));
        Some(Jitter { seed, ..jitter })
    }

    /// out (+)= x, shaken.
    fn shake(&self, jitter: Jitter, x: &Tensor, out: &Tensor, accumulate: bool) -> Result<(), StepError> {
        let Jitter { noise, seed, first_row } = jitter;
        let first = first_row * x.columns();
        Ok(self.ctx.device.run(Routing::Jitter { x, out, noise, seed, first, accumulate })?)
    }

    /// What the router sees of `[N, H]`.
    pub(super) fn router_input(&self, normed: &Tensor) -> Result<Tensor, StepError> {
        let Some(jitter) = self.jitter() else { return Ok(normed.clone()) };
        let (device, sizes) = (self.ctx.device, normed.shape());
        let out = device.alloc(normed.dtype(), sizes.dims(), Tag::Activations, "router.input")?;
        self.shake(jitter, normed, &out, false)?;
        Ok(out)
    }

    /// dnormed += what comes through the router's product.
    pub(super) fn router_input_backward(
        &self,
        linear: &Linear<'_>,
        through: Through,
        dlogits: &Tensor,
        dnormed: &Tensor,
    ) -> Result<(), StepError> {
        let Some(jitter) = self.jitter() else {
            return linear.backward_input(self.ctx, through, dlogits, dnormed, true);
        };
        let (device, sizes) = (self.ctx.device, dnormed.shape());
        let dinput = device.alloc(dnormed.dtype(), sizes.dims(), Tag::Activations, "drouter.input")?;
        linear.backward_input(self.ctx, through, dlogits, &dinput, false)?;
        self.shake(jitter, &dinput, dnormed, true)
    }
}
