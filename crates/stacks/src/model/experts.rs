//! Experts in the place of a feed-forward part: a router, and for each token a few of them.
//!
//! Up to transformers 4, and in litgpt, every expert is a module, and a loop picks the rows of each. From transformers 5 on all experts are
//! two tensors, and one product over sorted rows is for all of them (`integrations/moe.py`). bitsandbytes quantises modules alone, so the
//! tensors stay as they are. Which expert a token goes to is not known here: every expert has as many rows.

use plimsoll_model::{ExpertsSpec, Scoring};

use super::layers::{Linear, Maker};
use super::mlp::Mlp;
use crate::eager::{Tensor, Torch, Unary};
use crate::run::{Run, Stack, TorchType};

/// From this version on experts are two tensors.
const TOGETHER: (u32, u32) = (5, 0);

/// Whether a run's experts are modules, which can be quantised and have adapters.
pub(crate) fn are_modules(run: &Run) -> bool {
    run.stack == Stack::Litgpt || run.versions.transformers < TOGETHER || !run.model.mlp.gated
}

/// The experts' matrices.
enum Matrices {
    /// A module each.
    Apart(Vec<Mlp>),
    /// `[E, 2 I, H]` and `[E, H, I]`.
    Together(Box<[Tensor; 2]>),
}

/// What every token goes through beside its experts.
struct Shared {
    mlp: Mlp,
    gate: Option<Linear>,
}

/// A feed-forward part of experts.
pub(crate) struct Experts {
    router: Linear,
    matrices: Matrices,
    shared: Option<Shared>,
    count: u64,
    per_token: u64,
    /// Whether scores are sigmoids, of products in f32.
    sigmoid: bool,
    /// Groups of experts, and those that a token's experts are in.
    groups: [u64; 2],
    normalises: bool,
    /// Whether the router's weights stay f32.
    keeps_f32: bool,
}

impl Experts {
    pub fn new(maker: &Maker<'_>, spec: &ExpertsSpec) -> Experts {
        let model = &maker.run.model;
        let (hidden, inner, count) = (model.hidden_size, spec.intermediate_size, spec.count);
        let together = !are_modules(maker.run);
        let matrices = if together {
            Matrices::Together(Box::new([
                maker.parameter("gate_up_proj", &[count, 2 * inner, hidden]),
                maker.parameter("down_proj", &[count, hidden, inner]),
            ]))
        } else {
            Matrices::Apart((0..count).map(|_| Mlp::of_width(maker, inner)).collect())
        };
        let router = match together {
            true => maker.head("router", [hidden, count], None),
            false => maker.linear("router", [hidden, count], false),
        };
        let sigmoid = spec.router.scoring == Scoring::Sigmoid;
        Experts {
            router,
            matrices,
            shared: spec.shared.map(|shared| Shared {
                mlp: Mlp::of_width(maker, shared.intermediate_size),
                gate: shared.gated.then(|| maker.linear("shared_expert_gate", [hidden, 1], false)),
            }),
            count,
            per_token: spec.per_token,
            sigmoid,
            groups: spec.router.groups.map_or([1, 1], |groups| [groups.count.max(1), groups.chosen.max(1)]),
            normalises: spec.router.normalise,
            keeps_f32: sigmoid || together && model.architecture == "mixtral",
        }
    }

    pub fn linears(&mut self) -> Vec<&mut Linear> {
        let mut linears = vec![&mut self.router];
        if let Matrices::Apart(experts) = &mut self.matrices {
            linears.extend(experts.iter_mut().flat_map(Mlp::linears));
        }
        if let Some(shared) = &mut self.shared {
            linears.extend(shared.mlp.linears());
            linears.extend(&mut shared.gate);
        }
        linears
    }

    /// Its linears, in the order of `linears`.
    pub fn all(&self) -> Vec<&Linear> {
        let mut linears = vec![&self.router];
        if let Matrices::Apart(experts) = &self.matrices {
            linears.extend(experts.iter().flat_map(Mlp::all));
        }
        if let Some(shared) = &self.shared {
            linears.extend(shared.mlp.all());
            linears.extend(&shared.gate);
        }
        linears
    }

    pub fn trained(&self) -> Vec<Tensor> {
        let mut trained: Vec<Tensor> = self.all().into_iter().flat_map(Linear::trained).collect();
        if let Matrices::Together(both) = &self.matrices {
            trained.extend(both.iter().filter(|tensor| tensor.requires_grad()).cloned());
        }
        trained
    }

    /// `[B, S, H]` to `[B, S, H]`.
    pub fn forward(&self, torch: &Torch, x: &Tensor, liger: bool) -> Tensor {
        let shape = x.shape();
        let flat = torch.reshape(x, &[shape.elements() / shape.last(), shape.last()]);
        let gated = self.shared.iter().find_map(|shared| {
            let gate = shared.gate.as_ref()?;
            Some((shared.mlp.forward(torch, &flat, liger), gate))
        });
        let (weights, _numbers) = self.route(torch, &flat);
        let mut out = match &self.matrices {
            Matrices::Apart(experts) => self.one_by_one(torch, experts, &flat, &weights, liger),
            Matrices::Together(both) => self.at_once(torch, both, &flat, &weights),
        };
        match (gated, &self.shared) {
            (Some((shared, gate)), _) => {
                let share = torch.unary(Unary::Sigmoid, &gate.forward(torch, &flat));
                out = torch.add(&out, &torch.mul(&share, &shared));
            }
            (None, Some(shared)) => out = torch.add(&out, &shared.mlp.forward(torch, &flat, liger)),
            (None, None) => {}
        }
        torch.reshape(&out, &shape)
    }

