//! What the forward pass keeps for the backward pass, tensor group by tensor group.
//!
//! Every form of gradient checkpointing is a value of [`SavePolicy`]. Whatever is not kept is computed again by the
//! same functions, so a policy changes memory and time but not one bit of the result.

/// The fate of a group of activations between forward and backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Save {
    /// It stays in memory.
    Keep,
    /// It is dropped and computed again.
    Recompute,
}

impl Save {
    /// The value, if it is to stay.
    pub(crate) fn hold<T>(self, value: T) -> Option<T> {
        (self == Save::Keep).then_some(value)
    }
}

/// The policy of one block. Its input is always kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerPolicy {
    /// Outputs and statistics of both norms.
    pub norms: Save,
    /// Queries, keys and values.
    pub qkv: Save,
    /// The attention's output and log-sum-exp.
    pub attention: Save,
    /// The residual stream between attention and feed-forward part.
    pub middle: Save,
    /// Outputs of the gate and up projections.
    pub gate_up: Save,
    /// The input of the down projection.
    pub activation: Save,
}

impl LayerPolicy {
    /// The same fate for every group.
    pub fn all(save: Save) -> LayerPolicy {
        LayerPolicy { norms: save, qkv: save, attention: save, middle: save, gate_up: save, activation: save }
    }
}

/// Gradient checkpointing as users name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Checkpointing {
    /// Everything is kept.
    None,
    /// Only the blocks' inputs are kept (Chen et al. 2016, one segment a block).
    Full,
}

/// The policies of all blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SavePolicy {
    layers: Vec<LayerPolicy>,
}

impl SavePolicy {
    /// The policy that a form of checkpointing stands for.
    pub fn new(checkpointing: Checkpointing, layers: u32) -> SavePolicy {
        let save = match checkpointing {
            Checkpointing::None => Save::Keep,
            Checkpointing::Full => Save::Recompute,
        };
        SavePolicy { layers: vec![LayerPolicy::all(save); layers as usize] }
    }

    /// The policy of one block; blocks beyond the last keep nothing.
    pub fn layer(&self, layer: u32) -> LayerPolicy {
        self.layers.get(layer as usize).copied().unwrap_or(LayerPolicy::all(Save::Recompute))
    }
}
