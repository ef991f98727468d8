//! What stands in the way of a step as its settings say it: ranks that cannot divide the work so, and sequences that cannot be cut so.

use plimsoll_memory::Tier;
use plimsoll_model::{BlockId, ModelSpec, Parameter, QkNorm, Role};
use plimsoll_parallel::Mesh;

use super::{Adapters, AttentionKind, MOST_CHUNKS, StepSettings, UpdateTiming};
use crate::stage::Split;
use crate::{Checkpointing, Compression, StepError};

impl StepSettings {
    /// What stands in the way of ranks that are to divide the work on this model so.
    ///
    /// # Errors
    /// [`StepError`]: which way, and what would work.
    pub fn check_mesh(&self, spec: &ModelSpec) -> Result<(), StepError> {
        self.check_context()?;
        self.check_pipeline(spec)?;
        self.check_products(spec)?;
        self.check_experts(spec)?;
        self.check_sharers()
    }

    /// What stands in the way of ranks that have parts of the same sequences, if they do.
    fn check_context(&self) -> Result<(), StepError> {
        let what = match self.ranks.mesh.context {
            0 | 1 => return Ok(()),
            _ if self.chunk_tokens().is_some() => "sequences in chunks are not shared by ranks",
            _ if self.attention == AttentionKind::Standard => {
                "scores of shared sequences are not written out"
            }
            ranks if self.sequence_length < 2 * u64::from(ranks) => {
                "a sequence has too few tokens for the ranks that share it"
            }
            _ => return Ok(()),
        };
        Err(StepError::Invariant { what })
    }

    /// What stands in the way of the neighbours that are to share.
    fn check_sharers(&self) -> Result<(), StepError> {
        match self.ranks.mesh.replicas().is_multiple_of(self.sharers()) {
            true => Ok(()),
            false => Err(StepError::Invariant { what: "ranks fall into no groups of as many that share" }),
        }
    }

    /// What stands in the way of ranks that have some of the layers each, if they do.
    fn check_pipeline(&self, spec: &ModelSpec) -> Result<(), StepError> {
        let has_table =
            |adapters: &Adapters| adapters.layout.trains_base(BlockId::Embedding, Role::TokenEmbedding);
        let what = match self.ranks.mesh.pipeline {
            0 | 1 => return Ok(()),
            // The layers of one stage may be fewer.
            stages if self.stage.is_none() && spec.num_layers < stages => {
                return Err(StepError::TooManyStages { stages, layers: spec.num_layers });
            }
            stages if self.stage.is_none() && spec.num_layers / stages < self.pipeline_schedule.rounds() => {
                let (rounds, layers) = (self.pipeline_schedule.rounds(), spec.num_layers);
                return Err(StepError::TooManyRounds { stages, rounds, layers });
            }
            _ if spec.layers().any(|layer| spec.gating_residual_of(layer).is_some()) => {
                return Err(StepError::Mesh {
                    key: "parallel.pipeline_parallel",
                    what: "gating residuals go from layer to layer, past the ends of stages",
                    remedy: "give ranks other micro-batches, or parts of sequences, and all layers",
                });
            }
            _ if spec.experts.is_some() && (self.balance_loss > 0.0 || self.routers.z_loss > 0.0) => {
                return Err(StepError::Mesh {
                    key: "parallel.pipeline_parallel",
                    what: "the losses of routers are of all layers, which no stage has",
                    remedy: "set training.router_aux_loss_coef and training.router_z_loss_coef to 0",
                });
            }
            _ if self.chunk_tokens().is_some() => "sequences in chunks go through no pipeline",
            _ if self.micro_batches_per_pass > 1 => "micro-batches go through a pipeline one by one",
            _ if self.update != UpdateTiming::AfterBackward => {
                "the stages of a pipeline update behind the backward pass"
            }
            _ if spec.tie_word_embeddings && self.method.adapters().is_some_and(has_table) => {
                return Err(StepError::Mesh {
                    key: "parallel.pipeline_parallel",
                    what: "the first and the last stage have the embedding's table, which is trained beside adapters",
                    remedy: "leave embed_tokens out of training.lora.modules_to_save",
                });
            }
            _ => return Ok(()),
        };
        Err(StepError::Invariant { what })
    }

