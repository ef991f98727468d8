//! Products of bf16 by AMX: tiles of 16 rows and 16 columns of C, 32 values of k at a time.
//!
//! A panel of B is as for the dot products of AVX-512: a row of a panel's units is a row of the machine's tile. In a
//! panel of A the units of a line lie side by side, [`STEP`] of them, then those of the next line; k is filled up to
//! whole steps with zeros in both.
//!
//! What an instruction adds to a sum is made of 16 fused multiply-adds of the pairs' first values, 16 of their second
//! ones, and the sum of both, to nearest, with subnormals as zeros (Intel's manual of the instruction set extensions,
//! TDPBF16PS). [`Written`] is that in plain code.

use std::arch::asm;
use std::ops::Range;

use super::engine::{Engine, Pairs};
use super::pack::{Lines, Panels, along_end};
use super::storage::{self, At, Storage};
use super::tile::{self, Block, CHAIN, Tile};
use super::vector::{MAX_LANES, Vector};
use crate::DType;

/// Units of k that one instruction multiplies.
pub(super) const STEP: usize = 16;
/// Rows and columns of a block of C whose sums are kept in tiles: two by two of them.
pub(super) const HEIGHT: usize = 32;
pub(super) const WIDTH: usize = 32;

/// Rows and columns of one tile.
const TILE: usize = 16;

/// Values of k in a step.
pub(super) const STEP_K: usize = STEP * Pairs::K_PER_UNIT;

/// The units of a step for all lines of a panel.
const STEP_OF_A: usize = HEIGHT * STEP;

const _: () = assert!(CHAIN.is_multiple_of(STEP) && STEP == MAX_LANES && WIDTH <= tile::MAX_WIDTH);

/// A panel of A and one of B, from the same unit on.
#[derive(Clone, Copy)]
struct Pair {
    a: *const f32,
    b: *const f32,
    /// Whether B's panels change from tile to tile, and A's stay.
    b_streams: bool,
}

/// Who multiplies.
trait Machine {
    /// Makes the tiles ready for the calling thread, and drops them.
    ///
    /// # Safety
    /// The machine has the instructions.
    unsafe fn begin();
    unsafe fn end();

    /// Writes the sums of `steps` steps: 32 by 32 of them, or, where not `both`, the upper 16 rows, `stride` elements
    /// apart.
    ///
    /// # Safety
    /// The panels hold so many steps, `out` the rows, and tiles are ready.
    unsafe fn sums(panels: Pair, steps: usize, both: bool, out: *mut f32, stride: usize);
}

/// The instructions.
struct Tiles;

