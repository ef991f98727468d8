//! Gradients of the weights. A gradient takes memory when the backward pass first writes it, and gives it back when it
//! has served: before the backward pass there are none, and no zeroing pass is needed.
//!
//! Those of matrices may live on a lower tier between their uses. Then they are in a buffer only while the step works on
//! their layer, or on their piece of a table.

use std::collections::BTreeSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;
use std::sync::Arc;

use plimsoll_device::{
    Compute, DType, Device, DeviceExt, Elementwise, Embedding, GroupedProduct, Op, Product, Rounding, Tensor,
};
use plimsoll_disk::LowerTiers;
use plimsoll_memory::{Phase, Tag, Tier, splitmix64};
use plimsoll_model::{BlockId, Parameter, Role};
use rustc_hash::{FxHashMap, FxHashSet};

use crate::StepError;
use crate::head::rows;
use crate::optimizer::OwnParts;
use crate::tier::{Parcel, Parcels, Pieces, Unit, Use, is_matrix};
use crate::trainer::Part;

mod looked_up;

pub(crate) use looked_up::LookedUp;

/// Sets seeds of what a pass writes apart from others.
const PASSES: u64 = 0x9a55;
/// Sets seeds of sums over passes or ranks apart from others.
const SUMS: u64 = 0x50a5;

/// The gradients that exist at the moment.
pub(crate) struct Gradients<'a> {
    device: &'a dyn Device,
    dtype: DType,
    shapes: FxHashMap<(BlockId, Role), Vec<u64>>,
    tensors: FxHashMap<(BlockId, Role), Written>,
    seed: u64,
    /// Of what the present pass writes.
    pass_seed: u64,
    /// What the passes so far add up to, where each pass has gradients of its own: of this rank's shares.
    totals: FxHashMap<(BlockId, Role, u32), Tensor>,
    /// The parts of which there are such sums, here or below the device.
    begun: FxHashSet<(BlockId, Role, u32)>,
    /// Whether it is such sums that live below the device.
    totals_away: bool,
    /// Those that live on a lower tier.
    away: Parcels<'a, Unit, Role>,
    /// The pieces of tables there.
    pieces: FxHashMap<(BlockId, Role), Vec<Range<u64>>>,
    /// The units there whose gradients were begun and not given back.
    exist: BTreeSet<Unit>,
    /// The piece of a table that is in a buffer.
    held: Option<(Unit, Role, Tensor)>,
    /// What makes the embedding's gradient where that does not stay on the device.
    pub looked_up: LookedUp,
    /// The number of the first row of the embedding's table, where other ranks have those before it.
    pub first_table_row: u64,
}

/// A gradient that something was added to.
#[derive(Debug)]
struct Written {
    /// `None` while it is not on the device.
    gradient: Option<Tensor>,
    /// How often something was added to it.
    times: u64,
}

/// Where a gradient goes.
pub(crate) struct Target {
    pub tensor: Tensor,
    /// Whether it is to be added to what is there.
    pub accumulate: bool,
    pub rounding: Rounding,
}

impl Target {
    /// Adds dout^T x; that of each group of rows to a matrix of its own, where there are groups.
    pub fn add_product(
        &self,
        device: &dyn Device,
        dout: &Tensor,
        x: &Tensor,
        offsets: Option<&Tensor>,
        compute: Compute,
    ) -> Result<(), StepError> {
        let Target { tensor: dweight, accumulate, rounding } = self;
        let (accumulate, rounding) = (*accumulate, *rounding);
        let op: Op<'_> = match offsets {
            None => Product::LinearBackwardWeight { dout, x, dweight, accumulate, rounding, compute }.into(),
            Some(offsets) => GroupedProduct::LinearBackwardWeight {
                dout,
                x,
                offsets,
                dweight,
                accumulate,
                rounding,
                compute,
            }
            .into(),
        };
        Ok(device.run(op)?)
    }

    /// Adds dout `[N, H]` to the rows of `tokens`, of a table from `first_row` on.
    fn scatter(
        &self,
        device: &dyn Device,
        first_row: u64,
        tokens: &Tensor,
        dout: &Tensor,
    ) -> Result<(), StepError> {
        let Target { tensor: dtable, accumulate, rounding } = self;
        if !accumulate {
            device.run(Elementwise::Fill { out: dtable, value: 0.0 })?;
        }
        Ok(device.run(Embedding::Backward { tokens, dout, dtable, first_row, rounding: *rounding })?)
    }
}

