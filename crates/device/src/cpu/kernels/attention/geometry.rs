//! Which rows belong together, where they lie, and which keys they see: said here and nowhere else.

use std::ops::Range;

use super::{KEYS, QUERIES};
use crate::cpu::kernels::Simd;
use crate::cpu::kernels::soft_cap::soft_cap;
use crate::op::KeyPieces;
use crate::{AttentionShape, DType};
use crate::{KeyPiece, PagedRun};

/// The shape as indices.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Geometry<'a> {
    shape: AttentionShape,
    pub batch: usize,
    pub q_len: usize,
    pub kv_len: usize,
    pub kv_capacity: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub d: usize,
    /// Elements that a head takes in k and v: whole blocks of their types.
    k_columns: usize,
    v_columns: usize,
    pub scale: f32,
    soft_cap: Option<f32>,
    /// The first position that each query sees, where there are documents.
    documents: Option<&'a [u32]>,
    /// The positions of the keys that are there, where they are a piece.
    piece: Option<(usize, usize)>,
    /// Rows of a page and the pages of the only sequence, where its rows lie in pages.
    pages: Option<(usize, &'a [u32])>,
    /// Number of the first query among the rows of q.
    first_query: usize,
}

/// Queries that are handled together: consecutive positions of one head.
pub(in crate::cpu) struct Block {
    /// Element of the first row.
    pub start: usize,
    pub rows: usize,
    /// Index of the first row's log-sum-exp; the others follow.
    pub statistics: usize,
    /// Whose keys it sees.
    pub batch: usize,
    pub kv_head: usize,
    /// Position of the first row.
    position: usize,
    /// Number of the first row among the queries of all sequences.
    query: usize,
}

