//! The parameter inventory: every weight of a model with its name, role, block and shape.
//!
//! Names are those of Hugging Face's Llama, and of the family that brought a parameter where Llama has none. Families
//! whose files use other names, or store several parameters as one tensor, are mapped in `layout`, GGUF's in `gguf::layout`.

use std::ops::Range;

use plimsoll_device::DType;

use crate::spec::{LatentAttention, ModelPart, ModelSpec, NormKind, QkNorm};

/// The unit in which weights are gathered, updated and released.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum BlockId {
    /// The token embedding (and with it a tied head).
    Embedding,
    /// One transformer block.
    Layer(u32),
    /// The final norm and an untied head.
    Head,
}

impl BlockId {
    /// The same block of a model that has no more than some of the layers, numbered anew; `None` for a layer that is not
    /// among them. `layers` ascend.
    pub fn among(self, layers: &[u32]) -> Option<BlockId> {
        let BlockId::Layer(layer) = self else { return Some(self) };
        let place = layers.binary_search(&layer).ok()?;
        u32::try_from(place).ok().map(BlockId::Layer)
    }
}

/// What a parameter does in its block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs)]
pub enum Role {
    TokenEmbedding,
    PositionEmbedding,
    AttentionNorm,
    AttentionNormBias,
    QProj,
    KProj,
    VProj,
    OProj,
    QBias,
    KBias,
    VBias,
    OBias,
    /// Of queries, of each head or of all; in latent attention of the vector that queries are made of.
    QNorm,
    /// Of keys, in the same way.
    KNorm,
    /// To the vector that queries are made of, in latent attention.
    QDownProj,
    /// From there to queries.
    QUpProj,
    /// To the vector that keys and values are made of, and to what all heads' keys have in common.
    KvDownProj,
    /// From that vector to the keys, but for what they have in common, and values of each head.
    KvUpProj,
    /// A score of each head that has no value, `[heads]`.
    Sinks,
    PostAttentionNorm,
    MlpNorm,
    MlpNormBias,
    GateProj,
    UpProj,
    DownProj,
    GateBias,
    UpBias,
    DownBias,
    PostMlpNorm,
    /// What a token is multiplied with for the logits of experts, `[E, H]`. The matrices of all experts of a layer are the
    /// stacks `GateProj`, `UpProj` and `DownProj`, `[E, out, in]`.
    Router,
    /// What is added to logits.
    RouterBias,
    /// What is added to the scores of experts for their choice; no gradient reaches it.
    RouterCorrection,
    /// How often each expert was chosen in a step, and how much was dropped: no parameter, but what is told of it.
    RouterLoad,
    /// What the logits of the layer with experts before are multiplied with for those of this one, `[E, E]`.
    RouterResidual,
    /// What a token is multiplied with for the shares of its input and of its vector in each constant expert, `[2 C, H]`.
    ConstantGate,
    /// The vectors of constant experts, `[C, H]`.
    ConstantVectors,
    SharedGateProj,
    SharedUpProj,
    SharedDownProj,
    /// What a token is multiplied with for the weight of the shared expert, `[1, H]`.
    SharedRouter,
    FinalNorm,
    FinalNormBias,
    LmHead,
    /// A part of the low-rank adapter of a weight.
    Lora(LoraPart, Adapted),
}

/// A part of a low-rank adapter (Hu et al. 2021): the weight's change is `scale * B A`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum LoraPart {
    /// `[r, in]`; of an embedding its transpose, `[vocabulary, r]`.
    A,
    /// `[out, r]`
    B,
    /// DoRA's lengths of the weight's rows, `[out]`.
    Magnitude,
    /// The squared lengths of the frozen weight's own rows, `[out]`: no parameter, but what DoRA computes with.
    Squares,
    /// The first row of each expert's A among those of all, and the number of all, u32 `[E + 1]`: no parameter either.
    Offsets,
}

