//! Views: other sizes and strides of the same storage, and the copies where no view can be.

use crate::eager::Torch;
use crate::eager::shape::Dims;
use crate::eager::tensor::{History, Tensor};

impl Tensor {
    fn viewed(&self, shape: Dims, strides: Dims) -> Tensor {
        Tensor { shape, strides, history: History::None, ..self.clone() }
    }

    /// `detach().transpose(a, b)`
    pub(crate) fn swapped(&self, a: usize, b: usize) -> Tensor {
        self.viewed(self.shape.swapped(a, b), self.strides.swapped(a, b))
    }
}

impl Torch {
    /// `x.view(shape)` where that can be, else a copy in that shape (`reshape`).
    pub fn reshape(&self, x: &Tensor, shape: &[u64]) -> Tensor {
        let to = Dims::new(shape);
        if to == x.shape {
            return x.clone();
        }
        match x.shape.view_strides(&x.strides, &to) {
            Some(strides) => {
                let before = x.shape;
                self.recorded("ViewBackward", &[x], x.viewed(to, strides), |_| {
                    Box::new(move |torch, grads| {
                        vec![grads[0].as_ref().map(|grad| torch.reshape(grad, &before))]
                    })
                })
            }
            None => {
                let copy = self.contiguous(x);
                self.reshape(&copy, shape)
            }
        }
    }

    /// `x.transpose(a, b)`
    pub fn transpose(&self, x: &Tensor, a: usize, b: usize) -> Tensor {
        self.recorded("TransposeBackward", &[x], x.swapped(a, b), |_| {
            Box::new(move |torch, grads| vec![grads[0].as_ref().map(|grad| torch.transpose(grad, a, b))])
        })
    }

    /// `x.unsqueeze(at)`
    pub fn unsqueeze(&self, x: &Tensor, at: usize) -> Tensor {
        let stride = if at < x.shape.len() { x.strides[at] * x.shape[at] } else { 1 };
        let view = x.viewed(x.shape.inserted(at, 1), x.strides.inserted(at, stride));
        self.recorded("UnsqueezeBackward", &[x], view, |_| {
            Box::new(move |_, grads| {
                let squeezed = |grad: &Tensor| grad.viewed(grad.shape.removed(at), grad.strides.removed(at));
                vec![grads[0].as_ref().map(squeezed)]
            })
        })
    }

    /// `x.expand(...)` of dimension `at`, which is 1.
    pub fn expand(&self, x: &Tensor, at: usize, size: u64) -> Tensor {
        let view = x.viewed(x.shape.with(at, size), x.strides.with(at, 0));
        let before = x.shape;
        self.recorded("ExpandBackward", &[x], view, |_| {
            Box::new(move |torch, grads| vec![grads[0].as_ref().map(|grad| torch.sum_to(grad, &before))])
        })
    }

    /// `x.contiguous()`
    pub fn contiguous(&self, x: &Tensor) -> Tensor {
        if x.is_contiguous() { x.clone() } else { self.copy(x, "clone") }
    }

    /// `x.clone()`
    pub fn clone_of(&self, x: &Tensor) -> Tensor {
        self.copy(x, "clone")
    }

    /// `x.clone()`, in contiguous form.
    pub(crate) fn copy(&self, x: &Tensor, operation: &'static str) -> Tensor {
        let out = self.empty_as(&x.shape, x.dtype, operation);
        self.recorded("CloneBackward", &[x], out, |_| Box::new(|_, grads| grads.to_vec()))
    }

    /// `x[..., from : from + size, ...]` of dimension `at`; its gradient has the size of `x`, zeros elsewhere.
    pub fn slice(&self, x: &Tensor, at: usize, size: u64) -> Tensor {
        if x.shape[at] == size {
            return x.clone();
        }
        let before = x.shape;
        self.recorded("SliceBackward", &[x], x.viewed(x.shape.with(at, size), x.strides), |_| {
            Box::new(move |torch, grads| {
                vec![grads[0].as_ref().map(|grad| torch.empty_as(&before, grad.dtype, "slice_backward"))]
            })
        })
    }

    /// `x.split(sizes, dim=-1)`: views; the gradient is their concatenation.
    pub fn split(&self, x: &Tensor, sizes: &[u64]) -> Vec<Tensor> {
        let last = x.shape.len() - 1;
        let views = sizes.iter().map(|size| x.viewed(x.shape.with(last, *size), x.strides)).collect();
        let before = x.shape;
        self.recorded_many("SplitBackward", &[x], views, |_| {
            Box::new(move |torch, grads| {
                let like = grads.iter().flatten().next().map(|grad| grad.dtype);
                vec![like.map(|dtype| torch.empty_as(&before, dtype, "cat"))]
            })
        })
    }

    /// `torch.cat(parts, dim=at)`
    pub fn cat(&self, parts: &[&Tensor], at: usize) -> Tensor {
        let first = parts[0];
        let total = parts.iter().map(|part| part.shape[at]).sum();
        let out = self.empty_as(&first.shape.with(at, total), first.dtype, "cat");
        let shapes: Vec<Dims> = parts.iter().map(|part| part.shape).collect();
        self.recorded("CatBackward", parts, out, |_| {
            Box::new(move |_, grads| {
                let part = |shape: &Dims| grads[0].as_ref().map(|grad| grad.viewed(*shape, grad.strides));
                shapes.iter().map(part).collect()
            })
        })
    }
}
