//! Attention, forward and backward, against softmax written out in f64.

use plimsoll_device::{AttentionShape, Compute, DType, Op};

use crate::harness::{Expected, Operand, check, check_gradient, noise, refusal};

pub fn shape(
    batch: u64,
    [q_len, kv_len, kv_capacity]: [u64; 3],
    [heads, kv_heads, d]: [u64; 3],
) -> AttentionShape {
    AttentionShape {
        batch,
        q_len,
        kv_len,
        kv_capacity,
        heads,
        kv_heads,
        head_dim: d,
        scale: 0.3,
        window: None,
        soft_cap: None,
    }
}

/// Shapes with odd lengths, several tiles, groups, one query, chunks after a past, windows and caps.
fn shapes() -> Vec<AttentionShape> {
    let mut all = vec![
        shape(1, [1, 1, 1], [1, 1, 2]),
        shape(2, [5, 5, 5], [2, 1, 4]),
        shape(1, [131, 131, 131], [3, 3, 6]),
        shape(2, [300, 300, 300], [4, 2, 10]),
        shape(1, [530, 530, 530], [1, 1, 16]),
    ];
    for window in [2, 7, 129, 400] {
        all.push(AttentionShape { window: Some(window), ..shape(1, [530, 530, 530], [2, 1, 4]) });
    }
    all.push(AttentionShape { soft_cap: Some(0.7), ..shape(1, [140, 140, 140], [2, 2, 8]) });
    let both =
        AttentionShape { soft_cap: Some(2.0), window: Some(33), ..shape(2, [270, 270, 270], [2, 1, 4]) };
    all.push(both);
    all
}

/// What only inference has: more keys than queries, room for more.
pub fn decoding_shapes() -> Vec<AttentionShape> {
    let mut all = vec![
        shape(2, [1, 1, 9], [6, 2, 4]),
        shape(1, [1, 700, 800], [8, 1, 16]),
        shape(2, [3, 290, 300], [4, 2, 6]),
        shape(1, [140, 600, 600], [2, 2, 4]),
    ];
    for window in [1, 40, 300] {
        all.push(AttentionShape { window: Some(window), ..shape(1, [1, 700, 800], [4, 1, 4]) });
        all.push(AttentionShape { window: Some(window), ..shape(1, [140, 600, 600], [2, 1, 4]) });
        // Positions that lie where older ones did.
        let capacity = window + 140;
        all.push(AttentionShape { window: Some(window), ..shape(1, [1, 700, capacity], [4, 1, 4]) });
        all.push(AttentionShape { window: Some(window), ..shape(2, [140, 900, capacity], [2, 1, 4]) });
    }
    // Many queries to a key, heads wider than a vector, several pieces of positions and more than are aligned.
    all.push(shape(1, [1, 1000, 1000], [10, 2, 70]));
    all.push(shape(2, [1, 9000, 9000], [3, 1, 2]));
    all.push(AttentionShape {
        soft_cap: Some(0.7),
        window: Some(500),
        ..shape(1, [1, 640, 700], [9, 3, 64])
    });
    all
}

/// Where element t of a row's head lies.
fn query(s: &AttentionShape, batch: u64, i: u64, head: u64, t: u64) -> usize {
    (((batch * s.q_len + i) * s.heads + head) * s.head_dim + t) as usize
}

fn key(s: &AttentionShape, batch: u64, j: u64, head: u64, t: u64) -> usize {
    let row = batch * s.kv_capacity + j % s.kv_capacity;
    ((row * s.kv_heads + head / (s.heads / s.kv_heads)) * s.head_dim + t) as usize
}

/// The keys that a query sees.
fn seen(s: &AttentionShape, i: u64) -> std::ops::RangeInclusive<u64> {
    let position = s.kv_len - s.q_len + i;
    s.window.map_or(0, |window| (position + 1).saturating_sub(window))..=position
}

fn cap(s: &AttentionShape, score: f64) -> f64 {
    s.soft_cap.map_or(score, |cap| f64::from(cap) * (score / f64::from(cap)).tanh())
}

/// Visits every row of every head with its log-sum-exp, its keys, raw scores and probabilities.
fn for_each_row(
    s: &AttentionShape,
    q: &[f64],
    k: &[f64],
    mut visit: impl FnMut([u64; 3], f64, &[(u64, f64, f64)]),
) {
    for batch in 0..s.batch {
        for head in 0..s.heads {
            for i in 0..s.q_len {
                let score = |j| {
                    let product = |t| q[query(s, batch, i, head, t)] * k[key(s, batch, j, head, t)];
                    f64::from(s.scale) * (0..s.head_dim).map(product).sum::<f64>()
                };
                let scores: Vec<(u64, f64)> = seen(s, i).map(|j| (j, score(j))).collect();
                let lse = scores.iter().map(|(_, x)| cap(s, *x).exp()).sum::<f64>().ln();
                let row: Vec<_> = scores.iter().map(|(j, x)| (*j, *x, (cap(s, *x) - lse).exp())).collect();
                visit([batch, head, i], lse, &row);
            }
        }
    }
}