/// A weight that can have an adapter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs)]
pub enum Adapted {
    TokenEmbedding,
    QProj,
    KProj,
    VProj,
    OProj,
    QDownProj,
    QUpProj,
    KvDownProj,
    KvUpProj,
    GateProj,
    UpProj,
    DownProj,
    SharedGateProj,
    SharedUpProj,
    SharedDownProj,
    LmHead,
}

impl Adapted {
    /// The one that a role is, if it can have an adapter.
    pub fn of(role: Role) -> Option<Adapted> {
        Some(match role {
            Role::TokenEmbedding => Adapted::TokenEmbedding,
            Role::QProj => Adapted::QProj,
            Role::KProj => Adapted::KProj,
            Role::VProj => Adapted::VProj,
            Role::OProj => Adapted::OProj,
            Role::QDownProj => Adapted::QDownProj,
            Role::QUpProj => Adapted::QUpProj,
            Role::KvDownProj => Adapted::KvDownProj,
            Role::KvUpProj => Adapted::KvUpProj,
            Role::GateProj => Adapted::GateProj,
            Role::UpProj => Adapted::UpProj,
            Role::DownProj => Adapted::DownProj,
            Role::SharedGateProj => Adapted::SharedGateProj,
            Role::SharedUpProj => Adapted::SharedUpProj,
            Role::SharedDownProj => Adapted::SharedDownProj,
            Role::LmHead => Adapted::LmHead,
            _ => return None,
        })
    }

    /// Its role.
    pub fn role(self) -> Role {
        match self {
            Adapted::TokenEmbedding => Role::TokenEmbedding,
            Adapted::QProj => Role::QProj,
            Adapted::KProj => Role::KProj,
            Adapted::VProj => Role::VProj,
            Adapted::OProj => Role::OProj,
            Adapted::QDownProj => Role::QDownProj,
            Adapted::QUpProj => Role::QUpProj,
            Adapted::KvDownProj => Role::KvDownProj,
            Adapted::KvUpProj => Role::KvUpProj,
            Adapted::GateProj => Role::GateProj,
            Adapted::UpProj => Role::UpProj,
            Adapted::DownProj => Role::DownProj,
            Adapted::SharedGateProj => Role::SharedGateProj,
            Adapted::SharedUpProj => Role::SharedUpProj,
            Adapted::SharedDownProj => Role::SharedDownProj,
            Adapted::LmHead => Role::LmHead,
        }
    }
}

/// What matters to optimizers and formats.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ParameterKind {
    /// A linear's matrix, `[out, in]`.
    Matrix,
    /// An embedding, `[vocab or positions, hidden]`.
    Embedding,
    /// A norm's weight.
    Norm,
    /// A bias.
    Bias,
}

impl ParameterKind {
    /// Whether it is a vector; of a stack of experts, one for each.
    pub fn is_vector(self) -> bool {
        matches!(self, ParameterKind::Norm | ParameterKind::Bias)
    }
}

/// How a parameter starts in training from scratch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Initialisation {
    /// Normal with this standard deviation.
    Normal(f64),
    /// All ones.
    Ones,
    /// All zeros.
    Zeros,
}

/// About as many bytes of a table are brought to a disk at once.
const PART_BYTES: u64 = 1 << 20;

/// Parameters that a block has, but for a few of the largest.
const MOST_OF_BLOCK: usize = 16;

/// One parameter.
#[derive(Clone, Debug, PartialEq)]
pub struct Parameter {
    /// Its Hugging Face name, `model.layers.0.self_attn.q_proj.weight`.
    pub name: String,
    /// The block that it belongs to.
    pub block: BlockId,
    /// Its place in the block.
    pub role: Role,
    /// `[out, in]` for matrices, `[n]` for norms and biases.
    pub shape: Vec<u64>,
}

