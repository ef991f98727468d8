//! The low-rank adapter of a linear or an embedding (LoRA, Hu et al. 2021): beside y = x W^T comes s (x A^T) B^T. Nothing
//! of the weight's size is made, forward or backward: what is `[N, r]` wide is computed again where it is needed.

use plimsoll_device::{Compute, DType, Device, DeviceExt, Elementwise, Embedding, Magnitude, Op, Tensor};
use plimsoll_memory::{Tag, splitmix64};
use plimsoll_model::{BlockId, Role};

use crate::StepError;
use crate::context::Context;
use crate::gradients::Gradients;
use crate::matrices::Matrices;
use crate::products::Products;
use crate::stage::Split;

/// Which inputs of adapters are dropped in a pass (Srivastava et al. 2014); masks are functions of the seed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Dropout {
    pub probability: f32,
    pub seed: u64,
    /// The first token that a stage is given, where it is given a chunk of them.
    pub first_row: u64,
}

/// An adapter of a gathered block.
pub(crate) struct LowRank<'a> {
    pub block: BlockId,
    pub a_role: Role,
    /// `[r, I]`; of an embedding `[V, r]`; of experts `[E, r, I]`.
    pub a: &'a Tensor,
    pub b_role: Role,
    /// `[O, r]`; of experts `[E, O, r]`.
    pub b: &'a Tensor,
    /// The rows of each expert.
    pub offsets: Option<&'a Tensor>,
    pub scale: f32,
    pub dora: Option<Dora<'a>>,
}

/// The lengths of the rows of a weight with its adapter (DoRA, Liu et al. 2024): y = m / c (W x + s B A x) with
/// c = |W + s B A| row by row, which counts as a constant in the backward pass. Each matrix of a stack has its own.
#[derive(Clone, Copy)]
pub(crate) struct Dora<'a> {
    pub role: Role,
    /// m `[O]`; of experts `[E, O]`.
    pub magnitude: &'a Tensor,
    /// |W|^2 row by row, `[O]`, of experts `[E O]`; without it the adapter no longer changes and m is m / c.
    pub squares: Option<&'a Tensor>,
    /// The rows of each expert's A, where they are kept.
    pub offsets: Option<&'a Tensor>,
}

