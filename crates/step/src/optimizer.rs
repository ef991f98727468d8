//! The optimizer: states of all parameters, over f32 master weights where there are any, updated one tensor at a time.
//!
//! A file for each rule says which states a parameter has and which operations make its step. No rule needs the
//! gradient of another tensor.

use std::borrow::Cow;
use std::hash::Hasher;
use std::ops::Range;
use std::sync::Arc;

use plimsoll_device::{DType, Device, Dry, Op, Rounding, Rule, Tensor};
use plimsoll_disk::{Home, LowerTiers};
use plimsoll_memory::{Phase, Tag, Tier, splitmix64};
use plimsoll_model::{BlockId, Parameter, Role};
use rustc_hash::FxHashMap;

use crate::StepError;
use crate::tier::{Contents, HomePart, Parcel, Parcels, Pieces, Use, is_matrix};
use crate::trainer::Part;

mod adafactor;
mod adam_mini;
mod adamw;
mod apollo;
mod eight_bit;
mod galore;
mod lion;
mod low_rank;
mod settings;
mod sgd;
mod state;
#[cfg(test)]
mod tests;

pub use settings::{
    AdafactorSettings, AdamSettings, ApolloChannels, EightBit, LionSettings, LowRankSettings, OptimizerKind,
    OptimizerSettings, ParameterGroup, SgdSettings,
};
pub use state::{OptimizerState, StateKind};

use state::NewState;

/// The optimizer's states: on the device, or those of matrices in homes on a lower tier.
pub(crate) struct Optimizer<'a> {
    kind: OptimizerKind,
    /// Elements of a query head.
    head_dim: u64,
    slots: FxHashMap<(BlockId, Role), Slot>,
    seed: u64,
    /// States that live on a lower tier.
    away: Parcels<'a, StateUnit, StateKind>,
    /// Their pieces, with the rows that each is of.
    pieces: FxHashMap<(BlockId, Role), Vec<Piece>>,
}

/// A parameter's state, and its numbers.
#[derive(Debug)]
struct Slot {
    /// On the device, of these rows: of all at once, or of each of this rank's shares.
    states: Vec<(Range<u64>, OptimizerState)>,
    lr_scale: f64,
    weight_decay: f64,
}

/// The states of a matrix, or of a piece of a table.
type StateUnit = (BlockId, Role, u32);

/// Some rows of a parameter, by the number of the piece that they are of.
#[derive(Clone, Debug)]
struct Piece {
    number: u32,
    rows: Range<u64>,
}

/// This rank's share of each part of a parameter.
pub(crate) type OwnParts<'s> = &'s dyn Fn(&Parameter) -> Vec<Part>;

/// A state of a parameter: what it is and how large.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct StateShape {
    pub kind: StateKind,
    pub dtype: DType,
    pub shape: Vec<u64>,
}

impl StateShape {
    /// Size in bytes.
    pub fn bytes(&self) -> u64 {
        self.dtype.bytes_for(self.shape.iter().product()).unwrap_or(0)
    }
}

/// How states are held.
#[derive(Clone, Copy)]
pub(crate) struct StateStorage<'s> {
    /// The tiers, and the one on which the states of matrices live.
    pub tiers: &'s Arc<LowerTiers>,
    pub tier: Tier,
    /// Buffers through which they come and go.
    pub buffers: usize,
    /// Whose states stay on the device all the same.
    pub stays: &'s dyn Fn(&Parameter) -> bool,
    /// How tables are cut there.
    pub cut: Pieces,
    /// Elements of a query head.
    pub head_dim: u64,
    /// Which weights have an f32 master.
    pub needs_master: &'s dyn Fn(&Parameter) -> bool,
    pub seed: u64,
    /// This rank's share of each part of a parameter, where ranks have shares.
    pub shares: Option<OwnParts<'s>>,
}

/// The numbers of one update.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Update {
    pub lr: f64,
    /// 1-based.
    pub step: u64,
}

/// What is known on the device alone when weights are updated.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Control<'c> {
    /// f32 `[1]`: the factor on gradients, where there is one.
    pub factor: Option<&'c Tensor>,
    /// f32 `[1]`: where it is 0 nothing is changed.
    pub flag: Option<&'c Tensor>,
}

impl<'a> Optimizer<'a> {
    /// Buffers for states that live on a lower tier: one in use, one on its way and one on its way back.
    pub const BUFFERS: usize = 3;

