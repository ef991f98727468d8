//! What happens to complete gradients: they are measured, the weights are updated from them, and they are given back.

use std::rc::Rc;

use plimsoll_device::Tensor;
use plimsoll_memory::Phase;
use plimsoll_model::BlockId;

use super::lanes::NOTHING_LEFT;
use super::numbers::Found;
use super::parts::Part;
use super::pass::Pass;
use super::ranks::shares_sums;
use super::schedule::{Action, Schedule};
use super::{Passed, StepOutcome, Trainer};
use crate::StepError;
use crate::optimizer::Update;
use crate::products::Products;
use crate::settings::UpdateTiming;
use crate::store::BlockWeights;
use crate::tier::Unit;

impl Trainer<'_> {
    /// An action on complete gradients.
    pub(super) fn complete(
        &mut self,
        pass: &Pass<'_>,
        action: Action,
        weights: Option<&BlockWeights>,
    ) -> Result<(), StepError> {
        if let (true, Some(unit)) = (pass.is_empty(), action.gradients()) {
            self.device.enter(Phase::Optimizer, unit.block().layer());
        }
        match action {
            Action::GatherLookedUp { unit } => {
                if let Some(part) = self.parts.of(unit).first() {
                    self.gradients.gather_looked_up(part)?;
                }
            }
            Action::AddTerms { unit } => {
                let products = self.products.clone().ok_or(NOTHING_LEFT)?;
                for part in self.parts.of(unit).iter().filter(|part| part.standing.is_partial) {
                    products.sum(self.device, &self.gradients.part(part)?)?;
                }
            }
            Action::Reduce { unit } => {
                let parts = Rc::clone(&self.parts);
                for part in parts.of(unit) {
                    self.add_pass(part, pass.group)?;
                }
                self.gradients.free_pass(parts.of(unit));
            }
            Action::BeginReduce { unit } => {
                let parts = Rc::clone(&self.parts);
                for part in parts.of(unit) {
                    self.begin_to_add_pass(part, pass.group)?;
                }
                self.gradients.free_pass(parts.of(unit));
            }
            Action::EndReduce { unit } => {
                for _ in 0..self.parts.of(unit).len() {
                    self.add_begun_pass()?;
                }
            }
            Action::Sum { unit } => {
                let parts = Rc::clone(&self.parts);
                for part in parts.of(unit) {
                    self.sum_over_ranks(part)?;
                }
            }
            Action::Measure { unit } => {
                for part in self.parts.of(unit).iter().filter(|part| part.is_measured()) {
                    let Some(gradient) = self.summed(part)? else { continue };
                    match shares_sums(&self.settings) {
                        true => self.numbers.measure_share(self.device, part, &gradient)?,
                        false => self.numbers.measure(self.device, part, &gradient)?,
                    }
                }
                // What is updated next knows nothing of what others have found yet.
                if !pass.is_empty() && self.settings.update != UpdateTiming::AfterBackward {
                    self.numbers.agree_on_flag(self.device, &*self.replicas)?;
                    // Of tables they may have other numbers of pieces.
                    let is_piece = matches!(unit, Unit::Piece(..));
                    let agrees = |products: &&Rc<Products<'_>>| !is_piece || products.shares_experts_alone();
                    if let Some(products) = self.products.as_ref().filter(agrees) {
                        self.numbers.agree_on_flag(self.device, products.ranks())?;
                    }
                }
            }
            Action::Update { unit, part, numbers } => {
                let missing = StepError::Invariant { what: "a schedule updates what is not trained" };
                let part = self.parts.of(unit).get(part).ok_or(missing)?;
                let Some(gradient) = self.to_update(part)? else { return Ok(()) };
                let rows = self.updated_rows(part);
                let weight = match self.weights.shares(part.parameter.block, part.parameter.role) {
                    true => weights.and_then(|own| own.find(part.parameter.role)).cloned(),
                    false => part.view(&self.weight_of(part, weights)?, &rows),
                };
                let Some(weight) = weight else { return Ok(()) };
                let (own, control) = (part.of_rows(rows), self.numbers.control());
                self.optimizer.update(self.device, &own, (&weight, &gradient), numbers, control)?;
            }
            Action::AllGather { unit } => {
                for part in self.parts.of(unit).iter().filter(|part| !self.weights.shares_part(part)) {
                    self.gather_weight(part, &self.weight_of(part, weights)?)?;
                }
            }
            Action::BeginAllGather { unit } => {
                for part in self.parts.of(unit).iter().filter(|part| !self.weights.shares_part(part)) {
                    let weight = self.weight_of(part, weights)?;
                    match self.weights.is_away(part) {
                        // It leaves with its unit.
                        true => self.gather_weight(part, &weight)?,
                        false => {
                            let arriving = self.begin_to_gather_weight(part, &weight)?;
                            self.exchanged.weights.push(arriving);
                        }
                    }
                }
            }
            Action::EndAllGather => {
                for (part, ticket) in std::mem::take(&mut self.exchanged.weights) {
                    self.take_gathered_weight(&part, ticket)?;
                }
            }
            Action::Tie { unit } => {
                let parts = Rc::clone(&self.parts);
                for part in parts.of(unit) {
                    self.tie(part)?;
                }
            }
            Action::Follow { unit, .. } => {
                for part in self.parts.of(unit) {
                    let shared = self.weights.shares(part.parameter.block, part.parameter.role);
                    let weight = match shared {
                        true => weights.and_then(|own| own.find(part.parameter.role)).cloned(),
                        false => Some(self.weight_of(part, weights)?),
                    };
                    if let Some(weight) = weight {
                        self.between_ends(&weight)?;
                    }
                }
            }
            Action::Free { unit } => self.gradients.free(unit, self.parts.of(unit)),
            _ => return Err(StepError::Invariant { what: "an action of a pass came to the gradients" }),
        }
        Ok(())
    }

    /// The weight of a part: all of its rows.
    fn weight_of(&self, part: &Part, held: Option<&BlockWeights>) -> Result<Tensor, StepError> {
        match held.and_then(|weights| weights.find(part.parameter.role)) {
            Some(weight) => Ok(weight.clone()),
            None => Ok(self.weights.resident().tensor(&part.parameter)?.clone()),
        }
    }

    /// What a step gave, with the numbers that the device has found. Where any of them is not finite nothing was updated
    /// from then on: a smaller loss scale is for the next step, if that can help.
    pub(super) fn conclude(&mut self, passed: Passed, found: &Found) -> Result<StepOutcome, StepError> {
        let loss = self.mean_loss(passed, found)?;
        let grad_norm = found.norm() / self.loss_scale();
        let mut outcome = StepOutcome { loss, grad_norm, targets: passed.targets, skipped: false };
        let scaling = self.settings.loss_scaling;
        if let (Some(scaling), Some(scale)) = (scaling, &mut self.progress.loss_scale)
            && !grad_norm.is_finite()
            && scale.back_off(scaling)
        {
            outcome.skipped = true;
            return Ok(outcome);
        }
        self.check_finite(outcome, found, passed.within)?;
        if let (Some(scaling), Some(scale)) = (scaling, &mut self.progress.loss_scale) {
            scale.grow(scaling);
        }
        self.progress.steps += 1;
        self.progress.grad_norm = Some(grad_norm);
        Ok(outcome)
    }

    /// Refuses numbers that no update may be made of. `within`: weights were updated until one was found.
    fn check_finite(&self, outcome: StepOutcome, found: &Found, within: bool) -> Result<(), StepError> {
        let StepOutcome { loss, grad_norm, .. } = outcome;
        if loss.is_finite() && grad_norm.is_finite() {
            return Ok(());
        }
        let mut block = None;
        if loss.is_finite() {
            // In the order of the backward pass: the first one had it from the loss or made it itself.
            let measured = |part: &&Part| part.is_measured();
            let square = |part: &Part| found.squares.get(self.numbers.row_of(part) as usize).copied();
            let is_bad = |block: &BlockId| {
                !self.parts.of_block(*block).filter(measured).filter_map(square).all(f32::is_finite)
            };
            block = self.last_of_model(self.spec.blocks().rev().find(is_bad))?;
        }
        Err(match block {
            Some(block) if within => StepError::NotFiniteWithin { block },
            _ => StepError::NotFinite { loss, grad_norm, block },
        })
    }

    /// Updates all weights from their gradients.
    pub(super) fn update_all(&mut self, numbers: Update) -> Result<(), StepError> {
        let (ranks, looked_up) = (self.between_ranks(), self.keeps_looked_up());
        let schedule = Schedule::updates(&self.spec, &self.parts, ranks, looked_up, numbers);
        self.perform(&schedule, &mut Pass::empty())?;
        self.follow_table()
    }

    /// Waits until everything that the step has changed is where it lives.
    pub(super) fn settle(&mut self) -> Result<(), StepError> {
        self.weights.flush()?;
        self.optimizer.flush()
    }
}
