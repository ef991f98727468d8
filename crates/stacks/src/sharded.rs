//! One rank of several that share a model: what it holds of weights, gradients and states, and what it gathers and reduces when.
//!
//! Follows `torch/distributed/fsdp/_flat_param.py` and `_runtime_utils.py` (FSDP1), `torch/distributed/fsdp/_fully_shard` (FSDP2), and
//! `deepspeed/runtime/zero/stage_1_and_2.py`, `stage3.py` and `partition_parameters.py`. A unit is a block, as their wrapping policies have
//! it; embeddings, the last norm and the head are the root unit, which stays gathered from the forward pass to the end of the backward pass.
//! What a step computes is left to `model`. Messages take no time here: a rank's memory does not depend on what others send.

mod quantised;
mod sizes;
mod unit;
mod wrap;

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use crate::eager::{Tensor, Torch};
use crate::estimate::Kind;
use crate::model::Decoder;
use crate::run::{Autocast, Quantization, Run, Sharding, TorchType};
use sizes::Sizes;
use unit::Unit;

/// Elements of DeepSpeed's reduction bucket where its file says nothing (`reduce_bucket_size`).
const REDUCE_BUCKET: u64 = 500_000_000;

/// Elements that stage 3 updates at a time (`sub_group_size`).
const SUB_GROUP: u64 = 1_000_000_000;

/// Parameters that are used again within so many elements stay gathered (`stage3_max_reuse_distance`).
const REUSE_DISTANCE: u64 = 1_000_000_000;

/// A rank's share of a model.
pub(crate) struct Shards {
    sharding: Sharding,
    units: Vec<Unit>,
    /// Of 4-bit weights, which every rank has of all.
    _scales: Vec<Tensor>,
    /// What lives from the beginning to the end: buckets, partitions of gradients.
    kept: RefCell<Vec<Tensor>>,
    /// The unit that is still gathered behind the one in use.
    last: Cell<Option<usize>>,
    /// Whether gradients go to the host as they come.
    gradients_away: bool,
    /// Elements of DeepSpeed's bucket.
    bucket: u64,
    /// How many.
    buckets: u64,
}

/// The run as the model of a rank sees it: where a wrapper casts weights, no autocast does.
pub(crate) fn inner(run: &Run) -> Run {
    let Some(Autocast { to, .. }) = run.autocast else { return run.clone() };
    match run.sharding {
        Sharding::None | Sharding::FsdpWhole => run.clone(),
        _ => Run { weights: to, autocast: None, ..run.clone() },
    }
}

impl Shards {
    /// The shares of a rank, and the model whose parameters are views of what is gathered; `None` where each rank has all.
    pub fn load(torch: &Torch, run: &Run) -> Option<(Decoder, Rc<Shards>)> {
        if run.sharding == Sharding::None {
            return None;
        }
        let whole = matches!(run.sharding, Sharding::Zero { stage: 1 | 2, .. });
        let model = inner(run);
        let mut decoder = match whole {
            true => Decoder::load(torch, &model),
            false => torch.on_meta(|| Decoder::load(torch, &model)),
        };
        let sizes = Sizes::of(run, &model);
        let scales = match run.quantization {
            Some(Quantization::FourBit { double, .. }) if !whole => {
                quantised::quantise(torch, &sizes.four_bit, double, model.weights)
            }
            _ => Vec::new(),
        };
        let layers = decoder.trained_by_block();
        let mut units = Vec::with_capacity(layers.len());
        for (place, trained) in layers.into_iter().enumerate() {
            units.push(Unit::new(torch, &sizes, place, trained));
        }
        let offload = sizes.offload;
        let shards = Rc::new(Shards {
            sharding: run.sharding,
            units,
            _scales: scales,
            kept: RefCell::default(),
            last: Cell::new(None),
            gradients_away: offload.optimizer,
            // What transformers makes of "auto" at stage 3 (`trainer_config_finalize`).
            buckets: run.reduce_buckets,
            bucket: match run.sharding {
                _ if run.reduce_bucket.is_some() => run.reduce_bucket.unwrap_or_default(),
                Sharding::Zero { stage: 3, .. } => run.model.hidden_size.saturating_pow(2),
                _ => REDUCE_BUCKET,
            },
        });
        decoder.shards = Some(Rc::clone(&shards));
        Some((decoder, shards))
    }

    /// What the optimizer updates: this rank's parts.
    pub fn parameters(&self) -> Vec<Tensor> {
        self.units.iter().flat_map(Unit::parameters).collect()
    }

    /// The root unit is the last in the list.
    fn root(&self) -> usize {
        self.units.len() - 1
    }

    /// Before a forward pass.
    pub fn begin(&self, torch: &Torch) {
        self.units[self.root()].gather(torch);
    }

    /// Before the first backward pass of a step: DeepSpeed's bucket.
    pub fn before_backward(&self, torch: &Torch) {
        // The root's pre-backward hook gathers the unit behind whose forward pass its own ended.
        if self.prefetches() && self.units.len() > 1 {
            self.units[self.root() - 1].gather(torch);
        }
        let Sharding::Zero { .. } = self.sharding else { return };
        let mut kept = self.kept.borrow_mut();
        if kept.is_empty() {
            let trained: u64 = self.units.iter().map(Unit::trained_elements).sum();
            let elements = self.bucket.min(trained);
            for _ in 0..self.buckets {
                kept.push(torch.of_kind(Kind::Communication, || {
                    torch.empty(&[elements], self.units[0].gradient_type(), "ipg_buffer")
                }));
            }
        }
    }

