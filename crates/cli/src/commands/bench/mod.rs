//! `plimsoll bench`: what the techniques of this program save and cost, and what a disk does, measured.

mod charts;
mod disk;
mod memory;
mod report;
mod rung;
mod techniques;

use crate::args::{Bench, BenchArgs};
use crate::failure::Failure;

pub fn run(args: &BenchArgs) -> Result<(), Failure> {
    match &args.bench {
        Bench::Memory(args) => memory::run(args),
        Bench::Disk(args) => disk::run(args),
    }
}
