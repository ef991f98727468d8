//! A linear: a weight in some storage, an optional bias, an optional low-rank adapter. y = x W^T + b + s (x A^T) B^T.
//!
//! What is not trained has no gradient: a frozen weight is read by the products, in whatever storage it is, and that
//! is all.

use plimsoll_device::{Device, Op, Tensor};
use plimsoll_memory::Tag;
use plimsoll_model::{BlockId, Role};

use crate::StepError;
use crate::adapter::{Dora, LowRank};
use crate::context::Context;
use crate::gradients::Gradients;

/// A linear of a gathered block.
pub(crate) struct Linear<'a> {
    pub block: BlockId,
    pub role: Role,
    /// `[O, I]`
    pub weight: &'a Tensor,
    pub bias_role: Role,
    /// `[O]`
    pub bias: Option<&'a Tensor>,
    pub adapter: Option<LowRank<'a>>,
}

/// What the gradient of a linear's input needs of the gradients of its weights.
#[must_use]
pub(crate) struct Through {
    /// Of the adapter, `[N, r]`.
    inner: Option<Tensor>,
    /// The gradient of the output before its columns were scaled, `[N, O]`, where they are.
    dout: Option<Tensor>,
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

    /// out (+)= the linear of x; x `[N, I]`, out `[N, O]`.
    pub fn forward<D: Device>(
        &self,
        ctx: &Context<'_, D>,
        x: &Tensor,
        out: &Tensor,
        accumulate: bool,
    ) -> Result<(), StepError> {
        let (weight, bias, compute) = (self.weight, self.bias, ctx.compute);
        if let Some((adapter, dora)) = self.dora() {
            let y = self.undirected(ctx, adapter, x)?;
            let lengths = adapter.lengths(ctx, dora, weight)?;
            let (factors, divisors) = (dora.magnitude, lengths.as_ref());
            let x = &y;
            return Ok(ctx.device.run(Op::ScaleColumns { x, factors, divisors, bias, out, accumulate })?);
        }
        ctx.device.run(Op::Linear { x, weight, bias, out, accumulate, compute })?;
        match &self.adapter {
            Some(adapter) => adapter.forward(ctx, x, out),
            None => Ok(()),
        }
    }

    fn dora(&self) -> Option<(&LowRank<'_>, Dora<'_>)> {
        let adapter = self.adapter.as_ref()?;
        Some((adapter, adapter.dora?))
    }

    /// x W^T + s (x A^T) B^T `[N, O]`, in memory of its own.
    fn undirected<D: Device>(
        &self,
        ctx: &Context<'_, D>,
        adapter: &LowRank<'_>,
        x: &Tensor,
    ) -> Result<Tensor, StepError> {
        let y = ctx.device.alloc(ctx.activations, &[x.rows(), self.outputs()], Tag::Activations, "dora")?;
        let (weight, compute) = (self.weight, ctx.compute);
        let op = Op::Linear { x, weight, bias: None, out: &y, accumulate: false, compute };
        ctx.device.run(op)?;
        adapter.forward(ctx, x, &y)?;
        Ok(y)
    }

    /// Adds dout^T x to the weight's gradient and the sum of dout to the bias's, where they are trained, and to those
    /// of the adapter.
    pub fn backward_weight<D: Device>(
        &self,
        ctx: &Context<'_, D>,
        gradients: &mut Gradients,
        dout: &Tensor,
        x: &Tensor,
    ) -> Result<Through, StepError> {
        if gradients.wants(self.block, self.role) {
            gradients.add_product(ctx, self.block, self.role, dout, x)?;
        }
        if self.bias.is_some() && gradients.wants(self.block, self.bias_role) {
            let (dbias, accumulate) = gradients.target(ctx.device, self.block, self.bias_role)?;
            ctx.device.run(Op::BiasBackward { dout, dbias: &dbias, accumulate })?;
        }
        let Some(adapter) = &self.adapter else { return Ok(Through { inner: None, dout: None }) };
        let Some(dora) = adapter.dora else {
            let inner = Some(adapter.backward_weights(ctx, gradients, dout, x)?);
            return Ok(Through { inner, dout: None });
        };
        let y = self.undirected(ctx, adapter, x)?;
        let lengths = adapter.lengths(ctx, dora, self.weight)?;
        if let (Some(divisors), true) = (&lengths, gradients.wants(self.block, dora.role)) {
            let (out, accumulate) = gradients.target(ctx.device, self.block, dora.role)?;
            ctx.device.run(Op::ColumnDots { a: dout, b: &y, divisors, out: &out, accumulate })?;
        }
        // The output has served; the gradient before the scaling takes its place.
        let (factors, divisors, bias) = (dora.magnitude, lengths.as_ref(), None);
        ctx.device.run(Op::ScaleColumns { x: dout, factors, divisors, bias, out: &y, accumulate: false })?;
        let inner = Some(adapter.backward_weights(ctx, gradients, &y, x)?);
        Ok(Through { inner, dout: Some(y) })
    }

    /// dx (+)= dout W and what comes through the adapter; dout `[N, O]`, dx `[N, I]`, which may have been x.
    pub fn backward_input<D: Device>(
        &self,
        ctx: &Context<'_, D>,
        through: Through,
        dout: &Tensor,
        dx: &Tensor,
        accumulate: bool,
    ) -> Result<(), StepError> {
        let (weight, compute) = (self.weight, ctx.compute);
        let dout = through.dout.as_ref().unwrap_or(dout);
        ctx.device.run(Op::LinearBackwardInput { dout, weight, dx, accumulate, compute })?;
        match (&self.adapter, through.inner) {
            (Some(adapter), Some(dh)) => adapter.backward_input(ctx, &dh, dx),
            _ => Ok(()),
        }
    }
}
