//! Attention over keys and values that come a piece at a time: of a sequence that is visited in chunks, or of which other ranks
//! have parts. What is exact of it does not depend on how the keys are cut (Milakov and Gimelshein 2018; Liu et al. 2023).

use super::{Family, MAX_HEAD_DIM};
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
        let pairs = match shape.window.is_none() && shape.block_sparse.is_none() && end <= before {
            true => product_of(&[shape.q_len, shape.kv_capacity]),
            false => {
                let of = |position| {
                    let within = |key: u64| key.clamp(first, end);
                    shape
                        .seen(position, 0)
                        .map(|seen| within(seen.end) - within(seen.start))
                        .iter()
                        .sum::<u64>()
                };
                (before..shape.kv_len).map(of).sum()
            }
        };
        product_of(&[shape.batch, shape.heads, pairs])
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
        let possible = piece.first.checked_add(shape.kv_capacity).is_some()
            && shape.window != Some(0)
            && shape.block_sparse.is_none_or(|sparse| sparse.block > 0 && sparse.local_blocks > 0)
            && shape.soft_cap.is_none_or(|cap| cap > 0.0);
        self.that(possible, || format!("{piece:?} is impossible"))
            .queries(shape)
            .size(q, shape.batch * shape.q_len, shape.heads * shape.head_dim)
            .each(cached, |op, t| {
                op.size(t, shape.batch * shape.kv_capacity, shape.kv_heads * shape.head_dim)
            })
            .each(documents, |op, t| op.u32_vector(t, shape.batch * shape.q_len))
    }

    /// Queries of heads that kv heads serve, behind the positions before them.
    fn queries(self, shape: AttentionShape) -> Self {
        let possible =
            shape.kv_heads > 0 && shape.heads.is_multiple_of(shape.kv_heads) && shape.q_len <= shape.kv_len;
        self.that(possible, || format!("{shape:?} is impossible"))
            .that(shape.head_dim <= MAX_HEAD_DIM, || {
                format!("heads of {} values are wider than {MAX_HEAD_DIM}", shape.head_dim)
            })
    }

    fn running(self, Running { sums, most, total }: Running<'_>, shape: AttentionShape) -> Self {
        let queries = shape.batch * shape.q_len;
        self.size(sums, queries, shape.heads * shape.head_dim)
            .f32_vectors([sums], queries * shape.heads * shape.head_dim)
            .f32_vectors([most, total], queries * shape.heads)
    }
}
