//! What a step takes, as numbers that can be added: its time, the peak of each phase, and the lower tiers.

use plimsoll_memory::Phase;

use crate::limits::Limits;
use crate::resolve::{Choice, per_token};

/// Numbers of a footprint.
const PARTS: usize = 3 + Phase::ALL.len();
const SECONDS: usize = 0;
const HOST: usize = 1;
const DISK: usize = 2;

/// Seconds that a token takes, bytes of the host tier and of the disk, and the device's peak in each phase; or differences of them.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Footprint([f64; PARTS]);

impl Footprint {
    /// What a dry run has found.
    pub fn of(choice: &Choice, limits: &Limits) -> Footprint {
        let run = &choice.dry_run;
        let mut parts = [0.0; PARTS];
        parts[SECONDS] = per_token(choice);
        parts[HOST] = limits.host_tier(choice) as f64;
        parts[DISK] = run.disk_bytes() as f64;
        for (part, phase) in parts.iter_mut().skip(DISK + 1).zip(Phase::ALL) {
            *part = run.ledger.phase_peak(phase) as f64;
        }
        Footprint(parts)
    }

    /// What `change` makes of it.
    pub fn plus(self, change: Footprint) -> Footprint {
        Footprint(std::array::from_fn(|i| self.0[i] + change.0[i]))
    }

    /// The difference to another.
    pub fn less(self, other: Footprint) -> Footprint {
        Footprint(std::array::from_fn(|i| self.0[i] - other.0[i]))
    }

    /// So much of the way to another.
    pub fn towards(self, other: Footprint, share: f64) -> Footprint {
        Footprint(std::array::from_fn(|i| self.0[i] + share * (other.0[i] - self.0[i])))
    }

    /// The lesser of each number.
    pub fn least(self, other: Footprint) -> Footprint {
        Footprint(std::array::from_fn(|i| self.0[i].min(other.0[i])))
    }

    /// Whether no number is more than another's.
    pub fn is_within(self, other: Footprint) -> bool {
        self.0.iter().zip(other.0).all(|(own, other)| *own <= other)
    }

    pub fn seconds(self) -> f64 {
        self.0[SECONDS]
    }

    /// The device's peak.
    pub fn device(self) -> f64 {
        self.0.iter().skip(DISK + 1).copied().fold(0.0, f64::max)
    }

    /// The bytes of all phases together.
    pub fn in_all(self) -> f64 {
        self.0.iter().skip(DISK + 1).sum()
    }

    /// Bytes that the load line is held against.
    pub fn under_the_line(self, limits: &Limits) -> f64 {
        self.device() + if limits.host_bytes.is_none() { self.0[HOST] } else { 0.0 }
    }

    /// By how many bytes it is over what there is, with so much room under the line; 0 where it fits.
    pub fn over(self, limits: &Limits, room: f64) -> f64 {
        let (device, host) = (self.device(), self.0[HOST]);
        let limit = |bytes: u64| if bytes == u64::MAX { f64::INFINITY } else { bytes as f64 };
        let needs = [
            (self.under_the_line(limits), room),
            (device, limit(limits.arena_bytes)),
            (host, limits.host_bytes.map_or(f64::INFINITY, limit)),
            (device + host, limit(limits.memory_bytes)),
            (self.0[DISK], limit(limits.disk_bytes)),
        ];
        needs.into_iter().map(|(needed, allowed)| (needed - allowed).max(0.0)).sum()
    }
}
