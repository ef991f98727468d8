//! The arithmetic of batches: micro-batch x accumulation = effective batch.

use super::{Auto, ConfigError, RawConfig};

/// What is known of the batch; `None` is left to the planner. Where two are known, so is the third.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BatchSettings {
    /// Sequences of a micro-batch.
    pub batch_size: Option<u64>,
    /// Micro-batches of an optimizer step.
    pub gradient_accumulation_steps: Option<u64>,
    /// Sequences of an optimizer step.
    pub effective_batch_size: Option<u64>,
}

impl RawConfig {
    /// What the user has said of the batch, with what follows from it.
    ///
    /// # Errors
    /// [`ConfigError::Conflict`] where the three do not agree.
    pub fn batch_settings(&self) -> Result<BatchSettings, ConfigError> {
        let training = &self.training;
        let batch = training.batch_size().set();
        let accumulation = training.gradient_accumulation_steps().set();
        let effective = training.effective_batch_size.and_then(Auto::set);
        let conflict = |reason: String, remedy: String| {
            let set = [
                ("training.batch_size", batch),
                ("training.gradient_accumulation_steps", accumulation),
                ("training.effective_batch_size", effective),
            ];
            let keys =
                set.into_iter().filter_map(|(key, value)| Some(self.conflicting(key, value?))).collect();
            Err(ConfigError::Conflict { keys, reason, remedy })
        };
        let (mut accumulation, mut batch, mut effective) = (accumulation, batch, effective);
        match (batch, accumulation, effective) {
            (Some(b), Some(a), None) => effective = b.checked_mul(a),
            (Some(b), Some(a), Some(e)) if b.checked_mul(a) != Some(e) => {
                return conflict(
                    format!(
                        "batch_size x gradient_accumulation_steps is not effective_batch_size: {b} x {a} is not {e}"
                    ),
                    "any two of them give the third: remove one".to_owned(),
                );
            }
            (Some(part), None, Some(whole)) | (None, Some(part), Some(whole)) => {
                if part == 0 || !whole.is_multiple_of(part) {
                    let name = if batch.is_some() { "batch_size" } else { "gradient_accumulation_steps" };
                    let remedy = match whole.checked_next_multiple_of(part) {
                        Some(nearest) => format!("the next multiple is {nearest}"),
                        None => "make it one".to_owned(),
                    };
                    let reason = format!("effective_batch_size {whole} is not a multiple of {name} {part}");
                    return conflict(reason, remedy);
                }
                let other = Some(whole / part);
                if batch.is_some() { accumulation = other } else { batch = other }
            }
            _ => {}
        }
        Ok(BatchSettings {
            batch_size: batch,
            gradient_accumulation_steps: accumulation,
            effective_batch_size: effective,
        })
    }
}
