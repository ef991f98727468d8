//! Sinks of attention against a softmax with one more score, in f64.

use plimsoll_device::{Attention, AttentionShape, BlockSparse, Compute, DType, DeviceExt, Sink};

use crate::attention::{KINDS, for_each_row, inputs, key, query, shape, starts, tolerance};
use crate::harness::{
    Expected, Operand, check, check_costly, check_gradient_within, decode, noise, refusal, run,
};
use plimsoll_device::cpu::Isa;

/// Shapes with documents where there are any: groups, windows, patterns, caps, a past, single queries.
fn cases() -> Vec<(AttentionShape, Vec<u64>)> {
    let pattern = BlockSparse { block: 16, local_blocks: 2, global_blocks: 1 };
    let plain = shape(2, [150, 150, 150], [4, 2, 10]);
    let documents = (0..300).map(|n| n % 150 / 40 * 40).collect();
    let mut all = vec![(plain, documents)];
    all.extend(
        [
            plain,
            AttentionShape { window: Some(7), ..plain },
            AttentionShape { soft_cap: Some(0.7), block_sparse: Some(pattern), ..plain },
            shape(1, [1, 1, 1], [1, 1, 2]),
        ]
        .map(|s| (s, Vec::new())),
    );
    all
}

/// What only inference has.
fn decoding() -> Vec<(AttentionShape, Vec<u64>)> {
    let all = [
        shape(1, [1, 700, 800], [8, 1, 16]),
        AttentionShape { window: Some(40), ..shape(2, [3, 290, 300], [4, 2, 6]) },
    ];
    all.map(|s| (s, Vec::new())).into()
}

/// Sinks below, among and above the scores.
fn sinks(s: &AttentionShape) -> impl Iterator<Item = f64> {
    noise(9).map(|x| 4.0 * x).take(s.heads as usize)
}

/// Output, log-sum-exp and probabilities beside sinks.
fn forward(s: &AttentionShape, documents: &[u64], [q, k, v]: [&[f64]; 3], sinks: &[f64]) -> [Vec<f64>; 3] {
    let probabilities = vec![0.0; (s.batch * s.heads * s.q_len * s.kv_len) as usize];
    let (mut out, mut sums, mut all) = (vec![0.0; q.len()], Vec::new(), probabilities);
    for_each_row(s, documents, q, k, |[batch, head, i], lse, row| {
        let sum = (lse.exp() + sinks[head as usize].exp()).ln();
        sums.push(sum);
        let start = ((batch * s.heads + head) * s.q_len + i) * s.kv_len;
        for (j, _, p) in row {
            let p = p * (lse - sum).exp();
            all[(start + j) as usize] = p;
            for t in 0..s.head_dim {
                out[query(s, batch, i, head, t)] += p * v[key(s, batch, *j, head, t)];
            }
        }
    });
    [out, sums, all]
}

#[test]
fn attention_with_sinks() {
    let training = cases().into_iter().flat_map(|case| [(case.clone(), false), (case, true)]);
    for ((s, documents), standard) in training.chain(decoding().into_iter().map(|case| (case, false))) {
        for (dtype, compute) in KINDS {
            let [q, k, v] = inputs(&s, dtype);
            let sink = Operand::new(dtype, &[s.heads as usize], sinks(&s));
            let [out, lse, p] = forward(&s, &documents, [&q.values, &k.values, &v.values], &sink.values);
            let sizes = [s.batch * s.q_len, s.heads * s.head_dim].map(|n| n as usize);
            let statistics = [s.batch, s.heads, s.q_len].map(|n| n as usize);
            let scores = if standard {
                Operand::garbage(DType::F32, &[p.len()])
            } else {
                Operand::new(DType::F32, &[1], noise(7))
            };
            let (out_before, lse_before) =
                (Operand::garbage(dtype, &sizes), Operand::garbage(DType::F32, &statistics));
            let operands = [q, k, v, out_before, lse_before, starts(&documents), scores, sink];
            let tolerance = tolerance(compute);
            // What attention gave is rounded before it is scaled.
            let of_out = tolerance + if dtype == DType::F32 { 0.0 } else { 5e-3 };
            let mut expected = vec![
                Expected { operand: 3, values: out, tolerance: of_out },
                Expected { operand: 4, values: lse, tolerance },
            ];
            if standard {
                expected.push(Expected { operand: 6, values: p, tolerance: (3.0 * tolerance).max(6e-5) });
            }
            check_costly(
                &format!("{s:?} {dtype} {compute:?}, standard: {standard}"),
                &operands,
                |cpu, t| {
                    let (out, lse, probabilities) = (&t[3], &t[4], standard.then_some(&t[6]));
                    cpu.run(Attention::Forward {
                        q: &t[0],
                        k: &t[1],
                        v: &t[2],
                        documents: (!documents.is_empty()).then_some(&t[5]),
                        out,
                        lse,
                        probabilities,
                        shape: s,
                        compute,
                    })?;
                    cpu.run(Sink::Apply { sinks: &t[7], out, lse, probabilities, shape: s })
                },
                &expected,
                &[],
            );
        }
    }
}

