//! `plimsoll doctor`: the machine, its limits, and how fast it is; and what a log of memory that ran out means.

mod log;

use serde_json::json;

use crate::args::DoctorArgs;
use crate::card;
use crate::failure::Failure;
use crate::output::outln;
use crate::session::{Engine, resident_bytes};

pub fn run(args: &DoctorArgs) -> Result<(), Failure> {
    if let Some(path) = &args.log {
        return log::run(args, path);
    }
    let engine = Engine::start_measuring(None, args.measure)?;
    let speeds = engine.speeds();
    let overhead = resident_bytes();
    if args.json {
        let document = json!({
            "hardware": engine.hardware,
            "kernels": engine.isa.to_string(),
            "threads": engine.pool.threads(),
            "rates": speeds.machine.rates,
            "measured": speeds.json(None),
            "overhead_bytes": overhead,
            "cuda": match card::described() {
                Ok(lines) => json!({ "found": lines, "missing": null }),
                Err(error) => json!({ "found": [], "missing": error.to_string() }),
            },
        });
        outln!("{}", serde_json::to_string_pretty(&document)?)?;
        return Ok(());
    }
    outln!("{}", engine.hardware)?;
    outln!("Kernels    {}, {} threads", engine.isa, engine.pool.threads())?;
    let rates = speeds.machine.rates;
    outln!(
        "Measured   matrix products {:.0} GFLOP/s in f32, {:.0} in bf16; memory {:.0} GB/s",
        rates.matmul_f32 / 1e9,
        rates.matmul_bf16 / 1e9,
        rates.memory_bandwidth / 1e9
    )?;
    outln!("{}", speeds.words(None))?;
    match card::described() {
        Ok(lines) => lines.iter().try_for_each(|line| outln!("CUDA       {line}"))?,
        Err(error) => outln!("CUDA       {error}")?,
    }
    outln!("Overhead   {} outside any arena", plimsoll_memory::ByteSize(overhead))?;
    Ok(())
}
