//! `plimsoll watch`: runs as their files show them, while they go on or afterwards. Nothing that it does reaches a run.

mod followed;
mod serve;

use std::time::Duration;

use plimsoll_watch::terminal::{Look, Wish, draw};
use plimsoll_watch::{Lines, View, now};

use self::followed::Followed;
use crate::args::WatchArgs;
use crate::failure::Failure;
use crate::output::outln;
use crate::screen::{self, Restorer, Screen};
use crate::signals::StopSignals;

/// From one look at the files to the next.
const EVERY: Duration = Duration::from_millis(250);
/// The same for lines.
const LINES_EVERY: Duration = Duration::from_millis(500);
/// How often it is looked whether it is to stop.
const GLANCE: Duration = Duration::from_millis(50);

pub fn run(args: &WatchArgs) -> Result<(), Failure> {
    let mut runs = args.runs.iter().map(|folder| Followed::begin(folder)).collect::<Result<Vec<_>, _>>()?;
    if args.json {
        return json(&mut runs);
    }
    let signals = StopSignals::listen(false)?;
    if let Some(address) = args.serve {
        return serve::serve(runs, address, &signals);
    }
    match args.lines || !screen::is_there() {
        true => lines(&mut runs, &signals),
        false => pictures(&mut runs, &signals),
    }
}

/// What is known now.
fn json(runs: &mut [Followed]) -> Result<(), Failure> {
    runs.iter_mut().for_each(Followed::read_all);
    let views: Vec<serde_json::Value> = runs.iter().map(|run| run.view.to_json()).collect();
    outln!("{}", serde_json::to_string_pretty(&serde_json::json!({ "runs": views }))?)
}

/// Lines, until all runs have ended.
fn lines(runs: &mut [Followed], signals: &StopSignals) -> Result<(), Failure> {
    runs.iter_mut().for_each(Followed::read_all);
    let mut said = vec![Lines::default(); runs.len()];
    loop {
        for (run, said) in runs.iter_mut().zip(&mut said) {
            run.look();
            for line in said.news(&run.view, now()) {
                outln!("{line}")?;
            }
        }
        if runs.iter().all(|run| run.view.state.is_over()) {
            return Ok(());
        }
        wait(LINES_EVERY, signals);
        if signals.flag().is_raised() {
            return Err(Failure::stopped(signals.exit_code()));
        }
    }
}

fn wait(time: Duration, signals: &StopSignals) {
    let end = std::time::Instant::now() + time;
    while std::time::Instant::now() < end && !signals.flag().is_raised() {
        std::thread::sleep(GLANCE.min(end.saturating_duration_since(std::time::Instant::now())));
    }
}

/// Pictures, until somebody leaves.
fn pictures(runs: &mut [Followed], signals: &StopSignals) -> Result<(), Failure> {
    let restorer = Restorer::default();
    let mut look = Look::new(screen::colours(), false);
    let mut screen = Screen::take(&restorer)?;
    let mut shown: Vec<View> = Vec::new();
    loop {
        runs.iter_mut().for_each(Followed::look);
        if !look.paused || shown.is_empty() {
            shown = runs.iter().map(|run| run.view.clone()).collect();
        }
        screen.draw(|frame| draw(frame, &shown, &look))?;
        let (keys, _) = screen.keys(EVERY)?;
        for key in keys {
            if look.press(key, shown.len()) == Wish::Leave {
                return Ok(());
            }
        }
        if signals.flag().is_raised() {
            return Err(Failure::stopped(signals.exit_code()));
        }
    }
}
