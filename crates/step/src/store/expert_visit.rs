//! One visit to a layer's experts that come by themselves: the rows of each, and products with their matrices as these come, one after
//! the other. It takes the place of a product with a stack, and gives its bits.

use std::ops::Range;

use plimsoll_device::{Compute, Device, DeviceExt, Elementwise, Tensor};
use plimsoll_model::Role;

use super::ExpertWeights;
use crate::StepError;
use crate::head::{reshaped, rows};
use crate::matrices::Matrices;

/// Experts of a layer with the rows that were sent to them.
pub(crate) struct ExpertVisit<'w> {
    weights: &'w dyn ExpertWeights,
    layer: u32,
    /// The rows of each expert.
    runs: Vec<Range<u64>>,
    /// The experts that have rows.
    used: Vec<u32>,
    is_dry: bool,
}

impl<'w> ExpertVisit<'w> {
    /// Begins to bring the experts that rows go to: `offsets` u32 `[E + 1]`, of `total` rows. A device without memory takes every
    /// expert as one with rows.
    pub fn begin(
        device: &dyn Device,
        weights: &'w dyn ExpertWeights,
        layer: u32,
        offsets: &Tensor,
        total: u64,
    ) -> Result<Self, StepError> {
        let runs: Vec<Range<u64>> = if device.is_dry() {
            let count = offsets.elements().saturating_sub(1).max(1);
            let cut = |expert: u64| (expert * total).div_ceil(count);
            (0..count).map(|expert| cut(expert)..cut(expert + 1)).collect()
        } else {
            let offsets = device.read_u32(offsets)?;
            offsets.windows(2).map(|pair| u64::from(pair[0])..u64::from(pair[1])).collect()
        };
        let used: Vec<u32> = (0..).zip(&runs).filter(|(_, rows)| !rows.is_empty()).map(|(e, _)| e).collect();
        weights.expect(layer, &used)?;
        Ok(ExpertVisit { weights, layer, runs, used, is_dry: device.is_dry() })
    }

    /// Inputs and outputs of a kind of matrix; `None` of what does not come by itself.
    pub fn sides(&self, role: Role) -> Option<[u64; 2]> {
        self.weights.sides(self.layer, role)
    }

    /// out (+)= x W^T + b, each row with its expert's.
    pub fn forward(
        &self,
        device: &dyn Device,
        role: Role,
        x: &Tensor,
        bias: Option<&Tensor>,
        out: &Tensor,
        accumulate: bool,
        compute: Compute,
    ) -> Result<(), StepError> {
        self.clear_rest(device, out, accumulate)?;
        self.each(role, |expert, own, matrix| {
            let bias = bias.map(|bias| {
                let own = rows(bias, u64::from(expert), u64::from(expert) + 1)?;
                reshaped(&own, &[bias.columns()])
            });
            let (x, out) = (rows(x, own.start, own.end)?, rows(out, own.start, own.end)?);
            matrix.forward(device, &x, bias.transpose()?.as_ref(), &out, accumulate, compute)
        })
    }

    /// dx (+)= dout W, each row with its expert's.
    pub fn backward_input(
        &self,
        device: &dyn Device,
        role: Role,
        dout: &Tensor,
        dx: &Tensor,
        accumulate: bool,
        compute: Compute,
    ) -> Result<(), StepError> {
        self.clear_rest(device, dx, accumulate)?;
        self.each(role, |_, own, matrix| {
            let (dout, dx) = (rows(dout, own.start, own.end)?, rows(dx, own.start, own.end)?);
            matrix.backward_input(device, &dout, &dx, accumulate, compute)
        })
    }

    /// Calls `work` with each expert that has rows, those rows, and its matrix.
    fn each(
        &self,
        role: Role,
        mut work: impl FnMut(u32, &Range<u64>, Matrices<'_>) -> Result<(), StepError>,
    ) -> Result<(), StepError> {
        if self.is_dry {
            return self.each_group(role, work);
        }
        for expert in self.weights.announce(self.layer, role, &self.used)? {
            let matrix = self.weights.take(self.layer, role, expert)?;
            let own = self.runs.get(expert as usize).ok_or(StepError::Invariant { what: NO_ROWS })?;
            work(expert, own, Matrices { all: &matrix, offsets: None })?;
        }
        Ok(())
    }

    /// The same in a dry run: experts that come together are one, with as many of the rows.
    fn each_group(
        &self,
        role: Role,
        mut work: impl FnMut(u32, &Range<u64>, Matrices<'_>) -> Result<(), StepError>,
    ) -> Result<(), StepError> {
        let used = self.used.len() as u32;
        let total = self.runs.last().map_or(0, |run| run.end);
        let groups = self.weights.count(self.layer, role, used)?;
        let (mut experts, mut start) = (0, 0);
        for (group, count) in groups.into_iter().enumerate() {
            let matrix = self.weights.take_group(self.layer, role, groups, group)?;
            experts += u64::from(count);
            let end = total * experts / u64::from(used.max(1));
            if end > start {
                work(0, &(start..end), Matrices { all: &matrix, offsets: None })?;
            }
            start = end;
        }
        Ok(())
    }

    /// Rows behind those of the last expert are products of zeros.
    fn clear_rest(&self, device: &dyn Device, out: &Tensor, accumulate: bool) -> Result<(), StepError> {
        let last = self.runs.last().map_or(0, |run| run.end);
        if accumulate || last >= out.rows() {
            return Ok(());
        }
        let rest = rows(out, last, out.rows())?;
        Ok(device.run(Elementwise::Fill { out: &rest, value: 0.0 })?)
    }
}

const NO_ROWS: &str = "an expert was announced that has no rows";
