//! Embedding tables (`aten/src/ATen/native/cuda/Embedding.cu`).

use crate::eager::Torch;
use crate::eager::tensor::Tensor;
use crate::run::TorchType;

/// At most so many indices are added one by one; of more the gradient sorts them first.
const UNSORTED: u64 = 3072;

impl Torch {
    /// `F.embedding(tokens [B, S], weight [V, H])`: keeps the tokens; its gradient is dense.
    pub fn embedding(&self, tokens: &Tensor, weight: &Tensor) -> Tensor {
        let width = weight.shape[1];
        let shape = tokens.shape.inserted(tokens.shape.len(), width);
        let out = self.empty_as(&shape, weight.dtype, "embedding");
        let table = weight.shape;
        self.recorded("EmbeddingBackward", &[weight], out, |_| {
            let tokens = self.save(tokens);
            Box::new(move |torch, grads| {
                let tokens = tokens.unpack(torch);
                let Some(grad) = grads[0].as_ref() else { return vec![None] };
                let grad = torch.contiguous(grad);
                let out = torch.empty_as(&table, grad.dtype, "embedding_dense_backward");
                let indices = tokens.shape.elements();
                if indices > UNSORTED {
                    let list = || torch.scratch(indices * TorchType::I64.bytes(), "embedding sort");
                    let _lists = [list(), list(), list()];
                }
                vec![Some(out)]
            })
        })
    }
}
