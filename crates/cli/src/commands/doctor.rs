//! `plimsoll doctor`: the machine, its limits, and how fast it is; under a launcher the ranks, each on its machine; and what a log of
//! memory that ran out means.

mod log;
mod mpi;
mod ranks;

use serde_json::json;

use crate::args::DoctorArgs;
use crate::card;
use crate::failure::Failure;
use crate::output::outln;
use crate::ranks::{Stopping, has_others, on_each};
use crate::session::{Engine, resident_bytes};
use mpi::Mpi;

pub fn run(args: &DoctorArgs) -> Result<(), Failure> {
    if let Some(path) = &args.log {
        return log::run(args, path);
    }
    // A program without MPI sees its own machine alone, however it was started.
    if has_others() && cfg!(feature = "mpi") && !args.measure {
        return on_each(Stopping::AtOnce, None, |communicator| ranks::run(args, communicator));
    }
    let engine = Engine::start_measuring(None, args.measure)?;
    let speeds = engine.speeds();
    let overhead = resident_bytes();
    let mpi = Mpi::of_this_machine();
    if args.json {
        let document = json!({
            "hardware": engine.hardware,
            "kernels": engine.isa.to_string(),
            "threads": engine.pool.threads(),
            "rates": speeds.machine.rates,
            "measured": speeds.json(None),
            "overhead_bytes": overhead,
            "mpi": mpi,
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
    let [library, mpirun] = mpi.lines();
    outln!("MPI        {library}\n           {mpirun}")?;
    outln!("Overhead   {} outside any arena", plimsoll_memory::ByteSize(overhead))?;
    Ok(())
}
