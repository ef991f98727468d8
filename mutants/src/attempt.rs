//! Tries mutants: runs the tests that reach one, with it switched on, until one of them fails.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::execute::{Ran, Room, Switch};
use crate::list::Mutant;
use crate::report;
use crate::state::{Caught, How, Outcome, Program, Reached, State, Test};

/// Several tests are run at once while they take less than this.
const GROUP_SECONDS: f64 = 3.0;

/// The lists of survivors are written after so many mutants, and at the end.
const LISTED_EVERY: u32 = 20;

/// Which mutants to try, and how long.
pub struct Request<'a> {
    pub crates: &'a [String],
    /// Parts of paths of files that are not to be tried.
    pub without: &'a [String],
    /// Time for each mutant. Tests that are left then are run the next time; those that take longer by themselves, when a
    /// mutant is given more.
    pub seconds: f64,
}

pub fn attempt(state: &State, request: &Request<'_>) -> Result<()> {
    let (mutants, left_out, programs) = (state.mutants()?, state.left_out()?, state.programs()?);
    let mut outcomes = state.outcomes()?;
    let reached: Vec<Reached> = state.reached()?.into_iter().filter(|reached| reached.passed).collect();
    let mut by_mutant: HashMap<u32, Vec<&Reached>> = HashMap::new();
    for test in &reached {
        for id in &test.mutants {
            by_mutant.entry(*id).or_default().push(test);
        }
    }
    let room = Room::new(state.path("room"));
    let mut tried = 0;
    // How often a test caught a mutant of a file.
    let mut fails: HashMap<(String, String), u32> = HashMap::new();
    for mutant in &mutants {
        if let Some(caught) = outcomes.get(&mutant.name).and_then(|outcome| outcome.caught.as_ref()) {
            *fails.entry((mutant.file.clone(), caught.by.clone())).or_default() += 1;
        }
    }
    let wanted = |mutant: &&Mutant| {
        let of_crate = request.crates.is_empty() || request.crates.iter().any(|name| name == mutant.krate());
        of_crate && !request.without.iter().any(|part| mutant.file.contains(part.as_str()))
    };
    for name in request.crates.iter().map(String::as_str).chain(request.crates.is_empty().then_some("")) {
        for mutant in mutants.iter().filter(wanted).filter(|m| name.is_empty() || m.krate() == name) {
            let known = outcomes.get(&mutant.name);
            if left_out.contains_key(&mutant.name) || known.is_some_and(|outcome| outcome.caught.is_some()) {
                continue;
            }
            let passed = known.map(|outcome| outcome.passed.clone()).unwrap_or_default();
            let before: HashSet<&Test> = passed.iter().collect();
            let mut tests: Vec<&Reached> = by_mutant.get(&mutant.id).cloned().unwrap_or_default();
            tests.retain(|reached| !before.contains(&reached.test) && reached.seconds <= request.seconds);
            if tests.is_empty() && known.is_some() {
                continue;
            }
            // Its own crate's tests first; those that found mutants of the file before; those that are done soon.
            let cost = |reached: &Reached| {
                let found = fails.get(&(mutant.file.clone(), reached.test.to_string())).copied().unwrap_or(0);
                (reached.seconds + 0.01) / f64::from(1 + found)
            };
            tests.sort_by(|a, b| {
                let other = |reached: &Reached| reached.test.package != mutant.krate();
                other(a).cmp(&other(b)).then(cost(a).total_cmp(&cost(b)))
            });
            let mut outcome = Outcome { mutant: mutant.name.clone(), caught: None, passed: passed.clone() };
            let caught = run(&room, &programs, mutant, tests, request.seconds, &mut outcome)?;
            for test in caught {
                *fails.entry((mutant.file.clone(), test.to_string())).or_default() += 1;
            }
            println!("{}: {}", mutant.name, words(&outcome));
            state.add_outcome(&outcome)?;
            outcomes.insert(mutant.name.clone(), outcome);
            tried += 1;
            if tried % LISTED_EVERY == 0 {
                report::write_survivors(state)?;
            }
        }
    }
    report::write_survivors(state)
}

fn words(outcome: &Outcome) -> String {
    match &outcome.caught {
        Some(Caught { by, how: How::Failed }) => format!("caught by {by}"),
        Some(Caught { by, how }) => format!("caught by {by} ({how:?})"),
        None => format!("not caught by {} tests", outcome.passed.len()),
    }
}

/// Runs tests until one fails or the time is up. Returns those that failed.
fn run(
    room: &Room,
    programs: &[Program],
    mutant: &Mutant,
    mut tests: Vec<&Reached>,
    seconds: f64,
    outcome: &mut Outcome,
) -> Result<Vec<Test>> {
    let begun = Instant::now();
    let mut most = 1;
    while !tests.is_empty() && begun.elapsed().as_secs_f64() < seconds {
        let group = take_group(&mut tests, most);
        most = (most * 2).min(64);
        let first = &group[0].test;
        let program = (programs.iter())
            .find(|program| program.package == first.package && program.target == first.target)
            .with_context(|| format!("no program of {first}"))?;
        let names: Vec<&str> = group.iter().map(|reached| reached.test.name.as_str()).collect();
        let expected: f64 = group.iter().map(|reached| reached.seconds).sum();
        let limit = Duration::from_secs_f64(20.0 + 5.0 * expected);
        let ran = room.run(program, &names, &Switch::Mutant(mutant.id), limit)?;
        if let Some(how) = ran.failed {
            let failed = failed(&ran, &group);
            let by = failed.first().unwrap_or(first).to_string();
            outcome.caught = Some(Caught { by, how });
            return Ok(failed);
        }
        outcome.passed.extend(group.into_iter().map(|reached| reached.test.clone()));
    }
    Ok(Vec::new())
}

/// The first of `tests` and up to `most` more of its program, which are not too slow together.
fn take_group<'r>(tests: &mut Vec<&'r Reached>, most: usize) -> Vec<&'r Reached> {
    let first = tests.remove(0);
    let (mut group, mut seconds) = (vec![first], first.seconds);
    tests.retain(|reached| {
        let same = reached.test.package == first.test.package && reached.test.target == first.test.target;
        let taken = same && group.len() < most && seconds + reached.seconds < GROUP_SECONDS;
        if taken {
            seconds += reached.seconds;
            group.push(reached);
        }
        !taken
    });
    group
}

/// The tests that failed; that which was running, if the program ended itself.
fn failed(ran: &Ran, group: &[&Reached]) -> Vec<Test> {
    let of = |suffix: &str| -> Vec<Test> {
        let named = |test: &Test| ran.output.contains(&format!("test {} ... {suffix}", test.name));
        group.iter().map(|reached| &reached.test).filter(|test| named(test)).cloned().collect()
    };
    let failed = of("FAILED");
    if failed.is_empty() { of("").pop().into_iter().collect() } else { failed }
}
