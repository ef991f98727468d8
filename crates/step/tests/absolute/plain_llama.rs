//! Llama's forward pass in f64 as one would write it on a blackboard: one sequence, one position after the other.

use std::collections::HashMap;
use std::ops::Range;

use plimsoll_device::IGNORED_TARGET;
use plimsoll_model::{ModelSpec, Parameter};

use super::plain_mixture::Mixture;
use super::values;

pub type Matrix = Vec<f64>;

/// Weights by name.
pub type Weights = HashMap<String, Matrix>;

/// Those that tests train with.
pub fn weights_of(spec: &ModelSpec) -> Weights {
    let value = |p: &Parameter| (p.name.clone(), values(p).into_iter().map(f64::from).collect());
    spec.parameters().iter().map(value).collect()
}

/// The negative logarithm of the probability of every target, 0 where there is none.
pub fn token_losses(spec: &ModelSpec, tokens: &[u32], targets: &[u32]) -> Vec<f64> {
    losses_with(spec, &weights_of(spec), tokens, targets, &mut Mixture::new(spec, None))
}

/// The same with these weights; `mixture` is what layers with experts do.
pub fn losses_with(
    spec: &ModelSpec,
    all: &Weights,
    tokens: &[u32],
    targets: &[u32],
    mixture: &mut Mixture,
) -> Vec<f64> {
    let w = |name: &str| &all[name];
    let hidden = spec.hidden_size as usize;
    let embedding = w("model.embed_tokens.weight");
    let mut xs: Vec<Vec<f64>> =
        tokens.iter().map(|t| embedding[*t as usize * hidden..][..hidden].to_vec()).collect();
    for layer in 0..spec.num_layers {
        let w = |name: &str| w(&format!("model.layers.{layer}.{name}"));
        let normed: Vec<_> = xs.iter().map(|x| rms_norm(spec, x, w("input_layernorm.weight"))).collect();
        let projections = ["q", "k", "v"].map(|part| w(&format!("self_attn.{part}_proj.weight")));
        let attended = attention(spec, &normed, projections);
        for (x, attended) in xs.iter_mut().zip(&attended) {
            add(x, &product(w("self_attn.o_proj.weight"), attended));
        }
        let norm = w("post_attention_layernorm.weight");
        let normed: Vec<_> = xs.iter().map(|x| rms_norm(spec, x, norm)).collect();
        let outs = match spec.experts_of(layer) {
            Some(_) => mixture.layer(&w, &normed),
            None => normed.iter().map(|x| swiglu(&w, "mlp", 0..1, x)).collect(),
        };
        xs.iter_mut().zip(&outs).for_each(|(x, out)| add(x, out));
    }
    let head = if spec.tie_word_embeddings { embedding } else { w("lm_head.weight") };
    let loss = |(x, target): (&Vec<f64>, &u32)| {
        if *target == IGNORED_TARGET {
            return 0.0;
        }
        let logits = product(head, &rms_norm(spec, x, w("model.norm.weight")));
        logits.iter().map(|l| l.exp()).sum::<f64>().ln() - logits[*target as usize]
    };
    xs.iter().zip(targets).map(loss).collect()
}

/// A gated feed-forward part: number `which.start` of a stack of so many as `which.end`.
pub fn swiglu<'w>(w: &impl Fn(&str) -> &'w Matrix, at: &str, which: Range<usize>, x: &[f64]) -> Vec<f64> {
    let matrix = |part: &str| {
        let all = w(&format!("{at}.{part}_proj.weight"));
        let size = all.len() / which.end;
        &all[which.start * size..(which.start + 1) * size]
    };
    let (gate, up) = (product(matrix("gate"), x), product(matrix("up"), x));
    let inner: Vec<f64> = gate.iter().zip(&up).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect();
    product(matrix("down"), &inner)
}

/// Heads of queries, each with the keys and values of its group, rotated by halves.
fn attention(spec: &ModelSpec, xs: &[Vec<f64>], [q, k, v]: [&Matrix; 3]) -> Vec<Vec<f64>> {
    let (heads, groups) = (spec.attention.heads as usize, spec.attention.kv_heads as usize);
    let width = spec.attention.head_dim as usize;
    let theta = spec.attention.rope.as_ref().map(|rope| rope.theta).unwrap();
    let rotated = |x: &[f64], position: usize| -> Vec<f64> {
        let half = width / 2;
        let rotate = |i: usize| {
            let (head, i) = (i / width * width, i % width);
            let angle = position as f64 * theta.powf(-2.0 * (i % half) as f64 / width as f64);
            let (a, b) = (x[head + i % half], x[head + half + i % half]);
            if i < half { a * angle.cos() - b * angle.sin() } else { b * angle.cos() + a * angle.sin() }
        };
        (0..x.len()).map(rotate).collect()
    };
    let all = |w: &Matrix| xs.iter().map(|x| product(w, x)).collect::<Vec<_>>();
    let turned = |w| all(w).iter().enumerate().map(|(at, x)| rotated(x, at)).collect::<Vec<_>>();
    let (queries, keys, values) = (turned(q), turned(k), all(v));
    let attend = |at: usize| -> Vec<f64> {
        let of_head = |head: usize| {
            let group = head * groups / heads;
            let part = |x: &Vec<f64>, n: usize| x[n * width..(n + 1) * width].to_vec();
            let score = |key| dot(&part(&queries[at], head), &part(key, group)) / (width as f64).sqrt();
            let weights: Vec<f64> = keys[..=at].iter().map(|key| score(key).exp()).collect();
            let sum: f64 = weights.iter().sum();
            let mut out = vec![0.0; width];
            for (weight, value) in weights.iter().zip(&values) {
                let scaled: Vec<f64> = part(value, group).iter().map(|v| v * weight / sum).collect();
                add(&mut out, &scaled);
            }
            out
        };
        (0..heads).flat_map(of_head).collect()
    };
    (0..xs.len()).map(attend).collect()
}

fn rms_norm(spec: &ModelSpec, x: &[f64], weight: &[f64]) -> Vec<f64> {
    let mean = dot(x, x) / x.len() as f64 + spec.norm.epsilon;
    x.iter().zip(weight).map(|(x, w)| x / mean.sqrt() * w).collect()
}

/// W x, W `[O, I]`.
pub fn product(w: &[f64], x: &[f64]) -> Vec<f64> {
    w.chunks(x.len()).map(|row| dot(row, x)).collect()
}

pub fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

pub fn add(x: &mut [f64], y: &[f64]) {
    x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
}
