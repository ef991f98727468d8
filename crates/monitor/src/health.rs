//! How near to a limit memory is, in four words, without flapping.

use serde::{Deserialize, Serialize};

/// How near to its limit memory is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// Below all thresholds.
    #[default]
    Normal,
    /// At the warning threshold or above.
    Warning,
    /// At the critical threshold or above.
    Critical,
    /// At the emergency threshold or above.
    Emergency,
}

impl Status {
    /// The word.
    pub fn name(self) -> &'static str {
        match self {
            Status::Normal => "normal",
            Status::Warning => "warning",
            Status::Critical => "critical",
            Status::Emergency => "emergency",
        }
    }
}

impl std::fmt::Display for Status {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

/// Shares of a limit, in rising order.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Thresholds {
    /// What use should stay below.
    pub target: f64,
    /// From here on a warning is given.
    pub warning: f64,
    /// From here on it is critical.
    pub critical: f64,
    /// From here on it is an emergency.
    pub emergency: f64,
}

impl Thresholds {
    /// The status of a share, whatever it was before.
    pub fn status(&self, share: f64) -> Status {
        match share {
            s if s >= self.emergency => Status::Emergency,
            s if s >= self.critical => Status::Critical,
            s if s >= self.warning => Status::Warning,
            _ => Status::Normal,
        }
    }

    /// The share below which a status is left: halfway to the threshold below it, where there is one below it.
    fn left_below(&self, status: Status) -> f64 {
        let halfway = |from: f64, to: f64| if to < from { 0.5 * (from + to) } else { from };
        match status {
            Status::Normal => f64::NEG_INFINITY,
            Status::Warning => halfway(self.warning, self.target),
            Status::Critical => halfway(self.critical, self.warning),
            Status::Emergency => halfway(self.emergency, self.critical),
        }
    }

    /// Whether they rise.
    pub fn rise(&self) -> bool {
        let all = [self.target, self.warning, self.critical, self.emergency];
        all.is_sorted() && all.iter().all(|share| *share > 0.0 && share.is_finite())
    }
}

/// A status over time: it rises at once, and falls when use has fallen halfway to the threshold below.
#[derive(Clone, Debug)]
pub struct Health {
    thresholds: Thresholds,
    status: Status,
}

impl Health {
    /// Normal.
    pub fn new(thresholds: Thresholds) -> Health {
        Health { thresholds, status: Status::Normal }
    }

    /// The status now that `share` of the limit is in use; and whether it has risen.
    pub fn take(&mut self, share: f64) -> (Status, bool) {
        let before = self.status;
        let reached = self.thresholds.status(share);
        if reached > self.status {
            self.status = reached;
        }
        while self.status > reached && share < self.thresholds.left_below(self.status) {
            self.status = match self.status {
                Status::Emergency => Status::Critical,
                Status::Critical => Status::Warning,
                Status::Warning | Status::Normal => Status::Normal,
            };
        }
        (self.status, self.status > before)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Status::{Critical, Emergency, Normal, Warning};

    const BALANCED: Thresholds = Thresholds { target: 0.90, warning: 0.92, critical: 0.95, emergency: 0.97 };

    fn statuses(shares: &[f64]) -> Vec<Status> {
        let mut health = Health::new(BALANCED);
        shares.iter().map(|share| health.take(*share).0).collect()
    }

    #[test]
    fn a_share_has_the_highest_status_that_it_reaches() {
        let thresholds = Thresholds { target: 0.25, warning: 0.5, critical: 0.75, emergency: 0.875 };
        let of = [0.0, 0.49, 0.5, 0.74, 0.75, 0.87, 0.875, 2.0].map(|share| thresholds.status(share));
        assert_eq!(of, [Normal, Normal, Warning, Warning, Critical, Critical, Emergency, Emergency]);
    }

    /// Use that goes up and down around a threshold leaves the status where it is.
    #[test]
    fn a_status_rises_at_once_and_falls_with_a_margin() {
        assert_eq!(
            statuses(&[0.5, 0.93, 0.915, 0.925, 0.912, 0.909]),
            [Normal, Warning, Warning, Warning, Warning, Normal]
        );
        assert_eq!(
            statuses(&[0.98, 0.965, 0.94, 0.936, 0.5]),
            [Emergency, Emergency, Critical, Critical, Normal]
        );
        assert_eq!(
            statuses(&[0.955, 0.94, 0.955, 0.94, 0.93]),
            [Critical, Critical, Critical, Critical, Warning]
        );
    }

    #[test]
    fn only_a_rise_is_told() {
        let mut health = Health::new(BALANCED);
        let told = [0.93, 0.94, 0.99, 0.96, 0.2, 0.95].map(|share| health.take(share).1);
        assert_eq!(told, [true, false, true, false, false, true]);
    }

    #[test]
    fn thresholds_have_to_rise() {
        assert!(BALANCED.rise());
        assert!(!Thresholds { target: 0.93, ..BALANCED }.rise());
        assert!(!Thresholds { warning: f64::NAN, ..BALANCED }.rise());
        // Where the target is above the warning there is no margin, and no endless loop.
        let mut health = Health::new(Thresholds { target: 0.95, ..BALANCED });
        assert_eq!([0.92, 0.919].map(|share| health.take(share).0), [Warning, Normal]);
    }
}
