//! A fork-join pool: one caller, workers, tasks taken in order from a shared counter.
//!
//! Or from a counter for each thread: then a thread takes tasks that follow each other, and those of others when its own
//! are done. Where tasks stream through memory this is worth much: caches fetch ahead what the same core asks for next.
//!
//! Which worker takes which task is left to chance; kernels cut their work so that it cannot matter to the results,
//! which are the same bits however many threads there are.
//!
//! The caller works like everybody and waits only for workers that have joined its job: one that sleeps, or that another
//! process keeps from its core, is not missed. Jobs follow each other within microseconds, so workers look out for the next
//! one for a while before they sleep: less where there are fewer cores than threads. Those that sleep are woken for jobs
//! that take longer than waking.

use std::any::Any;
use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use plimsoll_memory::{Reservation, ReservationError, allowed_cores, keep_to, usable_cores};

/// How a thread looks for what it waits for before it goes to sleep.
#[derive(Clone, Copy)]
struct Patience {
    /// How often without a pause.
    spins: u32,
    /// How often, after that, with the core offered to others in between.
    yields: u32,
}

impl Patience {
    /// Some 50 to 100 microseconds where nobody else wants the core.
    const OWN_CORE: Patience = Patience { spins: 2000, yields: 100 };
    /// What is waited for may need this very core.
    const SHARED_CORE: Patience = Patience { spins: 0, yields: 2 };

    /// That of so many threads, which have the cores to themselves.
    fn of(threads: usize) -> Patience {
        if threads > usable_cores() { Patience::SHARED_CORE } else { Patience::OWN_CORE }
    }
}

/// A job that has taken so long and is not done is worth waking others for.
const WORTH_WAKING: Duration = Duration::from_micros(10);

/// A pool of threads with a scratch buffer each. Dropping it joins them.
pub struct Pool {
    shared: Arc<Shared>,
    /// One per thread; the caller's is the first.
    scratch: Vec<Reservation>,
    common: Reservation,
    workers: Vec<JoinHandle<()>>,
    caller: Mutex<()>,
    /// Those that its threads keep to, one each.
    cores: Option<&'static [usize]>,
    /// The thread that runs jobs, while it is kept to a core.
    kept: Mutex<Kept>,
}

/// What a task is given.
pub struct Worker<'a> {
    /// The thread's own buffer, 64-byte aligned; contents are whatever the last task left.
    pub scratch: &'a mut [u8],
    /// Whether the same thread has just run the task before this one.
    pub follows: bool,
}

/// The right to run jobs on a pool: one holder at a time.
pub struct Session<'a> {
    pool: &'a Pool,
    _caller: MutexGuard<'a, ()>,
}

type Body<'a> = dyn Fn(usize, &mut Worker<'_>) + Sync + 'a;

struct Shared {
    /// Written by the caller while the gate is shut and nobody is inside; read by workers inside.
    job: UnsafeCell<Option<Job>>,
    gate: Gate,
    /// One per thread; a job uses as many as it has runs.
    next_tasks: Vec<NextTask>,
    closing: AtomicBool,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    patience: Patience,
    /// Workers without a job.
    idle: Bed,
    /// The caller, while workers end its job.
    done: Bed,
}

#[derive(Clone, Copy)]
struct Job {
    body: *const Body<'static>,
    tasks: Tasks,
}

/// The tasks of a job, in runs of which each has its own counter.
#[derive(Clone, Copy)]
struct Tasks {
    count: usize,
    runs: usize,
}

impl Tasks {
    /// The first task of a run, or the end of the one before it.
    fn start(self, run: usize) -> usize {
        self.count / self.runs * run + run.min(self.count % self.runs)
    }
}

/// A counter with cache lines of its own.
#[repr(align(128))]
#[derive(Default)]
struct NextTask(AtomicUsize);

// SAFETY: the job's pointer is only followed inside the gate, while `run` keeps the closure alive; the cell is written only
// while nobody is inside, as its comment says.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

/// Lets workers into the newest job, and nobody into one that is over. In one number: the job's in the upper half, a bit that
/// says whether it is open, and how many are inside.
struct Gate(AtomicU64);

impl Gate {
    const OPEN: u64 = 1 << 31;
    const INSIDE: u64 = Gate::OPEN - 1;

