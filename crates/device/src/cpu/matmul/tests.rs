//! Every kernel against a plain product in f64.

use half::{bf16, f16};
use proptest::prelude::*;

use super::kernels::Kernels;
#[cfg(target_arch = "x86_64")]
use super::kernels::amx_pairs;
use super::storage::element;
use super::storage::tests::random_blocks;
use super::tile::CHAIN;
use super::{Operand, Output, Product, SCRATCH_BYTES, crew::Alone, int8, matmul, matmul_serial, run_on};
use crate::cpu::{Isa, Pool};
use crate::{Compute, DType};

const FLOATS: [DType; 3] = [DType::F32, DType::Bf16, DType::F16];

fn block_types() -> impl Iterator<Item = DType> {
    DType::ALL.into_iter().filter(|dtype| dtype.is_block())
}

/// A matrix with memory of its own.
struct Matrix {
    bytes: Vec<u8>,
    view: Operand,
}

/// How a matrix lies in memory.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Layout {
    Rows,
    Columns,
    /// Rows apart from each other, elements too.
    Scattered,
}

/// A reproducible sequence of values around zero.
struct Noise(u64);

impl Noise {
    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        self.0 >> 33
    }

    fn value(&mut self) -> f32 {
        (self.bits() as f32 / (1u64 << 30) as f32 - 1.0) * 2.0
    }
}

impl Matrix {
    /// Of a block type, the contiguous dimension is filled up to whole blocks, which the view leaves out.
    fn new(dtype: DType, layout: Layout, rows: usize, columns: usize, seed: u64) -> Matrix {
        let (block, multiple) = (dtype.block_elements() as usize, dtype.row_multiple() as usize);
        let (row_stride, column_stride, elements) = match layout {
            Layout::Rows => {
                let stride = (columns + 3 * (seed as usize % 2)).next_multiple_of(multiple);
                (stride, 1, rows * stride)
            }
            Layout::Columns => {
                let stride = (rows + 3 * (seed as usize % 2)).next_multiple_of(multiple);
                (1, stride, columns * stride)
            }
            Layout::Scattered => (3 * columns + 2, 3, rows * (3 * columns + 2)),
        };
        let mut noise = Noise(seed);
        let mut bytes = Vec::new();
        for _ in 0..elements.div_ceil(block) {
            match dtype {
                DType::F32 => bytes.extend(noise.value().to_le_bytes()),
                DType::Bf16 => bytes.extend(bf16::from_f32(noise.value()).to_le_bytes()),
                DType::F16 => bytes.extend(f16::from_f32(noise.value()).to_le_bytes()),
                _ => break,
            }
        }
        if dtype.is_block() {
            bytes = random_blocks(dtype, elements.div_ceil(block), || noise.bits() as u8);
        }
        let view = Operand { data: bytes.as_ptr(), dtype, rows, columns, row_stride, column_stride };
        Matrix { bytes, view }
    }

    fn get(&self, i: usize, j: usize) -> f32 {
        let index = i * self.view.row_stride + j * self.view.column_stride;
        let block = self.view.dtype.block_elements();
        let whole = (index as u64 / block + 1) * block;
        assert!(self.view.dtype.bytes_for(whole).unwrap() as usize <= self.bytes.len());
        // SAFETY: just checked.
        unsafe { element(self.view.dtype, self.bytes.as_ptr(), index) }
    }
}

/// A product to compute.
#[derive(Clone, Copy, Debug)]
struct Case {
    compute: Compute,
    a: (DType, Layout),
    b: (DType, Layout),
    c: DType,
    accumulate: bool,
    m: usize,
    k: usize,
    n: usize,
}

impl Case {
    fn operands(&self) -> (Matrix, Matrix) {
        let a = Matrix::new(self.a.0, self.a.1, self.m, self.k, 2 + self.k as u64);
        let b = Matrix::new(self.b.0, self.b.1, self.k, self.n, 3 + self.n as u64);
        (a, b)
    }

