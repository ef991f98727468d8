//! Self-attention as transformers has it.

use plimsoll_model::QkNorm;

use super::decoder::Context;
use super::layers::{Linear, Maker, Norm, NormForm, by_heads};
use super::positions::{apply_rotary, is_of_transformers};
use crate::eager::{Tensor, Torch, Unary};
use crate::run::{Attention as Implementation, Stack, TorchType};

/// From this version on attention is a function that all models call (`integrations/sdpa_attention.py`): the layer keeps what it passes on.
const SHARED_FUNCTION: (u32, u32) = (4, 48);

/// Up to this version that function made queries, keys and values contiguous; models before it did where there is a mask.
const COPIES_UNTIL: (u32, u32) = (4, 56);

/// The projections to queries, keys and values.
enum Projections {
    /// One each.
    Separate(Box<[Linear; 3]>),
    /// One for all (Phi-3, GPT-2).
    Joint(Box<Linear>),
}

/// An attention module.
pub(crate) struct Attention {
    projections: Projections,
    norms: Option<[Norm; 2]>,
    /// Whether the norms come before heads are transposed (Qwen 3) or after (Gemma 3).
    norms_first: bool,
    /// Whether they are of all heads together (OLMo 2, OLMoE).
    norms_whole: bool,
    output: Linear,
    heads: u64,
    kv_heads: u64,
    width: u64,
    soft_cap: bool,
    gpt2: bool,
    phi3: bool,
    window: Option<u64>,
    /// Whether key and value heads are repeated whatever PyTorch can do.
    expands: bool,
    /// Whether its code is that of transformers.
    of_transformers: bool,
    /// Whether queries, keys and values come from one product, as litgpt has them.
    at_once: bool,
}

impl Attention {
    pub fn new(maker: &Maker<'_>, form: NormForm, layer: u32) -> Attention {
        let model = &maker.run.model;
        let (spec, hidden) = (&model.attention, model.hidden_size);
        let (q, kv) = (model.q_size(), model.kv_size());
        let gpt2 = model.architecture == "gpt2";
        // litgpt has a gate and an up product of their own for every model, and its queries, keys and values are `at_once`.
        let phi3 = model.architecture == "phi3" && maker.run.stack != Stack::Litgpt;
        let projections = if gpt2 {
            Projections::Joint(Box::new(maker.conv1d("c_attn", [hidden, 3 * hidden])))
        } else if phi3 {
            Projections::Joint(Box::new(maker.linear("qkv_proj", [hidden, q + 2 * kv], false)))
        } else {
            let project = |name, outer| maker.linear(name, [hidden, outer], spec.qkv_bias);
            Projections::Separate(Box::new([
                project("q_proj", q),
                project("k_proj", kv),
                project("v_proj", kv),
            ]))
        };
        let output = if gpt2 {
            maker.conv1d("c_proj", [hidden, hidden])
        } else {
            maker.linear("o_proj", [q, hidden], spec.output_bias)
        };
        let norms = |[q, k]: [u64; 2]| [maker.norm("q_norm", form, q), maker.norm("k_norm", form, k)];
        let norm_widths = |kind| match kind {
            QkNorm::PerHead => [spec.head_dim; 2],
            QkNorm::Whole => [q, kv],
        };
        Attention {
            projections,
            norms: spec.qk_norm.map(|kind| norms(norm_widths(kind))),
            norms_whole: spec.qk_norm == Some(QkNorm::Whole),
            norms_first: !model.norm.one_plus_weight,
            output,
            heads: spec.heads,
            kv_heads: spec.kv_heads,
            width: spec.head_dim,
            soft_cap: spec.soft_cap.is_some(),
            gpt2,
            phi3,
            window: spec.window(layer),
            at_once: maker.run.stack == Stack::Litgpt && spec.qk_norm.is_none(),
            expands: matches!(maker.run.stack, Stack::Torchtune | Stack::Litgpt),
            of_transformers: is_of_transformers(maker.run),
        }
    }

    /// Whether it sees a part of the past only.
    pub fn is_windowed(&self) -> bool {
        self.window.is_some()
    }

    pub fn linears(&mut self) -> Vec<&mut Linear> {
        let mut linears: Vec<&mut Linear> = match &mut self.projections {
            Projections::Separate(three) => three.iter_mut().collect(),
            Projections::Joint(one) => vec![one],
        };
        linears.push(&mut self.output);
        linears
    }

