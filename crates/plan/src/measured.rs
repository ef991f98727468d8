//! Speeds of machines and disks, measured once and kept in a file of the user's cache folder. So a plan does not change
//! because the machine was busy while the plan was made.
//!
//! When to measure is left to others. A file that cannot be read, or holds impossible numbers, counts as none.

use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use crate::hardware::Cpu;
use crate::time::{DiskRates, Rates};

/// The file's layout.
const FORMAT: u32 = 3;

/// Bytes of a file that are read: far more than all entries take.
const MOST_BYTES: u64 = 1 << 20;

/// Machines and disks that are kept, the latest.
const MOST_ENTRIES: usize = 64;

/// A clock may have been set back by this much since a measurement.
const CLOCK_ERROR: u64 = 24 * 3600;

/// What a machine's speed depends on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachineName {
    /// The processor.
    pub cpu: String,
    /// Its logical cores.
    pub cores: Option<usize>,
    /// Threads that compute.
    pub threads: usize,
    /// The instruction set that kernels are chosen for.
    pub kernels: String,
    /// The version of this program, which has the kernels.
    pub version: String,
}

impl MachineName {
    /// This machine with so many threads.
    pub fn of(cpu: &Cpu, threads: usize, kernels: String) -> MachineName {
        let (name, cores) = (cpu.name.clone().unwrap_or_default(), cpu.logical_cores);
        let version = env!("CARGO_PKG_VERSION").to_owned();
        MachineName { cpu: name, cores, threads, kernels, version }
    }
}

/// A disk of a machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskName {
    /// The processor of the machine: a cache folder may be on a network, the disk is not.
    pub cpu: String,
    /// The topmost folder of the file system.
    pub folder: PathBuf,
    /// The system's number for it.
    pub device: u64,
}

impl DiskName {
    /// The disk that holds a folder which exists; `None` where the system does not say.
    #[cfg(unix)]
    pub fn of(cpu: &Cpu, folder: &Path) -> Option<DiskName> {
        use std::os::unix::fs::MetadataExt;
        let folder = folder.canonicalize().ok()?;
        let device = folder.metadata().ok()?.dev();
        let same = |folder: &&Path| folder.metadata().is_ok_and(|found| found.dev() == device);
        let folder = folder.ancestors().take_while(same).last()?.to_owned();
        Some(DiskName { cpu: cpu.name.clone().unwrap_or_default(), folder, device })
    }

    /// The disk that holds a folder which exists; `None` where the system does not say.
    #[cfg(not(unix))]
    pub fn of(_: &Cpu, _: &Path) -> Option<DiskName> {
        None
    }
}

/// A measurement.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Measured<T> {
    /// What was found.
    pub rates: T,
    /// When, in seconds since 1970.
    pub at: u64,
}

impl<T> Measured<T> {
    /// Found just now.
    pub fn now(rates: T) -> Measured<T> {
        Measured { rates, at: seconds_since_1970() }
    }

    /// How long ago it was found.
    pub fn age(&self) -> Duration {
        Duration::from_secs(seconds_since_1970().saturating_sub(self.at))
    }
}

/// The file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RatesFile {
    path: PathBuf,
}

#[derive(Debug, Default, Serialize, Deserialize)]
struct Content {
    format: u32,
    machines: Vec<Entry<MachineName, Rates>>,
    disks: Vec<Entry<DiskName, DiskRates>>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Entry<N, T> {
    name: N,
    measured: Measured<T>,
}

impl RatesFile {
    /// A file of any name.
    pub fn at(path: impl Into<PathBuf>) -> RatesFile {
        RatesFile { path: path.into() }
    }

