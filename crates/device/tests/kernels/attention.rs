//! Attention, forward and backward, against softmax written out in f64.

use plimsoll_device::{Attention, AttentionShape, BlockSparse, Compute, DType, DeviceExt};

use crate::harness::{Expected, Operand, check_costly, check_gradient, noise, refusal};

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
        block_sparse: None,
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
    // Heads that whole tiles are made of: of eight numbers, of more than one box, in groups.
    all.push(shape(2, [150, 150, 150], [2, 1, 8]));
    all.push(AttentionShape { window: Some(70), ..shape(1, [200, 200, 200], [1, 1, 72]) });
    all.push(AttentionShape { soft_cap: Some(0.7), ..shape(1, [130, 130, 130], [2, 1, 64]) });
    // The widest heads.
    all.push(AttentionShape { scale: 0.03, ..shape(1, [40, 40, 40], [2, 1, 576]) });
    all
}

/// What only inference has: more keys than queries, room for more.
pub fn decoding_shapes() -> Vec<AttentionShape> {
    let mut all = vec![
        shape(2, [1, 1, 9], [6, 2, 4]),
        shape(1, [1, 700, 800], [8, 1, 16]),
        shape(2, [3, 290, 300], [4, 2, 6]),
        shape(1, [140, 600, 600], [2, 2, 4]),
        shape(2, [140, 300, 350], [2, 1, 16]),
    ];
    for window in [1, 40, 300] {
        all.push(AttentionShape { window: Some(window), ..shape(1, [1, 700, 800], [4, 1, 4]) });
        all.push(AttentionShape { window: Some(window), ..shape(1, [140, 600, 600], [2, 1, 4]) });
        // Positions that lie where older ones did.
        let capacity = window + 140;
        all.push(AttentionShape { window: Some(window), ..shape(1, [1, 700, capacity], [4, 1, 4]) });
        all.push(AttentionShape { window: Some(window), ..shape(2, [140, 900, capacity], [2, 1, 4]) });
    }
    // The narrow vectors of latent attention, with more heads than are taken together.
    all.push(AttentionShape { scale: 0.03, ..shape(1, [1, 300, 320], [19, 1, 576]) });
    all.push(AttentionShape { scale: 0.03, ..shape(2, [5, 50, 60], [3, 1, 576]) });
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
pub fn query(s: &AttentionShape, batch: u64, i: u64, head: u64, t: u64) -> usize {
    (((batch * s.q_len + i) * s.heads + head) * s.head_dim + t) as usize
}

pub fn key(s: &AttentionShape, batch: u64, j: u64, head: u64, t: u64) -> usize {
    let row = batch * s.kv_capacity + j % s.kv_capacity;
    ((row * s.kv_heads + head / (s.heads / s.kv_heads)) * s.head_dim + t) as usize
}

/// Patterns of blocks: smaller and larger than a tile and its block of queries, with a gap inside a tile and over many.
fn sparse_shapes() -> Vec<AttentionShape> {
    let sparse = |pattern: [u64; 3], shape: AttentionShape| {
        let [block, local_blocks, global_blocks] = pattern;
        AttentionShape { block_sparse: Some(BlockSparse { block, local_blocks, global_blocks }), ..shape }
    };
    let mut all = Vec::new();
    for pattern in [[16, 2, 1], [5, 1, 0], [128, 1, 1], [100, 2, 0], [300, 1, 1], [1, 3, 2]] {
        all.push(sparse(pattern, shape(1, [790, 790, 790], [2, 1, 4])));
    }
    all.push(AttentionShape { window: Some(70), ..sparse([16, 2, 3], shape(2, [300, 300, 300], [2, 1, 4])) });
    all.push(AttentionShape {
        soft_cap: Some(0.7),
        ..sparse([32, 1, 1], shape(2, [270, 270, 270], [4, 2, 6]))
    });
    all
}

/// Where the documents of some sequences begin: for each query, the first position that it sees.
fn documents(s: &AttentionShape, kind: u64) -> Vec<u64> {
    let mut all = Vec::new();
    for batch in 0..s.batch {
        let mut start = 0;
        for i in 0..s.q_len {
            let begins = match kind {
                0 => i % (37 + 5 * batch) == 11,
                1 => [1, 2, 128, 257, 258].contains(&i),
                _ => i == 300 + batch,
            };
            start = if begins { i } else { start };
            all.push(start);
        }
    }
    all
}

/// Shapes and the documents of their sequences, none where there are none.
pub fn cases() -> Vec<(AttentionShape, Vec<u64>)> {
    let plain = shapes().into_iter().chain(sparse_shapes());
    let mut all: Vec<_> = plain.map(|s| (s, Vec::new())).collect();
    let packed = [
        shape(2, [300, 300, 300], [4, 2, 10]),
        AttentionShape { window: Some(20), ..shape(1, [530, 530, 530], [2, 1, 4]) },
        AttentionShape { soft_cap: Some(0.7), ..shape(1, [790, 790, 790], [2, 2, 4]) },
        sparse_shapes()[0],
        shape(2, [280, 280, 280], [1, 1, 24]),
    ];
    all.extend(packed.into_iter().flat_map(|s| (0..3).map(move |kind| (s, documents(&s, kind)))));
    all
}

/// The keys that a query sees.
fn seen(s: &AttentionShape, documents: &[u64], batch: u64, i: u64) -> Vec<u64> {
    let position = s.kv_len - s.q_len + i;
    let first = documents.get((batch * s.q_len + i) as usize).copied().unwrap_or(0);
    let sees = |key: &u64| {
        s.window.is_none_or(|window| position < key + window)
            && s.block_sparse.is_none_or(|b| {
                (position / b.block).saturating_sub(key / b.block) < b.local_blocks
                    || key / b.block < b.global_blocks
            })
    };
    (first..=position).filter(sees).collect()
}

fn cap(s: &AttentionShape, score: f64) -> f64 {
    s.soft_cap.map_or(score, |cap| f64::from(cap) * (score / f64::from(cap)).tanh())
}

/// Visits every row of every head with its log-sum-exp, its keys, raw scores and probabilities.
pub fn for_each_row(
    s: &AttentionShape,
    documents: &[u64],
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
                let keys = seen(s, documents, batch, i).into_iter();
                let scores: Vec<(u64, f64)> = keys.map(|j| (j, score(j))).collect();
                let lse = scores.iter().map(|(_, x)| cap(s, *x).exp()).sum::<f64>().ln();
                let row: Vec<_> = scores.iter().map(|(j, x)| (*j, *x, (cap(s, *x) - lse).exp())).collect();
                visit([batch, head, i], lse, &row);
            }
        }
    }
}

