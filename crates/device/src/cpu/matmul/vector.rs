//! A vector of f32 lanes on each instruction set: what packing, the tile kernel and the dot products are written in.
//!
//! Every method is inlined into a function that is compiled for the instruction set; on its own it would be slow.

use std::fmt::Debug;

/// The most lanes of any vector here.
pub(super) const MAX_LANES: usize = 16;

/// Vectors that hold 64 elements, at most.
pub(super) const MAX_VECTORS: usize = 16;

/// Vectors whose lanes are added up together.
pub(super) const SUMS: usize = 16;

/// One register of f32 values.
///
/// # Safety
/// For every method: the machine has the instruction set, and pointers are valid for the lanes named.
pub(super) trait Vector: Copy + Debug {
    /// Values in one vector; divides 16.
    const LANES: usize;
    /// LANES integers of 32 bits.
    type Codes: Copy;
    /// Sixteen values to choose from.
    type Table: Copy;
    /// 64 bytes.
    type Bytes: Copy;

    unsafe fn splat(x: f32) -> Self;
    unsafe fn load(p: *const f32) -> Self;
    unsafe fn store(self, p: *mut f32);
    /// self + a * b, with one rounding except on the portable path.
    unsafe fn plus_product(self, a: Self, b: Self) -> Self;
    unsafe fn plus(self, other: Self) -> Self;
    unsafe fn times(self, other: Self) -> Self;
    /// All lanes added up, halves first.
    unsafe fn sum(self) -> f32;
    /// [`sum`](Self::sum) of each of some vectors.
    #[inline(always)]
    unsafe fn sums(vectors: [Self; SUMS], out: &mut [f32; SUMS]) {
        for (out, vector) in out.iter_mut().zip(vectors) {
            // SAFETY: as the trait says.
            *out = unsafe { vector.sum() };
        }
    }
    /// LANES bf16 values.
    unsafe fn load_bf16(p: *const u16) -> Self;
    /// LANES f16 values.
    unsafe fn load_f16(p: *const u16) -> Self;
    /// LANES 8-bit floats E4M3, each less by 2^8.
    unsafe fn load_e4m3(p: *const u8) -> Self;
    /// LANES 8-bit floats E5M2.
    unsafe fn load_e5m2(p: *const u8) -> Self;
    /// LANES signed bytes.
    unsafe fn load_i8(p: *const i8) -> Self;
    /// LANES bytes, as numbers from 0 on.
    unsafe fn codes(p: *const u8) -> Self::Codes;
    /// codes >> by
    unsafe fn shift_right(codes: Self::Codes, by: u32) -> Self::Codes;
    /// (codes & mask) << by
    unsafe fn bits(codes: Self::Codes, mask: u32, by: u32) -> Self::Codes;
    /// a | b
    unsafe fn either(a: Self::Codes, b: Self::Codes) -> Self::Codes;
    /// 16 in lanes whose bit of `bits` is set, the first lane's being the lowest.
    unsafe fn sixteens(bits: u32) -> Self::Codes;
    unsafe fn from_codes(codes: Self::Codes) -> Self;
    /// 64 bytes.
    unsafe fn bytes(p: *const u8) -> Self::Bytes;
    /// 32 bytes, twice.
    unsafe fn bytes_twice(p: *const u8) -> Self::Bytes;
    /// The bits of each byte `right` places lower, or higher where that is negative, by less than 8: a number for each half of
    /// the bytes. The bits that move in are anything.
    unsafe fn move_bits(bytes: Self::Bytes, right: [i32; 2]) -> Self::Bytes;
    /// Of each byte the bits of a mask.
    unsafe fn mask_bytes(bytes: Self::Bytes, mask: u8) -> Self::Bytes;
    /// a | b
    unsafe fn either_bytes(a: Self::Bytes, b: Self::Bytes) -> Self::Bytes;
    /// All of them as codes, in vectors one after the other.
    unsafe fn widen(bytes: Self::Bytes, out: &mut [Self::Codes; MAX_VECTORS]);
    /// code * scale + minimum, of each code the lowest four bits, the others being anything.
    unsafe fn scaled_nibbles(codes: Self::Codes, scale: Self, minimum: Self) -> Self;
    /// table[code], of each code the lowest four bits, the others being anything.
    unsafe fn look_up(codes: Self::Codes, table: &[f32; 16]) -> Self;
    /// The values times a factor.
    unsafe fn table(values: &[f32; 16], factor: f32) -> Self::Table;
    /// table[code], of each code the lowest four bits, the others being anything.
    unsafe fn choose(codes: Self::Codes, table: Self::Table) -> Self;
    /// Two f16 values in a row.
    unsafe fn two_f16(p: *const u8) -> [f32; 2];
    /// Two f16 values in a row, each in every lane of a vector.
    unsafe fn splat_two_f16(p: *const u8) -> (Self, Self);
    /// Each lane rounded to bf16, to nearest even.
    unsafe fn round_bf16(self) -> Self;
    /// Each lane as bf16, rounded to nearest even.
    unsafe fn store_bf16(self, p: *mut u16);
    /// `rows[i]` lane j becomes `rows[j]` lane i, over LANES rows.
    unsafe fn transpose(rows: &mut [Self; MAX_LANES]);
}

