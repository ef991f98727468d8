//! A ladder of plans: steps that do the same in more and in less memory, between which a run goes while memory comes and goes. When it
//! goes is left to the run.

use plimsoll_step::{StepError, StepSettings};

use crate::evaluating::evaluating;
use crate::limits::Limits;
use crate::resolve::{Choice, evaluation_batch_size, lighter_choices, loss_chunk_tokens, resolved_config};
use crate::training_plan::TrainingPlan;

/// A rung of a ladder needs at most this share of the one above it.
const RUNG: f64 = 0.85;

impl TrainingPlan {
    /// Plans that do the same, each in less memory than the one before. With dynamic batches some differ in the micro-batch alone, of
    /// which those above this plan come first. Those below are for when memory is taken away from a run.
    ///
    /// # Errors
    /// A step cannot be run.
    pub fn ladder(self) -> Result<Vec<TrainingPlan>, StepError> {
        let (larger, smaller) = self.other_batches()?;
        let mut below: Vec<Choice> = smaller;
        if self.config.memory.ladder() {
            let least = self.asked.dynamic_batching().map_or(1, |dynamic| dynamic.min_batch_size());
            let lowest = below.last().unwrap_or(&self.choice);
            // Each evaluates what there is room for beside itself.
            let evaluation_batch_size = evaluation_batch_size(&self.asked);
            let settings = StepSettings { evaluation_batch_size, ..self.choice.settings.clone() };
            let own = Choice { settings, ..self.choice.clone() };
            let lighter = lighter_choices(&self.spec, &own, &self.machine.rates, self.limits, least)?;
            let mut above = self.limits.memory(lowest);
            while let Some(choice) = rung_below(&lighter, self.limits, above).cloned() {
                above = self.limits.memory(&choice);
                below.push(choice);
            }
        }
        let rungs = |choices: Vec<Choice>, is_above| -> Result<Vec<TrainingPlan>, StepError> {
            choices.into_iter().map(|choice| self.rung(choice, is_above)).collect()
        };
        let mut ladder = rungs(larger, true)?;
        let below = rungs(below, false)?;
        ladder.push(self);
        ladder.extend(below);
        Ok(ladder)
    }

    /// The same step with other micro-batches, between which dynamic batches go: those that need more memory and keep to the share that
    /// they may fill, and those that need less, the largest first.
    fn other_batches(&self) -> Result<(Vec<Choice>, Vec<Choice>), StepError> {
        let Some(dynamic) = self.asked.dynamic_batching() else { return Ok((Vec::new(), Vec::new())) };
        let own = &self.choice.settings;
        let effective = own.batch_size * self.choice.accumulation;
        let (limits, memory) = (self.limits, |choice: &Choice| self.limits.memory(choice));
        let share = dynamic.target_memory_utilization.unwrap_or(self.config.memory.shares()[0]);
        let line = (self.load_line.bytes as f64 * share) as u64;
        let room = line.saturating_sub(self.overhead_bytes);
        let (mut larger, mut smaller): (Vec<Choice>, Vec<Choice>) = (Vec::new(), Vec::new());
        for batch_size in dynamic.sizes(effective).into_iter().filter(|size| *size != own.batch_size) {
            let accumulation = effective / batch_size;
            let tokens = batch_size * own.sequence_length;
            let said = self.asked.training.loss_chunk_tokens().set();
            let settings = StepSettings {
                batch_size,
                loss_chunk_tokens: match said {
                    Some(said) => said.min(tokens),
                    None => loss_chunk_tokens(self.spec.vocab_size, tokens),
                },
                micro_batches_per_pass: own.micro_batches_per_pass.min(accumulation),
                evaluation_batch_size: evaluation_batch_size(&self.asked),
                ..own.clone()
            };
            let choice = Choice::new(&self.spec, settings, accumulation, &self.machine.rates)?;
            if batch_size > own.batch_size {
                let last = larger.last().map_or(u64::MAX, memory);
                let is_between = memory(&choice) < last && memory(&choice) > memory(&self.choice);
                if is_between && limits.allow_within(&choice, room) {
                    larger.push(choice);
                }
            } else if memory(&choice) < memory(smaller.last().unwrap_or(&self.choice)) {
                smaller.push(choice);
            }
        }
        Ok((larger, smaller))
    }

    /// This plan with another step.
    fn rung(&self, choice: Choice, is_above: bool) -> Result<TrainingPlan, StepError> {
        let choice = evaluating(&self.asked, &self.spec, choice, &self.machine.rates, self.limits)?;
        Ok(TrainingPlan {
            config: resolved_config(&self.config, &choice),
            asked: self.asked.clone(),
            spec: self.spec.clone(),
            choice,
            load_line: self.load_line,
            overhead_bytes: self.overhead_bytes,
            limits: self.limits,
            machine: self.machine,
            alternatives: Vec::new(),
            saved: self.saved,
            refusal: None,
            ranks: Vec::new(),
            division: None,
            search: None,
            is_above,
        })
    }
}

/// Of choices in the order in which they need less, the fastest that is a whole rung smaller than what needs `above` bytes;
/// where none is, the last rung is the smallest of all. `None` where there is nothing smaller.
fn rung_below(choices: &[Choice], limits: Limits, above: u64) -> Option<&Choice> {
    let most = (above as f64 * RUNG) as u64;
    let rate = |choice: &&Choice| choice.time.tokens_per_second;
    let smaller = choices.iter().filter(|choice| limits.memory(choice) <= most);
    let fastest = smaller.max_by(|a, b| rate(a).total_cmp(&rate(b)));
    fastest.or_else(|| choices.last().filter(|smallest| limits.memory(smallest) < above))
}
