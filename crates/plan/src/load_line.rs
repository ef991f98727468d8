//! The load line: how much memory a run may take, and who says so.
//!
//! The user's budget counts, but a container's limit and the limits of the shell (`ulimit`) count more: a process that goes
//! over them is killed or refused. Without a budget the line is what is free, less a margin.

use plimsoll_memory::ByteSize;
use serde::Serialize;

use crate::hardware::{Memory, ProcessMemory};

/// Whose limit the line is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum LimitedBy {
    /// `memory.device_budget`.
    #[serde(rename = "budget")]
    Budget,
    /// The memory of a device that has its own.
    #[serde(rename = "device memory")]
    Device,
    /// What the machine has free.
    #[serde(rename = "available memory")]
    Available,
    /// A control group.
    #[serde(rename = "container")]
    Container,
    /// Address space: `ulimit -v`.
    #[serde(rename = "ulimit -v")]
    AddressSpace,
    /// Private memory: `ulimit -d`.
    #[serde(rename = "ulimit -d")]
    Data,
}

impl std::fmt::Display for LimitedBy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            LimitedBy::Budget => "the budget",
            LimitedBy::Device => "the device's memory",
            LimitedBy::Available => "what is free on this machine",
            LimitedBy::Container => "the container's limit",
            LimitedBy::AddressSpace => "ulimit -v",
            LimitedBy::Data => "ulimit -d",
        })
    }
}

/// The line of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadLine {
    /// Bytes that the process may take in all.
    pub bytes: u64,
    /// Who says so.
    pub by: LimitedBy,
}

/// How large this process can get, in bytes of resident memory, by each limit; `None` where there is none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProcessLimits {
    /// What the process has and what the machine has free.
    pub available: Option<u64>,
    /// What the process has and what its control groups leave.
    pub container: Option<u64>,
    /// What the process has and what `ulimit -v` leaves.
    pub address_space: Option<u64>,
    /// What the process has and what `ulimit -d` leaves.
    pub data: Option<u64>,
}

/// Address space that a run takes beside its arenas after it was planned: stacks of threads and heaps of the allocator
/// (glibc reserves 64 MiB for a thread). Files of a checkpoint, which are mapped while they are read, come on top.
pub const ADDRESS_SPACE_BESIDE: u64 = 96 << 20;

/// The same of private memory: stacks, and buffers of the pipeline.
const DATA_BESIDE: u64 = 48 << 20;

impl ProcessLimits {
    /// No limit at all: for a plan that is made for another machine.
    pub const NONE: ProcessLimits =
        ProcessLimits { available: None, container: None, address_space: None, data: None };

    /// As the machine is now.
    pub fn detect() -> ProcessLimits {
        let (memory, process) = (Memory::detect(), crate::hardware::process_memory());
        ProcessLimits::of(&memory, &process.unwrap_or_default())
    }

    /// From what the system says.
    pub fn of(memory: &Memory, process: &ProcessMemory) -> ProcessLimits {
        let bytes = |size: Option<ByteSize>| size.map_or(0, |size| size.0);
        let resident = bytes(process.resident);
        let with = |free: u64| resident.saturating_add(free);
        let left = |limit: Option<ByteSize>, used: Option<ByteSize>, beside: u64| {
            limit.map(|limit| with(limit.0.saturating_sub(bytes(used)).saturating_sub(beside)))
        };
        let container = memory.container.as_ref();
        ProcessLimits {
            available: memory.available.map(|free| with(free.0)),
            container: container.map(|found| found.free.map_or(found.limit.0, |free| with(free.0))),
            address_space: left(memory.address_space_limit, process.virtual_size, ADDRESS_SPACE_BESIDE),
            data: left(memory.data_limit, process.data, DATA_BESIDE),
        }
    }

    /// Those of one of so many processes that share what this machine has free, of which so many are in one control group, where each has
    /// `own` bytes already. What the shell limits each has to itself.
    #[must_use]
    pub fn shared_by(self, of_machine: u32, of_group: u32, own: u64) -> ProcessLimits {
        let share = |all: u64, processes: u32| {
            let own = own.min(all);
            own.saturating_add((all - own) / u64::from(processes.max(1)))
        };
        ProcessLimits {
            available: self.available.map(|all| share(all, of_machine)),
            container: self.container.map(|all| share(all, of_group)),
            ..self
        }
    }

    /// What `ulimit -v` leaves beyond what the process has.
    pub fn address_space_left(&self, resident: u64) -> Option<u64> {
        self.address_space.map(|most| most.saturating_sub(resident))
    }

