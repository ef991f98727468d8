//! The speed of every kernel but matrix products and attention, as a ratio to a copy of as many bytes.
//!
//! `cargo run --release -p plimsoll-device --example kernel_bench [threads] [isa] [optimizers]`, the isa one of
//! `portable`, `avx2`, `avx512` and `best`; the last word leaves out all but optimizers. Each kernel runs in turn with a copy; what is printed are medians. Bytes are those that the operation
//! reads and writes by its shapes, so a kernel that reads its input twice, or whose outputs have to be fetched before
//! they are written, can stay under 1 without doing anything wrong.

use std::sync::Arc;
use std::time::Instant;

use plimsoll_device::cpu::{Isa, Pool};
use plimsoll_device::{
    Activation, Adam, BLOCK_8BIT, Codes, Cpu, DType, Device, DeviceError, DeviceExt, Elementwise, Embedding,
    Glu, Lion, Loss, Norm, Op, PIECE_ROWS, Position, Product, Reduction, RotatedHeads, Rounding, Rule,
    Tensor, Update,
};
use plimsoll_memory::{Tag, usable_cores};

const ROUNDS: usize = 15;

fn main() -> Result<(), DeviceError> {
    let mut arguments = std::env::args().skip(1);
    let threads = arguments.next().and_then(|n| n.parse().ok());
    let isa = arguments.next().and_then(|name| match name.as_str() {
        "portable" => Some(Isa::Portable),
        "avx2" => Some(Isa::Avx2),
        "avx512" => Some(Isa::Avx512),
        _ => None,
    });
    let only_optimizers = arguments.next().is_some_and(|kernels| kernels == "optimizers");
    let pool = Pool::on_own_cores(threads.unwrap_or_else(usable_cores), Cpu::SCRATCH_BYTES)?;
    let bench = Bench { cpu: Cpu::with_pool(Arc::new(pool), isa.unwrap_or_else(Isa::detect), 3 << 30)? };
    println!("{} threads, {}", bench.cpu.threads(), bench.cpu.isa());
    println!("{:34} {:>14} {:>9} {:>9} {:>9} {:>7}", "kernel", "shape", "ms", "GB/s", "copy GB/s", "ratio");
    for dtype in [DType::F32, DType::Bf16] {
        if only_optimizers {
            bench.optimizer(dtype, 32 << 20)?;
            continue;
        }
        for [n, h] in [[2048, 576], [8192, 4096]] {
            bench.activations(dtype, n, h)?;
        }
        bench.optimizer(dtype, 32 << 20)?;
    }
    if only_optimizers { Ok(()) } else { bench.cross_entropy(512, 49_152) }
}

struct Bench {
    cpu: Cpu,
}

impl Bench {
    /// A tensor of small numbers.
    fn tensor(&self, dtype: DType, sizes: &[u64]) -> Result<Tensor, DeviceError> {
        let tensor = self.cpu.alloc(dtype, sizes, Tag::Workspace, "bench")?;
        let source = self.cpu.alloc(DType::F32, sizes, Tag::Workspace, "bench")?;
        self.cpu.write(&source, &mut |bytes| {
            for (i, x) in bytes.chunks_exact_mut(4).enumerate() {
                let value = (i as u32).wrapping_mul(2_654_435_761) as f32 / u32::MAX as f32 - 0.5;
                x.copy_from_slice(&value.to_ne_bytes());
            }
        })?;
        self.cpu.run(Elementwise::Cast { x: &source, out: &tensor, rounding: Rounding::Nearest })?;
        Ok(tensor)
    }

    fn u32s(&self, values: impl Iterator<Item = u32>) -> Result<Tensor, DeviceError> {
        let values: Vec<u32> = values.collect();
        let tensor = self.cpu.alloc(DType::U32, &[values.len() as u64], Tag::Workspace, "bench")?;
        self.cpu.write_u32(&tensor, &values)?;
        Ok(tensor)
    }

