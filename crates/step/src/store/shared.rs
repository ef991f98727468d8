//! Matrices of which each rank has a share (stage 3 of ZeRO, Rajbhandari et al. 2020): where the shares begin and end, and how
//! a whole comes together for as long as a step works with it.

use std::ops::Range;
use std::rc::Rc;

use plimsoll_device::{Collective, Communicated, DType, Device, DeviceExt, Elementwise, Rounding, Tensor};
use plimsoll_memory::Tag;
use plimsoll_model::{BlockId, Parameter, Role};
use plimsoll_parallel::{Communicator, Exchange, Shares, Span, Ticket};
use rustc_hash::FxHashMap;

use crate::StepError;
use crate::tier::Unit;
use crate::trainer::{Part, Parts};

/// How ranks share out the matrices of a model.
#[derive(Clone, Copy)]
pub(crate) struct Sharing<'s, 'a> {
    pub communicator: &'s Rc<dyn Communicator + 'a>,
    /// What is trained: a rank has the rows that it updates.
    pub parts: &'s Parts,
}

/// A matrix, or a piece of a table, of which each rank has some bytes.
#[derive(Clone, Debug)]
pub(crate) struct SharedMatrix {
    role: Role,
    dtype: DType,
    shape: Vec<u64>,
    bytes: u64,
    /// What it is to the optimizer, if it is trained.
    part: Option<Part>,
}

impl SharedMatrix {
    /// Some rows of a parameter, which are one of its pieces.
    pub fn new(
        sharing: Sharing<'_, '_>,
        p: &Parameter,
        (number, rows): (u32, &Range<u64>),
        dtype: DType,
    ) -> SharedMatrix {
        let shape = p.shape_of(rows);
        let bytes = dtype.bytes_for(shape.iter().product()).unwrap_or(0);
        let unit = Unit::of_matrices(p.block, number);
        let part = sharing.parts.of(unit).iter().find(|part| part.parameter.role == p.role).cloned();
        SharedMatrix { role: p.role, dtype, shape, bytes, part }
    }

    /// The bytes that a rank has: the rows that it updates; of a matrix that is frozen, as many as any other.
    pub fn share(&self, rank: u32, ranks: u32) -> Range<u64> {
        let Some(part) = &self.part else { return Shares::new(self.bytes, 1, ranks).of(rank) };
        let rows = part.share(rank, ranks);
        let byte =
            |row| self.dtype.bytes_for((row - part.rows.start) * part.parameter.columns()).unwrap_or(0);
        byte(rows.start)..byte(rows.end)
    }
}

/// The matrices of which each rank has a share, by the unit in which they come.
pub(super) struct Shared<'a> {
    communicator: Rc<dyn Communicator + 'a>,
    units: FxHashMap<Unit, Vec<SharedMatrix>>,
    /// This rank's shares that are on the device all the time.
    here: FxHashMap<Unit, Vec<(Role, Tensor)>>,
}

impl<'a> Shared<'a> {
    pub fn new(communicator: &Rc<dyn Communicator + 'a>) -> Self {
        let communicator = Rc::clone(communicator);
        Shared { communicator, units: FxHashMap::default(), here: FxHashMap::default() }
    }

    /// Adds a matrix to a unit, with this rank's share where that is on the device.
    pub fn add(&mut self, unit: Unit, matrix: SharedMatrix, here: Option<Tensor>) {
        let role = matrix.role;
        self.units.entry(unit).or_default().push(matrix);
        self.here.entry(unit).or_default().extend(here.map(|share| (role, share)));
    }

    /// Whether a block's matrix is shared.
    pub fn has(&self, block: BlockId, role: Role) -> bool {
        let unit = Unit::of_matrices(block, 0);
        self.units.get(&unit).is_some_and(|all| all.iter().any(|matrix| matrix.role == role))
    }