    /// The number of the newest job.
    fn newest(&self) -> u64 {
        self.0.load(Ordering::SeqCst) >> 32
    }

    /// Opens the next job. To be called while nobody is inside.
    fn open(&self) {
        self.0.store((self.newest() + 1) << 32 | Gate::OPEN, Ordering::SeqCst);
    }

    /// Lets nobody in from now on.
    fn shut(&self) {
        self.0.fetch_and(!Gate::OPEN, Ordering::SeqCst);
    }

    fn is_empty(&self) -> bool {
        self.0.load(Ordering::SeqCst) & Gate::INSIDE == 0
    }

    /// Whether the caller of this function is inside the newest job now, and that job's number.
    fn enter(&self) -> (bool, u64) {
        let mut now = self.0.load(Ordering::SeqCst);
        while now & Gate::OPEN != 0 {
            match self.0.compare_exchange_weak(now, now + 1, Ordering::SeqCst, Ordering::SeqCst) {
                Ok(_) => return (true, now >> 32),
                Err(other) => now = other,
            }
        }
        (false, now >> 32)
    }

    /// Leaves, and says whether the caller of the job waits for nobody any more.
    fn leave(&self) -> bool {
        let before = self.0.fetch_sub(1, Ordering::SeqCst);
        before & Gate::INSIDE == 1 && before & Gate::OPEN == 0
    }
}

/// Where threads sleep.
#[derive(Default)]
struct Bed {
    /// Held between the last look at what is waited for and going to sleep, and by whoever wakes.
    lock: Mutex<()>,
    /// Threads that sleep or are about to.
    sleepers: AtomicUsize,
    wake: Condvar,
}

impl Bed {
    /// Returns when `done` holds: soon after, if it takes long.
    fn wait_until(&self, patience: Patience, done: impl Fn() -> bool) {
        for _ in 0..patience.spins {
            if done() {
                return;
            }
            std::hint::spin_loop();
        }
        for _ in 0..patience.yields {
            if done() {
                return;
            }
            std::thread::yield_now();
        }
        let mut guard = lock(&self.lock);
        // Whoever makes `done` hold looks at `sleepers` afterwards: one of the two sees the other's change.
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        while !done() {
            guard = self.wake.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }

    fn has_sleepers(&self) -> bool {
        self.sleepers.load(Ordering::SeqCst) > 0
    }

    /// To be called after a change that somebody may wait for.
    fn wake(&self) {
        if self.has_sleepers() {
            drop(lock(&self.lock));
            self.wake.notify_all();
        }
    }
}

impl Shared {
    /// Takes tasks until none is left, those of the thread's own run first, with `after` each.
    fn work(
        &self,
        body: &Body<'_>,
        tasks: Tasks,
        thread: usize,
        scratch: &mut [u8],
        mut after: impl FnMut(),
    ) {
        let mut following = None;
        for other in 0..tasks.runs {
            let run = (thread + other) % tasks.runs;
            let end = tasks.start(run + 1);
            loop {
                let task = self.next_tasks[run].0.fetch_add(1, Ordering::Relaxed);
                if task >= end {
                    break;
                }
                body(task, &mut Worker { scratch, follows: following == Some(task) });
                following = Some(task + 1);
                after();
            }
        }
    }

