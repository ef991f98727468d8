//! The dynamic 8-bit data types of bitsandbytes: 256 values, and the code of the nearest one.
//!
//! A decade of magnitudes, from one power of ten to the next, holds twice as many values as the one below it, the means
//! of neighbours in an even partition (Dettmers et al. 2022, section 2.2; `create_dynamic_map`).
//!
//! A number's code is its place among the values counted from 0, mirrored for negative ones. The place is found in two
//! steps: something that is right or one too low, from the upper half of the number's bits or by a line through its
//! decade, and a comparison with the one limit that is left.

#[cfg(target_arch = "x86_64")]
use crate::cpu::Isa;
use crate::cpu::kernels::Simd;

#[cfg(target_arch = "x86_64")]
mod avx512;

/// Upper halves of an f32 below this are one bucket: magnitudes below 2^-24, smaller than half of any value.
const FIRST_BUCKET: u32 = (127 - 24) << 7;

/// The upper half of 1.
const LAST_BUCKET: u32 = 127 << 7;

/// Room for the upper halves of f32 from there to 1: a power of two, so that no index needs a check.
const BUCKETS: usize = 4096;

/// Numbers that are coded at a time.
pub(super) const BLOCK: usize = crate::BLOCK_8BIT as usize;

/// A data type of 256 values, of either sign or not negative. Some tables are for vectors.
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
pub(super) struct DynamicMap<const SIGNED: bool> {
    /// In rising order.
    values: [f32; 256],
    /// The lower and upper halves of the values' bits.
    halves: [[u16; 256]; 2],
    /// A magnitude has a place above i where it exceeds the i-th. Midpoints between neighbours go to the even code.
    limits: [f32; 256],
    /// The lowest place of the magnitudes with an upper half; at most one limit lies among them.
    lowest: [u8; BUCKETS],
    lines: Lines,
    octaves: Octaves,
}

/// A place is on a line over the magnitudes of a decade. The first line is for what is nearest to 0, the one after the
/// seven decades for what is nearest to 1.
#[derive(Clone, Copy)]
struct Lines {
    /// scale * magnitude + offset is the place and a fraction.
    scale: [f32; LINES],
    offset: [f32; LINES],
    /// What it must not exceed: the last place of the decade and a half.
    most: [f32; LINES],
}

/// As many as a register holds.
const LINES: usize = 16;

/// The lines of the magnitudes from a power of two to the next, by the exponent's last five bits.
#[derive(Clone, Copy)]
struct Octaves {
    /// The line of the least.
    line: [u32; OCTAVES],
    /// Magnitudes above have the next line.
    end: [f32; OCTAVES],
}

const OCTAVES: usize = 32;

/// For values of either sign: -0.993 to 1, 0 at 127.
pub(super) static SIGNED: DynamicMap<true> = DynamicMap::new();

/// For values that are not negative: 0 to 1.
pub(super) static UNSIGNED: DynamicMap<false> = DynamicMap::new();

/// Values and limits of both data types, for other devices: of either sign, and not negative.
pub(crate) fn state_maps() -> [(&'static [f32; 256], &'static [f32; 256]); 2] {
    [(&SIGNED.values, &SIGNED.limits), (&UNSIGNED.values, &UNSIGNED.limits)]
}

impl<const SIGNED: bool> DynamicMap<SIGNED> {
    /// The code of 0.
    const ZERO: u8 = if SIGNED { 127 } else { 0 };

    const fn new() -> Self {
        let values = Self::values();
        let mut halves = [[0; 256]; 2];
        let mut code = 0;
        while code < 256 {
            let bits = values[code].to_bits();
            halves[0][code] = bits as u16;
            halves[1][code] = (bits >> 16) as u16;
            code += 1;
        }
        let limits = Self::limits(&values);
        let mut lowest = [0; BUCKETS];
        let mut place = 0;
        let mut bucket = 0;
        while bucket <= (LAST_BUCKET - FIRST_BUCKET) as usize {
            let smallest = if bucket == 0 { 0 } else { (FIRST_BUCKET + bucket as u32) << 16 };
            while f32::from_bits(smallest) > limits[place] {
                place += 1;
            }
            lowest[bucket] = place as u8;
            bucket += 1;
        }
        let (lines, ends) = Self::lines(&limits);
        DynamicMap { values, halves, limits, lowest, lines, octaves: octaves(&ends) }
    }

    /// out = the values of the codes, times `scale`.
    #[inline]
    pub fn decode_block(&self, simd: Simd, codes: &[u8; BLOCK], scale: f32, out: &mut [f32; BLOCK]) {
        #[cfg(target_arch = "x86_64")]
        if simd.isa() >= Isa::Avx512 {
            // SAFETY: a `Simd` is only made of an instruction set that this machine has.
            return unsafe { avx512::decode(self, codes, scale, out) };
        }
        let _ = simd;
        for (out, code) in out.iter_mut().zip(codes) {
            *out = self.values[usize::from(*code)] * scale;
        }
    }

