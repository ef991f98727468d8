//! The documents of a JSONL file, read through a small buffer.

#![no_main]

use std::io::BufReader;
use std::path::Path;

use libfuzzer_sys::fuzz_target;
use plimsoll_data::json_lines;

fuzz_target!(|bytes: &[u8]| {
    let mut characters = 0;
    let read =
        json_lines(&mut BufReader::with_capacity(7, bytes), Path::new("any.jsonl"), "text", &mut |text| {
            assert!(!text.is_empty());
            characters += text.len();
            Ok(())
        });
    // An escape is longer than what it stands for.
    assert!(characters <= bytes.len());
    if let Err(error) = read {
        assert!(error.to_string().contains("any.jsonl"), "{error}");
    }
});
