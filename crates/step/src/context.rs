//! What every block function needs to know: the device, the model's shape, the geometry of the batch.

use plimsoll_device::{AttentionShape, Compute, DType, Device, Glu, Tensor};
use plimsoll_model::{Activation, ModelSpec};

use crate::rope::RopeTable;

/// Shared by all blocks of a pass. N = batch * q_len tokens.
pub(crate) struct Context<'a, D: Device> {
    pub device: &'a D,
    pub spec: &'a ModelSpec,
    /// Type of the residual stream and of saved activations.
    pub activations: DType,
    pub compute: Compute,
    pub rope: &'a RopeTable,
    /// u32 [N]: the position of every token in its sequence.
    pub positions: &'a Tensor,
    pub attention: AttentionShape,
}

impl<D: Device> Context<'_, D> {
    /// The activation function of the feed-forward part.
    pub fn activation(&self) -> Glu {
        match self.spec.mlp.activation {
            Activation::Silu => Glu::Silu,
            Activation::Gelu => Glu::Gelu,
            Activation::GeluTanh => Glu::GeluTanh,
        }
    }
}

/// The geometry of `batch` sequences of `q_len` new tokens after `past` old ones.
pub(crate) fn attention_shape(
    spec: &ModelSpec,
    batch: u64,
    q_len: u64,
    past: u64,
    capacity: u64,
) -> AttentionShape {
    let attention = &spec.attention;
    AttentionShape {
        batch,
        q_len,
        kv_len: past + q_len,
        kv_capacity: capacity,
        heads: attention.heads,
        kv_heads: attention.kv_heads,
        head_dim: attention.head_dim,
        scale: (1.0 / (attention.head_dim as f64).sqrt()) as f32,
        window: None,
        soft_cap: None,
    }
}
