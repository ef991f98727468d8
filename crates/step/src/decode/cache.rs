//! The key-value cache: keys and values of every layer, of layers with a sliding window only as many as are still seen.

use plimsoll_device::{DType, Device, Op, Tensor};
use plimsoll_memory::{Phase, Tag};
use plimsoll_model::ModelSpec;

use crate::StepError;

/// Keys and values of one sequence. Position p of a layer lies in row p modulo the layer's capacity.
pub(super) struct KvCache {
    layers: Vec<LayerCache>,
}

/// Keys and values of one layer, [capacity, kv_heads * D'] each.
pub(super) struct LayerCache {
    pub keys: Tensor,
    pub values: Tensor,
    head_dim: u64,
    /// Positions that a query sees at most, its own included.
    window: Option<u64>,
}

impl KvCache {
    /// Room for `context` positions, of which up to `chunk` are written at a time before they are read.
    pub fn new<D: Device>(
        device: &D,
        spec: &ModelSpec,
        dtype: DType,
        context: u64,
        chunk: u64,
    ) -> Result<KvCache, StepError> {
        if !dtype.is_cache() {
            return Err(StepError::CacheType { dtype });
        }
        let attention = &spec.attention;
        let columns = attention.kv_heads.saturating_mul(dtype.cached_columns(attention.head_dim));
        let mut layers = Vec::new();
        for layer in 0..spec.num_layers {
            device.arena().enter(Phase::Setup, Some(layer));
            let window = attention.window(layer);
            let capacity = window.map_or(context, |window| {
                // The first query of a chunk sees its window, all others of the chunk come after it.
                context.min(window.saturating_add(chunk.max(1) - 1))
            });
            let alloc = |name| device.alloc(dtype, &[capacity, columns], Tag::KvCache, name);
            let (keys, values) = (alloc("k")?, alloc("v")?);
            layers.push(LayerCache { keys, values, head_dim: attention.head_dim, window });
        }
        device.arena().enter(Phase::Setup, None);
        Ok(KvCache { layers })
    }

    /// The layers in order.
    pub fn layers(&self) -> &[LayerCache] {
        &self.layers
    }

    /// Whether a query at `position` finds all that it sees, after `written` positions have been written.
    pub fn holds(&self, position: u64, written: u64) -> bool {
        self.layers.iter().all(|layer| {
            let first_seen = layer.window.map_or(0, |window| (position + 1).saturating_sub(window));
            first_seen >= written.saturating_sub(layer.capacity()).min(position)
        })
    }
}

impl LayerCache {
    /// Positions that it holds.
    pub fn capacity(&self) -> u64 {
        self.keys.rows()
    }

    /// Puts keys and values [N, kv_heads * D] of the positions from `past` on in their rows.
    pub fn write<D: Device>(
        &self,
        device: &D,
        keys: &Tensor,
        values: &Tensor,
        past: u64,
    ) -> Result<(), StepError> {
        for (x, cache) in [(keys, &self.keys), (values, &self.values)] {
            device.run(Op::WriteCache { x, cache, first: past, head_dim: self.head_dim })?;
        }
        Ok(())
    }
}
