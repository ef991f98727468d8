//! What several commands begin with: the configuration, the machine, a device of the planned size.

use std::cell::OnceCell;
use std::sync::Arc;

use plimsoll_device::cpu::{Isa, Pool};
use plimsoll_device::cuda::OpenCard;
use plimsoll_device::{Cpu, Cuda, DType, Device, DeviceError, DeviceTraits};
use plimsoll_memory::{ByteSize, release_free_heap};
use plimsoll_parallel::Communicator;
use plimsoll_plan::config::{Imported, Override, RawConfig, Started};
use plimsoll_plan::hardware::{Hardware, disk_space, on_one_disk, process_memory};
use plimsoll_plan::{
    Apart, DiskRates, DryRun, LoadLine, Machine, ProcessLimits, Rates, TrainingPlan, Wiring,
};
use plimsoll_step::{Linears, Precision};

use crate::args::ConfigSource;
use crate::card::{self, DeviceArgs};
use crate::failure::Failure;
use crate::load_line::kept_so_far;
use crate::output::errln;
use crate::overhead::{Progress, measured_bytes, overhead_bytes};
use crate::ranks;
use crate::speeds::Speeds;

/// The configuration of a command line: the file, then the flags, then every `--set`.
pub fn load_config(source: &ConfigSource) -> Result<RawConfig, Failure> {
    load_config_with(source, &[])
}

/// The same of a run on these ranks.
pub fn load_config_on(
    source: &ConfigSource,
    imported: &[Override],
    started: Started,
) -> Result<RawConfig, Failure> {
    Ok(read_config(source, imported, &[])?.on_ranks(started)?)
}

/// The same with further flags: the key that each sets, its name, and its value if it was given.
pub fn load_config_with(
    source: &ConfigSource,
    further: &[(&str, &str, &Option<String>)],
) -> Result<RawConfig, Failure> {
    load_config_over(source, &[], further)
}

/// The same over what a file of another program says.
pub fn load_config_over(
    source: &ConfigSource,
    imported: &[Override],
    further: &[(&str, &str, &Option<String>)],
) -> Result<RawConfig, Failure> {
    let config = read_config(source, imported, further)?;
    config.validate()?;
    Ok(config)
}

/// What was written, whether it can be run or not: for whoever adds to it.
pub fn written_config(source: &ConfigSource) -> Result<RawConfig, Failure> {
    read_config(source, &[], &[])
}

/// The file of a command line, where it is a configuration of the Ava framework, which is read as ours are.
fn foreign(source: &ConfigSource) -> Result<Option<Imported>, Failure> {
    match &source.config {
        Some(path) => Ok(Imported::read_as_ours(path)?),
        None => Ok(None),
    }
}

/// What of such a file has no meaning here, each key with a reason; nothing where the file is ours.
pub fn answers(source: &ConfigSource) -> Result<String, Failure> {
    let Some(Imported { left, .. }) = foreign(source)? else { return Ok(String::new()) };
    let mut text = "a configuration of the Ava framework; what has no meaning here:\n".to_owned();
    left.iter().for_each(|one| text.push_str(&format!("  {one}\n")));
    Ok(text + "\n")
}

/// What was written, each value read by itself.
fn read_config(
    source: &ConfigSource,
    imported: &[Override],
    further: &[(&str, &str, &Option<String>)],
) -> Result<RawConfig, Failure> {
    let foreign = foreign(source)?;
    let mut overrides = imported.to_vec();
    overrides.extend(foreign.iter().flat_map(|foreign| foreign.overrides.clone()));
    for (key, flag, value) in [
        ("model.path", "--model", &source.model),
        ("training.batch_size", "--batch-size", &source.batch_size),
        ("data.sequence_length", "--sequence-length", &source.sequence_length),
        ("memory.device_budget", "--memory", &source.memory),
        ("training.mixed_precision", "--mixed-precision", &source.mixed_precision),
        ("training.gradient_checkpointing", "--gradient-checkpointing", &source.gradient_checkpointing),
    ]
    .iter()
    .chain(further)
    {
        if let Some(value) = value {
            let argument = format!("{flag} {value}");
            // The name of a folder is one, whatever it would be in YAML.
            let value = match *key {
                "model.path" => serde_json::to_string(value)?,
                _ => value.clone(),
            };
            overrides.push(Override { key: (*key).to_owned(), value, argument });
        }
    }
    for assignment in &source.set {
        overrides.push(Override::set(assignment)?);
    }
    match source.config.as_ref().filter(|_| foreign.is_none()) {
        Some(path) => Ok(RawConfig::from_file_with(path, &overrides)?),
        None => Ok(RawConfig::of_command_line(&overrides)?),
    }
}

