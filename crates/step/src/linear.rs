//! A linear: a weight in some storage, an optional bias, an optional low-rank adapter. y = x W^T + b + s (x A^T) B^T.
//!
//! What is not trained has no gradient: a frozen weight is read by the products, in whatever storage it is, and that
//! is all.

use plimsoll_device::{
    Compute, DType, Device, DeviceExt, GroupedProduct, Magnitude, Op, Product, Quantization, Tensor,
};
use plimsoll_memory::Tag;
use plimsoll_model::{BlockId, Role};

use crate::StepError;
use crate::adapter::{Dora, LowRank};
use crate::context::Context;
use crate::gradients::{Gradients, Target};
use crate::matrices::Matrices;
use crate::settings::{Linears, Precision};
use crate::store::ExpertVisit;

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
            Linears::Int8 => Multiply::Plain(Compute::Int8),
            Linears::Fp8 => Multiply::Fp8,
        }
    }

    /// The tensor as it is multiplied: in 8-bit floats of `dtype`, unless it is stored in codes already.
    pub fn operand(self, device: &dyn Device, x: &Tensor, dtype: DType) -> Result<Tensor, StepError> {
        if self != Multiply::Fp8 || !x.dtype().is_float() {
            return Ok(x.clone());
        }
        let out = device.alloc(dtype, x.shape().dims(), Tag::Activations, "fp8")?;
        device.run(Quantization::QuantizeFp8 { x, out: &out })?;
        Ok(out)
    }

    /// An input or a weight as it is multiplied.
    pub fn input(self, device: &dyn Device, x: &Tensor) -> Result<Tensor, StepError> {
        self.operand(device, x, DType::F8E4m3)
    }

    /// The gradient of an output as it is multiplied: of a wider range.
    pub fn gradient(self, device: &dyn Device, dout: &Tensor) -> Result<Tensor, StepError> {
        self.operand(device, dout, DType::F8E5m2)
    }

    /// What rows are multiplied in that are no whole operand: in 8-bit floats they are `otherwise`.
    pub fn of_rows(self, otherwise: Compute) -> Compute {
        match self {
            Multiply::Plain(compute) => compute,
            Multiply::Fp8 => otherwise,
        }
    }

    /// 8-bit floats are bf16 numbers: their products are exact in bf16.
    fn compute(self) -> Compute {
        match self {
            Multiply::Plain(compute) => compute,
            Multiply::Fp8 => Compute::Bf16,
        }
    }
}

/// A linear of a gathered block.
pub(crate) struct Linear<'a> {
    pub block: BlockId,
    pub role: Role,
    pub weight: Weight<'a>,
    /// `[O]`; of experts `[E, O]`.
    pub bias: Option<(Role, &'a Tensor)>,
    pub adapter: Option<LowRank<'a>>,
    /// The rows of each expert, u32 `[E + 1]`.
    pub offsets: Option<&'a Tensor>,
}

/// Where the weight of a linear is.
#[derive(Clone, Copy)]
pub(crate) enum Weight<'a> {
    /// `[O, I]`; of experts `[E, O, I]`.
    Here(&'a Tensor),
    /// With experts that come by themselves.
    Coming(&'a ExpertVisit<'a>),
}

/// What the gradient of a linear's input needs of the gradients of its weights.
#[must_use]
pub(crate) struct Through {
    /// Of the adapter, `[N, r]`.
    inner: Option<Tensor>,
    /// The gradient of the output before its columns were scaled, `[N, O]`, where they are.
    dout: Option<Tensor>,
}

impl<'a> Linear<'a> {
    /// The same of experts, with these rows for each.
    pub fn grouped(self, offsets: Option<&'a Tensor>) -> Linear<'a> {
        let adapter = self.adapter.map(|adapter| LowRank { offsets, ..adapter });
        Linear { adapter, offsets, ..self }
    }

    /// Outputs of one token.
    pub fn outputs(&self) -> u64 {
        match self.weight {
            Weight::Here(weight) => self.matrices(weight).outputs(),
            Weight::Coming(visit) => visit.sides(self.role).map_or(0, |[_, outputs]| outputs),
        }
    }

    /// Inputs of one token.
    pub fn inputs(&self) -> u64 {
        match self.weight {
            Weight::Here(weight) => weight.columns(),
            Weight::Coming(visit) => visit.sides(self.role).map_or(0, |[inputs, _]| inputs),
        }
    }

    /// The whole weight, for what reads more of it than its products.
    pub fn whole(&self) -> Result<&'a Tensor, StepError> {
        match self.weight {
            Weight::Here(weight) => Ok(weight),
            Weight::Coming(_) => Err(StepError::MissingWeight { block: self.block, role: self.role }),
        }
    }

