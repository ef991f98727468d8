//! A unit: weights that are gathered, reduced and let go together.

use std::cell::RefCell;

use super::sizes::Sizes;
use super::wrap::{flatten, is_wrapped};
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
pub(super) const NCCL: Stream = 4;

/// One unit on one rank.
pub(super) struct Unit {
    sharding: Sharding,
    ranks: u64,
    /// Its trained parameters as the model has them.
    trained: Vec<Tensor>,
    /// This rank's parts of them, which the optimizer updates.
    shares: Vec<Tensor>,
    /// What else is on the device all the time.
    kept: Vec<Tensor>,
    /// Bytes of what is frozen and shared, and elements.
    frozen: [u64; 2],
    gathered_type: TorchType,
    on_host: bool,
    gathered: RefCell<Vec<Tensor>>,
}

impl Unit {
    /// The shares of a rank.
    pub fn new(torch: &Torch, sizes: &Sizes, place: usize, trained: Vec<Tensor>) -> Unit {
        let [frozen, own, frozen_elements] = sizes.frozen(place);
        let Sizes { ranks, sharding, offload, .. } = *sizes;
        let is_zero = matches!(sharding, Sharding::Zero { .. });
        let is_shared = !matches!(sharding, Sharding::Zero { stage: 1 | 2, .. });
        let stays = sharding == Sharding::FsdpWhole;
        let mut unit = Unit {
            sharding,
            ranks,
            trained,
            shares: Vec::new(),
            kept: Vec::new(),
            frozen: [frozen, frozen_elements],
            gathered_type: sizes.gathered,
            on_host: offload.optimizer || offload.parameters && !is_zero,
            gathered: RefCell::default(),
        };
        if unit.trains_parts() {
            unit.wrap_parts(torch, sizes);
        }
        let tables = sizes.tables(place);
        let mut wrapped = None;
        if is_wrapped(sharding) {
            let (whole, tables) = flatten(torch, sizes.tensors(place), tables, sizes.shard);
            unit.kept.extend(tables);
            wrapped = Some(whole);
        } else {
            unit.kept.extend(tables.iter().flat_map(|tables| tables.make(torch)));
        }
        let of_rank = |elements: u64| elements.div_ceil(ranks);
        let weights = |bytes: u64, name| {
            let made = torch.of_kind(Kind::Weights, || torch.empty(&[bytes], TorchType::U8, name));
            (bytes > 0).then_some(made)
        };
        let mut host = 0;
        if is_shared && offload.parameters {
            host += of_rank(frozen);
            wrapped.iter_mut().for_each(|whole| whole.cut(torch, of_rank(frozen)));
        } else if is_shared && !stays {
            unit.kept.extend(weights(of_rank(frozen), "flat_param"));
        }
        if is_shared {
            unit.kept.extend(weights(own, "quant_state"));
        }
        let elements = unit.trained_elements();
        // DeepSpeed's 16-bit partition, beside the f32 one below.
        if is_shared && is_zero {
            let half = of_rank(elements) * sizes.gathered.bytes();
            match offload.parameters {
                true => host += half,
                false => unit.kept.extend(weights(half, "partition")),
            }
        }
        // FSDP1 and DeepSpeed have a flat share of a unit; FSDP2 shares parameter by parameter.
        match sharding {
            Sharding::Fsdp2 { .. } => {
                let each: Vec<u64> = unit.trained.iter().map(|tensor| tensor.shape().elements()).collect();
                let shares = each.into_iter().enumerate();
                let shares = shares.map(|(at, elements)| unit.share(torch, sizes, at, of_rank(elements)));
                unit.shares = shares.collect();
            }
            _ if elements == 0 || stays || unit.trains_parts() => {}
            _ => {
                let share = unit.share(torch, sizes, 0, of_rank(elements));
                let away = wrapped.as_mut().filter(|_| unit.on_host);
                away.into_iter().for_each(|whole| whole.cut(torch, share.bytes()));
                unit.shares.push(share);
            }
        }
        if unit.on_host {
            // A pinned share, its gradient, and two states: the host's allocator rounds each up to a power of two.
            let each = unit.shares.iter().map(|share| share.bytes().next_power_of_two());
            host += each.sum::<u64>() * 4;
        }
        let flat = wrapped.and_then(|whole| whole.end(torch, stays));
        match unit.trains_parts() || elements == 0 {
            true => unit.kept.extend(flat),
            false => unit.shares.extend(flat.map(|flat| flat.as_leaf())),
        }
        if host > 0 {
            torch.memory().host(host.cast_signed());
        }
        unit
    }

