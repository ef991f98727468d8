//! What a trainer holds from step to step: weights and optimizer states, to be set, read and written, wherever they live.

use std::ops::Range;
use std::sync::Arc;

use plimsoll_device::{DType, Device, Op, Rounding, Tensor};
use plimsoll_disk::{ALIGNMENT, DiskError, Home};
use plimsoll_memory::{Region, release_free_heap};
use plimsoll_model::convert::convert;
use plimsoll_model::{BlockId, Parameter, Role};

use super::Trainer;
use crate::StepError;
use crate::optimizer::StateKind;
use crate::store::AwayParameter;

/// Bytes that are copied at once between a home and somebody else.
const PART: usize = 1 << 20;

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

/// Where a tensor of the training state is.
enum Place {
    Device(Tensor),
    /// In these homes, from a byte of each on, so many bytes.
    Homes(Vec<(Arc<Home>, u64, u64)>),
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
            let mut outcome = Ok(());
            self.device
                .write(target, &mut |bytes| outcome = fill(p, p.all_rows(), target.dtype(), bytes))
                .map_err(StepError::from)?;
            outcome?;
            if let Some(x) = master {
                let cast = Op::Cast { x, out: weight, rounding: Rounding::Nearest };
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
        let all: Vec<Parameter> = self.spec.parameters();
        for p in all {
            let away = self.weights.away().iter().find(|away| away.parameter == p);
            let mut targets = Vec::new();
            let in_file = |away: &AwayParameter| away.homes.iter().any(|(home, _)| home.is_in_file());
            if let Some(away) = away.filter(|away| !in_file(away)) {
                targets.push((away.dtype, self.home_of_weight(&p)));
            }
            let resident = self.optimizer.find(p.block, p.role).and_then(|state| state.master());
            match resident {
                Some(master) if away.is_some() => {
                    let mut outcome = Ok(());
                    self.device
                        .write(master, &mut |bytes| outcome = fill(&p, p.all_rows(), DType::F32, bytes))
                        .map_err(StepError::from)?;
                    outcome?;
                }
                _ => targets
                    .extend(self.state_in_homes(&p, StateKind::Master).map(|place| (DType::F32, place))),
            }
            for (dtype, place) in targets.into_iter().filter(|_| !self.tiers.is_dry()) {
                self.load_home(&p, dtype, &place, fill)?;
            }
        }
        Ok(())
    }

