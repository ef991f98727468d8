//! What a log says of memory that ran out: PyTorch's messages, CUDA's, the kernel's and those of schedulers.
//!
//! The messages are those of PyTorch 1.12 to 2.9, the Linux kernel, Kubernetes, SLURM, llama.cpp and XLA. A log is read a line at a time, of
//! any size; of the lines before a message the last are kept, for the step and the place in the program.

mod line;
mod message;
mod scene;

use std::collections::VecDeque;
use std::io::{self, BufRead};

use plimsoll_memory::ByteSize;
use serde::Serialize;

use line::Line;
pub use message::{Message, Source};
pub use scene::{Moment, Scene};

/// Lines before a message in which its traceback is looked for.
const BEFORE: usize = 400;

/// What a log says of the first time that memory ran out.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Diagnosis {
    /// The message.
    pub message: Message,
    /// Its line, from 1.
    pub line: u64,
    /// Where the program was.
    pub scene: Scene,
    /// Messages in the log, this one among them.
    pub messages: u64,
    /// Processes that have written such messages, where they have numbers: GPUs or ranks.
    pub devices: Vec<u32>,
    /// What it means, a sentence each, the most likely first.
    pub meaning: Vec<String>,
    /// What to change, the first first.
    pub remedies: Vec<Remedy>,
}

/// Something to change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Remedy {
    /// What.
    pub what: &'static str,
    /// What it does.
    pub why: &'static str,
}

/// Reads a log; `None` where it says nothing of memory that ran out.
///
/// # Errors
/// It cannot be read.
pub fn diagnose(log: &mut dyn BufRead) -> io::Result<Option<Diagnosis>> {
    let mut before: VecDeque<String> = VecDeque::with_capacity(BEFORE);
    let (mut found, mut number, mut messages) = (None, 0, 0);
    let mut devices: Vec<u32> = Vec::new();
    let mut steps = scene::Steps::default();
    let mut ranks = 1;
    while let Some(line) = Line::next(log)? {
        number += 1;
        ranks = ranks.max(line.ranks);
        match line.message {
            Some(message) => {
                messages += 1;
                devices.extend(message.device.filter(|device| !devices.contains(device)));
                // What a launcher says of a process that is gone is less than what the process or the kernel says.
                let weight = |message: &Message| message.source.weight();
                let is_better = |(_, first, _): &(u64, Message, Scene)| weight(&message) > weight(first);
                if found.as_ref().is_none_or(is_better) {
                    let scene = Scene::of(before.iter().map(String::as_str), &steps);
                    found = Some((number, message, scene));
                }
            }
            None => steps.see(&line.text),
        }
        if before.len() == BEFORE {
            before.pop_front();
        }
        before.push_back(line.text);
    }
    devices.sort_unstable();
    Ok(found.map(|(line, message, scene)| {
        let scene = Scene { ranks: ranks.max(devices.len() as u32), ..scene };
        let (meaning, remedies) = (meaning(&message, &scene), remedies(&message, &scene));
        Diagnosis { message, line, scene, messages, devices, meaning, remedies }
    }))
}

/// A GiB.
const GIB: u64 = 1 << 30;

/// What a message means where it came.
fn meaning(message: &Message, scene: &Scene) -> Vec<String> {
    let mut all = Vec::new();
    let mut say = |text: &str| all.push(text.to_owned());
    match message.source {
        Source::Kernel | Source::Cgroup | Source::Kubernetes | Source::Slurm | Source::Launcher => {
            say("it was the host's memory, not the GPU's: the system ended the process");
            match scene.moment {
                Moment::Loading => say(
                    "while the model was loaded: each process reads all weights into host memory unless low_cpu_mem_usage or meta devices are used",
                ),
                Moment::Saving => {
                    say("while a checkpoint was gathered: one process holds all weights and states")
                }
                _ => say(
                    "host memory holds what is offloaded, pinned buffers, every data worker's copy of the dataset, and the page cache of a container",
                ),
            }
        }
        Source::HostAllocator => say("it was the host's memory: one allocation was refused"),
        Source::SharedMemory => say(
            "it was /dev/shm, through which data workers hand over their batches: a container has 64 MiB of it by itself",
        ),
        Source::Library => say(
            "a library could not take its own workspace: the allocator had left it nothing, so the device was full already",
        ),
        _ => {}
    }
    if message.source.is_device() {
        if message.tried.zip(message.total).is_some_and(|(tried, total)| tried > total) {
            say(
                "one tensor alone is larger than the device: attention scores or logits of a whole batch, most often",
            );
        }
        if let Some(allowed) = message.allowed {
            all.push(format!(
                "this process may have {} of the device (set_per_process_memory_fraction), whatever is free",
                ByteSize(allowed)
            ));
        }
        if message.was_free() {
            all.push(
                "more was free than was asked for: another process took it and gave it back, or the driver could not map it"
                    .to_owned(),
            );
        }
        if let Some(others) = message.others().filter(|others| *others > GIB) {
            let who = match message.outside() {
                Some(_) => "other processes hold",
                None => "other processes, or this one outside of the allocator, hold",
            };
            all.push(format!("{who} {}", ByteSize(others)));
        }
        if let Some(outside) = message.outside().filter(|outside| *outside > GIB) {
            all.push(format!(
                "this process holds {} outside of the allocator: the context, and the buffers of NCCL and other libraries",
                ByteSize(outside)
            ));
        }
        if message.is_fragmented() {
            all.push(
                "much is reserved but not allocated: the memory is there in pieces that are too small (fragmentation)"
                    .to_owned(),
            );
        }
        all.extend(scene.words().map(str::to_owned));
    }
    all
}

