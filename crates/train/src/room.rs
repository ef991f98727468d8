//! Room on disk for what a run writes. It is checked before the data is read and before the first step. While there is no
//! checkpoint, a full disk is waited for.

use std::error::Error;
use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use plimsoll_plan::config::RawConfig;
use plimsoll_plan::hardware::{disk_space, on_one_disk};
use plimsoll_plan::{DiskNeeds, ModelOrigin, Past, TrainingPlan};

use crate::checkpoint::Checkpoint;
use crate::{Observer, RunEvent, StopFlag, TrainError};

/// Bytes of data from which on reading takes so long that room is asked for before.
const MUCH_DATA: u64 = 32 << 20;
/// How long a full disk is waited for at most.
const PATIENCE: Duration = Duration::from_secs(600);
/// How long until the first new attempt; later ones come more slowly.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// How often a run that waits says so.
const SAY_EVERY: Duration = Duration::from_secs(60);
/// How often it looks whether it is to stop.
const GLANCE: Duration = Duration::from_millis(100);

/// Refuses a run whose folder is on a disk without room for even the least that it can come to write, before its data is read
/// where there is much of it. What the run will write exactly is known when it is planned.
pub(crate) fn check_before_data(
    config: &RawConfig,
    origin: &ModelOrigin,
    steps_done: u64,
) -> Result<(), TrainError> {
    if plimsoll_data::bytes_of(config.training_data()?.patterns(), config.data.has_samples())? < MUCH_DATA {
        return Ok(());
    }
    let output = config.output.dir();
    let past = Past { steps: steps_done, checkpoints: Checkpoint::list(&output)?.len() as u64 };
    has_room(&output, DiskNeeds::least(config, origin.spec(), origin.weights(), past)?, 0)?;
    Ok(())
}

/// Refuses a run whose checkpoints and model would not all fit on the disk that they go to, beside its offloaded tensors. `token_bytes`
/// are there already. What is left for anything else.
pub(crate) fn check(
    output: &Path,
    plan: &TrainingPlan,
    needs: DiskNeeds,
    token_bytes: u64,
) -> Result<u64, TrainError> {
    let shared = on_one_disk(output, &plan.config.disk_path());
    let needs = DiskNeeds { spill_bytes: if shared { plan.disk_bytes() } else { 0 }, ..needs };
    has_room(output, needs, token_bytes)
}

fn has_room(output: &Path, needs: DiskNeeds, token_bytes: u64) -> Result<u64, TrainError> {
    // Where the system does not say, it is tried.
    let Ok(space) = disk_space(output) else { return Ok(u64::MAX) };
    let no_room =
        || TrainError::NoRoom { path: output.to_owned(), needs, available: space.available, token_bytes };
    space.available.0.checked_sub(needs.bytes()).ok_or_else(no_room)
}

/// Time as waiting sees it.
pub(crate) trait WallClock {
    /// Time since some fixed moment.
    fn now(&self) -> Duration;
    /// Lets time pass.
    fn sleep(&self, time: Duration);
}

/// Real time.
pub(crate) struct SystemClock(Instant);

impl SystemClock {
    pub fn start() -> SystemClock {
        SystemClock(Instant::now())
    }
}

impl WallClock for SystemClock {
    fn now(&self) -> Duration {
        self.0.elapsed()
    }

    fn sleep(&self, time: Duration) {
        std::thread::sleep(time);
    }
}

/// Writes a file of a run. While there is no checkpoint to resume from, a full disk does not end the run: the write is
/// tried again until there is room, or somebody asks to stop, or ten minutes have passed.
pub(crate) fn write_patiently<T>(
    run: &Path,
    mut write: impl FnMut() -> Result<T, TrainError>,
    observer: &mut dyn Observer,
    stop: &StopFlag,
    clock: &dyn WallClock,
) -> Result<T, TrainError> {
    let begun = clock.now();
    let (mut pause, mut say_at) = (FIRST_PAUSE, Duration::ZERO);
    loop {
        let error = match write() {
            Err(error) if is_full_disk(&error) => error,
            outcome => return outcome,
        };
        let waited = clock.now().saturating_sub(begun);
        let lost_otherwise = Checkpoint::list(run).is_ok_and(|all| all.is_empty());
        if waited >= PATIENCE || stop.is_raised() || !lost_otherwise {
            return Err(error);
        }
        if waited >= say_at {
            observer.event(RunEvent::WaitingForSpace { error: &error, waited, patience: PATIENCE });
            say_at = waited + SAY_EVERY;
        }
        // It wakes for what it has to say, and for its last attempt.
        let until = waited + pause.min(say_at.saturating_sub(waited)).min(PATIENCE.saturating_sub(waited));
        while clock.now().saturating_sub(begun) < until && !stop.is_raised() {
            clock.sleep(GLANCE);
        }
        pause = (2 * pause).min(LONGEST_PAUSE);
    }
}

