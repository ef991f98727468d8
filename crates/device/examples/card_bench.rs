//! What an NVIDIA card makes of the kernels: a line of JSON for each operation, with its time, arithmetic and bytes a second.
//!
//! `cargo run --release -p plimsoll-device --example card_bench [small]`. Times are medians of rounds, each of as many launches as take
//! long enough to be measured. `small` takes tiny shapes: with a driver library without a GPU, that shows that everything here runs.

use std::error::Error;
use std::sync::LazyLock;
use std::time::Instant;

use plimsoll_device::cuda::{Cuda, Driver, OpenCard};
use plimsoll_device::{
    Activation, Adam, Attention, AttentionShape, Compute, DType, Device, DeviceError, DeviceExt, Elementwise,
    Glu, Norm, Op, Product, Rounding, Rule, Tensor, Update,
};
use plimsoll_memory::{ByteSize, Tag, splitmix64};

const ROUNDS: usize = 7;
/// Seconds that a round takes at least.
const ROUND_SECONDS: f64 = 0.02;
/// Bytes of the largest shapes.
const ARENA: u64 = 6 << 30;

/// Random bytes of which no exponent is large.
static SOME: LazyLock<Vec<u8>> =
    LazyLock::new(|| (0..1 << 20).map(|place| (splitmix64(place, 0) >> 56) as u8 & 0xbf).collect());

fn main() -> Result<(), Box<dyn Error>> {
    let small = std::env::args().skip(1).any(|argument| argument == "small");
    let start = Instant::now();
    let card = OpenCard::new(&Driver::load()?, 0)?;
    let opened = start.elapsed().as_secs_f64();
    let (overhead, free) = (card.taken_bytes()?, card.free_bytes()?);
    let arena = if small { 64 << 20 } else { ARENA.min(free / 10 * 9) };
    let bench = Bench { cuda: Cuda::new(&card, arena)?, small };
    let name = &bench.cuda.card().name;
    eprintln!("{name}: {} taken by the context and the kernels", ByteSize(overhead));
    let about = serde_json::json!({
        "card": name, "overhead_bytes": overhead, "free_bytes": free, "opened_in_seconds": opened,
    });
    println!("{about}");
    // Of a 7B model with 2048 tokens: the attention's, the feed-forward part's, and a token alone.
    for [rows, inner, columns] in
        [[2048, 4096, 4096], [2048, 4096, 11_008], [2048, 11_008, 4096], [1, 4096, 4096]]
    {
        for (types, compute) in [
            ([DType::F32; 3], Compute::F32),
            ([DType::Bf16; 3], Compute::Bf16),
            ([DType::Bf16, DType::Q4K, DType::Bf16], Compute::Bf16),
            ([DType::Bf16, DType::F32, DType::Bf16], Compute::Bf16),
        ] {
            bench.products([rows, inner, columns], types, compute)?;
        }
    }
    // The head of a 1B model, whose gradients come in f32.
    bench.products([2048, 2048, 128_256], [DType::F32, DType::Bf16, DType::F32], Compute::Bf16)?;
    for (tokens, head_dim) in [(2048, 128), (8192, 128), (2048, 64)] {
        bench.attention(tokens, head_dim)?;
    }
    for dtype in [DType::F32, DType::Bf16] {
        bench.bound_by_memory(dtype, 8192, 4096)?;
    }
    Ok(())
}

struct Bench {
    cuda: Cuda,
    small: bool,
}

impl Bench {
    /// A size, or a small one.
    fn size(&self, size: u64) -> u64 {
        if self.small { size.div_ceil(64) } else { size }
    }

    fn tensor(&self, dtype: DType, sizes: &[u64]) -> Result<Tensor, DeviceError> {
        let tensor = self.cuda.alloc(dtype, sizes, Tag::Workspace, "bench")?;
        // Numbers that are small in f32, bf16 and f16, and codes of blocks with a scale: random bytes of which no exponent is large. Numbers
        // that are alike would take less power, and run faster than those of a model.
        self.cuda.write(&tensor, &mut |bytes| {
            for (number, some) in bytes.chunks_mut(SOME.len()).enumerate() {
                let start = number * 4096 % (SOME.len() - some.len() + 1);
                some.copy_from_slice(&SOME[start..start + some.len()]);
            }
        })?;
        Ok(tensor)
    }