impl LowRank<'_> {
    /// c `[O]`, of experts `[E O]`, where the adapter may have changed since it was last computed.
    pub fn lengths(
        &self,
        ctx: &Context<'_>,
        dora: Dora<'_>,
        weight: &Tensor,
    ) -> Result<Option<Tensor>, StepError> {
        let of = |squares| self.lengths_of(ctx.device, ctx.products, squares, weight);
        dora.squares.map(of).transpose()
    }

    /// |W|^2 row by row into `out`. Ranks that have some columns each add up their squares.
    pub fn squares_of(
        &self,
        device: &dyn Device,
        products: Option<&Products<'_>>,
        weight: &Tensor,
        out: &Tensor,
    ) -> Result<(), StepError> {
        device.run(Magnitude::RowSquares { x: weight, out })?;
        self.with_other_columns(products).map_or(Ok(()), |products| products.sum(device, out))
    }

    /// |W + s B A| row by row, from |W|^2. Ranks that have some columns each add up what they have of W A^T and A A^T.
    pub fn lengths_of(
        &self,
        device: &dyn Device,
        products: Option<&Products<'_>>,
        squares: &Tensor,
        weight: &Tensor,
    ) -> Result<Tensor, StepError> {
        let (rank, outputs) = (self.b.columns(), weight.rows());
        let stack = self.a.rows() / rank.max(1);
        let alloc = |sizes: &[u64], name| device.alloc(DType::F32, sizes, Tag::Workspace, name);
        let cross = alloc(&[self.a.rows(), outputs / stack.max(1)], "dora.cross")?;
        let gram = alloc(&[self.a.rows(), rank], "dora.gram")?;
        let kept = self.dora.and_then(|dora| dora.offsets);
        let made = match kept {
            None if self.is_of_experts() => Some(ranks_of_experts(device, stack, rank, Tag::Workspace)?),
            _ => None,
        };
        let of_each = kept.or(made.as_ref());
        for (all, out) in [(weight, &cross), (self.a, &gram)] {
            let matrices = Matrices { all, offsets: of_each };
            matrices.forward(device, self.a, None, out, false, Compute::F32)?;
        }
        drop(made);
        if let Some(products) = self.with_other_columns(products) {
            products.sum(device, &cross)?;
            products.sum(device, &gram)?;
        }
        let lengths = alloc(&[outputs], "dora.lengths")?;
        let (cross, gram, b, scale) = (&cross, &gram, self.b, self.scale);
        device.run(Magnitude::RowLengths { squares, cross, gram, b, scale, lengths: &lengths })?;
        Ok(lengths)
    }

    /// The ranks that have the other columns of the weight, where there are any.
    fn with_other_columns<'p, 'a>(&self, products: Option<&'p Products<'a>>) -> Option<&'p Products<'a>> {
        products.filter(|_| !self.is_of_experts() && Split::of(self.a_role) == Split::Columns)
    }

    fn is_of_experts(&self) -> bool {
        self.a.shape().dims().len() > 2
    }

    /// out += s (x A^T) B^T; x `[N, I]`, out `[N, O]`.
    pub fn forward(&self, ctx: &Context<'_>, x: &Tensor, out: &Tensor) -> Result<(), StepError> {
        let h = self.inner(ctx, x)?;
        self.expand(ctx, &h, out)
    }

    /// Adds to the gradients of A and B; returns what the gradient of x needs, `[N, r]`.
    pub fn backward_weights(
        &self,
        ctx: &Context<'_>,
        gradients: &mut Gradients<'_>,
        dout: &Tensor,
        x: &Tensor,
    ) -> Result<Tensor, StepError> {
        let h = self.inner(ctx, x)?;
        gradients.add_product(self.block, self.b_role, dout, &h, self.offsets, ctx.compute)?;
        drop(h);
        let dh = self.inner_gradient(ctx, dout)?;
        let dropped = self.dropped(ctx, x)?;
        let x = dropped.as_ref().unwrap_or(x);
        gradients.add_product(self.block, self.a_role, &dh, x, self.offsets, ctx.compute)?;
        Ok(dh)
    }

    /// dx += what comes through the adapter; `dh` is what [`backward_weights`](Self::backward_weights) returned.
    pub fn backward_input(&self, ctx: &Context<'_>, dh: &Tensor, dx: &Tensor) -> Result<(), StepError> {
        let product = |dx: &Tensor, accumulate| {
            self.of(self.a).backward_input(ctx.device, dh, dx, accumulate, ctx.compute)
        };
        let Some(dropout) = ctx.dropout else { return product(dx, true) };
        let through = ctx.device.alloc(dx.dtype(), dx.shape().dims(), Tag::Activations, "lora.dx")?;
        product(&through, false)?;
        Ok(ctx.device.run(self.mask(ctx, dropout, &through, dx, true))?)
    }

    /// out += s A[tokens] B^T, of an embedding; out `[N, H]`.
    pub fn embed(&self, ctx: &Context<'_>, tokens: &Tensor, out: &Tensor) -> Result<(), StepError> {
        let h = self.embedded(ctx, tokens)?;
        self.expand(ctx, &h, out)
    }

    /// Adds to the gradients of an embedding's A and B.
    pub fn embed_backward(
        &self,
        ctx: &Context<'_>,
        gradients: &mut Gradients<'_>,
        tokens: &Tensor,
        dout: &Tensor,
    ) -> Result<(), StepError> {
        let h = self.embedded(ctx, tokens)?;
        gradients.add_product(self.block, self.b_role, dout, &h, None, ctx.compute)?;
        drop(h);
        let dh = self.inner_gradient(ctx, dout)?;
        gradients.scatter(self.block, self.a_role, tokens, &dh)
    }

    /// s x A^T `[N, r]`, of x with elements dropped.
    fn inner(&self, ctx: &Context<'_>, x: &Tensor) -> Result<Tensor, StepError> {
        let a = self.of(self.a);
        let h = self.middle(ctx, x.rows(), a.outputs())?;
        let dropped = self.dropped(ctx, x)?;
        let x = dropped.as_ref().unwrap_or(x);
        a.forward(ctx.device, x, None, &h, false, ctx.compute)?;
        self.scaled(ctx, h)
    }

    fn embedded(&self, ctx: &Context<'_>, tokens: &Tensor) -> Result<Tensor, StepError> {
        let h = self.middle(ctx, tokens.elements(), self.a.columns())?;
        ctx.device.run(Embedding::Lookup { tokens, table: self.a, out: &h })?;
        self.scaled(ctx, h)
    }

    /// s dout B `[N, r]`
    fn inner_gradient(&self, ctx: &Context<'_>, dout: &Tensor) -> Result<Tensor, StepError> {
        let dh = self.middle(ctx, dout.rows(), self.b.columns())?;
        self.of(self.b).backward_input(ctx.device, dout, &dh, false, ctx.compute)?;
        self.scaled(ctx, dh)
    }

    /// out += h B^T
    fn expand(&self, ctx: &Context<'_>, h: &Tensor, out: &Tensor) -> Result<(), StepError> {
        self.of(self.b).forward(ctx.device, h, None, out, true, ctx.compute)
    }

    /// One of its two matrices, or that of each expert.
    fn of<'t>(&'t self, all: &'t Tensor) -> Matrices<'t> {
        Matrices { all, offsets: self.offsets }
    }

    fn middle(&self, ctx: &Context<'_>, rows: u64, rank: u64) -> Result<Tensor, StepError> {
        Ok(ctx.device.alloc(ctx.activations, &[rows, rank], Tag::Activations, "lora")?)
    }

    fn scaled(&self, ctx: &Context<'_>, h: Tensor) -> Result<Tensor, StepError> {
        if self.scale != 1.0 {
            ctx.device.run(Elementwise::Scale { x: &h, factor: self.scale })?;
        }
        Ok(h)
    }

    /// x with elements dropped, where any are.
    fn dropped(&self, ctx: &Context<'_>, x: &Tensor) -> Result<Option<Tensor>, StepError> {
        let Some(dropout) = ctx.dropout else { return Ok(None) };
        let out = ctx.device.alloc(x.dtype(), x.shape().dims(), Tag::Activations, "lora.dropout")?;
        ctx.device.run(self.mask(ctx, dropout, x, &out, false))?;
        Ok(Some(out))
    }

    fn mask<'t>(
        &self,
        ctx: &Context<'_>,
        dropout: Dropout,
        x: &'t Tensor,
        out: &'t Tensor,
        accumulate: bool,
    ) -> Op<'t> {
        // Linears that read the same input drop different elements of it.
        let seed = splitmix64(dropout.seed, self.block.parameter_number(self.b_role));
        // Ranks that have other columns of an input, or rows of other experts, make a choice of their own.
        let has_others = self.offsets.is_some() || Split::of(self.a_role) == Split::Columns;
        let apart = ctx.products.filter(|_| has_others);
        let seed = apart.map_or(seed, |products| splitmix64(seed, u64::from(products.ranks().rank())));
        let first = dropout.first_row * x.columns();
        Elementwise::Dropout { x, out, probability: dropout.probability, seed, first, accumulate }.into()
    }
}

/// Offsets of the rows of all experts' A: `rank` rows for each, u32 `[E + 1]`.
pub(crate) fn ranks_of_experts(
    device: &dyn Device,
    experts: u64,
    rank: u64,
    tag: Tag,
) -> Result<Tensor, StepError> {
    let offsets = device.alloc(DType::U32, &[experts + 1], tag, "dora.offsets")?;
    let first = |expert: u64| u32::try_from(expert * rank).unwrap_or(u32::MAX);
    device.write(&offsets, &mut |bytes| {
        for (bytes, expert) in bytes.chunks_exact_mut(size_of::<u32>()).zip(0..) {
            bytes.copy_from_slice(&first(expert).to_ne_bytes());
        }
    })?;
    Ok(offsets)
}
