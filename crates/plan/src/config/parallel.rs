//! `parallel`: how work and tensors are spread over ranks.

use super::section::section;
use super::value::choice;

section! {
    /// How work and tensors are spread over ranks.
    pub struct ParallelConfig at "parallel" {
        /// What data-parallel ranks shard: 0 nothing, 1 optimizer states, 2 gradients too, 3 parameters too.
        zero_stage: u64 = 0;
        /// The same in the words of PyTorch's FSDP.
        sharding_strategy: ShardingStrategy = ShardingStrategy::None;
        /// Ranks that each take their own part of a batch.
        data_parallel: u64 = 1;
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
    }
}
