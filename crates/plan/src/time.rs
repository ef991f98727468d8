//! How long a step takes: its arithmetic and bytes against what the machine was measured to do.

use plimsoll_device::Tally;
use plimsoll_disk::Moved;
use serde::{Deserialize, Serialize};

/// What a machine does, as measured or as told.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rates {
    /// f32 matrix products, FLOP/s.
    pub matmul_f32: f64,
    /// bf16 matrix products, FLOP/s.
    pub matmul_bf16: f64,
    /// Memory, bytes/s.
    pub memory_bandwidth: f64,
    /// exp and the like, evaluations/s.
    pub exps: f64,
    /// The disk for offloaded tensors, bytes read and written in a second.
    pub disk: DiskRates,
}

/// What a disk does, in bytes/s.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct DiskRates {
    /// Read.
    pub read: f64,
    /// Written.
    pub write: f64,
}

impl DiskRates {
    /// A common NVMe disk's, for plans that are made for no disk in particular.
    pub const USUAL: DiskRates = DiskRates { read: 2e9, write: 1e9 };
}

/// Share of the product rate that attention reaches on its smaller tiles.
const ATTENTION_EFFICIENCY: f64 = 0.6;

/// Starting an operation and waiting for all threads takes about this long, whatever its size.
const SECONDS_PER_OPERATION: f64 = 3e-5;

/// An estimate.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct TimeEstimate {
    /// Seconds of one optimizer step, those of the disk included.
    pub step_seconds: f64,
    /// Seconds that the disk needs for what a step moves. Some of the I/O is hidden behind the computation; the time of a
    /// step counts as if none were.
    pub disk_seconds: f64,
    /// Tokens of a step over that time.
    pub tokens_per_second: f64,
    /// Floating-point operations of a step's matrix products and attention.
    pub flops_per_step: u64,
}

impl Rates {
    /// The time of a tally that handles `tokens` tokens and moves so much to and from the disk.
    pub fn estimate(&self, tally: &Tally, moved: Moved, tokens: u64) -> TimeEstimate {
        let product = |flops: u64, rate: f64| flops as f64 / rate.max(1.0);
        let matmul =
            product(tally.matmul_f32, self.matmul_f32) + product(tally.matmul_bf16, self.matmul_bf16);
        let attention = product(tally.attention_f32, self.matmul_f32 * ATTENTION_EFFICIENCY)
            + product(tally.attention_bf16, self.matmul_bf16 * ATTENTION_EFFICIENCY);
        // Products overlap their own traffic unless they are all traffic, as in decoding.
        let matmul = matmul.max(product(tally.matmul_bytes, self.memory_bandwidth));
        let rest = product(tally.bytes, self.memory_bandwidth) + product(tally.exps, self.exps);
        let starts = tally.operations as f64 * SECONDS_PER_OPERATION;
        let disk_seconds = product(moved.read, self.disk.read) + product(moved.written, self.disk.write);
        let step_seconds = matmul + attention + rest + starts + disk_seconds;
        TimeEstimate {
            step_seconds,
            disk_seconds,
            tokens_per_second: tokens as f64 / step_seconds.max(f64::MIN_POSITIVE),
            flops_per_step: tally.flops(),
        }
    }
}
