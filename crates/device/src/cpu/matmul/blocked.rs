//! The blocked product: how it is cut into packed panels, tasks and tiles (after Goto and van de Geijn 2008).
//!
//! One operand, the one with fewer lines, is packed once into memory that all threads share, a chunk at a time and
//! each task a few panels. The other is cut into strips; a strip is packed by the task that multiplies it with the
//! whole chunk, straight before its use. No cut changes a result: k is cut between the chains of the tile kernel.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::Product;
use super::crew::{Crew, Memory};
use super::kernels::Kernels;
use super::pack::{Lines, Panels};
use super::tile::{Area, Block, CHAIN, Finish, Sums};
use super::vector::MAX_LANES;
use crate::{DType, PIECE_ROWS};

/// Chains of k in a block at most: C is read and written once for each block.
const MAX_CHAINS: usize = 3;

/// Values of k in a unit at most.
const MAX_K_PER_UNIT: usize = 2;

// A k that is cut into pieces is cut between two chains, and those are of whole blocks of quantised types.
const _: () =
    assert!((PIECE_ROWS as usize).is_multiple_of(CHAIN * MAX_K_PER_UNIT) && CHAIN.is_multiple_of(32));
/// Size of a packed strip at most: with a panel of the other operand it stays in the second-level cache.
pub(super) const STRIP_BYTES: usize = 384 << 10;
/// Size of the panels that one packing task makes, about.
const PACKING_TASK_BYTES: usize = 64 << 10;
/// Lines of a shared chunk at most where sums are kept in f32 beside a bf16 C.
const CHUNK_WITH_SUMS: usize = 512;

/// One of the two operands, with the lines that its panels hold.
#[derive(Clone, Copy)]
struct Side {
    lines: Lines,
    width: usize,
    pack: unsafe fn(Lines, Range<usize>, Range<usize>, Panels),
}

impl Side {
    /// The lines of `panels` of those that `chunk` is cut into.
    fn lines_of(self, panels: Range<usize>, chunk: &Range<usize>) -> Range<usize> {
        let at = |panel: usize| chunk.end.min(chunk.start + panel * self.width);
        at(panels.start)..at(panels.end)
    }

    fn panels(self, chunk: &Range<usize>) -> usize {
        chunk.len().div_ceil(self.width)
    }
}

/// Values from one panel to the next: 64-byte aligned, with room for whole vectors after the last unit.
fn panel_stride(width: usize, units: usize) -> usize {
    (units * width + MAX_LANES).next_multiple_of(16)
}

/// The largest chunk of at most `most` lines, in whole panels, that cuts `count` lines into even parts.
fn even_chunk(count: usize, most: usize, width: usize) -> usize {
    let chunks = count.div_ceil(most).max(1);
    count.div_ceil(chunks).next_multiple_of(width)
}

/// The parts of `0..count` that are `size` long, the last one perhaps shorter.
fn parts(count: usize, size: usize) -> impl Iterator<Item = Range<usize>> {
    (0..count).step_by(size.max(1)).map(move |start| start..count.min(start + size))
}

/// As [`parts`], but one empty part of nothing: without any k, C still has to be written.
fn parts_or_nothing(count: usize, size: usize) -> impl Iterator<Item = Range<usize>> {
    (count == 0).then_some(0..0).into_iter().chain(parts(count, size))
}

/// Computes the product.
///
/// # Safety
/// Operands and C are valid, and C overlaps neither.
pub(super) unsafe fn run(product: &Product, crew: &mut impl Crew) {
    let Product { kernels, a, b, k, c, .. } = *product;
    let a = Side { lines: a, width: kernels.rows, pack: kernels.pack_a };
    let b = Side { lines: b, width: kernels.columns, pack: kernels.pack_b };
    let share_a = a.lines.count < b.lines.count;
    let (shared, strips) = if share_a { (a, b) } else { (b, a) };

    let k_blocks = k.div_ceil(MAX_CHAINS * kernels.chain_k).max(1);
    // Whole chains, which begin at the same k wherever k ends.
    let whole = if k_blocks > 1 { kernels.chain_k } else { 32 };
    let k_block = k.div_ceil(k_blocks).next_multiple_of(whole);
    let units = |k: usize| k.div_ceil(kernels.step_k) * kernels.step_units;
    let panel = panel_stride(shared.width, units(k_block));

    // A narrow C cannot hold the sums from one block of k to the next.
    let beside = c.dtype != DType::F32 && k > k_block;
    let common = crew.common();
    let beside_bytes = if beside { common.bytes / 3 / 64 * 64 } else { 0 };
    let packed = common.start.wrapping_add(beside_bytes).cast::<f32>();
    let most = ((common.bytes - beside_bytes) / 4 / panel).max(1) * shared.width;
    let (shared_chunk, strips_chunk) = if beside {
        let most = most.min(CHUNK_WITH_SUMS.next_multiple_of(shared.width));
        let shared_chunk = even_chunk(shared.lines.count, most, shared.width);
        (shared_chunk, (beside_bytes / 4 / shared_chunk.max(1) / strips.width).max(1) * strips.width)
    } else {
        (even_chunk(shared.lines.count, most, shared.width), strips.lines.count)
    };

    for shared_lines in parts(shared.lines.count, shared_chunk) {
        for strips_lines in parts(strips.lines.count, strips_chunk) {
            let (rows, columns) =
                if share_a { (&shared_lines, &strips_lines) } else { (&strips_lines, &shared_lines) };
            for k_part in parts_or_nothing(k, k_block) {
                let place = ProductPart { first: k_part.start == 0, last: k_part.end == k, rows, columns };
                let round = Round {
                    kernels,
                    share_a,
                    shared,
                    shared_lines: &shared_lines,
                    strips,
                    strips_lines: &strips_lines,
                    units: units(k_part.len()),
                    k: k_part,
                    packed,
                    sums: sums(product, &place, beside.then_some(common)),
                };
                // SAFETY: as for this function; the chunks were cut to the memory's size.
                unsafe { round.run(crew) };
            }
        }
    }
}

