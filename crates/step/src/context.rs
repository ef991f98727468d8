//! What every block function needs to know: the device, the model's shape, the geometry of the batch.

use plimsoll_device::{AttentionShape, Compute, DType, Device, Glu, Tensor};
use plimsoll_model::{Activation, ExpertsSpec, MlpSpec, ModelSpec};

use crate::StepError;
use crate::adapter::Dropout;
use crate::block::{Absorbed, Around, Chunk, Mover, Turn};
use crate::linear::Multiply;
use crate::products::Products;
use crate::rope::{RopeTable, RopeTables};
use crate::routes::Routes;
use crate::settings::{AttentionKind, Precision};
use crate::store::ExpertWeights;

/// The activation function of a feed-forward part, as kernels know it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum NonLinearity {
    /// With a gate or without.
    Plain(Glu),
    /// The clamped SwiGLU, which has a gate.
    Clamped { alpha: f32, limit: f32 },
}

/// What a block needs to know of its pass. N = batch * q_len tokens.
pub(crate) struct Context<'a> {
    pub device: &'a dyn Device,
    pub spec: &'a ModelSpec,
    /// Type of the residual stream and of saved activations.
    pub activations: DType,
    pub compute: Compute,
    /// The products of the blocks' linears.
    pub linears: Multiply,
    /// The feed-forward part of this layer.
    pub mlp: &'a MlpSpec,
    /// Its experts, where it has any.
    pub experts: Option<&'a ExpertsSpec>,
    /// What routers have decided in this pass.
    pub routes: Option<&'a Routes>,
    /// Experts that come when a token is sent to them, where they do.
    pub expert_weights: Option<&'a dyn ExpertWeights>,
    pub ropes: &'a RopeTables,
    /// The rotation of this layer.
    pub rope: Option<&'a RopeTable>,
    /// u32 [N]: the position of every token in its sequence or document.
    pub positions: &'a Tensor,
    /// u32 [N]: the position in its sequence of the first token of every token's document, where there are documents.
    pub documents: Option<&'a Tensor>,
    pub attention: AttentionShape,
    /// How the queries of this pass see a cache of narrow vectors, where it is one.
    pub absorbed: Option<&'a Absorbed>,
    pub attention_kind: AttentionKind,
    /// The feed-forward part takes this many tokens at a time, where it does not take all.
    pub mlp_chunk_tokens: Option<u64>,
    /// What adapters drop of their inputs.
    pub dropout: Option<Dropout>,
    /// Takes what is kept for the backward pass to where it waits, where that is not the device.
    pub away: Option<&'a Mover<'a>>,
    /// The chunk of a sequence that these tokens are, where it is visited in chunks.
    pub chunk: Option<Chunk<'a>>,
    /// The ranks that have the rest of the sequences, where they have parts of them.
    pub around: Option<Around<'a>>,
    /// The ranks that share every product, where there are several.
    pub products: Option<&'a Products<'a>>,
    /// The same, where each has some rows of the residual stream between the halves of layers.
    pub rows: Option<&'a Products<'a>>,
    /// The ranks that have different experts, where no rank has all.
    pub expert_ranks: Option<&'a Products<'a>>,
}

