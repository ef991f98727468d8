//! Element types, plain and in blocks.

use std::fmt;

/// How the elements of a tensor are stored.
///
/// The block types are ggml's (`ggml-common.h`); a weight in one of them is only read. Blocks of 256 elements hold
/// scales of 16 or 32 elements each, which are themselves a few bits times the block's f16 scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum DType {
    F32,
    Bf16,
    F16,
    /// Token ids and positions.
    U32,
    /// Signed 8-bit codes whose scales are a tensor of their own.
    I8,
    /// 8-bit places in a table, whose scales are a tensor of their own.
    U8,
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
}

impl DType {
    /// Every type.
    pub const ALL: [DType; 19] = [
        DType::F32,
        DType::Bf16,
        DType::F16,
        DType::U32,
        DType::I8,
        DType::U8,
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
    ];

    /// Elements in one block: 1 for plain types.
    pub fn block_elements(self) -> u64 {
        match self {
            DType::F32 | DType::Bf16 | DType::F16 | DType::U32 | DType::I8 | DType::U8 => 1,
            DType::Q8_0 | DType::Q4_0 | DType::Q4_1 | DType::Q5_0 | DType::Q5_1 => 32,
            DType::Iq4Nl | DType::Mxfp4 => 32,
            DType::Q2K | DType::Q3K | DType::Q4K | DType::Q5K | DType::Q6K | DType::Q8K => 256,
        }
    }

    /// Bytes of one block.
    pub fn block_bytes(self) -> u64 {
        match self {
            DType::F32 | DType::U32 => 4,
            DType::Bf16 | DType::F16 => 2,
            DType::I8 | DType::U8 => 1,
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
        }
    }

    /// Bytes of `elements` elements, or `None` on overflow or where they are not whole blocks.
    pub fn bytes_for(self, elements: u64) -> Option<u64> {
        if !elements.is_multiple_of(self.block_elements()) {
            return None;
        }
        (elements / self.block_elements()).checked_mul(self.block_bytes())
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
            DType::Bf16 => "bf16",
            DType::F16 => "f16",
            DType::U32 => "u32",
            DType::I8 => "i8",
            DType::U8 => "u8",
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
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
