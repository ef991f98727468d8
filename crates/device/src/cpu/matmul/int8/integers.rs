//! Registers of 32 bytes on each instruction set, which hold eight lanes of 32 bits as well, and eight lanes of f32.

use super::scale_of;
use crate::cpu::matmul::storage::GROUP;
use crate::cpu::matmul::vector;

/// 32 bytes, and what multiplies them.
///
/// # Safety
/// For every method: the machine has the instruction set, and pointers are valid for what is read.
pub(super) trait Integers {
    type Bytes: Copy;
    /// Eight lanes.
    type Floats: Copy;

    /// Values as signed integers to nearest, ties to even, and their scale. Where a value is no finite number, the scale is NaN and the
    /// integers are anything.
    unsafe fn round(values: &[f32; GROUP]) -> (Self::Bytes, f32);
    /// Sums of the first and of the last 16 signed bytes.
    unsafe fn half_sums(bytes: Self::Bytes) -> [i32; 2];
    unsafe fn bytes(p: *const u8) -> Self::Bytes;
    /// 16 bytes, twice.
    unsafe fn bytes_twice(p: *const u8) -> Self::Bytes;
    /// The bits of each byte `right` places lower, or higher where that is negative, by less than 8: a number for each half of the
    /// bytes. The bits that move in are anything.
    unsafe fn move_bits(bytes: Self::Bytes, right: [i32; 2]) -> Self::Bytes;
    /// Of each byte the bits of a mask.
    unsafe fn mask(bytes: Self::Bytes, mask: u8) -> Self::Bytes;
    unsafe fn either(a: Self::Bytes, b: Self::Bytes) -> Self::Bytes;
    /// 16 in bytes whose bit of the 32 at `bits` is set, the first byte's being the lowest.
    unsafe fn sixteens(bits: *const u8) -> Self::Bytes;
    /// table[code], of codes below 16.
    unsafe fn look_up(codes: Self::Bytes, table: &[i8; 16]) -> Self::Bytes;
    /// The products of codes with the 32 signed bytes at `with`, four added up in each lane of 32 bits. Codes are unsigned, below 64; or
    /// signed. Where a byte is -128, which [`round`](Self::round) makes of no number, the sum is anything.
    unsafe fn dot(codes: Self::Bytes, with: *const i8, signed: bool) -> Self::Bytes;
    /// Of each register's eight lanes of 32 bits the sums of the first four and of the last four: a lane for each register.
    unsafe fn add_up(registers: [Self::Bytes; 8]) -> [Self::Bytes; 2];
    /// Lanes of 32 bits added up.
    unsafe fn plus(a: Self::Bytes, b: Self::Bytes) -> Self::Bytes;
    /// Each lane of 32 bits less a number.
    unsafe fn minus(lanes: Self::Bytes, by: i32) -> Self::Bytes;
    unsafe fn to_floats(lanes: Self::Bytes) -> Self::Floats;

    unsafe fn zero() -> Self::Bytes;
    unsafe fn store_bytes(bytes: Self::Bytes, p: *mut u8);
    /// Each byte less a number, modulo 256.
    unsafe fn less(bytes: Self::Bytes, by: u8) -> Self::Bytes;
    /// Eight registers as rows of eight lanes of 32 bits: the columns.
    unsafe fn transpose(rows: &mut [Self::Bytes; 8]);
    /// In each lane of 32 bits, the sum less 128 times four signed codes.
    unsafe fn less_128_times(sum: Self::Bytes, codes: Self::Bytes) -> Self::Bytes;

    unsafe fn splat(x: f32) -> Self::Floats;
    unsafe fn load(p: *const f32) -> Self::Floats;
    unsafe fn store(x: Self::Floats, p: *mut f32);
    /// The f16 at each address.
    unsafe fn eight_f16(from: [*const u8; 8]) -> Self::Floats;
    /// The lower and the upper f16 of each lane of 32 bits.
    unsafe fn two_f16(words: Self::Bytes) -> [Self::Floats; 2];
    /// The 16 bytes at each address: four words, a lane for each address.
    unsafe fn four_words(from: [*const u8; 8]) -> [Self::Bytes; 4];
    /// Byte `i` of each lane of 32 bits as a number.
    unsafe fn byte_floats(words: Self::Bytes, i: usize, signed: bool) -> Self::Floats;
    unsafe fn times(a: Self::Floats, b: Self::Floats) -> Self::Floats;
    /// sum + a * b
    unsafe fn plus_product(sum: Self::Floats, a: Self::Floats, b: Self::Floats) -> Self::Floats;
}