    /// C before the product: rows somewhat apart, a value in every place.
    fn before(&self) -> (Vec<u8>, usize) {
        let stride = self.n + 5;
        let mut noise = Noise(7);
        let mut bytes = Vec::new();
        for _ in 0..self.m * stride {
            match self.c {
                DType::Bf16 => bytes.extend(bf16::from_f32(noise.value()).to_le_bytes()),
                _ => bytes.extend(noise.value().to_le_bytes()),
            }
        }
        (bytes, stride)
    }

    /// C after the product, as it lies in memory.
    fn run(&self, a: Operand, b: Operand, run: impl FnOnce(Operand, Operand, Output)) -> Vec<u8> {
        let (mut bytes, row_stride) = self.before();
        run(
            a,
            b,
            Output {
                data: bytes.as_mut_ptr(),
                dtype: self.c,
                rows: self.m,
                columns: self.n,
                row_stride,
                dither: None,
            },
        );
        bytes
    }

    fn on(&self, pool: &Pool, isa: Isa, a: Operand, b: Operand) -> Vec<u8> {
        self.run(a, b, |a, b, c| {
            // SAFETY: the matrices own their memory, and C is another.
            unsafe { matmul(pool, isa, self.compute, a, b, c, self.accumulate) }
        })
    }

    fn alone(&self, isa: Isa, a: Operand, b: Operand, scratch: &mut [u8]) -> Vec<u8> {
        self.run(a, b, |a, b, c| {
            // SAFETY: as above.
            unsafe { matmul_serial(isa, self.compute, a, b, c, self.accumulate, scratch) }
        })
    }

    /// By the kernels of a table, which this machine has.
    fn by(&self, kernels: &'static Kernels, a: Operand, b: Operand, scratch: &mut [u8]) -> Vec<u8> {
        self.run(a, b, |a, b, c| {
            // SAFETY: as above, and the machine has what the table needs.
            unsafe { run_on(&Product::new(kernels, a, b, c, self.accumulate), &mut Alone::new(scratch)) }
        })
    }

    /// Compares some places of C, and all places beside it, with what they should be.
    fn verify(&self, isa: Isa, a: &Matrix, b: &Matrix, got: &[u8]) {
        let (before, stride) = self.before();
        let read = |bytes: &[u8], at: usize| match self.c {
            DType::Bf16 => f64::from(bf16::from_le_bytes([bytes[2 * at], bytes[2 * at + 1]])),
            _ => f64::from(f32::from_le_bytes(bytes[4 * at..4 * at + 4].try_into().unwrap())),
        };
        let round = |x: f32| match self.compute {
            Compute::F32 | Compute::Int8 => f64::from(x),
            Compute::Bf16 => bf16::from_f32(x).to_f64(),
        };
        let every = (self.m * self.n * self.k / 2_000_000).max(1);
        for i in 0..self.m {
            for j in 0..stride {
                let (old, value) = (read(&before, i * stride + j), read(got, i * stride + j));
                if j >= self.n {
                    assert_eq!(old, value, "{isa} {self:?}: wrote beside C at {i}, {j}");
                    continue;
                }
                if !(i * self.n + j).is_multiple_of(every) {
                    continue;
                }
                let (mut sum, mut size) = (0.0, 0.0);
                for k in 0..self.k {
                    let product = round(a.get(i, k)) * round(b.get(k, j));
                    sum += product;
                    size += product.abs();
                }
                if self.accumulate {
                    sum += old;
                    size += old.abs();
                }
                // Each multiply-add rounds once or twice, relative to a partial sum of at most `size`; so does each
                // addition of a chain.
                let additions = self.k.min(2 * CHAIN) + self.k / CHAIN;
                let mut tolerance = (2.0 * additions as f64 + 2.0) * f64::from(f32::EPSILON) * size;
                if self.c == DType::Bf16 {
                    tolerance += sum.abs() / 256.0;
                }
                assert!(
                    (value - sum).abs() <= tolerance,
                    "{isa} {self:?} at {i}, {j}: {value} is not {sum} within {tolerance}"
                );
            }
        }
    }
}