    /// This rank's share of a matrix, which was brought or is here: its bytes.
    fn own_bytes<'t>(
        &'t self,
        unit: Unit,
        brought: &'t [(Role, Tensor)],
        matrix: &SharedMatrix,
    ) -> Option<&'t Tensor> {
        let here = self.here.get(&unit).into_iter().flatten();
        brought.iter().chain(here).find(|(role, _)| *role == matrix.role).map(|(_, share)| share)
    }

    /// This rank's rows of the matrices of a unit that are trained.
    pub fn own_rows(&self, unit: Unit, brought: &[(Role, Tensor)]) -> Result<Vec<(Role, Tensor)>, StepError> {
        let rank = (self.communicator.rank(), self.communicator.size());
        let mut all = Vec::new();
        for matrix in self.units.get(&unit).into_iter().flatten() {
            let Some(part) = &matrix.part else { continue };
            let Some(share) = self.own_bytes(unit, brought, matrix) else { continue };
            let rows = part.share(rank.0, rank.1);
            let shape = part.parameter.shape_of(&rows);
            let what = "a rank's share of a weight is not the rows that it updates";
            let own = share.view(0, matrix.dtype, &shape).ok_or(StepError::Invariant { what })?;
            all.push((matrix.role, own));
        }
        Ok(all)
    }

    /// Whether ranks have shares of anything of a unit.
    pub fn has_unit(&self, unit: Unit) -> bool {
        self.units.contains_key(&unit)
    }

    /// Begins to make the matrices of a unit whole, in memory that is given back with them: every rank brings its share. All ranks call
    /// it for the same units in the same order.
    pub fn begin(
        &self,
        device: &dyn Device,
        unit: Unit,
        brought: &[(Role, Tensor)],
    ) -> Result<Gathering, StepError> {
        let (ranks, mut matrices) = (&*self.communicator, Vec::new());
        for matrix in self.units.get(&unit).into_iter().flatten() {
            let bytes = device.alloc(DType::U8, &[matrix.bytes], Tag::Communication, "weights.gathered")?;
            let span = |rank| {
                let bytes = matrix.share(rank, ranks.size());
                (!bytes.is_empty()).then_some(Span { buffer: 0, bytes })
            };
            let own = span(ranks.rank()).map(|own| own.bytes);
            let mut sent = Communicated::default();
            if let Some(Range { start, end }) = own.clone() {
                let (size, others) = (end - start, u64::from(ranks.size().saturating_sub(1)));
                sent = Communicated::of_many(Collective::AllGather, size * others, others);
                let out = bytes.view(start, DType::U8, &[size]);
                if let (Some(x), Some(out)) = (self.own_bytes(unit, brought, matrix), out) {
                    device.run(Elementwise::Cast { x, out: &out, rounding: Rounding::Nearest })?;
                }
            }
            let send = |_| own.clone().map(|bytes| Span { buffer: 0, bytes });
            let (within, buffers) = (Collective::AllGather, vec![bytes]);
            let exchange = Exchange { within, sent, buffers, send: &send, receive: &span };
            let ticket = ranks.begin(device, exchange)?;
            matrices.push(Arriving {
                role: matrix.role,
                dtype: matrix.dtype,
                shape: matrix.shape.clone(),
                ticket,
            });
        }
        Ok(Gathering { unit, matrices })
    }
}

/// A unit of which the other ranks' shares are on their way.
pub(super) struct Gathering {
    pub unit: Unit,
    matrices: Vec<Arriving>,
}

struct Arriving {
    role: Role,
    dtype: DType,
    shape: Vec<u64>,
    ticket: Ticket,
}

impl Gathering {
    /// Waits until all of it is there.
    pub fn arrived(self, device: &dyn Device) -> Result<Vec<(Role, Tensor)>, StepError> {
        let what = "a gathered weight is no tensor of its type";
        let whole = |Arriving { role, dtype, shape, ticket }: Arriving| {
            let bytes = ticket.wait(device)?;
            let whole = bytes.first().and_then(|bytes| bytes.view(0, dtype, &shape));
            Ok((role, whole.ok_or(StepError::Invariant { what })?))
        };
        self.matrices.into_iter().map(whole).collect()
    }
}
