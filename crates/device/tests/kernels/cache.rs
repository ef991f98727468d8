//! Caches of keys and values: what is written into them, and attention that reads them as they are stored.

use plimsoll_device::cpu::{Isa, dequantize};
use plimsoll_device::{
    Attention, AttentionShape, Compute, DType, Device, DeviceExt, PagedRun, Tensor, page_positions,
};

use crate::attention::{decoding_shapes, forward, shape};
use crate::harness::{Expected, Operand, check_costly, decode, noise, refusal, run, run_on_gpu};

const TYPES: [DType; 6] = [DType::F32, DType::Bf16, DType::F16, DType::Q8_0, DType::Q4_0, DType::Q4_1];

/// The bytes of a cache of `rows` rows of heads with `x` in it from row `first` on; and what was there before.
fn written(dtype: DType, x: &Operand, rows: usize, [heads, d]: [usize; 2], first: u64) -> Vec<u8> {
    let cache = zeros(dtype, rows, heads, d);
    let operands = [x.clone(), cache];
    let op = |isa, threads| {
        run(isa, threads, &operands, &|cpu, t| {
            cpu.run(Attention::WriteCache { x: &t[0], cache: &t[1], first, head_dim: d as u64 })
        })
    };
    let bytes = op(Isa::detect(), 1).unwrap().remove(1);
    for threads in [2, 3] {
        assert_eq!(op(Isa::detect(), threads).unwrap()[1], bytes, "{dtype}: {threads} threads");
    }
    bytes
}

fn zeros(dtype: DType, rows: usize, heads: usize, d: usize) -> Operand {
    let columns = heads * dtype.cached_columns(d as u64) as usize;
    let bytes = dtype.bytes_for((rows * columns) as u64).unwrap() as usize;
    Operand::blocks(dtype, &[rows, columns], vec![0; bytes])
}

/// The values of a cache, without what fills heads up.
fn values(dtype: DType, bytes: &[u8], d: usize) -> Vec<f64> {
    if dtype.is_float() {
        return decode(dtype, bytes);
    }
    let columns = dtype.cached_columns(d as u64) as usize;
    let blocks = bytes.len() / dtype.block_bytes() as usize;
    let mut all = vec![0.0; blocks * dtype.block_elements() as usize];
    dequantize(Isa::Portable, dtype, bytes, &mut all).unwrap();
    all.chunks_exact(columns).flat_map(|head| head[..d].iter().map(|x| f64::from(*x))).collect()
}

/// Half a step of a block's codes, as a share of the largest magnitude or the range in it.
fn half_step(dtype: DType) -> f64 {
    match dtype {
        DType::Q8_0 => 0.5 / 127.0,
        // The end without a counterpart is a whole step away.
        DType::Q4_0 => 1.0 / 8.0,
        DType::Q4_1 => 2.0 * 0.5 / 15.0,
        DType::F16 => f64::powi(2.0, -11),
        DType::Bf16 => f64::powi(2.0, -8),
        _ => 0.0,
    }
}

#[test]
fn rows_are_rounded_and_go_round() {
    for dtype in TYPES {
        for stored in [DType::F32, DType::Bf16] {
            for ([heads, d], rows, n, first) in [
                ([3, 64], 40, 40, 0),
                ([2, 6], 7, 5, 4),
                ([1, 40], 9, 3, 1_000_000_007),
                ([9, 256], 40, 17, 30),
            ] {
                let x = Operand::new(stored, &[n, heads * d], noise(7).map(|x| 5.0 * x + 1.0));
                let got = values(dtype, &written(dtype, &x, rows, [heads, d], first), d);
                for row in 0..n {
                    let at = (first as usize + row) % rows;
                    for (i, want) in x.values[row * heads * d..(row + 1) * heads * d].iter().enumerate() {
                        let got = got[at * heads * d + i];
                        let allowed = 1.01 * half_step(dtype) * 6.0;
                        assert!((got - want).abs() <= allowed, "{dtype}, row {row}, {i}: {got} {want}");
                    }
                }
                let written: Vec<usize> = (0..n).map(|row| (first as usize + row) % rows).collect();
                for row in (0..rows).filter(|row| !written.contains(row)) {
                    assert!(got[row * heads * d..(row + 1) * heads * d].iter().all(|x| *x == 0.0), "{dtype}");
                }
            }
        }
    }
}

