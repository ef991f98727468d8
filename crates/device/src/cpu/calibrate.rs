//! What this machine does, measured with the operations of a step: products by type and shape, attention, exps, 16-bit floats, memory,
//! and what it takes to start an operation.

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::{Duration, Instant};

use plimsoll_memory::Tag;

use super::{Cpu, Isa, Pool};
use crate::{
    Activation, Arithmetic, Attention, AttentionShape, Compute, DType, Device, DeviceError, DeviceExt,
    Elementwise, Glu, Multiplied, Op, Product, Rounding, Tensor,
};

/// How much is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effort {
    /// What most plans go by, in some tenths of a second, with so many bytes: as there are, from [`Effort::LEAST_ROOM`] on. Twice at
    /// least, and again while what was found before and now differs.
    Glance {
        /// Bytes.
        room: u64,
    },
    /// Everything, in some seconds.
    Thorough,
}

impl Effort {
    /// Bytes with which a glance sees the memory and not a cache.
    pub const ENOUGH_ROOM: u64 = 48 << 20;

    /// Bytes that a glance takes at least.
    pub const LEAST_ROOM: u64 = 12 << 20;

    /// Bytes that are measured with.
    pub fn room(self) -> u64 {
        match self {
            Effort::Glance { room } => room.clamp(Effort::LEAST_ROOM, Effort::ENOUGH_ROOM),
            Effort::Thorough => 96 << 20,
        }
    }

    /// Sides of products `[rows, inner]` times `[inner, columns]`: those of small models and a large one's.
    fn products(self) -> &'static [[u64; 3]] {
        match self {
            Effort::Glance { .. } => &[[384, 512, 768]],
            Effort::Thorough => {
                &[[512, 576, 1536], [1024, 1024, 1024], [1024, 1024, 4096], [1024, 4096, 1024]]
            }
        }
    }

    /// The same of LoRA's adapters.
    fn thin_products(self) -> &'static [[u64; 3]] {
        match self {
            Effort::Glance { .. } => &[[384, 512, 16]],
            Effort::Thorough => &[[1024, 1024, 16], [1024, 16, 1024]],
        }
    }

    /// Tokens of a sequence.
    fn tokens(self) -> u64 {
        match self {
            Effort::Glance { .. } => 512,
            Effort::Thorough => 1024,
        }
    }

    /// Elements of each of three f32 tensors that no common cache holds, where there is room.
    fn elements(self) -> u64 {
        match self {
            Effort::Glance { .. } => self.room() / 12,
            Effort::Thorough => 6 << 20,
        }
    }

    /// Each measurement is repeated for so long at least: somebody else may have a core for some milliseconds.
    fn least(self) -> Duration {
        match self {
            Effort::Glance { .. } => Duration::from_millis(2),
            Effort::Thorough => Duration::from_millis(40),
        }
    }

    /// How often all of it is measured, at least and at most: somebody else may have a core for a tenth of a second.
    fn passes(self) -> RangeInclusive<u32> {
        match self {
            Effort::Glance { .. } => 2..=4,
            Effort::Thorough => 1..=1,
        }
    }
}

/// Elements of a tensor that a cache holds.
const CACHED_ELEMENTS: u64 = 1 << 18;

/// Elements of a tensor that several threads share and that next to nothing is done with.
const FEW_ELEMENTS: u64 = 1 << 15;

/// Each measurement is the best of so many at least.
const TIMES: u32 = 3;

/// Times of an operation in two passes that differ by no more than this are the same.
const SAME: f64 = 1.15;

/// Share of an operation's time that is its own at least, whatever else of it was measured apart: caches and overlap make parts that
/// are more than the whole.
const OWN: f64 = 0.3;

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
    /// Products of 8-bit floats, FLOP/s; those of bf16 at a glance.
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
    /// exp and the like, evaluations/s, beside what their operations read and write.
    pub exps: f64,
    /// 16-bit floats read or written in a second, from and to a cache.
    pub conversions: f64,
    /// Seconds to start an operation; not measured at a glance, for threads that wait in between take longer.
    pub seconds_per_operation: Option<f64>,
    /// All measurements.
    pub samples: Vec<Sample>,
}