/// Computes a case on every instruction set, alone and on several threads; the bits must not depend on them.
fn check(case: Case, pools: &[Pool], scratch: &mut [u8]) {
    let (a, b) = case.operands();
    for isa in Isa::available() {
        let first = case.alone(isa, a.view, b.view, scratch);
        case.verify(isa, &a, &b, &first);
        for pool in pools {
            let again = case.on(pool, isa, a.view, b.view);
            assert!(first == again, "{isa} {case:?}: other bits on {} threads", pool.threads());
        }
    }
    #[cfg(target_arch = "x86_64")]
    check_amx_written_out(case, scratch);
}

/// AMX without AMX: its packing, tiles and edges, with the instructions in plain code; and the same bits where they exist.
#[cfg(target_arch = "x86_64")]
fn check_amx_written_out(case: Case, scratch: &mut [u8]) {
    if case.compute != Compute::Bf16 || Isa::detect() < Isa::Avx512Bf16 {
        return;
    }
    let (a, b) = case.operands();
    let written = case.by(&amx_pairs::WRITTEN, a.view, b.view, scratch);
    case.verify(Isa::Amx, &a, &b, &written);
    if Isa::detect() >= Isa::Amx {
        assert!(written == case.alone(Isa::Amx, a.view, b.view, scratch), "{case:?}: other bits written out");
    }
}

fn pools(threads: impl IntoIterator<Item = usize>) -> Vec<Pool> {
    threads.into_iter().map(|n| Pool::new(n, SCRATCH_BYTES).unwrap()).collect()
}

#[test]
fn every_storage_and_layout() {
    let pools = pools([2]);
    let mut scratch = vec![0; SCRATCH_BYTES];
    let layouts = [Layout::Rows, Layout::Columns, Layout::Scattered];
    for compute in [Compute::F32, Compute::Bf16] {
        for (m, k, n) in
            [(1, 64, 96), (3, 32, 64), (19, 64, 96), (37, 70, 45), (15, 1, 33), (5, 0, 7), (0, 5, 3)]
        {
            let mut run = |a, b, c, accumulate| {
                check(Case { compute, a, b, c, accumulate, m, k, n }, &pools, &mut scratch);
            };
            for c in [DType::F32, DType::Bf16] {
                for accumulate in [false, true] {
                    for a in layouts {
                        for b in layouts {
                            run((DType::F32, a), (DType::F32, b), c, accumulate);
                        }
                    }
                    for a in FLOATS {
                        for b in FLOATS {
                            run((a, Layout::Rows), (b, Layout::Columns), c, accumulate);
                            run((a, Layout::Columns), (b, Layout::Rows), c, accumulate);
                        }
                        for b in block_types() {
                            for layout in [Layout::Rows, Layout::Columns] {
                                run((a, Layout::Rows), (b, layout), c, accumulate);
                            }
                        }
                    }
                }
            }
        }
    }
}

/// Rows so long that they are taken eight at a time: the last one is by itself, but not the only one.
#[test]
fn rows_that_do_not_fit_together() {
    let pools = pools([2]);
    let mut scratch = vec![0; SCRATCH_BYTES];
    let (a, c) = ((DType::F32, Layout::Rows), DType::F32);
    for b in [DType::Q4_1, DType::Q8_0, DType::F32] {
        let b = (b, Layout::Columns);
        for m in [1, 9] {
            let case = Case { compute: Compute::F32, a, b, c, accumulate: false, m, k: 98_304, n: 5 };
            check(case, &pools, &mut scratch);
        }
    }
}

