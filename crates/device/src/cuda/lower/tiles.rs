//! Products of whole tiles. What is no matrix of bf16 that copies can be made of is rounded to one first, part by part, in the workspace.

use super::Launch;
use super::parameters::{Boxes, Emit, Rounding, View, plain, wide_blocks};
use crate::cuda::CudaError;
use crate::{DType, Tensor};

/// Rows of a tile of whole products, the inner length of a step, and columns of a wide and of a narrow one.
const TILE_ROWS: u64 = 128;
const TILE_STEP: u64 = 64;
const WIDE: u64 = 256;
const NARROW: u64 = 128;
/// What a narrow tile takes to a wide one, in percent: as an H200 made whole rounds of both.
const NARROW_PERCENT: u64 = 53;
/// Tiles of both operands that are on their way, where sums go through, barriers, and what aligns them: the same of wide and narrow ones.
const SHARED_BYTES: u64 = 4 * 48 * 1024 + 8 * 16 * 40 * 4 + 128 + 1024;
/// Rows and columns of a part at least, while the inner length is whole; and at most, where it is not.
const LEAST_SIDE: u64 = 1024;
const MOST_SIDE: u64 = 4096;
/// Inner length of such a part at least, if there is as much and room for it.
const LEAST_INNER: u64 = 256;
/// Numbers that a thread rounds together: `UNIT` of the kernels.
const UNIT: u64 = 16;

plain! {
    /// Where sums are: number (row, column) of a part is number at + row * pitch + column of the values.
    Sums { values: View, pitch: u64, at: u64 }
}

impl Sums {
    const NONE: Sums = Sums { values: View::NONE, pitch: 0, at: 0 };
}

/// An operand; `along` says that its lines are along the inner length, else they lie across it.
#[derive(Clone, Copy)]
pub(super) struct Side<'a> {
    pub tensor: &'a Tensor,
    pub along: bool,
}

/// A range of numbers: the first one, and how many there are.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Span {
    first: u64,
    count: u64,
}

/// The spans of so many numbers, all but the last one of `step`.
fn spans(length: u64, step: u64) -> impl Iterator<Item = Span> {
    (0..length).step_by(step as usize).map(move |first| Span { first, count: step.min(length - first) })
}

/// What a product of whole tiles is made of.
pub(super) struct WholeTiles<'a> {
    pub a: Side<'a>,
    pub b: Side<'a>,
    pub out: &'a Tensor,
    pub bias: Option<&'a Tensor>,
    /// Rows, inner length and columns.
    pub sides: [u64; 3],
    pub accumulate: bool,
    pub rounding: crate::Rounding,
    /// The kernels of wide and of narrow tiles.
    pub names: [&'static str; 2],
}

/// How large the parts of a product are, and where in the workspace their operands and sums are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Parts {
    rows: u64,
    inner: u64,
    columns: u64,
}

/// An operand that is rounded in the workspace: where, and which part of it is there.
struct Rounded {
    offset: u64,
    there: Option<(Span, Span)>,
}

