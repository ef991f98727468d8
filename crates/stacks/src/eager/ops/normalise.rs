//! Softmax and layer norm.

use crate::eager::Torch;
use crate::eager::tensor::Tensor;
use crate::run::TorchType;

impl Torch {
    /// `softmax(x, dim=-1, dtype=...)`: converted first, except from f16 to f32, which its kernel does
    /// (`aten/src/ATen/native/SoftMax.cpp`). Autocast asks for f32.
    pub fn softmax(&self, x: &Tensor, dtype: Option<TorchType>) -> Tensor {
        self.soft("softmax", "_softmax_backward_data", x, dtype)
    }

    /// `log_softmax(x, dim=-1)`
    pub fn log_softmax(&self, x: &Tensor) -> Tensor {
        self.soft("log_softmax", "_log_softmax_backward_data", x, None)
    }

    fn soft(
        &self,
        operation: &'static str,
        backward: &'static str,
        x: &Tensor,
        dtype: Option<TorchType>,
    ) -> Tensor {
        let dtype = dtype.or_else(|| self.autocast_type().map(|_| TorchType::F32)).unwrap_or(x.dtype);
        let within_kernel = x.dtype == TorchType::F16 && dtype == TorchType::F32;
        let x = if within_kernel { x.clone() } else { self.to(x, dtype) };
        let input = self.contiguous(&x.detach());
        let out = self.empty_as(&x.shape, dtype, operation);
        drop(input);
        let (result, before) = (out.detach(), x.dtype);
        let plain = operation == "softmax";
        self.recorded(operation, &[&x], out, |_| {
            let result = self.save(&result);
            Box::new(move |torch, grads| {
                let result = result.unpack(torch);
                let shape = result.shape;
                vec![grads[0].as_ref().map(|_| {
                    let out = torch.empty_as(&shape, before, backward);
                    // `softmax_backward_cuda_out` multiplies gradient and result first (`cuda/SoftMax.cu`).
                    let product = if plain { result.bytes() } else { 0 };
                    drop(torch.scratch(product, backward));
                    out
                })]
            })
        })
    }

    /// `F.layer_norm`: keeps its input, mean and reciprocal deviation of each row in f32. Autocast computes it in f32.
    pub fn layer_norm(&self, x: &Tensor, weight: &Tensor, bias: &Tensor) -> Tensor {
        let (x, weight, bias) = (&self.raise(x), &self.raise(weight), &self.raise(bias));
        let x = &self.contiguous(x);
        let rows = x.shape.with(x.shape.len() - 1, 1);
        let out = self.empty_as(&x.shape, x.dtype, "native_layer_norm");
        let mean = self.empty_as(&rows, TorchType::F32, "native_layer_norm");
        let deviation = self.empty_as(&rows, TorchType::F32, "native_layer_norm");
        self.recorded("NativeLayerNormBackward", &[x, weight, bias], out, |needs| {
            let needs = needs.to_vec();
            let kept = [x, weight, bias, &mean, &deviation].map(|tensor| self.save(tensor));
            Box::new(move |torch, grads| {
                let kept = kept.each_ref().map(|saved| saved.unpack(torch));
                if grads[0].is_none() {
                    return vec![None; 3];
                }
                let like = |place: usize| {
                    let like: &Tensor = &kept[place];
                    needs[place]
                        .then(|| torch.empty_as(&like.shape, like.dtype, "native_layer_norm_backward"))
                };
                vec![like(0), like(1), like(2)]
            })
        })
    }
}
