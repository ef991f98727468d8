//! A decoder: embeddings, blocks, the final norm and the head, as `LlamaForCausalLM` and its kin run them.

use std::cell::RefCell;
use std::rc::Rc;

use plimsoll_model::NormKind;

use super::attention::Attention;
use super::experts::Experts;
use super::layers::{Linear, Maker, Norm, NormForm};
use super::loss::logits_and_loss;
use super::mlp::Mlp;
use super::positions::{Rotary, causal_mask, rotates_by_layer};
use crate::eager::{Segment, Tensor, Torch};
use crate::estimate::Kind;
use crate::run::{Attention as Implementation, Checkpointing, Run, Stack, TorchType};
use crate::sharded::Shards;

/// Keys and values of earlier tokens, for each layer.
#[derive(Default)]
pub(crate) struct Cache {
    layers: RefCell<Vec<Option<(Tensor, Tensor)>>>,
    /// What a pass has replaced, where caches are tuples: the caller keeps the old one until the pass has ended.
    replaced: RefCell<Vec<(Tensor, Tensor)>>,
}

/// From this version on a cache is an object, and a layer's update replaces what it had.
const CACHE_OBJECTS: (u32, u32) = (4, 36);

impl Cache {
    /// Tokens in it.
    pub fn len(&self) -> u64 {
        self.layers.borrow().first().and_then(|layer| layer.as_ref().map(|(k, _)| k.size(2))).unwrap_or(0)
    }

    /// Lets so many tokens be as if they had been decoded.
    pub fn skip(&self, torch: &Torch, tokens: u64) {
        for layer in self.layers.borrow_mut().iter_mut().flatten() {
            let longer = |x: &Tensor| {
                torch.of_kind(Kind::KvCache, || {
                    torch.empty(&x.shape().with(2, x.size(2) + tokens), x.dtype(), "cat")
                })
            };
            let (keys, values) = (longer(&layer.0), longer(&layer.1));
            *layer = (keys, values);
        }
    }

    /// `DynamicCache.update`: what is there and what is new, in a new tensor.
    pub fn update(&self, torch: &Torch, layer: usize, k: Tensor, v: Tensor) -> (Tensor, Tensor) {
        let mut layers = self.layers.borrow_mut();
        if layers.len() <= layer {
            layers.resize_with(layer + 1, || None);
        }
        let joined = |before: Option<&Tensor>, new: &Tensor| {
            torch.of_kind(Kind::KvCache, || match before {
                Some(before) => torch.cat(&[before, new], 2),
                None => torch.cat(&[new], 2),
            })
        };
        let before = layers[layer].as_ref();
        let keys = joined(before.map(|(k, _)| k), &k);
        let values = joined(before.map(|(_, v)| v), &v);
        let before = layers[layer].replace((keys.detach(), values.detach()));
        if torch.versions().transformers < CACHE_OBJECTS {
            self.replaced.borrow_mut().extend(before);
        }
        (keys, values)
    }

    /// The end of a pass.
    pub fn end_pass(&self) {
        self.replaced.borrow_mut().clear();
    }
}

/// What all layers of a forward pass see.
#[derive(Clone)]
pub(crate) struct Context {
    pub attention: Implementation,
    pub cache: Option<Rc<Cache>>,
    pub liger: bool,
    rotation: Option<(Tensor, Tensor)>,
    local_rotation: Option<(Tensor, Tensor)>,
    mask: Option<Tensor>,
    window_mask: Option<Tensor>,
    positions: Tensor,
    /// Where every layer makes its own cos and sin.
    by_layer: Option<Rc<Rotary>>,
}

impl Context {
    /// What a layer gets, and a checkpoint of it keeps: its own mask and tables alone.
    fn for_layer(&self, windowed: bool) -> Context {
        let mut own = self.clone();
        if windowed {
            own.mask = None;
            own.rotation = own.rotation.filter(|_| own.local_rotation.is_none());
        } else {
            own.window_mask = None;
            own.local_rotation = None;
        }
        own
    }

    /// cos and sin that a layer makes for itself.
    pub fn rotation_of_layer(&self, torch: &Torch, dtype: TorchType) -> Option<(Tensor, Tensor)> {
        self.by_layer.as_ref().map(|rotary| rotary.forward(torch, &self.positions, dtype))
    }

    /// cos and sin for a layer, with a window or without.
    pub fn rotation(&self, windowed: bool) -> Option<&(Tensor, Tensor)> {
        self.local_rotation.as_ref().filter(|_| windowed).or(self.rotation.as_ref())
    }