    /// Takes memory for the states of all parameters that are trained and sets them to those before the first step.
    pub fn allocate(
        device: &'a dyn Device,
        trained: &[Parameter],
        settings: &OptimizerSettings,
        storage: StateStorage<'_>,
    ) -> Result<Self, StepError> {
        for group in &settings.groups {
            if !trained.iter().any(|p| group.pattern.matches(&p.name)) {
                return Err(StepError::EmptyGroup { pattern: group.pattern.to_string() });
            }
        }
        let kind = settings.kind;
        let StateStorage { tiers, tier, buffers, stays, cut, head_dim, needs_master, seed, shares } = storage;
        let mut slots = FxHashMap::default();
        let (mut parcels, mut pieces) = (FxHashMap::default(), FxHashMap::<_, Vec<_>>::default());
        for p in trained {
            device.enter(Phase::Setup, p.block.layer());
            tiers.enter(Phase::Setup, p.block.layer());
            let mut states = Vec::new();
            let is_resident = tier == Tier::Device || !is_matrix(p) || stays(p);
            let piece = |(number, rows)| Piece { number, rows };
            let own: Vec<Piece> = match shares {
                Some(shares) => shares(p).into_iter().map(|part| piece((part.piece, part.rows))).collect(),
                None if is_resident => vec![piece((0, p.all_rows()))],
                None => (0..).zip(cut.of(p)).map(piece).collect(),
            };
            for own in own.into_iter().filter(|own| !own.rows.is_empty()) {
                let first = new_state(device, (p, &of_rows(p, &own.rows)), kind, head_dim, needs_master(p))?;
                if is_resident {
                    states.push((own.rows, first));
                } else {
                    let unit = (p.block, p.role, own.number);
                    let mut parcel = Parcel::new();
                    for (kind, tensor) in first.tensors() {
                        parcel.add(*kind, tensor.dtype(), tensor.shape().dims());
                    }
                    if parcel.is_empty() {
                        // There is nothing to be anywhere.
                        states.push((own.rows, first));
                        continue;
                    }
                    parcel.settle(tiers, tier, Tag::Optimizer, "states")?;
                    for ((_, tensor), placed) in first.tensors().iter().zip(parcel.tensors()) {
                        if let Some(home) = parcel.home() {
                            send_now(device, tiers, home, placed.offset, tensor)?;
                        }
                    }
                    parcels.insert(unit, parcel);
                    pieces.entry((p.block, p.role)).or_default().push(own);
                }
            }
            let (lr_scale, weight_decay) = settings.numbers_of(p);
            slots.insert((p.block, p.role), Slot { states, lr_scale, weight_decay });
        }
        device.enter(Phase::Setup, None);
        let away = Parcels::of(device, tiers, parcels, buffers, "states.staging")?;
        Ok(Optimizer { kind, head_dim, slots, seed, away, pieces })
    }

    /// The states of a parameter that are on the device, with the rows that each is of.
    pub fn states(&self, block: BlockId, role: Role) -> &[(Range<u64>, OptimizerState)] {
        self.slots.get(&(block, role)).map_or(&[], |slot| &slot.states)
    }

    /// Where a state of a parameter is: of the rows that this rank has.
    pub fn contents(&self, parameter: &Parameter, kind: StateKind) -> Option<Contents> {
        let (block, role) = (parameter.block, parameter.role);
        let states = self.states(block, role).iter().filter_map(|(_, state)| state.find(kind).cloned());
        let states: Vec<Tensor> = states.collect();
        if !states.is_empty() {
            return Some(Contents::Device(states));
        }
        let homes = self.away(block, role).filter_map(|(_, parcel)| home_of(parcel, kind));
        let homes: Vec<HomePart> = homes.collect();
        (!homes.is_empty()).then_some(Contents::Homes(homes))
    }

    /// The f32 weights behind a parameter, of the rows that this rank has: each run of rows, and where they are.
    pub fn masters(&self, parameter: &Parameter) -> Vec<(Range<u64>, Contents)> {
        let (block, role) = (parameter.block, parameter.role);
        let resident = self.states(block, role).iter();
        let resident = resident.filter_map(|(rows, state)| {
            Some((rows.clone(), Contents::Device(vec![state.master()?.clone()])))
        });
        let away = self.away(block, role).filter_map(|(rows, parcel)| {
            Some((rows.clone(), Contents::Homes(vec![home_of(parcel, StateKind::Master)?])))
        });
        resident.chain(away).collect()
    }

    /// The states that some rows of a parameter have, with their types and shapes: whoever has them.
    pub fn shapes_of(
        &self,
        parameter: &Parameter,
        rows: &Range<u64>,
        with_master: bool,
    ) -> Result<Vec<StateShape>, StepError> {
        let dry = Dry::new();
        let own = of_rows(parameter, rows);
        let state = new_state(&dry, (parameter, &own), self.kind, self.head_dim, with_master)?;
        let shape = |(kind, tensor): &(StateKind, Tensor)| StateShape {
            kind: *kind,
            dtype: tensor.dtype(),
            shape: tensor.shape().dims().to_vec(),
        };
        Ok(state.tensors().iter().map(shape).collect())
    }