    /// Its linears, in the order of `linears`.
    pub fn all(&self) -> Vec<&Linear> {
        let projections: Vec<&Linear> = match &self.projections {
            Projections::Separate(three) => three.iter().collect(),
            Projections::Joint(one) => vec![one],
        };
        projections.into_iter().chain([&self.output]).collect()
    }

    pub fn trained(&self) -> Vec<Tensor> {
        let linears = self.all().into_iter().flat_map(Linear::trained);
        linears.chain(self.norms.iter().flatten().flat_map(Norm::trained)).collect()
    }

    fn heads(&self, torch: &Torch, x: &Tensor, norm: Option<&Norm>) -> Tensor {
        let whole = norm.filter(|_| self.norms_whole).map(|norm| norm.forward(torch, x));
        let x = whole.as_ref().unwrap_or(x);
        let split = torch.reshape(x, &by_heads(x, self.width));
        match norm {
            None => torch.transpose(&split, 1, 2),
            Some(_) if self.norms_whole => torch.transpose(&split, 1, 2),
            Some(norm) if self.norms_first => torch.transpose(&norm.forward(torch, &split), 1, 2),
            Some(norm) => norm.forward(torch, &torch.transpose(&split, 1, 2)),
        }
    }

    fn project(&self, torch: &Torch, x: &Tensor) -> [Tensor; 3] {
        let [q_norm, k_norm] = match &self.norms {
            Some([q, k]) => [Some(q), Some(k)],
            None => [None, None],
        };
        match &self.projections {
            Projections::Separate(three) if self.norms.is_some() && !self.norms_first => {
                // Gemma 3 projects all, then norms.
                let [q, k, v] =
                    three.each_ref().map(|linear| self.heads(torch, &linear.forward(torch, x), None));
                let normed =
                    |x: Tensor, norm: Option<&Norm>| norm.map_or(x.clone(), |norm| norm.forward(torch, &x));
                [normed(q, q_norm), normed(k, k_norm), v]
            }
            Projections::Separate(three) if self.at_once => self.at_once(torch, three, x),
            Projections::Separate(three) => [(&three[0], q_norm), (&three[1], k_norm), (&three[2], None)]
                .map(|(linear, norm)| self.heads(torch, &linear.forward(torch, x), norm)),
            Projections::Joint(joint) => {
                let joined = joint.forward(torch, x);
                let (q, kv) = (self.heads * self.width, self.kv_heads * self.width);
                let parts = if self.gpt2 {
                    torch.split(&joined, &[q, kv, kv])
                } else {
                    [q, kv, kv].map(|size| torch.slice(&joined, 2, size)).into()
                };
                [0, 1, 2].map(|part| self.heads(torch, &parts[part], None))
            }
        }
    }

    /// litgpt's product for all three: one dropout is for its adapters, and values that need no copy for groups of heads keep all of it.
    fn at_once(&self, torch: &Torch, three: &[Linear; 3], x: &Tensor) -> [Tensor; 3] {
        let dropped = three.iter().any(Linear::drops).then(|| torch.dropout(x));
        let made = three.each_ref().map(|linear| match &dropped {
            Some(dropped) => linear.forward_dropped(torch, x, dropped),
            None => linear.forward(torch, x),
        });
        drop(dropped);
        let parts = if self.heads == self.kv_heads {
            let joined = torch.cat(&made.each_ref(), 2);
            let sizes = made.each_ref().map(|part| part.size(2));
            drop(made);
            torch.split(&joined, &sizes)
        } else {
            made.into()
        };
        [0, 1, 2].map(|part| self.heads(torch, &parts[part], None))
    }

