//! Products of matrices: `mm`, `addmm`, `bmm`, and what `linear` and `matmul` make of them
//! (`aten/src/ATen/native/Linear.cpp`, `LinearAlgebra.cpp`).

use crate::eager::Torch;
use crate::eager::graph::{Backward, Saved};
use crate::eager::tensor::Tensor;

impl Torch {
    /// `[m, k] x [k, n]`
    pub fn mm(&self, a: &Tensor, b: &Tensor) -> Tensor {
        self.product(a, b, None, "mm")
    }

    /// `[b, m, k] x [b, k, n]`
    pub fn bmm(&self, a: &Tensor, b: &Tensor) -> Tensor {
        self.product(a, b, None, "bmm")
    }

    /// The gradient of the first factor is `grad x b'`, of the second `a' x grad`; where a factor is a transposed
    /// matrix its gradient is computed transposed too.
    fn product(&self, a: &Tensor, b: &Tensor, bias: Option<&Tensor>, operation: &'static str) -> Tensor {
        let rank = a.shape.len();
        let (rows, columns) = (rank - 2, rank - 1);
        self.use_cublas();
        let out = || self.empty_as(&a.shape.with(columns, b.shape[columns]), a.dtype, operation);
        let inputs: Vec<&Tensor> = [a, b].into_iter().chain(bias).collect();
        let b_transposed = rank == 2 && is_column_major(b);
        let formula = |needs: &[bool]| -> Backward {
            let needs = needs.to_vec();
            let other_of_a = needs[0].then(|| self.save(b));
            let other_of_b = needs[1].then(|| self.save(a));
            Box::new(move |torch, grads| {
                let Some(grad) = grads[0].as_ref() else { return vec![None; needs.len()] };
                // Both are unpacked before either gradient is computed, and live until both are.
                let swapped = |saved: &Option<Saved>| -> Option<Tensor> {
                    saved.as_ref().map(|saved| saved.unpack(torch).swapped(rows, columns))
                };
                let (b, a) = (swapped(&other_of_a), swapped(&other_of_b));
                let bias = needs.get(2).map(|need| grads[0].clone().filter(|_| *need));
                let gradient_of_a = || b.as_ref().map(|b| torch.product(grad, b, None, operation_of(rank)));
                // By the names of the arguments: `mat1` before `mat2` of `addmm`, `mat2` before `self` of `mm` and `bmm`.
                let early = if needs.len() > 2 { gradient_of_a() } else { None };
                let of_b = a.as_ref().map(|a| {
                    if b_transposed {
                        let grad = grad.swapped(rows, columns);
                        torch.product(&grad, &a.swapped(rows, columns), None, "mm").swapped(rows, columns)
                    } else {
                        torch.product(a, grad, None, operation_of(rank))
                    }
                });
                let of_a = if needs.len() > 2 { early } else { gradient_of_a() };
                [of_a, of_b].into_iter().chain(bias).collect()
            })
        };
        self.recorded_first("MmBackward", &inputs, formula, out)
    }

    /// `F.linear(x, weight, bias)`; weight `[out, in]`.
    pub fn linear(&self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Tensor {
        // C++ evaluates the casts of the arguments from the last to the first.
        let bias = bias.map(|bias| self.lower(bias));
        let weight = &self.lower(weight);
        let x = &self.lower(x);
        let inner = x.shape.last();
        let rows = x.shape.elements() / inner;
        let flat = self.reshape(x, &[rows, inner]);
        let transposed = self.transpose(weight, 0, 1);
        let operation = if bias.is_some() { "addmm" } else { "mm" };
        let out = self.product(&flat, &transposed, bias.as_ref(), operation);
        self.reshape(&out, &x.shape.with(x.shape.len() - 1, weight.shape[0]))
    }

    /// transformers' `Conv1D`: `addmm(bias, x, weight)`; weight `[in, out]`.
    pub fn conv1d(&self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Tensor {
        let inner = x.shape.last();
        let flat = self.reshape(x, &[x.shape.elements() / inner, inner]);
        let weight = self.lower(weight);
        let flat = self.lower(&flat);
        let bias = bias.map(|bias| self.lower(bias));
        let out = self.product(&flat, &weight, bias.as_ref(), "addmm");
        self.reshape(&out, &x.shape.with(x.shape.len() - 1, weight.shape[1]))
    }

    /// `torch.matmul` of two tensors of the same leading dimensions.
    pub fn matmul(&self, a: &Tensor, b: &Tensor) -> Tensor {
        let b = &self.lower(b);
        let a = &self.lower(a);
        let rank = a.shape.len();
        let (m, k, n) = (a.shape[rank - 2], a.shape[rank - 1], b.shape[rank - 1]);
        let batch = a.shape.elements() / (m * k);
        let flat_a = self.reshape(a, &[batch, m, k]);
        let flat_b = self.reshape(b, &[batch, k, n]);
        let out = self.bmm(&flat_a, &flat_b);
        self.reshape(&out, &a.shape.with(rank - 1, n))
    }
}

fn operation_of(rank: usize) -> &'static str {
    if rank == 2 { "mm" } else { "bmm" }
}

/// A matrix of which the transpose is contiguous.
fn is_column_major(matrix: &Tensor) -> bool {
    matrix.strides[0] == 1 && matrix.strides[1] == matrix.shape[0] && matrix.shape[0] > 1
}