/// Where the gradients of matrices live.
#[derive(Clone, Copy)]
pub(crate) struct OnTier<'s> {
    pub tiers: &'s Arc<LowerTiers>,
    pub tier: Tier,
    /// Whose gradients stay on the device all the same.
    pub stays: &'s dyn Fn(&Parameter) -> bool,
    /// This rank's share of each part, where it is what passes add up to that lives there.
    pub totals: Option<OwnParts<'s>>,
}

impl<'a> Gradients<'a> {
    /// No gradients yet, for the parameters that are trained; those of matrices live on a tier and come through buffers.
    pub fn new(
        device: &'a dyn Device,
        trained: &[Parameter],
        dtype: DType,
        OnTier { tiers, tier, stays, totals }: OnTier<'_>,
        (cut, buffers): (Pieces, usize),
    ) -> Result<Self, StepError> {
        let (mut parcels, mut pieces) = (FxHashMap::<Unit, Parcel<Role>>::default(), FxHashMap::default());
        for p in trained.iter().filter(|p| tier != Tier::Device && is_matrix(p) && !stays(p)) {
            if let Some(totals) = totals {
                for part in totals(p).iter().filter(|part| !part.rows.is_empty()) {
                    let unit = Unit::of_matrices(p.block, part.piece);
                    let parcel = parcels.entry(unit).or_insert_with(Parcel::new);
                    parcel.add(p.role, dtype, &p.shape_of(&part.rows));
                    parcel.settle_later(tier, Tag::Gradients, "gradients");
                }
                continue;
            }
            let cuts = cut.of(p);
            for (piece, rows) in (0..).zip(&cuts) {
                let parcel = parcels.entry(Unit::of_matrices(p.block, piece)).or_insert_with(Parcel::new);
                parcel.add(p.role, dtype, &p.shape_of(rows));
                // Gradients that are used up at once never leave the device.
                parcel.settle_later(tier, Tag::Gradients, "gradients");
            }
            if p.block.layer().is_none() {
                pieces.insert((p.block, p.role), cuts);
            }
        }
        device.enter(Phase::Setup, None);
        Ok(Gradients {
            device,
            dtype,
            shapes: trained.iter().map(|p| ((p.block, p.role), p.shape.clone())).collect(),
            tensors: FxHashMap::default(),
            seed: 0,
            pass_seed: 0,
            totals: FxHashMap::default(),
            begun: FxHashSet::default(),
            totals_away: totals.is_some(),
            away: Parcels::of(device, tiers, parcels, buffers, "gradients.staging")?,
            pieces,
            exist: BTreeSet::new(),
            held: None,
            looked_up: LookedUp::default(),
            first_table_row: 0,
        })
    }

    /// Gives all gradients back and starts a pass. Sums in narrow gradients are rounded stochastically by `seed`, so that
    /// what is small beside the sum is not lost: twice the same pass gives the same bits.
    pub fn begin(&mut self, seed: u64) {
        self.clear();
        (self.seed, self.pass_seed) = (seed, seed);
    }

    /// Starts a pass whose gradients are its own: `number` is its place in the whole batch.
    pub fn begin_pass(&mut self, number: u64) {
        self.pass_seed = splitmix64(splitmix64(self.seed, PASSES), number);
    }

    /// What the passes so far add up to of a part, where each has gradients of its own.
    pub fn total(&self, part: &Part) -> Option<&Tensor> {
        self.totals.get(&part.key())
    }