    /// Where a state of one of this rank's shares is.
    pub fn contents_of_part(&self, part: &Part, kind: StateKind) -> Option<Contents> {
        let (block, role) = (part.parameter.block, part.parameter.role);
        let resident = self.states(block, role).iter().find(|(rows, _)| *rows == part.rows);
        if let Some(tensor) = resident.and_then(|(_, state)| state.find(kind)) {
            return Some(Contents::Device(vec![tensor.clone()]));
        }
        let (_, parcel) = self.away(block, role).find(|(rows, _)| **rows == part.rows)?;
        Some(Contents::Homes(vec![home_of(parcel, kind)?]))
    }

    /// The states that live on a lower tier, a parcel for each piece, with the rows that it is of.
    pub fn away(
        &self,
        block: BlockId,
        role: Role,
    ) -> impl Iterator<Item = (&Range<u64>, &Parcel<StateKind>)> {
        let pieces = self.pieces.get(&(block, role)).into_iter().flatten();
        pieces.filter_map(move |piece| Some((&piece.rows, self.away.get((block, role, piece.number))?)))
    }

    /// The parameters that will be updated next, in order, with the pieces that each has.
    pub fn announce(&mut self, order: impl IntoIterator<Item = StateUnit>) -> Result<(), StepError> {
        self.away.announce(order.into_iter().map(Use::of))
    }

    /// Feeds what lies in the buffers to a hasher.
    pub fn hash_buffers(&self, hasher: &mut impl Hasher) {
        self.away.hash_buffers(hasher);
    }

    /// Waits until every state is where it lives.
    pub fn flush(&mut self) -> Result<(), StepError> {
        self.away.flush()
    }

    /// Updates a part of a parameter from the part's gradient.
    pub fn update(
        &mut self,
        device: &dyn Device,
        part: &Part,
        (weight, grad): (&Tensor, &Tensor),
        update: Update,
        control: Control<'_>,
    ) -> Result<(), StepError> {
        let (block, role) = (part.parameter.block, part.parameter.role);
        let unit = (block, role, part.piece);
        let is_away = self.away.has(unit);
        let brought = if is_away { Some(OptimizerState::new(self.away.gather(unit)?)) } else { None };
        let missing = || StepError::MissingWeight { block, role };
        let Slot { states, lr_scale, weight_decay } = self.slots.get(&(block, role)).ok_or_else(missing)?;
        let resident = || {
            let within = |of: &Range<u64>| of.start <= part.rows.start && part.rows.end <= of.end;
            let (of, state) = states.iter().find(|(of, _)| within(of))?;
            let rows = part.rows.start - of.start..part.rows.end - of.start;
            state.of_rows(&of_rows(&part.parameter, of), &rows)
        };
        let state = brought.or_else(resident).ok_or_else(missing)?;
        let job = ParameterStep {
            device,
            parameter: &of_rows(&part.parameter, &part.rows),
            weight,
            grad,
            state: &state,
            lr: update.lr * lr_scale,
            weight_decay: *weight_decay,
            control,
            step: update.step,
            own_seed: splitmix64(self.seed, block.parameter_number(role)),
            first: part.rows.start * part.parameter.columns(),
        };
        self.apply(&job)?;
        // The buffer may go back when no view of it is left.
        drop(state);
        if is_away {
            self.away.release(unit, true);
            self.away.advance()?;
        }
        Ok(())
    }

    /// Makes a parameter's step by the rule.
    fn apply(&self, job: &ParameterStep<'_>) -> Result<(), StepError> {
        match self.kind {
            OptimizerKind::AdamW(adam) | OptimizerKind::AdamWBf16(adam) => adamw::update(job, adam),
            OptimizerKind::AdamW8bit(adam, _) => eight_bit::update_adamw(job, adam),
            OptimizerKind::AdamMini(adam) => adam_mini::update(job, adam),
            OptimizerKind::Lion(numbers) => lion::update(job, numbers),
            OptimizerKind::Lion8bit(numbers, _) => eight_bit::update_lion(job, numbers),
            OptimizerKind::Adafactor(s) | OptimizerKind::AdaLomo(s) => adafactor::update(job, &s),
            OptimizerKind::Sgd(s) => sgd::update(job, &s),
            OptimizerKind::GaLore(s) => galore::update(job, &s),
            OptimizerKind::Apollo(s, channels) => apollo::update(job, &s, channels),
        }
    }
}

/// Where a state lies in its parcel's home.
fn home_of(parcel: &Parcel<StateKind>, kind: StateKind) -> Option<HomePart> {
    let state = parcel.tensors().iter().find(|state| state.key == kind)?;
    let bytes = state.dtype.bytes_for(state.shape.iter().product()).unwrap_or(0);
    Some(HomePart { home: Arc::clone(parcel.home()?), start: state.offset, bytes })
}

