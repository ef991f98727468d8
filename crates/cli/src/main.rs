//! Plimsoll: train, fine-tune and run language models in the memory you have.
//!
//! This crate reads arguments, shows what the libraries say, and renders errors. Everything else is delegated.

#![forbid(unsafe_code)]

mod args;
mod asked;
mod by_group;
mod card;
mod chat_format;
mod commands;
mod dashboard;
mod failure;
mod guessing;
mod http;
mod inference;
mod load_line;
mod models;
mod needs;
mod output;
mod overhead;
mod progress;
mod ranks;
mod screen;
mod session;
mod signals;
mod speeds;
mod streaming;
mod table;
mod units;
mod weights;

use std::io::{ErrorKind, Write};
use std::process::ExitCode;
#[cfg(unix)]
use std::sync::{Arc, atomic::AtomicBool};

use clap::Parser;

use args::{Arguments, Command};
use failure::Failure;

fn main() -> ExitCode {
    quiet_where_caught();
    let given = args::with_stacks_estimated(args::with_signs(std::env::args_os()));
    let arguments = match Arguments::try_parse_from(given) {
        Ok(arguments) => arguments,
        Err(error) => {
            // Help and version are no errors; clap knows which stream each belongs to.
            let code = if error.use_stderr() { failure::USAGE } else { 0 };
            return match error.print() {
                Ok(()) => ExitCode::from(code),
                // `plimsoll --help | head`: whoever read has seen enough.
                Err(error) if error.kind() == ErrorKind::BrokenPipe => ExitCode::from(code),
                Err(_) => ExitCode::from(failure::OTHER),
            };
        }
    };
    match run(&arguments.command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            if !failure.is_silent() {
                // Where standard error is closed too, the exit code says the rest.
                let _ = writeln!(std::io::stderr(), "error: {failure}");
            }
            ExitCode::from(failure.exit_code())
        }
    }
}

/// Panics of a library that reads a damaged file are caught and become errors: the program says the error alone.
fn quiet_where_caught() {
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        if !plimsoll_data::panics_are_caught() {
            usual(panic);
        }
    }));
}

fn run(command: &Command) -> Result<(), Failure> {
    // A file that grows beyond `ulimit -f` is an error to report, as a full disk is; by default the signal would end
    // the process and leave its temporary files behind.
    #[cfg(unix)]
    signal_hook::flag::register(signal_hook::consts::SIGXFSZ, Arc::new(AtomicBool::new(false)))?;
    match command {
        Command::Plan(args) => commands::plan::run(args),
        Command::Estimate(args) => commands::estimate::run(args),
        Command::Export(args) => commands::export::run(args),
        Command::Report(args) => commands::report::run(args),
        Command::Snapshot(args) => commands::snapshot::run(args),
        Command::Preview(args) => commands::preview::run(args),
        Command::Train(args) => commands::train::run(args),
        Command::Eval(args) => commands::eval::run(args),
        Command::Generate(args) => commands::generate::run(args),
        Command::Chat(args) => commands::chat::run(args),
        Command::Bench(args) => commands::bench::run(args),
        Command::Convert(args) => commands::convert::run(args),
        Command::Merge(args) => commands::merge::run(args),
        Command::Inspect(args) => commands::inspect::run(args),
        Command::Calibrate(args) => commands::calibrate::run(args),
        Command::Hardware(args) => commands::hardware::run(args),
        Command::Monitor(args) => commands::monitor::run(args),
        Command::Watch(args) => commands::watch::run(args),
        Command::Doctor(args) => commands::doctor::run(args),
        Command::Config(args) => commands::config::run(args),
        Command::EndWithParent { parent, command } => ranks::end_with_parent(*parent, command),
    }
}
