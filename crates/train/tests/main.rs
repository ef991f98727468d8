//! The tests of training runs in one program, which links faster than many. A new file is named here.

mod adapters;
mod common;
mod families;
mod families_through_gguf;
mod ladder;
mod pissa;
mod ranks;
mod real_models;
mod stopping;
mod values;
mod words;
