//! `plimsoll snapshot` from outside: the keys of its JSON, its page, and what it says of files that are no snapshots.

use std::fs;
use std::process::Output;

use plimsoll_stacks::allocator::{CachingAllocator, Settings, TraceTag};
use plimsoll_stacks::snapshot::{Format, StackFrame, TorchVersion, write_snapshot};
use serde_json::Value;

fn run(arguments: &[&str]) -> Output {
    std::process::Command::new(env!("CARGO_BIN_EXE_plimsoll"))
        .arg("snapshot")
        .args(arguments)
        .output()
        .unwrap()
}

fn snapshot() -> Vec<u8> {
    let mut allocator = CachingAllocator::new(Settings::default(), 1 << 30);
    allocator.record_history(usize::MAX);
    allocator.set_tag(TraceTag(1));
    for _ in 0..100 {
        allocator.malloc(3 << 20, 0).unwrap();
    }
    let frames = |_| vec![StackFrame { name: "log".to_owned(), filename: "train.py".to_owned(), line: 3 }];
    let mut bytes = Vec::new();
    write_snapshot(&[&allocator], frames, Format::Python(TorchVersion::V2_9), &mut bytes).unwrap();
    bytes
}

#[test]
fn json_has_the_keys_of_the_contract_and_the_page_is_written() {
    let folder = tempfile::tempdir().unwrap();
    let (file, page) = (folder.path().join("snapshot.pickle"), folder.path().join("page.html"));
    fs::write(&file, snapshot()).unwrap();
    let (file, page) = (file.to_str().unwrap(), page.to_str().unwrap());
    let output = run(&[file, "--json", "--html", page]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let said: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(said["peak"]["allocated_bytes"], 300 << 20);
    assert_eq!(said["peak"]["reserved_bytes"], 340 << 20);
    assert_eq!(said["peak"]["live"][0]["bytes"], 300 << 20);
    assert_eq!(said["peak"]["live"][0]["stack"][0], "train.py:3 log");
    assert_eq!(said["fragmentation"]["unused_bytes"], 40 << 20);
    assert_eq!(said["leaks"][0]["count"], 100);
    assert_eq!(said["segments"].as_array().unwrap().len(), 17);
    assert!(said["peak"]["time_us"].is_u64() && said["peak"]["live"][0]["kind"].is_string());
    assert!(fs::read_to_string(page).unwrap().starts_with("<!DOCTYPE html>"));
    let text = String::from_utf8(run(&[file]).stdout).unwrap();
    assert!(text.contains("at most 300.0 MiB live in 340.0 MiB of segments"), "{text}");
    assert!(text.contains("tensors kept in a list"), "{text}");
}

#[test]
fn what_is_no_snapshot_is_an_error_with_file_and_place() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("other.pickle");
    let name = file.to_str().unwrap();
    for (bytes, said) in [
        (&b"cposix\nsystem\n(S'true'\ntR."[..], "byte 0: opcode GLOBAL would run code"),
        (b"\x80\x04}.", "byte 3: this is no memory snapshot"),
        (&snapshot()[..1000], "the file ends in the middle"),
    ] {
        fs::write(&file, bytes).unwrap();
        let output = run(&[name]);
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2));
        assert!(error.contains(name) && error.contains(said), "{error}");
    }
    fs::write(&file, snapshot()).unwrap();
    let error = String::from_utf8(run(&[name, "--memory", "10KiB"]).stderr).unwrap();
    assert!(error.contains("--memory"), "{error}");
    let error = String::from_utf8(run(&[name, "--device", "1"]).stderr).unwrap();
    assert!(error.contains("no device 1"), "{error}");
}
