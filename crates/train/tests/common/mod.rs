//! What the tests of runs share.

use plimsoll_plan::{DiskRates, Machine, ProcessLimits, Rates};

/// A machine without limits of its own, at made-up speeds: plans do not depend on where they are made.
pub fn machine() -> Machine {
    let rates = Rates {
        matmul_f32: 1e10,
        matmul_bf16: 1e10,
        memory_bandwidth: 1e10,
        exps: 1e8,
        disk: DiskRates::USUAL,
    };
    Machine {
        rates,
        limits: ProcessLimits::NONE,
        overhead_bytes: 0,
        host_bytes_per_token: 32,
        disk_available: None,
    }
}
