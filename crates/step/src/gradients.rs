//! Gradients of the weights. A gradient takes memory when the backward pass first writes it, and gives it back when it
//! has served: before the backward pass there are none, and no zeroing pass is needed.
//!
//! Those of matrices may live on a lower tier between their uses. Then they are in a buffer only while the step works on
//! their layer, or on their piece of a table.

use std::collections::{BTreeSet, HashMap};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;
use std::sync::Arc;

use plimsoll_device::{Compute, DType, Device, DeviceExt, Elementwise, Embedding, Product, Rounding, Tensor};
use plimsoll_disk::LowerTiers;
use plimsoll_memory::{Phase, Tag, Tier};
use plimsoll_model::{BlockId, Parameter, Role};

use crate::StepError;
use crate::head::rows;
use crate::seed::{mix, parameter_number};
use crate::store::{layer_of, role_name};
use crate::tier::{Parcel, Parcels, Pieces, Unit, Use, is_matrix};
use crate::trainer::Part;

mod looked_up;

use looked_up::LookedUp;

/// The gradients that exist at the moment.
pub(crate) struct Gradients<'a> {
    device: &'a dyn Device,
    dtype: DType,
    shapes: HashMap<(BlockId, Role), Vec<u64>>,
    tensors: HashMap<(BlockId, Role), Written>,
    seed: u64,
    away: Option<Away<'a>>,
    looked_up: LookedUp,
}

/// A gradient that something was added to.
#[derive(Debug)]
struct Written {
    /// `None` while it is not on the device.
    gradient: Option<Tensor>,
    /// How often something was added to it.
    times: u64,
}

/// Gradients that live on a lower tier.
struct Away<'a> {
    pool: Parcels<'a, Unit, Role>,
    /// The pieces of tables.
    pieces: HashMap<(BlockId, Role), Vec<Range<u64>>>,
    /// The units whose gradients were begun and not given back.
    exist: BTreeSet<Unit>,
    /// The piece of a table that is in a buffer.
    held: Option<(Unit, Role, Tensor)>,
}

/// Where a gradient goes.
pub(crate) struct Target {
    pub tensor: Tensor,
    /// Whether it is to be added to what is there.
    pub accumulate: bool,
    pub rounding: Rounding,
}

/// Where the gradients of matrices live.
#[derive(Clone, Copy)]
pub(crate) struct OnTier<'s> {
    pub tiers: &'s Arc<LowerTiers>,
    pub tier: Tier,
    /// Whose gradients stay on the device all the same.
    pub stays: &'s dyn Fn(&Parameter) -> bool,
}

impl<'a> Gradients<'a> {
    /// No gradients yet, for the parameters that are trained; those of matrices live on a tier and come through buffers.
    pub fn new(
        device: &'a dyn Device,
        trained: &[Parameter],
        dtype: DType,
        OnTier { tiers, tier, stays }: OnTier<'_>,
        (cut, buffers): (Pieces, usize),
    ) -> Result<Self, StepError> {
        let shapes = trained.iter().map(|p| ((p.block, p.role), p.shape.clone())).collect();
        let mut gradients = Gradients {
            device,
            dtype,
            shapes,
            tensors: HashMap::new(),
            seed: 0,
            away: None,
            looked_up: LookedUp::default(),
        };
        if tier == Tier::Device {
            return Ok(gradients);
        }
        let (mut parcels, mut pieces) = (HashMap::<Unit, Parcel<Role>>::new(), HashMap::new());
        for p in trained.iter().filter(|p| is_matrix(p) && !stays(p)) {
            let cuts = cut.of(p);
            for (piece, rows) in (0..).zip(&cuts) {
                let parcel = parcels.entry(Unit::of_matrices(p.block, piece)).or_insert_with(Parcel::new);
                parcel.add(p.role, dtype, &p.shape_of(rows));
                // Gradients that are used up at once never leave the device.
                parcel.settle_later(tier, Tag::Gradients, "gradients");
            }
            if layer_of(p.block).is_none() {
                pieces.insert((p.block, p.role), cuts);
            }
        }
        if !parcels.is_empty() {
            device.enter(Phase::Setup, None);
            let pool = Parcels::of(device, tiers, parcels, buffers, "gradients.staging")?;
            gradients.away = Some(Away { pool, pieces, exist: BTreeSet::new(), held: None });
        }
        Ok(gradients)
    }

    /// Gives all gradients back and starts a pass. Sums in narrow gradients are rounded stochastically by `seed`, so that
    /// what is small beside the sum is not lost: twice the same pass gives the same bits.
    pub fn begin(&mut self, seed: u64) {
        self.clear();
        self.seed = seed;
    }