/// Output and log-sum-exp.
pub fn forward(s: &AttentionShape, q: &[f64], k: &[f64], v: &[f64]) -> (Vec<f64>, Vec<f64>) {
    let (mut out, mut all_lse) = (vec![0.0; q.len()], Vec::new());
    for_each_row(s, q, k, |[batch, head, i], lse, row| {
        all_lse.push(lse);
        for (j, _, p) in row {
            for t in 0..s.head_dim {
                out[query(s, batch, i, head, t)] += p * v[key(s, batch, *j, head, t)];
            }
        }
    });
    (out, all_lse)
}

/// The sums of dout * out over each head of each row.
fn deltas(s: &AttentionShape, out: &[f64], dout: &[f64]) -> Vec<f64> {
    let row = |n: u64| -> f64 {
        let (batch, head, i) = (n / s.q_len / s.heads, n / s.q_len % s.heads, n % s.q_len);
        let at = |t| query(s, batch, i, head, t);
        (0..s.head_dim).map(|t| out[at(t)] * dout[at(t)]).sum()
    };
    (0..s.batch * s.heads * s.q_len).map(row).collect()
}

/// Gradients of q, k and v.
fn backward(s: &AttentionShape, [q, k, v, dout]: [&[f64]; 4], deltas: &[f64]) -> [Vec<f64>; 3] {
    let (mut dq, mut dk, mut dv) = (vec![0.0; q.len()], vec![0.0; k.len()], vec![0.0; v.len()]);
    for_each_row(s, q, k, |[batch, head, i], _, row| {
        let dp = |j: u64| -> f64 {
            (0..s.head_dim).map(|t| dout[query(s, batch, i, head, t)] * v[key(s, batch, j, head, t)]).sum()
        };
        let delta = deltas[((batch * s.heads + head) * s.q_len + i) as usize];
        for (j, score, p) in row {
            let slope = s.soft_cap.map_or(1.0, |cap| 1.0 - (score / f64::from(cap)).tanh().powi(2));
            let ds = p * (dp(*j) - delta) * slope * f64::from(s.scale);
            for t in 0..s.head_dim {
                let (at_q, at_k) = (query(s, batch, i, head, t), key(s, batch, *j, head, t));
                dq[at_q] += ds * k[at_k];
                dk[at_k] += ds * q[at_q];
                dv[at_k] += p * dout[at_q];
            }
        }
    });
    [dq, dk, dv]
}

/// q, k and v; scores of a spread that makes some probabilities large.
fn inputs(s: &AttentionShape, dtype: DType) -> [Operand; 3] {
    let [n, m] = [s.batch * s.q_len, s.batch * s.kv_capacity].map(|n| n as usize);
    let [qw, kw] = [s.heads * s.head_dim, s.kv_heads * s.head_dim].map(|n| n as usize);
    [
        Operand::new(dtype, &[n, qw], noise(1).map(|x| 3.0 * x)),
        Operand::new(dtype, &[m, kw], noise(2).map(|x| 3.0 * x)),
        Operand::new(dtype, &[m, kw], noise(3)),
    ]
}

fn tolerance(compute: Compute) -> f64 {
    match compute {
        Compute::F32 => 6e-6,
        Compute::Bf16 => 3e-2,
    }
}

const KINDS: [(DType, Compute); 3] =
    [(DType::F32, Compute::F32), (DType::Bf16, Compute::F32), (DType::Bf16, Compute::Bf16)];

#[test]
fn attention() {
    for s in shapes().into_iter().chain(decoding_shapes()) {
        for (dtype, compute) in KINDS {
            let [q, k, v] = inputs(&s, dtype);
            let (out, lse) = forward(&s, &q.values, &k.values, &v.values);
            let sizes = [s.batch * s.q_len, s.heads * s.head_dim].map(|n| n as usize);
            let statistics = [s.batch, s.heads, s.q_len].map(|n| n as usize);
            let operands =
                [q, k, v, Operand::garbage(dtype, &sizes), Operand::garbage(DType::F32, &statistics)];
            let tolerance = tolerance(compute);
            check(
                &format!("{s:?} {dtype} {compute:?}"),
                &operands,
                |t| Op::Attention { q: &t[0], k: &t[1], v: &t[2], out: &t[3], lse: &t[4], shape: s, compute },
                &[
                    Expected { operand: 3, values: out, tolerance },
                    Expected { operand: 4, values: lse, tolerance },
                ],
            );
        }
    }
}

