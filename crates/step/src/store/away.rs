//! Parameters that are not on the device as a whole all the time: where they are, and what travels together.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use plimsoll_device::{DType, Device};
use plimsoll_disk::{DiskError, Home, LowerTiers};
use plimsoll_memory::{Tag, Tier};
use plimsoll_model::{BlockId, Parameter, Role, StoredWeight};
use rustc_hash::FxHashMap;

use super::shared::SharedMatrix;
use crate::StepError;
use crate::tier::{Contents, HomePart, Parcel, Unit, Values};

/// A parameter that lives on a lower tier, or of which each rank has a share.
#[derive(Clone, Debug)]
pub(crate) struct AwayParameter {
    pub parameter: Parameter,
    pub dtype: DType,
    /// One for a matrix of a layer, or for each expert of a stack.
    pub pieces: Vec<AwayPiece>,
    /// Whether its pieces are experts that come by themselves.
    pub by_expert: bool,
    /// Where a file of the model's holds it, which is only read.
    pub in_file: Option<StoredWeight>,
}

/// Some rows that come as one.
#[derive(Clone, Debug)]
pub(crate) struct AwayPiece {
    pub rows: Range<u64>,
    /// How ranks share it, where they do.
    pub shared: Option<SharedMatrix>,
    /// Which of its bytes are here: all of them, or this rank's share.
    pub own: Range<u64>,
    /// Where these are.
    pub contents: Contents,
}

impl AwayParameter {
    /// What a piece travels with.
    fn unit(&self, number: u32) -> Unit {
        match (self.by_expert, self.parameter.block) {
            (true, BlockId::Layer(layer)) => Unit::Expert(layer, number, self.parameter.role),
            (_, block) => Unit::of_matrices(block, number),
        }
    }

    /// Where its bytes are, of those that this rank has.
    pub fn contents(&self) -> Contents {
        let of_pieces = self.pieces.iter().flat_map(|piece| match &piece.contents {
            Contents::Homes(parts) => parts.clone(),
            Contents::Device(_) => Vec::new(),
        });
        Contents::Homes(of_pieces.collect())
    }

    /// Whether it has to be loaded: what a file holds is there.
    pub fn is_loaded(&self) -> bool {
        self.in_file.is_none()
    }

    /// What its pieces hold, with where that is.
    pub fn values(&self) -> impl Iterator<Item = (Values<'_>, &Contents)> {
        let (p, dtype) = (&self.parameter, self.dtype);
        self.pieces.iter().filter(|piece| !piece.own.is_empty()).map(move |piece| {
            (Values { bytes: piece.own.clone(), ..Values::all(p, &piece.rows, dtype) }, &piece.contents)
        })
    }

    /// The bytes of some rows, among its own.
    pub fn bytes_of(&self, rows: &Range<u64>) -> Range<u64> {
        let byte = |row: u64| self.dtype.bytes_for(row * self.parameter.columns()).unwrap_or(0);
        byte(rows.start)..byte(rows.end)
    }

    /// The bytes of a piece in the file that holds it.
    fn stored(&self, piece: &AwayPiece) -> Option<(&Path, Range<u64>)> {
        let StoredWeight { path, bytes, .. } = self.in_file.as_ref()?;
        let first = bytes.start + self.bytes_of(&piece.rows).start;
        Some((path, first + piece.own.start..first + piece.own.end))
    }

    /// What a piece is in a parcel: its rows, or the bytes of a share.
    fn form(&self, piece: &AwayPiece) -> (DType, Vec<u64>) {
        match piece.shared {
            Some(_) => (DType::U8, vec![piece.own.end - piece.own.start]),
            None => (self.dtype, self.parameter.shape_of(&piece.rows)),
        }
    }

    /// Memory of the device for each of its shares.
    pub fn settle(&mut self, device: &dyn Device) -> Result<(), StepError> {
        let name = self.parameter.role.name();
        for piece in self.pieces.iter_mut().filter(|piece| !piece.own.is_empty()) {
            let share = device.alloc(DType::U8, &[piece.own.end - piece.own.start], Tag::Weights, name)?;
            piece.contents = Contents::Device(vec![share]);
        }
        Ok(())
    }

