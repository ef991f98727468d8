//! Registers of 32 bytes on each instruction set, and the eight f32 lanes that their products are added to.

use crate::cpu::matmul::vector::{self, Vector};

/// 32 bytes, and what multiplies them.
///
/// # Safety
/// For every method: the machine has the instruction set, and pointers are valid for what is read.
pub(super) trait Integers {
    /// What reads scales.
    type V: Vector;
    type Bytes: Copy;
    /// Eight lanes.
    type Floats: Copy;

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
    /// The products of codes with the 32 signed bytes at `with`, of which none is -128, four added up in each lane. Codes are
    /// unsigned, below 64; or signed.
    unsafe fn dot(codes: Self::Bytes, with: *const i8, signed: bool) -> Self::Floats;

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
    /// Two values, the first in the lower four lanes.
    unsafe fn halves(p: *const f32) -> Self::Floats;
    unsafe fn store(x: Self::Floats, p: *mut f32);
    unsafe fn times(a: Self::Floats, b: Self::Floats) -> Self::Floats;
    /// sum + a * b
    unsafe fn plus_product(sum: Self::Floats, a: Self::Floats, b: Self::Floats) -> Self::Floats;
    /// All lanes added up, halves first.
    unsafe fn sum(x: Self::Floats) -> f32;
}

/// Plain Rust.
pub(super) struct Portable;

// SAFETY (all methods): as the trait says.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Integers for Portable {
    type V = vector::Portable;
    type Bytes = [u8; 32];
    type Floats = [f32; 8];

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
    unsafe fn dot(codes: [u8; 32], with: *const i8, signed: bool) -> [f32; 8] {
        let with = unsafe { with.cast::<[i8; 32]>().read() };
        let product = |i: usize| {
            let code = if signed { i32::from(codes[i] as i8) } else { i32::from(codes[i]) };
            code * i32::from(with[i])
        };
        std::array::from_fn(|lane| (4 * lane..4 * lane + 4).map(product).sum::<i32>() as f32)
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
    unsafe fn less_128_times(mut sum: [u8; 32], codes: [u8; 32]) -> [u8; 32] {
        for (lane, codes) in sum.as_chunks_mut().0.iter_mut().zip(codes.as_chunks::<4>().0) {
            let codes = codes.map(|code| i32::from(code as i8)).iter().sum::<i32>();
            *lane = (i32::from_ne_bytes(*lane) - 128 * codes).to_ne_bytes();
        }
        sum
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
    unsafe fn halves(p: *const f32) -> [f32; 8] {
        let [low, high] = unsafe { p.cast::<[f32; 2]>().read() };
        [low, low, low, low, high, high, high, high]
    }

    #[inline(always)]
    unsafe fn store(x: [f32; 8], p: *mut f32) {
        unsafe { p.cast::<[f32; 8]>().write(x) }
    }

    #[inline(always)]
    unsafe fn times(a: [f32; 8], b: [f32; 8]) -> [f32; 8] {
        std::array::from_fn(|i| a[i] * b[i])
    }

    #[inline(always)]
    unsafe fn plus_product(sum: [f32; 8], a: [f32; 8], b: [f32; 8]) -> [f32; 8] {
        std::array::from_fn(|i| sum[i] + a[i] * b[i])
    }

    #[inline(always)]
    unsafe fn sum(x: [f32; 8]) -> f32 {
        let [a, b, c, d] = std::array::from_fn(|i| x[i] + x[i + 4]);
        (a + c) + (b + d)
    }
}

#[cfg(target_arch = "x86_64")]
pub(super) use x86::{Avx2, Avx512Vnni, AvxVnni};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::{Integers, vector};
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
        type V = vector::Avx2;
        type Bytes = __m256i;
        type Floats = __m256;

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
        unsafe fn dot(codes: __m256i, with: *const i8, signed: bool) -> __m256 {
            unsafe {
                let with = _mm256_loadu_si256(with.cast());
                let sums = if signed {
                    T::fours(_mm256_abs_epi8(codes), _mm256_sign_epi8(with, codes))
                } else {
                    T::fours(codes, with)
                };
                _mm256_cvtepi32_ps(sums)
            }
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
        unsafe fn halves(p: *const f32) -> __m256 {
            unsafe {
                let both = _mm256_castpd_ps(_mm256_set1_pd(p.cast::<f64>().read_unaligned()));
                _mm256_permutevar_ps(both, _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1))
            }
        }

        #[inline(always)]
        unsafe fn store(x: __m256, p: *mut f32) {
            unsafe { _mm256_storeu_ps(p, x) }
        }

        #[inline(always)]
        unsafe fn times(a: __m256, b: __m256) -> __m256 {
            unsafe { _mm256_mul_ps(a, b) }
        }

        #[inline(always)]
        unsafe fn plus_product(sum: __m256, a: __m256, b: __m256) -> __m256 {
            unsafe { _mm256_fmadd_ps(a, b, sum) }
        }

        #[inline(always)]
        unsafe fn sum(x: __m256) -> f32 {
            unsafe {
                let halves = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
                let pairs = _mm_add_ps(halves, _mm_movehl_ps(halves, halves));
                _mm_cvtss_f32(_mm_add_ss(pairs, _mm_shuffle_ps::<1>(pairs, pairs)))
            }
        }
    }
}