/// What to change, in order.
fn remedies(message: &Message, scene: &Scene) -> Vec<Remedy> {
    let remedy = |what, why| Remedy { what, why };
    let mut all = Vec::new();
    if message.source == Source::SharedMemory {
        all.push(remedy(
            "a larger /dev/shm (docker run --shm-size=16g, or --ipc=host)",
            "workers hand over batches there",
        ));
    }
    if !message.source.is_device() && message.source != Source::Library {
        all.extend([
            remedy(
                "fewer data workers, a smaller prefetch_factor",
                "each worker holds its own batches and dataset",
            ),
            remedy(
                "safetensors with low_cpu_mem_usage, one process after the other",
                "weights are not held twice",
            ),
            remedy(
                "less offload to the host, or to NVMe",
                "offloaded states take 8 to 16 bytes a parameter there",
            ),
            remedy(
                "a higher limit of the container or the job",
                "the limit counts pinned memory and shared memory too",
            ),
        ]);
        return all;
    }
    if message.allowed.is_some() {
        all.push(remedy(
            "a larger fraction in set_per_process_memory_fraction",
            "the limit was the process's own",
        ));
    }
    if message.others().is_some_and(|others| others > GIB) && message.allowed.is_none() {
        all.push(remedy(
            "end the other processes (nvidia-smi lists them)",
            "what they hold comes back at once",
        ));
    }
    if message.is_fragmented() {
        all.push(remedy(
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
            "pieces of memory are joined; costs nothing",
        ));
    }
    if scene.moment == Moment::Evaluation {
        all.extend([
            remedy(
                "a smaller evaluation batch, eval_accumulation_steps",
                "logits of an evaluation are kept until its end",
            ),
            remedy("prediction_loss_only", "no logits are kept at all"),
        ]);
    }
    if scene.moment == Moment::Loading {
        all.extend([
            remedy("weights in bf16, or in 4 bits (QLoRA)", "2 or 0.5 bytes a parameter instead of 4"),
            remedy("more devices with ZeRO 3 or tensor parallelism", "each then has a part of the weights"),
        ]);
        return all;
    }
    if scene.attention {
        all.push(remedy("flash attention", "scores of a whole sequence are not written out"));
    }
    if scene.logits {
        all.push(remedy(
            "the loss in chunks (a fused or chunked cross-entropy)",
            "logits of all tokens exist nowhere",
        ));
    }
    all.extend([
        remedy("bf16 instead of f32", "activations and weights halve; no price in time"),
        remedy(
            "a smaller micro-batch with more accumulation",
            "activations shrink with it; the steps are the same",
        ),
        remedy("gradient checkpointing", "activations of a layer instead of all; about a third more time"),
        remedy("LoRA or QLoRA", "no gradients and states of the frozen weights"),
        remedy("an 8-bit or factored optimizer", "states of 2 instead of 8 bytes a parameter"),
    ]);
    let sharded = remedy(
        "ZeRO 1 to 3 (FSDP) on several devices",
        "plain data parallelism does not lower what a device holds: each has everything; the stages share states, gradients, weights",
    );
    all.push(sharded);
    all.extend([
        remedy("offload of optimizer states to the host", "8 to 12 bytes a parameter leave the device"),
        remedy("shorter sequences", "activations shrink with them, attention scores by the square"),
        remedy("a smaller model", "everything shrinks"),
    ]);
    all
}

#[cfg(test)]
mod tests;
