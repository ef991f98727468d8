//! What routers are trained for beside the loss: that experts have alike much to do, and that logits stay small.

use plimsoll_device::{DType, Device, DeviceExt, LoadRatio, Routing, Tensor, ZeroExperts};
use plimsoll_memory::Tag;
use plimsoll_model::ExpertsSpec;

use crate::StepError;

/// What factors on the losses of routers are made of.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct LossFactors {
    /// What a loss of a micro-batch counts among sums of token losses.
    pub share: f64,
    /// From such sums to their gradients.
    pub gradients: f64,
}

/// The losses of a micro-batch's routers; either may be missing.
pub(crate) struct RouterLosses {
    pub balance: Option<Balance>,
    pub z: Option<ZLoss>,
}

impl RouterLosses {
    /// Notes what a layer's router said.
    pub fn add(&self, device: &dyn Device, logits: &Tensor, choice: &Tensor) -> Result<(), StepError> {
        if let Some(balance) = &self.balance {
            balance.add(device, logits, choice)?;
        }
        self.z.as_ref().map_or(Ok(()), |z| z.add(device, logits))
    }

    /// The losses, f32 `[1]` each, when all layers have been visited.
    pub fn losses(&self, device: &dyn Device) -> Result<Vec<Tensor>, StepError> {
        let balance = self.balance.as_ref().map(|balance| balance.loss(device)).transpose()?;
        Ok(balance.into_iter().chain(self.z.as_ref().map(|z| z.sum.clone())).collect())
    }

    /// dlogits += their gradients.
    pub fn backward(&self, device: &dyn Device, logits: &Tensor, dlogits: &Tensor) -> Result<(), StepError> {
        if let Some(balance) = &self.balance {
            balance.backward(device, logits, dlogits)?;
        }
        self.z.as_ref().map_or(Ok(()), |z| z.backward(device, logits, dlogits))
    }
}

/// How evenly the tokens of a micro-batch use the experts of all layers together, as transformers has it: E times the sum of shares of
/// the choices times means of the softmax. Where there are experts without matrices it is MoE++'s loss, without E, in which those with
/// matrices count 1 and those without tau.
pub(crate) struct Balance {
    /// u32 `[E]`: how often each was chosen.
    counts: Tensor,
    /// f64 `[E]`: the softmax of the logits, added up.
    mass: Tensor,
    /// Tokens times layers with experts.
    rows: u64,
    ratio: LoadRatio,
    /// Factor on the loss among sums of token losses.
    factor: f64,
    /// Factor on its gradient.
    gradient_factor: f64,
}

impl Balance {
    /// Takes memory.
    pub fn new(
        device: &dyn Device,
        experts: &ExpertsSpec,
        rows: u64,
        coefficient: f64,
        factors: LossFactors,
    ) -> Result<Balance, StepError> {
        let alloc = |dtype, name| device.alloc(dtype, &[experts.total()], Tag::Activations, name);
        let (counts, mass) = (alloc(DType::U32, "experts.counts")?, alloc(DType::F64, "experts.mass")?);
        for tensor in [&counts, &mass] {
            device.write(tensor, &mut |bytes| bytes.fill(0))?;
        }
        let (ratio, factor) = match experts.zero_experts() {
            None => (LoadRatio::EVEN, coefficient),
            Some(ZeroExperts { first, .. }) => {
                (LoadRatio { first, of_others: experts.tau() }, coefficient / experts.total() as f64)
            }
        };
        let factor = factor * factors.share;
        Ok(Balance { counts, mass, rows, ratio, factor, gradient_factor: factor * factors.gradients })
    }

    fn add(&self, device: &dyn Device, logits: &Tensor, choice: &Tensor) -> Result<(), StepError> {
        device.run(Routing::Count { choice, counts: &self.counts })?;
        Ok(device.run(Routing::Mass { logits, mass: &self.mass })?)
    }

    fn loss(&self, device: &dyn Device) -> Result<Tensor, StepError> {
        let Balance { counts, mass, rows, factor, ratio, .. } = self;
        let out = device.alloc(DType::F32, &[1], Tag::Activations, "balance.loss")?;
        let (rows, ratio, factor) = (*rows, *ratio, *factor);
        device.run(Routing::BalanceLoss { counts, mass, rows, ratio, factor, out: &out })?;
        Ok(out)
    }

    fn backward(&self, device: &dyn Device, logits: &Tensor, dlogits: &Tensor) -> Result<(), StepError> {
        let (counts, rows, ratio, factor) = (&self.counts, self.rows, self.ratio, self.gradient_factor);
        Ok(device.run(Routing::BalanceBackward { logits, counts, rows, ratio, factor, dlogits })?)
    }
}

/// The router z-loss (ST-MoE, Zoph et al. 2022): the mean of logsumexp(logits)^2 over the tokens of a micro-batch and all layers.
pub(crate) struct ZLoss {
    /// f32 `[1]`
    sum: Tensor,
    /// Factor on each square among sums of token losses.
    factor: f64,
    /// Factor on its gradient.
    gradient_factor: f64,
}

impl ZLoss {
    /// Takes memory. `rows`: tokens times layers with experts.
    pub fn new(
        device: &dyn Device,
        rows: u64,
        coefficient: f64,
        factors: LossFactors,
    ) -> Result<ZLoss, StepError> {
        let sum = device.alloc(DType::F32, &[1], Tag::Activations, "router.z_loss")?;
        device.write_f32(&sum, &[0.0])?;
        let factor = coefficient * factors.share / rows.max(1) as f64;
        Ok(ZLoss { sum, factor, gradient_factor: factor * factors.gradients })
    }

    fn add(&self, device: &dyn Device, logits: &Tensor) -> Result<(), StepError> {
        Ok(device.run(Routing::ZLoss { logits, factor: self.factor, out: &self.sum })?)
    }

    fn backward(&self, device: &dyn Device, logits: &Tensor, dlogits: &Tensor) -> Result<(), StepError> {
        Ok(device.run(Routing::ZBackward { logits, factor: self.gradient_factor, dlogits })?)
    }
}
