//! What the machine says beside a process: its name, the time since it was started, groups, and how often the kernel has ended
//! something for memory. The same questions are asked when a recording begins, and after its end.

use std::path::{Path, PathBuf};

use plimsoll_plan::hardware::{Memory, SystemFiles, container_of, field, memory_group_of};

use crate::group::group;
use crate::process::process;
use crate::recorder::About;

/// The machine around a process.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Conditions {
    /// The machine's name.
    pub host: String,
    /// What it calls the time since it was started.
    pub boot: String,
    /// Whether the process is there.
    pub is_alive: bool,
    /// Processes that the kernel has ended for memory: in the group, and on the machine.
    pub oom_kills: [u64; 2],
    /// The group's own limit now; `None` where it has none or is gone.
    pub group_limit: Option<u64>,
}

impl Conditions {
    /// As they are now around a process and a group's folder.
    pub fn now(files: &SystemFiles, pid: u32, folder: Option<&Path>) -> Conditions {
        let read = |path: &str| files.read(Path::new(path)).unwrap_or_default();
        let found = folder.and_then(|folder| group(files, folder));
        let vmstat = read("/proc/vmstat");
        let on_machine = field(&vmstat, "oom_kill").and_then(|text| text.parse().ok()).unwrap_or(0);
        Conditions {
            host: files.host().unwrap_or_default(),
            boot: read("/proc/sys/kernel/random/boot_id").trim().to_owned(),
            is_alive: process(files, pid).is_some(),
            oom_kills: [found.as_ref().map_or(0, |group| group.oom_kills), on_machine],
            group_limit: found.and_then(|group| group.limit_bytes),
        }
    }

    /// What a recording says of a process at its beginning; `what` runs.
    pub fn about(files: &SystemFiles, pid: u32, what: String, began: f64) -> About {
        let group = memory_group_of(files, pid);
        let Conditions { host, boot, oom_kills, .. } = Conditions::now(files, pid, group.as_deref());
        About { pid, what, host, boot, group, oom_kills, began, planned_bytes: None, ended: None }
    }

    /// The limit of a process's container with what is used of it, and the machine's memory with what it can give, in bytes.
    pub fn room(files: &SystemFiles, pid: u32) -> (Option<[u64; 2]>, Option<[u64; 2]>) {
        let found = container_of(files, pid);
        let container =
            found.and_then(|found| Some([found.limit.0, found.limit.0.saturating_sub(found.free?.0)]));
        let memory = Memory::under(files);
        (container, memory.total.zip(memory.available).map(|(total, free)| [total.0, free.0]))
    }

    /// The folder that a recording's group has.
    pub fn after(files: &SystemFiles, about: &About) -> Conditions {
        let folder: Option<&PathBuf> = about.group.as_ref();
        Conditions::now(files, about.pid, folder.map(PathBuf::as_path))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::tests::system;

    #[test]
    fn a_machine_is_asked_the_same_before_and_after() {
        let (root, files) = system(&[
            ("proc/sys/kernel/hostname", "box\n"),
            ("proc/sys/kernel/random/boot_id", "abc\n"),
            ("proc/vmstat", "nr_free 5\noom_kill 7\n"),
            ("proc/meminfo", "MemTotal: 1000 kB\nMemAvailable: 600 kB\n"),
            ("proc/10/stat", "10 (python) S 1 10 10 0 -1 4 111 0 22 0 5 6"),
            ("proc/10/status", "Name:\tpython\nVmRSS:\t300 kB\n"),
            ("proc/10/cgroup", "0::/job\n"),
            ("proc/self/mountinfo", "30 23 0:26 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw\n"),
            ("sys/fs/cgroup/job/memory.current", "1000\n"),
            ("sys/fs/cgroup/job/memory.max", "5000\n"),
            ("sys/fs/cgroup/job/memory.events", "oom_kill 1\n"),
        ]);
        let about = Conditions::about(&files, 10, "train".into(), 5.0);
        assert_eq!((about.host.as_str(), about.boot.as_str(), about.oom_kills), ("box", "abc", [1, 7]));
        assert_eq!(about.group.as_deref(), Some(Path::new("/sys/fs/cgroup/job")));
        assert_eq!(Conditions::room(&files, 10), (Some([5000, 1000]), Some([1000 << 10, 600 << 10])));
        std::fs::remove_dir_all(root.path().join("proc/10")).unwrap();
        std::fs::write(root.path().join("sys/fs/cgroup/job/memory.events"), "oom_kill 2\n").unwrap();
        let after = Conditions::after(&files, &about);
        assert_eq!((after.is_alive, after.oom_kills, after.group_limit), (false, [2, 7], Some(5000)));
    }
}
