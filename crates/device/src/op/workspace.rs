//! Memory beside the arena that operations need, and how their sums fall into the parts that lie there: by the shape alone,
//! so that the bits of a result are the same on every device. What of it an operation needs, its family says. Tiles and
//! packing buffers, whose size is the device's choice, are not in here.

/// Bytes beside the arena.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Workspace {
    /// For all tasks of an operation together: partial sums, sort keys.
    pub shared: u64,
    /// For each task that runs at the same time.
    pub each_task: u64,
}

impl Workspace {
    /// What every device has. An operation that needs more is refused.
    pub const MOST: Workspace = Workspace { shared: 1 << 20, each_task: 3 << 19 };

    /// Room for whichever of the two needs more.
    #[must_use]
    pub fn or(self, other: Workspace) -> Workspace {
        let (shared, each_task) = (self.shared.max(other.shared), self.each_task.max(other.each_task));
        Workspace { shared, each_task }
    }
}

/// Columns of partial sums that there is room for.
pub(crate) const MAX_PARTIAL_COLUMNS: usize = Workspace::MOST.shared as usize / size_of::<f32>();

/// Sums over rows are made of at most this many pieces, each of at least this many rows.
const MAX_PIECES: usize = 32;
const MIN_PIECE_ROWS: usize = 16;

/// How rows that are summed fall into pieces.
#[derive(Clone, Copy)]
pub(crate) struct RowPieces {
    pub count: usize,
    pub rows: usize,
}

impl RowPieces {
    /// Pieces of `rows` rows with partial sums of `columns` columns, at most [`MAX_PARTIAL_COLUMNS`].
    pub fn new(rows: usize, columns: usize) -> RowPieces {
        let most = (MAX_PARTIAL_COLUMNS / columns.max(1)).clamp(1, MAX_PIECES);
        let piece = rows.div_ceil(most).max(MIN_PIECE_ROWS);
        RowPieces { count: rows.div_ceil(piece), rows: piece }
    }
}

/// Elements of one task of an element-wise kernel: enough to be worth handing out, few enough to spread.
pub(crate) const PIECE: usize = 16 * 1024;

/// Rows of one task of a row-wise kernel.
pub(crate) fn rows_per_task(columns: usize) -> usize {
    (PIECE / columns.max(1)).max(1)
}

/// Elements of a task of whole rows of `columns`.
pub(crate) fn task_elements(columns: usize) -> usize {
    rows_per_task(columns) * columns.max(1)
}
