//! Attention, and the cache of keys and values that it reads.

use std::ops::Range;

use super::{Family, Workspace};
use crate::check::Description;
use crate::cost::product_of;
use crate::{AttentionShape, Compute, Cost, DType, Tensor};

/// Values of the widest head: that of the narrow vectors of DeepSeek-V2 and its successors.
pub const MAX_HEAD_DIM: u64 = 576;

/// Positions of a piece, where there are not too many pieces.
const POSITIONS: u64 = 128;
/// Pieces at most.
const MAX_PIECES: u64 = 64;
/// Positions of a piece at most.
pub(crate) const MAX_POSITIONS: u64 = 16 * 1024;

/// Keys of a tile: a page that is no multiple of them has its rows put together in a tile's own memory.
pub(crate) const TILE_POSITIONS: u64 = 256;
/// Bytes of that memory.
pub(crate) const TOGETHER_BYTES: u64 = 128 << 10;

/// Positions of a page of keys or values of this type, heads of `head_dim`: few, so that little of a sequence's last page is
/// empty, as long as a tile of them can be put together.
#[must_use]
pub fn page_positions(dtype: DType, head_dim: u64) -> u64 {
    if can_be_put_together(dtype, head_dim) { 64 } else { TILE_POSITIONS }
}

fn can_be_put_together(dtype: DType, head_dim: u64) -> bool {
    let bytes = dtype.bytes_for(dtype.cached_columns(head_dim));
    bytes.is_some_and(|bytes| bytes.saturating_mul(TILE_POSITIONS) <= TOGETHER_BYTES)
}

/// The last positions of a sequence, whose keys and values lie in pages.
#[derive(Clone, Copy, Debug)]
pub struct PagedRun<'a> {
    /// Queries: those of the last positions.
    pub q_len: u64,
    /// Positions, those of the queries included.
    pub kv_len: u64,
    /// The pages, in the order of the positions: page n is rows `n * page` up to `(n + 1) * page` of the cache.
    pub pages: &'a [u32],
}

impl PagedRun<'_> {
    /// The shape of a sequence that is alone with its pages.
    pub(crate) fn shape(&self, page: u64, of_all: AttentionShape) -> AttentionShape {
        let kv_capacity = (self.pages.len() as u64).saturating_mul(page);
        AttentionShape { batch: 1, q_len: self.q_len, kv_len: self.kv_len, kv_capacity, ..of_all }
    }
}

/// How the positions that the only query of each head sees are cut: by the shape alone. Each piece leaves a maximum, a
/// sum of exponentials and a weighted sum of values for each query head.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KeyPieces {
    /// Positions of a piece.
    pub positions: u64,
    /// Number of the first piece, which begins at position `first * positions`.
    pub first: u64,
    pub count: u64,
}

impl KeyPieces {
    /// `None` for more than one query of a head, for patterns that only training has, or where there is no room.
    pub fn of(shape: &AttentionShape, documents: bool) -> Option<KeyPieces> {
        if shape.q_len != 1 || shape.heads == 0 || documents || shape.block_sparse.is_some() {
            return None;
        }
        // Aligned pieces may be one more than the positions fill.
        let most = (Workspace::MOST.shared / KeyPieces::part_bytes(shape).max(1)).min(MAX_PIECES);
        let most = most.checked_sub(1).filter(|most| *most > 0)?;
        let (start, end) = (shape.first_seen(), shape.kv_len);
        let positions = end.saturating_sub(start).div_ceil(most).next_multiple_of(POSITIONS);
        let first = start / positions.max(1);
        let count = end.div_ceil(positions.max(1)).saturating_sub(first);
        (positions <= MAX_POSITIONS).then_some(KeyPieces { positions, first, count })
    }

    /// Bytes of what a piece leaves, over all query heads.
    fn part_bytes(shape: &AttentionShape) -> u64 {
        product_of(&[shape.batch, shape.heads, shape.head_dim.saturating_add(2), size_of::<f32>() as u64])
    }

    fn bytes(&self, shape: &AttentionShape) -> u64 {
        KeyPieces::part_bytes(shape).saturating_mul(self.count)
    }

