//! A store that has some of the weights on the device all the time and brings the others, ahead of their use, through a few
//! buffers: from the model's files, or from homes on a lower tier, to which they are written back when they were changed.
//!
//! The weights that come are those that would be on the device otherwise, bit for bit.

use std::collections::{BTreeMap, HashMap};
use std::hash::Hasher;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use plimsoll_device::{DType, Device, DeviceExt, Elementwise, Rounding, Tensor};
use plimsoll_disk::{DiskError, LowerTiers};
use plimsoll_memory::{Phase, Tag, Tier, release_free_heap};
use plimsoll_model::{
    AdaptedModule, AdapterLayout, BlockId, ModelSpec, Parameter, Role, StoredWeight, StoredWeights,
};

use super::{BlockWeights, ResidentStore, WeightOffload, WeightStorage};
use crate::StepError;
use crate::head::Head;
use crate::tier::{Contents, HomePart, Parcel, Parcels, Pieces, Unit, Use, is_matrix};

/// Buffers of weights that live on a lower tier: one in use and one prefetched.
const BUFFERS: usize = 2;

/// Weights of which some may be away.
pub(crate) struct WeightStore<'a> {
    device: &'a dyn Device,
    tiers: Arc<LowerTiers>,
    resident: ResidentStore,
    /// What lives on a lower tier.
    away: Vec<AwayParameter>,
    /// The tables that come in pieces: the rows of each piece.
    tables: HashMap<BlockId, (Role, Vec<Range<u64>>)>,
    /// Which of `away` is the table of which the rows that are looked up are brought.
    looked_up: Option<usize>,
    pool: Parcels<'a, Unit, Role>,
}

/// A parameter that lives on a lower tier.
#[derive(Clone, Debug)]
pub(crate) struct AwayParameter {
    pub parameter: Parameter,
    pub dtype: DType,
    /// The rows of each piece; one for a matrix of a layer.
    pub pieces: Vec<Range<u64>>,
    /// Where each piece is.
    homes: Vec<HomePart>,
    /// Where a file of the model's holds it, which is only read.
    in_file: Option<StoredWeight>,
}

impl AwayParameter {
    /// Where its bytes are.
    pub fn contents(&self) -> Contents {
        Contents::Homes(self.homes.clone())
    }

    /// Whether it has to be loaded: what a file holds is there.
    pub fn is_loaded(&self) -> bool {
        self.in_file.is_none()
    }

    /// The bytes of some rows, among its own.
    fn bytes_of(&self, rows: &Range<u64>) -> Range<u64> {
        let byte = |row: u64| self.dtype.bytes_for(row * self.parameter.columns()).unwrap_or(0);
        byte(rows.start)..byte(rows.end)
    }

    /// The bytes of some rows in the file that holds it.
    fn stored(&self, rows: &Range<u64>) -> Option<(&Path, Range<u64>)> {
        let StoredWeight { path, bytes, .. } = self.in_file.as_ref()?;
        let Range { start, end } = self.bytes_of(rows);
        Some((path, bytes.start + start..bytes.start + end))
    }

    /// A home for each piece by itself: in the file that holds it, or one that is taken.
    fn lodge_alone(&mut self, tiers: &LowerTiers, tier: Tier) -> Result<(), DiskError> {
        let home = |rows| {
            let Range { start, end } = self.bytes_of(rows);
            let home = match self.stored(rows) {
                Some((path, bytes)) => tiers.adopt(path, bytes)?,
                None => tiers.take(tier, end - start, Tag::Weights, "weights")?,
            };
            Ok(HomePart { home: Arc::new(home), start: 0, bytes: end - start })
        };
        self.homes = self.pieces.iter().map(home).collect::<Result<_, DiskError>>()?;
        Ok(())
    }

