//! Attention over keys that come a piece at a time, against softmax written out in f64 and against attention over all of them.

use plimsoll_device::{
    Attention, AttentionShape, DType, Device, DeviceError, DeviceExt, Elementwise, KeyPiece, PiecedAttention,
    Running, Tensor,
};
use plimsoll_memory::Tag;

use crate::attention::{KINDS, backward, cases, deltas, forward, inputs, shape, starts, tolerance};
use crate::harness::{Expected, Operand, check_costly, check_in_place, noise};

/// The last queries of a sequence, its keys, and how these are cut.
fn chunks() -> Vec<(AttentionShape, Vec<u64>, Vec<u64>)> {
    let mut all = Vec::new();
    for (s, documents) in cases() {
        for (queries, cut) in [(s.q_len, 256), (s.q_len.div_ceil(3), 100)] {
            let own = AttentionShape { batch: 1, q_len: queries, ..s };
            let from = (s.q_len - queries) as usize;
            let documents = documents.get(from..s.q_len as usize).unwrap_or_default().to_vec();
            let cuts = (0..=s.kv_len.div_ceil(cut)).map(|i| (i * cut).min(s.kv_len)).collect();
            all.push((own, documents, cuts));
        }
    }
    all
}

/// The pieces, the last one first, as a backward pass has them.
fn pieces(
    s: AttentionShape,
    cuts: &[u64],
) -> impl DoubleEndedIterator<Item = (KeyPiece, std::ops::Range<u64>)> {
    cuts.windows(2).map(move |cut| {
        let shape = AttentionShape { kv_capacity: cut[1] - cut[0], ..s };
        (KeyPiece { first: cut[0], shape }, cut[0]..cut[1])
    })
}

/// What queries have before the first piece.
fn begin(cpu: &dyn Device, s: &AttentionShape) -> Result<[Tensor; 3], DeviceError> {
    let alloc = |sizes: &[u64], value| -> Result<Tensor, DeviceError> {
        let tensor = cpu.alloc(DType::F32, sizes, Tag::Workspace, "running")?;
        fill(cpu, &tensor, value)?;
        Ok(tensor)
    };
    let statistics = [s.batch, s.heads, s.q_len];
    Ok([
        alloc(&[s.batch * s.q_len, s.heads * s.head_dim], 0.0)?,
        alloc(&statistics, f32::NEG_INFINITY)?,
        alloc(&statistics, 0.0)?,
    ])
}

fn fill(cpu: &dyn Device, out: &Tensor, value: f32) -> Result<(), DeviceError> {
    cpu.run(Elementwise::Fill { out, value })
}

#[test]
fn pieces_of_the_keys_give_what_all_of_them_give() {
    for (s, documents, cuts) in chunks() {
        for (dtype, compute) in KINDS {
            let [q, k, v] = inputs(&s, dtype);
            let (out, lse) = forward(&s, &documents, [&q.values, &k.values, &v.values]);
            let sizes = [s.q_len, s.heads * s.head_dim].map(|n| n as usize);
            let statistics = [1, s.heads as usize, s.q_len as usize];
            let garbage = |sizes: &[usize]| Operand::garbage(DType::F32, sizes);
            let operands =
                [q, k, v, Operand::garbage(dtype, &sizes), garbage(&statistics), starts(&documents)];
            let tolerance = tolerance(compute);
            check_costly(
                &format!("{s:?} {cuts:?} {dtype} {compute:?}"),
                &operands,
                |cpu, t| {
                    let [sums, most, total] = begin(cpu, &s)?;
                    let running = Running { sums: &sums, most: &most, total: &total };
                    for (piece, rows) in pieces(s, &cuts) {
                        cpu.run(PiecedAttention::Add {
                            q: &t[0],
                            k: &t[1].slice_rows(rows.clone()).unwrap(),
                            v: &t[2].slice_rows(rows).unwrap(),
                            documents: (!documents.is_empty()).then_some(&t[5]),
                            running,
                            piece,
                            compute,
                        })?;
                    }
                    cpu.run(PiecedAttention::Finish { running, out: &t[3], lse: &t[4], shape: s })
                },
                &[
                    Expected { operand: 3, values: out, tolerance },
                    Expected { operand: 4, values: lse, tolerance },
                ],
                &[],
            );
        }
    }
}

