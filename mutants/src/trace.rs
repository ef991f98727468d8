//! Which mutants each test reaches, and how long it takes without one.

use std::collections::HashSet;
use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::Result;

use crate::execute::{Room, Switch};
use crate::state::{Reached, State, Test};

/// A test that takes longer is not used.
const LONGEST: Duration = Duration::from_secs(300);

/// Runs every test by itself that was not yet; of the programs of `crates` alone, if any are named.
pub fn trace(state: &State, crates: &[String]) -> Result<()> {
    let known: HashSet<Test> = state.reached()?.into_iter().map(|reached| reached.test).collect();
    let room = Room::new(state.path("room"));
    let file = state.path("trace");
    for program in state.programs()? {
        if !crates.is_empty() && !crates.contains(&program.package) {
            continue;
        }
        let (mut tests, mut seconds) = (0, 0.0);
        for name in room.tests(&program)? {
            let test = Test { package: program.package.clone(), target: program.target.clone(), name };
            if known.contains(&test) {
                continue;
            }
            let _ = fs::remove_file(&file);
            let ran = room.run(&program, &[&test.name], &Switch::Trace(&file), LONGEST)?;
            if ran.failed.is_some() {
                println!("fails without a mutant, and is not used: {test}");
            }
            tests += 1;
            seconds += ran.seconds;
            let (passed, mutants) = (ran.failed.is_none(), numbers(&file));
            state.add_reached(&Reached { test, passed, seconds: ran.seconds, mutants })?;
        }
        println!("{}/{}: {tests} tests, {seconds:.1} s", program.package, program.target);
    }
    Ok(())
}

/// Several processes of a test may have named the same mutant.
fn numbers(file: &Path) -> Vec<u32> {
    let text = fs::read_to_string(file).unwrap_or_default();
    let mut numbers: Vec<u32> = text.lines().filter_map(|line| line.parse().ok()).collect();
    numbers.sort_unstable();
    numbers.dedup();
    numbers
}
