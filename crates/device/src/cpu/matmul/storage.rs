//! Reading elements of every storage type as vectors of f32; block types are dequantised on the way.
//!
//! This is the one place that knows how blocks are laid out: packing, dot products, embeddings and conversions all
//! read through [`Storage`]. (Products of integers want codes and scales apart: `int8/codes`.) Layouts of GGUF types are those of ggml (`ggml-common.h`).

mod blocks;
mod fp8;
mod normal_float;
mod super_blocks;
#[cfg(test)]
pub(super) mod tests;

use std::marker::PhantomData;

use super::vector::{MAX_VECTORS, Portable, Vector, bf16_value, f16_value};
use crate::DType;

pub(super) use blocks::{IQ4_NL, Int8, Iq4Nl, Mxfp4, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, TWICE_E2M1, half_e8m0};
pub(super) use fp8::{E4m3, E5m2, Fp8};
pub(super) use normal_float::{DoublyQuantized, Float, NormalFloat, Quantized};
pub(super) use super_blocks::{MAX_GROUPS, Q2K, Q3K, Q4K, Q5K, Q6K, Q8K};

/// Elements that are taken together even of plain types; divides every block of a quantised type.
pub(super) const GROUP: usize = 32;

/// Elements of the longest [chunk](Storage::CHUNK).
pub(super) const MAX_CHUNK: usize = 64;

/// A storage type.
///
/// # Safety
/// For every method but `offset`: the place is that of a block that lies whole in memory, or of a plain type holds the
/// elements named. Of a block type, `at` is a multiple of `V::LANES` inside the block.
pub(super) trait Storage {
    /// Elements of a block: 1 of plain types.
    const BLOCK: usize;
    /// Elements that are read together: 32 or 64, which divides a block and [`GROUP`] elements of a plain type.
    const CHUNK: usize;
    /// Where a block is, and what it shares with others.
    type Place: Copy;
    /// What is read once for all elements of a block.
    type Scales<V: Vector>: Copy;

    /// The block of element `index` of the tensor at `data`.
    unsafe fn place(data: *const u8, index: usize) -> Self::Place;

    /// The place after the next block, or after [`GROUP`] elements of a plain type. It may lie behind the last one.
    unsafe fn next(place: Self::Place) -> Self::Place;

    /// Where it begins, to be fetched.
    fn address(place: Self::Place) -> *const u8;

    unsafe fn scales<V: Vector>(place: Self::Place) -> Self::Scales<V>;

    /// [`CHUNK`](Self::CHUNK) elements from `at` on, a multiple of their number, in the first vectors of `out`.
    unsafe fn chunk<V: Vector>(
        place: Self::Place,
        at: usize,
        scales: &Self::Scales<V>,
        out: &mut [V; MAX_VECTORS],
    );

    /// `V::LANES` elements from `at` on, where no more of the block is wanted.
    unsafe fn load_alone<V: Vector>(place: Self::Place, at: usize) -> V;

    /// Where the bits of `load` in bf16 can be had as they are: the address of element `at`.
    fn bf16_at(place: Self::Place, at: usize) -> Option<*const u16>;

    /// Bytes from the start to element `index`, or to its block; about, to fetch it, where blocks share factors.
    fn offset(index: usize) -> usize;
}

/// A storage type whose blocks need nothing but themselves, one after the other.
///
/// # Safety
/// For every method: the pointer holds the whole block, or of a plain type the elements named. Of a block type, `at`
/// is a multiple of `V::LANES` inside the block.
pub(super) trait Blocks {
    /// As [`Storage::BLOCK`].
    const BLOCK: usize;
    /// Bytes of a block.
    const BYTES: usize;
    /// As [`Storage::CHUNK`].
    const CHUNK: usize = GROUP;
    /// As [`Storage::Scales`].
    type Scales<V: Vector>: Copy;

    unsafe fn scales<V: Vector>(block: *const u8) -> Self::Scales<V>;

    /// `V::LANES` elements from `at` on.
    unsafe fn load<V: Vector>(block: *const u8, at: usize, scales: &Self::Scales<V>) -> V;

    /// As [`Storage::chunk`].
    #[inline(always)]
    unsafe fn chunk<V: Vector>(
        block: *const u8,
        at: usize,
        scales: &Self::Scales<V>,
        out: &mut [V; MAX_VECTORS],
    ) {
        for (i, out) in out.iter_mut().enumerate().take(Self::CHUNK / V::LANES) {
            // SAFETY: as the trait says.
            *out = unsafe { Self::load(block, at + i * V::LANES, scales) };
        }
    }

    #[inline(always)]
    unsafe fn load_alone<V: Vector>(block: *const u8, at: usize) -> V {
        // SAFETY: as the trait says.
        unsafe { Self::load(block, at, &Self::scales(block)) }
    }

    #[inline(always)]
    fn bf16_at(_block: *const u8, _at: usize) -> Option<*const u16> {
        None
    }
}

impl<T: Blocks> Storage for T {
    const BLOCK: usize = <T as Blocks>::BLOCK;
    const CHUNK: usize = <T as Blocks>::CHUNK;
    type Place = *const u8;
    type Scales<V: Vector> = <T as Blocks>::Scales<V>;

