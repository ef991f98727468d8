//! `plimsoll calibrate`: measures this machine, for plans that are made here and for those that are made elsewhere.

use std::path::Path;

use plimsoll_device::cpu::{Effort, Sample};
use plimsoll_memory::ByteSize;
use plimsoll_plan::hardware::disk_space;
use plimsoll_plan::{DiskRates, MeasuredCpu, Rates, Spill, Target};
use serde_json::{Value, json};

use crate::args::CalibrateArgs;
use crate::failure::Failure;
use crate::output::{out, outln, write_file};
use crate::overhead::overhead_without_tokenizer;
use crate::row;
use crate::session::Engine;
use crate::table;
use crate::units::seconds;

pub fn run(args: &CalibrateArgs) -> Result<(), Failure> {
    // Before anything is measured, so that nobody waits for a file that cannot be written.
    let folders = [args.disk.as_deref(), args.output.as_deref().and_then(Path::parent)];
    for folder in folders.into_iter().flatten().filter(|folder| !folder.as_os_str().is_empty()) {
        if !folder.is_dir() {
            return Err(Failure::other(format!("{}: there is no such folder", folder.display())));
        }
    }
    let engine = Engine::start_measuring(args.threads, true)?;
    let speeds = engine.speeds();
    let Some(calibration) = &speeds.calibration else {
        return Err(Failure::other(format!(
            "there is too little memory to measure in: {} are needed",
            ByteSize(Effort::Thorough.room())
        )));
    };
    let disk = match &args.disk {
        Some(folder) => Some(speeds.measure_disk(folder).ok_or_else(|| {
            Failure::other(format!(
                "{}: no disk can be measured there; name a folder that you may write to",
                folder.display()
            ))
        })?),
        None => None,
    };
    let target = this_machine(&engine, args.disk.as_deref(), disk);
    if let Some(file) = &args.output {
        let text = target.to_yaml().map_err(Failure::other)?;
        let said = "# This machine, as plimsoll calibrate has measured it. plimsoll plan --hardware with this file plans for it anywhere.\n";
        write_file("the description of this machine", file, format!("{said}{text}").as_bytes())?;
    }
    if args.json {
        let samples: Vec<Value> = calibration.samples.iter().map(sample_json).collect();
        let document = json!({
            "rates": speeds.machine.rates,
            "disk": disk,
            "samples": samples,
            "hardware": target,
            "measured": speeds.json(None),
        });
        return outln!("{}", serde_json::to_string_pretty(&document)?);
    }
    let mut rows = vec![row!["operation", "type", "sizes", "time", "rate"]];
    rows.extend(calibration.samples.iter().map(sample_row));
    out!("{}\n{}", table::render(&rows), summary(&speeds.machine.rates, disk))?;
    outln!("{}", speeds.words(None))?;
    match &args.output {
        Some(file) => {
            outln!("{0}: plimsoll plan --hardware {0} plans for this machine anywhere", file.display())
        }
        None => Ok(()),
    }
}

/// This machine as plans elsewhere read it.
fn this_machine(engine: &Engine, folder: Option<&Path>, disk: Option<DiskRates>) -> Target {
    let hardware = &engine.hardware;
    let memory = hardware.memory.limit.or(hardware.memory.total).unwrap_or(ByteSize(0));
    let name = hardware.cpu.name.clone().unwrap_or_else(|| hardware.cpu.architecture.to_owned());
    let measured = MeasuredCpu {
        threads: engine.pool.threads(),
        units_for_bf16: Some(engine.narrow().is_some()),
        overhead: ByteSize(overhead_without_tokenizer(&engine.pool)),
        measured: engine.speeds().machine,
    };
    let size = folder.and_then(|folder| Some(disk_space(folder).ok()?.available));
    let spill = disk.zip(size).map(|(DiskRates { read, write }, size)| Spill { size, read, write });
    Target::of_cpu(&name, memory, measured, spill)
}

fn sample_json(sample: &Sample) -> Value {
    let Sample { operation, dtype, shape, seconds, rate } = sample;
    json!({ "operation": operation, "dtype": dtype.name(), "shape": shape, "seconds": seconds, "rate": rate })
}

fn sample_row(sample: &Sample) -> Vec<String> {
    let Sample { operation, dtype, shape, seconds: taken, rate } = sample;
    let sizes: Vec<String> = shape.iter().map(u64::to_string).collect();
    let rate = match *operation {
        "start" => String::new(),
        "add" => format!("{:.1} GB/s", rate / 1e9),
        "gated" => format!("{:.2} G exps/s", rate / 1e9),
        _ => format!("{:.0} GFLOP/s", rate / 1e9),
    };
    let taken = if *taken < 1e-3 { format!("{:.1} µs", 1e6 * taken) } else { seconds(*taken) };
    row![operation.replace('_', " "), dtype, sizes.join(" x "), taken, rate]
}

/// What plans go by.
fn summary(rates: &Rates, disk: Option<DiskRates>) -> String {
    let giga = |rate: f64| format!("{:.0}", rate / 1e9);
    let disk = disk.map_or(String::new(), |DiskRates { read, write }| {
        format!("disk             {:.2} GB/s read, {:.2} written\n", read / 1e9, write / 1e9)
    });
    format!(
        "matrix products  {} GFLOP/s in f32, {} in bf16, {} in fp8; thin ones {} and {}\n\
         attention        {} GFLOP/s in f32, {} in bf16\n\
         memory           {:.1} GB/s; {:.2} G exps/s, {:.1} G of 16-bit floats/s; {:.1} µs to start an operation\n{disk}",
        giga(rates.matmul_f32),
        giga(rates.matmul_bf16),
        giga(rates.matmul_fp8),
        giga(rates.thin_f32),
        giga(rates.thin_bf16),
        giga(rates.attention_f32),
        giga(rates.attention_bf16),
        rates.memory_bandwidth / 1e9,
        rates.exps / 1e9,
        rates.conversions / 1e9,
        1e6 * rates.seconds_per_operation,
    )
}
