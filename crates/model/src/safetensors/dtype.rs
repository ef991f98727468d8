//! The element types that the format knows.

use std::fmt;

use plimsoll_device::DType;

macro_rules! stored_dtypes {
    ($($variant:ident $name:literal $bits:literal $doc:literal,)*) => {
        /// An element type of the safetensors format.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[allow(non_camel_case_types)]
        pub enum StoredDType { $(#[doc = $doc] $variant,)* }

        impl StoredDType {
            /// The type of this name in a header.
            pub fn parse(name: &str) -> Option<StoredDType> {
                match name {
                    $($name => Some(StoredDType::$variant),)*
                    _ => None,
                }
            }

            /// Its name in a header.
            pub fn name(self) -> &'static str {
                match self { $(StoredDType::$variant => $name,)* }
            }

            /// Bits of an element.
            pub fn bits(self) -> u64 {
                match self { $(StoredDType::$variant => $bits,)* }
            }
        }
    };
}

stored_dtypes! {
    Bool "BOOL" 8 "A byte, 0 or 1.",
    F4 "F4" 4 "MX 4-bit float.",
    F6_E2M3 "F6_E2M3" 6 "MX 6-bit float.",
    F6_E3M2 "F6_E3M2" 6 "MX 6-bit float.",
    U8 "U8" 8 "Unsigned byte.",
    I8 "I8" 8 "Signed byte.",
    F8_E5M2 "F8_E5M2" 8 "8-bit float.",
    F8_E4M3 "F8_E4M3" 8 "8-bit float.",
    F8_E8M0 "F8_E8M0" 8 "8-bit power of two.",
    F8_E5M2FNUZ "F8_E5M2FNUZ" 8 "8-bit float without negative zero.",
    F8_E4M3FNUZ "F8_E4M3FNUZ" 8 "8-bit float without negative zero.",
    I16 "I16" 16 "Signed.",
    U16 "U16" 16 "Unsigned.",
    F16 "F16" 16 "IEEE half precision.",
    BF16 "BF16" 16 "The upper half of an f32.",
    I32 "I32" 32 "Signed.",
    U32 "U32" 32 "Unsigned.",
    F32 "F32" 32 "IEEE single precision.",
    C64 "C64" 64 "Complex of two f32.",
    F64 "F64" 64 "IEEE double precision.",
    I64 "I64" 64 "Signed.",
    U64 "U64" 64 "Unsigned.",
}

impl StoredDType {
    /// Bytes of a tensor of this type and shape, or `None` where they overflow or are not whole.
    pub fn bytes_for(self, shape: &[u64]) -> Option<u64> {
        let elements = shape.iter().try_fold(1u64, |product, size| product.checked_mul(*size))?;
        let bits = elements.checked_mul(self.bits())?;
        bits.is_multiple_of(8).then_some(bits / 8)
    }

    /// The device's type for it, where there is one.
    pub fn device(self) -> Option<DType> {
        match self {
            StoredDType::F32 => Some(DType::F32),
            StoredDType::BF16 => Some(DType::Bf16),
            StoredDType::F16 => Some(DType::F16),
            StoredDType::U32 => Some(DType::U32),
            _ => None,
        }
    }

    /// The format's type for a device's, where there is one.
    pub fn from_device(dtype: DType) -> Option<StoredDType> {
        match dtype {
            DType::F32 => Some(StoredDType::F32),
            DType::Bf16 => Some(StoredDType::BF16),
            DType::F16 => Some(StoredDType::F16),
            DType::U32 => Some(StoredDType::U32),
            DType::I8 => Some(StoredDType::I8),
            DType::U8 => Some(StoredDType::U8),
            _ => None,
        }
    }
}

impl fmt::Display for StoredDType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
