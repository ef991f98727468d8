//! One file a command.

pub mod advice;
pub mod bench;
pub mod calibrate;
pub mod chat;
pub mod config;
pub mod convert;
pub mod doctor;
pub mod estimate;
pub mod eval;
pub mod export;
pub mod generate;
pub mod hardware;
pub mod inspect;
pub mod merge;
pub mod monitor;
pub mod plan;
pub mod preview;
pub mod report;
pub mod snapshot;
pub mod train;
pub mod warmup;
pub mod watch;
