//! What the tests of plans share.

use plimsoll_plan::{DiskRates, Machine, ProcessLimits, Rates, Wiring};

/// A machine without limits of its own, at made-up speeds: plans do not depend on where they are made.
pub fn machine() -> Machine {
    let rates = Rates {
        matmul_f32: 1e11,
        matmul_bf16: 1e11,
        memory_bandwidth: 1e10,
        exps: 1e9,
        disk: DiskRates::USUAL,
        wiring: Wiring::CPU,
    };
    let limits = ProcessLimits::NONE;
    Machine {
        rates,
        limits,
        overhead_bytes: 0,
        host_bytes_per_token: 32,
        disk_available: Some(1 << 40),
        device_bytes: None,
        host_bytes: None,
    }
}
