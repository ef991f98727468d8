//! What a trainer holds from step to step: weights and optimizer states, to be set, read and written, wherever they live.

use std::ops::Range;

use plimsoll_device::{DType, Device, DeviceExt, Elementwise, Rounding, Tensor};
use plimsoll_memory::release_free_heap;
use plimsoll_model::convert::convert;
use plimsoll_model::{BlockId, Parameter, Role};

use super::Trainer;
use crate::StepError;
use crate::optimizer::StateKind;
use crate::tier::{Contents, HomePart};

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

impl<D: Device> Trainer<'_, D> {
    /// Sets every weight, those of adapters too. `fill` writes the values of some rows of a parameter in the given type; it
    /// is not called on a dry device. With master weights it fills the master, and the weight is that, rounded.
    pub fn load<E: From<StepError>>(
        &mut self,
        mut fill: impl FnMut(&Parameter, Range<u64>, DType, &mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        // First what needs memory of its own on its way, while little of the arena has been touched.
        self.load_homes(&mut fill)?;
        for p in self.weights.resident().parameters() {
            let weight = self.weights.resident().tensor(p)?;
            let master = self.optimizer.find(p.block, p.role).and_then(|state| state.master());
            let target = master.unwrap_or(weight);
            let contents = Contents::Device(target.clone());
            contents.load(self.device, &self.tiers, (p, target.dtype()), &mut fill)?;
            if let Some(x) = master {
                let cast = Elementwise::Cast { x, out: weight, rounding: Rounding::Nearest };
                self.device.run(cast).map_err(StepError::from)?;
            }
        }
        // What quantising and converting took of the heap counts against the arena, which is touched from here on.
        release_free_heap();
        Ok(self.weights.prepare()?)
    }

    /// Sets what lives on a lower tier, and masters whose weights do.
    fn load_homes<E: From<StepError>>(
        &mut self,
        fill: &mut impl FnMut(&Parameter, Range<u64>, DType, &mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        for p in self.spec.parameters() {
            let Some(away) = self.weights.away().iter().find(|away| away.parameter == p) else {
                self.load_masters(&p, false, fill)?;
                continue;
            };
            if away.is_loaded() && !self.tiers.is_dry() {
                away.contents().load(self.device, &self.tiers, (&p, away.dtype), fill)?;
            }
            self.load_masters(&p, true, fill)?;
        }
        Ok(())
    }

    /// Sets a master in homes, and one on the device whose weight is away.
    fn load_masters<E: From<StepError>>(
        &self,
        p: &Parameter,
        away: bool,
        fill: &mut impl FnMut(&Parameter, Range<u64>, DType, &mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let resident = self.optimizer.find(p.block, p.role).and_then(|state| state.master());
        let master = match resident {
            Some(master) => away.then(|| Contents::Device(master.clone())),
            None => self.state_in_homes(p, StateKind::Master).filter(|_| !self.tiers.is_dry()),
        };
        master.map_or(Ok(()), |master| master.load(self.device, &self.tiers, (p, DType::F32), fill))
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
            let weight = self.weights.away().iter().find(|away| away.parameter == *p).map(|away| away.dtype);
            let dtype = match weight {
                Some(dtype) => dtype,
                None => self.weights.resident().tensor(p)?.dtype(),
            };
            add(StateKind::Weight, dtype, p.shape.clone());
            for (kind, tensor) in self.optimizer.state(p.block, p.role)?.tensors() {
                add(*kind, tensor.dtype(), tensor.shape().dims().to_vec());
            }
            let homes = self.optimizer.at_home(p.block, p.role);
            for first in homes.iter().filter(|state| state.piece == 0) {
                let rows = homes.iter().filter(|state| state.kind == first.kind);
                let mut shape = first.shape.clone();
                if let Some(all) = shape.first_mut() {
                    *all = rows.filter_map(|state| state.shape.first()).sum();
                }
                add(first.kind, first.dtype, shape);
            }
        }
        Ok(all)
    }

    fn state_in_homes(&self, p: &Parameter, kind: StateKind) -> Option<Contents> {
        let states = self.optimizer.at_home(p.block, p.role);
        let homes: Vec<HomePart> = states
            .into_iter()
            .filter(|state| state.kind == kind)
            .map(|state| {
                let bytes = state.dtype.bytes_for(state.shape.iter().product()).unwrap_or(0);
                HomePart { home: state.home, start: state.offset, bytes }
            })
            .collect();
        (!homes.is_empty()).then_some(Contents::Homes(homes))
    }

    fn contents(&self, tensor: &NamedTensor) -> Result<Contents, StepError> {
        let (block, role) = tensor.parameter;
        let missing = StepError::MissingWeight { block, role };
        let p = self.trained.iter().find(|p| (p.block, p.role) == tensor.parameter).ok_or(missing)?;
        self.contents_of(p, tensor.kind)
    }

    fn contents_of(&self, p: &Parameter, kind: StateKind) -> Result<Contents, StepError> {
        let missing = StepError::MissingWeight { block: p.block, role: p.role };
        if kind == StateKind::Weight {
            return match self.weights.away().iter().find(|away| away.parameter == *p) {
                Some(away) => Ok(away.contents()),
                None => Ok(Contents::Device(self.weights.resident().tensor(p)?.clone())),
            };
        }
        let resident = self.optimizer.find(p.block, p.role).and_then(|state| state.find(kind).cloned());
        match resident {
            Some(tensor) => Ok(Contents::Device(tensor)),
            None => self.state_in_homes(p, kind).ok_or(missing),
        }
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
        self.contents_of(parameter, StateKind::Weight)?.read(self.device, &self.tiers, look)
    }

    /// The values of a parameter's f32 master, or of the weight itself where there is none.
    pub fn values(&self, parameter: &Parameter) -> Result<Vec<f32>, StepError> {
        let is_away = |p: &Parameter| self.weights.away().iter().find(|away| away.parameter == *p);
        let (contents, dtype) = match self.contents_of(parameter, StateKind::Master) {
            Ok(contents) => (contents, DType::F32),
            Err(_) => {
                let contents = self.contents_of(parameter, StateKind::Weight)?;
                let dtype = match (&contents, is_away(parameter)) {
                    (Contents::Device(tensor), _) => tensor.dtype(),
                    (Contents::Homes(_), away) => away.map_or(DType::F32, |away| away.dtype),
                };
                (contents, dtype)
            }
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
