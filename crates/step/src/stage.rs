//! A pipeline's stages: which of a model's blocks a rank has (GPipe, Huang et al. 2019; 1F1B, Narayanan et al. 2019; interleaved
//! stages, Narayanan et al. 2021).

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use crate::StepSettings;
use crate::settings::{Adapters, TrainingMethod};
use crate::tier::Pieces;
use crate::trainer::Parts;
use plimsoll_device::PIECE_ROWS;
use plimsoll_model::{Adapted, BlockId, LoraPart, ModelPart, ModelSpec, Parameter, ParameterGroup, Role};

/// When a stage takes micro-batches back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PipelineSchedule {
    /// One forward, one backward: no stage has more micro-batches under way than there are stages behind it, itself included.
    #[default]
    OneForwardOneBackward,
    /// All forward, then all backward: every micro-batch of the step is under way at once.
    GPipe,
    /// One forward, one backward, through so many runs of layers of each rank: a micro-batch goes through all ranks as often.
    Interleaved(u32),
}

impl PipelineSchedule {
    /// Runs of layers that a rank has: how often a micro-batch goes through all ranks.
    pub fn rounds(self) -> u32 {
        match self {
            PipelineSchedule::OneForwardOneBackward | PipelineSchedule::GPipe => 1,
            PipelineSchedule::Interleaved(rounds) => rounds.max(1),
        }
    }
}

/// Micro-batches that GPipe has under way at most: a plan goes through each.
pub const MOST_AT_ONCE: u64 = 256;

/// Micro-batches of a step that go through interleaved stages at most. They take each other's place in an order that comes round late,
/// if at all: a plan may go through each.
pub const MOST_INTERLEAVED: u64 = 1024;

/// What a rank has of a model: one stage of a pipeline, and of every product in it one part.
#[derive(Clone, Debug, PartialEq)]
pub struct Stage {
    /// Which stage, from the embedding on.
    pub number: u32,
    /// How many there are.
    pub count: u32,
    /// Runs of layers that it has: how often a micro-batch goes through all stages.
    pub rounds: u32,
    /// Which part of its products.
    pub tensor: u32,
    /// In how many parts.
    pub tensors: u32,
    /// What they share.
    pub(crate) sharing: LayerParts,
    /// The whole model, and how it is trained.
    pub(crate) whole: Arc<(ModelSpec, TrainingMethod)>,
    /// Parts that each rank of the whole model measures of each of its runs of layers: for each round stage after stage, and of a stage
    /// rank after rank.
    pub(crate) parts: Vec<Vec<u64>>,
    /// Whether the gradient of the last stage's copy is added to the first one's table, and the copy follows the table.
    pub(crate) ties_training: bool,
}

impl Stage {
    /// One of so many runs of layers: as many layers as in any other, or one more.
    fn run(num_layers: u32, number: u64, count: u64) -> Range<u32> {
        let cut = |number: u64| (u64::from(num_layers) * number / count.max(1)) as u32;
        cut(number)..cut(number + 1)
    }

    /// What a stage of one run of layers has of a model.
    pub fn part(spec: &ModelSpec, number: u32, count: u32) -> ModelSpec {
        Stage::part_of(spec, number, (count, 1))
    }

    /// What a stage has of a model through which micro-batches go in so many rounds: in each round the stages have the next runs of
    /// layers.
    fn part_of(spec: &ModelSpec, number: u32, (count, rounds): (u32, u32)) -> ModelSpec {
        let all = u64::from(count) * u64::from(rounds);
        let run = |round: u32| {
            Stage::run(spec.num_layers, u64::from(round) * u64::from(count) + u64::from(number), all)
        };
        let runs = (0..rounds).map(run).collect();
        let (embedding, head) = (number == 0, number + 1 == count);
        spec.stage(ModelPart { runs, embedding, head, ..ModelPart::WHOLE })
    }

