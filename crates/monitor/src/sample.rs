//! What is watched, and samples of it: a process with its descendants or a control group, and GPUs beside.
//!
//! Some numbers cost more than others: the kernel walks page tables for proportional sizes, and finding descendants reads every
//! process. Each of these is asked for so seldom that it takes a few thousandths of the time.

use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use plimsoll_plan::hardware::{Memory, SystemFiles, container_of};
use serde::Serialize;

use crate::gpu::{GpuSample, Gpus};
use crate::group::{GroupSample, group, processes_of};
use crate::process::{ProcessSample, process, proportional_bytes, tree};

/// Something that costs much is asked for again after so many times its own time: two thousandths of the time.
const SELDOM: u32 = 500;

/// The same where it is known to have changed.
const SOONER: u32 = 20;

/// What is watched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Watched {
    /// A process and its descendants.
    Process(u32),
    /// A control group, by its folder, and its processes.
    Group(PathBuf),
    /// GPUs alone.
    Gpus,
}

/// Who says how much memory may be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum LimitedBy {
    /// Whoever started the monitor.
    Asked,
    /// The control group.
    Container,
    /// The machine's memory.
    Machine,
    /// The memory of a GPU.
    Gpu,
}

impl LimitedBy {
    /// In words.
    pub fn words(self) -> &'static str {
        match self {
            LimitedBy::Asked => "the given limit",
            LimitedBy::Container => "the container's limit",
            LimitedBy::Machine => "the machine's memory",
            LimitedBy::Gpu => "the GPU's memory",
        }
    }
}

/// A limit and what is used of it, by whomever.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Room {
    /// The limit.
    pub limit_bytes: u64,
    /// What counts against it.
    pub used_bytes: u64,
    /// Who says so.
    pub limited_by: LimitedBy,
}

impl Room {
    /// The share in use.
    pub fn share(&self) -> f64 {
        self.used_bytes as f64 / self.limit_bytes.max(1) as f64
    }
}

/// What was seen at a moment. Sizes are in bytes, over all processes.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Sample {
    /// Seconds since 1970.
    pub time: f64,
    /// The process that is watched.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// Resident sets together; pages that processes share count for each.
    pub rss_bytes: u64,
    /// Resident pages of no file.
    pub anonymous_bytes: u64,
    /// Resident pages of mapped files; of a group, its page cache.
    pub file_bytes: u64,
    /// Shared memory.
    pub shared_bytes: u64,
    /// Pages in swap.
    pub swap_bytes: u64,
    /// The sum in which pages that processes share are divided among them: as of the last time that the kernel was asked, and what resident
    /// sets of processes that were there then have grown or shrunk by since.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub proportional_bytes: Option<u64>,
    /// Page faults so far that needed no disk.
    pub minor_faults: u64,
    /// Page faults so far that did.
    pub major_faults: u64,
    /// Threads.
    pub threads: u64,
    /// The processes, the largest first.
    pub processes: Vec<ProcessSample>,
    /// The control group, if one is watched.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cgroup: Option<GroupSample>,
    /// The tightest limit and what is used of it.
    #[serde(flatten)]
    pub room: Option<Room>,
    /// GPUs.
    pub gpu: Vec<GpuSample>,
}

/// Something that is asked for seldom.
#[derive(Debug, Default)]
struct Seldom<T> {
    last: Option<T>,
    /// When it was asked for last, and how long that took.
    asked: Option<(Instant, Duration)>,
}

impl<T> Seldom<T> {
    /// As it was last, if it need not be asked for again after so many times the time that it took.
    fn get(&mut self, times: u32, ask: impl FnOnce() -> T) -> Option<&T> {
        let begun = Instant::now();
        let is_due = |(asked, took): (Instant, Duration)| begun >= asked + took.saturating_mul(times);
        if self.asked.is_none_or(is_due) {
            self.last = Some(ask());
            self.asked = Some((Instant::now(), begun.elapsed()));
        }
        self.last.as_ref()
    }
}

/// What processes take together, and the resident set that each had then.
#[derive(Debug)]
struct Proportional {
    bytes: u64,
    resident: Vec<(u32, u64)>,
}