/// Output and log-sum-exp.
pub fn forward(s: &AttentionShape, documents: &[u64], [q, k, v]: [&[f64]; 3]) -> (Vec<f64>, Vec<f64>) {
    let (mut out, mut all_lse) = (vec![0.0; q.len()], Vec::new());
    for_each_row(s, documents, q, k, |[batch, head, i], lse, row| {
        all_lse.push(lse);
        for (j, _, p) in row {
            for t in 0..s.head_dim {
                out[query(s, batch, i, head, t)] += p * v[key(s, batch, *j, head, t)];
            }
        }
    });
    (out, all_lse)
}

/// The probabilities, 0 where nothing is seen.
fn probabilities(s: &AttentionShape, documents: &[u64], q: &[f64], k: &[f64]) -> Vec<f64> {
    let mut all = vec![0.0; (s.batch * s.heads * s.q_len * s.kv_len) as usize];
    for_each_row(s, documents, q, k, |[batch, head, i], _, row| {
        let start = ((batch * s.heads + head) * s.q_len + i) * s.kv_len;
        row.iter().for_each(|(j, _, p)| all[(start + j) as usize] = *p);
    });
    all
}

/// The sums of dout * out over each head of each row.
pub fn deltas(s: &AttentionShape, out: &[f64], dout: &[f64]) -> Vec<f64> {
    let row = |n: u64| -> f64 {
        let (batch, head, i) = (n / s.q_len / s.heads, n / s.q_len % s.heads, n % s.q_len);
        let at = |t| query(s, batch, i, head, t);
        (0..s.head_dim).map(|t| out[at(t)] * dout[at(t)]).sum()
    };
    (0..s.batch * s.heads * s.q_len).map(row).collect()
}

