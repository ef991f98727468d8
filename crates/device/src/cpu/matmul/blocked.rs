//! Blocking: how a product is cut into packed panels, tasks and tiles.
//!
//! One operand is packed once, by all threads together, into a buffer that they share: the one with fewer lines, a
//! chunk at a time. The other is cut into strips; a strip is packed by the task that multiplies it with the whole
//! chunk, straight before its use. No cut changes a result: each sum is one chain in the order of k.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::Output;
use super::few_rows::{Columns, padded_rows, row_units};
use super::kernels::Kernels;
use super::pack::{Lines, Panels};
use super::tile::{Area, Block, Finish, Sums};
use super::vector::MAX_LANES;
use crate::DType;
use crate::cpu::pool::Session;

/// Units of k in a block at most: C is read and written once for each block.
const MAX_UNITS: usize = 768;
/// Size of a packed strip at most, so that it stays in the second-level cache.
const STRIP_BYTES: usize = 384 << 10;

/// Products of at most this many rows go over B once, unpacked: decoding.
const FEW_ROWS: usize = 16;
/// Bytes of B that one task of such a product takes.
const FEW_ROWS_TASK_BYTES: usize = 32 << 10;

/// Packed rows that all tasks read.
struct Shared(*const f32);

// SAFETY: the rows are complete before any task reads them, and nobody writes them meanwhile.
unsafe impl Sync for Shared {}

/// The threads that work on a product, and their memory.
pub(super) trait Crew {
    fn threads(&self) -> usize;
    /// Memory shared by all tasks: address and bytes, 64-byte aligned.
    fn common(&mut self) -> (*mut u8, usize);
    /// Runs every task with its thread's own memory: address and bytes, 64-byte aligned. Tasks begin in order.
    fn run(&mut self, tasks: usize, body: &(dyn Fn(usize, *mut u8, usize) + Sync));
}

/// All threads of a pool.
pub(super) struct Everybody<'a>(pub Session<'a>);

impl Crew for Everybody<'_> {
    fn threads(&self) -> usize {
        self.0.threads()
    }

    fn common(&mut self) -> (*mut u8, usize) {
        (self.0.common(), crate::cpu::Pool::COMMON_BYTES)
    }

    fn run(&mut self, tasks: usize, body: &(dyn Fn(usize, *mut u8, usize) + Sync)) {
        self.0.run(tasks, &|task, worker| body(task, worker.scratch.as_mut_ptr(), worker.scratch.len()));
    }
}

/// The calling thread alone, with a buffer of which a part stands for the common one.
pub(super) struct Alone {
    common: (*mut u8, usize),
    own: (*mut u8, usize),
}

impl Alone {
    pub fn new(scratch: &mut [u8]) -> Alone {
        let skip = scratch.as_ptr().align_offset(64).min(scratch.len());
        let start = scratch.as_mut_ptr().wrapping_add(skip);
        let bytes = scratch.len() - skip;
        let common = bytes / 3 * 2 / 64 * 64;
        Alone { common: (start, common), own: (start.wrapping_add(common), bytes - common) }
    }
}

impl Crew for Alone {
    fn threads(&self) -> usize {
        1
    }

    fn common(&mut self) -> (*mut u8, usize) {
        self.common
    }

    fn run(&mut self, tasks: usize, body: &(dyn Fn(usize, *mut u8, usize) + Sync)) {
        for task in 0..tasks {
            body(task, self.own.0, self.own.1);
        }
    }
}

/// C = A B, or C += A B.
pub(super) struct Product {
    pub kernels: &'static Kernels,
    /// Rows of A.
    pub a: Lines,
    /// Columns of B.
    pub b: Lines,
    pub k: usize,
    pub c: Output,
    pub accumulate: bool,
}

// SAFETY: tasks write disjoint parts of C; all else is only read.
unsafe impl Sync for Product {}

/// Units from one panel to the next: 64-byte aligned, with room for whole vectors after the last unit.
fn panel_stride(width: usize, units: usize) -> usize {
    (units * width + MAX_LANES).next_multiple_of(16)
}

