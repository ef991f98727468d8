//! bitsandbytes' products with quantised weights (`bitsandbytes/autograd/_functions.py`, `backends/cuda/ops.py`).

use crate::eager::Torch;
use crate::eager::graph::Attributes;
use crate::eager::tensor::{History, Tensor};
use crate::run::TorchType;

/// More rows than this are multiplied by the dequantised matrix; before 0.50 all were.
const FUSED_ROWS: u64 = 1536;

/// A 4-bit matrix.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FourBitForm {
    /// `[out, in]`
    pub shape: [u64; 2],
    /// Type that it is dequantised to.
    pub dtype: TorchType,
    /// Whether its scales are quantised.
    pub nested: bool,
}

impl Torch {
    /// `dequantize_4bit`: the scales in f32 first, where they are quantised.
    pub(crate) fn dequantize_4bit(&self, scales: &Tensor, form: FourBitForm, hidden: bool) -> Tensor {
        let rebuilt = form.nested.then(|| {
            let elements = scales.shape.elements();
            if hidden {
                self.scratch(elements * 4, "dequantize_blockwise")
            } else {
                self.empty(&[elements], TorchType::F32, "dequantize_blockwise").storage
            }
        });
        let out = self.of_kind(crate::estimate::Kind::WeightCopies, || {
            self.empty(&form.shape, form.dtype, "dequantize_4bit")
        });
        drop(rebuilt);
        out
    }

    /// `matmul_4bit(x, weight)`: keeps the packed weight, never `x`.
    pub(crate) fn matmul_4bit(
        &self,
        x: &Tensor,
        packed: &Tensor,
        scales: &Tensor,
        bias: Option<&Tensor>,
        form: FourBitForm,
    ) -> Tensor {
        let [outer, inner] = form.shape;
        let rows = x.shape.elements() / inner;
        let out = self.empty_as(&x.shape.with(x.shape.len() - 1, outer), x.dtype, "gemm_4bit");
        if rows > FUSED_ROWS || self.versions().bitsandbytes < (0, 50) {
            let scales =
                form.nested.then(|| [0, 1].map(|_| self.scratch(scales.shape.elements() * 4, "gemm_4bit")));
            let weight = self.scratch(outer * inner * form.dtype.bytes(), "gemm_4bit");
            weight.set_kind(crate::estimate::Kind::WeightCopies);
            let cast =
                (form.dtype != x.dtype).then(|| self.scratch(outer * inner * x.dtype.bytes(), "gemm_4bit"));
            drop((scales, weight, cast));
        }
        let inputs: Vec<&Tensor> = [x].into_iter().chain(bias).collect();
        let (packed, scales, before) = (packed.detach(), scales.detach(), x.shape);
        let out = self.recorded("MatMul4Bit", &inputs, out, |needs| {
            let needs = needs.to_vec();
            Box::new(move |torch, grads| {
                let Some(grad) = grads[0].as_ref() else { return vec![None; needs.len()] };
                let _packed = &packed;
                let bias = needs.get(1).map(|need| need.then(|| torch.empty(&[outer], grad.dtype, "sum")));
                let weight = torch.dequantize_4bit(&scales, form, false);
                let cast = torch.to(&weight, grad.dtype);
                drop(weight);
                let flat = torch.reshape(grad, &[grad.shape.elements() / outer, outer]);
                let product = torch.mm(&flat, &cast);
                drop(cast);
                [Some(torch.reshape(&product, &before))].into_iter().chain(bias).collect()
            })
        });
        // Up to 0.43.1 the input was an attribute of the context, which lives as long as the graph does (pull request 1270).
        if let (true, History::Made(edge)) = (self.versions().bitsandbytes < (0, 44), &out.history) {
            *edge.node.attributes.borrow_mut() = Attributes::Tensor { _tensor: x.detach() };
        }
        out
    }

    /// `MatMul8bitLt`: quantises `x` from f16, multiplies, and keeps `x` (threshold 6, as transformers sets it).
    pub(crate) fn matmul_8bit(&self, x: &Tensor, rows: &Tensor, scales: &Tensor) -> Tensor {
        let [outer, inner] = [rows.shape[0], rows.shape[1]];
        let count = x.shape.elements() / inner;
        let flat = self.reshape(x, &[count, inner]);
        let half = self.to(&flat.detach(), TorchType::F16);
        let quantised = self.empty(&[count, inner], TorchType::I8, "int8_vectorwise_quant");
        let row_scales = self.empty(&[count], TorchType::F32, "int8_vectorwise_quant");
        drop(half);
        let products = self.empty(&[count, outer], TorchType::I32, "int8_linear_matmul");
        let out = self.empty(&[count, outer], TorchType::F16, "int8_mm_dequant");
        drop((products, quantised, row_scales));
        let out = self.to(&out, x.dtype);
        let (rows, scales) = (rows.detach(), scales.detach());
        let before = x.shape;
        let out = self.recorded("MatMul8bitLt", &[&flat], out, |_| {
            let kept = crate::eager::graph::Kept::new(&flat);
            Box::new(move |torch, grads| {
                let Some(grad) = grads[0].as_ref() else { return vec![None] };
                let dtype = kept.0.dtype;
                let weight = torch.empty_as(&rows.shape, dtype, "_to_copy");
                let _scales = &scales;
                let grad = torch.to(&torch.contiguous(grad), dtype);
                vec![Some(torch.mm(&grad, &weight))]
            })
        });
        self.reshape(&out, &before.with(before.len() - 1, outer))
    }
}