/// Attention's own backward pass gives the gradients of a softmax with sinks, and [`Sink::Backward`] theirs.
#[test]
fn gradients_with_sinks() {
    for (s, documents) in [
        (AttentionShape { window: Some(4), ..shape(2, [9, 9, 9], [4, 2, 6]) }, vec![]),
        (shape(1, [9, 9, 9], [2, 1, 4]), vec![0, 0, 0, 0, 4, 4, 4, 7, 7]),
    ] {
        for (standard, accumulate) in [(false, false), (true, true)] {
            let [q, k, v] = inputs(&s, DType::F32);
            let sink = Operand::new(DType::F32, &[s.heads as usize], sinks(&s));
            let (rows, heads) = ((s.batch * s.q_len) as usize, s.heads as usize);
            let (width, scores) = (heads * s.head_dim as usize, rows * heads * s.kv_len as usize);
            let f32 = |sizes: &[usize]| Operand::garbage(DType::F32, sizes);
            let dout = Operand::new(DType::F32, &[rows, width], noise(5));
            let before = Operand::new(DType::F32, &[heads], noise(6));
            let [dq, dk, dv] = [&q, &k, &v].map(|x| f32(&[rows, x.values.len() / rows]));
            let operands = [
                q.clone(),
                k.clone(),
                v.clone(),
                sink.clone(),
                dout.clone(),
                starts(&documents),
                f32(&[rows, width]),
                f32(&[rows * heads]),
                f32(&[scores]),
                f32(&[rows * heads]),
                dq,
                dk,
                dv,
                before.clone(),
            ];
            let written = run(Isa::detect(), 2, &operands, &|cpu, t| {
                let documents = (!documents.is_empty()).then_some(&t[5]);
                let ([q, k, v, sinks, dout], [out, lse, p]) =
                    ([&t[0], &t[1], &t[2], &t[3], &t[4]], [&t[6], &t[7], &t[8]]);
                let (probabilities, shape, compute) = (standard.then_some(p), s, Compute::F32);
                cpu.run(Attention::Forward { q, k, v, documents, out, lse, probabilities, shape, compute })?;
                cpu.run(Sink::Apply { sinks, out, lse, probabilities, shape })?;
                cpu.run(Sink::Backward { sinks, out, lse, dout, dsinks: &t[13], accumulate, shape })?;
                cpu.run(Attention::Backward {
                    q,
                    k,
                    v,
                    documents,
                    out,
                    lse,
                    probabilities,
                    dout,
                    delta: &t[9],
                    sums: None,
                    dq: &t[10],
                    dk: &t[11],
                    dv: &t[12],
                    shape,
                    compute,
                })
            })
            .unwrap();
            let loss = |[q, k, v]: [&[f64]; 3], sinks: &[f64]| -> f64 {
                let [out, ..] = forward(&s, &documents, [q, k, v], sinks);
                out.iter().zip(&dout.values).map(|(out, dout)| out * dout).sum()
            };
            let [q, k, v, sink] = [&q.values, &k.values, &v.values, &sink.values];
            let check = |name: &str, values: &[f64], operand: usize, loss: &dyn Fn(&[f64]) -> f64| {
                let mut found = decode(DType::F32, &written[operand]);
                if accumulate && operand == 13 {
                    found.iter_mut().zip(&before.values).for_each(|(found, before)| *found -= before);
                }
                check_gradient_within(2e-5, &format!("{s:?} {standard} {name}"), values, &found, loss);
            };
            check("q", q, 10, &|q| loss([q, k, v], sink));
            check("k", k, 11, &|k| loss([q, k, v], sink));
            check("v", v, 12, &|v| loss([q, k, v], sink));
            check("sinks", sink, 13, &|sink| loss([q, k, v], sink));
        }
    }
}

#[test]
fn threads_and_types_of_the_gradient_of_sinks() {
    let s = shape(2, [70, 70, 70], [3, 1, 20]);
    let (rows, heads) = (140, 3);
    for dtype in [DType::F32, DType::Bf16] {
        let operands = [
            Operand::new(dtype, &[heads], noise(1)),
            Operand::new(dtype, &[rows, heads * 20], noise(2)),
            Operand::new(DType::F32, &[2, heads, 70], noise(3).map(|x| 2.0 + x)),
            Operand::new(dtype, &[rows, heads * 20], noise(4)),
            Operand::new(DType::F32, &[heads], noise(5)),
        ];
        let [sinks, out, lse, dout, before] = operands.each_ref().map(|operand| &operand.values);
        let of_head = |head: usize| -> f64 {
            let of_row = |row: usize| -> f64 {
                let dot: f64 = (0..20).map(|t| (row * heads + head) * 20 + t).map(|i| out[i] * dout[i]).sum();
                let statistic = (row / 70 * heads + head) * 70 + row % 70;
                (sinks[head] - lse[statistic]).exp() * dot
            };
            before[head] - (0..rows).map(of_row).sum::<f64>()
        };
        let values = (0..heads).map(of_head).collect();
        check(
            &format!("{dtype}"),
            &operands,
            |cpu, t| {
                let (sinks, out, lse, dout, dsinks) = (&t[0], &t[1], &t[2], &t[3], &t[4]);
                cpu.run(Sink::Backward { sinks, out, lse, dout, dsinks, accumulate: true, shape: s })
            },
            &[Expected { operand: 4, values, tolerance: 2e-6 }],
        );
    }
}

#[test]
fn sinks_that_do_not_fit() {
    let s = shape(1, [4, 4, 4], [2, 1, 3]);
    let operands = [
        Operand::new(DType::F32, &[3], noise(1)),
        Operand::new(DType::F32, &[4, 6], noise(2)),
        Operand::new(DType::F32, &[1, 2, 4], noise(3)),
    ];
    let message = refusal(&operands, |cpu, t| {
        cpu.run(Sink::Apply { sinks: &t[0], out: &t[1], lse: &t[2], probabilities: None, shape: s })
    });
    assert!(message.contains("does not have 2 elements"), "{message}");
}
