//! A store that has some of the weights in memory all the time and brings the others, ahead of their use, through a few
//! buffers: from the model's files, or from homes on a lower tier, where they are sent again when they were changed.
//!
//! The weights that come are those that a resident store would hold, bit for bit.

use std::cell::RefCell;
use std::collections::HashMap;
use std::hash::Hasher;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

use plimsoll_device::{DType, Device, Tensor};
use plimsoll_disk::{DiskError, Home, LowerTiers};
use plimsoll_memory::{Phase, Region, Tag, Tier, release_free_heap};
use plimsoll_model::{
    AdaptedModule, AdapterLayout, BlockId, ModelSpec, Parameter, Role, StagedBlock, WeightReader,
};

use super::{BlockWeights, ResidentStore, StoredWeight, WeightStorage, WeightStore, layer_of};
use crate::StepError;
use crate::tier::{Carrier, Homes, Parcel, Pieces, Placed, Pool, Unit, is_matrix};

/// Buffers of weights that live on a lower tier: one in use and one on its way.
const BUFFERS: usize = 2;

/// Weights of which some may be away.
pub struct StreamedStore<'a, D: Device> {
    device: &'a D,
    resident: ResidentStore,
    parcels: HashMap<Unit, Parcel<Role>>,
    /// The table of which the rows that are looked up are brought, and its type.
    table: Option<(Parameter, DType)>,
    /// The tables that come in pieces: the rows of each piece.
    tables: HashMap<BlockId, (Role, Vec<Range<u64>>)>,
    /// What lives on a lower tier, with its type and its pieces.
    away: Vec<AwayParameter>,
    pool: Pool<'a, D, Unit>,
    rows: Option<Box<dyn Rows + 'a>>,
}

/// Where weights live that are away.
pub(crate) struct Away<'s> {
    pub tiers: &'s Arc<LowerTiers>,
    pub tier: Tier,
    /// Which stay on the device all the same.
    pub stays: &'s dyn Fn(&Parameter) -> bool,
    /// What files hold as it is computed with.
    pub in_files: Option<&'s HashMap<(BlockId, Role), StoredWeight>>,
}

/// A parameter that lives on a lower tier.
#[derive(Clone, Debug)]
pub(crate) struct AwayParameter {
    pub parameter: Parameter,
    pub dtype: DType,
    /// The rows of each piece; one for a matrix of a layer.
    pub pieces: Vec<Range<u64>>,
    /// The home of each piece, and where in it the piece begins.
    pub homes: Vec<(Arc<Home>, u64)>,
}

/// Reads rows of a table.
trait Rows {
    /// Writes rows into `out`, one after the other.
    fn read(&mut self, table: Role, rows: &[u32], out: &mut [u8]) -> Result<(), DiskError>;
}

/// A reader of the model's files: a carrier of whole blocks, and of rows.
struct FromFiles(Rc<RefCell<Box<dyn WeightReader>>>);

impl Carrier<Unit> for FromFiles {
    fn begin_read(&mut self, unit: Unit, memory: Region) {
        self.0.borrow_mut().begin((unit.block, unit.piece), memory);
    }

    /// The model's files stay as they are: what does not change is not sent back.
    fn begin_write(&mut self, _: Unit, _: Region) {}

    fn is_done(&self, _: Unit) -> bool {
        false
    }

    fn finish(&mut self, unit: Unit) -> Option<(Region, Result<(), DiskError>)> {
        self.0.borrow_mut().finish((unit.block, unit.piece))
    }
}

impl Rows for FromFiles {
    fn read(&mut self, table: Role, rows: &[u32], out: &mut [u8]) -> Result<(), DiskError> {
        self.0.borrow_mut().read_rows(table, rows, out)
    }
}

/// Rows of a table in homes.
struct FromHomes {
    tiers: Arc<LowerTiers>,
    table: AwayParameter,
}

impl Rows for FromHomes {
    fn read(&mut self, _: Role, rows: &[u32], out: &mut [u8]) -> Result<(), DiskError> {
        let AwayParameter { parameter, dtype, pieces, homes } = &self.table;
        let columns = parameter.columns();
        let row_bytes = dtype.bytes_for(columns).unwrap_or(0);
        let chunks = out.chunks_exact_mut(usize::try_from(row_bytes).unwrap_or(usize::MAX).max(1));
        let mut parts = Vec::with_capacity(rows.len());
        for (row, out) in rows.iter().map(|row| u64::from(*row)).zip(chunks) {
            let place = pieces.iter().zip(homes).find(|(rows, _)| rows.contains(&row));
            let Some((piece, (home, start))) = place else { return Err(DiskError::Stopped) };
            parts.push((home.as_ref(), start + (row - piece.start) * row_bytes, out));
        }
        self.tiers.read_all_now(&mut parts)
    }
}

