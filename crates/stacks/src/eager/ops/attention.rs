//! `scaled_dot_product_attention`: the choice of its back end, and what each allocates and keeps.
//! Follows `aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`, `attention.cu`, `attention_backward.cu` and
//! `flash_attn/flash_api.cpp`.

use crate::eager::Torch;
use crate::eager::graph::{Grads, Saved};
use crate::eager::tensor::Tensor;
use crate::run::{Card, TorchType};

/// A back end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backend {
    /// FlashAttention 2, in PyTorch.
    Flash,
    /// cuDNN's.
    Cudnn,
    /// CUTLASS's memory-efficient attention.
    Efficient,
    /// Products and a softmax.
    Math,
}

/// The memory-efficient kernel takes fewer key than query heads since pull request 191085 (2026-07).
const EFFICIENT_GROUPS: (u32, u32) = (2, 14);

/// What PyTorch takes, of those that it is built with. cuDNN is preferred on Hopper and data-center Blackwell from 2.5 on.
pub fn choose_backend(card: &Card, torch: (u32, u32), q: &Tensor, k: &Tensor, masked: bool) -> Backend {
    let half = matches!(q.dtype, TorchType::Bf16 | TorchType::F16);
    let grouped = q.shape[1] != k.shape[1];
    let width = q.shape.last();
    let (major, minor) = card.capability;
    let ampere = major >= 8;
    let flash = half && ampere && !masked && width <= 256;
    let cudnn = half && matches!((major, minor), (9 | 10, _)) && width <= 128 && width.is_multiple_of(8);
    if cudnn && torch >= (2, 5) {
        Backend::Cudnn
    } else if flash {
        Backend::Flash
    } else if (!grouped || torch >= EFFICIENT_GROUPS) && (half || q.dtype == TorchType::F32) {
        Backend::Efficient
    } else {
        Backend::Math
    }
}

impl Torch {
    /// `q [B, Hq, S, D]`, `k` and `v` `[B, Hkv, T, D]`; the result has the shape of `q`.
    pub fn scaled_dot_product_attention(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        mask: Option<&Tensor>,
    ) -> Tensor {
        let v = &self.lower(v);
        let k = &self.lower(k);
        let q = &self.lower(q);
        match choose_backend(&self.card, self.versions.torch, q, k, mask.is_some()) {
            Backend::Math => self.attention_math(q, k, v, mask),
            backend => self.attention_fused(backend, q, k, v, mask),
        }
    }

