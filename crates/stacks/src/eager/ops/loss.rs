//! Cross-entropy: `log_softmax`, then `nll_loss`.

use crate::eager::Torch;
use crate::eager::tensor::Tensor;

impl Torch {
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
