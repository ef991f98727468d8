//! What this machine has and what this process may use of it: cores, instruction sets, memory, the limits that a
//! container or a shell has set, disk space, and the process's own use.
//!
//! Everything is read from the files that the system shows; what a system does not show is `None`. Parsing is
//! apart from reading, so that it is tested on texts from other machines. What to do with the numbers is left to
//! the planner.

mod cgroup;
mod cpu;
mod disk;
mod files;
mod memory;
mod process;

pub use cgroup::{CgroupVersion, ContainerLimit, container_of, memory_group_of};
pub use cpu::Cpu;
pub use disk::{DiskSpace, disk_space, on_one_disk};
pub use files::{SystemFiles, core_list, field, host, kilobytes};
pub use memory::Memory;
pub use process::{ProcessMemory, process_memory};

use std::fmt;

/// Processor and memory, as far as this process may use them.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Hardware {
    /// The processor.
    pub cpu: Cpu,
    /// The memory.
    pub memory: Memory,
}

impl Hardware {
    /// Looks at this machine. Takes well under a millisecond a core; never fails, but may know little.
    pub fn detect() -> Hardware {
        Hardware::under(&SystemFiles::of_this_machine())
    }

    fn under(files: &SystemFiles) -> Hardware {
        Hardware { cpu: Cpu::under(files), memory: Memory::under(files) }
    }
}

impl fmt::Display for Hardware {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}\n{}", self.cpu, self.memory)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine of two cores and 4 GiB, in a container that may use one and a half cores and 1 GiB.
    fn container() -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in [
            ("proc/cpuinfo", "processor: 0\nmodel name\t: Test CPU\nflags\t\t: fpu avx2 fma avx512_bf16\n"),
            (
                "proc/meminfo",
                "MemTotal: 4194304 kB\nMemAvailable: 3145728 kB\nSwapTotal: 0 kB\nSwapFree: 0 kB\n",
            ),
            ("proc/self/status", "VmSize:\t 2048 kB\nVmData:\t 1024 kB\nCpus_allowed_list:\t0-1\n"),
            (
                "proc/self/limits",
                "Max data size   unlimited unlimited bytes\nMax address space   2147483648 2147483648 bytes\n",
            ),
            ("proc/self/cgroup", "0::/pod/job\n"),
            ("proc/self/mountinfo", "30 23 0:26 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw\n"),
            ("sys/fs/cgroup/pod/memory.max", "1073741824\n"),
            ("sys/fs/cgroup/pod/memory.current", "314572800\n"),
            ("sys/fs/cgroup/pod/memory.stat", "anon 1\ninactive_file 104857600\n"),
            ("sys/fs/cgroup/pod/job/memory.max", "max\n"),
            ("sys/fs/cgroup/pod/job/cpu.max", "150000 100000\n"),
            ("sys/devices/system/cpu/online", "0-3\n"),
            ("sys/devices/system/cpu/cpu0/topology/thread_siblings_list", "0,1\n"),
            ("sys/devices/system/cpu/cpu1/topology/thread_siblings_list", "0,1\n"),
        ] {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        root
    }

    #[test]
    fn a_container_is_seen_through_its_files() {
        let root = container();
        let hardware = Hardware::under(&SystemFiles::under(root.path()));
        assert_eq!(
            hardware.to_string(),
            format!(
                "CPU        Test CPU ({})\n\
                 \x20          2 of 4 logical cores allowed on 1 physical, quota of 1.50 cores: 1 thread\n\
                 \x20          FMA, AVX2, AVX-512 BF16\n\
                 Memory     4.00 GiB in all, 3.00 GiB available, no swap\n\
                 \x20          1.00 GiB at most in the container (cgroup v2, /sys/fs/cgroup/pod/memory.max)\n\
                 \x20          2.00 GiB of address space at most (ulimit -v)\n\
                 \x20          1.00 GiB is the limit, 824.0 MiB are free",
                std::env::consts::ARCH
            )
        );
    }

    #[test]
    fn an_unknown_system_is_described_all_the_same() {
        let root = tempfile::tempdir().unwrap();
        let cores = root.path().join("sys/devices/system/cpu");
        std::fs::create_dir_all(&cores).unwrap();
        std::fs::write(cores.join("online"), "\n").unwrap();
        let hardware = Hardware::under(&SystemFiles::under(root.path()));
        assert_eq!((&hardware.memory, hardware.cpu.logical_cores), (&Memory::default(), None));
        assert!(hardware.cpu.threads >= 1);
        assert!(hardware.to_string().contains("unknown"));
        assert!(serde_json::to_value(&hardware).unwrap()["memory"]["total"].is_null());
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn this_machine_is_seen() {
        let Hardware { cpu, memory } = Hardware::detect();
        let (total, limit, free) = (memory.total.unwrap(), memory.limit.unwrap(), memory.free.unwrap());
        assert!(free <= limit && limit <= total, "{free} {limit} {total}");
        assert!(cpu.threads <= cpu.allowed_cores.unwrap());
    }
}
