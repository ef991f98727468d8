//! What this machine does: the rates that the planner turns arithmetic into time with, measured in a few hundredths of a
//! second.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use super::matmul::{Operand, Output, matmul};
use super::{Isa, Pool};
use crate::{Compute, DType};

/// Rates of a machine, with all threads of a pool.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MachineRates {
    /// f32 matrix products, FLOP/s.
    pub matmul_f32: f64,
    /// bf16 matrix products, FLOP/s.
    pub matmul_bf16: f64,
    /// Memory read and written, bytes/s.
    pub memory_bandwidth: f64,
}

/// Size of the products: large enough to be past the start-up costs, small enough for the time.
const M: usize = 384;
const K: usize = 512;
const N: usize = 768;

/// Bytes updated in one measurement of the bandwidth: more than most caches hold, and less than a small job takes.
const COPY_BYTES: usize = 24 << 20;

/// The same where there is no room: what fits in a cache looks faster than memory is.
const LEAST_COPY_BYTES: usize = 4 << 20;

impl MachineRates {
    /// Room in which memory is measured and not a cache.
    pub const ROOM: u64 = 2 * COPY_BYTES as u64;

    /// Measures: the best of a few products of each precision, and of a few copies, in less memory where there is little
    /// `room`: products take 4 MiB in any case.
    pub fn measure(pool: &Pool, isa: Isa, room: u64) -> MachineRates {
        let half = usize::try_from(room / 2).unwrap_or(usize::MAX);
        MachineRates {
            matmul_f32: product_rate(pool, isa, Compute::F32),
            matmul_bf16: product_rate(pool, isa, Compute::Bf16),
            memory_bandwidth: copy_rate(pool, half.clamp(LEAST_COPY_BYTES, COPY_BYTES)),
        }
    }
}

fn best_of(times: usize, mut body: impl FnMut()) -> Duration {
    // The first one warms up.
    body();
    let time = |body: &mut dyn FnMut()| {
        let begun = Instant::now();
        body();
        begun.elapsed()
    };
    (0..times).map(|_| time(&mut body)).min().unwrap_or(Duration::MAX).max(Duration::from_nanos(1))
}

fn product_rate(pool: &Pool, isa: Isa, compute: Compute) -> f64 {
    let a = vec![1.0f32; M * K];
    let b = vec![1.0f32; N * K];
    let mut c = vec![0.0f32; M * N];
    let a = Operand {
        data: a.as_ptr().cast(),
        dtype: DType::F32,
        rows: M,
        columns: K,
        row_stride: K,
        column_stride: 1,
    };
    let b = Operand { data: b.as_ptr().cast(), rows: K, columns: N, row_stride: 1, column_stride: K, ..a };
    let (data, dtype) = (c.as_mut_ptr().cast(), DType::F32);
    let c = Output { data, dtype, rows: M, columns: N, row_stride: N, dither: None };
    let time = best_of(3, || {
        // SAFETY: the vectors have the sizes described and are three different ones.
        unsafe { matmul(pool, isa, compute, a, b, c, false) }
    });
    (2 * M * N * K) as f64 / time.as_secs_f64()
}

/// Reads and writes one buffer of `bytes` in place.
fn copy_rate(pool: &Pool, bytes: usize) -> f64 {
    let mut buffer = vec![1.0f32; bytes / 4];
    let pieces = 4 * pool.threads();
    let parts: Vec<Mutex<&mut [f32]>> =
        buffer.chunks_mut((bytes / 4).div_ceil(pieces)).map(Mutex::new).collect();
    let time = best_of(2, || {
        pool.run(parts.len(), &|piece, _| {
            if let Ok(mut part) = parts[piece].lock() {
                part.iter_mut().for_each(|value| *value = 0.5 + 0.5 * *value);
            }
        });
    });
    // Each byte is read once and written once.
    (2 * bytes) as f64 / time.as_secs_f64()
}
