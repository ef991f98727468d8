//! Cross-entropy: `log_softmax`, then `nll_loss`.

use crate::eager::Torch;
use crate::eager::tensor::Tensor;
use crate::run::TorchType;

impl Torch {
    /// The same compiled, as torchtune compiles its losses: the kernels upcast as they read, keep the logits with a maximum and a sum for
    /// each row, and write the logits' gradient at once.
    pub fn compiled_cross_entropy(&self, logits: &Tensor, labels: &Tensor) -> Tensor {
        let rows = logits.shape.elements() / logits.shape.last().max(1);
        let [largest, sums] = [0, 1].map(|_| self.empty(&[rows], TorchType::F32, "compiled"));
        let loss = self.empty(&[], TorchType::F32, "compiled");
        self.recorded("CompiledFunctionBackward", &[logits], loss, |_| {
            let kept = [logits, labels, &largest, &sums].map(|tensor| self.save(tensor));
            Box::new(move |torch, grads| {
                let kept = kept.each_ref().map(|saved| saved.unpack(torch));
                let logits = &kept[0];
                vec![grads[0].as_ref().map(|_| torch.empty_as(&logits.shape, logits.dtype, "compiled"))]
            })
        })
    }

    /// `F.cross_entropy(logits [N, V], labels [N])`; autocast computes it in f32.
    pub fn cross_entropy(&self, logits: &Tensor, labels: &Tensor) -> Tensor {
        let scores = self.log_softmax(logits);
        let scores = self.raise(&scores);
        let loss = self.empty(&[], scores.dtype, "nll_loss_forward");
        let total_weight = self.empty(&[], scores.dtype, "nll_loss_forward");
        self.recorded("NllLossBackward", &[&scores], loss, |_| {
            let scores = self.save(&scores);
            let (labels, total_weight) = (self.save(labels), self.save(&total_weight));
            Box::new(move |torch, grads| {
                let scores = scores.unpack(torch);
                let (_labels, _total) = (labels.unpack(torch), total_weight.unpack(torch));
                let shape = scores.shape;
                vec![grads[0].as_ref().map(|_| torch.empty_as(&shape, scores.dtype, "nll_loss_backward"))]
            })
        })
    }
}