impl Proportional {
    fn ask(files: &SystemFiles, processes: &[ProcessSample]) -> Option<Proportional> {
        let bytes: Option<u64> = processes.iter().map(|process| proportional_bytes(files, process.pid)).sum();
        let resident = processes.iter().map(|process| (process.pid, process.rss_bytes)).collect();
        Some(Proportional { bytes: bytes?, resident })
    }

    /// Whether it is of just these processes.
    fn is_of(&self, processes: &[ProcessSample]) -> bool {
        let is_there = |process: &ProcessSample| self.resident.iter().any(|(pid, _)| *pid == process.pid);
        self.resident.len() == processes.len() && processes.iter().all(is_there)
    }

    /// With what has grown or shrunk since. What came or went counts when the kernel is asked again: pages that a child has of its parent
    /// are in both resident sets.
    fn now(&self, processes: &[ProcessSample]) -> u64 {
        let (mut bytes, mut then) = (self.bytes, 0);
        for (pid, resident) in &self.resident {
            if let Some(process) = processes.iter().find(|process| process.pid == *pid) {
                bytes = bytes.saturating_add(process.rss_bytes);
                then += resident;
            }
        }
        bytes.saturating_sub(then)
    }
}

/// Takes samples.
pub struct Sampler {
    files: SystemFiles,
    watched: Watched,
    gpus: Option<(Box<dyn Gpus>, Vec<u32>)>,
    limit: Option<u64>,
    descendants: Seldom<Vec<u32>>,
    proportional: Seldom<Option<Proportional>>,
    started: Instant,
    started_at: f64,
}

impl Sampler {
    /// For what is watched, on this machine; `limit`: bytes that it may take, where that is not what container and machine allow.
    pub fn new(watched: Watched, limit: Option<u64>) -> Sampler {
        Sampler::on(SystemFiles::of_this_machine(), watched, limit)
    }

    /// The same for a system of these files.
    pub fn on(files: SystemFiles, watched: Watched, limit: Option<u64>) -> Sampler {
        let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
        Sampler {
            files,
            watched,
            gpus: None,
            limit,
            descendants: Seldom { last: None, asked: None },
            proportional: Seldom { last: None, asked: None },
            started: Instant::now(),
            started_at: since_1970.as_secs_f64(),
        }
    }

    /// With these GPUs beside.
    pub fn with_gpus(self, gpus: Box<dyn Gpus>, indices: Vec<u32>) -> Sampler {
        Sampler { gpus: Some((gpus, indices)), ..self }
    }

    /// What is there now; `None` when what is watched has ended.
    pub fn sample(&mut self) -> Option<Sample> {
        // A clock that is set meanwhile moves nothing.
        let time = self.started_at + self.started.elapsed().as_secs_f64();
        let mut sample = Sample { time, ..Sample::default() };
        let files = &self.files;
        let pids = match &self.watched {
            Watched::Process(pid) => {
                sample.pid = Some(*pid);
                let mut pids =
                    self.descendants.get(SELDOM, || tree(files, *pid)).cloned().unwrap_or_default();
                if !pids.contains(pid) {
                    pids.insert(0, *pid);
                }
                pids
            }
            Watched::Group(folder) => {
                sample.cgroup = Some(group(files, folder)?);
                processes_of(files, folder)
            }
            Watched::Gpus => Vec::new(),
        };
        sample.processes = pids.iter().filter_map(|pid| process(files, *pid)).collect();
        if let Watched::Process(pid) = self.watched
            && !sample.processes.iter().any(|process| process.pid == pid)
        {
            return None;
        }
        sample.add_processes();
        if sample.processes.len() > 1 && sample.cgroup.is_none() {
            let processes = &sample.processes;
            let last = self.proportional.last.as_ref().and_then(Option::as_ref);
            let times = if last.is_some_and(|last| !last.is_of(processes)) { SOONER } else { SELDOM };
            let known = self.proportional.get(times, || Proportional::ask(files, processes));
            sample.proportional_bytes = known.and_then(Option::as_ref).map(|known| known.now(processes));
        }
        if let Some((gpus, indices)) = &mut self.gpus {
            sample.gpu = indices.iter().filter_map(|index| gpus.sample(*index).ok()).collect();
        }
        sample.room = self.room(&sample);
        Some(sample)
    }