/// Blocks of 256 elements: whole ones, a rest, and rows that begin anywhere in memory.
#[test]
fn whole_blocks_and_a_rest() {
    let pools = pools([2]);
    let mut scratch = vec![0; SCRATCH_BYTES];
    for b in block_types() {
        for compute in [Compute::F32, Compute::Bf16] {
            for (m, k, n) in [(1, 512, 13), (2, 256, 6), (4, 300, 5), (7, 777, 9), (33, 800, 40)] {
                for layout in [Layout::Rows, Layout::Columns] {
                    let case = Case {
                        compute,
                        a: (DType::F32, Layout::Rows),
                        b: (b, layout),
                        c: DType::F32,
                        accumulate: false,
                        m,
                        k,
                        n,
                    };
                    check(case, &pools, &mut scratch);
                }
            }
        }
    }
}

/// Blocks are computed with as their elements are, read one at a time by plain code: the bits of C are the same.
#[test]
fn blocks_are_their_elements() {
    let mut scratch = vec![0; SCRATCH_BYTES];
    for dtype in block_types() {
        for (m, layout) in [1, 2, 4, 7]
            .map(|m| (m, Layout::Columns))
            .into_iter()
            .chain([(33, Layout::Columns), (33, Layout::Rows)])
        {
            let case = Case {
                compute: Compute::F32,
                a: (DType::F32, Layout::Rows),
                b: (dtype, layout),
                c: DType::F32,
                accumulate: false,
                m,
                k: 832,
                n: 77,
            };
            let (a, b) = case.operands();
            let count = b.bytes.len() / dtype.block_bytes() as usize * dtype.block_elements() as usize;
            // SAFETY: the matrix holds so many elements, in whole blocks.
            let plain: Vec<f32> =
                (0..count).map(|i| unsafe { element(dtype, b.bytes.as_ptr(), i) }).collect();
            let plain = Operand { data: plain.as_ptr().cast(), dtype: DType::F32, ..b.view };
            for isa in Isa::available() {
                for case in [case, Case { compute: Compute::Bf16, ..case }] {
                    let got = case.alone(isa, a.view, b.view, &mut scratch);
                    assert!(got == case.alone(isa, a.view, plain, &mut scratch), "{isa} {case:?}");
                }
            }
        }
    }
}

/// Several blocks of k, chunks of the shared operand, partial sums, strips of all lengths, edges everywhere.
#[test]
fn large() {
    let pools = pools([1, 3]);
    let mut scratch = vec![0; SCRATCH_BYTES];
    let rows = |dtype| (dtype, Layout::Rows);
    let columns = |dtype| (dtype, Layout::Columns);
    let (compute, accumulate) = (Compute::Bf16, true);
    let small = [
        Case {
            compute,
            a: rows(DType::Bf16),
            b: columns(DType::Bf16),
            c: DType::Bf16,
            accumulate,
            m: 33,
            k: 5003,
            n: 61,
        },
        Case {
            compute,
            a: columns(DType::F32),
            b: rows(DType::Bf16),
            c: DType::Bf16,
            accumulate: false,
            m: 61,
            k: 4100,
            n: 33,
        },
        Case {
            compute,
            a: rows(DType::F32),
            b: columns(DType::Q4_1),
            c: DType::F32,
            accumulate,
            m: 40,
            k: 2560,
            n: 70,
        },
    ];
    for case in small {
        check(case, &pools, &mut scratch);
        check(Case { compute: Compute::F32, ..case }, &pools, &mut scratch);
    }
    let isa = Isa::detect();
    let large = [
        Case {
            compute,
            a: rows(DType::F32),
            b: columns(DType::F32),
            c: DType::Bf16,
            accumulate,
            m: 1100,
            k: 2100,
            n: 700,
        },
        Case {
            compute,
            a: rows(DType::F32),
            b: columns(DType::F32),
            c: DType::F32,
            accumulate,
            m: 1700,
            k: 600,
            n: 2501,
        },
    ];
    for case in large {
        let (a, b) = case.operands();
        let first = case.on(&pools[1], isa, a.view, b.view);
        case.verify(isa, &a, &b, &first);
        assert!(first == case.on(&pools[0], isa, a.view, b.view), "{case:?}: other bits on one thread");
        assert!(first == case.alone(isa, a.view, b.view, &mut scratch), "{case:?}: other bits alone");
    }
}

