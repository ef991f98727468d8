//! What is measured and updated at once: a parameter, or some rows of a table of the vocabulary. Tables are cut alike
//! wherever they live, so that no order depends on that.

use std::ops::Range;

use plimsoll_device::Tensor;
use plimsoll_model::{BlockId, ModelSpec, Parameter, Role};
use plimsoll_parallel::Shares;
use rustc_hash::FxHashMap;

use crate::OptimizerKind;
use crate::tier::{Pieces, Unit, is_matrix};

/// Rows of a parameter that is trained; all of them but for a table.
#[derive(Clone, Debug)]
pub(crate) struct Part {
    pub parameter: Parameter,
    /// 0 for what is no table.
    pub piece: u32,
    pub rows: Range<u64>,
    /// Where the squared norm of its gradient goes.
    pub norm_row: u64,
    /// The rank whose share is all of it, where the optimizer's rule has to see it whole.
    pub owner: Option<u32>,
    /// What it is to other ranks.
    pub standing: Standing,
}

/// What a part is to other ranks of the whole model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Standing {
    /// Whether it is a copy of another stage's, which measures and updates it.
    pub is_copy: bool,
    /// Whether a rank that shares products with this one has it too and measures it.
    pub is_measured_elsewhere: bool,
    /// Whether such ranks have a term of its gradient each.
    pub is_partial: bool,
}

impl Part {
    /// Whether it is all of the parameter.
    pub fn is_whole(&self) -> bool {
        self.rows == self.parameter.all_rows()
    }

    /// What tells it from all others.
    pub fn key(&self) -> (BlockId, Role, u32) {
        (self.parameter.block, self.parameter.role, self.piece)
    }

    /// The rows that a rank of `ranks` has as its share.
    pub fn share(&self, rank: u32, ranks: u32) -> Range<u64> {
        let Range { start, end } = self.rows;
        match self.owner {
            Some(owner) if owner == rank => start..end,
            Some(_) => start..start,
            None => {
                let share = Shares::new(end - start, self.parameter.columns(), ranks).of(rank);
                start + share.start..start + share.end
            }
        }
    }

    /// How many of so many ranks have a share of it.
    pub fn sharing(&self, ranks: u32) -> u32 {
        let rows = self.rows.end - self.rows.start;
        self.owner.map_or_else(|| Shares::new(rows, self.parameter.columns(), ranks).filled(), |_| 1)
    }

    /// Some of its rows in a tensor that holds all of them; `None` where there are none.
    pub fn view(&self, tensor: &Tensor, rows: &Range<u64>) -> Option<Tensor> {
        if *rows == self.rows {
            return Some(tensor.clone());
        }
        let all = self.rows.end - self.rows.start;
        let within = rows.start.checked_sub(self.rows.start)?..rows.end.checked_sub(self.rows.start)?;
        let matrix = tensor.reshape(&[all, self.parameter.columns()])?;
        matrix.slice_rows(within).filter(|rows| rows.elements() > 0)
    }

    /// Some of its rows, as a part.
    pub fn of_rows(&self, rows: Range<u64>) -> Part {
        Part { rows, ..self.clone() }
    }

    /// Whether this rank takes the norm of its gradient.
    pub fn is_measured(&self) -> bool {
        !self.standing.is_copy && !self.standing.is_measured_elsewhere
    }

    /// Whether no further part of the parameter follows.
    pub fn is_last(&self) -> bool {
        self.rows.end == self.parameter.rows()
    }
}

/// All parts, by the unit that they come with.
#[derive(Debug, Default)]
pub(crate) struct Parts {
    units: FxHashMap<Unit, Vec<Part>>,
    /// Pieces of each table that is trained.
    pieces: FxHashMap<BlockId, u32>,
    count: u64,
}

impl Parts {
    /// Those of what is trained, which comes in the order of the blocks. Where the rule has to see a parameter whole, the ranks
    /// take parameters in turn, whoever has the fewest elements so far.
    pub fn new(trained: &[Parameter], cut: Pieces, kind: &OptimizerKind, ranks: u32) -> Parts {
        Parts::standing(trained, cut, kind, ranks, &|_| Standing::default())
    }

