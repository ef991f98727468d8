//! Activations to codes and back on the CPU.

use super::KernelCall;
use crate::cpu::kernels::{fp8, int8};
use crate::{DType, Quantization};

pub(super) fn run(op: Quantization<'_>, KernelCall { exec, t, .. }: KernelCall<'_>) {
    match op {
        Quantization::QuantizeInt8 { x, codes, scales, block } => {
            int8::quantize(exec, t.floats(x), t.i8s_mut(codes), t.f32s_mut(scales), block as usize);
        }
        Quantization::DequantizeInt8 { codes, scales, block, out } => {
            int8::dequantize(exec, t.i8s(codes), t.f32s(scales), block as usize, t.floats_mut(out));
        }
        Quantization::QuantizeFp8 { x, out } => {
            let format = if out.dtype() == DType::F8E4m3 { fp8::E4M3 } else { fp8::E5M2 };
            fp8::quantize(exec, t.floats(x), format, t.bytes_mut(out));
        }
    }
}
