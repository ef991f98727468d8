//! Rows of a table, looked up by token.

use super::{Family, Rounding};
use crate::check::Description;
use crate::{Cost, Tensor};

/// An embedding's rows, or their gradient.
#[allow(missing_docs)]
#[derive(Clone, Copy, Debug)]
pub enum Embedding<'a> {
    /// `out[n] = table[tokens[n]]`; tokens u32 `[N]`, table `[V, H]`, out `[N, H]`. A token outside the table is an error.
    Lookup { tokens: &'a Tensor, table: &'a Tensor, out: &'a Tensor },
    /// The same with some rows of a table, those from `first_row` on: rows of out whose tokens are others stay as they are.
    LookupPiece { tokens: &'a Tensor, table: &'a Tensor, first_row: u64, out: &'a Tensor },
    /// `dtable[tokens[n] - first_row] += dout[n]`, in token order; `rounding` is that of a narrow dtable's sums. dtable are
    /// the table's rows from `first_row` on; tokens of other rows are left out.
    Backward { tokens: &'a Tensor, dout: &'a Tensor, dtable: &'a Tensor, first_row: u64, rounding: Rounding },
}

/// Bytes of what the places of a token are sorted by.
const KEY_BYTES: u64 = size_of::<u64>() as u64;

impl<'a> Family<'a> for Embedding<'a> {
    fn describe(&self) -> Description<'a> {
        match *self {
            Embedding::Lookup { tokens, table, out } => {
                looked_up(Description::new("embedding", [tokens, table], [out]), tokens, table, out)
            }
            Embedding::LookupPiece { tokens, table, first_row, out } => {
                let described = Description::new("embedding_piece", [tokens, table], []).changing([out]);
                looked_up(described, tokens, table, out).that(rows_of_tokens(first_row, table), || {
                    format!("{table:?}: from row {first_row} on there are rows that no token can have")
                })
            }
            Embedding::Backward { tokens, dout, dtable, first_row, .. } => {
                Description::new("embedding_backward", [tokens, dout], [dtable])
                    .u32(tokens)
                    .that(rows_of_tokens(first_row, dtable), || {
                        format!("{dtable:?}: from row {first_row} on there are rows that no token can have")
                    })
                    .floats([dtable, dout])
                    .size(dout, tokens.elements(), dtable.columns())
                    .shared(tokens.elements().saturating_mul(KEY_BYTES))
            }
        }
    }

    /// Only the looked-up rows of the table move.
    fn cost(&self, once: Cost) -> Cost {
        let (tokens, rows) = match *self {
            Embedding::Lookup { tokens, out, .. } => (tokens, out.bytes()),
            // How many of the tokens are the piece's is not known.
            Embedding::LookupPiece { tokens, table, out, .. } => (tokens, out.bytes().min(table.bytes())),
            Embedding::Backward { tokens, dout, .. } => (tokens, dout.bytes()),
        };
        Cost { bytes: tokens.bytes() + 2 * rows, conversions: 0, ..once }
    }
}

fn looked_up<'a>(
    described: Description<'a>,
    tokens: &'a Tensor,
    table: &'a Tensor,
    out: &'a Tensor,
) -> Description<'a> {
    let whole_blocks = table.columns().is_multiple_of(table.dtype().block_elements());
    described
        .u32(tokens)
        .weight(table)
        .that(table.dtype().has_rows() && whole_blocks, || {
            format!("{table:?}: rows cannot be read one by one")
        })
        .floats([out])
        .size(out, tokens.elements(), table.columns())
}

/// Whether tokens can have the rows from a first one on.
fn rows_of_tokens(first_row: u64, table: &Tensor) -> bool {
    first_row.checked_add(table.rows()).is_some_and(|end| end <= u64::from(u32::MAX) + 1)
}
