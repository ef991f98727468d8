//! How a schedule is gone through: what it announces, and what is held for its actions. Where ranks share weights, the next unit that
//! was announced is gathered while the present one is worked on.

use plimsoll_model::{BlockId, Role};

use super::Trainer;
use super::pass::Pass;
use super::schedule::{Form, Hold, Schedule};
use crate::StepError;
use crate::head::rows;
use crate::store::BlockWeights;
use crate::tier::Unit;

impl Trainer<'_> {
    /// Goes through a schedule: everything that it will need is announced, each unit is taken once for the actions that
    /// hold it, and released behind the last of them.
    pub(super) fn perform(&mut self, schedule: &Schedule, pass: &mut Pass<'_>) -> Result<(), StepError> {
        self.weights.announce(schedule.weights())?;
        self.gradients.announce(schedule.gradients())?;
        let states = schedule.updated().filter_map(|(unit, part)| {
            let part = self.parts.of(unit).get(part)?;
            Some((part.parameter.block, part.parameter.role, part.piece))
        });
        self.optimizer.announce(states)?;
        let (mut held, mut upcoming) = (None, schedule.taken().skip(1));
        for entry in schedule.entries() {
            if let Some(hold) = entry.weights.filter(|hold| hold.first) {
                held = Some(match hold.form {
                    Form::Whole => self.held_weights(hold.unit)?,
                    Form::Own => self.weights.gather_own(hold.unit)?,
                });
                if let Some(next) = upcoming.next().filter(|next| self.comes_ahead(hold, *next)) {
                    self.weights.gather_ahead(next.unit)?;
                }
            }
            if let Some(hold) = entry.gradients.filter(|hold| hold.first) {
                self.gradients.hold(hold.unit)?;
            }
            self.act(pass, entry.action, held.as_ref())?;
            if let Some(hold) = entry.weights.filter(|hold| hold.last) {
                held = None;
                self.weights.release(hold.unit, hold.ends);
                if hold.ends {
                    self.weights.advance()?;
                }
            }
            if let Some(hold) = entry.gradients.filter(|hold| hold.last) {
                self.gradients.leave(hold.unit)?;
            }
        }
        Ok(())
    }

    /// Whether the other ranks' shares of the unit that is taken next come while this one is worked on, which may change it.
    fn comes_ahead(&self, hold: Hold, next: Hold) -> bool {
        let overlaps = self.between_ranks().overlap;
        overlaps && next.form == Form::Whole && !(hold.unit == next.unit && hold.ends)
    }

    /// The weights of a unit, on the device.
    fn held_weights(&mut self, unit: Unit) -> Result<BlockWeights, StepError> {
        let Unit::Piece(block, piece) = unit else { return self.weights.gather(unit.block()) };
        let role = if block == BlockId::Embedding { Role::TokenEmbedding } else { Role::LmHead };
        if self.weights.pieces(block, role).is_some() {
            let tensor = self.weights.gather_piece(block, role, piece)?;
            return Ok(BlockWeights::new(block, vec![(role, tensor)]));
        }
        let own = self.parts.of(unit).first().map(|part| &part.rows);
        let of_loss = || self.loss_pieces.as_ref()?.get(piece as usize);
        let range = own.or_else(of_loss).ok_or(StepError::MissingWeight { block, role })?;
        let weights = self.weights.resident().gather(block)?;
        let tensor = rows(weights.get(role)?, range.start, range.end)?;
        Ok(BlockWeights::new(block, vec![(role, tensor)]))
    }
}
