//! Where a token stands in its sequence: rotary embeddings.

use super::Family;
use crate::Tensor;
use crate::check::Description;

/// What a position does to a row.
#[allow(missing_docs)]
#[derive(Clone, Copy, Debug)]
pub enum Position<'a> {
    /// Rotates pairs (i, i + R/2) of the first R values of every head of x `[N, heads * head_dim]` in place by the angle
    /// of its position: row n uses row `positions[n]` of cos and sin, both f32 `[P, R/2]`. `inverse` rotates back: it is
    /// the backward pass. A position outside the table is an error.
    Rope {
        x: &'a Tensor,
        positions: &'a Tensor,
        cos: &'a Tensor,
        sin: &'a Tensor,
        head_dim: u64,
        inverse: bool,
    },
}

impl<'a> Family<'a> for Position<'a> {
    fn describe(&self) -> Description<'a> {
        match *self {
            Position::Rope { x, positions, cos, sin, head_dim, .. } => Description::new("rope", [], [])
                .changing([x])
                .reading([positions, cos, sin])
                .floats([x])
                .u32_vector(positions, x.rows())
                .same_size(cos, [sin])
                .f32s([cos, sin])
                .heads(x, head_dim)
                .that(2 * cos.columns() <= head_dim, || {
                    format!("{cos:?} has more pairs than a head of {head_dim}")
                }),
        }
    }
}