impl<'a> Context<'a> {
    /// That of tokens at `positions` in a pass that drops nothing, cuts nothing into chunks and takes nothing away.
    pub fn new(
        device: &'a dyn Device,
        spec: &'a ModelSpec,
        precision: Precision,
        ropes: &'a RopeTables,
        positions: &'a Tensor,
        attention: AttentionShape,
    ) -> Context<'a> {
        Context {
            device,
            spec,
            activations: precision.activations,
            compute: precision.compute(),
            linears: Multiply::of(precision),
            mlp: &spec.mlp,
            experts: None,
            routes: None,
            expert_weights: None,
            ropes,
            rope: ropes.of(false),
            positions,
            documents: None,
            attention,
            absorbed: None,
            attention_kind: AttentionKind::Flash,
            mlp_chunk_tokens: None,
            dropout: None,
            away: None,
            chunk: None,
            around: None,
            products: None,
            expert_ranks: None,
            rows: None,
        }
    }

    /// The same for a layer: its window, its rotation and its feed-forward part.
    pub fn layer(&self, layer: u32) -> Context<'a> {
        let own = self.spec.attention.window(layer);
        let (asked, block_sparse) = match self.attention_kind {
            AttentionKind::Flash | AttentionKind::Standard => (None, None),
            AttentionKind::SlidingWindow(window) => (Some(window), None),
            AttentionKind::BlockSparse(pattern) => (None, Some(pattern)),
        };
        let window = own.into_iter().chain(asked).min();
        let attention = AttentionShape { window, block_sparse, ..self.attention };
        let (mlp, experts) = (self.spec.feed_forward(layer), self.spec.experts_of(layer));
        let chunk = self.chunk.map(|chunk| Chunk { turn: Turn { layer, ..chunk.turn }, ..chunk });
        Context { rope: self.ropes.of(own.is_some()), attention, mlp, experts, chunk, ..*self }
    }

    /// The same for tokens from `row` on.
    pub fn at_row(&self, row: u64) -> Context<'a> {
        let dropout = self.dropout.map(|dropout| Dropout { first_row: dropout.first_row + row, ..dropout });
        Context { dropout, ..*self }
    }

    /// Tokens of a chunk of the feed-forward part, if `tokens` are taken in chunks.
    pub fn mlp_chunk(&self, tokens: u64) -> Option<u64> {
        self.mlp_chunk_tokens.filter(|chunk| *chunk < tokens)
    }

    /// The same for ranks that share every product of so many tokens, or have different experts.
    pub fn sharing(self, products: Option<&'a Products<'a>>, tokens: u64) -> Context<'a> {
        if let Some(ranks) = products.filter(|products| products.shares_experts_alone()) {
            return Context { expert_ranks: Some(ranks), ..self };
        }
        let rows = products.filter(|products| products.shares_rows(tokens));
        Context { products, rows, ..self }
    }

    /// Rows of the residual stream of so many tokens that this rank has.
    pub fn stream_rows(&self, tokens: u64) -> u64 {
        tokens / self.row_shares()
    }

    /// Tokens of a residual stream of so many rows.
    pub fn tokens(&self, stream_rows: u64) -> u64 {
        stream_rows * self.row_shares()
    }

    fn row_shares(&self) -> u64 {
        self.rows.map_or(1, |products| u64::from(products.ranks().size()))
    }

    /// What a half of a layer works with, [N, ..], of what is between the halves.
    pub fn of_all_rows(&self, x: &Tensor) -> Result<Tensor, StepError> {
        self.rows.map_or_else(|| Ok(x.clone()), |products| products.rows_of_all(self.device, x))
    }

    /// What is between the halves of something that every rank has all of.
    pub fn of_stream(&self, x: &Tensor) -> Result<Tensor, StepError> {
        self.rows.map_or_else(|| Ok(x.clone()), |products| products.own_rows(x))
    }

    /// What is between the halves: the sum of what all ranks that share products have of x, [N, ..].
    pub fn sum(&self, x: Tensor, name: &'static str) -> Result<Tensor, StepError> {
        match (self.products, self.rows) {
            (_, Some(products)) => products.sum_of_own_rows(self.device, &x, name),
            (Some(products), None) => {
                products.sum(self.device, &x)?;
                Ok(x)
            }
            (None, None) => Ok(x),
        }
    }

    /// The ranks that share the tables of the vocabulary.
    pub fn tables(&self) -> Option<&'a Products<'a>> {
        self.products.filter(|products| products.vocabulary.is_some())
    }

    /// The cap on logits.
    pub fn logit_soft_cap(&self) -> Option<f32> {
        self.spec.logit_soft_cap.map(|cap| cap as f32)
    }

    /// The activation function of the feed-forward part.
    pub fn activation(&self) -> NonLinearity {
        match self.mlp.activation {
            Activation::Silu => NonLinearity::Plain(Glu::Silu),
            Activation::Gelu => NonLinearity::Plain(Glu::Gelu),
            Activation::GeluTanh => NonLinearity::Plain(Glu::GeluTanh),
            Activation::ClampedSwiglu { alpha, limit } => {
                NonLinearity::Clamped { alpha: alpha as f32, limit: limit as f32 }
            }
        }
    }
}