    /// A block's input, on its way into the block.
    pub fn enter(self: &Rc<Self>, torch: &Torch, layer: usize, x: &Tensor) -> Tensor {
        self.fetch(torch, layer);
        let shards = Rc::clone(self);
        torch.with_backward_hook("PostBackward", x, move |torch| shards.done(torch, layer))
    }

    /// A block's output, on its way out.
    pub fn leave(self: &Rc<Self>, torch: &Torch, layer: usize, x: &Tensor) -> Tensor {
        if !self.stays(layer) {
            self.let_go(torch, layer);
        }
        let shards = Rc::clone(self);
        torch.with_backward_hook("PreBackward", x, move |torch| {
            shards.fetch(torch, layer);
            torch.memory().synchronize();
            // The next unit of the backward pass is gathered before this one computes.
            if layer > 0 && shards.prefetches() && !shards.units[layer].trains_parts() {
                shards.units[layer - 1].gather(torch);
            }
        })
    }

    fn prefetches(&self) -> bool {
        matches!(self.sharding, Sharding::Fsdp1 { .. } | Sharding::Fsdp2 { .. })
    }

    /// Gathers a unit. The one before it is let go only now: the host is ahead of the device by a unit.
    fn fetch(&self, torch: &Torch, layer: usize) {
        self.units[layer].gather(torch);
        if let Some(last) = self.last.take().filter(|last| *last != layer) {
            self.units[last].release(torch);
        }
    }

    fn let_go(&self, torch: &Torch, layer: usize) {
        match self.sharding {
            Sharding::Fsdp2 { .. } => {
                if let Some(before) = self.last.replace(Some(layer)).filter(|before| *before != layer) {
                    self.units[before].release(torch);
                }
            }
            _ => self.units[layer].release(torch),
        }
    }

    /// Whether a unit's weights stay from the forward pass to the backward pass.
    fn stays(&self, layer: usize) -> bool {
        match self.sharding {
            Sharding::Fsdp1 { keep_gathered, .. } | Sharding::Fsdp2 { keep_gathered, .. } => keep_gathered,
            Sharding::Zero { stage: 3, .. } => {
                // Twice what comes behind it lies between its two uses.
                let behind: u64 = self.units[layer + 1..].iter().map(Unit::elements).sum();
                2 * behind <= REUSE_DISTANCE
            }
            _ => true,
        }
    }

    /// A unit's backward pass has ended: its gradients are reduced, its weights let go.
    fn done(&self, torch: &Torch, layer: usize) {
        // Where each adapter is a unit within a block's, as PEFT's wrapping policy has it (`fsdp_auto_wrap_policy`), the unit before is
        // gathered in the backward pass of the block's first adapter, which is almost its end.
        if layer > 0 && self.units[layer].trains_parts() {
            self.units[layer - 1].gather(torch);
        }
        self.units[layer].reduce(torch, self.gradients_away);
        self.units[layer].release(torch);
    }

    /// After a backward pass: what no hook has seen, and the root.
    pub fn finish(&self, torch: &Torch) {
        for unit in &self.units {
            unit.reduce(torch, self.gradients_away);
            unit.release(torch);
        }
        torch.memory().synchronize();
        self.last.set(None);
        if let Sharding::Zero { stage: 1 | 2, .. } = self.sharding {
            self.kept.borrow_mut().clear();
        }
    }

    /// What the step has besides for a while: DeepSpeed flattens a partition's gradients and makes them f32.
    pub fn step(&self, torch: &Torch, work: impl FnOnce()) {
        let Sharding::Zero { offload, .. } = self.sharding else { return work() };
        let all: u64 = self.units.iter().map(Unit::shard_elements).sum();
        // Stage 3 goes from one sub-group to the next (`_prepare_fp32_grad_for_sub_group`, `release_sub_group`).
        let elements = match self.sharding {
            Sharding::Zero { stage: 3, .. } => all.min(SUB_GROUP),
            _ => all,
        };
        let f32_too = self.units[0].gradient_type() != TorchType::F32 && !offload.optimizer;
        let flat = torch.of_kind(Kind::Communication, || {
            let dtype = self.units[0].gradient_type();
            (!offload.optimizer).then(|| torch.empty(&[elements], dtype, "flatten"))
        });
        let upcast = f32_too
            .then(|| torch.of_kind(Kind::Gradients, || torch.empty(&[elements], TorchType::F32, "_to_copy")));
        drop(flat);
        work();
        drop(upcast);
    }

    /// A full state dict: one unit is whole at a time.
    pub fn gather_each(&self, torch: &Torch) {
        for unit in &self.units {
            unit.gather(torch);
            unit.release(torch);
        }
    }

    /// `zero_grad(set_to_none=True)`
    pub fn zero_grad(&self) {
        self.units.iter().for_each(Unit::zero_grad);
    }
}

#[cfg(test)]
mod tests;