    /// The mask of a layer.
    pub fn mask(&self, windowed: bool) -> Option<&Tensor> {
        if windowed { self.window_mask.as_ref() } else { self.mask.as_ref() }
    }
}

/// The second half of a block.
enum FeedForward {
    Dense(Mlp),
    Experts(Box<Experts>),
}

impl FeedForward {
    fn linears(&mut self) -> Vec<&mut Linear> {
        match self {
            FeedForward::Dense(mlp) => mlp.linears(),
            FeedForward::Experts(experts) => experts.linears(),
        }
    }

    fn all(&self) -> Vec<&Linear> {
        match self {
            FeedForward::Dense(mlp) => mlp.all(),
            FeedForward::Experts(experts) => experts.all(),
        }
    }

    fn trained(&self) -> Vec<Tensor> {
        match self {
            FeedForward::Dense(mlp) => mlp.trained(),
            FeedForward::Experts(experts) => experts.trained(),
        }
    }

    fn forward(&self, torch: &Torch, x: &Tensor, liger: bool) -> Tensor {
        match self {
            FeedForward::Dense(mlp) => mlp.forward(torch, x, liger),
            FeedForward::Experts(experts) => experts.forward(torch, x, liger),
        }
    }
}

struct Block {
    before_attention: Option<Norm>,
    attention: Attention,
    after_attention: Option<Norm>,
    before_mlp: Option<Norm>,
    mlp: FeedForward,
    after_mlp: Option<Norm>,
    gpt2: bool,
}

impl Block {
    fn new(maker: &Maker<'_>, form: NormForm, layer: u32) -> Block {
        let model = &maker.run.model;
        let placement = model.norm.placement;
        let norm = |name, there: bool| there.then(|| maker.norm(name, form, model.hidden_size));
        Block {
            attention: Attention::new(maker, form, layer),
            mlp: match model.experts_of(layer) {
                Some(experts) => FeedForward::Experts(Box::new(Experts::new(maker, experts))),
                None => FeedForward::Dense(Mlp::new(maker)),
            },
            before_attention: norm("input_layernorm", placement.before()),
            after_attention: norm("post_attention_layernorm", placement.after()),
            before_mlp: norm("pre_feedforward_layernorm", placement.before()),
            after_mlp: norm("post_feedforward_layernorm", placement.after()),
            gpt2: model.architecture == "gpt2",
        }
    }

    fn trained(&self) -> Vec<Tensor> {
        let norms = [&self.before_attention, &self.after_attention, &self.before_mlp, &self.after_mlp];
        let norms = norms.into_iter().flatten().flat_map(Norm::trained);
        self.attention.trained().into_iter().chain(self.mlp.trained()).chain(norms).collect()
    }

    fn forward(&self, torch: &Torch, x: &Tensor, context: &Context, layer: usize) -> Tensor {
        torch.module(&format!("layers.{layer}"), || {
            let through = |norm: &Option<Norm>, x: Tensor| match norm {
                Some(norm) => norm.forward(torch, &x),
                None => x,
            };
            let mut residual = x.clone();
            let mut hidden = through(&self.before_attention, x.clone());
            // The caller keeps the weights of the eager form until the layer ends.
            let (out, _weights) =
                torch.module("self_attn", || self.attention.forward(torch, &hidden, context, layer));
            let mut attention_output = None;
            if self.gpt2 {
                hidden = torch.add(&out, &residual);
                attention_output = Some(out);
            } else {
                hidden = out;
                hidden = through(&self.after_attention, hidden);
                hidden = torch.add(&residual, &hidden);
            }
            residual = hidden.clone();
            hidden = through(&self.before_mlp, hidden);
            let out = torch.module("mlp", || self.mlp.forward(torch, &hidden, context.liger));
            let feed_forward = if self.gpt2 {
                torch.add(&residual, &out)
            } else {
                hidden = out;
                hidden = through(&self.after_mlp, hidden);
                torch.add(&residual, &hidden)
            };
            drop(attention_output);
            feed_forward
        })
    }
}

/// What `model(...)` returns.
pub(crate) struct Output {
    pub loss: Option<Tensor>,
    /// The logits that are kept.
    pub logits: Vec<Tensor>,
    /// Keys and values, which live as long as the output does.
    _cache: Option<Rc<Cache>>,
}