/// One block of k for one chunk of the shared operand and one of the other.
#[derive(Clone, Copy)]
struct Round<'a> {
    product: &'a Product,
    /// Whether A is the shared operand.
    share_a: bool,
    shared: (usize, usize),
    strips: (usize, usize),
    k: (usize, usize),
    units: usize,
    packed: *mut f32,
    sums: Sums,
    cuts: Cuts,
}

// SAFETY: each task writes panels and tiles of its own, and reads the shared panels after they are complete.
unsafe impl Sync for Round<'_> {}

/// How the lines of the strips' chunk are dealt out.
#[derive(Clone, Copy)]
struct Cuts {
    /// Panels of the shared operand that one packing task takes.
    group: usize,
    packing_tasks: usize,
    /// Ranges that the shared chunk is cut into, where there are too few strips for the threads.
    ranges: usize,
}

impl Product {
    /// # Safety
    /// Operands and C are valid and C overlaps neither.
    pub unsafe fn run(&self, crew: &mut impl Crew) {
        let kernels = self.kernels;
        if self.has_few_rows(crew) {
            // SAFETY: as for this function.
            return unsafe { self.run_few_rows(crew) };
        }
        let share_a = self.a.count < self.b.count;
        let (shared, strips) = if share_a { (self.a, self.b) } else { (self.b, self.a) };
        let (shared_width, strip_width) =
            if share_a { (kernels.rows, kernels.columns) } else { (kernels.columns, kernels.rows) };
        let blocks = self.k.div_ceil(MAX_UNITS * kernels.k_per_unit).max(1);
        // Whole blocks of quantised types.
        let k_block = self.k.div_ceil(blocks).next_multiple_of(32);
        let units = k_block.div_ceil(kernels.k_per_unit);

        let (common, common_bytes) = crew.common();
        let partial = self.c.dtype == DType::Bf16 && blocks > 1;
        let partial_values = if partial { common_bytes / 3 / 64 * 16 } else { 0 };
        let packed = common.wrapping_add(partial_values * 4).cast::<f32>();
        let shared_stride = panel_stride(shared_width, units);
        let mut shared_panels = ((common_bytes / 4 - partial_values) / shared_stride).max(1);
        if partial {
            shared_panels = shared_panels.min((512 / shared_width).max(1));
        }
        let shared_chunk = even_chunk(shared.count, shared_panels * shared_width, shared_width);
        let strips_chunk = if partial {
            (partial_values / shared_chunk / strip_width).max(1) * strip_width
        } else {
            strips.count
        };
        for shared_start in (0..shared.count).step_by(shared_chunk.max(1)) {
            let shared_end = shared.count.min(shared_start + shared_chunk);
            for strips_start in (0..strips.count).step_by(strips_chunk.max(1)) {
                let strips_end = strips.count.min(strips_start + strips_chunk);
                let (row, column) =
                    if share_a { (shared_start, strips_start) } else { (strips_start, shared_start) };
                let columns = if share_a { strips_end - strips_start } else { shared_end - shared_start };
                for block in 0..blocks {
                    let k = (block * k_block, self.k.min((block + 1) * k_block));
                    let sums = self.sums(block, blocks, partial.then_some((common, columns)), row, column);
                    let round = Round {
                        product: self,
                        share_a,
                        shared: (shared_start, shared_end),
                        strips: (strips_start, strips_end),
                        k,
                        units: (k.1 - k.0).div_ceil(kernels.k_per_unit),
                        packed,
                        sums,
                        cuts: Cuts { group: 0, packing_tasks: 0, ranges: 1 },
                    };
                    round.run(crew);
                }
            }
        }
    }

    fn has_few_rows(&self, crew: &mut impl Crew) -> bool {
        let blocks = self.b.dtype.block_elements() as usize;
        let units = row_units(self.k, self.kernels.k_per_unit);
        self.a.count <= FEW_ROWS
            && self.k > 0
            && self.b.k_stride == 1
            && self.b.stride.is_multiple_of(blocks)
            && padded_rows(self.a.count) * units * 4 <= crew.common().1
    }

