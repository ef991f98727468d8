//! The key-value cache: keys and values of every layer, of layers with a sliding window only as many as are still seen.
//! They are in memory, or on a lower tier, from where a layer's come when its turn is near.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use plimsoll_device::{Attention, DType, Device, DeviceExt, Tensor};
use plimsoll_disk::LowerTiers;
use plimsoll_memory::{Phase, Tag, Tier};
use plimsoll_model::{BlockId, ModelSpec, Role};

use crate::StepError;
use crate::tier::{Extents, Parcel, Parcels, Use};

/// Buffers of layers whose keys and values live on a lower tier: one in use, one on its way and one on its way back.
const BUFFERS: usize = 3;

/// Keys and values of one sequence. Position p of a layer lies in row p modulo the layer's capacity.
pub(super) struct KvCache<'a> {
    device: &'a dyn Device,
    layers: Vec<Geometry>,
    head_dim: u64,
    row_bytes: u64,
    /// Those of every layer, where they live on the device.
    resident: Vec<[Tensor; 2]>,
    /// Those that live on a lower tier.
    away: Parcels<'a, u32, usize>,
}

/// How a layer's keys and values lie.
#[derive(Clone, Copy)]
struct Geometry {
    capacity: u64,
    /// Positions that a query sees at most, its own included.
    window: Option<u64>,
}

impl<'a> KvCache<'a> {
    /// Room for `context` positions, of which up to `chunk` are written at a time before they are read.
    pub fn new(
        device: &'a dyn Device,
        spec: &ModelSpec,
        dtype: DType,
        (context, chunk): (u64, u64),
        (tiers, tier): (&Arc<LowerTiers>, Tier),
    ) -> Result<Self, StepError> {
        if !dtype.is_cache() {
            return Err(StepError::CacheType { dtype });
        }
        let attention = &spec.attention;
        let columns = attention.kv_heads.saturating_mul(dtype.cached_columns(attention.head_dim));
        let geometry = |layer| {
            let window = attention.window(layer);
            let capacity = window.map_or(context, |window| {
                // The first query of a chunk sees its window, all others of the chunk come after it.
                context.min(window.saturating_add(chunk.max(1) - 1))
            });
            Geometry { capacity, window }
        };
        let layers: Vec<Geometry> = spec.layers().map(geometry).collect();
        let (mut resident, mut parcels) = (Vec::new(), HashMap::new());
        for (layer, Geometry { capacity, .. }) in (0..).zip(&layers) {
            let sizes = [*capacity, columns];
            if tier == Tier::Device {
                device.enter(Phase::Setup, Some(layer));
                let alloc = |name| device.alloc(dtype, &sizes, Tag::KvCache, name);
                resident.push([alloc("k")?, alloc("v")?]);
                continue;
            }
            tiers.enter(Phase::Setup, Some(layer));
            let mut parcel = Parcel::new();
            for part in 0..2 {
                parcel.add(part, dtype, &sizes);
            }
            parcel.settle(tiers, tier, Tag::KvCache, "kv")?;
            parcels.insert(layer, parcel);
        }
        device.enter(Phase::Setup, None);
        let away = Parcels::of(device, tiers, parcels, BUFFERS, "kv.staging")?;
        let row_bytes = dtype.bytes_for(columns).unwrap_or(0);
        Ok(KvCache { device, layers, head_dim: attention.head_dim, row_bytes, resident, away })
    }

    /// Whether a query at `position` finds all that it sees, after `written` positions have been written.
    pub fn holds(&self, position: u64, written: u64) -> bool {
        self.layers.iter().all(|layer| {
            let first_seen = layer.window.map_or(0, |window| (position + 1).saturating_sub(window));
            first_seen >= written.saturating_sub(layer.capacity).min(position)
        })
    }

    /// Positions that a layer holds, counted from the first of the layers that there are.
    pub fn capacity(&self, layer: u32) -> u64 {
        self.layers.get(layer as usize).map_or(0, |layer| layer.capacity)
    }

