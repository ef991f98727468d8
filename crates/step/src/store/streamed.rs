//! A store that has some of the weights on the device all the time and brings the others, ahead of their use, through a few
//! buffers: from the model's files, or from homes on a lower tier, to which they are written back when they were changed. Where
//! ranks share the weights, what is here and what comes is this rank's share; the whole is gathered for as long as it is used.
//!
//! The weights that come are those that would be on the device otherwise, bit for bit.

use std::hash::Hasher;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

use plimsoll_device::{DType, Device, DeviceExt, Elementwise, Rounding, Tensor};
use plimsoll_disk::LowerTiers;
use plimsoll_memory::{Phase, Tag, Tier, release_free_heap};
use plimsoll_model::{AdaptedModule, AdapterLayout, BlockId, ModelSpec, Parameter, Role, StoredWeights};
use rustc_hash::FxHashMap;

use super::away::{AwayParameter, AwayPiece, lodge};
use super::expert_slots::{ExpertSlots, ExpertTraffic, ExpertWeights};
use super::shared::{Gathering, Shared, SharedMatrix, Sharing};
use super::{BlockWeights, ResidentStore, WeightOffload, WeightStorage};
use crate::StepError;
use crate::head::Head;
use crate::products::Products;
use crate::tier::{Contents, Parcels, Pieces, Unit, Use, Values, is_matrix};
use crate::trainer::Part;

/// Weights of which some may be away.
pub(crate) struct WeightStore<'a> {
    device: &'a dyn Device,
    tiers: Arc<LowerTiers>,
    resident: ResidentStore,
    /// What lives on a lower tier.
    away: Vec<AwayParameter>,
    /// The tables that come in pieces: the rows of each piece.
    tables: FxHashMap<BlockId, (Role, Vec<Range<u64>>)>,
    /// Which of `away` is the table of which the rows that are looked up are brought.
    looked_up: Option<usize>,
    pool: Parcels<'a, Unit, Role>,
    /// Experts that come by themselves.
    experts: Option<Rc<ExpertSlots<'a>>>,
    /// What ranks share.
    shared: Option<Shared<'a>>,
    /// The unit that is made whole ahead of its use.
    ahead: Option<Gathering>,
    /// Whether other ranks have some rows of the tables.
    tables_are_cut: bool,
    /// The ranks that share every product with this one.
    products: Option<Rc<Products<'a>>>,
}

/// How weights that are trained are held.
#[derive(Clone, Copy)]
pub(crate) struct Training<'s, 'a> {
    /// How tables come and go.
    pub cut: Pieces,
    /// How ranks share the matrices, where they do.
    pub sharing: Option<Sharing<'s, 'a>>,
    /// Buffers through which they come and go.
    pub buffers: usize,
}

/// The f32 weights behind a parameter: some rows, and where they are.
type Masters<'s> = dyn Fn(&Parameter) -> Vec<(Range<u64>, Contents)> + 's;

/// Whether the experts of a model can come by themselves: its weights are frozen but for what adapters train, and each matrix of these
/// types can be read alone. Lengths of rows are of whole stacks.
pub(crate) fn experts_can_come(
    spec: &ModelSpec,
    adapters: Option<&AdapterLayout>,
    types: &dyn Fn(&Parameter) -> DType,
    trains: &dyn Fn(&Parameter) -> bool,
) -> bool {
    let of_experts = |p: &Parameter| p.is_of_experts() && is_matrix(p);
    let alone =
        |p: &Parameter| (p.elements() / p.experts()).is_multiple_of(types(p).run_elements()) && !trains(p);
    let has_lengths = adapters.is_some_and(AdapterLayout::has_lengths_of_experts);
    spec.experts.is_some() && !has_lengths && spec.parameters().iter().filter(|p| of_experts(p)).all(alone)
}

