//! Products with operands in 16 bits, as tensor cores make them: every storage, edges of tiles, lengths that are folded.

use half::bf16;
use plimsoll_device::cpu::quantize::quantize;
use plimsoll_device::cpu::{Isa, dequantize};
use plimsoll_device::{Compute, DType, Device, DeviceExt, Product, Rounding, Tensor};

use crate::harness::{Expected, Operand, check_product, noise};

use DType::{Bf16, F16, F32};

/// Tokens, inputs, outputs: one of everything, rows of few, edges of tiles of 128, lines that begin at multiples of 16, 8, 4 and 2
/// bytes, whole tiles that are narrow and wide, sums that are folded, and operands that are rounded part by part, and adapters of
/// rank 1.
const SHAPES: [[usize; 3]; 14] = [
    [1, 1, 1],
    [16, 70, 9],
    [17, 16, 3],
    [33, 64, 136],
    [130, 36, 40],
    [19, 34, 131],
    [129, 33, 129],
    [150, 136, 272],
    [24, 2050, 18],
    [18, 24, 2088],
    [20, 64, 2100],
    [20, 24, 1],
    [20, 1, 24],
    [200, 1, 40],
];

/// An operand and its values as a product takes them.
fn operand(dtype: DType, sizes: &[usize], seed: u64, rounded: bool) -> (Operand, Vec<f64>) {
    let operand = Operand::new(dtype, sizes, noise(seed));
    let values = operand
        .values
        .iter()
        .map(|x| if rounded { bf16::from_f32(*x as f32).to_f64() } else { *x })
        .collect();
    (operand, values)
}

/// a [m, k] times b [k, n], where `a(i, l)` and `b(l, j)` are the elements.
fn product(
    [m, k, n]: [usize; 3],
    a: impl Fn(usize, usize) -> f64,
    b: impl Fn(usize, usize) -> f64,
) -> Vec<f64> {
    (0..m * n).map(|at| (0..k).map(|l| a(at / n, l) * b(l, at % n)).sum()).collect()
}

/// All three products of operands of these types.
fn check_all([n, i, o]: [usize; 3], [x_type, weight_type, out_type]: [DType; 3], compute: Compute) {
    for accumulate in [false, true] {
        let rounded = compute == Compute::Bf16;
        let (x, xs) = operand(x_type, &[n, i], 1, rounded);
        let (weight, ws) = operand(weight_type, &[o, i], 2, rounded);
        let (dout, ds) = operand(x_type, &[n, o], 3, rounded);
        let bias = Operand::new(F32, &[o], noise(5));
        let label =
            |what| format!("{what}, {n} {i} {o} {x_type} {weight_type} {out_type} {compute:?} {accumulate}");
        let expect = |number, out: &Operand, product: Vec<f64>, bias: Option<&Operand>| {
            let before = |at: usize| if accumulate { out.values[at] } else { 0.0 };
            let added = |at: usize| bias.map_or(0.0, |bias| bias.values[at % o]);
            let values = product.iter().enumerate().map(|(at, x)| x + before(at) + added(at)).collect();
            // A narrow output is rounded once more, when the bias has been added.
            let twice = if out_type != F32 && bias.is_some() { 0.01 } else { 0.0 };
            [Expected { operand: number, values, tolerance: 4e-6 + twice }]
        };

        let out = Operand::new(out_type, &[n, o], noise(4));
        let values = product([n, i, o], |row, l| xs[row * i + l], |l, column| ws[column * i + l]);
        let expected = expect(3, &out, values, Some(&bias));
        let operands = [x.clone(), weight.clone(), bias, out];
        let run = |device: &dyn Device, t: &[Tensor]| {
            let (bias, out) = (Some(&t[2]), &t[3]);
            device.run(Product::Linear { x: &t[0], weight: &t[1], bias, out, accumulate, compute })
        };
        check_product(&label("forward"), &operands, run, &expected);

        let out = Operand::new(out_type, &[n, i], noise(4));
        let values = product([n, o, i], |row, l| ds[row * o + l], |l, column| ws[l * i + column]);
        let expected = expect(2, &out, values, None);
        let operands = [dout.clone(), weight, out];
        let run = |device: &dyn Device, t: &[Tensor]| {
            let (dout, weight, dx) = (&t[0], &t[1], &t[2]);
            device.run(Product::LinearBackwardInput { dout, weight, dx, accumulate, compute })
        };
        check_product(&label("backward, input"), &operands, run, &expected);

        let out = Operand::new(out_type, &[o, i], noise(4));
        let values = product([o, n, i], |row, l| ds[l * o + row], |l, column| xs[l * i + column]);
        let expected = expect(2, &out, values, None);
        let operands = [dout, x, out];
        let run = |device: &dyn Device, t: &[Tensor]| {
            let (dout, x, dweight, rounding) = (&t[0], &t[1], &t[2], Rounding::Nearest);
            device.run(Product::LinearBackwardWeight { dout, x, dweight, accumulate, rounding, compute })
        };
        check_product(&label("backward, weight"), &operands, run, &expected);
    }
}

