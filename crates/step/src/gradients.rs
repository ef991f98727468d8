//! Gradients of the weights. A gradient takes memory when the backward pass first writes it, and gives it back when it
//! has served: before the backward pass there are none, and no zeroing pass is needed.

use std::collections::HashMap;

use plimsoll_device::{DType, Device, Op, Tensor};
use plimsoll_memory::Tag;
use plimsoll_model::{BlockId, ModelSpec, Role};

use crate::StepError;
use crate::store::role_name;

/// The gradients that exist at the moment.
#[derive(Debug)]
pub(crate) struct Gradients {
    dtype: DType,
    shapes: HashMap<(BlockId, Role), Vec<u64>>,
    tensors: HashMap<(BlockId, Role), Tensor>,
}

impl Gradients {
    /// No gradients yet, for the weights of a model.
    pub fn new(spec: &ModelSpec, dtype: DType) -> Self {
        let shapes = spec.parameters().into_iter().map(|p| ((p.block, p.role), p.shape)).collect();
        Gradients { dtype, shapes, tensors: HashMap::new() }
    }

    /// Gives all gradients back.
    pub fn clear(&mut self) {
        self.tensors.clear();
    }

    /// Gives one gradient back.
    pub fn release(&mut self, block: BlockId, role: Role) {
        self.tensors.remove(&(block, role));
    }

    /// Where a gradient goes, and whether it is to be added to what is there.
    pub fn target<D: Device>(
        &mut self,
        device: &D,
        block: BlockId,
        role: Role,
    ) -> Result<(Tensor, bool), StepError> {
        let key = (block, role);
        if let Some(gradient) = self.tensors.get(&key) {
            return Ok((gradient.clone(), true));
        }
        let shape = self.shapes.get(&key).ok_or(StepError::MissingWeight { block, role })?;
        let gradient = device.alloc(self.dtype, shape, Tag::Gradients, role_name(role))?;
        self.tensors.insert(key, gradient.clone());
        Ok((gradient, false))
    }

    /// Where a gradient goes by scattered addition: zeroed if nothing is there yet.
    pub fn scatter_target<D: Device>(
        &mut self,
        device: &D,
        block: BlockId,
        role: Role,
    ) -> Result<Tensor, StepError> {
        let (gradient, accumulate) = self.target(device, block, role)?;
        if !accumulate {
            device.run(Op::Fill { out: &gradient, value: 0.0 })?;
        }
        Ok(gradient)
    }

    /// A gradient that the backward pass has written.
    pub fn get(&self, block: BlockId, role: Role) -> Result<&Tensor, StepError> {
        self.tensors.get(&(block, role)).ok_or(StepError::MissingWeight { block, role })
    }
}
