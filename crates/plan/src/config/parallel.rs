//! `parallel`: how work and tensors are spread over ranks.

use plimsoll_parallel::Mesh;
use plimsoll_step::{AttentionKind, MOST_AT_ONCE, MOST_INTERLEAVED, PipelineSchedule, Sharding, ZeroStage};

use super::error::conflicts;
use super::section::section;
use super::value::choice;
use super::{Auto, ConfigError, ConflictingKey, RawConfig};
use crate::optimizer::optimizer_settings;

/// Ranks of a run at most.
const MOST_RANKS: u64 = 65_536;

section! {
    /// How work and tensors are spread over ranks.
    pub struct ParallelConfig at "parallel" {
        /// Ranks that each take their own part of a batch. A run that is started on several ranks has as many as the other ways
        /// leave. auto, here and for the other ways: the fastest division of the ranks that fits.
        data_parallel: Auto<u64>, "1", RANKS;
        /// Ranks that have parts of the same sequences, for sequences that are too long for one rank (ring attention).
        context_parallel: Auto<u64>, "1", RANKS;
        /// What each rank has its own share of (ZeRO): 0 nothing, 1 optimizer states and master weights, 2 gradients too, 3 weights
        /// too. auto: the fastest stage that fits.
        zero_stage: Auto<u64>, "0", ZERO_STAGES;
        /// The same in the words of PyTorch's FSDP.
        sharding_strategy: Auto<ShardingStrategy>, "none";
        /// Ranks that share what the stage says, where not all do that hold the same weights: those of a machine, so that weights are
        /// gathered within it. hybrid_shard takes the ranks of each machine.
        shard_size: u64, "all of them", RANKS;
        /// Whether gradients are summed in the order of the whole batch, so that the number of ranks changes no bit. Stages 2 and 3
        /// always do.
        reproducible: bool = false;
        /// Whether what ranks with the same weights send each other is under way while they compute: the next layer's weights, the
        /// last layer's gradients. It takes the memory of what is under way, and changes no bit. auto: where that fits and is
        /// planned to be faster.
        overlap_communication: Auto<bool> = Auto::Auto;
        /// Ranks that share every matrix product.
        tensor_parallel: Auto<u64>, "1", RANKS;
        /// Whether they divide the tokens between the halves of layers too: each normalises and keeps its part. Where it does not divide
        /// the tokens of a micro-batch, and in fp8, each has all of them.
        sequence_parallel: bool = true;
        /// Data parallel ranks that each have some of the experts of a mixture; divides data_parallel. Tokens go to the ranks of their
        /// experts. Ranks of tensor_parallel have different experts without it.
        expert_parallel: u64 = 1, RANKS;
        /// Stages that the model's layers are divided into. A stage is a rank, or as many as there are others along the other ways.
        pipeline_parallel: Auto<u64>, "1", RANKS;
        /// When a stage takes micro-batches back: gpipe all of them at the end, 1f1b as soon as they can come. interleaved does as 1f1b
        /// with several runs of layers on each stage, which waits less and sends more.
        pipeline_schedule: PipelineForm = PipelineForm::OneForwardOneBackward;
        /// Runs of layers of each stage where pipeline_schedule is interleaved, 2 or more: a micro-batch goes through all stages as
        /// often. Megatron-LM's virtual pipeline stages, which it sets by the layers of each (num_layers_per_virtual_pipeline_stage).
        virtual_stages: u64 = 2, RANKS;
    }
}

choice! {
    /// When a stage of a pipeline takes micro-batches back.
    pub enum PipelineForm {
        /// One forward, one backward.
        OneForwardOneBackward = "1f1b",
        /// All forward, then all backward.
        GPipe = "gpipe",
        /// One forward, one backward, through several runs of layers of each stage.
        Interleaved = "interleaved" | "interleaved_1f1b" | "Interleaved1F1B",
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
        /// The same within a machine, and replicated between machines.
        HybridShard = "hybrid_shard",
    }
}

impl ShardingStrategy {
    /// The stage of ZeRO that it is, by its number.
    fn zero_stage(self) -> u64 {
        match self {
            ShardingStrategy::None => 0,
            ShardingStrategy::ShardGradOp => 2,
            ShardingStrategy::FullShard | ShardingStrategy::HybridShard => 3,
        }
    }
}

/// What is set for a key, where that is decided.
fn decided<T: Copy>(key: Option<Auto<T>>, default: T) -> T {
    key.and_then(Auto::set).unwrap_or(default)
}

impl ParallelConfig {
    /// Ranks that take other micro-batches than each other; 1 where that is not decided, here and below.
    pub fn data_parallel(&self) -> u64 {
        decided(self.data_parallel, 1)
    }

