//! What was looked up of an embedding that is no head as well, and whose gradient does not stay on the device: the tokens of
//! every micro-batch and the gradients of their rows. The table's gradient is made of them, a piece at a time, when it is
//! needed, and never lives anywhere.

use plimsoll_device::{DType, Device, DeviceExt, Elementwise, Rounding, Tensor};
use plimsoll_memory::Tag;

use crate::StepError;
use crate::head::rows;

#[derive(Debug, Default)]
pub(crate) struct LookedUp {
    /// Of the micro-batches of the passes before the last one, in one place, so that passes are alike: u32 `[before, N]` and
    /// `[before N, H]`.
    before: Option<(Tensor, Tensor)>,
    /// Those of the last pass, each where it was made.
    last: Vec<(Tensor, Tensor)>,
}

impl LookedUp {
    /// Nothing yet, with room for `before` micro-batches of `tokens` tokens with gradients of so many columns.
    pub fn with_room(
        device: &dyn Device,
        before: u64,
        tokens: u64,
        (dtype, columns): (DType, u64),
    ) -> Result<LookedUp, StepError> {
        if before == 0 {
            return Ok(LookedUp::default());
        }
        let alloc = |dtype, sizes: &[u64], name| device.alloc(dtype, sizes, Tag::Gradients, name);
        let rows = before.saturating_mul(tokens);
        let tokens = alloc(DType::U32, &[before, tokens], "looked_up.tokens")?;
        let rows = alloc(dtype, &[rows, columns], "looked_up.rows")?;
        Ok(LookedUp { before: Some((tokens, rows)), last: Vec::new() })
    }

    /// Keeps the gradients dx `[N, H]` of the rows that a micro-batch looked up.
    pub fn keep(
        &mut self,
        device: &dyn Device,
        number: u64,
        tokens: Tensor,
        dx: Tensor,
    ) -> Result<(), StepError> {
        let Some((own_tokens, own_dx)) = self.get(number)? else {
            self.last.push((tokens, dx));
            return Ok(());
        };
        let rounding = Rounding::Nearest;
        device.run(Elementwise::Cast { x: &tokens, out: &own_tokens, rounding })?;
        Ok(device.run(Elementwise::Cast { x: &dx, out: &own_dx, rounding })?)
    }

    fn before(&self) -> u64 {
        self.before.as_ref().map_or(0, |(tokens, _)| tokens.rows())
    }

    /// The micro-batches; none before the last pass, without which the others are not complete.
    pub fn len(&self) -> u64 {
        if self.last.is_empty() { 0 } else { self.before() + self.last.len() as u64 }
    }

    /// The tokens and the gradients of the rows of a micro-batch.
    pub fn get(&self, number: u64) -> Result<Option<(Tensor, Tensor)>, StepError> {
        if let Some(nth) = number.checked_sub(self.before()) {
            return Ok(usize::try_from(nth).ok().and_then(|nth| self.last.get(nth)).cloned());
        }
        let Some((tokens, dx)) = &self.before else { return Ok(None) };
        let each = tokens.columns();
        let own = rows(dx, number * each, (number + 1) * each)?;
        Ok(Some((rows(tokens, number, number + 1)?, own)))
    }
}