impl WholeTiles<'_> {
    /// Launches the product; false where it cannot be one of whole tiles.
    pub fn launch(&self, emit: &mut Emit<'_>) -> Result<bool, CudaError> {
        let [rows, inner, columns] = self.sides;
        let [a_rounded, b_rounded] = [self.a, self.b].map(|side| !can_be_copied(emit, side.tensor));
        let exact = self.out.dtype() == DType::F32;
        let Some(parts) = parts(self.sides, [a_rounded, b_rounded], exact, emit.part_bytes()) else {
            return Ok(false);
        };
        let within = |side: Side<'_>| side.tensor.columns().max(side.tensor.rows()) <= u64::from(u32::MAX);
        if !within(self.a) || !within(self.b) {
            return Ok(false);
        }
        let bytes = |is: bool, side: u64| match is {
            true => 2 * side.next_multiple_of(UNIT) * parts.inner.next_multiple_of(UNIT),
            false => 0,
        };
        let a_bytes = bytes(a_rounded, parts.rows);
        let mut rounded = [(a_rounded, 0), (b_rounded, a_bytes)]
            .map(|(is, offset)| is.then_some(Rounded { offset, there: None }));
        let sums = emit.workspace_f32(a_bytes + bytes(b_rounded, parts.columns));
        let values = emit.view(self.out);
        for row in spans(rows, parts.rows) {
            for column in spans(columns, parts.columns) {
                let own = Sums { values, pitch: columns, at: row.first * columns + column.first };
                let between = if exact { own } else { Sums { values: sums, pitch: column.count, at: 0 } };
                for k in spans(inner, parts.inner) {
                    let from = match k.first {
                        0 if self.accumulate => own,
                        0 => Sums::NONE,
                        _ => between,
                    };
                    let to = if k.first + k.count == inner { own } else { between };
                    self.launch_part(emit, [row, k, column], &mut rounded, [from, to])?;
                }
            }
        }
        Ok(true)
    }

    /// Launches a part of the product, with operands rounded where they have to be.
    fn launch_part(
        &self,
        emit: &mut Emit<'_>,
        [row, k, column]: [Span; 3],
        [a, b]: &mut [Option<Rounded>; 2],
        [from, to]: [Sums; 2],
    ) -> Result<(), CudaError> {
        let wide = self.is_wide(emit, row.count, column.count);
        let [of_wide, of_narrow] = self.names;
        let (name, width) = if wide { (of_wide, WIDE) } else { (of_narrow, NARROW) };
        let of_a = boxes(emit, self.a, a.as_mut(), row, k, TILE_ROWS)?;
        let of_b = boxes(emit, self.b, b.as_mut(), column, k, width)?;
        let tiles = row.count.div_ceil(TILE_ROWS).saturating_mul(column.count.div_ceil(width));
        let kernel = emit.kernel(name, emit.tile_blocks(tiles)).shared(SHARED_BYTES);
        let kernel = kernel.with_matrix(of_a).with_matrix(of_b).with(from).with(to);
        let bias = self.bias.filter(|_| k.first == 0);
        let kernel = kernel.with(bias.map_or(View::NONE, |bias| emit.view_from(bias, column.first)));
        let kernel = [row.count, k.count, column.count].into_iter().fold(kernel, Launch::with);
        emit.launch(kernel.with(Rounding::from(self.rounding)))
    }

    /// Whether tiles of a part are wide.
    fn is_wide(&self, emit: &Emit<'_>, rows: u64, columns: u64) -> bool {
        let tiles = |width: u64| rows.div_ceil(TILE_ROWS).saturating_mul(columns.div_ceil(width));
        let rounds = |width| tiles(width).div_ceil(emit.multiprocessors());
        rounds(WIDE) * 100 <= rounds(NARROW) * NARROW_PERCENT
    }
}

/// Whether tiles of an operand can be copied as they are: in bf16, lines of multiples of 16 bytes.
fn can_be_copied(emit: &Emit<'_>, t: &Tensor) -> bool {
    t.dtype() == DType::Bf16 && t.columns().is_multiple_of(8) && emit.address(t).is_multiple_of(16)
}

/// Parts of a product of which some operands are rounded in so many bytes: of whole inner length where these are large enough, else of
/// some of it. Sums in f32 go on where they are; others are kept in f32 between parts.
fn parts(sides: [u64; 3], rounded: [bool; 2], exact: bool, bytes: u64) -> Option<Parts> {
    let [rows, inner, columns] = sides;
    if sides.contains(&0) {
        return None;
    }
    if rounded == [false, false] {
        return Some(Parts { rows, inner, columns });
    }
    let share = bytes / rounded.iter().filter(|is| **is).count() as u64;
    let fit = |is: bool, side: u64, step: u64| match is {
        true => (share / (2 * inner.next_multiple_of(UNIT)) / step * step).min(side),
        false => side,
    };
    let (some_rows, some_columns) = (fit(rounded[0], rows, TILE_ROWS), fit(rounded[1], columns, WIDE));
    if some_rows >= rows.min(LEAST_SIDE) && some_columns >= columns.min(LEAST_SIDE) {
        return Some(Parts { rows: some_rows, inner, columns: some_columns });
    }
    let (mut rows, mut columns) = (rows.min(MOST_SIDE), columns.min(MOST_SIDE));
    let sums = |rows: u64, columns: u64| if exact { 0 } else { (4 * rows * columns).next_multiple_of(256) };
    // The inner length that there is room for beside the sums, in whole steps.
    let length = |rows: u64, columns: u64| {
        let side = |is: bool, side: u64| if is { side.next_multiple_of(UNIT) } else { 0 };
        let each = 2 * (side(rounded[0], rows) + side(rounded[1], columns));
        bytes.saturating_sub(sums(rows, columns)) / each / TILE_STEP * TILE_STEP
    };
    let least = inner.min(LEAST_INNER);
    while (sums(rows, columns) > bytes / 2 || length(rows, columns) < least)
        && (rows > TILE_ROWS || columns > WIDE)
    {
        // By halves, which are whole tiles: the side that has more of them.
        let [down, across] = [rows.div_ceil(TILE_ROWS), columns.div_ceil(WIDE)];
        match down >= across {
            true => rows = down / 2 * TILE_ROWS,
            false => columns = across / 2 * WIDE,
        }
    }
    let inner = length(rows, columns);
    (inner > 0).then_some(Parts { rows, inner, columns })
}