    /// The limit that is nearest.
    fn room(&self, sample: &Sample) -> Option<Room> {
        let room = |limit_bytes: u64, used_bytes, limited_by| Room { limit_bytes, used_bytes, limited_by };
        if let Some(limit) = self.limit {
            let used = match (&sample.cgroup, &self.watched) {
                (Some(group), _) => group.used_bytes,
                (_, Watched::Gpus) => sample.gpu.iter().map(|gpu| gpu.used_bytes).max()?,
                _ => sample.proportional_bytes.map_or(sample.rss_bytes, |all| all.min(sample.rss_bytes)),
            };
            return Some(room(limit, used, LimitedBy::Asked));
        }
        let gpus = sample.gpu.iter().map(|gpu| room(gpu.total_bytes, gpu.used_bytes, LimitedBy::Gpu));
        let mut all: Vec<Room> = gpus.collect();
        let memory = Memory::under(&self.files);
        if let (Some(total), Some(available), false) =
            (memory.total, memory.available, self.watched == Watched::Gpus)
        {
            all.push(room(total.0, total.0.saturating_sub(available.0), LimitedBy::Machine));
        }
        let pid = sample.pid.or_else(|| sample.processes.first().map(|process| process.pid));
        if let Some(found) = pid.and_then(|pid| container_of(&self.files, pid))
            && let Some(free) = found.free
        {
            let used = found.limit.0.saturating_sub(free.0);
            all.push(room(found.limit.0, used, LimitedBy::Container));
        }
        if let Some(group) = &sample.cgroup
            && let Some(limit) = group.limit_bytes
        {
            all.push(room(limit, group.used_bytes, LimitedBy::Container));
        }
        all.into_iter().max_by(|a, b| a.share().total_cmp(&b.share()))
    }
}

impl Sample {
    /// Sets the sums over processes, or those that the group has itself.
    fn add_processes(&mut self) {
        let sum = |of: fn(&ProcessSample) -> u64| self.processes.iter().map(of).sum::<u64>();
        (self.rss_bytes, self.threads) = (sum(|p| p.rss_bytes), sum(|p| p.threads));
        match &self.cgroup {
            Some(group) => {
                self.anonymous_bytes = group.anonymous_bytes;
                self.file_bytes = group.file_bytes;
                self.shared_bytes = group.shared_bytes;
                self.swap_bytes = group.swap_bytes;
                self.minor_faults = group.minor_faults;
                self.major_faults = group.major_faults;
            }
            None => {
                self.anonymous_bytes = sum(|p| p.anonymous_bytes);
                self.file_bytes = sum(|p| p.file_bytes);
                self.shared_bytes = sum(|p| p.shared_bytes);
                self.swap_bytes = sum(|p| p.swap_bytes);
                self.minor_faults = sum(|p| p.minor_faults);
                self.major_faults = sum(|p| p.major_faults);
            }
        }
        self.processes.sort_by_key(|process| std::cmp::Reverse(process.rss_bytes));
    }
}

#[cfg(test)]
mod tests {
    use plimsoll_memory::NvmlError;

    use super::*;
    use crate::process::tests::system;

    struct OneGpu;

    impl Gpus for OneGpu {
        fn sample(&mut self, index: u32) -> Result<GpuSample, NvmlError> {
            let gpu = GpuSample { index, used_bytes: 30, total_bytes: 40, processes: Vec::new() };
            if index == 0 { Ok(gpu) } else { Err(NvmlError::NoFunction("x".to_owned())) }
        }
    }

    const FILES: [(&str, &str); 8] = [
        ("proc/meminfo", "MemTotal: 1000 kB\nMemAvailable: 600 kB\n"),
        ("proc/10/stat", "10 (python) S 1 10 10 0 -1 4 111 0 22 0 5 6"),
        (
            "proc/10/status",
            "Name:\tpython\nVmRSS:\t300 kB\nRssAnon:\t200 kB\nRssFile:\t100 kB\nThreads:\t2\n",
        ),
        ("proc/10/smaps_rollup", "Pss: 250 kB\n"),
        ("proc/12/stat", "12 (worker) R 10 10 10 0 -1 4 1 0 2 0 5 6"),
        ("proc/12/status", "Name:\tworker\nVmRSS:\t400 kB\nRssAnon:\t400 kB\nThreads:\t1\n"),
        ("proc/12/smaps_rollup", "Pss: 350 kB\n"),
        ("g/memory.current", "512000"),
    ];