impl<'a, D: Device> StreamedStore<'a, D> {
    /// Takes memory for the weights that stay, and for the buffers of those that are brought from files.
    pub fn allocate(
        device: &'a D,
        spec: &ModelSpec,
        storage: WeightStorage<'_>,
        tag: Tag,
    ) -> Result<Self, StepError> {
        let resident = ResidentStore::allocate(device, spec, storage, tag, &|p| storage.is_resident(p))?;
        device.arena().enter(Phase::Setup, None);
        let (mut parcels, mut tables) = (HashMap::new(), HashMap::new());
        let (mut table, mut bytes, mut buffers) = (None, 0, 0);
        if let Some(staging) = storage.staging {
            for staged in &staging.blocks {
                let StagedBlock { block, piece, first_row, .. } = *staged;
                parcels.insert(Unit { block, piece }, parcel(staged));
                if let (None, [tensor]) = (layer_of(block), &staged.tensors[..]) {
                    let (role, rows) = (tensor.parameter.role, tensor.parameter.shape.first().copied());
                    let own = tables.entry(block).or_insert((role, Vec::new()));
                    own.1.push(first_row..first_row + rows.unwrap_or(0));
                }
            }
            // A table in one piece is there with its block.
            tables.retain(|_, (_, pieces): &mut (Role, Vec<Range<u64>>)| pieces.len() > 1);
            table = staging.tables.first().cloned();
            (bytes, buffers) = (staging.buffer_bytes(), staging.buffers);
        }
        let pool = Pool::new(device, bytes, buffers)?;
        let away = Vec::new();
        Ok(StreamedStore { device, resident, parcels, table, tables, away, pool, rows: None })
    }