    /// Runs of one query that follow each other and whose parts have room at the same time, as many as can be, from each of
    /// `runs` on that is in no group yet; other runs are groups of their own. With the bytes of the parts.
    pub fn groups(
        runs: &[PagedRun<'_>],
        page: u64,
        shape: AttentionShape,
    ) -> impl Iterator<Item = (Range<usize>, u64)> {
        let bytes = move |run: &PagedRun<'_>| {
            let shape = run.shape(page, shape);
            KeyPieces::of(&shape, false).map(|pieces| pieces.bytes(&shape))
        };
        let mut first = 0;
        std::iter::from_fn(move || {
            let (start, mut total) = (first, bytes(runs.get(first)?));
            first += 1;
            while let (Some(sum), Some(Some(more))) = (total, runs.get(first).map(bytes)) {
                if sum.saturating_add(more) > Workspace::MOST.shared {
                    break;
                }
                (first, total) = (first + 1, Some(sum + more));
            }
            Some((start..first, total.unwrap_or(0)))
        })
    }
}

/// Attention, its backward pass, or a write to its cache.
#[allow(missing_docs)]
#[derive(Clone, Copy, Debug)]
pub enum Attention<'a> {
    /// Puts keys or values into a cache: row `(first + n) % C` of cache = row n of x, rounded to the cache's type, to
    /// nearest. x `[N, heads * head_dim]`, N at most C; cache `[C, heads * D']` of a plain type, Q8_0, Q4_0 or Q4_1, D'
    /// being `head_dim` filled up with zeros to whole blocks.
    WriteCache { x: &'a Tensor, cache: &'a Tensor, first: u64, head_dim: u64 },
    /// The same with a row of the cache for each row of x: row `rows[n]` of cache = row n of x. No row is named twice.
    WriteRows { x: &'a Tensor, cache: &'a Tensor, rows: &'a [u32], head_dim: u64 },

    /// Causal attention by tiles with an online softmax (FlashAttention-2, Dao 2023). lse f32 `[batch, heads, q_len]` is
    /// the log of the sum of the exponentials of each row's scaled scores. k and v may be of any type that
    /// [`WriteCache`](Attention::WriteCache) writes; they are read as they are stored. `documents` u32 `[batch * q_len]`
    /// is the first position that each query sees, whatever else the shape lets it see. With `probabilities`, f32
    /// `[batch, heads, q_len, kv_len]`, rows of scores are written out there and normalised, 0 where nothing is seen.
    Forward {
        q: &'a Tensor,
        k: &'a Tensor,
        v: &'a Tensor,
        documents: Option<&'a Tensor>,
        out: &'a Tensor,
        lse: &'a Tensor,
        probabilities: Option<&'a Tensor>,
        shape: AttentionShape,
        compute: Compute,
    },
    /// The same of sequences whose keys and values lie in pages of `page` rows of one cache, to the bit: q and out have the
    /// queries of each run behind those of the run before, and lse `[heads, q_len]` of each run likewise. `shape` says what
    /// all runs have in common; its batch and its lengths do not count. A page may be that of several runs.
    Paged {
        q: &'a Tensor,
        k: &'a Tensor,
        v: &'a Tensor,
        out: &'a Tensor,
        lse: &'a Tensor,
        runs: &'a [PagedRun<'a>],
        page: u64,
        shape: AttentionShape,
        compute: Compute,
    },
    /// dq, dk, dv = gradients. `delta` f32 `[batch, heads, q_len]` is workspace, and so is `sums`, f32 with an element
    /// for each of dq's, dk's and dv's, without which all three are f32. Needs kv_capacity = kv_len = q_len. With
    /// `probabilities` they are read, without they are computed again tile by tile.
    Backward {
        q: &'a Tensor,
        k: &'a Tensor,
        v: &'a Tensor,
        documents: Option<&'a Tensor>,
        out: &'a Tensor,
        lse: &'a Tensor,
        probabilities: Option<&'a Tensor>,
        dout: &'a Tensor,
        delta: &'a Tensor,
        sums: Option<&'a Tensor>,
        dq: &'a Tensor,
        dk: &'a Tensor,
        dv: &'a Tensor,
        shape: AttentionShape,
        compute: Compute,
    },
}

