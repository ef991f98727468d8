//! What is said of a machine, and what is kept of its speed.

use std::path::Path;
use std::time::Duration;

use plimsoll_memory::ByteSize;
use plimsoll_plan::hardware::{CgroupVersion, ContainerLimit, Cpu, Memory, disk_space};
use plimsoll_plan::{DiskName, DiskRates, Measured, RatesFile};

fn cpu(allowed_cores: Option<usize>, logical_cores: Option<usize>) -> Cpu {
    Cpu {
        name: Some("Some CPU".to_owned()),
        architecture: "x86_64",
        logical_cores,
        allowed_cores,
        physical_cores: None,
        quota_cores: None,
        threads: 2,
        instruction_sets: vec!["AVX2"],
    }
}

#[test]
fn cores_are_counted_of_all_where_some_are_not_allowed() {
    for (allowed, logical, said) in [
        (Some(2), Some(4), "2 of 4 logical cores allowed"),
        (Some(4), Some(4), "4 logical cores"),
        (Some(8), Some(4), "8 logical cores"),
        (Some(3), None, "3 logical cores"),
        (None, Some(4), "4 logical cores"),
        (None, None, "unknown number of cores"),
    ] {
        let expected = format!("CPU        Some CPU (x86_64)\n           {said}: 2 threads\n           AVX2");
        assert_eq!(cpu(allowed, logical).to_string(), expected);
    }
}

#[test]
fn memory_is_shown_with_every_limit() {
    let size = |mib: u64| Some(ByteSize(mib << 20));
    let container = ContainerLimit {
        limit: ByteSize(1 << 30),
        free: None,
        version: CgroupVersion::V1,
        file: "/sys/fs/cgroup/memory/limit".into(),
    };
    let memory = Memory {
        total: size(4096),
        swap_total: size(512),
        swap_free: size(256),
        container: Some(container),
        data_limit: size(3072),
        ..Memory::default()
    };
    assert_eq!(
        memory.to_string(),
        "Memory     4.00 GiB in all, unknown available, 256.0 MiB of 512.0 MiB swap free\n           \
         1.00 GiB at most in the container (cgroup v1, /sys/fs/cgroup/memory/limit)\n           \
         3.00 GiB of private memory at most (ulimit -d)"
    );
    let none = Memory { swap_total: size(0), swap_free: size(0), ..Memory::default() };
    assert_eq!(none.to_string(), "Memory     unknown in all, unknown available, no swap");
    assert_eq!(Memory::default().to_string(), "Memory     unknown in all, unknown available");
}

#[cfg(target_os = "linux")]
#[test]
fn this_machine_has_memory_and_a_disk() {
    assert!(Memory::detect().total.is_some_and(|total| total.0 > 1 << 20));
    let space = disk_space(Path::new("/")).unwrap();
    assert!(space.total.0 > 1 << 20 && space.available <= space.total, "{space:?}");
}

#[test]
fn a_disk_is_known_by_both_of_its_rates() {
    let folder = tempfile::tempdir().unwrap();
    let file = RatesFile::at(folder.path().join("rates.json"));
    let name = DiskName { cpu: "c".to_owned(), folder: "/".into(), device: 1 };
    for (read, write, known) in [
        (2e9, 1e9, true),
        (0.0, 1e9, false),
        (2e9, 0.5, false),
        (-1.0, -1.0, false),
        (1.0, 1e18, true),
        (1.0, 2e18, false),
    ] {
        file.keep_disk(name.clone(), Measured::now(DiskRates { read, write })).unwrap();
        assert_eq!(file.disk(&name).is_some(), known, "{read} {write}");
    }
}

#[test]
fn a_measurement_has_an_age() {
    const YEAR: Duration = Duration::from_secs(365 * 24 * 3600);
    let old = Measured { rates: (), at: 0 };
    assert!(old.age() > 50 * YEAR && Measured::now(()).age() < YEAR);
    assert!(Measured::now(()).at > 50 * YEAR.as_secs());
}
