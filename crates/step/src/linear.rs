//! A linear: a weight in some storage, an optional bias. y = x W^T + b.

use plimsoll_device::{Compute, DType, Device, Op, Tensor};
use plimsoll_memory::Tag;
use plimsoll_model::{BlockId, Role};

use crate::StepError;
use crate::gradients::Gradients;
use crate::settings::{Linears, Precision};

/// How operands are multiplied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Multiply {
    /// As they are, in this precision.
    Plain(Compute),
    /// In 8-bit floats.
    Fp8,
}

impl Multiply {
    /// The products of a block's linears.
    pub fn of(precision: Precision) -> Multiply {
        match precision.linears {
            Linears::Plain => Multiply::Plain(precision.compute()),
            Linears::Fp8 => Multiply::Fp8,
        }
    }

    /// The tensor as it is multiplied: in 8-bit floats of `dtype`, unless it is stored in codes already.
    pub fn operand<D: Device>(self, device: &D, x: &Tensor, dtype: DType) -> Result<Tensor, StepError> {
        if self != Multiply::Fp8 || !x.dtype().is_float() {
            return Ok(x.clone());
        }
        let out = device.alloc(dtype, x.shape().dims(), Tag::Activations, "fp8")?;
        device.run(Op::QuantizeFp8 { x, out: &out })?;
        Ok(out)
    }

    /// An input or a weight as it is multiplied.
    pub fn input<D: Device>(self, device: &D, x: &Tensor) -> Result<Tensor, StepError> {
        self.operand(device, x, DType::F8E4m3)
    }

    /// The gradient of an output as it is multiplied: of a wider range.
    pub fn gradient<D: Device>(self, device: &D, dout: &Tensor) -> Result<Tensor, StepError> {
        self.operand(device, dout, DType::F8E5m2)
    }

    /// 8-bit floats are bf16 numbers: their products are exact in bf16.
    fn compute(self) -> Compute {
        match self {
            Multiply::Plain(compute) => compute,
            Multiply::Fp8 => Compute::Bf16,
        }
    }
}

impl From<Compute> for Multiply {
    fn from(compute: Compute) -> Multiply {
        Multiply::Plain(compute)
    }
}

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
        multiply: impl Into<Multiply>,
    ) -> Result<(), StepError> {
        let multiply = multiply.into();
        let (x, weight) = (&multiply.input(device, x)?, &multiply.input(device, self.weight)?);
        let compute = multiply.compute();
        device.run(Op::Linear { x, weight, bias: self.bias, out, accumulate, compute })?;
        Ok(())
    }

    /// dx (+)= dout W; dout [N, O], dx [N, I].
    pub fn backward_input<D: Device>(
        &self,
        device: &D,
        dout: &Tensor,
        dx: &Tensor,
        accumulate: bool,
        multiply: impl Into<Multiply>,
    ) -> Result<(), StepError> {
        let multiply = multiply.into();
        let (dout, weight) = (&multiply.gradient(device, dout)?, &multiply.input(device, self.weight)?);
        let compute = multiply.compute();
        device.run(Op::LinearBackwardInput { dout, weight, dx, accumulate, compute })?;
        Ok(())
    }

    /// Adds dout^T x to the weight's gradient and the sum of dout to the bias's.
    pub fn backward_weight<D: Device>(
        &self,
        device: &D,
        gradients: &mut Gradients,
        dout: &Tensor,
        x: &Tensor,
        multiply: impl Into<Multiply>,
    ) -> Result<(), StepError> {
        let multiply = multiply.into();
        let (dweight, accumulate) = gradients.target(device, self.block, self.role)?;
        let rounding = gradients.rounding(self.block, self.role);
        let (narrow, x) = (&multiply.gradient(device, dout)?, &multiply.input(device, x)?);
        device.run(Op::LinearBackwardWeight {
            dout: narrow,
            x,
            dweight: &dweight,
            accumulate,
            rounding,
            compute: multiply.compute(),
        })?;
        if self.bias.is_some() {
            let (dbias, accumulate) = gradients.target(device, self.block, self.bias_role)?;
            device.run(Op::BiasBackward { dout, dbias: &dbias, accumulate })?;
        }
        Ok(())
    }
}
