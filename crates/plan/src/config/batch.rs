//! The arithmetic of batches: micro-batch x accumulation x ranks = effective batch.

use super::{Auto, ConfigError, RawConfig};

/// What is known of the batch; `None` is left to the planner. Where two are known, so is the third.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BatchSettings {
    /// Sequences of a micro-batch.
    pub batch_size: Option<u64>,
    /// Micro-batches that each rank takes in an optimizer step.
    pub gradient_accumulation_steps: Option<u64>,
    /// Sequences of an optimizer step, of all ranks.
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
        let ranks = self.parallel.data_parallel().max(1);
        if let Some(whole) = effective.filter(|whole| !whole.is_multiple_of(ranks)) {
            let remedy = match whole.checked_next_multiple_of(ranks) {
                Some(nearest) => format!("the next multiple is {nearest}"),
                None => "make it one".to_owned(),
            };
            return conflict(
                format!("effective_batch_size {whole} is not a multiple of the {ranks} ranks"),
                remedy,
            );
        }
        let (mut accumulation, mut batch, mut effective) = (accumulation, batch, effective);
        match (batch, accumulation, effective.map(|whole| whole / ranks)) {
            (Some(b), Some(a), None) => effective = b.checked_mul(a).and_then(|own| own.checked_mul(ranks)),
            (Some(b), Some(a), Some(e)) if b.checked_mul(a) != Some(e) => {
                let (and_ranks, of_ranks) = match ranks {
                    1 => (String::new(), String::new()),
                    _ => (" x ranks".to_owned(), format!(" x {ranks}")),
                };
                let e = e * ranks;
                return conflict(
                    format!(
                        "batch_size x gradient_accumulation_steps{and_ranks} is not effective_batch_size: {b} x {a}{of_ranks} is not {e}"
                    ),
                    "any two of them give the third: remove one".to_owned(),
                );
            }
            (Some(part), None, Some(whole)) | (None, Some(part), Some(whole)) => {
                if part == 0 || !whole.is_multiple_of(part) {
                    let name = if batch.is_some() { "batch_size" } else { "gradient_accumulation_steps" };
                    let remedy = match whole.checked_next_multiple_of(part) {
                        Some(nearest) => format!("the next multiple is {}", nearest * ranks),
                        None => "make it one".to_owned(),
                    };
                    let of_ranks = if ranks > 1 { format!(" on {ranks} ranks") } else { String::new() };
                    let whole = whole * ranks;
                    let reason =
                        format!("effective_batch_size {whole} is not a multiple of {name} {part}{of_ranks}");
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
