//! The batch of validation data, where the user leaves it open: as many sequences as an evaluation can take while it needs no more than
//! the step does.

use plimsoll_model::ModelSpec;
use plimsoll_step::{StepError, StepSettings};

use crate::config::RawConfig;
use crate::dry_run::DryRun;
use crate::limits::Limits;
use crate::resolve::Choice;
use crate::time::Rates;

/// Sequences of a batch that is evaluated, at most, in micro-batches: more are no faster.
const MOST_TIMES: u64 = 8;

/// The same step with the largest evaluation that raises no peak.
pub(crate) fn evaluating(
    config: &RawConfig,
    spec: &ModelSpec,
    choice: Choice,
    rates: &Rates,
    limits: Limits,
) -> Result<Choice, StepError> {
    let settings = &choice.settings;
    let is_open = config.training.eval_batch_size().set().is_none();
    let alone = settings.ranks.mesh.size() <= 1 && settings.chunk_tokens().is_none();
    if !(settings.evaluated() > 0 && is_open && alone && limits.allow(&choice)) {
        return Ok(choice);
    }
    let mut times = MOST_TIMES;
    while times > 1 {
        let evaluation_batch_size = Some(settings.batch_size.saturating_mul(times));
        let larger = StepSettings { evaluation_batch_size, ..settings.clone() };
        let phase = DryRun::evaluation_phase(spec, &larger, rates)?;
        if phase.peak_bytes <= choice.peak_bytes() {
            let other = Choice::new(spec, larger, choice.accumulation, rates)?;
            if other.peak_bytes() <= choice.peak_bytes() && limits.allow(&other) {
                return Ok(other);
            }
        }
        times /= 2;
    }
    Ok(choice)
}
