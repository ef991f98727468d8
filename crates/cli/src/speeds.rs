//! How fast this machine and its disks are, measured once and kept in the user's cache folder. So a plan depends on the
//! machine and not on how busy the machine was.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use plimsoll_device::cpu::{Calibration, Effort, Isa, Pool};
use plimsoll_disk::EngineSettings;
use plimsoll_plan::hardware::{Cpu, disk_space};
use plimsoll_plan::{DiskName, DiskRates, MachineName, Measured, Rates, RatesFile, Target, TrainingPlan};
use serde_json::{Value, json};

use crate::session::Engine;
use crate::units;

/// A CPU of which nothing is known.
const UNKNOWN: Rates = Rates::of_cpu([1e11, 1e11], 1e10, 1e9);

/// Bytes that are written and read to find out how fast a disk is: some hundredths of a second.
const DISK_SAMPLE: u64 = 32 << 20;

/// The command that measures again.
pub const MEASURE_AGAIN: &str = "plimsoll doctor --measure";

/// From this age on a measurement is called old: machines get other memory, other firmware, other neighbours.
const OLD_DAYS: u64 = 90;

/// The speeds of this machine, and the file that they are kept in.
pub struct Speeds {
    file: Option<RatesFile>,
    cpu: Cpu,
    /// What its kernels do.
    pub machine: Measured<Rates>,
    /// All that was measured, where that was asked for.
    pub calibration: Option<Calibration>,
    /// Why the last measurement could not be kept.
    not_kept: Option<String>,
}

impl Speeds {
    /// The speeds of this machine: measured at a glance where they are unknown, and thoroughly where `again` asks for it. A measurement
    /// that has less `room` than it takes counts for this run alone and is not kept.
    pub fn of(cpu: &Cpu, (pool, isa): (&Arc<Pool>, Isa), again: bool, room: u64) -> Speeds {
        let file = RatesFile::from_variables(&|key| std::env::var_os(key));
        let name = MachineName::of(cpu, pool.threads(), isa.to_string());
        let known = file.as_ref().filter(|_| !again).and_then(|file| file.machine(&name));
        let thorough = again && room >= Effort::Thorough.room();
        let calibration = thorough.then(|| Calibration::measure(pool, isa, Effort::Thorough).ok()).flatten();
        let found = || calibration.as_ref().map_or_else(|| at_a_glance(pool, isa, room), rates);
        let measured = known.unwrap_or_else(|| Measured::now(found()));
        let mut speeds = Speeds { file, cpu: cpu.clone(), machine: measured, calibration, not_kept: None };
        if known.is_none() && room < Effort::ENOUGH_ROOM {
            speeds.not_kept = Some("there was little memory to measure in".to_owned());
        } else if known.is_none() {
            speeds.keep(|file| file.keep_machine(name, measured));
        }
        if again {
            speeds.keep(|file| file.forget_disks(cpu));
        }
        speeds
    }

    fn keep(&mut self, write: impl FnOnce(&RatesFile) -> std::io::Result<()>) {
        self.not_kept = match &self.file {
            Some(file) => {
                write(file).err().map(|error| format!("{} cannot be written: {error}", file.path().display()))
            }
            None => Some("neither XDG_CACHE_HOME nor HOME is set".to_owned()),
        };
    }

    /// What is known of the disk that holds a folder, which need not exist yet.
    pub fn disk(&self, folder: &Path) -> Option<Measured<DiskRates>> {
        self.file.as_ref()?.disk(&self.disk_name(folder)?)
    }

    /// Measures that disk, and keeps what was found; `None` where it cannot be measured.
    pub fn measure_disk(&self, folder: &Path) -> Option<DiskRates> {
        let there = existing(folder)?;
        let speed = plimsoll_disk::measure(&there, DISK_SAMPLE, EngineSettings::default(), true).ok()?;
        let rates = DiskRates { read: speed.read_rate(), write: speed.write_rate() };
        if let (Some(file), Some(name)) = (&self.file, self.disk_name(folder)) {
            // What cannot be kept is measured again the next time.
            let _ = file.keep_disk(name, Measured::now(rates));
        }
        Some(rates)
    }

    fn disk_name(&self, folder: &Path) -> Option<DiskName> {
        DiskName::of(&self.cpu, &existing(folder)?)
    }

    /// Where the speeds of a plan come from and how old they are; `folder` is that of its tensors on disk, if it has any.
    pub fn words(&self, folder: Option<&Path>) -> String {
        let machine = self.machine.age().as_secs();
        let disk = folder.map(|folder| self.disk(folder).map_or(0, |disk| disk.age().as_secs()));
        let disk_words =
            disk.map_or(String::new(), |seconds| format!(" (its disk's {})", units::ago(seconds)));
        let old = machine.max(disk.unwrap_or(0)) / (24 * 3600) >= OLD_DAYS;
        let kept = match (&self.not_kept, &self.file) {
            (Some(reason), _) => format!(", not kept: {reason}"),
            (None, Some(file)) => format!(", kept in {}", file.path().display()),
            (None, None) => String::new(),
        };
        let again = match old {
            true => format!("they are old: {MEASURE_AGAIN} measures them anew"),
            false => format!("{MEASURE_AGAIN} measures them again"),
        };
        format!("this machine's speeds were measured {}{disk_words}{kept};\n{again}", units::ago(machine))
    }

