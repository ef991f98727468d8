//! What becomes of the last hidden states: logits and a loss (`loss/loss_utils.py` of transformers, Liger, torchtune, litgpt).

use super::layers::Linear;
use crate::eager::{Tensor, Torch};
use crate::estimate::Kind;
use crate::run::{Loss, TorchType};

/// `[B, S, H]` hidden states and `[B, S]` labels to the logits that are kept, and a loss.
pub(crate) fn logits_and_loss(
    torch: &Torch,
    form: Loss,
    soft_cap: bool,
    head: &Linear,
    hidden: &Tensor,
    labels: Option<&Tensor>,
) -> (Vec<Tensor>, Option<Tensor>) {
    torch.of_kind(Kind::Logits, || match (form, labels) {
        (Loss::Liger | Loss::Cce, Some(labels)) => {
            let [_padded, shifted] = shift_labels(torch, labels);
            let loss = torch.module("loss", || head.fused_loss(torch, form == Loss::Liger, hidden, &shifted));
            (Vec::new(), Some(loss))
        }
        (Loss::Chunked { chunks, compiled }, Some(labels)) => {
            (Vec::new(), Some(chunked(torch, head, hidden, labels, chunks, compiled)))
        }
        (Loss::ChunkedKept { tokens }, Some(labels)) => chunked_kept(torch, head, hidden, labels, tokens),
        (Loss::WholeKept { rows }, Some(labels)) => whole_kept(torch, head, hidden, labels, rows),
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
            let loss = labels.map(|labels| torch.module("loss", || whole(torch, form, &logits, labels)));
            (vec![logits], loss)
        }
    })
}

/// Labels padded by one, and shifted: `[B, S]`.
fn shift_labels(torch: &Torch, labels: &Tensor) -> [Tensor; 2] {
    let [batch, rows] = [labels.size(0), labels.size(1)];
    let padded = torch.empty(&[batch, rows + 1], labels.dtype(), "constant_pad_nd");
    [padded, torch.empty(&[batch, rows], labels.dtype(), "clone")]
}

/// The loss of all logits at once.
fn whole(torch: &Torch, form: Loss, logits: &Tensor, labels: &Tensor) -> Tensor {
    let logits = if form == Loss::Shifted { logits.clone() } else { torch.to(logits, TorchType::F32) };
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
    chunks: u64,
    compiled: bool,
) -> Tensor {
    let rows = hidden.size(1);
    let mut total: Option<Tensor> = None;
    for count in parts(rows, rows.div_ceil(chunks.max(1))) {
        let part = torch.slice(hidden, 1, count);
        let mut logits = head.forward(torch, &part);
        if !compiled {
            logits = torch.to(&logits, TorchType::F32);
        }
        let loss = loss_of_chunk(torch, logits, labels, count, compiled);
        total = Some(total.map_or(loss.clone(), |total| torch.add(&total, &loss)));
    }
    total.unwrap_or_else(|| torch.empty(&[], TorchType::F32, "zeros"))
}

/// The logits of every chunk first, which the caller keeps, then the losses.
fn chunked_kept(
    torch: &Torch,
    head: &Linear,
    hidden: &Tensor,
    labels: &Tensor,
    tokens: u64,
) -> (Vec<Tensor>, Option<Tensor>) {
    let rows = hidden.size(1);
    let made: Vec<Tensor> =
        parts(rows, tokens).map(|count| head.forward(torch, &torch.slice(hidden, 1, count))).collect();
    let logits: Vec<Tensor> = made.iter().map(|chunk| torch.to(chunk, TorchType::F32)).collect();
    drop(made);
    let losses = |chunk: &Tensor| loss_of_chunk(torch, chunk.clone(), labels, chunk.size(1), false);
    let losses: Vec<Tensor> = torch.module("loss", || logits.iter().map(losses).collect());
    let total = losses.into_iter().reduce(|total, loss| torch.add(&total, &loss));
    (logits, total)
}

/// All logits, which the caller keeps, then the losses of so many rows each.
fn whole_kept(
    torch: &Torch,
    head: &Linear,
    hidden: &Tensor,
    labels: &Tensor,
    rows: u64,
) -> (Vec<Tensor>, Option<Tensor>) {
    let logits = {
        let made = head.forward(torch, hidden);
        torch.to(&made, TorchType::F32)
    };
    let [batch, tokens, vocabulary] = [logits.size(0), logits.size(1), logits.size(2)];
    let shifted = torch.contiguous(&torch.slice(&logits, 1, tokens - 1));
    let all = batch * (tokens - 1);
    let flat = torch.reshape(&shifted, &[all, vocabulary]);
    let targets = torch.reshape(&torch.slice(labels, 1, tokens - 1), &[all]);
    let loss = |count| torch.cross_entropy(&torch.slice(&flat, 0, count), &torch.slice(&targets, 0, count));
    let losses: Vec<Tensor> = torch.module("loss", || parts(all, rows).map(loss).collect());
    (vec![logits], losses.into_iter().reduce(|total, loss| torch.add(&total, &loss)))
}

fn loss_of_chunk(torch: &Torch, logits: Tensor, labels: &Tensor, count: u64, compiled: bool) -> Tensor {
    let batch = logits.size(0);
    let flat = torch.reshape(&logits, &[batch * count, logits.size(2)]);
    drop(logits);
    let targets = torch.reshape(&torch.slice(labels, 1, count), &[batch * count]);
    match compiled {
        true => torch.compiled_cross_entropy(&flat, &targets),
        false => torch.cross_entropy(&flat, &targets),
    }
}

/// Sizes of the parts that `rows` are cut into.
fn parts(rows: u64, size: u64) -> impl Iterator<Item = u64> {
    let size = size.clamp(1, rows.max(1));
    (0..rows.div_ceil(size)).map(move |part| size.min(rows - part * size))
}
