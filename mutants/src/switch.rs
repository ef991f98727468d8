//! Which mutant of this build is on. This file is compiled into every crate whose mutants are tried.
//!
//! `MUTANT=N` switches the mutant N on. Where no mutant is on and `MUTANT_TRACE` names a file, the number of each
//! mutant is appended to it when its place in the program is reached for the first time.

use std::io::Write;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

const UNKNOWN: u32 = u32::MAX;
const TRACED: u32 = u32::MAX - 1;
const MOST: usize = 1 << 16;

static ACTIVE: AtomicU32 = AtomicU32::new(UNKNOWN);
static REACHED: [AtomicU64; MOST / 64] = [const { AtomicU64::new(0) }; MOST / 64];

#[inline(always)]
pub fn on(mutant: u32) -> bool {
    let active = ACTIVE.load(Relaxed);
    active == mutant || (active >= TRACED && first_or_traced(mutant))
}

/// The value of a condition, or that of the mutant that is on. A mutant is reached where its value is another.
#[inline(always)]
pub fn either<const N: usize>(as_it_is: bool, mutants: [(u32, bool); N]) -> bool {
    for (mutant, value) in mutants {
        if value != as_it_is && on(mutant) {
            return value;
        }
    }
    as_it_is
}

#[cold]
fn first_or_traced(mutant: u32) -> bool {
    if ACTIVE.load(Relaxed) == UNKNOWN {
        let named = std::env::var("MUTANT").ok().and_then(|number| number.parse().ok());
        let traced = std::env::var_os("MUTANT_TRACE").is_some();
        ACTIVE.store(named.unwrap_or(if traced { TRACED } else { 0 }), Relaxed);
    }
    let active = ACTIVE.load(Relaxed);
    if active == TRACED {
        trace(mutant);
    }
    active == mutant
}

fn trace(mutant: u32) {
    let bit = 1 << (mutant % 64);
    if REACHED[mutant as usize / 64].fetch_or(bit, Relaxed) & bit != 0 {
        return;
    }
    let Some(path) = std::env::var_os("MUTANT_TRACE") else { return };
    if let Ok(mut file) = std::fs::OpenOptions::new().create(true).append(true).open(path) {
        let _ = file.write_all(format!("{mutant}\n").as_bytes());
    }
}
