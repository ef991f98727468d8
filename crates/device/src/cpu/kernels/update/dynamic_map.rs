//! The dynamic 8-bit data types of bitsandbytes: 256 values, and the code of the nearest one.
//!
//! A decade of magnitudes, from one power of ten to the next, holds twice as many values as the one below it, the means
//! of neighbours in an even partition (Dettmers et al. 2022, section 2.2; `create_dynamic_map`).
//!
//! A code is found in two steps: something that is right or one too low, from the upper half of the number's bits or by
//! arithmetic on its decade, and a comparison with the one threshold that is left.

#[cfg(target_arch = "x86_64")]
use crate::cpu::Isa;
use crate::cpu::kernels::Simd;

/// Upper halves of an f32 below this are one bucket: magnitudes below 2^-24, smaller than half of any value.
const FIRST_BUCKET: u32 = (127 - 24) << 7;

/// Buckets of one sign: the upper halves of f32 from there to 1.
const BUCKETS: usize = 0x3f80 - FIRST_BUCKET as usize + 1;

/// Where the buckets of negative numbers begin.
const NEGATIVE: usize = 4096;

/// Numbers that are coded at a time.
pub(super) const BLOCK: usize = crate::BLOCK_8BIT as usize;

/// A data type of 256 values.
pub(super) struct DynamicMap {
    /// In rising order.
    values: [f32; 256],
    /// x has a code above i where it exceeds the i-th. Midpoints between neighbours go to the even code.
    thresholds: [f32; 256],
    /// The least code of the numbers with an upper half; at most one threshold lies among them.
    least: [u8; 2 * NEGATIVE],
    /// The code of 0.
    zero: u8,
    /// The largest code that a negative number may have: one decoded to 0 would lose its sign.
    last_negative: u8,
    decades: Decades,
}

/// Where the k-th value away from 0 is, decade by decade; the first entry is for what is nearest to 0.
#[derive(Clone, Copy)]
struct Decades {
    /// Magnitudes above the i-th have left entry i behind, and some that have are not above it.
    ends: [f32; 7],
    /// k is at least scale * magnitude + offset, cut to an integer, and at most one more.
    scale: [f32; 16],
    offset: [f32; 16],
    /// The last k of the decade.
    last: [f32; 16],
}

/// For values of either sign: -0.993 to 1, 0 at 127.
pub(super) static SIGNED: DynamicMap = DynamicMap::new(true);

/// For values that are not negative: 0 to 1.
pub(super) static UNSIGNED: DynamicMap = DynamicMap::new(false);

impl DynamicMap {
    const fn new(signed: bool) -> DynamicMap {
        let values = values(signed);
        let thresholds = thresholds(&values);
        let mut least = [0; 2 * NEGATIVE];
        let mut code = if signed { 127 } else { 0 };
        let mut bucket = 0;
        while bucket < BUCKETS {
            let smallest = if bucket == 0 { 0 } else { (FIRST_BUCKET + bucket as u32) << 16 };
            while f32::from_bits(smallest) > thresholds[code] {
                code += 1;
            }
            least[bucket] = code as u8;
            bucket += 1;
        }
        let mut code = 127;
        let mut bucket = 0;
        while signed && bucket < BUCKETS {
            let largest = ((FIRST_BUCKET + bucket as u32) << 16) | 0xffff;
            while code > 0 && -f32::from_bits(largest) <= thresholds[code - 1] {
                code -= 1;
            }
            least[NEGATIVE + bucket] = code as u8;
            bucket += 1;
        }
        let (zero, last_negative) = if signed { (127, 126) } else { (0, 255) };
        let decades = decades(&thresholds, signed);
        DynamicMap { values, thresholds, least, zero, last_negative, decades }
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
            *out = self.decode(*code) * scale;
        }
    }

    /// The codes of numbers from -1 to 1.
    #[inline]
    pub fn encode_block(&self, simd: Simd, x: &[f32; BLOCK], codes: &mut [u8; BLOCK]) {
        #[cfg(target_arch = "x86_64")]
        if simd.isa() >= Isa::Avx512 {
            // SAFETY: a `Simd` is only made of an instruction set that this machine has.
            return unsafe { avx512::encode(self, x, codes) };
        }
        let _ = simd;
        for (code, x) in codes.iter_mut().zip(x) {
            *code = self.encode(*x);
        }
    }

    /// The value of a code.
    #[inline(always)]
    fn decode(&self, code: u8) -> f32 {
        self.values[usize::from(code)]
    }

    /// The code of the value nearest to x, which is -1 to 1.
    #[inline(always)]
    fn encode(&self, x: f32) -> u8 {
        let bits = x.to_bits();
        let half = ((bits & 0x7fff_ffff) >> 16).clamp(FIRST_BUCKET, 0x3f80) - FIRST_BUCKET;
        let bucket = (half | ((bits >> 31) << 12)) as usize;
        let least = self.least[bucket % (2 * NEGATIVE)];
        let code = least + u8::from(x > self.thresholds[usize::from(least)]);
        if x.is_sign_negative() { code.min(self.last_negative) } else { code }
    }
}