/// Whether space on a disk is what is missing.
fn is_full_disk(error: &TrainError) -> bool {
    let mut cause: Option<&(dyn Error + 'static)> = Some(error);
    while let Some(error) = cause {
        if let Some(error) = error.downcast_ref::<io::Error>() {
            return matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded);
        }
        cause = error.source();
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    /// Time that passes when it is slept.
    #[derive(Default)]
    struct Slept(Cell<Duration>);

    impl WallClock for Slept {
        fn now(&self) -> Duration {
            self.0.get()
        }

        fn sleep(&self, time: Duration) {
            self.0.set(self.0.get() + time);
        }
    }

    /// Notes when it was told that a run waits; raises a flag when it has waited that long.
    struct Told {
        seconds: Vec<u64>,
        stop: StopFlag,
        stop_at: Duration,
    }

    impl Observer for Told {
        fn event(&mut self, event: RunEvent<'_>) {
            if let RunEvent::WaitingForSpace { waited, .. } = event {
                self.seconds.push(waited.as_secs());
                if waited >= self.stop_at {
                    self.stop.raise();
                }
            }
        }
    }

    fn full() -> TrainError {
        TrainError::io("write", Path::new("metrics.jsonl"), io::ErrorKind::StorageFull.into())
    }

    /// A disk that is full until `free_at`, and a user who asks to stop at `stop_at`, in seconds.
    fn wait(run: &Path, free_at: u64, stop_at: u64) -> (Result<(), TrainError>, Vec<u64>, u64) {
        let (clock, stop) = (Slept::default(), StopFlag::new());
        let mut told =
            Told { seconds: Vec::new(), stop: stop.clone(), stop_at: Duration::from_secs(stop_at) };
        let write = || if clock.now() >= Duration::from_secs(free_at) { Ok(()) } else { Err(full()) };
        let outcome = write_patiently(run, write, &mut told, &stop, &clock);
        (outcome, told.seconds, clock.now().as_secs())
    }

    #[test]
    fn a_run_that_waits_says_so_every_minute_and_gives_up_after_ten() {
        let run = tempfile::tempdir().unwrap();
        let (outcome, told, waited) = wait(run.path(), 10_000, 10_000);
        assert!(is_full_disk(&outcome.unwrap_err()));
        assert_eq!(told, [0, 60, 120, 180, 240, 300, 360, 420, 480, 540]);
        assert_eq!(waited, 600);
        let (outcome, told, waited) = wait(run.path(), 130, 10_000);
        assert!(outcome.is_ok());
        assert_eq!(told, [0, 60, 120]);
        assert!((130..=150).contains(&waited), "{waited}");
    }

    #[test]
    fn a_run_that_waits_stops_when_it_is_asked_to_after_a_last_attempt() {
        let run = tempfile::tempdir().unwrap();
        let (outcome, _, waited) = wait(run.path(), 10_000, 60);
        assert!(outcome.is_err());
        assert_eq!(waited, 60);
    }

    #[test]
    fn with_a_checkpoint_nothing_is_lost_and_nothing_waited_for() {
        let run = tempfile::tempdir().unwrap();
        std::fs::create_dir(run.path().join("checkpoint-3")).unwrap();
        let (outcome, told, waited) = wait(run.path(), 5, 10_000);
        assert!(outcome.is_err());
        assert_eq!((told, waited), (vec![], 0));
    }

    /// Every waiting ends at the moment that it was to end at.
    #[test]
    fn a_run_that_waits_wakes_in_time() {
        struct Exact(Vec<Duration>);
        impl Observer for Exact {
            fn event(&mut self, event: RunEvent<'_>) {
                if let RunEvent::WaitingForSpace { waited, .. } = event {
                    self.0.push(waited);
                }
            }
        }
        let (run, clock) = (tempfile::tempdir().unwrap(), Slept::default());
        let (mut told, mut tried) = (Exact(Vec::new()), Vec::new());
        let write = || -> Result<(), TrainError> {
            tried.push(clock.now());
            Err(full())
        };
        write_patiently(run.path(), write, &mut told, &StopFlag::new(), &clock).unwrap_err();
        assert_eq!(told.0, (0..10).map(|minute| Duration::from_secs(60 * minute)).collect::<Vec<_>>());
        // Pauses of 1, 2, 4, 8 and 16 seconds, and the rest of the minute.
        let seconds = [0, 1, 3, 7, 15, 31, 60, 90, 120];
        assert_eq!(tried[..9], seconds.map(Duration::from_secs));
        assert_eq!(tried.last(), Some(&PATIENCE));
    }

    #[test]
    fn the_clock_of_the_system_goes_on_while_it_sleeps() {
        let (clock, time) = (SystemClock::start(), Duration::from_millis(30));
        clock.sleep(time);
        assert!(clock.now() >= time);
    }

    /// A model of far more than any disk has room for, which is trained from its beginning.
    fn enormous(folder: &Path, memory: &str) -> (RawConfig, ModelOrigin) {
        let text = format!(
            "
model:
  from_scratch: {{hidden_size: 262144, intermediate_size: 1048576, num_hidden_layers: 150, num_attention_heads: 2048, vocab_size: 1000}}
data: {{train: '{}'}}
training: {{batch_size: 1, gradient_accumulation_steps: 1, gradient_checkpointing: full}}
memory: {{device_budget: 4096TiB, {memory}}}
output: {{dir: '{}'}}
",
            folder.join("data.txt").display(),
            folder.join("out").display()
        );
        let config = RawConfig::from_str(&text, "test").unwrap();
        let origin = ModelOrigin::find(&config).unwrap();
        (config, origin)
    }

    /// From 32 MiB of data on, room is asked for before they are read.
    #[test]
    fn room_is_asked_for_before_much_data_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let (config, origin) = enormous(folder.path(), "");
        let data = std::fs::File::create(folder.path().join("data.txt")).unwrap();
        let check = |bytes| {
            data.set_len(bytes).unwrap();
            check_before_data(&config, &origin, 0)
        };
        check(0).unwrap();
        check((32 << 20) - 1).unwrap();
        for bytes in [32 << 20, (32 << 20) + 1] {
            assert!(matches!(check(bytes), Err(TrainError::NoRoom { .. })), "{bytes}");
        }
    }

    /// Offloaded tensors count where they go to the disk that the run is written to.
    #[test]
    #[cfg(target_os = "linux")]
    fn offloaded_tensors_take_room_of_their_own_disk() {
        let folder = tempfile::tempdir().unwrap();
        let rates = plimsoll_plan::Rates::of_cpu([1e10, 1e10], 1e10, 1e8);
        let machine = plimsoll_plan::Machine {
            rates,
            limits: plimsoll_plan::ProcessLimits::NONE,
            overhead_bytes: 0,
            host_bytes_per_token: 32,
            worker_bytes: 0,
            disk_available: None,
            disk_reserved: 0,
            device_bytes: None,
            host_bytes: None,
        };
        let check = |disk_path: &Path| {
            let offload = format!("offload: {{optimizer: disk}}, disk_path: '{}'", disk_path.display());
            let (config, origin) = enormous(folder.path(), &offload);
            let plan = TrainingPlan::for_model(&config, &origin, &machine).unwrap();
            assert!(plan.disk_bytes() > 1 << 50);
            let needs =
                DiskNeeds { model_bytes: 1, checkpoint_bytes: 1, most_checkpoints: 1, spill_bytes: 0 };
            (plan.disk_bytes(), super::check(&folder.path().join("out"), &plan, needs, 0))
        };
        match check(&folder.path().join("spill")) {
            (spilled, Err(TrainError::NoRoom { needs, .. })) => assert_eq!(needs.spill_bytes, spilled),
            (_, other) => panic!("{other:?}"),
        }
        check(Path::new("/proc/nowhere")).1.unwrap();
    }
}
