//! The records of a JSONL, JSON or Parquet file; the first byte says which.

#![no_main]

use libfuzzer_sys::fuzz_target;
use plimsoll_data::for_each_record;
use plimsoll_fuzz::{file, names_file};

// The reader of Parquet panics at files that contradict themselves, which becomes an error. libFuzzer's hook would end the
// process before; a panic that reaches the target ends it all the same.
fuzz_target!(init: std::panic::set_hook(Box::new(|_| {})), |bytes: &[u8]| {
    let Some((choice, bytes)) = bytes.split_first() else { return };
    let file = file([".jsonl", ".json", ".parquet"][usize::from(choice % 3)], bytes);
    let mut last = 0;
    let read = for_each_record(file.path(), 7, &mut |place, _| {
        assert!(place.number > last && place.path == file.path());
        last = place.number;
        Ok(())
    });
    if let Err(error) = read {
        names_file(&error, &file);
    }
});
