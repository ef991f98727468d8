//! What comes and goes as one: a layer's matrices, or a piece of the rows of a table of the vocabulary, so that no
//! vocabulary is too large.

use std::ops::Range;

use plimsoll_device::PIECE_ROWS as ROWS;
use plimsoll_model::{BlockId, ModelSpec, Parameter, Role};

use crate::OptimizerKind;

/// A layer, or one piece of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Unit {
    pub block: BlockId,
    /// 0 for a layer.
    pub piece: u32,
}

impl Unit {
    /// A layer, or the first piece of a table.
    pub fn whole(block: BlockId) -> Unit {
        Unit { block, piece: 0 }
    }
}

/// How the tables of the vocabulary are cut. It depends on the model and the optimizer's rule alone, so that everybody
/// cuts alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pieces {
    rows: u64,
}

impl Pieces {
    /// Pieces of a quarter of a layer's largest matrix, so that not even f32 states of a table need more room than 8-bit ones
    /// of a matrix, if the rule treats every element by itself or every run of neighbours; one piece where it has to see
    /// a whole table.
    pub fn new(spec: &ModelSpec, kind: &OptimizerKind) -> Pieces {
        if !kind.is_local() {
            return Pieces { rows: u64::MAX };
        }
        let layer = spec.block_parameters(BlockId::Layer(0));
        let largest = layer.iter().filter(|p| p.shape.len() == 2).map(Parameter::elements).max().unwrap_or(0);
        let rows = largest / 4 / spec.hidden_size.max(1) / ROWS * ROWS;
        Pieces { rows: rows.max(ROWS) }
    }

    /// Pieces of at most so many bytes, where as much as the least piece fits there.
    pub fn of_bytes(bytes: u64, row_bytes: u64) -> Pieces {
        // The last piece may have some rows more than the others.
        let rows = (bytes / row_bytes.max(1)).saturating_sub(ROWS) / ROWS * ROWS;
        Pieces { rows: rows.max(ROWS) }
    }

    /// The rows of each piece of a parameter; one piece for what is no table of the vocabulary.
    pub fn of(self, parameter: &Parameter) -> Vec<Range<u64>> {
        let rows = parameter.rows();
        let most = if parameter.is_table() { self.rows } else { u64::MAX };
        // A rest of a few rows goes with the piece before it.
        let count = (rows.saturating_add(most - ROWS.min(most)) / most).max(1);
        let end = |piece: u64| if piece == count { rows } else { piece * most };
        (0..count).map(|piece| end(piece)..end(piece + 1)).collect()
    }
}

/// Whether a parameter is large: a matrix of a layer or a table. The others stay where they are.
pub(crate) fn is_matrix(parameter: &Parameter) -> bool {
    let small = matches!(parameter.role, Role::PositionEmbedding | Role::Lora(..));
    parameter.shape.len() == 2 && !small
}
