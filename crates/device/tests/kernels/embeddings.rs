//! Token embeddings and rotary position embeddings.

use plimsoll_device::cpu::{Isa, dequantize};
use plimsoll_device::{DType, DeviceExt, Embedding, Position, RotatedHeads, Rounding};

use crate::harness::{Expected, Operand, check, check_gradient, noise, refusal, storages};
use crate::reference;

const VOCABULARY: usize = 11;

fn tokens(n: usize) -> Vec<u32> {
    // A few tokens make most of a text.
    noise(9).take(n).map(|x| (x.powi(3).abs() * VOCABULARY as f64) as u32).collect()
}

#[test]
fn embedding() {
    for ([table, out], [n, h]) in
        storages().flat_map(|t| [[0, 4], [1, 1], [7, 63], [100, 576]].map(|s| (t, s)))
    {
        let tokens = tokens(n);
        let table_operand = Operand::new(table, &[VOCABULARY, h], noise(1));
        let values =
            tokens.iter().flat_map(|t| table_operand.values[*t as usize * h..][..h].to_vec()).collect();
        let operands = [Operand::u32s(&tokens), table_operand, Operand::garbage(out, &[n, h])];
        check(
            &format!("{n} {h} {table} {out}"),
            &operands,
            |cpu, t| cpu.run(Embedding::Lookup { tokens: &t[0], table: &t[1], out: &t[2] }),
            &[Expected { operand: 2, values, tolerance: 0.0 }],
        );
    }
}

/// Rows of blocks come out as `dequantize` has them; other tokens' rows are not read.
#[test]
fn embedding_of_blocks() {
    for dtype in DType::ALL.into_iter().filter(|dtype| dtype.is_block() && dtype.has_rows()) {
        for h in [256, 1280] {
            let bytes = dtype.bytes_for((VOCABULARY * h) as u64).unwrap();
            let bytes: Vec<u8> = (0..bytes).map(|i| (i * 37 % 61) as u8).collect();
            let mut table = vec![0.0; VOCABULARY * h];
            dequantize(Isa::Portable, dtype, &bytes, &mut table).unwrap();
            let table_operand = Operand::blocks(dtype, &[VOCABULARY, h], bytes);
            let tokens = tokens(40);
            let values = tokens
                .iter()
                .flat_map(|t| table[*t as usize * h..][..h].iter().map(|x| f64::from(*x)))
                .collect();
            let operands = [Operand::u32s(&tokens), table_operand, Operand::garbage(DType::F32, &[40, h])];
            check(
                &format!("{dtype} {h}"),
                &operands,
                |cpu, t| cpu.run(Embedding::Lookup { tokens: &t[0], table: &t[1], out: &t[2] }),
                &[Expected { operand: 2, values, tolerance: 0.0 }],
            );
        }
    }
}

/// Pieces of a table that are looked up one after the other give what the whole gives.
#[test]
fn embedding_pieces() {
    for ([table, out], [n, h]) in storages().flat_map(|t| [[0, 4], [7, 63], [100, 576]].map(|s| (t, s))) {
        let tokens = tokens(n);
        let table = Operand::new(table, &[VOCABULARY, h], noise(1));
        let values = tokens.iter().flat_map(|t| table.values[*t as usize * h..][..h].to_vec()).collect();
        let operands = [Operand::u32s(&tokens), table, Operand::garbage(out, &[n, h])];
        check(
            &format!("{n} {h} {out}"),
            &operands,
            |cpu, t| {
                for rows in [0..4, 4..5, 5..VOCABULARY as u64] {
                    let (tokens, out, first_row) = (&t[0], &t[2], rows.start);
                    let table = &t[1].slice_rows(rows).unwrap();
                    cpu.run(Embedding::LookupPiece { tokens, table, first_row, out })?;
                }
                Ok(())
            },
            &[Expected { operand: 2, values, tolerance: 0.0 }],
        );
    }
}

#[test]
fn embedding_backward() {
    for ([dout, dtable], [n, h]) in
        storages().flat_map(|t| [[0, 4], [1, 1], [7, 63], [300, 576]].map(|s| (t, s)))
    {
        let tokens = tokens(n);
        let operands = [
            Operand::u32s(&tokens),
            Operand::new(dout, &[n, h], noise(1)),
            Operand::new(dtable, &[VOCABULARY, h], noise(2)),
        ];
        let mut values = operands[2].values.clone();
        for (row, token) in operands[1].values.chunks(h).zip(&tokens) {
            let sum = &mut values[*token as usize * h..][..h];
            sum.iter_mut().zip(row).for_each(|(sum, x)| *sum += x);
        }
        check(
            &format!("{n} {h} {dout} {dtable}"),
            &operands,
            |cpu, t| {
                cpu.run(Embedding::Backward {
                    tokens: &t[0],
                    dout: &t[1],
                    dtable: &t[2],
                    first_row: 0,
                    rounding: Rounding::Nearest,
                })
            },
            &[Expected { operand: 2, values, tolerance: 2e-6 }],
        );
    }
}

#[test]
fn tokens_outside_the_table_are_refused() {
    let operands = [
        Operand::u32s(&[3, 11]),
        Operand::new(DType::F32, &[VOCABULARY, 2], noise(1)),
        Operand::new(DType::F32, &[2, 2], noise(1)),
    ];
    let forward =
        refusal(&operands, |cpu, t| cpu.run(Embedding::Lookup { tokens: &t[0], table: &t[1], out: &t[2] }));
    assert_eq!(forward, "embedding: token 11 at 1 is outside operand f32[11, 2]");
}

const POSITIONS: usize = 50;