    /// Gives all gradients back.
    pub fn clear(&mut self) {
        self.tensors.clear();
        self.looked_up = LookedUp::default();
        if let Some(away) = &mut self.away {
            away.held = None;
            std::mem::take(&mut away.exist).into_iter().for_each(|unit| away.pool.forget(unit));
        }
    }

    /// Whether a parameter is trained.
    pub fn wants(&self, block: BlockId, role: Role) -> bool {
        self.shapes.contains_key(&(block, role))
    }

    /// The units that will be held next, in order, and whether they are freed before they are left.
    pub fn announce(&mut self, units: impl Iterator<Item = (Unit, bool)>) -> Result<(), StepError> {
        let Some(Away { pool, exist, .. }) = &mut self.away else { return Ok(()) };
        let mut exist = exist.clone();
        let mut uses = Vec::new();
        for (unit, frees) in units {
            let fresh = if frees { !exist.remove(&unit) } else { exist.insert(unit) };
            uses.push(Use { key: unit, fresh });
        }
        pool.announce(uses)
    }

    /// Has the gradients of a unit on the device until they are left: as they are, or room for them where there are none yet.
    pub fn hold(&mut self, unit: Unit) -> Result<(), StepError> {
        let Some(Away { pool, exist, held, .. }) = &mut self.away else { return Ok(()) };
        if !pool.has(unit) {
            return Ok(());
        }
        exist.insert(unit);
        for (role, tensor) in pool.gather(unit)? {
            if let Unit::Piece(..) = unit {
                *held = Some((unit, role, tensor));
                continue;
            }
            let written = self.tensors.entry((unit.block(), role));
            written.or_insert(Written { gradient: None, times: 0 }).gradient = Some(tensor);
        }
        Ok(())
    }

    /// Sends the gradients of a unit to where they live, unless they were freed.
    pub fn leave(&mut self, unit: Unit) -> Result<(), StepError> {
        let Some(Away { pool, exist, held, .. }) = &mut self.away else { return Ok(()) };
        if !pool.has(unit) {
            return Ok(());
        }
        *held = None;
        for placed in pool.get(unit).iter().flat_map(|parcel| parcel.tensors()) {
            if let Some(written) = self.tensors.get_mut(&(unit.block(), placed.key)) {
                written.gradient = None;
            }
        }
        if exist.contains(&unit) {
            pool.release(unit, true);
        } else {
            pool.forget(unit);
        }
        pool.advance()
    }