    /// The limit that the system enforces: the least of the container's and the shell's, less a margin.
    pub fn enforced(&self) -> Option<LoadLine> {
        let all = [
            (self.container, LimitedBy::Container),
            (self.address_space, LimitedBy::AddressSpace),
            (self.data, LimitedBy::Data),
        ];
        least(all)
    }

    /// The line where `stated` is the user's, if there is one.
    pub fn load_line(&self, stated: Option<u64>) -> LoadLine {
        let own = match stated {
            Some(bytes) => LoadLine { bytes, by: LimitedBy::Budget },
            None => least([(self.available, LimitedBy::Available)])
                // Where the system says nothing, whatever is asked for is tried.
                .unwrap_or(LoadLine { bytes: u64::MAX / 2, by: LimitedBy::Available }),
        };
        match self.enforced() {
            Some(enforced) if enforced.bytes < own.bytes => enforced,
            _ => own,
        }
    }
}

/// The least of the limits, with room for what the kernel counts to the process and we do not see.
fn least<const N: usize>(limits: [(Option<u64>, LimitedBy); N]) -> Option<LoadLine> {
    let known = limits.into_iter().filter_map(|(bytes, by)| Some(LoadLine { bytes: bytes?, by }));
    let line = known.min_by_key(|line| line.bytes)?;
    Some(LoadLine { bytes: line.bytes.saturating_sub(margin(line.bytes)), ..line })
}

/// A thirty-second part, of 16 MiB at least and 512 MiB at most.
fn margin(bytes: u64) -> u64 {
    (bytes / 32).clamp(16 << 20, 512 << 20)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hardware::{CgroupVersion, ContainerLimit};

    const MIB: u64 = 1 << 20;

    fn memory() -> (Memory, ProcessMemory) {
        let size = |mib: u64| Some(ByteSize(mib * MIB));
        let container = ContainerLimit {
            limit: ByteSize(2048 * MIB),
            free: size(1900),
            version: CgroupVersion::V2,
            file: "/sys/fs/cgroup/memory.max".into(),
        };
        let memory = Memory { available: size(8000), container: Some(container), ..Memory::default() };
        let process = ProcessMemory { resident: size(100), virtual_size: size(300), ..Default::default() };
        (memory, process)
    }

    #[test]
    fn processes_of_one_machine_share_what_is_free_and_not_what_the_shell_limits() {
        let all = ProcessLimits {
            available: Some(1000),
            container: Some(600),
            address_space: Some(800),
            data: Some(700),
        };
        assert_eq!(all.shared_by(1, 1, 100), all);
        let four = all.shared_by(4, 4, 100);
        assert_eq!((four.available, four.container), (Some(325), Some(225)));
        assert_eq!(all.shared_by(4, 1, 100).container, all.container);
        assert_eq!((four.address_space, four.data), (all.address_space, all.data));
        // Before there are any, all that is free is theirs.
        assert_eq!(all.shared_by(4, 4, 0).available, Some(250));
        assert_eq!(all.shared_by(4, 4, 2000).available, Some(1000));
    }

    #[test]
    fn the_smaller_of_what_is_stated_and_what_is_enforced_counts() {
        let (mut memory, process) = memory();
        let limits = ProcessLimits::of(&memory, &process);
        let most = 2000 * MIB - margin(2000 * MIB);
        assert_eq!(limits.load_line(Some(512 * MIB)), LoadLine { bytes: 512 * MIB, by: LimitedBy::Budget });
        assert_eq!(limits.load_line(Some(u64::MAX)), LoadLine { bytes: most, by: LimitedBy::Container });
        assert_eq!(limits.load_line(None), LoadLine { bytes: most, by: LimitedBy::Container });
        memory.address_space_limit = Some(ByteSize(1024 * MIB));
        let line = ProcessLimits::of(&memory, &process).load_line(None);
        let left = 100 * MIB + 1024 * MIB - 300 * MIB - ADDRESS_SPACE_BESIDE;
        assert_eq!(line, LoadLine { bytes: left - margin(left), by: LimitedBy::AddressSpace });
    }

    #[test]
    fn what_is_free_counts_only_where_nothing_is_stated() {
        let (mut memory, process) = memory();
        memory.container = None;
        let limits = ProcessLimits::of(&memory, &process);
        assert_eq!(limits.load_line(None).by, LimitedBy::Available);
        assert!(limits.load_line(None).bytes < 8100 * MIB);
        assert_eq!(
            limits.load_line(Some(1 << 40)),
            LoadLine { bytes: 1 << 40, by: LimitedBy::Budget },
            "planning for more than is free is allowed"
        );
        assert_eq!(ProcessLimits::NONE.enforced(), None);
    }
}