    fn time<'a>(&self, name: &str, shape: &[u64], op: impl Into<Op<'a>>) -> Result<(), DeviceError> {
        let op = op.into();
        let launched = |times: u32| -> Result<f64, DeviceError> {
            let start = Instant::now();
            for _ in 0..times {
                self.cuda.run(op)?;
            }
            self.cuda.finish()?;
            Ok(start.elapsed().as_secs_f64())
        };
        launched(1)?;
        let once = launched(1)?;
        let times = if self.small { 1 } else { (ROUND_SECONDS / once.max(1e-6)).ceil() as u32 };
        let mut seconds = (0..ROUNDS)
            .map(|_| Ok(launched(times)? / f64::from(times)))
            .collect::<Result<Vec<f64>, DeviceError>>()?;
        seconds.sort_by(f64::total_cmp);
        let median = seconds[ROUNDS / 2];
        let cost = op.cost();
        let flops =
            cost.matmul.map_or(0, |matmul| matmul.flops) + cost.attention.map_or(0, |(_, flops)| flops);
        let mut line = serde_json::json!({
            "operation": name,
            "shape": shape,
            "seconds": median,
            "gigabytes_per_second": cost.bytes as f64 / median / 1e9,
        });
        if flops > 0 {
            line["teraflops"] = (flops as f64 / median / 1e12).into();
        }
        println!("{line}");
        Ok(())
    }

    /// A product with a weight of that type, and both of its gradients where the weight is none that is quantised.
    fn products(&self, shape: [u64; 3], types: [DType; 3], compute: Compute) -> Result<(), DeviceError> {
        let [rows, inner, columns] = if self.small { shape.map(|n| n.div_ceil(4096) * 256) } else { shape };
        let rows = if shape[0] == 1 { 1 } else { rows };
        let [of_x, of_weight, of_out] = types;
        let (x, out) = (self.tensor(of_x, &[rows, inner])?, self.tensor(of_out, &[rows, columns])?);
        let weight = self.tensor(of_weight, &[columns, inner])?;
        let (accumulate, shape) = (false, [rows, inner, columns]);
        let name = |what: &str| format!("{what} {of_x} x {of_weight}");
        let linear = Product::Linear { x: &x, weight: &weight, bias: None, out: &out, accumulate, compute };
        self.time(&name("linear"), &shape, linear)?;
        let (dout, dx) = (&out, &x);
        let input = Product::LinearBackwardInput { dout, weight: &weight, dx, accumulate, compute };
        self.time(&name("linear_backward_input"), &shape, input)?;
        if of_weight == of_x {
            let rounding = Rounding::Nearest;
            let weight = Product::LinearBackwardWeight {
                dout,
                x: &x,
                dweight: &weight,
                accumulate,
                rounding,
                compute,
            };
            self.time(&name("linear_backward_weight"), &shape, weight)?;
        }
        Ok(())
    }

    fn attention(&self, tokens: u64, head_dim: u64) -> Result<(), DeviceError> {
        let (tokens, heads, dtype) = (self.size(tokens), if self.small { 2 } else { 32 }, DType::Bf16);
        let scale = 1.0 / (head_dim as f32).sqrt();
        let shape = AttentionShape {
            batch: 1,
            q_len: tokens,
            kv_len: tokens,
            kv_capacity: tokens,
            heads,
            kv_heads: heads,
            head_dim,
            scale,
            window: None,
            block_sparse: None,
            soft_cap: None,
        };
        let rows = || self.tensor(dtype, &[tokens, heads * head_dim]);
        let statistics = || self.tensor(DType::F32, &[1, heads, tokens]);
        let (q, k, v, out, dout) = (rows()?, rows()?, rows()?, rows()?, rows()?);
        let (dq, dk, dv, lse, delta) = (rows()?, rows()?, rows()?, statistics()?, statistics()?);
        let sums = self.tensor(DType::F32, &[3 * tokens, heads * head_dim])?;
        let (q, k, v, out, lse) = (&q, &k, &v, &out, &lse);
        let (documents, probabilities, compute) = (None, None, Compute::Bf16);
        let sizes = [tokens, heads, head_dim];
        let forward = Attention::Forward { q, k, v, documents, out, lse, probabilities, shape, compute };
        self.time("attention bf16", &sizes, forward)?;
        let backward = Attention::Backward {
            q,
            k,
            v,
            documents,
            out,
            lse,
            probabilities,
            dout: &dout,
            delta: &delta,
            sums: Some(&sums),
            dq: &dq,
            dk: &dk,
            dv: &dv,
            shape,
            compute,
        };
        self.time("attention_backward bf16", &sizes, backward)
    }

    fn bound_by_memory(&self, dtype: DType, rows: u64, columns: u64) -> Result<(), DeviceError> {
        let (rows, columns) = (self.size(rows), self.size(columns));
        let sizes = [rows, columns];
        let [a, b, out] =
            [self.tensor(dtype, &sizes)?, self.tensor(dtype, &sizes)?, self.tensor(dtype, &sizes)?];
        let of = |name: &str| format!("{name} {dtype}");
        self.time(&of("add"), &sizes, Elementwise::Add { a: &a, b: &b, out: &out })?;
        let cast = Elementwise::Cast { x: &a, out: &b, rounding: Rounding::Nearest };
        self.time(&of("cast"), &sizes, cast)?;
        let (weight, rstd) = (self.tensor(dtype, &[columns])?, self.tensor(DType::F32, &[rows])?);
        let (weight_offset, epsilon) = (0.0, 1e-5);
        let norm = Norm::RmsNorm { x: &a, weight: &weight, weight_offset, epsilon, out: &out, rstd: &rstd };
        self.time(&of("rms_norm"), &sizes, norm)?;
        let gated = Activation::Gated { gate: &a, up: &b, out: &out, activation: Glu::Silu };
        self.time(&of("swiglu"), &sizes, gated)?;
        let [m, v] = [self.tensor(DType::F32, &sizes)?, self.tensor(DType::F32, &sizes)?];
        let hyper = Adam { lr: 1e-5, beta1: 0.9, beta2: 0.999, epsilon: 1e-8, weight_decay: 0.1, step: 10 };
        let step = Update {
            param: &a,
            master: None,
            grad: &b,
            grad_scale: None,
            rounding: Rounding::Nearest,
            rule: Rule::AdamW { m: &m, v: &v, hyper },
        };
        self.time(&of("adamw"), &sizes, step)
    }
}