impl Calibration {
    /// Measures, with all threads of a pool.
    ///
    /// # Errors
    /// There is no memory for it.
    pub fn measure(pool: &Arc<Pool>, isa: Isa, effort: Effort) -> Result<Calibration, DeviceError> {
        let device = Cpu::with_pool(Arc::clone(pool), isa, effort.room())?;
        let mut bench = Bench { device, effort, samples: Vec::new(), least: Vec::new(), differs: false };
        let (mut pass, passes) = (1, effort.passes());
        loop {
            let found = Calibration::of_pass(&mut bench)?;
            if pass >= *passes.end() || pass >= *passes.start() && !bench.differs {
                return Ok(found);
            }
            pass += 1;
        }
    }

    /// Measures everything once; of what was measured before, the best.
    fn of_pass(bench: &mut Bench) -> Result<Calibration, DeviceError> {
        let effort = bench.effort;
        (bench.samples, bench.differs) = (Vec::new(), false);
        let memory_bandwidth = bench.sums(DType::F32, effort.elements())?.1;
        let conversions = bench.conversions()?;
        let exps = bench.exps(conversions)?;
        let rest = Rest { memory_bandwidth, exps };
        let (products, thin) = (effort.products(), effort.thin_products());
        let matmul_bf16 = bench.products(Arithmetic::Half, products)?;
        let (matmul_fp8, seconds_per_operation) = match effort {
            Effort::Glance { .. } => (matmul_bf16, None),
            Effort::Thorough => (bench.products(Arithmetic::Fp8, products)?, Some(bench.start()?)),
        };
        Ok(Calibration {
            matmul_f32: bench.products(Arithmetic::F32, products)?,
            matmul_bf16,
            matmul_fp8,
            thin_f32: bench.products(Arithmetic::F32, thin)?,
            thin_bf16: bench.products(Arithmetic::Half, thin)?,
            attention_f32: bench.attention(DType::F32, rest)?,
            attention_bf16: bench.attention(DType::Bf16, rest)?,
            memory_bandwidth,
            exps,
            conversions,
            seconds_per_operation,
            samples: std::mem::take(&mut bench.samples),
        })
    }
}

/// What measures.
struct Bench {
    device: Cpu,
    effort: Effort,
    samples: Vec<Sample>,
    /// Seconds of each operation in the best pass so far, in the order of a pass.
    least: Vec<f64>,
    /// Whether an operation took another time in this pass than in the best before it.
    differs: bool,
}

/// Speeds of what operations do beside multiplying.
#[derive(Clone, Copy)]
struct Rest {
    memory_bandwidth: f64,
    exps: f64,
}

impl Bench {
    fn tensor(&self, dtype: DType, sizes: &[u64]) -> Result<Tensor, DeviceError> {
        let tensor = self.device.alloc(dtype, sizes, Tag::Workspace, "calibration")?;
        if dtype == DType::F32 || dtype == DType::Bf16 {
            self.device.run(Elementwise::Fill { out: &tensor, value: 0.5 })?;
        }
        Ok(tensor)
    }

