//! What a plan must keep to: the load line, the budgets, and the limits that the system enforces.

use plimsoll_device::DType;
use plimsoll_memory::{Tag, Tier};
use serde::Serialize;

use crate::config::{GradientCheckpointing, RawConfig};
use crate::dry_run::DryRun;
use crate::load_line::{LimitedBy, LoadLine};
use crate::resolve::Choice;
use crate::shortage::{Resource, Shortage};
use crate::training_plan::Machine;

/// What the data pipeline takes on the host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PipelineBytes {
    /// Batches that are made before they are asked for.
    pub ahead: u64,
    /// Batches of a step.
    pub step: u64,
    /// A batch that is evaluated.
    pub evaluation: u64,
    /// The threads that make them.
    pub workers: u64,
}

impl PipelineBytes {
    /// All of it: buffers of a step wait for the next one while a batch is evaluated.
    pub fn bytes(self) -> u64 {
        let PipelineBytes { ahead, step, evaluation, workers } = self;
        [step, evaluation, workers].into_iter().fold(ahead, u64::saturating_add)
    }
}

/// What a plan must keep to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limits {
    /// Bytes of the load line that are left for the arena; for the host tier and the data pipeline too, where these have
    /// no budget of their own.
    pub room_bytes: u64,
    /// Bytes of them that automatic choices may fill.
    pub target_bytes: u64,
    /// Bytes of the arena for which the form of checkpointing is to be found.
    pub arena_bytes: u64,
    /// The host tier's own budget.
    pub host_bytes: Option<u64>,
    /// Whether the device has memory of its own, so that what is on the host takes none of it.
    pub is_apart: bool,
    /// The 16-bit type that comes before f32 where the precision is open.
    pub narrow: Option<DType>,
    /// Bytes that all of it together may take, beside the overhead.
    pub memory_bytes: u64,
    /// Bytes of address space beside the overhead: for arenas, and for the files of a checkpoint while it is read.
    pub address_bytes: u64,
    /// Bytes of disk.
    pub disk_bytes: u64,
    /// Bytes of the data pipeline for each token of a micro-batch.
    pub pipeline_bytes_per_token: u64,
    /// Bytes of its threads.
    pub worker_bytes: u64,
    /// Bytes between files and the tokenizer while the data is read, before there is an arena.
    pub reading_bytes: u64,
}

impl Limits {
    /// None at all.
    #[cfg(test)]
    pub(crate) fn endless() -> Limits {
        let most = u64::MAX;
        Limits {
            room_bytes: most,
            target_bytes: most,
            arena_bytes: most,
            host_bytes: None,
            is_apart: false,
            narrow: None,
            memory_bytes: most,
            address_bytes: most,
            disk_bytes: most,
            pipeline_bytes_per_token: 0,
            worker_bytes: 0,
            reading_bytes: 0,
        }
    }

    /// What a configuration may have on a machine, under a load line.
    pub(crate) fn of(config: &RawConfig, machine: &Machine) -> Limits {
        let (overhead, line) = (machine.overhead_bytes, load_line(config, machine));
        let [share, ..] = config.memory.shares();
        let target = (line.bytes as f64 * share) as u64;
        let free = machine.disk_room();
        let enforced = machine.limits.enforced();
        Limits {
            room_bytes: line.bytes.saturating_sub(overhead),
            target_bytes: target.saturating_sub(overhead),
            arena_bytes: match config.training.gradient_checkpointing().set() {
                Some(GradientCheckpointing::Within(size)) => size.0,
                _ => u64::MAX,
            },
            host_bytes: config.memory.host_budget().set().map(|size| size.0).or(machine.host_bytes),
            is_apart: !machine.rates.wiring.device.unified,
            narrow: machine.rates.wiring.narrow,
            memory_bytes: enforced.map_or(u64::MAX, |line| line.bytes.saturating_sub(overhead)),
            address_bytes: machine.limits.address_space_left(overhead).unwrap_or(u64::MAX),
            disk_bytes: config.memory.disk_budget().set().map_or(free, |size| size.0.min(free)),
            pipeline_bytes_per_token: machine.host_bytes_per_token,
            worker_bytes: machine.worker_bytes.saturating_mul(config.data.workers()),
            reading_bytes: config.data.buffer_size().set().map_or(0, |size| size.0),
        }
    }

    /// Whether a step keeps to the limits.
    pub fn allow(&self, choice: &Choice) -> bool {
        self.allow_within(choice, self.room_bytes)
    }

    pub(crate) fn allow_within(&self, choice: &Choice, room: u64) -> bool {
        Limits { room_bytes: room, ..*self }.shortages(choice).next().is_none()
    }

