//! The key-value cache: keys and values of every layer, of layers with a sliding window only as many as are still seen. Of latent
//! attention it has the narrow vectors, which are the keys and the values of one head.
//! They are in memory, or on a lower tier, from where a layer's come when its turn is near. In memory those of layers that see
//! everything may lie in pages that all sequences share ([`pages`](super::pages)).

use std::ops::Range;
use std::sync::Arc;

use plimsoll_device::{Attention, AttentionShape, DType, Device, DeviceExt, PagedRun, Tensor};
use plimsoll_disk::LowerTiers;
use plimsoll_memory::{Phase, Tag, Tier};
use plimsoll_model::{BlockId, ModelSpec, Role};
use rustc_hash::FxHashMap;

use super::DecodeSettings;
use super::pages::Pages;
use crate::StepError;
use crate::block::{self, LatentCache, Qkv};
use crate::context::Context;
use crate::head::{reshaped, rows};
use crate::tier::{Extents, Parcel, Parcels, Use};

/// Buffers of layers whose keys and values live on a lower tier: one in use, one on its way and one on its way back.
const BUFFERS: usize = 3;

/// Keys and values of some sequences. Position p of a layer lies in row p modulo the layer's capacity, or in a page.
pub(super) struct KvCache<'a> {
    device: &'a dyn Device,
    layers: Vec<Geometry>,
    head_dim: u64,
    /// Whether values have tensors of their own. Else the rows of keys are read as values too.
    has_values: bool,
    row_bytes: u64,
    /// Those that live on the device.
    resident: FxHashMap<Place, [Tensor; 2]>,
    /// Those of layers whose sequences share pages.
    pooled: FxHashMap<u32, [Tensor; 2]>,
    pages: Option<Pages>,
    /// The rows of the pools in which the new tokens of the pass lie.
    new_rows: Vec<u32>,
    /// Those that live on a lower tier.
    away: Parcels<'a, Place, usize>,
}

/// Whose keys and values: those of a layer, counted from the first that there is, and of a sequence.
type Place = (u32, u32);

/// New tokens of a sequence in a pass. Those of one sequence follow each other in the pass's rows, behind those of the run before.
#[derive(Clone, Copy, Debug)]
pub(super) struct Run {
    pub sequence: u32,
    /// Positions of the sequence that are in the cache already.
    pub past: u64,
    pub tokens: u64,
    /// Whether each token is attended to as if the others came in later passes.
    pub singly: bool,
}

impl Run {
    /// Queries that are attended to together, and the positions until the last of them.
    fn parts(self) -> impl Iterator<Item = (u64, u64)> {
        let end = self.past + self.tokens;
        let step = if self.singly { 1 } else { self.tokens.max(1) };
        (0..self.tokens).step_by(step as usize).map(move |first| (step, (self.past + first + step).min(end)))
    }
}

/// How a layer's keys and values lie.
#[derive(Clone, Copy)]
struct Geometry {
    capacity: u64,
    /// Positions that a query sees at most, its own included.
    window: Option<u64>,
}