impl Role {
    /// The parameter's kind.
    pub fn kind(self) -> ParameterKind {
        match self {
            Role::TokenEmbedding | Role::PositionEmbedding => ParameterKind::Embedding,
            Role::QProj
            | Role::KProj
            | Role::VProj
            | Role::OProj
            | Role::QDownProj
            | Role::QUpProj
            | Role::KvDownProj
            | Role::KvUpProj
            | Role::GateProj
            | Role::UpProj
            | Role::DownProj
            | Role::Router
            | Role::RouterResidual
            | Role::ConstantGate
            | Role::ConstantVectors
            | Role::SharedGateProj
            | Role::SharedUpProj
            | Role::SharedDownProj
            | Role::SharedRouter
            | Role::LmHead
            | Role::Lora(LoraPart::A | LoraPart::B, _) => ParameterKind::Matrix,
            Role::Lora(LoraPart::Magnitude | LoraPart::Squares | LoraPart::Offsets, _)
            | Role::AttentionNorm
            | Role::QNorm
            | Role::KNorm
            | Role::PostAttentionNorm
            | Role::MlpNorm
            | Role::PostMlpNorm
            | Role::FinalNorm => ParameterKind::Norm,
            Role::AttentionNormBias
            | Role::QBias
            | Role::KBias
            | Role::VBias
            | Role::OBias
            | Role::Sinks
            | Role::MlpNormBias
            | Role::GateBias
            | Role::UpBias
            | Role::DownBias
            | Role::RouterBias
            | Role::RouterCorrection
            | Role::RouterLoad
            | Role::FinalNormBias => ParameterKind::Bias,
        }
    }
}

/// The part of a model that a parameter belongs to, for counting.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ParameterGroup {
    /// Tokens and positions to vectors.
    Embedding,
    /// The linears of attention.
    Attention,
    /// The linears of the feed-forward part, and of shared experts.
    FeedForward,
    /// Those of experts that tokens are sent to.
    Experts,
    /// What sends them.
    Routers,
    /// Norms, of queries and keys too.
    Norms,
    /// Vectors to logits, where that is not the embedding again.
    Head,
    /// Low-rank adapters.
    Adapters,
}

impl ParameterGroup {
    /// As reports call it.
    pub fn name(self) -> &'static str {
        match self {
            ParameterGroup::Embedding => "embedding",
            ParameterGroup::Attention => "attention",
            ParameterGroup::FeedForward => "feed_forward",
            ParameterGroup::Experts => "experts",
            ParameterGroup::Routers => "routers",
            ParameterGroup::Norms => "norms",
            ParameterGroup::Head => "head",
            ParameterGroup::Adapters => "adapters",
        }
    }
}

impl Role {
    /// The part of the model that it belongs to.
    pub fn group(self) -> ParameterGroup {
        match self {
            Role::TokenEmbedding | Role::PositionEmbedding => ParameterGroup::Embedding,
            Role::QProj
            | Role::KProj
            | Role::VProj
            | Role::OProj
            | Role::QDownProj
            | Role::QUpProj
            | Role::KvDownProj
            | Role::KvUpProj
            | Role::QBias
            | Role::KBias
            | Role::VBias
            | Role::OBias
            | Role::Sinks => ParameterGroup::Attention,
            Role::GateProj
            | Role::UpProj
            | Role::DownProj
            | Role::GateBias
            | Role::UpBias
            | Role::DownBias
            | Role::SharedGateProj
            | Role::SharedUpProj
            | Role::SharedDownProj => ParameterGroup::FeedForward,
            Role::Router
            | Role::RouterBias
            | Role::RouterCorrection
            | Role::RouterLoad
            | Role::RouterResidual
            | Role::SharedRouter => ParameterGroup::Routers,
            Role::ConstantGate | Role::ConstantVectors => ParameterGroup::Experts,
            Role::LmHead => ParameterGroup::Head,
            Role::Lora(..) => ParameterGroup::Adapters,
            Role::AttentionNorm
            | Role::AttentionNormBias
            | Role::QNorm
            | Role::KNorm
            | Role::PostAttentionNorm
            | Role::MlpNorm
            | Role::MlpNormBias
            | Role::PostMlpNorm
            | Role::FinalNorm
            | Role::FinalNormBias => ParameterGroup::Norms,
        }
    }