/// Plain Rust.
pub(super) struct Portable;

// SAFETY (all methods): as the trait says.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Integers for Portable {
    type Bytes = [u8; 32];
    type Floats = [f32; 8];

    #[inline(always)]
    unsafe fn round(values: &[f32; GROUP]) -> ([u8; 32], f32) {
        /// Added to a number of few bits, it leaves the number's integer in the lowest ones.
        const SHIFT: f32 = 12_582_912.0;
        let mut largest = 0;
        for value in values {
            largest = largest.max(value.to_bits() & 0x7fff_ffff);
        }
        let (scale, factor) = scale_of(largest);
        let mut codes = [0; GROUP];
        for (code, value) in codes.iter_mut().zip(values) {
            *code = (value * factor + SHIFT).to_bits() as u8;
        }
        (codes, scale)
    }

    #[inline(always)]
    unsafe fn half_sums(bytes: [u8; 32]) -> [i32; 2] {
        let mut sums = [0; 2];
        for (sum, half) in sums.iter_mut().zip(bytes.as_chunks::<16>().0) {
            for byte in half {
                *sum += i32::from(*byte as i8);
            }
        }
        sums
    }

    #[inline(always)]
    unsafe fn bytes(p: *const u8) -> [u8; 32] {
        unsafe { p.cast::<[u8; 32]>().read() }
    }

    #[inline(always)]
    unsafe fn bytes_twice(p: *const u8) -> [u8; 32] {
        let half = unsafe { p.cast::<[u8; 16]>().read() };
        std::array::from_fn(|i| half[i % 16])
    }

    #[inline(always)]
    unsafe fn move_bits(bytes: [u8; 32], right: [i32; 2]) -> [u8; 32] {
        vector::moved_bits(bytes, right)
    }

    #[inline(always)]
    unsafe fn mask(bytes: [u8; 32], mask: u8) -> [u8; 32] {
        bytes.map(|byte| byte & mask)
    }

    #[inline(always)]
    unsafe fn either(a: [u8; 32], b: [u8; 32]) -> [u8; 32] {
        std::array::from_fn(|i| a[i] | b[i])
    }

    #[inline(always)]
    unsafe fn sixteens(bits: *const u8) -> [u8; 32] {
        let bits = u32::from_le(unsafe { bits.cast::<u32>().read_unaligned() });
        std::array::from_fn(|i| ((bits >> i & 1) as u8) << 4)
    }

    #[inline(always)]
    unsafe fn look_up(codes: [u8; 32], table: &[i8; 16]) -> [u8; 32] {
        codes.map(|code| table[usize::from(code & 15)] as u8)
    }

    #[inline(always)]
    unsafe fn dot(codes: [u8; 32], with: *const i8, signed: bool) -> [u8; 32] {
        let with = unsafe { with.cast::<[i8; 32]>().read() };
        let product = |i: usize| {
            let code = if signed { i32::from(codes[i] as i8) } else { i32::from(codes[i]) };
            code * i32::from(with[i])
        };
        bytes_of(std::array::from_fn(|lane| (4 * lane..4 * lane + 4).map(product).sum::<i32>()))
    }

    #[inline(always)]
    unsafe fn add_up(registers: [[u8; 32]; 8]) -> [[u8; 32]; 2] {
        let sum = |register: [u8; 32], half: usize| lanes_of(register)[4 * half..4 * half + 4].iter().sum();
        std::array::from_fn(|half| bytes_of(std::array::from_fn(|i| sum(registers[i], half))))
    }

    #[inline(always)]
    unsafe fn plus(a: [u8; 32], b: [u8; 32]) -> [u8; 32] {
        let (a, b) = (lanes_of(a), lanes_of(b));
        bytes_of(std::array::from_fn(|i| a[i] + b[i]))
    }

    #[inline(always)]
    unsafe fn minus(lanes: [u8; 32], by: i32) -> [u8; 32] {
        bytes_of(lanes_of(lanes).map(|lane| lane - by))
    }

    #[inline(always)]
    unsafe fn to_floats(lanes: [u8; 32]) -> [f32; 8] {
        lanes_of(lanes).map(|lane| lane as f32)
    }

    #[inline(always)]
    unsafe fn zero() -> [u8; 32] {
        [0; 32]
    }

    #[inline(always)]
    unsafe fn store_bytes(bytes: [u8; 32], p: *mut u8) {
        unsafe { p.cast::<[u8; 32]>().write(bytes) }
    }

    #[inline(always)]
    unsafe fn less(bytes: [u8; 32], by: u8) -> [u8; 32] {
        bytes.map(|byte| byte.wrapping_sub(by))
    }

    #[inline(always)]
    unsafe fn transpose(rows: &mut [[u8; 32]; 8]) {
        let old = *rows;
        for (i, row) in rows.iter_mut().enumerate() {
            for (lane, old) in row.chunks_exact_mut(4).zip(old) {
                lane.copy_from_slice(&old[4 * i..4 * i + 4]);
            }
        }
    }

    #[inline(always)]
    unsafe fn less_128_times(sum: [u8; 32], codes: [u8; 32]) -> [u8; 32] {
        let (sum, codes) = (lanes_of(sum), codes.map(|code| i32::from(code as i8)));
        bytes_of(std::array::from_fn(|i| sum[i] - 128 * codes[4 * i..4 * i + 4].iter().sum::<i32>()))
    }

    #[inline(always)]
    unsafe fn splat(x: f32) -> [f32; 8] {
        [x; 8]
    }

    #[inline(always)]
    unsafe fn load(p: *const f32) -> [f32; 8] {
        unsafe { p.cast::<[f32; 8]>().read() }
    }

    #[inline(always)]
    unsafe fn store(x: [f32; 8], p: *mut f32) {
        unsafe { p.cast::<[f32; 8]>().write(x) }
    }

    #[inline(always)]
    unsafe fn eight_f16(from: [*const u8; 8]) -> [f32; 8] {
        from.map(|p| vector::f16_value(u16::from_le(unsafe { p.cast::<u16>().read_unaligned() })))
    }

    #[inline(always)]
    unsafe fn two_f16(words: [u8; 32]) -> [[f32; 8]; 2] {
        let half = |lane: i32, i: usize| vector::f16_value((lane >> (16 * i)) as u16);
        std::array::from_fn(|i| lanes_of(words).map(|lane| half(lane, i)))
    }

    #[inline(always)]
    unsafe fn four_words(from: [*const u8; 8]) -> [[u8; 32]; 4] {
        let words = from.map(|p| unsafe { p.cast::<[[u8; 4]; 4]>().read_unaligned() });
        std::array::from_fn(|i| bytes_of(words.map(|words| i32::from_le_bytes(words[i]))))
    }

    #[inline(always)]
    unsafe fn byte_floats(words: [u8; 32], i: usize, signed: bool) -> [f32; 8] {
        let byte = |lane: i32| (lane >> (8 * i)) as u8;
        lanes_of(words).map(|lane| if signed { f32::from(byte(lane) as i8) } else { f32::from(byte(lane)) })
    }

    #[inline(always)]
    unsafe fn times(a: [f32; 8], b: [f32; 8]) -> [f32; 8] {
        std::array::from_fn(|i| a[i] * b[i])
    }

    #[inline(always)]
    unsafe fn plus_product(sum: [f32; 8], a: [f32; 8], b: [f32; 8]) -> [f32; 8] {
        std::array::from_fn(|i| sum[i] + a[i] * b[i])
    }
}