/// A row of C has the same bits whatever other rows are computed with it.
#[test]
fn rows_do_not_depend_on_each_other() {
    let mut scratch = vec![0; SCRATCH_BYTES];
    for isa in Isa::available() {
        for (compute, b_layout, m, cut) in [
            (Compute::F32, Layout::Columns, 70, 31),
            (Compute::Bf16, Layout::Columns, 70, 31),
            (Compute::F32, Layout::Columns, 8, 3),
            (Compute::F32, Layout::Rows, 41, 2),
            (Compute::Bf16, Layout::Rows, 41, 2),
        ] {
            let case = Case {
                compute,
                a: (DType::F32, Layout::Rows),
                b: (DType::F32, b_layout),
                c: DType::F32,
                accumulate: false,
                m,
                k: 1800,
                n: 50,
            };
            let (a, b) = case.operands();
            let whole = case.alone(isa, a.view, b.view, &mut scratch);
            let by_rows = case.run(a.view, b.view, |a, b, c| {
                for (from, to) in [(0, cut), (cut, m)] {
                    let a =
                        Operand { data: a.data.wrapping_add(from * a.row_stride * 4), rows: to - from, ..a };
                    let c =
                        Output { data: c.data.wrapping_add(from * c.row_stride * 4), rows: to - from, ..c };
                    // SAFETY: parts of matrices that own their memory.
                    unsafe { matmul_serial(isa, compute, a, b, c, false, &mut scratch) };
                }
            });
            assert!(whole == by_rows, "{isa} {case:?} cut after row {cut}");
        }
    }
}

/// `a` as integers of 8 bits times a scale for each 32.
fn as_integers(a: &Matrix, case: Case) -> Matrix {
    let mut rounded = Matrix::new(DType::F32, Layout::Rows, case.m, case.k, 0);
    for row in 0..case.m {
        for group in (0..case.k).step_by(32) {
            let values: Vec<f32> = (group..group + 32).map(|k| a.get(row, k)).collect();
            let largest = values.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
            let (scale, factor) = (largest / 127.0, 127.0 / largest);
            for (value, k) in values.iter().zip(group..) {
                let code = if scale > 0.0 { (value * factor).round_ties_even() } else { 0.0 };
                let at = 4 * (row * rounded.view.row_stride + k);
                rounded.bytes[at..at + 4].copy_from_slice(&(code * scale).to_le_bytes());
            }
        }
    }
    rounded
}

/// Every way of multiplying bytes that this machine has, with numbers of rows that each of them is for.
#[test]
fn few_rows_as_integers_of_every_kind() {
    let mut scratch = vec![0; SCRATCH_BYTES];
    for dtype in block_types().filter(|dtype| int8::tiles::written(*dtype).is_some()) {
        for (m, accumulate) in [(1, false), (2, true), (4, false), (8, true)] {
            let (a, b) = ((DType::F32, Layout::Rows), (dtype, Layout::Columns));
            let case = Case { compute: Compute::Int8, a, b, c: DType::F32, accumulate, m, k: 768, n: 19 };
            let (a, b) = case.operands();
            let rounded = as_integers(&a, case);
            let mut fused = None;
            for (i, kernels) in int8::rows::all().into_iter().enumerate() {
                if m > kernels.few_rows {
                    continue;
                }
                let got = case.by(kernels, a.view, b.view, &mut scratch);
                case.verify(Isa::Portable, &rounded, &b, &got);
                assert!(
                    i == 0 || fused.get_or_insert(got.clone()) == &got,
                    "{case:?}: other bits of kind {i}"
                );
            }
        }
    }
}