    /// Ranks that have parts of the same sequences.
    pub fn context_parallel(&self) -> u64 {
        decided(self.context_parallel, 1)
    }

    /// Ranks that share every product.
    pub fn tensor_parallel(&self) -> u64 {
        decided(self.tensor_parallel, 1)
    }

    /// Stages that the layers are divided into.
    pub fn pipeline_parallel(&self) -> u64 {
        decided(self.pipeline_parallel, 1)
    }

    /// The stage of ZeRO by its number; 0 where that is not decided.
    pub fn zero_stage(&self) -> u64 {
        decided(self.zero_stage, 0)
    }

    /// The stage by FSDP's name; none where that is not decided.
    pub fn sharding_strategy(&self) -> ShardingStrategy {
        decided(self.sharding_strategy, ShardingStrategy::None)
    }

    /// What the step's ranks share out between them.
    pub fn sharding(&self) -> Sharding {
        let stage = match self.zero_stage().max(self.sharding_strategy().zero_stage()) {
            0 => ZeroStage::Nothing,
            1 => ZeroStage::States,
            2 => ZeroStage::Gradients,
            _ => ZeroStage::Weights,
        };
        let among = self.shard_size.map(|ranks| u32::try_from(ranks).unwrap_or(u32::MAX));
        Sharding { stage, reproducible: self.reproducible(), among }
    }

    /// When stages take micro-batches back, as the step knows it.
    pub fn schedule(&self) -> PipelineSchedule {
        match self.pipeline_schedule() {
            PipelineForm::OneForwardOneBackward => PipelineSchedule::OneForwardOneBackward,
            PipelineForm::GPipe => PipelineSchedule::GPipe,
            PipelineForm::Interleaved => {
                PipelineSchedule::Interleaved(u32::try_from(self.virtual_stages()).unwrap_or(u32::MAX))
            }
        }
    }

    /// Micro-batches of which a rank takes a multiple in a step.
    pub fn micro_batch_groups(&self) -> u64 {
        match self.pipeline_schedule() {
            PipelineForm::Interleaved => self.pipeline_parallel().max(1),
            PipelineForm::OneForwardOneBackward | PipelineForm::GPipe => 1,
        }
    }

    /// The ranks that take the step together.
    pub fn mesh(&self) -> Mesh {
        let [data, context, pipeline, tensor] =
            [self.data_parallel(), self.context_parallel(), self.pipeline_parallel(), self.tensor_parallel()];
        let count = |ranks: u64| u32::try_from(ranks).unwrap_or(u32::MAX);
        Mesh {
            data: count(data),
            expert: count(self.expert_parallel()),
            context: count(context),
            pipeline: count(pipeline),
            tensor: count(tensor),
        }
    }
}

/// The next multiple of something; the smallest one where the next is beyond all numbers.
fn next_multiple(of: u64, part: u64) -> u64 {
    of.checked_next_multiple_of(part).unwrap_or(part)
}