    /// For each token the weights of its experts, and their numbers: `[N, k]`.
    fn route(&self, torch: &Torch, x: &Tensor) -> (Tensor, Tensor) {
        let (mut weights, numbers) = if self.sigmoid {
            self.choose_by_group(torch, x)
        } else {
            let scores = torch.softmax(&self.router.forward(torch, x), Some(TorchType::F32));
            torch.largest(&scores, self.per_token)
        };
        if self.normalises {
            weights = torch.normalise_rows(&weights);
        }
        if self.sigmoid {
            weights = torch.scale(&weights);
        }
        if !self.keeps_f32 {
            weights = torch.to(&weights, x.dtype());
        }
        (weights, numbers)
    }

    /// The choice of DeepSeek-V3 and GLM 4.5 (`Glm4MoeTopkRouter`): scores in f32 with a correction, the best groups of experts by their two
    /// best, and of these the best experts; their weights are the scores without the correction.
    fn choose_by_group(&self, torch: &Torch, x: &Tensor) -> (Tensor, Tensor) {
        let logits = self.router.forward_in(torch, x, TorchType::F32);
        let scores = torch.unary(Unary::Sigmoid, &logits);
        let rows = scores.size(0);
        let mut choice = torch.shift(&scores);
        let [groups, chosen] = self.groups;
        {
            let by_group = torch.reshape(&choice, &[rows, groups, self.count / groups]);
            let (best, _) = torch.largest(&by_group, 2);
            let sums = torch.reshape(&torch.mean_last(&best), &[rows, groups]);
            drop(torch.largest(&sums, chosen));
        }
        let mask = torch.empty(&[rows, self.count], TorchType::Bool, "bitwise_not");
        choice = torch.masked_fill(&choice, &mask);
        let (_, numbers) = torch.largest(&choice, self.per_token);
        (torch.gather(&scores, &numbers), numbers)
    }

    /// One product for all experts, of rows that are sorted by expert.
    fn at_once(&self, torch: &Torch, [gate_up, down]: &[Tensor; 2], x: &Tensor, weights: &Tensor) -> Tensor {
        let (tokens, hidden) = (x.size(0), x.size(1));
        let routed = tokens * self.per_token;
        let list = |operation| torch.empty(&[routed], TorchType::I64, operation);
        let flat_weights = torch.reshape(weights, &[routed, 1]);
        let (_sorted, order) = (list("sort"), list("sort"));
        let selected = torch.rows(x, &list("floor_divide"));
        let own_weights = torch.rows(&flat_weights, &order);
        let counts = {
            let _numbers = torch.empty(&[routed], TorchType::I32, "_to_copy");
            torch.empty(&[self.count], TorchType::I32, "histc")
        };
        let offsets = torch.empty(&[self.count], TorchType::I32, "cumsum");
        let mut rows = torch.grouped_mm(&selected, gate_up, &offsets);
        rows = {
            let half = rows.shape().last() / 2;
            let parts = torch.split(&rows, &[half, half]);
            drop(rows);
            let active = torch.unary(Unary::Silu, &parts[0]);
            torch.mul(&active, &parts[1])
        };
        rows = torch.grouped_mm(&rows, down, &offsets);
        let weighted = torch.mul(&rows, &own_weights);
        let back = list("empty_like");
        drop(list("arange"));
        let in_order = torch.rows(&weighted, &back);
        drop(weighted);
        let sum = torch.sum_second(&torch.reshape(&in_order, &[tokens, self.per_token, hidden]));
        // The function's own variables end with it.
        drop((rows, counts, selected, own_weights));
        torch.to(&sum, x.dtype())
    }

    /// The rows of each expert, one expert after the other.
    fn one_by_one(
        &self,
        torch: &Torch,
        experts: &[Mlp],
        x: &Tensor,
        weights: &Tensor,
        liger: bool,
    ) -> Tensor {
        let (tokens, hidden) = (x.size(0), x.size(1));
        let routed = tokens * self.per_token;
        let flat_weights = torch.reshape(weights, &[routed, 1]);
        let dtype = if self.keeps_f32 { weights.dtype() } else { x.dtype() };
        let mut total = torch.empty(&[tokens, hidden], dtype, "zeros");
        // `one_hot` of the numbers, which the loop reads.
        let _mask = torch.empty(&[tokens, self.per_token, self.count], TorchType::I64, "zeros");
        // What the loop's variables hold until they are assigned again.
        let mut _before = None;
        for (expert, number) in experts.iter().zip(0..) {
            let rows = routed / self.count + u64::from(number < routed % self.count);
            if rows == 0 {
                break;
            }
            let places = [0, 1].map(|_| torch.empty(&[rows], TorchType::I64, "nonzero"));
            let current = torch.rows(x, &places[0]);
            let own_weights = torch.rows(&flat_weights, &places[1]);
            let out = expert.forward(torch, &current, liger);
            let weighted = torch.to(&torch.mul(&out, &own_weights), dtype);
            total = torch.add_rows(&total, &places[0], &weighted);
            _before = Some((places, current, weighted));
        }
        torch.to(&total, x.dtype())
    }
}