/// Codes as far from zero as they may be.
#[test]
fn extreme_integers() {
    let mut scratch = vec![0; SCRATCH_BYTES];
    // The type, the bytes of codes in a block, and those of scales.
    let none = 0..0;
    for (dtype, codes, scales) in [
        (DType::Q8_0, 2..34, none.clone()),
        (DType::Iq4Nl, 2..18, none.clone()),
        (DType::Int8, 4..68, none.clone()),
        (DType::Q5_1, 4..24, none),
        (DType::Q5K, 16..176, 4..16),
        (DType::Q6K, 0..192, 192..208),
    ] {
        for fill in [0x00, 0x7f, 0x80, 0xff] {
            for m in [1, 2, 7, 25] {
                let (a, b) = ((DType::F32, Layout::Rows), (dtype, Layout::Columns));
                let case =
                    Case { compute: Compute::Int8, a, b, c: DType::F32, accumulate: false, m, k: 256, n: 9 };
                let (mut a, mut b) = case.operands();
                for (i, bytes) in a.bytes.chunks_exact_mut(4).enumerate() {
                    let value = if (i / case.k).is_multiple_of(2) { 3.0f32 } else { -3.0 };
                    bytes.copy_from_slice(&value.to_le_bytes());
                }
                for block in b.bytes.chunks_exact_mut(dtype.block_bytes() as usize) {
                    block[codes.clone()].fill(fill);
                    block[scales.clone()].fill(0x7f);
                }
                let rounded = as_integers(&a, case);
                for isa in Isa::available() {
                    let got = case.alone(isa, a.view, b.view, &mut scratch);
                    let floats = m > 24 && int8::tiles::kernels(isa, dtype).is_none();
                    case.verify(isa, if floats { &a } else { &rounded }, &b, &got);
                }
            }
        }
    }
}

/// The product of each row alone.
fn row_by_row(case: Case, isa: Isa, a: Operand, b: Operand, scratch: &mut [u8]) -> Vec<u8> {
    case.run(a, b, |a, b, c| {
        for row in 0..case.m {
            let at = |stride, dtype: DType| row * stride * dtype.block_bytes() as usize;
            let a = Operand { data: a.data.wrapping_add(at(a.row_stride, a.dtype)), rows: 1, ..a };
            let c = Output { data: c.data.wrapping_add(at(c.row_stride, c.dtype)), rows: 1, ..c };
            // SAFETY: parts of matrices that own their memory.
            unsafe { matmul_serial(isa, case.compute, a, b, c, case.accumulate, scratch) };
        }
    })
}

/// Few rows as integers, with every type of integer codes: near the product of what they are rounded to, and the same bits on all
/// machines that have vectors of eight lanes, whatever rows are beside them.
#[test]
fn few_rows_as_integers() {
    let pools = pools([1, 3]);
    let mut scratch = vec![0; SCRATCH_BYTES];
    let without = [DType::Nf4, DType::Fp4, DType::Nf4F32, DType::Fp4F32, DType::Q8K];
    let mut types = 0;
    for dtype in block_types() {
        for ((m, k, n), (a, c), accumulate) in [
            ((1, 512, 13), (DType::F32, DType::F32), false),
            ((2, 256, 7), (DType::F32, DType::Bf16), true),
            ((3, 768, 5), (DType::Bf16, DType::F32), true),
            ((4, 1024, 9), (DType::F32, DType::F32), false),
            ((7, 256, 33), (DType::F16, DType::F32), false),
            ((5, 512, 40), (DType::F32, DType::F32), false),
            ((8, 256, 34), (DType::Bf16, DType::Bf16), false),
            ((9, 768, 8), (DType::F32, DType::F32), true),
            ((24, 1536, 6), (DType::F32, DType::F32), false),
            ((24, 7168, 3), (DType::F32, DType::F32), false),
        ] {
            let compute = Compute::Int8;
            let (a, b) = ((a, Layout::Rows), (dtype, Layout::Columns));
            let case = Case { compute, a, b, c, accumulate, m, k, n };
            let (a, b) = case.operands();
            let plain = Case { compute: compute.beside(case.a.0), ..case };
            let mut wide = None;
            for isa in Isa::available() {
                let got = case.alone(isa, a.view, b.view, &mut scratch);
                let rounds = got != plain.alone(isa, a.view, b.view, &mut scratch);
                assert_eq!(rounds, !without.contains(&dtype), "{isa} {case:?}");
                if rounds {
                    case.verify(isa, &as_integers(&a, case), &b, &got);
                }
                for pool in &pools {
                    assert!(
                        got == case.on(pool, isa, a.view, b.view),
                        "{isa} {case:?}: other bits on threads"
                    );
                }
                if isa >= Isa::Avx2 && rounds {
                    assert!(wide.get_or_insert(got.clone()) == &got, "{isa} {case:?}: other bits than AVX2");
                }
                let by_rows = row_by_row(case, isa, a.view, b.view, &mut scratch);
                assert!(got == by_rows, "{isa} {case:?}: other bits row by row");
            }
        }
        types += usize::from(!without.contains(&dtype));
    }
    assert_eq!(types, 13);
}

