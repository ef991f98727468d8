//! One message, in whatever words.

use std::str::FromStr;

use plimsoll_memory::ByteSize;
use serde::Serialize;

/// Who says that memory ran out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    /// PyTorch's caching allocator, on CUDA or HIP.
    Torch,
    /// PyTorch on Apple's GPUs.
    Mps,
    /// CUDA or HIP itself.
    Cuda,
    /// cuBLAS, cuDNN or NCCL.
    Library,
    /// XLA: JAX and TensorFlow.
    Xla,
    /// llama.cpp.
    LlamaCpp,
    /// An allocator of host memory.
    HostAllocator,
    /// Data workers, of `/dev/shm`.
    SharedMemory,
    /// The kernel, for the whole machine.
    Kernel,
    /// The kernel, for a control group: a container or a job.
    Cgroup,
    /// Kubernetes.
    Kubernetes,
    /// SLURM.
    Slurm,
    /// A launcher, of a process that was killed.
    Launcher,
}

impl Source {
    /// Whether it is about a device's memory.
    pub fn is_device(self) -> bool {
        matches!(self, Source::Torch | Source::Mps | Source::Cuda | Source::Xla | Source::LlamaCpp)
    }

    /// How much it says: of several messages, the first that says most counts.
    pub(super) fn weight(self) -> u8 {
        match self {
            Source::Launcher => 0,
            Source::Kubernetes | Source::Slurm => 1,
            Source::Library | Source::Cuda => 2,
            _ => 3,
        }
    }

    /// In words.
    pub fn name(self) -> &'static str {
        match self {
            Source::Torch => "PyTorch's allocator",
            Source::Mps => "PyTorch on an Apple GPU",
            Source::Cuda => "the GPU's driver",
            Source::Library => "a library of the GPU",
            Source::Xla => "XLA",
            Source::LlamaCpp => "llama.cpp",
            Source::HostAllocator => "an allocator of host memory",
            Source::SharedMemory => "shared memory of data workers",
            Source::Kernel => "the kernel",
            Source::Cgroup => "the kernel, for a container or job",
            Source::Kubernetes => "Kubernetes",
            Source::Slurm => "SLURM",
            Source::Launcher => "the launcher",
        }
    }
}

/// What a message says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Message {
    /// Whose it is.
    pub source: Source,
    /// The number of the GPU.
    pub device: Option<u32>,
    /// What was asked for.
    pub tried: Option<u64>,
    /// What the device has.
    pub total: Option<u64>,
    /// What was free.
    pub free: Option<u64>,
    /// What this process had, in all.
    pub in_use: Option<u64>,
    /// What it may have, where it has a limit of its own.
    pub allowed: Option<u64>,
    /// What tensors had.
    pub allocated: Option<u64>,
    /// What the allocator held and no tensor had.
    pub unallocated: Option<u64>,
    /// The process, where another one tells of it.
    pub process: Option<String>,
}

impl Message {
    fn by(source: Source) -> Message {
        Message {
            source,
            device: None,
            tried: None,
            total: None,
            free: None,
            in_use: None,
            allowed: None,
            allocated: None,
            unallocated: None,
            process: None,
        }
    }

    /// What a line says; `None` where it says nothing of memory that ran out.
    pub fn of(line: &str) -> Option<Message> {
        let has = |words: &str| line.contains(words);
        if has("out of memory. Tried to allocate") && !has("MPS backend") {
            return Some(torch(line));
        }
        if has("MPS backend out of memory") {
            // PyTorch prints KB, MB and GB there, of 1024 each (`format_size` of its MPS allocator).
            let line = line.replace(" KB", " KiB").replace(" MB", " MiB").replace(" GB", " GiB");
            let mut message = Message::by(Source::Mps);
            message.tried = size_after(&line, "Tried to allocate ");
            message.total = size_after(&line, "max allowed: ");
            message.allocated = size_after(&line, "MPS allocated: ");
            let others = size_after(&line, "other allocations: ");
            message.in_use = message.allocated.zip(others).map(|(own, others)| own.saturating_add(others));
            return Some(message);
        }
        if has("RESOURCE_EXHAUSTED") && has("emory") {
            let tried = size_after(line, "trying to allocate ").or_else(|| size_after(line, "allocate "));
            return Some(Message { tried, ..Message::by(Source::Xla) });
        }
        if has("cudaMalloc failed: out of memory") || has("allocating") && has("failed: out of memory") {
            let tried = size_after(line, "allocating ");
            let device = number_after(line, "on device ");
            return Some(Message { tried, device, ..Message::by(Source::LlamaCpp) });
        }
        if has("CUBLAS_STATUS_ALLOC_FAILED")
            || has("CUDNN_STATUS_ALLOC_FAILED")
            || has("Cuda failure") && has("'out of memory'")
        {
            return Some(Message::by(Source::Library));
        }
        if has("CUDA error: out of memory")
            || has("HIP error: out of memory")
            || has("cudaErrorMemoryAllocation")
            || has("CUDA_ERROR_OUT_OF_MEMORY")
        {
            return Some(Message::by(Source::Cuda));
        }
        if has("DefaultCPUAllocator") && has("tried to allocate") {
            return Some(Message {
                tried: size_after(line, "tried to allocate "),
                ..Message::by(Source::HostAllocator)
            });
        }
        if has("numpy.core._exceptions._ArrayMemoryError") || has("_ArrayMemoryError: Unable to allocate") {
            return Some(Message {
                tried: size_after(line, "Unable to allocate "),
                ..Message::by(Source::HostAllocator)
            });
        }
        if has("Bus error") && has("shared memory") {
            return Some(Message::by(Source::SharedMemory));
        }
        if has("ut of memory: Kill") {
            let source = if has("emory cgroup") { Source::Cgroup } else { Source::Kernel };
            return Some(killed(line, source));
        }
        if has("OOMKilled") || has("Exit Code:") && has("137") {
            return Some(Message::by(Source::Kubernetes));
        }
        if has("slurmstepd") && (has("oom_kill") || has("oom-kill")) || has("xceeded job memory limit") {
            return Some(Message::by(Source::Slurm));
        }
        let ended = has("exits with return code = -9")
            || has("exitcode") && has("-9") && !has("-9.")
            || has("Signal 9 (SIGKILL)")
            || has("is killed by signal: Killed")
            || has("died with <Signals.SIGKILL: 9>");
        ended.then(|| Message::by(Source::Launcher))
    }