/// What `ldtilecfg` reads.
#[repr(C, align(64))]
struct Configuration {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

/// All eight tiles whole.
static CONFIGURATION: Configuration = {
    let (mut row_bytes, mut rows) = ([0; 16], [0; 16]);
    let mut tile = 0;
    while tile < 8 {
        row_bytes[tile] = 64;
        rows[tile] = TILE as u8;
        tile += 1;
    }
    Configuration { palette: 1, start_row: 0, reserved: [0; 14], row_bytes, rows }
};

/// Asks for eight lines of a panel's next step, `at` bytes after its beginning.
macro_rules! next_step {
    ($panel:literal, $at:literal) => {
        concat!(
            "prefetcht0 [{",
            $panel,
            "} + 2048 + ",
            $at,
            "]\n",
            "prefetcht0 [{",
            $panel,
            "} + 2112 + ",
            $at,
            "]\n",
            "prefetcht0 [{",
            $panel,
            "} + 2176 + ",
            $at,
            "]\n",
            "prefetcht0 [{",
            $panel,
            "} + 2240 + ",
            $at,
            "]\n",
            "prefetcht0 [{",
            $panel,
            "} + 2304 + ",
            $at,
            "]\n",
            "prefetcht0 [{",
            $panel,
            "} + 2368 + ",
            $at,
            "]\n",
            "prefetcht0 [{",
            $panel,
            "} + 2432 + ",
            $at,
            "]\n",
            "prefetcht0 [{",
            $panel,
            "} + 2496 + ",
            $at,
            "]\n",
        )
    };
}

/// Runs `template` over the steps of a pair of panels: what both shapes of sums have in common. Behind the last step the
/// registers of the panels are free.
macro_rules! over_steps {
    ($a:ident, $b:ident, $steps:ident, $out:ident, $stride:ident, $($template:expr),* $(,)?) => {
        asm!(
            $($template,)*
            a = inout(reg) $a => _,
            b = inout(reg) $b => _,
            steps = inout(reg) $steps => _,
            a_stride = in(reg) 64usize,
            b_stride = in(reg) 128usize,
            out = in(reg) $out,
            stride = in(reg) 4 * $stride,
            options(nostack),
        )
    };
}

/// Four tiles of sums. The operand that streams by does not drive the other out of the first-level cache: it is loaded
/// with a hint, and the other fetched a step ahead.
macro_rules! two_by_two {
    ($load_a:literal, $load_b:literal, $stays:literal, $a:ident, $b:ident, $steps:ident, $out:ident, $stride:ident) => {
        over_steps!(
            $a,
            $b,
            $steps,
            $out,
            $stride,
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            "test {steps}, {steps}",
            "jz 3f",
            "2:",
            concat!($load_b, " tmm6, [{b} + {b_stride}]"),
            concat!($load_a, " tmm4, [{a} + {a_stride}]"),
            next_step!($stays, "0"),
            "tdpbf16ps tmm0, tmm4, tmm6",
            concat!($load_b, " tmm7, [{b} + {b_stride} + 64]"),
            next_step!($stays, "512"),
            "tdpbf16ps tmm1, tmm4, tmm7",
            concat!($load_a, " tmm5, [{a} + {a_stride} + 1024]"),
            next_step!($stays, "1024"),
            "tdpbf16ps tmm2, tmm5, tmm6",
            next_step!($stays, "1536"),
            "tdpbf16ps tmm3, tmm5, tmm7",
            "add {a}, 2048",
            "add {b}, 2048",
            "dec {steps}",
            "jnz 2b",
            "3:",
            "tilestored [{out} + {stride}], tmm0",
            "tilestored [{out} + {stride} + 64], tmm1",
            // 16 rows below.
            "lea {a}, [{out} + 8*{stride}]",
            "lea {a}, [{a} + 8*{stride}]",
            "tilestored [{a} + {stride}], tmm2",
            "tilestored [{a} + {stride} + 64], tmm3",
        )
    };
}

/// Two tiles of sums beside each other.
macro_rules! one_by_two {
    ($a:ident, $b:ident, $steps:ident, $out:ident, $stride:ident) => {
        over_steps!(
            $a,
            $b,
            $steps,
            $out,
            $stride,
            "tilezero tmm0",
            "tilezero tmm1",
            "test {steps}, {steps}",
            "jz 3f",
            "2:",
            "tileloadd tmm6, [{b} + {b_stride}]",
            "tileloadd tmm4, [{a} + {a_stride}]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm7, [{b} + {b_stride} + 64]",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "add {a}, 2048",
            "add {b}, 2048",
            "dec {steps}",
            "jnz 2b",
            "3:",
            "tilestored [{out} + {stride}], tmm0",
            "tilestored [{out} + {stride} + 64], tmm1",
        )
    };
}

impl Machine for Tiles {
    #[inline(always)]
    unsafe fn begin() {
        // SAFETY: reads the 64 bytes of the configuration.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const CONFIGURATION, options(nostack, readonly)) }
    }

    #[inline(always)]
    unsafe fn end() {
        // SAFETY: touches tiles alone.
        unsafe { asm!("tilerelease", options(nostack, nomem)) }
    }