/// bf16 bits of `x`, to nearest even; NaN stays NaN.
#[inline(always)]
pub(super) fn bf16_bits(x: f32) -> u16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    let quiet_nan = bits >> 16 | 0x40;
    (if x.is_nan() { quiet_nan } else { rounded }) as u16
}

/// The value of bf16 bits.
#[inline(always)]
pub(super) fn bf16_value(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// f16 bits of `x`, to nearest even; NaN stays NaN, and what is too large becomes infinite.
#[inline(always)]
pub(super) fn f16_bits(x: f32) -> u16 {
    half::f16::from_f32(x).to_bits()
}

/// The value of f16 bits, found without a table or a branch.
#[inline(always)]
pub(super) fn f16_value(bits: u16) -> f32 {
    let sign = u32::from(bits & 0x8000) << 16;
    let magnitude = u32::from(bits & 0x7fff) << 13;
    // Moves the exponent's bias from 15 to 127; subnormals come out right too.
    let scaled = f32::from_bits(magnitude) * f32::from_bits((127 + 127 - 15) << 23);
    let infinite_or_nan = if magnitude >= 0x7c00 << 13 { 0x7f80_0000 } else { 0 };
    f32::from_bits(scaled.to_bits() | infinite_or_nan | sign)
}

/// The value of an 8-bit float E4M3 that is a number, less by 2^8: its exponent and mantissa in the places of an f16's.
#[inline(always)]
pub(super) fn e4m3_value(code: u8) -> f32 {
    f16_value((u16::from(code & 0x80) << 8) | (u16::from(code & 0x7f) << 7))
}

/// The value of an 8-bit float E5M2: the upper half of an f16.
#[inline(always)]
pub(super) fn e5m2_value(code: u8) -> f32 {
    f16_value(u16::from(code) << 8)
}

/// The bits of each byte `right` places lower, or higher where that is negative, by less than 8: a number for each half of the bytes.
#[inline(always)]
pub(super) fn moved_bits<const N: usize>(mut bytes: [u8; N], right: [i32; 2]) -> [u8; N] {
    for (half, right) in bytes.chunks_exact_mut(N / 2).zip(right) {
        for byte in half {
            *byte = if right < 0 { *byte << (-right & 7) } else { *byte >> (right & 7) };
        }
    }
    bytes
}

/// Plain Rust: four lanes, which compilers map onto any 128-bit unit.
#[derive(Clone, Copy, Debug)]
#[repr(align(16))]
pub(super) struct Portable([f32; 4]);

impl Portable {
    #[inline(always)]
    fn zip(self, other: Portable, f: impl Fn(f32, f32) -> f32) -> Portable {
        Portable(std::array::from_fn(|i| f(self.0[i], other.0[i])))
    }

    #[inline(always)]
    unsafe fn widen<T: Copy>(p: *const T, f: impl Fn(T) -> f32) -> Portable {
        // SAFETY: four values at `p`.
        Portable(std::array::from_fn(|i| f(unsafe { p.add(i).read_unaligned() })))
    }
}

// SAFETY comments below: each method's contract says that its pointer holds LANES values.
impl Vector for Portable {
    const LANES: usize = 4;
    type Codes = [u32; 4];
    type Table = [f32; 16];
    type Bytes = [u8; 64];

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        Portable([x; 4])
    }

    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        // SAFETY: as the trait says.
        unsafe { Self::widen(p, |x| x) }
    }

    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        // SAFETY: as the trait says.
        unsafe { p.cast::<[f32; 4]>().write_unaligned(self.0) }
    }

    #[inline(always)]
    unsafe fn plus_product(self, a: Self, b: Self) -> Self {
        // Elsewhere a fused multiply-add is a library call.
        if cfg!(target_arch = "aarch64") {
            Portable(std::array::from_fn(|i| a.0[i].mul_add(b.0[i], self.0[i])))
        } else {
            self.zip(a.zip(b, |a, b| a * b), |sum, product| sum + product)
        }
    }

    #[inline(always)]
    unsafe fn plus(self, other: Self) -> Self {
        self.zip(other, |a, b| a + b)
    }

    #[inline(always)]
    unsafe fn times(self, other: Self) -> Self {
        self.zip(other, |a, b| a * b)
    }

    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        let [a, b, c, d] = self.0;
        (a + c) + (b + d)
    }

    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> Self {
        // SAFETY: as the trait says.
        unsafe { Self::widen(p, bf16_value) }
    }

    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> Self {
        // SAFETY: as the trait says.
        unsafe { Self::widen(p, f16_value) }
    }

    #[inline(always)]
    unsafe fn load_e4m3(p: *const u8) -> Self {
        // SAFETY: as the trait says.
        unsafe { Self::widen(p, e4m3_value) }
    }

    #[inline(always)]
    unsafe fn load_e5m2(p: *const u8) -> Self {
        // SAFETY: as the trait says.
        unsafe { Self::widen(p, e5m2_value) }
    }

    #[inline(always)]
    unsafe fn load_i8(p: *const i8) -> Self {
        // SAFETY: as the trait says.
        unsafe { Self::widen(p, f32::from) }
    }

    #[inline(always)]
    unsafe fn codes(p: *const u8) -> [u32; 4] {
        // SAFETY: as the trait says.
        std::array::from_fn(|i| u32::from(unsafe { *p.add(i) }))
    }

    #[inline(always)]
    unsafe fn shift_right(codes: [u32; 4], by: u32) -> [u32; 4] {
        codes.map(|code| code >> by)
    }

    #[inline(always)]
    unsafe fn bits(codes: [u32; 4], mask: u32, by: u32) -> [u32; 4] {
        codes.map(|code| (code & mask) << by)
    }

    #[inline(always)]
    unsafe fn either(a: [u32; 4], b: [u32; 4]) -> [u32; 4] {
        std::array::from_fn(|i| a[i] | b[i])
    }

    #[inline(always)]
    unsafe fn sixteens(bits: u32) -> [u32; 4] {
        std::array::from_fn(|i| (bits >> i & 1) << 4)
    }

    #[inline(always)]
    unsafe fn from_codes(codes: [u32; 4]) -> Self {
        Portable(codes.map(|code| code as i32 as f32))
    }

    #[inline(always)]
    unsafe fn bytes(p: *const u8) -> [u8; 64] {
        // SAFETY: as the trait says.
        unsafe { p.cast::<[u8; 64]>().read() }
    }

    #[inline(always)]
    unsafe fn bytes_twice(p: *const u8) -> [u8; 64] {
        // SAFETY: as the trait says.
        let half = unsafe { p.cast::<[u8; 32]>().read() };
        std::array::from_fn(|i| half[i % 32])
    }

    #[inline(always)]
    unsafe fn move_bits(bytes: [u8; 64], right: [i32; 2]) -> [u8; 64] {
        moved_bits(bytes, right)
    }

    #[inline(always)]
    unsafe fn mask_bytes(bytes: [u8; 64], mask: u8) -> [u8; 64] {
        bytes.map(|byte| byte & mask)
    }

    #[inline(always)]
    unsafe fn either_bytes(a: [u8; 64], b: [u8; 64]) -> [u8; 64] {
        std::array::from_fn(|i| a[i] | b[i])
    }

    #[inline(always)]
    unsafe fn widen(bytes: [u8; 64], out: &mut [[u32; 4]; MAX_VECTORS]) {
        for (out, bytes) in out.iter_mut().zip(bytes.chunks_exact(4)) {
            *out = std::array::from_fn(|i| u32::from(bytes[i]));
        }
    }

    #[inline(always)]
    unsafe fn scaled_nibbles(codes: [u32; 4], scale: Self, minimum: Self) -> Self {
        // SAFETY: no pointers.
        unsafe { minimum.plus_product(Self::from_codes(codes.map(|code| code & 15)), scale) }
    }

    #[inline(always)]
    unsafe fn look_up(codes: [u32; 4], table: &[f32; 16]) -> Self {
        Portable(codes.map(|code| table[code as usize & 15]))
    }

    #[inline(always)]
    unsafe fn table(values: &[f32; 16], factor: f32) -> [f32; 16] {
        std::array::from_fn(|i| values[i] * factor)
    }

    #[inline(always)]
    unsafe fn choose(codes: [u32; 4], table: [f32; 16]) -> Self {
        Portable(codes.map(|code| table[code as usize & 15]))
    }

    #[inline(always)]
    unsafe fn two_f16(p: *const u8) -> [f32; 2] {
        // SAFETY: as the trait says.
        unsafe { p.cast::<[u16; 2]>().read_unaligned() }.map(f16_value)
    }

    #[inline(always)]
    unsafe fn splat_two_f16(p: *const u8) -> (Self, Self) {
        // SAFETY: as the trait says.
        let [first, second] = unsafe { p.cast::<[u16; 2]>().read_unaligned() };
        (Portable([f16_value(first); 4]), Portable([f16_value(second); 4]))
    }

    #[inline(always)]
    unsafe fn round_bf16(self) -> Self {
        Portable(self.0.map(|x| bf16_value(bf16_bits(x))))
    }

    #[inline(always)]
    unsafe fn store_bf16(self, p: *mut u16) {
        // SAFETY: as the trait says.
        unsafe { p.cast::<[u16; 4]>().write_unaligned(self.0.map(bf16_bits)) }
    }

    #[inline(always)]
    unsafe fn transpose(rows: &mut [Self; MAX_LANES]) {
        let old = *rows;
        for (i, row) in rows.iter_mut().take(4).enumerate() {
            *row = Portable(std::array::from_fn(|j| old[j].0[i]));
        }
    }
}