#[test]
fn bf16_in_all_shapes() {
    for (number, shape) in SHAPES.into_iter().enumerate() {
        check_all(shape, [Bf16, Bf16, [Bf16, F32][number % 2]], Compute::Bf16);
        check_all(shape, [[Bf16, F32][number % 2], F32, F32], Compute::Bf16);
    }
}

#[test]
fn f16_is_multiplied_as_it_is() {
    for (number, shape) in SHAPES.into_iter().enumerate() {
        check_all(shape, [F16, F16, [F16, F32][number % 2]], Compute::F32);
    }
}

/// Weights in every storage of blocks, forward and backward, with whole blocks and without.
#[test]
fn weights_in_blocks() {
    for dtype in DType::ALL.into_iter().filter(|dtype| dtype.is_block() && dtype.is_weight()) {
        let multiple = if dtype.has_rows() { dtype.row_multiple() as usize } else { 1 };
        for (n, i, o) in [(3, 256, 20), (21, multiple.max(40).next_multiple_of(multiple), 33), (20, 512, 130)]
        {
            let values: Vec<f32> = noise(2).take(o * i).map(|x| x as f32).collect();
            let Some(size) = dtype.bytes_for((o * i) as u64) else { continue };
            let mut bytes = vec![0; size as usize];
            if quantize(dtype, &values, &mut bytes, 1).is_none() {
                bytes.iter_mut().enumerate().for_each(|(at, byte)| *byte = (at * 37 % 61) as u8);
            }
            let mut stored = vec![0.0; o * i];
            dequantize(Isa::Portable, dtype, &bytes, &mut stored).unwrap();
            let weight = Operand::blocks(dtype, &[o, i], bytes);
            for compute in [Compute::Bf16, Compute::F32] {
                let bf16 = compute == Compute::Bf16;
                let ws: Vec<f64> = stored
                    .iter()
                    .map(|x| if bf16 { bf16::from_f32(*x).to_f64() } else { f64::from(*x) })
                    .collect();
                let (x, xs) = operand(Bf16, &[n, i], 1, true);
                let operands = [x, weight.clone(), Operand::garbage(F32, &[n, o])];
                let values = product([n, i, o], |row, l| xs[row * i + l], |l, column| ws[column * i + l]);
                let run = |device: &dyn Device, t: &[Tensor]| {
                    let (bias, accumulate, out) = (None, false, &t[2]);
                    device.run(Product::Linear { x: &t[0], weight: &t[1], bias, out, accumulate, compute })
                };
                let label = format!("{dtype} {compute:?} {n} {i} {o}");
                check_product(&label, &operands, run, &[Expected { operand: 2, values, tolerance: 4e-6 }]);
                let (dout, ds) = operand(Bf16, &[n, o], 3, true);
                let operands = [dout, weight.clone(), Operand::garbage(F32, &[n, i])];
                let values = product([n, o, i], |row, l| ds[row * o + l], |l, column| ws[l * i + column]);
                let run = |device: &dyn Device, t: &[Tensor]| {
                    let (dout, weight, dx, accumulate) = (&t[0], &t[1], &t[2], false);
                    device.run(Product::LinearBackwardInput { dout, weight, dx, accumulate, compute })
                };
                check_product(&label, &operands, run, &[Expected { operand: 2, values, tolerance: 4e-6 }]);
            }
        }
    }
}