impl<'a> KvCache<'a> {
    /// Room for the sequences that the settings name: passes of a prompt are written before they are read.
    pub fn new(
        device: &'a dyn Device,
        spec: &ModelSpec,
        settings: &DecodeSettings,
        latent: Option<LatentCache>,
        tiers: &Arc<LowerTiers>,
    ) -> Result<Self, StepError> {
        let DecodeSettings { cache: dtype, cache_tier: tier, context, sequences, .. } = *settings;
        if !dtype.is_cache() {
            return Err(StepError::CacheType { dtype });
        }
        let attention = &spec.attention;
        let (kv_heads, head_dim) = match latent {
            Some(latent) => (1, latent.width()),
            None => (attention.kv_heads, attention.head_dim),
        };
        let (columns, has_values) =
            (kv_heads.saturating_mul(dtype.cached_columns(head_dim)), latent.is_none());
        // Keys and values, or rows that are both.
        let new = |sizes: &[u64], [k, v]: [&'static str; 2]| -> Result<[Tensor; 2], StepError> {
            let k = device.alloc(dtype, sizes, Tag::KvCache, k)?;
            let v = if has_values { device.alloc(dtype, sizes, Tag::KvCache, v)? } else { k.clone() };
            Ok([k, v])
        };
        let geometry = |layer| {
            let window = attention.window(layer);
            let capacity = window.map_or(context, |window| {
                // The first query of a chunk sees its window, all others of the chunk come after it.
                let ahead = settings.prompt_chunk_tokens.max(settings.drafted_tokens.saturating_add(1));
                context.min(window.saturating_add(ahead.max(1) - 1))
            });
            Geometry { capacity, window }
        };
        let layers: Vec<Geometry> = spec.layers().map(geometry).collect();
        let pages = match settings.pages {
            Some(count) if tier == Tier::Device => Some(Pages::new(settings.page_tokens(spec), count)?),
            _ => None,
        };
        let (mut resident, mut pooled, mut parcels) =
            (FxHashMap::default(), FxHashMap::default(), FxHashMap::default());
        for (layer, Geometry { capacity, window }) in (0..).zip(&layers) {
            let sizes = [*capacity, columns];
            device.enter(Phase::Setup, Some(layer));
            tiers.enter(Phase::Setup, Some(layer));
            if let (Some(pages), None) = (&pages, window) {
                pooled.insert(layer, new(&[pages.rows(), columns], ["k.pages", "v.pages"])?);
                continue;
            }
            let sequences = u32::try_from(sequences.max(1)).unwrap_or(u32::MAX);
            for place in (0..sequences).map(|sequence| (layer, sequence)) {
                if tier == Tier::Device {
                    resident.insert(place, new(&sizes, ["k", "v"])?);
                    continue;
                }
                let mut parcel = Parcel::new();
                for part in 0..1 + usize::from(has_values) {
                    parcel.add(part, dtype, &sizes);
                }
                parcel.settle(tiers, tier, Tag::KvCache, "kv")?;
                parcels.insert(place, parcel);
            }
        }
        device.enter(Phase::Setup, None);
        let away = Parcels::of(device, tiers, parcels, BUFFERS, "kv.staging")?;
        let row_bytes = dtype.bytes_for(columns).unwrap_or(0);
        let new_rows = Vec::new();
        Ok(KvCache {
            device,
            layers,
            head_dim,
            has_values,
            row_bytes,
            resident,
            pooled,
            pages,
            new_rows,
            away,
        })
    }

    /// Whether there are pages for sequences that become so long.
    pub fn has_pages_for(&self, lengths: impl Iterator<Item = (u32, u64)> + Clone) -> bool {
        self.pages.as_ref().is_none_or(|pages| pages.has_for(lengths))
    }

    /// Refuses runs that there are no pages for, all of them together.
    pub fn check_pages(&self, lengths: impl Iterator<Item = (u32, u64)> + Clone) -> Result<(), StepError> {
        self.pages.as_ref().map_or(Ok(()), |pages| pages.check(lengths))
    }

    /// Takes the pages that a sequence of so many tokens needs beyond its own.
    pub fn reserve(&mut self, sequence: u32, length: u64) -> Result<(), StepError> {
        self.pages.as_mut().map_or(Ok(()), |pages| pages.reserve(sequence, length))
    }

    /// Gives back the pages behind so many tokens of a sequence.
    pub fn keep(&mut self, sequence: u32, length: u64) {
        if let Some(pages) = &mut self.pages {
            pages.keep(sequence, length);
        }
    }

    /// Whether a query at `position` finds all that it sees, after `written` positions have been written.
    pub fn holds(&self, position: u64, written: u64) -> bool {
        self.layers.iter().all(|layer| {
            let first_seen = layer.window.map_or(0, |window| (position + 1).saturating_sub(window));
            first_seen >= written.saturating_sub(layer.capacity).min(position)
        })
    }

    /// Positions of a sequence that a layer holds, counted from the first of the layers that there are.
    fn capacity(&self, layer: u32) -> u64 {
        self.layers.get(layer as usize).map_or(0, |layer| layer.capacity)
    }

    /// Prepares for a pass of these runs through all layers. What is refused has taken no page.
    pub fn begin(&mut self, runs: &[Run]) -> Result<(), StepError> {
        self.check_pages(runs.iter().map(|run| (run.sequence, run.past + run.tokens)))?;
        if runs.iter().any(|run| run.tokens > 0 && !self.holds(run.past, run.past + run.tokens)) {
            let what = "a pass has more tokens of a sequence than its windows have room for";
            return Err(StepError::Invariant { what });
        }
        if let Some(pages) = &mut self.pages {
            self.new_rows.clear();
            for run in runs {
                pages.reserve(run.sequence, run.past + run.tokens)?;
                self.new_rows.extend(pages.rows_of(run.sequence, run.past..run.past + run.tokens));
            }
        }
        for (layer, geometry) in (0..).zip(&self.layers) {
            for Run { sequence, past, tokens, .. } in runs.iter().copied() {
                let Some(parcel) = self.away.get_mut((layer, sequence)) else { continue };
                let row_bytes = self.row_bytes;
                // A ring may hold them anywhere.
                let ring = past + tokens > geometry.capacity;
                let rows = |rows: Range<u64>| -> Vec<Range<u64>> {
                    let starts = parcel.tensors().iter().map(|placed| placed.offset);
                    starts.map(|start| start + rows.start * row_bytes..start + rows.end * row_bytes).collect()
                };
                let all = 0..geometry.capacity;
                let read = rows(if ring { all.clone() } else { 0..past });
                let changed = rows(if ring { all } else { past..past + tokens });
                parcel.extents = Some(Extents { read, changed });
            }
        }
        let layers = 0..self.layers.len() as u32;
        let places = layers.flat_map(|layer| runs.iter().map(move |run| (layer, run.sequence)));
        self.away.announce(places.map(Use::of))
    }