    #[test]
    fn a_tree_of_processes_is_added_up() {
        let (root, files) = system(&FILES);
        let mut sampler =
            Sampler::on(files, Watched::Process(10), None).with_gpus(Box::new(OneGpu), vec![0, 1]);
        let sample = sampler.sample().unwrap();
        assert_eq!((sample.rss_bytes, sample.anonymous_bytes, sample.threads), (700 << 10, 600 << 10, 3));
        assert_eq!(sample.proportional_bytes, Some(600 << 10));
        assert_eq!(sample.processes[0].name, "worker");
        assert_eq!(sample.gpu.len(), 1);
        // The GPU is fuller than the machine.
        assert_eq!(sample.room, Some(Room { limit_bytes: 40, used_bytes: 30, limited_by: LimitedBy::Gpu }));
        let json = serde_json::to_value(&sample).unwrap();
        assert_eq!((&json["limit_bytes"], &json["rss_bytes"]), (&40.into(), &(700 << 10).into()));
        std::fs::remove_dir_all(root.path().join("proc/10")).unwrap();
        assert_eq!(sampler.sample(), None);
    }

    #[test]
    fn what_processes_grow_by_counts_before_the_kernel_is_asked_again() {
        let (root, files) = system(&FILES);
        let mut sampler = Sampler::on(files, Watched::Process(10), Some(1 << 20));
        sampler.sample().unwrap();
        // The next time is far away.
        let far = Some((Instant::now(), Duration::from_secs(3600)));
        sampler.proportional.asked = far;
        for (resident, used) in [("900 kB", 1100 << 10), ("350 kB", 550 << 10)] {
            let status = format!("Name:\tworker\nVmRSS:\t{resident}\nRssAnon:\t400 kB\nThreads:\t1\n");
            std::fs::write(root.path().join("proc/12/status"), status).unwrap();
            assert_eq!(sampler.sample().unwrap().room.unwrap().used_bytes, used);
        }
        // A child of the worker shares its pages, and so does what is left when it ends.
        let path = |name: &str| root.path().join("proc").join(name);
        std::fs::create_dir(path("14")).unwrap();
        std::fs::write(path("14/stat"), "14 (child) R 12 10 10 0 -1 4 1 0 2 0 5 6").unwrap();
        std::fs::write(path("14/status"), "Name:\tchild\nVmRSS:\t340 kB\nThreads:\t1\n").unwrap();
        sampler.descendants.asked = None;
        assert_eq!(sampler.sample().unwrap().room.unwrap().used_bytes, 550 << 10);
        std::fs::write(path("14/smaps_rollup"), "Pss: 20 kB\n").unwrap();
        sampler.proportional.asked = None;
        assert_eq!(sampler.sample().unwrap().room.unwrap().used_bytes, 620 << 10);
        sampler.proportional.asked = far;
        std::fs::remove_dir_all(path("14")).unwrap();
        assert_eq!(sampler.sample().unwrap().room.unwrap().used_bytes, 620 << 10);
    }

    #[test]
    fn a_limit_that_was_asked_for_is_for_what_is_watched_alone() {
        let (_root, files) = system(&FILES);
        let mut sampler = Sampler::on(files.clone(), Watched::Process(10), Some(1 << 20));
        let room = sampler.sample().unwrap().room.unwrap();
        assert_eq!((room.used_bytes, room.limited_by), (600 << 10, LimitedBy::Asked));
        let room = Sampler::on(files.clone(), Watched::Process(10), None).sample().unwrap().room.unwrap();
        assert_eq!((room.used_bytes, room.limited_by), (400 << 10, LimitedBy::Machine));
        let sample = Sampler::on(files.clone(), Watched::Group("/g".into()), Some(1 << 20)).sample().unwrap();
        assert_eq!(sample.room.unwrap().used_bytes, 512_000);
        assert_eq!(Sampler::on(files, Watched::Group("/none".into()), None).sample(), None);
    }
}
