//! Memory as it is now, and what it says of a ladder of plans: which rung still fits, and when to climb back.

use std::sync::Arc;

use plimsoll_memory::ByteSize;
use plimsoll_monitor::{Status, Thresholds};
use plimsoll_plan::config::DynamicBatching;
use plimsoll_plan::hardware::{Memory, process_memory};

use crate::relief::{Lookout, Relief};

/// What there is, at a step boundary. `None` where the system does not say, or sets no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryReading {
    /// Memory of this process that nobody can take back: anonymous and shared pages, not those of mapped files.
    pub own_bytes: u64,
    /// What its control groups leave.
    pub container_free: Option<u64>,
    /// What the machine can give without swapping.
    pub available: Option<u64>,
}

impl MemoryReading {
    /// As the system shows it now; limits are read again every time.
    pub fn now() -> MemoryReading {
        let (memory, process) = (Memory::detect(), process_memory().unwrap_or_default());
        let bytes = |size: Option<ByteSize>| size.map_or(0, |size| size.0);
        let container = memory.container;
        MemoryReading {
            own_bytes: bytes(process.anonymous.or(process.resident)) + bytes(process.shared),
            container_free: container.and_then(|found| found.free).map(|free| free.0),
            available: memory.available.map(|available| available.0),
        }
    }

    /// The most that this process could be now, and who says so.
    fn room(&self) -> Option<(u64, &'static str)> {
        let container = self.container_free.map(|free| (free, "the container leaves"));
        let machine = self.available.map(|free| (free, "the machine has"));
        let (free, who) = container.into_iter().chain(machine).min_by_key(|(free, _)| *free)?;
        Some((self.own_bytes.saturating_add(free), who))
    }
}

/// Steps in a row for which there has to be room before a run climbs.
const PATIENCE: u64 = 5;

/// A run that had to step down soon after it climbed waits longer the next time, up to this.
const MOST_PATIENCE: u64 = 320;

/// When a run leaves its rung, and for which.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Policy {
    /// The share of what there is from which a rung takes too much.
    pub down_at: f64,
    /// The share that the rung may take to which the run goes.
    pub fits: f64,
    /// Steps in a row for which there has to be room before it climbs.
    pub patience: u64,
    /// Whether it goes one rung at a time, but at emergency.
    pub smooth: bool,
}

impl Policy {
    /// That of a ladder for when memory is taken away.
    pub fn of_ladder(thresholds: Thresholds) -> Policy {
        let Thresholds { critical, emergency, .. } = thresholds;
        Policy { down_at: emergency, fits: critical, patience: PATIENCE, smooth: false }
    }

    /// That of dynamic batches.
    pub fn of_batches(dynamic: &DynamicBatching, thresholds: Thresholds) -> Policy {
        Policy {
            down_at: thresholds.critical,
            fits: dynamic.target_memory_utilization.unwrap_or(thresholds.target),
            patience: dynamic.adjustment_frequency(),
            smooth: dynamic.smooth_transitions(),
        }
    }
}

/// What a rung needs of what there is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RungMemory {
    /// What the run needs on its rung, with what nobody planned, in bytes.
    pub used_bytes: u64,
    /// The most that it may be now, in bytes.
    pub limit_bytes: u64,
    /// How near that is, in a word.
    pub status: Status,
}

/// Watches memory for a run on a ladder.
#[derive(Debug)]
pub(crate) struct Pressure {
    /// Bytes of memory that each rung takes, the largest first.
    needs: Vec<u64>,
    load_line: u64,
    thresholds: Thresholds,
    policy: Policy,
    patience: u64,
    /// Steps in a row for which a higher rung would have fitted.
    good_steps: u64,
    climbed: bool,
}

/// A change of rungs.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct RungChange {
    pub to: usize,
    pub why: String,
    /// What asked for it; `None` where memory was refused.
    pub memory: Option<RungMemory>,
}

impl Pressure {
    pub fn new(needs: Vec<u64>, load_line: u64, thresholds: Thresholds, policy: Policy) -> Pressure {
        let patience = policy.patience;
        Pressure { needs, load_line, thresholds, policy, patience, good_steps: 0, climbed: false }
    }

    /// Rules a rung out for the rest of the run: its memory was refused.
    pub fn refuse(&mut self, rung: usize) {
        if let Some(need) = self.needs.get_mut(rung) {
            *need = u64::MAX;
        }
    }

    /// A thread that looks at memory for a run on `rung` within its steps.
    pub fn lookout(&self, relief: Arc<Relief>, rung: usize) -> Lookout {
        let need = self.needs.get(rung).copied().unwrap_or(0);
        Lookout::start(relief, need, self.load_line, self.thresholds)
    }

    /// How near a run on `rung` is to the most that it may be.
    pub fn memory(&self, rung: usize, reading: &MemoryReading) -> RungMemory {
        let present = self.needs.get(rung).copied().unwrap_or(0);
        memory_of(present, self.load_line, self.thresholds, reading)
    }

