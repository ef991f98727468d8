//! What the forward pass leaves for the backward pass, and how it is held meanwhile.

use plimsoll_device::{DType, DeviceExt, Quantization, Tensor};
use plimsoll_memory::Tag;

use super::mlp::SavedMlp;
use super::mover::{Mover, Stored};
use crate::StepError;
use crate::context::Context;
use crate::norm::{Normed, Statistics};
use crate::policy::Save;

/// What the backward pass of a block will need.
pub(crate) struct Saved {
    /// The block's input `[N, H]`.
    pub input: Held<Tensor>,
    pub attention_norm: Held<Normed>,
    pub qkv: Held<Qkv>,
    pub attention: Held<Attended>,
    /// The residual stream after attention.
    pub middle: Held<Summed>,
    pub mlp: SavedMlp,
    /// What the norm after the feed-forward part saw.
    pub mlp_out: Held<Raw>,
}

impl Saved {
    /// Begins to bring back what is away.
    pub fn fetch(&mut self, away: Option<&Mover<'_>>) -> Result<(), StepError> {
        self.input.fetch(away)?;
        self.attention_norm.fetch(away)?;
        self.qkv.fetch(away)?;
        self.attention.fetch(away)?;
        self.middle.fetch(away)?;
        self.mlp.fetch(away)?;
        self.mlp_out.fetch(away)
    }

    /// The input alone: everything else is computed again.
    pub fn of_input(input: Held<Tensor>) -> Saved {
        Saved {
            input,
            attention_norm: Held::Dropped,
            qkv: Held::Dropped,
            attention: Held::Dropped,
            middle: Held::Dropped,
            mlp: SavedMlp::dropped(),
            mlp_out: Held::Dropped,
        }
    }
}

/// Queries `[N, Q]`, keys and values `[N, KV]`, normalised and rotated.
#[derive(Clone)]
pub(crate) struct Qkv {
    pub q: Tensor,
    pub k: Tensor,
    pub v: Tensor,
    /// What the norm of queries saw, where there is one; in latent attention that of the vector that they are made of.
    pub raw_q: Option<Raw>,
    /// The same of keys.
    pub raw_k: Option<Raw>,
}

/// The input of a norm that is not the residual stream, and its statistics.
#[derive(Clone)]
pub(crate) struct Raw {
    pub x: Tensor,
    pub statistics: Statistics,
}

/// The residual stream `[N, H]` after a part was added, and what the norm after the part saw.
#[derive(Clone)]
pub(crate) struct Summed {
    pub stream: Tensor,
    pub raw: Option<Raw>,
}

/// The attention's output `[N, Q]`, of heads as wide as values are, and log-sum-exp `[batch, heads, q_len]`, and its probabilities
/// `[batch, heads, q_len, kv_len]` where scores are written out.
#[derive(Clone)]
pub(crate) struct Attended {
    pub out: Tensor,
    pub lse: Tensor,
    pub probabilities: Option<Tensor>,
}

/// Outputs of the gate (where there is one) and up projections `[N, I]`.
#[derive(Clone)]
pub(crate) struct Inner {
    pub gate: Option<Tensor>,
    pub up: Tensor,
}

/// A group of activations with one fate.
pub(crate) trait Activations {
    /// The tensors that are worth compressing, always in the same order.
    fn tensors(&mut self) -> Vec<&mut Tensor>;

    /// Those of them that are not 8-bit codes from the start.
    fn wide_tensors(&mut self) -> Vec<&mut Tensor> {
        self.tensors().into_iter().filter(|tensor| !tensor.dtype().is_fp8()).collect()
    }
}

impl Activations for Tensor {
    fn tensors(&mut self) -> Vec<&mut Tensor> {
        vec![self]
    }
}

impl Activations for Normed {
    fn tensors(&mut self) -> Vec<&mut Tensor> {
        vec![&mut self.out]
    }
}

impl Activations for Raw {
    fn tensors(&mut self) -> Vec<&mut Tensor> {
        vec![&mut self.x]
    }
}

impl Activations for Qkv {
    fn tensors(&mut self) -> Vec<&mut Tensor> {
        let raw = self.raw_q.iter_mut().chain(&mut self.raw_k).map(|raw| &mut raw.x);
        [&mut self.q, &mut self.k, &mut self.v].into_iter().chain(raw).collect()
    }
}

impl Activations for Summed {
    fn tensors(&mut self) -> Vec<&mut Tensor> {
        let raw = self.raw.iter_mut().map(|raw| &mut raw.x);
        [&mut self.stream].into_iter().chain(raw).collect()
    }
}