    /// Whether it is the matrix of a linear in a transformer block, or a stack of them. Routers are small, and a rounding of theirs
    /// sends tokens elsewhere: they are none.
    pub fn is_block_matrix(self) -> bool {
        let others = matches!(self, Role::LmHead | Role::Lora(..)) || self.is_small_matrix();
        self.kind() == ParameterKind::Matrix && !others
    }

    /// Whether it is a matrix of a few rows that stays as it is: a router, or what constant experts have.
    pub fn is_small_matrix(self) -> bool {
        matches!(
            self,
            Role::Router
                | Role::SharedRouter
                | Role::RouterResidual
                | Role::ConstantGate
                | Role::ConstantVectors
        )
    }

    /// Whether it belongs to the feed-forward part proper, of which experts have one each.
    pub fn is_expert_part(self) -> bool {
        match self {
            Role::GateProj
            | Role::UpProj
            | Role::DownProj
            | Role::GateBias
            | Role::UpBias
            | Role::DownBias => true,
            Role::Lora(_, of) => of.role().is_expert_part(),
            _ => false,
        }
    }

    /// The type that it is saved in, where weights are saved in this one: training adds small numbers to the corrections of
    /// routers, which narrow types would lose.
    pub fn saved_as(self, usual: DType) -> DType {
        if self == Role::RouterCorrection { DType::F32 } else { usual }
    }

    /// Whether gradients reach it.
    pub fn has_gradient(self) -> bool {
        !matches!(self, Role::RouterCorrection | Role::RouterLoad)
    }
}

impl Parameter {
    /// The part of the model that it belongs to.
    pub fn group(&self) -> ParameterGroup {
        match self.role.group() {
            ParameterGroup::FeedForward if self.is_of_experts() => ParameterGroup::Experts,
            group => group,
        }
    }

    /// Whether it has a part for each expert of a layer.
    pub fn is_of_experts(&self) -> bool {
        let of_one = if self.role.kind().is_vector() { 1 } else { 2 };
        self.role.is_expert_part() && self.shape.len() > of_one
    }

    /// Experts that it has a part for; 1 where it belongs to none.
    pub fn experts(&self) -> u64 {
        self.shape.first().copied().filter(|_| self.is_of_experts()).unwrap_or(1).max(1)
    }

    /// The rows that are one expert's.
    pub fn rows_of_expert(&self, expert: u64) -> Range<u64> {
        let each = self.rows() / self.experts();
        expert * each..(expert + 1) * each
    }

    /// Rows of a matrix or of a stack of matrices, elements of a vector.
    pub fn rows(&self) -> u64 {
        match self.shape.as_slice() {
            [elements] => *elements,
            shape => shape.split_last().map_or(1, |(_, rest)| rest.iter().product()),
        }
    }

    /// All rows.
    pub fn all_rows(&self) -> Range<u64> {
        0..self.rows()
    }

    /// Elements of a row; 1 for a vector.
    pub fn columns(&self) -> u64 {
        match self.shape.as_slice() {
            [] | [_] => 1,
            [.., columns] => *columns,
        }
    }

    /// The shape of some rows: the parameter's own where these are all of them.
    pub fn shape_of(&self, rows: &Range<u64>) -> Vec<u64> {
        match *rows == self.all_rows() {
            true => self.shape.clone(),
            false => vec![rows.end - rows.start, self.columns()],
        }
    }

    /// Whether it has a row for every token of the vocabulary.
    pub fn is_table(&self) -> bool {
        matches!(self.role, Role::TokenEmbedding | Role::LmHead)
    }

