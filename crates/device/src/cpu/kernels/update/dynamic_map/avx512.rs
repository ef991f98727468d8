//! The dynamic map with AVX-512: whole vectors at a time. Tables are looked up by permuting registers, which is faster
//! than gathering.

use std::arch::x86_64::*;

use super::{BLOCK, DOUBT, DynamicMap, FIRST_BUCKET};

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub fn decode<const SIGNED: bool>(
    map: &DynamicMap<SIGNED>,
    codes: &[u8; BLOCK],
    scale: f32,
    out: &mut [f32; BLOCK],
) {
    let scale = _mm512_set1_ps(scale);
    let [low, high] = [&map.halves[0], &map.halves[1]].map(|table| -> [__m512i; 8] {
        // SAFETY: the table has 256 words, which eight registers hold.
        std::array::from_fn(|i| unsafe { _mm512_loadu_si512(table.as_ptr().add(32 * i).cast()) })
    });
    // Fours of codes in the order in which joining words within each quarter of a register brings them back.
    let order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    for (codes, out) in codes.as_chunks::<32>().0.iter().zip(out.as_chunks_mut::<32>().0) {
        // SAFETY: 32 codes.
        let codes = unsafe { _mm256_loadu_si256(codes.as_ptr().cast()) };
        let index = _mm512_cvtepu8_epi16(_mm256_permutevar8x32_epi32(codes, order));
        let bit = |bit: i16| _mm512_test_epi16_mask(index, _mm512_set1_epi16(bit));
        let (second, upper) = (bit(64), bit(128));
        let look_up = |table: &[__m512i; 8]| {
            let pair = |i: usize| _mm512_permutex2var_epi16(table[i], index, table[i + 1]);
            let half = |i: usize| _mm512_mask_blend_epi16(second, pair(i), pair(i + 2));
            _mm512_mask_blend_epi16(upper, half(0), half(4))
        };
        let (low, high) = (look_up(&low), look_up(&high));
        let join = [_mm512_unpacklo_epi16(low, high), _mm512_unpackhi_epi16(low, high)];
        for (values, out) in join.into_iter().zip(out.as_chunks_mut::<16>().0) {
            let values = _mm512_mul_ps(_mm512_castsi512_ps(values), scale);
            // SAFETY: sixteen elements.
            unsafe { _mm512_storeu_ps(out.as_mut_ptr(), values) };
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub fn encode<const SIGNED: bool>(
    map: &DynamicMap<SIGNED>,
    x: &[f32; BLOCK],
    absmax: f32,
    codes: &mut [u8; BLOCK],
) {
    // SAFETY: the tables of octaves fill two registers each, those of lines one.
    let (lines, ends, [scales, offsets, mosts]) = unsafe {
        let line = map.octaves.line.as_ptr();
        let end = map.octaves.end.as_ptr();
        (
            [_mm512_loadu_si512(line.cast()), _mm512_loadu_si512(line.add(16).cast())],
            [_mm512_loadu_ps(end), _mm512_loadu_ps(end.add(16))],
            [&map.lines.scale, &map.lines.offset, &map.lines.most]
                .map(|table| _mm512_loadu_ps(table.as_ptr())),
        )
    };
    let absmax = _mm512_set1_ps(absmax);
    let doubt = _mm512_set1_ps(DOUBT);
    let smallest = _mm512_castsi512_ps(_mm512_set1_epi32((FIRST_BUCKET << 16) as i32));
    let (zero, one) = (_mm512_set1_epi32(i32::from(DynamicMap::<SIGNED>::ZERO)), _mm512_set1_epi32(1));
    // Four at a time, for the way from a number to its code is long: it takes less time to go it side by side.
    for (x, codes) in x.as_chunks::<64>().0.iter().zip(codes.as_chunks_mut::<64>().0) {
        // SAFETY: four times sixteen elements.
        let x: [__m512; 4] = std::array::from_fn(|i| unsafe { _mm512_loadu_ps(x.as_ptr().add(16 * i)) });
        let x = x.map(|x| _mm512_div_ps(x, absmax));
        let magnitudes = x.map(|x| _mm512_abs_ps(x));
        let octaves = magnitudes.map(|magnitude| {
            _mm512_srli_epi32::<23>(_mm512_castps_si512(_mm512_max_ps(magnitude, smallest)))
        });
        let lines: [__m512i; 4] = std::array::from_fn(|i| {
            let line = _mm512_permutex2var_epi32(lines[0], octaves[i], lines[1]);
            let end = _mm512_permutex2var_ps(ends[0], octaves[i], ends[1]);
            let beyond = _mm512_cmp_ps_mask::<_CMP_GT_OQ>(magnitudes[i], end);
            _mm512_mask_add_epi32(line, beyond, line, one)
        });
        let fractions: [__m512; 4] = std::array::from_fn(|i| {
            let [scale, offset, most] =
                [scales, offsets, mosts].map(|table| _mm512_permutexvar_ps(lines[i], table));
            _mm512_min_ps(_mm512_fmadd_ps(magnitudes[i], scale, offset), most)
        });
        let mut places = fractions.map(|fraction| _mm512_cvttps_epi32(fraction));
        let highest = fractions.map(|fraction| _mm512_cvttps_epi32(_mm512_add_ps(fraction, doubt)));
        let doubtful: [__mmask16; 4] =
            std::array::from_fn(|i| _mm512_cmpneq_epi32_mask(places[i], highest[i]));
        if doubtful != [0; 4] {
            for (place, magnitude) in places.iter_mut().zip(magnitudes) {
                // SAFETY: places are from 0 to 255, as `most` bounds them.
                let limit = unsafe { _mm512_i32gather_ps::<4>(*place, map.limits.as_ptr()) };
                let higher = _mm512_cmp_ps_mask::<_CMP_GT_OQ>(magnitude, limit);
                *place = _mm512_mask_add_epi32(*place, higher, *place, one);
            }
        }
        for i in 0..4 {
            let mut code = _mm512_add_epi32(zero, places[i]);
            if SIGNED {
                let negative = _mm512_movepi32_mask(_mm512_castps_si512(x[i]));
                let place = _mm512_min_epi32(_mm512_max_epi32(places[i], one), zero);
                code = _mm512_mask_sub_epi32(code, negative, zero, place);
            }
            // SAFETY: sixteen of the codes.
            unsafe { _mm_storeu_si128(codes.as_mut_ptr().add(16 * i).cast(), _mm512_cvtepi32_epi8(code)) };
        }
    }
}