/// A model with a language-modeling head.
pub(crate) struct Decoder {
    embedding: Tensor,
    positions: Option<Tensor>,
    embedding_scale: Option<Tensor>,
    blocks: Vec<Rc<Block>>,
    norm: Norm,
    head: Linear,
    rotary: Option<Rc<Rotary>>,
    local_rotary: Option<Rotary>,
    /// What PEFT's `ModulesToSaveWrapper` keeps of a table beside its trained copy.
    _originals: Vec<Tensor>,
    /// Whether the embedding's output is made to need a gradient (`enable_input_require_grads`).
    input_needs_grad: bool,
    /// Where ranks share the weights: what gathers and reduces them.
    pub shards: Option<Rc<Shards>>,
}

impl Decoder {
    /// The model with its weights on the device, adapters included.
    pub fn load(torch: &Torch, run: &Run) -> Decoder {
        let model = &run.model;
        let maker = Maker { torch, run };
        let form = match (model.norm.kind, model.norm.one_plus_weight) {
            (NormKind::Layer, _) => NormForm::Layer,
            (NormKind::Rms, _) if run.liger_layers => NormForm::Liger,
            (NormKind::Rms, true) => NormForm::Gemma,
            (NormKind::Rms, false) => NormForm::Llama,
        };
        let hidden = model.hidden_size;
        let embedding = maker.parameter("embed_tokens", &[model.vocab_size, hidden]);
        let learned = model.attention.rope.is_none();
        let positions = learned.then(|| maker.parameter("wpe", &[model.max_position_embeddings, hidden]));
        let embedding_scale = model.embedding_scale.map(|_| torch.empty(&[], run.weights, "empty"));
        let mut blocks: Vec<Block> =
            (0..model.num_layers).map(|layer| Block::new(&maker, form, layer)).collect();
        let norm = maker.norm("norm", form, hidden);
        let ties = model.tie_word_embeddings && run.stack != Stack::Litgpt;
        let tied = ties.then(|| embedding.clone());
        let mut head = maker.head("lm_head", [hidden, model.vocab_size], tied);
        if let Some(adapter) = &run.adapter {
            if run.quantization.is_some() {
                // `prepare_model_for_kbit_training` ends so.
                torch.memory().empty_cache();
            }
            let of_blocks = blocks.iter_mut().flat_map(|block| {
                let mut linears = block.attention.linears();
                linears.extend(block.mlp.linears());
                linears
            });
            for linear in of_blocks.chain([&mut head]).filter(|linear| linear.is_target(adapter)) {
                linear.adapt(torch, adapter);
            }
        }
        let whole = |table: &&str| {
            run.adapter.iter().flat_map(|adapter| &adapter.trained_whole).any(|trained| trained == *table)
        };
        let wraps = matches!(run.stack, Stack::Plain | Stack::Transformers | Stack::Unsloth);
        let originals = ["embed_tokens", "lm_head"].iter().filter(|table| wraps && whole(table));
        let originals = originals.map(|_| maker.frozen(&[model.vocab_size, hidden])).collect();
        // One table for each kind of layer that there is.
        let layers = model.attention.sliding_window.as_ref().map(|window| &window.layers);
        let two = model.attention.local_rope.is_some();
        let there = |windowed: bool| !two || layers.is_some_and(|layers| layers.contains(&windowed));
        let rotary = |rope: &Option<_>, windowed: bool| {
            rope.as_ref().filter(|_| there(windowed)).map(|rope| Rotary::new(torch, rope))
        };
        Decoder {
            embedding,
            positions,
            embedding_scale,
            rotary: rotary(&model.attention.rope, false).map(Rc::new),
            local_rotary: rotary(&model.attention.local_rope, true),
            blocks: blocks.into_iter().map(Rc::new).collect(),
            norm,
            head,
            _originals: originals,
            input_needs_grad: run.adapter.is_some() && run.checkpointing != Checkpointing::Off,
            shards: None,
        }
    }

    /// What is trained, in the order of `parameters()`.
    pub fn trained(&self) -> Vec<Tensor> {
        let tables = [Some(&self.embedding), self.positions.as_ref()].into_iter().flatten();
        let tables = tables.filter(|table| table.requires_grad()).cloned();
        let mut all: Vec<Tensor> = tables.collect();
        all.extend(self.blocks.iter().flat_map(|block| block.trained()));
        all.extend(self.norm.trained());
        all.extend(self.head.trained());
        let mut seen = std::collections::HashSet::new();
        all.retain(|tensor| seen.insert(tensor.storage().id()));
        all
    }