/// Which part of the product a round computes.
struct ProductPart<'a> {
    /// Whether it is the first and the last block of k.
    first: bool,
    last: bool,
    rows: &'a Range<usize>,
    columns: &'a Range<usize>,
}

/// Where the sums of a round start from and go to. `beside` is memory for f32 sums that C cannot hold.
fn sums(product: &Product, place: &ProductPart<'_>, beside: Option<Memory>) -> Sums {
    let c = product.c;
    let finish = match (c.dtype, product.accumulate) {
        (DType::Bf16, false) => Finish::Bf16,
        (DType::Bf16, true) => c.dither.map_or(Finish::AddBf16, Finish::AddBf16Dithered),
        (DType::F16, false) => Finish::F16,
        (DType::F16, true) => Finish::AddF16,
        _ => Finish::F32,
    };
    let whole =
        Sums { start: std::ptr::null(), start_stride: 0, out: c.data, out_stride: c.row_stride, finish };
    let mut sums = whole.at(place.rows.start, place.columns.start);
    match beside {
        Some(memory) => {
            let stride = place.columns.len();
            if !place.first {
                (sums.start, sums.start_stride) = (memory.start.cast_const().cast(), stride);
            }
            if !place.last {
                (sums.out, sums.out_stride, sums.finish) = (memory.start, stride, Finish::F32);
            }
        }
        None if finish == Finish::F32 && (product.accumulate || !place.first) => {
            (sums.start, sums.start_stride) = (sums.out.cast_const().cast(), sums.out_stride);
        }
        None => {}
    }
    sums
}

/// One block of k for one chunk of either operand.
struct Round<'a> {
    kernels: &'static Kernels,
    /// Whether A is the shared operand, B the one in strips; else the other way around.
    share_a: bool,
    shared: Side,
    shared_lines: &'a Range<usize>,
    strips: Side,
    strips_lines: &'a Range<usize>,
    k: Range<usize>,
    units: usize,
    /// The shared chunk's panels.
    packed: *mut f32,
    /// At the chunks' first row and column.
    sums: Sums,
}

// SAFETY: each task writes panels and tiles of its own, and reads shared panels only after all are complete.
unsafe impl Sync for Round<'_> {}

/// How a round is dealt out to tasks.
#[derive(Clone, Copy)]
struct Deal {
    /// Panels of the shared operand, and how many of them a packing task takes.
    shared_panels: usize,
    packing: usize,
    packing_tasks: usize,
    strip_panels: usize,
    /// Panels in a strip at most.
    longest: usize,
    threads: usize,
    /// Parts of the shared chunk, each a task of its own for every strip: more than one where strips are few.
    parts: usize,
}

impl Deal {
    /// The panels of strip `index`; strips get shorter towards the end, so that all threads end together.
    fn strip(&self, index: usize) -> Range<usize> {
        let mut start = 0;
        for _ in 0..index {
            start += self.length(start);
        }
        start..start + self.length(start)
    }

    fn strips(&self) -> usize {
        let (mut start, mut count) = (0, 0);
        while start < self.strip_panels {
            start += self.length(start);
            count += 1;
        }
        count
    }

    /// Panels of the strip that begins with panel `start`.
    fn length(&self, start: usize) -> usize {
        let left = self.strip_panels - start;
        if self.threads == 1 {
            left.min(self.longest)
        } else {
            (left / (2 * self.threads)).clamp(1, self.longest).min(left)
        }
    }
}

