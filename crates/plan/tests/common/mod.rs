//! What the tests of plans share.

use plimsoll_plan::{Machine, ProcessLimits, Rates};

/// A machine without limits of its own, at made-up speeds: plans do not depend on where they are made.
pub fn machine() -> Machine {
    let rates = Rates::of_cpu([1e11, 1e11], 1e10, 1e9);
    let limits = ProcessLimits::NONE;
    Machine {
        rates,
        limits,
        overhead_bytes: 0,
        host_bytes_per_token: 32,
        worker_bytes: 0,
        disk_available: Some(1 << 40),
        disk_reserved: 0,
        device_bytes: None,
        host_bytes: None,
    }
}
