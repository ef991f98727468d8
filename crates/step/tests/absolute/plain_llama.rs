//! Llama's forward pass in f64 as one would write it on a blackboard: one sequence, one position after the other.

use std::collections::HashMap;

use plimsoll_device::IGNORED_TARGET;
use plimsoll_model::ModelSpec;

use super::values;

type Matrix = Vec<f64>;

/// The negative logarithm of the probability of every target, 0 where there is none.
pub fn token_losses(spec: &ModelSpec, tokens: &[u32], targets: &[u32]) -> Vec<f64> {
    let all: HashMap<String, Matrix> = spec
        .parameters()
        .iter()
        .map(|p| (p.name.clone(), values(p).into_iter().map(f64::from).collect()))
        .collect();
    let w = |name: &str| &all[name];
    let hidden = spec.hidden_size as usize;
    let embedding = w("model.embed_tokens.weight");
    let mut xs: Vec<Vec<f64>> =
        tokens.iter().map(|t| embedding[*t as usize * hidden..][..hidden].to_vec()).collect();
    for layer in 0..spec.num_layers {
        let w = |name: &str| w(&format!("model.layers.{layer}.{name}.weight"));
        let normed: Vec<_> = xs.iter().map(|x| rms_norm(spec, x, w("input_layernorm"))).collect();
        let attended =
            attention(spec, &normed, [w("self_attn.q_proj"), w("self_attn.k_proj"), w("self_attn.v_proj")]);
        for (x, attended) in xs.iter_mut().zip(&attended) {
            add(x, &product(w("self_attn.o_proj"), attended));
            let normed = rms_norm(spec, x, w("post_attention_layernorm"));
            let gate = product(w("mlp.gate_proj"), &normed);
            let up = product(w("mlp.up_proj"), &normed);
            let inner: Vec<f64> = gate.iter().zip(&up).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect();
            add(x, &product(w("mlp.down_proj"), &inner));
        }
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
fn product(w: &[f64], x: &[f64]) -> Vec<f64> {
    w.chunks(x.len()).map(|row| dot(row, x)).collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn add(x: &mut [f64], y: &[f64]) {
    x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
}