/// More threads than any machine has cores for one process.
const MOST_THREADS: usize = 1024;

/// The threads and kernels of this machine, and what it can do.
pub struct Engine {
    pub hardware: Hardware,
    pub pool: Arc<Pool>,
    pub isa: Isa,
    /// The card that computes, if it is not the CPU.
    pub card: Option<Arc<OpenCard>>,
    /// Whether that reaches those of other ranks without the hosts.
    linked: bool,
    /// All ranks there are.
    all_ranks: u32,
    /// Ranks that share the machine's memory and disk, this one among them.
    ranks: u32,
    /// Those of them that are in its control group.
    of_group: u32,
    /// Whether the ranks are to come: this process plans for them and is none of them.
    ahead: bool,
    /// Whether the machine is measured although it was before.
    again: bool,
    speeds: OnceCell<Speeds>,
}

impl Engine {
    /// Starts the pool.
    pub fn start(threads: Option<usize>) -> Result<Engine, Failure> {
        Engine::start_measuring(threads, false)
    }

    /// The same; `again` measures the machine even if it was measured before.
    pub fn start_measuring(threads: Option<usize>, again: bool) -> Result<Engine, Failure> {
        let hardware = Hardware::detect();
        let isa = Isa::detect();
        let threads = threads.unwrap_or(hardware.cpu.threads.min(MOST_THREADS));
        if threads == 0 {
            return Err(Failure::usage("--threads must be at least 1"));
        }
        if threads > MOST_THREADS {
            return Err(Failure::usage(format!(
                "--threads is {threads}; at most {MOST_THREADS} can be used"
            )));
        }
        let pool =
            Pool::on_own_cores(threads, Cpu::SCRATCH_BYTES).map_err(|e| Failure::other(e.to_string()))?;
        Ok(Engine {
            hardware,
            pool: Arc::new(pool),
            isa,
            card: None,
            linked: false,
            all_ranks: 1,
            ranks: 1,
            of_group: 1,
            ahead: false,
            again,
            speeds: OnceCell::new(),
        })
    }

    /// The engine of a rank, with a card if one is to compute: the ranks of this machine share what it has.
    pub fn of_rank(
        ranks: &dyn Communicator,
        threads: Option<usize>,
        device: DeviceArgs,
    ) -> Result<Engine, Failure> {
        let engine = Engine::start(threads)?;
        let group = engine.hardware.memory.container.as_ref().map(|limit| limit.file.clone());
        let (here, of_group) = (ranks::of_this_machine(ranks)?, ranks::of_this_group(ranks, group)?);
        if let Some(note) = ranks::note_of_binding(ranks, here, &engine.hardware.cpu, threads)? {
            errln!("note: {note}");
        }
        let opened = card::open(device, ranks)?;
        let (card, linked) = opened.map_or((None, false), |opened| (Some(opened.card), opened.linked));
        Ok(Engine { card, linked, all_ranks: ranks.size(), ranks: here, of_group, ..engine })
    }

    /// One like that of each of so many ranks that are to share this machine: with its share of the cores.
    pub fn for_ranks(ranks: u32) -> Result<Engine, Failure> {
        let share = |cores: usize| (cores / ranks.max(1) as usize).max(1);
        let threads = (ranks > 1).then(|| share(Hardware::detect().cpu.threads.min(MOST_THREADS)));
        Ok(Engine { ranks, of_group: ranks, ahead: true, ..Engine::start(threads)? })
    }

    /// Ranks that share this machine.
    pub fn ranks(&self) -> u32 {
        self.ranks
    }

    /// What this machine has free, for all ranks on it; `None` of a card, and where nobody knows.
    pub fn free_bytes(&self) -> Option<u64> {
        let all = ProcessLimits::detect().available.filter(|_| self.card.is_none())?;
        Some(all.saturating_sub(resident_bytes()))
    }