    /// Whether a task is left that nobody has taken.
    fn has_tasks(&self, tasks: Tasks) -> bool {
        (0..tasks.runs).any(|run| self.next_tasks[run].0.load(Ordering::Relaxed) < tasks.start(run + 1))
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Pool {
    /// Size of the buffer that all threads share, in bytes. Pages that no kernel touches are never committed.
    pub const COMMON_BYTES: usize = 6 << 20;

    /// A pool of `threads` threads, the caller's included, each with `scratch_bytes` of scratch. It takes no core from others:
    /// the system places its threads, and those without a job sleep at once.
    ///
    /// Its memory is `threads` times that, and [`COMMON_BYTES`](Self::COMMON_BYTES) once.
    ///
    /// # Errors
    /// There is no memory for it.
    pub fn new(threads: usize, scratch_bytes: usize) -> Result<Pool, ReservationError> {
        Pool::build(threads, scratch_bytes, Patience::SHARED_CORE, None)
    }

    /// The same for a program whose only busy threads these are: those without a job look out for the next one for a while. Where
    /// there are as many threads as cores, each keeps to one; the caller to the first, while a [device](super::Cpu) has the pool.
    /// Of fewer threads, which cores are free and which two are one is left to the system.
    ///
    /// # Errors
    /// There is no memory for it.
    pub fn on_own_cores(threads: usize, scratch_bytes: usize) -> Result<Pool, ReservationError> {
        let (cores, patience) = (allowed_cores(), Patience::of(threads));
        let one_each = threads > 1 && threads == cores.len();
        Pool::build(threads, scratch_bytes, patience, one_each.then_some(cores))
    }

    fn build(
        threads: usize,
        scratch_bytes: usize,
        patience: Patience,
        cores: Option<&'static [usize]>,
    ) -> Result<Pool, ReservationError> {
        let threads = threads.max(1);
        let scratch =
            (0..threads).map(|_| Reservation::new(scratch_bytes as u64)).collect::<Result<Vec<_>, _>>()?;
        let common = Reservation::new(Self::COMMON_BYTES as u64)?;
        let shared = Arc::new(Shared {
            job: UnsafeCell::new(None),
            gate: Gate(AtomicU64::new(0)),
            next_tasks: (0..threads).map(|_| NextTask::default()).collect(),
            closing: AtomicBool::new(false),
            panic: Mutex::new(None),
            patience,
            idle: Bed::default(),
            done: Bed::default(),
        });
        let mut workers = Vec::new();
        for index in 1..threads {
            let shared = Arc::clone(&shared);
            let scratch = ScratchPointer(scratch[index].as_ptr(), scratch[index].len());
            let thread = std::thread::Builder::new().name(format!("plimsoll-{index}")).spawn(move || {
                pin(cores.unwrap_or_default(), index);
                // SAFETY: the reservation outlives the worker, which `Pool::drop` joins first, and only this
                // worker uses it.
                let scratch = unsafe { scratch.slice() };
                worker_loop(&shared, index, scratch);
            });
            match thread {
                Ok(handle) => workers.push(handle),
                // Fewer threads, the same results.
                Err(_) => break,
            }
        }
        Ok(Pool { shared, scratch, common, workers, caller: Mutex::new(()), cores, kept: Mutex::default() })
    }

    /// Number of threads, the caller's included.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Bytes of its buffers in all.
    pub fn bytes(&self) -> u64 {
        self.buffers().map(|buffer| buffer.len() as u64).sum()
    }

    /// Bytes of its buffers that no kernel has touched yet: what they may still take.
    pub fn untouched_bytes(&self) -> u64 {
        self.buffers().map(Reservation::untouched_bytes).sum()
    }

    fn buffers(&self) -> impl Iterator<Item = &Reservation> {
        self.scratch.iter().chain([&self.common])
    }

    /// Waits for the pool and takes it, for several jobs in a row.
    pub fn session(&self) -> Session<'_> {
        Session { pool: self, _caller: lock(&self.caller) }
    }

    /// Runs `body(task, worker)` for every task in `0..tasks` and returns when all are done.
    ///
    /// A panic in a task is raised again here, after the others have ended.
    pub fn run(&self, tasks: usize, body: &Body<'_>) {
        self.session().run(tasks, body);
    }
}

impl Session<'_> {
    /// Number of threads, the caller's included.
    pub fn threads(&self) -> usize {
        self.pool.threads()
    }

    /// The buffer that all threads share, 2 MiB aligned, of [`Pool::COMMON_BYTES`]. It belongs to this session; the
    /// tasks of its jobs order their accesses among themselves.
    pub fn common(&mut self) -> *mut u8 {
        self.pool.common.as_ptr()
    }

    /// As [`Pool::run`]; tasks begin in order.
    pub fn run(&mut self, tasks: usize, body: &Body<'_>) {
        self.run_in(Tasks { count: tasks, runs: 1 }, body);
    }

    /// As [`Pool::run`]; each thread begins with tasks that follow each other, and only then takes those of others.
    pub fn run_side_by_side(&mut self, tasks: usize, body: &Body<'_>) {
        self.run_in(Tasks { count: tasks, runs: self.threads().min(tasks).max(1) }, body);
    }