/// The state of some rows of a parameter before its first step, on the device.
fn new_state(
    device: &dyn Device,
    (whole, rows): (&Parameter, &Parameter),
    kind: OptimizerKind,
    head_dim: u64,
    with_master: bool,
) -> Result<OptimizerState, StepError> {
    let mut new = NewState::new(device, whole, rows);
    match kind {
        OptimizerKind::AdamW(_) => adamw::allocate(&mut new, DType::F32),
        OptimizerKind::AdamWBf16(_) => adamw::allocate(&mut new, DType::Bf16),
        OptimizerKind::AdamW8bit(_, bits) => eight_bit::allocate_adamw(&mut new, bits),
        OptimizerKind::AdamMini(_) => adam_mini::allocate(&mut new, head_dim),
        OptimizerKind::Lion(_) => lion::allocate(&mut new),
        OptimizerKind::Lion8bit(_, bits) => eight_bit::allocate_lion(&mut new, bits),
        OptimizerKind::Adafactor(s) | OptimizerKind::AdaLomo(s) => adafactor::allocate(&mut new, &s),
        OptimizerKind::Sgd(s) => sgd::allocate(&mut new, &s),
        OptimizerKind::GaLore(s) => galore::allocate(&mut new, &s),
        OptimizerKind::Apollo(s, _) => apollo::allocate(&mut new, &s),
    }?;
    if with_master {
        new.master()?;
    }
    Ok(new.done())
}

/// Rows of a parameter, as a parameter.
fn of_rows<'p>(parameter: &'p Parameter, rows: &Range<u64>) -> Cow<'p, Parameter> {
    match *rows == parameter.all_rows() {
        true => Cow::Borrowed(parameter),
        false => Cow::Owned(Parameter { shape: parameter.shape_of(rows), ..parameter.clone() }),
    }
}

/// Writes a tensor into a home, now. A dry run has none.
fn send_now(
    device: &dyn Device,
    tiers: &LowerTiers,
    home: &Home,
    offset: u64,
    tensor: &Tensor,
) -> Result<(), StepError> {
    let (mut outcome, mut next) = (Ok(()), offset);
    Contents::Device(vec![tensor.clone()]).read(device, tiers, &mut |bytes| {
        if outcome.is_ok() {
            outcome = tiers.write_now(home, next, bytes);
        }
        next += bytes.len() as u64;
    })?;
    Ok(outcome?)
}

/// One parameter's step: what a rule is given.
struct ParameterStep<'a> {
    device: &'a dyn Device,
    parameter: &'a Parameter,
    weight: &'a Tensor,
    grad: &'a Tensor,
    state: &'a OptimizerState,
    lr: f64,
    weight_decay: f64,
    control: Control<'a>,
    /// 1-based.
    step: u64,
    /// Of the parameter, the same at every step.
    own_seed: u64,
    /// The first element of the parameter that is updated.
    first: u64,
}

impl<'a> ParameterStep<'a> {
    fn find(&self, kind: StateKind) -> Option<&'a Tensor> {
        self.state.find(kind)
    }

    /// A state that the rule has allocated.
    fn state(&self, kind: StateKind) -> Result<&'a Tensor, StepError> {
        self.find(kind).ok_or(self.missing())
    }

    fn missing(&self) -> StepError {
        StepError::MissingWeight { block: self.parameter.block, role: self.parameter.role }
    }

    /// Random numbers of this step.
    fn seed(&self) -> u64 {
        splitmix64(self.own_seed, self.step)
    }

    /// Updates the weights by a rule.
    fn run(&self, rule: Rule<'_>) -> Result<(), StepError> {
        self.execute(plimsoll_device::Update {
            param: self.weight,
            master: self.state.master(),
            grad: self.grad,
            grad_scale: self.control.factor,
            rounding: Rounding::Stochastic { seed: self.seed(), first: self.first },
            rule,
        })
    }

    /// Carries out an operation of the step, unless nothing is to be changed.
    fn execute<'o>(&self, op: impl Into<Op<'o>>) -> Result<(), StepError> {
        Ok(self.device.execute(op.into(), self.control.flag)?)
    }
}

/// Learning rate and decay with which a rule that decays weights before its step does what `lr` and `weight_decay`
/// would if they decayed after it: (p - lr u)(1 - lr w) = p (1 - lr' w') - lr' u.
fn decay_after_step(lr: f64, weight_decay: f64) -> (f64, f64) {
    let shorter = lr * (1.0 - lr * weight_decay);
    (shorter, if shorter == 0.0 { 0.0 } else { lr * weight_decay / shorter })
}
