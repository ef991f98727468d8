//! Element types, plain and in blocks.

use std::fmt;

/// How the elements of a tensor are stored.
///
/// A weight in blocks is only read. The GGUF types are ggml's (`ggml-common.h`); their blocks of 256 elements hold
/// scales of 16 or 32 elements each, which are themselves a few bits times the block's f16 scale. The other ones mean
/// what bitsandbytes means by these names (QLoRA, Dettmers et al. 2023), laid out for this engine's kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum DType {
    F32,
    /// Sums of a whole step, which f32 would round.
    F64,
    Bf16,
    F16,
    /// Token ids and positions.
    U32,
    /// Signed 8-bit codes whose scales are a tensor of their own.
    I8,
    /// 8-bit places in a table, whose scales are a tensor of their own.
    U8,
    /// 8-bit floats of 4 exponent and 3 mantissa bits, 448 at most, without infinity (Micikevicius et al. 2022, "FP8
    /// formats for deep learning"). An f32 factor, a power of two, stands before the tensor's first element; all
    /// elements are multiplied by it. Operands of products, made by [`Quantization::QuantizeFp8`](crate::Quantization::QuantizeFp8).
    F8E4m3,
    /// The same with 5 exponent and 2 mantissa bits, 57344 at most: the upper halves of f16.
    F8E5m2,
    /// GGUF: blocks of 32, f16 scale, 8-bit signed codes (34 bytes).
    Q8_0,
    /// GGUF: blocks of 32, f16 scale, 4-bit codes less 8 (18 bytes).
    Q4_0,
    /// GGUF: blocks of 32, f16 scale and minimum, 4-bit codes (20 bytes).
    Q4_1,
    /// GGUF: blocks of 32, f16 scale, 5-bit codes less 16 (22 bytes).
    Q5_0,
    /// GGUF: blocks of 32, f16 scale and minimum, 5-bit codes (24 bytes).
    Q5_1,
    /// GGUF: blocks of 256, 16 scales and minima of 4 bits, 2-bit codes (84 bytes).
    Q2K,
    /// GGUF: blocks of 256, 16 signed scales of 6 bits, 3-bit codes less 4 (110 bytes).
    Q3K,
    /// GGUF: blocks of 256, 8 scales and minima of 6 bits, 4-bit codes (144 bytes).
    Q4K,
    /// GGUF: blocks of 256, 8 scales and minima of 6 bits, 5-bit codes (176 bytes).
    Q5K,
    /// GGUF: blocks of 256, 16 signed scales of 8 bits, 6-bit codes less 32 (210 bytes).
    Q6K,
    /// GGUF: blocks of 256, f32 scale, 8-bit signed codes (292 bytes, with sums of codes that are not needed).
    Q8K,
    /// GGUF: blocks of 32, f16 scale, 4-bit places in a table of 16 signed bytes (18 bytes).
    Iq4Nl,
    /// GGUF: blocks of 32, 8-bit power of two as the scale, 4-bit floats E2M1 (17 bytes).
    Mxfp4,
    /// 4-bit NormalFloat, doubly quantised: blocks of 64 elements of the flat matrix with an 8-bit code of their largest
    /// magnitude (33 bytes); before every 256 blocks two f32, the factor and the offset of these codes.
    Nf4,
    /// The same with 4-bit floats.
    Fp4,
    /// 4-bit NormalFloat: blocks of 64 elements of the flat matrix with their largest magnitude in f32 (36 bytes).
    Nf4F32,
    /// The same with 4-bit floats.
    Fp4F32,
    /// Blocks of 64 with an f32 scale and 8-bit signed codes (68 bytes). Scales of whole rows are written to each of a
    /// row's blocks.
    Int8,
}

/// Blocks of [`DType::Nf4`] and [`DType::Fp4`] that share a factor and an offset.
const BLOCKS_PER_FACTOR: u64 = 256;
/// Bytes of factor and offset.
const FACTOR_BYTES: u64 = 8;
/// Bytes of the factor of 8-bit floats.
pub(crate) const FP8_FACTOR_BYTES: u64 = 4;

