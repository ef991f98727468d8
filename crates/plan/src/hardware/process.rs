//! What this process uses now and has used at most, as the kernel counts it.

use std::path::Path;

use plimsoll_memory::ByteSize;

use super::files::{SystemFiles, kilobytes};

/// Memory of this process, in bytes.
///
/// Kernels since 6.2 count pages by CPU and add up lazily, so that each number may lag by some tens of pages
/// a core.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct ProcessMemory {
    /// Resident: anonymous, file-backed and shared pages in RAM (`VmRSS`).
    pub resident: Option<ByteSize>,
    /// The most that was ever resident (`VmHWM`).
    pub peak_resident: Option<ByteSize>,
    /// Resident anonymous pages: heap, stacks, arenas (`RssAnon`).
    pub anonymous: Option<ByteSize>,
    /// Resident pages of mapped files: the program, memory-mapped weights (`RssFile`).
    pub file: Option<ByteSize>,
    /// Resident shared memory (`RssShmem`).
    pub shared: Option<ByteSize>,
    /// Pages in swap (`VmSwap`).
    pub swapped: Option<ByteSize>,
    /// Address space that is mapped, touched or not (`VmSize`).
    pub virtual_size: Option<ByteSize>,
    /// Private writable address space (`VmData`), which `ulimit -d` limits.
    pub data: Option<ByteSize>,
}

/// The memory of this process; `None` where the system does not show it.
pub fn process_memory() -> Option<ProcessMemory> {
    let status = SystemFiles::of_this_machine().read(Path::new("/proc/self/status"))?;
    let memory = ProcessMemory::parse(&status);
    memory.resident.is_some().then_some(memory)
}

impl ProcessMemory {
    /// Reads the text of `/proc/PID/status`.
    pub fn parse(status: &str) -> ProcessMemory {
        let size = |key| kilobytes(status, key).map(ByteSize);
        ProcessMemory {
            resident: size("VmRSS"),
            peak_resident: size("VmHWM"),
            anonymous: size("RssAnon"),
            file: size("RssFile"),
            shared: size("RssShmem"),
            swapped: size("VmSwap"),
            virtual_size: size("VmSize"),
            data: size("VmData"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_is_read() {
        let status = "Name:\tplimsoll\nVmPeak:\t    9000 kB\nVmSize:\t    3060 kB\nVmHWM:\t    1800 kB\nVmRSS:\t    1768 kB\nRssAnon:\t     116 kB\nRssFile:\t    1652 kB\nVmData:\t     360 kB\n";
        let kib = |n: u64| Some(ByteSize(n << 10));
        assert_eq!(
            ProcessMemory::parse(status),
            ProcessMemory {
                resident: kib(1768),
                peak_resident: kib(1800),
                anonymous: kib(116),
                file: kib(1652),
                shared: None,
                swapped: None,
                virtual_size: kib(3060),
                data: kib(360),
            }
        );
        assert_eq!(ProcessMemory::parse("VmRSS: many kB"), ProcessMemory::default());
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn touched_memory_is_resident() {
        const SIZE: usize = 64 << 20;
        let before = process_memory().unwrap().anonymous.unwrap().0;
        let touched = std::hint::black_box(vec![1u8; SIZE]);
        let after = process_memory().unwrap();
        drop(touched);
        assert!(after.anonymous.unwrap().0 >= before + SIZE as u64 / 2);
        assert!(after.peak_resident.unwrap() >= ByteSize(SIZE as u64));
    }
}