    /// The same for machines.
    pub fn json(&self, folder: Option<&Path>) -> Value {
        json!({
            "machine": self.machine,
            "disk": folder.and_then(|folder| self.disk(folder)),
            "file": self.file.as_ref().map(RatesFile::path),
        })
    }
}

/// What is found in a moment; a machine like any other where there is no memory to measure in.
fn at_a_glance(pool: &Arc<Pool>, isa: Isa, room: u64) -> Rates {
    Calibration::measure(pool, isa, Effort::Glance { room })
        .map_or(UNKNOWN, |calibration| rates(&calibration))
}

fn rates(calibration: &Calibration) -> Rates {
    let Calibration { matmul_f32, matmul_bf16, memory_bandwidth, exps, .. } = *calibration;
    let usual = Rates::of_cpu([matmul_f32, matmul_bf16], memory_bandwidth, exps);
    Rates {
        matmul_fp8: calibration.matmul_fp8,
        thin_f32: calibration.thin_f32,
        thin_bf16: calibration.thin_bf16,
        attention_f32: calibration.attention_f32,
        attention_bf16: calibration.attention_bf16,
        conversions: calibration.conversions,
        seconds_per_operation: calibration.seconds_per_operation.unwrap_or(usual.seconds_per_operation),
        ..usual
    }
}

/// The folder, or the nearest above it that exists.
fn existing(folder: &Path) -> Option<PathBuf> {
    disk_space(folder).ok().map(|space| space.folder)
}

/// Whose speeds a plan's time is made of.
pub struct PlanSpeeds {
    /// Where they are found.
    whose: String,
    /// Where they come from and how old they are.
    pub words: String,
    pub json: Value,
}

impl PlanSpeeds {
    /// Those of a plan for this machine.
    pub fn here(engine: &Engine, plan: &TrainingPlan) -> PlanSpeeds {
        if let Some(card) = &engine.card {
            return PlanSpeeds {
                whose: format!("on {}", card.card().name),
                words: "shares of what the vendor states, or of what a card of this size has; steps were timed on an\n\
                        H200 alone: on another card the time is the plan's claim"
                    .to_owned(),
                json: json!({ "machine": null, "disk": null, "file": null }),
            };
        }
        let uses_disk = plan.disk_bytes() > 0 && plan.machine.disk_available.is_some();
        PlanSpeeds::of(engine, uses_disk.then(|| plan.config.disk_path()).as_deref(), false)
    }

    /// Those of a plan for this machine, or for one of which nothing but its memory is known; `folder` is on the disk that the plan uses.
    pub fn of(engine: &Engine, folder: Option<&Path>, elsewhere: bool) -> PlanSpeeds {
        let cpu = &engine.hardware.cpu;
        let (name, threads) = (cpu.name.as_deref().unwrap_or(cpu.architecture), engine.pool.threads());
        let shared = match engine.ranks() {
            1 => String::new(),
            ranks => format!(" for each of {ranks} ranks, which share cores and memory"),
        };
        let cpu = format!("{name}, {threads} thread{}{shared}", if threads == 1 { "" } else { "s" });
        PlanSpeeds {
            whose: match elsewhere {
                false => format!("on this machine's CPU ({cpu})"),
                true => format!(
                    "at the speed of this machine's CPU ({cpu}):\nthe machine that the plan is for has another"
                ),
            },
            words: engine.speeds().words(folder),
            json: engine.speeds().json(folder),
        }
    }

    /// Those of a machine of the catalogue.
    pub fn of_catalogue(target: &Target) -> PlanSpeeds {
        let mut words = match &target.device.cpu {
            Some(_) => "its speeds are those that plimsoll calibrate measured there".to_owned(),
            None => "shares of what the vendor states, as measured elsewhere (plimsoll hardware shows the figures);\n\
                     steps were timed on an H200 alone: what the step takes on another GPU is the plan's claim"
                .to_owned(),
        };
        if target.disk.is_none() {
            words.push_str("\na disk of 2 GB/s read and 1 GB/s written, of any size, is assumed");
        }
        PlanSpeeds {
            whose: format!("on {}", target.title),
            words,
            json: json!({ "machine": null, "disk": null, "file": null }),
        }
    }

    /// What a rate is followed by.
    pub fn place(&self) -> &str {
        &self.whose
    }
}
