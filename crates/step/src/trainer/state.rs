//! What a trainer holds from step to step: weights and optimizer states, to be set, read and written, wherever they live.

use std::ops::Range;

use plimsoll_device::{DType, Tensor};
use plimsoll_model::convert::convert;
use plimsoll_model::{BlockId, Parameter, Role};
use plimsoll_parallel::Collectives;

use super::ranks::shares_weights;
use super::{Part, Parts, Trainer};
use crate::StepError;
use crate::optimizer::StateKind;
use crate::tier::{Contents, Pieces, is_matrix};

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

/// What a rank has of a state: its share of a part, or all of it.
struct Share {
    rank: u32,
    part: Option<Part>,
    bytes: u64,
}

impl Trainer<'_> {
    /// Sets every weight, those of adapters too. `fill` writes the values of some rows of a parameter in the given type; it
    /// is not called on a dry device. With master weights it fills the master, and the weight is that, rounded.
    pub fn load<E: From<StepError>>(
        &mut self,
        fill: impl FnMut(&Parameter, Range<u64>, DType, &mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let (optimizer, stages) = (&self.optimizer, &self.stages);
        let mut fill = fill;
        self.weights.load(
            &|p| optimizer.masters(p),
            |p: &Parameter, rows, dtype, out: &mut [u8]| match stages {
                Some(stages) => fill(&stages.stage.original(p), rows, dtype, out),
                None => fill(p, rows, dtype, out),
            },
        )
    }

    /// Sets the lengths of rows, where adapters have them (DoRA), to those that the loaded weights have: once, before
    /// the first step.
    pub fn reset_magnitudes(&mut self) -> Result<(), StepError> {
        self.weights.reset_magnitudes()
    }

    /// Every tensor that a run must keep to continue to the same bits.
    pub fn state(&self) -> Result<Vec<NamedTensor>, StepError> {
        let mut all = Vec::new();
        for p in self.trained() {
            let parameter = (p.block, p.role);
            let mut add = |kind, dtype, shape| {
                all.push(NamedTensor { name: p.name.clone(), kind, dtype, shape, parameter });
            };
            add(StateKind::Weight, self.weight_dtype(p), p.shape.clone());
            for state in self.optimizer.shapes_of(p, &p.all_rows(), self.has_master(p))? {
                add(state.kind, state.dtype, state.shape);
            }
        }
        Ok(all)
    }

    /// The type in which a parameter is computed with.
    fn weight_dtype(&self, p: &Parameter) -> DType {
        match (p.role, &self.stages) {
            (Role::Lora(..), _) => DType::F32,
            (_, None) => self.settings.method.weight_type(p, self.settings.precision.weights),
            (_, Some(stages)) => stages.stage.whole.1.weight_type(p, self.settings.precision.weights),
        }
    }

    /// What is trained, by whatever stage.
    fn parameter_of(&self, tensor: &NamedTensor) -> Result<&Parameter, StepError> {
        let (block, role) = tensor.parameter;
        let found = self.trained().iter().find(|p| (p.block, p.role) == tensor.parameter);
        found.ok_or(StepError::MissingWeight { block, role })
    }

    fn contents(&self, tensor: &NamedTensor) -> Result<Contents, StepError> {
        let (block, role) = tensor.parameter;
        let missing = || StepError::MissingWeight { block, role };
        let p = self.parameter_of(tensor)?;
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

    /// Does something on the first rank, which may read all states and weights meanwhile. All ranks call it together: the others
    /// send what the first one asks for, until the work is done, and give nothing.
    pub fn on_first_rank<T, E: From<StepError>>(
        &self,
        work: impl FnOnce() -> Result<T, E>,
    ) -> Result<Option<T>, E> {
        if self.communicator.rank() == 0 {
            let outcome = work();
            self.ask(None)?;
            return outcome.map(Some);
        }
        let state = self.state()?;
        while let Some((parameter, kind)) = self.asked()? {
            let of = self.trained().get(parameter).map(|p| (p.block, p.role));
            let tensor =
                state.iter().find(|tensor| Some(tensor.parameter) == of && tensor.kind as u8 == kind);
            let what = "the first rank asks for a state that this rank does not know";
            self.send_shares(tensor.ok_or(StepError::Invariant { what })?)?;
        }
        Ok(None)
    }

    /// Has all ranks send their shares of a tensor to this one, the first; with none, has them go on.
    fn ask(&self, tensor: Option<&NamedTensor>) -> Result<(), StepError> {
        if self.communicator.is_alone() {
            return Ok(());
        }
        let number = |tensor: &NamedTensor| {
            let (block, role) = tensor.parameter;
            let place = self.trained().iter().position(|p| (p.block, p.role) == tensor.parameter);
            let place = place.ok_or(StepError::MissingWeight { block, role })?;
            Ok::<_, StepError>([(place + 1) as f64, f64::from(tensor.kind as u8)])
        };
        self.communicator.gather_numbers(&tensor.map_or(Ok([0.0; 2]), number)?)?;
        Ok(())
    }

    /// What the first rank asks for: the place of the parameter, and the number of the kind.
    fn asked(&self) -> Result<Option<(usize, u8)>, StepError> {
        let asked = self.communicator.gather_numbers(&[0.0; 2])?;
        Ok(match asked.first().map(Vec::as_slice) {
            Some([place, kind]) if *place > 0.0 => Some((*place as usize - 1, *kind as u8)),
            _ => None,
        })
    }

    /// Shows a tensor's bytes, in order, part by part. Nothing is shown in a dry run. What ranks have shares of is read by the first
    /// one, within [`Trainer::on_first_rank`].
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

    /// Whether the ranks that have a block have their own rows of a tensor each, or this rank does not have the block.
    fn is_shared_out(&self, tensor: &NamedTensor) -> bool {
        self.is_elsewhere(tensor.parameter.0) || self.has_shares(tensor)
    }

    /// Whether a block is another stage's.
    fn is_elsewhere(&self, block: BlockId) -> bool {
        self.stages.as_ref().is_some_and(|stages| stages.stage.of_block(block) != stages.stage.number)
    }

    /// Whether each of the ranks that have a block has its own rows of a tensor.
    fn has_shares(&self, tensor: &NamedTensor) -> bool {
        match (tensor.kind, tensor.parameter) {
            // Whoever has shares of weights has shares of all matrices.
            (StateKind::Weight, (block, _)) if self.is_elsewhere(block) => {
                shares_weights(&self.settings) && self.parameter_of(tensor).is_ok_and(is_matrix)
            }
            (StateKind::Weight, (block, role)) => self.weights.shares(block, role),
            _ => self.shares_updates(),
        }
    }

    /// Whether a weight has an f32 master.
    fn has_master(&self, parameter: &Parameter) -> bool {
        // Adapters are in f32 themselves.
        self.settings.precision.master_weights && !matches!(parameter.role, Role::Lora(..))
    }

    /// Every rank's shares of a state, in the order of the rows, with their bytes.
    fn shares_of_state(&self, tensor: &NamedTensor) -> Result<Vec<Share>, StepError> {
        let (count, p) = (self.replicas.size(), self.parameter_of(tensor)?);
        let stage = self.stages.as_ref().map(|stages| &stages.stage);
        let owner = stage.map_or(0, |stage| stage.of_block(p.block));
        // The first rank of the stage that has it.
        let base = owner * count;
        if !self.has_shares(tensor) {
            return Ok(vec![Share { rank: base, bytes: tensor.bytes(), part: None }]);
        }
        let others = stage.filter(|stage| stage.number != owner).map(|stage| {
            let kind = &self.settings.optimizer.kind;
            let trained = stage.trained_by(owner);
            Parts::of_copies(&trained, Pieces::new(&stage.whole.0, kind), kind, count, &|p| stage.is_copy(p))
        });
        let parts = others.as_ref().unwrap_or(&self.parts);
        let mut all = Vec::new();
        for (part, rank) in parts.of_parameter(p).flat_map(|part| (0..count).map(move |rank| (part, rank))) {
            let part = part.of_rows(part.share(rank, count));
            if part.rows.is_empty() {
                continue;
            }
            if tensor.kind == StateKind::Weight {
                let elements = (part.rows.end - part.rows.start) * p.columns();
                let bytes = tensor.dtype.bytes_for(elements).unwrap_or(0);
                all.push(Share { rank: base + rank, bytes, part: Some(part) });
                continue;
            }
            let shapes = self.optimizer.shapes_of(p, &part.rows, self.has_master(p))?;
            let state = shapes.iter().find(|state| state.kind == tensor.kind);
            all.extend(state.map(|state| Share {
                rank: base + rank,
                bytes: state.bytes(),
                part: Some(part),
            }));
        }
        Ok(all)
    }

    /// Shows the first rank a tensor of which each rank has its shares.
    fn read_shares(&self, tensor: &NamedTensor, look: &mut dyn FnMut(&[u8])) -> Result<(), StepError> {
        if self.communicator.rank() != 0 {
            return Err(StepError::Invariant { what: "a rank that is not the first reads what ranks share" });
        }
        self.ask(Some(tensor))?;
        for Share { rank, part, bytes } in self.shares_of_state(tensor)? {
            if rank == 0 {
                self.share_of_state(part.as_ref(), tensor)?.read(self.device, &self.tiers, look)?;
                continue;
            }
            let mut memory = vec![0; bytes.min(MESSAGE) as usize];
            for message in messages(bytes) {
                let into = memory.get_mut(..message).unwrap_or_default();
                self.communicator.receive_bytes(rank, into)?;
                look(into);
            }
        }
        Ok(())
    }

    /// Sends the first rank this one's shares of a tensor, in messages that do not depend on the parts that a share is read in.
    fn send_shares(&self, tensor: &NamedTensor) -> Result<(), StepError> {
        let own = self.communicator.rank();
        let shares = self.shares_of_state(tensor)?;
        for Share { part, bytes, .. } in shares.iter().filter(|share| share.rank == own) {
            let (mut outcome, mut lengths) = (Ok(()), messages(*bytes));
            let mut message = Vec::with_capacity((*bytes).min(MESSAGE) as usize);
            let mut length = lengths.next().unwrap_or(0);
            self.share_of_state(part.as_ref(), tensor)?.read(
                self.device,
                &self.tiers,
                &mut |mut bytes| {
                    while outcome.is_ok() && !bytes.is_empty() {
                        let (now, later) = bytes.split_at(bytes.len().min(length - message.len()).max(1));
                        message.extend_from_slice(now);
                        bytes = later;
                        if message.len() >= length {
                            outcome = self.communicator.send_bytes(0, &message);
                            message.clear();
                            length = lengths.next().unwrap_or(usize::MAX);
                        }
                    }
                },
            )?;
            outcome?;
        }
        Ok(())
    }

    /// Has this rank's shares of a state written. `fill` gives the bytes of the whole state, in order.
    fn write_shares(&self, tensor: &NamedTensor, fill: &mut dyn FnMut(&mut [u8])) -> Result<(), StepError> {
        let mut memory = Vec::new();
        for Share { rank, part, bytes } in self.shares_of_state(tensor)? {
            if rank == self.settings.ranks.rank {
                self.share_of_state(part.as_ref(), tensor)?.write(self.device, &self.tiers, fill)?;
                continue;
            }
            memory.resize(bytes.min(MESSAGE) as usize, 0);
            messages(bytes).for_each(|message| fill(memory.get_mut(..message).unwrap_or_default()));
        }
        Ok(())
    }

    /// Where a state of one of this rank's shares is.
    fn share_of_state(&self, part: Option<&Part>, tensor: &NamedTensor) -> Result<Contents, StepError> {
        let Some(part) = part else { return self.contents(tensor) };
        let (block, role) = tensor.parameter;
        let contents = match tensor.kind {
            StateKind::Weight => self.weights.contents_of_part(part),
            kind => self.optimizer.contents_of_part(part, kind),
        };
        contents.ok_or(StepError::MissingWeight { block, role })
    }

    /// Shows the bytes of a weight of the model, or of an adapter, in the type that it is stored in. Where ranks share it, it is
    /// trained and the first one reads it, within [`Trainer::on_first_rank`].
    pub fn read_weight(&self, p: &Parameter, look: &mut dyn FnMut(&[u8])) -> Result<(), StepError> {
        let dtype = self.weight_dtype(p);
        if !self.weights.shares(p.block, p.role) && !self.is_elsewhere(p.block) {
            return self.weight_contents(p)?.0.read(self.device, &self.tiers, look);
        }
        let (name, shape, parameter) = (p.name.clone(), p.shape.clone(), (p.block, p.role));
        self.read_shares(&NamedTensor { name, kind: StateKind::Weight, dtype, shape, parameter }, look)
    }

    /// The values of a parameter's f32 master, or of the weight itself where there is none.
    pub fn values(&self, parameter: &Parameter) -> Result<Vec<f32>, StepError> {
        // Where this rank has a share of the master, the weight is what all have.
        let masters = self.optimizer.masters(parameter);
        let rows: u64 = masters.iter().map(|(rows, _)| rows.end - rows.start).sum();
        let master = self.optimizer.contents(parameter, StateKind::Master);
        let (mut bytes, mut out) = (Vec::new(), vec![0.0; parameter.elements() as usize]);
        let mut look = |part: &[u8]| bytes.extend_from_slice(part);
        let dtype = match master.filter(|_| rows == parameter.rows()) {
            Some(contents) => {
                contents.read(self.device, &self.tiers, &mut look)?;
                DType::F32
            }
            None => {
                self.read_weight(parameter, &mut look)?;
                self.weight_dtype(parameter)
            }
        };
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
