//! A control group at a moment, of version 1 or 2. Formats: the kernel's `admin-guide/cgroup-v2.rst`, `cgroup-v1/memory.rst` and
//! `accounting/psi.rst`.

use std::path::{Path, PathBuf};

use plimsoll_plan::hardware::{SystemFiles, field};
use serde::Serialize;

/// A control group. Sizes are in bytes; 0 where the system does not say.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct GroupSample {
    /// Its folder.
    pub path: PathBuf,
    /// What it uses, without page cache that the kernel gives up first.
    pub used_bytes: u64,
    /// The most that it may use; `None` where its own files set no limit.
    pub limit_bytes: Option<u64>,
    /// Memory of no file.
    pub anonymous_bytes: u64,
    /// Page cache.
    pub file_bytes: u64,
    /// Shared memory, which page cache includes.
    pub shared_bytes: u64,
    /// Pages in swap.
    pub swap_bytes: u64,
    /// Page faults so far that needed no disk.
    pub minor_faults: u64,
    /// Page faults so far that did.
    pub major_faults: u64,
    /// Processes that the kernel has ended here for memory, so far.
    pub oom_kills: u64,
    /// The share of the last ten seconds in which a task waited for memory, in percent; `None` without pressure information.
    pub pressure: Option<f64>,
}

/// Limits from here on mean that there is none: version 1 writes the largest number of pages.
const UNLIMITED: u64 = 1 << 60;

/// A group now; `None` where the folder is no memory control group.
pub fn group(files: &SystemFiles, folder: &Path) -> Option<GroupSample> {
    let read = |name: &str| files.read(&folder.join(name));
    let number = |name: &str| read(name).and_then(|text| text.trim().parse::<u64>().ok());
    let limit = |name: &str| number(name).filter(|bytes| *bytes < UNLIMITED);
    let stat = read("memory.stat").unwrap_or_default();
    let of_stat = |key: &str| field(&stat, key).and_then(|text| text.parse::<u64>().ok()).unwrap_or(0);
    let path = folder.to_owned();
    if let Some(used) = number("memory.current") {
        let events = read("memory.events").unwrap_or_default();
        let pressure = read("memory.pressure").unwrap_or_default();
        return Some(GroupSample {
            path,
            used_bytes: used.saturating_sub(of_stat("inactive_file")),
            limit_bytes: [limit("memory.max"), limit("memory.high")].into_iter().flatten().min(),
            anonymous_bytes: of_stat("anon"),
            file_bytes: of_stat("file"),
            shared_bytes: of_stat("shmem"),
            swap_bytes: number("memory.swap.current").unwrap_or(0),
            minor_faults: of_stat("pgfault").saturating_sub(of_stat("pgmajfault")),
            major_faults: of_stat("pgmajfault"),
            oom_kills: field(&events, "oom_kill").and_then(|text| text.parse().ok()).unwrap_or(0),
            pressure: pressure_share(&pressure),
        });
    }
    let used = number("memory.usage_in_bytes")?;
    let control = read("memory.oom_control").unwrap_or_default();
    Some(GroupSample {
        path,
        used_bytes: used.saturating_sub(of_stat("total_inactive_file")),
        limit_bytes: limit("memory.limit_in_bytes"),
        anonymous_bytes: of_stat("total_rss"),
        file_bytes: of_stat("total_cache"),
        shared_bytes: of_stat("total_shmem"),
        swap_bytes: of_stat("total_swap"),
        minor_faults: of_stat("total_pgfault").saturating_sub(of_stat("total_pgmajfault")),
        major_faults: of_stat("total_pgmajfault"),
        oom_kills: field(&control, "oom_kill").and_then(|text| text.parse().ok()).unwrap_or(0),
        pressure: None,
    })
}

/// The processes of a group, without those of groups below it.
pub fn processes_of(files: &SystemFiles, folder: &Path) -> Vec<u32> {
    let text = files.read(&folder.join("cgroup.procs")).unwrap_or_default();
    text.lines().filter_map(|line| line.trim().parse().ok()).collect()
}

/// `some avg10=1.50 avg60=...`: the share of ten seconds, in percent.
fn pressure_share(text: &str) -> Option<f64> {
    let some = text.lines().find_map(|line| line.strip_prefix("some "))?;
    some.split_whitespace().find_map(|word| word.strip_prefix("avg10="))?.parse().ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::process::tests::system;

    #[test]
    fn groups_of_both_versions_are_read() {
        let (_root, files) = system(&[
            ("two/memory.current", "1000\n"),
            ("two/memory.max", "4000\n"),
            ("two/memory.high", "max\n"),
            (
                "two/memory.stat",
                "anon 700\nfile 300\nshmem 10\ninactive_file 100\npgfault 50\npgmajfault 4\n",
            ),
            ("two/memory.swap.current", "8\n"),
            ("two/memory.events", "low 0\noom 3\noom_kill 2\noom_group_kill 0\n"),
            (
                "two/memory.pressure",
                "some avg10=1.50 avg60=0.00 total=5\nfull avg10=0.50 avg60=0.00 total=5\n",
            ),
            ("two/cgroup.procs", "7\n8\n"),
            ("one/memory.usage_in_bytes", "1000\n"),
            ("one/memory.limit_in_bytes", "9223372036854771712\n"),
            ("one/memory.stat", "rss 1\ntotal_rss 600\ntotal_cache 300\ntotal_inactive_file 50\n"),
            ("one/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n"),
            ("none/file", ""),
        ]);
        let two = group(&files, Path::new("/two")).unwrap();
        assert_eq!((two.used_bytes, two.limit_bytes, two.anonymous_bytes), (900, Some(4000), 700));
        assert_eq!((two.oom_kills, two.pressure, two.minor_faults, two.swap_bytes), (2, Some(1.5), 46, 8));
        assert_eq!(processes_of(&files, Path::new("/two")), [7, 8]);
        let one = group(&files, Path::new("/one")).unwrap();
        assert_eq!((one.used_bytes, one.limit_bytes, one.anonymous_bytes), (950, None, 600));
        assert_eq!((one.oom_kills, one.pressure), (5, None));
        assert_eq!(group(&files, Path::new("/none")), None);
    }

    proptest! {
        #[test]
        fn any_group_is_read_without_panic(text in "[0-9a-z_= .\n-]{0,80}") {
            let (_root, files) = system(&[("g/memory.current", "5"), ("g/memory.stat", &text), ("g/memory.pressure", &text), ("g/memory.events", &text), ("g/memory.max", &text), ("g/cgroup.procs", &text)]);
            assert!(group(&files, Path::new("/g")).is_some());
            let _ = processes_of(&files, Path::new("/g"));
        }
    }
}
