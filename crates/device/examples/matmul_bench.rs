//! The speed of matrix products over the shapes of a training step, as a share of what the cores' multipliers can do,
//! and of a decoding step over a whole small model's weights, in bytes a second.
//!
//! `cargo run --release -p plimsoll-device --example matmul_bench [threads] [isa] [decoding]`, the instruction set one of
//! `portable`, `avx2`, `avx512`, `avx512bf16` and `amx`; with the last word there is no training, and names of types after it are
//! those of the weights, and each is multiplied with rows of f32 and of 8-bit integers; the word `cached` before them takes so few weights that
//! they stay in the cache; with `frozen` in its place there are only products of a batch, and of a prompt in f32 and in integers, with
//! frozen weights of every type.
//! The peak is measured in the same run by a loop of multiply-adds that touches no memory.
//! Numbers are medians; y = x W^T is `fwd`, dx = dy W is `dx`, dW = dy^T x is `dw`.

use std::error::Error;
use std::time::Instant;

use plimsoll_device::cpu::matmul::{Operand, Output, SCRATCH_BYTES, matmul};
use plimsoll_device::cpu::{Isa, Pool};
use plimsoll_device::{Compute, DType};
use plimsoll_memory::{Reservation, ReservationError};

/// Tokens, inputs and outputs of linear layers: SmolLM2-135M's, then larger models'.
const SHAPES: [[usize; 3]; 15] = [
    [512, 576, 576],
    [512, 576, 192],
    [512, 576, 1536],
    [512, 1536, 576],
    [2048, 576, 576],
    [2048, 576, 192],
    [2048, 576, 1536],
    [2048, 1536, 576],
    [256, 576, 49_152],
    [512, 576, 49_152],
    [512, 1024, 4096],
    [2048, 1024, 4096],
    [2048, 2048, 2048],
    [512, 4096, 4096],
    [2048, 4096, 4096],
];

/// Inputs and outputs of the linears of one of SmolLM2-135M's 30 blocks.
const BLOCK: [[usize; 2]; 7] =
    [[576, 576], [576, 192], [576, 192], [576, 576], [576, 1536], [576, 1536], [1536, 576]];

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    let threads = arguments.next().and_then(|n| n.parse().ok()).unwrap_or(cores);
    let isa = match arguments.next().as_deref() {
        Some("portable") => Isa::Portable,
        Some("avx2") => Isa::Avx2,
        Some("avx512") => Isa::Avx512,
        Some("avx512bf16") => Isa::Avx512Bf16,
        _ => Isa::detect(),
    };
    let isa = isa.min(Isa::detect());
    let bench = Bench { pool: Pool::on_own_cores(threads, SCRATCH_BYTES)?, isa };
    match arguments.next().as_deref() {
        Some("frozen") => bench.frozen(),
        Some("decoding") => bench.decoding(&arguments.collect::<Vec<_>>()),
        _ => {
            bench.training()?;
            bench.decoding(&[])
        }
    }
}

struct Bench {
    pool: Pool,
    isa: Isa,
}

impl Bench {
    fn training(&self) -> Result<(), Box<dyn Error>> {
        let modes = [("f32", DType::F32, Compute::F32), ("bf16", DType::Bf16, Compute::Bf16)];
        let peaks = modes.map(|(_, _, compute)| peak(&self.pool, self.isa, compute));
        let pool = &self.pool;
        println!("{} threads, {}", pool.threads(), self.isa);
        for ((name, ..), peak) in modes.iter().zip(peaks) {
            println!("peak {name}: {:.0} GFLOP/s", peak / 1e9);
        }
        println!(
            "{:>6} {:>6} {:>6} {:4} {:>5} {:>9} {:>7}",
            "tokens", "in", "out", "", "", "GFLOP/s", "of peak"
        );
        for (mode, peak) in modes.into_iter().zip(peaks) {
            let mut logarithms = Vec::new();
            for [tokens, inputs, outputs] in SHAPES {
                for pass in ["fwd", "dx", "dw"] {
                    let rate = self.pass(mode.1, mode.2, pass, [tokens, inputs, outputs])?;
                    logarithms.push((rate / peak).ln());
                    let (name, share) = (mode.0, 100.0 * rate / peak);
                    println!(
                        "{tokens:6} {inputs:6} {outputs:6} {pass:4} {name:>5} {:9.0} {share:6.1}%",
                        rate / 1e9
                    );
                }
            }
            let mean = logarithms.iter().sum::<f64>() / logarithms.len() as f64;
            println!("geometric mean {}: {:.1}%", mode.0, 100.0 * mean.exp());
        }
        Ok(())
    }