    /// Where a term of what passes add up to goes, and whether it is the first.
    pub fn total_to_add_to(&mut self, part: &Part, term: &Tensor) -> Result<(Tensor, bool), StepError> {
        let is_first = self.begun.insert(part.key());
        if let Some(total) = self.totals.get(&part.key()) {
            return Ok((total.clone(), is_first));
        }
        let (sizes, name) = (term.shape(), part.parameter.role.name());
        let total = self.device.alloc(term.dtype(), sizes.dims(), Tag::Gradients, name)?;
        self.totals.insert(part.key(), total.clone());
        Ok((total, is_first))
    }

    /// What sums of a part over ranks and passes are rounded by.
    pub fn seed_of_sums(&self, part: &Part) -> u64 {
        let Parameter { block, role, .. } = &part.parameter;
        splitmix64(splitmix64(self.seed, SUMS), block.parameter_number(*role))
    }

    /// Gives all gradients back.
    pub fn clear(&mut self) {
        self.tensors.clear();
        self.totals.clear();
        self.begun.clear();
        self.looked_up = LookedUp::default();
        self.held = None;
        std::mem::take(&mut self.exist).into_iter().for_each(|unit| self.away.forget(unit));
    }

    /// Whether a parameter is trained.
    pub fn wants(&self, block: BlockId, role: Role) -> bool {
        self.shapes.contains_key(&(block, role))
    }

    /// The units that will be held next, in order, and whether they are freed before they are left.
    pub fn announce(&mut self, units: impl Iterator<Item = (Unit, bool)>) -> Result<(), StepError> {
        let mut exist = self.exist.clone();
        let mut uses = Vec::new();
        for (unit, frees) in units {
            let fresh = if frees { !exist.remove(&unit) } else { exist.insert(unit) };
            uses.push(Use { key: unit, fresh });
        }
        self.away.announce(uses)
    }

    /// Has the gradients of a unit on the device until they are left: as they are, or room for them where there are none yet.
    pub fn hold(&mut self, unit: Unit) -> Result<(), StepError> {
        if !self.away.has(unit) {
            return Ok(());
        }
        self.exist.insert(unit);
        for (role, tensor) in self.away.gather(unit)? {
            if self.totals_away {
                self.totals.insert((unit.block(), role, unit.piece()), tensor);
                continue;
            }
            if let Unit::Piece(..) = unit {
                self.held = Some((unit, role, tensor));
                continue;
            }
            let written = self.tensors.entry((unit.block(), role));
            written.or_insert(Written { gradient: None, times: 0 }).gradient = Some(tensor);
        }
        Ok(())
    }

    /// Sends the gradients of a unit to where they live, unless they were freed.
    pub fn leave(&mut self, unit: Unit) -> Result<(), StepError> {
        let Some(parcel) = self.away.get(unit) else { return Ok(()) };
        self.held = None;
        for placed in parcel.tensors() {
            if self.totals_away {
                self.totals.remove(&(unit.block(), placed.key, unit.piece()));
            } else if let Some(written) = self.tensors.get_mut(&(unit.block(), placed.key)) {
                written.gradient = None;
            }
        }
        if self.exist.contains(&unit) {
            self.away.release(unit, true);
        } else {
            self.away.forget(unit);
        }
        self.away.advance()
    }

    /// Gives back the gradients of a unit, which consists of these parts.
    pub fn free(&mut self, unit: Unit, parts: &[Part]) {
        for part in parts {
            self.totals.remove(&part.key());
            self.begun.remove(&part.key());
        }
        self.exist.remove(&unit);
        self.free_pass(parts);
    }

    /// Gives back what a pass has written of a unit, not what the passes add up to.
    pub fn free_pass(&mut self, parts: &[Part]) {
        for part in parts.iter().filter(|part| part.is_last()) {
            self.tensors.remove(&(part.parameter.block, part.parameter.role));
        }
        self.held = None;
    }

