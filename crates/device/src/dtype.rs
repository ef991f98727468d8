//! Element types, plain and in blocks.

use std::fmt;

/// How the elements of a tensor are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum DType {
    F32,
    Bf16,
    F16,
    /// Token ids and positions.
    U32,
    /// GGUF: blocks of 32, f16 scale, 8-bit signed codes (34 bytes).
    Q8_0,
    /// GGUF: blocks of 32, f16 scale, 4-bit codes less 8 (18 bytes).
    Q4_0,
    /// GGUF: blocks of 32, f16 scale and minimum, 4-bit codes (20 bytes).
    Q4_1,
}

impl DType {
    /// Elements in one block: 1 for plain types.
    pub fn block_elements(self) -> u64 {
        match self {
            DType::F32 | DType::Bf16 | DType::F16 | DType::U32 => 1,
            DType::Q8_0 | DType::Q4_0 | DType::Q4_1 => 32,
        }
    }

    /// Bytes of one block.
    pub fn block_bytes(self) -> u64 {
        match self {
            DType::F32 | DType::U32 => 4,
            DType::Bf16 | DType::F16 => 2,
            DType::Q8_0 => 34,
            DType::Q4_0 => 18,
            DType::Q4_1 => 20,
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

    /// The name used in configurations and reports.
    pub fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::Bf16 => "bf16",
            DType::F16 => "f16",
            DType::U32 => "u32",
            DType::Q8_0 => "q8_0",
            DType::Q4_0 => "q4_0",
            DType::Q4_1 => "q4_1",
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
