//! What a trainer holds from step to step: weights and optimizer states, to be set, read and written, wherever they live.

use std::ops::Range;

use plimsoll_device::cpu::quantize::quantize;
use plimsoll_device::{DType, Tensor};
use plimsoll_model::convert::convert;
use plimsoll_model::{BlockId, Parameter, Role};
use plimsoll_parallel::Collectives;

use super::ranks::shares_weights;
use super::{Part, Parts, Standing, Trainer};
use crate::StepError;
use crate::optimizer::{StateKind, StateShape};
use crate::stage::{Split, Stage};
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
    /// Its number among those that share products.
    tensor: u32,
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
        let (optimizer, stage) = (&self.optimizer, self.settings.stage.as_ref());
        let mut fill = fill;
        self.weights.load(&|p| optimizer.masters(p), |p: &Parameter, rows, dtype, out: &mut [u8]| match stage
        {
            Some(stage) => fill_share(stage, p, rows, dtype, out, &mut fill),
            None => fill(p, rows, dtype, out),
        })
    }

    /// Sets the lengths of rows, where adapters have them (DoRA), to those that the loaded weights have: once, before
    /// the first step.
    pub fn reset_magnitudes(&mut self) -> Result<(), StepError> {
        self.weights.reset_magnitudes()
    }

    /// Every tensor that a run must keep to continue to the same bits.
    pub fn state(&self) -> Result<Vec<NamedTensor>, StepError> {
        let mut all = Vec::new();
        if self.settings.routers.correction_speed > 0.0 {
            all.extend(self.corrections.iter().map(|p| self.weight_named(p)));
        }
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

    /// A weight as a state.
    fn weight_named(&self, p: &Parameter) -> NamedTensor {
        let (name, shape, parameter) = (p.name.clone(), p.shape.clone(), (p.block, p.role));
        NamedTensor { name, kind: StateKind::Weight, dtype: self.weight_dtype(p), shape, parameter }
    }

    /// The type in which a parameter is computed with.
    fn weight_dtype(&self, p: &Parameter) -> DType {
        match (p.role, &self.settings.stage) {
            (Role::Lora(..), _) => DType::F32,
            (_, None) => self.settings.method.weight_type(p, self.settings.precision.weights),
            (_, Some(stage)) => stage.whole.1.weight_type(p, self.settings.precision.weights),
        }
    }

    /// What training changes, by whatever stage: what is trained, and what routers are corrected by.
    fn changed(&self) -> impl Iterator<Item = &Parameter> {
        self.trained().iter().chain(&self.corrections)
    }

    /// The parameter of a state.
    fn parameter_of(&self, tensor: &NamedTensor) -> Result<&Parameter, StepError> {
        let (block, role) = tensor.parameter;
        let found = self.changed().find(|p| (p.block, p.role) == tensor.parameter);
        found.ok_or(StepError::MissingWeight { block, role })
    }

    fn contents(&self, tensor: &NamedTensor) -> Result<Contents, StepError> {
        let (block, role) = tensor.parameter;
        let missing = || StepError::MissingWeight { block, role };
        let own = |p: &&Parameter| (p.block, p.role) == tensor.parameter;
        let p = self.trained.iter().chain(&self.corrections).find(own).ok_or_else(missing)?;
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
            let p = self.changed().nth(parameter);
            let of = p.map(|p| (p.block, p.role));
            let tensor =
                state.iter().find(|tensor| Some(tensor.parameter) == of && tensor.kind as u8 == kind);
            // A correction that is not adjusted is no state, and still saved.
            let correction = p.filter(|p| p.role == Role::RouterCorrection).map(|p| self.weight_named(p));
            let what = "the first rank asks for a state that this rank does not know";
            let tensor = tensor.or(correction.as_ref());
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
            let place = self.changed().position(|p| (p.block, p.role) == tensor.parameter);
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

    /// Whether other ranks have some of a tensor that this one does not have.
    fn is_shared_out(&self, tensor: &NamedTensor) -> bool {
        let is_split = self.parameter_of(tensor).is_ok_and(|p| self.split(p) != Split::Whole);
        self.is_elsewhere(tensor.parameter.0) || is_split || self.has_shares(tensor)
    }

    /// How ranks that share products have a parameter.
    fn split(&self, p: &Parameter) -> Split {
        self.settings.stage.as_ref().map_or(Split::Whole, |stage| stage.split(p))
    }

    /// Whether a block is another stage's.
    fn is_elsewhere(&self, block: BlockId) -> bool {
        self.stages.as_ref().is_some_and(|stages| stages.stage.of_block(block) != stages.stage.number)
    }

    /// Whether each of the ranks that have a block has its own rows of a tensor.
    fn has_shares(&self, tensor: &NamedTensor) -> bool {
        match (tensor.kind, tensor.parameter) {
            // Whoever has shares of weights has shares of all matrices of the model; adapters are whole.
            (StateKind::Weight, (block, role)) if self.is_elsewhere(block) => {
                let is_shared = |p| is_matrix(p) && !matches!(role, Role::Lora(..));
                shares_weights(&self.settings) && self.parameter_of(tensor).is_ok_and(is_shared)
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

    /// What the ranks have of a state: of those that share its products rank after rank, and of each in the order of the rows.
    fn shares_of_state(&self, tensor: &NamedTensor) -> Result<Vec<Share>, StepError> {
        let (count, whole) = (self.sharers.size(), self.parameter_of(tensor)?);
        let (stage, mesh) = (self.settings.stage.as_ref(), self.settings.ranks.mesh);
        let owner = stage.map_or(0, |stage| stage.of_block(whole.block));
        let tensors = match (stage, self.split(whole)) {
            (None, _) | (_, Split::Whole) => 1,
            (Some(stage), _) => stage.tensors,
        };
        let mut all = Vec::new();
        for number in 0..tensors {
            let p = &stage.map_or_else(|| whole.clone(), |stage| stage.local(whole, number));
            let bytes = |rows: &Range<u64>| -> Result<u64, StepError> {
                if tensor.kind == StateKind::Weight {
                    let elements = (rows.end - rows.start) * p.columns();
                    return Ok(tensor.dtype.bytes_for(elements).unwrap_or(0));
                }
                let shapes = self.optimizer.shapes_of(p, rows, self.has_master(p))?;
                Ok(shapes.iter().find(|state| state.kind == tensor.kind).map_or(0, StateShape::bytes))
            };
            let rank = |replica| mesh.rank(owner, replica, number);
            if !self.has_shares(tensor) {
                all.push(Share { rank: rank(0), tensor: number, bytes: bytes(&p.all_rows())?, part: None });
                continue;
            }
            let other = |stage: &&Stage| (stage.number, stage.tensor) != (owner, number);
            let others = stage.filter(other).map(|stage| {
                let kind = &self.settings.optimizer.kind;
                let standing = |p: &Parameter| Standing { is_copy: stage.is_copy(p), ..Standing::default() };
                let (trained, cut) = (stage.trained_by(owner, number), Pieces::new(&stage.whole.0, kind));
                Parts::standing(&trained, cut, kind, count, &standing)
            });
            let parts = others.as_ref().unwrap_or(&self.parts);
            for (part, replica) in
                parts.of_parameter(p).flat_map(|part| (0..count).map(move |replica| (part, replica)))
            {
                let part = part.of_rows(part.share(replica, count));
                let bytes = if part.rows.is_empty() { 0 } else { bytes(&part.rows)? };
                if bytes > 0 {
                    all.push(Share { rank: rank(replica), tensor: number, bytes, part: Some(part) });
                }
            }
        }
        Ok(all)
    }

    /// Shows the first rank a tensor of which each rank has its shares.
    fn read_shares(&self, tensor: &NamedTensor, look: &mut dyn FnMut(&[u8])) -> Result<(), StepError> {
        if self.communicator.rank() != 0 {
            return Err(StepError::Invariant { what: "a rank that is not the first reads what ranks share" });
        }
        self.ask(Some(tensor))?;
        let whole = self.parameter_of(tensor)?;
        if self.split(whole) != Split::Columns {
            return self
                .shares_of_state(tensor)?
                .iter()
                .try_for_each(|share| self.read_share(tensor, share, look));
        }
        // What each rank has of every row.
        let mut columns: Vec<Vec<u8>> = Vec::new();
        for share in self.shares_of_state(tensor)? {
            columns.resize_with(columns.len().max(share.tensor as usize + 1), Vec::new);
            if let Some(own) = columns.get_mut(share.tensor as usize) {
                self.read_share(tensor, &share, &mut |bytes| own.extend_from_slice(bytes))?;
            }
        }
        let rows = whole.rows().max(1) as usize;
        for row in 0..rows {
            for own in &columns {
                let width = own.len() / rows;
                look(own.get(row * width..(row + 1) * width).unwrap_or_default());
            }
        }
        Ok(())
    }

    /// Shows the first rank what a rank has of a tensor.
    fn read_share(
        &self,
        tensor: &NamedTensor,
        share: &Share,
        look: &mut dyn FnMut(&[u8]),
    ) -> Result<(), StepError> {
        if share.rank == 0 {
            return self.share_of_state(share.part.as_ref(), tensor)?.read(self.device, &self.tiers, look);
        }
        let mut memory = vec![0; share.bytes.min(MESSAGE) as usize];
        for message in messages(share.bytes) {
            let into = memory.get_mut(..message).unwrap_or_default();
            self.communicator.receive_bytes(share.rank, into)?;
            look(into);
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
        let whole = self.parameter_of(tensor)?;
        let (Split::Columns, Some(stage)) = (self.split(whole), &self.settings.stage) else {
            return self.write_own(tensor, None, fill);
        };
        let bytes = |elements| tensor.dtype.bytes_for(elements).unwrap_or(0) as usize;
        let (row, share) = (bytes(whole.columns()), stage.share(whole, stage.tensor));
        let columns = bytes(share.start)..bytes(share.end);
        let mut own: Vec<u8> = Vec::with_capacity(columns.len() * whole.rows() as usize);
        let mut memory = vec![0; row];
        for _ in 0..whole.rows() {
            fill(&mut memory);
            own.extend(memory.get(columns.clone()).unwrap_or_default());
        }
        let mut rest = own.as_slice();
        self.write_own(tensor, Some(stage.tensor), &mut |out| {
            let now = rest.split_off(..out.len().min(rest.len())).unwrap_or_default();
            out.iter_mut().zip(now).for_each(|(out, byte)| *out = *byte);
        })
    }

    /// The same where `fill` gives the bytes of all ranks, or of one alone of those that share products.
    fn write_own(
        &self,
        tensor: &NamedTensor,
        of: Option<u32>,
        fill: &mut dyn FnMut(&mut [u8]),
    ) -> Result<(), StepError> {
        let (mesh, own, mut memory) = (self.settings.ranks.mesh, self.settings.ranks.place(), Vec::new());
        let elsewhere = self.is_elsewhere(tensor.parameter.0);
        let is_whole = self.split(self.parameter_of(tensor)?) == Split::Whole;
        // What is not cut, all ranks of a stage have that share products.
        let is_here = |number| !elsewhere && (is_whole || number == own.part());
        for Share { rank, tensor: number, part, bytes } in self.shares_of_state(tensor)? {
            if of.is_some_and(|of| of != number) {
                continue;
            }
            // What ranks do not share, all that hold it have.
            let is_own = match part {
                Some(_) => is_here(number) && mesh.replica(rank) == self.sharers.rank(),
                None => is_here(number),
            };
            if is_own {
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
        let is_here = !self.is_elsewhere(p.block) && self.split(p) == Split::Whole;
        if is_here && !self.weights.shares(p.block, p.role) {
            return self.weight_contents(p)?.0.read(self.device, &self.tiers, look);
        }
        self.read_shares(&self.weight_named(p), look)
    }

    /// The values of a parameter's f32 master, or of the weight itself where there is none.
    pub fn values(&self, parameter: &Parameter) -> Result<Vec<f32>, StepError> {
        // Where this rank has a share of the master, the weight is what all have.
        let masters = self.optimizer.masters(parameter);
        let rows: u64 = masters.iter().map(|(rows, _)| rows.end - rows.start).sum();
        let master = self.optimizer.contents(parameter, StateKind::Master);
        let (mut bytes, mut out) = (Vec::new(), vec![0.0; parameter.elements() as usize]);
        let mut look = |part: &[u8]| bytes.extend_from_slice(part);
        let is_here = self.split(parameter) == Split::Whole && rows == parameter.rows();
        let dtype = match master.filter(|_| is_here) {
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

/// Fills some rows of a parameter of this rank's, from the whole model's.
fn fill_share<E: From<StepError>>(
    stage: &Stage,
    p: &Parameter,
    rows: Range<u64>,
    dtype: DType,
    out: &mut [u8],
    fill: &mut impl FnMut(&Parameter, Range<u64>, DType, &mut [u8]) -> Result<(), E>,
) -> Result<(), E> {
    /// Bytes of whole rows that are had at once.
    const AT_ONCE: u64 = 1 << 20;
    let whole = stage.whole_of(p);
    let (split, share) = (stage.split(&whole), stage.share(&whole, stage.tensor));
    if split == Split::Whole {
        return fill(&whole, rows, dtype, out);
    }
    let is_adapter = matches!(p.role, Role::Lora(..));
    if split == Split::Rows && dtype.has_rows() && !is_adapter {
        return fill(&whole, rows.start + share.start..rows.end + share.start, dtype, out);
    }
    // Blocks that share factors are made anew of their values.
    let read = if dtype.has_rows() { dtype } else { DType::F32 };
    let columns = if split == Split::Columns { share.clone() } else { 0..whole.columns() };
    let first = if split == Split::Rows { share.start } else { 0 };
    let bytes = |elements| {
        let what = "a part of a product is not whole blocks of its storage";
        read.bytes_for(elements).ok_or(StepError::Invariant { what })
    };
    let (row, before, own) =
        (bytes(whole.columns())?, bytes(columns.start)?, bytes(columns.end - columns.start)?);
    // Adapters are read as a whole.
    let each = if is_adapter { u64::MAX } else { (AT_ONCE / row.max(1)).max(1) };
    let wanted = first + rows.start..first + rows.end;
    let all = if is_adapter { whole.all_rows() } else { wanted.clone() };
    let mut values = Vec::with_capacity((own * (rows.end - rows.start)) as usize);
    let mut start = all.start;
    while start < all.end {
        let end = all.end.min(start.saturating_add(each));
        let mut some = vec![0; (row * (end - start)) as usize];
        fill(&whole, start..end, read, &mut some)?;
        let of_row = |(number, bytes): (u64, &[u8])| {
            let bytes = bytes.get(before as usize..(before + own) as usize).unwrap_or_default();
            if wanted.contains(&number) {
                values.extend_from_slice(bytes);
            }
        };
        (start..end).zip(some.chunks(row.max(1) as usize)).for_each(of_row);
        start = end;
    }
    let what = "a part of a product does not fill its place";
    let fits = match read == dtype {
        true => (values.len() == out.len()).then(|| out.copy_from_slice(&values)),
        false => {
            let values = values.as_chunks().0.iter().map(|value| f32::from_ne_bytes(*value));
            quantize(dtype, &values.collect::<Vec<f32>>(), out, 1)
        }
    };
    Ok(fits.ok_or(StepError::Invariant { what })?)
}
