//! What happens to complete gradients: they are measured, the weights are updated from them, and they are given back.

use plimsoll_device::{DeviceExt, Reduction};
use plimsoll_memory::Phase;

use super::Trainer;
use super::parts::Part;
use super::pass::Pass;
use super::schedule::{Action, Schedule};
use crate::StepError;
use crate::head::rows;
use crate::optimizer::Update;
use crate::store::{BlockWeights, layer_of};

impl Trainer<'_> {
    /// An action on complete gradients.
    pub(super) fn complete(
        &mut self,
        pass: &Pass<'_>,
        action: Action,
        weights: Option<&BlockWeights>,
    ) -> Result<(), StepError> {
        if let (true, Some(unit)) = (pass.is_empty(), action.gradients()) {
            self.device.enter(Phase::Optimizer, layer_of(unit.block()));
        }
        match action {
            Action::GatherLookedUp { unit } => {
                if let Some(part) = self.parts.of(unit).first() {
                    let key = (part.parameter.block, part.parameter.role);
                    self.gradients.gather_looked_up(key, part.piece, &part.rows)?;
                }
            }
            Action::Measure { unit } => {
                for part in self.parts.of(unit) {
                    let gradient = self.gradients.part(part)?;
                    self.communicator.all_reduce(&gradient)?;
                    let out = rows(&self.squared_norms, part.norm_row, part.norm_row + 1)?;
                    self.device.run(Reduction::SumSquares { x: &gradient, out: &out })?;
                }
            }
            Action::CheckFinite { unit } => {
                let squares = self.device.read_f32(&self.squared_norms)?;
                if !self.are_finite(&squares, self.parts.of(unit)) {
                    return Err(StepError::NotFiniteWithin { block: unit.block() });
                }
            }
            Action::Update { unit, part, numbers } => {
                let missing = StepError::Invariant { what: "a schedule updates what is not trained" };
                let part = self.parts.of(unit).get(part).ok_or(missing)?;
                let role = part.parameter.role;
                let weight = match weights.and_then(|weights| weights.find(role)) {
                    Some(weight) => weight.clone(),
                    None => self.weights.resident().tensor(&part.parameter)?.clone(),
                };
                let gradient = self.gradients.part(part)?;
                self.optimizer.update(self.device, part, (&weight, &gradient), numbers)?;
            }
            Action::Free { unit } => self.gradients.free(unit, self.parts.of(unit)),
            _ => return Err(StepError::Invariant { what: "an action of a pass came to the gradients" }),
        }
        Ok(())
    }

    /// The norm of all unscaled gradients together, of which the squared norms have been taken.
    pub(super) fn global_norm(&self) -> Result<f64, StepError> {
        let squares = self.device.read_f32(&self.squared_norms)?;
        Ok(squares.into_iter().map(f64::from).sum::<f64>().sqrt() / self.loss_scale())
    }

    /// Whether the gradients of some parts are finite, by their squared norms. A device without memory has none.
    fn are_finite<'p>(&self, squares: &[f32], parts: impl IntoIterator<Item = &'p Part>) -> bool {
        let square = |part: &Part| squares.get(part.norm_row as usize).copied();
        parts.into_iter().filter_map(square).all(f32::is_finite)
    }

    /// Refuses numbers that no update may be made of.
    pub(super) fn check_finite(&self, loss: f64, grad_norm: f64) -> Result<(), StepError> {
        if loss.is_finite() && grad_norm.is_finite() {
            return Ok(());
        }
        let mut block = None;
        if loss.is_finite() {
            let squares = self.device.read_f32(&self.squared_norms)?;
            // In the order of the backward pass: the first one had it from the loss or made it itself.
            let mut order = self.spec.blocks().rev();
            block = order.find(|block| !self.are_finite(&squares, self.parts.of_block(*block)));
        }
        Err(StepError::NotFinite { loss, grad_norm, block })
    }

    /// Updates all weights from their gradients.
    pub(super) fn update_all(&mut self, numbers: Update) -> Result<(), StepError> {
        let schedule = Schedule::updates(&self.spec, &self.parts, self.keeps_looked_up(), numbers);
        self.perform(&schedule, &mut Pass::empty())
    }

    /// Waits until everything that the step has changed is where it lives.
    pub(super) fn settle(&mut self) -> Result<(), StepError> {
        self.weights.flush()?;
        self.optimizer.flush()
    }
}