    /// FLOP/s of one product of a linear layer; activations, weights and gradients are stored as `dtype`.
    fn pass(
        &self,
        dtype: DType,
        compute: Compute,
        pass: &str,
        [tokens, inputs, outputs]: [usize; 3],
    ) -> Result<f64, ReservationError> {
        let x = Matrix::new(dtype, tokens, inputs)?;
        let weight = Matrix::new(dtype, outputs, inputs)?;
        let y = Matrix::new(dtype, tokens, outputs)?;
        let (a, b, c) = match pass {
            "fwd" => (x.operand(), weight.transposed(), y.output()),
            "dx" => (y.operand(), weight.operand(), x.output()),
            _ => (y.transposed(), x.operand(), weight.output()),
        };
        let seconds = median(|| {
            // SAFETY: three different matrices of the sizes described.
            unsafe { matmul(&self.pool, self.isa, compute, a, b, c, false) }
        });
        Ok((2 * tokens * inputs * outputs) as f64 / seconds)
    }

    /// y = x W^T and dx = dy W of a batch in bf16 and of a prompt in f32 and in integers, with weights of every type.
    fn frozen(&self) -> Result<(), Box<dyn Error>> {
        self.frozen_of(512, DType::Bf16, Compute::Bf16)?;
        self.frozen_of(256, DType::F32, Compute::F32)?;
        self.frozen_of(256, DType::F32, Compute::Int8)
    }

    /// With so many tokens, as parts of the speed with weights of the type of the activations.
    fn frozen_of(&self, tokens: usize, plain: DType, compute: Compute) -> Result<(), Box<dyn Error>> {
        const SHAPES: [[usize; 2]; 4] = [[576, 576], [576, 1536], [1536, 576], [4096, 4096]];
        println!(
            "{tokens} tokens, {compute:?}: GFLOP/s and as a part of that with {plain} weights, fwd, dx of each shape"
        );
        let mut first = Vec::new();
        for dtype in [plain].into_iter().chain(DType::ALL.into_iter().filter(|dtype| dtype.is_block())) {
            print!("{dtype:8}");
            let mut rates = Vec::new();
            for [inputs, outputs] in SHAPES {
                // Whole blocks of every type.
                let inputs = if dtype.row_multiple() == 256 { inputs.next_multiple_of(256) } else { inputs };
                let x = Matrix::new(plain, tokens, inputs)?;
                let weight = Matrix::new(dtype, outputs, inputs)?;
                let y = Matrix::new(plain, tokens, outputs)?;
                for (a, b, c) in [
                    (x.operand(), weight.transposed(), y.output()),
                    (y.operand(), weight.operand(), x.output()),
                ] {
                    let seconds = median(|| {
                        // SAFETY: three different matrices of the sizes described.
                        unsafe { matmul(&self.pool, self.isa, compute, a, b, c, false) }
                    });
                    let rate = (2 * tokens * inputs * outputs) as f64 / seconds;
                    let part = first.get(rates.len()).map_or(1.0, |first| rate / first);
                    print!("  {:5.0} {part:.2}", rate / 1e9);
                    rates.push(rate);
                }
            }
            println!();
            if first.is_empty() {
                first = rates;
            }
        }
        Ok(())
    }

