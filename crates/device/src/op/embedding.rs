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
                let whole_blocks = table.columns().is_multiple_of(table.dtype().block_elements());
                Description::new("embedding", [tokens, table], [out])
                    .u32(tokens)
                    .weight(table)
                    .that(table.dtype().has_rows() && whole_blocks, || {
                        format!("{table:?}: rows cannot be read one by one")
                    })
                    .floats([out])
                    .size(out, tokens.elements(), table.columns())
            }
            Embedding::Backward { tokens, dout, dtable, first_row, .. } => {
                let end = first_row.checked_add(dtable.rows());
                Description::new("embedding_backward", [tokens, dout], [dtable])
                    .u32(tokens)
                    .that(end.is_some_and(|end| end <= u64::from(u32::MAX) + 1), || {
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
        let (Embedding::Lookup { tokens, out: rows, .. } | Embedding::Backward { tokens, dout: rows, .. }) =
            *self;
        Cost { bytes: tokens.bytes() + 2 * rows.bytes(), ..once }
    }
}
