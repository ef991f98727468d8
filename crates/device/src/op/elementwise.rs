//! Operations that take every element by itself.

use super::Family;
use crate::check::Description;
use crate::{DType, Tensor};

/// How an f32 result becomes a narrower type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rounding {
    /// To nearest, ties to even.
    Nearest,
    /// Up with the probability of what is cut off. Element i is rounded by a random number from the seed and `first + i`.
    Stochastic {
        /// Seed; the same seed gives the same bits.
        seed: u64,
        /// Place of the tensor's first element in what it is a piece of; 0 of a whole tensor.
        first: u64,
    },
}

/// An operation on every element by itself.
#[allow(missing_docs)]
#[derive(Clone, Copy, Debug)]
pub enum Elementwise<'a> {
    /// out = value
    Fill { out: &'a Tensor, value: f32 },
    /// out = x, converted; any plain types, integers only to themselves.
    Cast { x: &'a Tensor, out: &'a Tensor, rounding: Rounding },
    /// out = a + b. In place: out = a or out = b.
    Add { a: &'a Tensor, b: &'a Tensor, out: &'a Tensor },
    /// out += each of `terms` `[T, ..]` in turn, each sum in f32 and then rounded: stochastically, for term t by the seed
    /// `splitmix64(seed, number + t)`. `first` as in [`Rounding::Stochastic`].
    AccumulateAll { terms: &'a Tensor, out: &'a Tensor, seed: u64, number: u64, first: u64 },
    /// x *= factor
    Scale { x: &'a Tensor, factor: f32 },
    /// x *= factor, f32 `[1]`
    ScaleBy { x: &'a Tensor, factor: &'a Tensor },
    /// out (+)= x / (1 - probability) where an element is kept, 0 where it is dropped (Srivastava et al. 2014). Element i
    /// is dropped by a random number from the seed and `first + i`. In place: out = x.
    Dropout { x: &'a Tensor, out: &'a Tensor, probability: f32, seed: u64, first: u64, accumulate: bool },
}

impl<'a> Family<'a> for Elementwise<'a> {
    fn describe(&self) -> Description<'a> {
        match *self {
            Elementwise::Fill { out, .. } => Description::new("fill", [], [out]).floats([out]),
            Elementwise::Cast { x, out, .. } => {
                let integers = |t: &Tensor| matches!(t.dtype(), DType::U32 | DType::U8);
                let alike = x.dtype() == out.dtype() || !(integers(x) || integers(out));
                let plain = [x, out].iter().all(|t| t.dtype().is_float() || integers(t));
                Description::new("cast", [x], [out])
                    .same_size(x, [out])
                    .that(alike, || format!("{x:?} and {out:?}: integers are cast only to themselves"))
                    .that(plain, || format!("{x:?} to {out:?}: codes are not cast"))
            }
            Elementwise::Add { a, b, out } => Description::new("add", [a, b], [out])
                .in_place([(out, a), (out, b)])
                .floats([a, b, out])
                .same_size(a, [out])
                .same_size(b, [out]),
            Elementwise::AccumulateAll { terms, out, .. } => {
                let whole = out.elements() > 0 && terms.elements().is_multiple_of(out.elements());
                Description::new("accumulate_all", [terms], [])
                    .changing([out])
                    .floats([terms, out])
                    .that(whole, || format!("{terms:?} are not terms like {out:?}"))
            }
            Elementwise::Scale { x, .. } => Description::new("scale", [], []).changing([x]).floats([x]),
            Elementwise::ScaleBy { x, factor } => {
                Description::new("scale_by", [factor], []).changing([x]).floats([x]).f32_vectors([factor], 1)
            }
            Elementwise::Dropout { x, out, probability, .. } => Description::new("dropout", [x], [out])
                .in_place([(out, x)])
                .floats([x, out])
                .same_size(x, [out])
                .that((0.0..1.0).contains(&probability), || {
                    format!("{probability} is no probability below 1")
                }),
        }
    }
}
