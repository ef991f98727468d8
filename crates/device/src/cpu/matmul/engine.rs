//! How one instruction set and precision multiplies: the unit that panels are made of and its multiply-add.

use super::storage::{At, Elements, Storage};
use super::vector::{MAX_LANES, Vector};

/// A vector type with a meaning for its 32-bit lanes. A *unit* is one lane: one value of k in f32 or two in bf16.
///
/// # Safety
/// For every method: the machine has the instruction set, and pointers are valid for what is read.
pub(super) trait Engine {
    type V: Vector;
    /// Values of k in one unit.
    const K_PER_UNIT: usize;

    /// `LANES` units that follow each other along k, where k is contiguous.
    unsafe fn along(from: impl Elements<Self::V>) -> Self::V;

    /// One unit each of `LANES` neighbours, where k is strided: the element `index` and those after it, and for a
    /// second value of k those at `second`; `None` where k ends after the first.
    unsafe fn across<S: Storage>(data: *const u8, index: usize, second: Option<usize>) -> Self::V;

    /// sum + a * b; the two products of a bf16 pair are added one after the other.
    unsafe fn multiply_add(sum: Self::V, a: Self::V, b: Self::V) -> Self::V;
}

/// Operands as f32.
pub(super) struct Single<V>(std::marker::PhantomData<V>);

/// Operands rounded to bf16, each in an f32.
pub(super) struct Rounded<V>(std::marker::PhantomData<V>);

// SAFETY (both impls): the trait's contract is that of the vector's methods.
#[allow(clippy::undocumented_unsafe_blocks)]
impl<V: Vector> Engine for Single<V> {
    type V = V;
    const K_PER_UNIT: usize = 1;

    #[inline(always)]
    unsafe fn along(from: impl Elements<V>) -> V {
        unsafe { from.load(0) }
    }

    #[inline(always)]
    unsafe fn across<S: Storage>(data: *const u8, index: usize, _: Option<usize>) -> V {
        unsafe { At::<S>::new(data, index).load(0) }
    }

    #[inline(always)]
    unsafe fn multiply_add(sum: V, a: V, b: V) -> V {
        unsafe { sum.plus_product(a, b) }
    }
}

#[allow(clippy::undocumented_unsafe_blocks)]
impl<V: Vector> Engine for Rounded<V> {
    type V = V;
    const K_PER_UNIT: usize = 1;

    #[inline(always)]
    unsafe fn along(from: impl Elements<V>) -> V {
        unsafe {
            let x = from.load(0);
            if from.bf16().is_some() { x } else { x.round_bf16() }
        }
    }

    #[inline(always)]
    unsafe fn across<S: Storage>(data: *const u8, index: usize, _: Option<usize>) -> V {
        unsafe { Self::along(At::<S>::new(data, index)) }
    }

    #[inline(always)]
    unsafe fn multiply_add(sum: V, a: V, b: V) -> V {
        unsafe { sum.plus_product(a, b) }
    }
}

/// The most values of k that a vector of units holds.
pub(super) const MAX_ALONG: usize = 2 * MAX_LANES;

#[cfg(target_arch = "x86_64")]
pub(super) use pairs::Pairs;

#[cfg(target_arch = "x86_64")]
mod pairs {
    use std::arch::x86_64::*;

    use super::Engine;
    use crate::cpu::matmul::storage::{At, Elements, Storage};
    use crate::cpu::matmul::vector::Avx512;

    /// Operands as pairs of bf16, for the dot-product instruction of AVX-512 BF16.
    pub(in super::super) struct Pairs;

    /// Takes 32 words of which the first 16 are the pairs' first values and the others their second ones.
    #[inline(always)]
    unsafe fn interleave(words: __m512i) -> Avx512 {
        // SAFETY: registers only.
        unsafe {
            let order = _mm512_add_epi32(
                _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                _mm512_setr_epi32(
                    0x10_0000, 0x11_0000, 0x12_0000, 0x13_0000, 0x14_0000, 0x15_0000, 0x16_0000, 0x17_0000,
                    0x18_0000, 0x19_0000, 0x1a_0000, 0x1b_0000, 0x1c_0000, 0x1d_0000, 0x1e_0000, 0x1f_0000,
                ),
            );
            Avx512(_mm512_castsi512_ps(_mm512_permutexvar_epi16(order, words)))
        }
    }

    #[inline(always)]
    unsafe fn narrow(first: Avx512, second: Avx512) -> __m512i {
        // SAFETY: registers only; both types are 512 bits without a meaning of their own.
        unsafe { std::mem::transmute(_mm512_cvtne2ps_pbh(second.0, first.0)) }
    }

    // SAFETY (all methods): the pointers hold the elements, as the trait says; the rest is registers only.
    #[allow(clippy::undocumented_unsafe_blocks)]
    impl Engine for Pairs {
        type V = Avx512;
        const K_PER_UNIT: usize = 2;

        #[inline(always)]
        unsafe fn along(from: impl Elements<Avx512>) -> Avx512 {
            unsafe {
                match from.bf16() {
                    Some(p) => Avx512(_mm512_loadu_ps(p.cast())),
                    None => {
                        let (low, high) = (from.load(0), from.load(16));
                        Avx512(_mm512_castsi512_ps(narrow(low, high)))
                    }
                }
            }
        }

        #[inline(always)]
        unsafe fn across<S: Storage>(data: *const u8, index: usize, second: Option<usize>) -> Avx512 {
            unsafe {
                let from = |index| At::<S>::new(data, index);
                let bf16 = |index| Elements::<Avx512>::bf16(&from(index));
                if let Some(p) = bf16(index) {
                    let first = _mm256_loadu_si256(p.cast());
                    let other = match second.and_then(bf16) {
                        Some(p) => _mm256_loadu_si256(p.cast()),
                        None => _mm256_setzero_si256(),
                    };
                    return interleave(_mm512_inserti64x4::<1>(_mm512_castsi256_si512(first), other));
                }
                let first = from(index).load(0);
                let other = match second {
                    Some(index) => from(index).load(0),
                    None => Avx512(_mm512_setzero_ps()),
                };
                interleave(narrow(first, other))
            }
        }

        #[inline(always)]
        unsafe fn multiply_add(sum: Avx512, a: Avx512, b: Avx512) -> Avx512 {
            // SAFETY: both types are 64 bytes of plain bits.
            let pairs = |x| unsafe { std::mem::transmute::<__m512, __m512bh>(x) };
            // SAFETY: the instruction set was found at start-up.
            unsafe { Avx512(_mm512_dpbf16_ps(sum.0, pairs(a.0), pairs(b.0))) }
        }
    }
}
