//! The tests of steps in one program, which links faster than many. A new file is named here.

mod apart;
mod attention;
mod chunks;
mod common;
mod counting;
mod decode;
mod experts;
mod fetches;
mod optimizers;
mod optimizers_away;
mod policies;
mod ranks;
mod samples;
mod step;
mod streaming;
mod tiers;
