//! What the tests of runs share.

use plimsoll_device::{Cpu, CpuOptions, Device, DeviceError};
use plimsoll_plan::{Machine, ProcessLimits, Rates};

/// The device of a run: this machine's processor with an arena of so many bytes.
pub fn cpu<'d>(bytes: u64) -> Result<Box<dyn Device + 'd>, DeviceError> {
    Ok(Box::new(Cpu::new(bytes, CpuOptions::default())?))
}

/// A machine without limits of its own, at made-up speeds: plans do not depend on where they are made.
pub fn machine() -> Machine {
    let rates = Rates::of_cpu([1e10, 1e10], 1e10, 1e8);
    Machine {
        rates,
        limits: ProcessLimits::NONE,
        overhead_bytes: 0,
        host_bytes_per_token: 24,
        worker_bytes: plimsoll_plan::Machine::WORKER_BYTES,
        disk_available: None,
        disk_reserved: 0,
        device_bytes: None,
        host_bytes: None,
    }
}
