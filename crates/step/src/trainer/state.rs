//! What a trainer holds from step to step: weights and optimizer states, to be set, read and written, wherever they live.

use std::ops::Range;

use plimsoll_device::{DType, Tensor};
use plimsoll_model::convert::convert;
use plimsoll_model::{BlockId, Parameter, Role};

use super::Trainer;
use crate::StepError;
use crate::optimizer::{OptimizerState, StateKind};
use crate::tier::{Contents, Parcel};

/// One tensor of the training state.
#[derive(Clone, Debug, PartialEq)]
pub struct NamedTensor {
    /// The parameter's name.
    pub name: String,
    /// What the tensor is to the parameter.
    pub kind: StateKind,
    /// Its type.
    pub dtype: DType,
    /// Its shape.
    pub shape: Vec<u64>,
    parameter: (BlockId, Role),
}

impl NamedTensor {
    /// Size in bytes.
    pub fn bytes(&self) -> u64 {
        self.dtype.bytes_for(self.shape.iter().product()).unwrap_or(0)
    }
}

impl Trainer<'_> {
    /// Sets every weight, those of adapters too. `fill` writes the values of some rows of a parameter in the given type; it
    /// is not called on a dry device. With master weights it fills the master, and the weight is that, rounded.
    pub fn load<E: From<StepError>>(
        &mut self,
        fill: impl FnMut(&Parameter, Range<u64>, DType, &mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let optimizer = &self.optimizer;
        self.weights.load(&|p| optimizer.contents(p, StateKind::Master), fill)
    }

    /// Sets the lengths of rows, where adapters have them (DoRA), to those that the loaded weights have: once, before
    /// the first step.
    pub fn reset_magnitudes(&mut self) -> Result<(), StepError> {
        self.weights.reset_magnitudes()
    }

    /// Every tensor that a run must keep to continue to the same bits.
    pub fn state(&self) -> Result<Vec<NamedTensor>, StepError> {
        let mut all = Vec::new();
        for p in &self.trained {
            let parameter = (p.block, p.role);
            let mut add = |kind, dtype, shape| {
                all.push(NamedTensor { name: p.name.clone(), kind, dtype, shape, parameter });
            };
            add(StateKind::Weight, self.weight_contents(p)?.1, p.shape.clone());
            for (kind, tensor) in
                self.optimizer.state(p.block, p.role).into_iter().flat_map(OptimizerState::tensors)
            {
                add(*kind, tensor.dtype(), tensor.shape().dims().to_vec());
            }
            let pieces = || self.optimizer.away(p.block, p.role);
            for first in pieces().take(1).flat_map(Parcel::tensors) {
                let rows = pieces().flat_map(Parcel::tensors).filter(|state| state.key == first.key);
                let mut shape = first.shape.clone();
                if let Some(all) = shape.first_mut() {
                    *all = rows.filter_map(|state| state.shape.first()).sum();
                }
                add(first.key, first.dtype, shape);
            }
        }
        Ok(all)
    }

    fn contents(&self, tensor: &NamedTensor) -> Result<Contents, StepError> {
        let (block, role) = tensor.parameter;
        let missing = || StepError::MissingWeight { block, role };
        let p = self.trained.iter().find(|p| (p.block, p.role) == tensor.parameter).ok_or_else(missing)?;
        match tensor.kind {
            StateKind::Weight => Ok(self.weight_contents(p)?.0),
            kind => self.optimizer.contents(p, kind).ok_or(missing()),
        }
    }

    /// Where a weight is, and its type.
    fn weight_contents(&self, p: &Parameter) -> Result<(Contents, DType), StepError> {
        if let Some(away) = self.weights.away().iter().find(|away| away.parameter == *p) {
            return Ok((away.contents(), away.dtype));
        }
        let tensor = self.weights.resident().tensor(p)?;
        Ok((Contents::Device(tensor.clone()), tensor.dtype()))
    }

    /// Shows a tensor's bytes, in order, part by part. Nothing is shown in a dry run.
    pub fn read_state(&self, tensor: &NamedTensor, look: &mut dyn FnMut(&[u8])) -> Result<(), StepError> {
        self.contents(tensor)?.read(self.device, &self.tiers, look)
    }

    /// Has a tensor's bytes written, in order, part by part.
    pub fn write_state(
        &mut self,
        tensor: &NamedTensor,
        fill: &mut dyn FnMut(&mut [u8]),
    ) -> Result<(), StepError> {
        self.contents(tensor)?.write(self.device, &self.tiers, fill)
    }

    /// Shows the bytes of a weight of the model, or of an adapter, in the type that it is stored in.
    pub fn read_weight(&self, parameter: &Parameter, look: &mut dyn FnMut(&[u8])) -> Result<(), StepError> {
        self.weight_contents(parameter)?.0.read(self.device, &self.tiers, look)
    }

    /// The values of a parameter's f32 master, or of the weight itself where there is none.
    pub fn values(&self, parameter: &Parameter) -> Result<Vec<f32>, StepError> {
        let (contents, dtype) = match self.optimizer.contents(parameter, StateKind::Master) {
            Some(contents) => (contents, DType::F32),
            None => self.weight_contents(parameter)?,
        };
        let (mut bytes, mut out) = (Vec::new(), vec![0.0; parameter.elements() as usize]);
        contents.read(self.device, &self.tiers, &mut |part| bytes.extend_from_slice(part))?;
        if !bytes.is_empty() {
            convert(dtype, &bytes, DType::F32, bytemuck::cast_slice_mut(&mut out))?;
        }
        Ok(out)
    }

    /// A weight that is on the device.
    pub fn weight(&self, parameter: &Parameter) -> Result<&Tensor, StepError> {
        self.weights.resident().tensor(parameter)
    }

    /// A gradient that is on the device, as the last [`Trainer::accumulate`] left it.
    pub fn gradient(&self, parameter: &Parameter) -> Result<&Tensor, StepError> {
        self.gradients.get(parameter.block, parameter.role)
    }
}