    fn matrices<'t>(&'t self, all: &'t Tensor) -> Matrices<'t> {
        Matrices { all, offsets: self.offsets }
    }

    /// out (+)= the linear of x; x `[N, I]`, out `[N, O]`.
    pub fn forward(
        &self,
        ctx: &Context<'_>,
        x: &Tensor,
        out: &Tensor,
        accumulate: bool,
    ) -> Result<(), StepError> {
        // Of experts that ranks have apart, nobody else adds the bias.
        let adds_bias =
            self.offsets.is_some() || ctx.products.is_none_or(|products| products.adds_bias(self.role));
        let bias = self.bias.filter(|_| adds_bias).map(|(_, bias)| bias);
        if let Some((adapter, dora)) = self.dora() {
            let y = self.undirected(ctx, adapter, x)?;
            let lengths = adapter.lengths(ctx, dora, self.whole()?)?;
            let (factors, divisors) = (dora.magnitude, lengths.as_ref());
            let x = &y;
            return Ok(ctx.device.run(Magnitude::ScaleColumns {
                x,
                factors,
                divisors,
                bias,
                offsets: self.offsets,
                out,
                accumulate,
            })?);
        }
        self.product(ctx, x, bias, out, accumulate)?;
        match &self.adapter {
            Some(adapter) => adapter.forward(ctx, x, out),
            None => Ok(()),
        }
    }

    /// How its operands are multiplied: the head is no linear of a block, and a stack is not one operand with one scale, as which
    /// 8-bit floats are scaled.
    fn multiply(&self, ctx: &Context<'_>) -> Multiply {
        let whole = self.role.is_block_matrix() && self.offsets.is_none();
        if whole { ctx.linears } else { Multiply::Plain(ctx.linears.of_rows(ctx.compute)) }
    }

    /// out (+)= x W^T + b
    fn product(
        &self,
        ctx: &Context<'_>,
        x: &Tensor,
        bias: Option<&Tensor>,
        out: &Tensor,
        accumulate: bool,
    ) -> Result<(), StepError> {
        let multiply = self.multiply(ctx);
        let weight = match self.weight {
            Weight::Here(weight) => weight,
            Weight::Coming(visit) => {
                return visit.forward(ctx.device, self.role, x, bias, out, accumulate, multiply.compute());
            }
        };
        let (x, weight) = (&multiply.input(ctx.device, x)?, &multiply.input(ctx.device, weight)?);
        self.matrices(weight).forward(ctx.device, x, bias, out, accumulate, multiply.compute())
    }

    fn dora(&self) -> Option<(&LowRank<'_>, Dora<'_>)> {
        let adapter = self.adapter.as_ref()?;
        Some((adapter, adapter.dora?))
    }

    /// x W^T + s (x A^T) B^T `[N, O]`, in memory of its own.
    fn undirected(&self, ctx: &Context<'_>, adapter: &LowRank<'_>, x: &Tensor) -> Result<Tensor, StepError> {
        let y = ctx.device.alloc(ctx.activations, &[x.rows(), self.outputs()], Tag::Activations, "dora")?;
        self.product(ctx, x, None, &y, false)?;
        adapter.forward(ctx, x, &y)?;
        Ok(y)
    }

    /// out += x W: the weight's rows, each by its factor; x `[N, O]`, out `[N, I]`.
    pub fn add_rows(&self, ctx: &Context<'_>, x: &Tensor, out: &Tensor) -> Result<(), StepError> {
        self.matrices(self.whole()?).backward_input(ctx.device, x, out, true, ctx.compute)
    }

