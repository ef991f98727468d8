//! A unit: weights that are gathered, reduced and let go together.

use std::cell::RefCell;

use super::sizes::Sizes;
use crate::allocator::Stream;
use crate::eager::{Tensor, Torch};
use crate::estimate::Kind;
use crate::run::{Sharding, TorchType};

/// The stream of gathers (`unshard_stream`, `all_gather_stream`, DeepSpeed's), that of reductions (`post_backward_stream`,
/// `reduce_scatter_stream`), and that of copies from the host and casts (`pre_unshard_stream`).
const GATHERS: Stream = 1;
const REDUCTIONS: Stream = 2;
const COPIES: Stream = 3;
/// NCCL's own, on which its buffers are recorded (`ProcessGroupNCCL::collective`).
const NCCL: Stream = 4;

/// One unit on one rank.
pub(super) struct Unit {
    sharding: Sharding,
    ranks: u64,
    /// Its trained parameters as the model has them.
    trained: Vec<Tensor>,
    /// This rank's parts of them, which the optimizer updates.
    shares: Vec<Tensor>,
    /// What else is on the device all the time.
    _kept: Vec<Tensor>,
    /// Bytes of what is frozen and shared, and elements.
    frozen: [u64; 2],
    gathered_type: TorchType,
    on_host: bool,
    gathered: RefCell<Vec<Tensor>>,
}

/// Bytes from which a group of tensors is broadcast (`PARAM_BROADCAST_BUCKET_SIZE`).
const BROADCAST: u64 = 250 << 20;

/// What FSDP1 does with a unit's tensors when it wraps them: they come to the device one by one, are broadcast from rank 0 in flat groups,
/// and copied into a flat parameter (`_move_module_to_device`, `_sync_module_params_and_buffers`, `flatten_tensors`). A rank's share is a
/// copy of a part of it. The caller drops the flat one.
pub(super) fn flatten(torch: &Torch, tensors: &[u64]) -> Tensor {
    let empty = |kind, bytes: u64, name| torch.of_kind(kind, || torch.empty(&[bytes], TorchType::U8, name));
    let moved: Vec<Tensor> = tensors.iter().map(|bytes| empty(Kind::Weights, *bytes, "_to_copy")).collect();
    let mut groups = vec![0];
    for bytes in tensors {
        match groups.last_mut() {
            Some(group) if *group < BROADCAST => *group += bytes,
            _ => groups.push(*bytes),
        }
    }
    // The host does not wait for a broadcast: its buffers cannot be used again before the flat parameter is made.
    let group = |bytes| {
        let group = empty(Kind::Communication, bytes, "flatten_dense_tensors");
        torch.memory().record_stream(group.storage(), NCCL);
        group
    };
    drop(groups.into_iter().map(group).collect::<Vec<Tensor>>());
    let flat = empty(Kind::Weights, tensors.iter().sum(), "cat");
    drop(moved);
    // The next unit's tensors come from pageable memory, for which the host waits.
    torch.memory().synchronize();
    flat
}