    /// What was written of a part, to read it.
    pub fn part(&self, part: &Part) -> Result<Tensor, StepError> {
        let (block, role) = (part.parameter.block, part.parameter.role);
        match self.held_piece(block, role, part.piece) {
            Some(tensor) => Ok(tensor),
            None if part.is_whole() => self.get(block, role).cloned(),
            None => rows(self.get(block, role)?, part.rows.start, part.rows.end),
        }
    }

    /// What a pass has written of a part, for whoever sends it away: the gradient itself, of which nothing is left here, or a copy of a
    /// piece of a table.
    pub fn take_part(&mut self, part: &Part) -> Result<Tensor, StepError> {
        let (block, role) = (part.parameter.block, part.parameter.role);
        if part.is_whole() {
            let written = self.tensors.remove(&(block, role)).and_then(|written| written.gradient);
            return written.ok_or(StepError::MissingWeight { block, role });
        }
        let x = &self.part(part)?;
        let out = self.device.alloc(x.dtype(), x.shape().dims(), Tag::Communication, "gradients.sent")?;
        self.device.run(Elementwise::Cast { x, out: &out, rounding: Rounding::Nearest })?;
        Ok(out)
    }

    /// A piece of a table's gradient that is in a buffer.
    fn held_piece(&self, block: BlockId, role: Role, piece: u32) -> Option<Tensor> {
        let (unit, of, tensor) = self.held.as_ref()?;
        (*unit == Unit::Piece(block, piece) && *of == role).then(|| tensor.clone())
    }

    /// Whether the gradient of a table lives on a lower tier, in pieces.
    pub fn is_in_pieces(&self, block: BlockId, role: Role) -> bool {
        self.pieces.contains_key(&(block, role))
    }

    /// The pieces of a table whose gradient lives on a lower tier.
    pub fn pieces(&self, block: BlockId, role: Role) -> Option<Vec<Range<u64>>> {
        self.pieces.get(&(block, role)).cloned()
    }

    /// Where the gradient of some rows of a table goes that is written in pieces: for the `nth` time since
    /// [`count_rows`](Self::count_rows).
    pub fn rows_target(
        &mut self,
        (block, role): (BlockId, Role),
        piece: u32,
        range: &Range<u64>,
        nth: u64,
    ) -> Result<Target, StepError> {
        let times = nth + self.tensors.get(&(block, role)).map_or(0, |written| written.times);
        let tensor = match self.held_piece(block, role, piece) {
            Some(tensor) => tensor,
            None => rows(&self.whole(block, role)?, range.start, range.end)?,
        };
        let rounding = self.rounding_at(block, role, times, range.start * tensor.columns());
        Ok(Target { tensor, accumulate: times > 0, rounding })
    }

    /// A whole gradient on the device.
    fn whole(&mut self, block: BlockId, role: Role) -> Result<Tensor, StepError> {
        if let Some(Written { gradient: Some(gradient), .. }) = self.tensors.get(&(block, role)) {
            return Ok(gradient.clone());
        }
        let gradient = self.new_gradient(block, role)?;
        self.tensors.insert((block, role), Written { gradient: Some(gradient.clone()), times: 0 });
        Ok(gradient)
    }

    /// Makes a piece of the embedding's gradient of what was looked up.
    pub fn gather_looked_up(&mut self, part: &Part) -> Result<(), StepError> {
        let (device, times) = (self.device, self.looked_up.len());
        device.repeat(times, |nth| match self.looked_up.get(nth)? {
            Some((tokens, dx)) => self.scatter_rows(part, &tokens, &dx, nth),
            None => Ok(()),
        })
    }