#[test]
fn attention_backward() {
    for s in shapes() {
        for (dtype, compute) in KINDS {
            let [q, k, v] = inputs(&s, dtype);
            let sizes = |columns: u64| [(s.batch * s.q_len) as usize, columns as usize];
            let (q_sizes, k_sizes) = (sizes(s.heads * s.head_dim), sizes(s.kv_heads * s.head_dim));
            let statistics = [s.batch, s.heads, s.q_len].map(|n| n as usize);
            let (out, lse) = forward(&s, &q.values, &k.values, &v.values);
            let (out, lse) = (Operand::new(dtype, &q_sizes, out), Operand::new(DType::F32, &statistics, lse));
            let dout = Operand::new(dtype, &q_sizes, noise(4));
            // Of the output as it is stored: that is what the kernel has.
            let delta = deltas(&s, &out.values, &dout.values);
            let [dq, dk, dv] = backward(&s, [&q.values, &k.values, &v.values, &dout.values], &delta);
            let elements = dq.len() + dk.len() + dv.len();
            // With f32 gradients the sums are left alone.
            let sums = match dtype {
                DType::F32 => Operand::new(DType::F32, &[elements], noise(5)),
                _ => Operand::garbage(DType::F32, &[elements]),
            };
            let operands = [
                q,
                k,
                v,
                out,
                lse,
                dout,
                Operand::garbage(DType::F32, &statistics),
                sums,
                Operand::garbage(dtype, &q_sizes),
                Operand::garbage(dtype, &k_sizes),
                Operand::garbage(dtype, &k_sizes),
            ];
            // Scores reach 30, where f32 is exact to 2e-6 and its exponential no better.
            let tolerance = (2.0 * tolerance(compute)).max(4e-5);
            let mut expected = vec![
                Expected { operand: 6, values: delta, tolerance: 2e-6 },
                Expected { operand: 8, values: dq.clone(), tolerance },
                Expected { operand: 9, values: dk.clone(), tolerance },
                Expected { operand: 10, values: dv.clone(), tolerance },
            ];
            if dtype != DType::F32 {
                expected.push(Expected { operand: 7, values: [dq, dk, dv].concat(), tolerance });
            }
            check(
                &format!("{s:?} {dtype} {compute:?}"),
                &operands,
                |t| Op::AttentionBackward {
                    q: &t[0],
                    k: &t[1],
                    v: &t[2],
                    out: &t[3],
                    lse: &t[4],
                    dout: &t[5],
                    delta: &t[6],
                    sums: Some(&t[7]),
                    dq: &t[8],
                    dk: &t[9],
                    dv: &t[10],
                    shape: s,
                    compute,
                },
                &expected,
            );
        }
    }
}

/// The plain gradients above are those of the plain output.
#[test]
fn plain_gradients_are_right() {
    for (window, soft_cap) in [(None, None), (Some(3), None), (None, Some(0.7)), (Some(2), Some(0.5))] {
        let s = AttentionShape { window, soft_cap, ..shape(1, [6, 6, 6], [2, 1, 4]) };
        let [q, k, v] = inputs(&s, DType::F32).map(|x| x.values);
        let weights: Vec<f64> = noise(8).take(q.len()).collect();
        let loss = |q: &[f64], k: &[f64], v: &[f64]| -> f64 {
            forward(&s, q, k, v).0.iter().zip(&weights).map(|(x, w)| x * w).sum()
        };
        let delta = deltas(&s, &forward(&s, &q, &k, &v).0, &weights);
        let [dq, dk, dv] = backward(&s, [&q, &k, &v, &weights], &delta);
        check_gradient("q", &q, &dq, |x| loss(x, &k, &v));
        check_gradient("k", &k, &dk, |x| loss(&q, x, &v));
        check_gradient("v", &v, &dv, |x| loss(&q, &k, x));
    }
}

#[test]
fn narrow_gradients_need_sums() {
    let s = shape(1, [4, 4, 4], [1, 1, 2]);
    let [q, k, v] = inputs(&s, DType::Bf16);
    let statistics = Operand::garbage(DType::F32, &[1, 1, 4]);
    let row = || Operand::garbage(DType::Bf16, &[4, 2]);
    let operands = [q, k, v, row(), statistics.clone(), row(), statistics, row(), row(), row()];
    let refused = refusal(&operands, |t| Op::AttentionBackward {
        q: &t[0],
        k: &t[1],
        v: &t[2],
        out: &t[3],
        lse: &t[4],
        dout: &t[5],
        delta: &t[6],
        sums: None,
        dq: &t[7],
        dk: &t[8],
        dv: &t[9],
        shape: s,
        compute: Compute::F32,
    });
    assert_eq!(refused, "attention_backward: gradients that are not f32 need sums");
}