impl Activations for Attended {
    fn tensors(&mut self) -> Vec<&mut Tensor> {
        [&mut self.out].into_iter().chain(&mut self.probabilities).collect()
    }
}

impl Activations for Inner {
    fn tensors(&mut self) -> Vec<&mut Tensor> {
        self.gate.iter_mut().chain([&mut self.up]).collect()
    }
}

/// A group of activations between forward and backward.
pub(crate) enum Held<T> {
    /// It will be computed again.
    Dropped,
    /// Codes stand in the place of tensors that are compressed, and nothing in that of what is away.
    Kept {
        value: T,
        /// Which of the tensors, or of their codes, wait on a lower tier; none where nothing does.
        away: Vec<Option<Stored>>,
        /// Of tensors that are compressed.
        packings: Vec<Packing>,
    },
}

/// What turns codes back into a tensor.
pub(crate) struct Packing {
    scales: Tensor,
    block: u64,
    dtype: DType,
}

impl<T: Activations> Held<T> {
    /// Treats a group as the policy says.
    pub fn new(ctx: &Context<'_>, save: Save, mut value: T) -> Result<Held<T>, StepError> {
        if save == Save::Recompute {
            return Ok(Held::Dropped);
        }
        let (mut away, mut packings) = (Vec::new(), Vec::new());
        for tensor in value.wide_tensors() {
            let Save::Int8 { block } = save else {
                let Some(mover) = ctx.away else { break };
                let sent = mover.takes(tensor).then(|| mover.send_copy(tensor)).transpose()?;
                if sent.is_some() {
                    *tensor = mover.nothing();
                }
                away.push(sent);
                continue;
            };
            let device = ctx.device;
            let block = block.clamp(1, tensor.elements().max(1));
            let (mut buffer, codes) = match ctx.away {
                Some(mover) => mover.new_tensor(DType::I8, tensor.shape()).map(|(b, t)| (Some(b), t))?,
                None => {
                    let sizes = tensor.shape();
                    (None, device.alloc(DType::I8, sizes.dims(), Tag::Activations, "codes")?)
                }
            };
            let runs = tensor.elements().div_ceil(block);
            let scales = device.alloc(DType::F32, &[runs], Tag::Activations, "codes.scales")?;
            device.run(Quantization::QuantizeInt8 { x: tensor, codes: &codes, scales: &scales, block })?;
            packings.push(Packing { scales, block, dtype: tensor.dtype() });
            match (ctx.away, buffer.take()) {
                (Some(mover), Some(buffer)) => {
                    away.push(Some(mover.send(buffer, codes)?));
                    *tensor = mover.nothing();
                }
                _ => *tensor = codes,
            }
        }
        Ok(Held::Kept { value, away, packings })
    }

    /// A group that stays as it is.
    pub fn plain(value: T) -> Held<T> {
        Held::Kept { value, away: Vec::new(), packings: Vec::new() }
    }

    /// Begins to bring the group back, if it is away.
    pub fn fetch(&mut self, away: Option<&Mover<'_>>) -> Result<(), StepError> {
        if let (Held::Kept { away: stored, .. }, Some(mover)) = (self, away) {
            for stored in stored.iter_mut().flatten() {
                mover.fetch(stored)?;
            }
        }
        Ok(())
    }

    /// The group as it was, or as `compute` makes it again.
    pub fn restore(
        self,
        ctx: &Context<'_>,
        compute: impl FnOnce() -> Result<T, StepError>,
    ) -> Result<T, StepError> {
        let Held::Kept { mut value, away, packings } = self else { return compute() };
        for (tensor, stored) in value.wide_tensors().into_iter().zip(away) {
            if let (Some(stored), Some(mover)) = (stored, ctx.away) {
                *tensor = mover.take(stored)?;
            }
        }
        for (tensor, Packing { scales, block, dtype }) in value.wide_tensors().into_iter().zip(packings) {
            let out = ctx.device.alloc(dtype, tensor.shape().dims(), Tag::Activations, "restored")?;
            let (codes, scales) = (&*tensor, &scales);
            ctx.device.run(Quantization::DequantizeInt8 { codes, scales, block, out: &out })?;
            *tensor = out;
        }
        Ok(value)
    }

    /// What stays as it is.
    pub fn value(&self) -> Option<&T> {
        match self {
            Held::Kept { value, away, packings } if away.is_empty() && packings.is_empty() => Some(value),
            _ => None,
        }
    }

    pub fn is_dropped(&self) -> bool {
        matches!(self, Held::Dropped)
    }
}

#[cfg(test)]
mod tests;
