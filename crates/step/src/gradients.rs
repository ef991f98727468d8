//! Gradients of the weights. The first micro-batch of a step writes them, later ones add: there is no zeroing pass.

use std::collections::HashMap;

use plimsoll_device::{Device, Op, Tensor};
use plimsoll_memory::{Phase, Tag};
use plimsoll_model::{BlockId, ModelSpec, Role};

use crate::store::{layer_of, role_name};
use crate::{Precision, StepError};

/// All gradients, resident.
#[derive(Debug)]
pub(crate) struct Gradients {
    slots: HashMap<(BlockId, Role), Slot>,
}

#[derive(Debug)]
struct Slot {
    gradient: Tensor,
    /// Whether this step has put anything into it yet.
    written: bool,
}

impl Gradients {
    /// Takes memory for the gradients of all weights.
    pub fn allocate<D: Device>(
        device: &D,
        spec: &ModelSpec,
        precision: Precision,
    ) -> Result<Self, StepError> {
        let mut slots = HashMap::new();
        for p in spec.parameters() {
            device.arena().enter(Phase::Setup, layer_of(p.block));
            let gradient = device.alloc(precision.gradients, &p.shape, Tag::Gradients, role_name(p.role))?;
            slots.insert((p.block, p.role), Slot { gradient, written: false });
        }
        Ok(Gradients { slots })
    }

    /// Starts a step: whatever is there counts no more.
    pub fn begin(&mut self) {
        self.slots.values_mut().for_each(|slot| slot.written = false);
    }

    /// Where a gradient goes, and whether it is to be added to what is there.
    pub fn target(&mut self, block: BlockId, role: Role) -> Result<(Tensor, bool), StepError> {
        let slot = self.slots.get_mut(&(block, role)).ok_or(StepError::MissingWeight { block, role })?;
        let accumulate = std::mem::replace(&mut slot.written, true);
        Ok((slot.gradient.clone(), accumulate))
    }

    /// Where a gradient goes by scattered addition: zeroed if nothing is there yet.
    pub fn scatter_target<D: Device>(
        &mut self,
        device: &D,
        block: BlockId,
        role: Role,
    ) -> Result<Tensor, StepError> {
        let (gradient, accumulate) = self.target(block, role)?;
        if !accumulate {
            device.run(Op::Fill { out: &gradient, value: 0.0 })?;
        }
        Ok(gradient)
    }

    /// A finished gradient.
    pub fn get(&self, block: BlockId, role: Role) -> Result<&Tensor, StepError> {
        let missing = StepError::MissingWeight { block, role };
        self.slots.get(&(block, role)).map(|slot| &slot.gradient).ok_or(missing)
    }
}
