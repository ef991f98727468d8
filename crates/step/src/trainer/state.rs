//! What a trainer holds from step to step: weights and optimizer states, to be set, read and written, wherever they live.

use std::ops::Range;

use plimsoll_device::{DType, Tensor};
use plimsoll_model::convert::convert;
use plimsoll_model::{BlockId, Parameter, Role};

use super::{Part, Trainer};
use crate::StepError;
use crate::optimizer::StateKind;
use crate::settings::Ranks;
use crate::tier::Contents;

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

/// Bytes of a message in which a state goes from rank to rank.
const MESSAGE: u64 = 1 << 20;

/// The lengths of the messages that so many bytes are.
fn messages(bytes: u64) -> impl Iterator<Item = usize> {
    (0..bytes.div_ceil(MESSAGE)).map(move |nth| (bytes - nth * MESSAGE).min(MESSAGE) as usize)
}

/// A rank's share of a state.
struct Share {
    rank: u32,
    part: Part,
    bytes: u64,
}

impl Trainer<'_> {
    /// Sets every weight, those of adapters too. `fill` writes the values of some rows of a parameter in the given type; it
    /// is not called on a dry device. With master weights it fills the master, and the weight is that, rounded.
    pub fn load<E: From<StepError>>(
        &mut self,
        fill: impl FnMut(&Parameter, Range<u64>, DType, &mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let optimizer = &self.optimizer;
        self.weights.load(&|p| optimizer.masters(p), fill)
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
            for state in self.optimizer.shapes_of(p, &p.all_rows(), self.has_master(p))? {
                add(state.kind, state.dtype, state.shape);
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
        Ok((Contents::Device(vec![tensor.clone()]), tensor.dtype()))
    }

    /// Shows a tensor's bytes, in order, part by part. Nothing is shown in a dry run.
    pub fn read_state(&self, tensor: &NamedTensor, look: &mut dyn FnMut(&[u8])) -> Result<(), StepError> {
        match self.is_shared_out(tensor) {
            true => self.read_shares(tensor, look),
            false => self.contents(tensor)?.read(self.device, &self.tiers, look),
        }
    }

    /// Has a tensor's bytes written, in order, part by part.
    pub fn write_state(
        &mut self,
        tensor: &NamedTensor,
        fill: &mut dyn FnMut(&mut [u8]),
    ) -> Result<(), StepError> {
        match self.is_shared_out(tensor) {
            true => self.write_shares(tensor, fill),
            false => self.contents(tensor)?.write(self.device, &self.tiers, fill),
        }
    }

    /// Whether each rank has its own rows of a tensor.
    fn is_shared_out(&self, tensor: &NamedTensor) -> bool {
        tensor.kind != StateKind::Weight && self.shares_updates()
    }

    /// Whether a weight has an f32 master.
    fn has_master(&self, parameter: &Parameter) -> bool {
        // Adapters are in f32 themselves.
        self.settings.precision.master_weights && !matches!(parameter.role, Role::Lora(..))
    }

    /// Every rank's shares of a state, in the order of the rows, with their bytes.
    fn shares_of_state(&self, tensor: &NamedTensor) -> Result<Vec<Share>, StepError> {
        let Ranks { count, .. } = self.settings.ranks;
        let (block, role) = tensor.parameter;
        let p = self.trained.iter().find(|p| (p.block, p.role) == tensor.parameter);
        let p = p.ok_or(StepError::MissingWeight { block, role })?;
        let mut all = Vec::new();
        for (part, rank) in
            self.parts.of_parameter(p).flat_map(|part| (0..count).map(move |rank| (part, rank)))
        {
            let part = part.of_rows(part.share(rank, count));
            if part.rows.is_empty() {
                continue;
            }
            let shapes = self.optimizer.shapes_of(p, &part.rows, self.has_master(p))?;
            let state = shapes.iter().find(|state| state.kind == tensor.kind);
            all.extend(state.map(|state| Share { rank, bytes: state.bytes(), part }));
        }
        Ok(all)
    }

    /// Has the first rank see a state of which each rank has its shares. All ranks call it, for the same tensors in the same
    /// order; what the others have goes to the first rank.
    fn read_shares(&self, tensor: &NamedTensor, look: &mut dyn FnMut(&[u8])) -> Result<(), StepError> {
        let (device, tiers, own) = (self.device, &*self.tiers, self.settings.ranks.rank);
        for Share { rank, part, bytes } in self.shares_of_state(tensor)? {
            if own != rank {
                if own == 0 {
                    let mut memory = vec![0; bytes.min(MESSAGE) as usize];
                    for message in messages(bytes) {
                        let into = memory.get_mut(..message).unwrap_or_default();
                        self.communicator.receive_bytes(rank, into)?;
                        look(into);
                    }
                }
                continue;
            }
            let contents = self.share_of_state(&part, tensor)?;
            if own == 0 {
                contents.read(device, tiers, look)?;
                continue;
            }
            let mut outcome = Ok(());
            contents.read(device, tiers, &mut |bytes| {
                if outcome.is_ok() {
                    let mut messages = bytes.chunks(MESSAGE as usize);
                    outcome = messages.try_for_each(|message| self.communicator.send_bytes(0, message));
                }
            })?;
            outcome?;
        }
        Ok(())
    }

    /// Has this rank's shares of a state written. `fill` gives the bytes of the whole state, in order.
    fn write_shares(&self, tensor: &NamedTensor, fill: &mut dyn FnMut(&mut [u8])) -> Result<(), StepError> {
        let mut memory = Vec::new();
        for Share { rank, part, bytes } in self.shares_of_state(tensor)? {
            if rank == self.settings.ranks.rank {
                self.share_of_state(&part, tensor)?.write(self.device, &self.tiers, fill)?;
                continue;
            }
            memory.resize(bytes.min(MESSAGE) as usize, 0);
            messages(bytes).for_each(|message| fill(memory.get_mut(..message).unwrap_or_default()));
        }
        Ok(())
    }

    /// Where a state of one of this rank's shares is.
    fn share_of_state(&self, part: &Part, tensor: &NamedTensor) -> Result<Contents, StepError> {
        let (block, role) = tensor.parameter;
        let contents = self.optimizer.contents_of_part(part, tensor.kind);
        contents.ok_or(StepError::MissingWeight { block, role })
    }

    /// Shows the bytes of a weight of the model, or of an adapter, in the type that it is stored in.
    pub fn read_weight(&self, parameter: &Parameter, look: &mut dyn FnMut(&[u8])) -> Result<(), StepError> {
        self.weight_contents(parameter)?.0.read(self.device, &self.tiers, look)
    }

    /// The values of a parameter's f32 master, or of the weight itself where there is none.
    pub fn values(&self, parameter: &Parameter) -> Result<Vec<f32>, StepError> {
        // Where this rank has a share of the master, the weight is what all have.
        let masters = self.optimizer.masters(parameter);
        let rows: u64 = masters.iter().map(|(rows, _)| rows.end - rows.start).sum();
        let master = self.optimizer.contents(parameter, StateKind::Master);
        let (contents, dtype) = match master.filter(|_| rows == parameter.rows()) {
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