    /// Writes rows of it into `out`, one after the other.
    fn read_rows(&self, tiers: &LowerTiers, rows: &[u32], out: &mut [u8]) -> Result<(), DiskError> {
        let row_bytes = self.bytes_of(&(0..1)).end;
        let chunks = out.chunks_exact_mut(usize::try_from(row_bytes).unwrap_or(usize::MAX).max(1));
        let mut parts = Vec::with_capacity(rows.len());
        for (row, out) in rows.iter().map(|row| u64::from(*row)).zip(chunks) {
            let place = self.pieces.iter().zip(&self.homes).find(|(rows, _)| rows.contains(&row));
            let Some((piece, HomePart { home, start, bytes })) = place else {
                let needed = row.saturating_add(1).saturating_mul(row_bytes);
                return Err(DiskError::Buffer {
                    has: self.homes.iter().map(|part| part.bytes).sum(),
                    needed,
                });
            };
            let first = (row - piece.start) * row_bytes;
            if first + row_bytes > *bytes {
                return Err(DiskError::Buffer { has: *bytes, needed: first + row_bytes });
            }
            parts.push((home.as_ref(), start + first, out));
        }
        tiers.read_all_now(&mut parts)
    }
}

/// The f32 weights behind a parameter: some rows, and where they are.
type Masters<'s> = dyn Fn(&Parameter) -> Vec<(Range<u64>, Contents)> + 's;

impl<'a> WeightStore<'a> {
    /// Takes memory for the weights that stay, homes for those that live below the device, and buffers for these. `cut`
    /// says how tables come and go; where it says nothing, a piece of one is no larger than a layer.
    pub(crate) fn new(
        device: &'a dyn Device,
        tiers: &Arc<LowerTiers>,
        spec: &ModelSpec,
        storage: WeightStorage<'_>,
        cut: Option<Pieces>,
    ) -> Result<Self, StepError> {
        // An adapter of the head is computed beside all of it.
        let modules = storage.adapters.map(AdapterLayout::modules).unwrap_or_default();
        let has_adapter = |p: &Parameter| {
            let own = |module: &&AdaptedModule| module.block == p.block && p.role == Role::LmHead;
            modules.iter().find(own).is_some_and(|m| m.parts.iter().any(|of| of.role() == p.role))
        };
        let goes = |p: &Parameter| {
            let kept = |offload: &WeightOffload<'_>| offload.residency.keeps(spec, p.block);
            storage.offload.is_some_and(|offload| !kept(&offload))
                && is_matrix(p)
                && !(storage.trained && has_adapter(p))
        };
        let resident = ResidentStore::allocate(device, spec, storage, &|p| !goes(p))?;
        let bytes = |p: &Parameter| (storage.types)(p).bytes_for(p.elements()).unwrap_or(0);
        let layer_bytes = spec.blocks().filter(|block| block.layer().is_some()).map(|block| {
            spec.block_parameters(block).iter().filter(|p| is_matrix(p)).map(bytes).sum::<u64>()
        });
        let layer_bytes = layer_bytes.max().unwrap_or(0);
        let (mut away, mut parcels) = (Vec::new(), HashMap::new());
        let mut looked_up = None;
        for block in spec.blocks() {
            let Some(WeightOffload { tier, in_files, .. }) = storage.offload else { break };
            let in_files = in_files.filter(|_| tier == Tier::Disk);
            device.enter(Phase::Setup, block.layer());
            tiers.enter(Phase::Setup, block.layer());
            let mut own = Vec::new();
            for parameter in spec.block_parameters(block).into_iter().filter(goes) {
                let dtype = (storage.types)(&parameter);
                let divisible =
                    dtype.has_rows() && parameter.columns().is_multiple_of(dtype.block_elements());
                let row_bytes = dtype.bytes_for(parameter.columns()).unwrap_or(0);
                let cut = cut.unwrap_or_else(|| Pieces::of_bytes(layer_bytes, row_bytes));
                let pieces = match divisible && !has_adapter(&parameter) {
                    true => cut.of(&parameter),
                    false => std::iter::once(parameter.all_rows()).collect(),
                };
                let place = in_files.and_then(|files: &StoredWeights| files.get(&(block, parameter.role)));
                let in_file = place.filter(|place| place.dtype == dtype).cloned();
                if block == BlockId::Embedding && divisible {
                    looked_up = Some(away.len() + own.len());
                }
                own.push(AwayParameter { parameter, dtype, pieces, homes: Vec::new(), in_file });
            }
            // Rows are all that inference needs of an embedding that is no head.
            let only_rows = block == BlockId::Embedding
                && looked_up.is_some()
                && !spec.tie_word_embeddings
                && !storage.trained;
            match only_rows {
                true => own.iter_mut().try_for_each(|matrix| matrix.lodge_alone(tiers, tier))?,
                false => lodge(tiers, block, &mut own, tier, &mut parcels)?,
            }
            away.append(&mut own);
        }
        device.enter(Phase::Setup, None);
        let pool = Parcels::of(device, tiers, parcels, BUFFERS, "weights.staging")?;
        // Where nothing changes, a table of one piece comes with its block.
        let in_pieces = |away: &&AwayParameter| {
            let table = away.parameter.block.layer().is_none();
            table && (storage.trained || away.pieces.len() > 1)
        };
        let tables = away
            .iter()
            .filter(in_pieces)
            .map(|away| (away.parameter.block, (away.parameter.role, away.pieces.clone())))
            .collect();
        Ok(WeightStore { device, tiers: Arc::clone(tiers), resident, away, tables, looked_up, pool })
    }