#[test]
fn odd_numbers_are_kept_or_stay_odd() {
    for dtype in TYPES {
        let row = |x: f64| {
            let x = Operand::new(DType::F32, &[1, 32], (0..32).map(|i| if i == 5 { x } else { 0.25 }));
            values(dtype, &written(dtype, &x, 1, [1, 32], 0), 32)
        };
        assert!(row(0.25).iter().all(|x| (x - 0.25).abs() < 0.002), "{dtype}: {:?}", row(0.25));
        assert!(row(f64::NAN)[5].is_nan(), "{dtype}");
        assert!(!row(f64::INFINITY)[5].is_finite(), "{dtype}");
        // A scale of f16 is held at the largest one.
        assert!(row(1e30)[5] > 60000.0, "{dtype}");
    }
}

#[test]
fn attention_reads_what_is_stored() {
    let wide = |q_len, window| {
        let capacity = if window { 300 } else { 500 };
        AttentionShape { window: window.then_some(200), ..shape(1, [q_len, 500, capacity], [9, 3, 64]) }
    };
    let more = [wide(1, false), wide(1, true), wide(90, false), wide(90, true)];
    for s in decoding_shapes().into_iter().chain(more) {
        for dtype in &TYPES[2..] {
            let (rows, d) = ((s.batch * s.kv_capacity) as usize, s.head_dim as usize);
            let heads = s.kv_heads as usize;
            let cached = |seed, factor| {
                let x = Operand::new(DType::F32, &[rows, heads * d], noise(seed).map(|x| factor * x));
                let bytes = written(*dtype, &x, rows, [heads, d], 0);
                let columns = heads * dtype.cached_columns(d as u64) as usize;
                (values(*dtype, &bytes, d), Operand::blocks(*dtype, &[rows, columns], bytes))
            };
            let ((k, k_stored), (v, v_stored)) = (cached(2, 24.0 / d.max(8) as f64), cached(3, 1.0));
            let sizes = [s.batch * s.q_len, s.heads * s.head_dim].map(|n| n as usize);
            let q = Operand::new(DType::F32, &sizes, noise(1).map(|x| 3.0 * x));
            let (out, lse) = forward(&s, &[], [&q.values, &k, &v]);
            let statistics = [s.batch, s.heads, s.q_len].map(|n| n as usize);
            let operands = [
                q,
                k_stored,
                v_stored,
                Operand::garbage(DType::F32, &sizes),
                Operand::garbage(DType::F32, &statistics),
            ];
            let tolerance = 6e-6;
            let expected = [
                Expected { operand: 3, values: out, tolerance },
                Expected { operand: 4, values: lse, tolerance },
            ];
            let compute = Compute::F32;
            check_costly(
                &format!("{s:?} {dtype}"),
                &operands,
                |cpu, t| {
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
                },
                &expected,
                &[],
            );
        }
    }
}