    /// Prepares for a pass through all layers, in which `n` positions follow `past` others.
    pub fn begin(&mut self, past: u64, n: u64) -> Result<(), StepError> {
        for (layer, geometry) in (0..).zip(&self.layers) {
            let Some(parcel) = self.away.get_mut(layer) else { continue };
            let row_bytes = self.row_bytes;
            // A ring may hold them anywhere.
            let ring = past + n > geometry.capacity;
            let rows = |rows: Range<u64>| -> Vec<Range<u64>> {
                let starts = parcel.tensors().iter().map(|placed| placed.offset);
                starts.map(|start| start + rows.start * row_bytes..start + rows.end * row_bytes).collect()
            };
            let all = 0..geometry.capacity;
            let read = rows(if ring { all.clone() } else { 0..past });
            let changed = rows(if ring { all } else { past..past + n });
            parcel.extents = Some(Extents { read, changed });
        }
        self.away.announce((0..self.layers.len() as u32).map(Use::of))
    }

    /// Puts keys and values `[N, kv_heads * D]` of the positions from `past` on in their rows of a layer, and gives back
    /// all that it holds, `[capacity, kv_heads * D']`. To be left by [`leave`](Self::leave).
    pub fn write(
        &mut self,
        layer: u32,
        keys: &Tensor,
        values: &Tensor,
        past: u64,
    ) -> Result<(Tensor, Tensor), StepError> {
        let missing = StepError::MissingWeight { block: BlockId::Layer(layer), role: Role::KProj };
        let [k, v] = match self.resident.get(layer as usize) {
            Some(tensors) => tensors.clone(),
            None => {
                let mut views = self.away.gather(layer)?.into_iter().map(|(_, tensor)| tensor);
                match (views.next(), views.next()) {
                    (Some(k), Some(v)) => [k, v],
                    _ => return Err(missing),
                }
            }
        };
        for (x, cache) in [(keys, &k), (values, &v)] {
            self.device.run(Attention::WriteCache { x, cache, first: past, head_dim: self.head_dim })?;
        }
        Ok((k, v))
    }

    /// Done with a layer, whose tensors are gone.
    pub fn leave(&mut self, layer: u32) -> Result<(), StepError> {
        self.away.release(layer, true);
        self.away.advance()
    }

    /// Waits until everything that was written is where it lives.
    pub fn settle(&mut self) -> Result<(), StepError> {
        self.away.flush()
    }
}

#[cfg(test)]
mod tests {
    use plimsoll_device::{Dry, Transferred};
    use plimsoll_model::SlidingWindow;

    use super::*;
    use crate::common::llama;

    /// Five layers of windows of nine positions, of which passes of up to eight leave 9 + 8 - 1; keys and values of 1 KiB each.
    #[test]
    fn a_pass_moves_what_comes_before_it_and_what_it_writes() {
        let moved = |past, n| {
            let (dry, tiers) = (Dry::new(), Arc::new(LowerTiers::dry()));
            let mut spec = ModelSpec { num_layers: 5, ..llama() };
            spec.attention.head_dim = 128;
            spec.attention.sliding_window = Some(SlidingWindow { size: 9, layers: vec![true; 5] });
            let place = (&tiers, Tier::Disk);
            let mut cache = KvCache::new(&dry, &spec, DType::F32, (60, 8), place).unwrap();
            cache.begin(past, n).unwrap();
            for layer in 0..5 {
                let new = dry.alloc(DType::F32, &[n, 256], Tag::Activations, "test").unwrap();
                drop(cache.write(layer, &new, &new, past).unwrap());
                cache.leave(layer).unwrap();
            }
            cache.settle().unwrap();
            let Transferred { read, written, .. } = dry.moved();
            (read / (5 * 2 * 1024), written / (5 * 2 * 1024))
        };
        assert_eq!(moved(0, 8), (0, 8));
        assert_eq!(moved(8, 7), (8, 7));
        assert_eq!(moved(8, 8), (8, 8));
        // From here on a position may lie anywhere.
        assert_eq!(moved(8, 9), (16, 16));
        assert_eq!(moved(40, 1), (16, 16));
    }
}