    /// All matrix products of a decoding step, for some numbers of sequences, with weights of these types, or of all.
    fn decoding(&self, only: &[String]) -> Result<(), Box<dyn Error>> {
        // Two blocks stay in the last cache: what is left is what the kernels take.
        let cached = only.first().is_some_and(|word| word == "cached");
        let only = if cached { &only[1..] } else { only };
        let blocks = if cached { 2 } else { 30 };
        let shapes = (0..blocks).flat_map(|_| BLOCK).chain((!cached).then_some([576, 49_152]));
        let shapes: Vec<[usize; 2]> = shapes.collect();
        let weights: usize = shapes.iter().map(|[inputs, outputs]| inputs * outputs).sum();
        println!(
            "decoding, {:.1} million weights: ms a step and GB/s of weights, by sequences",
            weights as f64 / 1e6
        );
        // Whole blocks of every type.
        let shapes = shapes.into_iter().map(|[i, o]| [i.next_multiple_of(256), o]).collect::<Vec<_>>();
        let wanted = |dtype: &DType| {
            dtype.is_weight() && (only.is_empty() || only.iter().any(|name| name == dtype.name()))
        };
        let computes = |dtype: DType| {
            if dtype.is_block() { &[Compute::F32, Compute::Int8][..] } else { &[Compute::F32] }
        };
        let wanted = DType::ALL.into_iter().filter(wanted);
        for (dtype, compute) in wanted.flat_map(|dtype| computes(dtype).iter().map(move |c| (dtype, *c))) {
            let weights = shapes
                .iter()
                .map(|[inputs, outputs]| Matrix::new(dtype, *outputs, *inputs))
                .collect::<Result<Vec<_>, _>>()?;
            let bytes: usize = weights.iter().map(|weight| weight.memory.len()).sum();
            print!("{dtype:5} {:4}", if compute == Compute::Int8 { "int8" } else { "" });
            for rows in [1, 2, 4, 8, 16, 32] {
                let (x, y) = (Matrix::new(DType::F32, rows, 1536)?, Matrix::new(DType::F32, rows, 49_152)?);
                let seconds = median(|| {
                    for weight in &weights {
                        let a =
                            Operand { columns: weight.columns, row_stride: weight.columns, ..x.operand() };
                        let c = Output { columns: weight.rows, row_stride: weight.rows, ..y.output() };
                        // SAFETY: `x` and `y` are as wide as the widest weight needs.
                        unsafe { matmul(&self.pool, self.isa, compute, a, weight.transposed(), c, false) };
                    }
                });
                print!("  {rows}: {:.2} ms {:.1}", seconds * 1e3, bytes as f64 / seconds / 1e9);
            }
            println!();
        }
        Ok(())
    }
}

/// A matrix of small values, rows contiguous.
struct Matrix {
    memory: Reservation,
    dtype: DType,
    rows: usize,
    columns: usize,
}

impl Matrix {
    fn new(dtype: DType, rows: usize, columns: usize) -> Result<Matrix, ReservationError> {
        let bytes = dtype.bytes_for((rows * columns) as u64).unwrap_or(0);
        let memory = Reservation::new(bytes)?;
        // A number around 0.01, or a scale around 1, in every type.
        // SAFETY: the whole reservation, which nobody else knows yet.
        unsafe { memory.as_ptr().write_bytes(0x3c, memory.len()) };
        Ok(Matrix { memory, dtype, rows, columns })
    }

    fn operand(&self) -> Operand {
        Operand {
            data: self.memory.as_ptr(),
            dtype: self.dtype,
            rows: self.rows,
            columns: self.columns,
            row_stride: self.columns,
            column_stride: 1,
        }
    }

    fn transposed(&self) -> Operand {
        Operand {
            rows: self.columns,
            columns: self.rows,
            row_stride: 1,
            column_stride: self.columns,
            ..self.operand()
        }
    }

    fn output(&self) -> Output {
        let Matrix { dtype, rows, columns, .. } = *self;
        Output { data: self.memory.as_ptr(), dtype, rows, columns, row_stride: columns, dither: None }
    }
}

