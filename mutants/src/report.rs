//! What became of the mutants: a table of crates, and those that no test caught.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt::Write;
use std::fs;

use anyhow::Result;

use crate::list::Mutant;
use crate::state::{How, Outcome, Reached, State, Without};
use crate::weave::LeftOut;

/// The state of knowledge about a mutant.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Fate {
    Unviable,
    Alone,
    Untried,
    Caught,
    CaughtByLimit,
    /// All tests that reach it pass.
    Missed,
    Unreached,
    /// Tests that reach it are left to run.
    Open,
}

struct Known {
    left_out: BTreeMap<String, Without>,
    outcomes: BTreeMap<String, Outcome>,
    reached: Vec<Reached>,
}

impl Known {
    fn of(state: &State) -> Result<Self> {
        let mut reached = state.reached()?;
        reached.retain(|reached| reached.passed);
        reached.sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
        Ok(Self { left_out: state.left_out()?, outcomes: state.outcomes()?, reached })
    }

    fn tests(&self, mutant: &Mutant) -> impl Iterator<Item = &Reached> {
        self.reached.iter().filter(|reached| reached.mutants.binary_search(&mutant.id).is_ok())
    }

    fn fate(&self, mutant: &Mutant) -> Fate {
        if let Some(without) = self.left_out.get(&mutant.name) {
            return if without.reason == LeftOut::Unviable { Fate::Unviable } else { Fate::Alone };
        }
        let Some(outcome) = self.outcomes.get(&mutant.name) else { return Fate::Untried };
        match &outcome.caught {
            Some(caught) if caught.how == How::Failed => return Fate::Caught,
            Some(_) => return Fate::CaughtByLimit,
            None => {}
        }
        let passed: HashSet<_> = outcome.passed.iter().collect();
        if self.tests(mutant).any(|reached| !passed.contains(&reached.test)) {
            Fate::Open
        } else if passed.is_empty() {
            Fate::Unreached
        } else {
            Fate::Missed
        }
    }
}

/// Prints the table, in the columns of docs/testing.md.
pub fn print(state: &State) -> Result<()> {
    let (known, mutants) = (Known::of(state)?, state.mutants()?);
    println!(
        "| crate | mutants | caught | of them by a limit | missed | reached by no test | unviable | to try alone | not yet tried | caught of those decided |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|");
    let mut crates: Vec<&str> = mutants.iter().map(Mutant::krate).collect();
    crates.dedup();
    for name in crates {
        let of_crate = mutants.iter().filter(|mutant| mutant.krate() == name);
        let mut counts: HashMap<Fate, usize> = HashMap::new();
        for mutant in of_crate.clone() {
            *counts.entry(known.fate(mutant)).or_default() += 1;
        }
        let count = |fate| counts.get(&fate).copied().unwrap_or(0);
        let limit = count(Fate::CaughtByLimit);
        let caught = count(Fate::Caught) + limit;
        let (missed, unreached) = (count(Fate::Missed), count(Fate::Unreached));
        let share = 100.0 * caught as f64 / (caught + missed + unreached).max(1) as f64;
        println!(
            "| `{name}` | {} | {caught} | {limit} | {missed} | {unreached} | {} | {} | {} | {share:.1} % |",
            of_crate.count(),
            count(Fate::Unviable),
            count(Fate::Alone),
            count(Fate::Untried) + count(Fate::Open)
        );
    }
    write_survivors(state)
}

/// Writes `survivors-CRATE.txt` and `alone-CRATE.txt`: mutants with the first tests that reach them, and those that
/// `cargo mutants` has to try.
pub fn write_survivors(state: &State) -> Result<()> {
    let (known, mutants) = (Known::of(state)?, state.mutants()?);
    let (mut survivors, mut alone) = (BTreeMap::<&str, String>::new(), BTreeMap::<&str, String>::new());
    for mutant in &mutants {
        let kind = match known.fate(mutant) {
            Fate::Missed => "missed",
            Fate::Unreached => "reached by no test",
            Fate::Open => "not caught yet",
            Fate::Alone => {
                writeln!(alone.entry(mutant.krate()).or_default(), "{}", mutant.name)?;
                continue;
            }
            _ => continue,
        };
        let text = survivors.entry(mutant.krate()).or_default();
        writeln!(text, "{} [{kind}]", mutant.name)?;
        for reached in known.tests(mutant).take(3) {
            writeln!(text, "    {}", reached.test)?;
        }
    }
    for (name, text) in survivors {
        fs::write(state.path(&format!("survivors-{name}.txt")), text)?;
    }
    for (name, text) in alone {
        fs::write(state.path(&format!("alone-{name}.txt")), text)?;
    }
    Ok(())
}