impl Unit {
    /// The shares of a rank.
    pub fn new(torch: &Torch, sizes: &Sizes, place: usize, trained: Vec<Tensor>) -> Unit {
        let [frozen, own, frozen_elements] = sizes.frozen(place);
        let Sizes { ranks, sharding, offload, .. } = *sizes;
        let whole = matches!(sharding, Sharding::Zero { stage: 1 | 2, .. });
        let is_zero = matches!(sharding, Sharding::Zero { .. });
        let elements: u64 = trained.iter().map(|tensor| tensor.shape().elements()).sum();
        let flat = matches!(sharding, Sharding::Fsdp1 { .. }).then(|| flatten(torch, sizes.tensors(place)));
        let mut kept = Vec::new();
        let mut keep = |bytes: u64, name| {
            if bytes > 0 {
                kept.push(torch.of_kind(Kind::Weights, || torch.empty(&[bytes], TorchType::U8, name)));
            }
        };
        let mut host = 0;
        if !whole {
            if offload.parameters {
                host += frozen.div_ceil(ranks);
            } else {
                keep(frozen.div_ceil(ranks), "flat_param");
            }
            keep(own, "quant_state");
            // DeepSpeed's 16-bit partition, beside the f32 one below.
            if is_zero {
                let half = elements.div_ceil(ranks) * sizes.gathered.bytes();
                if offload.parameters { host += half } else { keep(half, "partition") }
            }
        }
        // FSDP1 has a flat share of a unit, and each adapter's matrix is a unit within the block's (PEFT's `fsdp_auto_wrap_policy`, the
        // policy of llama-recipes); FSDP2 and DeepSpeed share parameter by parameter.
        let sizes_of_shares: Vec<u64> = match sharding {
            Sharding::Fsdp1 { .. } if elements > 0 && frozen_elements == 0 => vec![elements.div_ceil(ranks)],
            Sharding::Zero { .. } if elements > 0 => vec![elements.div_ceil(ranks)],
            _ => trained.iter().map(|tensor| tensor.shape().elements().div_ceil(ranks)).collect(),
        };
        let dtype = |at: usize| match sharding {
            Sharding::Zero { .. } => TorchType::F32,
            _ if sizes.shard != sizes.gathered => sizes.shard,
            _ => trained.get(at).map_or(sizes.shard, Tensor::dtype),
        };
        let on_host = offload.optimizer || offload.parameters && !is_zero;
        let share = |(at, elements): (usize, &u64)| {
            let make = || torch.empty(&[*elements], dtype(at), "shard").as_leaf();
            match on_host {
                true => torch.on_meta(make),
                false if is_zero => torch.of_kind(Kind::OptimizerStates, make),
                false => torch.of_kind(Kind::Weights, make),
            }
        };
        let shares: Vec<Tensor> = sizes_of_shares.iter().enumerate().map(share).collect();
        if on_host {
            // A pinned share, its gradient, and two states: the host's allocator rounds each up to a power of two.
            let each = shares.iter().map(|share| share.bytes().next_power_of_two());
            host += each.sum::<u64>() * 4;
        }
        drop(flat);
        if host > 0 {
            torch.memory().host(host.cast_signed());
        }
        Unit {
            sharding,
            ranks,
            trained,
            shares,
            _kept: kept,
            frozen: [frozen, frozen_elements],
            gathered_type: sizes.gathered,
            on_host,
            gathered: RefCell::default(),
        }
    }

    /// What the optimizer updates on the device.
    pub fn parameters(&self) -> Vec<Tensor> {
        if self.on_host { Vec::new() } else { self.shares.clone() }
    }

    /// Elements of all ranks.
    pub fn elements(&self) -> u64 {
        self.frozen[1] + self.trained_elements()
    }

    /// Trained elements of all ranks.
    pub fn trained_elements(&self) -> u64 {
        self.trained.iter().map(|tensor| tensor.shape().elements()).sum()
    }

    /// This rank's trained elements.
    pub fn shard_elements(&self) -> u64 {
        self.shares.iter().map(|share| share.shape().elements()).sum()
    }

    /// The type that gradients are reduced in.
    pub fn gradient_type(&self) -> TorchType {
        self.trained.first().map_or(self.gathered_type, Tensor::dtype)
    }

