//! Sizes as people write them.

#![no_main]

use libfuzzer_sys::fuzz_target;
use plimsoll_memory::ByteSize;

fuzz_target!(|text: &str| {
    if let Ok(size) = text.parse::<ByteSize>() {
        // Printing rounds: to three digits below 10, to one decimal above. The last tebibyte below 2^64 rounds to 2^64.
        if size.0 < u64::MAX - (1 << 40) {
            let printed: ByteSize = size.to_string().parse().expect("what is printed");
            assert!(printed.0.abs_diff(size.0) as f64 <= size.0 as f64 / 150.0, "{size:?} as {size}");
        }
        assert_eq!(size.0.to_string().parse::<ByteSize>().expect("a plain number"), size);
    }
    let _ = serde_json::from_str::<ByteSize>(text);
});
