//! From f32 values to frozen weight storages.
//!
//! Blocks are quantised each by itself, so that the number of threads changes nothing. The GGUF types follow ggml's
//! definitions; those of bitsandbytes are the same bits as its own ([`four_bit`]). Reading is `matmul`'s affair.

mod blocks;
pub mod four_bit;
mod k_quants;
mod mean;
mod tables;
#[cfg(test)]
mod tests;

pub use tables::{FP4_VALUES, NF4_VALUES, SIGNED_DYNAMIC_MAP};

use crate::DType;
use crate::cpu::at_once;
use four_bit::{FourBit, Magnitudes};

/// Writes `values` as `dtype` into `out`, over up to `threads` threads: any type of blocks that [`can_quantize`] tells,
/// from the start of a tensor on. Of [`DType::Nf4`] and [`DType::Fp4`], whose offset is a mean, `values` are the whole
/// tensor; of [`DType::Int8`] each block gets a scale of its own.
///
/// `None`, and nothing done, where there is no quantiser or `out` is not just large enough.
pub fn quantize(dtype: DType, values: &[f32], out: &mut [u8], threads: usize) -> Option<()> {
    if dtype.bytes_for(values.len() as u64) != Some(out.len() as u64) {
        return None;
    }
    if let Some(kind) = FourBit::of(dtype) {
        let mut codes = vec![0; values.len().div_ceil(2)];
        let mut magnitudes = vec![0.0; values.len().div_ceil(four_bit::BLOCK)];
        four_bit::code(kind, values, &mut codes, &mut magnitudes, threads)?;
        let magnitudes = Magnitudes::new(magnitudes, !dtype.has_rows());
        return four_bit::arrange(dtype, values.len(), &codes, &magnitudes, out);
    }
    let block = quantizer(dtype)?;
    let (elements, bytes) = (dtype.block_elements() as usize, dtype.block_bytes() as usize);
    let each = (values.len() / elements).div_ceil(threads.max(1)).max(1);
    at_once(values.chunks(each * elements).zip(out.chunks_mut(each * bytes)), threads, |(values, out)| {
        for (values, out) in values.chunks_exact(elements).zip(out.chunks_exact_mut(bytes)) {
            block(values, out);
        }
    });
    Some(())
}

/// Writes rows of `columns` values as [`DType::Int8`], each block with the scale of its row, and each row's largest
/// magnitude, 127 times that scale, into `magnitudes`: LLM.int8's vector-wise weights (Dettmers et al. 2022).
///
/// `None`, and nothing done, where rows are not whole blocks or sizes do not fit.
pub fn quantize_rows(values: &[f32], columns: usize, out: &mut [u8], magnitudes: &mut [f32]) -> Option<()> {
    let row_bytes = DType::Int8.bytes_for(columns as u64)? as usize;
    if columns == 0 || values.len() != columns * magnitudes.len() || out.len() != row_bytes * magnitudes.len()
    {
        return None;
    }
    for ((row, out), magnitude) in
        values.chunks_exact(columns).zip(out.chunks_exact_mut(row_bytes)).zip(magnitudes)
    {
        *magnitude = blocks::largest(row);
        for (values, out) in
            row.chunks_exact(blocks::INT8_BLOCK).zip(out.chunks_exact_mut(4 + blocks::INT8_BLOCK))
        {
            blocks::int8_scaled(values, blocks::int8_scale(*magnitude), out);
        }
    }
    Some(())
}

/// The codes alone of rows of `columns` values, each with the scale of its row, and each row's largest magnitude.
///
/// `None`, and nothing done, where sizes do not fit.
pub fn quantize_rows_codes(
    values: &[f32],
    columns: usize,
    codes: &mut [u8],
    magnitudes: &mut [f32],
) -> Option<()> {
    if columns == 0 || values.len() != columns * magnitudes.len() || codes.len() != values.len() {
        return None;
    }
    for ((row, codes), magnitude) in
        values.chunks_exact(columns).zip(codes.chunks_exact_mut(columns)).zip(magnitudes)
    {
        *magnitude = blocks::largest(row);
        blocks::int8_codes(row, blocks::int8_scale(*magnitude), codes);
    }
    Some(())
}

/// The factor from a row's largest magnitude to the scale of its 8-bit codes.
pub fn int8_scale(magnitude: f32) -> f32 {
    blocks::int8_scale(magnitude)
}

/// Whether [`quantize`] writes a type.
pub fn can_quantize(dtype: DType) -> bool {
    FourBit::of(dtype).is_some() || quantizer(dtype).is_some()
}

/// Writes values as blocks.
type Quantizer = fn(&[f32], &mut [u8]);

/// What writes one block.
fn quantizer(dtype: DType) -> Option<Quantizer> {
    match dtype {
        DType::Q8_0 => Some(blocks::q8_0),
        DType::Q4_0 => Some(blocks::q4_0),
        DType::Q4_1 => Some(blocks::q4_1),
        DType::Q5_0 => Some(blocks::q5_0),
        DType::Q5_1 => Some(blocks::q5_1),
        DType::Q4K => Some(k_quants::q4_k),
        DType::Q6K => Some(k_quants::q6_k),
        DType::Int8 => Some(blocks::int8),
        DType::Mxfp4 => Some(blocks::mxfp4),
        _ => None,
    }
}