#[test]
fn pieces_of_the_keys_owe_what_all_of_them_owe() {
    for (s, documents, cuts) in chunks() {
        for (dtype, compute) in KINDS {
            let [q, k, v] = inputs(&s, dtype);
            let sizes = |rows: u64, heads: u64| [rows as usize, (heads * s.head_dim) as usize];
            let (q_sizes, k_sizes) = (sizes(s.q_len, s.heads), sizes(s.kv_len, s.kv_heads));
            let statistics = [1, s.heads as usize, s.q_len as usize];
            let (out, lse) = forward(&s, &documents, [&q.values, &k.values, &v.values]);
            let (out, lse) = (Operand::new(dtype, &q_sizes, out), Operand::new(DType::F32, &statistics, lse));
            let dout = Operand::new(dtype, &q_sizes, noise(4));
            let delta = deltas(&s, &out.values, &dout.values);
            let [dq, dk, dv] =
                backward(&s, &documents, [&q.values, &k.values, &v.values, &dout.values], &delta);
            let garbage = |sizes: &[usize]| Operand::garbage(DType::F32, sizes);
            let operands = [
                q,
                k,
                v,
                out,
                lse,
                dout,
                garbage(&statistics),
                garbage(&q_sizes),
                garbage(&k_sizes),
                garbage(&k_sizes),
                starts(&documents),
            ];
            let tolerance = (2.0 * tolerance(compute)).max(4e-5);
            check_costly(
                &format!("{s:?} {cuts:?} {dtype} {compute:?}"),
                &operands,
                |cpu, t| {
                    let (out, dout, delta) = (&t[3], &t[5], &t[6]);
                    cpu.run(PiecedAttention::Deltas { out, dout, delta, shape: s })?;
                    for gradient in &t[7..10] {
                        fill(cpu, gradient, 0.0)?;
                    }
                    for (piece, rows) in pieces(s, &cuts).rev() {
                        let of = |tensor: &Tensor| tensor.slice_rows(rows.clone()).unwrap();
                        cpu.run(PiecedAttention::Backward {
                            q: &t[0],
                            k: &of(&t[1]),
                            v: &of(&t[2]),
                            documents: (!documents.is_empty()).then_some(&t[10]),
                            lse: &t[4],
                            delta,
                            dout,
                            dq: &t[7],
                            dk: &of(&t[8]),
                            dv: &of(&t[9]),
                            piece,
                            compute,
                        })?;
                    }
                    Ok(())
                },
                &[
                    Expected { operand: 6, values: delta, tolerance: 2e-6 },
                    Expected { operand: 7, values: dq, tolerance },
                    Expected { operand: 8, values: dk, tolerance },
                    Expected { operand: 9, values: dv, tolerance },
                ],
                &[],
            );
        }
    }
}

/// Pieces of whole tiles give the very bits of whole attention.
#[test]
fn pieces_of_whole_tiles_have_the_bits_of_all_keys() {
    let s = shape(1, [900, 900, 900], [4, 2, 16]);
    for (dtype, compute) in KINDS {
        let [q, k, v] = inputs(&s, dtype);
        let (out, lse) = (Operand::garbage(dtype, &[900, 64]), Operand::garbage(DType::F32, &[1, 4, 900]));
        let operands = [q, k, v, out, lse];
        let whole = |cpu: &dyn Device, t: &[Tensor]| {
            cpu.run(Attention::Forward {
                q: &t[0],
                k: &t[1],
                v: &t[2],
                documents: None,
                out: &t[3],
                lse: &t[4],
                probabilities: None,
                shape: s,
                compute,
            })
        };
        let pieced = |cpu: &dyn Device, t: &[Tensor]| {
            let [sums, most, total] = begin(cpu, &s)?;
            let running = Running { sums: &sums, most: &most, total: &total };
            for (piece, rows) in pieces(s, &[0, 256, 768, 900]) {
                let (k, v) = (&t[1].slice_rows(rows.clone()).unwrap(), &t[2].slice_rows(rows).unwrap());
                cpu.run(PiecedAttention::Add { q: &t[0], k, v, documents: None, running, piece, compute })?;
            }
            cpu.run(PiecedAttention::Finish { running, out: &t[3], lse: &t[4], shape: s })
        };
        for result in [3, 4] {
            check_in_place(
                &format!("{dtype} {compute:?}"),
                (&operands, &whole, result),
                (&operands, &pieced, result),
            );
        }
    }
}