/// Gradients of q, k and v.
pub fn backward(
    s: &AttentionShape,
    documents: &[u64],
    [q, k, v, dout]: [&[f64]; 4],
    deltas: &[f64],
) -> [Vec<f64>; 3] {
    let (mut dq, mut dk, mut dv) = (vec![0.0; q.len()], vec![0.0; k.len()], vec![0.0; v.len()]);
    for_each_row(s, documents, q, k, |[batch, head, i], _, row| {
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
pub fn inputs(s: &AttentionShape, dtype: DType) -> [Operand; 3] {
    let [n, m] = [s.batch * s.q_len, s.batch * s.kv_capacity].map(|n| n as usize);
    let [qw, kw] = [s.heads * s.head_dim, s.kv_heads * s.head_dim].map(|n| n as usize);
    [
        Operand::new(dtype, &[n, qw], noise(1).map(|x| 3.0 * x)),
        Operand::new(dtype, &[m, kw], noise(2).map(|x| 3.0 * x)),
        Operand::new(dtype, &[m, kw], noise(3)),
    ]
}

pub fn tolerance(compute: Compute) -> f64 {
    match compute {
        Compute::F32 | Compute::Int8 => 6e-6,
        Compute::Bf16 => 3e-2,
    }
}

pub const KINDS: [(DType, Compute); 3] =
    [(DType::F32, Compute::F32), (DType::Bf16, Compute::F32), (DType::Bf16, Compute::Bf16)];

/// The operand that says where documents begin; of no use where there are none.
pub fn starts(documents: &[u64]) -> Operand {
    let values: Vec<f64> = documents.iter().map(|first| *first as f64).collect();
    Operand::new(DType::U32, &[documents.len().max(1)], values.into_iter().chain([0.0]))
}

/// Checks a forward pass, its scores in tiles or written out.
fn check_forward(s: AttentionShape, documents: &[u64], standard: bool) {
    for (dtype, compute) in KINDS {
        let [q, k, v] = inputs(&s, dtype);
        let (out, lse) = forward(&s, documents, [&q.values, &k.values, &v.values]);
        let p = if standard { probabilities(&s, documents, &q.values, &k.values) } else { vec![] };
        let sizes = [s.batch * s.q_len, s.heads * s.head_dim].map(|n| n as usize);
        let statistics = [s.batch, s.heads, s.q_len].map(|n| n as usize);
        let scores = if standard {
            Operand::garbage(DType::F32, &[p.len()])
        } else {
            Operand::new(DType::F32, &[1], noise(7))
        };
        let operands = [
            q,
            k,
            v,
            Operand::garbage(dtype, &sizes),
            Operand::garbage(DType::F32, &statistics),
            starts(documents),
            scores,
        ];
        let tolerance = tolerance(compute);
        let mut expected = vec![
            Expected { operand: 3, values: out, tolerance },
            Expected { operand: 4, values: lse, tolerance },
        ];
        if standard {
            // Scores reach 30, where f32 is exact to 2e-6: so much is a probability near 1 wrong.
            expected.push(Expected { operand: 6, values: p, tolerance: (3.0 * tolerance).max(6e-5) });
        }
        check_costly(
            &format!("{s:?} {dtype} {compute:?}, standard: {standard}"),
            &operands,
            |cpu, t| {
                cpu.run(Attention::Forward {
                    q: &t[0],
                    k: &t[1],
                    v: &t[2],
                    documents: (!documents.is_empty()).then_some(&t[5]),
                    out: &t[3],
                    lse: &t[4],
                    probabilities: standard.then_some(&t[6]),
                    shape: s,
                    compute,
                })
            },
            &expected,
            &[],
        );
    }
}

#[test]
fn attention() {
    for (s, documents) in cases() {
        check_forward(s, &documents, false);
    }
    for s in decoding_shapes() {
        check_forward(s, &[], false);
    }
    let pattern = BlockSparse { block: 64, local_blocks: 2, global_blocks: 1 };
    for q_len in [1, 140] {
        let s = shape(2, [q_len, 600, 600], [4, 2, 4]);
        check_forward(AttentionShape { block_sparse: Some(pattern), ..s }, &[], false);
        // All queries of a sequence belong to its last document.
        let documents: Vec<u64> = (0..2 * q_len).map(|n| 300 + 70 * (n / q_len)).collect();
        check_forward(s, &documents, false);
    }
}

#[test]
fn attention_written_out() {
    for (s, documents) in cases() {
        check_forward(s, &documents, true);
    }
    for s in decoding_shapes().into_iter().filter(|s| s.kv_len < 2000) {
        check_forward(s, &[], true);
    }
}

/// Checks a backward pass, with probabilities that were kept or without.
fn check_backward(s: AttentionShape, documents: &[u64], standard: bool) {
    for (dtype, compute) in KINDS {
        let [q, k, v] = inputs(&s, dtype);
        let sizes = |columns: u64| [(s.batch * s.q_len) as usize, columns as usize];
        let (q_sizes, k_sizes) = (sizes(s.heads * s.head_dim), sizes(s.kv_heads * s.head_dim));
        let statistics = [s.batch, s.heads, s.q_len].map(|n| n as usize);
        let (out, lse) = forward(&s, documents, [&q.values, &k.values, &v.values]);
        let p = if standard { probabilities(&s, documents, &q.values, &k.values) } else { vec![0.0] };
        let (out, lse) = (Operand::new(dtype, &q_sizes, out), Operand::new(DType::F32, &statistics, lse));
        let dout = Operand::new(dtype, &q_sizes, noise(4));
        // Of the output as it is stored: that is what the kernel has.
        let delta = deltas(&s, &out.values, &dout.values);
        let [dq, dk, dv] = backward(&s, documents, [&q.values, &k.values, &v.values, &dout.values], &delta);
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
            starts(documents),
            Operand::new(DType::F32, &[p.len()], p),
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
        check_costly(
            &format!("{s:?} {dtype} {compute:?}, standard: {standard}"),
            &operands,
            |cpu, t| {
                cpu.run(Attention::Backward {
                    q: &t[0],
                    k: &t[1],
                    v: &t[2],
                    documents: (!documents.is_empty()).then_some(&t[11]),
                    out: &t[3],
                    lse: &t[4],
                    probabilities: standard.then_some(&t[12]),
                    dout: &t[5],
                    delta: &t[6],
                    sums: Some(&t[7]),
                    dq: &t[8],
                    dk: &t[9],
                    dv: &t[10],
                    shape: s,
                    compute,
                })
            },
            &expected,
            &[7],
        );
    }
}

#[test]
fn attention_backward() {
    for (s, documents) in cases() {
        check_backward(s, &documents, false);
    }
}

#[test]
fn attention_backward_with_kept_probabilities() {
    for (s, documents) in cases() {
        check_backward(s, &documents, true);
    }
}

/// The plain gradients above are those of the plain output.
#[test]
fn plain_gradients_are_right() {
    let sparse = |block| Some(BlockSparse { block, local_blocks: 1, global_blocks: 1 });
    for (window, soft_cap, block_sparse, documents) in [
        (None, None, None, vec![]),
        (Some(3), None, None, vec![]),
        (None, Some(0.7), sparse(2), vec![]),
        (Some(2), Some(0.5), None, vec![0, 0, 2, 2, 2, 5]),
        (None, None, sparse(1), vec![0, 0, 0, 0, 4, 4]),
    ] {
        let s = AttentionShape { window, soft_cap, block_sparse, ..shape(1, [6, 6, 6], [2, 1, 4]) };
        let [q, k, v] = inputs(&s, DType::F32).map(|x| x.values);
        let weights: Vec<f64> = noise(8).take(q.len()).collect();
        let loss = |q: &[f64], k: &[f64], v: &[f64]| -> f64 {
            forward(&s, &documents, [q, k, v]).0.iter().zip(&weights).map(|(x, w)| x * w).sum()
        };
        let delta = deltas(&s, &forward(&s, &documents, [&q, &k, &v]).0, &weights);
        let [dq, dk, dv] = backward(&s, &documents, [&q, &k, &v, &weights], &delta);
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
    let refused = refusal(&operands, |cpu, t| {
        cpu.run(Attention::Backward {
            q: &t[0],
            k: &t[1],
            v: &t[2],
            documents: None,
            out: &t[3],
            lse: &t[4],
            probabilities: None,
            dout: &t[5],
            delta: &t[6],
            sums: None,
            dq: &t[7],
            dk: &t[8],
            dv: &t[9],
            shape: s,
            compute: Compute::F32,
        })
    });
    assert_eq!(refused, "attention_backward: gradients that are not f32 need sums");
}

/// Forward, with operands that do not fit the shape.
#[test]
fn masks_must_fit() {
    let s = shape(1, [4, 4, 4], [1, 1, 2]);
    let refused = |shape, starts: Operand, probabilities: usize| {
        let [q, k, v] = inputs(&s, DType::F32);
        let out = Operand::garbage(DType::F32, &[4, 2]);
        let lse = Operand::garbage(DType::F32, &[1, 1, 4]);
        let probabilities = Operand::garbage(DType::F32, &[probabilities]);
        refusal(&[q, k, v, out, lse, starts, probabilities], |cpu, t| {
            cpu.run(Attention::Forward {
                q: &t[0],
                k: &t[1],
                v: &t[2],
                documents: Some(&t[5]),
                out: &t[3],
                lse: &t[4],
                probabilities: Some(&t[6]),
                shape,
                compute: Compute::F32,
            })
        })
    };
    let starts = |n| Operand::new(DType::U32, &[n], [0.0; 8]);
    assert_eq!(refused(s, starts(4), 16), "accepted");
    assert!(refused(s, starts(3), 16).contains("does not have 4 elements"));
    assert!(refused(s, Operand::new(DType::F32, &[4], [0.0; 4]), 16).contains("is not u32"));
    assert!(refused(s, starts(4), 12).contains("does not have 16 elements"));
    for (block, local_blocks) in [(0, 1), (1, 0)] {
        let block_sparse = Some(BlockSparse { block, local_blocks, global_blocks: 1 });
        let refused = refused(AttentionShape { block_sparse, ..s }, starts(4), 16);
        assert!(refused.contains("is impossible"), "{refused}");
    }
    // Nobody sees what comes after it, whatever is said of documents.
    assert_eq!(refused(s, Operand::new(DType::U32, &[4], [9.0, 4e9, 3.0, 7.0]), 16), "accepted");
}