    /// A stage of a model that is not trained.
    pub(crate) fn measured(spec: &ModelSpec, number: u32, count: u32) -> Stage {
        let whole = Arc::new((spec.clone(), TrainingMethod::Full));
        Stage {
            number,
            count,
            rounds: 1,
            tensor: 0,
            tensors: 1,
            sharing: LayerParts::default(),
            whole,
            parts: Vec::new(),
            ties_training: false,
        }
    }

    /// Rows of the tables of the vocabulary that one of so many ranks has which share every product.
    pub fn table_rows(spec: &ModelSpec, tensor: u32, tensors: u32) -> u64 {
        vocabulary(spec, tensor, tensors).map_or(spec.vocab_size, |(start, end)| end - start)
    }

    /// The stage that has a block.
    pub(crate) fn of_block(&self, block: BlockId) -> u32 {
        match block {
            BlockId::Embedding => 0,
            BlockId::Head => self.count - 1,
            BlockId::Layer(layer) => (self.run_of(layer) % u64::from(self.count)) as u32,
        }
    }

    /// In which round a micro-batch goes through a block.
    fn round_of(&self, block: BlockId) -> u32 {
        match block {
            BlockId::Embedding => 0,
            BlockId::Head => self.rounds - 1,
            BlockId::Layer(layer) => (self.run_of(layer) / u64::from(self.count)) as u32,
        }
    }

    /// The number of the run that a layer is in.
    fn run_of(&self, layer: u32) -> u64 {
        let all = u64::from(self.count) * u64::from(self.rounds);
        let has = |number: &u64| Stage::run(self.whole.0.num_layers, *number, all).contains(&layer);
        (0..all).find(has).unwrap_or(0)
    }

    /// Whether the last stage works with a copy of the first one's table.
    pub(crate) fn is_tied(&self) -> bool {
        self.whole.0.tie_word_embeddings
    }

    /// Whether it is the first.
    pub(crate) fn is_first(&self) -> bool {
        self.number == 0
    }

    /// Whether it is the last.
    pub(crate) fn is_last(&self) -> bool {
        self.number + 1 == self.count
    }

    /// Whether a micro-batch begins here with this round.
    pub(crate) fn begins(&self, round: u32) -> bool {
        self.is_first() && round == 0
    }

    /// Whether a micro-batch is through all layers with this round here.
    pub(crate) fn ends(&self, round: u32) -> bool {
        self.is_last() && round + 1 == self.rounds
    }

    /// Whether a parameter that this stage has is a copy of another stage's.
    pub(crate) fn is_copy(&self, p: &Parameter) -> bool {
        self.count > 1 && self.is_tied() && p.role == Role::LmHead
    }

    /// The parameter that a copy is of; itself, of any other.
    pub(crate) fn original(&self, p: &Parameter) -> Parameter {
        if self.is_copy(p) { self.whole.0.original(p) } else { p.clone() }
    }

    /// The parameters that a rank of the whole model trains, as it has them.
    pub(crate) fn trained_by(&self, number: u32, tensor: u32) -> Vec<Parameter> {
        let (stage, tensor) = ((number, self.count), (tensor, self.tensors));
        let place = Place { stage, rounds: self.rounds, tensor, sharing: self.sharing };
        let (spec, method) = cut(&self.whole.0, &self.whole.1, place);
        method.trained(&spec)
    }

    /// Whether a parameter counts in the norm of all gradients here: it is no copy, and no other rank that shares products with this
    /// one has all of it too and comes before.
    pub fn counts(&self, p: &Parameter) -> bool {
        self.counts_of(self.tensor, p)
    }

    fn counts_of(&self, tensor: u32, p: &Parameter) -> bool {
        !self.is_copy(p) && (tensor == 0 || self.split(p) != Split::Whole)
    }