    /// `plimsoll/rates.json` in the folder for caches: `XDG_CACHE_HOME`, by default `.cache` in `HOME`. `None` where neither
    /// is set to an absolute path.
    pub fn from_variables(variable: &dyn Fn(&str) -> Option<OsString>) -> Option<RatesFile> {
        let folder = |key: &str| variable(key).map(PathBuf::from).filter(|folder| folder.is_absolute());
        let caches = folder("XDG_CACHE_HOME").or_else(|| Some(folder("HOME")?.join(".cache")))?;
        Some(RatesFile::at(caches.join("plimsoll").join("rates.json")))
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What is known of a machine.
    pub fn machine(&self, name: &MachineName) -> Option<Measured<Rates>> {
        find(&self.read().machines, name, |rates| rates.fault().is_none())
    }

    /// What is known of a disk.
    pub fn disk(&self, name: &DiskName) -> Option<Measured<DiskRates>> {
        find(&self.read().disks, name, DiskRates::is_sound)
    }

    /// Keeps what was measured of a machine.
    ///
    /// # Errors
    /// The file cannot be written; it stays as it was.
    pub fn keep_machine(&self, name: MachineName, measured: Measured<Rates>) -> io::Result<()> {
        let mut content = self.read();
        put(&mut content.machines, name, measured);
        self.write(content)
    }

    /// Keeps what was measured of a disk.
    ///
    /// # Errors
    /// The file cannot be written; it stays as it was.
    pub fn keep_disk(&self, name: DiskName, measured: Measured<DiskRates>) -> io::Result<()> {
        let mut content = self.read();
        put(&mut content.disks, name, measured);
        self.write(content)
    }

    /// Forgets the disks of a machine, so that each is measured when it is used next.
    ///
    /// # Errors
    /// The file cannot be written; it stays as it was.
    pub fn forget_disks(&self, cpu: &Cpu) -> io::Result<()> {
        let mut content = self.read();
        content.disks.retain(|entry| Some(&entry.name.cpu) != cpu.name.as_ref());
        self.write(content)
    }

    fn read(&self) -> Content {
        let content = || -> Option<Content> {
            // A pipe would be waited for.
            if !self.path.metadata().ok()?.is_file() {
                return None;
            }
            let mut bytes = Vec::new();
            std::fs::File::open(&self.path).ok()?.take(MOST_BYTES).read_to_end(&mut bytes).ok()?;
            serde_json::from_slice(&bytes).ok()
        };
        content().filter(|content| content.format == FORMAT).unwrap_or_default()
    }

    /// Written aside and renamed: a reader sees all of it or what was there before.
    fn write(&self, content: Content) -> io::Result<()> {
        let folder = self.path.parent().unwrap_or(Path::new("."));
        std::fs::create_dir_all(folder)?;
        let mut aside = tempfile::NamedTempFile::new_in(folder)?;
        serde_json::to_writer_pretty(&mut aside, &Content { format: FORMAT, ..content })?;
        aside.write_all(b"\n")?;
        aside.persist(&self.path).map_err(|error| error.error)?;
        Ok(())
    }
}

fn find<N: PartialEq, T: Copy>(
    entries: &[Entry<N, T>],
    name: &N,
    sound: impl Fn(&T) -> bool,
) -> Option<Measured<T>> {
    let latest = seconds_since_1970().saturating_add(CLOCK_ERROR);
    let found = entries.iter().find(|entry| entry.name == *name)?.measured;
    (found.at <= latest && sound(&found.rates)).then_some(found)
}

fn put<N: PartialEq, T>(entries: &mut Vec<Entry<N, T>>, name: N, measured: Measured<T>) {
    entries.retain(|entry| entry.name != name);
    entries.insert(0, Entry { name, measured });
    entries.truncate(MOST_ENTRIES);
}

fn seconds_since_1970() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hardware::Hardware;

    const RATES: Rates = Rates::of_cpu([1e11, 2e11], 1e10, 1e9);

    fn name(threads: usize) -> MachineName {
        MachineName::of(&Hardware::detect().cpu, threads, "AVX2".to_owned())
    }

