//! What an optimizer remembers of a parameter.

use std::ops::Range;

use plimsoll_device::{BLOCK_8BIT, Codes, DType, Device, DeviceExt, Elementwise, Tensor};
use plimsoll_memory::Tag;
use plimsoll_model::Parameter;

use crate::StepError;
use crate::tier::clear;

/// What a tensor of the training state is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StateKind {
    /// A weight as the products read it.
    Weight,
    /// Its f32 master.
    Master,
    /// First moment or momentum; codes in an 8-bit optimizer.
    FirstMoment,
    /// Second moment; codes in an 8-bit optimizer, one number for a run of elements in Adam-mini.
    SecondMoment,
    /// Largest magnitude of each block of the first moment's codes.
    FirstMomentAbsmax,
    /// Largest magnitude of each block of the second moment's codes.
    SecondMomentAbsmax,
    /// Means of the second moment over rows.
    SecondMomentRows,
    /// Means of the second moment over columns.
    SecondMomentColumns,
    /// Where gradients are projected to.
    Projection,
    /// Norm of the last update.
    UpdateNorm,
}

/// State of one parameter.
#[derive(Clone, Debug, Default)]
pub struct OptimizerState {
    tensors: Vec<(StateKind, Tensor)>,
}

impl OptimizerState {
    /// A state of these tensors.
    pub(super) fn new(tensors: Vec<(StateKind, Tensor)>) -> OptimizerState {
        OptimizerState { tensors }
    }

    /// The part of a parameter's state that belongs to some of its rows, of a rule that treats them by themselves; all of it
    /// where that is all rows, whatever the rule. `None` where the rows have no state of their own.
    pub(super) fn of_rows(&self, parameter: &Parameter, rows: &Range<u64>) -> Option<OptimizerState> {
        if *rows == parameter.all_rows() {
            return Some(self.clone());
        }
        let all = parameter.rows().max(1);
        let part = |tensor: &Tensor| {
            let mut sizes = tensor.shape().dims().to_vec();
            if sizes.first() == Some(&all) {
                let matrix = tensor.reshape(&[all, tensor.elements() / all])?;
                sizes[0] = rows.end - rows.start;
                return matrix.slice_rows(rows.clone())?.reshape(&sizes);
            }
            // One number for each block of elements; pieces are whole blocks.
            let columns = parameter.elements() / all;
            let block = |row: u64| (row * columns).div_ceil(BLOCK_8BIT);
            let (start, end) = (block(rows.start), block(rows.end));
            tensor.reshape(&[tensor.elements(), 1])?.slice_rows(start..end)?.reshape(&[end - start])
        };
        let tensors = self.tensors.iter().map(|(kind, tensor)| Some((*kind, part(tensor)?)));
        Some(OptimizerState { tensors: tensors.collect::<Option<_>>()? })
    }

    /// Every tensor, the master included.
    pub fn tensors(&self) -> &[(StateKind, Tensor)] {
        &self.tensors
    }

    /// One of them, if the state has it.
    pub fn find(&self, kind: StateKind) -> Option<&Tensor> {
        self.tensors.iter().find(|(k, _)| *k == kind).map(|(_, tensor)| tensor)
    }

    /// The f32 weights behind the parameter's.
    pub fn master(&self) -> Option<&Tensor> {
        self.find(StateKind::Master)
    }
}

/// Makes the state of one parameter.
pub(super) struct NewState<'a> {
    pub device: &'a dyn Device,
    /// All of the parameter.
    pub whole: &'a Parameter,
    /// The rows whose state it is, as a parameter.
    pub parameter: &'a Parameter,
    state: OptimizerState,
}

impl<'a> NewState<'a> {
    pub fn new(device: &'a dyn Device, whole: &'a Parameter, parameter: &'a Parameter) -> Self {
        NewState { device, whole, parameter, state: OptimizerState::default() }
    }

    fn alloc(&mut self, kind: StateKind, dtype: DType, shape: &[u64]) -> Result<Tensor, StepError> {
        let tag = if kind == StateKind::Master { Tag::MasterWeights } else { Tag::Optimizer };
        let tensor = self.device.alloc(dtype, shape, tag, self.parameter.role.name())?;
        self.state.tensors.push((kind, tensor.clone()));
        Ok(tensor)
    }

    /// A float tensor of zeros.
    pub fn zeros(&mut self, kind: StateKind, dtype: DType, shape: &[u64]) -> Result<(), StepError> {
        let tensor = self.alloc(kind, dtype, shape)?;
        Ok(self.device.run(Elementwise::Fill { out: &tensor, value: 0.0 })?)
    }

    /// A tensor of zeros of the parameter's shape.
    pub fn like_parameter(&mut self, kind: StateKind, dtype: DType) -> Result<(), StepError> {
        self.zeros(kind, dtype, &self.parameter.shape)
    }

    /// An 8-bit tensor of the parameter's shape whose blocks are all zero.
    pub fn codes(&mut self, kind: StateKind, absmax: StateKind) -> Result<(), StepError> {
        let codes = self.alloc(kind, DType::U8, &self.parameter.shape)?;
        clear(self.device, &codes)?;
        let blocks = self.parameter.elements().div_ceil(BLOCK_8BIT);
        self.zeros(absmax, DType::F32, &[blocks])
    }

    /// The master weights, to be written by the caller.
    pub fn master(&mut self) -> Result<(), StepError> {
        self.alloc(StateKind::Master, DType::F32, &self.parameter.shape).map(|_| ())
    }

    pub fn done(self) -> OptimizerState {
        self.state
    }
}

/// An 8-bit state of a parameter.
pub(super) fn codes(state: &OptimizerState, codes: StateKind, absmax: StateKind) -> Option<Codes<'_>> {
    Some(Codes { codes: state.find(codes)?, absmax: state.find(absmax)? })
}