/// What a kernel copies tiles of a part of an operand by: rounded first, unless that part is there.
fn boxes(
    emit: &mut Emit<'_>,
    side: Side<'_>,
    rounded: Option<&mut Rounded>,
    outer: Span,
    inner: Span,
    tile: u64,
) -> Result<Boxes, CudaError> {
    let (lines, along) = if side.along { (outer, inner) } else { (inner, outer) };
    let step = TILE_STEP as u32;
    // Lines along the inner length are copied as many as a tile has, others 64 at a time.
    let tile = [step, if side.along { tile as u32 } else { step }];
    let width = side.tensor.columns();
    let Some(rounded) = rounded else {
        let address = emit.address(side.tensor).wrapping_add(2 * (lines.first * width + along.first));
        return Ok(Boxes::of_part(address, [along.count, lines.count], width, tile));
    };
    let (address, pitch) = (emit.workspace(rounded.offset), along.count.next_multiple_of(UNIT));
    if rounded.there.replace((outer, inner)) != Some((outer, inner)) {
        let kernel =
            emit.kernel("round_part", wide_blocks(lines.count * pitch / 2)).with(emit.view(side.tensor));
        let places = [width, lines.first, lines.count, along.first, along.count, address, pitch];
        emit.launch(places.into_iter().fold(kernel, Launch::with))?;
    }
    Ok(Boxes::of_part(address, [along.count, lines.count], pitch, tile))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes that parts need at most.
    fn needed(parts: Parts, rounded: [bool; 2], exact: bool, inner: u64) -> u64 {
        let side = |is: bool, side: u64| if is { 2 * side * parts.inner.next_multiple_of(UNIT) } else { 0 };
        let sums = if exact || parts.inner == inner { 0 } else { 4 * parts.rows * parts.columns };
        side(rounded[0], parts.rows.next_multiple_of(UNIT))
            + side(rounded[1], parts.columns.next_multiple_of(UNIT))
            + sums
    }

    #[test]
    fn parts_fit_the_workspace() {
        for bytes in [256 << 10, 1 << 20, 64 << 20] {
            for sides in [
                [1, 1, 1],
                [512, 128_256, 2048],
                [128_256, 512, 2048],
                [2048, 4096, 11_008],
                [40, 2088, 24],
                [150, 136, 272],
                [255, 4096, 511],
            ] {
                for rounded in [[true, false], [false, true], [true, true]] {
                    for exact in [false, true] {
                        let parts = parts(sides, rounded, exact, bytes).unwrap();
                        let needed = needed(parts, rounded, exact, sides[1]);
                        assert!(
                            needed <= bytes,
                            "{sides:?} {rounded:?} {exact} {bytes}: {parts:?} need {needed}"
                        );
                        assert!(parts.inner == sides[1] || parts.inner.is_multiple_of(TILE_STEP));
                        assert!(parts.rows == sides[0] || parts.rows.is_multiple_of(TILE_ROWS));
                        assert!(parts.columns == sides[2] || parts.columns.is_multiple_of(WIDE));
                    }
                }
            }
        }
        assert_eq!(parts([2048, 4096, 4096], [false, true], false, 64 << 20).unwrap().columns, 4096);
        assert_eq!(parts([17, 64, 64], [true, false], false, 0), None);
        assert_eq!(parts([17, 0, 64], [true, false], false, 64 << 20), None);
    }
}