    #[test]
    fn what_was_measured_is_found_again_by_its_name_alone() {
        let folder = tempfile::tempdir().unwrap();
        let file = RatesFile::at(folder.path().join("below/rates.json"));
        assert_eq!(file.machine(&name(2)), None);
        let measured = Measured::now(RATES);
        file.keep_machine(name(2), measured).unwrap();
        file.keep_machine(name(3), Measured { rates: Rates { exps: 2e9, ..RATES }, ..measured }).unwrap();
        assert_eq!(file.machine(&name(2)), Some(measured));
        assert_eq!(file.machine(&name(3)).unwrap().rates.exps, 2e9);
        assert_eq!(file.machine(&MachineName { version: "0.0.0".to_owned(), ..name(2) }), None);

        let cpu = Hardware::detect().cpu;
        let disk = DiskName::of(&cpu, folder.path()).unwrap();
        assert!(folder.path().canonicalize().unwrap().starts_with(&disk.folder));
        let speed = Measured::now(DiskRates { read: 3e9, write: 2e9 });
        file.keep_disk(disk.clone(), speed).unwrap();
        assert_eq!((file.disk(&disk), file.machine(&name(2))), (Some(speed), Some(measured)));
        assert_eq!(file.disk(&DiskName { device: disk.device + 1, ..disk.clone() }), None);
        file.forget_disks(&cpu).unwrap();
        assert_eq!((file.disk(&disk), file.machine(&name(2))), (None, Some(measured)));
    }

    #[test]
    fn a_hostile_file_is_none_and_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let file = RatesFile::at(folder.path().join("rates.json"));
        let measured = Measured::now(RATES);
        file.keep_machine(name(2), measured).unwrap();
        let good = std::fs::read_to_string(file.path()).unwrap();
        let at = measured.at.to_string();
        for bad in [
            String::new(),
            "[".repeat(100_000),
            good[..good.len() / 2].to_owned(),
            good.replace("100000000000.0", "-1.0"),
            good.replace("100000000000.0", "1e300"),
            good.replace("100000000000.0", "null"),
            good.replace(&at, "18446744073709551615"),
            good.replace(&format!("\"format\": {FORMAT}"), "\"format\": 2"),
        ] {
            assert_ne!(bad, good);
            std::fs::write(file.path(), &bad).unwrap();
            assert_eq!(file.machine(&name(2)), None, "{:.200}", bad);
            file.keep_machine(name(2), measured).unwrap();
            assert_eq!(file.machine(&name(2)), Some(measured));
        }
        // What cannot be replaced is an error, and no more.
        let nowhere = RatesFile::at(folder.path().join("rates.json/rates.json"));
        assert_eq!(nowhere.machine(&name(2)), None);
        assert!(nowhere.keep_machine(name(2), measured).is_err());
    }

    #[test]
    fn the_file_does_not_grow_without_end() {
        let folder = tempfile::tempdir().unwrap();
        let file = RatesFile::at(folder.path().join("rates.json"));
        (0..MOST_ENTRIES + 6).for_each(|n| file.keep_machine(name(n), Measured::now(RATES)).unwrap());
        assert_eq!(file.read().machines.len(), MOST_ENTRIES);
        assert!(file.machine(&name(MOST_ENTRIES + 5)).is_some() && file.machine(&name(0)).is_none());
    }

    #[test]
    fn the_folder_for_caches_is_where_the_user_says() {
        let of = |set: &[(&str, &str)]| {
            let variable = |key: &str| {
                set.iter().find(|(name, _)| *name == key).map(|(_, value)| OsString::from(*value))
            };
            RatesFile::from_variables(&variable).map(|file| file.path().to_owned())
        };
        let path = |path: &str| Some(PathBuf::from(path));
        assert_eq!(of(&[("HOME", "/home/me")]), path("/home/me/.cache/plimsoll/rates.json"));
        assert_eq!(of(&[("HOME", "/home/me"), ("XDG_CACHE_HOME", "/c")]), path("/c/plimsoll/rates.json"));
        assert_eq!(
            of(&[("HOME", "/home/me"), ("XDG_CACHE_HOME", "c")]),
            path("/home/me/.cache/plimsoll/rates.json")
        );
        assert_eq!(of(&[]), None);
    }
}
