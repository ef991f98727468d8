//! Snapshots of simulated trainings in the form of every version, for `docs/bench/check_snapshots.py`.
//!
//! `write_snapshots FOLDER` writes small ones. `write_snapshots FILE BYTES` writes one of about that size, in which each entry has a
//! list of frames of its own, as PyTorch's have.

use std::fs::File;
use std::io::{self, BufWriter};
use std::path::Path;

use plimsoll_stacks::allocator::{BlockId, CachingAllocator, Settings, TraceTag};
use plimsoll_stacks::snapshot::{Format, StackFrame, TorchVersion, write_snapshot};

const MIB: u64 = 1 << 20;

/// Stacks by tag, innermost frame first.
const STACKS: [&[(&str, &str, u32)]; 6] = [
    &[("_apply", "/usr/lib/python3/site-packages/torch/nn/modules/module.py", 927), ("main", "train.py", 10)],
    &[
        ("forward", "/usr/lib/python3/site-packages/torch/nn/modules/linear.py", 125),
        ("_call_impl", "/usr/lib/python3/site-packages/torch/nn/modules/module.py", 1750),
        ("forward", "model.py", 42),
        ("main", "train.py", 20),
    ],
    &[
        ("_engine_run_backward", "/usr/lib/python3/site-packages/torch/autograd/graph.py", 823),
        ("main", "train.py", 21),
    ],
    &[("_init_group", "/usr/lib/python3/site-packages/torch/optim/adamw.py", 180), ("main", "train.py", 22)],
    &[("main", "train.py", 23)],
    &[("log", "train.py", 30), ("main", "train.py", 24)],
];

fn frames_of(tag: TraceTag) -> Vec<StackFrame> {
    let frames = STACKS.get(tag.0 as usize).copied().unwrap_or_default().iter();
    frames
        .map(|&(name, filename, line)| StackFrame { name: name.into(), filename: filename.into(), line })
        .collect()
}

/// A training; with a tensor kept in each step where `leaks`. The recording, of so many entries, begins behind the weights.
fn training(settings: &str, steps: u64, leaks: bool, entries: usize) -> Result<CachingAllocator, String> {
    let settings = Settings::parse(settings).map_err(|error| error.to_string())?;
    let mut allocator = CachingAllocator::new(settings, 6 << 30);
    let take = |allocator: &mut CachingAllocator, tag, bytes, stream| -> Result<BlockId, String> {
        allocator.set_tag(TraceTag(tag));
        allocator.malloc(bytes, stream).map_err(|error| error.to_string())
    };
    for layer in 0..8 {
        take(&mut allocator, 0, 6 * MIB + 4096 * layer, 0)?;
    }
    let staging = take(&mut allocator, 0, 30 * MIB, 0)?;
    allocator.record_history(entries);
    allocator.set_tag(TraceTag(4));
    allocator.free(staging);
    for step in 0..steps {
        let mut kept = Vec::new();
        for layer in 0..8 {
            kept.push(take(&mut allocator, 1, (2 + layer % 3) * MIB + 700 * step, 0)?);
            let temporary = take(&mut allocator, 1, 800_000, 0)?;
            allocator.free(temporary);
        }
        let sent = take(&mut allocator, 1, 400_000, 1)?;
        allocator.record_stream(sent, 0);
        allocator.free(sent);
        let mut gradients = Vec::new();
        for activation in kept.into_iter().rev() {
            gradients.push(take(&mut allocator, 2, 6 * MIB, 0)?);
            allocator.free(activation);
        }
        if step == 0 {
            for layer in 0..16 {
                take(&mut allocator, 3, 6 * MIB + 4096 * (layer / 2), 0)?;
            }
        }
        if leaks {
            take(&mut allocator, 5, MIB / 2, 0)?;
        }
        allocator.set_tag(TraceTag(4));
        gradients.into_iter().for_each(|gradient| allocator.free(gradient));
    }
    Ok(allocator)
}

fn write(path: &Path, allocators: &[&CachingAllocator], format: Format) -> Result<(), String> {
    let failed = |error: io::Error| format!("{}: {error}", path.display());
    let out = BufWriter::new(File::create(path).map_err(failed)?);
    write_snapshot(allocators, frames_of, format, out).map_err(failed)
}

fn write_small(folder: &Path) -> Result<(), String> {
    use TorchVersion::{V2_0, V2_1, V2_2, V2_6, V2_9};
    for (name, settings, leaks, entries, format) in [
        ("2.0", "", false, usize::MAX, Format::Python(V2_0)),
        ("2.1-expandable", "expandable_segments:True", false, usize::MAX, Format::Python(V2_1)),
        ("2.2-leak", "", true, usize::MAX, Format::Python(V2_2)),
        ("2.6-lost-beginning", "max_split_size_mb:20", false, 300, Format::Python(V2_6)),
        ("2.9-expandable", "expandable_segments:True", true, usize::MAX, Format::Python(V2_9)),
        ("2.2-cpp", "", false, usize::MAX, Format::Cpp(V2_2)),
        ("2.9-cpp-expandable", "expandable_segments:True", true, usize::MAX, Format::Cpp(V2_9)),
    ] {
        let allocator = training(settings, 24, leaks, entries)?;
        write(&folder.join(format!("{name}.pickle")), &[&allocator], format)?;
    }
    let (first, second) = (training("", 6, false, usize::MAX)?, training("", 24, true, usize::MAX)?);
    write(&folder.join("2.6-two-devices.pickle"), &[&first, &second], Format::Python(V2_6))
}

/// Bytes of an entry with a list of 24 frames of its own, about; the two entries of a free share one.
const BYTES_OF_ENTRY: u64 = 115;

fn write_large(path: &Path, bytes: u64) -> Result<(), String> {
    let mut allocator = CachingAllocator::new(Settings::default(), 6 << 30);
    allocator.record_history(usize::MAX);
    let mut live = std::collections::VecDeque::new();
    for at in 0..bytes / BYTES_OF_ENTRY / 3 {
        allocator.set_tag(TraceTag(at as u32 + 100));
        live.push_back(
            allocator.malloc(1000 * (1 + at * 7919 % 5000), 0).map_err(|error| error.to_string())?,
        );
        if live.len() > 500
            && let Some(oldest) = live.pop_front()
        {
            allocator.set_tag(TraceTag(u32::MAX - at as u32));
            allocator.free(oldest);
        }
    }
    let frames_of = |tag: TraceTag| {
        let frame = |depth: u32| {
            let (name, line) = (format!("function_{depth}"), 1 + tag.0 % 17 * 31 + depth);
            StackFrame { name, filename: format!("/home/user/project/file_{}.py", depth % 12), line }
        };
        (0..24).map(frame).collect()
    };
    let failed = |error: io::Error| format!("{}: {error}", path.display());
    let out = BufWriter::new(File::create(path).map_err(failed)?);
    write_snapshot(&[&allocator], frames_of, Format::Python(TorchVersion::V2_6), out).map_err(failed)
}

fn main() -> Result<(), String> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match &arguments[..] {
        [folder] => write_small(Path::new(folder)),
        [file, bytes] => {
            write_large(Path::new(file), bytes.parse().map_err(|_| format!("{bytes} is no number"))?)
        }
        _ => Err("usage: write_snapshots FOLDER, or write_snapshots FILE BYTES".to_owned()),
    }
}