    /// What stands in the way of ranks that share every product, if they do.
    fn check_products(&self, spec: &ModelSpec) -> Result<(), StepError> {
        let ranks = self.ranks.mesh.tensor;
        if ranks <= 1 {
            return Ok(());
        }
        let adapted = |adapters: &Adapters| {
            let of_table = |p: &Parameter| p.block.layer().is_none() && matches!(p.role, Role::Lora(..));
            adapters.layout.parameters().iter().any(of_table)
        };
        let adapts_tables = self.method.adapters().is_some_and(adapted);
        let of_mesh = |what, remedy| StepError::Mesh { key: "parallel.tensor_parallel", what, remedy };
        let what = match () {
            () if self.chunk_tokens().is_some() => "sequences in chunks go through products of one rank",
            () if !self.optimizer.kind.has_states_of_elements() => {
                "an optimizer whose states are of rows or blocks needs whole matrices"
            }
            () if spec.attention.qk_norm == Some(QkNorm::Whole) => {
                let what = "queries and keys are normalised over all heads, which no rank has";
                return Err(of_mesh(what, "divide the layers by parallel.pipeline_parallel"));
            }
            () if spec.experts.as_ref().is_some_and(|experts| experts.zero_computation.is_some()) => {
                let what = "experts without matrices are on every rank";
                return Err(of_mesh(what, "divide the others by parallel.expert_parallel"));
            }
            () if adapts_tables => {
                let what = "an adapter of the embedding or the head needs all of its table";
                return Err(of_mesh(what, "leave them out of training.lora.target_modules"));
            }
            () if self.stage.is_some() => return Ok(()),
            () => {
                let ranks = u64::from(ranks);
                let experts = spec.experts.as_ref();
                let is_dense = spec.layers().any(|layer| spec.experts_of(layer).is_none());
                let shared = experts.and_then(|experts| experts.shared);
                let sizes = [
                    ("attention heads", spec.attention.heads),
                    ("key-value heads", spec.attention.kv_heads),
                    (
                        "columns of the feed-forward part",
                        if is_dense { spec.mlp.intermediate_size } else { ranks },
                    ),
                    ("experts", experts.map_or(ranks, |experts| experts.count)),
                    ("columns of the shared expert", shared.map_or(ranks, |shared| shared.intermediate_size)),
                ];
                let blocks = |p: &Parameter| {
                    let types = &self.method.adapters()?.weight_types;
                    let elements = types.get(&(p.block, p.role))?.block_elements();
                    let is_cut = Split::of_parameter(p) == Split::Columns;
                    (is_cut && !(p.columns() / ranks).is_multiple_of(elements))
                        .then(|| p.columns() / elements)
                };
                let blocks = spec.parameters().iter().find_map(blocks);
                let blocks = blocks.map(|blocks| ("blocks of a row of a quantised weight", blocks));
                let odd = sizes.into_iter().find(|(_, size)| !size.is_multiple_of(ranks)).or(blocks);
                let Some((what, size)) = odd else { return Ok(()) };
                let ranks = self.ranks.mesh.tensor;
                return Err(StepError::UnevenProducts { ranks, what, size });
            }
        };
        Err(StepError::Invariant { what })
    }

    /// What stands in the way of ranks that have different experts, if they do.
    fn check_experts(&self, spec: &ModelSpec) -> Result<(), StepError> {
        let Mesh { data, expert: ranks, tensor, .. } = self.ranks.mesh;
        if ranks <= 1 {
            return Ok(());
        }
        let of_mesh = |what, remedy| StepError::Mesh { key: "parallel.expert_parallel", what, remedy };
        let what = match (&spec.experts, &self.stage) {
            _ if tensor > 1 => "ranks that share every product have different experts",
            _ if !data.is_multiple_of(ranks) => "ranks with different experts take other micro-batches",
            _ if self.chunk_tokens().is_some() => "sequences in chunks go through experts of one rank",
            _ if !self.optimizer.kind.has_states_of_elements() => {
                "an optimizer whose states are of rows or blocks needs whole stacks"
            }
            (None, _) => return Err(of_mesh("the model has no experts", "leave it away")),
            (Some(experts), None) if !experts.count.is_multiple_of(u64::from(ranks)) => {
                let size = experts.count;
                return Err(StepError::UnevenExperts { ranks, size });
            }
            (Some(_), _) => return Ok(()),
        };
        Err(StepError::Invariant { what })
    }

    /// What stands in the way of visiting sequences in chunks, if they are.
    pub(crate) fn check_chunks(&self) -> Result<(), StepError> {
        let what = match self.chunk_tokens() {
            None => return Ok(()),
            Some(0) => "a chunk of a sequence has no tokens",
            Some(chunk) if self.sequence_length.div_ceil(chunk) > MOST_CHUNKS => {
                "a sequence has too many chunks"
            }
            Some(_) if self.batch_size != 1 || self.micro_batches_per_pass > 1 => {
                "sequences in chunks come one at a time"
            }
            Some(_) if self.offload.activations == Tier::Device || self.kept_layers.activations > 0 => {
                "what chunks of a sequence leave waits below the device"
            }
            Some(_) if self.checkpointing != Checkpointing::Full || self.compression != Compression::None => {
                "chunks of a sequence keep the inputs of layers alone, as they are"
            }
            Some(_) if self.attention == AttentionKind::Standard => {
                "scores of a sequence in chunks are not written out"
            }
            Some(_) => return Ok(()),
        };
        Err(StepError::Invariant { what })
    }
}
