//! What FSDP1 does with a unit's tensors when it wraps them.

use super::unit::NCCL;
use crate::eager::{Tensor, Torch};
use crate::estimate::Kind;
use crate::model::Tables;
use crate::run::{Sharding, TorchType};

/// Whether `FullyShardedDataParallel` makes flat parameters.
pub(super) fn is_wrapped(sharding: Sharding) -> bool {
    matches!(sharding, Sharding::FsdpWhole | Sharding::Fsdp1 { .. })
}

/// Bytes from which a group of tensors is broadcast (`PARAM_BROADCAST_BUCKET_SIZE`).
const BROADCAST: u64 = 250 << 20;

/// A unit before its share is cut: a rank's share is a copy of a part of the flat parameter, made while the tensors are still there as
/// they came.
pub(super) struct Whole {
    flat: Tensor,
    moved: Vec<Tensor>,
    /// What is cut here and then goes to the host.
    away: Vec<Tensor>,
}

/// Tensors of so many bytes come to the device one by one, buffers behind parameters, are broadcast from rank 0 in flat groups of a type,
/// buffers before parameters, and copied into a flat parameter (`_move_states_to_device`, `_sync_module_params_and_buffers`,
/// `flatten_tensors`). The buffers stay.
pub(super) fn flatten(
    torch: &Torch,
    tensors: &[u64],
    tables: Option<Tables>,
    dtype: TorchType,
) -> (Whole, Vec<Tensor>) {
    let empty = |kind, bytes: u64, name| torch.of_kind(kind, || torch.empty(&[bytes], TorchType::U8, name));
    let moved: Vec<Tensor> = tensors.iter().map(|bytes| empty(Kind::Weights, *bytes, "_to_copy")).collect();
    let tables: Vec<Tensor> = tables.iter().flat_map(|tables| tables.make(torch)).collect();
    let mut groups: Vec<Vec<u64>> = vec![tables.iter().map(Tensor::bytes).collect()];
    if tables.first().is_some_and(|table| table.dtype() != dtype) {
        groups.push(Vec::new());
    }
    for bytes in tensors {
        match groups.last_mut() {
            Some(group) if group.iter().sum::<u64>() < BROADCAST => group.push(*bytes),
            _ => groups.push(vec![*bytes]),
        }
    }
    // A tensor alone is broadcast as it is. The host does not wait: buffers cannot be used again before the flat parameter is made.
    let group = |tensors: Vec<u64>| {
        let group = empty(Kind::Communication, tensors.iter().sum(), "flatten_dense_tensors");
        torch.memory().record_stream(group.storage(), NCCL);
        group
    };
    drop(groups.into_iter().filter(|group| group.len() > 1).map(group).collect::<Vec<Tensor>>());
    let elements = tensors.iter().sum::<u64>() / dtype.bytes();
    let flat = torch.of_kind(Kind::Weights, || torch.empty(&[elements], dtype, "cat"));
    (Whole { flat, moved, away: Vec::new() }, tables)
}

impl Whole {
    /// A share of so many bytes is cut on the device, from where it goes to the host.
    pub fn cut(&mut self, torch: &Torch, bytes: u64) {
        let share = torch.of_kind(Kind::Weights, || torch.empty(&[bytes], TorchType::U8, "flat_param"));
        self.away.push(share);
    }

    /// The share has been cut; where there is none (`NO_SHARD`), the flat parameter stays.
    pub fn end(self, torch: &Torch, stays: bool) -> Option<Tensor> {
        let Whole { flat, moved, away } = self;
        let flat = stays.then_some(flat);
        drop((moved, away));
        // The next unit's tensors come from pageable memory, for which the host waits.
        torch.memory().synchronize();
        flat
    }
}
