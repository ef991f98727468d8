//! The tests of plans in one program, which links faster than many. A new file is named here.

mod advice;
mod attention_memory;
mod choosing;
mod common;
mod configuration;
mod dividing;
mod document;
mod explain;
mod export;
mod filling;
mod generating;
mod golden_peaks;
mod inference;
mod machine;
mod origins;
mod searching;
mod tiers;
mod timeline;
mod waterfall;
mod zero_table;
