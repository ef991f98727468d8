//! A snapshot of PyTorch's memory: nothing is run, memory has its limit, and what is live at the peak adds up.

#![no_main]

use libfuzzer_sys::fuzz_target;
use plimsoll_stacks::snapshot::{Analysis, Limits, read_snapshot};

fuzz_target!(|bytes: &[u8]| {
    match read_snapshot(bytes, bytes.len() as u64, Limits { memory: 1 << 24 }) {
        Ok(snapshot) => {
            for device in 0..snapshot.devices().min(4) {
                let peak = Analysis::of(&snapshot, device).peak;
                let live = peak.live.iter().fold(0u64, |sum, live| sum.saturating_add(live.bytes));
                let by_kind = peak.by_kind.iter().fold(0u64, |sum, (_, bytes)| sum.saturating_add(*bytes));
                assert_eq!(live, by_kind);
            }
        }
        Err(error) => assert!(error.offset <= bytes.len() as u64),
    }
});