    /// The codes of numbers over the largest magnitude among them, which is not 0.
    #[inline]
    pub fn encode_block(&self, simd: Simd, x: &[f32; BLOCK], absmax: f32, codes: &mut [u8; BLOCK]) {
        #[cfg(target_arch = "x86_64")]
        if simd.isa() >= Isa::Avx512 {
            // SAFETY: a `Simd` is only made of an instruction set that this machine has.
            return unsafe { avx512::encode(self, x, absmax, codes) };
        }
        let _ = simd;
        for (code, x) in codes.iter_mut().zip(x) {
            *code = self.encode(x / absmax);
        }
    }

    /// The code of the value nearest to x, which is -1 to 1; one nearest to 0 where it is not a number.
    #[inline(always)]
    fn encode(&self, x: f32) -> u8 {
        let magnitude = x.abs();
        let half = (magnitude.to_bits() >> 16).max(FIRST_BUCKET);
        let bucket = if half > LAST_BUCKET { 0 } else { half - FIRST_BUCKET };
        let lowest = self.lowest[bucket as usize % BUCKETS];
        let place = lowest + u8::from(magnitude > self.limits[usize::from(lowest)]);
        if SIGNED && x.is_sign_negative() {
            // A negative number that became 0 would lose its sign, and there is no -1.
            Self::ZERO - place.clamp(1, Self::ZERO)
        } else {
            Self::ZERO + place
        }
    }

    /// The values, computed in f32 as the reference tables are.
    const fn values() -> [f32; 256] {
        const POWERS: [f32; 7] = [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0];
        let mut values = [0.0; 256];
        let zero = Self::ZERO as usize;
        values[255] = 1.0;
        let mut next = zero + 1;
        let mut decade = 0;
        while decade < 7 {
            let count = Self::count(decade);
            let mut i = 0;
            while i < count {
                let mean = (boundary(i, count) + boundary(i + 1, count)) / 2.0;
                let value = mean * POWERS[decade];
                values[next] = value;
                if SIGNED {
                    values[2 * zero - next] = -value;
                }
                next += 1;
                i += 1;
            }
            decade += 1;
        }
        values
    }

    /// Values in a decade.
    const fn count(decade: usize) -> usize {
        if SIGNED { 1 << decade } else { 2 << decade }
    }

    /// The same for either sign: the codes of neighbours are as even or odd on both sides of 0.
    const fn limits(values: &[f32; 256]) -> [f32; 256] {
        let mut limits = [f32::INFINITY; 256];
        let mut code = Self::ZERO as usize;
        while code < 255 {
            let middle = (values[code] + values[code + 1]) * 0.5;
            limits[code - Self::ZERO as usize] =
                if code.is_multiple_of(2) { middle } else { middle.next_down() };
            code += 1;
        }
        limits
    }

    /// Also the ends of all lines but the last.
    ///
    /// A decade from `low` on has n values, `low` is n / 9 of their distances, and the limit of its first value lies a
    /// fifth of one above `low`: there the line of the decade below is already too high by one.
    const fn lines(limits: &[f32; 256]) -> (Lines, [f32; 8]) {
        let mut lines = Lines { scale: [0.0; LINES], offset: [0.5; LINES], most: [0.5; LINES] };
        let mut ends = [0.0; 8];
        let mut first = 1;
        let mut power = 1e-6;
        let mut decade = 0;
        while decade < 7 {
            let count = Self::count(decade);
            ends[decade] = limits[first - 1];
            lines.scale[decade + 1] = (count as f64 / (0.9 * power)) as f32;
            lines.offset[decade + 1] = (first as f64 - count as f64 / 9.0 - DOUBT as f64 / 2.0) as f32;
            lines.most[decade + 1] = (first + count) as f32 - 0.5;
            first += count;
            power *= 10.0;
            decade += 1;
        }
        ends[7] = limits[first - 1];
        lines.offset[8] = first as f32 + 0.5;
        lines.most[8] = first as f32 + 0.5;
        (lines, ends)
    }
}

/// Lines are lowered by half of this, more than they can be wrong by: where adding it leaves the place the same, it is
/// right.
const DOUBT: f32 = 1e-4;

/// The i-th of `count + 1` even steps from 0.1 to 1, reckoned from the nearer end.
const fn boundary(i: usize, count: usize) -> f32 {
    let step = (1.0f32 - 0.1) / count as f32;
    if i < count.div_ceil(2) { 0.1 + step * i as f32 } else { 1.0 - step * (count - i) as f32 }
}