    /// Sets what lives in homes: a table a part at a time, so that none of its size is ever in memory.
    fn load_home<E: From<StepError>>(
        &self,
        p: &Parameter,
        dtype: DType,
        place: &Place,
        fill: &mut impl FnMut(&Parameter, Range<u64>, DType, &mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut parts = p.parts(dtype, 1).map(|rows| -> Result<Region, E> {
            let bytes = dtype.bytes_for((rows.end - rows.start) * p.columns()).unwrap_or(0);
            let mut memory = Region::new(bytes).map_err(|e| StepError::from(DiskError::from(e)))?;
            fill(p, rows, dtype, memory.bytes_mut())?;
            Ok(memory)
        });
        let (mut part, mut taken, mut outcome) = (None, 0, Ok(()));
        self.write_place(place, &mut |mut out| {
            while !out.is_empty() && outcome.is_ok() {
                let left =
                    part.as_ref().and_then(|part: &Region| part.bytes().get(taken..)).unwrap_or_default();
                if left.is_empty() {
                    match parts.next() {
                        Some(Ok(next)) => (part, taken) = (Some(next), 0),
                        Some(Err(error)) => outcome = Err(error),
                        None => return,
                    }
                    continue;
                }
                let count = out.len().min(left.len());
                out.iter_mut().zip(left).for_each(|(out, byte)| *out = *byte);
                (taken, out) = (taken + count, out.get_mut(count..).unwrap_or_default());
            }
        })?;
        outcome
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

    fn home_of_weight(&self, p: &Parameter) -> Place {
        let away = self.weights.away().iter().find(|away| away.parameter == *p);
        let columns = p.columns();
        let homes = away.into_iter().flat_map(|away| {
            away.pieces.iter().zip(&away.homes).map(move |(rows, (home, start))| {
                let elements = (rows.end - rows.start) * columns;
                (Arc::clone(home), *start, away.dtype.bytes_for(elements).unwrap_or(0))
            })
        });
        Place::Homes(homes.collect())
    }

    fn state_in_homes(&self, p: &Parameter, kind: StateKind) -> Option<Place> {
        let states = self.optimizer.at_home(p.block, p.role);
        let homes: Vec<_> = states
            .into_iter()
            .filter(|state| state.kind == kind)
            .map(|state| {
                let bytes = state.dtype.bytes_for(state.shape.iter().product()).unwrap_or(0);
                (state.home, state.offset, bytes)
            })
            .collect();
        (!homes.is_empty()).then_some(Place::Homes(homes))
    }

    fn place(&self, tensor: &NamedTensor) -> Result<Place, StepError> {
        let (block, role) = tensor.parameter;
        let missing = StepError::MissingWeight { block, role };
        let p = self.trained.iter().find(|p| (p.block, p.role) == tensor.parameter).ok_or(missing)?;
        self.place_of(p, tensor.kind)
    }

    fn place_of(&self, p: &Parameter, kind: StateKind) -> Result<Place, StepError> {
        let missing = StepError::MissingWeight { block: p.block, role: p.role };
        if kind == StateKind::Weight {
            return match self.weights.away().iter().any(|away| away.parameter == *p) {
                true => Ok(self.home_of_weight(p)),
                false => Ok(Place::Device(self.weights.resident().tensor(p)?.clone())),
            };
        }
        let resident = self.optimizer.find(p.block, p.role).and_then(|state| state.find(kind).cloned());
        match resident {
            Some(tensor) => Ok(Place::Device(tensor)),
            None => self.state_in_homes(p, kind).ok_or(missing),
        }
    }

    /// Shows a tensor's bytes, in order, part by part. Nothing is shown in a dry run.
    pub fn read_state(&self, tensor: &NamedTensor, look: &mut dyn FnMut(&[u8])) -> Result<(), StepError> {
        self.read_place(&self.place(tensor)?, look)
    }

    /// Has a tensor's bytes written, in order, part by part.
    pub fn write_state(
        &mut self,
        tensor: &NamedTensor,
        fill: &mut dyn FnMut(&mut [u8]),
    ) -> Result<(), StepError> {
        self.write_place(&self.place(tensor)?, fill)
    }

    /// Shows the bytes of a weight of the model, or of an adapter, in the type that it is stored in.
    pub fn read_weight(&self, parameter: &Parameter, look: &mut dyn FnMut(&[u8])) -> Result<(), StepError> {
        self.read_place(&self.place_of(parameter, StateKind::Weight)?, look)
    }

    /// The values of a parameter's f32 master, or of the weight itself where there is none.
    pub fn values(&self, parameter: &Parameter) -> Result<Vec<f32>, StepError> {
        let is_away = |p: &Parameter| self.weights.away().iter().find(|away| away.parameter == *p);
        let (place, dtype) = match self.place_of(parameter, StateKind::Master) {
            Ok(place) => (place, DType::F32),
            Err(_) => {
                let place = self.place_of(parameter, StateKind::Weight)?;
                let dtype = match (&place, is_away(parameter)) {
                    (Place::Device(tensor), _) => tensor.dtype(),
                    (Place::Homes(_), away) => away.map_or(DType::F32, |away| away.dtype),
                };
                (place, dtype)
            }
        };
        let (mut bytes, mut out) = (Vec::new(), vec![0.0; parameter.elements() as usize]);
        self.read_place(&place, &mut |part| bytes.extend_from_slice(part))?;
        if !bytes.is_empty() {
            convert(dtype, &bytes, DType::F32, bytemuck::cast_slice_mut(&mut out))?;
        }
        Ok(out)
    }

    fn read_place(&self, place: &Place, look: &mut dyn FnMut(&[u8])) -> Result<(), StepError> {
        match place {
            Place::Device(tensor) => Ok(self.device.read(tensor, look)?),
            Place::Homes(_) if self.tiers.is_dry() => Ok(()),
            Place::Homes(homes) => {
                let mut part = vec![0; PART];
                for (home, start, bytes) in homes {
                    let mut done = 0;
                    while done < *bytes {
                        let length = (*bytes - done).min(PART as u64) as usize;
                        let out = part.get_mut(..length).unwrap_or_default();
                        self.tiers.read_now(home, start + done, out)?;
                        look(out);
                        done += length as u64;
                    }
                }
                Ok(())
            }
        }
    }

    fn write_place(&self, place: &Place, fill: &mut dyn FnMut(&mut [u8])) -> Result<(), StepError> {
        match place {
            Place::Device(tensor) => Ok(self.device.write(tensor, fill)?),
            Place::Homes(_) if self.tiers.is_dry() => Ok(()),
            Place::Homes(homes) => {
                // Every part but the last begins and ends with a page.
                const { assert!((PART as u64).is_multiple_of(ALIGNMENT)) };
                let mut part = vec![0; PART];
                for (home, start, bytes) in homes {
                    let mut done = 0;
                    while done < *bytes {
                        let length = (*bytes - done).min(PART as u64) as usize;
                        let out = part.get_mut(..length).unwrap_or_default();
                        fill(out);
                        self.tiers.write_now(home, start + done, out)?;
                        done += length as u64;
                    }
                }
                Ok(())
            }
        }
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
