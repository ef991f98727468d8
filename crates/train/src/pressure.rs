//! Memory as it is now, and what it says of a ladder of plans: which rung still fits, and when to climb back.

use plimsoll_memory::ByteSize;
use plimsoll_monitor::Thresholds;
use plimsoll_plan::hardware::{Memory, process_memory};

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

/// Watches memory for a run on a ladder.
#[derive(Debug)]
pub(crate) struct Pressure {
    /// Bytes of memory that each rung takes, the largest first.
    needs: Vec<u64>,
    load_line: u64,
    thresholds: Thresholds,
    patience: u64,
    /// Steps in a row for which a higher rung would have fitted.
    good_steps: u64,
    climbed: bool,
}

/// A change of rungs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RungChange {
    pub to: usize,
    pub why: String,
}

impl Pressure {
    pub fn new(needs: Vec<u64>, load_line: u64, thresholds: Thresholds) -> Pressure {
        Pressure { needs, load_line, thresholds, patience: PATIENCE, good_steps: 0, climbed: false }
    }

    /// Rules a rung out for the rest of the run: its memory was refused.
    pub fn refuse(&mut self, rung: usize) {
        if let Some(need) = self.needs.get_mut(rung) {
            *need = u64::MAX;
        }
    }

    /// Whether a run on `rung` should be on another.
    ///
    /// Down: where the rung would take more than the emergency threshold's share of what there is, to the first rung that
    /// takes at most the critical threshold's share. Up: to such a rung, when there has been room for it for some steps.
    pub fn judge(&mut self, rung: usize, reading: &MemoryReading) -> Option<RungChange> {
        let present = *self.needs.get(rung)?;
        // What nobody planned stays, whatever the rung.
        let unplanned = reading.own_bytes.saturating_sub(present);
        let room = reading.room();
        let fits = |need: u64, share: f64| {
            let need = need.saturating_add(unplanned);
            need <= self.load_line && room.is_none_or(|(room, _)| need as f64 <= share * room as f64)
        };
        let Thresholds { critical, emergency, .. } = self.thresholds;
        let first = self.needs.iter().position(|need| fits(*need, critical));
        if !fits(present, emergency) {
            self.good_steps = 0;
            let to = first.unwrap_or(self.needs.len().saturating_sub(1));
            if to <= rung {
                return None;
            }
            if self.climbed {
                self.patience = (2 * self.patience).min(MOST_PATIENCE);
                self.climbed = false;
            }
            let (least, who) = room
                .filter(|(room, _)| *room < self.load_line)
                .unwrap_or((self.load_line, "the load line is"));
            let need = ByteSize(present.saturating_add(unplanned));
            return Some(RungChange { to, why: format!("it needs {need} and {who} {}", ByteSize(least)) });
        }
        let to = first.filter(|first| *first < rung);
        self.good_steps = if to.is_some() { self.good_steps + 1 } else { 0 };
        let to = to.filter(|_| self.good_steps >= self.patience)?;
        (self.good_steps, self.climbed) = (0, true);
        Some(RungChange { to, why: format!("there has been room again for {} steps", self.patience) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn pressure() -> Pressure {
        let thresholds = Thresholds { target: 0.9, warning: 0.9, critical: 0.95, emergency: 0.98 };
        Pressure::new(vec![1000 * MIB, 600 * MIB, 300 * MIB], 1024 * MIB, thresholds)
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
}