    /// How the ranks that share products have a parameter.
    pub(crate) fn split(&self, p: &Parameter) -> Split {
        match self.sharing {
            _ if self.tensors <= 1 => Split::Whole,
            LayerParts::Experts if p.is_of_experts() => Split::Rows,
            LayerParts::Experts => Split::Whole,
            LayerParts::Products { .. } if p.is_table() && self.vocabulary(0).is_none() => Split::Whole,
            LayerParts::Products { .. } => Split::of_parameter(p),
        }
    }

    /// The rows that a rank has of the tables of the vocabulary, where it does not have all.
    fn vocabulary(&self, tensor: u32) -> Option<(u64, u64)> {
        let shares_tables = self.sharing != LayerParts::Experts;
        vocabulary(&self.whole.0, tensor, self.tensors).filter(|_| shares_tables)
    }

    /// The rows or columns that a rank has of a parameter, which is given whole.
    pub(crate) fn share(&self, whole: &Parameter, tensor: u32) -> Range<u64> {
        if whole.is_table()
            && let Some((start, end)) = self.vocabulary(tensor)
        {
            return start..end;
        }
        let all = match self.split(whole) {
            Split::Columns => whole.columns(),
            Split::Rows | Split::Whole => whole.rows(),
        };
        let (tensor, tensors) = (u64::from(tensor), u64::from(self.tensors));
        match self.split(whole) {
            Split::Whole => 0..all,
            Split::Rows | Split::Columns => all / tensors * tensor..all / tensors * (tensor + 1),
        }
    }

    /// A parameter of the whole model's as a rank has it.
    pub(crate) fn local(&self, whole: &Parameter, tensor: u32) -> Parameter {
        let (share, mut own) = (self.share(whole, tensor), whole.clone());
        let place = match self.split(whole) {
            Split::Whole => None,
            Split::Rows => own.shape.first_mut().map(|size| (size, whole.rows())),
            Split::Columns => own.shape.last_mut().map(|size| (size, whole.columns())),
        };
        if let Some((size, all)) = place {
            // A stack of matrices has several rows for each of its first size.
            *size = (share.end - share.start) / (all / (*size).max(1)).max(1);
        }
        own
    }

    /// A parameter of this rank's as the whole model has it.
    pub(crate) fn whole_of(&self, p: &Parameter) -> Parameter {
        let p = self.original(p);
        if self.split(&p) == Split::Whole {
            return p;
        }
        let (spec, method) = &*self.whole;
        let adapters = method.adapters().map(|adapters| adapters.layout.parameters()).unwrap_or_default();
        let same = |other: &&Parameter| (other.block, other.role) == (p.block, p.role);
        let base = spec.block_parameters(p.block);
        base.iter().chain(adapters).find(same).cloned().unwrap_or(p)
    }

    /// Whether each of the ranks that have parts of layers has its own sum of a gradient, of a parameter that all of them have.
    pub(crate) fn is_partial(&self, p: &Parameter) -> bool {
        let of_part = match (self.sharing, p.role) {
            // They take other micro-batches.
            (LayerParts::Experts, _)
            | (_, Role::QNorm | Role::KNorm)
            | (_, Role::Lora(LoraPart::A | LoraPart::B | LoraPart::Magnitude, _)) => true,
            // What latent attention makes of a vector is of some heads.
            (_, Role::QDownProj | Role::KvDownProj) => true,
            (LayerParts::Products { rows }, role) => rows && role.group() == ParameterGroup::Norms,
        };
        self.tensors > 1 && of_part && self.split(p) == Split::Whole
    }

    /// All that is trained, of every stage. A copy is none of it.
    pub(crate) fn trained(&self) -> Vec<Parameter> {
        self.whole.1.trained(&self.whole.0)
    }

    /// This rank's number among those that have the whole model between them.
    pub(crate) fn place(&self) -> usize {
        (self.number * self.tensors + self.tensor) as usize
    }

