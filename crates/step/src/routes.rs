//! What routers decide in the forward pass of a micro-batch, and what the backward pass needs of it: the experts of every token, and
//! how evenly all layers have used them.
//!
//! A choice is kept from the first forward pass of a layer to its backward pass, whatever else is dropped: what is computed again
//! goes to the same experts, even where activations come back from 8-bit codes.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use plimsoll_device::{DType, Device, DeviceExt, Routing, Tensor};
use plimsoll_memory::Tag;

use crate::StepError;

/// The decisions for some tokens.
#[derive(Default)]
pub(crate) struct Routes {
    /// u32 `[N, k]` of each layer that has been visited and not yet gone back through.
    choices: RefCell<BTreeMap<u32, Tensor>>,
    /// What the load-balancing loss is made of, where there is one.
    balance: Option<Rc<Balance>>,
}

impl Routes {
    /// Of tokens of a micro-batch whose experts are balanced, if any are.
    pub fn new(balance: Option<Rc<Balance>>) -> Routes {
        Routes { choices: RefCell::default(), balance }
    }

    /// The choice of a layer, where it has been made.
    pub fn choice(&self, layer: u32) -> Option<Tensor> {
        self.choices.borrow().get(&layer).cloned()
    }

    /// Keeps the first choice of a layer, made from these logits, for the backward pass.
    pub fn keep(
        &self,
        device: &dyn Device,
        layer: u32,
        logits: &Tensor,
        choice: &Tensor,
    ) -> Result<(), StepError> {
        self.choices.borrow_mut().insert(layer, choice.clone());
        self.balance.as_ref().map_or(Ok(()), |balance| balance.add(device, logits, choice))
    }

    /// A layer's choice is needed no more.
    pub fn forget(&self, layer: u32) {
        self.choices.borrow_mut().remove(&layer);
    }

    /// What experts are balanced by.
    pub fn balance(&self) -> Option<&Balance> {
        self.balance.as_deref()
    }
}

/// How evenly the tokens of a micro-batch use the experts of all layers together, as transformers has it.
pub(crate) struct Balance {
    /// u32 `[E]`: how often each was chosen.
    counts: Tensor,
    /// f64 `[E]`: the softmax of the logits, added up.
    mass: Tensor,
    /// Tokens times layers with experts.
    rows: u64,
    /// Factor on the loss among sums of token losses.
    factor: f64,
    /// Factor on its gradient.
    pub gradient_factor: f64,
}

impl Balance {
    /// Takes memory. `factor` is that of the loss among sums of token losses, `scale` that of gradients of such sums.
    pub fn new(
        device: &dyn Device,
        experts: u64,
        rows: u64,
        factor: f64,
        scale: f64,
    ) -> Result<Balance, StepError> {
        let alloc = |dtype, name| device.alloc(dtype, &[experts], Tag::Activations, name);
        let (counts, mass) = (alloc(DType::U32, "experts.counts")?, alloc(DType::F64, "experts.mass")?);
        for tensor in [&counts, &mass] {
            device.write(tensor, &mut |bytes| bytes.fill(0))?;
        }
        Ok(Balance { counts, mass, rows, factor, gradient_factor: factor * scale })
    }

    fn add(&self, device: &dyn Device, logits: &Tensor, choice: &Tensor) -> Result<(), StepError> {
        device.run(Routing::Count { choice, counts: &self.counts })?;
        Ok(device.run(Routing::Mass { logits, mass: &self.mass })?)
    }

    /// The loss, f32 `[1]`, when all layers have been visited.
    pub fn loss(&self, device: &dyn Device) -> Result<Tensor, StepError> {
        let Balance { counts, mass, rows, factor, .. } = self;
        let out = device.alloc(DType::F32, &[1], Tag::Activations, "balance.loss")?;
        device.run(Routing::BalanceLoss { counts, mass, rows: *rows, factor: *factor, out: &out })?;
        Ok(out)
    }

    /// dlogits += its gradient.
    pub fn backward(&self, device: &dyn Device, logits: &Tensor, dlogits: &Tensor) -> Result<(), StepError> {
        let (counts, rows, factor) = (&self.counts, self.rows, self.gradient_factor);
        Ok(device.run(Routing::BalanceBackward { logits, counts, rows, factor, dlogits })?)
    }
}
