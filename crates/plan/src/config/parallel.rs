//! `parallel`: how work and tensors are spread over ranks.

use plimsoll_step::{Sharding, ZeroStage};

use super::section::section;
use super::value::choice;

section! {
    /// How work and tensors are spread over ranks.
    pub struct ParallelConfig at "parallel" {
        /// Ranks that each take their own part of a batch. A run that is started on several ranks has as many.
        data_parallel: u64 = 1, RANKS;
        /// What each rank has its own share of (ZeRO): 0 nothing, 1 optimizer states and master weights, 2 gradients too, 3 weights
        /// too.
        zero_stage: u64 = 0, ZERO_STAGES;
        /// The same in the words of PyTorch's FSDP.
        sharding_strategy: ShardingStrategy = ShardingStrategy::None;
        /// Whether gradients are summed in the order of the whole batch, so that the number of ranks changes no bit. Stages 2 and 3
        /// always do.
        reproducible: bool = false;
        /// Ranks that share every matrix product.
        tensor_parallel: u64 = 1;
        /// Ranks that share the model by layers.
        pipeline_parallel: u64 = 1;
    }
}

choice! {
    /// What ranks shard.
    pub enum ShardingStrategy {
        /// Nothing.
        None = "none" | "no_shard",
        /// Optimizer states and gradients.
        ShardGradOp = "shard_grad_op" | "zero2",
        /// Optimizer states, gradients and weights.
        FullShard = "full_shard" | "zero3",
    }
}

impl ParallelConfig {
    /// What the step's ranks share out between them.
    pub fn sharding(&self) -> Sharding {
        let stage = match (self.zero_stage(), self.sharding_strategy()) {
            (3, _) | (_, ShardingStrategy::FullShard) => ZeroStage::Weights,
            (2, _) | (_, ShardingStrategy::ShardGradOp) => ZeroStage::Gradients,
            (1, _) => ZeroStage::States,
            _ => ZeroStage::Nothing,
        };
        Sharding { stage, reproducible: self.reproducible() }
    }

    /// Ranks that take the step together.
    pub fn ranks(&self) -> u32 {
        u32::try_from(self.data_parallel()).unwrap_or(u32::MAX)
    }
}
