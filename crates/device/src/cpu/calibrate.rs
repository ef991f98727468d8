//! What this machine does, measured with the operations of a step: products by type and shape, attention, exps, memory, and what it
//! takes to start an operation. That takes some seconds, where [`MachineRates`](super::MachineRates) takes some hundredths of one.

use std::sync::Arc;
use std::time::{Duration, Instant};

use plimsoll_memory::Tag;

use super::{Cpu, Isa, Pool};
use crate::{
    Activation, Arithmetic, Attention, AttentionShape, Compute, DType, Device, DeviceError, DeviceExt,
    Elementwise, Glu, Multiplied, Op, Product, Rounding, Tensor,
};

/// Sides of products `[rows, inner]` times `[inner, columns]`: those of small models and a large one's.
const PRODUCTS: [[u64; 3]; 4] =
    [[512, 576, 1536], [1024, 1024, 1024], [1024, 1024, 4096], [1024, 4096, 1024]];

/// The same of LoRA's adapters.
const THIN_PRODUCTS: [[u64; 3]; 2] = [[1024, 1024, 16], [1024, 16, 1024]];

/// Elements of a tensor that no common cache holds.
const ELEMENTS: u64 = 6 << 20;

/// Elements of a tensor that a cache holds.
const CACHED_ELEMENTS: u64 = 1 << 18;

/// Elements of a tensor that several threads share and that next to nothing is done with.
const FEW_ELEMENTS: u64 = 1 << 15;

/// Each measurement is the best of so many at least.
const TIMES: u32 = 3;
/// Short ones are repeated for so long: somebody else may have a core for some milliseconds.
const LEAST: Duration = Duration::from_millis(40);

/// An operation as it was measured.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// The operation.
    pub operation: &'static str,
    /// The type in which it computes.
    pub dtype: DType,
    /// Its sizes: rows, inner side and columns of a product, sequences, tokens, heads and their width of attention, else elements.
    pub shape: Vec<u64>,
    /// Seconds that it takes.
    pub seconds: f64,
    /// FLOP/s of products and attention, exps/s of an activation, else bytes/s.
    pub rate: f64,
}

/// What a machine does.
#[derive(Clone, Debug, PartialEq)]
pub struct Calibration {
    /// f32 products, FLOP/s.
    pub matmul_f32: f64,
    /// bf16 products, FLOP/s.
    pub matmul_bf16: f64,
    /// Products of 8-bit floats, FLOP/s.
    pub matmul_fp8: f64,
    /// f32 products with a short side, FLOP/s.
    pub thin_f32: f64,
    /// The same in bf16.
    pub thin_bf16: f64,
    /// Attention in f32, forward and backward, FLOP/s.
    pub attention_f32: f64,
    /// The same in bf16.
    pub attention_bf16: f64,
    /// Memory read and written, bytes/s.
    pub memory_bandwidth: f64,
    /// exp and the like, evaluations/s, beside the memory that their operations move.
    pub exps: f64,
    /// Seconds to start an operation.
    pub seconds_per_operation: f64,
    /// All measurements.
    pub samples: Vec<Sample>,
}

impl Calibration {
    /// Bytes that measuring takes.
    pub const ROOM: u64 = 96 << 20;

    /// Measures, with all threads of a pool.
    ///
    /// # Errors
    /// There is no memory for it.
    pub fn measure(pool: &Arc<Pool>, isa: Isa) -> Result<Calibration, DeviceError> {
        let device = Cpu::with_pool(Arc::clone(pool), isa, Calibration::ROOM)?;
        let mut bench = Bench { device, samples: Vec::new() };
        let memory_bandwidth = bench.memory(ELEMENTS)?;
        let cached = bench.memory(CACHED_ELEMENTS)?;
        let seconds_per_operation = bench.start(cached)?;
        let types = [Arithmetic::F32, Arithmetic::Half, Arithmetic::Fp8];
        let mut products = [0.0; 3];
        for (rate, arithmetic) in products.iter_mut().zip(types) {
            *rate = bench.products(arithmetic, &PRODUCTS)?;
        }
        let [matmul_f32, matmul_bf16, matmul_fp8] = products;
        Ok(Calibration {
            matmul_f32,
            matmul_bf16,
            matmul_fp8,
            thin_f32: bench.products(Arithmetic::F32, &THIN_PRODUCTS)?,
            thin_bf16: bench.products(Arithmetic::Half, &THIN_PRODUCTS)?,
            attention_f32: bench.attention(DType::F32)?,
            attention_bf16: bench.attention(DType::Bf16)?,
            memory_bandwidth,
            exps: bench.exps(memory_bandwidth)?,
            seconds_per_operation,
            samples: bench.samples,
        })
    }
}