    /// Times the operation and a copy of half as many bytes as it moves, by turns.
    fn time<'a>(&self, label: &str, op: impl Into<Op<'a>>) -> Result<(), DeviceError> {
        let op = op.into();
        let bytes = op.cost().bytes;
        let [from, to] = [0, 1].map(|_| self.tensor(DType::F32, &[bytes / 8]));
        let (from, to) = (from?, to?);
        let copy = Elementwise::Cast { x: &from, out: &to, rounding: Rounding::Nearest };
        let mut seconds = [vec![], vec![]];
        for _ in 0..ROUNDS {
            for (op, seconds) in [op, copy.into()].into_iter().zip(&mut seconds) {
                let start = Instant::now();
                self.cpu.run(op)?;
                seconds.push(start.elapsed().as_secs_f64());
            }
        }
        let [kernel, copy] = seconds.map(|mut seconds| {
            seconds.sort_by(f64::total_cmp);
            seconds[ROUNDS / 2]
        });
        let rate = |seconds| bytes as f64 / seconds / 1e9;
        let shape = label.rsplit_once(" of ").map_or("", |(_, shape)| shape);
        println!(
            "{:34} {shape:>14} {:9.3} {:9.1} {:9.1} {:7.2}",
            label.trim_end_matches(shape).trim_end_matches(" of "),
            kernel * 1e3,
            rate(kernel),
            rate(copy),
            copy / kernel
        );
        Ok(())
    }

    /// Times two operations by turns: the median of the first one's time over the second one's right after it.
    fn compare<'a>(
        &self,
        label: &str,
        op: impl Into<Op<'a>>,
        baseline: impl Into<Op<'a>>,
    ) -> Result<(), DeviceError> {
        let (op, baseline) = (op.into(), baseline.into());
        let seconds = |op: Op<'a>| -> Result<f64, DeviceError> {
            let start = Instant::now();
            self.cpu.run(op)?;
            Ok(start.elapsed().as_secs_f64())
        };
        let ratio = |_| Ok(seconds(op)? / seconds(baseline)?);
        let mut ratios = (0..ROUNDS).map(ratio).collect::<Result<Vec<f64>, DeviceError>>()?;
        ratios.sort_by(f64::total_cmp);
        println!("{label:34} {:>14} {:9.2}", "", ratios[ROUNDS / 2]);
        Ok(())
    }

    fn activations(&self, dtype: DType, n: u64, h: u64) -> Result<(), DeviceError> {
        let matrix = || self.tensor(dtype, &[n, h]);
        let (x, y, z) = (matrix()?, matrix()?, matrix()?);
        let (weight, bias) = (self.tensor(dtype, &[h])?, self.tensor(dtype, &[h])?);
        let (mean, rstd) = (self.tensor(DType::F32, &[n])?, self.tensor(DType::F32, &[n])?);
        let label = |name| format!("{name} {dtype} of {n}x{h}");
        let activation = Glu::Silu;
        self.time(&label("fill"), Elementwise::Fill { out: &x, value: 0.5 })?;
        self.time(&label("scale"), Elementwise::Scale { x: &x, factor: 1.0 })?;
        self.time(&label("add"), Elementwise::Add { a: &x, b: &y, out: &z })?;
        self.time(&label("add in place"), Elementwise::Add { a: &z, b: &y, out: &z })?;
        let other = self.tensor(if dtype == DType::F32 { DType::Bf16 } else { DType::F32 }, &[n, h])?;
        self.time(
            &label("cast from"),
            Elementwise::Cast { x: &x, out: &other, rounding: Rounding::Nearest },
        )?;
        if dtype == DType::F32 {
            let rounding = Rounding::Stochastic { seed: 1, first: 0 };
            self.time(&label("cast, stochastic, from"), Elementwise::Cast { x: &x, out: &other, rounding })?;
        }
        drop(other);
        self.time(
            &label("rms_norm"),
            Norm::RmsNorm { x: &x, weight: &weight, weight_offset: 0.0, epsilon: 1e-5, out: &y, rstd: &rstd },
        )?;
        self.time(
            &label("rms_norm_backward"),
            Norm::RmsNormBackward {
                x: &x,
                weight: &weight,
                weight_offset: 0.0,
                rstd: &rstd,
                dout: &y,
                dx: &z,
                dweight: Some(&bias),
                accumulate_weight: true,
            },
        )?;
        self.time(
            &label("layer_norm"),
            Norm::LayerNorm {
                x: &x,
                weight: &weight,
                bias: &bias,
                epsilon: 1e-5,
                out: &y,
                mean: &mean,
                rstd: &rstd,
            },
        )?;
        let dbias = self.tensor(dtype, &[h])?;
        self.time(
            &label("layer_norm_backward"),
            Norm::LayerNormBackward {
                x: &x,
                weight: &weight,
                mean: &mean,
                rstd: &rstd,
                dout: &y,
                dx: &z,
                dweight: Some(&bias),
                dbias: Some(&dbias),
                accumulate_weight: true,
            },
        )?;
        self.time(
            &label("bias_backward"),
            Product::BiasBackward { dout: &x, dbias: &dbias, accumulate: false },
        )?;
        for (name, activation) in
            [("swiglu", Glu::Silu), ("geglu", Glu::Gelu), ("geglu, tanh,", Glu::GeluTanh)]
        {
            self.time(&label(name), Activation::Gated { gate: &x, up: &y, out: &z, activation })?;
        }
        self.time(&label("gelu"), Activation::Activate { x: &x, out: &y, activation: Glu::Gelu })?;
        let (dgate, dup) = (matrix()?, matrix()?);
        self.time(
            &label("swiglu backward"),
            Activation::GatedBackward { gate: &x, up: &y, dout: &z, dgate: &dgate, dup: &dup, activation },
        )?;
        let positions = self.u32s((0..n as u32).map(|i| i % 512))?;
        let (cos, sin) = (self.tensor(DType::F32, &[512, 32])?, self.tensor(DType::F32, &[512, 32])?);
        self.time(
            &label("rope"),
            Position::Rope {
                x: &x,
                positions: &positions,
                cos: &cos,
                sin: &sin,
                heads: RotatedHeads::from_first(64),
                inverse: false,
            },
        )?;
        let tokens = self.u32s((0..n as u32).map(|i| i.wrapping_mul(2_654_435_761) % 10_000))?;
        let table = self.tensor(dtype, &[10_000, h])?;
        self.time(&label("embedding"), Embedding::Lookup { tokens: &tokens, table: &table, out: &x })?;
        self.time(
            &label("embedding_backward"),
            Embedding::Backward {
                tokens: &tokens,
                dout: &y,
                dtable: &table,
                first_row: 0,
                rounding: Rounding::Nearest,
            },
        )?;
        let sum = self.tensor(DType::F32, &[1])?;
        self.time(&label("sum_squares"), Reduction::SumSquares { x: &x, out: &sum, finite: None })
    }

    fn optimizer(&self, dtype: DType, n: u64) -> Result<(), DeviceError> {
        let (param, grad) = (self.tensor(dtype, &[n])?, self.tensor(dtype, &[n])?);
        let [m, v, master] = [0, 1, 2].map(|_| self.tensor(DType::F32, &[n]));
        let (m, v, master) = (m?, v?, master?);
        self.cpu.run(Elementwise::Fill { out: &v, value: 0.1 })?;
        let hyper = Adam { lr: 1e-5, beta1: 0.9, beta2: 0.999, epsilon: 1e-8, weight_decay: 0.1, step: 10 };
        let step = |master, rounding, rule| Update {
            param: &param,
            master,
            grad: &grad,
            grad_scale: None,
            rounding,
            rule,
        };
        let (nearest, stochastic) = (Rounding::Nearest, Rounding::Stochastic { seed: 1, first: 0 });
        let adamw = Rule::AdamW { m: &m, v: &v, hyper };
        self.time(&format!("adamw {dtype} of {n}"), step(None, nearest, adamw))?;
        if dtype == DType::Bf16 {
            self.time(&format!("adamw, stochastic, {dtype} of {n}"), step(None, stochastic, adamw))?;
            self.time(&format!("adamw with f32 master {dtype} of {n}"), step(Some(&master), nearest, adamw))?;
        }
        let [m_codes, v_codes] = [0, 1].map(|_| self.cpu.alloc(DType::U8, &[n], Tag::Workspace, "bench"));
        let (m_codes, v_codes) = (m_codes?, v_codes?);
        let blocks = [n.div_ceil(BLOCK_8BIT)];
        let (m_max, v_max) = (self.tensor(DType::F32, &blocks)?, self.tensor(DType::F32, &blocks)?);
        let zero = |t| self.cpu.write(t, &mut |bytes| bytes.fill(0));
        [&m_codes, &v_codes, &m_max, &v_max].into_iter().try_for_each(zero)?;
        let (m8, v8) = (Codes { codes: &m_codes, absmax: &m_max }, Codes { codes: &v_codes, absmax: &v_max });
        let adamw_8bit = step(None, stochastic, Rule::AdamW8bit { m: m8, v: v8, hyper });
        self.time(&format!("adamw_8bit {dtype} of {n}"), adamw_8bit)?;
        self.compare("  its time over adamw's", adamw_8bit, step(None, nearest, adamw))?;
        let lion = Lion { lr: 1e-5, beta1: 0.9, beta2: 0.99, weight_decay: 0.1 };
        self.time(&format!("lion {dtype} of {n}"), step(None, nearest, Rule::Lion { m: &m, hyper: lion }))?;
        let lion_8bit = Rule::Lion8bit { m: m8, hyper: lion };
        self.time(&format!("lion_8bit {dtype} of {n}"), step(None, nearest, lion_8bit))
    }

    fn cross_entropy(&self, n: u64, v: u64) -> Result<(), DeviceError> {
        let logits = self.tensor(DType::F32, &[n, v])?;
        let losses = self.tensor(DType::F32, &[n])?;
        let targets = self.u32s((0..n as u32).map(|i| i * 97 % v as u32))?;
        let op = |soft_cap, gradient_scale| Loss::CrossEntropy {
            logits: &logits,
            targets: &targets,
            weights: None,
            losses: &losses,
            soft_cap,
            gradient_scale,
        };
        self.time(&format!("cross_entropy of {n}x{v}"), op(None, None))?;
        self.time(&format!("cross_entropy with gradient of {n}x{v}"), op(None, Some(1.0)))?;
        self.time(&format!("the same, capped, of {n}x{v}"), op(Some(30.0), Some(1.0)))?;
        let piece = self.tensor(DType::F32, &[n, 8 * PIECE_ROWS])?;
        let runs = self.tensor(DType::F32, &[n, 2 * v.div_ceil(PIECE_ROWS)])?;
        let target_logits = self.tensor(DType::F32, &[n])?;
        let label = |name| format!("{name} of {n}x{}", 8 * PIECE_ROWS);
        let runs_of = Loss::LogitRuns {
            logits: &piece,
            first_column: 0,
            targets: &targets,
            soft_cap: None,
            runs: &runs,
            target_logits: &target_logits,
        };
        self.time(&label("logit_runs"), runs_of)?;
        let gradient = Loss::GradientOfRuns {
            logits: &piece,
            first_column: 0,
            targets: &targets,
            weights: None,
            runs: &runs,
            soft_cap: None,
            gradient_scale: 1.0,
        };
        self.time(&label("gradient_of_runs"), gradient)
    }
}