    unsafe fn run_few_rows(&self, crew: &mut impl Crew) {
        let rows = crew.common().0.cast::<f32>();
        // SAFETY: `has_few_rows` has found the common memory large enough for the packed rows.
        unsafe { (self.kernels.pack_rows)(self.a, self.k, rows) };
        let bytes = self.b.dtype.bytes_for((self.b.stride) as u64).unwrap_or(0) as usize;
        let shared = Shared(rows);
        let per_task = (FEW_ROWS_TASK_BYTES / bytes.max(1)).max(1).next_multiple_of(4);
        crew.run(self.b.count.div_ceil(per_task), &|task, _, _| {
            let shared = &shared;
            let columns = task * per_task..self.b.count.min((task + 1) * per_task);
            let task = Columns {
                rows: shared.0,
                b: self.b,
                k: self.k,
                c: self.c,
                accumulate: self.accumulate,
                start: columns.start,
                end: columns.end,
            };
            // SAFETY: operands and C are valid as for this function; tasks have columns of their own.
            unsafe { (self.kernels.multiply_columns)(&task) };
        });
    }

    /// Where the sums of one block of k start from and go to, from the chunk's first row and column on.
    fn sums(
        &self,
        block: usize,
        blocks: usize,
        partial: Option<(*mut u8, usize)>,
        row: usize,
        column: usize,
    ) -> Sums {
        let Output { data, dtype, row_stride, .. } = self.c;
        let finish = match (dtype, self.accumulate) {
            (DType::Bf16, false) => Finish::Bf16,
            (DType::Bf16, true) => Finish::AddBf16,
            _ => Finish::F32,
        };
        let c = Sums {
            start: std::ptr::null(),
            start_stride: row_stride,
            out: data,
            out_stride: row_stride,
            finish,
        }
        .at(row, column);
        match partial {
            Some((buffer, columns)) => {
                let start = if block > 0 { buffer.cast_const().cast() } else { std::ptr::null() };
                if block + 1 < blocks {
                    Sums {
                        start,
                        start_stride: columns,
                        out: buffer,
                        out_stride: columns,
                        finish: Finish::F32,
                    }
                } else {
                    Sums { start, start_stride: columns, ..c }
                }
            }
            None if finish == Finish::F32 && (block > 0 || self.accumulate) => {
                Sums { start: c.out.cast_const().cast(), ..c }
            }
            None => c,
        }
    }
}

/// The largest chunk of at most `most` lines, in whole panels, that cuts `count` lines into even parts.
fn even_chunk(count: usize, most: usize, width: usize) -> usize {
    let chunks = count.div_ceil(most).max(1);
    count.div_ceil(chunks).next_multiple_of(width)
}

