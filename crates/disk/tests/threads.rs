//! An engine's threads end with it. In a process of its own, as all of its threads are looked at.
#![cfg(target_os = "linux")]

use plimsoll_disk::{DiskEngine, EngineSettings};

/// Threads of engines.
fn threads() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    let name = |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("comm")).ok();
    tasks.filter_map(name).filter(|name| name.starts_with("disk-")).count()
}

/// Two minutes at most, of which a moment is enough.
fn wait_until(done: impl Fn() -> bool) {
    for _ in 0..120_000 {
        if done() {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    panic!("{} threads of engines", threads());
}

#[test]
fn an_engine_ends_its_threads() {
    for queue_depth in [1, 5] {
        let engine = DiskEngine::start(EngineSettings { queue_depth, piece_bytes: 4096 }).unwrap();
        // A thread that has just been started may not have its name yet.
        wait_until(|| threads() == queue_depth);
        drop(engine);
        // One that was waited for may still be listed for a moment.
        wait_until(|| threads() == 0);
    }
}