    /// Adds to the weight's gradient that of its rows, where it is trained; x `[N, O]`, dout `[N, I]`.
    pub fn add_row_gradients(
        &self,
        ctx: &Context<'_>,
        gradients: &mut Gradients<'_>,
        x: &Tensor,
        dout: &Tensor,
    ) -> Result<(), StepError> {
        match gradients.wants(self.block, self.role) {
            true => gradients.add_product(self.block, self.role, x, dout, None, ctx.compute),
            false => Ok(()),
        }
    }

    /// Adds dout^T x to the weight's gradient and the sum of dout to the bias's, where they are trained, and to those
    /// of the adapter.
    pub fn backward_weight(
        &self,
        ctx: &Context<'_>,
        gradients: &mut Gradients<'_>,
        dout: &Tensor,
        x: &Tensor,
    ) -> Result<Through, StepError> {
        if gradients.wants(self.block, self.role) {
            let multiply = self.multiply(ctx);
            let (narrow, x) = (&multiply.gradient(ctx.device, dout)?, &multiply.input(ctx.device, x)?);
            gradients.add_product(self.block, self.role, narrow, x, self.offsets, multiply.compute())?;
        }
        if let Some((role, _)) = self.bias.filter(|(role, _)| gradients.wants(self.block, *role)) {
            let Target { tensor: dbias, accumulate, .. } = gradients.target(self.block, role)?;
            let dbias = &dbias;
            let op: Op<'_> = match self.offsets {
                None => Product::BiasBackward { dout, dbias, accumulate }.into(),
                Some(offsets) => GroupedProduct::BiasBackward { dout, offsets, dbias, accumulate }.into(),
            };
            ctx.device.run(op)?;
        }
        let Some(adapter) = &self.adapter else { return Ok(Through { inner: None, dout: None }) };
        let Some(dora) = adapter.dora else {
            let inner = Some(adapter.backward_weights(ctx, gradients, dout, x)?);
            return Ok(Through { inner, dout: None });
        };
        let y = self.undirected(ctx, adapter, x)?;
        let lengths = adapter.lengths(ctx, dora, self.whole()?)?;
        if let (Some(divisors), true) = (&lengths, gradients.wants(self.block, dora.role)) {
            let Target { tensor: out, accumulate, .. } = gradients.target(self.block, dora.role)?;
            let (a, b, out, offsets) = (dout, &y, &out, self.offsets);
            ctx.device.run(Magnitude::ColumnDots { a, b, divisors, offsets, out, accumulate })?;
        }
        // The output has served; the gradient before the scaling takes its place.
        let (factors, divisors, bias) = (dora.magnitude, lengths.as_ref(), None);
        ctx.device.run(Magnitude::ScaleColumns {
            x: dout,
            factors,
            divisors,
            bias,
            offsets: self.offsets,
            out: &y,
            accumulate: false,
        })?;
        let inner = Some(adapter.backward_weights(ctx, gradients, &y, x)?);
        Ok(Through { inner, dout: Some(y) })
    }

    /// dx (+)= dout W and what comes through the adapter; dout `[N, O]`, dx `[N, I]`, which may have been x.
    pub fn backward_input(
        &self,
        ctx: &Context<'_>,
        through: Through,
        dout: &Tensor,
        dx: &Tensor,
        accumulate: bool,
    ) -> Result<(), StepError> {
        let dout = through.dout.as_ref().unwrap_or(dout);
        let multiply = self.multiply(ctx);
        match self.weight {
            Weight::Here(weight) => {
                let (narrow, weight) =
                    (&multiply.gradient(ctx.device, dout)?, &multiply.input(ctx.device, weight)?);
                self.matrices(weight).backward_input(
                    ctx.device,
                    narrow,
                    dx,
                    accumulate,
                    multiply.compute(),
                )?;
            }
            Weight::Coming(visit) => {
                visit.backward_input(ctx.device, self.role, dout, dx, accumulate, multiply.compute())?;
            }
        }
        match (&self.adapter, through.inner) {
            (Some(adapter), Some(dh)) => adapter.backward_input(ctx, &dh, dx),
            _ => Ok(()),
        }
    }
}