    /// Takes memory for the small weights, homes on a lower tier for the matrices of the layers and the tables, and
    /// buffers for these. What stays as files hold it lives there, unless it is to live on the host.
    pub(crate) fn allocate_away(
        device: &'a D,
        spec: &ModelSpec,
        storage: WeightStorage<'_>,
        Away { tiers, tier, stays: kept, in_files }: Away<'_>,
        cut: Pieces,
    ) -> Result<Self, StepError> {
        // An adapter of the head is computed beside all of it.
        let modules = storage.adapters.map(AdapterLayout::modules).unwrap_or_default();
        let has_adapter = |p: &Parameter| {
            let own = |module: &&AdaptedModule| module.block == p.block && p.role == Role::LmHead;
            modules.iter().find(own).is_some_and(|m| m.parts.iter().any(|of| of.role() == p.role))
        };
        let goes = |p: &Parameter| is_matrix(p) && !has_adapter(p) && !kept(p);
        let stays = |p: &Parameter| !goes(p);
        let resident = ResidentStore::allocate(device, spec, storage, Tag::Weights, &stays)?;
        let (mut homes, mut parcels, mut away) = (Homes::new(tiers), HashMap::new(), Vec::new());
        let mut table = None;
        for block in spec.blocks() {
            tiers.enter(Phase::Setup, layer_of(block));
            let matrices: Vec<Parameter> = spec.block_parameters(block).into_iter().filter(goes).collect();
            // What is written behind it too goes first: each unit has one home of its own.
            let (mut own, mut stored) = (Vec::new(), Vec::new());
            for p in matrices {
                let dtype = (storage.types)(&p);
                let place = in_files.and_then(|files| files.get(&(p.block, p.role)));
                match place.filter(|place| place.dtype == dtype) {
                    Some(place) => stored.push((p, dtype, Some(place))),
                    None => own.push((p, dtype, None)),
                }
            }
            let first_stored = own.len();
            let mut of_block: Vec<AwayParameter> = Vec::new();
            let mut placed: Vec<(usize, Unit, u64)> = Vec::new();
            for (index, (p, dtype, place)) in own.into_iter().chain(stored).enumerate() {
                if index == first_stored {
                    take_homes(&mut homes, &parcels, block, tier)?;
                }
                let columns = p.columns();
                let divisible = dtype.has_rows() && columns.is_multiple_of(dtype.block_elements());
                let rows = p.rows();
                let pieces = if divisible { cut.of(&p) } else { std::iter::once(0..rows).collect() };
                let mut in_file = Vec::new();
                for (piece, rows) in (0..).zip(&pieces) {
                    let unit = Unit { block, piece };
                    let parcel = parcels.entry(unit).or_insert_with(Parcel::new);
                    let shape = [rows.end - rows.start, columns];
                    let Some(place) = place else {
                        placed.push((index, unit, parcel.bytes()));
                        parcel.add(p.role, dtype, &shape);
                        continue;
                    };
                    let row = |row: u64| dtype.bytes_for(row * columns).unwrap_or(0);
                    let bytes = place.bytes.start + row(rows.start)..place.bytes.start + row(rows.end);
                    parcel.add_stored(p.role, dtype, &shape, &bytes);
                    in_file.push((homes.add_stored(unit, &place.path, bytes)?, 0));
                }
                if block == BlockId::Embedding && divisible {
                    table = Some((p.clone(), dtype));
                }
                of_block.push(AwayParameter { parameter: p, dtype, pieces, homes: in_file });
            }
            if first_stored == of_block.len() {
                take_homes(&mut homes, &parcels, block, tier)?;
            }
            for (index, unit, start) in placed {
                if let (Some(parameter), Some(home)) = (of_block.get_mut(index), homes.get(unit)) {
                    parameter.homes.push((Arc::clone(home), start));
                }
            }
            away.extend(of_block);
        }
        device.arena().enter(Phase::Setup, None);
        let bytes = parcels.values().map(Parcel::bytes).max().unwrap_or(0);
        let mut pool = Pool::new(device, bytes, BUFFERS.min(parcels.len()))?;
        pool.carry_with(Box::new(homes));
        // Only the embedding's table is looked up.
        let of_table = away.iter().find(|away| {
            table.as_ref().is_some_and(|(table, _): &(Parameter, DType)| *table == away.parameter)
        });
        let rows = of_table.map(|table| -> Box<dyn Rows + 'a> {
            Box::new(FromHomes { tiers: Arc::clone(tiers), table: table.clone() })
        });
        let in_pieces = away.iter().filter(|away| layer_of(away.parameter.block).is_none());
        let tables = in_pieces
            .map(|away| (away.parameter.block, (away.parameter.role, away.pieces.clone())))
            .collect();
        Ok(StreamedStore { device, resident, parcels, table, tables, away, pool, rows })
    }

    /// Sets every weight that is in memory; `fill` writes the values of some rows of a parameter in the given type
    /// and is not called on a dry device.
    pub fn load<E: From<StepError>>(
        &mut self,
        fill: impl FnMut(&Parameter, Range<u64>, DType, &mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        self.resident.load(self.device, fill)?;
        // What conversions took of the heap counts against the arena, the rest of which is touched from here on.
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
        work: impl Fn(&D, &BlockWeights) -> Result<(), StepError>,
    ) -> Result<(), StepError> {
        for block in self.resident.ordered() {
            if !self.resident.gather(block)?.has_lengths() {
                continue;
            }
            self.device.arena().enter(Phase::Setup, layer_of(block));
            let weights = self.gather(block)?;
            work(self.device, &weights)?;
            self.release(block);
        }
        Ok(())
    }

    /// Takes staged weights from here from now on. Until then buffers hold whatever was there.
    pub fn stream_from(&mut self, reader: Box<dyn WeightReader>) {
        let reader = Rc::new(RefCell::new(reader));
        self.pool.carry_with(Box::new(FromFiles(Rc::clone(&reader))));
        self.rows = Some(Box::new(FromFiles(reader)));
    }

    /// What it has in memory all the time.
    pub(crate) fn resident(&self) -> &ResidentStore {
        &self.resident
    }

    /// What lives on a lower tier.
    pub(crate) fn away(&self) -> &[AwayParameter] {
        &self.away
    }

    /// The step has changed a block and is done with it for now.
    pub(crate) fn release_changed(&mut self, block: BlockId) {
        self.pool.release(Unit::whole(block), true);
    }

    /// Moves on what is under way, without waiting.
    pub(crate) fn advance(&mut self) -> Result<(), StepError> {
        self.pool.advance()
    }

    /// Waits until everything that was changed is where it lives.
    pub(crate) fn flush(&mut self) -> Result<(), StepError> {
        self.pool.flush()
    }

    /// How often weights were fetched that nobody had announced.
    pub(crate) fn unannounced(&self) -> u64 {
        self.pool.unannounced()
    }

    /// Feeds what lies in the buffers to a hasher.
    pub(crate) fn hash_buffers(&self, hasher: &mut impl Hasher) {
        self.pool.hash_buffers(hasher);
    }

    /// The units that will be gathered next, in order.
    pub(crate) fn announce_units(&mut self, units: Vec<Unit>) -> Result<(), StepError> {
        let parcels = &self.parcels;
        self.pool.announce(units.into_iter().filter(|unit| parcels.contains_key(unit)))
    }

    /// The tensors of a unit, brought where they are not there.
    fn bring(&mut self, unit: Unit) -> Result<Vec<(Role, Tensor)>, StepError> {
        let Some(parcel) = self.parcels.get(&unit) else { return Ok(Vec::new()) };
        let missing = |role| StepError::MissingWeight { block: unit.block, role };
        let buffer = self.pool.take(unit)?.ok_or_else(|| missing(Role::TokenEmbedding))?;
        let views = parcel.views(&buffer).zip(parcel.tensors());
        views.map(|(view, placed)| view.map(|(r, t)| (*r, t)).ok_or_else(|| missing(placed.key))).collect()
    }
}