    /// Rows that are brought to a disk one after another as `dtype`: about a MiB of a table at a time, since a table may be
    /// larger than anything else that is in memory at once; all of any other parameter. Every part but the last is of
    /// whole `alignment`s of bytes, a power of two.
    pub fn parts(&self, dtype: DType, alignment: u64) -> impl Iterator<Item = Range<u64>> {
        let rows = self.rows();
        let each = match dtype.bytes_for(self.columns()) {
            Some(row_bytes @ 1..) if self.is_table() && dtype.is_float() => {
                // An alignment is a power of two: that many rows are whole ones of it.
                let aligned = alignment >> row_bytes.trailing_zeros().min(alignment.trailing_zeros());
                (PART_BYTES / row_bytes).max(1).next_multiple_of(aligned.max(1))
            }
            _ => rows.max(1),
        };
        (0..rows.div_ceil(each)).map(move |part| part * each..rows.min((part + 1) * each))
    }

    /// Number of elements.
    pub fn elements(&self) -> u64 {
        self.shape.iter().product()
    }

    /// How it starts in training from scratch: GPT-2's and Llama's usual choice.
    pub fn initialisation(&self, spec: &ModelSpec) -> Initialisation {
        match self.role.kind() {
            ParameterKind::Matrix | ParameterKind::Embedding => {
                Initialisation::Normal(spec.initializer_range)
            }
            ParameterKind::Norm if spec.norm.one_plus_weight => Initialisation::Zeros,
            ParameterKind::Norm => Initialisation::Ones,
            ParameterKind::Bias => Initialisation::Zeros,
        }
    }
}

impl ModelSpec {
    /// The same model with no more than some of its layers, which ascend and are numbered anew.
    pub fn of_layers(&self, layers: &[u32]) -> ModelSpec {
        let mut spec = self.clone();
        spec.num_layers = layers.len() as u32;
        let mut end = 0;
        let of_run = |run: Range<u32>| {
            let first = end;
            end += layers.iter().filter(|layer| run.contains(layer)).count() as u32;
            first..end
        };
        spec.part.runs = self.runs().into_iter().map(of_run).collect();
        if let Some(window) = &mut spec.attention.sliding_window {
            window.layers = layers.iter().map(|layer| self.attention.window(*layer).is_some()).collect();
        }
        if let Some(experts) = &mut spec.experts {
            experts.layers = layers.iter().map(|layer| self.experts_of(*layer).is_some()).collect();
        }
        spec
    }

    /// All parameters: the embedding, the blocks in order, the head.
    pub fn parameters(&self) -> Vec<Parameter> {
        self.blocks().flat_map(|block| self.block_parameters(block)).collect()
    }

    /// Its runs of layers that follow each other: one, but for a rank whose stages are interleaved with those of others.
    pub fn runs(&self) -> Vec<Range<u32>> {
        if self.part.runs.is_empty() {
            std::iter::once(0..self.num_layers).collect()
        } else {
            self.part.runs.clone()
        }
    }

    /// The numbers of its layers, in order.
    pub fn layers(&self) -> impl DoubleEndedIterator<Item = u32> + Clone + use<> {
        self.runs().into_iter().flatten()
    }

    /// The place of a layer among its own.
    pub fn place_of(&self, layer: u32) -> Option<u32> {
        let place = self.layers().position(|own| own == layer);
        place.map(|place| place as u32)
    }

    /// The parameter of this whole model's that a stage's stands for: the head of a stage has the embedding's table where it is tied.
    pub fn original(&self, p: &Parameter) -> Parameter {
        let table =
            || self.block_parameters(BlockId::Embedding).into_iter().find(|p| p.role == Role::TokenEmbedding);
        match self.tie_word_embeddings && p.role == Role::LmHead {
            true => table().unwrap_or_else(|| p.clone()),
            false => p.clone(),
        }
    }

    /// Rows of the tables of the vocabulary.
    pub fn table_rows(&self) -> u64 {
        self.part.vocabulary.map_or(self.vocab_size, |(start, end)| end - start)
    }