/// The values, computed in f32 as the reference tables are.
const fn values(signed: bool) -> [f32; 256] {
    const POWERS: [f32; 7] = [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0];
    let mut values = [0.0; 256];
    let zero = if signed { 127 } else { 0 };
    values[255] = 1.0;
    let mut next = zero + 1;
    let mut decade = 0;
    while decade < 7 {
        let count = if signed { 1 << decade } else { 2 << decade };
        let mut i = 0;
        while i < count {
            let mean = (boundary(i, count) + boundary(i + 1, count)) / 2.0;
            let value = mean * POWERS[decade];
            values[next] = value;
            if signed {
                values[2 * zero - next] = -value;
            }
            next += 1;
            i += 1;
        }
        decade += 1;
    }
    values
}

/// The i-th of `count + 1` even steps from 0.1 to 1, reckoned from the nearer end.
const fn boundary(i: usize, count: usize) -> f32 {
    let step = (1.0f32 - 0.1) / count as f32;
    if i < count.div_ceil(2) { 0.1 + step * i as f32 } else { 1.0 - step * (count - i) as f32 }
}

const fn thresholds(values: &[f32; 256]) -> [f32; 256] {
    let mut thresholds = [f32::INFINITY; 256];
    let mut i = 0;
    while i < 255 {
        let middle = (values[i] + values[i + 1]) * 0.5;
        thresholds[i] = if i % 2 == 0 { middle } else { middle.next_down() };
        i += 1;
    }
    thresholds
}

/// A decade from `low` on has n values, `low` is n / 9 of their distances, and the threshold to its first value lies a
/// fifth of one above `low`. A hundredth is taken off, against rounding upwards.
const fn decades(thresholds: &[f32; 256], signed: bool) -> Decades {
    let mut decades = Decades { ends: [0.0; 7], scale: [0.0; 16], offset: [0.0; 16], last: [0.0; 16] };
    let zero = if signed { 127 } else { 0 };
    let mut first = 1;
    let mut power = 1e-6;
    let mut decade = 0;
    while decade < 7 {
        let count = if signed { 1 << decade } else { 2 << decade };
        // What lies on the threshold counts with the decade below: the comparison that follows puts it right.
        decades.ends[decade] = thresholds[zero + first - 1].next_up().next_up();
        decades.scale[decade + 1] = (count as f64 / (0.9 * power)) as f32;
        decades.offset[decade + 1] = (first as f64 - count as f64 / 9.0 - 0.01) as f32;
        decades.last[decade + 1] = (first + count - 1) as f32;
        first += count;
        power *= 10.0;
        decade += 1;
    }
    decades
}

#[cfg(target_arch = "x86_64")]
mod avx512 {
    //! Sixteen at a time; tables are looked up by permuting registers, which is faster than gathering.

    use std::arch::x86_64::*;

    use super::{BLOCK, DynamicMap};