impl Round<'_> {
    /// # Safety
    /// As for [`run`]; the shared chunk's panels and the sums fit in their memory.
    unsafe fn run(&self, crew: &mut impl Crew) {
        let threads = crew.threads();
        let shared_panels = self.shared.panels(self.shared_lines);
        let strip_panels = self.strips.panels(self.strips_lines);
        let packing = (PACKING_TASK_BYTES / 4 / panel_stride(self.shared.width, self.units)).max(1);
        let packing_tasks = shared_panels.div_ceil(packing);
        let wanted = if threads == 1 { 1 } else { (4 * threads).div_ceil(strip_panels.max(1)) };
        let parts = wanted.clamp(1, shared_panels.max(1));
        let longest = (STRIP_BYTES / 4 / panel_stride(self.strips.width, self.units)).max(1);
        let deal = Deal { shared_panels, packing, packing_tasks, strip_panels, longest, threads, parts };

        let packed = AtomicUsize::new(0);
        crew.run(packing_tasks + deal.strips() * parts, &|task, own| {
            if task < packing_tasks {
                // SAFETY: as for this function, and each task is run once.
                unsafe { self.pack_shared(&deal, task) };
                packed.fetch_add(1, Ordering::Release);
            } else {
                // SAFETY: as above.
                unsafe { self.multiply(&deal, task - packing_tasks, own, &packed) };
            }
        });
    }

    /// Packs the shared panels of one packing task.
    ///
    /// # Safety
    /// As for [`run`](Round::run); no other task has this number.
    unsafe fn pack_shared(&self, deal: &Deal, task: usize) {
        let panels = task * deal.packing..deal.shared_panels.min((task + 1) * deal.packing);
        let Side { lines, width, pack } = self.shared;
        let stride = panel_stride(width, self.units);
        let to = Panels { data: self.packed.wrapping_add(panels.start * stride), width, stride };
        // SAFETY: as for this function.
        unsafe { pack(lines, self.shared.lines_of(panels, self.shared_lines), self.k.clone(), to) };
    }

    /// Packs a strip and multiplies it with its part of the shared chunk.
    ///
    /// # Safety
    /// As for [`run`](Round::run); no other task has this number or uses `own`.
    unsafe fn multiply(&self, deal: &Deal, task: usize, own: Memory, packed: &AtomicUsize) {
        let (strip, part) = (task / deal.parts, task % deal.parts);
        let Side { lines, width, pack } = self.strips;
        let stride = panel_stride(width, self.units);
        let strip_lines = self.strips.lines_of(deal.strip(strip), self.strips_lines);
        assert!(strip_lines.len().div_ceil(width) * stride * size_of::<f32>() <= own.bytes);
        let to = Panels { data: own.start.cast(), width, stride };
        // SAFETY: as for this function.
        unsafe { pack(lines, strip_lines.clone(), self.k.clone(), to) };

        // Packing tasks begin before all others and wait for nobody, so this ends.
        let mut spins = 0;
        while packed.load(Ordering::Acquire) < deal.packing_tasks {
            spins += 1;
            if spins < 1000 { std::hint::spin_loop() } else { std::thread::yield_now() }
        }

        let each = deal.shared_panels.div_ceil(deal.parts);
        let panels = deal.shared_panels.min(part * each)..deal.shared_panels.min((part + 1) * each);
        let shared_stride = panel_stride(self.shared.width, self.units);
        let shared = (self.packed.wrapping_add(panels.start * shared_stride).cast_const(), shared_stride);
        let shared_lines = self.shared.lines_of(panels, self.shared_lines);
        let shared_at = shared_lines.start - self.shared_lines.start;
        let own = (own.start.cast::<f32>().cast_const(), stride);
        let strip_at = strip_lines.start - self.strips_lines.start;
        let ahead = if deal.parts == 1 { self.strip_after(deal, strip) } else { None };
        let block = if self.share_a {
            Block {
                a: shared.0,
                a_stride: shared.1,
                b: own.0,
                b_stride: own.1,
                units: self.units,
                rows: shared_lines.len(),
                columns: strip_lines.len(),
                sums: self.sums.at(shared_at, strip_at),
                b_outer: false,
                ahead,
            }
        } else {
            Block {
                a: own.0,
                a_stride: own.1,
                b: shared.0,
                b_stride: shared.1,
                units: self.units,
                rows: strip_lines.len(),
                columns: shared_lines.len(),
                sums: self.sums.at(strip_at, shared_at),
                b_outer: true,
                ahead,
            }
        };
        // SAFETY: the panels are complete, and no other task has these tiles.
        unsafe { (self.kernels.multiply)(&block) };
    }

    /// The elements of the strip that this thread will probably take after `strip`.
    fn strip_after(&self, deal: &Deal, strip: usize) -> Option<Area> {
        let panels = deal.strip(strip + deal.threads);
        if panels.is_empty() {
            return None;
        }
        Some(self.strips.lines.area(self.strips.lines_of(panels, self.strips_lines), self.k.clone()))
    }
}
