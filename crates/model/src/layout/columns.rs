//! Parts of a stored tensor that are columns of its matrices, beside each other or by turns.

use super::StoredTensor;
use crate::source::RowOrder;

/// Where the rows of a part lie: row r is column `first + r * step` of a matrix of `total` columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Columns {
    /// Number of the matrix.
    pub matrix: u64,
    /// Columns of the matrix.
    pub total: u64,
    /// The column of the first row.
    pub first: u64,
    /// Columns from a row to the next.
    pub step: u64,
    /// Rows of the part: columns of the matrix.
    pub rows: u64,
    /// Elements of a row: rows of the matrix.
    pub length: u64,
}

impl Columns {
    /// Elements of the whole matrix.
    pub fn matrix_elements(&self) -> u64 {
        self.total * self.length
    }

    /// Elements of the part.
    pub fn elements(&self) -> u64 {
        self.rows * self.length
    }
}

impl StoredTensor {
    /// Where each of its parts lies, if they are columns of matrices.
    pub fn columns_of_parts(&self) -> Option<Vec<Columns>> {
        let mut before = 0;
        match self.rows {
            RowOrder::Natural | RowOrder::Interleaved { .. } => None,
            RowOrder::Transposed { total, step, .. } => {
                let columns = self.parts.iter().map(|part| {
                    let (matrix, within) = (before / total.max(1), before % total.max(1));
                    before += part.count();
                    let first = if step > 1 { within / part.count().max(1) } else { within };
                    Columns {
                        matrix,
                        total,
                        first,
                        step,
                        rows: part.count(),
                        length: part.parameter.columns(),
                    }
                });
                Some(columns.collect())
            }
            // A row of as many elements as the parts have together.
            RowOrder::Alternating { of, .. } => {
                let columns = self.parts.iter().map(|part| {
                    let (matrix, first) = (before / of.max(1), before % of.max(1));
                    before += part.count();
                    let rows = part.parameter.columns();
                    Columns { matrix, total: of * rows, first, step: of, rows, length: 1 }
                });
                Some(columns.collect())
            }
        }
    }
}