    #[inline(always)]
    unsafe fn place(data: *const u8, index: usize) -> *const u8 {
        data.wrapping_add(Self::offset(index))
    }

    #[inline(always)]
    unsafe fn next(place: *const u8) -> *const u8 {
        place.wrapping_add(Self::offset(<T as Blocks>::BLOCK.max(GROUP)))
    }

    #[inline(always)]
    fn address(place: *const u8) -> *const u8 {
        place
    }

    #[inline(always)]
    unsafe fn scales<V: Vector>(place: *const u8) -> Self::Scales<V> {
        // SAFETY: as the trait says.
        unsafe { <T as Blocks>::scales(place) }
    }

    #[inline(always)]
    unsafe fn chunk<V: Vector>(
        place: *const u8,
        at: usize,
        scales: &Self::Scales<V>,
        out: &mut [V; MAX_VECTORS],
    ) {
        // SAFETY: as the trait says.
        unsafe { <T as Blocks>::chunk(place, at, scales, out) }
    }

    #[inline(always)]
    unsafe fn load_alone<V: Vector>(place: *const u8, at: usize) -> V {
        // SAFETY: as the trait says.
        unsafe { <T as Blocks>::load_alone(place, at) }
    }

    #[inline(always)]
    fn bf16_at(place: *const u8, at: usize) -> Option<*const u16> {
        <T as Blocks>::bf16_at(place, at)
    }

    #[inline(always)]
    fn offset(index: usize) -> usize {
        index / <T as Blocks>::BLOCK * <T as Blocks>::BYTES
    }
}

/// Elements that follow each other, to be read a vector at a time.
///
/// # Safety
/// Of `load`: the elements exist; `after` is a multiple of `V::LANES`.
pub(super) trait Elements<V> {
    /// `V::LANES` elements, `after` elements from the first one.
    unsafe fn load(&self, after: usize) -> V;

    /// As [`Storage::bf16_at`], of the first one.
    fn bf16(&self) -> Option<*const u16>;
}

/// Elements from number `index` on, wherever their blocks begin.
pub(super) struct At<S> {
    data: *const u8,
    index: usize,
    storage: PhantomData<S>,
}

impl<S: Storage> At<S> {
    #[inline(always)]
    pub fn new(data: *const u8, index: usize) -> Self {
        At { data, index, storage: PhantomData }
    }
}

impl<V: Vector, S: Storage> Elements<V> for At<S> {
    #[inline(always)]
    unsafe fn load(&self, after: usize) -> V {
        let index = self.index + after;
        // SAFETY: the caller vouches for the elements, and a block lies whole in memory.
        unsafe { S::load_alone(S::place(self.data, index), index % S::BLOCK) }
    }

    #[inline(always)]
    fn bf16(&self) -> Option<*const u16> {
        // SAFETY: the caller of `new` vouches for the element.
        S::bf16_at(unsafe { S::place(self.data, self.index) }, self.index % S::BLOCK)
    }
}

/// Elements that have been read, from number `at` on, and where they were if they are bf16 as they are.
pub(super) struct Read<'a, V> {
    pub vectors: &'a [V; MAX_VECTORS],
    pub at: usize,
    pub bf16: Option<*const u16>,
}

impl<V: Vector> Elements<V> for Read<'_, V> {
    #[inline(always)]
    unsafe fn load(&self, after: usize) -> V {
        self.vectors[(self.at + after) / V::LANES]
    }

    #[inline(always)]
    fn bf16(&self) -> Option<*const u16> {
        self.bf16
    }
}

pub(super) struct F32;
pub(super) struct Bf16;
pub(super) struct F16;

