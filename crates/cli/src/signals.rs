//! Signals that ask for an end: Ctrl-C, `kill`, and a terminal that goes away.
//!
//! The first signal asks the run to stop between steps. A Ctrl-C after the first signal ends the program at once; other
//! signals do not, since shells and launchers send them twice. A signal that was ignored when the program was started
//! (`nohup`) stays ignored, but for the Ctrl-C of a dashboard.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use plimsoll_train::StopFlag;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};
use signal_hook::iterator::Signals;

use crate::screen::Restorer;

/// The stack of the thread that waits for signals.
const STACK: usize = 256 << 10;

/// Listens for the signals from its creation on.
pub struct StopSignals {
    flag: StopFlag,
    last: Arc<AtomicUsize>,
}

impl StopSignals {
    /// Begins to listen; until then a signal ends the program, as it does by default. `of_rank`: launchers of ranks tell them to
    /// stop by SIGUSR1, for other signals end them.
    pub fn listen(of_rank: bool) -> std::io::Result<StopSignals> {
        StopSignals::begin(of_rank, None)
    }

    /// The same; a terminal that is taken is given back before a Ctrl-C ends the program at once.
    pub fn listen_beside(restorer: &Restorer) -> std::io::Result<StopSignals> {
        StopSignals::begin(false, Some(restorer.clone()))
    }

    fn begin(of_rank: bool, restorer: Option<Restorer>) -> std::io::Result<StopSignals> {
        let signals = StopSignals { flag: StopFlag::new(), last: Arc::default() };
        let ignored = ignored(&std::fs::read_to_string("/proc/self/status").unwrap_or_default());
        let all = [SIGINT, SIGTERM, SIGHUP].into_iter().chain(of_rank.then_some(SIGUSR1));
        for signal in all {
            // A dashboard has a terminal, whose Ctrl-C is meant however the program was started.
            let is_key = signal == SIGINT && restorer.is_some();
            if ignored & (1 << (signal - 1)) != 0 && !is_key {
                continue;
            }
            if signal == SIGINT && restorer.is_none() {
                let code = i32::from(exit_code(signal as usize));
                signal_hook::flag::register_conditional_shutdown(signal, code, signals.flag.shared())?;
            }
            // Which one it was is known by the time that the wish is heard.
            signal_hook::flag::register_usize(signal, Arc::clone(&signals.last), signal as usize)?;
            signal_hook::flag::register(signal, signals.flag.shared())?;
        }
        if let Some(restorer) = restorer {
            end_at_once_at_the_second(restorer, ignored)?;
        }
        Ok(signals)
    }

    /// The flag that each signal raises.
    pub fn flag(&self) -> &StopFlag {
        &self.flag
    }

    /// The exit code of a program that ended because of the last signal, as shells have it: 128 and the signal's
    /// number.
    pub fn exit_code(&self) -> u8 {
        match self.last.load(Ordering::SeqCst) {
            0 => exit_code(SIGINT as usize),
            signal => exit_code(signal),
        }
    }
}

/// Ends the program at a Ctrl-C that is not the first signal, from a thread, which can do what a signal's handler must not.
fn end_at_once_at_the_second(restorer: Restorer, ignored: u64) -> std::io::Result<()> {
    let heard = [SIGTERM, SIGHUP].into_iter().filter(|signal| ignored & (1 << (signal - 1)) == 0);
    let mut all = Signals::new(heard.chain([SIGINT]))?;
    let listen = move || {
        let mut is_asked = false;
        for signal in all.forever() {
            if is_asked && signal == SIGINT {
                restorer.restore();
                signal_hook::low_level::exit(i32::from(exit_code(SIGINT as usize)));
            }
            is_asked = true;
        }
    };
    std::thread::Builder::new().name("signals".to_owned()).stack_size(STACK).spawn(listen).map(drop)
}

/// The signal that stops an answer: Ctrl-C, or what a launcher of ranks tells them instead.
pub fn to_interrupt(of_rank: bool) -> i32 {
    if of_rank { SIGUSR1 } else { SIGINT }
}

fn exit_code(signal: usize) -> u8 {
    u8::try_from(128 + signal).unwrap_or(u8::MAX)
}

/// Those of some signals that were not ignored when the program was started.
pub fn heard(all: [i32; 3]) -> impl Iterator<Item = i32> {
    let ignored = ignored(&std::fs::read_to_string("/proc/self/status").unwrap_or_default());
    all.into_iter().filter(move |signal| ignored & (1 << (signal - 1)) == 0)
}

/// The signals that a process ignores, as Linux shows them: bit 0 is signal 1. None where the system does not say.
fn ignored(status: &str) -> u64 {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_ignored_is_read_from_the_systems_mask() {
        assert_eq!(ignored("Name:\tx\nSigBlk:\t0000000000000002\nSigIgn:\t0000000000001001\n"), 0x1001);
        assert_eq!(ignored("") | ignored("SigIgn:\tno"), 0);
    }

    #[test]
    fn codes_are_those_of_shells() {
        assert_eq!([SIGHUP, SIGINT, SIGTERM].map(|signal| exit_code(signal as usize)), [129, 130, 143]);
    }
}