    /// A home for each piece by itself: in the file that holds it, or one that is taken.
    pub fn lodge_alone(&mut self, tiers: &LowerTiers, tier: Tier) -> Result<(), DiskError> {
        let home = |piece: &AwayPiece| {
            let bytes = piece.own.end - piece.own.start;
            if bytes == 0 {
                return Ok(Contents::Homes(Vec::new()));
            }
            let home = match self.stored(piece) {
                Some((path, bytes)) => tiers.adopt(path, bytes)?,
                None => tiers.take(tier, bytes, Tag::Weights, "weights")?,
            };
            Ok(Contents::Homes(vec![HomePart { home: Arc::new(home), start: 0, bytes }]))
        };
        let homes: Vec<Contents> = self.pieces.iter().map(home).collect::<Result<_, DiskError>>()?;
        self.pieces.iter_mut().zip(homes).for_each(|(piece, home)| piece.contents = home);
        Ok(())
    }

    /// Writes rows of it into `out`, one after the other.
    pub fn read_rows(&self, tiers: &LowerTiers, rows: &[u32], out: &mut [u8]) -> Result<(), DiskError> {
        let row_bytes = self.bytes_of(&(0..1)).end;
        let chunks = out.chunks_exact_mut(usize::try_from(row_bytes).unwrap_or(usize::MAX).max(1));
        let homes: Vec<(&Range<u64>, &HomePart)> = self
            .pieces
            .iter()
            .filter_map(|piece| match &piece.contents {
                Contents::Homes(parts) => Some((&piece.rows, parts.first()?)),
                Contents::Device(_) => None,
            })
            .collect();
        let mut parts: Vec<(&Home, u64, &mut [u8])> = Vec::with_capacity(rows.len());
        for (row, out) in rows.iter().map(|row| u64::from(*row)).zip(chunks) {
            let place = homes.iter().find(|(rows, _)| rows.contains(&row));
            let Some((piece, HomePart { home, start, bytes })) = place else {
                let needed = row.saturating_add(1).saturating_mul(row_bytes);
                return Err(DiskError::Buffer {
                    has: homes.iter().map(|(_, part)| part.bytes).sum(),
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

/// Homes for the matrices of a block, in parcels that travel together.
pub(super) fn lodge(
    tiers: &LowerTiers,
    matrices: &mut [AwayParameter],
    tier: Tier,
    parcels: &mut FxHashMap<Unit, Parcel<Role>>,
) -> Result<(), StepError> {
    let mut own: BTreeMap<Unit, Parcel<Role>> = BTreeMap::new();
    let (mut in_files, mut starts) = (Vec::new(), Vec::new());
    for matrix in matrices.iter() {
        let (role, mut of_matrix) = (matrix.parameter.role, Vec::new());
        for (number, piece) in (0..).zip(&matrix.pieces).filter(|(_, piece)| !piece.own.is_empty()) {
            let parcel = own.entry(matrix.unit(number)).or_insert_with(Parcel::new);
            let (dtype, shape) = matrix.form(piece);
            match matrix.stored(piece) {
                Some((path, bytes)) => in_files.push((path, bytes, matrix.unit(number), role, dtype, shape)),
                None => of_matrix.push((number, parcel.add(role, dtype, &shape))),
            }
        }
        starts.push(of_matrix);
    }
    in_files.sort_by_key(|(path, bytes, ..)| (*path, bytes.start));
    for (path, bytes, unit, role, dtype, shape) in in_files {
        own.entry(unit).or_insert_with(Parcel::new).add_stored(role, dtype, &shape, path, bytes);
    }
    for (unit, mut parcel) in own {
        parcel.settle(tiers, tier, Tag::Weights, "weights")?;
        parcel.is_of_expert = matches!(unit, Unit::Expert(..));
        parcels.insert(unit, parcel);
    }
    for (matrix, starts) in matrices.iter_mut().zip(starts) {
        if matrix.in_file.is_some() {
            matrix.lodge_alone(tiers, tier)?;
            continue;
        }
        for (number, start) in starts {
            let home = parcels.get(&matrix.unit(number)).and_then(Parcel::home);
            let home = home.ok_or(StepError::Invariant { what: "a parcel of weights has no home" })?;
            if let Some(piece) = matrix.pieces.get_mut(number as usize) {
                let bytes = piece.own.end - piece.own.start;
                let part = HomePart { home: Arc::clone(home), start, bytes };
                piece.contents = Contents::Homes(vec![part]);
            }
        }
    }
    Ok(())
}