/// More rows than a few as integers, written out and by the machine: near the product of what they are rounded to, and the same bits on
/// any number of threads and row by row.
#[test]
fn more_rows_as_integers() {
    let pools = pools([1, 3]);
    let mut scratch = vec![0; SCRATCH_BYTES];
    let mut types = 0;
    for dtype in block_types() {
        let Some(kernels) = int8::tiles::written(dtype) else { continue };
        types += 1;
        for ((m, k, n), (a, c), accumulate) in [
            ((25, 512, 13), (DType::F32, DType::F32), false),
            ((30, 256, 71), (DType::F32, DType::Bf16), true),
            ((61, 768, 32), (DType::Bf16, DType::F32), true),
            ((28, 3328, 5), (DType::F16, DType::Bf16), true),
            ((40, 4096, 40), (DType::F32, DType::F32), true),
            ((27, 6400, 33), (DType::F32, DType::F32), false),
            ((26, 14_336, 4), (DType::F32, DType::Bf16), false),
        ] {
            let (a, b) = ((a, Layout::Rows), (dtype, Layout::Columns));
            let case = Case { compute: Compute::Int8, a, b, c, accumulate, m, k, n };
            let (a, b) = case.operands();
            let rounded = as_integers(&a, case);
            let written = case.by(kernels, a.view, b.view, &mut scratch);
            case.verify(Isa::Portable, &rounded, &b, &written);
            let floats = Case { compute: case.compute.beside(case.a.0), ..case };
            for isa in Isa::available() {
                let got = case.alone(isa, a.view, b.view, &mut scratch);
                let amx = isa == Isa::Amx && case.a.0 == DType::Bf16;
                if int8::tiles::kernels(isa, dtype).is_none() || amx {
                    assert!(got == floats.alone(isa, a.view, b.view, &mut scratch), "{isa} {case:?}");
                    continue;
                }
                case.verify(isa, &rounded, &b, &got);
                for pool in &pools {
                    assert!(
                        got == case.on(pool, isa, a.view, b.view),
                        "{isa} {case:?}: other bits on threads"
                    );
                }
                let by_rows = row_by_row(case, isa, a.view, b.view, &mut scratch);
                assert!(got == by_rows, "{isa} {case:?}: other bits row by row");
            }
        }
    }
    assert_eq!(types, 13);
}

/// Integers need whole blocks, and without instructions for tiles of them few rows; else the product is that of f32, or of bf16 where the
/// rows are.
#[test]
fn what_integers_do_not_suit_is_as_without() {
    let mut scratch = vec![0; SCRATCH_BYTES];
    for (m, k, b, layout) in [
        (25, 300, DType::Q4K, Layout::Columns),
        (25, 64, DType::Q8_0, Layout::Rows),
        (1, 300, DType::Q4K, Layout::Columns),
        (1, 40, DType::Q8_0, Layout::Columns),
        (2, 64, DType::Q8_0, Layout::Rows),
        (2, 64, DType::F32, Layout::Columns),
        (1, 300_000, DType::Q4_0, Layout::Columns),
    ] {
        for (a, beside) in [(DType::F32, Compute::F32), (DType::Bf16, Compute::Bf16)] {
            let (a, b, c) = ((a, Layout::Rows), (b, layout), DType::F32);
            let case = Case { compute: Compute::Int8, a, b, c, accumulate: false, m, k, n: 5 };
            let (a, b) = case.operands();
            for isa in Isa::available() {
                let plain = Case { compute: beside, ..case };
                let plain = plain.alone(isa, a.view, b.view, &mut scratch);
                assert!(plain == case.alone(isa, a.view, b.view, &mut scratch), "{isa} {case:?}");
            }
        }
    }
}

