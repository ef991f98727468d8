//! The numbers of a step that stay on the device until its end: what the loss adds up to, the squared norms of gradients, and
//! what updates make of them. The host reads them once, behind the last update.

use plimsoll_device::{DType, Device, DeviceExt, Reduction, Tensor};
use plimsoll_memory::Tag;

use crate::StepError;
use crate::head::rows;
use crate::optimizer::Control;

/// Bytes of what comes before the squared norms: the loss, the factor and the flag.
const BEFORE_SQUARES: usize = 16;

/// The numbers of a step, on the device.
pub struct Numbers {
    /// All of them, as bytes.
    all: Tensor,
    /// f64 `[1]`: the sum of token losses.
    loss: Tensor,
    /// f32 `[1]`: the factor on gradients.
    factor: Tensor,
    /// f32 `[1]`: 0 from the first number on that is not finite. Nothing is updated then.
    finite: Tensor,
    /// f32 `[parts, 1]`: the squared norm of each part's gradient.
    squares: Tensor,
}

/// What the host has read of them.
#[derive(Debug, PartialEq)]
pub(super) struct Found {
    pub loss: f64,
    pub squares: Vec<f32>,
}

impl Found {
    /// The norm of all gradients together, scaled as they are.
    pub fn norm(&self) -> f64 {
        self.squares.iter().copied().map(f64::from).sum::<f64>().sqrt()
    }
}

impl Numbers {
    /// What their memory is called in the ledger: the one tensor whose size depends on the number of layers.
    pub const NAME: &str = "step.numbers";

    /// Bytes of those of a step that measures and updates so many parts.
    pub fn bytes(parts: u64) -> u64 {
        BEFORE_SQUARES as u64 + parts.max(1).saturating_mul(size_of::<f32>() as u64)
    }

    /// Takes memory for those of a step with so many parts.
    pub(super) fn new(device: &dyn Device, parts: u64) -> Result<Numbers, StepError> {
        let all = device.alloc(DType::U8, &[Numbers::bytes(parts)], Tag::Workspace, Numbers::NAME)?;
        let what = StepError::Invariant { what: "the numbers of a step do not fit their memory" };
        let view = |start, dtype, sizes: &[u64]| all.view(start, dtype, sizes);
        let views = || {
            let [loss, factor] = [view(0, DType::F64, &[1])?, view(8, DType::F32, &[1])?];
            Some([loss, factor, view(12, DType::F32, &[1])?, view(16, DType::F32, &[parts.max(1), 1])?])
        };
        let [loss, factor, finite, squares] = views().ok_or(what)?;
        Ok(Numbers { all, loss, factor, finite, squares })
    }

    /// Begins a step, with this factor on its gradients until another is found.
    pub(super) fn begin(&self, device: &dyn Device, factor: f32) -> Result<(), StepError> {
        self.forget_loss(device)?;
        device.write_f32(&self.factor, &[factor])?;
        Ok(device.write_f32(&self.finite, &[1.0])?)
    }

    /// Begins the sum of losses anew.
    pub(super) fn forget_loss(&self, device: &dyn Device) -> Result<(), StepError> {
        Ok(device.write(&self.loss, &mut |bytes| bytes.fill(0))?)
    }

    /// Adds token losses, f32 `[N]`.
    pub(super) fn add_losses(&self, device: &dyn Device, losses: &Tensor) -> Result<(), StepError> {
        Ok(device.run(Reduction::AddSum { x: losses, out: &self.loss, finite: &self.finite })?)
    }

    /// Takes the squared norm of a part's gradient.
    pub(super) fn measure(&self, device: &dyn Device, row: u64, gradient: &Tensor) -> Result<(), StepError> {
        let out = rows(&self.squares, row, row + 1)?;
        Ok(device.run(Reduction::SumSquares { x: gradient, out: &out, finite: Some(&self.finite) })?)
    }

    /// Works out the factor that clips gradients, `loss_scale` times too large, to a global norm.
    pub(super) fn clip(&self, device: &dyn Device, max_norm: f64, loss_scale: f64) -> Result<(), StepError> {
        let (squares, out) = (&self.squares, &self.factor);
        Ok(device.run(Reduction::ClipFactor { squares, max_norm, loss_scale, out })?)
    }

    /// What updates are to take note of.
    pub(super) fn control(&self) -> Control<'_> {
        Control { factor: Some(&self.factor), flag: Some(&self.finite) }
    }

    /// Room for one f32 that no step needs between its steps.
    pub(super) fn spare(&self) -> Result<Tensor, StepError> {
        rows(&self.squares, 0, 1)
    }

    #[cfg(test)]
    pub(super) fn set_squares(&self, device: &dyn Device, squares: &[f32]) -> Result<(), StepError> {
        Ok(device.write_f32(&self.squares, squares)?)
    }

    /// Reads what has been found. A device without memory has found nothing.
    pub(super) fn read(&self, device: &dyn Device) -> Result<Found, StepError> {
        let mut found = Found { loss: 0.0, squares: vec![0.0; self.squares.elements() as usize] };
        device.read(&self.all, &mut |bytes| {
            let (before, squares) = bytes.split_at(BEFORE_SQUARES.min(bytes.len()));
            found.loss = before.first_chunk().map_or(f64::NAN, |loss| f64::from_ne_bytes(*loss));
            let squares = squares.as_chunks().0.iter().map(|square| f32::from_ne_bytes(*square));
            found.squares.iter_mut().zip(squares).for_each(|(out, square)| *out = square);
        })?;
        Ok(found)
    }
}
