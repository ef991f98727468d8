//! What was freed goes back to the system when it is asked for: in a process of its own, as it looks at all of its memory.
#![cfg(all(target_os = "linux", target_env = "gnu"))]

fn resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
}

#[test]
fn freed_memory_goes_back_to_the_system() {
    const BYTES: u64 = 64 << 20;
    let blocks: Vec<Vec<u8>> = (0..BYTES >> 14).map(|i| vec![i as u8; 1 << 14]).collect();
    // A small one behind them keeps the heap from shrinking by itself.
    let last = vec![1u8; 1 << 10];
    let taken = resident_bytes();
    drop(blocks);
    plimsoll_memory::release_free_heap();
    let left = resident_bytes();
    assert!(left + BYTES / 2 < taken, "{left} of {taken}");
    assert_eq!(last[1 << 9], 1);
}