    /// What the `rank`-th of so many ranks has of the model that share every product: some heads, a part of the feed-forward width,
    /// some of the experts of each layer as a whole, and these rows of the tables.
    pub fn share_of_products(&self, rank: u64, ranks: u64, vocabulary: Option<(u64, u64)>) -> ModelSpec {
        let mut spec = self.share_of_experts(rank, ranks);
        spec.attention.heads /= ranks.max(1);
        spec.attention.kv_heads /= ranks.max(1);
        spec.mlp.intermediate_size /= ranks.max(1);
        if let Some(shared) = spec.experts.as_mut().and_then(|experts| experts.shared.as_mut()) {
            shared.intermediate_size /= ranks.max(1);
        }
        spec.part.vocabulary = vocabulary;
        spec
    }

    /// What the `rank`-th of so many ranks has of the model that have different experts, and all else alike.
    pub fn share_of_experts(&self, rank: u64, ranks: u64) -> ModelSpec {
        let mut spec = self.clone();
        let count = spec.experts.as_ref().map(|experts| experts.count / ranks.max(1));
        spec.part.experts = count.map(|count| (rank * count, (rank + 1) * count));
        spec
    }

    /// A part of the same model, which has its layers' numbers. Where it has a head and no embedding, the head has a table of its own.
    pub fn stage(&self, part: ModelPart) -> ModelSpec {
        ModelSpec {
            num_layers: part.runs.iter().map(|run| run.end - run.start).sum(),
            tie_word_embeddings: self.tie_word_embeddings && part.embedding,
            part,
            ..self.clone()
        }
    }

    /// The blocks, in the order of the forward pass.
    pub fn blocks(&self) -> impl DoubleEndedIterator<Item = BlockId> + use<> {
        let ModelPart { embedding, head, .. } = self.part;
        let first = embedding.then_some(BlockId::Embedding).into_iter();
        first.chain(self.layers().map(BlockId::Layer)).chain(head.then_some(BlockId::Head))
    }