    /// Attention of a layer, as wide as the queries, with the log-sum-exps of the runs: the keys and values of every run are put into the
    /// cache, and its queries see all that is there of its sequence, beside the sinks of heads where there are any.
    pub fn attend(
        &mut self,
        ctx: &Context<'_>,
        layer: u32,
        runs: &[Run],
        (qkv, sinks): (&Qkv, Option<&Tensor>),
    ) -> Result<(Tensor, Vec<Tensor>), StepError> {
        let out = block::attended(ctx, qkv)?;
        if let (Some(pages), Some(pools)) = (&self.pages, self.pooled.get(&layer)) {
            let lse = self.attend_pages(ctx, pages, pools, runs, qkv, &out)?;
            let Some(sinks) = sinks else { return Ok((out, vec![lse])) };
            // Queries of one length are as sequences beside each other.
            let mut lengths = runs.iter().copied().flat_map(Run::parts).map(|(q_len, _)| q_len).peekable();
            let mut first = 0;
            while let Some(q_len) = lengths.next() {
                let batch = 1 + std::iter::from_fn(|| lengths.next_if_eq(&q_len)).count() as u64;
                let own = |x: &Tensor| rows(x, first, first + batch * q_len);
                let of_runs = reshaped(&own(&lse)?, &[batch, ctx.attention.heads, q_len])?;
                let shape = AttentionShape { batch, q_len, ..ctx.attention };
                block::apply_sinks(ctx, Some(sinks), &own(&out)?, &of_runs, None, shape)?;
                first += batch * q_len;
            }
            return Ok((out, vec![lse]));
        }
        let (mut first, mut sums) = (0, Vec::with_capacity(runs.len()));
        for run in runs {
            let own = |x: &Tensor| rows(x, first, first + run.tokens);
            let (k, v) = self.write(layer, *run, &own(&qkv.k)?, &own(&qkv.v)?)?;
            let kv_capacity = self.capacity(layer);
            for (q_len, kv_len) in run.parts() {
                let own = |x: &Tensor| rows(x, first, first + q_len);
                let shape = AttentionShape { q_len, kv_len, kv_capacity, ..ctx.attention };
                let (lse, _) = block::attend_into(ctx, [&own(&qkv.q)?, &k, &v], sinks, &own(&out)?, shape)?;
                sums.push(lse);
                first += q_len;
            }
            drop((k, v));
            self.leave((layer, run.sequence))?;
        }
        Ok((out, sums))
    }

    /// Puts the keys and values of every run into the cache of a layer, and attends to nothing.
    pub fn put(&mut self, layer: u32, runs: &[Run], qkv: &Qkv) -> Result<(), StepError> {
        if let (Some(_), Some([k, v])) = (&self.pages, self.pooled.get(&layer)) {
            return self.write_rows([k, v], qkv);
        }
        let mut first = 0;
        for run in runs {
            let own = |x: &Tensor| rows(x, first, first + run.tokens);
            drop(self.write(layer, *run, &own(&qkv.k)?, &own(&qkv.v)?)?);
            self.leave((layer, run.sequence))?;
            first += run.tokens;
        }
        Ok(())
    }

    /// [`attend`](Self::attend) of a layer whose sequences share pages: all runs at once.
    fn attend_pages(
        &self,
        ctx: &Context<'_>,
        pages: &Pages,
        [k, v]: &[Tensor; 2],
        runs: &[Run],
        qkv: &Qkv,
        out: &Tensor,
    ) -> Result<Tensor, StepError> {
        let device = self.device;
        self.write_rows([k, v], qkv)?;
        let parts = runs.iter().flat_map(|run| run.parts().map(|part| (run.sequence, part)));
        let paged: Vec<PagedRun<'_>> = parts
            .map(|(sequence, (q_len, kv_len))| PagedRun { q_len, kv_len, pages: pages.of(sequence) })
            .collect();
        let lse = device.alloc(DType::F32, &[qkv.q.rows(), ctx.attention.heads], Tag::Attention, "lse")?;
        device.run(Attention::Paged {
            q: &qkv.q,
            k,
            v,
            out,
            lse: &lse,
            runs: &paged,
            page: pages.tokens(),
            shape: ctx.attention,
            compute: ctx.compute,
        })?;
        Ok(lse)
    }