    /// The best of some times, behind one that warms up, and of the same in other passes. What is measured is kept as a sample.
    fn seconds<'a>(&mut self, op: impl Into<Op<'a>> + Copy) -> Result<f64, DeviceError> {
        self.device.run(op)?;
        let (first, mut best, mut times) = (Instant::now(), f64::INFINITY, 0);
        while times < TIMES || first.elapsed() < self.effort.least() {
            let begun = Instant::now();
            self.device.run(op)?;
            best = best.min(begun.elapsed().as_secs_f64());
            times += 1;
        }
        let seconds = best.max(1e-9);
        // Each operation is kept before the next one.
        match self.least.get_mut(self.samples.len()) {
            Some(least) => {
                self.differs |= seconds > SAME * *least || *least > SAME * seconds;
                *least = least.min(seconds);
                Ok(*least)
            }
            None => {
                self.least.push(seconds);
                Ok(seconds)
            }
        }
    }

    fn keep(&mut self, operation: &'static str, (dtype, shape): (DType, &[u64]), seconds: f64, work: u64) {
        let rate = work as f64 / seconds;
        self.samples.push(Sample { operation, dtype, shape: shape.to_vec(), seconds, rate });
    }

    /// Seconds of a sum of so many elements, and the bytes that it moves in a second.
    fn sums(&mut self, dtype: DType, elements: u64) -> Result<(f64, f64), DeviceError> {
        let [a, b, out] = [(); 3].map(|()| self.tensor(dtype, &[elements]));
        let (a, b, out) = (a?, b?, out?);
        let op = Op::from(Elementwise::Add { a: &a, b: &b, out: &out });
        let (seconds, bytes) = (self.seconds(op)?, op.cost().bytes);
        self.keep(op.name(), (dtype, &[elements]), seconds, bytes);
        Ok((seconds, bytes as f64 / seconds))
    }

    /// 16-bit floats that are read or written in a second: those of a sum.
    fn conversions(&mut self) -> Result<f64, DeviceError> {
        let (seconds, _) = self.sums(DType::Bf16, CACHED_ELEMENTS)?;
        Ok((3 * CACHED_ELEMENTS) as f64 / seconds)
    }

    /// Seconds to start an operation: those of a short one.
    fn start(&mut self) -> Result<f64, DeviceError> {
        let x = self.tensor(DType::F32, &[FEW_ELEMENTS])?;
        let op = Op::from(Elementwise::Scale { x: &x, factor: 1.0 });
        let seconds = self.seconds(op)?;
        self.keep("start", (DType::F32, &[FEW_ELEMENTS]), seconds, 1);
        Ok(seconds)
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

    /// Attention forward and backward, in FLOP/s beside its exps and its memory.
    fn attention(&mut self, dtype: DType, rest: Rest) -> Result<f64, DeviceError> {
        let [batch, tokens, heads, head_dim] = [1, self.effort.tokens(), 8, 64];
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
            let (seconds, cost) = (self.seconds(op)?, op.cost());
            let own = cost.attention.map_or(0, |(_, flops)| flops);
            self.keep(op.name(), (dtype, &[batch, tokens, heads, head_dim]), seconds, own);
            let apart = cost.bytes as f64 / rest.memory_bandwidth + cost.exps as f64 / rest.exps;
            (flops, time) = (flops + own, time + (seconds - apart).max(OWN * seconds));
        }
        Ok(flops as f64 / time)
    }

    /// Gated activations in a cache, in exps/s: what they take beyond the time of their 16-bit floats.
    fn exps(&mut self, conversions: f64) -> Result<f64, DeviceError> {
        let sizes = [256, 1024];
        let [gate, up, out] = [(); 3].map(|()| self.tensor(DType::Bf16, &sizes));
        let (gate, up, out) = (gate?, up?, out?);
        let op = Op::from(Activation::Gated { gate: &gate, up: &up, out: &out, activation: Glu::Silu });
        let (seconds, cost) = (self.seconds(op)?, op.cost());
        self.keep(op.name(), (DType::Bf16, &sizes), seconds, cost.exps);
        let own = (seconds - cost.conversions as f64 / conversions).max(OWN * seconds);
        Ok(cost.exps as f64 / own)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::THIN;

    fn measured(effort: Effort) -> Calibration {
        let pool = Arc::new(Pool::new(1, Cpu::SCRATCH_BYTES).unwrap());
        let found = Calibration::measure(&pool, Isa::detect(), effort).unwrap();
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
            found.conversions,
        ];
        assert!(rates.iter().all(|rate| rate.is_finite() && *rate > 1e6), "{found:?}");
        // Each shape has three products.
        let thin = |sample: &&Sample| sample.shape.len() == 3 && sample.shape.iter().any(|side| *side < THIN);
        assert_eq!(found.samples.iter().filter(thin).count(), 2 * 3 * effort.thin_products().len());
        assert!(found.samples.iter().all(|sample| sample.seconds > 0.0));
        found
    }

    #[test]
    fn everything_is_measured() {
        let start = measured(Effort::Thorough).seconds_per_operation.unwrap();
        assert!(start > 0.0 && start < 1.0);
    }

    #[test]
    fn a_glance_takes_the_room_that_there_is() {
        assert_eq!(measured(Effort::Glance { room: u64::MAX }).seconds_per_operation, None);
        assert_eq!(Effort::Glance { room: 20 << 20 }.room(), 20 << 20);
        measured(Effort::Glance { room: 0 });
    }
}
