//! What happens to complete gradients: they are measured, the weights are updated from them, and they are given back.

use std::ops::Range;

use plimsoll_device::{Device, Op, Tensor};
use plimsoll_memory::Phase;
use plimsoll_model::{BlockId, Parameter, Role};

use super::{Finish, Trainer};
use crate::StepError;
use crate::head::rows;
use crate::optimizer::{Rows, Update};
use crate::store::{WeightStore, layer_of};
use crate::tier::{Unit, is_matrix};

impl<D: Device> Trainer<'_, D> {
    /// Does with the complete gradients of a block what is to be done; those of tables that come in pieces are done with
    /// already.
    pub(super) fn finish(&mut self, block: BlockId, finish: Option<Finish>) -> Result<(), StepError> {
        let Some(finish) = finish else { return self.gradients.put_away(block, false) };
        let (mut whole, mut tables) = (Vec::new(), Vec::new());
        for p in self.trained_of(block) {
            match self.pieces_of(&p) {
                None => whole.push(p),
                Some(pieces) if !self.is_done(&p) => tables.push((p, pieces)),
                Some(_) => {}
            }
        }
        for (p, pieces) in &tables {
            for (piece, rows) in (0..).zip(pieces) {
                self.finish_rows(p, piece, rows, finish)?;
            }
        }
        for p in &whole {
            self.communicator.all_reduce(self.gradients.get(p.block, p.role)?)?;
            self.measure(p)?;
        }
        if let Finish::Update(update) = finish {
            if self.first_bad_gradient(&[block])?.is_some() {
                return Err(StepError::NotFiniteWithin { block });
            }
            self.update_whole(block, &whole, update)?;
        }
        let served = !matches!(finish, Finish::Keep);
        self.gradients.put_away(block, served)?;
        if served {
            self.trained_of(block).iter().for_each(|p| self.gradients.release(p.block, p.role));
        }
        Ok(())
    }

    /// The same for rows of a table.
    pub(super) fn finish_rows(
        &mut self,
        parameter: &Parameter,
        piece: u32,
        range: &Range<u64>,
        finish: Finish,
    ) -> Result<(), StepError> {
        let (block, role) = (parameter.block, parameter.role);
        let gradient = self.gradients.get_rows(block, role, piece, range)?;
        self.communicator.all_reduce(&gradient)?;
        self.measure_part(block, role, u64::from(piece), &gradient)?;
        drop(gradient);
        if let Finish::Update(update) = finish {
            if self.first_bad_gradient(&[block])?.is_some() {
                return Err(StepError::NotFiniteWithin { block });
            }
            self.update_rows(parameter, piece, range, update)?;
        }
        let again = block == BlockId::Embedding && self.keeps_looked_up();
        self.gradients.leave_rows(block, piece, again || !matches!(finish, Finish::Keep))
    }

    /// Whether the pass has done with a table already, piece by piece.
    fn is_done(&self, p: &Parameter) -> bool {
        let in_pieces = self.gradients.is_in_pieces(p.block, p.role);
        in_pieces || p.block == BlockId::Head && self.weights.pieces(p.block, p.role).is_some()
    }

    /// The pieces of a table of which anything lives on a lower tier.
    fn pieces_of(&self, p: &Parameter) -> Option<Vec<Range<u64>>> {
        let table = is_matrix(p) && layer_of(p.block).is_none();
        let away = || {
            self.weights.pieces(p.block, p.role).is_some()
                || self.gradients.is_in_pieces(p.block, p.role)
                || self.optimizer.is_away(p.block, p.role)
        };
        (table && away()).then(|| self.cut.of(p))
    }

    /// Takes the squared norm of a parameter's gradient, a piece at a time.
    fn measure(&self, p: &Parameter) -> Result<(), StepError> {
        let gradient = self.gradients.get(p.block, p.role)?;
        let pieces = self.cut.of(p);
        if pieces.len() < 2 {
            return self.measure_part(p.block, p.role, 0, gradient);
        }
        for (piece, range) in (0..).zip(pieces) {
            self.measure_part(p.block, p.role, piece, &rows(gradient, range.start, range.end)?)?;
        }
        Ok(())
    }

    fn measure_part(&self, block: BlockId, role: Role, part: u64, x: &Tensor) -> Result<(), StepError> {
        let first = *self.norm_rows.get(&(block, role)).ok_or(StepError::MissingWeight { block, role })?;
        let out = rows(&self.squared_norms, first + part, first + part + 1)?;
        Ok(self.device.run(Op::SumSquares { x, out: &out })?)
    }

    /// The norm of all unscaled gradients together, of which the squared norms have been taken.
    pub(super) fn global_norm(&self) -> Result<f64, StepError> {
        let squares = self.device.read_f32(&self.squared_norms)?;
        Ok(squares.into_iter().map(f64::from).sum::<f64>().sqrt() / self.loss_scale())
    }

    /// The first of `blocks` whose gradients have a squared norm that is not finite.
    fn first_bad_gradient(&self, blocks: &[BlockId]) -> Result<Option<BlockId>, StepError> {
        let squares = self.device.read_f32(&self.squared_norms)?;
        let bad = |block: &&BlockId| {
            self.trained.iter().filter(|p| p.block == **block).any(|p| {
                let first = self.norm_rows.get(&(p.block, p.role)).map_or(0, |row| *row as usize);
                let own = squares.iter().skip(first).take(self.cut.of(p).len());
                own.into_iter().any(|square| !square.is_finite())
            })
        };
        Ok(blocks.iter().find(bad).copied())
    }

    /// Refuses numbers that no update may be made of.
    pub(super) fn check_finite(&self, loss: f64, grad_norm: f64) -> Result<(), StepError> {
        if loss.is_finite() && grad_norm.is_finite() {
            return Ok(());
        }
        // In the order of the backward pass: the first one had it from the loss or made it itself.
        let layers = (0..self.spec.num_layers).rev().map(BlockId::Layer);
        let order: Vec<BlockId> =
            [BlockId::Head].into_iter().chain(layers).chain([BlockId::Embedding]).collect();
        let block = if loss.is_finite() { self.first_bad_gradient(&order)? } else { None };
        Err(StepError::NotFinite { loss, grad_norm, block })
    }

    /// What is trained of a block.
    fn trained_of(&self, block: BlockId) -> Vec<Parameter> {
        self.trained.iter().filter(|p| p.block == block).cloned().collect()
    }

    /// The matrices in the order of their updates, each with its pieces.
    pub(super) fn order_of_updates(&self, in_backward: bool) -> Vec<(BlockId, Role, u32)> {
        let mut blocks: Vec<BlockId> = self.spec.blocks().collect();
        if in_backward {
            blocks.sort_by_key(|block| match block {
                BlockId::Head => (0, 0),
                BlockId::Layer(layer) => (1, self.spec.num_layers - layer),
                BlockId::Embedding => (2, 0),
            });
        }
        let mut order = Vec::new();
        for block in blocks {
            for p in self.trained.iter().filter(|p| p.block == block && is_matrix(p)) {
                order.extend((0..self.cut.of(p).len() as u32).map(|piece| (block, p.role, piece)));
            }
        }
        order
    }

    /// Updates all weights from their gradients.
    pub(super) fn update_all(&mut self, update: Update) -> Result<(), StepError> {
        let order = self.order_of_updates(false);
        let mut units: Vec<Unit> =
            order.iter().map(|(block, _, piece)| Unit { block: *block, piece: *piece }).collect();
        units.dedup();
        self.gradients.announce(&units)?;
        self.weights.announce_units(units)?;
        self.optimizer.announce(order)?;
        let blocks: Vec<BlockId> = self.spec.blocks().collect();
        for block in blocks {
            self.device.arena().enter(Phase::Optimizer, layer_of(block));
            let mut whole = Vec::new();
            for p in self.trained_of(block) {
                let Some(pieces) = self.pieces_of(&p) else {
                    whole.push(p);
                    continue;
                };
                for (piece, rows) in (0..).zip(&pieces) {
                    if block == BlockId::Embedding && self.keeps_looked_up() {
                        self.gradients.gather_looked_up((block, p.role), piece, rows)?;
                    }
                    self.update_rows(&p, piece, rows, update)?;
                    self.gradients.leave_rows(block, piece, true)?;
                }
            }
            if whole.is_empty() {
                continue;
            }
            if layer_of(block).is_some() {
                self.gradients.fetch(block)?;
            }
            self.update_whole(block, &whole, update)?;
            self.gradients.put_away(block, true)?;
        }
        Ok(())
    }

    /// Updates parameters of a block from their gradients.
    fn update_whole(
        &mut self,
        block: BlockId,
        parameters: &[Parameter],
        update: Update,
    ) -> Result<(), StepError> {
        let weights = self.weights.gather(block)?;
        for p in parameters {
            let operands = (weights.get(p.role)?, self.gradients.get(p.block, p.role)?);
            self.optimizer.update(self.device, p, None, operands, update)?;
        }
        drop(weights);
        match parameters.iter().any(is_matrix) {
            true => self.weights.release_changed(block),
            false => self.weights.release(block),
        }
        self.weights.advance()
    }

    /// Updates rows of a table from their gradients.
    fn update_rows(
        &mut self,
        parameter: &Parameter,
        piece: u32,
        range: &Range<u64>,
        update: Update,
    ) -> Result<(), StepError> {
        let (block, role) = (parameter.block, parameter.role);
        let weight = self.weight_rows(block, role, piece, range)?;
        let gradient = self.gradients.get_rows(block, role, piece, range)?;
        let part = Some(Rows { piece, rows: range });
        self.optimizer.update(self.device, parameter, part, (&weight, &gradient), update)?;
        drop((weight, gradient));
        self.weights.release_piece(block, piece, true);
        self.weights.advance()
    }

    /// Waits until everything that the step has changed is where it lives.
    pub(super) fn settle(&mut self) -> Result<(), StepError> {
        self.weights.flush()?;
        self.optimizer.flush()
    }
}