    /// Everything that a step would need more of.
    pub fn shortages(&self, choice: &Choice) -> impl Iterator<Item = Shortage> {
        let host = self.host_tier(choice);
        let needs = [
            (Resource::Memory, self.under_the_line(choice).max(self.reading_bytes), self.room_bytes),
            (Resource::Arena, choice.peak_bytes(), self.arena_bytes),
            (Resource::Host, host, self.host_bytes.unwrap_or(u64::MAX)),
            (Resource::Process, self.memory(choice), self.memory_bytes),
            (Resource::AddressSpace, self.address_space(choice), self.address_bytes),
            (Resource::Disk, choice.dry_run.disk_bytes(), self.disk_bytes),
        ];
        let short = needs.into_iter().filter(|(_, needed, allowed)| needed > allowed);
        short.map(|(resource, needed_bytes, allowed_bytes)| Shortage {
            resource,
            needed_bytes,
            allowed_bytes,
        })
    }

    /// Bytes that the load line is held against, beside the overhead.
    pub fn under_the_line(&self, choice: &Choice) -> u64 {
        let in_room = if self.host_bytes.is_none() { self.host_tier(choice) } else { 0 };
        choice.peak_bytes().saturating_add(in_room)
    }

    /// Bytes of the host tier with the data pipeline.
    pub fn host_tier(&self, choice: &Choice) -> u64 {
        choice.dry_run.host_bytes().saturating_add(self.pipeline(choice).bytes())
    }

    /// What the data pipeline takes on the host.
    pub fn pipeline(&self, choice: &Choice) -> PipelineBytes {
        let settings = &choice.settings;
        let tokens = settings.batch_size.saturating_mul(settings.sequence_length);
        // The pipeline counts one micro-batch for the step, which holds all of its own.
        let further = tokens.saturating_mul(choice.accumulation.saturating_sub(1));
        let of_token = settings.host_bytes_per_token();
        let one = tokens.saturating_mul(of_token.min(self.pipeline_bytes_per_token));
        let all = tokens.saturating_mul(self.pipeline_bytes_per_token);
        let evaluated = settings.evaluated().saturating_mul(settings.sequence_length);
        PipelineBytes {
            ahead: all.saturating_sub(one),
            step: one.saturating_add(further.saturating_mul(of_token)),
            evaluation: evaluated.saturating_mul(of_token),
            workers: self.worker_bytes,
        }
    }

    /// Bytes of memory beside the overhead.
    pub fn memory(&self, choice: &Choice) -> u64 {
        choice.peak_bytes().saturating_add(self.host_tier(choice))
    }

    /// Bytes of address space beside the overhead. A checkpoint has what the run trains and its optimizer keeps.
    pub fn address_space(&self, choice: &Choice) -> u64 {
        let DryRun { ledger, host, disk, .. } = &choice.dry_run;
        let mut kinds = vec![Tag::MasterWeights, Tag::Optimizer, Tag::Adapters];
        if choice.settings.method.adapters().is_none() {
            kinds.push(Tag::Weights);
        }
        let most = |tag: Tag| [ledger, host, disk].into_iter().map(|ledger| ledger.most(tag)).sum::<u64>();
        self.memory(choice).saturating_add(kinds.into_iter().map(most).sum())
    }

    /// Bytes of the memory that offload spares.
    pub(crate) fn spared(&self, choice: &Choice) -> u64 {
        if self.is_apart { choice.peak_bytes() } else { self.memory(choice) }
    }

    /// The tiers that tensors may go to, the nearest first.
    pub(crate) fn lower_tiers(&self) -> &'static [Tier] {
        match self.is_apart && self.host_bytes.is_some() {
            true => &[Tier::Host, Tier::Disk],
            false => &[Tier::Disk],
        }
    }

    /// How far from fitting, the nearest first: more memory is nearer than more disk.
    pub(crate) fn distance(&self, choice: &Choice) -> (bool, u64) {
        (choice.dry_run.disk_bytes() > self.disk_bytes, self.memory(choice))
    }
}

/// The line of a configuration on a machine.
pub(crate) fn load_line(config: &RawConfig, machine: &Machine) -> LoadLine {
    let stated = config.memory.device_budget().set().map(|size| size.0);
    match machine.device_bytes {
        None => machine.limits.load_line(stated),
        Some(bytes) => match stated.filter(|stated| *stated <= bytes) {
            Some(bytes) => LoadLine { bytes, by: LimitedBy::Budget },
            None => LoadLine { bytes, by: LimitedBy::Device },
        },
    }
}