    /// Parts that all others measure.
    pub fn parts_elsewhere(&self) -> u64 {
        let others = |parts: &Vec<u64>| {
            let all = parts.iter().enumerate();
            all.filter(|(place, _)| *place != self.place()).map(|(_, parts)| parts).sum::<u64>()
        };
        self.parts.iter().map(others).sum()
    }
}

/// What ranks share that have parts of the same layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LayerParts {
    /// Every product (Megatron-LM, Shoeybi et al. 2019); perhaps some rows each of the residual stream.
    Products {
        /// Whether they do.
        rows: bool,
    },
    /// Experts alone: each has some of every layer, as a whole (GShard, Lepikhin et al. 2020). They take other micro-batches.
    Experts,
}

impl Default for LayerParts {
    fn default() -> Self {
        LayerParts::Products { rows: false }
    }
}

/// How ranks that share products have a parameter (Megatron-LM, Shoeybi et al. 2019).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Split {
    /// Each has all of it.
    Whole,
    /// Each has some rows: outputs of a product, or words of the vocabulary.
    Rows,
    /// Each has some columns: inputs of a product, whose outputs are added up.
    Columns,
}

impl Split {
    /// How they have a parameter: of a layer's experts, each has some as a whole.
    pub fn of_parameter(p: &Parameter) -> Split {
        if p.is_of_experts() { Split::Rows } else { Split::of(p.role) }
    }

    /// How they have what has this role, where it does not belong to experts.
    pub fn of(role: Role) -> Split {
        use Adapted::{DownProj, GateProj, KProj, KvUpProj, OProj, QProj, QUpProj, UpProj, VProj};
        use Adapted::{SharedDownProj, SharedGateProj, SharedUpProj};
        match role {
            Role::QProj
            | Role::KProj
            | Role::VProj
            | Role::QUpProj
            | Role::KvUpProj
            | Role::QBias
            | Role::KBias
            | Role::VBias
            | Role::Sinks
            | Role::GateProj
            | Role::UpProj
            | Role::SharedGateProj
            | Role::SharedUpProj
            | Role::GateBias
            | Role::UpBias
            | Role::TokenEmbedding
            | Role::LmHead
            | Role::Lora(
                LoraPart::B | LoraPart::Magnitude,
                QProj | KProj | VProj | QUpProj | KvUpProj | GateProj | UpProj | SharedGateProj
                | SharedUpProj,
            ) => Split::Rows,
            Role::OProj
            | Role::DownProj
            | Role::SharedDownProj
            | Role::Lora(LoraPart::A, OProj | DownProj | SharedDownProj) => Split::Columns,
            _ => Split::Whole,
        }
    }
}

/// The rows that a rank has of the tables of the vocabulary, in whole runs of logits; `None` where there are too few for every rank.
fn vocabulary(spec: &ModelSpec, tensor: u32, tensors: u32) -> Option<(u64, u64)> {
    let (runs, tensors) = (spec.vocab_size.div_ceil(PIECE_ROWS), u64::from(tensors));
    // The first rank has as much as any other.
    let cut = |tensor: u64| spec.vocab_size.min((runs * tensor).div_ceil(tensors) * PIECE_ROWS);
    (tensors > 1 && runs >= tensors).then(|| (cut(u64::from(tensor)), cut(u64::from(tensor) + 1)))
}

/// A rank among those that have the whole model: its number along each way in which they divide it, and how many there are.
#[derive(Clone, Copy)]
struct Place {
    stage: (u32, u32),
    rounds: u32,
    tensor: (u32, u32),
    sharing: LayerParts,
}

