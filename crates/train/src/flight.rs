//! The flight recorder of a run: who has which memory, four times a second, from a thread of its own.
//!
//! The loop says after every step what the arena holds; the thread asks the system for the rest, so that a step which takes minutes
//! is recorded too. A recording that cannot be written ends; the run goes on.

use std::path::Path;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use plimsoll_memory::Ledger;
use plimsoll_monitor::{
    About, Conditions, FLIGHT_RECORDER, Owner, Record, Recorder, Recording, Status, process,
};
use plimsoll_plan::TrainingPlan;
use plimsoll_plan::hardware::SystemFiles;

use crate::{TrainError, TrainingOutcome};

/// How a recording says that its run came to its end.
pub const RUN_COMPLETE: &str = "the run is complete";

/// The same of one that was stopped.
pub const RUN_STOPPED: &str = "the run was stopped";

/// From one record to the next: a recording holds 1200, which are five minutes.
const EVERY: Duration = Duration::from_millis(250);

/// The thread's stack: it parses small files.
const STACK: usize = 512 << 10;

/// What the loop knows.
#[derive(Clone, Debug, Default)]
struct Known {
    step: Option<u64>,
    status: Status,
    /// What the arena holds at its peak, by tag, with its gaps, and the host tier.
    owners: Vec<Owner>,
    /// Bytes of these.
    bytes: u64,
}

/// A recording that goes on.
pub(crate) struct Flight {
    known: Arc<Mutex<Known>>,
    /// How it ended, for the thread.
    end: Sender<String>,
    thread: Option<JoinHandle<()>>,
}

impl Flight {
    /// Bytes of disk that a recording takes which is not there yet.
    pub fn room(output: &Path) -> u64 {
        let there = std::fs::metadata(output.join(FLIGHT_RECORDER)).map_or(0, |file| file.len());
        (Recording::FILE_BYTES as u64).saturating_sub(there)
    }

    /// Begins to record a run into its folder.
    pub fn begin(output: &Path, plan: &TrainingPlan) -> Flight {
        let known = Arc::new(Mutex::new(Known::default()));
        let (end, ended) = channel::<String>();
        let path = output.join(FLIGHT_RECORDER);
        let what = format!("training of {} in {}", plan.spec.name, output.display());
        let shared = Arc::clone(&known);
        let planned_bytes = Some(plan.process_bytes());
        let record = move || -> std::io::Result<()> {
            let (files, pid) = (SystemFiles::of_this_machine(), std::process::id());
            let about = About { planned_bytes, ..Conditions::about(&files, pid, what, now()) };
            let mut recorder = Recorder::begin(&path, about)?;
            loop {
                let known = shared.lock().unwrap_or_else(PoisonError::into_inner).clone();
                recorder.record(&record_of(&files, pid, known))?;
                match ended.recv_timeout(EVERY) {
                    Err(RecvTimeoutError::Timeout) => {}
                    Ok(how) => return recorder.end(&how),
                    Err(RecvTimeoutError::Disconnected) => return recorder.end("it was given up"),
                }
            }
        };
        let thread = std::thread::Builder::new()
            .name("flight recorder".to_owned())
            .stack_size(STACK)
            .spawn(move || drop(record()));
        Flight { known, end, thread: thread.ok() }
    }

    /// Says what the arena and the host tier hold after a step; `high_water`: of both, in bytes.
    pub fn step(&self, step: u64, status: Status, ledger: Ledger, high_water: (u64, u64)) {
        let at_peak = ledger.at_peak();
        let owner = |name: &str, bytes| Owner { name: name.to_owned(), bytes };
        let mut owners: Vec<Owner> =
            at_peak.by_tag.iter().map(|(tag, bytes)| owner(tag.name(), bytes)).collect();
        let gaps = high_water.0.saturating_sub(at_peak.by_tag.total());
        owners.extend([owner("gaps of the arena", gaps), owner("host tier", high_water.1)]);
        owners.retain(|owner| owner.bytes > 0);
        let bytes = high_water.0 + high_water.1;
        let known = Known { step: Some(step), status, owners, bytes };
        *self.known.lock().unwrap_or_else(PoisonError::into_inner) = known;
    }

    /// Ends the recording with how the run has ended.
    pub fn end(mut self, outcome: &Result<TrainingOutcome, TrainError>) {
        let how = match outcome {
            Ok(outcome) if outcome.report.finished => RUN_COMPLETE.to_owned(),
            Ok(_) => RUN_STOPPED.to_owned(),
            Err(error) => error.to_string(),
        };
        // Without a thread nobody hears it.
        let _ = self.end.send(how);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Memory now, by owner: every byte of the resident set has one.
fn record_of(files: &SystemFiles, pid: u32, known: Known) -> Record {
    let own = process(files, pid).unwrap_or_default();
    let (container, machine) = Conditions::room(files, pid);
    let mut owners = known.owners;
    let mut add = |name: &str, bytes: u64| {
        if bytes > 0 {
            owners.push(Owner { name: name.to_owned(), bytes });
        }
    };
    // Pages of the arena that are not touched yet are no one's.
    let private = own.anonymous_bytes + own.shared_bytes;
    add("program, threads and heap", private.saturating_sub(known.bytes));
    add("mapped files", own.file_bytes);
    add("swapped out", own.swap_bytes);
    if let Some([_, used]) = container {
        add("others in the container", used.saturating_sub(own.rss_bytes));
    }
    if let Some([total, free]) = machine {
        let used = total.saturating_sub(free);
        add("others on the machine", used.saturating_sub(own.rss_bytes));
    }
    Record {
        time: now(),
        step: known.step,
        status: known.status,
        rss: own.rss_bytes,
        container,
        machine,
        owners,
    }
}

/// Seconds since 1970.
fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs_f64()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the arena holds was touched; what is beyond it belongs to the program.
    #[test]
    #[cfg(target_os = "linux")]
    fn every_byte_of_the_resident_set_has_an_owner() {
        let mine = std::hint::black_box(vec![1u8; 64 << 20]);
        let arena = Owner { name: "weights".to_owned(), bytes: mine.len() as u64 };
        let known =
            Known { step: Some(3), owners: vec![arena], bytes: mine.len() as u64, ..Known::default() };
        let record = record_of(&SystemFiles::of_this_machine(), std::process::id(), known);
        let own = |owner: &&Owner| !owner.name.starts_with("others") && owner.name != "swapped out";
        let named: u64 = record.owners.iter().filter(own).map(|owner| owner.bytes).sum();
        assert!(record.rss > 64 << 20 && named as f64 >= 0.99 * record.rss as f64, "{named} {record:?}");
        assert!(named as f64 <= 1.01 * record.rss as f64, "{named} {record:?}");
        assert_eq!(record.step, Some(3));
    }
}