/// Whether they do.
fn comes_by_expert(spec: &ModelSpec, storage: WeightStorage<'_>, is_shared: bool) -> bool {
    let asked = storage.offload.is_some_and(|offload| offload.residency.expert_slots() > 0);
    let trains = |p: &Parameter| {
        storage.trained && storage.adapters.is_none_or(|layout| layout.trains_base(p.block, p.role))
    };
    asked && !is_shared && experts_can_come(spec, storage.adapters, storage.types, &trains)
}

impl<'a> WeightStore<'a> {
    /// Buffers of weights that live on a lower tier: one in use and one prefetched.
    pub const BUFFERS: usize = 2;

    /// Takes memory for the weights that stay, homes for those that live below the device, and buffers for these. Where nothing is
    /// trained, a piece of a table is no larger than a layer.
    pub(crate) fn new(
        device: &'a dyn Device,
        tiers: &Arc<LowerTiers>,
        spec: &ModelSpec,
        storage: WeightStorage<'_>,
        training: Option<Training<'_, 'a>>,
    ) -> Result<Self, StepError> {
        let sharing = training.and_then(|training| training.sharing);
        // An adapter of the head is computed beside all of it.
        let modules = storage.adapters.map(AdapterLayout::modules).unwrap_or_default();
        let has_adapter = |p: &Parameter| {
            let own = |module: &&AdaptedModule| module.block == p.block && p.role == Role::LmHead;
            modules.iter().find(own).is_some_and(|m| m.parts.iter().any(|of| of.role() == p.role))
        };
        let goes_below =
            |block: BlockId| storage.offload.filter(|offload| !offload.residency.keeps(spec, block));
        let slots = storage.offload.filter(|_| comes_by_expert(spec, storage, sharing.is_some()));
        let by_expert = |p: &Parameter| slots.is_some() && is_matrix(p) && p.is_of_experts();
        let goes = |p: &Parameter| {
            let below = (sharing.is_some() || goes_below(p.block).is_some()) && is_matrix(p);
            by_expert(p) || (below && !(storage.trained && has_adapter(p)))
        };
        let resident = ResidentStore::allocate(device, spec, storage, &|p| !goes(p))?;
        let bytes = |p: &Parameter| (storage.types)(p).bytes_for(p.elements()).unwrap_or(0);
        let layer_bytes = spec.blocks().filter(|block| block.layer().is_some()).map(|block| {
            let of_layer = spec.block_parameters(block);
            of_layer.iter().filter(|p| is_matrix(p) && !by_expert(p)).map(bytes).sum::<u64>()
        });
        let layer_bytes = layer_bytes.max().unwrap_or(0);
        let (mut away, mut parcels) = (Vec::new(), FxHashMap::default());
        let tables_are_cut = spec.part.vocabulary.is_some();
        let (mut looked_up, mut shared) = (None, sharing.map(|sharing| Shared::new(sharing.communicator)));
        for block in spec.blocks() {
            let has_experts = block.layer().is_some_and(|layer| spec.experts_of(layer).is_some());
            let below = goes_below(block)
                .or_else(|| slots.filter(|_| has_experts))
                .map(|offload| WeightOffload { tier: offload.tier_of(spec, block), ..offload });
            if below.is_none() && sharing.is_none() {
                continue;
            }
            let in_files = below
                .and_then(|WeightOffload { tier, in_files, .. }| in_files.filter(|_| tier == Tier::Disk));
            device.enter(Phase::Setup, block.layer());
            tiers.enter(Phase::Setup, block.layer());
            let mut own = Vec::new();
            for parameter in spec.block_parameters(block).into_iter().filter(goes) {
                let dtype = (storage.types)(&parameter);
                let divisible =
                    dtype.has_rows() && parameter.columns().is_multiple_of(dtype.block_elements());
                let row_bytes = dtype.bytes_for(parameter.columns()).unwrap_or(0);
                let cut = training.map(|training| training.cut);
                let cut = cut.unwrap_or_else(|| Pieces::of_bytes(layer_bytes, row_bytes));
                let by_expert = by_expert(&parameter);
                let pieces = match by_expert {
                    true => {
                        let rows = |expert| parameter.rows_of_expert(expert);
                        (0..parameter.experts()).map(rows).collect()
                    }
                    _ if divisible && !has_adapter(&parameter) => cut.of(&parameter),
                    _ => std::iter::once(parameter.all_rows()).collect(),
                };
                let piece = |(number, rows): (u32, Range<u64>)| {
                    let shared =
                        sharing.map(|sharing| SharedMatrix::new(sharing, &parameter, (number, &rows), dtype));
                    let own = match (sharing, &shared) {
                        (Some(Sharing { communicator: ranks, .. }), Some(matrix)) => {
                            matrix.share(ranks.rank(), ranks.size())
                        }
                        _ => 0..Values::all(&parameter, &rows, dtype).bytes.end,
                    };
                    AwayPiece { rows, shared, own, contents: Contents::Homes(Vec::new()) }
                };
                let pieces = (0..).zip(pieces).map(piece).collect();
                let place = in_files.and_then(|files: &StoredWeights| files.get(&(block, parameter.role)));
                let in_file = place.filter(|place| place.dtype == dtype).cloned();
                if block == BlockId::Embedding && divisible && sharing.is_none() && !tables_are_cut {
                    looked_up = Some(away.len() + own.len());
                }
                own.push(AwayParameter { parameter, dtype, pieces, by_expert, in_file });
            }
            // Rows are all that inference needs of an embedding that is no head.
            let only_rows = block == BlockId::Embedding
                && looked_up.is_some()
                && !spec.tie_word_embeddings
                && !storage.trained;
            match below {
                None => own.iter_mut().try_for_each(|matrix| matrix.settle(device))?,
                Some(WeightOffload { tier, .. }) if only_rows => {
                    own.iter_mut().try_for_each(|matrix| matrix.lodge_alone(tiers, tier))?;
                }
                Some(WeightOffload { tier, .. }) => lodge(tiers, &mut own, tier, &mut parcels)?,
            }
            if let Some(shared) = &mut shared {
                share_out(shared, &own);
            }
            away.append(&mut own);
        }
        device.enter(Phase::Setup, None);
        let is_expert = |unit: &Unit| matches!(unit, Unit::Expert(..));
        let (of_experts, parcels) = parcels.into_iter().partition(|(unit, _)| is_expert(unit));
        let experts = match slots {
            Some(offload) => {
                let count = offload.residency.expert_slots();
                Some(Rc::new(ExpertSlots::new(device, tiers, of_experts, count)?))
            }
            None => None,
        };
        let buffers = training.map_or(Self::BUFFERS, |training| training.buffers);
        let pool = Parcels::of(device, tiers, parcels, buffers, "weights.staging")?;
        // Where nothing changes, a table of one piece comes with its block.
        let in_pieces = |away: &&AwayParameter| {
            let table = away.parameter.block.layer().is_none();
            table && (storage.trained || away.pieces.len() > 1)
        };
        let tables = away
            .iter()
            .filter(in_pieces)
            .map(|away| {
                let rows = away.pieces.iter().map(|piece| piece.rows.clone()).collect();
                (away.parameter.block, (away.parameter.role, rows))
            })
            .collect();
        let tiers = Arc::clone(tiers);
        Ok(WeightStore {
            device,
            tiers,
            resident,
            away,
            tables,
            looked_up,
            pool,
            experts,
            shared,
            ahead: None,
            tables_are_cut,
            products: None,
        })
    }