    /// The same where other ranks have the rest of the model.
    pub fn standing(
        trained: &[Parameter],
        cut: Pieces,
        kind: &OptimizerKind,
        ranks: u32,
        standing: &dyn Fn(&Parameter) -> Standing,
    ) -> Parts {
        let mut parts = Parts::default();
        let mut taken = vec![0; ranks as usize];
        for parameter in trained {
            for (piece, rows) in (0..).zip(cut.of(parameter)) {
                let block = parameter.block;
                let in_layer = matches!(block, BlockId::Layer(_));
                let is_table = !in_layer && is_matrix(parameter);
                let unit = match in_layer || is_table {
                    true => Unit::of_matrices(block, piece),
                    false => Unit::Rest(block),
                };
                if is_table {
                    parts.pieces.insert(block, piece + 1);
                }
                let mut owner = None;
                let standing = standing(parameter);
                if ranks > 1 && !kind.takes_rows(parameter) && standing.is_copy {
                    // That of the original, which is the first of its stage.
                    owner = Some(0);
                } else if ranks > 1 && !kind.takes_rows(parameter) {
                    let least = taken.iter_mut().zip(0..).min_by_key(|(taken, rank)| (**taken, *rank));
                    owner = least.map(|(taken, rank)| {
                        *taken += parameter.elements();
                        rank
                    });
                }
                let norm_row = parts.count;
                let part = Part { parameter: parameter.clone(), piece, rows, norm_row, owner, standing };
                parts.count += u64::from(part.is_measured());
                parts.units.entry(unit).or_default().push(part);
            }
        }
        parts
    }

    /// Those that are measured here, of each run of a model's layers and what comes before or behind it.
    pub fn by_run(&self, spec: &ModelSpec) -> Vec<u64> {
        let runs = spec.runs();
        let mut counts = vec![0; runs.len()];
        for block in spec.blocks() {
            let run = match block {
                BlockId::Embedding => Some(0),
                BlockId::Head => runs.len().checked_sub(1),
                BlockId::Layer(layer) => runs.iter().position(|run| run.contains(&layer)),
            };
            if let Some(count) = run.and_then(|run| counts.get_mut(run)) {
                *count += self.of_block(block).filter(|part| part.is_measured()).count() as u64;
            }
        }
        counts
    }

    /// The number of all.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Those of a unit; none where nothing of it is trained.
    pub fn of(&self, unit: Unit) -> &[Part] {
        self.units.get(&unit).map_or(&[], Vec::as_slice)
    }

    /// Pieces of a block's table; none where it is not trained, or the block has none.
    pub fn pieces(&self, block: BlockId) -> u32 {
        self.pieces.get(&block).copied().unwrap_or(0)
    }

    /// The units of a block of which anything is trained, the pieces of its table first.
    pub fn units_of(&self, block: BlockId) -> Vec<Unit> {
        let pieces = (0..self.pieces(block)).map(|piece| Unit::Piece(block, piece));
        let whole = match block {
            BlockId::Layer(layer) => Unit::Layer(layer),
            table => Unit::Rest(table),
        };
        pieces.chain([whole]).filter(|unit| self.units.contains_key(unit)).collect()
    }

    /// Whether anything of a unit is trained that may live below the device.
    pub fn changes_matrices(&self, unit: Unit) -> bool {
        self.of(unit).iter().any(|part| is_matrix(&part.parameter))
    }

    /// Whether a unit is a copy of another stage's.
    pub fn is_copy(&self, unit: Unit) -> bool {
        self.of(unit).iter().any(|part| part.standing.is_copy)
    }

    /// Whether ranks that share products have terms of a unit's gradients.
    pub fn is_partial(&self, unit: Unit) -> bool {
        self.of(unit).iter().any(|part| part.standing.is_partial)
    }

    /// Those of a parameter, in the order of their rows.
    pub fn of_parameter<'p>(&'p self, parameter: &'p Parameter) -> impl Iterator<Item = &'p Part> {
        self.of_block(parameter.block).filter(|part| part.parameter.role == parameter.role)
    }

    /// All parts of a block.
    pub fn of_block(&self, block: BlockId) -> impl Iterator<Item = &Part> {
        self.units_of(block).into_iter().flat_map(|unit| self.of(unit))
    }
}