    /// What the allocator has of the device.
    fn allocator(&self) -> Option<u64> {
        Some(self.allocated?.saturating_add(self.unallocated.unwrap_or(0)))
    }

    /// What this process holds outside of the allocator, where the message says what it has in all.
    pub fn outside(&self) -> Option<u64> {
        self.in_use?.checked_sub(self.allocator()?)
    }

    /// What others hold of the device; this process outside of the allocator too, where what that holds is not known.
    pub fn others(&self) -> Option<u64> {
        // Less than the allocator's is that of another process.
        let own = self.in_use.filter(|_| self.outside().is_some()).or(self.allocator())?;
        Some(self.total?.saturating_sub(self.free?).saturating_sub(own))
    }

    /// Whether more was free than was asked for, and the process may have it.
    pub fn was_free(&self) -> bool {
        self.allowed.is_none() && self.free.zip(self.tried).is_some_and(|(free, tried)| free > tried)
    }

    /// Whether what is held and not used would have been enough, or is a tenth of the device.
    pub fn is_fragmented(&self) -> bool {
        let Some(unallocated) = self.unallocated else { return false };
        let enough = self.tried.is_some_and(|tried| unallocated > tried && unallocated > 256 << 20);
        enough || self.total.is_some_and(|total| unallocated > total / 10)
    }
}

/// PyTorch's own, before 2.1 and since.
fn torch(line: &str) -> Message {
    let mut message = Message::by(Source::Torch);
    message.tried = size_after(line, "Tried to allocate ");
    message.device = number_after(line, "(GPU ").or_else(|| number_after(line, "GPU "));
    message.total = size_before(line, " total capacity")
        .or_else(|| size_after(line, "total capacity of "))
        .or_else(|| size_after(line, "total capacty of "));
    message.free = size_before(line, " free;").or_else(|| size_before(line, " is free"));
    // Of the processes that are listed this one counts; in a container it is one of the numbers.
    let this = line.split_once("this process has ").map_or(line, |(_, behind)| behind);
    message.in_use = size_before(this, " memory in use");
    message.allowed = size_before(line, " allowed;");
    message.allocated =
        size_before(line, " already allocated").or_else(|| size_before(line, " is allocated by PyTorch"));
    let reserved = size_before(line, " reserved in total by PyTorch");
    message.unallocated = size_before(line, " is reserved by PyTorch but unallocated")
        .or_else(|| Some(reserved?.saturating_sub(message.allocated?)));
    message
}

/// The kernel's line on a process that it has ended.
fn killed(line: &str, source: Source) -> Message {
    let mut message = Message::by(source);
    let rss = ["anon-rss:", "file-rss:", "shmem-rss:"].map(|key| kilobytes_after(line, key));
    message.in_use = rss.iter().any(Option::is_some).then(|| rss.into_iter().flatten().sum());
    let process = line.split_once("process ").map(|(_, rest)| rest);
    message.process = process
        .and_then(|rest| Some(rest.split_once('(')?.1.split_once(')')?.0.to_owned()))
        .filter(|name| name.len() <= 64);
    message
}

/// A size behind some words: `2.00 GiB`, `512.00 MB`, `4194304000 bytes`.
fn size_after(line: &str, words: &str) -> Option<u64> {
    let (_, rest) = line.split_once(words)?;
    let rest = rest.trim_start();
    let digits = rest.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(rest.len());
    let (number, rest) = rest.split_at_checked(digits)?;
    let unit = rest.trim_start();
    let letters = unit.find(|c: char| !c.is_ascii_alphabetic()).unwrap_or(unit.len());
    size(number, unit.get(..letters)?)
}

/// A size before some words.
fn size_before(line: &str, words: &str) -> Option<u64> {
    let (before, _) = line.split_once(words)?;
    let mut parts = before.split_ascii_whitespace().rev();
    let unit = parts.next()?;
    let number = parts.next()?.trim_start_matches(['(', ';', ',']);
    size(number, unit)
}

fn size(number: &str, unit: &str) -> Option<u64> {
    let number = number.trim_end_matches('.');
    let unit = if unit.starts_with("byte") { "" } else { unit };
    ByteSize::from_str(&format!("{number}{unit}")).ok().map(|size| size.0)
}

fn number_after(line: &str, words: &str) -> Option<u32> {
    let (_, rest) = line.split_once(words)?;
    leading_number(rest)
}

/// The number that a text begins with.
pub(super) fn leading_number<T: FromStr>(text: &str) -> Option<T> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    text.get(..digits)?.parse().ok()
}

fn kilobytes_after(line: &str, words: &str) -> Option<u64> {
    let (_, rest) = line.split_once(words)?;
    leading_number::<u64>(rest)?.checked_mul(1024)
}