impl<'a> Family<'a> for Attention<'a> {
    fn describe(&self) -> Description<'a> {
        match *self {
            Attention::WriteCache { x, cache, head_dim, .. } => {
                let heads = x.columns() / head_dim.max(1);
                Description::new("write_cache", [x], [cache])
                    .floats([x])
                    .cached([cache])
                    .heads(x, head_dim)
                    .that(x.rows() <= cache.rows(), || format!("{x:?} has more rows than {cache:?}"))
                    .size(cache, cache.rows(), heads * cache.dtype().cached_columns(head_dim))
            }
            Attention::WriteRows { x, cache, rows, head_dim } => {
                let heads = x.columns() / head_dim.max(1);
                let ascend = |rows: &[u32]| rows.is_sorted_by(|a, b| a < b);
                // Pages are handed out upwards: most are in order as they are.
                let differ = ascend(rows) || {
                    let mut sorted = rows.to_vec();
                    sorted.sort_unstable();
                    ascend(&sorted)
                };
                let fit = differ && rows.iter().all(|row| u64::from(*row) < cache.rows());
                Description::new("write_rows", [x], [cache])
                    .floats([x])
                    .cached([cache])
                    .heads(x, head_dim)
                    .that(x.rows() == rows.len() as u64, || format!("{x:?} has not {} rows", rows.len()))
                    .that(fit, || format!("{rows:?} are no different rows of {cache:?}"))
                    .size(cache, cache.rows(), heads * cache.dtype().cached_columns(head_dim))
            }
            Attention::Paged { q, k, v, out, lse, runs, page, shape, .. } => {
                let queries = runs.iter().map(|run| run.q_len).sum();
                let whole = page > 0 && [k, v].iter().all(|t| t.rows().is_multiple_of(page));
                let pages = k.rows().checked_div(page).unwrap_or(0);
                let mut named = runs.iter().flat_map(|run| run.pages);
                let there = named.all(|number| u64::from(*number) < pages);
                let tiles = page.is_multiple_of(TILE_POSITIONS)
                    || runs.iter().all(|run| run.pages.len() <= 1)
                    || [k, v].iter().all(|t| can_be_put_together(t.dtype(), shape.head_dim));
                let groups = KeyPieces::groups(runs, page, shape).map(|(_, bytes)| bytes);
                let shapes = runs.iter().map(|run| run.shape(page, shape));
                let described = Description::new("paged_attention", [q, k, v], [out, lse])
                    .floats([q, out])
                    .cached([k, v])
                    .that(whole, || format!("{k:?} and {v:?} are no pages of {page} rows"))
                    .that(there, || format!("there are {pages} pages"))
                    .that(tiles, || format!("pages of {page} rows are too wide for {shape:?}"))
                    .that(shape.block_sparse.is_none(), || format!("{shape:?}: pages have no pattern"))
                    .that(k.rows() == v.rows(), || format!("{k:?} and {v:?} differ in shape"))
                    .size(q, queries, shape.heads * shape.head_dim)
                    .same_size(q, [out])
                    .f32_vectors([lse], shape.heads * queries)
                    .each([k, v], |op, t| {
                        op.size(t, t.rows(), shape.kv_heads * t.dtype().cached_columns(shape.head_dim))
                    })
                    .shared(groups.max().unwrap_or(0));
                shapes.fold(described, |op, shape| {
                    op.queries(shape).that(shape.kv_len <= shape.kv_capacity, || {
                        format!("{} positions are more than their pages have", shape.kv_len)
                    })
                })
            }
            Attention::Forward { q, k, v, documents, out, lse, probabilities, shape, .. } => {
                let parts = KeyPieces::of(&shape, documents.is_some()).filter(|_| probabilities.is_none());
                Description::new("attention", [q, k, v], [out, lse])
                    .reading(documents)
                    .writing(probabilities)
                    .masks(documents, probabilities, shape)
                    .floats([q, out])
                    .cached([k, v])
                    .attention(q, [k, v], shape)
                    .same_size(q, [out])
                    .f32_vectors([lse], shape.batch * shape.heads * shape.q_len)
                    .shared(parts.map_or(0, |parts| parts.bytes(&shape)))
            }
            Attention::Backward {
                q,
                k,
                v,
                documents,
                out,
                lse,
                probabilities,
                dout,
                delta,
                sums,
                dq,
                dk,
                dv,
                shape,
                ..
            } => {
                let whole = shape.kv_len == shape.q_len && shape.kv_capacity == shape.q_len;
                let all_f32 = [dq, dk, dv].iter().all(|t| t.dtype() == DType::F32);
                Description::new("attention_backward", [q, k, v, out, lse, dout], [delta, dq, dk, dv])
                    .reading(documents)
                    .reading(probabilities)
                    .writing(sums)
                    .masks(documents, probabilities, shape)
                    .floats([q, k, v, out, dout, dq, dk, dv])
                    .attention(q, [k, v], shape)
                    .same_size(k, [v])
                    .same_size(q, [out, dout, dq])
                    .same_size(k, [dk, dv])
                    .f32_vectors([lse, delta], shape.batch * shape.heads * shape.q_len)
                    .f32_vectors(sums, dq.elements() + dk.elements() + dv.elements())
                    .that(sums.is_some() || all_f32, || "gradients that are not f32 need sums".to_owned())
                    .that(whole, || format!("{shape:?}: the backward pass takes whole sequences"))
            }
        }
    }

    fn cost(&self, once: Cost) -> Cost {
        match *self {
            // Only the rows that are written move.
            Attention::WriteCache { x, cache, .. } | Attention::WriteRows { x, cache, .. } => {
                let row = cache.bytes() / cache.rows().max(1);
                Cost { bytes: x.bytes() + x.rows() * row, conversions: 0, ..once }
            }
            Attention::Paged { q, k, v, runs, page, shape, compute, .. } => {
                let shapes = || runs.iter().map(|run| run.shape(page, shape));
                let scores = shapes().map(|shape| shape.score_count()).fold(0, u64::saturating_add);
                let row = (k.bytes() + v.bytes()) / k.rows().max(1);
                let read: u64 = shapes().map(|shape| (shape.kv_len - shape.first_seen()) * row).sum();
                Cost {
                    attention: Some((compute, product_of(&[4, scores, shape.head_dim]))),
                    bytes: 2 * q.bytes() + read,
                    exps: scores,
                    ..once
                }
            }
            Attention::Forward { q, k, v, probabilities, shape, compute, .. } => {
                let seen = (shape.kv_len - shape.first_seen()).min(shape.kv_capacity);
                let share = |t: &Tensor| t.bytes() / shape.kv_capacity.max(1) * seen;
                let written = probabilities.map_or(0, Tensor::bytes);
                Cost {
                    attention: Some((compute, product_of(&[4, shape.score_count(), shape.head_dim]))),
                    bytes: 2 * q.bytes() + share(k) + share(v) + written,
                    exps: shape.score_count(),
                    ..once
                }
            }
            // Five products, of which kept probabilities save the first, and the exponentials.
            Attention::Backward { probabilities, shape, compute, .. } => {
                let scores = shape.score_count();
                let (products, exps) = if probabilities.is_some() { (4, 0) } else { (5, scores) };
                Cost {
                    attention: Some((compute, product_of(&[2 * products, scores, shape.head_dim]))),
                    exps,
                    ..once
                }
            }
        }
    }
}

