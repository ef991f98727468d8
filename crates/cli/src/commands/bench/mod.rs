//! `plimsoll bench`: what the techniques of this program save and cost, where the time of a step goes, and what a disk does, measured.

mod base;
mod charts;
mod disk;
mod memory;
mod report;
mod roofline;
mod rung;
mod step;
mod techniques;

use crate::args::{Bench, BenchArgs};
use crate::failure::Failure;

pub fn run(args: &BenchArgs) -> Result<(), Failure> {
    match &args.bench {
        Bench::Memory(args) => memory::run(args),
        Bench::Step(args) => step::run(args),
        Bench::Disk(args) => disk::run(args),
    }
}