/// A type whose elements are vectors as they are: `$load` of `V` reads them from a pointer to `$element`.
macro_rules! plain {
    ($storage:ident, $element:ty, $load:ident $(, $bf16_at:item)?) => {
        impl Blocks for $storage {
            const BLOCK: usize = 1;
            const BYTES: usize = size_of::<$element>();
            type Scales<V: Vector> = ();

            #[inline(always)]
            unsafe fn scales<V: Vector>(_: *const u8) {}

            #[inline(always)]
            unsafe fn load<V: Vector>(data: *const u8, at: usize, (): &()) -> V {
                // SAFETY: as the trait says.
                unsafe { V::$load(data.cast::<$element>().add(at)) }
            }

            $(#[inline(always)] $bf16_at)?
        }
    };
}

plain!(F32, f32, load);
plain!(F16, u16, load_f16);
plain!(
    Bf16,
    u16,
    load_bf16,
    fn bf16_at(data: *const u8, at: usize) -> Option<*const u16> {
        Some(data.cast::<u16>().wrapping_add(at))
    }
);

/// Calls a function with the storage type of `dtype` in the place of `[]`; nothing for what is no number to compute with.
macro_rules! by_storage {
    ($dtype:expr, $function:ident::<[] $(, $parameter:tt)*>($($argument:expr),*)) => {
        match $dtype {
            DType::F32 => $function::<storage::F32 $(, $parameter)*>($($argument),*),
            DType::Bf16 => $function::<storage::Bf16 $(, $parameter)*>($($argument),*),
            DType::F16 => $function::<storage::F16 $(, $parameter)*>($($argument),*),
            DType::Q8_0 => $function::<storage::Q8_0 $(, $parameter)*>($($argument),*),
            DType::Q4_0 => $function::<storage::Q4_0 $(, $parameter)*>($($argument),*),
            DType::Q4_1 => $function::<storage::Q4_1 $(, $parameter)*>($($argument),*),
            DType::Q5_0 => $function::<storage::Q5_0 $(, $parameter)*>($($argument),*),
            DType::Q5_1 => $function::<storage::Q5_1 $(, $parameter)*>($($argument),*),
            DType::Q2K => $function::<storage::Q2K $(, $parameter)*>($($argument),*),
            DType::Q3K => $function::<storage::Q3K $(, $parameter)*>($($argument),*),
            DType::Q4K => $function::<storage::Q4K $(, $parameter)*>($($argument),*),
            DType::Q5K => $function::<storage::Q5K $(, $parameter)*>($($argument),*),
            DType::Q6K => $function::<storage::Q6K $(, $parameter)*>($($argument),*),
            DType::Q8K => $function::<storage::Q8K $(, $parameter)*>($($argument),*),
            DType::Iq4Nl => $function::<storage::Iq4Nl $(, $parameter)*>($($argument),*),
            DType::Mxfp4 => $function::<storage::Mxfp4 $(, $parameter)*>($($argument),*),
            DType::Nf4 => $function::<storage::DoublyQuantized<storage::NormalFloat> $(, $parameter)*>($($argument),*),
            DType::Fp4 => $function::<storage::DoublyQuantized<storage::Float> $(, $parameter)*>($($argument),*),
            DType::Nf4F32 => $function::<storage::Quantized<storage::NormalFloat> $(, $parameter)*>($($argument),*),
            DType::Fp4F32 => $function::<storage::Quantized<storage::Float> $(, $parameter)*>($($argument),*),
            DType::Int8 => $function::<storage::Int8 $(, $parameter)*>($($argument),*),
            DType::F8E4m3 => $function::<storage::Fp8<storage::E4m3> $(, $parameter)*>($($argument),*),
            DType::F8E5m2 => $function::<storage::Fp8<storage::E5m2> $(, $parameter)*>($($argument),*),
            DType::F64 | DType::U32 | DType::I8 | DType::U8 => Default::default(),
        }
    };
}
pub(super) use by_storage;

/// One element, of any type.
///
/// # Safety
/// `data` holds element `index`, and its whole block.
pub(super) unsafe fn element(dtype: DType, data: *const u8, index: usize) -> f32 {
    use super::storage;
    // SAFETY: the caller vouches for the element.
    unsafe {
        match dtype {
            DType::F32 => *data.cast::<f32>().add(index),
            DType::Bf16 => bf16_value(*data.cast::<u16>().add(index)),
            DType::F16 => f16_value(*data.cast::<u16>().add(index)),
            DType::F64 => *data.cast::<f64>().add(index) as f32,
            DType::U32 => *data.cast::<u32>().add(index) as f32,
            DType::I8 => f32::from(*data.cast::<i8>().add(index)),
            DType::U8 => f32::from(*data.add(index)),
            DType::F8E4m3 => Fp8::<E4m3>::element(data, index),
            DType::F8E5m2 => Fp8::<E5m2>::element(data, index),
            _ => by_storage!(dtype, block_element::<[]>(data, index)),
        }
    }
}

unsafe fn block_element<S: Storage>(data: *const u8, index: usize) -> f32 {
    let first = index / Portable::LANES * Portable::LANES;
    let mut lanes = [0.0; Portable::LANES];
    // SAFETY: the block is there, and what is read begins at a multiple of the lanes.
    unsafe { Elements::<Portable>::load(&At::<S>::new(data, first), 0).store(lanes.as_mut_ptr()) };
    lanes[index - first]
}

/// `count` elements of `dtype`, which `S` reads, as f32, from element `first` on, with which a block begins.
///
/// # Safety
/// The machine has the vector's instruction set, the elements exist and `out` has room for them.
#[inline(always)]
pub(super) unsafe fn dequantize<V: Vector, S: Storage>(
    dtype: DType,
    data: *const u8,
    first: usize,
    count: usize,
    out: *mut f32,
) {
    let step = S::BLOCK.max(GROUP);
    let whole = count / step * step;
    // SAFETY: as for this function.
    unsafe {
        let mut place = S::place(data, first);
        for block in (0..whole).step_by(step) {
            let scales = S::scales::<V>(place);
            for start in (0..step).step_by(S::CHUNK) {
                let mut vectors = [V::splat(0.0); MAX_VECTORS];
                S::chunk(place, start, &scales, &mut vectors);
                for (i, vector) in vectors.iter().enumerate().take(S::CHUNK / V::LANES) {
                    vector.store(out.add(block + start + i * V::LANES));
                }
            }
            place = S::next(place);
        }
        for index in whole..count {
            *out.add(index) = element(dtype, data, first + index);
        }
    }
}