impl Description<'_> {
    /// Queries of heads that kv heads serve, behind the positions before them, and what hides keys from them.
    pub(super) fn queries(self, shape: AttentionShape) -> Self {
        let possible = shape.kv_heads > 0
            && shape.heads.is_multiple_of(shape.kv_heads)
            && shape.q_len <= shape.kv_len
            && shape.window != Some(0)
            && shape.block_sparse.is_none_or(|sparse| sparse.block > 0 && sparse.local_blocks > 0)
            && shape.soft_cap.is_none_or(|cap| cap > 0.0);
        self.that(possible, || format!("{shape:?} is impossible"))
            .that(shape.head_dim <= MAX_HEAD_DIM, || {
                format!("heads of {} values are wider than {MAX_HEAD_DIM}", shape.head_dim)
            })
    }

    fn attention(self, q: &Tensor, cached: [&Tensor; 2], shape: AttentionShape) -> Self {
        let is_there = shape.kv_len.saturating_sub(shape.first_seen()) <= shape.kv_capacity;
        self.queries(shape)
            .that(is_there, || format!("{shape:?} is impossible"))
            .size(q, shape.batch * shape.q_len, shape.heads * shape.head_dim)
            .each(cached, |op, t| {
                let columns = shape.kv_heads * t.dtype().cached_columns(shape.head_dim);
                op.size(t, shape.batch * shape.kv_capacity, columns)
            })
    }

    fn masks(
        self,
        documents: Option<&Tensor>,
        probabilities: Option<&Tensor>,
        shape: AttentionShape,
    ) -> Self {
        self.each(documents, |op, t| op.u32_vector(t, shape.batch * shape.q_len))
            .f32_vectors(probabilities, shape.batch * shape.heads * shape.q_len * shape.kv_len)
    }

    fn cached<'t>(self, tensors: impl IntoIterator<Item = &'t Tensor>) -> Self {
        self.each(tensors, |op, t| {
            op.that(t.dtype().is_cache(), || format!("{t:?} is of no type for keys and values"))
        })
    }
}
