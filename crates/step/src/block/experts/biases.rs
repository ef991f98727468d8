//! Biases of down projections: the weights of experts multiply the input of a down projection, so that its bias is multiplied by them as
//! well (gpt-oss).

use plimsoll_device::{DType, DeviceExt, Elementwise, Tensor, WeightedBias};
use plimsoll_memory::Tag;
use plimsoll_model::Role;

use super::{Experts, Order};
use crate::StepError;
use crate::gradients::{Gradients, Target};

impl Experts<'_, '_> {
    /// The biases of down projections `[E, H]`, where there are any.
    fn down_bias(&self) -> Option<&Tensor> {
        self.weights.find(Role::DownBias)
    }

    /// y `[R, H]` += the bias of each row's expert times the weight of its place.
    pub(super) fn add_down_bias(
        &self,
        order: &Order<'_>,
        weights: &Tensor,
        y: &Tensor,
    ) -> Result<(), StepError> {
        let Some(bias) = self.down_bias() else { return Ok(()) };
        let (factors, sources, offsets, out) = (weights, &order.sources, &order.offsets, y);
        Ok(self.ctx.device.run(WeightedBias::Add { bias, factors, sources, offsets, out })?)
    }

    /// Adds to the gradient of the biases; gives what the weights of experts owe to them, `[N, k]`. drows `[R, H]`.
    pub(super) fn down_bias_backward(
        &self,
        (weights, order): (&Tensor, &Order<'_>),
        drows: &Tensor,
        gradients: &mut Gradients<'_>,
    ) -> Result<Option<Tensor>, StepError> {
        let (device, block, role) = (self.ctx.device, self.weights.block(), Role::DownBias);
        if self.down_bias().is_some() && gradients.wants(block, role) {
            let Target { tensor: dbias, accumulate, .. } = gradients.target(block, role)?;
            let (factors, sources, offsets) = (weights, &order.sources, &order.offsets);
            let (dout, dbias) = (drows, &dbias);
            device.run(WeightedBias::Backward { dout, factors, sources, offsets, dbias, accumulate })?;
        }
        let Some(bias) = self.down_bias() else { return Ok(None) };
        let owed = device.alloc(DType::F32, weights.shape().dims(), Tag::Activations, "dweights.biases")?;
        device.run(Elementwise::Fill { out: &owed, value: 0.0 })?;
        let (dout, places, offsets, dfactors) = (drows, &order.places, &order.offsets, &owed);
        device.run(WeightedBias::FactorsBackward { dout, bias, places, offsets, dfactors })?;
        Ok(Some(owed))
    }
}
