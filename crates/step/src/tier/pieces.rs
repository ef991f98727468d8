//! What comes and goes as one: a layer, or a piece of the rows of a table of the vocabulary, so that no vocabulary is too
//! large.

use std::ops::Range;

use plimsoll_device::PIECE_ROWS as ROWS;
use plimsoll_model::{BlockId, ModelSpec, Parameter, Role};

use crate::OptimizerKind;

/// What comes, is completed and is freed at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Unit {
    /// Everything of a layer.
    Layer(u32),
    /// Some rows of the table of the embedding or of the head.
    Piece(BlockId, u32),
    /// A matrix of one expert of a layer, where experts come by themselves.
    Expert(u32, u32, Role),
    /// What the embedding's or the head's block has beside its table: norms, learned positions, adapters. It never leaves the
    /// device.
    Rest(BlockId),
}

impl Unit {
    /// The unit of a block's matrices: a layer's, or a piece of the table.
    pub fn of_matrices(block: BlockId, piece: u32) -> Unit {
        match block {
            BlockId::Layer(layer) => Unit::Layer(layer),
            table => Unit::Piece(table, piece),
        }
    }

    /// The number of a piece of a table; 0 of anything else.
    pub fn piece(self) -> u32 {
        match self {
            Unit::Piece(_, piece) => piece,
            Unit::Layer(_) | Unit::Expert(..) | Unit::Rest(_) => 0,
        }
    }

    /// The block that it belongs to.
    pub fn block(self) -> BlockId {
        match self {
            Unit::Layer(layer) | Unit::Expert(layer, ..) => BlockId::Layer(layer),
            Unit::Piece(block, _) | Unit::Rest(block) => block,
        }
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
        let largest = layer.iter().filter(|p| p.shape.len() >= 2).map(Parameter::elements).max().unwrap_or(0);
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

/// Whether a parameter is large: a matrix of a layer, a stack of them, of adapters of experts too, or a table. The others stay where
/// they are.
pub(crate) fn is_matrix(parameter: &Parameter) -> bool {
    let small = match parameter.role {
        Role::PositionEmbedding => true,
        Role::Lora(..) => !parameter.is_of_experts(),
        role => role.is_small_matrix(),
    };
    parameter.shape.len() >= 2 && !parameter.role.kind().is_vector() && !small
}
