//! A matrix that all rows are multiplied with, or a stack of them with a matrix for each group of rows: what linears and adapters
//! of experts and of anything else have in common.

use plimsoll_device::{Compute, Device, DeviceExt, GroupedProduct, Op, Product, Tensor};

use crate::StepError;

/// One matrix `[O, I]`, or a stack `[E, O, I]`.
#[derive(Clone, Copy)]
pub(crate) struct Matrices<'a> {
    pub all: &'a Tensor,
    /// u32 `[E + 1]`: the first row of each group, and the one behind the last; where there is a stack.
    pub offsets: Option<&'a Tensor>,
}

impl<'a> Matrices<'a> {
    /// Matrices of the stack.
    fn count(self) -> u64 {
        self.offsets.map_or(1, |offsets| offsets.elements().saturating_sub(1).max(1))
    }

    /// Outputs of a row.
    pub fn outputs(self) -> u64 {
        self.all.rows() / self.count()
    }

    /// out (+)= x W^T + b, each row with its own.
    pub fn forward(
        self,
        device: &dyn Device,
        x: &Tensor,
        bias: Option<&Tensor>,
        out: &Tensor,
        accumulate: bool,
        compute: Compute,
    ) -> Result<(), StepError> {
        let weight = self.all;
        let op: Op<'_> = match self.offsets {
            None => Product::Linear { x, weight, bias, out, accumulate, compute }.into(),
            Some(offsets) => {
                GroupedProduct::Linear { x, weight, bias, offsets, out, accumulate, compute }.into()
            }
        };
        Ok(device.run(op)?)
    }

    /// dx (+)= dout W, each row with its own.
    pub fn backward_input(
        self,
        device: &dyn Device,
        dout: &Tensor,
        dx: &Tensor,
        accumulate: bool,
        compute: Compute,
    ) -> Result<(), StepError> {
        let weight = self.all;
        let op: Op<'_> = match self.offsets {
            None => Product::LinearBackwardInput { dout, weight, dx, accumulate, compute }.into(),
            Some(offsets) => {
                GroupedProduct::LinearBackwardInput { dout, weight, offsets, dx, accumulate, compute }.into()
            }
        };
        Ok(device.run(op)?)
    }
}