/// Takes a home for what is there by now of a block's parcels, if anything is.
fn take_homes(
    homes: &mut Homes<Unit>,
    parcels: &HashMap<Unit, Parcel<Role>>,
    block: BlockId,
    tier: Tier,
) -> Result<(), StepError> {
    let mut own: Vec<_> = parcels.iter().filter(|(unit, _)| unit.block == block).collect();
    own.sort_by_key(|(unit, _)| **unit);
    for (unit, parcel) in own {
        homes.take(*unit, tier, parcel.bytes(), Tag::Weights, "weights")?;
    }
    Ok(())
}

/// A block as it lies in its files.
fn parcel(staged: &StagedBlock) -> Parcel<Role> {
    let tensors = staged.tensors.iter().map(|tensor| Placed {
        key: tensor.parameter.role,
        dtype: tensor.dtype,
        shape: tensor.parameter.shape.clone(),
        offset: tensor.offset,
    });
    Parcel::placed(staged.bytes, tensors.collect())
}

impl<D: Device> WeightStore for StreamedStore<'_, D> {
    fn gather(&mut self, block: BlockId) -> Result<BlockWeights, StepError> {
        let mut weights = self.resident.gather(block)?;
        if !self.tables.contains_key(&block) {
            weights.tensors.extend(self.bring(Unit::whole(block))?);
        }
        Ok(weights)
    }

    fn release(&mut self, block: BlockId) {
        self.pool.release(Unit::whole(block), false);
    }

    fn gather_embedding(&mut self, tokens: &Tensor) -> Result<(BlockWeights, Tensor), StepError> {
        let Some((table, dtype)) = &self.table else {
            return Ok((self.gather(BlockId::Embedding)?, tokens.clone()));
        };
        // Rows come from where the table lives.
        self.pool.flush()?;
        let mut weights = self.resident.gather(BlockId::Embedding)?;
        let (n, columns) = (tokens.elements(), table.columns());
        let device = self.device;
        let rows = device.alloc(*dtype, &[n, columns], Tag::Staging, "embed_rows")?;
        let places = device.alloc(DType::U32, &[n], Tag::Data, "embed_places")?;
        let mut wanted = Vec::new();
        device.read(tokens, &mut |bytes| {
            wanted = bytes.as_chunks::<4>().0.iter().map(|bytes| u32::from_ne_bytes(*bytes)).collect();
        })?;
        if let Some(reader) = &mut self.rows {
            let mut outcome = Ok(());
            device.write(&rows, &mut |out| outcome = reader.read(table.role, &wanted, out))?;
            outcome?;
        }
        device.write(&places, &mut |bytes| {
            let places = (0..).zip(bytes.as_chunks_mut::<4>().0);
            places.for_each(|(place, cell): (u32, _)| *cell = place.to_ne_bytes());
        })?;
        weights.tensors.push((table.role, rows));
        Ok((weights, places))
    }

    fn announce(&mut self, blocks: &[BlockId]) -> Result<(), StepError> {
        let mut units = Vec::new();
        for block in blocks {
            match self.tables.get(block) {
                Some((_, pieces)) => {
                    units.extend((0..pieces.len() as u32).map(|piece| Unit { block: *block, piece }));
                }
                None => units.push(Unit::whole(*block)),
            }
        }
        self.announce_units(units)
    }

    fn pieces(&self, block: BlockId, role: Role) -> Option<Vec<Range<u64>>> {
        let (table, pieces) = self.tables.get(&block)?;
        (*table == role).then(|| pieces.clone())
    }

    fn gather_piece(&mut self, block: BlockId, role: Role, piece: u32) -> Result<Tensor, StepError> {
        let found = self.bring(Unit { block, piece })?;
        let found = found.into_iter().find(|(r, _)| *r == role);
        found.map(|(_, tensor)| tensor).ok_or(StepError::MissingWeight { block, role })
    }

    fn release_piece(&mut self, block: BlockId, piece: u32, changed: bool) {
        self.pool.release(Unit { block, piece }, changed);
    }
}