fn angles(pairs: usize) -> [Operand; 2] {
    let angle = |i: usize| (i / pairs) as f64 * 0.3f64.powi((i % pairs) as i32);
    let table = |f: fn(f64) -> f64| (0..POSITIONS * pairs).map(move |i| f(angle(i)));
    [f64::cos, f64::sin].map(|f| Operand::new(DType::F32, &[POSITIONS, pairs], table(f)))
}

#[test]
fn rope() {
    for ([dtype], [n, heads, pairs]) in
        storages().flat_map(|t| [[1, 1, 1], [5, 3, 7], [100, 9, 32]].map(|s| (t, s)))
    {
        for inverse in [false, true] {
            let positions: Vec<u32> = (0..n).map(|i| (i * 7 % POSITIONS) as u32).collect();
            let [cos, sin] = angles(pairs);
            let columns = heads * 2 * pairs;
            let x = Operand::new(dtype, &[n, columns], noise(1));
            let values =
                reference::rope(&x.values, columns, &positions, &cos.values, &sin.values, pairs, inverse);
            check(
                &format!("{n} {heads} {pairs} {dtype} {inverse}"),
                &[x, Operand::u32s(&positions), cos, sin],
                |cpu, t| {
                    cpu.run(Position::Rope {
                        x: &t[0],
                        positions: &t[1],
                        cos: &t[2],
                        sin: &t[3],
                        heads: RotatedHeads::from_first(2 * pairs as u64),
                        inverse,
                    })
                },
                &[Expected { operand: 0, values, tolerance: 2e-7 }],
            );
        }
    }
}

/// Only the first values of each head turn where there are fewer angles.
#[test]
fn partial_rope() {
    let (n, heads, pairs, head_dim) = (5, 3, 2, 10);
    let positions: Vec<u32> = (0..n as u32).map(|i| i * 7).collect();
    let [cos, sin] = angles(pairs);
    let x = Operand::new(DType::F32, &[n, heads * head_dim], noise(1));
    let mut values = x.values.clone();
    for (head, position) in values.chunks_mut(head_dim).zip(positions.iter().flat_map(|p| [*p; 3])) {
        let width = 2 * pairs;
        let turned =
            reference::rope(&head[..width], width, &[position], &cos.values, &sin.values, pairs, false);
        head[..width].copy_from_slice(&turned);
    }
    let head_dim = head_dim as u64;
    check(
        "partial",
        &[x, Operand::u32s(&positions), cos, sin],
        |cpu, t| {
            cpu.run(Position::Rope {
                x: &t[0],
                positions: &t[1],
                cos: &t[2],
                sin: &t[3],
                heads: RotatedHeads::from_first(head_dim),
                inverse: false,
            })
        },
        &[Expected { operand: 0, values, tolerance: 2e-7 }],
    );
}

/// Values next to each other turn together, behind those of a head that do not.
#[test]
fn interleaved_rope() {
    let (n, heads, pairs) = (5, 3, 4);
    let rotated = RotatedHeads { dim: 11, first: 2, interleaved: true };
    let (dim, first) = (rotated.dim as usize, rotated.first as usize);
    let positions: Vec<u32> = (0..n as u32).map(|i| i * 7).collect();
    let [cos, sin] = angles(pairs);
    for ([dtype], inverse) in storages().flat_map(|t| [(t, false), (t, true)]) {
        let x = Operand::new(dtype, &[n, heads * dim], noise(1));
        let mut values = x.values.clone();
        for (head, position) in values.chunks_mut(dim).zip(positions.iter().flat_map(|p| [*p; 3])) {
            let own = &mut head[first..first + 2 * pairs];
            let halves: Vec<f64> =
                [0, 1].iter().flat_map(|odd| own.iter().skip(*odd).step_by(2).copied()).collect();
            let (cos, sin) = (&cos.values, &sin.values);
            let turned = reference::rope(&halves, 2 * pairs, &[position], cos, sin, pairs, inverse);
            for (pair, values) in own.chunks_mut(2).enumerate() {
                values.copy_from_slice(&[turned[pair], turned[pairs + pair]]);
            }
        }
        check(
            &format!("{dtype} {inverse}"),
            &[x, Operand::u32s(&positions), cos.clone(), sin.clone()],
            |cpu, t| {
                let (x, positions, cos, sin) = (&t[0], &t[1], &t[2], &t[3]);
                cpu.run(Position::Rope { x, positions, cos, sin, heads: rotated, inverse })
            },
            &[Expected { operand: 0, values, tolerance: 2e-7 }],
        );
    }
}

#[test]
fn turning_back_is_the_gradient() {
    let [cos, sin] = angles(3);
    let turn = |x: &[f64], inverse| reference::rope(x, 12, &[4], &cos.values, &sin.values, 3, inverse);
    let x: Vec<f64> = noise(1).take(12).collect();
    let dout: Vec<f64> = noise(2).take(12).collect();
    let dot = |out: Vec<f64>| out.iter().zip(&dout).map(|(a, b)| a * b).sum::<f64>();
    check_gradient("rope", &x, &turn(&dout, true), |x| dot(turn(x, false)));
}

#[test]
fn positions_outside_the_table_are_refused() {
    let [cos, sin] = angles(2);
    let operands = [Operand::new(DType::F32, &[2, 4], noise(1)), Operand::u32s(&[0, 50]), cos, sin];
    let refusal = refusal(&operands, |cpu, t| {
        cpu.run(Position::Rope {
            x: &t[0],
            positions: &t[1],
            cos: &t[2],
            sin: &t[3],
            heads: RotatedHeads::from_first(4),
            inverse: false,
        })
    });
    assert_eq!(refusal, "rope: position 50 at 1 is outside operand f32[50, 2]");
}
