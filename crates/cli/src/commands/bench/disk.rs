//! `plimsoll bench disk`: how fast a disk writes and reads, in the ways in which the disk engine can use it.

use std::path::{Path, PathBuf};

use plimsoll_disk::{DiskSpeed, EngineSettings, default_folder, is_in_memory, measure};
use plimsoll_memory::ByteSize;
use plimsoll_plan::hardware::disk_space;
use serde_json::json;

use crate::args::BenchDiskArgs;
use crate::failure::Failure;
use crate::output::{out, outln};
use crate::progress;
use crate::row;
use crate::table;

/// Bytes of a request.
const BLOCKS: [u64; 3] = [256 << 10, 1 << 20, 4 << 20];
/// Requests under way at once.
const DEPTHS: [usize; 3] = [1, 4, 16];

pub fn run(args: &BenchDiskArgs) -> Result<(), Failure> {
    let folder: PathBuf = args.path.clone().unwrap_or_else(default_folder);
    if !folder.is_dir() {
        return Err(Failure::usage(format!("--path {}: is no folder", folder.display())));
    }
    if args.size.0 == 0 {
        return Err(Failure::usage(
            "--size 0: there is nothing to write; leave --size away, or give for example 256MiB",
        ));
    }
    if let Ok(space) = disk_space(&folder)
        && space.available < args.size
    {
        return Err(Failure::usage(format!(
            "--size {}: {} has {} free; give a smaller size or another folder",
            args.size,
            folder.display(),
            space.available
        )));
    }
    let ways: Vec<(bool, u64, usize)> = [true, false]
        .into_iter()
        .flat_map(|direct| BLOCKS.into_iter().map(move |block| (direct, block)))
        .flat_map(|(direct, block)| DEPTHS.into_iter().map(move |depth| (direct, block, depth)))
        .collect();
    let bar = progress::counter(ways.len() as u64, "ways", args.json);
    let mut speeds = Vec::new();
    for (direct, piece_bytes, queue_depth) in ways {
        let settings = EngineSettings { queue_depth, piece_bytes };
        speeds.push((direct, measure(&folder, args.size.0, settings, direct)?));
        bar.inc(1);
    }
    bar.finish_and_clear();
    let in_memory = is_in_memory(&folder);
    if args.json {
        return print_json(&folder, in_memory, &speeds);
    }
    outln!("{}, {} a file", folder.display(), args.size)?;
    if in_memory {
        outln!("It is in memory (tmpfs): what is measured is no disk.")?;
    } else if speeds.iter().any(|(direct, speed)| *direct && !is_direct(speed)) {
        outln!("Direct I/O is refused here: all of it went through the page cache, a piece at a time.")?;
    }
    let mut rows = vec![row!["", "block", "queue depth", "write", "read"]];
    for (_, speed) in &speeds {
        let rate = |rate: f64| format!("{}/s", ByteSize(rate as u64));
        let block = ByteSize(speed.block_bytes);
        rows.push(row![
            speed.mode,
            block,
            speed.queue_depth,
            rate(speed.write_rate()),
            rate(speed.read_rate())
        ]);
    }
    out!("{}", table::render(&rows))
}

fn is_direct(speed: &DiskSpeed) -> bool {
    speed.mode == plimsoll_disk::IoMode::Direct
}

fn print_json(folder: &Path, in_memory: bool, speeds: &[(bool, DiskSpeed)]) -> Result<(), Failure> {
    let ways: Vec<_> = speeds
        .iter()
        .map(|(direct, speed)| {
            json!({
                "asked_for": if *direct { "direct" } else { "buffered" },
                "mode": speed.mode,
                "block_bytes": speed.block_bytes,
                "queue_depth": speed.queue_depth,
                "bytes": speed.bytes,
                "write_bytes_per_second": speed.write_rate(),
                "read_bytes_per_second": speed.read_rate(),
            })
        })
        .collect();
    outln!("{}", json!({ "folder": folder, "in_memory": in_memory, "ways": ways }))
}
