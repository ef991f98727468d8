//! Products with a B of integer codes, rows of A rounded to 8-bit integers: inference's x W^T, multiplied as the machine multiplies
//! bytes.
//!
//! Each 32 values of a row share a scale, their largest magnitude / 127 (ggml's Q8_0, the scale in f32). Products of codes are added up
//! exactly, of 32 values or of the 16 that share a scale of B, made f32, and times both scales added to one f32 sum, in the order of k;
//! after them, where B has minima, the minimum times the sum of the row's values. So results of integers have the same bits whatever rows
//! are beside them, and whether [`rows`] or [`tiles`] made them: the first is for a few rows, on every machine; the others for more of
//! them, on machines that add four products of bytes in one instruction of 512 bits. The sum is a chain of k / 32 additions, or twice or
//! four times as many with halves and minima: what they round away is far below what rounding the rows to 8 bits does.

mod codes;
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
mod integers;
pub(super) mod rows;
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, unused_imports))]
pub(super) mod tiles;

use super::pack::Lines;
use super::storage::{GROUP, element};
use super::vector::bf16_value;
use super::{Product, few_rows};
use crate::DType;
use crate::cpu::Isa;
use codes::has_codes;

/// Columns of B that share a vector of sums.
const TOGETHER: usize = few_rows::MOST_COLUMNS;

/// The same product by integers, where that is possible and pays.
pub(super) fn product(isa: Isa, product: &Product) -> Option<Product> {
    let Product { a, b, k, .. } = *product;
    let few = Product { kernels: rows::kernels(isa), ..*product };
    let whole = k.is_multiple_of(b.dtype.block_elements() as usize);
    if !has_codes(b.dtype) || !whole || !few_rows::streams(&few) {
        return None;
    }
    let many = a.count > few_rows::MAX_ROWS;
    // Tiles of AMX multiply bf16 faster still.
    let amx = a.dtype == DType::Bf16 && isa.min(Isa::detect()) >= Isa::Amx;
    match tiles::kernels(isa, b.dtype) {
        Some(kernels) if a.count > rows::MOST && !(many && amx) => Some(Product { kernels, ..few }),
        _ => Some(few).filter(few_rows::suits),
    }
}

/// Whether `isa`, or the best that this machine has, multiplies bytes in vectors of 512 bits.
#[cfg(target_arch = "x86_64")]
fn has_vnni(isa: Isa) -> bool {
    isa.min(Isa::detect()) >= Isa::Avx512 && is_x86_feature_detected!("avx512vnni")
}

/// The scale of values of which the largest magnitude has these bits, and what they are multiplied with. Where one is no finite number
/// the scale is NaN.
#[inline(always)]
fn scale_of(largest: u32) -> (f32, f32) {
    const INFINITE: u32 = 0x7f80_0000;
    let magnitude = f32::from_bits(largest);
    if largest >= INFINITE {
        (f32::NAN, 0.0)
    } else if magnitude > 127.0 / f32::MAX {
        (magnitude / 127.0, 127.0 / magnitude)
    } else {
        // Of numbers so small that the factor would be infinite there is nothing left.
        (magnitude / 127.0, 0.0)
    }
}

/// The values of a row of A from `k` on.
///
/// # Safety
/// The elements exist, of a float type.
#[inline(always)]
unsafe fn group_of(a: Lines, row: usize, k: usize) -> [f32; GROUP] {
    let first = row * a.stride + k * a.k_stride;
    let mut values = [0.0; GROUP];
    // SAFETY: the caller vouches for the elements.
    unsafe {
        match a.dtype {
            DType::F32 if a.k_stride == 1 => {
                values = a.data.cast::<f32>().add(first).cast::<[f32; GROUP]>().read_unaligned()
            }
            DType::Bf16 if a.k_stride == 1 => {
                let bits = a.data.cast::<u16>().add(first).cast::<[u16; GROUP]>().read_unaligned();
                for (value, bits) in values.iter_mut().zip(bits) {
                    *value = bf16_value(bits);
                }
            }
            dtype => {
                for (i, value) in values.iter_mut().enumerate() {
                    *value = element(dtype, a.data, first + i * a.k_stride);
                }
            }
        }
    }
    values
}