    /// Gathers it, if it is not.
    pub fn gather(&self, torch: &Torch) {
        let mut gathered = self.gathered.borrow_mut();
        let whole = matches!(self.sharding, Sharding::Zero { stage: 1 | 2, .. });
        if whole || !gathered.is_empty() {
            return;
        }
        let trained: u64 = self.trained.iter().map(Tensor::bytes).sum();
        let bytes = self.frozen[0] + trained;
        // Of FSDP1: the block's own flat parameter, and those of its adapters.
        let flats = match self.frozen[0] {
            0 => vec![bytes],
            frozen => [frozen].into_iter().chain(self.trained.iter().map(Tensor::bytes)).collect(),
        };
        let on = |stream: Stream, bytes: u64, name| {
            torch.memory().on_stream(stream, || {
                torch.of_kind(Kind::Communication, || torch.empty(&[bytes], TorchType::U8, name))
            })
        };
        let flat = |bytes: u64, name| on(GATHERS, bytes, name);
        match self.sharding {
            // A share on the host is copied to the device, or one of another type cast, and freed behind the exchange.
            Sharding::Fsdp1 { .. } => {
                let casts = self.shares.first().is_some_and(|share| share.dtype() != self.gradient_type());
                for bytes in flats {
                    let share =
                        (self.on_host || casts).then(|| on(COPIES, bytes.div_ceil(self.ranks), "mp_shard"));
                    gathered.push(flat(bytes.next_multiple_of(self.ranks), "all_gather"));
                    if let Some(share) = share {
                        torch.memory().record_stream(share.storage(), NCCL);
                    }
                }
                // The host has waited for the event of the unit before last (`limit_all_gathers`).
                torch.memory().synchronize();
            }
            // The output of the exchange, then a copy of each parameter out of it; the output is freed behind them.
            Sharding::Fsdp2 { .. } => {
                let input = flat(bytes.div_ceil(self.ranks), "all_gather_copy_in");
                let output = flat(bytes.next_multiple_of(self.ranks), "all_gather");
                drop(input);
                gathered.push(on(0, bytes, "split_with_sizes_copy"));
                drop(output);
            }
            Sharding::Zero { .. } => {
                let output = flat(bytes.next_multiple_of(self.ranks), "all_gather");
                gathered.push(flat(bytes, "cat"));
                drop(output);
            }
            Sharding::None | Sharding::FsdpWhole => {}
        }
    }

    /// Lets go what was gathered. The stream that computes has used what FSDP1 gathers on another.
    pub fn release(&self, torch: &Torch) {
        let gathered = self.gathered.take();
        if let Sharding::Fsdp1 { .. } = self.sharding {
            gathered.iter().for_each(|flat| torch.memory().record_stream(flat.storage(), 0));
        }
    }

    /// Reduces the gradients that there are, and keeps this rank's part; with `away`, on the host.
    pub fn reduce(&self, torch: &Torch, away: bool) {
        let there = self.trained.iter().any(|tensor| tensor.grad().is_some());
        if let Sharding::Zero { stage: 1, .. } = self.sharding {
            // All gradients stay until the step.
            return self.stand_in(torch, there);
        }
        if !there {
            return;
        }
        let bytes: u64 =
            self.trained.iter().filter(|tensor| tensor.grad().is_some()).map(Tensor::bytes).sum();
        let flat = |bytes: u64, name| {
            torch.of_kind(Kind::Communication, || torch.empty(&[bytes], TorchType::U8, name))
        };
        // FSDP's copy of a unit's gradients; DeepSpeed copies into its bucket.
        // One adapter at a time where each is a unit of its own.
        let of_parts = matches!(self.sharding, Sharding::Fsdp1 { .. }) && self.frozen[0] > 0;
        let input = match self.sharding {
            Sharding::Zero { .. } => None,
            _ if of_parts => None,
            _ => Some(flat(bytes, "reduce_scatter_input")),
        };
        if of_parts {
            let there = self.trained.iter().filter(|tensor| tensor.grad().is_some());
            there.for_each(|tensor| drop(flat(tensor.bytes(), "reduce_scatter_input")));
        }
        self.trained.iter().for_each(|tensor| drop(tensor.take_grad()));
        if away {
            return;
        }
        for share in &self.shares {
            let elements = share.shape().elements();
            let new = torch.memory().on_stream(REDUCTIONS, || {
                torch.of_kind(Kind::Gradients, || {
                    torch.empty(&[elements], self.gradient_type(), "reduce_scatter")
                })
            });
            share.accumulate_grad(new);
        }
        drop(input);
    }

    /// At stage 1 gradients are whole; the share's own appears in the step.
    fn stand_in(&self, torch: &Torch, there: bool) {
        if !there {
            return;
        }
        for share in self.shares.iter().filter(|share| share.grad().is_none()) {
            let empty = torch.on_meta(|| torch.empty(&[share.shape().elements()], TorchType::F32, "view"));
            share.accumulate_grad(empty);
        }
    }

    /// Takes all gradients away.
    pub fn zero_grad(&self) {
        self.trained.iter().chain(&self.shares).for_each(|tensor| drop(tensor.take_grad()));
    }
}
