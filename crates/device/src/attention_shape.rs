//! The geometry of causal attention: how many heads and positions there are, and which of them see each other.

use std::ops::Range;

/// The geometry of causal attention with grouped heads.
///
/// q and out are `[batch * q_len, heads * head_dim]`; k and v are `[batch * kv_capacity, kv_heads * D']`, D' being
/// `head_dim` filled up to whole blocks of their type. Position p of a sequence lies in row `p % kv_capacity` of its
/// rows. Query i sits at position `kv_len - q_len + i` and sees the positions up to its own, fewer where a window, a
/// pattern of blocks or documents say so; all that it sees must still be there, so that only those let `kv_len` be more
/// than `kv_capacity`. Query head h reads kv head `h / (heads / kv_heads)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionShape {
    /// Sequences.
    pub batch: u64,
    /// Queries of each sequence.
    pub q_len: u64,
    /// Positions of each sequence so far, those of the queries included.
    pub kv_len: u64,
    /// Rows of each sequence's keys.
    pub kv_capacity: u64,
    /// Query heads.
    pub heads: u64,
    /// Key and value heads.
    pub kv_heads: u64,
    /// Width of a head.
    pub head_dim: u64,
    /// Factor on the scores, usually 1 / sqrt(head_dim).
    pub scale: f32,
    /// Sliding window: a query sees this many positions at most, its own included. All that came before where `None`.
    pub window: Option<u64>,
    /// Blocks that see each other; all do where `None`. What a window hides stays hidden.
    pub block_sparse: Option<BlockSparse>,
    /// Scores become cap * tanh(score / cap) before the softmax (Gemma 2).
    pub soft_cap: Option<f32>,
}

/// A pattern of blocks of positions (fixed patterns: "Generating Long Sequences with Sparse Transformers", Child et al.
/// 2019; local and global blocks: "Big Bird", Zaheer et al. 2020, without its random ones). A query in block i sees what
/// comes before it in block j where `i - j < local_blocks` or `j < global_blocks`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockSparse {
    /// Positions of a block, at least 1.
    pub block: u64,
    /// Blocks that a query sees back from its own, which is the first of them; at least 1.
    pub local_blocks: u64,
    /// Blocks at the beginning of the sequence that every query sees.
    pub global_blocks: u64,
}

impl AttentionShape {
    /// What a query at `position` sees of the positions from `first` on: two ranges in order that do not meet. The
    /// second one ends with its own position; the first may be empty.
    pub fn seen(&self, position: u64, first: u64) -> [Range<u64>; 2] {
        let end = position.saturating_add(1);
        let window = self.window.unwrap_or(u64::MAX);
        let first = end.saturating_sub(window).max(first).min(position);
        let all = [first..first, first..end];
        let Some(BlockSparse { block, local_blocks, global_blocks }) = self.block_sparse else { return all };
        let own = position / block.max(1);
        let local = (own + 1).saturating_sub(local_blocks).saturating_mul(block).clamp(first, position);
        let global = global_blocks.saturating_mul(block).clamp(first, end);
        if global < local { [first..global, local..end] } else { all }
    }

    /// The lowest position that any query sees.
    pub fn first_seen(&self) -> u64 {
        let [global, local] = self.seen(self.kv_len.saturating_sub(self.q_len), 0);
        if global.is_empty() { local.start } else { global.start }
    }

    /// Positions that a query may look back, its own included.
    pub fn reach(&self) -> u64 {
        let blocks = self.block_sparse.filter(|sparse| sparse.global_blocks == 0);
        let blocks = blocks.map_or(u64::MAX, |sparse| sparse.local_blocks.saturating_mul(sparse.block));
        self.window.unwrap_or(u64::MAX).min(blocks)
    }

    /// Number of (query, key) pairs that see each other, over all heads, where a sequence is one document.
    pub fn score_count(&self) -> u64 {
        let before = self.kv_len.saturating_sub(self.q_len);
        let pairs = if self.block_sparse.is_some() {
            let seen = |position| self.seen(position, 0).map(|range| range.end - range.start);
            (before..self.kv_len).map(seen).map(|[global, local]| global + local).sum()
        } else {
            let window = self.window.unwrap_or(u64::MAX);
            // Queries that do not fill the window yet see one more key each than the one before.
            let growing = window.saturating_sub(before).min(self.q_len);
            let full = self.q_len - growing;
            growing * before + growing * (growing + 1) / 2 + full * window.min(self.kv_len)
        };
        // Whatever somebody wants planned.
        self.batch.saturating_mul(self.heads).saturating_mul(pairs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(length: u64, window: Option<u64>, sparse: Option<[u64; 3]>) -> AttentionShape {
        let pattern = |[block, local_blocks, global_blocks]: [u64; 3]| BlockSparse {
            block,
            local_blocks,
            global_blocks,
        };
        AttentionShape {
            batch: 1,
            q_len: length,
            kv_len: length,
            kv_capacity: length,
            heads: 1,
            kv_heads: 1,
            head_dim: 2,
            scale: 1.0,
            window,
            block_sparse: sparse.map(pattern),
            soft_cap: None,
        }
    }

    /// Which keys every query sees, as the definitions say it.
    fn check(window: Option<u64>, sparse: Option<[u64; 3]>, first: u64) {
        let s = shape(23, window, sparse);
        let mut pairs = 0;
        for q in 0..23 {
            let ranges = s.seen(q, first);
            assert!(ranges[0].is_empty() || ranges[0].end < ranges[1].start, "{s:?}, {q}: {ranges:?}");
            assert_eq!(ranges[1].end, q + 1);
            for k in 0..23 {
                let near = window.is_none_or(|window| q < k + window);
                let pattern = sparse.is_none_or(|[block, local, global]| {
                    k / block < global || (q / block).saturating_sub(k / block) < local
                });
                let sees = k <= q && near && pattern && (k >= first || k == q && first > q);
                assert_eq!(ranges.iter().any(|range| range.contains(&k)), sees, "{s:?}, {q}, {k}");
                pairs += u64::from(sees);
            }
        }
        if first == 0 {
            assert_eq!(s.score_count(), pairs, "{s:?}");
        }
    }

    #[test]
    fn a_query_sees_what_window_blocks_and_documents_leave() {
        let patterns = [[4, 1, 0], [4, 2, 1], [5, 1, 2], [1, 3, 2], [7, 9, 0], [30, 1, 1], [3, 2, 9]];
        for window in [None, Some(1), Some(6), Some(40)] {
            for sparse in [None].into_iter().chain(patterns.map(Some)) {
                for first in [0, 3, 11, 22] {
                    check(window, sparse, first);
                }
            }
        }
    }

    #[test]
    fn reach_is_that_of_the_farthest_key() {
        assert_eq!(shape(9, None, None).reach(), u64::MAX);
        assert_eq!(shape(9, Some(5), Some([4, 2, 0])).reach(), 5);
        assert_eq!(shape(9, None, Some([4, 2, 0])).reach(), 8);
        assert_eq!(shape(9, None, Some([4, 2, 1])).reach(), u64::MAX);
    }
}
