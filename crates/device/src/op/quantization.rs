//! Activations to codes of 8 bits and back. How weights are quantised is no operation of a step.

use super::Family;
use crate::check::Description;
use crate::{Cost, DType, Tensor};

/// To 8-bit integers with a scale for every run, or to 8-bit floats with one factor.
#[allow(missing_docs)]
#[derive(Clone, Copy, Debug)]
pub enum Quantization<'a> {
    /// codes = x over its scale, rounded; scales f32 `[ceil(elements / block)]`, one for each run of `block` elements of x
    /// in their order in memory. codes i8 of x's shape.
    QuantizeInt8 { x: &'a Tensor, codes: &'a Tensor, scales: &'a Tensor, block: u64 },
    /// out = codes times their scales: what [`QuantizeInt8`](Quantization::QuantizeInt8) left of x, wrong by half a scale
    /// at most.
    DequantizeInt8 { codes: &'a Tensor, scales: &'a Tensor, block: u64, out: &'a Tensor },

    /// out = x in the 8-bit floats of out's type, to nearest even, with the smallest power of two as its factor that lets
    /// the largest magnitude of x fit: just-in-time scaling of a tensor. A factor of that kind makes rounding the only
    /// error, and quantising the result, or some rows of it, again gives the same numbers. Where a number of x is not
    /// finite no number of out is one.
    QuantizeFp8 { x: &'a Tensor, out: &'a Tensor },
}

impl<'a> Family<'a> for Quantization<'a> {
    fn describe(&self) -> Description<'a> {
        match *self {
            Quantization::QuantizeInt8 { x, codes, scales, block } => {
                Description::new("quantize_int8", [x], [codes, scales]).int8(x, codes, scales, block)
            }
            Quantization::DequantizeInt8 { codes, scales, block, out } => {
                Description::new("dequantize_int8", [codes, scales], [out]).int8(out, codes, scales, block)
            }
            Quantization::QuantizeFp8 { x, out } => Description::new("quantize_fp8", [x], [out])
                .floats([x])
                .that(out.dtype().is_fp8(), || format!("{out:?} is not e4m3 or e5m2"))
                .same_size(x, [out]),
        }
    }

    fn cost(&self, once: Cost) -> Cost {
        match *self {
            // x is read once for the largest magnitude, once to round.
            Quantization::QuantizeFp8 { x, .. } => Cost { bytes: once.bytes + x.bytes(), ..once },
            _ => once,
        }
    }
}

impl Description<'_> {
    fn int8(self, x: &Tensor, codes: &Tensor, scales: &Tensor, block: u64) -> Self {
        self.floats([x])
            .that(codes.dtype() == DType::I8, || format!("{codes:?} is not i8"))
            .same_size(x, [codes])
            .that(block > 0, || "runs of no elements".to_owned())
            .f32_vectors([scales], x.elements().div_ceil(block.max(1)))
    }
}
