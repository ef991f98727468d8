//! MoE++ (Jin et al. 2024, arXiv 2410.07348) in f64, as the paper has it: one token after the other, each expert by itself.

use plimsoll_model::{ExpertsSpec, ModelSpec};

use super::plain_llama::{Matrix, add, dot, product, swiglu};

/// The layers with experts of a model, in order.
pub struct Mixture {
    spec: Option<ExpertsSpec>,
    /// gamma, where capacities are limited.
    capacity: Option<f64>,
    /// G of the layer before, for each token.
    before: Option<Vec<Vec<f64>>>,
    /// How often each expert was chosen, and its softmax added up, over tokens and layers.
    counts: Vec<f64>,
    mass: Vec<f64>,
    rows: f64,
    /// Choices that were dropped.
    pub dropped: usize,
}

impl Mixture {
    pub fn new(spec: &ModelSpec, capacity: Option<f64>) -> Mixture {
        let experts = spec.experts.clone();
        let zeros = vec![0.0; experts.as_ref().map_or(0, |experts| experts.total() as usize)];
        let (counts, mass) = (zeros.clone(), zeros);
        Mixture { spec: experts, capacity, before: None, counts, mass, rows: 0.0, dropped: 0 }
    }

    /// What the experts make of the tokens of a layer.
    pub fn layer<'w>(&mut self, w: &impl Fn(&str) -> &'w Matrix, xs: &[Vec<f64>]) -> Vec<Vec<f64>> {
        let spec = self.spec.clone().unwrap();
        let own = spec.zero_computation.unwrap();
        let (count, total) = (spec.count as usize, spec.total() as usize);
        // G(x) = W x, and W_g G of the layer before.
        let mut logits: Vec<Vec<f64>> = xs.iter().map(|x| product(w("mlp.gate.weight"), x)).collect();
        if let Some(before) = &self.before {
            for (logits, before) in logits.iter_mut().zip(before) {
                add(logits, &product(w("mlp.gate_residual.weight"), before));
            }
        }
        // Experts take what comes first, up to their capacity.
        let places = self.capacity.map(|gamma| gamma * (xs.len() * spec.per_token as usize) as f64);
        let shares = own.tau * spec.count as f64 + (total - count) as f64;
        let room = |expert: usize| {
            let share = if expert < count { own.tau / shares } else { 1.0 / shares };
            places.map_or(usize::MAX, |places| (places * share).ceil() as usize)
        };
        let mut taken = vec![0; total];
        let mut outs = Vec::new();
        for (x, logits) in xs.iter().zip(&logits) {
            let sum: f64 = logits.iter().map(|l| l.exp()).sum();
            let softmax: Vec<f64> = logits.iter().map(|l| l.exp() / sum).collect();
            let mut order: Vec<usize> = (0..total).collect();
            order.sort_by(|a, b| softmax[*b].total_cmp(&softmax[*a]));
            let mut out = swiglu(w, "mlp.shared_expert", 0..1, x);
            for expert in order.into_iter().take(spec.per_token as usize) {
                self.counts[expert] += 1.0;
                if taken[expert] == room(expert) {
                    self.dropped += 1;
                    continue;
                }
                taken[expert] += 1;
                let y = expert_of(w, &spec, expert, x);
                add(&mut out, &y.iter().map(|y| softmax[expert] * y).collect::<Vec<_>>());
            }
            add(&mut self.mass, &softmax);
            self.rows += 1.0;
            outs.push(out);
        }
        self.before = Some(logits);
        outs
    }

    /// The sum of eta f P.
    pub fn balance_loss(&self) -> f64 {
        let spec = self.spec.as_ref().unwrap();
        let eta = |expert: usize| if (expert as u64) < spec.count { 1.0 } else { spec.tau() };
        let pairs = self.counts.iter().zip(&self.mass).enumerate();
        pairs.map(|(e, (count, mass))| eta(e) * count / self.rows * mass / self.rows).sum()
    }
}

fn expert_of<'w>(w: &impl Fn(&str) -> &'w Matrix, spec: &ExpertsSpec, expert: usize, x: &[f64]) -> Vec<f64> {
    let own = spec.zero_computation.unwrap();
    let count = spec.count as usize;
    let (zeros, copies) = (own.zero as usize, own.copy as usize);
    if expert < count {
        return swiglu(w, "mlp.experts", expert..count, x);
    }
    if expert < count + zeros {
        return vec![0.0; x.len()];
    }
    if expert < count + zeros + copies {
        return x.to_vec();
    }
    let number = expert - count - zeros - copies;
    let rows = &w("mlp.constant_experts.gate.weight")[2 * number * x.len()..][..2 * x.len()];
    let v = &w("mlp.constant_experts.vectors")[number * x.len()..][..x.len()];
    let [a, b] = [dot(&rows[..x.len()], x).exp(), dot(&rows[x.len()..], x).exp()];
    x.iter().zip(v).map(|(x, v)| (a * x + b * v) / (a + b)).collect()
}