    /// The entries of a table of 256 at the places `index`, of which only eight bits count.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    fn look_up(table: &[f32; 256], index: __m512i) -> __m512 {
        let pair = |i: usize| {
            // SAFETY: the table has 32 entries from 32 i on, for i below 8.
            let halves = unsafe {
                let start = table.as_ptr().add(32 * i);
                [_mm512_loadu_ps(start), _mm512_loadu_ps(start.add(16))]
            };
            _mm512_permutex2var_ps(halves[0], index, halves[1])
        };
        let bit = |bit: i32| _mm512_test_epi32_mask(index, _mm512_set1_epi32(bit));
        let (low, middle, high) = (bit(32), bit(64), bit(128));
        let four = |i: usize| {
            let a = _mm512_mask_blend_ps(low, pair(i), pair(i + 1));
            let b = _mm512_mask_blend_ps(low, pair(i + 2), pair(i + 3));
            _mm512_mask_blend_ps(middle, a, b)
        };
        _mm512_mask_blend_ps(high, four(0), four(4))
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    pub fn decode(map: &DynamicMap, codes: &[u8; BLOCK], scale: f32, out: &mut [f32; BLOCK]) {
        let scale = _mm512_set1_ps(scale);
        for (codes, out) in codes.as_chunks::<16>().0.iter().zip(out.as_chunks_mut::<16>().0) {
            // SAFETY: both are sixteen elements.
            unsafe {
                let index = _mm512_cvtepu8_epi32(_mm_loadu_si128(codes.as_ptr().cast()));
                let values = _mm512_mul_ps(look_up(&map.values, index), scale);
                _mm512_storeu_ps(out.as_mut_ptr(), values);
            }
        }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    pub fn encode(map: &DynamicMap, x: &[f32; BLOCK], codes: &mut [u8; BLOCK]) {
        let decades = &map.decades;
        // SAFETY: the tables have sixteen entries each.
        let [scales, offsets, lasts] = [&decades.scale, &decades.offset, &decades.last]
            .map(|table| unsafe { _mm512_loadu_ps(table.as_ptr()) });
        let (zero, one) = (_mm512_set1_epi32(i32::from(map.zero)), _mm512_set1_epi32(1));
        let last_negative = _mm512_set1_epi32(i32::from(map.last_negative));
        for (x, codes) in x.as_chunks::<16>().0.iter().zip(codes.as_chunks_mut::<16>().0) {
            // SAFETY: sixteen elements.
            let x = unsafe { _mm512_loadu_ps(x.as_ptr()) };
            let size = _mm512_abs_ps(x);
            let mut decade = _mm512_setzero_si512();
            for end in decades.ends {
                let left = _mm512_cmp_ps_mask::<_CMP_GT_OQ>(size, _mm512_set1_ps(end));
                decade = _mm512_mask_add_epi32(decade, left, decade, one);
            }
            let of_decade = |table| _mm512_permutexvar_ps(decade, table);
            let k = _mm512_fmadd_ps(size, of_decade(scales), of_decade(offsets));
            let k = _mm512_cvttps_epi32(_mm512_min_ps(k, of_decade(lasts)));
            let negative = _mm512_movepi32_mask(_mm512_castps_si512(x));
            // Of negative numbers, k one larger is the lower code.
            let above = _mm512_add_epi32(zero, k);
            let below = _mm512_sub_epi32(_mm512_sub_epi32(zero, one), k);
            let least = _mm512_mask_blend_epi32(negative, above, below);
            let least = _mm512_max_epi32(least, _mm512_setzero_si512());
            let threshold = look_up(&map.thresholds, least);
            let higher = _mm512_cmp_ps_mask::<_CMP_GT_OQ>(x, threshold);
            let code = _mm512_mask_add_epi32(least, higher, least, one);
            let code = _mm512_mask_min_epi32(code, negative, code, last_negative);
            // SAFETY: sixteen elements.
            unsafe { _mm_storeu_si128(codes.as_mut_ptr().cast(), _mm512_cvtepi32_epi8(code)) };
        }
    }
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
        for (map, line) in [&SIGNED, &UNSIGNED].into_iter().zip(text.lines()) {
            let bits: Vec<u32> = line.split(' ').map(|x| u32::from_str_radix(x, 16).unwrap()).collect();
            assert_eq!(map.values.map(f32::to_bits).to_vec(), bits);
        }
    }

    #[test]
    fn codes_are_those_of_the_binary_search() {
        for (map, signed) in [(&SIGNED, true), (&UNSIGNED, false)] {
            let mut points: Vec<f32> = (0..=200_000).map(|i| i as f32 / 200_000.0).collect();
            points.extend((0..3000).map(|i| (0.99f32).powi(i)));
            for i in 0..255 {
                let middle = (map.values[i] + map.values[i + 1]) * 0.5;
                let near = [middle, middle.next_down(), middle.next_up(), map.values[i], map.values[i + 1]];
                points.extend(near.map(f32::abs));
            }
            points.retain(|x| *x <= 1.0);
            if signed {
                points.extend(points.clone().iter().map(|x| -x));
            }
            let want = |x: f32| {
                let code = by_halving(&map.values, x);
                let value = map.values[usize::from(code)];
                match signed && x.is_sign_negative() != value.is_sign_negative() {
                    true if x > 0.0 => code.wrapping_add(1),
                    true => code.wrapping_sub(1),
                    false => code,
                }
            };
            for isa in Isa::available() {
                for points in points.chunks(BLOCK) {
                    let (mut x, mut codes) = ([0.0; BLOCK], [0; BLOCK]);
                    x[..points.len()].copy_from_slice(points);
                    map.encode_block(Simd::new(isa), &x, &mut codes);
                    for (x, code) in x.into_iter().zip(codes) {
                        assert_eq!(code, want(x), "{x:e} {signed} {isa}");
                    }
                }
                let codes = std::array::from_fn(|i| i as u8);
                let mut values = [0.0; BLOCK];
                map.decode_block(Simd::new(isa), &codes, 1.0, &mut values);
                assert_eq!(values, map.values, "{isa}");
            }
        }
    }
}
