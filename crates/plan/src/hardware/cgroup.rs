//! The limits of the container: control groups of version 1 and 2, nested, seen from inside a namespace or not.
//!
//! A limit anywhere between this process's group and the root of what is mounted holds, so all of them are read.
//! Formats: the kernel's `Documentation/admin-guide/cgroup-v2.rst` and `cgroup-v1/memory.rst`.

use std::path::{Component, Path, PathBuf};

use plimsoll_memory::ByteSize;

use super::files::{SystemFiles, field};

/// The two generations of control groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum CgroupVersion {
    /// A hierarchy for each controller.
    V1,
    /// One hierarchy.
    V2,
}

/// The tightest memory limit of the groups that this process is in.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct ContainerLimit {
    /// The limit.
    pub limit: ByteSize,
    /// What may still be taken before any of the groups is at its limit; page cache that the kernel gives up
    /// first counts as free.
    pub free: Option<ByteSize>,
    /// The generation of the group.
    pub version: CgroupVersion,
    /// The file that the limit stands in.
    pub file: PathBuf,
}

/// Where the groups of this process are mounted.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Cgroups {
    memory_v1: Option<Group>,
    cpu_v1: Option<Group>,
    unified: Option<Group>,
}

/// A group: folders from its own up to that of the mount.
#[derive(Debug, PartialEq, Eq)]
struct Group {
    folder: PathBuf,
    mount_point: PathBuf,
}

impl Group {
    fn folders(&self) -> impl Iterator<Item = &Path> {
        self.folder.ancestors().take_while(|folder| folder.starts_with(&self.mount_point))
    }
}

impl Cgroups {
    pub(super) fn under(files: &SystemFiles) -> Option<Cgroups> {
        Cgroups::of_process(files, "self")
    }

    fn of_process(files: &SystemFiles, pid: &str) -> Option<Cgroups> {
        let groups = files.read(&Path::new("/proc").join(pid).join("cgroup"))?;
        let mounts = files.read(Path::new("/proc/self/mountinfo"))?;
        Some(Cgroups::parse(&groups, &mounts))
    }

    fn parse(groups: &str, mounts: &str) -> Cgroups {
        let mounts: Vec<Mount> = mounts.lines().filter_map(Mount::parse).collect();
        let find = |controller: Option<&str>| {
            let group = groups.lines().find_map(|line| group_path(line, controller))?;
            mounts.iter().filter(|mount| mount.has(controller)).map(|mount| mount.group(group)).next()
        };
        Cgroups { memory_v1: find(Some("memory")), cpu_v1: find(Some("cpu")), unified: find(None) }
    }
}

/// The path in a line of `/proc/self/cgroup`, `4:memory:/a` or `0::/a`, if it is of that controller; `None` stands
/// for version 2.
fn group_path<'a>(line: &'a str, controller: Option<&str>) -> Option<&'a str> {
    let mut parts = line.splitn(3, ':');
    let (id, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
    let found = match controller {
        Some(controller) => controllers.split(',').any(|name| name == controller),
        None => id == "0" && controllers.is_empty(),
    };
    found.then_some(path)
}

/// A mounted hierarchy, from a line of `/proc/self/mountinfo`.
#[derive(Debug)]
struct Mount {
    root: PathBuf,
    mount_point: PathBuf,
    version: CgroupVersion,
    controllers: Vec<String>,
}

impl Mount {
    fn parse(line: &str) -> Option<Mount> {
        let (before, after) = line.split_once(" - ")?;
        let mut before = before.split(' ').skip(3);
        let (root, mount_point) = (unescape(before.next()?), unescape(before.next()?));
        let mut after = after.split(' ');
        let version = match after.next()? {
            "cgroup" => CgroupVersion::V1,
            "cgroup2" => CgroupVersion::V2,
            _ => return None,
        };
        let controllers = after.nth(1)?.split(',').map(str::to_owned).collect();
        Some(Mount { root: root.into(), mount_point: mount_point.into(), version, controllers })
    }

    fn has(&self, controller: Option<&str>) -> bool {
        match controller {
            Some(controller) => {
                self.version == CgroupVersion::V1 && self.controllers.iter().any(|name| name == controller)
            }
            None => self.version == CgroupVersion::V2,
        }
    }

    /// A group's folder; the mount's own if the group lies outside of what is mounted.
    fn group(&self, path: &str) -> Group {
        let visible = Path::new(path)
            .strip_prefix(&self.root)
            .ok()
            .filter(|inner| inner.components().all(|part| matches!(part, Component::Normal(_))));
        Group {
            folder: visible.map_or_else(|| self.mount_point.clone(), |inner| self.mount_point.join(inner)),
            mount_point: self.mount_point.clone(),
        }
    }
}

