//! Liger's kernels (`liger_kernel/ops`): what each keeps and allocates.

use crate::eager::Torch;
use crate::eager::tensor::Tensor;
use crate::run::TorchType;

impl Torch {
    /// RMSNorm in one kernel: keeps `x` and the reciprocal of each row's norm in f32. Its backward pass has a part of the
    /// weight's gradient in f32 for each multiprocessor, and writes the gradient over the one that it was given.
    pub(crate) fn liger_rms_norm(&self, x: &Tensor, weight: &Tensor) -> Tensor {
        let out = self.empty_as(&x.shape, x.dtype, "liger_rms_norm");
        let rows = x.shape.elements() / x.shape.last();
        let norms = self.empty(&[rows], TorchType::F32, "liger_rms_norm");
        let width = x.shape.last();
        let parts = self.card.multiprocessors;
        self.recorded("LigerRMSNorm", &[x, weight], out, |needs| {
            let needs = needs.to_vec();
            let kept = [x, weight, &norms].map(|tensor| self.save(tensor));
            Box::new(move |torch, grads| {
                let kept = kept.each_ref().map(|saved| saved.unpack(torch));
                let partial = torch.empty(&[parts, width], TorchType::F32, "liger_rms_norm_backward");
                let of_weight = needs[1].then(|| {
                    let sum = torch.empty(&[width], TorchType::F32, "sum");
                    torch.to(&sum, kept[1].dtype)
                });
                drop(partial);
                vec![grads[0].clone().filter(|_| needs[0]), of_weight]
            })
        })
    }

    /// `silu(gate) * up`: keeps both, and writes their gradients over them.
    pub(crate) fn liger_silu_mul(&self, gate: &Tensor, up: &Tensor) -> Tensor {
        let out = self.empty_as(&gate.shape, gate.dtype, "liger_silu_mul");
        self.recorded("LigerSiLUMul", &[gate, up], out, |_| {
            let kept = [gate, up].map(|tensor| self.save(tensor));
            Box::new(move |torch, _| kept.each_ref().map(|saved| Some(saved.unpack(torch))).into())
        })
    }

    /// Rotation in place, of copies where heads are transposed.
    pub(crate) fn liger_rope(&self, x: &Tensor, cos: &Tensor, sin: &Tensor) -> Tensor {
        let out = self.empty_as(&x.shape.swapped(1, 2), x.dtype, "liger_rope").swapped(1, 2);
        self.recorded("LigerRope", &[x], out, |_| {
            let tables = [cos, sin].map(|tensor| self.save(tensor));
            Box::new(move |torch, grads| {
                let _tables = tables.each_ref().map(|saved| saved.unpack(torch));
                vec![grads[0].as_ref().map(|grad| torch.contiguous(&grad.swapped(1, 2)).swapped(1, 2))]
            })
        })
    }

    /// Product and loss in chunks of tokens; gradients are made in the forward pass and kept.
    pub(crate) fn liger_fused_loss(&self, hidden: &Tensor, weight: &Tensor, labels: &Tensor) -> Tensor {
        let (hidden, weight) = (&self.lower(hidden), &self.lower(weight));
        let (width, vocabulary) = (hidden.shape.last(), weight.shape[0]);
        let rows = hidden.shape.elements() / width;
        let flat = self.reshape(hidden, &[rows, width]);
        let increase = vocabulary.div_ceil(width);
        let chunk = rows.div_ceil(increase).next_power_of_two();
        let of_weight = (weight.requires_grad() && self.grad_enabled())
            .then(|| self.empty_as(&weight.shape, weight.dtype, "zeros_like"));
        let of_input = self.empty_as(&flat.shape, flat.dtype, "zeros_like");
        let losses = self.empty(&[rows], TorchType::F32, "zeros");
        self.use_cublas();
        for _ in 0..rows.div_ceil(chunk) {
            let logits = self.empty(&[chunk.min(rows), vocabulary], flat.dtype, "mm");
            if of_weight.is_some() && self.versions().torch < (2, 8) {
                let product = self.empty_as(&weight.shape, weight.dtype, "mm");
                let upcast = self.to(&product, TorchType::F32);
                drop((product, upcast));
            }
            let part = self.empty(&[chunk.min(rows), width], flat.dtype, "mm");
            drop((logits, part));
        }
        let loss = self.empty(&[], TorchType::F32, "sum");
        drop(losses);
        let _ = labels;
        self.recorded("LigerFusedLinearCrossEntropy", &[&flat, weight], loss, |needs| {
            let needs = needs.to_vec();
            let of_input = self.save(&of_input);
            let of_weight = of_weight.as_ref().map(|grad| self.save(grad));
            Box::new(move |torch, _| {
                let of_weight = of_weight.as_ref().map(|saved| saved.unpack(torch));
                vec![needs[0].then(|| of_input.unpack(torch)), of_weight.filter(|_| needs[1])]
            })
        })
    }

    /// Cut cross-entropy: keeps the inputs and a number for each token; logits live in the kernel's blocks only.
    pub(crate) fn cut_cross_entropy(&self, hidden: &Tensor, weight: &Tensor, labels: &Tensor) -> Tensor {
        let (hidden, weight) = (&self.lower(hidden), &self.lower(weight));
        let width = hidden.shape.last();
        let rows = hidden.shape.elements() / width;
        let flat = self.reshape(hidden, &[rows, width]);
        let normalisers = self.empty(&[rows], TorchType::F32, "cce_lse");
        let loss = self.empty(&[], TorchType::F32, "mean");
        self.recorded("LinearCrossEntropy", &[&flat, weight], loss, |needs| {
            let needs = needs.to_vec();
            let kept = [&flat, weight, labels, &normalisers].map(|tensor| self.save(tensor));
            Box::new(move |torch, _| {
                let kept = kept.each_ref().map(|saved| saved.unpack(torch));
                let like = |place: usize| {
                    let like: &Tensor = &kept[place];
                    needs[place].then(|| torch.empty_as(&like.shape, like.dtype, "cce_backward"))
                };
                vec![like(0), like(1)]
            })
        })
    }
}