/// What is no finite number is none afterwards, and rows of very small numbers come out as such.
#[test]
fn rows_of_unusual_numbers_as_integers() {
    let mut scratch = vec![0; SCRATCH_BYTES];
    for dtype in [DType::Q8_0, DType::Q4_1, DType::Q2K, DType::Q4K, DType::Q6K] {
        for m in [1, 5, 25] {
            let (a, b) = ((DType::F32, Layout::Rows), (dtype, Layout::Columns));
            let case =
                Case { compute: Compute::Int8, a, b, c: DType::F32, accumulate: false, m, k: 256, n: 4 };
            let (_, b) = case.operands();
            let largest = |j| (0..256).map(|k| b.get(k, j).abs()).fold(0.0f32, f32::max);
            for isa in Isa::available() {
                let large = if dtype == DType::Q8_0 { f32::MAX } else { 1e30 };
                for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, large, 1e-38, 1e-41, 0.0, -0.0] {
                    for place in [0, 17, 255] {
                        // In the last row; the others are zeros.
                        let mut values = vec![0.0f32; m * 256];
                        values[(m - 1) * 256 + place] = value;
                        let a = Operand {
                            data: values.as_ptr().cast(),
                            dtype: DType::F32,
                            rows: m,
                            columns: 256,
                            row_stride: 256,
                            column_stride: 1,
                        };
                        let got = case.alone(isa, a, b.view, &mut scratch);
                        for (i, row) in got.chunks_exact(4 * 9).enumerate() {
                            for j in 0..4 {
                                let got = f32::from_le_bytes(row[4 * j..4 * j + 4].try_into().unwrap());
                                let expected = if i + 1 == m { value * b.get(place, j) } else { 0.0 };
                                let size = if i + 1 == m { value.abs() * largest(j) } else { 0.0 };
                                if size.is_finite() {
                                    let tolerance = size * 4e-6 + 1e-36;
                                    assert!(
                                        (got - expected).abs() <= tolerance,
                                        "{isa} {dtype}, {m} rows: {value:e} gives {got:e}, not {expected:e}"
                                    );
                                } else if !value.is_finite() {
                                    // Rows of floats keep infinities.
                                    let kept = m > 24 && got.is_infinite();
                                    assert!(
                                        got.is_nan() || kept,
                                        "{isa} {dtype}, {m} rows: {value} gives {got}"
                                    );
                                }
                            }
                        }
                    }
                }
            }
        }
    }
}

fn any_case() -> impl Strategy<Value = Case> {
    let float = || prop::sample::select(FLOATS.to_vec());
    let layout = || prop::sample::select(vec![Layout::Rows, Layout::Columns, Layout::Scattered]);
    let b = prop_oneof![
        (float(), layout()),
        (
            prop::sample::select(block_types().collect::<Vec<_>>()),
            prop::sample::select(vec![Layout::Rows, Layout::Columns])
        ),
    ];
    let kind = (any::<bool>(), (float(), layout()), b, any::<bool>(), any::<bool>());
    (kind, 1..70usize, 1..70usize, 1..70usize).prop_map(|((rounded, a, b, narrow, accumulate), m, k, n)| {
        Case {
            compute: if rounded { Compute::Bf16 } else { Compute::F32 },
            a,
            b,
            c: if narrow { DType::Bf16 } else { DType::F32 },
            accumulate,
            m,
            k,
            n,
        }
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    #[test]
    fn any_shape(case in any_case()) {
        check(case, &pools([1, 2]), &mut vec![0; SCRATCH_BYTES]);
    }
}