/// What a rank has of a model and of what is trained.
fn cut(spec: &ModelSpec, method: &TrainingMethod, place: Place) -> (ModelSpec, TrainingMethod) {
    let Place { stage: (number, count), rounds, tensor: (tensor, tensors), sharing } = place;
    let mut own = Stage::part_of(spec, number, (count, rounds));
    let has_head = own.part.head;
    if tensors > 1 {
        let (rank, ranks) = (u64::from(tensor), u64::from(tensors));
        own = match sharing {
            LayerParts::Products { .. } => {
                own.share_of_products(rank, ranks, vocabulary(spec, tensor, tensors))
            }
            LayerParts::Experts => own.share_of_experts(rank, ranks),
        };
    }
    let Some(adapters) = method.adapters() else { return (own, TrainingMethod::Full) };
    let blocks: Vec<BlockId> = own.blocks().collect();
    let copied = spec.tie_word_embeddings && !own.tie_word_embeddings && has_head;
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
    let mut layout = adapters.layout.of_blocks(&|block| blocks.contains(&block));
    if tensors > 1 {
        layout = layout.of_shapes(&own);
    }
    let mut adapters = Adapters {
        layout,
        dropout: adapters.dropout,
        weight_types: own_of(&adapters.weight_types, &blocks, copied),
        in_files: own_of(&adapters.in_files, &blocks, copied),
    };
    // Files hold whole matrices, and stacks of all experts.
    let is_cut = |role: Role| match sharing {
        LayerParts::Experts => role.is_expert_part(),
        LayerParts::Products { .. } => role.is_expert_part() || Split::of(role) != Split::Whole,
    };
    adapters.in_files.retain(|(_, role), _| tensors <= 1 || !is_cut(*role));
    (own, TrainingMethod::Adapters(Arc::new(adapters)))
}

impl StepSettings {
    /// What the rank that these settings are of has of a model, and the settings for that; both as they are where a rank has all
    /// layers, or where they are of a stage already.
    pub fn of_stage(&self, spec: &ModelSpec) -> (ModelSpec, StepSettings) {
        let (count, tensors) = (self.ranks.mesh.pipeline, self.ranks.mesh.parts());
        if count <= 1 && tensors <= 1 || self.stage.is_some() {
            return (spec.clone(), self.clone());
        }
        let (count, tensors) = (count.max(1), tensors.max(1));
        let (number, tensor) = (self.ranks.place().stage, self.ranks.place().part());
        let sharing = match self.ranks.mesh.expert {
            0 | 1 => LayerParts::Products { rows: self.shares_rows() },
            _ => LayerParts::Experts,
        };
        let rounds = if count > 1 { self.pipeline_schedule.rounds() } else { 1 };
        let place = Place { stage: (number, count), rounds, tensor: (tensor, tensors), sharing };
        let (own, method) = cut(spec, &self.method, place);
        let whole = Arc::new((spec.clone(), self.method.clone()));
        let (parts, ties_training) = (Vec::new(), false);
        let mut stage =
            Stage { number, count, rounds, tensor, tensors, sharing, whole, parts, ties_training };
        stage.ties_training =
            count > 1 && stage.is_tied() && stage.trained().iter().any(|p| p.role == Role::TokenEmbedding);
        let (pieces, kind) = (Pieces::new(spec, &self.optimizer.kind), &self.optimizer.kind);
        let mut all = vec![Vec::new(); rounds as usize];
        for place in 0..count * tensors {
            let (number, tensor) = (place / tensors, place % tensors);
            // Ranks behind the first have as many rows of everything but tables.
            let has_tables = number == 0 || number + 1 == count;
            if tensor > 1 && !has_tables {
                for parts in &mut all {
                    let alike = parts.last().copied();
                    parts.extend(alike);
                }
                continue;
            }
            let mut trained = stage.trained_by(number, tensor);
            trained.retain(|p| stage.counts_of(tensor, p));
            for (round, parts) in (0..).zip(&mut all) {
                let of_round = trained.iter().filter(|p| stage.round_of(p.block) == round);
                let of_round: Vec<Parameter> = of_round.cloned().collect();
                parts.push(Parts::new(&of_round, pieces, kind, 1).count());
            }
        }
        stage.parts = all;
        (own, StepSettings { method, stage: Some(stage), ..self.clone() })
    }
}
