//! The beginning of a flight recording: its header and the first records.

#![no_main]

use libfuzzer_sys::fuzz_target;
use plimsoll_monitor::{Conditions, PostMortem, Recording};

fuzz_target!(|data: &[u8]| {
    let mut bytes = data.to_vec();
    bytes.resize(Recording::FILE_BYTES, 0);
    if let Ok(((_, about), slots, torn)) = Recording::parse(&bytes) {
        assert!(slots.is_sorted_by_key(|(number, _)| *number));
        let records = slots.into_iter().map(|(_, record)| record).collect();
        let found = PostMortem::of(&Recording { about, records, torn }, &Conditions::default());
        assert!(!found.cause.to_string().is_empty());
    }
});