    /// Whether a run on `rung` should be on another.
    ///
    /// Down: where the rung would take more of what there is than the policy lets it, to the first rung that fits, or to the next
    /// one. Up: to a rung that fits, when there has been room for it for some steps.
    pub fn judge(&mut self, rung: usize, reading: &MemoryReading) -> Option<RungChange> {
        let present = *self.needs.get(rung)?;
        let unplanned = unplanned(present, reading);
        let room = reading.room();
        let fits = |need: u64, share: f64| {
            let need = need.saturating_add(unplanned);
            need <= self.load_line && room.is_none_or(|(room, _)| need as f64 <= share * room as f64)
        };
        let Policy { down_at, fits: share, smooth, .. } = self.policy;
        let first = self.needs.iter().position(|need| fits(*need, share));
        let memory = self.memory(rung, reading);
        if !fits(present, down_at) {
            self.good_steps = 0;
            let next = (rung + 1..self.needs.len()).find(|to| self.needs.get(*to) != Some(&u64::MAX));
            let to = match (smooth && memory.status < Status::Emergency, first) {
                (true, _) => next?,
                (false, first) => first.unwrap_or(self.needs.len().saturating_sub(1)),
            };
            if to <= rung {
                return None;
            }
            if self.climbed {
                self.patience = (2 * self.patience).min(MOST_PATIENCE.max(self.policy.patience));
                self.climbed = false;
            }
            let (least, who) = room
                .filter(|(room, _)| *room < self.load_line)
                .unwrap_or((self.load_line, "the load line is"));
            let need = ByteSize(memory.used_bytes);
            let why = format!("it needs {need} and {who} {}", ByteSize(least));
            return Some(RungChange { to, why, memory: Some(memory) });
        }
        let nearest =
            (0..rung).rev().find(|above| self.needs.get(*above).is_some_and(|need| fits(*need, share)));
        let to = if smooth { nearest } else { first.filter(|first| *first < rung) };
        self.good_steps = if to.is_some() { self.good_steps + 1 } else { 0 };
        let to = to.filter(|_| self.good_steps >= self.patience)?;
        (self.good_steps, self.climbed) = (0, true);
        let why = format!("there has been room again for {} steps", self.patience);
        Some(RungChange { to, why, memory: Some(memory) })
    }
}

/// Memory of the process that is no part of what a rung needs: it stays, whatever the rung.
fn unplanned(present: u64, reading: &MemoryReading) -> u64 {
    reading.own_bytes.saturating_sub(present)
}