    /// Puts the keys and values of all runs in the pages of a layer.
    fn write_rows(&self, [k, v]: [&Tensor; 2], qkv: &Qkv) -> Result<(), StepError> {
        for (x, cache) in self.written([(&qkv.k, k), (&qkv.v, v)]) {
            let (rows, head_dim) = (&self.new_rows, self.head_dim);
            self.device.run(Attention::WriteRows { x, cache, rows, head_dim })?;
        }
        Ok(())
    }

    /// What of new keys and values is written.
    fn written<T>(&self, [keys, values]: [T; 2]) -> impl Iterator<Item = T> + use<T> {
        std::iter::once(keys).chain(self.has_values.then_some(values))
    }

    /// Puts keys and values `[N, kv_heads * D]` of a run in their rows of a layer, and gives back all that it holds,
    /// `[capacity, kv_heads * D']`. To be left by [`leave`](Self::leave).
    fn write(
        &mut self,
        layer: u32,
        run: Run,
        keys: &Tensor,
        values: &Tensor,
    ) -> Result<(Tensor, Tensor), StepError> {
        let missing = StepError::MissingWeight { block: BlockId::Layer(layer), role: Role::KProj };
        let place = (layer, run.sequence);
        let [k, v] = match self.resident.get(&place) {
            Some(tensors) => tensors.clone(),
            None => {
                let mut views = self.away.gather(place)?.into_iter().map(|(_, tensor)| tensor);
                match (views.next(), views.next()) {
                    (Some(k), Some(v)) => [k, v],
                    (Some(k), None) if !self.has_values => [k.clone(), k],
                    _ => return Err(missing),
                }
            }
        };
        for (x, cache) in self.written([(keys, &k), (values, &v)]) {
            self.device.run(Attention::WriteCache { x, cache, first: run.past, head_dim: self.head_dim })?;
        }
        Ok((k, v))
    }

    /// Done with a layer of a sequence, whose tensors are gone.
    fn leave(&mut self, place: Place) -> Result<(), StepError> {
        self.away.release(place, true);
        self.away.advance()
    }

    /// Waits until everything that was written is where it lives.
    pub fn settle(&mut self) -> Result<(), StepError> {
        self.away.flush()
    }
}

#[cfg(test)]
mod tests {
    use plimsoll_device::{DType, Dry, Transferred};
    use plimsoll_model::SlidingWindow;

    use super::*;
    use crate::common::llama;
    use crate::settings::Precision;

    /// Five layers of windows of nine positions, of which passes of up to eight leave 9 + 8 - 1; keys and values of 1 KiB each.
    #[test]
    fn a_pass_moves_what_comes_before_it_and_what_it_writes() {
        let moved = |past, n| {
            let (dry, tiers) = (Dry::new(), Arc::new(LowerTiers::dry()));
            let mut spec = ModelSpec { num_layers: 5, ..llama() };
            spec.attention.head_dim = 128;
            spec.attention.sliding_window = Some(SlidingWindow { size: 9, layers: vec![true; 5] });
            let settings = DecodeSettings {
                precision: Precision::F32,
                cache: DType::F32,
                cache_tier: Tier::Disk,
                context: 60,
                prompt_chunk_tokens: 8,
                sequences: 2,
                pages: None,
                drafted_tokens: 0,
            };
            let mut cache = KvCache::new(&dry, &spec, &settings, None, &tiers).unwrap();
            let run = Run { sequence: 1, past, tokens: n, singly: false };
            cache.begin(&[run]).unwrap();
            for layer in 0..5 {
                let new = dry.alloc(DType::F32, &[n, 256], Tag::Activations, "test").unwrap();
                drop(cache.write(layer, run, &new, &new).unwrap());
                cache.leave((layer, 1)).unwrap();
            }
            cache.settle().unwrap();
            let Transferred { read, written, .. } = dry.moved();
            (read / (5 * 2 * 1024), written / (5 * 2 * 1024))
        };
        assert_eq!(moved(0, 8), (0, 8));
        assert_eq!(moved(8, 7), (8, 7));
        assert_eq!(moved(8, 8), (8, 8));
        // From here on a position may lie anywhere.
        assert_eq!(moved(9, 8), (16, 16));
        assert_eq!(moved(40, 1), (16, 16));
    }
}
