//! Experts that come one by one, when tokens are sent to them: each is multiplied with its own rows of what a stack would have.

use std::ops::Range;

use plimsoll_device::{DeviceExt, Routing, Tensor};
use plimsoll_model::{FeedForwardRoles, Role};

use super::super::mlp::{FeedForward, activated_in_place};
use super::super::parts::activation_tensor;
use super::super::saved::Inner;
use super::{Experts, Order};
use crate::StepError;
use crate::head::{reshaped, rows};
use crate::store::{BlockWeights, ExpertWeights};

impl Experts<'_, '_> {
    /// What experts that come one by one make of their rows, `[R, H]`. Each has the bits that it has in a stack.
    pub(super) fn through_slots(
        &self,
        slots: &dyn ExpertWeights,
        order: &Order,
        weights: &Tensor,
        normed: &Tensor,
    ) -> Result<Tensor, StepError> {
        let (ctx, block) = (self.ctx, self.weights.block());
        let layer = block.layer().unwrap_or(0);
        let routed = self.gather(normed, order)?;
        let (count, inner) = (routed.rows(), self.spec.intermediate_size);
        let gate = match ctx.mlp.gated {
            true => Some(activation_tensor(ctx, count, inner, "gate")?),
            false => None,
        };
        let up = activation_tensor(ctx, count, inner, "up")?;
        let outputs = activation_tensor(ctx, count, normed.columns(), "expert.outputs")?;
        let sources = reshaped(&order.sources, &[count, 1])?;
        let runs = self.runs(order)?;
        let used: Vec<u32> = (0..).zip(&runs).filter(|(_, rows)| !rows.is_empty()).map(|(e, _)| e).collect();
        for expert in slots.announce(layer, &used)? {
            let own = runs.get(expert as usize).cloned().unwrap_or_default();
            let part = |x: &Tensor| rows(x, own.start, own.end);
            let number = u64::from(expert);
            let bias_of = |all: &Tensor| rows(all, number, number + 1);
            let mut own_weights = slots.take(layer, expert)?;
            for role in [Role::GateBias, Role::UpBias] {
                own_weights
                    .extend(self.weights.find(role).map(bias_of).transpose()?.map(|bias| (role, bias)));
            }
            let weights_of_expert = BlockWeights::new(block, own_weights);
            let (weights_of_expert, roles) = (&weights_of_expert, FeedForwardRoles::EXPERTS);
            let linears = FeedForward { weights: weights_of_expert, roles, offsets: None };
            let (x, up) = (part(&routed)?, part(&up)?);
            let gate = gate.as_ref().map(&part).transpose()?;
            if let Some(gate) = &gate {
                linears.gate()?.forward(ctx, &x, gate, false)?;
            }
            linears.up()?.forward(ctx, &x, &up, false)?;
            let activated = activated_in_place(ctx, Inner { gate, up })?;
            let (x, sources) = (&activated, Some(&part(&sources)?));
            ctx.device.run(Routing::ScaleRows { x, factors: weights, sources, out: x })?;
            let outputs = &part(&outputs)?;
            linears.down()?.forward(ctx, x, outputs, false)?;
            if let (Some(all), Some(sources)) = (self.down_bias(), sources) {
                self.add_down_bias_of(&bias_of(all)?, sources, weights, outputs)?;
            }
        }
        Ok(outputs)
    }

    /// The rows of each expert. A device without memory takes every expert that there may be tokens for as one with tokens.
    fn runs(&self, order: &Order) -> Result<Vec<Range<u64>>, StepError> {
        let (count, total) = (self.spec.count, order.sources.elements());
        if self.ctx.device.is_dry() {
            let cut = |expert: u64| (expert * total).div_ceil(count);
            return Ok((0..count).map(|expert| cut(expert)..cut(expert + 1)).collect());
        }
        let offsets = self.ctx.device.read_u32(&order.offsets)?;
        Ok(offsets.windows(2).map(|pair| u64::from(pair[0])..u64::from(pair[1])).collect())
    }
}