    /// Merges every adapter.
    pub fn merge(&self, torch: &Torch) {
        let of_blocks =
            self.blocks.iter().flat_map(|block| block.attention.all().into_iter().chain(block.mlp.all()));
        of_blocks.chain([&self.head]).for_each(|linear| linear.merge(torch));
    }

    /// What is trained of each block, and behind them of all else.
    pub fn trained_by_block(&self) -> Vec<Vec<Tensor>> {
        let mut units: Vec<Vec<Tensor>> = self.blocks.iter().map(|block| block.trained()).collect();
        let of_blocks: std::collections::HashSet<u64> =
            units.iter().flatten().map(|tensor| tensor.storage().id()).collect();
        let outside = |tensor: &Tensor| !of_blocks.contains(&tensor.storage().id());
        units.push(self.trained().into_iter().filter(outside).collect());
        units
    }

    /// `model(input_ids [B, S], labels)`.
    pub fn forward(
        &self,
        torch: &Torch,
        run: &Run,
        tokens: &Tensor,
        labels: Option<&Tensor>,
        cache: Option<Rc<Cache>>,
    ) -> Output {
        let rows = tokens.size(1);
        let mut embeddings = torch.module("embed_tokens", || torch.embedding(tokens, &self.embedding));
        if let Some(scale) = &self.embedding_scale {
            let scale = torch.to(scale, embeddings.dtype());
            embeddings = torch.mul(&embeddings, &scale);
        }
        if self.input_needs_grad && labels.is_some() && !embeddings.requires_grad() {
            embeddings = embeddings.as_leaf();
        }
        let before = cache.as_ref().map_or(0, |cache| cache.len());
        let positions = {
            let range = torch.empty(&[rows], TorchType::I64, "arange");
            let shifted = torch.map(&range, TorchType::I64, "add");
            drop(range);
            torch.unsqueeze(&shifted, 0)
        };
        let mut hidden = embeddings.clone();
        let position_embeddings = self.positions.as_ref().map(|table| torch.embedding(&positions, table));
        if let Some(table) = &position_embeddings {
            hidden = torch.add(&embeddings, table);
        }
        let dtype = embeddings.dtype();
        let windowed = |size: u64| before + rows > size;
        let window = run.model.attention.sliding_window.as_ref();
        let any = window.is_some_and(|window| window.layers.contains(&true));
        let mask = causal_mask(torch, run, dtype, [rows, before + rows], false);
        let window_mask = match window {
            Some(window) if any => {
                causal_mask(torch, run, dtype, [rows, before + rows], windowed(window.size))
            }
            _ => None,
        };
        let turn = |rotary: Option<&Rotary>| rotary.map(|rotary| rotary.forward(torch, &positions, dtype));
        let by_layer = self.rotary.clone().filter(|_| rotates_by_layer(torch, run));
        let context = Context {
            attention: run.attention,
            cache: cache.clone(),
            liger: run.liger_layers,
            rotation: turn(self.rotary.as_deref().filter(|_| by_layer.is_none())),
            local_rotation: turn(self.local_rotary.as_ref()),
            mask,
            window_mask,
            positions,
            by_layer,
        };
        for (layer, block) in self.blocks.iter().enumerate() {
            let (block, context) = (Rc::clone(block), context.for_layer(block.attention.is_windowed()));
            let segment: Segment = Rc::new(move |torch, x| block.forward(torch, x, &context, layer));
            if let Some(shards) = &self.shards {
                hidden = shards.enter(torch, layer, &hidden);
            }
            hidden = match run.checkpointing {
                Checkpointing::Off => segment(torch, &hidden),
                _ if labels.is_none() => segment(torch, &hidden),
                Checkpointing::NonReentrant => torch.checkpoint(segment, &hidden),
                Checkpointing::Reentrant => torch.checkpoint_reentrant(segment, &hidden, false),
                Checkpointing::Offloaded => torch.checkpoint_reentrant(segment, &hidden, true),
            };
            if let Some(shards) = &self.shards {
                hidden = shards.leave(torch, layer, &hidden);
            }
        }
        hidden = self.norm.forward(torch, &hidden);
        // `generate` asks for the logits of the last token alone, since 4.45.
        if labels.is_none() && torch.versions().transformers >= (4, 45) {
            hidden = torch.slice(&hidden, 1, 1);
        }
        drop((context, embeddings, position_embeddings));
        let soft_cap = run.model.logit_soft_cap.is_some();
        let (logits, loss) = torch
            .module("lm_head", || logits_and_loss(torch, run.loss, soft_cap, &self.head, &hidden, labels));
        Output { loss, logits, _cache: cache }
    }
}
