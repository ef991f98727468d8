//! What sends tokens to experts and brings them back: the largest of each row, rows by their numbers, and one product for all experts
//! (`tools/autograd/derivatives.yaml`, `FunctionsManual.cpp`, `aten/src/ATen/native/cuda/Indexing.cu`, `GroupedBlas.cpp`).

use crate::eager::Torch;
use crate::eager::graph::{Backward, Saved};
use crate::eager::tensor::Tensor;
use crate::run::TorchType;

impl Torch {
    /// `x.topk(count, dim=-1)` of `x [N, E]`: values and numbers `[N, count]`.
    pub fn largest(&self, x: &Tensor, count: u64) -> (Tensor, Tensor) {
        let shape = x.shape.with(x.shape.len() - 1, count);
        let values = self.empty_as(&shape, x.dtype, "topk");
        let numbers = self.empty_as(&shape, TorchType::I64, "topk");
        let before = x.shape;
        let values = self.recorded("TopkBackward", &[x], values, |_| {
            let numbers = self.save(&numbers);
            Box::new(move |torch, grads| {
                let _numbers = numbers.unpack(torch);
                vec![grads[0].as_ref().map(|grad| torch.empty_as(&before, grad.dtype, "new_zeros"))]
            })
        });
        (values, numbers)
    }

    /// `x.masked_fill(mask, number)`
    pub fn masked_fill(&self, x: &Tensor, mask: &Tensor) -> Tensor {
        let out = self.map(x, x.dtype, "masked_fill");
        self.recorded("MaskedFillBackward", &[x], out, |_| {
            let mask = self.save(mask);
            Box::new(move |torch, grads| {
                let _mask = mask.unpack(torch);
                vec![grads[0].as_ref().map(|grad| torch.map(grad, grad.dtype, "masked_fill"))]
            })
        })
    }

    /// `x.gather(1, numbers)` of `x [N, E]` and numbers `[N, k]`: keeps both.
    pub fn gather(&self, x: &Tensor, numbers: &Tensor) -> Tensor {
        let out = self.empty_as(&numbers.shape, x.dtype, "gather");
        self.recorded("GatherBackward", &[x], out, |_| {
            let kept = [x, numbers].map(|tensor| self.save(tensor));
            Box::new(move |torch, grads| {
                let [x, _numbers] = kept.each_ref().map(|saved| saved.unpack(torch));
                vec![grads[0].as_ref().map(|grad| torch.empty_as(&x.shape, grad.dtype, "new_zeros"))]
            })
        })
    }

    /// `x /= x.sum(dim=-1, keepdim=True)`: the quotient takes the place of `x`, of which a copy is kept where a gradient passes.
    pub fn normalise_rows(&self, x: &Tensor) -> Tensor {
        let last = x.shape.len() - 1;
        let before = x.shape;
        let sums = self.empty_as(&before.with(last, 1), x.dtype, "sum");
        let sums = self.recorded("SumBackward", &[x], sums, |_| {
            Box::new(move |torch, grads| {
                vec![grads[0].as_ref().map(|grad| torch.expand(grad, last, before[last]))]
            })
        });
        let formula = |_: &[bool]| -> Backward {
            let kept = [self.save(&self.copy(&x.detach(), "clone")), self.save(&sums)];
            Box::new(move |torch, grads| {
                let _kept = kept.each_ref().map(|saved| saved.unpack(torch));
                let own = grads[0].as_ref().map(|grad| torch.map(grad, grad.dtype, "div"));
                vec![own.clone(), own]
            })
        };
        self.recorded_first("DivBackward", &[x, &sums], formula, || x.detach())
    }

    /// `x[rows]`: rows of `x` in another order, some of them more than once. Its gradient has the size of `x`.
    pub fn rows(&self, x: &Tensor, rows: &Tensor) -> Tensor {
        let out = self.empty_as(&x.shape.with(0, rows.shape[0]), x.dtype, "index");
        let before = x.shape;
        self.recorded("IndexBackward", &[x], out, |_| {
            let rows = self.save(rows);
            Box::new(move |torch, grads| {
                let rows = rows.unpack(torch);
                let Some(grad) = grads[0].as_ref() else { return vec![None] };
                let out = torch.empty_as(&before, grad.dtype, "new_zeros");
                // Equal numbers are summed in order: they are sorted first (`index_put_with_sort_kernel`).
                let list = || torch.scratch(rows.bytes(), "index_put sort");
                let _lists = [list(), list(), list()];
                vec![Some(out)]
            })
        })
    }

    /// `total.index_add_(0, rows, part)`: in the place of `total`.
    pub fn add_rows(&self, total: &Tensor, rows: &Tensor, part: &Tensor) -> Tensor {
        let shape = part.shape;
        self.recorded("IndexAddBackward", &[total, part], total.detach(), |needs| {
            let needs = needs.to_vec();
            let rows = self.save(rows);
            Box::new(move |torch, grads| {
                let _rows = rows.unpack(torch);
                let of_part = |grad: &Tensor| torch.empty_as(&shape, grad.dtype, "index_select");
                vec![
                    grads[0].clone().filter(|_| needs[0]),
                    grads[0].as_ref().filter(|_| needs[1]).map(of_part),
                ]
            })
        })
    }

    /// `x [N, k, H]` summed over its second dimension.
    pub fn sum_second(&self, x: &Tensor) -> Tensor {
        let count = x.shape[1];
        let out = self.empty_as(&x.shape.removed(1), x.dtype, "sum");
        self.recorded("SumBackward", &[x], out, |_| {
            Box::new(move |torch, grads| {
                let spread = |grad: &Tensor| torch.expand(&torch.unsqueeze(grad, 1), 1, count);
                vec![grads[0].as_ref().map(spread)]
            })
        })
    }

    /// `grouped_mm(x [S, K], weight [E, N, K], offsets [E])`: rows of `x` by expert. Autocast does not know it.
    pub fn grouped_mm(&self, x: &Tensor, weight: &Tensor, offsets: &Tensor) -> Tensor {
        let x = &self.to(x, weight.dtype);
        let shape = x.shape.with(1, weight.shape[1]);
        let out = || self.empty_as(&shape, x.dtype, "_grouped_mm");
        let formula = |needs: &[bool]| -> Backward {
            let kept = |needed: bool, tensor: &Tensor| needed.then(|| self.save(tensor));
            let (of_weight, of_x) = (kept(needs[0], weight), kept(needs[1], x));
            let offsets = self.save(offsets);
            let [x_shape, weight_shape] = [x.shape, weight.shape];
            Box::new(move |torch, grads| {
                let unpacked = |saved: &Option<Saved>| saved.as_ref().map(|saved| saved.unpack(torch));
                let (weight, x) = (unpacked(&of_weight), unpacked(&of_x));
                let _offsets = offsets.unpack(torch);
                let Some(grad) = grads[0].as_ref() else { return vec![None, None] };
                let made =
                    |needed: bool, shape| needed.then(|| torch.empty_as(shape, grad.dtype, "_grouped_mm"));
                vec![made(weight.is_some(), &x_shape), made(x.is_some(), &weight_shape)]
            })
        };
        self.recorded_first("GroupedMmBackward", &[x, weight], formula, out)
    }
}
