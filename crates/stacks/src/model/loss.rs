//! What becomes of the last hidden states: logits and a loss (`loss/loss_utils.py` of transformers, Liger, torchtune, litgpt).

use super::layers::Linear;
use crate::eager::{Tensor, Torch};
use crate::estimate::Kind;
use crate::run::{Loss, TorchType};

/// `[B, S, H]` hidden states and `[B, S]` labels to logits, if they are kept, and a loss.
pub(crate) fn logits_and_loss(
    torch: &Torch,
    form: Loss,
    soft_cap: bool,
    head: &Linear,
    hidden: &Tensor,
    labels: Option<&Tensor>,
) -> (Option<Tensor>, Option<Tensor>) {
    torch.of_kind(Kind::Logits, || match (form, labels) {
        (Loss::Liger | Loss::Cce, Some(labels)) => {
            let [_padded, shifted] = shift_labels(torch, labels);
            (
                None,
                Some(torch.module("loss", || head.fused_loss(torch, form == Loss::Liger, hidden, &shifted))),
            )
        }
        (Loss::Chunked { chunks, tokens, upcast }, Some(labels)) => {
            (None, Some(chunked(torch, head, hidden, labels, chunks, tokens, upcast)))
        }
        (_, labels) => {
            // `generate` asks for the last position's logits from transformers 4.45 on (`logits_to_keep`); before, all were made.
            let last = labels.is_none() && matches!(form, Loss::UpcastShifted | Loss::Upcast);
            let wanted = if last { torch.slice(hidden, 1, 1) } else { hidden.clone() };
            let mut logits = head.forward(torch, &wanted);
            if soft_cap {
                logits = torch.scale(&logits);
                logits = torch.unary(crate::eager::Unary::Tanh, &logits);
                logits = torch.scale(&logits);
            }
            if form == Loss::UpcastShiftedEarly {
                logits = torch.to(&logits, TorchType::F32);
            }
            let loss = labels.map(|labels| torch.module("loss", || upcast(torch, form, &logits, labels)));
            (Some(logits), loss)
        }
    })
}

/// Labels padded by one, and shifted: `[B, S]`.
fn shift_labels(torch: &Torch, labels: &Tensor) -> [Tensor; 2] {
    let [batch, rows] = [labels.size(0), labels.size(1)];
    let padded = torch.empty(&[batch, rows + 1], labels.dtype(), "constant_pad_nd");
    [padded, torch.empty(&[batch, rows], labels.dtype(), "clone")]
}

fn upcast(torch: &Torch, form: Loss, logits: &Tensor, labels: &Tensor) -> Tensor {
    let logits = torch.to(logits, TorchType::F32);
    let [batch, rows, vocabulary] = [logits.size(0), logits.size(1), logits.size(2)];
    if form == Loss::Upcast {
        let [_padded, shifted] = shift_labels(torch, labels);
        let flat = torch.reshape(&logits, &[batch * rows, vocabulary]);
        drop(logits);
        return torch.cross_entropy(&flat, &torch.reshape(&shifted, &[batch * rows]));
    }
    let shifted = torch.contiguous(&torch.slice(&logits, 1, rows - 1));
    let labels = torch.empty(&[batch, rows - 1], labels.dtype(), "clone");
    let flat = torch.reshape(&shifted, &[batch * (rows - 1), vocabulary]);
    torch.cross_entropy(&flat, &torch.reshape(&labels, &[batch * (rows - 1)]))
}

/// The graph of every chunk stays until the backward pass.
fn chunked(
    torch: &Torch,
    head: &Linear,
    hidden: &Tensor,
    labels: &Tensor,
    chunks: Option<u64>,
    tokens: Option<u64>,
    upcast: bool,
) -> Tensor {
    let [batch, rows] = [hidden.size(0), hidden.size(1)];
    let size =
        tokens.or_else(|| chunks.map(|chunks| rows.div_ceil(chunks.max(1)))).unwrap_or(rows).clamp(1, rows);
    let mut total: Option<Tensor> = None;
    let mut left = rows;
    while left > 0 {
        let count = size.min(left);
        left -= count;
        let part = torch.slice(hidden, 1, count);
        let mut logits = head.forward(torch, &part);
        if upcast {
            logits = torch.to(&logits, TorchType::F32);
        }
        let flat = torch.reshape(&logits, &[batch * count, logits.size(2)]);
        drop(logits);
        let targets = torch.slice(labels, 1, count);
        let targets = torch.reshape(&targets, &[batch * count]);
        let loss = torch.cross_entropy(&flat, &targets);
        total = Some(total.map_or(loss.clone(), |total| torch.add(&total, &loss)));
    }
    total.unwrap_or_else(|| torch.empty(&[], TorchType::F32, "zeros"))
}
