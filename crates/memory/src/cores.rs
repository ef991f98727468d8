//! Which cores threads run on.
//!
//! A pool of kernels that has as many threads as there are cores keeps each, the caller among them, to one. A thread begins on its
//! maker's cores: whoever starts one for other work lets it [run on all](run_on_all_cores), or it shares a single core with a busy thread.

use std::num::NonZero;
use std::sync::OnceLock;
use std::thread::available_parallelism;

/// The cores that the calling thread may run on now: before others are begun and [`allowed_cores`] is asked for, the process's.
#[cfg(target_os = "linux")]
pub fn cores_of_process() -> Vec<usize> {
    // SAFETY: the set is plain data that the call fills in; its size is passed.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        if libc::sched_getaffinity(0, std::mem::size_of::<libc::cpu_set_t>(), &mut set) != 0 {
            return Vec::new();
        }
        (0..libc::CPU_SETSIZE as usize).filter(|core| libc::CPU_ISSET(*core, &set)).collect()
    }
}

#[cfg(not(target_os = "linux"))]
pub fn cores_of_process() -> Vec<usize> {
    Vec::new()
}

/// Lets this process run on these cores alone: to be called before threads are begun and [`allowed_cores`] is asked for. Where
/// the system refuses, nothing changes.
#[cfg(target_os = "linux")]
pub fn keep_process_to(cores: &[usize]) {
    set_affinity(0, cores);
}

#[cfg(not(target_os = "linux"))]
pub fn keep_process_to(_: &[usize]) {}

/// The cores that this process may use. Found once, before [`keep_to`] first keeps a thread to less: that thread no longer
/// knows what it was allowed before.
#[cfg(target_os = "linux")]
pub fn allowed_cores() -> &'static [usize] {
    static CORES: OnceLock<Vec<usize>> = OnceLock::new();
    CORES.get_or_init(cores_of_process)
}

#[cfg(not(target_os = "linux"))]
pub fn allowed_cores() -> &'static [usize] {
    &[]
}

/// How many of them this process may keep busy: where a container allows a share of the time, fewer than it may use. Found
/// once, for the same reason.
pub fn usable_cores() -> usize {
    static CORES: OnceLock<usize> = OnceLock::new();
    *CORES.get_or_init(|| available_parallelism().map_or(1, NonZero::get))
}

/// Lets the calling thread run on every core that the process may use. Where the system refuses, the thread stays where it is.
pub fn run_on_all_cores() {
    keep_to(0, allowed_cores());
}

/// The core on which the calling thread runs now; `None` where nobody knows.
#[cfg(target_os = "linux")]
pub fn current_core() -> Option<usize> {
    // SAFETY: a plain question to the kernel.
    usize::try_from(unsafe { libc::sched_getcpu() }).ok()
}

#[cfg(not(target_os = "linux"))]
pub fn current_core() -> Option<usize> {
    None
}

/// Lets the calling thread run on every core but one, its maker's, which is busy: the thread would begin there and wait for its
/// turn. Where there is no other core, it waits.
pub fn run_beside(core: Option<usize>) {
    let others: Vec<usize> = allowed_cores().iter().copied().filter(|other| Some(*other) != core).collect();
    keep_to(0, if others.is_empty() { allowed_cores() } else { &others });
}

/// Lets a thread run on these cores alone; 0 is the calling one. Where the system refuses, the thread stays where it is.
#[cfg(target_os = "linux")]
pub fn keep_to(thread: i32, cores: &[usize]) {
    allowed_cores();
    usable_cores();
    set_affinity(thread, cores);
}

#[cfg(target_os = "linux")]
fn set_affinity(thread: i32, cores: &[usize]) {
    // SAFETY: the set is plain data, the cores are some that the kernel named.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        for core in cores {
            libc::CPU_SET(*core, &mut set);
        }
        libc::sched_setaffinity(thread, std::mem::size_of::<libc::cpu_set_t>(), &set);
    }
}

#[cfg(not(target_os = "linux"))]
pub fn keep_to(_: i32, _: &[usize]) {}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn what_a_thread_of_one_core_begins_may_run_on_all() {
        // As far as this machine has several.
        let here = || (0..allowed_cores().len()).filter(|core| is_allowed(allowed_cores()[*core])).count();
        std::thread::spawn(move || {
            keep_to(0, &allowed_cores()[..1]);
            assert_eq!(here(), 1);
            let beside = std::thread::spawn(move || {
                let before = here();
                run_on_all_cores();
                (before, here())
            });
            assert_eq!(beside.join().unwrap(), (1, allowed_cores().len()));
            assert!(usable_cores() >= 1);
        })
        .join()
        .unwrap();
    }

    /// Whether the calling thread may run on a core.
    fn is_allowed(core: usize) -> bool {
        cores_of_process().contains(&core)
    }
}
