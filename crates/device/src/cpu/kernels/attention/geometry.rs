//! Which rows belong together, where they lie, and which keys they see: said here and nowhere else.

use std::ops::Range;

use super::{KEYS, QUERIES};
use crate::AttentionShape;
use crate::cpu::kernels::Simd;
use crate::cpu::kernels::soft_cap::soft_cap;

/// The shape as indices.
#[derive(Clone, Copy)]
pub(super) struct Geometry {
    pub batch: usize,
    pub q_len: usize,
    pub kv_len: usize,
    pub kv_capacity: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub d: usize,
    pub scale: f32,
    /// Keys that a query sees at most, its own position included.
    window: usize,
    soft_cap: Option<f32>,
    /// Consecutive query heads that a block takes together: all of a group where there is one query, else one.
    together: usize,
}

/// Queries that are handled together: consecutive positions of one head, or one position of a group of heads.
pub(super) struct Block {
    /// Element of the first row, and elements from one to the next.
    pub start: usize,
    pub stride: usize,
    pub rows: usize,
    /// Index of the first row's log-sum-exp; the others follow.
    pub statistics: usize,
    /// Element of the first key.
    pub keys_start: usize,
    /// Position of the first row, and whether the others are further on.
    position: usize,
    consecutive: bool,
}

impl Geometry {
    pub fn new(s: AttentionShape) -> Geometry {
        let group = (s.heads / s.kv_heads.max(1)) as usize;
        Geometry {
            batch: s.batch as usize,
            q_len: s.q_len as usize,
            kv_len: s.kv_len as usize,
            kv_capacity: s.kv_capacity as usize,
            heads: s.heads as usize,
            kv_heads: s.kv_heads as usize,
            d: s.head_dim as usize,
            scale: s.scale,
            window: s.window.map_or(usize::MAX, |window| window as usize),
            soft_cap: s.soft_cap,
            together: if s.q_len == 1 && group <= QUERIES { group } else { 1 },
        }
    }

    /// The same with blocks of one head, even for single queries.
    pub fn by_head(self) -> Geometry {
        Geometry { together: 1, ..self }
    }

    pub fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    fn query_blocks(&self) -> usize {
        self.q_len.div_ceil(QUERIES)
    }

    pub fn query_tasks(&self) -> usize {
        self.batch * (self.heads / self.together) * self.query_blocks()
    }

    /// The block of a task; blocks that see most come first.
    pub fn query_task(&self, task: usize) -> Block {
        let units = self.heads / self.together;
        let outer = self.batch * units;
        let block = self.query_blocks() - 1 - task / outer;
        let (batch, unit) = ((task % outer) / units, task % units);
        self.block(batch, unit * self.together, block * QUERIES)
    }

    /// The block whose first row is query number `first`.
    pub fn block(&self, batch: usize, head: usize, first: usize) -> Block {
        let many = self.together > 1;
        Block {
            start: ((batch * self.q_len + first) * self.heads + head) * self.d,
            stride: if many { self.d } else { self.q_stride() },
            rows: if many { self.together } else { QUERIES.min(self.q_len - first) },
            statistics: (batch * self.heads + head) * self.q_len + first,
            keys_start: self.key(batch, head / self.group(), 0),
            position: self.kv_len - self.q_len + first,
            consecutive: !many,
        }
    }

    /// Element of a key or value.
    pub fn key(&self, batch: usize, kv_head: usize, position: usize) -> usize {
        ((batch * self.kv_capacity + position) * self.kv_heads + kv_head) * self.d
    }

    /// Elements from a query to the next one of its head.
    pub fn q_stride(&self) -> usize {
        self.heads * self.d
    }

    /// Elements from a key to the next one of its head.
    pub fn kv_stride(&self) -> usize {
        self.kv_heads * self.d
    }

    /// Keys that some row of the block sees.
    pub fn keys(&self, block: &Block) -> Range<usize> {
        let last = block.position + if block.consecutive { block.rows.max(1) - 1 } else { 0 };
        (block.position + 1).saturating_sub(self.window)..last + 1
    }

    /// Which of the keys in `range` a row sees, counted from the first of them.
    pub fn visible(&self, block: &Block, row: usize, range: &Range<usize>) -> Range<usize> {
        let position = block.position + if block.consecutive { row } else { 0 };
        let within = |key: usize| key.clamp(range.start, range.end) - range.start;
        within((position + 1).saturating_sub(self.window))..within(position + 1)
    }

    /// The tiles of keys that the block sees.
    pub fn tiles(&self, block: &Block) -> impl Iterator<Item = Range<usize>> + use<> {
        let keys = self.keys(block);
        keys.clone().step_by(KEYS).map(move |start| start..keys.end.min(start + KEYS))
    }

    /// Whether a query sees a key that is at least `distance` positions before it.
    pub fn reaches(&self, distance: usize) -> bool {
        distance < self.window
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