    /// flash-attn's own function: as [`Backend::Flash`], over `[B, S, H, D]`.
    pub fn flash_attention_2(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Tensor {
        self.attention_fused(Backend::Flash, q, k, v, None)
    }

    fn attention_fused(
        &self,
        backend: Backend,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        mask: Option<&Tensor>,
    ) -> Tensor {
        let [batch, heads, queries] = [q.shape[0], q.shape[1], q.shape[2]];
        let operation = match backend {
            Backend::Cudnn => "_scaled_dot_product_cudnn_attention",
            Backend::Efficient => "_scaled_dot_product_efficient_attention",
            Backend::Flash | Backend::Math => "_scaled_dot_product_flash_attention",
        };
        // A boolean mask becomes a bias of the queries' type; the memory-efficient kernel wants its rows aligned to 16 elements.
        let bias =
            mask.map(|mask| match mask.dtype == TorchType::Bool || !mask.shape.last().is_multiple_of(16) {
                true => self.empty_as(&mask.shape, q.dtype, "where"),
                false => mask.detach(),
            });
        // The memory-efficient kernel writes [B, S, H, D]; the others in the order that the queries have in memory.
        let out = match backend {
            Backend::Efficient => {
                self.empty(&[batch, queries, heads, q.shape[3]], q.dtype, operation).swapped(1, 2)
            }
            _ => self.map(q, q.dtype, operation),
        };
        let rows = if backend == Backend::Efficient { queries.next_multiple_of(32) } else { queries };
        let logsumexp = self.empty(&[batch, heads, rows], TorchType::F32, operation);
        let seeds = match backend {
            Backend::Flash | Backend::Math => [2, 1],
            Backend::Cudnn | Backend::Efficient => [1, 1],
        }
        .map(|numbers| self.empty(&[numbers], TorchType::I64, operation));
        let result = out.detach();
        self.recorded(operation, &[q, k, v], out, |_| {
            let kept: Vec<Saved> = [q, k, v, &result, &logsumexp]
                .into_iter()
                .chain(&seeds)
                .map(|tensor| self.save(tensor))
                .collect();
            let bias = bias.as_ref().map(|bias| self.save(bias));
            Box::new(move |torch, grads| {
                let kept: Vec<Tensor> = kept.iter().map(|saved| saved.unpack(torch)).collect();
                let _bias = bias.as_ref().map(|bias| bias.unpack(torch));
                torch.attention_fused_backward(backend, &kept, grads)
            })
        })
    }

    fn attention_fused_backward(&self, backend: Backend, kept: &[Tensor], grads: &[Option<Tensor>]) -> Grads {
        let [q, k, v, out] = [&kept[0], &kept[1], &kept[2], &kept[3]];
        let Some(grad) = grads[0].as_ref() else { return vec![None; 3] };
        let operation = match backend {
            Backend::Cudnn => "_scaled_dot_product_cudnn_attention_backward",
            Backend::Efficient => "_scaled_dot_product_efficient_attention_backward",
            Backend::Flash | Backend::Math => "_scaled_dot_product_flash_attention_backward",
        };
        let [batch, heads, queries, width] = [q.shape[0], q.shape[1], q.shape[2], q.shape[3]];
        // Kernels read [B, S, H, D]: they copy what is not so in memory.
        let copied =
            |x: &Tensor| (!x.swapped(1, 2).is_contiguous()).then(|| self.scratch(x.bytes(), operation));
        let _copies = [copied(grad), copied(out)];
        let like = |x: &Tensor| match backend {
            Backend::Efficient => {
                let shape = x.shape.swapped(1, 2);
                self.empty_as(&shape, x.dtype, operation).swapped(1, 2)
            }
            _ => self.map(x, x.dtype, operation),
        };
        let (dq, dk, dv) = (like(q), like(k), like(v));
        let _scratch: Vec<_> = match backend {
            Backend::Flash | Backend::Math => {
                let rows = queries.next_multiple_of(128);
                let rounded =
                    if width <= 128 { width.next_multiple_of(32) } else { width.next_multiple_of(64) };
                let softmax_d = batch * heads * rows * 4;
                let accumulator = batch * rows * heads * rounded * 4;
                let expanded = if k.shape[1] == heads {
                    0
                } else {
                    batch * k.shape[2] * heads * width * k.dtype.bytes()
                };
                [softmax_d, accumulator, expanded, expanded]
                    .map(|bytes| self.scratch(bytes, operation))
                    .into()
            }
            // delta, and an f32 accumulator of dq where the type is narrower and the rows are more than a block.
            Backend::Efficient => {
                let delta = batch * heads * queries * 4;
                let accumulator =
                    if q.dtype == TorchType::F32 { 0 } else { batch * queries * heads * width * 4 };
                let expanded = if k.shape[1] == heads {
                    0
                } else {
                    batch * k.shape[2] * heads * width * k.dtype.bytes()
                };
                [delta, accumulator, expanded, expanded].map(|bytes| self.scratch(bytes, operation)).into()
            }
            Backend::Cudnn => Vec::new(),
        };
        vec![Some(dq), Some(dk), Some(dv)]
    }

    /// `_scaled_dot_product_attention_math`: both factors scaled, heads repeated, a mask made where it is causal.
    fn attention_math(&self, q: &Tensor, k: &Tensor, v: &Tensor, mask: Option<&Tensor>) -> Tensor {
        let groups = q.shape[1] / k.shape[1];
        let dtype = q.dtype;
        let [q, k, v] = [q, k, v].map(|x| self.to(x, TorchType::F32));
        let q = self.scale(&q);
        let causal = mask.is_none().then(|| {
            let square = self.empty(&[q.shape[2], k.shape[2]], TorchType::Bool, "tril");
            self.map(&square, TorchType::F32, "where")
        });
        let repeat = |x: &Tensor| if groups == 1 { x.clone() } else { self.repeat_heads(x, groups) };
        let (k, v) = (repeat(&k), repeat(&v));
        let k = self.scale(&self.transpose(&k, 2, 3));
        let mut scores = self.without_autocast(|| self.matmul(&q, &k));
        if let Some(mask) = causal.as_ref().or(mask) {
            scores = self.add(&scores, mask);
        }
        let weights = self.softmax(&scores, None);
        drop(scores);
        let out = self.without_autocast(|| self.matmul(&weights, &v));
        self.to(&out, dtype)
    }

    /// `x.repeat_interleave(groups, dim=1)`, as `repeat_kv` of transformers: a view expanded, then copied.
    pub fn repeat_heads(&self, x: &Tensor, groups: u64) -> Tensor {
        let [batch, heads, rows, width] = [x.shape[0], x.shape[1], x.shape[2], x.shape[3]];
        let expanded = self.expand(&self.unsqueeze(x, 2), 2, groups);
        self.reshape(&expanded, &[batch, heads * groups, rows, width])
    }
}