#[cfg(target_arch = "x86_64")]
pub(super) use x86::{Avx2, Avx512};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{MAX_LANES, MAX_VECTORS, SUMS, Vector};
    use std::arch::x86_64::*;

    /// 256-bit registers with FMA and F16C.
    #[derive(Clone, Copy, Debug)]
    pub(in super::super) struct Avx2(pub __m256);

    impl Avx2 {
        /// The bits of each lane, rounded so that the upper half is the bf16 value.
        #[inline(always)]
        unsafe fn bf16_in_upper_half(self) -> __m256i {
            // SAFETY: registers only.
            unsafe {
                let bits = _mm256_castps_si256(self.0);
                let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
                let rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
                let quiet_nan = _mm256_or_si256(bits, _mm256_set1_epi32(0x40_0000));
                let is_nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(self.0, self.0));
                _mm256_blendv_epi8(rounded, quiet_nan, is_nan)
            }
        }
    }

    // SAFETY (all methods): the pointers hold LANES values, as the trait says; the rest is registers only.
    #[allow(clippy::undocumented_unsafe_blocks)]
    impl Vector for Avx2 {
        const LANES: usize = 8;
        type Codes = __m256i;
        type Table = [__m256; 2];
        type Bytes = [__m256i; 2];

        #[inline(always)]
        unsafe fn splat(x: f32) -> Self {
            unsafe { Avx2(_mm256_set1_ps(x)) }
        }

        #[inline(always)]
        unsafe fn load(p: *const f32) -> Self {
            unsafe { Avx2(_mm256_loadu_ps(p)) }
        }

        #[inline(always)]
        unsafe fn store(self, p: *mut f32) {
            unsafe { _mm256_storeu_ps(p, self.0) }
        }

        #[inline(always)]
        unsafe fn plus_product(self, a: Self, b: Self) -> Self {
            unsafe { Avx2(_mm256_fmadd_ps(a.0, b.0, self.0)) }
        }

        #[inline(always)]
        unsafe fn plus(self, other: Self) -> Self {
            unsafe { Avx2(_mm256_add_ps(self.0, other.0)) }
        }

        #[inline(always)]
        unsafe fn times(self, other: Self) -> Self {
            unsafe { Avx2(_mm256_mul_ps(self.0, other.0)) }
        }

        #[inline(always)]
        unsafe fn sum(self) -> f32 {
            unsafe {
                let four = _mm_add_ps(_mm256_castps256_ps128(self.0), _mm256_extractf128_ps::<1>(self.0));
                let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
                _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
            }
        }

        #[inline(always)]
        unsafe fn load_bf16(p: *const u16) -> Self {
            unsafe {
                let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()));
                Avx2(_mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide)))
            }
        }

        #[inline(always)]
        unsafe fn load_f16(p: *const u16) -> Self {
            unsafe { Avx2(_mm256_cvtph_ps(_mm_loadu_si128(p.cast()))) }
        }

        #[inline(always)]
        unsafe fn load_e4m3(p: *const u8) -> Self {
            unsafe {
                // Signs fill the upper bytes; the one above the exponent is cleared.
                let codes = _mm_slli_epi16::<7>(_mm_cvtepi8_epi16(_mm_loadl_epi64(p.cast())));
                Avx2(_mm256_cvtph_ps(_mm_and_si128(codes, _mm_set1_epi16(0xbf80_u16 as i16))))
            }
        }

        #[inline(always)]
        unsafe fn load_e5m2(p: *const u8) -> Self {
            unsafe {
                let codes = _mm_cvtepu8_epi16(_mm_loadl_epi64(p.cast()));
                Avx2(_mm256_cvtph_ps(_mm_slli_epi16::<8>(codes)))
            }
        }

        #[inline(always)]
        unsafe fn load_i8(p: *const i8) -> Self {
            unsafe { Avx2(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(p.cast())))) }
        }

        #[inline(always)]
        unsafe fn codes(p: *const u8) -> __m256i {
            unsafe { _mm256_cvtepu8_epi32(_mm_loadl_epi64(p.cast())) }
        }

        #[inline(always)]
        unsafe fn shift_right(codes: __m256i, by: u32) -> __m256i {
            unsafe { _mm256_srl_epi32(codes, _mm_cvtsi32_si128(by as i32)) }
        }

        #[inline(always)]
        unsafe fn bits(codes: __m256i, mask: u32, by: u32) -> __m256i {
            unsafe {
                let kept = _mm256_and_si256(codes, _mm256_set1_epi32(mask as i32));
                _mm256_sll_epi32(kept, _mm_cvtsi32_si128(by as i32))
            }
        }

        #[inline(always)]
        unsafe fn either(a: __m256i, b: __m256i) -> __m256i {
            unsafe { _mm256_or_si256(a, b) }
        }

        #[inline(always)]
        unsafe fn sixteens(bits: u32) -> __m256i {
            unsafe {
                // Each lane's bit is moved to place 4.
                let places = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
                let moved = _mm256_srlv_epi32(_mm256_set1_epi32((bits << 4) as i32), places);
                _mm256_and_si256(moved, _mm256_set1_epi32(16))
            }
        }

        #[inline(always)]
        unsafe fn from_codes(codes: __m256i) -> Self {
            unsafe { Avx2(_mm256_cvtepi32_ps(codes)) }
        }

        #[inline(always)]
        unsafe fn bytes(p: *const u8) -> [__m256i; 2] {
            unsafe { [_mm256_loadu_si256(p.cast()), _mm256_loadu_si256(p.add(32).cast())] }
        }

        #[inline(always)]
        unsafe fn bytes_twice(p: *const u8) -> [__m256i; 2] {
            unsafe { [_mm256_loadu_si256(p.cast()); 2] }
        }

        #[inline(always)]
        unsafe fn move_bits([first, second]: [__m256i; 2], right: [i32; 2]) -> [__m256i; 2] {
            unsafe {
                let by = |by: i32| (_mm_cvtsi32_si128(by.max(0)), _mm_cvtsi32_si128((-by).max(0)));
                let right = [by(right[0]), by(right[1])];
                let [(a, b), (c, d)] = right;
                [
                    _mm256_sll_epi16(_mm256_srl_epi16(first, a), b),
                    _mm256_sll_epi16(_mm256_srl_epi16(second, c), d),
                ]
            }
        }

        #[inline(always)]
        unsafe fn mask_bytes([first, second]: [__m256i; 2], mask: u8) -> [__m256i; 2] {
            unsafe {
                let mask = _mm256_set1_epi8(mask.cast_signed());
                [_mm256_and_si256(first, mask), _mm256_and_si256(second, mask)]
            }
        }

        #[inline(always)]
        unsafe fn either_bytes(a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] {
            unsafe { [_mm256_or_si256(a[0], b[0]), _mm256_or_si256(a[1], b[1])] }
        }

        #[inline(always)]
        unsafe fn widen(bytes: [__m256i; 2], out: &mut [__m256i; MAX_VECTORS]) {
            unsafe {
                for (half, out) in bytes.into_iter().zip(out.chunks_exact_mut(4)) {
                    let (low, high) = (_mm256_castsi256_si128(half), _mm256_extracti128_si256::<1>(half));
                    out[0] = _mm256_cvtepu8_epi32(low);
                    out[1] = _mm256_cvtepu8_epi32(_mm_srli_si128::<8>(low));
                    out[2] = _mm256_cvtepu8_epi32(high);
                    out[3] = _mm256_cvtepu8_epi32(_mm_srli_si128::<8>(high));
                }
            }
        }

        #[inline(always)]
        unsafe fn scaled_nibbles(codes: __m256i, scale: Self, minimum: Self) -> Self {
            unsafe {
                let codes = _mm256_and_si256(codes, _mm256_set1_epi32(15));
                minimum.plus_product(Avx2(_mm256_cvtepi32_ps(codes)), scale)
            }
        }

        #[inline(always)]
        unsafe fn look_up(codes: __m256i, table: &[f32; 16]) -> Self {
            unsafe {
                let low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table.as_ptr()), codes);
                let high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table.as_ptr().add(8)), codes);
                let upper_half = _mm256_castsi256_ps(_mm256_slli_epi32::<28>(codes));
                Avx2(_mm256_blendv_ps(low, high, upper_half))
            }
        }

        #[inline(always)]
        unsafe fn table(values: &[f32; 16], factor: f32) -> [__m256; 2] {
            unsafe {
                let factor = _mm256_set1_ps(factor);
                let half = |at| _mm256_mul_ps(_mm256_loadu_ps(values.as_ptr().add(at)), factor);
                [half(0), half(8)]
            }
        }

        #[inline(always)]
        unsafe fn choose(codes: __m256i, [low, high]: [__m256; 2]) -> Self {
            unsafe {
                let low = _mm256_permutevar8x32_ps(low, codes);
                let high = _mm256_permutevar8x32_ps(high, codes);
                let upper_half = _mm256_castsi256_ps(_mm256_slli_epi32::<28>(codes));
                Avx2(_mm256_blendv_ps(low, high, upper_half))
            }
        }

        #[inline(always)]
        unsafe fn two_f16(p: *const u8) -> [f32; 2] {
            unsafe {
                let both = _mm_cvtph_ps(_mm_loadu_si32(p));
                [_mm_cvtss_f32(both), _mm_cvtss_f32(_mm_movehdup_ps(both))]
            }
        }

        #[inline(always)]
        unsafe fn splat_two_f16(p: *const u8) -> (Self, Self) {
            unsafe {
                let both = _mm_cvtph_ps(_mm_loadu_si32(p));
                (Avx2(_mm256_broadcastss_ps(both)), Avx2(_mm256_broadcastss_ps(_mm_movehdup_ps(both))))
            }
        }

        #[inline(always)]
        unsafe fn round_bf16(self) -> Self {
            unsafe {
                let upper = _mm256_set1_epi32(0xffff_0000_u32 as i32);
                Avx2(_mm256_castsi256_ps(_mm256_and_si256(self.bf16_in_upper_half(), upper)))
            }
        }

        #[inline(always)]
        unsafe fn store_bf16(self, p: *mut u16) {
            unsafe {
                let words = _mm256_srli_epi32::<16>(self.bf16_in_upper_half());
                let packed = _mm256_permute4x64_epi64::<0b1000>(_mm256_packus_epi32(words, words));
                _mm_storeu_si128(p.cast(), _mm256_castsi256_si128(packed));
            }
        }

        #[inline(always)]
        unsafe fn transpose(rows: &mut [Self; MAX_LANES]) {
            unsafe {
                let r = |i: usize| rows[i].0;
                // By loops, which are part of this function; `map` would be a call.
                let (mut low, mut high) = ([_mm256_setzero_ps(); 4], [_mm256_setzero_ps(); 4]);
                for (i, (low, high)) in low.iter_mut().zip(&mut high).enumerate() {
                    *low = _mm256_unpacklo_ps(r(2 * i), r(2 * i + 1));
                    *high = _mm256_unpackhi_ps(r(2 * i), r(2 * i + 1));
                }
                // quads[q][h] holds columns q and q + 4 of rows 4 h to 4 h + 3.
                let quad = |h: usize| {
                    let (l0, l1, h0, h1) = (low[2 * h], low[2 * h + 1], high[2 * h], high[2 * h + 1]);
                    [
                        _mm256_shuffle_ps::<0x44>(l0, l1),
                        _mm256_shuffle_ps::<0xee>(l0, l1),
                        _mm256_shuffle_ps::<0x44>(h0, h1),
                        _mm256_shuffle_ps::<0xee>(h0, h1),
                    ]
                };
                let (upper, lower) = (quad(0), quad(1));
                for q in 0..4 {
                    rows[q] = Avx2(_mm256_permute2f128_ps::<0x20>(upper[q], lower[q]));
                    rows[q + 4] = Avx2(_mm256_permute2f128_ps::<0x31>(upper[q], lower[q]));
                }
            }
        }
    }

    /// 512-bit registers.
    #[derive(Clone, Copy, Debug)]
    pub(in super::super) struct Avx512(pub __m512);

    impl Avx512 {
        #[inline(always)]
        unsafe fn bf16_in_upper_half(self) -> __m512i {
            // SAFETY: registers only.
            unsafe {
                let bits = _mm512_castps_si512(self.0);
                let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
                let rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
                let is_nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(self.0, self.0);
                _mm512_mask_or_epi32(rounded, is_nan, bits, _mm512_set1_epi32(0x40_0000))
            }
        }
    }

    // SAFETY (all methods): the pointers hold LANES values, as the trait says; the rest is registers only.
    #[allow(clippy::undocumented_unsafe_blocks)]
    impl Vector for Avx512 {
        const LANES: usize = 16;
        type Codes = __m512i;
        type Table = __m512;
        type Bytes = __m512i;

        #[inline(always)]
        unsafe fn splat(x: f32) -> Self {
            unsafe { Avx512(_mm512_set1_ps(x)) }
        }

        #[inline(always)]
        unsafe fn load(p: *const f32) -> Self {
            unsafe { Avx512(_mm512_loadu_ps(p)) }
        }

        #[inline(always)]
        unsafe fn store(self, p: *mut f32) {
            unsafe { _mm512_storeu_ps(p, self.0) }
        }

        #[inline(always)]
        unsafe fn plus_product(self, a: Self, b: Self) -> Self {
            unsafe { Avx512(_mm512_fmadd_ps(a.0, b.0, self.0)) }
        }

        #[inline(always)]
        unsafe fn plus(self, other: Self) -> Self {
            unsafe { Avx512(_mm512_add_ps(self.0, other.0)) }
        }

        #[inline(always)]
        unsafe fn times(self, other: Self) -> Self {
            unsafe { Avx512(_mm512_mul_ps(self.0, other.0)) }
        }

        #[inline(always)]
        unsafe fn sum(self) -> f32 {
            unsafe {
                let upper = _mm512_shuffle_f32x4::<0b1110>(self.0, self.0);
                let eight = _mm512_castps512_ps256(_mm512_add_ps(self.0, upper));
                super::Vector::sum(Avx2(eight))
            }
        }

        #[inline(always)]
        unsafe fn sums(vectors: [Self; SUMS], out: &mut [f32; SUMS]) {
            unsafe {
                // Each step adds the halves of what is left of a vector, beside those of another one: there are half as many
                // registers after it. A sum's order is that of `sum`.
                let mut left = [_mm512_setzero_ps(); SUMS];
                for (left, vector) in left.iter_mut().zip(vectors) {
                    *left = vector.0;
                }
                for i in 0..8 {
                    let (a, b) = (left[i], left[i + 8]);
                    let halves = _mm512_shuffle_f32x4::<0b0100_0100>(a, b);
                    left[i] = _mm512_add_ps(halves, _mm512_shuffle_f32x4::<0b1110_1110>(a, b));
                }
                // Eight lanes each of `i` and `i + 8`.
                for i in 0..4 {
                    let (a, b) = (left[i], left[i + 4]);
                    let quarters = _mm512_shuffle_f32x4::<0b1000_1000>(a, b);
                    left[i] = _mm512_add_ps(quarters, _mm512_shuffle_f32x4::<0b1101_1101>(a, b));
                }
                // Four lanes each of `i`, `i + 8`, `i + 4` and `i + 12`.
                for i in 0..2 {
                    let (a, b) = (left[i], left[i + 2]);
                    let (a, b) = (_mm512_castps_pd(a), _mm512_castps_pd(b));
                    let pairs = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
                    left[i] = _mm512_add_ps(pairs, _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
                }
                // Two lanes each of the same four, and of those two numbers higher, in turns.
                let (a, b) = (left[0], left[1]);
                let even = _mm512_shuffle_ps::<0b1000_1000>(a, b);
                let all = _mm512_add_ps(even, _mm512_shuffle_ps::<0b1101_1101>(a, b));
                let places = _mm512_setr_epi32(0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15);
                _mm512_storeu_ps(out.as_mut_ptr(), _mm512_permutexvar_ps(places, all));
            }
        }

        #[inline(always)]
        unsafe fn load_bf16(p: *const u16) -> Self {
            unsafe {
                let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()));
                Avx512(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide)))
            }
        }

        #[inline(always)]
        unsafe fn load_f16(p: *const u16) -> Self {
            unsafe { Avx512(_mm512_cvtph_ps(_mm256_loadu_si256(p.cast()))) }
        }

        #[inline(always)]
        unsafe fn load_e4m3(p: *const u8) -> Self {
            unsafe {
                // As on AVX2.
                let codes = _mm256_slli_epi16::<7>(_mm256_cvtepi8_epi16(_mm_loadu_si128(p.cast())));
                Avx512(_mm512_cvtph_ps(_mm256_and_si256(codes, _mm256_set1_epi16(0xbf80_u16 as i16))))
            }
        }

        #[inline(always)]
        unsafe fn load_e5m2(p: *const u8) -> Self {
            unsafe {
                let codes = _mm256_cvtepu8_epi16(_mm_loadu_si128(p.cast()));
                Avx512(_mm512_cvtph_ps(_mm256_slli_epi16::<8>(codes)))
            }
        }

        #[inline(always)]
        unsafe fn load_i8(p: *const i8) -> Self {
            unsafe { Avx512(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p.cast())))) }
        }

        #[inline(always)]
        unsafe fn codes(p: *const u8) -> __m512i {
            unsafe { _mm512_cvtepu8_epi32(_mm_loadu_si128(p.cast())) }
        }

        #[inline(always)]
        unsafe fn shift_right(codes: __m512i, by: u32) -> __m512i {
            unsafe { _mm512_srl_epi32(codes, _mm_cvtsi32_si128(by as i32)) }
        }

        #[inline(always)]
        unsafe fn bits(codes: __m512i, mask: u32, by: u32) -> __m512i {
            unsafe {
                let kept = _mm512_and_si512(codes, _mm512_set1_epi32(mask as i32));
                _mm512_sll_epi32(kept, _mm_cvtsi32_si128(by as i32))
            }
        }

        #[inline(always)]
        unsafe fn either(a: __m512i, b: __m512i) -> __m512i {
            unsafe { _mm512_or_si512(a, b) }
        }

        #[inline(always)]
        unsafe fn sixteens(bits: u32) -> __m512i {
            unsafe { _mm512_maskz_set1_epi32(bits as u16, 16) }
        }

        #[inline(always)]
        unsafe fn from_codes(codes: __m512i) -> Self {
            unsafe { Avx512(_mm512_cvtepi32_ps(codes)) }
        }

        #[inline(always)]
        unsafe fn bytes(p: *const u8) -> __m512i {
            unsafe { _mm512_loadu_si512(p.cast()) }
        }

        #[inline(always)]
        unsafe fn bytes_twice(p: *const u8) -> __m512i {
            unsafe { _mm512_broadcast_i64x4(_mm256_loadu_si256(p.cast())) }
        }

        #[inline(always)]
        unsafe fn move_bits(bytes: __m512i, [low, high]: [i32; 2]) -> __m512i {
            unsafe {
                // A rotation by any number of places, in one instruction whatever its sign.
                let by = _mm512_inserti64x4::<1>(_mm512_set1_epi32(low), _mm256_set1_epi32(high));
                _mm512_rorv_epi32(bytes, by)
            }
        }

        #[inline(always)]
        unsafe fn mask_bytes(bytes: __m512i, mask: u8) -> __m512i {
            unsafe { _mm512_and_si512(bytes, _mm512_set1_epi8(mask.cast_signed())) }
        }

        #[inline(always)]
        unsafe fn either_bytes(a: __m512i, b: __m512i) -> __m512i {
            unsafe { _mm512_or_si512(a, b) }
        }

        #[inline(always)]
        unsafe fn widen(bytes: __m512i, out: &mut [__m512i; MAX_VECTORS]) {
            unsafe {
                out[0] = _mm512_cvtepu8_epi32(_mm512_castsi512_si128(bytes));
                out[1] = _mm512_cvtepu8_epi32(_mm512_extracti32x4_epi32::<1>(bytes));
                out[2] = _mm512_cvtepu8_epi32(_mm512_extracti32x4_epi32::<2>(bytes));
                out[3] = _mm512_cvtepu8_epi32(_mm512_extracti32x4_epi32::<3>(bytes));
            }
        }

        #[inline(always)]
        unsafe fn scaled_nibbles(codes: __m512i, scale: Self, minimum: Self) -> Self {
            unsafe {
                // All sixteen values, to be looked up: the vectors of a block share them.
                let all = Avx512(_mm512_setr_ps(
                    0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0,
                ));
                let values = minimum.plus_product(all, scale);
                // Only the lowest four bits of an index count.
                Avx512(_mm512_permutexvar_ps(codes, values.0))
            }
        }

        #[inline(always)]
        unsafe fn look_up(codes: __m512i, table: &[f32; 16]) -> Self {
            unsafe { Avx512(_mm512_permutexvar_ps(codes, _mm512_loadu_ps(table.as_ptr()))) }
        }

        #[inline(always)]
        unsafe fn table(values: &[f32; 16], factor: f32) -> __m512 {
            unsafe { _mm512_mul_ps(_mm512_loadu_ps(values.as_ptr()), _mm512_set1_ps(factor)) }
        }

        #[inline(always)]
        unsafe fn choose(codes: __m512i, table: __m512) -> Self {
            // Only the lowest four bits of an index count.
            unsafe { Avx512(_mm512_permutexvar_ps(codes, table)) }
        }

        #[inline(always)]
        unsafe fn two_f16(p: *const u8) -> [f32; 2] {
            unsafe { Avx2::two_f16(p) }
        }

        #[inline(always)]
        unsafe fn splat_two_f16(p: *const u8) -> (Self, Self) {
            unsafe {
                let both = _mm_cvtph_ps(_mm_loadu_si32(p));
                (Avx512(_mm512_broadcastss_ps(both)), Avx512(_mm512_broadcastss_ps(_mm_movehdup_ps(both))))
            }
        }

        #[inline(always)]
        unsafe fn round_bf16(self) -> Self {
            unsafe {
                let upper = _mm512_set1_epi32(0xffff_0000_u32 as i32);
                Avx512(_mm512_castsi512_ps(_mm512_and_si512(self.bf16_in_upper_half(), upper)))
            }
        }

        #[inline(always)]
        unsafe fn store_bf16(self, p: *mut u16) {
            unsafe {
                let words = _mm512_srli_epi32::<16>(self.bf16_in_upper_half());
                _mm256_storeu_si256(p.cast(), _mm512_cvtepi32_epi16(words));
            }
        }

        #[inline(always)]
        unsafe fn transpose(rows: &mut [Self; MAX_LANES]) {
            unsafe {
                // By a loop, which is part of this function; `map` would be a call.
                let mut t = [_mm512_setzero_ps(); MAX_LANES];
                for (t, row) in t.iter_mut().zip(rows.iter()) {
                    *t = row.0;
                }
                // Inside 128-bit lanes: quads of four rows, t[4 g + q] holding columns q, q + 4, q + 8, q + 12.
                for g in 0..4 {
                    let [a, b, c, d] = [t[4 * g], t[4 * g + 1], t[4 * g + 2], t[4 * g + 3]];
                    let ab = _mm512_castps_pd(_mm512_unpacklo_ps(a, b));
                    let cd = _mm512_castps_pd(_mm512_unpacklo_ps(c, d));
                    t[4 * g] = _mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd));
                    t[4 * g + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd));
                    let ab = _mm512_castps_pd(_mm512_unpackhi_ps(a, b));
                    let cd = _mm512_castps_pd(_mm512_unpackhi_ps(c, d));
                    t[4 * g + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd));
                    t[4 * g + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd));
                }
                // Across lanes: column 4 l + q is lane l of t[q], t[4 + q], t[8 + q], t[12 + q].
                for q in 0..4 {
                    let even_01 = _mm512_shuffle_f32x4::<0x88>(t[q], t[4 + q]);
                    let odd_01 = _mm512_shuffle_f32x4::<0xdd>(t[q], t[4 + q]);
                    let even_23 = _mm512_shuffle_f32x4::<0x88>(t[8 + q], t[12 + q]);
                    let odd_23 = _mm512_shuffle_f32x4::<0xdd>(t[8 + q], t[12 + q]);
                    rows[q] = Avx512(_mm512_shuffle_f32x4::<0x88>(even_01, even_23));
                    rows[4 + q] = Avx512(_mm512_shuffle_f32x4::<0x88>(odd_01, odd_23));
                    rows[8 + q] = Avx512(_mm512_shuffle_f32x4::<0xdd>(even_01, even_23));
                    rows[12 + q] = Avx512(_mm512_shuffle_f32x4::<0xdd>(odd_01, odd_23));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn sums_beside_each_other_are_those_of_each() {
        if !std::arch::is_x86_feature_detected!("avx512f") {
            println!("skipped: this machine has no AVX-512");
            return;
        }
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
        unsafe fn both(values: &[[f32; 16]; SUMS]) -> [[f32; SUMS]; 2] {
            // SAFETY: the caller has found the instruction set.
            let (mut vectors, mut sums) = ([unsafe { Avx512::splat(0.0) }; SUMS], [[0.0; SUMS]; 2]);
            for (vector, values) in vectors.iter_mut().zip(values) {
                // SAFETY: sixteen values, and the caller has found the instruction set.
                *vector = unsafe { Avx512::load(values.as_ptr()) };
            }
            for (sum, vector) in sums[0].iter_mut().zip(vectors) {
                // SAFETY: as above.
                *sum = unsafe { vector.sum() };
            }
            // SAFETY: as above.
            unsafe { Avx512::sums(vectors, &mut sums[1]) };
            sums
        }
        let values = std::array::from_fn(|i| std::array::from_fn(|j| 1.0 / (1 + 17 * i + 5 * j * j) as f32));
        // SAFETY: the instruction set has just been found.
        let [each, together] = unsafe { both(&values) };
        assert_eq!(each.map(f32::to_bits), together.map(f32::to_bits));
    }

    #[test]
    fn every_16_bit_float() {
        for bits in 0..=u16::MAX {
            let same = |ours: f32, theirs: f32| {
                ours.to_bits() == theirs.to_bits() || ours.is_nan() && theirs.is_nan()
            };
            assert!(same(f16_value(bits), half::f16::from_bits(bits).to_f32()), "f16 {bits:#x}");
            let value = half::bf16::from_bits(bits).to_f32();
            assert!(same(bf16_value(bits), value), "bf16 {bits:#x}");
            for between in [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let x = f32::from_bits(value.to_bits() | between);
                let (ours, theirs) = (bf16_value(bf16_bits(x)), half::bf16::from_f32(x).to_f32());
                assert!(same(ours, theirs), "{x} to bf16");
            }
        }
    }
}
