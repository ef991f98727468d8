//! Memory: of the machine, and what of it this process may take.

use std::fmt;
use std::path::Path;

use plimsoll_memory::ByteSize;

use super::cgroup::{self, CgroupVersion, Cgroups, ContainerLimit};
use super::files::{SystemFiles, kilobytes};
use super::process::ProcessMemory;

/// Memory, in bytes. `None` where the system does not say, or where there is no limit.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Memory {
    /// RAM of the machine.
    pub total: Option<ByteSize>,
    /// RAM that can be taken without swapping: free, or page cache that the kernel gives up.
    pub available: Option<ByteSize>,
    /// Swap space.
    pub swap_total: Option<ByteSize>,
    /// Swap space that is not in use.
    pub swap_free: Option<ByteSize>,
    /// The limit of the container.
    pub container: Option<ContainerLimit>,
    /// The most address space that this process may map (`ulimit -v`). Reserved memory counts, touched or not.
    pub address_space_limit: Option<ByteSize>,
    /// The most private memory that this process may map (`ulimit -d`).
    pub data_limit: Option<ByteSize>,
    /// The most that this process can ever use: the least of RAM and all limits.
    pub limit: Option<ByteSize>,
    /// The most that this process can take now, beyond what it has: the least of what is available and what each
    /// limit leaves.
    pub free: Option<ByteSize>,
}

impl Memory {
    /// As it is now: every file is read again.
    pub fn detect() -> Memory {
        Memory::under(&SystemFiles::of_this_machine())
    }

    /// As a system's files say.
    pub fn under(files: &SystemFiles) -> Memory {
        let read = |path: &str| files.read(Path::new(path)).unwrap_or_default();
        let meminfo = read("/proc/meminfo");
        let of_machine = |key| kilobytes(&meminfo, key).map(ByteSize);
        let limits = read("/proc/self/limits");
        let process = ProcessMemory::parse(&read("/proc/self/status"));
        let container = Cgroups::under(files).and_then(|cgroups| cgroup::memory_limit(files, &cgroups));
        let address_space_limit = soft_limit(&limits, "Max address space").map(ByteSize);
        let data_limit = soft_limit(&limits, "Max data size").map(ByteSize);
        let total = of_machine("MemTotal");
        let available = of_machine("MemAvailable").or_else(|| of_machine("MemFree"));
        let left = |limit: Option<ByteSize>, used: Option<ByteSize>| {
            limit.map(|limit| ByteSize(limit.0.saturating_sub(used.map_or(0, |used| used.0))))
        };
        Memory {
            total,
            available,
            swap_total: of_machine("SwapTotal"),
            swap_free: of_machine("SwapFree"),
            limit: least([total, container.as_ref().map(|c| c.limit), address_space_limit, data_limit]),
            free: least([
                available,
                container.as_ref().map(|container| container.free.unwrap_or(container.limit)),
                left(address_space_limit, process.virtual_size),
                left(data_limit, process.data),
            ]),
            container,
            address_space_limit,
            data_limit,
        }
    }
}

fn least(sizes: [Option<ByteSize>; 4]) -> Option<ByteSize> {
    sizes.into_iter().flatten().min()
}

/// A soft limit of `/proc/self/limits`; `None` for `unlimited`.
fn soft_limit(limits: &str, name: &str) -> Option<u64> {
    let values = limits.lines().find_map(|line| line.strip_prefix(name))?;
    values.split_whitespace().next()?.parse().ok()
}

impl fmt::Display for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown =
            |size: Option<ByteSize>| size.map_or_else(|| "unknown".to_owned(), |size| size.to_string());
        write!(f, "Memory     {} in all, {} available", shown(self.total), shown(self.available))?;
        match (self.swap_total, self.swap_free) {
            (Some(ByteSize(0)), _) => write!(f, ", no swap")?,
            (Some(total), Some(free)) => write!(f, ", {free} of {total} swap free")?,
            _ => {}
        }
        if let Some(container) = &self.container {
            let version = match container.version {
                CgroupVersion::V1 => "v1",
                CgroupVersion::V2 => "v2",
            };
            let (limit, file) = (container.limit, container.file.display());
            write!(f, "\n           {limit} at most in the container (cgroup {version}, {file})")?;
        }
        if let Some(limit) = self.address_space_limit {
            write!(f, "\n           {limit} of address space at most (ulimit -v)")?;
        }
        if let Some(limit) = self.data_limit {
            write!(f, "\n           {limit} of private memory at most (ulimit -d)")?;
        }
        if let (Some(limit), Some(free)) = (self.limit, self.free) {
            write!(f, "\n           {limit} is the limit, {free} are free")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn soft_limits_are_read() {
        let limits = "\
Limit                     Soft Limit           Hard Limit           Units
Max data size             unlimited            unlimited            bytes
Max resident set          unlimited            unlimited            bytes
Max address space         4294967296           unlimited            bytes
";
        assert_eq!(soft_limit(limits, "Max address space"), Some(4 << 30));
        assert_eq!(soft_limit(limits, "Max data size"), None);
        assert_eq!(soft_limit("", "Max data size"), None);
    }
}