fn lanes_of(bytes: [u8; 32]) -> [i32; 8] {
    std::array::from_fn(|lane| i32::from_ne_bytes(std::array::from_fn(|i| bytes[4 * lane + i])))
}

fn bytes_of(lanes: [i32; 8]) -> [u8; 32] {
    std::array::from_fn(|i| lanes[i / 4].to_ne_bytes()[i % 4])
}

#[cfg(target_arch = "x86_64")]
pub(super) use x86::{Avx2, Avx512Vnni, AvxVnni};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::{GROUP, Integers, scale_of, vector};
    use crate::cpu::matmul::vector::{MAX_LANES, Vector};

    /// Sums of four products of an unsigned and a signed byte, in each of eight lanes of 32 bits.
    ///
    /// # Safety
    /// The machine has the instruction set.
    pub(in super::super) trait Fours {
        unsafe fn fours(unsigned: __m256i, signed: __m256i) -> __m256i;
    }

    /// 256-bit registers: pairs are added up in 16 bits, which two products of 128 and 127, or of 128 and -128, do not overflow.
    pub(in super::super) struct Avx2;
    /// The dot products of AVX-VNNI.
    pub(in super::super) struct AvxVnni;
    /// Those of AVX-512.
    pub(in super::super) struct Avx512Vnni;

    impl Fours for Avx2 {
        #[inline(always)]
        unsafe fn fours(unsigned: __m256i, signed: __m256i) -> __m256i {
            // SAFETY: registers only.
            unsafe { _mm256_madd_epi16(_mm256_maddubs_epi16(unsigned, signed), _mm256_set1_epi16(1)) }
        }
    }

    impl Fours for AvxVnni {
        #[inline(always)]
        unsafe fn fours(unsigned: __m256i, signed: __m256i) -> __m256i {
            // SAFETY: registers only.
            unsafe { _mm256_dpbusd_avx_epi32(_mm256_setzero_si256(), unsigned, signed) }
        }
    }

    impl Fours for Avx512Vnni {
        #[inline(always)]
        unsafe fn fours(unsigned: __m256i, signed: __m256i) -> __m256i {
            // SAFETY: registers only.
            unsafe { _mm256_dpbusd_epi32(_mm256_setzero_si256(), unsigned, signed) }
        }
    }

    // SAFETY (all methods): the pointers hold what the trait says; the rest is registers only.
    #[allow(clippy::undocumented_unsafe_blocks)]
    impl<T: Fours> Integers for T {
        type Bytes = __m256i;
        type Floats = __m256;

        #[inline(always)]
        unsafe fn round(values: &[f32; GROUP]) -> (__m256i, f32) {
            unsafe {
                let mut all = [_mm256_setzero_ps(); 4];
                let mut largest = _mm256_setzero_si256();
                for (i, eight) in all.iter_mut().enumerate() {
                    *eight = _mm256_loadu_ps(values.as_ptr().add(8 * i));
                    let bits = _mm256_and_si256(_mm256_castps_si256(*eight), _mm256_set1_epi32(i32::MAX));
                    largest = _mm256_max_epu32(largest, bits);
                }
                let four =
                    _mm_max_epu32(_mm256_castsi256_si128(largest), _mm256_extracti128_si256::<1>(largest));
                let two = _mm_max_epu32(four, _mm_shuffle_epi32::<0x4e>(four));
                let one = _mm_max_epu32(two, _mm_shuffle_epi32::<0xb1>(two));
                let (scale, factor) = scale_of(_mm_cvtsi128_si32(one) as u32);
                let mut integers = [_mm256_setzero_si256(); 4];
                for (integers, values) in integers.iter_mut().zip(all) {
                    *integers = _mm256_cvtps_epi32(_mm256_mul_ps(values, _mm256_set1_ps(factor)));
                }
                let [a, b, c, d] = integers;
                let bytes = _mm256_packs_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
                // Packing goes half by half.
                let order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
                (_mm256_permutevar8x32_epi32(bytes, order), scale)
            }
        }

        #[inline(always)]
        unsafe fn half_sums(bytes: __m256i) -> [i32; 2] {
            unsafe {
                let fours = T::fours(_mm256_set1_epi8(1), bytes);
                let pairs = _mm256_add_epi32(fours, _mm256_shuffle_epi32::<0x4e>(fours));
                let sums = _mm256_add_epi32(pairs, _mm256_shuffle_epi32::<0xb1>(pairs));
                let second = _mm256_extracti128_si256::<1>(sums);
                [_mm_cvtsi128_si32(_mm256_castsi256_si128(sums)), _mm_cvtsi128_si32(second)]
            }
        }

        #[inline(always)]
        unsafe fn bytes(p: *const u8) -> __m256i {
            unsafe { _mm256_loadu_si256(p.cast()) }
        }

        #[inline(always)]
        unsafe fn bytes_twice(p: *const u8) -> __m256i {
            unsafe { _mm256_broadcastsi128_si256(_mm_loadu_si128(p.cast())) }
        }

        #[inline(always)]
        unsafe fn move_bits(bytes: __m256i, [low, high]: [i32; 2]) -> __m256i {
            unsafe {
                let each = |low, high| _mm256_setr_epi32(low, low, low, low, high, high, high, high);
                let (right, left) = (each(low.max(0), high.max(0)), each((-low).max(0), (-high).max(0)));
                let mut moved = bytes;
                if low > 0 || high > 0 {
                    moved = _mm256_srlv_epi32(moved, right);
                }
                if low < 0 || high < 0 {
                    moved = _mm256_sllv_epi32(moved, left);
                }
                moved
            }
        }

        #[inline(always)]
        unsafe fn mask(bytes: __m256i, mask: u8) -> __m256i {
            unsafe { _mm256_and_si256(bytes, _mm256_set1_epi8(mask as i8)) }
        }

        #[inline(always)]
        unsafe fn either(a: __m256i, b: __m256i) -> __m256i {
            unsafe { _mm256_or_si256(a, b) }
        }

        #[inline(always)]
        unsafe fn sixteens(bits: *const u8) -> __m256i {
            unsafe {
                let all = _mm256_set1_epi32(bits.cast::<i32>().read_unaligned());
                let byte_of_each = _mm256_setr_epi64x(
                    0,
                    0x0101_0101_0101_0101,
                    0x0202_0202_0202_0202,
                    0x0303_0303_0303_0303,
                );
                let bit_of_each = _mm256_set1_epi64x(0x8040_2010_0804_0201_u64 as i64);
                let here = _mm256_and_si256(_mm256_shuffle_epi8(all, byte_of_each), bit_of_each);
                _mm256_and_si256(_mm256_cmpeq_epi8(here, bit_of_each), _mm256_set1_epi8(16))
            }
        }

        #[inline(always)]
        unsafe fn look_up(codes: __m256i, table: &[i8; 16]) -> __m256i {
            unsafe {
                let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast()));
                _mm256_shuffle_epi8(table, codes)
            }
        }

        #[inline(always)]
        unsafe fn dot(codes: __m256i, with: *const i8, signed: bool) -> __m256i {
            unsafe {
                let with = _mm256_loadu_si256(with.cast());
                if signed {
                    T::fours(_mm256_abs_epi8(codes), _mm256_sign_epi8(with, codes))
                } else {
                    T::fours(codes, with)
                }
            }
        }

        #[inline(always)]
        unsafe fn add_up(r: [__m256i; 8]) -> [__m256i; 2] {
            unsafe {
                // In each half: lanes 0 and 2 of both, 1 and 3 of both.
                let mut pairs = [_mm256_setzero_si256(); 4];
                for (i, pairs) in pairs.iter_mut().enumerate() {
                    let (a, b) = (r[2 * i], r[2 * i + 1]);
                    *pairs = _mm256_add_epi32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
                }
                let mut fours = [_mm256_setzero_si256(); 2];
                for (i, fours) in fours.iter_mut().enumerate() {
                    let (a, b) = (pairs[2 * i], pairs[2 * i + 1]);
                    *fours = _mm256_add_epi32(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
                }
                [
                    _mm256_permute2x128_si256::<0x20>(fours[0], fours[1]),
                    _mm256_permute2x128_si256::<0x31>(fours[0], fours[1]),
                ]
            }
        }

        #[inline(always)]
        unsafe fn plus(a: __m256i, b: __m256i) -> __m256i {
            unsafe { _mm256_add_epi32(a, b) }
        }

        #[inline(always)]
        unsafe fn minus(lanes: __m256i, by: i32) -> __m256i {
            unsafe { _mm256_sub_epi32(lanes, _mm256_set1_epi32(by)) }
        }

        #[inline(always)]
        unsafe fn to_floats(lanes: __m256i) -> __m256 {
            unsafe { _mm256_cvtepi32_ps(lanes) }
        }

        #[inline(always)]
        unsafe fn zero() -> __m256i {
            unsafe { _mm256_setzero_si256() }
        }

        #[inline(always)]
        unsafe fn store_bytes(bytes: __m256i, p: *mut u8) {
            unsafe { _mm256_storeu_si256(p.cast(), bytes) }
        }

        #[inline(always)]
        unsafe fn less(bytes: __m256i, by: u8) -> __m256i {
            unsafe { _mm256_sub_epi8(bytes, _mm256_set1_epi8(by as i8)) }
        }

        #[inline(always)]
        unsafe fn transpose(rows: &mut [__m256i; 8]) {
            unsafe {
                let mut lanes = [vector::Avx2(_mm256_setzero_ps()); MAX_LANES];
                for (lanes, row) in lanes.iter_mut().zip(rows.iter()) {
                    *lanes = vector::Avx2(_mm256_castsi256_ps(*row));
                }
                vector::Avx2::transpose(&mut lanes);
                for (row, lanes) in rows.iter_mut().zip(&lanes) {
                    *row = _mm256_castps_si256(lanes.0);
                }
            }
        }

        #[inline(always)]
        unsafe fn less_128_times(sum: __m256i, codes: __m256i) -> __m256i {
            unsafe { _mm256_sub_epi32(sum, T::fours(_mm256_set1_epi8(-128), codes)) }
        }

        #[inline(always)]
        unsafe fn splat(x: f32) -> __m256 {
            unsafe { _mm256_set1_ps(x) }
        }

        #[inline(always)]
        unsafe fn load(p: *const f32) -> __m256 {
            unsafe { _mm256_loadu_ps(p) }
        }

        #[inline(always)]
        unsafe fn store(x: __m256, p: *mut f32) {
            unsafe { _mm256_storeu_ps(p, x) }
        }

        #[inline(always)]
        unsafe fn eight_f16(from: [*const u8; 8]) -> __m256 {
            unsafe {
                let mut bits = [0; 8];
                for (bits, from) in bits.iter_mut().zip(from) {
                    *bits = from.cast::<i16>().read_unaligned();
                }
                let [a, b, c, d, e, f, g, h] = bits;
                _mm256_cvtph_ps(_mm_setr_epi16(a, b, c, d, e, f, g, h))
            }
        }

        #[inline(always)]
        unsafe fn two_f16(words: __m256i) -> [__m256; 2] {
            unsafe {
                // In each half the lower ones, then the upper ones.
                let order = _mm256_setr_epi8(
                    0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15, 0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6,
                    7, 10, 11, 14, 15,
                );
                let halves = _mm256_permute4x64_epi64::<0xd8>(_mm256_shuffle_epi8(words, order));
                [
                    _mm256_cvtph_ps(_mm256_castsi256_si128(halves)),
                    _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(halves)),
                ]
            }
        }

        #[inline(always)]
        unsafe fn four_words(from: [*const u8; 8]) -> [__m256i; 4] {
            unsafe {
                // An address of the first four in one half, one of the others in the other.
                let mut rows = [_mm256_setzero_si256(); 4];
                for (i, row) in rows.iter_mut().enumerate() {
                    let (low, high) = (_mm_loadu_si128(from[i].cast()), _mm_loadu_si128(from[i + 4].cast()));
                    *row = _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(low), high);
                }
                let [a, b, c, d] = rows;
                let (ab, cd) = (_mm256_unpacklo_epi32(a, b), _mm256_unpacklo_epi32(c, d));
                let (ab_high, cd_high) = (_mm256_unpackhi_epi32(a, b), _mm256_unpackhi_epi32(c, d));
                [
                    _mm256_unpacklo_epi64(ab, cd),
                    _mm256_unpackhi_epi64(ab, cd),
                    _mm256_unpacklo_epi64(ab_high, cd_high),
                    _mm256_unpackhi_epi64(ab_high, cd_high),
                ]
            }
        }

        #[inline(always)]
        unsafe fn byte_floats(words: __m256i, i: usize, signed: bool) -> __m256 {
            unsafe {
                let upper = _mm256_sllv_epi32(words, _mm256_set1_epi32(24 - 8 * i as i32));
                let by = _mm256_set1_epi32(24);
                let number = if signed { _mm256_srav_epi32(upper, by) } else { _mm256_srlv_epi32(upper, by) };
                _mm256_cvtepi32_ps(number)
            }
        }

        #[inline(always)]
        unsafe fn times(a: __m256, b: __m256) -> __m256 {
            unsafe { _mm256_mul_ps(a, b) }
        }

        #[inline(always)]
        unsafe fn plus_product(sum: __m256, a: __m256, b: __m256) -> __m256 {
            unsafe { _mm256_fmadd_ps(a, b, sum) }
        }
    }
}