    /// Sets every weight that no file holds as it is computed with, and its f32 master, of which `masters` says where it is.
    /// `fill` writes the values of some rows of a parameter in the given type and is not called on a dry device. A weight
    /// beside its master on the device is that, rounded.
    pub fn load<E: From<StepError>>(
        &mut self,
        masters: &Masters<'_>,
        mut fill: impl FnMut(&Parameter, Range<u64>, DType, &mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let (device, tiers) = (self.device, &self.tiers);
        let in_homes = |contents: &Contents| matches!(contents, Contents::Homes(_));
        let fill_master = |p: &Parameter, rows: &Range<u64>, master: &Contents, fill: &mut _| {
            master.load(device, tiers, (p, rows, DType::F32), fill)
        };
        // First what needs memory of its own on its way, while little of the arena has been touched.
        let resident = self.resident.parameters();
        for p in resident.iter().filter(|_| !tiers.is_dry()) {
            for (rows, master) in masters(p).iter().filter(|(_, master)| in_homes(master)) {
                fill_master(p, rows, master, &mut fill)?;
            }
        }
        for away in self.away.iter().filter(|_| !tiers.is_dry()) {
            if away.is_loaded() {
                let p = &away.parameter;
                away.contents().load(device, tiers, (p, &p.all_rows(), away.dtype), &mut fill)?;
            }
            for (rows, master) in masters(&away.parameter) {
                fill_master(&away.parameter, &rows, &master, &mut fill)?;
            }
        }
        for p in resident {
            let weight = self.resident.tensor(p)?;
            let masters = masters(p);
            for (rows, master) in masters.iter().filter(|(_, master)| !in_homes(master)) {
                fill_master(p, rows, master, &mut fill)?;
            }
            if let [(rows, Contents::Device(masters))] = &masters[..]
                && let ([x], true) = (&masters[..], *rows == p.all_rows())
            {
                let cast = Elementwise::Cast { x, out: weight, rounding: Rounding::Nearest };
                device.run(cast).map_err(StepError::from)?;
                continue;
            }
            let contents = Contents::Device(vec![weight.clone()]);
            contents.load(device, tiers, (p, &p.all_rows(), weight.dtype()), &mut fill)?;
        }
        // What quantising and converting took of the heap counts against the arena, the rest of which is touched from here on.
        release_free_heap();
        Ok(self.prepare()?)
    }

    /// Does once what adapters with lengths need of the weights, when all have their values.
    pub(crate) fn prepare(&mut self) -> Result<(), StepError> {
        self.for_each_with_lengths(|device, weights| weights.prepare(device))
    }

    /// Sets the lengths of rows to those that the weights have with their adapters: where DoRA begins.
    pub(crate) fn reset_magnitudes(&mut self) -> Result<(), StepError> {
        self.for_each_with_lengths(|device, weights| weights.reset_magnitudes(device))
    }

    fn for_each_with_lengths(
        &mut self,
        work: impl Fn(&dyn Device, &BlockWeights) -> Result<(), StepError>,
    ) -> Result<(), StepError> {
        let with_lengths = self.resident.blocks.values().filter(|weights| weights.has_lengths());
        let blocks: Vec<BlockId> = with_lengths.map(BlockWeights::block).collect();
        self.announce(blocks.iter().map(|block| Unit::of_matrices(*block, 0)))?;
        for block in blocks {
            self.device.enter(Phase::Setup, block.layer());
            let weights = self.gather(block)?;
            work(self.device, &weights)?;
            drop(weights);
            self.release(Unit::of_matrices(block, 0), false);
        }
        Ok(())
    }

    /// What it has in memory all the time.
    pub(crate) fn resident(&self) -> &ResidentStore {
        &self.resident
    }

    /// What lives on a lower tier.
    pub(crate) fn away(&self) -> &[AwayParameter] {
        &self.away
    }

    /// Moves on what is under way, without waiting.
    pub(crate) fn advance(&mut self) -> Result<(), StepError> {
        self.pool.advance()
    }

    /// Waits until everything that was changed is where it lives.
    pub(crate) fn flush(&mut self) -> Result<(), StepError> {
        self.pool.flush()
    }

    /// Feeds what lies in the buffers to a hasher.
    pub(crate) fn hash_buffers(&self, hasher: &mut impl Hasher) {
        self.pool.hash_buffers(hasher);
    }

    /// The units that will be gathered next, in order: they are brought ahead of their use. Nothing of before is in use any
    /// more.
    pub(crate) fn announce(&mut self, units: impl IntoIterator<Item = Unit>) -> Result<(), StepError> {
        self.pool.announce(units.into_iter().map(Use::of))
    }

    /// Announces a forward pass, with the head if it comes to that, and what the next one begins with.
    pub(crate) fn announce_forward(&mut self, spec: &ModelSpec, with_head: bool) -> Result<(), StepError> {
        let (head, _) = Head::table(spec.tie_word_embeddings);
        // Of a table that stays, whose rows are looked up or that comes in pieces, the embedding takes nothing through the
        // buffers.
        let whole = Unit::Piece(BlockId::Embedding, 0);
        let in_pieces = self.tables.contains_key(&BlockId::Embedding);
        let comes = self.looked_up.is_none() && !in_pieces && self.pool.has(whole);
        let embedding = comes.then_some(whole);
        let pieces = self.tables.get(&head).map_or(1, |(_, pieces)| pieces.len() as u32);
        let head = (0..pieces).map(|piece| Unit::Piece(head, piece)).filter(|_| with_head);
        let layers = (0..spec.num_layers).map(Unit::Layer);
        let next = embedding.unwrap_or(Unit::Layer(0));
        let units: Vec<Unit> = embedding.into_iter().chain(layers).chain(head).chain([next]).collect();
        self.announce(units)
    }

    /// Makes the block's weights available, but for a table that comes in pieces.
    pub(crate) fn gather(&mut self, block: BlockId) -> Result<BlockWeights, StepError> {
        let mut weights = self.resident.gather(block)?;
        if !self.tables.contains_key(&block) {
            weights.tensors.extend(self.pool.gather(Unit::of_matrices(block, 0))?);
        }
        Ok(weights)
    }

    /// The step is done with a unit for now, of which no view is left, and has changed it or not.
    pub(crate) fn release(&mut self, unit: Unit, changed: bool) {
        self.pool.release(unit, changed);
    }

    /// The rows of each piece of a table that is gathered in pieces; `None` for one that comes with its block.
    pub(crate) fn pieces(&self, block: BlockId, role: Role) -> Option<Vec<Range<u64>>> {
        let (table, pieces) = self.tables.get(&block)?;
        (*table == role).then(|| pieces.clone())
    }

    /// Makes a piece of such a table available.
    pub(crate) fn gather_piece(
        &mut self,
        block: BlockId,
        role: Role,
        piece: u32,
    ) -> Result<Tensor, StepError> {
        let found = self.pool.gather(Unit::Piece(block, piece))?.into_iter().find(|(r, _)| *r == role);
        found.map(|(_, tensor)| tensor).ok_or(StepError::MissingWeight { block, role })
    }

    /// The embedding's weights to look `tokens` up in, which are `ids` on the host, and the row of the table in which each is: the token itself where
    /// the table is whole. To be released as a gathered block is.
    pub(crate) fn gather_embedding(
        &mut self,
        tokens: &Tensor,
        ids: &[u32],
    ) -> Result<(BlockWeights, Tensor), StepError> {
        let Some(table) = self.looked_up.and_then(|index| self.away.get(index)) else {
            return Ok((self.gather(BlockId::Embedding)?, tokens.clone()));
        };
        // Rows come from where the table lives.
        self.pool.flush()?;
        let mut weights = self.resident.gather(BlockId::Embedding)?;
        let (n, columns) = (tokens.elements(), table.parameter.columns());
        let device = self.device;
        let rows = device.alloc(table.dtype, &[n, columns], Tag::Staging, "embed_rows")?;
        let places = device.alloc(DType::U32, &[n], Tag::Data, "embed_places")?;
        let mut outcome = Ok(());
        device.write(&rows, &mut |out| outcome = table.read_rows(&self.tiers, ids, out))?;
        outcome?;
        device.write(&places, &mut |bytes| {
            let places = (0..).zip(bytes.as_chunks_mut::<4>().0);
            places.for_each(|(place, cell): (u32, _)| *cell = place.to_ne_bytes());
        })?;
        weights.tensors.push((table.parameter.role, rows));
        Ok((weights, places))
    }
}

/// Homes for the matrices of a block, in parcels that travel together.
fn lodge(
    tiers: &LowerTiers,
    block: BlockId,
    matrices: &mut [AwayParameter],
    tier: Tier,
    parcels: &mut HashMap<Unit, Parcel<Role>>,
) -> Result<(), StepError> {
    let mut own: BTreeMap<u32, Parcel<Role>> = BTreeMap::new();
    let (mut in_files, mut starts) = (Vec::new(), Vec::new());
    for matrix in matrices.iter() {
        let (role, mut of_matrix) = (matrix.parameter.role, Vec::new());
        for (piece, rows) in (0..).zip(&matrix.pieces) {
            let parcel = own.entry(piece).or_insert_with(Parcel::new);
            let shape = matrix.parameter.shape_of(rows);
            match matrix.stored(rows) {
                Some((path, bytes)) => in_files.push((path, bytes, piece, role, matrix.dtype, shape)),
                None => of_matrix.push(parcel.add(role, matrix.dtype, &shape)),
            }
        }
        starts.push(of_matrix);
    }
    in_files.sort_by_key(|(path, bytes, ..)| (*path, bytes.start));
    for (path, bytes, piece, role, dtype, shape) in in_files {
        own.entry(piece).or_insert_with(Parcel::new).add_stored(role, dtype, &shape, path, bytes);
    }
    for (piece, mut parcel) in own {
        parcel.settle(tiers, tier, Tag::Weights, "weights")?;
        parcels.insert(Unit::of_matrices(block, piece), parcel);
    }
    for (matrix, starts) in matrices.iter_mut().zip(starts) {
        if matrix.in_file.is_some() {
            matrix.lodge_alone(tiers, tier)?;
            continue;
        }
        let mut homes = Vec::new();
        for ((piece, rows), start) in (0..).zip(&matrix.pieces).zip(starts) {
            let home = parcels.get(&Unit::of_matrices(block, piece)).and_then(Parcel::home);
            let home = home.ok_or(StepError::Invariant { what: "a parcel of weights has no home" })?;
            let Range { start: first, end } = matrix.bytes_of(rows);
            homes.push(HomePart { home: Arc::clone(home), start, bytes: end - first });
        }
        matrix.homes = homes;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
