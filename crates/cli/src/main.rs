//! Plimsoll: train, fine-tune and run language models in the memory you have.
//!
//! This crate reads arguments, shows what the libraries say, and renders errors. Everything else is delegated.

#![forbid(unsafe_code)]

mod args;
mod commands;
mod failure;
mod progress;
mod session;
mod table;

use std::process::ExitCode;

use clap::Parser;

use args::{Arguments, Command};

fn main() -> ExitCode {
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(error) => {
            // Help and version are no errors; clap knows which stream each belongs to.
            let code = if error.use_stderr() { failure::USAGE } else { 0 };
            return match error.print() {
                Ok(()) => ExitCode::from(code),
                Err(_) => ExitCode::from(failure::OTHER),
            };
        }
    };
    let outcome = match &arguments.command {
        Command::Plan(args) => commands::plan::run(args),
        Command::Train(args) => commands::train::run(args),
        Command::Eval(args) => commands::eval::run(args),
        Command::Generate(args) => commands::generate::run(args),
        Command::Inspect(args) => commands::inspect::run(args),
        Command::Doctor(args) => commands::doctor::run(args),
        Command::Config(args) => commands::config::run(args),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("error: {failure}");
            ExitCode::from(failure.exit_code())
        }
    }
}