impl RawConfig {
    pub(super) fn check_mesh(&self, errors: &mut Vec<ConfigError>) {
        let parallel = &self.parallel;
        let [data, context] = [parallel.data_parallel(), parallel.context_parallel()];
        let [pipeline, tensor] = [parallel.pipeline_parallel(), parallel.tensor_parallel()];
        // Of ways that are open, each division is checked by itself.
        let is_open = parallel.has_open_ways();
        if parallel.sharding_strategy() == ShardingStrategy::HybridShard
            && parallel.shard_size.is_none()
            && data > 1
            && !is_open
        {
            errors.push(ConfigError::Conflict {
                keys: vec![self.conflicting("parallel.sharding_strategy", "hybrid_shard")],
                reason: "weights are shared within a machine, whose number of ranks is not known here"
                    .to_owned(),
                remedy: "set parallel.shard_size to it".to_owned(),
            });
        }
        let (stage, strategy) = (parallel.zero_stage(), parallel.sharding_strategy());
        let same = strategy.zero_stage();
        // A plan that is read again has both, one of them as nobody set it.
        if stage > 0 && same > 0 && stage != same {
            conflicts(self.conflicting("parallel.zero_stage", stage), errors)(
                self.conflicting("parallel.sharding_strategy", strategy),
                "they are two names of one setting, and say different things",
                &format!("leave one of them out: {strategy} is stage {same}"),
            );
        }
        if let (Some(size @ 2..), 0, 0, false) = (parallel.shard_size, stage, same, parallel.has_open_stage())
        {
            conflicts(self.conflicting("parallel.shard_size", size), errors)(
                self.conflicting("parallel.zero_stage", stage),
                "groups of ranks share nothing in stage 0",
                "set parallel.zero_stage to 1, 2 or 3, or leave parallel.shard_size out",
            );
        }
        self.check_experts(data, is_open, errors);
        let replicas = (data / parallel.expert_parallel().max(1)).saturating_mul(context);
        if let Some(size) = parallel.shard_size.filter(|size| !is_open && !replicas.is_multiple_of(*size)) {
            conflicts(self.conflicting("parallel.shard_size", size), errors)(
                self.conflicting("parallel.data_parallel", data),
                &format!("{replicas} ranks hold the same weights, which fall into no groups of {size}"),
                &format!("set parallel.shard_size to a divisor of {replicas}"),
            );
        }
        let ranks = [data, context, pipeline, tensor].into_iter().fold(1, u64::saturating_mul);
        if ranks > MOST_RANKS {
            conflicts(self.conflicting("parallel.data_parallel", data), errors)(
                self.conflicting("parallel.tensor_parallel", tensor),
                &format!("the ways multiply to {ranks} ranks"),
                &format!("take {MOST_RANKS} or fewer in all"),
            );
        }
        type Check = fn(&RawConfig, ConflictingKey, &mut Vec<ConfigError>);
        let ways: [(&'static str, u64, &str, Check); 3] = [
            (
                "parallel.context_parallel",
                context,
                "a sequence is in chunks on one rank, or whole on several",
                RawConfig::check_context,
            ),
            (
                "parallel.tensor_parallel",
                tensor,
                "sequences in chunks go through products of one rank",
                RawConfig::check_products,
            ),
            (
                "parallel.pipeline_parallel",
                pipeline,
                "sequences in chunks go through no pipeline",
                RawConfig::check_pipeline,
            ),
        ];
        for (key, ranks, beside_chunks, check) in ways.into_iter().filter(|(_, ranks, ..)| *ranks > 1) {
            let own = self.conflicting(key, ranks);
            if let Some(chunk) = self.sequence_chunk() {
                conflicts(own.clone(), errors)(
                    self.conflicting("training.sequence_chunk_tokens", chunk),
                    beside_chunks,
                    "leave one of the two away",
                );
            }
            check(self, own, errors);
        }
    }

    fn check_products(&self, own: ConflictingKey, errors: &mut Vec<ConfigError>) {
        let mut conflict = conflicts(own, errors);
        let (tensor, length) = (self.parallel.tensor_parallel(), self.data.sequence_length());
        let of_rank = length / self.parallel.context_parallel().max(1);
        let batch_size = self.batch_settings().ok().and_then(|batch| batch.batch_size).unwrap_or(1);
        if self.parallel.sequence_parallel == Some(true)
            && !of_rank.saturating_mul(batch_size).is_multiple_of(tensor)
        {
            // Ranks that share sequences have two runs of each.
            let runs = match self.parallel.context_parallel() {
                0 | 1 => 1,
                ranks => 2 * ranks,
            };
            conflict(
                self.conflicting("data.sequence_length", length),
                &format!(
                    "{tensor} ranks do not divide the tokens that parallel.sequence_parallel has them share"
                ),
                &format!(
                    "set data.sequence_length to {}",
                    length.next_multiple_of(tensor.saturating_mul(runs))
                ),
            );
        }
        let optimizer = self.training.optimizer();
        if !optimizer_settings(&self.training).kind.has_states_of_elements() {
            conflict(
                self.conflicting("training.optimizer", optimizer),
                "ranks that share products have parts of matrices, and states of its kind are of whole ones",
                "set training.optimizer to adamw, adamw_bf16, lion or sgd",
            );
        }
    }

    /// Experts that data parallel ranks divide.
    fn check_experts(&self, data: u64, is_open: bool, errors: &mut Vec<ConfigError>) {
        let experts = self.parallel.expert_parallel();
        if experts <= 1 {
            return;
        }
        let own = self.conflicting("parallel.expert_parallel", experts);
        let mut conflict = conflicts(own, errors);
        let tensor = self.parallel.tensor_parallel();
        if tensor > 1 {
            conflict(
                self.conflicting("parallel.tensor_parallel", tensor),
                "ranks that share every product divide the experts already",
                "leave parallel.expert_parallel away",
            );
        }
        if !is_open && !data.is_multiple_of(experts) {
            conflict(
                self.conflicting("parallel.data_parallel", data),
                &format!("{data} data parallel ranks fall into no groups of {experts}"),
                &format!("set parallel.data_parallel to a multiple of {experts}"),
            );
        }
        if let Some(chunk) = self.sequence_chunk() {
            conflict(
                self.conflicting("training.sequence_chunk_tokens", chunk),
                "sequences in chunks go through experts of one rank",
                "leave one of the two away",
            );
        }
        if !optimizer_settings(&self.training).kind.has_states_of_elements() {
            conflict(
                self.conflicting("training.optimizer", self.training.optimizer()),
                "each rank has a part of every stack of experts, and states of its kind are of whole ones",
                "set training.optimizer to adamw, adamw_bf16, lion or sgd",
            );
        }
    }

    fn check_pipeline(&self, own: ConflictingKey, errors: &mut Vec<ConfigError>) {
        let mut conflict = conflicts(own, errors);
        if self.training.optimizer_in_backward() {
            conflict(
                self.conflicting("training.optimizer_in_backward", true),
                "the stages of a pipeline update when the last micro-batch has come back",
                "set training.optimizer_in_backward to false",
            );
        }
        let accumulation = self.batch_settings().ok().and_then(|batch| batch.gradient_accumulation_steps);
        let is_gpipe = self.parallel.pipeline_schedule() == PipelineForm::GPipe;
        if let Some(steps) = accumulation.filter(|steps| is_gpipe && *steps > MOST_AT_ONCE) {
            conflict(
                self.conflicting("training.gradient_accumulation_steps", steps),
                &format!("gpipe has every micro-batch of a step under way at once, {MOST_AT_ONCE} at most"),
                "set parallel.pipeline_schedule to 1f1b",
            );
        }
        if self.parallel.pipeline_schedule() == PipelineForm::Interleaved {
            self.check_interleaved(accumulation, &mut conflict);
        }
        let together = self.training.micro_batches_per_pass().set();
        if let Some(together) = together.filter(|together| *together != 1) {
            conflict(
                self.conflicting("training.micro_batches_per_pass", together),
                "micro-batches go through a pipeline one by one",
                "set training.micro_batches_per_pass to 1 or auto",
            );
        }
    }

    fn check_interleaved(
        &self,
        accumulation: Option<u64>,
        conflict: &mut impl FnMut(ConflictingKey, &str, &str),
    ) {
        let rounds = self.parallel.virtual_stages();
        if rounds < 2 {
            conflict(
                self.conflicting("parallel.virtual_stages", rounds),
                "interleaved stages have two runs of layers or more",
                "set parallel.virtual_stages to 2, or parallel.pipeline_schedule to 1f1b",
            );
        }
        let stages = self.parallel.pipeline_parallel();
        let whole = self.batch_settings().ok().and_then(|batch| batch.effective_batch_size);
        let ranks = self.parallel.data_parallel().max(1);
        if let (None, Some(whole)) = (accumulation, whole)
            && !(whole / ranks).is_multiple_of(stages)
        {
            conflict(
                self.conflicting("training.effective_batch_size", whole),
                &format!("micro-batches go through interleaved stages in groups of {stages}"),
                &format!(
                    "set training.effective_batch_size to {}, or parallel.pipeline_schedule to 1f1b",
                    next_multiple(whole, stages.saturating_mul(ranks))
                ),
            );
        }
        let Some(steps) = accumulation else { return };
        if !steps.is_multiple_of(stages) {
            conflict(
                self.conflicting("training.gradient_accumulation_steps", steps),
                &format!("micro-batches go through interleaved stages in groups of {stages}"),
                &format!(
                    "set training.gradient_accumulation_steps to {}, or parallel.pipeline_schedule to 1f1b",
                    next_multiple(steps, stages)
                ),
            );
        }
        if steps > MOST_INTERLEAVED {
            conflict(
                self.conflicting("training.gradient_accumulation_steps", steps),
                &format!("{MOST_INTERLEAVED} micro-batches of a step at most go through interleaved stages"),
                "set parallel.pipeline_schedule to 1f1b",
            );
        }
    }

    fn check_context(&self, own: ConflictingKey, errors: &mut Vec<ConfigError>) {
        let mut conflict = conflicts(own, errors);
        let length = self.data.sequence_length();
        let runs = 2 * self.parallel.context_parallel();
        if !length.is_multiple_of(runs) {
            conflict(
                self.conflicting("data.sequence_length", length),
                &format!("ranks that share sequences have two runs of each, all as long: {runs} in all"),
                &format!("set data.sequence_length to {}", length.next_multiple_of(runs)),
            );
        }
        if let Auto::Set(attention) = self.training.attention()
            && attention.0 == AttentionKind::Standard
        {
            conflict(
                self.conflicting("training.attention", attention),
                "scores of sequences that ranks share are not written out",
                "set training.attention to flash or auto",
            );
        }
    }
}
