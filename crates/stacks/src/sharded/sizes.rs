//! How much a rank has of each unit.

use plimsoll_model::parameters::BlockId;

use crate::model::{Tables, are_modules, position_tables};
use crate::run::{Offload, Quantization, Run, Sharding, TorchType};

/// What decides how much of a unit there is where.
pub(super) struct Sizes {
    pub ranks: u64,
    pub sharding: Sharding,
    pub offload: Offload,
    /// The type of what is gathered.
    pub gathered: TorchType,
    /// The type of a rank's own share, where the optimizer updates that.
    pub shard: TorchType,
    /// Frozen bytes of a unit that are shared, those that every rank has, and elements, for each unit; the root is the last.
    frozen: Vec<[u64; 3]>,
    /// Bytes of every tensor of a unit that is not an adapter's, as it comes to the device.
    tensors: Vec<Vec<u64>>,
    /// A layer's tables of positions.
    tables: Option<Tables>,
    /// Elements of every matrix that 4 bits are made of, in the order of the model.
    pub four_bit: Vec<u64>,
}

impl Sizes {
    /// Of a run, whose model on a rank is `inner`.
    pub fn of(run: &Run, inner: &Run) -> Sizes {
        let offload = match run.sharding {
            Sharding::Zero { offload, .. }
            | Sharding::Fsdp1 { offload, .. }
            | Sharding::Fsdp2 { offload, .. } => offload,
            Sharding::None | Sharding::FsdpWhole => Offload::default(),
        };
        // DeepSpeed keeps f32 master weights beside 16-bit ones; FSDP's shares are as the weights were loaded.
        let shard = match run.sharding {
            Sharding::Zero { .. } => TorchType::F32,
            _ => run.weights,
        };
        let blocks: Vec<Vec<BlockId>> = (0..run.model.num_layers)
            .map(|layer| vec![BlockId::Layer(layer)])
            .chain([vec![BlockId::Embedding, BlockId::Head]])
            .collect();
        let frozen = blocks.iter().map(|blocks| of_block(run, inner, blocks)).collect();
        let tensors = blocks.iter().map(|blocks| tensors_of(run, blocks)).collect();
        let four_bit = match run.quantization {
            Some(Quantization::FourBit { .. }) => {
                blocks.iter().flat_map(|blocks| matrices_of(run, blocks)).collect()
            }
            _ => Vec::new(),
        };
        Sizes {
            four_bit,
            ranks: if run.sharding == Sharding::FsdpWhole { 1 } else { run.shard_devices.max(1) },
            sharding: run.sharding,
            offload,
            gathered: inner.weights,
            shard,
            frozen,
            tensors,
            tables: position_tables(run),
        }
    }

    /// Bytes of each tensor of a unit, in order.
    pub fn tensors(&self, unit: usize) -> &[u64] {
        self.tensors.get(unit).map_or(&[], Vec::as_slice)
    }

    /// A unit's tables of positions.
    pub fn tables(&self, unit: usize) -> Option<Tables> {
        self.tables.filter(|_| unit + 1 < self.tensors.len())
    }

    /// Shared bytes, bytes of every rank, elements: of what is frozen in a unit.
    pub fn frozen(&self, unit: usize) -> [u64; 3] {
        self.frozen.get(unit).copied().unwrap_or_default()
    }
}

/// Bytes of the tensors of a unit as they were loaded: what is quantised comes packed.
fn tensors_of(run: &Run, blocks: &[BlockId]) -> Vec<u64> {
    let parameters = blocks.iter().flat_map(|block| run.model.block_parameters(*block));
    let bytes = |elements: u64, is_linear: bool| match run.quantization {
        Some(Quantization::FourBit { .. }) if is_linear => elements / 2,
        Some(Quantization::Int8) if is_linear => elements,
        _ => elements * run.weights.bytes(),
    };
    parameters
        .map(|parameter| bytes(parameter.shape.iter().product(), is_linear(run, blocks, &parameter.shape)))
        .collect()
}

/// Elements of the matrices of a unit that can be quantised.
fn matrices_of(run: &Run, blocks: &[BlockId]) -> Vec<u64> {
    let parameters = blocks.iter().flat_map(|block| run.model.block_parameters(*block));
    let matrices = parameters.filter(|parameter| is_linear(run, blocks, &parameter.shape));
    // Experts that are modules come one by one.
    let each = |shape: &[u64]| {
        let [outer, inner] = [shape.len() - 2, shape.len() - 1].map(|at| shape[at]);
        let count = shape[..shape.len() - 2].iter().product::<u64>();
        (0..count).map(move |_| outer * inner)
    };
    matrices.flat_map(|parameter| each(&parameter.shape)).collect()
}

/// Whether a parameter of a unit is a matrix of a linear, or the matrices of experts that are modules: what can be quantised.
fn is_linear(run: &Run, blocks: &[BlockId], shape: &[u64]) -> bool {
    let is_matrix = shape.len() == 2 || shape.len() == 3 && are_modules(run);
    is_matrix && matches!(blocks[0], BlockId::Layer(_))
}

/// Frozen parameters of a unit: none where all weights are trained.
fn of_block(run: &Run, inner: &Run, blocks: &[BlockId]) -> [u64; 3] {
    if run.adapter.is_none() {
        return [0; 3];
    }
    let parameters = blocks.iter().flat_map(|block| run.model.block_parameters(*block));
    let mut sums = [0; 3];
    for parameter in parameters {
        let elements: u64 = parameter.shape.iter().product();
        let is_linear = is_linear(run, blocks, &parameter.shape);
        let [shared, own] = match run.quantization {
            // Packed weights are shared; their scales are attributes that every rank has (`quantised`).
            Some(Quantization::FourBit { .. }) if is_linear => [elements / 2, 0],
            Some(Quantization::Int8) if is_linear => [elements, 4 * parameter.rows()],
            _ => [elements * inner.weights.bytes(), 0],
        };
        sums[0] += shared;
        sums[1] += own;
        sums[2] += elements;
    }
    sums
}