/// What measures.
struct Bench {
    device: Cpu,
    samples: Vec<Sample>,
}

impl Bench {
    fn tensor(&self, dtype: DType, sizes: &[u64]) -> Result<Tensor, DeviceError> {
        let tensor = self.device.alloc(dtype, sizes, Tag::Workspace, "calibration")?;
        if dtype == DType::F32 || dtype == DType::Bf16 {
            self.device.run(Elementwise::Fill { out: &tensor, value: 0.5 })?;
        }
        Ok(tensor)
    }

    /// The best of some times, behind one that warms up.
    fn seconds<'a>(&self, op: impl Into<Op<'a>> + Copy) -> Result<f64, DeviceError> {
        self.device.run(op)?;
        let (first, mut best, mut times) = (Instant::now(), f64::INFINITY, 0);
        while times < TIMES || first.elapsed() < LEAST {
            let begun = Instant::now();
            self.device.run(op)?;
            best = best.min(begun.elapsed().as_secs_f64());
            times += 1;
        }
        Ok(best.max(1e-9))
    }

    fn keep(&mut self, operation: &'static str, (dtype, shape): (DType, &[u64]), seconds: f64, work: u64) {
        let rate = work as f64 / seconds;
        self.samples.push(Sample { operation, dtype, shape: shape.to_vec(), seconds, rate });
    }

    /// Sums of so many elements, in bytes/s.
    fn memory(&mut self, elements: u64) -> Result<f64, DeviceError> {
        let [a, b, out] = [(); 3].map(|()| self.tensor(DType::F32, &[elements]));
        let (a, b, out) = (a?, b?, out?);
        let op = Op::from(Elementwise::Add { a: &a, b: &b, out: &out });
        let (seconds, bytes) = (self.seconds(op)?, op.cost().bytes);
        self.keep(op.name(), (DType::F32, &[elements]), seconds, bytes);
        Ok(bytes as f64 / seconds)
    }

    /// Seconds to start an operation: a short one's, less those of its bytes in a cache.
    fn start(&mut self, cached: f64) -> Result<f64, DeviceError> {
        let x = self.tensor(DType::F32, &[FEW_ELEMENTS])?;
        let op = Op::from(Elementwise::Scale { x: &x, factor: 1.0 });
        let seconds = self.seconds(op)?;
        self.keep("start", (DType::F32, &[FEW_ELEMENTS]), seconds, 1);
        Ok((seconds - op.cost().bytes as f64 / cached).max(1e-7))
    }

    /// Products of some shapes, each forward and backward as in a step: all their operations over all their time.
    fn products(&mut self, arithmetic: Arithmetic, shapes: &[[u64; 3]]) -> Result<f64, DeviceError> {
        let (mut flops, mut time) = (0, 0.0);
        for shape in shapes {
            let seconds = self.product(arithmetic, *shape)?;
            flops += 3 * Multiplied::new(arithmetic, *shape).flops;
            time += seconds;
        }
        Ok(flops as f64 / time)
    }

    /// Seconds of a product and of the products of its gradients.
    fn product(&mut self, arithmetic: Arithmetic, shape: [u64; 3]) -> Result<f64, DeviceError> {
        let [rows, inner, columns] = shape;
        let (operand, gradient, stored, compute) = match arithmetic {
            Arithmetic::F32 => (DType::F32, DType::F32, DType::F32, Compute::F32),
            Arithmetic::F16 => (DType::F16, DType::F16, DType::F16, Compute::F32),
            Arithmetic::Half => (DType::Bf16, DType::Bf16, DType::Bf16, Compute::Bf16),
            Arithmetic::Fp8 => (DType::F8E4m3, DType::F8E5m2, DType::Bf16, Compute::Bf16),
        };
        let (x, weight) = (self.tensor(operand, &[rows, inner])?, self.tensor(operand, &[columns, inner])?);
        let (out, dx) = (self.tensor(stored, &[rows, columns])?, self.tensor(stored, &[rows, inner])?);
        let dout = self.tensor(gradient, &[rows, columns])?;
        let dweight = self.tensor(DType::F32, &[columns, inner])?;
        let (accumulate, rounding) = (false, Rounding::Nearest);
        let forward = Product::Linear { x: &x, weight: &weight, bias: None, out: &out, accumulate, compute };
        let of_input =
            Product::LinearBackwardInput { dout: &dout, weight: &weight, dx: &dx, accumulate, compute };
        let of_weight = Product::LinearBackwardWeight {
            dout: &dout,
            x: &x,
            dweight: &dweight,
            accumulate,
            rounding,
            compute,
        };
        let mut all = 0.0;
        for op in [forward, of_input, of_weight].map(Op::from) {
            let seconds = self.seconds(op)?;
            let flops = op.cost().matmul.map_or(0, |multiplied| multiplied.flops);
            self.keep(op.name(), (operand, &shape), seconds, flops);
            all += seconds;
        }
        Ok(all)
    }

    /// Attention forward and backward, in FLOP/s.
    fn attention(&mut self, dtype: DType) -> Result<f64, DeviceError> {
        let [batch, tokens, heads, head_dim] = [1, 1024, 8, 64];
        let shape = AttentionShape {
            batch,
            q_len: tokens,
            kv_len: tokens,
            kv_capacity: tokens,
            heads,
            kv_heads: heads,
            head_dim,
            scale: 0.125,
            window: None,
            block_sparse: None,
            soft_cap: None,
        };
        let compute = if dtype == DType::F32 { Compute::F32 } else { Compute::Bf16 };
        let wide = || self.tensor(dtype, &[tokens, heads * head_dim]);
        let (q, k, v, out) = (wide()?, wide()?, wide()?, wide()?);
        let (dout, dq, dk, dv) = (wide()?, wide()?, wide()?, wide()?);
        let per_row = || self.tensor(DType::F32, &[batch, heads, tokens]);
        let (lse, delta) = (per_row()?, per_row()?);
        let sums = match dtype {
            DType::F32 => None,
            _ => Some(self.tensor(DType::F32, &[3 * tokens * heads * head_dim])?),
        };
        let forward = Op::from(Attention::Forward {
            q: &q,
            k: &k,
            v: &v,
            documents: None,
            out: &out,
            lse: &lse,
            probabilities: None,
            shape,
            compute,
        });
        let backward = Op::from(Attention::Backward {
            q: &q,
            k: &k,
            v: &v,
            documents: None,
            out: &out,
            lse: &lse,
            probabilities: None,
            dout: &dout,
            delta: &delta,
            sums: sums.as_ref(),
            dq: &dq,
            dk: &dk,
            dv: &dv,
            shape,
            compute,
        });
        let (mut flops, mut time) = (0, 0.0);
        for op in [forward, backward] {
            let seconds = self.seconds(op)?;
            let own = op.cost().attention.map_or(0, |(_, flops)| flops);
            self.keep(op.name(), (dtype, &[batch, tokens, heads, head_dim]), seconds, own);
            (flops, time) = (flops + own, time + seconds);
        }
        Ok(flops as f64 / time)
    }

    /// Gated activations, in exps/s: what they take beyond the time of their memory.
    fn exps(&mut self, memory_bandwidth: f64) -> Result<f64, DeviceError> {
        let sizes = [1024, 1536];
        let [gate, up, out] = [(); 3].map(|()| self.tensor(DType::F32, &sizes));
        let (gate, up, out) = (gate?, up?, out?);
        let op = Op::from(Activation::Gated { gate: &gate, up: &up, out: &out, activation: Glu::Silu });
        let (seconds, cost) = (self.seconds(op)?, op.cost());
        self.keep(op.name(), (DType::F32, &sizes), seconds, cost.exps);
        // Where memory is all of it, exps take some of the time all the same.
        let own = (seconds - cost.bytes as f64 / memory_bandwidth).max(0.1 * seconds);
        Ok(cost.exps as f64 / own)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::THIN;

    #[test]
    fn everything_is_measured() {
        let pool = Arc::new(Pool::new(1, Cpu::SCRATCH_BYTES).unwrap());
        let found = Calibration::measure(&pool, Isa::detect()).unwrap();
        let rates = [
            found.matmul_f32,
            found.matmul_bf16,
            found.matmul_fp8,
            found.thin_f32,
            found.thin_bf16,
            found.attention_f32,
            found.attention_bf16,
            found.memory_bandwidth,
            found.exps,
        ];
        assert!(rates.iter().all(|rate| rate.is_finite() && *rate > 1e6), "{found:?}");
        assert!(found.seconds_per_operation > 0.0 && found.seconds_per_operation < 1.0);
        // Each shape has three products.
        let thin = |sample: &&Sample| sample.shape.len() == 3 && sample.shape.iter().any(|side| *side < THIN);
        assert_eq!(found.samples.iter().filter(thin).count(), 2 * 3 * THIN_PRODUCTS.len());
        assert!(found.samples.iter().all(|sample| sample.seconds > 0.0));
    }
}
