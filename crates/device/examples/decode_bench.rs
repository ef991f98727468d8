//! The time that attention of one token takes over caches of each type, layer after layer, as decoding does it.
//!
//! `cargo run --release -p plimsoll-device --example decode_bench [threads] [positions]`, for the heads of SmolLM2-135M
//! (9 queries, 3 keys, 64 wide, 30 layers). What is printed are the best and the median of several tokens.

use std::sync::Arc;
use std::time::Instant;

use plimsoll_device::cpu::{Isa, Pool};
use plimsoll_device::{
    Attention, AttentionShape, Compute, Cpu, DType, Device, DeviceError, DeviceExt, Tensor,
};
use plimsoll_memory::{Tag, usable_cores};

const LAYERS: usize = 30;
const HEADS: u64 = 9;
const KV_HEADS: u64 = 3;
const HEAD_DIM: u64 = 64;
const TOKENS: usize = 25;

fn main() -> Result<(), DeviceError> {
    let mut arguments = std::env::args().skip(1).map(|n| n.parse().ok());
    let threads = arguments.next().flatten();
    let positions = arguments.next().flatten().map_or(2048, |n: usize| n as u64);
    let pool = Pool::on_own_cores(threads.unwrap_or_else(usable_cores), Cpu::SCRATCH_BYTES)?;
    let cpu = Cpu::with_pool(Arc::new(pool), Isa::detect(), 1 << 30)?;
    println!("{} threads, {}, {positions} positions", cpu.threads(), cpu.isa());
    println!("{:6} {:>12} {:>12} {:>10} {:>9}", "cache", "best ms", "median ms", "MB", "best GB/s");
    for dtype in [DType::F32, DType::F16, DType::Bf16, DType::Q8_0, DType::Q4_0, DType::Q4_1] {
        let mut seconds = tokens(&cpu, dtype, positions)?;
        seconds.sort_by(f64::total_cmp);
        let row = KV_HEADS * dtype.cached_columns(HEAD_DIM) * dtype.block_bytes() / dtype.block_elements();
        let megabytes = (2 * LAYERS as u64 * positions * row) as f64 / 1e6;
        println!(
            "{:6} {:12.3} {:12.3} {megabytes:10.1} {:9.1}",
            dtype.name(),
            1e3 * seconds[0],
            1e3 * seconds[TOKENS / 2],
            megabytes / 1e3 / seconds[0]
        );
    }
    Ok(())
}

/// Seconds of each token.
fn tokens(cpu: &Cpu, dtype: DType, positions: u64) -> Result<Vec<f64>, DeviceError> {
    let alloc = |dtype, sizes: &[u64]| cpu.alloc(dtype, sizes, Tag::Workspace, "bench");
    let filled = |sizes: &[u64]| -> Result<Tensor, DeviceError> {
        let tensor = alloc(DType::F32, sizes)?;
        cpu.write(&tensor, &mut |bytes| {
            for (i, x) in bytes.chunks_exact_mut(4).enumerate() {
                let value = (i as u32).wrapping_mul(2_654_435_761) as f32 / u32::MAX as f32 - 0.5;
                x.copy_from_slice(&value.to_ne_bytes());
            }
        })?;
        Ok(tensor)
    };
    let x = filled(&[positions, KV_HEADS * HEAD_DIM])?;
    let mut caches = Vec::new();
    for _ in 0..2 * LAYERS {
        let cache = alloc(dtype, &[positions, KV_HEADS * dtype.cached_columns(HEAD_DIM)])?;
        cpu.run(Attention::WriteCache { x: &x, cache: &cache, first: 0, head_dim: HEAD_DIM })?;
        caches.push(cache);
    }
    let q = filled(&[1, HEADS * HEAD_DIM])?;
    let (out, lse) = (alloc(DType::F32, &[1, HEADS * HEAD_DIM])?, alloc(DType::F32, &[1, HEADS, 1])?);
    let shape = AttentionShape {
        batch: 1,
        q_len: 1,
        kv_len: positions,
        kv_capacity: positions,
        heads: HEADS,
        kv_heads: KV_HEADS,
        head_dim: HEAD_DIM,
        scale: 0.125,
        window: None,
        block_sparse: None,
        soft_cap: None,
    };
    (0..TOKENS)
        .map(|_| {
            let begun = Instant::now();
            for layer in caches.chunks_exact(2) {
                let (k, v) = (&layer[0], &layer[1]);
                let compute = Compute::F32;
                cpu.run(Attention::Forward {
                    q: &q,
                    k,
                    v,
                    documents: None,
                    out: &out,
                    lse: &lse,
                    probabilities: None,
                    shape,
                    compute,
                })?;
            }
            Ok(begun.elapsed().as_secs_f64())
        })
        .collect()
}