/// The geometry of `batch` sequences of `q_len` new tokens after `past` old ones.
pub(crate) fn attention_shape(
    spec: &ModelSpec,
    batch: u64,
    q_len: u64,
    past: u64,
    capacity: u64,
) -> AttentionShape {
    let attention = &spec.attention;
    AttentionShape {
        batch,
        q_len,
        kv_len: past + q_len,
        kv_capacity: capacity,
        heads: attention.heads,
        kv_heads: attention.kv_heads,
        head_dim: attention.head_dim,
        scale: attention.scale.unwrap_or_else(|| (attention.head_dim as f64).powf(-0.5)) as f32,
        window: None,
        block_sparse: None,
        soft_cap: attention.soft_cap.map(|cap| cap as f32),
    }
}

#[cfg(test)]
mod tests {
    use plimsoll_device::Dry;

    use super::*;
    use crate::common::{gemma, llama};
    use crate::inputs::{Inputs, Places};
    use crate::settings::MicroBatch;

    /// Looks at the context of a pass over nine tokens.
    fn with_context(
        spec: &ModelSpec,
        mlp_chunk_tokens: Option<u64>,
        dropout: Option<Dropout>,
        look: impl FnOnce(&Context<'_>),
    ) {
        let dry = Dry::new();
        let ropes = RopeTables::new(&dry, spec, 9).unwrap();
        let inputs =
            Inputs::upload(&dry, spec, &Places::whole(1, 9), None, &MicroBatch::new(&[], &[])).unwrap();
        let ctx = inputs.context(&dry, spec, Precision::F32, &ropes);
        look(&Context { mlp_chunk_tokens, dropout, ..ctx });
    }

    /// The first and the last layer of the three have windows.
    #[test]
    fn layers_with_a_window_have_a_rotation_of_their_own() {
        with_context(&gemma(), None, None, |ctx| {
            for (layer, windowed) in [(0, true), (1, false), (2, true)] {
                let own = ctx.layer(layer);
                assert!(std::ptr::eq(own.rope.unwrap(), ctx.ropes.of(windowed).unwrap()), "{layer}");
                assert_eq!(own.attention.window, windowed.then_some(3));
            }
            assert!(!std::ptr::eq(ctx.ropes.of(true).unwrap(), ctx.ropes.of(false).unwrap()));
        });
    }

    #[test]
    fn what_is_dropped_depends_on_the_row() {
        let dropout = Dropout { probability: 0.5, seed: 7, first_row: 0 };
        with_context(&llama(), None, Some(dropout), |ctx| {
            let later = ctx.at_row(6).dropout.unwrap();
            assert_eq!((later.first_row, later.seed, later.probability), (6, 7, 0.5));
        });
        with_context(&llama(), None, None, |ctx| assert!(ctx.at_row(6).dropout.is_none()));
    }

    #[test]
    fn a_chunk_that_holds_all_tokens_is_none() {
        with_context(&llama(), Some(5), None, |ctx| {
            assert_eq!([4, 5, 6].map(|tokens| ctx.mlp_chunk(tokens)), [None, None, Some(5)]);
        });
        with_context(&llama(), None, None, |ctx| assert_eq!(ctx.mlp_chunk(100), None));
    }
}