impl Round<'_> {
    fn run(mut self, crew: &mut impl Crew) {
        let kernels = self.product.kernels;
        let (shared_width, strip_width) = self.widths();
        let shared_panels = (self.shared.1 - self.shared.0).div_ceil(shared_width);
        let strip_panels = (self.strips.1 - self.strips.0).div_ceil(strip_width);
        let threads = crew.threads();
        // Some 64 KiB each.
        let group = (16 * 1024 / (self.units * shared_width).max(1)).max(1);
        let ranges = if threads == 1 {
            1
        } else {
            (4 * threads).div_ceil(strip_panels.max(1)).min(shared_panels).max(1)
        };
        self.cuts = Cuts { group, packing_tasks: shared_panels.div_ceil(group), ranges };
        let _ = kernels;
        let strips = self.strip_list(strip_panels, threads);
        let packed = AtomicUsize::new(0);
        let tasks = self.cuts.packing_tasks + strips * ranges;
        crew.run(tasks, &|task, scratch, bytes| {
            if task < self.cuts.packing_tasks {
                // SAFETY: x
                unsafe { self.pack_shared(task) };
                packed.fetch_add(1, Ordering::Release);
            } else {
                let task = task - self.cuts.packing_tasks;
                let (a, b) = self.strip(task / ranges, strip_panels, threads);
                let (na, nb) = self.strip(task / ranges + threads, strip_panels, threads);
                let ahead = (nb > na && ranges == 1).then(|| {
                    let (_, from) = self.operands();
                    let (_, width) = self.widths();
                    let l = self.strips.0 + na * width..self.strips.1.min(self.strips.0 + nb * width);
                    from.area(l, self.k.0..self.k.1)
                });
                // SAFETY: a thread's scratch holds a strip, and tasks have strips of their own.
                unsafe { self.multiply(a..b, task % ranges, scratch.cast(), bytes, &packed, ahead) };
            }
        });
    }

    fn widths(&self) -> (usize, usize) {
        let k = self.product.kernels;
        if self.share_a { (k.rows, k.columns) } else { (k.columns, k.rows) }
    }
    fn operands(&self) -> (Lines, Lines) {
        if self.share_a { (self.product.a, self.product.b) } else { (self.product.b, self.product.a) }
    }

    fn longest(&self) -> usize {
        let (_, strip_width) = self.widths();
        (STRIP_BYTES / 4 / panel_stride(strip_width, self.units)).max(1)
    }
    fn next_len(&self, left: usize, threads: usize) -> usize {
        let longest = self.longest();
        if threads == 1 { longest.min(left) } else { (left / (2 * threads)).clamp(1, longest).min(left) }
    }
    fn strip_list(&self, panels: usize, threads: usize) -> usize {
        let mut left = panels;
        let mut n = 0;
        while left > 0 {
            left -= self.next_len(left, threads);
            n += 1;
        }
        n
    }
    fn strip(&self, index: usize, panels: usize, threads: usize) -> (usize, usize) {
        let mut left = panels;
        for _ in 0..index {
            if left == 0 {
                break;
            }
            left -= self.next_len(left, threads);
        }
        let start = panels - left;
        (start, start + self.next_len(left, threads))
    }

    unsafe fn pack_shared(&self, task: usize) {
        let (from, _) = self.operands();
        let (width, _) = self.widths();
        let stride = panel_stride(width, self.units);
        let start = self.shared.0 + task * self.cuts.group * width;
        let end = self.shared.1.min(start + self.cuts.group * width);
        let to = Panels { data: self.packed.wrapping_add(task * self.cuts.group * stride), width, stride };
        // SAFETY: the lines lie in the operand, and the panels' memory holds them.
        unsafe { (self.product.kernels.pack)(from, start..end, self.k.0..self.k.1, to) };
    }

    unsafe fn multiply(
        &self,
        panels: Range<usize>,
        range: usize,
        scratch: *mut f32,
        bytes: usize,
        packed: &AtomicUsize,
        ahead: Option<Area>,
    ) {
        let (_, from) = self.operands();
        let (shared_width, width) = self.widths();
        let stride = panel_stride(width, self.units);
        let start = self.strips.0 + panels.start * width;
        let end = self.strips.1.min(self.strips.0 + panels.end * width);
        debug_assert!(panels.len() * stride * 4 <= bytes);
        let to = Panels { data: scratch, width, stride };
        // SAFETY: the lines lie in the operand, and the panels' memory holds them.
        unsafe { (self.product.kernels.pack)(from, start..end, self.k.0..self.k.1, to) };
        let mut n = 0;
        while packed.load(Ordering::Acquire) < self.cuts.packing_tasks {
            n += 1;
            if n > 10000 {
                std::thread::yield_now();
            } else {
                std::hint::spin_loop();
            }
        }
        let shared_panels = (self.shared.1 - self.shared.0).div_ceil(shared_width);
        let per = shared_panels.div_ceil(self.cuts.ranges);
        let s0 = (range * per).min(shared_panels);
        let s1 = ((range + 1) * per).min(shared_panels);
        let shared_lines = (self.shared.1 - self.shared.0).min(s1 * shared_width)
            - (s0 * shared_width).min(self.shared.1 - self.shared.0);
        let shared_stride = panel_stride(shared_width, self.units);
        let shared_ptr = self.packed.wrapping_add(s0 * shared_stride);
        let strip_off = start - self.strips.0;
        let block = if self.share_a {
            Block {
                a: shared_ptr,
                a_stride: shared_stride,
                b: scratch,
                b_stride: stride,
                units: self.units,
                rows: shared_lines,
                columns: end - start,
                sums: self.sums.at(s0 * shared_width, strip_off),
                b_outer: false,
                ahead,
            }
        } else {
            Block {
                a: scratch,
                a_stride: stride,
                b: shared_ptr,
                b_stride: shared_stride,
                units: self.units,
                rows: end - start,
                columns: shared_lines,
                sums: self.sums.at(strip_off, s0 * shared_width),
                b_outer: true,
                ahead,
            }
        };
        // SAFETY: both sides are packed, and the sums of this block are this task's alone.
        unsafe { (self.product.kernels.multiply)(&block) };
    }
}
