//! What a run takes of machines that are paid by the hour.

use serde::Serialize;

use crate::training_plan::TrainingPlan;

const SECONDS_OF_AN_HOUR: f64 = 3600.0;

/// A run's hours and their price. Validation and saving come on top.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct RunCost {
    /// Tokens of all steps.
    pub tokens: u64,
    /// Optimizer steps.
    pub steps: u64,
    /// Hours from the first to the last.
    pub hours: f64,
    /// The same for every device.
    pub device_hours: f64,
    /// US dollars, at the lowest and the highest price; `None` where no price is known.
    pub dollars: Option<[f64; 2]>,
}

impl TrainingPlan {
    /// What a run costs on so many devices: of as many `tokens`, or, where nobody says how many, of as many steps as the configuration
    /// says. `None` where that depends on the data.
    pub fn cost(
        &self,
        tokens: Option<u64>,
        devices: u64,
        dollars_an_hour: Option<[f64; 2]>,
    ) -> Option<RunCost> {
        let of_step = self.choice.sequences().saturating_mul(self.choice.settings.sequence_length).max(1);
        let steps = match tokens {
            Some(tokens) => tokens.div_ceil(of_step),
            None => self.run_needs(None).steps?,
        };
        let hours = steps as f64 * self.choice.time.step_seconds / SECONDS_OF_AN_HOUR;
        Some(RunCost {
            tokens: steps.saturating_mul(of_step),
            steps,
            hours,
            device_hours: hours * devices as f64,
            dollars: dollars_an_hour.map(|prices| prices.map(|price| price * hours)),
        })
    }
}