    /// Feeds what lies in the buffers to a hasher, and which gradients there are.
    pub fn hash_state(&self, hasher: &mut impl Hasher) {
        self.away.hash_buffers(hasher);
        self.exist.hash(hasher);
        // In no order.
        let there = self.tensors.iter().map(|(key, Written { gradient, times })| {
            let mut hasher = DefaultHasher::new();
            (key, gradient.is_some(), *times > 0).hash(&mut hasher);
            hasher.finish()
        });
        there.fold(0, u64::wrapping_add).hash(hasher);
        (self.totals.len(), self.begun.len()).hash(hasher);
    }

    /// Adds dx `[N, H]`, the gradient of the rows of `tokens`, to a piece of the table's.
    pub fn scatter_rows(
        &mut self,
        part: &Part,
        tokens: &Tensor,
        dout: &Tensor,
        nth: u64,
    ) -> Result<(), StepError> {
        let key = (part.parameter.block, part.parameter.role);
        let target = self.rows_target(key, part.piece, &part.rows, nth)?;
        target.scatter(self.device, self.first_table_row + part.rows.start, tokens, dout)
    }

    /// All rows of a table were written `times` more times; gives how often they were before.
    pub fn count_rows(&mut self, block: BlockId, role: Role, times: u64) -> u64 {
        let written = self.tensors.entry((block, role));
        let written = written.or_insert(Written { gradient: None, times: 0 });
        written.times += times;
        written.times - times
    }

    /// The type of a part's gradient.
    pub fn dtype_of(&self, part: &Part) -> DType {
        self.dtype_of_shape(part.parameter.role, &part.parameter.shape)
    }

    fn dtype_of_shape(&self, role: Role, shape: &[u64]) -> DType {
        // Vectors are too small to save anything on, and many sums end in each of their elements.
        if shape.len() < 2 || role.kind().is_vector() { DType::F32 } else { self.dtype }
    }

    fn new_gradient(&self, block: BlockId, role: Role) -> Result<Tensor, StepError> {
        let shape = self.shapes.get(&(block, role)).ok_or(StepError::MissingWeight { block, role })?;
        let dtype = self.dtype_of_shape(role, shape);
        Ok(self.device.alloc(dtype, shape, Tag::Gradients, role.name())?)
    }

    /// Where a gradient goes that is written as a whole.
    pub fn target(&mut self, block: BlockId, role: Role) -> Result<Target, StepError> {
        let tensor = self.whole(block, role)?;
        let times = self.count_rows(block, role, 1);
        Ok(Target { tensor, accumulate: times > 0, rounding: self.rounding_at(block, role, times, 0) })
    }

    /// Adds dout `[N, H]`, the gradient of the rows of `tokens`, to a table's gradient.
    pub fn scatter(
        &mut self,
        block: BlockId,
        role: Role,
        tokens: &Tensor,
        dout: &Tensor,
    ) -> Result<(), StepError> {
        // Positions are no tokens.
        let first = if role == Role::TokenEmbedding { self.first_table_row } else { 0 };
        self.target(block, role)?.scatter(self.device, first, tokens, dout)
    }

    /// Adds dout^T x to a weight's gradient, or that of each group of rows to its matrix of a stack.
    pub fn add_product(
        &mut self,
        block: BlockId,
        role: Role,
        dout: &Tensor,
        x: &Tensor,
        offsets: Option<&Tensor>,
        compute: Compute,
    ) -> Result<(), StepError> {
        self.target(block, role)?.add_product(self.device, dout, x, offsets, compute)
    }

    /// The rounding of what is added to a gradient after `times` others.
    fn rounding_at(&self, block: BlockId, role: Role, times: u64, first: u64) -> Rounding {
        let seed = splitmix64(splitmix64(self.pass_seed, times), block.parameter_number(role));
        Rounding::Stochastic { seed, first }
    }

    /// A gradient that the backward pass has written and that is on the device.
    pub fn get(&self, block: BlockId, role: Role) -> Result<&Tensor, StepError> {
        let written = self.tensors.get(&(block, role)).and_then(|written| written.gradient.as_ref());
        written.ok_or(StepError::MissingWeight { block, role })
    }
}

#[cfg(test)]
mod tests;
