//! Sinks of attention (Xiao et al. 2023; as logits that are learned: gpt-oss): each head has one more score, which takes part in
//! the softmax and has no value. What attention without sinks gives is all that they need: the rest of the weights is scaled.

use super::Family;
use crate::check::Description;
use crate::{AttentionShape, Cost, Tensor};

/// Sinks after attention of any kind, and their gradient. Of the shape, batch, queries and heads count.
#[allow(missing_docs)]
#[derive(Clone, Copy, Debug)]
pub enum Sink<'a> {
    /// `out *= sigmoid(lse - sink)`, `lse = ln(e^lse + e^sink)`: attention of the same scores with a sink for each head. out `[batch *
    /// q_len, heads * D]`, lse f32 `[batch, heads, q_len]`, sinks `[heads]`. `probabilities` f32 `[batch, heads, q_len, kv_len]` are
    /// scaled likewise. The backward pass of attention is right for what comes out as it is.
    Apply {
        sinks: &'a Tensor,
        out: &'a Tensor,
        lse: &'a Tensor,
        probabilities: Option<&'a Tensor>,
        shape: AttentionShape,
    },
    /// dsinks (+)= -sum over the queries of `e^(sink - lse) * (dout . out)`; out and lse as [`Sink::Apply`] leaves them.
    Backward {
        sinks: &'a Tensor,
        out: &'a Tensor,
        lse: &'a Tensor,
        dout: &'a Tensor,
        dsinks: &'a Tensor,
        accumulate: bool,
        shape: AttentionShape,
    },
}

impl<'a> Family<'a> for Sink<'a> {
    fn describe(&self) -> Description<'a> {
        match *self {
            Sink::Apply { sinks, out, lse, probabilities, shape } => {
                let weights = shape.batch * shape.heads * shape.q_len * shape.kv_len;
                Description::new("attention_sinks", [sinks], [])
                    .changing([out, lse])
                    .changing(probabilities)
                    .sinks(sinks, out, lse, shape)
                    .f32_vectors(probabilities, weights)
            }
            Sink::Backward { sinks, out, lse, dout, dsinks, shape, .. } => {
                Description::new("attention_sinks_backward", [sinks, out, lse, dout], [dsinks])
                    .sinks(sinks, out, lse, shape)
                    .floats([dout, dsinks])
                    .same_size(out, [dout])
                    .vectors([dsinks], shape.heads)
            }
        }
    }

    fn cost(&self, once: Cost) -> Cost {
        let (Sink::Apply { lse, .. } | Sink::Backward { lse, .. }) = *self;
        Cost { exps: lse.elements(), ..once }
    }
}

impl Description<'_> {
    fn sinks(self, sinks: &Tensor, out: &Tensor, lse: &Tensor, shape: AttentionShape) -> Self {
        self.queries(shape)
            .floats([sinks, out])
            .vectors([sinks], shape.heads)
            .size(out, shape.batch * shape.q_len, shape.heads * shape.head_dim)
            .f32_vectors([lse], shape.batch * shape.heads * shape.q_len)
    }
}