/// Three sequences, of 300, 70 and 5 positions: their rows in pages that lie anywhere, and in caches of their own.
#[test]
fn rows_in_pages_have_the_bits_of_rows_in_a_row() {
    let lengths = [300, 70, 5];
    for (dtype, [heads, kv_heads, d], window, soft_cap) in [
        (DType::F32, [9, 3, 64], None, None),
        (DType::F16, [4, 4, 40], Some(50), None),
        (DType::Q8_0, [8, 1, 128], None, Some(20.0)),
        (DType::Q4_1, [2, 1, 64], Some(290), None),
        // Too wide for a tile of rows to be put together.
        (DType::F32, [2, 1, 256], None, None),
    ] {
        let page = page_positions(dtype, d);
        assert_eq!(page, if d == 256 { 256 } else { 64 });
        let common = AttentionShape { window, soft_cap, ..shape(1, [1, 1, 1], [heads, kv_heads, d]) };
        let columns = (kv_heads * dtype.cached_columns(d)) as usize;
        // Pages of all sequences, the last ones first, and one that nobody has between them.
        let mut next = 20u32;
        let pages = lengths.map(|length: u64| -> Vec<u32> {
            next -= 1;
            (0..length.div_ceil(page))
                .map(|_| {
                    next -= 1;
                    next
                })
                .collect()
        });
        let row = |own: usize, position: u64| {
            pages[own][(position / page) as usize] * page as u32 + (position % page) as u32
        };
        let x: Vec<[Operand; 2]> = (0..3)
            .map(|own| {
                [2, 3].map(|seed| {
                    let sizes = [lengths[own] as usize, (kv_heads * d) as usize];
                    Operand::new(DType::F32, &sizes, noise(seed + 10 * own as u64))
                })
            })
            .collect();
        for q_lens in [[1, 1, 1], [90, 1, 5], [150, 70, 1]] {
            let queries: u64 = q_lens.iter().sum();
            let q = Operand::new(DType::F32, &[queries as usize, (heads * d) as usize], noise(1));
            let (out, lse) = (
                Operand::garbage(DType::F32, &[queries as usize, (heads * d) as usize]),
                Operand::garbage(DType::F32, &[queries as usize, heads as usize]),
            );
            let pool = || zeros(dtype, 20 * page as usize, kv_heads as usize, d as usize);
            let mut operands = vec![q.clone(), pool(), pool(), out, lse];
            operands.extend(x.iter().flatten().cloned());
            let runs: Vec<PagedRun<'_>> = (0..3)
                .map(|own| PagedRun { q_len: q_lens[own], kv_len: lengths[own], pages: &pages[own] })
                .collect();
            let in_pages = |device: &dyn Device, t: &[Tensor]| {
                for own in 0..3 {
                    let rows: Vec<u32> = (0..lengths[own]).map(|position| row(own, position)).collect();
                    for part in 0..2 {
                        let (x, cache) = (&t[5 + 2 * own + part], &t[1 + part]);
                        device.run(Attention::WriteRows { x, cache, rows: &rows, head_dim: d })?;
                    }
                }
                let (q, k, v, out, lse) = (&t[0], &t[1], &t[2], &t[3], &t[4]);
                let compute = Compute::F32;
                device.run(Attention::Paged { q, k, v, out, lse, runs: &runs, page, shape: common, compute })
            };
            let paged = run(Isa::detect(), 2, &operands, &in_pages).unwrap();
            // Few of the shapes take long on a GPU that is none.
            let on_gpu = if q_lens[0] < 150 { run_on_gpu(&operands, &in_pages) } else { None };
            let on_gpu = on_gpu.map(Result::unwrap);
            for (cpu, gpu) in on_gpu.iter().flat_map(|gpu| paged[3..5].iter().zip(&gpu[3..5])) {
                let [cpu, gpu] = [cpu, gpu].map(|bytes| decode(DType::F32, bytes));
                for (cpu, gpu) in cpu.iter().zip(gpu) {
                    assert!((cpu - gpu).abs() <= 1e-5 * (1.0 + cpu.abs()), "{dtype} {d}: {cpu} and {gpu}");
                }
            }
            let (mut first, width) = (0, (heads * d) as usize);
            for own in 0..3 {
                let [length, q_len] = [lengths[own], q_lens[own]];
                let s = AttentionShape { q_len, kv_len: length, kv_capacity: length, ..common };
                let mut operands = vec![
                    Operand::new(
                        DType::F32,
                        &[q_len as usize, width],
                        q.values[first * width..].iter().copied(),
                    ),
                    Operand::garbage(DType::F32, &[q_len as usize, width]),
                    Operand::garbage(DType::F32, &[q_len as usize, heads as usize]),
                ];
                for _ in 0..2 {
                    let bytes = dtype.bytes_for(length * columns as u64).unwrap() as usize;
                    operands.push(Operand::blocks(dtype, &[length as usize, columns], vec![0; bytes]));
                }
                operands.extend(x[own].clone());
                let apart = |device: &dyn Device, t: &[Tensor]| {
                    for part in 0..2 {
                        let (x, cache) = (&t[5 + part], &t[3 + part]);
                        device.run(Attention::WriteCache { x, cache, first: 0, head_dim: d })?;
                    }
                    let (q, k, v, out, lse) = (&t[0], &t[3], &t[4], &t[1], &t[2]);
                    let (documents, probabilities, compute) = (None, None, Compute::F32);
                    device.run(Attention::Forward {
                        q,
                        k,
                        v,
                        documents,
                        out,
                        lse,
                        probabilities,
                        shape: s,
                        compute,
                    })
                };
                let alone = run(Isa::detect(), 2, &operands, &apart).unwrap();
                let gpu =
                    on_gpu.as_ref().and_then(|paged| Some((paged, run_on_gpu(&operands, &apart)?.unwrap())));
                for (paged, alone) in [(&paged, alone)].into_iter().chain(gpu) {
                    let at = first * width * 4;
                    assert!(paged[3][at..at + alone[1].len()] == alone[1], "{dtype} {d} {q_lens:?}: {own}");
                    let at = first * heads as usize * 4;
                    assert!(
                        paged[4][at..at + alone[2].len()] == alone[2],
                        "{dtype} {d} {q_lens:?}: lse of {own}"
                    );
                }
                first += q_len as usize;
            }
        }
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let x = Operand::new(DType::F32, &[3, 8], noise(1));
    let write = |cache, head_dim| {
        refusal(&[x.clone(), cache], |cpu, t| {
            cpu.run(Attention::WriteCache { x: &t[0], cache: &t[1], first: 0, head_dim })
        })
    };
    assert_eq!(write(zeros(DType::Q8_0, 3, 2, 4), 4), "accepted");
    for (cache, head_dim) in [
        (zeros(DType::Q8_0, 2, 2, 4), 4),
        (zeros(DType::Q8_0, 3, 1, 4), 4),
        (zeros(DType::Q5_0, 3, 2, 4), 4),
        (zeros(DType::F32, 3, 2, 4), 3),
        (zeros(DType::F32, 3, 2, 4), 0),
    ] {
        assert!(write(cache, head_dim).starts_with("write_cache: "));
    }
    let rows = |rows: &[u32]| {
        refusal(&[x.clone(), zeros(DType::F32, 5, 2, 4)], |cpu, t| {
            cpu.run(Attention::WriteRows { x: &t[0], cache: &t[1], rows, head_dim: 4 })
        })
    };
    assert_eq!(rows(&[4, 0, 2]), "accepted");
    for wrong in [&[4, 0][..], &[4, 0, 4], &[4, 0, 5]] {
        assert!(rows(wrong).starts_with("write_rows: "), "{wrong:?}");
    }
    let cache = zeros(DType::F32, 4, 2, 4);
    let vectors = [Operand::garbage(DType::F32, &[3, 8]), Operand::garbage(DType::F32, &[3, 2])];
    let attend = |page, pages: &[u32], kv_len| {
        let operands = [vec![x.clone(), cache.clone(), cache.clone()], vectors.to_vec()].concat();
        refusal(&operands, |cpu, t| {
            let (q, k, v, out, lse) = (&t[0], &t[1], &t[2], &t[3], &t[4]);
            let (runs, compute) = (&[PagedRun { q_len: 3, kv_len, pages }], Compute::F32);
            let shape = shape(1, [1, 1, 1], [2, 2, 4]);
            cpu.run(Attention::Paged { q, k, v, out, lse, runs, page, shape, compute })
        })
    };
    assert_eq!(attend(2, &[1, 0], 4), "accepted");
    for (page, pages, kv_len) in
        [(3, &[0][..], 3), (0, &[0], 3), (2, &[0, 2], 4), (2, &[1], 3), (2, &[0, 1], 2), (2, &[0, 1], 5)]
    {
        let refusal = attend(page, pages, kv_len);
        assert!(refusal.starts_with("paged_attention: "), "{page} {pages:?} {kv_len}: {refusal}");
    }
}