    fn run_in(&mut self, tasks: Tasks, body: &Body<'_>) {
        let Pool { shared, scratch, workers, .. } = self.pool;
        let own = ScratchPointer(scratch[0].as_ptr(), scratch[0].len());
        // SAFETY: the first reservation is the caller's, and the session admits one caller at a time.
        let own = unsafe { own.slice() };
        for run in 0..tasks.runs {
            shared.next_tasks[run].0.store(tasks.start(run), Ordering::Relaxed);
        }
        if tasks.count <= 1 || workers.is_empty() {
            shared.work(body, tasks, 0, own, || {});
            return;
        }
        // SAFETY: only the lifetime changes; every worker is done with the pointer before this function returns.
        let body_pointer: *const Body<'static> = unsafe { std::mem::transmute(std::ptr::from_ref(body)) };
        // SAFETY: nobody is inside the gate, so none reads the cell before it opens.
        unsafe { *shared.job.get() = Some(Job { body: body_pointer, tasks }) };
        shared.gate.open();
        let mut begun = shared.idle.has_sleepers().then(Instant::now);
        let wake_if_long = || {
            if begun.is_some_and(|begun| begun.elapsed() >= WORTH_WAKING) {
                begun = None;
                if shared.has_tasks(tasks) {
                    shared.idle.wake();
                }
            }
        };
        let outcome = catch_unwind(AssertUnwindSafe(|| shared.work(body, tasks, 0, own, wake_if_long)));
        shared.gate.shut();
        shared.done.wait_until(shared.patience, || shared.gate.is_empty());
        let panic = lock(&shared.panic).take();
        if let Some(payload) = outcome.err().or(panic) {
            resume_unwind(payload);
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.closing.store(true, Ordering::SeqCst);
        self.shared.idle.wake();
        for worker in self.workers.drain(..) {
            // A worker's panic was already raised in `run`.
            let _ = worker.join();
        }
    }
}

fn worker_loop(shared: &Shared, thread: usize, scratch: &mut [u8]) {
    let mut seen = 0;
    let closing = || shared.closing.load(Ordering::SeqCst);
    loop {
        shared.idle.wait_until(shared.patience, || shared.gate.newest() != seen || closing());
        if closing() {
            return;
        }
        let (inside, newest) = shared.gate.enter();
        seen = newest;
        if !inside {
            continue;
        }
        // SAFETY: the job was written before the gate opened, and the next one is written when nobody is inside.
        if let Some(job) = unsafe { *shared.job.get() } {
            // SAFETY: `run` keeps the closure alive until nobody is inside.
            let body = unsafe { &*job.body };
            let outcome =
                catch_unwind(AssertUnwindSafe(|| shared.work(body, job.tasks, thread, scratch, || {})));
            if let Err(payload) = outcome {
                lock(&shared.panic).get_or_insert(payload);
            }
        }
        if shared.gate.leave() {
            shared.done.wake();
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

/// Pins the calling thread to the `index`-th allowed core; without success it stays where it is.
fn pin(cores: &[usize], index: usize) {
    if let Some(core) = cores.get(index..=index) {
        keep_to(0, core);
    }
}

/// A pool, and the thread that runs jobs on it: where the pool's threads have a core each, that thread keeps to the first one while
/// anybody holds it so. Later it goes back to all: threads and processes that it starts would inherit the one.
pub(super) struct WithCaller(Arc<Pool>);

/// The thread that is kept to a core, and how many hold it there.
#[derive(Default)]
struct Kept {
    thread: i32,
    holders: u32,
}

impl WithCaller {
    /// The calling thread is the one.
    pub(super) fn new(pool: Arc<Pool>) -> WithCaller {
        let mut kept = lock(&pool.kept);
        kept.holders += 1;
        if let (1, Some(cores)) = (kept.holders, pool.cores) {
            kept.thread = this_thread();
            pin(cores, 0);
        }
        drop(kept);
        WithCaller(pool)
    }
}

impl std::ops::Deref for WithCaller {
    type Target = Arc<Pool>;

    fn deref(&self) -> &Arc<Pool> {
        &self.0
    }
}

impl Drop for WithCaller {
    fn drop(&mut self) {
        let mut kept = lock(&self.0.kept);
        kept.holders -= 1;
        if let (0, Some(cores)) = (kept.holders, self.0.cores) {
            keep_to(kept.thread, cores);
        }
    }
}

#[cfg(target_os = "linux")]
fn this_thread() -> i32 {
    // SAFETY: the call has no conditions.
    unsafe { libc::gettid() }
}

#[cfg(not(target_os = "linux"))]
fn this_thread() -> i32 {
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_once() {
        let pool = Pool::new(3, 64).unwrap();
        for tasks in [0, 1, 2, 3, 7, 1000] {
            let counts: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
            let count = |task: usize, _: &mut Worker<'_>| {
                counts[task].fetch_add(1, Ordering::Relaxed);
            };
            pool.run(tasks, &count);
            assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 1), "{tasks}");
            pool.session().run_side_by_side(tasks, &count);
            assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 2), "{tasks} side by side");
        }
    }