    /// `[B, S, H]` to `[B, S, H]`, and the weights that the eager form returns.
    pub fn forward(
        &self,
        torch: &Torch,
        x: &Tensor,
        context: &Context,
        layer: usize,
    ) -> (Tensor, Option<Tensor>) {
        let [mut q, mut k, mut v] = self.project(torch, x);
        let own = context.rotation_of_layer(torch, q.dtype());
        if let Some((cos, sin)) = own.as_ref().or(context.rotation(self.window.is_some())) {
            let (cos, sin) = (torch.unsqueeze(cos, 1), torch.unsqueeze(sin, 1));
            let rotate = |x: &Tensor| match context.liger {
                true => torch.liger_rope(x, &cos, &sin),
                false => apply_rotary(torch, x, &cos, &sin, self.phi3 || cos.shape().last() < self.width),
            };
            let (turned_q, turned_k) = (rotate(&q), rotate(&k));
            (q, k) = (turned_q, turned_k);
        }
        if let Some(cache) = &context.cache {
            (k, v) = cache.update(torch, layer, k, v);
        }
        let mask = context.mask(self.window.is_some());
        let (out, weights) = match context.attention {
            Implementation::Eager => self.eager(torch, &q, &k, &v, mask),
            Implementation::Sdpa if torch.versions().transformers < SHARED_FUNCTION => {
                [q, k, v] = self.prepare(torch, [q, k, v], mask);
                (self.sdpa(torch, [&q, &k, &v], mask), None)
            }
            Implementation::Sdpa => {
                let passed = self.prepare(torch, [q.clone(), k.clone(), v.clone()], mask);
                (self.sdpa(torch, passed.each_ref(), mask), None)
            }
            Implementation::Flash2 => (self.flash(torch, &q, &k, &v), None),
        };
        let out = {
            let shape = out.shape();
            let flat = torch.reshape(&out, &[shape[0], shape[1], shape[2] * shape[3]]);
            drop(out);
            torch.contiguous(&flat)
        };
        (self.output.forward(torch, &out), weights)
    }

    fn eager(
        &self,
        torch: &Torch,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        mask: Option<&Tensor>,
    ) -> (Tensor, Option<Tensor>) {
        let groups = self.heads / self.kv_heads;
        let repeat = |x: &Tensor| if groups == 1 { x.clone() } else { torch.repeat_heads(x, groups) };
        let (k, v) = (repeat(k), repeat(v));
        let product = torch.matmul(q, &torch.transpose(&k, 2, 3));
        let mut weights = torch.scale(&product);
        drop(product);
        if self.soft_cap {
            weights = torch.scale(&weights);
            weights = torch.unary(Unary::Tanh, &weights);
            weights = torch.scale(&weights);
        }
        if let Some(mask) = mask {
            let columns = k.size(2);
            weights = torch.add(&weights, &torch.slice(mask, 3, columns));
        }
        weights = if self.gpt2 {
            torch.softmax(&weights, None)
        } else {
            let scores = torch.softmax(&weights, Some(TorchType::F32));
            torch.to(&scores, q.dtype())
        };
        if self.gpt2 {
            weights = torch.to(&weights, v.dtype());
        }
        let out = torch.transpose(&torch.matmul(&weights, &v), 1, 2);
        let out = if self.gpt2 { out } else { torch.contiguous(&out) };
        (out, Some(weights))
    }

    /// Queries, keys and values as `scaled_dot_product_attention` gets them. Key and value heads are repeated where there is a mask, PyTorch is
    /// older than 2.5, or transformers is older than its pull request 39412 (2025-07). torchtune and litgpt expand them always.
    fn prepare(
        &self,
        torch: &Torch,
        [mut q, mut k, mut v]: [Tensor; 3],
        mask: Option<&Tensor>,
    ) -> [Tensor; 3] {
        let groups = self.heads / self.kv_heads;
        let version = torch.versions().transformers;
        let repeats = groups > 1
            && (self.expands || mask.is_some() || torch.versions().torch < (2, 5) || version < (4, 54));
        if repeats {
            k = torch.repeat_heads(&k, groups);
            v = torch.repeat_heads(&v, groups);
        }
        let copies =
            (SHARED_FUNCTION..COPIES_UNTIL).contains(&version) || mask.is_some() && version < SHARED_FUNCTION;
        if self.of_transformers && copies {
            q = torch.contiguous(&q);
            k = torch.contiguous(&k);
            v = torch.contiguous(&v);
        }
        [q, k, v]
    }

    fn sdpa(&self, torch: &Torch, [q, k, v]: [&Tensor; 3], mask: Option<&Tensor>) -> Tensor {
        let (rows, columns) = (q.size(2), k.size(2));
        // A mask of all positions is indexed by those that there are.
        let indexed = mask
            .filter(|mask| mask.size(2) > rows)
            .map(|mask| torch.empty(&[mask.size(0), 1, rows, columns], mask.dtype(), "index"));
        let out = torch.scaled_dot_product_attention(q, k, v, indexed.as_ref().or(mask));
        torch.contiguous(&torch.transpose(&out, 1, 2))
    }

    fn flash(&self, torch: &Torch, q: &Tensor, k: &Tensor, v: &Tensor) -> Tensor {
        let to = torch.autocast_type().unwrap_or(q.dtype());
        let [q, k, v] = [q, k, v].map(|x| torch.to(x, to));
        torch.transpose(&torch.flash_attention_2(&q, &k, &v), 1, 2)
    }
}