/// Paths in mountinfo have blanks and backslashes as three octal digits: `\040`.
fn unescape(text: &str) -> String {
    let mut plain = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('\\') {
        plain.push_str(before);
        match after.get(..3).and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) => {
                plain.push(char::from(byte));
                rest = after.get(3..).unwrap_or_default();
            }
            None => {
                plain.push('\\');
                rest = after;
            }
        }
    }
    plain.push_str(rest);
    plain
}

/// A limit in bytes; `None` for `max` and for the huge numbers that mean the same in version 1 (the largest
/// 64-bit number, rounded down to a page).
fn limit(text: &str) -> Option<u64> {
    const UNLIMITED: u64 = 1 << 60;
    text.trim().parse::<u64>().ok().filter(|bytes| *bytes < UNLIMITED)
}

/// The tightest memory limit, if there is any.
pub(super) fn memory_limit(files: &SystemFiles, cgroups: &Cgroups) -> Option<ContainerLimit> {
    let v2 = (CgroupVersion::V2, &cgroups.unified, ["memory.max", "memory.high"].as_slice());
    let v1 = (CgroupVersion::V1, &cgroups.memory_v1, ["memory.limit_in_bytes"].as_slice());
    let mut tightest: Option<ContainerLimit> = None;
    let mut least_free: Option<ByteSize> = None;
    for (version, group, names) in [v2, v1] {
        for folder in group.iter().flat_map(Group::folders) {
            for file in names.iter().map(|name| folder.join(name)) {
                let Some(bytes) = files.read(&file).as_deref().and_then(limit) else { continue };
                let free = used(files, folder, version).map(|used| ByteSize(bytes.saturating_sub(used)));
                least_free = least_free.into_iter().chain(free).min();
                if tightest.as_ref().is_none_or(|tightest| bytes < tightest.limit.0) {
                    tightest = Some(ContainerLimit { limit: ByteSize(bytes), free: None, version, file });
                }
            }
        }
    }
    tightest.map(|tightest| ContainerLimit { free: least_free, ..tightest })
}

/// The tightest memory limit of the groups that a process is in; `None` if there is none, or no such process.
pub fn container_of(files: &SystemFiles, pid: u32) -> Option<ContainerLimit> {
    memory_limit(files, &Cgroups::of_process(files, &pid.to_string())?)
}

/// The folder of the memory control group that a process is in, as it is mounted here.
pub fn memory_group_of(files: &SystemFiles, pid: u32) -> Option<PathBuf> {
    let groups = Cgroups::of_process(files, &pid.to_string())?;
    groups.memory_v1.or(groups.unified).map(|group| group.folder)
}

/// What a group uses, without the page cache that is given up first.
fn used(files: &SystemFiles, folder: &Path, version: CgroupVersion) -> Option<u64> {
    let (usage, cache) = match version {
        CgroupVersion::V1 => ("memory.usage_in_bytes", "total_inactive_file"),
        CgroupVersion::V2 => ("memory.current", "inactive_file"),
    };
    let usage: u64 = files.read(&folder.join(usage))?.trim().parse().ok()?;
    let statistics = files.read(&folder.join("memory.stat")).unwrap_or_default();
    let cache = field(&statistics, cache).and_then(|bytes| bytes.parse().ok()).unwrap_or(0);
    Some(usage.saturating_sub(cache))
}

/// The smallest share of processor time of all groups, in cores; `None` if there is no limit.
pub(super) fn cpu_quota(files: &SystemFiles, cgroups: &Cgroups) -> Option<f64> {
    let unified = cgroups.unified.iter().flat_map(Group::folders).filter_map(|folder| {
        let text = files.read(&folder.join("cpu.max"))?;
        let (quota, period) = text.trim().split_once(' ')?;
        cores(quota, period)
    });
    let v1 = cgroups.cpu_v1.iter().flat_map(Group::folders).filter_map(|folder| {
        let quota = files.read(&folder.join("cpu.cfs_quota_us"))?;
        let period = files.read(&folder.join("cpu.cfs_period_us"))?;
        cores(&quota, &period)
    });
    unified.chain(v1).reduce(f64::min)
}

