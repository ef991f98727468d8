//! Attention over keys and values that come a piece at a time: of a sequence that is visited in chunks, or of which other ranks
//! have parts. What is exact of it does not depend on how the keys are cut (Milakov and Gimelshein 2018; Liu et al. 2023).

use super::Family;
use crate::check::Description;
use crate::cost::product_of;
use crate::{AttentionShape, Compute, Cost, Tensor};

/// What the queries have of the pieces so far. Before the first one `most` is -inf, the others are 0.
#[allow(missing_docs)]
#[derive(Clone, Copy, Debug)]
pub struct Running<'a> {
    /// f32 `[batch * q_len, heads * D]`: values, weighted by exponentials of scores that are counted from the highest.
    pub sums: &'a Tensor,
    /// f32 `[batch, heads, q_len]`: the highest score.
    pub most: &'a Tensor,
    /// f32 `[batch, heads, q_len]`: the sum of the exponentials.
    pub total: &'a Tensor,
}

/// Which queries see which piece. Of `shape`, `kv_len` counts every position up to the last query, and `kv_capacity` the rows
/// of the piece of each sequence.
#[derive(Clone, Copy, Debug)]
pub struct KeyPiece {
    /// The position of the first key.
    pub first: u64,
    /// Queries, heads, masks.
    pub shape: AttentionShape,
}

/// Attention by pieces of the keys, forward and backward.
#[allow(missing_docs)]
#[derive(Clone, Copy, Debug)]
pub enum PiecedAttention<'a> {
    /// Adds what the queries see of a piece to what they have of the pieces before. q `[batch * q_len, heads * D]`, k and v
    /// `[batch * kv_capacity, kv_heads * D]`. `documents` as in [`Attention::Forward`](super::Attention::Forward). Pieces of
    /// whole tiles of 256 keys, from the first on, give the bits of the whole.
    Add {
        q: &'a Tensor,
        k: &'a Tensor,
        v: &'a Tensor,
        documents: Option<&'a Tensor>,
        running: Running<'a>,
        piece: KeyPiece,
        compute: Compute,
    },
    /// out = sums / total, lse = most + ln(total): what whole attention gives, when all pieces were added.
    Finish { running: Running<'a>, out: &'a Tensor, lse: &'a Tensor, shape: AttentionShape },
    /// delta f32 `[batch, heads, q_len]` = sum over D of dout * out.
    Deltas { out: &'a Tensor, dout: &'a Tensor, delta: &'a Tensor, shape: AttentionShape },
    /// dq, dk, dv += gradients of what the queries see of a piece; all three f32.
    Backward {
        q: &'a Tensor,
        k: &'a Tensor,
        v: &'a Tensor,
        documents: Option<&'a Tensor>,
        lse: &'a Tensor,
        delta: &'a Tensor,
        dout: &'a Tensor,
        dq: &'a Tensor,
        dk: &'a Tensor,
        dv: &'a Tensor,
        piece: KeyPiece,
        compute: Compute,
    },
}

impl KeyPiece {
    /// Number of (query, key) pairs that see each other, over all heads, where a sequence is one document.
    fn score_count(&self) -> u64 {
        let KeyPiece { first, shape } = *self;
        let (before, end) =
            (shape.kv_len.saturating_sub(shape.q_len), first.saturating_add(shape.kv_capacity));
        let pairs = match shape.window.is_none() && shape.block_sparse.is_none() {
            true => {
                // Queries within the piece see one key more each than the one before, those behind it all of its keys.
                let [rising, full] = [first, end].map(|position| position.clamp(before, shape.kv_len));
                let first_and_last = (rising + full + 1).saturating_sub(first.saturating_mul(2));
                let within = (full - rising).saturating_mul(first_and_last) / 2;
                within.saturating_add(product_of(&[shape.kv_len - full, shape.kv_capacity]))
            }
            false => (before..shape.kv_len).map(|position| self.seen_by(position)).sum(),
        };
        product_of(&[shape.batch, shape.heads, pairs])
    }

    /// How many keys of the piece a query sees.
    fn seen_by(&self, position: u64) -> u64 {
        let end = self.first.saturating_add(self.shape.kv_capacity);
        let within = |key: u64| key.clamp(self.first, end);
        self.shape.seen(position, 0).map(|seen| within(seen.end) - within(seen.start)).iter().sum()
    }
}

impl<'a> Family<'a> for PiecedAttention<'a> {
    fn describe(&self) -> Description<'a> {
        match *self {
            PiecedAttention::Add { q, k, v, documents, running, piece, .. } => {
                let Running { sums, most, total } = running;
                Description::new("attention_piece", [q, k, v], [])
                    .reading(documents)
                    .changing([sums, most, total])
                    .floats([q, k, v])
                    .pieced(q, [k, v], documents, piece)
                    .running(running, piece.shape)
            }
            PiecedAttention::Finish { running, out, lse, shape } => {
                let Running { sums, most, total } = running;
                Description::new("attention_finish", [sums, most, total], [out, lse])
                    .floats([out])
                    .same_size(sums, [out])
                    .running(running, shape)
                    .queries(shape)
                    .f32_vectors([lse], shape.batch * shape.heads * shape.q_len)
            }
            PiecedAttention::Deltas { out, dout, delta, shape } => {
                let columns = shape.heads * shape.head_dim;
                Description::new("attention_deltas", [out, dout], [delta])
                    .floats([out, dout])
                    .size(out, shape.batch * shape.q_len, columns)
                    .same_size(out, [dout])
                    .f32_vectors([delta], shape.batch * shape.heads * shape.q_len)
                    .queries(shape)
            }
            PiecedAttention::Backward { q, k, v, documents, lse, delta, dout, dq, dk, dv, piece, .. } => {
                let shape = piece.shape;
                Description::new("attention_piece_backward", [q, k, v, lse, delta, dout], [])
                    .reading(documents)
                    .changing([dq, dk, dv])
                    .floats([q, k, v, dout])
                    .pieced(q, [k, v], documents, piece)
                    .same_size(q, [dout, dq])
                    .same_size(k, [v, dk, dv])
                    .f32_vectors([lse, delta], shape.batch * shape.heads * shape.q_len)
                    .f32_vectors([dq], q.elements())
                    .f32_vectors([dk, dv], k.elements())
            }
        }
    }

    fn cost(&self, once: Cost) -> Cost {
        let products = |count: u64, piece: KeyPiece, compute| Cost {
            attention: Some((compute, product_of(&[2 * count, piece.score_count(), piece.shape.head_dim]))),
            exps: piece.score_count(),
            ..once
        };
        match *self {
            PiecedAttention::Add { piece, compute, .. } => products(2, piece, compute),
            PiecedAttention::Backward { piece, compute, .. } => products(5, piece, compute),
            PiecedAttention::Finish { .. } | PiecedAttention::Deltas { .. } => once,
        }
    }
}