/// How near a run that needs so much is to the most that it may be.
pub(crate) fn memory_of(
    present: u64,
    load_line: u64,
    thresholds: Thresholds,
    reading: &MemoryReading,
) -> RungMemory {
    let used_bytes = present.saturating_add(unplanned(present, reading));
    let limit_bytes = reading.room().map_or(load_line, |(room, _)| room.min(load_line));
    // A plan may fill the line to its last byte: what is short is what there is less of than planned.
    let status = match limit_bytes < load_line {
        true => thresholds.status(used_bytes as f64 / limit_bytes.max(1) as f64),
        false if used_bytes > load_line => Status::Emergency,
        false => Status::Normal,
    };
    RungMemory { used_bytes, limit_bytes, status }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn pressure() -> Pressure {
        let thresholds = Thresholds { target: 0.9, warning: 0.9, critical: 0.95, emergency: 0.98 };
        let policy = Policy::of_ladder(thresholds);
        Pressure::new(vec![1000 * MIB, 600 * MIB, 300 * MIB], 1024 * MIB, thresholds, policy)
    }

    fn container(own: u64, room: u64) -> MemoryReading {
        MemoryReading {
            own_bytes: own * MIB,
            container_free: Some(room.saturating_sub(own) * MIB),
            available: None,
        }
    }

    #[test]
    fn a_run_steps_down_to_the_first_rung_that_fits_and_climbs_when_there_has_been_room() {
        let mut pressure = pressure();
        assert_eq!(pressure.judge(0, &container(990, 1040)), None);
        let change = pressure.judge(0, &container(990, 1010)).unwrap();
        assert_eq!(
            (change.to, change.why.as_str()),
            (1, "it needs 1000.0 MiB and the container leaves 1010.0 MiB")
        );
        assert_eq!(pressure.judge(0, &container(290, 400)).unwrap().to, 2);
        // At the bottom there is nowhere to go.
        assert_eq!(pressure.judge(2, &container(290, 300)), None);
        let climb = |pressure: &mut Pressure, steps: u64| {
            (0..steps)
                .find_map(|step| pressure.judge(2, &container(290, 800)).map(|change| (step, change.to)))
        };
        assert_eq!(climb(&mut pressure, 20), Some((PATIENCE - 1, 1)));
        // Room that comes and goes is waited for longer.
        assert_eq!(pressure.judge(1, &container(590, 400)).unwrap().to, 2);
        assert_eq!(climb(&mut pressure, 20), Some((2 * PATIENCE - 1, 1)));
    }

    /// Where the machine leaves just what the load line is, the line is what is named.
    #[test]
    fn of_equals_the_load_line_is_named() {
        let change = pressure().judge(0, &container(1010, 1024)).unwrap();
        assert_eq!(change.why, "it needs 1010.0 MiB and the load line is 1.00 GiB");
    }

    /// The process counts what is its own alone and what it shares.
    #[test]
    fn a_reading_is_of_this_process() {
        let mine = std::hint::black_box(vec![1u8; 64 << 20]);
        let now = MemoryReading::now();
        let length = std::hint::black_box(&mine).len() as u64;
        assert!(now.own_bytes >= length, "{now:?}");
        let process = process_memory().unwrap_or_default();
        let bytes = |size: Option<ByteSize>| size.map_or(0, |size| size.0);
        let own = bytes(process.anonymous.or(process.resident));
        // Other tests come and go meanwhile.
        assert!(now.own_bytes < own + bytes(process.shared) + (512 << 20), "{now:?} {process:?}");
        assert!(now.available.is_none_or(|available| available > 0));
    }

    #[test]
    fn between_the_thresholds_nothing_changes() {
        let mut pressure = pressure();
        let reading = container(600, 1030);
        assert!((0..50).all(|_| pressure.judge(1, &reading).is_none()));
        assert_eq!(pressure.judge(0, &reading), None);
    }

    #[test]
    fn memory_that_nobody_planned_counts_against_every_rung() {
        let mut pressure = pressure();
        let reading = MemoryReading { own_bytes: 1100 * MIB, ..MemoryReading::default() };
        let change = pressure.judge(0, &reading).unwrap();
        assert_eq!((change.to, change.why.as_str()), (1, "it needs 1.07 GiB and the load line is 1.00 GiB"));
    }

    #[test]
    fn a_rung_whose_memory_was_refused_is_passed_over() {
        let mut pressure = pressure();
        pressure.refuse(0);
        let there = MemoryReading { own_bytes: 290 * MIB, ..MemoryReading::default() };
        let climbed = (0..20).find_map(|_| pressure.judge(2, &there)).unwrap();
        assert_eq!(climbed.to, 1);
    }

    #[test]
    fn where_the_system_says_nothing_the_plan_is_believed() {
        assert_eq!(pressure().judge(0, &MemoryReading::default()), None);
    }

    /// Dynamic batches of 1000, 800, 600 and 400 MiB.
    fn batches(smooth: bool) -> Pressure {
        let thresholds = Thresholds { target: 0.8, warning: 0.92, critical: 0.95, emergency: 0.97 };
        let dynamic = DynamicBatching {
            adjustment_frequency: Some(3),
            smooth_transitions: Some(smooth),
            target_memory_utilization: Some(0.9),
            ..DynamicBatching::default()
        };
        let policy = Policy::of_batches(&dynamic, thresholds);
        Pressure::new([1000, 800, 600, 400].map(|mib| mib * MIB).to_vec(), 1200 * MIB, thresholds, policy)
    }

    #[test]
    fn batches_shrink_at_critical_by_one_size_and_at_emergency_to_what_fits() {
        let mut pressure = batches(true);
        assert_eq!(pressure.judge(0, &container(990, 1060)), None);
        // 1000 of 1050 MiB are critical, 1000 of 1030 an emergency.
        let change = pressure.judge(0, &container(990, 1050)).unwrap();
        assert_eq!((change.to, change.memory.unwrap().status), (1, Status::Critical));
        let change = pressure.judge(0, &container(650, 700)).unwrap();
        assert_eq!((change.to, change.memory.unwrap().status), (2, Status::Emergency));
        assert_eq!(change.memory.unwrap().limit_bytes, 700 * MIB);
        // At once where it need not be smooth: 600 of 664 MiB are more than 90 %.
        let mut pressure = batches(false);
        assert_eq!(pressure.judge(1, &container(790, 841)).unwrap().to, 2);
        assert_eq!(pressure.judge(1, &container(600, 664)).unwrap().to, 3);
    }

    #[test]
    fn batches_grow_by_one_size_when_there_has_been_room_for_long_enough() {
        for (smooth, to) in [(true, 2), (false, 0)] {
            let mut pressure = batches(smooth);
            let grown = (1..9).find_map(|step| Some((step, pressure.judge(3, &container(390, 2000))?.to)));
            assert_eq!(grown, Some((3, to)));
        }
        // 800 of 880 MiB are more than the 90 % that a larger batch may fill.
        let mut pressure = batches(true);
        assert!((0..9).all(|_| pressure.judge(2, &container(590, 880)).is_none()));
        pressure.refuse(1);
        assert_eq!((0..9).find_map(|_| pressure.judge(2, &container(590, 2000))).unwrap().to, 0);
    }
}
