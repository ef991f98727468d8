//! Every element by itself.

use super::parameters::{Emit, Rounding, row_blocks, vector_blocks, wide_blocks};
use crate::cuda::CudaError;
use crate::{Activation, Elementwise, Glu, Quantization, Tensor};

pub(super) fn elementwise(op: Elementwise<'_>, emit: &mut Emit<'_>) -> Result<(), CudaError> {
    let kernel = match op {
        Elementwise::Fill { out, value } => {
            let n = out.elements();
            emit.kernel("fill", wide_blocks(n)).with(emit.view(out)).with(n).with(value)
        }
        Elementwise::Cast { x, out, rounding } => {
            let n = out.elements();
            let cast = emit.kernel("cast", wide_blocks(n)).with(emit.view(x)).with(emit.view(out));
            cast.with(n).with(Rounding::from(rounding))
        }
        Elementwise::Add { a, b, out } => {
            let n = out.elements();
            let add = emit.kernel("add", wide_blocks(n)).with(emit.view(a)).with(emit.view(b));
            add.with(emit.view(out)).with(n)
        }
        Elementwise::AccumulateAll { terms, out, seed, number, first } => {
            let (n, count) = (out.elements(), terms.elements() / out.elements().max(1));
            let add = emit.kernel("accumulate_all", wide_blocks(n)).with(emit.view(terms));
            add.with(emit.view(out)).with(n).with(count).with(seed).with(number).with(first)
        }
        Elementwise::Scale { x, factor } => {
            let n = x.elements();
            emit.kernel("scale", wide_blocks(n)).with(emit.view(x)).with(n).with(factor).with(0u64)
        }
        Elementwise::ScaleBy { x, factor } => {
            let n = x.elements();
            let scale = emit.kernel("scale", wide_blocks(n)).with(emit.view(x)).with(n);
            scale.with(1f32).with(emit.address(factor))
        }
        Elementwise::Dropout { x, out, probability, seed, first, accumulate } => {
            let n = out.elements();
            let dropout = emit.kernel("dropout", wide_blocks(n)).with(emit.view(x)).with(emit.view(out));
            dropout.with(n).with(probability).with(seed).with(first).with(u32::from(accumulate))
        }
    };
    emit.launch(kernel)
}

/// The number of a non-linearity in the kernels.
fn number(activation: Glu) -> u32 {
    match activation {
        Glu::Silu => 0,
        Glu::Gelu => 1,
        Glu::GeluTanh => 2,
    }
}

pub(super) fn activation(op: Activation<'_>, emit: &mut Emit<'_>) -> Result<(), CudaError> {
    let clamped = |emit: &mut Emit<'_>, name, tensors: &[&Tensor], alpha: f32, limit: f32| {
        let n = tensors.first().map_or(0, |tensor| tensor.elements());
        let kernel = emit.kernel(name, wide_blocks(n));
        let kernel = tensors.iter().fold(kernel, |kernel, tensor| kernel.with(emit.view(tensor)));
        emit.launch(kernel.with(n).with(alpha).with(limit))
    };
    let (name, tensors, activation) = match op {
        Activation::Gated { gate, up, out, activation } => ("gated", vec![gate, up, out], activation),
        Activation::GatedBackward { gate, up, dout, dgate, dup, activation } => {
            ("gated_backward", vec![gate, up, dout, dgate, dup], activation)
        }
        Activation::Activate { x, out, activation } => ("activate", vec![x, out], activation),
        Activation::ActivateBackward { x, dout, dx, activation } => {
            ("activate_backward", vec![x, dout, dx], activation)
        }
        Activation::ClampedSwiglu { gate, up, out, alpha, limit } => {
            return clamped(emit, "clamped_swiglu", &[gate, up, out], alpha, limit);
        }
        Activation::ClampedSwigluBackward { gate, up, dout, dgate, dup, alpha, limit } => {
            let tensors = [gate, up, dout, dgate, dup];
            return clamped(emit, "clamped_swiglu_backward", &tensors, alpha, limit);
        }
    };
    let n = tensors.first().map_or(0, |tensor| tensor.elements());
    let kernel = emit.kernel(name, wide_blocks(n));
    let kernel = tensors.into_iter().fold(kernel, |kernel, tensor| kernel.with(emit.view(tensor)));
    emit.launch(kernel.with(n).with(number(activation)))
}

pub(super) fn quantization(op: Quantization<'_>, emit: &mut Emit<'_>) -> Result<(), CudaError> {
    match op {
        Quantization::QuantizeInt8 { x, codes, scales, block } => {
            let (n, runs) = (x.elements(), scales.elements());
            let of_runs = emit.kernel("int8_scales", row_blocks(runs)).scratch::<u32>().with(emit.view(x));
            emit.launch(of_runs.with(emit.address(scales)).with(n).with(block).with(runs))?;
            let quantize = emit.kernel("quantize_int8", vector_blocks(n.div_ceil(4))).with(emit.view(x));
            emit.launch(quantize.with(emit.address(codes)).with(emit.address(scales)).with(n).with(block))
        }
        Quantization::DequantizeInt8 { codes, scales, block, out } => {
            let n = out.elements();
            let dequantize =
                emit.kernel("dequantize_int8", vector_blocks(n.div_ceil(4))).with(emit.address(codes));
            emit.launch(dequantize.with(emit.address(scales)).with(emit.view(out)).with(n).with(block))
        }
        Quantization::QuantizeFp8 { x, out } => {
            let n = x.elements();
            let clear = emit.kernel("clear_words", [1, 1]).with(emit.workspace(0)).with(1u64).with(0u64);
            emit.launch(clear)?;
            let most = emit.kernel("largest_magnitude", wide_blocks(n)).scratch::<u32>();
            emit.launch(most.with(emit.view(x)).with(n).with(emit.workspace(0)))?;
            let quantize = emit.kernel("quantize_fp8", vector_blocks(n)).with(emit.view(x));
            emit.launch(quantize.with(emit.view(out)).with(n).with(emit.workspace(0)))
        }
    }
}
