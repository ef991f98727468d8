//! The tests of the program in one program, which links faster than many. A new file is named here.

mod adapters;
mod bench;
mod budget;
mod cases;
mod commands;
mod convert;
mod durability;
mod estimating;
mod export;
mod full_disk;
mod gpu;
mod hub;
mod inspect;
mod load_line;
mod monitor;
mod planning;
mod report;
mod runs;
mod samples;
mod scratch;
mod searching;
mod snapshot;
mod strangers;
mod streaming;
mod support;
#[path = "support/svg.rs"]
mod svg;
mod talking;
mod tiers;
mod timeline;
mod watch;