    /// What a rank may take of this machine.
    fn limits(&self) -> ProcessLimits {
        let own = if self.ahead { 0 } else { resident_bytes() };
        ProcessLimits::detect().shared_by(self.ranks, self.of_group, own)
    }

    /// Host memory that a tier below a card may take, or this rank's share of it.
    pub fn host_room(&self) -> u64 {
        card::host_room(self.limits(), self.overhead_bytes())
    }

    /// What a plan for a card has to know beside its memory; `None` of the CPU.
    pub fn apart(&self) -> Option<Apart> {
        self.card.as_ref().map(|_| Apart { device: DeviceTraits::CUDA, host_room: self.host_room() })
    }

    /// What this machine can do. It is measured if it never was.
    pub fn speeds(&self) -> &Speeds {
        self.speeds_within(u64::MAX)
    }

    /// The same, measured in about `room` bytes at most.
    fn speeds_within(&self, room: u64) -> &Speeds {
        self.speeds.get_or_init(|| Speeds::of(&self.hardware.cpu, (&self.pool, self.isa), self.again, room))
    }

    /// The 16-bit type that this machine has units for, whatever it was measured to do.
    pub fn narrow(&self) -> Option<DType> {
        (self.isa >= Isa::Amx).then_some(DType::Bf16)
    }

    /// What the planner needs to know to plan a model with so many tokens. What planning itself holds without need is given back.
    pub fn machine(&self, config: &RawConfig, tokens: u64, progress: Progress) -> Machine {
        release_free_heap();
        let limits = self.limits();
        let line = limits.load_line(config.memory.device_budget().set().map(|size| size.0));
        let speeds = self.speeds_within(line.bytes.saturating_sub(resident_bytes()));
        let disk = speeds.disk(&config.disk_path()).map_or(DiskRates::USUAL, |disk| disk.rates);
        Machine {
            rates: Rates {
                disk,
                wiring: Wiring { narrow: self.narrow(), ..Wiring::CPU },
                ..speeds.machine.rates
            },
            limits,
            overhead_bytes: overhead_bytes(&self.pool, tokens, progress, self.ranks.max(self.all_ranks) > 1),
            host_bytes_per_token: plimsoll_train::host_bytes_per_token(config),
            worker_bytes: Machine::WORKER_BYTES,
            disk_available: disk_space(&config.disk_path())
                .ok()
                .map(|space| space.available.0 / u64::from(self.ranks.max(1))),
            disk_reserved: 0,
            device_bytes: None,
            host_bytes: None,
        }
    }

    /// The same of what computes: the card, if there is one, with this machine as its host.
    ///
    /// # Errors
    /// The card does not say what is free.
    pub fn machine_that_computes(&self, config: &RawConfig, tokens: u64) -> Result<Machine, Failure> {
        match &self.card {
            None => Ok(self.machine(config, tokens, Progress::Ready)),
            Some(card) => {
                let host = self.host_room();
                let machine = self.machine(config, tokens, Progress::Ready);
                Ok(Machine {
                    rates: card::rates(card, machine.rates.disk, self.linked, [self.ranks, self.all_ranks]),
                    limits: ProcessLimits::NONE,
                    overhead_bytes: card::overhead_bytes(card)?,
                    device_bytes: Some(card.card().memory),
                    host_bytes: Some(host),
                    ..machine
                })
            }
        }
    }

    /// Plans for a machine. The plan is made again where it uses a disk that was never measured, and where the run fills the disk that
    /// the plan spills to with something else.
    pub fn plan<P, E>(
        &self,
        config: &RawConfig,
        machine: &Machine,
        disk_use: impl Fn(&P) -> Option<DiskUse>,
        mut plan: impl FnMut(&Machine) -> Result<P, E>,
    ) -> Result<P, E> {
        let first = plan(machine)?;
        let folder = config.disk_path();
        let (Some(DiskUse { spilled, written }), Some(free)) = (disk_use(&first), machine.disk_available)
        else {
            return Ok(first);
        };
        let is_shared = written > 0 && on_one_disk(&config.output.dir(), &folder);
        let disk_reserved = if is_shared { written.div_ceil(u64::from(self.ranks.max(1))) } else { 0 };
        let too_full = is_shared && spilled.saturating_add(disk_reserved) > free;
        let measured = match self.speeds().disk(&folder) {
            Some(_) => None,
            None => self.speeds().measure_disk(&folder),
        };
        if measured.is_none() && !too_full {
            return Ok(first);
        }
        let disk = measured.unwrap_or(machine.rates.disk);
        plan(&Machine { rates: Rates { disk, ..machine.rates }, disk_reserved, ..*machine })
    }