impl DType {
    /// Every type.
    pub const ALL: [DType; 27] = [
        DType::F32,
        DType::F64,
        DType::Bf16,
        DType::F16,
        DType::U32,
        DType::I8,
        DType::U8,
        DType::F8E4m3,
        DType::F8E5m2,
        DType::Q8_0,
        DType::Q4_0,
        DType::Q4_1,
        DType::Q5_0,
        DType::Q5_1,
        DType::Q2K,
        DType::Q3K,
        DType::Q4K,
        DType::Q5K,
        DType::Q6K,
        DType::Q8K,
        DType::Iq4Nl,
        DType::Mxfp4,
        DType::Nf4,
        DType::Fp4,
        DType::Nf4F32,
        DType::Fp4F32,
        DType::Int8,
    ];

    /// Elements in one block: 1 for plain types.
    pub fn block_elements(self) -> u64 {
        match self {
            DType::F32 | DType::Bf16 | DType::F16 | DType::U32 | DType::I8 | DType::U8 => 1,
            DType::F64 => 1,
            DType::F8E4m3 | DType::F8E5m2 => 1,
            DType::Q8_0 | DType::Q4_0 | DType::Q4_1 | DType::Q5_0 | DType::Q5_1 => 32,
            DType::Iq4Nl | DType::Mxfp4 => 32,
            DType::Nf4 | DType::Fp4 | DType::Nf4F32 | DType::Fp4F32 | DType::Int8 => 64,
            DType::Q2K | DType::Q3K | DType::Q4K | DType::Q5K | DType::Q6K | DType::Q8K => 256,
        }
    }

    /// What the width of a matrix has to be a multiple of. The 4-bit types of bitsandbytes are blocks of the flat matrix,
    /// whatever its rows, and its last block may be cut short.
    pub fn row_multiple(self) -> u64 {
        match self {
            DType::Nf4 | DType::Fp4 | DType::Nf4F32 | DType::Fp4F32 => 1,
            _ => self.block_elements(),
        }
    }

    /// What the address of a tensor's first byte has to be a multiple of.
    pub fn alignment(self) -> u64 {
        // Blocks begin with scales of up to four bytes.
        if self.is_block() { 4 } else { self.block_bytes() }
    }

    /// Whether rows of whole blocks can be had by themselves: not where factors are shared by several rows.
    pub fn has_rows(self) -> bool {
        !matches!(self, DType::Nf4 | DType::Fp4) && !self.is_fp8()
    }

    /// Bytes of one block, without factors that several blocks share.
    pub fn block_bytes(self) -> u64 {
        match self {
            DType::F64 => 8,
            DType::F32 | DType::U32 => 4,
            DType::Bf16 | DType::F16 => 2,
            DType::I8 | DType::U8 | DType::F8E4m3 | DType::F8E5m2 => 1,
            DType::Q8_0 => 34,
            DType::Q4_0 | DType::Iq4Nl => 18,
            DType::Q4_1 => 20,
            DType::Q5_0 => 22,
            DType::Q5_1 => 24,
            DType::Q2K => 84,
            DType::Q3K => 110,
            DType::Q4K => 144,
            DType::Q5K => 176,
            DType::Q6K => 210,
            DType::Q8K => 292,
            DType::Mxfp4 => 17,
            DType::Nf4 | DType::Fp4 => 33,
            DType::Nf4F32 | DType::Fp4F32 => 36,
            DType::Int8 => 68,
        }
    }

    /// Bytes of `elements` elements, or `None` on overflow or where they are not whole blocks but have to be.
    pub fn bytes_for(self, elements: u64) -> Option<u64> {
        if !elements.is_multiple_of(self.row_multiple()) {
            return None;
        }
        let blocks = elements.div_ceil(self.block_elements());
        let shared = match self {
            DType::Nf4 | DType::Fp4 => blocks.div_ceil(BLOCKS_PER_FACTOR) * FACTOR_BYTES,
            DType::F8E4m3 | DType::F8E5m2 => FP8_FACTOR_BYTES,
            _ => 0,
        };
        blocks.checked_mul(self.block_bytes())?.checked_add(shared)
    }