/// Microseconds in each period; `max` and `-1` are no limit.
fn cores(quota: &str, period: &str) -> Option<f64> {
    let quota: u64 = quota.trim().parse().ok()?;
    let period: u64 = period.trim().parse().ok().filter(|period| *period > 0)?;
    Some(quota as f64 / period as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const HYBRID_MOUNTS: &str = "\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
";
    const HYBRID_GROUPS: &str = "8:pids:/\n4:memory:/docker/a:b\n1:cpu,cpuacct:/\n0::/system.slice\n";

    fn group(folder: &str, mount_point: &str) -> Option<Group> {
        Some(Group { folder: folder.into(), mount_point: mount_point.into() })
    }

    #[test]
    fn groups_are_found_where_they_are_mounted() {
        assert_eq!(
            Cgroups::parse(HYBRID_GROUPS, HYBRID_MOUNTS),
            Cgroups {
                memory_v1: group("/sys/fs/cgroup/memory/docker/a:b", "/sys/fs/cgroup/memory"),
                cpu_v1: group("/sys/fs/cgroup/cpu,cpuacct", "/sys/fs/cgroup/cpu,cpuacct"),
                unified: group("/sys/fs/cgroup/unified/system.slice", "/sys/fs/cgroup/unified"),
            }
        );
        let check = |groups: &str, mount: &str, folder: &str| {
            let mounts = format!("30 23 0:26 {mount} rw shared:4 - cgroup2 cgroup2 rw,nsdelegate\n");
            assert_eq!(Cgroups::parse(groups, &mounts).unified.unwrap().folder, Path::new(folder), "{mount}");
        };
        check("0::/", "/ /sys/fs/cgroup", "/sys/fs/cgroup");
        check("0::/a/b/c", "/a /sys/fs/cgroup", "/sys/fs/cgroup/b/c");
        check("0::/abc", "/a /sys/fs/cgroup", "/sys/fs/cgroup");
        check("0::/../other", "/ /sys/fs/cgroup", "/sys/fs/cgroup");
        check("0::/a", "/ /mnt/c\\040g", "/mnt/c g/a");
        check("3::/a\n0:pids:/b\n0::/c", "/ /sys/fs/cgroup", "/sys/fs/cgroup/c");
        assert_eq!(Cgroups::parse("", "").unified, None);
    }

    #[test]
    fn limits_are_numbers_below_the_huge() {
        for (text, bytes) in [
            ("max\n", None),
            ("9223372036854771712\n", None),
            ("18446744073709551615", None),
            ("99999999999999999999999", None),
            ("", None),
            ("0\n", Some(0)),
            ("1073741824\n", Some(1 << 30)),
            ("1152921504606846975", Some((1 << 60) - 1)),
            ("1152921504606846976", None),
        ] {
            assert_eq!(limit(text), bytes, "{text}");
        }
    }

    #[test]
    fn quotas_are_shares_of_a_period() {
        for (quota, period, expected) in [
            ("max", "100000", None),
            ("-1\n", "100000\n", None),
            ("150000", "100000", Some(1.5)),
            ("50000", "0", None),
            ("", "", None),
        ] {
            assert_eq!(cores(quota, period), expected, "{quota} {period}");
        }
    }

    /// The limit, what is free and the file, in a system of these files.
    fn check_memory(files: &[(&str, &str)], expected: Option<(u64, Option<u64>, &str)>) {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join("sys/fs/cgroup").join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        let cgroups = Cgroups::parse(HYBRID_GROUPS, HYBRID_MOUNTS);
        let found = memory_limit(&SystemFiles::under(root.path()), &cgroups);
        let expected =
            expected.map(|(limit, free, file)| (limit, free, Path::new("/sys/fs/cgroup").join(file)));
        assert_eq!(found.map(|found| (found.limit.0, found.free.map(|free| free.0), found.file)), expected);
    }

    #[test]
    fn the_tightest_limit_of_all_groups_holds() {
        check_memory(&[], None);
        check_memory(&[("memory/docker/a:b/memory.limit_in_bytes", "9223372036854771712\n")], None);
        check_memory(
            &[
                ("memory/docker/a:b/memory.limit_in_bytes", "9223372036854771712\n"),
                ("memory/docker/memory.limit_in_bytes", "3000\n"),
                ("memory/docker/memory.usage_in_bytes", "1500\n"),
                ("memory/docker/memory.stat", "inactive_file 1\ntotal_inactive_file 500\n"),
                ("memory/memory.limit_in_bytes", "4000\n"),
                ("memory/memory.usage_in_bytes", "3900\n"),
            ],
            Some((3000, Some(100), "memory/docker/memory.limit_in_bytes")),
        );
        check_memory(
            &[
                ("memory/docker/a:b/memory.limit_in_bytes", "5000\n"),
                ("unified/system.slice/memory.max", "max\n"),
                ("unified/system.slice/memory.high", "2000\n"),
            ],
            Some((2000, None, "unified/system.slice/memory.high")),
        );
        check_memory(
            &[
                ("unified/system.slice/memory.max", "5000\n"),
                ("unified/system.slice/memory.high", "3000\n"),
                ("unified/memory.max", "3000\n"),
            ],
            Some((3000, None, "unified/system.slice/memory.high")),
        );
    }

    proptest! {
        #[test]
        fn any_text_is_parsed_without_panic(groups in "[0-9a-z:/,.\n]{0,80}", mounts in "[0-9a-z:/,.\\\\ \n-]{0,160}") {
            let _ = Cgroups::parse(&groups, &mounts);
            let _ = Cgroups::parse(&groups, &format!("1 2 0:1 {mounts} - cgroup2 cgroup2 rw"));
            let _ = (limit(&groups), cores(&groups, &mounts), unescape(&mounts));
        }
    }
}