    /// FSDP1 wraps units within a block before the block: each adapter's matrix (PEFT's `fsdp_auto_wrap_policy`, the policy of
    /// llama-recipes).
    fn wrap_parts(&mut self, torch: &Torch, sizes: &Sizes) {
        let stays = self.sharding == Sharding::FsdpWhole;
        for at in 0..self.trained.len() {
            let elements = self.trained[at].shape().elements();
            let of_rank = elements.div_ceil(self.ranks);
            let dtype = self.share_type(sizes, at);
            let (mut whole, _) = flatten(torch, &[elements * dtype.bytes()], None, dtype);
            let share = (!stays).then(|| self.share(torch, sizes, at, of_rank));
            if self.on_host {
                whole.cut(torch, of_rank * dtype.bytes());
            }
            let flat = whole.end(torch, stays).map(|flat| flat.as_leaf());
            self.shares.extend(share.or(flat));
        }
    }

    fn share_type(&self, sizes: &Sizes, at: usize) -> TorchType {
        match self.sharding {
            Sharding::Zero { .. } => TorchType::F32,
            _ if sizes.shard != sizes.gathered => sizes.shard,
            _ => self.trained.get(at).map_or(sizes.shard, Tensor::dtype),
        }
    }

    /// A share of so many elements of a trained parameter, or of all of them.
    fn share(&self, torch: &Torch, sizes: &Sizes, at: usize, elements: u64) -> Tensor {
        let make = || torch.empty(&[elements], self.share_type(sizes, at), "shard").as_leaf();
        match (self.on_host, self.sharding) {
            (true, _) => torch.on_meta(make),
            (false, Sharding::Zero { .. }) => torch.of_kind(Kind::OptimizerStates, make),
            (false, _) => torch.of_kind(Kind::Weights, make),
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

    /// Whether what is trained of it are units within it: FSDP1's of adapters.
    pub fn trains_parts(&self) -> bool {
        is_wrapped(self.sharding) && self.frozen[0] > 0
    }

    /// Gathers it, if it is not.
    pub fn gather(&self, torch: &Torch) {
        let mut gathered = self.gathered.borrow_mut();
        let whole = matches!(self.sharding, Sharding::FsdpWhole | Sharding::Zero { stage: 1 | 2, .. });
        if whole || !gathered.is_empty() {
            return;
        }
        let trained: u64 = self.trained.iter().map(Tensor::bytes).sum();
        let bytes = self.frozen[0] + trained;
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
                // The block's own flat parameter, and those of its adapters.
                let flats = match self.trains_parts() {
                    true => {
                        [self.frozen[0]].into_iter().chain(self.trained.iter().map(Tensor::bytes)).collect()
                    }
                    false => vec![bytes],
                };
                for bytes in flats {
                    let share =
                        (self.on_host || casts).then(|| on(COPIES, bytes.div_ceil(self.ranks), "mp_shard"));
                    // The host waits for the event of the unit before last (`limit_all_gathers`), once the share is on its way.
                    torch.memory().synchronize();
                    gathered.push(flat(bytes.next_multiple_of(self.ranks), "all_gather"));
                    if let Some(share) = share {
                        torch.memory().record_stream(share.storage(), NCCL);
                    }
                }
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
        if self.sharding == Sharding::FsdpWhole {
            return self.keep_gradients(torch);
        }
        let bytes: u64 =
            self.trained.iter().filter(|tensor| tensor.grad().is_some()).map(Tensor::bytes).sum();
        let flat = |bytes: u64, name| {
            torch.of_kind(Kind::Communication, || torch.empty(&[bytes], TorchType::U8, name))
        };
        // FSDP's copy of a unit's gradients, one adapter at a time where each is a unit; DeepSpeed copies into its bucket.
        let input = match self.sharding {
            Sharding::Zero { .. } => None,
            _ if self.trains_parts() => {
                let there = self.trained.iter().filter(|tensor| tensor.grad().is_some());
                there.for_each(|tensor| drop(flat(tensor.bytes(), "reduce_scatter_input")));
                None
            }
            _ => Some(flat(bytes, "reduce_scatter_input")),
        };
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

    /// Gradients of a flat parameter that is whole: those of its parts together, or of the part that it is.
    fn keep_gradients(&self, torch: &Torch) {
        if self.trains_parts() {
            for (share, part) in self.shares.iter().zip(&self.trained) {
                part.take_grad().into_iter().for_each(|grad| share.accumulate_grad(grad));
            }
            return;
        }
        let flat = torch.of_kind(Kind::Gradients, || {
            torch.empty(&[self.trained_elements()], self.gradient_type(), "split_with_sizes_backward")
        });
        self.trained.iter().for_each(|tensor| drop(tensor.take_grad()));
        self.shares.iter().for_each(|share| share.accumulate_grad(flat.clone()));
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