    /// The same of a rank that shares every product with others.
    pub fn sharing(self, products: Option<Rc<Products<'a>>>) -> Self {
        WeightStore { products: products.filter(|products| !products.shares_experts_alone()), ..self }
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
            master.load(device, tiers, Values::all(p, rows, DType::F32), fill)
        };
        // First what needs memory of its own on its way, while little of the arena has been touched.
        let resident = self.resident.parameters();
        for p in resident {
            for (rows, master) in masters(p).iter().filter(|(_, master)| in_homes(master)) {
                fill_master(p, rows, master, &mut fill)?;
            }
        }
        for away in &self.away {
            if away.is_loaded() {
                for (values, contents) in away.values() {
                    contents.load(device, tiers, values, &mut fill)?;
                }
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
            contents.load(device, tiers, Values::all(p, &p.all_rows(), weight.dtype()), &mut fill)?;
        }
        // What quantising and converting took of the heap counts against the arena, the rest of which is touched from here on.
        if !device.is_dry() {
            release_free_heap();
        }
        Ok(self.prepare()?)
    }

    /// Does once what adapters with lengths need of the weights, when all have their values.
    pub(crate) fn prepare(&mut self) -> Result<(), StepError> {
        self.for_each_with_lengths(BlockWeights::prepare)
    }