    #[inline(always)]
    unsafe fn sums(panels: Pair, steps: usize, both: bool, out: *mut f32, stride: usize) {
        let Pair { a, b, b_streams } = panels;
        // SAFETY: what is read and written are the panels and `out`, as the caller says.
        unsafe {
            match (both, b_streams) {
                (true, false) => two_by_two!("tileloaddt1", "tileloadd", "b", a, b, steps, out, stride),
                (true, true) => two_by_two!("tileloadd", "tileloaddt1", "a", a, b, steps, out, stride),
                (false, _) => one_by_two!(a, b, steps, out, stride),
            }
        }
    }
}

/// The instructions' effect, written out: for machines that lack them.
#[cfg(test)]
struct Written;

#[cfg(test)]
impl Machine for Written {
    unsafe fn begin() {}
    unsafe fn end() {}

    unsafe fn sums(panels: Pair, steps: usize, both: bool, out: *mut f32, stride: usize) {
        let Pair { a, b, .. } = panels;
        // Subnormals are zeros.
        let flushed = |x: f32| if x.is_subnormal() { 0.0f32.copysign(x) } else { x };
        let value = |bits: u32| flushed(f32::from_bits(bits));
        for i in 0..if both { HEIGHT } else { TILE } {
            for j in 0..WIDTH {
                let mut sum = 0.0f32;
                for step in 0..steps {
                    let mut halves = [0.0f32; 2];
                    for unit in 0..STEP {
                        // SAFETY: the panels hold so many steps.
                        let (a, b) = unsafe {
                            let a = *a.add(step * STEP_OF_A + i * STEP + unit);
                            (a.to_bits(), (*b.add((step * STEP + unit) * WIDTH + j)).to_bits())
                        };
                        halves[0] = flushed(value(a << 16).mul_add(value(b << 16), halves[0]));
                        halves[1] =
                            flushed(value(a & 0xffff_0000).mul_add(value(b & 0xffff_0000), halves[1]));
                    }
                    sum = flushed(sum + flushed(halves[0] + halves[1]));
                }
                // SAFETY: `out` holds the rows.
                unsafe { *out.add(i * stride + j) = sum };
            }
        }
    }
}

/// Multiplies a block by the machine's instructions.
///
/// # Safety
/// The machine has AMX and AVX-512 with bf16; the rest as for [`tile::multiply`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
pub(super) unsafe fn multiply(block: &Block) {
    // SAFETY: as for this function.
    unsafe {
        Tiles::begin();
        tile::multiply::<Pairs, HEIGHT>(block, WIDTH, product::<Tiles>);
        Tiles::end();
    }
}

/// The same in plain code.
///
/// # Safety
/// As above, but for AMX.
#[cfg(test)]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
pub(super) unsafe fn multiply_written(block: &Block) {
    // SAFETY: as for this function.
    unsafe { tile::multiply::<Pairs, HEIGHT>(block, WIDTH, product::<Written>) }
}

/// What [`tile::kernel`] does, for up to 32 rows and 32 columns.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
unsafe fn product<M: Machine>(rows: usize, tile: &Tile) {
    let Tile { a, b, units, start, start_stride, out, out_stride, b_streams, .. } = *tile;
    let both = rows > TILE;
    tile.fetch_ahead::<HEIGHT, { WIDTH * size_of::<f32>() }>();
    for chain in 0..units.div_ceil(CHAIN).max(1) {
        let first = chain * CHAIN;
        let (start, start_stride) =
            if chain == 0 { (start, start_stride) } else { (out.cast_const(), out_stride) };
        let steps = (units - first).min(CHAIN) / STEP;
        // SAFETY: the panels hold the chain's steps; rows that do not exist are written beside C alone.
        unsafe {
            let panels = Pair { a: a.add(first * HEIGHT), b: b.add(first * WIDTH), b_streams };
            if start.is_null() && rows.is_multiple_of(TILE) {
                M::sums(panels, steps, both, out, out_stride);
                continue;
            }
            let sums = tile.spare;
            M::sums(panels, steps, both, sums, WIDTH);
            for i in 0..rows {
                for j in (0..WIDTH).step_by(MAX_LANES) {
                    type V = <Pairs as Engine>::V;
                    let mut sum = V::load(sums.add(i * WIDTH + j));
                    if !start.is_null() {
                        sum = V::load(start.add(i * start_stride + j)).plus(sum);
                    }
                    sum.store(out.add(i * out_stride + j));
                }
            }
        }
    }
}

/// Fills the last step of panels of B with zeros.
///
/// # Safety
/// The panels of `lines` lines are valid and have room for whole steps.
pub(super) unsafe fn fill_up_b(lines: usize, k: usize, to: Panels) {
    let units = k.div_ceil(Pairs::K_PER_UNIT);
    let zeros = (units.next_multiple_of(STEP) - units) * to.width;
    if zeros > 0 {
        for panel in 0..lines.div_ceil(to.width) {
            // SAFETY: as for this function.
            unsafe { to.data.add(panel * to.stride + units * to.width).write_bytes(0, zeros) };
        }
    }
}

/// Packs lines of A. What belongs to lines that do not exist is anything.
///
/// # Safety
/// As for [`pack::pack`](super::pack::pack), with panels that have room for whole steps.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
pub(super) unsafe fn pack_a(from: Lines, lines: Range<usize>, k: Range<usize>, to: Panels) {
    // SAFETY: as for this function.
    unsafe {
        match from.dtype {
            DType::F32 => pack_floats::<storage::F32>(from, lines, k, to),
            DType::Bf16 => pack_floats::<storage::Bf16>(from, lines, k, to),
            DType::F16 => pack_floats::<storage::F16>(from, lines, k, to),
            DType::F8E4m3 => pack_floats::<storage::Fp8<storage::E4m3>>(from, lines, k, to),
            DType::F8E5m2 => pack_floats::<storage::Fp8<storage::E5m2>>(from, lines, k, to),
            _ => pack_rest(from, lines, 0, k, to),
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
unsafe fn pack_floats<S: Storage>(from: Lines, lines: Range<usize>, k: Range<usize>, to: Panels) {
    // SAFETY: as for `pack_a`.
    unsafe {
        if from.k_stride == 1 {
            pack_along::<S>(from, lines, k, to);
        } else if from.stride == 1 {
            pack_across::<S>(from, lines, k, to);
        } else {
            pack_rest(from, lines, 0, k, to);
        }
    }
}

/// k is contiguous in memory: a vector is a line's part of a step as it is.
#[inline(always)]
unsafe fn pack_along<S: Storage>(from: Lines, lines: Range<usize>, k: Range<usize>, to: Panels) {
    for (i, line) in lines.enumerate() {
        let mut out = to.data.wrapping_add(i / to.width * to.stride + i % to.width * STEP);
        let mut k_at = k.start;
        while k_at < k.end {
            let (index, left) = (line * from.stride + k_at, k.end - k_at);
            // SAFETY: the line's elements exist, and the panel has room for whole steps.
            unsafe {
                let units = if left >= STEP_K {
                    Pairs::along(At::<S>::new(from.data, index))
                } else {
                    along_end::<Pairs>(from, index, left)
                };
                units.store(out);
            }
            out = out.wrapping_add(STEP_OF_A);
            k_at += STEP_K;
        }
    }
}

/// Lines are neighbours in memory: squares of units, transposed in registers.
#[inline(always)]
unsafe fn pack_across<S: Storage>(from: Lines, lines: Range<usize>, k: Range<usize>, to: Panels) {
    // Lines of panels whose vectors all lie inside the matrix.
    let whole = lines.len() / TILE * TILE;
    for (step, k_step) in k.clone().step_by(STEP_K).enumerate() {
        for i in (0..whole).step_by(TILE) {
            // SAFETY: registers only.
            let mut vectors = [unsafe { <Pairs as Engine>::V::splat(0.0) }; MAX_LANES];
            for (unit, vector) in vectors.iter_mut().enumerate() {
                let k_at = k_step + unit * Pairs::K_PER_UNIT;
                if k_at < k.end {
                    let index = k_at * from.k_stride + lines.start + i;
                    let second = (k_at + 1 < k.end).then_some(index + from.k_stride);
                    // SAFETY: these elements of the rows of k exist.
                    *vector = unsafe { Pairs::across::<S>(from.data, index, second) };
                }
            }
            let out = to.data.wrapping_add(i / to.width * to.stride + step * STEP_OF_A + i % to.width * STEP);
            // SAFETY: the panel has room for the square.
            unsafe {
                <Pairs as Engine>::V::transpose(&mut vectors);
                for (line, vector) in vectors.iter().enumerate() {
                    vector.store(out.add(line * STEP));
                }
            }
        }
    }
    // SAFETY: as for `pack_a`.
    unsafe { pack_rest(from, lines, whole, k, to) }
}

/// The lines from number `first` of `lines` on, of any strides and type, element by element.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
unsafe fn pack_rest(from: Lines, lines: Range<usize>, first: usize, k: Range<usize>, to: Panels) {
    for (i, line) in lines.enumerate().skip(first) {
        for (step, k_at) in k.clone().step_by(STEP_K).enumerate() {
            let out = i / to.width * to.stride + step * STEP_OF_A + i % to.width * STEP;
            let index = line * from.stride + k_at * from.k_stride;
            // SAFETY: the elements exist, and the panel has room for whole steps.
            unsafe { along_end::<Pairs>(from, index, (k.end - k_at).min(STEP_K)).store(to.data.add(out)) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::Isa;

    /// What the plain code says of an instruction is what it does, to the bit: subnormals, infinities and sums that cancel too.
    #[test]
    fn written_out_as_the_machine_does_it() {
        if Isa::detect() < Isa::Amx {
            eprintln!("skipped: this machine has no AMX");
            return;
        }
        let mut state = 88172645463325252u64;
        let mut bits = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 16) as u16
        };
        #[repr(align(64))]
        struct Panel([u16; 2 * 3 * STEP_OF_A]);
        for kind in 0..4 {
            let mut panel = || {
                Panel(std::array::from_fn(|_| {
                    let any = bits();
                    match kind {
                        // Any at all; numbers around one; subnormals and their neighbours; large and small.
                        0 => any,
                        1 => any & 0x83ff | 0x3c00,
                        2 => any & 0x82ff,
                        _ => any & 0xbfff | (any & 1) << 14,
                    }
                }))
            };
            let (a, b) = (panel(), panel());
            let (a, b): (*const f32, *const f32) = (a.0.as_ptr().cast(), b.0.as_ptr().cast());
            for (both, b_streams) in [(true, true), (true, false), (false, false)] {
                let panels = Pair { a, b, b_streams };
                let (mut got, mut expected) = ([7.0f32; HEIGHT * WIDTH], [7.0f32; HEIGHT * WIDTH]);
                // SAFETY: three steps of both panels, and 32 rows of 32 sums.
                unsafe {
                    Tiles::begin();
                    Tiles::sums(panels, 3, both, got.as_mut_ptr(), WIDTH);
                    Tiles::end();
                    Written::sums(panels, 3, both, expected.as_mut_ptr(), WIDTH);
                }
                for (i, (got, expected)) in got.into_iter().zip(expected).enumerate() {
                    let same = got.to_bits() == expected.to_bits() || got.is_nan() && expected.is_nan();
                    assert!(same, "kind {kind}, {both}: {got:e} is not {expected:e} at {i}");
                }
            }
        }
    }
}
