//! Gradients of the weights. A gradient takes memory when the backward pass first writes it, and gives it back when it
//! has served: before the backward pass there are none, and no zeroing pass is needed.

use std::collections::HashMap;

use plimsoll_device::{Compute, DType, Device, Op, Rounding, Tensor};
use plimsoll_memory::Tag;
use plimsoll_model::{BlockId, Parameter, Role};

use crate::StepError;
use crate::seed::{mix, parameter_number};
use crate::store::role_name;

/// The gradients that exist at the moment.
#[derive(Debug)]
pub(crate) struct Gradients {
    dtype: DType,
    shapes: HashMap<(BlockId, Role), Vec<u64>>,
    tensors: HashMap<(BlockId, Role), Written>,
    seed: u64,
}

#[derive(Debug)]
struct Written {
    gradient: Tensor,
    /// How often something was added to it.
    times: u64,
}

impl Gradients {
    /// No gradients yet, for the parameters that are trained.
    pub fn new(trained: &[Parameter], dtype: DType) -> Self {
        let shapes = trained.iter().map(|p| ((p.block, p.role), p.shape.clone())).collect();
        Gradients { dtype, shapes, tensors: HashMap::new(), seed: 0 }
    }

    /// Gives all gradients back and starts a pass. Sums in narrow gradients are rounded stochastically by `seed`, so that
    /// what is small beside the sum is not lost: twice the same pass gives the same bits.
    pub fn begin(&mut self, seed: u64) {
        self.clear();
        self.seed = seed;
    }

    /// Gives all gradients back.
    pub fn clear(&mut self) {
        self.tensors.clear();
    }

    /// Whether a parameter is trained.
    pub fn wants(&self, block: BlockId, role: Role) -> bool {
        self.shapes.contains_key(&(block, role))
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
        if let Some(written) = self.tensors.get_mut(&key) {
            written.times += 1;
            return Ok((written.gradient.clone(), true));
        }
        let shape = self.shapes.get(&key).ok_or(StepError::MissingWeight { block, role })?;
        // Vectors are too small to save anything on, and many sums end in each of their elements.
        let dtype = if shape.len() < 2 { DType::F32 } else { self.dtype };
        let gradient = device.alloc(dtype, shape, Tag::Gradients, role_name(role))?;
        self.tensors.insert(key, Written { gradient: gradient.clone(), times: 0 });
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

    /// Adds dout^T x to a weight's gradient.
    pub fn add_product<D: Device>(
        &mut self,
        device: &D,
        block: BlockId,
        role: Role,
        dout: &Tensor,
        x: &Tensor,
        compute: Compute,
    ) -> Result<(), StepError> {
        let (dweight, accumulate) = self.target(device, block, role)?;
        let (dweight, rounding) = (&dweight, self.rounding(block, role));
        Ok(device.run(Op::LinearBackwardWeight { dout, x, dweight, accumulate, rounding, compute })?)
    }

    /// The rounding of what is now added to a gradient.
    pub fn rounding(&self, block: BlockId, role: Role) -> Rounding {
        let times = self.tensors.get(&(block, role)).map_or(0, |written| written.times);
        let seed = mix(mix(self.seed, times), parameter_number(block, role));
        Rounding::Stochastic { seed, first: 0 }
    }

    /// A gradient that the backward pass has written.
    pub fn get(&self, block: BlockId, role: Role) -> Result<&Tensor, StepError> {
        let written = self.tensors.get(&(block, role)).ok_or(StepError::MissingWeight { block, role })?;
        Ok(&written.gradient)
    }
}