    #[test]
    fn a_task_is_told_whether_it_follows() {
        let pool = Pool::new(3, 64).unwrap();
        for tasks in [1, 5, 100] {
            let last = Mutex::new(std::collections::HashMap::new());
            pool.session().run_side_by_side(tasks, &|task, worker| {
                let before = lock(&last).insert(std::thread::current().id(), task);
                assert_eq!(worker.follows, before.is_some_and(|before| before + 1 == task), "{task}");
            });
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

    #[cfg(target_os = "linux")]
    #[test]
    fn the_caller_keeps_to_a_core_while_a_device_wants_it_and_threads_have_one_each() {
        let cores = || plimsoll_memory::cores_of_process().len();
        let allowed = allowed_cores().len();
        let one = if allowed > 1 { 1 } else { allowed };
        let seen = |pool: Result<Pool, ReservationError>| {
            let pool = Arc::new(pool.unwrap());
            let before = cores();
            let first = WithCaller::new(Arc::clone(&pool));
            let with_one = cores();
            let second = WithCaller::new(Arc::clone(&pool));
            drop(first);
            let with_the_other = cores();
            drop(second);
            [before, with_one, with_the_other, cores()]
        };
        assert_eq!(seen(Pool::on_own_cores(allowed, 64)), [allowed, one, one, allowed]);
        assert_eq!(seen(Pool::on_own_cores(allowed + 1, 64)), [allowed; 4]);
        assert_eq!(seen(Pool::on_own_cores(1, 64)), [allowed; 4]);
        assert_eq!(seen(Pool::new(allowed, 64)), [allowed; 4]);
    }

    #[test]
    fn sleeping_workers_wake_for_the_next_job() {
        let pool = Pool::new(3, 64).unwrap();
        for _ in 0..20 {
            std::thread::sleep(std::time::Duration::from_millis(2));
            let sum = AtomicUsize::new(0);
            pool.run(64, &|task, _| {
                sum.fetch_add(task, Ordering::Relaxed);
            });
            assert_eq!(sum.load(Ordering::Relaxed), 64 * 63 / 2);
        }
    }

    /// Far more threads than cores, and jobs so small that most are over before anybody else has seen them.
    #[test]
    fn a_job_waits_for_nobody_who_has_not_joined_it() {
        let pool = Pool::new(24, 64).unwrap();
        for round in 0..5000 {
            let sum = AtomicUsize::new(0);
            pool.run(3, &|task, _| {
                sum.fetch_add(task + round, Ordering::Relaxed);
            });
            assert_eq!(sum.load(Ordering::Relaxed), 3 * round + 3);
        }
    }

    /// All tasks of a long job wait until two threads are in it.
    #[test]
    fn who_sleeps_is_woken_for_a_long_job() {
        let pool = Pool::new(2, 64).unwrap();
        for round in 0..6 {
            std::thread::sleep(Duration::from_millis(2));
            let threads = Mutex::new(std::collections::HashSet::new());
            let task = |_: usize, _: &mut Worker<'_>| {
                lock(&threads).insert(std::thread::current().id());
                std::thread::sleep(Duration::from_millis(1));
            };
            while lock(&threads).len() < 2 {
                match round % 2 {
                    0 => pool.run(8, &task),
                    _ => pool.session().run_side_by_side(8, &task),
                }
            }
        }
    }
}