    /// The parameters of one block.
    pub fn block_parameters(&self, block: BlockId) -> Vec<Parameter> {
        let mut list = Vec::with_capacity(MOST_OF_BLOCK);
        let mut add = |name: String, role, shape: &[u64]| {
            list.push(Parameter { name, block, role, shape: shape.to_vec() });
        };
        let hidden = self.hidden_size;
        let layer_norm = self.norm.kind == NormKind::Layer;
        match block {
            BlockId::Embedding => {
                add("model.embed_tokens.weight".into(), Role::TokenEmbedding, &[self.table_rows(), hidden]);
                if self.attention.rope.is_none() {
                    let positions = self.max_position_embeddings;
                    add("model.embed_positions.weight".into(), Role::PositionEmbedding, &[positions, hidden]);
                }
            }
            BlockId::Layer(i) => {
                let mlp = self.feed_forward(i);
                let of_layer = format!("model.layers.{i}.");
                let name = |rest: &str| [&of_layer, rest].concat();
                let (before, after) = (self.norm.placement.before(), self.norm.placement.after());
                if before {
                    add(name("input_layernorm.weight"), Role::AttentionNorm, &[hidden]);
                }
                if layer_norm {
                    add(name("input_layernorm.bias"), Role::AttentionNormBias, &[hidden]);
                }
                match self.attention.latent {
                    Some(latent) => self.latent_parameters(&mut add, &name("self_attn"), latent),
                    None => self.qkv_parameters(&mut add, &name("self_attn")),
                }
                add(name("self_attn.o_proj.weight"), Role::OProj, &[hidden, self.attended_size()]);
                if self.attention.output_bias {
                    add(name("self_attn.o_proj.bias"), Role::OBias, &[hidden]);
                }
                if self.attention.sinks {
                    add(name("self_attn.sinks"), Role::Sinks, &[self.attention.heads]);
                }
                // Llama's name for the norm before the feed-forward part says where it stands.
                if after {
                    add(name("post_attention_layernorm.weight"), Role::PostAttentionNorm, &[hidden]);
                }
                if before {
                    let own = if after { "pre_feedforward_layernorm" } else { "post_attention_layernorm" };
                    add(name(&format!("{own}.weight")), Role::MlpNorm, &[hidden]);
                }
                if layer_norm {
                    add(name("post_attention_layernorm.bias"), Role::MlpNormBias, &[hidden]);
                }
                match self.experts_of(i) {
                    None => {
                        let roles = FeedForwardRoles::DENSE;
                        self.feed_forward_parameters(
                            &mut add,
                            &name("mlp"),
                            roles,
                            &[],
                            mlp.intermediate_size,
                        );
                    }
                    Some(experts) => {
                        let inner = experts.intermediate_size;
                        let (own, total) = (self.own_experts(experts), experts.total());
                        add(name("mlp.gate.weight"), Role::Router, &[total, hidden]);
                        if experts.router.bias {
                            add(name("mlp.gate.bias"), Role::RouterBias, &[total]);
                        }
                        if experts.router.correction {
                            let role = Role::RouterCorrection;
                            add(name("mlp.gate.e_score_correction_bias"), role, &[total]);
                        }
                        if self.gating_residual_of(i).is_some() {
                            add(name("mlp.gate_residual.weight"), Role::RouterResidual, &[total, total]);
                        }
                        let constant = experts.zero_experts().map_or(0, |own| own.constant);
                        if constant > 0 {
                            let at = name("mlp.constant_experts");
                            add(format!("{at}.gate.weight"), Role::ConstantGate, &[2 * constant, hidden]);
                            add(format!("{at}.vectors"), Role::ConstantVectors, &[constant, hidden]);
                        }
                        let roles = FeedForwardRoles::DENSE;
                        let stack = [own.end - own.start];
                        self.feed_forward_parameters(&mut add, &name("mlp.experts"), roles, &stack, inner);
                        if let Some(shared) = experts.shared {
                            let (at, inner) = (name("mlp.shared_expert"), shared.intermediate_size);
                            self.feed_forward_parameters(&mut add, &at, FeedForwardRoles::SHARED, &[], inner);
                            if shared.gated {
                                let role = Role::SharedRouter;
                                add(name("mlp.shared_expert_gate.weight"), role, &[1, hidden]);
                            }
                        }
                    }
                }
                if after {
                    add(name("post_feedforward_layernorm.weight"), Role::PostMlpNorm, &[hidden]);
                }
            }
            BlockId::Head => {
                add("model.norm.weight".into(), Role::FinalNorm, &[hidden]);
                if layer_norm {
                    add("model.norm.bias".into(), Role::FinalNormBias, &[hidden]);
                }
                if !self.tie_word_embeddings {
                    add("lm_head.weight".into(), Role::LmHead, &[self.table_rows(), hidden]);
                }
            }
        }
        list
    }

    /// The projections to queries, keys and values, and their norms.
    fn qkv_parameters(&self, add: &mut impl FnMut(String, Role, &[u64]), at: &str) {
        let (hidden, q, kv) = (self.hidden_size, self.q_size(), self.kv_size());
        for (part, weight, bias, out) in [
            ("q_proj", Role::QProj, Role::QBias, q),
            ("k_proj", Role::KProj, Role::KBias, kv),
            ("v_proj", Role::VProj, Role::VBias, kv),
        ] {
            add(format!("{at}.{part}.weight"), weight, &[out, hidden]);
            if self.attention.qkv_bias {
                add(format!("{at}.{part}.bias"), bias, &[out]);
            }
        }
        if let Some(kind) = self.attention.qk_norm {
            let width = |whole| if kind == QkNorm::Whole { whole } else { self.attention.head_dim };
            add(format!("{at}.q_norm.weight"), Role::QNorm, &[width(q)]);
            add(format!("{at}.k_norm.weight"), Role::KNorm, &[width(kv)]);
        }
    }

