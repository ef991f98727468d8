//! What is measured and updated at once: a parameter, or some rows of a table of the vocabulary. Tables are cut alike
//! wherever they live, so that no order depends on that.

use std::collections::HashMap;
use std::ops::Range;

use plimsoll_model::{BlockId, Parameter};

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
}

impl Part {
    /// Whether it is all of the parameter.
    pub fn is_whole(&self) -> bool {
        self.rows == self.parameter.all_rows()
    }

    /// Whether no further part of the parameter follows.
    pub fn is_last(&self) -> bool {
        self.rows.end == self.parameter.rows()
    }
}

/// All parts, by the unit that they come with.
#[derive(Debug, Default)]
pub(crate) struct Parts {
    units: HashMap<Unit, Vec<Part>>,
    /// Pieces of each table that is trained.
    pieces: HashMap<BlockId, u32>,
    count: u64,
}

impl Parts {
    /// Those of what is trained, which comes in the order of the blocks.
    pub fn new(trained: &[Parameter], cut: Pieces) -> Parts {
        let mut parts = Parts::default();
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
                let part = Part { parameter: parameter.clone(), piece, rows, norm_row: parts.count };
                parts.units.entry(unit).or_default().push(part);
                parts.count += 1;
            }
        }
        parts
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

    /// All parts of a block.
    pub fn of_block(&self, block: BlockId) -> impl Iterator<Item = &Part> {
        self.units_of(block).into_iter().flat_map(|unit| self.of(unit))
    }
}