    /// Elements of a weight that come with everything needed to read them, wherever such a run of it lies in memory.
    pub fn run_elements(self) -> u64 {
        if self.has_rows() { self.block_elements() } else { self.block_elements() * BLOCKS_PER_FACTOR }
    }

    /// Whether weights may be kept in it: not in integers, nor in f64, nor in 8-bit floats, which a step makes of its
    /// weights.
    pub fn is_weight(self) -> bool {
        !matches!(self, DType::F64 | DType::U32 | DType::I8 | DType::U8) && !self.is_fp8()
    }

    /// Whether it is one of 8-bit floats with a factor for the whole tensor.
    pub fn is_fp8(self) -> bool {
        matches!(self, DType::F8E4m3 | DType::F8E5m2)
    }

    /// Whether it is a floating-point type that kernels compute on directly.
    pub fn is_float(self) -> bool {
        matches!(self, DType::F32 | DType::Bf16 | DType::F16)
    }

    /// Whether its elements are stored in blocks that have to be dequantised.
    pub fn is_block(self) -> bool {
        self.block_elements() > 1
    }

    /// Whether keys and values may be cached in it.
    pub fn is_cache(self) -> bool {
        self.is_float() || matches!(self, DType::Q8_0 | DType::Q4_0 | DType::Q4_1)
    }

    /// Elements that a head of `head_dim` takes in a cache of this type: whole blocks.
    pub fn cached_columns(self, head_dim: u64) -> u64 {
        head_dim.div_ceil(self.block_elements()).saturating_mul(self.block_elements())
    }

    /// The name used in configurations and reports.
    pub fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::F64 => "f64",
            DType::Bf16 => "bf16",
            DType::F16 => "f16",
            DType::U32 => "u32",
            DType::I8 => "i8",
            DType::U8 => "u8",
            DType::F8E4m3 => "e4m3",
            DType::F8E5m2 => "e5m2",
            DType::Q8_0 => "q8_0",
            DType::Q4_0 => "q4_0",
            DType::Q4_1 => "q4_1",
            DType::Q5_0 => "q5_0",
            DType::Q5_1 => "q5_1",
            DType::Q2K => "q2_k",
            DType::Q3K => "q3_k",
            DType::Q4K => "q4_k",
            DType::Q5K => "q5_k",
            DType::Q6K => "q6_k",
            DType::Q8K => "q8_k",
            DType::Iq4Nl => "iq4_nl",
            DType::Mxfp4 => "mxfp4",
            DType::Nf4 => "nf4",
            DType::Fp4 => "fp4",
            DType::Nf4F32 => "nf4_f32",
            DType::Fp4F32 => "fp4_f32",
            DType::Int8 => "int8",
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn doubly_quantised_weights_take_little_more_than_four_bits() {
        for matrix in [[576, 576], [192, 576], [1536, 576], [4096, 4096], [11008, 4096]] {
            let elements: u64 = matrix.iter().product();
            let bits = DType::Nf4.bytes_for(elements).unwrap() as f64 * 8.0 / elements as f64;
            assert!(bits < 4.13, "{matrix:?} takes {bits} bits an element");
        }
        assert_eq!(DType::Nf4.bytes_for(16384), Some(256 * 33 + 8));
        assert_eq!(DType::Nf4.bytes_for(16385), Some(257 * 33 + 16));
        assert_eq!(DType::Nf4.bytes_for(1), Some(41));
        assert_eq!(DType::Fp4F32.bytes_for(65), Some(72));
        assert_eq!(DType::Int8.bytes_for(65), None);
        assert_eq!(DType::F8E4m3.bytes_for(65), Some(69));
    }
}
