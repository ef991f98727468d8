//! A pipeline's stages: which of a model's blocks a rank has (GPipe, Huang et al. 2019; 1F1B, Narayanan et al. 2019).

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use plimsoll_model::{BlockId, ModelPart, ModelSpec, Parameter, Role};

use crate::StepSettings;
use crate::settings::{Adapters, TrainingMethod};
use crate::tier::Pieces;
use crate::trainer::Parts;

/// When a stage takes micro-batches back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PipelineSchedule {
    /// One forward, one backward: no stage has more micro-batches under way than there are stages behind it, itself included.
    #[default]
    OneForwardOneBackward,
    /// All forward, then all backward: every micro-batch of the step is under way at once.
    GPipe,
}

/// One stage of a pipeline.
#[derive(Clone, Debug, PartialEq)]
pub struct Stage {
    /// Which one, from the embedding on.
    pub number: u32,
    /// How many there are.
    pub count: u32,
    /// The whole model, and how it is trained.
    pub(crate) whole: Arc<(ModelSpec, TrainingMethod)>,
    /// Parts that each stage measures and updates.
    pub(crate) parts: Vec<u64>,
}

impl Stage {
    /// The layers of a stage: as many as of any other, or one more.
    pub fn layers(num_layers: u32, number: u32, count: u32) -> Range<u32> {
        let cut = |number: u32| (u64::from(num_layers) * u64::from(number) / u64::from(count.max(1))) as u32;
        cut(number)..cut(number + 1)
    }

    /// The stage that has a block.
    pub(crate) fn of_block(&self, block: BlockId) -> u32 {
        match block {
            BlockId::Embedding => 0,
            BlockId::Head => self.count - 1,
            BlockId::Layer(layer) => {
                let num_layers = self.whole.0.num_layers;
                let has = |number: &u32| Stage::layers(num_layers, *number, self.count).contains(&layer);
                (0..self.count).find(has).unwrap_or(0)
            }
        }
    }

    /// Whether the last stage works with a copy of the first one's table.
    pub(crate) fn is_tied(&self) -> bool {
        self.whole.0.tie_word_embeddings
    }

    /// Whether that copy's gradient is added to the table's, and the copy follows the table.
    pub(crate) fn ties_training(&self) -> bool {
        self.is_tied() && self.trained().iter().any(|p| p.role == Role::TokenEmbedding)
    }

    /// Whether it is the first.
    pub(crate) fn is_first(&self) -> bool {
        self.number == 0
    }

    /// Whether it is the last.
    pub(crate) fn is_last(&self) -> bool {
        self.number + 1 == self.count
    }

    /// Whether a parameter that this stage has is a copy of another stage's.
    pub(crate) fn is_copy(&self, p: &Parameter) -> bool {
        self.is_tied() && p.role == Role::LmHead
    }

    /// The parameter that a copy is of; itself, of any other.
    pub(crate) fn original(&self, p: &Parameter) -> Parameter {
        let all = || self.whole.0.block_parameters(BlockId::Embedding);
        let table = || all().into_iter().find(|p| p.role == Role::TokenEmbedding);
        match self.is_copy(p) {
            true => table().unwrap_or_else(|| p.clone()),
            false => p.clone(),
        }
    }

    /// The parameters that a stage trains.
    pub(crate) fn trained_by(&self, number: u32) -> Vec<Parameter> {
        let (spec, method) = cut(&self.whole.0, &self.whole.1, number, self.count);
        method.trained(&spec)
    }

    /// All that is trained, of every stage. A copy is none of it.
    pub(crate) fn trained(&self) -> Vec<Parameter> {
        self.whole.1.trained(&self.whole.0)
    }

    /// Parts of the stages before this one.
    pub(crate) fn parts_before(&self) -> u64 {
        self.parts.iter().take(self.number as usize).sum()
    }

    /// Parts of all other stages.
    pub fn parts_elsewhere(&self) -> u64 {
        let all: u64 = self.parts.iter().sum();
        all - self.parts.get(self.number as usize).copied().unwrap_or(0)
    }
}

/// What a stage has of a model and of what is trained.
fn cut(spec: &ModelSpec, method: &TrainingMethod, number: u32, count: u32) -> (ModelSpec, TrainingMethod) {
    let part = ModelPart { first_layer: 0, embedding: number == 0, head: number + 1 == count };
    let own = spec.stage(Stage::layers(spec.num_layers, number, count), part);
    let Some(adapters) = method.adapters() else { return (own, TrainingMethod::Full) };
    let blocks: Vec<BlockId> = own.blocks().collect();
    let copied = spec.tie_word_embeddings && !own.tie_word_embeddings && part.head;
    let (table, copy) = ((BlockId::Embedding, Role::TokenEmbedding), (BlockId::Head, Role::LmHead));
    fn own_of<T: Clone>(
        all: &HashMap<(BlockId, Role), T>,
        blocks: &[BlockId],
        copied: Option<((BlockId, Role), (BlockId, Role))>,
    ) -> HashMap<(BlockId, Role), T> {
        let own = all.iter().filter(|((block, _), _)| blocks.contains(block));
        let mut own: HashMap<_, _> = own.map(|(key, value)| (*key, value.clone())).collect();
        if let Some((table, copy)) = copied
            && let Some(value) = all.get(&table)
        {
            own.insert(copy, value.clone());
        }
        own
    }
    let copied = copied.then_some((table, copy));
    let adapters = Adapters {
        layout: adapters.layout.of_blocks(&|block| blocks.contains(&block)),
        dropout: adapters.dropout,
        weight_types: own_of(&adapters.weight_types, &blocks, copied),
        in_files: own_of(&adapters.in_files, &blocks, copied),
    };
    (own, TrainingMethod::Adapters(Arc::new(adapters)))
}

impl StepSettings {
    /// What the rank that these settings are of has of a model, and the settings for that; both as they are where a rank has all
    /// layers, or where they are of a stage already.
    pub fn of_stage(&self, spec: &ModelSpec) -> (ModelSpec, StepSettings) {
        let count = self.ranks.mesh.pipeline;
        if count <= 1 || self.stage.is_some() {
            return (spec.clone(), self.clone());
        }
        let (own, method) = cut(spec, &self.method, self.ranks.place().stage, count);
        let whole = Arc::new((spec.clone(), self.method.clone()));
        let mut stage = Stage { number: self.ranks.place().stage, count, whole, parts: Vec::new() };
        let (pieces, kind) = (Pieces::new(spec, &self.optimizer.kind), &self.optimizer.kind);
        let parts = |number| {
            let trained: Vec<Parameter> =
                stage.trained_by(number).into_iter().filter(|p| !stage.is_copy(p)).collect();
            Parts::new(&trained, pieces, kind, 1).count()
        };
        stage.parts = (0..count).map(parts).collect();
        (own, StepSettings { method, stage: Some(stage), ..self.clone() })
    }
}
