//! A fork-join pool: one caller, pinned workers, tasks taken in order from a shared counter.
//!
//! Which worker takes which task is left to chance; kernels cut their work into tasks by its size alone, never by
//! the number of threads, so that the results are the same bits however many there are.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use plimsoll_memory::{Reservation, ReservationError};

/// How long a worker looks for the next job before it goes to sleep.
const SPINS: u32 = 4000;

/// A pool of threads with a scratch buffer each. Dropping it joins them.
pub struct Pool {
    shared: Arc<Shared>,
    /// One per thread; the caller's is the first.
    scratch: Vec<Reservation>,
    workers: Vec<JoinHandle<()>>,
    caller: Mutex<()>,
}

/// What a task is given.
pub struct Worker<'a> {
    /// The thread's own buffer, 64-byte aligned; contents are whatever the last task left.
    pub scratch: &'a mut [u8],
}

type Body<'a> = dyn Fn(usize, &mut Worker<'_>) + Sync + 'a;

struct Shared {
    state: Mutex<State>,
    wake: Condvar,
    finished: Condvar,
    /// Number of the newest job, for spinning without the lock.
    newest: AtomicUsize,
    next_task: AtomicUsize,
}

struct State {
    job: Option<Job>,
    number: usize,
    running: usize,
    panic: Option<Box<dyn Any + Send>>,
    closing: bool,
}

#[derive(Clone, Copy)]
struct Job {
    body: *const Body<'static>,
    tasks: usize,
}

// SAFETY: the pointer is only followed between the job's start and its end, while `run` keeps the closure alive.
unsafe impl Send for Job {}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes tasks until none is left.
    fn work(&self, body: &Body<'_>, tasks: usize, scratch: &mut [u8]) {
        loop {
            let task = self.next_task.fetch_add(1, Ordering::Relaxed);
            if task >= tasks {
                return;
            }
            body(task, &mut Worker { scratch });
        }
    }
}

impl Pool {
    /// A pool of `threads` threads, the caller's included, each with `scratch_bytes` of scratch.
    pub fn new(threads: usize, scratch_bytes: usize) -> Result<Pool, ReservationError> {
        let threads = threads.max(1);
        let scratch = (0..threads)
            .map(|_| Reservation::new(scratch_bytes as u64))
            .collect::<Result<Vec<_>, _>>()?;
        let shared = Arc::new(Shared {
            state: Mutex::new(State { job: None, number: 0, running: 0, panic: None, closing: false }),
            wake: Condvar::new(),
            finished: Condvar::new(),
            newest: AtomicUsize::new(0),
            next_task: AtomicUsize::new(0),
        });
        let cores = allowed_cores();
        if threads > 1 {
            pin(&cores, 0);
        }
        let mut workers = Vec::new();
        for index in 1..threads {
            let shared = Arc::clone(&shared);
            let cores = cores.clone();
            let scratch = ScratchPointer(scratch[index].as_ptr(), scratch[index].len());
            let thread = std::thread::Builder::new().name(format!("plimsoll-{index}")).spawn(move || {
                pin(&cores, index);
                // SAFETY: the reservation outlives the worker, which `Pool::drop` joins first, and only this
                // worker uses it.
                let scratch = unsafe { scratch.slice() };
                worker_loop(&shared, scratch);
            });
            match thread {
                Ok(handle) => workers.push(handle),
                // Fewer threads, the same results.
                Err(_) => break,
            }
        }
        Ok(Pool { shared, scratch, workers, caller: Mutex::new(()) })
    }