    /// Gives back the gradients of a unit, which consists of these parts.
    pub fn free(&mut self, unit: Unit, parts: &[Part]) {
        for part in parts.iter().filter(|part| part.is_last()) {
            self.tensors.remove(&(part.parameter.block, part.parameter.role));
        }
        if let Some(Away { exist, held, .. }) = &mut self.away {
            exist.remove(&unit);
            *held = None;
        }
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

    /// A piece of a table's gradient that is in a buffer.
    fn held_piece(&self, block: BlockId, role: Role, piece: u32) -> Option<Tensor> {
        let (unit, of, tensor) = self.away.as_ref()?.held.as_ref()?;
        (*unit == Unit::Piece(block, piece) && *of == role).then(|| tensor.clone())
    }

    /// Whether the gradient of a table lives on a lower tier, in pieces.
    pub fn is_in_pieces(&self, block: BlockId, role: Role) -> bool {
        self.away.as_ref().is_some_and(|away| away.pieces.contains_key(&(block, role)))
    }

    /// The pieces of a table whose gradient lives on a lower tier.
    pub fn pieces(&self, block: BlockId, role: Role) -> Option<Vec<Range<u64>>> {
        self.away.as_ref()?.pieces.get(&(block, role)).cloned()
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

    /// Takes room for the rows that the `before` micro-batches of the passes before the last one look up, each of `tokens`
    /// tokens, with gradients of so many columns.
    pub fn make_room_for_looked_up(
        &mut self,
        before: u64,
        tokens: u64,
        row: (DType, u64),
    ) -> Result<(), StepError> {
        self.looked_up = LookedUp::with_room(self.device, before, tokens, row)?;
        Ok(())
    }

    /// Keeps the gradients dx `[N, H]` of the rows that a micro-batch looked up.
    pub fn keep_looked_up(&mut self, number: u64, tokens: Tensor, dx: Tensor) -> Result<(), StepError> {
        self.looked_up.keep(self.device, number, tokens, dx)
    }

    /// Makes a piece of the embedding's gradient of what was looked up.
    pub fn gather_looked_up(
        &mut self,
        key: (BlockId, Role),
        piece: u32,
        range: &Range<u64>,
    ) -> Result<(), StepError> {
        let (device, times) = (self.device, self.looked_up.len());
        device.repeat(times, |nth| match self.looked_up.get(nth)? {
            Some((tokens, dx)) => self.scatter_rows(key, piece, range, (&tokens, &dx), nth),
            None => Ok(()),
        })
    }

    /// Feeds what lies in the buffers to a hasher, and which gradients there are.
    pub fn hash_state(&self, hasher: &mut impl Hasher) {
        if let Some(away) = &self.away {
            away.pool.hash_buffers(hasher);
            away.exist.hash(hasher);
        }
        // In no order.
        let there = self.tensors.iter().map(|(key, Written { gradient, times })| {
            let mut hasher = DefaultHasher::new();
            (key, gradient.is_some(), *times > 0).hash(&mut hasher);
            hasher.finish()
        });
        there.fold(0, u64::wrapping_add).hash(hasher);
    }

    /// Adds dx `[N, H]`, the gradient of the rows of `tokens`, to a piece of the table's.
    pub fn scatter_rows(
        &mut self,
        key: (BlockId, Role),
        piece: u32,
        range: &Range<u64>,
        (tokens, dout): (&Tensor, &Tensor),
        nth: u64,
    ) -> Result<(), StepError> {
        let Target { tensor, accumulate, rounding } = self.rows_target(key, piece, range, nth)?;
        if !accumulate {
            self.device.run(Elementwise::Fill { out: &tensor, value: 0.0 })?;
        }
        let (dtable, first_row) = (&tensor, range.start);
        Ok(self.device.run(Embedding::Backward { tokens, dout, dtable, first_row, rounding })?)
    }

    /// All rows of a table were written `times` more times.
    pub fn count_rows(&mut self, block: BlockId, role: Role, times: u64) {
        let written = self.tensors.entry((block, role));
        written.or_insert(Written { gradient: None, times: 0 }).times += times;
    }

    fn new_gradient(&self, block: BlockId, role: Role) -> Result<Tensor, StepError> {
        let shape = self.shapes.get(&(block, role)).ok_or(StepError::MissingWeight { block, role })?;
        // Vectors are too small to save anything on, and many sums end in each of their elements.
        let dtype = if shape.len() < 2 { DType::F32 } else { self.dtype };
        Ok(self.device.alloc(dtype, shape, Tag::Gradients, role_name(role))?)
    }

    /// Where a gradient goes, and whether it is to be added to what is there.
    pub fn target(&mut self, block: BlockId, role: Role) -> Result<(Tensor, bool), StepError> {
        let key = (block, role);
        if let Some(Written { gradient: Some(gradient), times }) = self.tensors.get_mut(&key) {
            *times += 1;
            return Ok((gradient.clone(), *times > 1));
        }
        let gradient = self.new_gradient(block, role)?;
        self.tensors.insert(key, Written { gradient: Some(gradient.clone()), times: 1 });
        Ok((gradient, false))
    }

    /// Where a gradient goes by scattered addition: zeroed if nothing is there yet.
    pub fn scatter_target(&mut self, block: BlockId, role: Role) -> Result<Tensor, StepError> {
        let (gradient, accumulate) = self.target(block, role)?;
        if !accumulate {
            self.device.run(Elementwise::Fill { out: &gradient, value: 0.0 })?;
        }
        Ok(gradient)
    }

    /// Adds dout^T x to a weight's gradient.
    pub fn add_product(
        &mut self,
        block: BlockId,
        role: Role,
        dout: &Tensor,
        x: &Tensor,
        compute: Compute,
    ) -> Result<(), StepError> {
        let (dweight, accumulate) = self.target(block, role)?;
        let (dweight, rounding) = (&dweight, self.rounding(block, role));
        Ok(self.device.run(Product::LinearBackwardWeight {
            dout,
            x,
            dweight,
            accumulate,
            rounding,
            compute,
        })?)
    }

    /// The rounding of what is now added to a gradient.
    pub fn rounding(&self, block: BlockId, role: Role) -> Rounding {
        let times = self.tensors.get(&(block, role)).map_or(0, |written| written.times.saturating_sub(1));
        self.rounding_at(block, role, times, 0)
    }

    fn rounding_at(&self, block: BlockId, role: Role, times: u64, first: u64) -> Rounding {
        let seed = mix(mix(self.seed, times), parameter_number(block, role));
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