    /// Sets the lengths of rows to those that the weights have with their adapters: where DoRA begins.
    pub(crate) fn reset_magnitudes(&mut self) -> Result<(), StepError> {
        self.for_each_with_lengths(BlockWeights::reset_magnitudes)
    }

    fn for_each_with_lengths(
        &mut self,
        work: impl Fn(&BlockWeights, &dyn Device, Option<&Products<'_>>) -> Result<(), StepError>,
    ) -> Result<(), StepError> {
        let with_lengths = self.resident.blocks.values().filter(|weights| weights.has_lengths());
        let blocks: Vec<BlockId> = with_lengths.map(BlockWeights::block).collect();
        self.announce(blocks.iter().map(|block| Unit::of_matrices(*block, 0)))?;
        for block in blocks {
            self.device.enter(Phase::Setup, block.layer());
            let weights = self.gather(block)?;
            work(&weights, self.device, self.products.as_deref())?;
            drop(weights);
            self.release(Unit::of_matrices(block, 0), false);
        }
        Ok(())
    }

    /// Experts that come by themselves, where they do.
    pub(crate) fn expert_weights(&self) -> Option<Rc<dyn ExpertWeights + 'a>> {
        self.experts.clone().map(|experts| experts as Rc<dyn ExpertWeights + 'a>)
    }

    /// In a dry run: supposes from now on that tokens go to any experts alike.
    pub(crate) fn suppose_even_use(&self) {
        self.experts.iter().for_each(|experts| experts.suppose_even_use());
    }

    /// How often these were used, and read for it.
    pub(crate) fn expert_traffic(&self) -> Option<ExpertTraffic> {
        self.experts.as_ref().map(|experts| experts.traffic())
    }

    /// What it has in memory all the time.
    pub(crate) fn resident(&self) -> &ResidentStore {
        &self.resident
    }

    /// What lives on a lower tier, or is shared by ranks.
    pub(crate) fn away(&self) -> &[AwayParameter] {
        &self.away
    }

    /// Where this rank's share of a part of a weight is, where ranks share it.
    pub(crate) fn contents_of_part(&self, part: &Part) -> Option<Contents> {
        let away = self.away.iter().find(|away| away.parameter == part.parameter)?;
        away.pieces.get(part.piece as usize).map(|piece| piece.contents.clone())
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
        self.experts.iter().for_each(|experts| experts.hash_slots(hasher));
    }

    /// The units that will be gathered next, in order: they are brought ahead of their use. Nothing of before is in use any
    /// more.
    pub(crate) fn announce(&mut self, units: impl IntoIterator<Item = Unit>) -> Result<(), StepError> {
        // Left behind by a schedule that failed.
        self.ahead = None;
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
        let mut embedding = self.embedding_pieces().map(|(unit, _)| unit).collect::<Vec<_>>();
        embedding.extend(comes.then_some(whole));
        let pieces = self.tables.get(&head).map_or(1, |(_, pieces)| pieces.len() as u32);
        let head = (0..pieces).map(|piece| Unit::Piece(head, piece)).filter(|_| with_head);
        let layers = spec.layers().map(Unit::Layer);
        let next = embedding.first().copied().or_else(|| layers.clone().next());
        self.announce(embedding.into_iter().chain(layers).chain(head).chain(next))
    }

    /// Makes the block's weights available, but for a table that comes in pieces.
    pub(crate) fn gather(&mut self, block: BlockId) -> Result<BlockWeights, StepError> {
        let mut weights = self.resident.gather(block)?;
        if !self.tables.contains_key(&block) {
            weights.tensors.extend(self.bring(Unit::of_matrices(block, 0))?);
        }
        Ok(weights)
    }

    /// The matrices of a unit as a whole.
    fn bring(&mut self, unit: Unit) -> Result<Vec<(Role, Tensor)>, StepError> {
        if let Some(ahead) = self.ahead.take() {
            if ahead.unit != unit {
                return Err(StepError::Invariant {
                    what: "another unit was taken than the one gathered ahead",
                });
            }
            return ahead.arrived(self.device);
        }
        let brought = self.pool.gather(unit)?;
        match &self.shared {
            Some(shared) => shared.begin(self.device, unit, &brought)?.arrived(self.device),
            None => Ok(brought),
        }
    }

    /// Begins to make a unit whole, where ranks share it, while the one in use is worked on: the next one that was announced.
    pub(crate) fn gather_ahead(&mut self, unit: Unit) -> Result<(), StepError> {
        let Some(shared) = self.shared.as_ref().filter(|shared| shared.has_unit(unit)) else { return Ok(()) };
        let brought = self.pool.gather(unit)?;
        self.ahead = Some(shared.begin(self.device, unit, &brought)?);
        drop(brought);
        // What this rank has of it was copied.
        self.pool.release(unit, false);
        Ok(())
    }

    /// This rank's rows of the matrices of a unit, where ranks share them: what it updates. None of the others' come.
    pub(crate) fn gather_own(&mut self, unit: Unit) -> Result<BlockWeights, StepError> {
        let brought = self.pool.gather(unit)?;
        let own = self.shared.as_ref().map(|shared| shared.own_rows(unit, &brought));
        Ok(BlockWeights::new(unit.block(), own.transpose()?.unwrap_or_default()))
    }

    /// Whether each rank has its share of a weight.
    pub(crate) fn shares(&self, block: BlockId, role: Role) -> bool {
        self.shared.as_ref().is_some_and(|shared| shared.has(block, role))
    }

    /// Whether each rank has its share of the weight that a part is of.
    pub(crate) fn shares_part(&self, part: &Part) -> bool {
        self.shares(part.parameter.block, part.parameter.role)
    }

    /// Whether the weight that a part is of comes and goes.
    pub(crate) fn is_away(&self, part: &Part) -> bool {
        self.away.iter().any(|away| away.parameter == part.parameter)
    }

    /// The pieces in which the embedding's table comes to look tokens up, with their rows: where ranks share it, and where it is below
    /// the device and other ranks have the rest.
    pub(crate) fn embedding_pieces(&self) -> impl Iterator<Item = (Unit, &Range<u64>)> {
        let comes = self.shared.is_some() || self.tables_are_cut;
        let table = self.tables.get(&BlockId::Embedding).filter(|_| comes);
        let pieces = (0..).zip(table.into_iter().flat_map(|(_, pieces)| pieces));
        pieces.map(|(number, rows)| (Unit::Piece(BlockId::Embedding, number), rows))
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
        let found = self.bring(Unit::Piece(block, piece))?.into_iter().find(|(r, _)| *r == role);
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

/// Adds the matrices of a block to what ranks share.
fn share_out(shared: &mut Shared<'_>, matrices: &[AwayParameter]) {
    for matrix in matrices {
        for (number, piece) in (0..).zip(&matrix.pieces) {
            let Some(of_piece) = &piece.shared else { continue };
            let here = match &piece.contents {
                Contents::Device(shares) => shares.first().cloned(),
                Contents::Homes(_) => None,
            };
            shared.add(Unit::of_matrices(matrix.parameter.block, number), of_piece.clone(), here);
        }
    }
}

#[cfg(test)]
mod tests;
