//! One process and its descendants, as the kernel counts them: `proc(5)`, `status`, `stat` and `smaps_rollup`.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use plimsoll_plan::hardware::{ProcessMemory, SystemFiles, field, kilobytes};
use serde::Serialize;

/// A process at a moment. Sizes are in bytes; 0 where the system does not say.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ProcessSample {
    /// Its id.
    pub pid: u32,
    /// Its name, as the kernel cuts it.
    pub name: String,
    /// Resident pages.
    pub rss_bytes: u64,
    /// Resident pages of no file: heap, stacks, tensors.
    pub anonymous_bytes: u64,
    /// Resident pages of mapped files.
    pub file_bytes: u64,
    /// Resident shared memory.
    pub shared_bytes: u64,
    /// Pages in swap.
    pub swap_bytes: u64,
    /// Threads.
    pub threads: u64,
    /// Page faults so far that needed no disk.
    pub minor_faults: u64,
    /// Page faults so far that did.
    pub major_faults: u64,
}

fn folder(pid: u32) -> PathBuf {
    Path::new("/proc").join(pid.to_string())
}

/// A process now; `None` if it has ended, a zombie included.
pub fn process(files: &SystemFiles, pid: u32) -> Option<ProcessSample> {
    let folder = folder(pid);
    let status = files.read(&folder.join("status"))?;
    let stat = Stat::parse(&files.read(&folder.join("stat"))?)?;
    if stat.has_ended {
        return None;
    }
    let memory = ProcessMemory::parse(&status);
    let bytes = |size: Option<plimsoll_memory::ByteSize>| size.map_or(0, |size| size.0);
    Some(ProcessSample {
        pid,
        name: field(&status, "Name").unwrap_or_default().to_owned(),
        rss_bytes: bytes(memory.resident),
        anonymous_bytes: bytes(memory.anonymous),
        file_bytes: bytes(memory.file),
        shared_bytes: bytes(memory.shared),
        swap_bytes: bytes(memory.swapped),
        threads: field(&status, "Threads").and_then(|n| n.parse().ok()).unwrap_or(0),
        minor_faults: stat.minor_faults,
        major_faults: stat.major_faults,
    })
}

/// What a process takes where pages that several share are divided among them (`Pss` and `SwapPss`): sums over processes count no
/// page twice. The kernel walks all page tables for it; `None` where it may not be asked.
pub fn proportional_bytes(files: &SystemFiles, pid: u32) -> Option<u64> {
    let text = files.read(&folder(pid).join("smaps_rollup"))?;
    Some(kilobytes(&text, "Pss")? + kilobytes(&text, "SwapPss").unwrap_or(0))
}

/// A process and its descendants, the process first; empty if it has ended.
pub fn tree(files: &SystemFiles, root: u32) -> Vec<u32> {
    let mut children: HashMap<u32, Vec<u32>> = HashMap::new();
    let mut found = Vec::new();
    for pid in files.names(Path::new("/proc")).iter().filter_map(|name| name.parse::<u32>().ok()) {
        let stat = files.read(&folder(pid).join("stat"));
        let Some(stat) = stat.as_deref().and_then(Stat::parse).filter(|stat| !stat.has_ended) else {
            continue;
        };
        children.entry(stat.parent).or_default().push(pid);
        if pid == root {
            found.push(pid);
        }
    }
    let mut next = 0;
    while let Some(pid) = found.get(next) {
        // Taken out, so that a system that contradicts itself gives no endless loop.
        let mut own = children.remove(pid).unwrap_or_default();
        own.sort_unstable();
        found.extend(own.into_iter().filter(|child| *child != root));
        next += 1;
    }
    found
}

/// What `/proc/PID/stat` says.
#[derive(Debug, PartialEq, Eq)]
struct Stat {
    parent: u32,
    minor_faults: u64,
    major_faults: u64,
    has_ended: bool,
}

impl Stat {
    /// The name in brackets may hold anything, brackets and blanks too.
    fn parse(text: &str) -> Option<Stat> {
        let (_, rest) = text.rsplit_once(')')?;
        let fields: Vec<&str> = rest.split_whitespace().collect();
        let number = |place: usize| fields.get(place).and_then(|text| text.parse::<u64>().ok());
        Some(Stat {
            has_ended: matches!(*fields.first()?, "Z" | "X"),
            parent: u32::try_from(number(1)?).ok()?,
            minor_faults: number(7)?,
            major_faults: number(9)?,
        })
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A system of these files.
    pub fn system(files: &[(&str, &str)]) -> (tempfile::TempDir, SystemFiles) {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        let files = SystemFiles::under(root.path());
        (root, files)
    }

    const STATUS: &str = "Name:\tpython\nVmRSS:\t 300 kB\nRssAnon:\t 200 kB\nRssFile:\t 90 kB\nRssShmem:\t 10 kB\nVmSwap:\t 5 kB\nThreads:\t7\n";

    #[test]
    fn a_process_and_its_descendants_are_found() {
        let (_root, files) = system(&[
            ("proc/10/stat", "10 (py) thon (x)) S 1 10 10 0 -1 4 111 0 22 0 5 6"),
            ("proc/10/status", STATUS),
            ("proc/12/stat", "12 (worker) R 10 10 10 0 -1 4 1 0 2 0 5 6"),
            ("proc/13/stat", "13 (deep) S 12 10 10 0 -1 4 1 0 2 0 5 6"),
            ("proc/14/stat", "14 (gone) Z 10 10 10 0 -1 4 1 0 2 0 5 6"),
            ("proc/20/stat", "20 (other) S 1 10 10 0 -1 4 1 0 2 0 5 6"),
            ("proc/30/stat", "garbage"),
            ("proc/10/smaps_rollup", "Pss: 250 kB\nSwapPss: 5 kB\n"),
        ]);
        assert_eq!(tree(&files, 10), [10, 12, 13]);
        assert!(tree(&files, 14).is_empty());
        let sample = process(&files, 10).unwrap();
        assert_eq!(
            (sample.rss_bytes, sample.anonymous_bytes, sample.swap_bytes),
            (300 << 10, 200 << 10, 5 << 10)
        );
        assert_eq!((sample.minor_faults, sample.major_faults, sample.threads), (111, 22, 7));
        assert_eq!(sample.name, "python");
        assert_eq!(proportional_bytes(&files, 10), Some(255 << 10));
        assert_eq!(
            (process(&files, 14), process(&files, 99), proportional_bytes(&files, 12)),
            (None, None, None)
        );
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn this_process_is_seen_with_its_memory() {
        let files = SystemFiles::of_this_machine();
        let mine = std::hint::black_box(vec![1u8; 32 << 20]);
        let sample = process(&files, std::process::id()).unwrap();
        assert!(sample.anonymous_bytes >= mine.len() as u64, "{sample:?}");
        assert!(tree(&files, std::process::id()).contains(&std::process::id()));
    }

    proptest! {
        #[test]
        fn any_stat_is_parsed_without_panic(text in "[0-9a-zA-Z() -]{0,60}") {
            let _ = Stat::parse(&text);
        }
    }
}