    /// A device with an arena of just the planned size, if the process has kept to the line so far.
    pub fn device(&self, dry_run: &DryRun, line: LoadLine) -> Result<Box<dyn Device>, Failure> {
        if self.card.is_none() {
            kept_so_far(line)?;
        }
        Ok(self.arena(dry_run.peak_bytes())?)
    }

    /// A device with an arena of so many bytes.
    pub fn arena(&self, bytes: u64) -> Result<Box<dyn Device>, DeviceError> {
        Ok(match &self.card {
            Some(card) => Box::new(Cuda::new(card, bytes)?),
            None => Box::new(Cpu::with_pool(Arc::clone(&self.pool), self.isa, bytes)?),
        })
    }

    /// What may be taken of what computes: of the process's memory, or of a card's.
    pub fn line(&self, stated: Option<ByteSize>) -> LoadLine {
        let of_process = || self.limits().load_line(stated.map(|size| size.0));
        self.card.as_ref().map_or_else(of_process, |card| card::line(card, stated))
    }

    /// What is taken of that beside the arena.
    ///
    /// # Errors
    /// The card does not say what is free.
    pub fn overhead_of_what_computes(&self) -> Result<u64, Failure> {
        self.card.as_ref().map_or_else(|| Ok(self.overhead_bytes()), |card| card::overhead_bytes(card))
    }

    /// What computes is like that.
    pub fn traits(&self) -> DeviceTraits {
        self.card.as_ref().map_or(DeviceTraits::CPU, |_| DeviceTraits::CUDA)
    }

    /// What the process takes beside the arena, when everything else is in memory: what was measured, for who plans and computes in one
    /// process.
    pub fn overhead_bytes(&self) -> u64 {
        measured_bytes(&self.pool)
    }
}

/// What a plan takes of disks.
#[derive(Clone, Copy, Default)]
pub struct DiskUse {
    /// Bytes of its spill file.
    pub spilled: u64,
    /// Bytes that its run writes to the output folder, at the moment when they are most.
    pub written: u64,
}

impl DiskUse {
    /// Of a plan whose run still writes so much.
    pub fn of(plan: &TrainingPlan, written: u64) -> Option<DiskUse> {
        Some(DiskUse { spilled: plan.disk_bytes(), written }).filter(|disk| disk.spilled > 0)
    }
}

/// The process's resident set now; 0 where the system does not show it.
pub fn resident_bytes() -> u64 {
    process_memory().and_then(|m| m.resident).map_or(0, |size| size.0)
}

/// Storage types for inference.
pub fn inference_precision(dtype: &str, quantize_activations: bool) -> Result<Precision, Failure> {
    let linears = if quantize_activations { Linears::Int8 } else { Linears::Plain };
    match dtype {
        "f32" | "fp32" | "float32" => Ok(Precision { linears, ..Precision::F32 }),
        "bf16" | "bfloat16" => {
            Ok(Precision { weights: DType::Bf16, activations: DType::Bf16, linears, ..Precision::F32 })
        }
        other => Err(Failure::usage(format!("--dtype {other}: must be f32 or bf16"))),
    }
}

/// The type of the key-value cache, if one is named.
pub fn cache_type(name: Option<&str>) -> Result<Option<DType>, Failure> {
    Ok(Some(match name {
        None => return Ok(None),
        Some("f32" | "fp32" | "float32") => DType::F32,
        Some("bf16" | "bfloat16") => DType::Bf16,
        Some("f16" | "fp16" | "float16") => DType::F16,
        Some("int8" | "q8_0") => DType::Q8_0,
        Some("int4" | "q4_1") => DType::Q4_1,
        Some("q4_0") => DType::Q4_0,
        Some(other) => {
            return Err(Failure::usage(format!(
                "--kv-cache {other}: must be f32, bf16, f16, int8 (q8_0), int4 (q4_1) or q4_0"
            )));
        }
    }))
}