    /// The same through narrow vectors; names are those of DeepSeek-V2.
    fn latent_parameters(
        &self,
        add: &mut impl FnMut(String, Role, &[u64]),
        at: &str,
        LatentAttention { query_rank, kv_rank, value_dim }: LatentAttention,
    ) {
        let (hidden, q, attention) = (self.hidden_size, self.q_size(), &self.attention);
        let rotated = attention.rotated_dim();
        match query_rank {
            None => add(format!("{at}.q_proj.weight"), Role::QProj, &[q, hidden]),
            Some(rank) => {
                add(format!("{at}.q_a_proj.weight"), Role::QDownProj, &[rank, hidden]);
                add(format!("{at}.q_a_layernorm.weight"), Role::QNorm, &[rank]);
                add(format!("{at}.q_b_proj.weight"), Role::QUpProj, &[q, rank]);
            }
        }
        let of_heads = attention.heads * (attention.head_dim.saturating_sub(rotated) + value_dim);
        add(format!("{at}.kv_a_proj_with_mqa.weight"), Role::KvDownProj, &[kv_rank + rotated, hidden]);
        add(format!("{at}.kv_a_layernorm.weight"), Role::KNorm, &[kv_rank]);
        add(format!("{at}.kv_b_proj.weight"), Role::KvUpProj, &[of_heads, kv_rank]);
    }

    /// Gate, up and down of a feed-forward part of an inner width, or of each of `stack`.
    fn feed_forward_parameters(
        &self,
        add: &mut impl FnMut(String, Role, &[u64]),
        at: &str,
        FeedForwardRoles { gate, up, down }: FeedForwardRoles,
        stack: &[u64],
        inner: u64,
    ) {
        let hidden = self.hidden_size;
        let gate = self.mlp.gated.then_some((".gate_proj", gate, inner, hidden));
        for (part, LinearRoles { weight, bias }, out, inp) in
            gate.into_iter().chain([(".up_proj", up, inner, hidden), (".down_proj", down, hidden, inner)])
        {
            let of_stack = |rest: &[u64]| [stack, rest].concat();
            add([at, part, ".weight"].concat(), weight, &of_stack(&[out, inp]));
            if let Some(bias) = bias.filter(|_| self.mlp.bias) {
                add([at, part, ".bias"].concat(), bias, &of_stack(&[out]));
            }
        }
    }
}

/// The roles of a linear.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinearRoles {
    /// That of its matrix.
    pub weight: Role,
    /// That of its bias, where it can have one.
    pub bias: Option<Role>,
}

/// The roles of the linears of a feed-forward part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FeedForwardRoles {
    /// The gate, where there is one.
    pub gate: LinearRoles,
    /// The up projection.
    pub up: LinearRoles,
    /// The down projection.
    pub down: LinearRoles,
}

impl FeedForwardRoles {
    /// Those of a layer's feed-forward part, or of its experts.
    pub const DENSE: FeedForwardRoles = FeedForwardRoles {
        gate: LinearRoles { weight: Role::GateProj, bias: Some(Role::GateBias) },
        up: LinearRoles { weight: Role::UpProj, bias: Some(Role::UpBias) },
        down: LinearRoles { weight: Role::DownProj, bias: Some(Role::DownBias) },
    };
    /// What experts are computed with: the biases of their down projections come behind the weights of experts.
    pub const EXPERTS: FeedForwardRoles = FeedForwardRoles {
        down: LinearRoles { weight: Role::DownProj, bias: None },
        ..FeedForwardRoles::DENSE
    };
    /// Those of a shared expert.
    pub const SHARED: FeedForwardRoles = FeedForwardRoles {
        gate: LinearRoles { weight: Role::SharedGateProj, bias: None },
        up: LinearRoles { weight: Role::SharedUpProj, bias: None },
        down: LinearRoles { weight: Role::SharedDownProj, bias: None },
    };
}