    /// Number of threads, the caller's included.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Runs `body(task, worker)` for every task in `0..tasks` and returns when all are done.
    ///
    /// A panic in a task is raised again here, after the others have ended.
    pub fn run(&self, tasks: usize, body: &Body<'_>) {
        let _one_caller = self.caller.lock().unwrap_or_else(PoisonError::into_inner);
        let own = ScratchPointer(self.scratch[0].as_ptr(), self.scratch[0].len());
        // SAFETY: the first reservation is the caller's, and the lock above admits one caller at a time.
        let own = unsafe { own.slice() };
        self.shared.next_task.store(0, Ordering::Relaxed);
        if tasks <= 1 || self.workers.is_empty() {
            self.shared.work(body, tasks, own);
            return;
        }
        // SAFETY: only the lifetime changes; every worker is done with the pointer before this function returns.
        let body_pointer: *const Body<'static> = unsafe { std::mem::transmute(std::ptr::from_ref(body)) };
        {
            let mut state = self.shared.lock();
            state.job = Some(Job { body: body_pointer, tasks });
            state.number += 1;
            state.running = self.workers.len();
            self.shared.newest.store(state.number, Ordering::Release);
        }
        self.shared.wake.notify_all();
        let outcome = catch_unwind(AssertUnwindSafe(|| self.shared.work(body, tasks, own)));
        let mut spins = 0;
        let mut state = self.shared.lock();
        while state.running > 0 {
            if spins < SPINS {
                spins += 1;
                drop(state);
                std::hint::spin_loop();
                state = self.shared.lock();
            } else {
                state = self.shared.finished.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
        }
        state.job = None;
        let panic = state.panic.take();
        drop(state);
        if let Some(payload) = outcome.err().or(panic) {
            resume_unwind(payload);
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        {
            let mut state = self.shared.lock();
            state.closing = true;
            state.number += 1;
            self.shared.newest.store(state.number, Ordering::Release);
        }
        self.shared.wake.notify_all();
        for worker in self.workers.drain(..) {
            // A worker's panic was already raised in `run`.
            let _ = worker.join();
        }
    }
}

fn worker_loop(shared: &Shared, scratch: &mut [u8]) {
    let mut seen = 0;
    loop {
        let mut spins = 0;
        while shared.newest.load(Ordering::Acquire) == seen && spins < SPINS {
            spins += 1;
            std::hint::spin_loop();
        }
        let job = {
            let mut state = shared.lock();
            while state.number == seen {
                state = shared.wake.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
            seen = state.number;
            if state.closing {
                return;
            }
            state.job
        };
        let Some(job) = job else { continue };
        // SAFETY: `run` keeps the closure alive until `running` is 0, which is only set below.
        let body = unsafe { &*job.body };
        let outcome = catch_unwind(AssertUnwindSafe(|| shared.work(body, job.tasks, scratch)));
        let mut state = shared.lock();
        if let Err(payload) = outcome {
            state.panic.get_or_insert(payload);
        }
        state.running -= 1;
        if state.running == 0 {
            shared.finished.notify_one();
        }
    }
}

struct ScratchPointer(*mut u8, usize);

// SAFETY: each pointer is handed to exactly one thread.
unsafe impl Send for ScratchPointer {}

impl ScratchPointer {
    /// # Safety
    /// The memory must outlive the slice and be used by nobody else meanwhile.
    unsafe fn slice<'a>(self) -> &'a mut [u8] {
        // SAFETY: a reservation is readable and writable for its whole length.
        unsafe { std::slice::from_raw_parts_mut(self.0, self.1) }
    }
}

/// The cores that this process may use.
#[cfg(target_os = "linux")]
fn allowed_cores() -> Vec<usize> {
    // SAFETY: the set is plain data that the call fills in; its size is passed.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        if libc::sched_getaffinity(0, std::mem::size_of::<libc::cpu_set_t>(), &mut set) != 0 {
            return Vec::new();
        }
        (0..libc::CPU_SETSIZE as usize).filter(|core| libc::CPU_ISSET(*core, &set)).collect()
    }
}

/// Pins the calling thread to the `index`-th allowed core; without success it stays where it is.
#[cfg(target_os = "linux")]
fn pin(cores: &[usize], index: usize) {
    let Some(core) = cores.get(index) else { return };
    // SAFETY: the set is plain data, the core is one that the kernel named.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(*core, &mut set);
        libc::sched_setaffinity(0, std::mem::size_of::<libc::cpu_set_t>(), &set);
    }
}

#[cfg(not(target_os = "linux"))]
fn allowed_cores() -> Vec<usize> {
    Vec::new()
}

#[cfg(not(target_os = "linux"))]
fn pin(_: &[usize], _: usize) {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_once() {
        let pool = Pool::new(3, 64).unwrap();
        for tasks in [0, 1, 2, 1000] {
            let counts: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
            pool.run(tasks, &|task, _| {
                counts[task].fetch_add(1, Ordering::Relaxed);
            });
            assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 1), "{tasks}");
        }
    }

    #[test]
    fn a_panic_comes_back_and_the_pool_lives_on() {
        let pool = Pool::new(2, 64).unwrap();
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            pool.run(8, &|task, _| assert_ne!(task, 5, "task five"));
        }));
        assert!(outcome.is_err());
        let sum = AtomicUsize::new(0);
        pool.run(4, &|task, _| {
            sum.fetch_add(task, Ordering::Relaxed);
        });
        assert_eq!(sum.load(Ordering::Relaxed), 6);
    }
}
