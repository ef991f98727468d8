//! Biases of experts behind weights: what a row of an expert's output gets is the bias of its expert times the weight of its place.

use super::Family;
use crate::check::Description;
use crate::{Cost, Tensor};

/// Biases of groups of rows, weighted row by row. Rows `offsets[e]..offsets[e + 1]` are of group e; offsets u32 `[E + 1]`, the first 0.
/// The weight of row r is `factors[sources[r]]`; factors f32, sources u32 `[R]`. Rows behind the last have no bias.
#[allow(missing_docs)]
#[derive(Clone, Copy, Debug)]
pub enum WeightedBias<'a> {
    /// `out[r] += factors[sources[r]] * bias[e]`; out `[R, O]`, bias `[E, O]`.
    Add { bias: &'a Tensor, factors: &'a Tensor, sources: &'a Tensor, offsets: &'a Tensor, out: &'a Tensor },
    /// `dbias[e]` (+)= the sum over the rows of e, in order, of `factors[sources[r]] * dout[r]`; dout `[R, O]`.
    Backward {
        dout: &'a Tensor,
        factors: &'a Tensor,
        sources: &'a Tensor,
        offsets: &'a Tensor,
        dbias: &'a Tensor,
        accumulate: bool,
    },
    /// `dfactors[p]` += the dot product of `dout[places[p]]` and the bias of that row's group, of places that have a row in one; dfactors
    /// f32 and places u32, as many.
    FactorsBackward {
        dout: &'a Tensor,
        bias: &'a Tensor,
        places: &'a Tensor,
        offsets: &'a Tensor,
        dfactors: &'a Tensor,
    },
}

impl<'a> Family<'a> for WeightedBias<'a> {
    fn describe(&self) -> Description<'a> {
        match *self {
            WeightedBias::Add { bias, factors, sources, offsets, out } => {
                Description::new("weighted_bias", [bias, factors, sources, offsets], [])
                    .changing([out])
                    .floats([bias, out])
                    .f32s([factors])
                    .u32_vector(sources, out.rows())
                    .biases(bias, offsets, out)
            }
            WeightedBias::Backward { dout, factors, sources, offsets, dbias, .. } => {
                Description::new("weighted_bias_backward", [dout, factors, sources, offsets], [dbias])
                    .floats([dout, dbias])
                    .f32s([factors])
                    .u32_vector(sources, dout.rows())
                    .biases(dbias, offsets, dout)
            }
            WeightedBias::FactorsBackward { dout, bias, places, offsets, dfactors } => {
                Description::new("bias_factors_backward", [dout, bias, places, offsets], [])
                    .changing([dfactors])
                    .floats([dout, bias])
                    .f32s([dfactors])
                    .u32(places)
                    .that(places.elements() == dfactors.elements(), || {
                        format!("{dfactors:?} are not as many as {places:?}")
                    })
                    .biases(bias, offsets, dout)
            }
        }
    }

    fn cost(&self, once: Cost) -> Cost {
        once
    }
}

impl Description<'_> {
    /// A bias for each group of rows.
    fn biases(self, bias: &Tensor, offsets: &Tensor, rows: &Tensor) -> Self {
        let groups = offsets.elements().saturating_sub(1);
        self.u32(offsets).that(groups > 0 && bias.elements() == groups * rows.columns(), || {
            format!("{bias:?} is not a bias of {rows:?} for each of {groups} groups")
        })
    }
}