impl<'a> Geometry<'a> {
    pub fn new(s: AttentionShape, documents: Option<&'a [u32]>) -> Geometry<'a> {
        Geometry {
            shape: s,
            batch: s.batch as usize,
            q_len: s.q_len as usize,
            kv_len: s.kv_len as usize,
            kv_capacity: s.kv_capacity as usize,
            heads: s.heads as usize,
            kv_heads: s.kv_heads as usize,
            d: s.head_dim as usize,
            k_columns: s.head_dim as usize,
            v_columns: s.head_dim as usize,
            scale: s.scale,
            soft_cap: s.soft_cap,
            documents,
            piece: None,
            pages: None,
            first_query: 0,
        }
    }

    /// A sequence in pages of so many rows, whose queries begin at a row of q.
    pub fn of_run(run: &PagedRun<'a>, page: u64, shape: AttentionShape, first_query: usize) -> Geometry<'a> {
        let pages = Some((page as usize, run.pages));
        Geometry { pages, first_query, ..Geometry::new(run.shape(page, shape), None) }
    }

    /// The same with a piece of the keys.
    pub fn of_piece(KeyPiece { first, shape }: KeyPiece, documents: Option<&'a [u32]>) -> Geometry<'a> {
        let first = first as usize;
        let piece = Some((first, first + shape.kv_capacity as usize));
        Geometry { piece, ..Geometry::new(shape, documents) }
    }

    /// The same with k and v of these types.
    pub fn cached(self, k: DType, v: DType) -> Geometry<'a> {
        let [k_columns, v_columns] = [k, v].map(|dtype| dtype.cached_columns(self.d as u64) as usize);
        Geometry { k_columns, v_columns, ..self }
    }

    pub fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    fn query_blocks(&self) -> usize {
        self.q_len.div_ceil(QUERIES)
    }

    pub fn query_tasks(&self) -> usize {
        self.batch * self.heads * self.query_blocks()
    }

    /// The block of a task; blocks that see most come first.
    pub fn query_task(&self, task: usize) -> Block {
        let outer = self.batch * self.heads;
        let block = self.query_blocks() - 1 - task / outer;
        self.block(task % outer / self.heads, task % self.heads, block * QUERIES)
    }

    /// The block whose first row is query number `first`.
    pub fn block(&self, batch: usize, head: usize, first: usize) -> Block {
        Block {
            start: ((self.first_query + batch * self.q_len + first) * self.heads + head) * self.d,
            rows: QUERIES.min(self.q_len - first),
            statistics: self.first_row() + (batch * self.heads + head) * self.q_len + first,
            batch,
            kv_head: head / self.group(),
            position: self.kv_len - self.q_len + first,
            query: batch * self.q_len + first,
        }
    }

    /// Number of the first query's first head among the rows of all heads: where its statistics begin.
    pub fn first_row(&self) -> usize {
        self.first_query * self.heads
    }

    /// Row of a key or value; heads are as many places along the row.
    fn row(&self, batch: usize, position: usize) -> usize {
        let place = match (self.pages, self.piece) {
            (Some((page, pages)), _) => pages[position / page] as usize * page + position % page,
            (None, Some((first, _))) => position - first,
            (None, None) => position % self.kv_capacity.max(1),
        };
        batch * self.kv_capacity + place
    }

    /// Element of a key.
    pub fn key(&self, batch: usize, kv_head: usize, position: usize) -> usize {
        (self.row(batch, position) * self.kv_heads + kv_head) * self.k_columns
    }

    /// Element of a value.
    pub fn value(&self, batch: usize, kv_head: usize, position: usize) -> usize {
        (self.row(batch, position) * self.kv_heads + kv_head) * self.v_columns
    }

    /// Elements from a query to the next one of its head.
    pub fn q_stride(&self) -> usize {
        self.heads * self.d
    }

    /// Elements from a key to the next one of its head.
    pub fn k_stride(&self) -> usize {
        self.kv_heads * self.k_columns
    }

    /// Elements from a value to the next one of its head.
    pub fn v_stride(&self) -> usize {
        self.kv_heads * self.v_columns
    }

    /// The end of the beginning of `positions` whose rows follow each other.
    pub fn run_end(&self, positions: &Range<usize>) -> usize {
        match self.pages {
            Some((page, _)) => positions.end.min((positions.start / page + 1) * page),
            None => self.piece_end(positions, usize::MAX),
        }
    }

    /// The end of a piece of `positions` that are taken together, `most` of them at most: their rows follow each other, or lie in
    /// pages.
    fn piece_end(&self, positions: &Range<usize>, most: usize) -> usize {
        let capacity = self.kv_capacity.max(1);
        let wrap = match self.piece {
            Some(_) => usize::MAX,
            None => (positions.start / capacity + 1) * capacity,
        };
        positions.end.min(positions.start.saturating_add(most)).min(wrap)
    }

    /// What a row of the block sees: two ranges in order, of which the first may be empty.
    fn seen(&self, block: &Block, row: usize) -> [Range<usize>; 2] {
        let first = self.documents.and_then(|first| first.get(block.query + row)).copied().unwrap_or(0);
        // Asked for of every row and tile: `map` would be a call.
        let [global, local] = self.shape.seen((block.position + row) as u64, u64::from(first));
        let places = |range: Range<u64>| range.start as usize..range.end as usize;
        [places(global), places(local)]
    }

    /// Keys that some row of the block sees, between others that none may see: two ranges in order, of which the first
    /// may be empty.
    pub fn keys(&self, block: &Block) -> [Range<usize>; 2] {
        let hull = |a: Range<usize>, b: Range<usize>| match (a.is_empty(), b.is_empty()) {
            (true, _) => b,
            (_, true) => a,
            _ => a.start.min(b.start)..a.end.max(b.end),
        };
        let rows = (0..block.rows).map(|row| self.seen(block, row));
        let [global, local] = rows.fold([0..0, 0..0], |[global, local], row| {
            let [global_of_row, local_of_row] = row;
            [hull(global, global_of_row), hull(local, local_of_row)]
        });
        if global.is_empty() || global.end < local.start {
            [global, local]
        } else {
            [0..0, hull(global, local)]
        }
    }

    /// Which of the keys in `range` a row sees, counted from the first of them: two ranges in order.
    pub fn visible(&self, block: &Block, row: usize, range: &Range<usize>) -> [Range<usize>; 2] {
        let within = |key: usize| key.clamp(range.start, range.end) - range.start;
        let [global, local] = self.seen(block, row);
        [within(global.start)..within(global.end), within(local.start)..within(local.end)]
    }

    /// The tiles of keys that the block sees.
    pub fn tiles(self, block: &Block) -> impl Iterator<Item = Range<usize>> + use<'a> {
        self.keys(block).into_iter().flat_map(move |mut left| {
            std::iter::from_fn(move || {
                let end = self.piece_end(&left, KEYS);
                let tile = left.start..end;
                left.start = end;
                (!tile.is_empty()).then_some(tile)
            })
            .filter_map(move |tile| {
                let (first, end) = self.piece.unwrap_or((0, usize::MAX));
                let here = tile.start.max(first)..tile.end.min(end);
                (!here.is_empty()).then_some(here)
            })
        })
    }

    /// The positions of the keys that are there.
    pub fn held(&self) -> Range<usize> {
        let (first, end) = self.piece.unwrap_or((0, self.kv_len));
        first..end.min(self.kv_len)
    }

    /// Whether a query may see a key that is at least `distance` positions before it.
    pub fn reaches(&self, distance: usize) -> bool {
        (distance as u64) < self.shape.reach()
    }

    /// How the positions are cut that the only query of each head sees, where they are.
    pub fn key_pieces(&self) -> Option<KeyPieces> {
        KeyPieces::of(&self.shape, self.documents.is_some())
    }

    pub fn soft_cap(&self) -> Option<f32> {
        self.soft_cap
    }

    /// Caps scores, if there is a cap; returns the factor that they still need.
    pub fn cap_scores(&self, simd: Simd, scores: &mut [f32]) -> f32 {
        let Some(cap) = self.soft_cap else { return self.scale };
        soft_cap(simd, scores, self.scale, cap);
        1.0
    }
}
