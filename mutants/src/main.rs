//! Mutation testing with all mutants in one build.
//!
//! `cargo mutants` builds and tests once for each mutant. Here its mutants are compiled into one copy of the
//! repository, each behind a switch that is chosen when a test starts ([`weave`]). A mutant then costs the tests that
//! reach it, until the first one fails. What has no such form, or does not compile in it, is listed: `cargo mutants`
//! has to try it.

#![forbid(unsafe_code)]

mod attempt;
mod compile;
mod execute;
mod list;
mod report;
mod state;
mod syntax;
mod trace;
mod weave;

use std::path::PathBuf;

use anyhow::Result;
use clap::{Parser, Subcommand};

use state::State;

#[derive(Parser)]
#[command(about = "Tries the mutants that cargo-mutants lists, all of them compiled into one build")]
struct Arguments {
    /// The repository.
    #[arg(long, default_value = ".")]
    source: PathBuf,
    /// Where the copy with the mutants goes; it is built there.
    #[arg(long, default_value = "target/mutants/copy")]
    copy: PathBuf,
    /// What is known of the mutants and tests, and the lists of survivors.
    #[arg(long, default_value = "target/mutants/state")]
    state: PathBuf,
    #[command(subcommand)]
    step: Step,
}

#[derive(Subcommand)]
enum Step {
    /// Lists the mutants of crates, weaves them into the copy, and builds its tests.
    Build {
        /// Crates without `plimsoll-`: disk, plan, ...
        #[arg(required = true)]
        crates: Vec<String>,
    },
    /// Finds which mutants each test reaches.
    Trace {
        /// Whose tests; without any, all.
        crates: Vec<String>,
    },
    /// Tries mutants that are not caught yet.
    Test {
        /// Whose mutants; without any, all.
        crates: Vec<String>,
        /// Leaves files out whose path contains this.
        #[arg(long)]
        without: Vec<String>,
        /// Time for a mutant. Tests that are left then are run by the next `test`.
        #[arg(long, default_value_t = 20.0)]
        seconds: f64,
    },
    /// Counts what was caught, and writes the lists of survivors.
    Report,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let state = State::open(std::path::absolute(&arguments.state)?)?;
    match &arguments.step {
        Step::Build { crates } => compile::compile(&arguments.source, &arguments.copy, &state, crates),
        Step::Trace { crates } => trace::trace(&state, crates),
        Step::Test { crates, without, seconds } => {
            attempt::attempt(&state, &attempt::Request { crates, without, seconds: *seconds })
        }
        Step::Report => report::print(&state),
    }
}