/// Median of the seconds that `body` takes, after a first time that does not count.
fn median(mut body: impl FnMut()) -> f64 {
    body();
    let begun = Instant::now();
    let mut times = Vec::new();
    while times.len() < 5 || (times.len() < 200 && begun.elapsed().as_secs_f64() < 0.2) {
        let start = Instant::now();
        body();
        times.push(start.elapsed().as_secs_f64());
    }
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// FLOP/s of all threads in a loop of multiply-adds on registers; NaN where no such loop is written.
fn peak(pool: &Pool, isa: Isa, compute: Compute) -> f64 {
    const STEPS: usize = 50_000;
    let run = |steps: usize| -> f64 {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the instruction set was found on this machine.
        unsafe {
            match (isa, compute) {
                (Isa::Amx, Compute::Bf16) => return registers::amx(steps),
                (Isa::Avx512Bf16, Compute::Bf16) => return registers::avx512_bf16(steps),
                (Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx, _) => return registers::avx512(steps),
                (Isa::Avx2, _) => return registers::avx2(steps),
                _ => {}
            }
        }
        let _ = (isa, compute, steps);
        f64::NAN
    };
    let best = (0..15)
        .map(|_| {
            let start = Instant::now();
            pool.run(pool.threads(), &|_, _| {
                std::hint::black_box(run(STEPS));
            });
            start.elapsed().as_secs_f64()
        })
        .fold(f64::MAX, f64::min);
    run(0) * (STEPS * pool.threads()) as f64 / best
}

/// Loops of `steps` times 12 or 24 multiply-adds; each gives the FLOPs of one step.
#[cfg(target_arch = "x86_64")]
mod registers {
    use std::arch::x86_64::*;
    use std::hint::black_box;

    #[target_feature(enable = "avx512f")]
    pub fn avx512(steps: usize) -> f64 {
        let (x, mut sums) = (_mm512_set1_ps(black_box(1e-9)), [_mm512_setzero_ps(); 24]);
        for _ in 0..steps {
            for sum in &mut sums {
                *sum = _mm512_fmadd_ps(x, x, *sum);
            }
        }
        black_box(sums);
        (24 * 16 * 2) as f64
    }

    #[target_feature(enable = "avx512f,avx512bf16")]
    pub fn avx512_bf16(steps: usize) -> f64 {
        let (x, mut sums) = (_mm512_set1_ps(black_box(1e-9)), [_mm512_setzero_ps(); 24]);
        let x = _mm512_cvtne2ps_pbh(x, x);
        for _ in 0..steps {
            for sum in &mut sums {
                *sum = _mm512_dpbf16_ps(*sum, x, x);
            }
        }
        black_box(sums);
        (24 * 16 * 4) as f64
    }

    /// Four products of tiles a step.
    pub fn amx(steps: usize) -> f64 {
        #[repr(align(64))]
        struct Configuration([u8; 64]);
        let mut all = Configuration([0; 64]);
        all.0[0] = 1;
        for tile in 0..8 {
            (all.0[16 + 2 * tile], all.0[48 + tile]) = (64, 16);
        }
        // SAFETY: the instructions were found on this machine; zeros times zeros, in registers.
        unsafe {
            std::arch::asm!("ldtilecfg [{}]", in(reg) &raw const all, options(nostack, readonly));
            for _ in 0..steps {
                std::arch::asm!(
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    "tdpbf16ps tmm1, tmm4, tmm7",
                    "tdpbf16ps tmm2, tmm5, tmm6",
                    "tdpbf16ps tmm3, tmm5, tmm7",
                    options(nostack, nomem)
                );
            }
            std::arch::asm!("tilerelease", options(nostack, nomem));
        }
        (4 * 16 * 16 * 32 * 2) as f64
    }

    #[target_feature(enable = "avx2,fma")]
    pub fn avx2(steps: usize) -> f64 {
        let (x, mut sums) = (_mm256_set1_ps(black_box(1e-9)), [_mm256_setzero_ps(); 12]);
        for _ in 0..steps {
            for sum in &mut sums {
                *sum = _mm256_fmadd_ps(x, x, *sum);
            }
        }
        black_box(sums);
        (12 * 8 * 2) as f64
    }
}
