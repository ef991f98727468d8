//! Columns of heads against loops.

use plimsoll_device::{DType, DeviceExt, HeadColumns, Heads};

use crate::harness::{Expected, Operand, check, noise, refusal, storages};

/// Rows, heads, columns of a head that move, and where heads have them: first and stride, from and to.
const SHAPES: [[usize; 7]; 5] = [
    [1, 1, 1, 0, 0, 0, 0],
    [5, 3, 7, 2, 9, 1, 7],
    [40, 4, 128, 0, 192, 64, 200],
    // All heads have the same columns.
    [17, 5, 6, 3, 0, 4, 10],
    [3, 2, 1500, 1, 1501, 0, 1500],
];

#[test]
fn heads_are_copied_and_summed() {
    for ([rows, heads, width, first, stride, to_first, to_stride], [from_type, to_type]) in
        SHAPES.into_iter().flat_map(|shape| storages().map(move |types| (shape, types)))
    {
        let columns = first + (heads - 1) * stride + width + 1;
        let to_columns = to_first + (heads - 1) * to_stride + width + 2;
        let from = Operand::new(from_type, &[rows, columns], noise(1));
        let to = Operand::new(to_type, &[rows, to_columns], noise(2));
        let (mut copied, mut summed) = (to.values.clone(), to.values.clone());
        for row in 0..rows {
            let own = |head, i| from.values[row * columns + first + head * stride + i];
            for i in 0..width {
                summed[row * to_columns + to_first + i] = (0..heads).map(|head| own(head, i)).sum();
                for head in 0..heads {
                    copied[row * to_columns + to_first + head * to_stride + i] = own(head, i);
                }
            }
        }
        let name = format!("{rows} {heads} {width} {from_type} {to_type}");
        let [first, stride, to_first, to_stride] = [first, stride, to_first, to_stride].map(|n| n as u64);
        let (heads, width) = (heads as u64, width as u64);
        for (values, is_sum) in [(copied, false), (summed, true)] {
            check(
                &name,
                &[from.clone(), to.clone()],
                |cpu, t| {
                    let from = HeadColumns::new(&t[0], stride).from(first);
                    let to = HeadColumns::new(&t[1], to_stride).from(to_first);
                    match is_sum {
                        false => cpu.run(Heads::Copy { from, to, heads, width }),
                        true => cpu.run(Heads::Sum { from, to, heads, width }),
                    }
                },
                &[Expected { operand: 1, values, tolerance: 2e-7 }],
            );
        }
    }
}

#[test]
fn heads_that_are_not_there_are_refused() {
    let refused = |from: &[usize], to: &[usize], to_stride| {
        let operands = [from, to].map(|shape| Operand::new(DType::F32, shape, noise(1)));
        refusal(&operands, |cpu, t| {
            let (from, to) = (HeadColumns::new(&t[0], 4), HeadColumns::new(&t[1], to_stride));
            cpu.run(Heads::Copy { from, to, heads: 3, width: 4 })
        })
    };
    assert_eq!(refused(&[2, 11], &[2, 12], 4), "copy_heads: operand f32[2, 11] has no 3 heads of 4");
    assert_eq!(refused(&[2, 12], &[2, 12], 5), "copy_heads: operand f32[2, 12] has no 3 heads of 4");
    assert_eq!(
        refused(&[2, 12], &[3, 12], 4),
        "copy_heads: operand f32[2, 12] and operand f32[3, 12] differ in rows"
    );
    assert_eq!(refused(&[2, 12], &[2, 12], 3), "copy_heads: heads of 4 overlap in operand f32[2, 12]");
}
