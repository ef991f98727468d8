//! Where a token stands in its sequence: rotary embeddings.

use super::Family;
use crate::Tensor;
use crate::check::Description;

/// Which values of heads are rotated, R of them, and in which pairs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RotatedHeads {
    /// Width of a head.
    pub dim: u64,
    /// The first value that is rotated.
    pub first: u64,
    /// Whether value `2 i` is paired with `2 i + 1` (DeepSeek-V2 and V3), not value `i` with `i + R/2`.
    pub interleaved: bool,
}

impl RotatedHeads {
    /// Heads whose first values are rotated, each with the one half of them behind it.
    pub const fn from_first(dim: u64) -> RotatedHeads {
        RotatedHeads { dim, first: 0, interleaved: false }
    }
}

/// What a position does to a row.
#[allow(missing_docs)]
#[derive(Clone, Copy, Debug)]
pub enum Position<'a> {
    /// Rotates pairs of R values of every head of x `[N, heads * D]` in place by the angle of its position: row n uses row
    /// `positions[n]` of cos and sin, both f32 `[P, R/2]`. `inverse` rotates back: it is the backward pass. A position outside the
    /// table is an error.
    Rope {
        x: &'a Tensor,
        positions: &'a Tensor,
        cos: &'a Tensor,
        sin: &'a Tensor,
        heads: RotatedHeads,
        inverse: bool,
    },
}

impl<'a> Family<'a> for Position<'a> {
    fn describe(&self) -> Description<'a> {
        match *self {
            Position::Rope { x, positions, cos, sin, heads, .. } => Description::new("rope", [], [])
                .changing([x])
                .reading([positions, cos, sin])
                .floats([x])
                .u32_vector(positions, x.rows())
                .same_size(cos, [sin])
                .f32s([cos, sin])
                .heads(x, heads.dim)
                .that(heads.first.saturating_add(2 * cos.columns()) <= heads.dim, || match heads.first {
                    0 => format!("{cos:?} has more pairs than a head of {}", heads.dim),
                    first => format!("{cos:?} has more pairs than a head of {} from {first} on", heads.dim),
                }),
        }
    }
}