/// No octave has more than one end.
const fn octaves(ends: &[f32; 8]) -> Octaves {
    let mut octaves = Octaves { line: [0; OCTAVES], end: [f32::INFINITY; OCTAVES] };
    let mut exponent = FIRST_BUCKET >> 7;
    let mut line = 0;
    while exponent <= 127 {
        let octave = exponent as usize % OCTAVES;
        octaves.line[octave] = line as u32;
        if line < ends.len() && ends[line] < f32::from_bits((exponent + 1) << 23) {
            octaves.end[octave] = ends[line];
            line += 1;
        }
        exponent += 1;
    }
    octaves
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::Isa;

    /// The code as bitsandbytes finds it: eight halvings, then the nearer of two neighbours.
    fn by_halving(values: &[f32; 256], x: f32) -> u8 {
        let (mut lower, mut pivot, mut upper) = (0usize, 127usize, 255usize);
        for step in [64, 32, 16, 8, 4, 2, 1] {
            if x > values[pivot] {
                lower = pivot;
                pivot += step;
            } else {
                upper = pivot;
                pivot -= step;
            }
        }
        let middle = |a: usize| (values[a] + values[pivot]) * 0.5;
        let code = if x > values[pivot] {
            if x > middle(upper) { upper } else { pivot }
        } else if x < middle(lower) {
            lower
        } else {
            pivot
        };
        code as u8
    }

    #[test]
    fn maps_are_the_reference_tables() {
        let text = include_str!("../../../../tests/fixtures/dynamic_maps.txt");
        for (values, line) in [SIGNED.values, UNSIGNED.values].into_iter().zip(text.lines()) {
            let bits: Vec<u32> = line.split(' ').map(|x| u32::from_str_radix(x, 16).unwrap()).collect();
            assert_eq!(values.map(f32::to_bits).to_vec(), bits);
        }
    }

    #[test]
    fn codes_are_those_of_the_binary_search() {
        check_codes(&SIGNED);
        check_codes(&UNSIGNED);
    }

    fn check_codes<const SIGNED: bool>(map: &DynamicMap<SIGNED>) {
        let mut points: Vec<f32> = (0..=200_000).map(|i| i as f32 / 200_000.0).collect();
        points.extend((0..3000).map(|i| (0.99f32).powi(i)));
        for i in 0..255 {
            let middle = (map.values[i] + map.values[i + 1]) * 0.5;
            let near = [middle, middle.next_down(), middle.next_up(), map.values[i], map.values[i + 1]];
            points.extend(near.map(f32::abs));
        }
        points.retain(|x| *x <= 1.0);
        if SIGNED {
            points.extend(points.clone().iter().map(|x| -x));
        }
        let want = |x: f32| {
            let code = by_halving(&map.values, x);
            let value = map.values[usize::from(code)];
            match SIGNED && x.is_sign_negative() != value.is_sign_negative() {
                true if x > 0.0 => code.wrapping_add(1),
                true => code.wrapping_sub(1),
                false => code,
            }
        };
        for isa in Isa::available() {
            for points in points.chunks(BLOCK) {
                let (mut x, mut codes) = ([0.0; BLOCK], [0; BLOCK]);
                x[..points.len()].copy_from_slice(points);
                map.encode_block(Simd::new(isa), &x, 1.0, &mut codes);
                for (x, code) in x.into_iter().zip(codes) {
                    assert_eq!(code, want(x), "{x:e} {SIGNED} {isa}");
                }
            }
            let codes = std::array::from_fn(|i| i as u8);
            let mut values = [0.0; BLOCK];
            map.decode_block(Simd::new(isa), &codes, 1.0, &mut values);
            assert_eq!(values, map.values, "{isa}");
        }
    }

    #[test]
    fn lines_are_right_about_every_magnitude() {
        check_lines(&SIGNED);
        check_lines(&UNSIGNED);
    }

    /// On a line, places rise with the magnitude: what holds right below and above every limit holds in between.
    fn check_lines<const SIGNED: bool>(map: &DynamicMap<SIGNED>) {
        let lowest_and_highest = |x: f32| {
            let octave = (x.max(f32::from_bits(FIRST_BUCKET << 16)).to_bits() >> 23) as usize % OCTAVES;
            let line = (map.octaves.line[octave] + u32::from(x > map.octaves.end[octave])) as usize;
            let Lines { scale, offset, most } = &map.lines;
            let fraction = x.mul_add(scale[line], offset[line]).min(most[line]);
            [fraction, fraction + DOUBT].map(|place| place as usize)
        };
        for (place, limit) in map.limits.into_iter().enumerate().filter(|(_, limit)| limit.is_finite()) {
            let [lowest, highest] = lowest_and_highest(limit);
            assert!(lowest <= place && highest >= place, "{lowest} {place} {highest}");
            let [lowest, highest] = lowest_and_highest(limit.next_up());
            assert!(lowest >= place && highest > place, "{lowest} {place} {highest}");
        }
    }
}
