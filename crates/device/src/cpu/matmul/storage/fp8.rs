//! 8-bit floats with one factor for the whole tensor, which stands before its first element.
//!
//! Both are read as f16 numbers, whose upper bits theirs are: the conversion knows subnormals on every instruction set.
//! The factor is a power of two, so that every value is exact, in bf16 too.

use std::marker::PhantomData;

use super::{GROUP, Storage};
use crate::cpu::matmul::vector::{MAX_VECTORS, Vector, e4m3_value, e5m2_value};
use crate::dtype::FP8_FACTOR_BYTES;

const FACTOR: usize = FP8_FACTOR_BYTES as usize;

/// A format of 8-bit floats.
pub(in super::super) trait Format {
    /// What [`value`](Format::value) and [`load`](Format::load) leave to be multiplied.
    const UNIT: f32;

    fn value(code: u8) -> f32;

    /// # Safety
    /// `V::LANES` codes at `p`, and the vector's instruction set.
    unsafe fn load<V: Vector>(p: *const u8) -> V;
}

pub(in super::super) struct E4m3;
pub(in super::super) struct E5m2;

impl Format for E4m3 {
    const UNIT: f32 = 256.0;

    #[inline(always)]
    fn value(code: u8) -> f32 {
        e4m3_value(code)
    }

    #[inline(always)]
    unsafe fn load<V: Vector>(p: *const u8) -> V {
        // SAFETY: as the trait says.
        unsafe { V::load_e4m3(p) }
    }
}

impl Format for E5m2 {
    const UNIT: f32 = 1.0;

    #[inline(always)]
    fn value(code: u8) -> f32 {
        e5m2_value(code)
    }

    #[inline(always)]
    unsafe fn load<V: Vector>(p: *const u8) -> V {
        // SAFETY: as the trait says.
        unsafe { V::load_e5m2(p) }
    }
}

/// A tensor of one format.
pub(in super::super) struct Fp8<F>(PhantomData<F>);

/// Elements with the factor of their tensor.
#[derive(Clone, Copy)]
pub(in super::super) struct Scaled {
    factor: *const u8,
    codes: *const u8,
}

impl<F: Format> Fp8<F> {
    /// One element.
    ///
    /// # Safety
    /// `data` holds the factor and element `index`.
    pub unsafe fn element(data: *const u8, index: usize) -> f32 {
        // SAFETY: as for this function.
        unsafe { F::value(*data.add(FACTOR + index)) * Self::factor(data) }
    }

    /// # Safety
    /// `at` holds a factor.
    #[inline(always)]
    unsafe fn factor(at: *const u8) -> f32 {
        // SAFETY: as for this function.
        f32::from_bits(unsafe { at.cast::<u32>().read_unaligned() }) * F::UNIT
    }
}

impl<F: Format> Storage for Fp8<F> {
    const BLOCK: usize = 1;
    const CHUNK: usize = GROUP;
    type Place = Scaled;
    type Scales<V: Vector> = V;

    #[inline(always)]
    unsafe fn place(data: *const u8, index: usize) -> Scaled {
        Scaled { factor: data, codes: data.wrapping_add(FACTOR + index) }
    }

    #[inline(always)]
    unsafe fn next(place: Scaled) -> Scaled {
        Scaled { codes: place.codes.wrapping_add(GROUP), ..place }
    }

    #[inline(always)]
    fn address(place: Scaled) -> *const u8 {
        place.codes
    }

    #[inline(always)]
    unsafe fn scales<V: Vector>(place: Scaled) -> V {
        // SAFETY: the factor stands before the elements.
        unsafe { V::splat(Self::factor(place.factor)) }
    }

    #[inline(always)]
    unsafe fn chunk<V: Vector>(place: Scaled, at: usize, factor: &V, out: &mut [V; MAX_VECTORS]) {
        for (i, out) in out.iter_mut().enumerate().take(GROUP / V::LANES) {
            // SAFETY: as the trait says.
            *out = unsafe { F::load::<V>(place.codes.wrapping_add(at + i * V::LANES)).times(*factor) };
        }
    }

    #[inline(always)]
    unsafe fn load_alone<V: Vector>(place: Scaled, at: usize) -> V {
        // SAFETY: as the trait says.
        unsafe { F::load::<V>(place.codes.wrapping_add(at)).times(Self::scales::<V>(place)) }
    }

    #[inline(always)]
    fn bf16_at(_: Scaled, _: usize) -> Option<*const u16> {
        None
    }

    #[inline(always)]
    fn offset(index: usize) -> usize {
        FACTOR + index
    }
}