impl Description<'_> {
    fn pieced(self, q: &Tensor, cached: [&Tensor; 2], documents: Option<&Tensor>, piece: KeyPiece) -> Self {
        let shape = piece.shape;
        let ends = piece.first.checked_add(shape.kv_capacity).is_some();
        self.that(ends, || format!("{piece:?} is impossible"))
            .queries(shape)
            .size(q, shape.batch * shape.q_len, shape.heads * shape.head_dim)
            .each(cached, |op, t| {
                op.size(t, shape.batch * shape.kv_capacity, shape.kv_heads * shape.head_dim)
            })
            .each(documents, |op, t| op.u32_vector(t, shape.batch * shape.q_len))
    }

    fn running(self, Running { sums, most, total }: Running<'_>, shape: AttentionShape) -> Self {
        let queries = shape.batch * shape.q_len;
        self.size(sums, queries, shape.heads * shape.head_dim)
            .f32_vectors([sums], queries * shape.heads * shape.head_dim)
            .f32_vectors([most, total], queries * shape.heads)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_are_counted_without_looking_at_each_query() {
        for (q_len, kv_len) in [(4, 4), (3, 10), (10, 10), (1, 7)] {
            for first in 0..12 {
                for kv_capacity in 0..9 {
                    let shape = AttentionShape {
                        batch: 2,
                        q_len,
                        kv_len,
                        kv_capacity,
                        heads: 3,
                        kv_heads: 1,
                        head_dim: 4,
                        scale: 1.0,
                        window: None,
                        block_sparse: None,
                        soft_cap: None,
                    };
                    let piece = KeyPiece { first, shape };
                    let pairs: u64 = (kv_len - q_len..kv_len).map(|position| piece.seen_by(position)).sum();
                    assert_eq!(piece.score_count(), 6 * pairs, "{piece:?}");
                }
            }
        }
    }
}
