//! A linear: a weight in some storage, an optional bias. y = x W^T + b.

use plimsoll_device::{Compute, Device, Op, Tensor};
use plimsoll_model::{BlockId, Role};

use crate::StepError;
use crate::gradients::Gradients;

/// A linear of a gathered block.
pub(crate) struct Linear<'a> {
    pub block: BlockId,
    pub role: Role,
    /// [O, I]
    pub weight: &'a Tensor,
    pub bias_role: Role,
    /// [O]
    pub bias: Option<&'a Tensor>,
}

impl Linear<'_> {
    /// Outputs of one token.
    pub fn outputs(&self) -> u64 {
        self.weight.rows()
    }

    /// Inputs of one token.
    pub fn inputs(&self) -> u64 {
        self.weight.columns()
    }

    /// out (+)= x W^T + b; x [N, I], out [N, O].
    pub fn forward<D: Device>(
        &self,
        device: &D,
        x: &Tensor,
        out: &Tensor,
        accumulate: bool,
        compute: Compute,
    ) -> Result<(), StepError> {
        device.run(Op::Linear { x, weight: self.weight, bias: self.bias, out, accumulate, compute })?;
        Ok(())
    }

    /// dx (+)= dout W; dout [N, O], dx [N, I].
    pub fn backward_input<D: Device>(
        &self,
        device: &D,
        dout: &Tensor,
        dx: &Tensor,
        accumulate: bool,
        compute: Compute,
    ) -> Result<(), StepError> {
        device.run(Op::LinearBackwardInput { dout, weight: self.weight, dx, accumulate, compute })?;
        Ok(())
    }

    /// Adds dout^T x to the weight's gradient and the sum of dout to the bias's.
    pub fn backward_weight<D: Device>(
        &self,
        device: &D,
        gradients: &mut Gradients,
        dout: &Tensor,
        x: &Tensor,
        compute: Compute,
    ) -> Result<(), StepError> {
        let (dweight, accumulate) = gradients.target(device, self.block, self.role)?;
        let rounding = gradients.rounding(self.block, self.role);
        device.run(Op::LinearBackwardWeight { dout, x, dweight: &dweight, accumulate, rounding, compute })?;
        if self.bias.is_some() {
            let (dbias, accumulate) = gradients.target(device, self.block, self.bias_role)?;
            device.run(Op::BiasBackward { dout, dbias: &dbias, accumulate })?;
        }
        Ok(())
    }
}
