//! The numbers of a step that stay on the device until its end: what the loss adds up to, the squared norms of gradients, and
//! what updates make of them. The host reads them once, behind the last update.

use std::ops::Range;

use plimsoll_device::{
    Collective, DType, Device, DeviceExt, Elementwise, ExactSum, Reduction, Rounding, Tensor,
};
use plimsoll_memory::{Phase, Tag};
use plimsoll_parallel::{Collectives, Communicator};

use crate::StepError;
use crate::head::rows;
use crate::optimizer::Control;
use crate::stage::Stage;

use super::parts::Part;
use super::pipeline::Model;

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
    /// U8 `[parts, ExactSum::BYTES]`: those of this rank's shares, where ranks have shares of gradients.
    shares: Option<Tensor>,
    norms: NormRows,
}

/// Where squared norms are: in the order of the whole model's layers, which ranks have in runs.
#[derive(Clone, Debug)]
pub(super) struct NormRows {
    /// Parts that each rank measures of each of its runs, for each round rank after rank.
    parts: Vec<Vec<u64>>,
    /// This one's place among the ranks.
    place: usize,
}

impl NormRows {
    /// Those of a rank with all layers.
    pub fn alone(parts: u64) -> NormRows {
        NormRows { parts: vec![vec![parts]], place: 0 }
    }

    /// Those of a rank with some of the layers: of each of its runs so many parts.
    pub fn among(stage: &Stage, own: Vec<u64>) -> NormRows {
        let (mut parts, place) = (stage.parts.clone(), stage.place());
        for (of_round, own) in parts.iter_mut().zip(own) {
            if let Some(parts) = of_round.get_mut(place) {
                *parts = own;
            }
        }
        NormRows { parts, place }
    }

    /// All.
    fn count(&self) -> u64 {
        self.parts.iter().flatten().sum()
    }

    /// This rank's.
    fn own(&self) -> u64 {
        self.parts.iter().filter_map(|of_round| of_round.get(self.place)).sum()
    }

    /// The rows of a rank's run.
    fn rows(&self, round: usize, place: usize) -> Range<u64> {
        let rounds_before = self.parts.iter().take(round).flatten().sum::<u64>();
        let of_round = self.parts.get(round).map(Vec::as_slice).unwrap_or_default();
        let begin = rounds_before + of_round.iter().take(place).sum::<u64>();
        begin..begin + of_round.get(place).copied().unwrap_or(0)
    }

    /// The rows of each of this rank's runs, and the same as it counts its own parts.
    fn own_runs(&self) -> impl Iterator<Item = (Range<u64>, Range<u64>)> {
        let mut end = 0;
        (0..self.parts.len()).map(move |round| {
            let rows = self.rows(round, self.place);
            let begin = end;
            end += rows.end - rows.start;
            (rows, begin..end)
        })
    }
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

    /// What the squared norms of a rank's shares are called, and what they are added up in.
    const SHARES: &str = "norms.own";
    const RECEIVED: &str = "norms.received";
    /// What the squared norms of all ranks are called. Ranks send each other as many bytes whenever these are taken.
    pub const TOTAL: &str = "norms.total";

    /// Bytes of what has this name in the ledger, of a step that measures and updates so many parts, of `all` that all stages of a
    /// pipeline do; `None` of what does not depend on them.
    pub fn bytes_under(name: &str, parts: u64, all: u64) -> Option<u64> {
        match name {
            Numbers::NAME => Some(Numbers::bytes(all)),
            Numbers::SHARES | Numbers::RECEIVED | Numbers::TOTAL => Some(Numbers::share_bytes(parts)),
            _ => None,
        }
    }

    /// Bytes of the squared norms of shares of so many parts.
    pub fn share_bytes(parts: u64) -> u64 {
        parts.max(1).saturating_mul(ExactSum::BYTES as u64)
    }

    /// Bytes of those of a step that measures and updates so many parts.
    pub fn bytes(parts: u64) -> u64 {
        BEFORE_SQUARES as u64 + parts.max(1).saturating_mul(size_of::<f32>() as u64)
    }

    /// Takes memory for those of a step. `shared`: each rank measures its own shares of parts.
    pub(super) fn new(device: &dyn Device, norms: NormRows, shared: bool) -> Result<Numbers, StepError> {
        let (parts, own) = (norms.count(), norms.own());
        let all = device.alloc(DType::U8, &[Numbers::bytes(parts)], Tag::Workspace, Numbers::NAME)?;
        let what = StepError::Invariant { what: "the numbers of a step do not fit their memory" };
        let view = |start, dtype, sizes: &[u64]| all.view(start, dtype, sizes);
        let views = || {
            let [loss, factor] = [view(0, DType::F64, &[1])?, view(8, DType::F32, &[1])?];
            Some([loss, factor, view(12, DType::F32, &[1])?, view(16, DType::F32, &[parts.max(1), 1])?])
        };
        let [loss, factor, finite, squares] = views().ok_or(what)?;
        let sums = [own.max(1), ExactSum::BYTES as u64];
        let shares = shared.then(|| device.alloc(DType::U8, &sums, Tag::Communication, Numbers::SHARES));
        Ok(Numbers { all, loss, factor, finite, squares, shares: shares.transpose()?, norms })
    }

    /// Begins a step, with this factor on its gradients until another is found.
    pub(super) fn begin(&self, device: &dyn Device, factor: f32) -> Result<(), StepError> {
        self.forget_loss(device)?;
        // A rank measures nothing of what it has no share of.
        if let Some(shares) = &self.shares {
            device.write(shares, &mut |bytes| bytes.fill(0))?;
        }
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
    pub(super) fn measure(
        &self,
        device: &dyn Device,
        part: &Part,
        gradient: &Tensor,
    ) -> Result<(), StepError> {
        let row = self.row_of(part);
        let out = rows(&self.squares, row, row + 1)?;
        Ok(device.run(Reduction::SumSquares { x: gradient, out: &out, finite: Some(&self.finite) })?)
    }

    /// Takes the squared norm of this rank's share of a part's gradient.
    pub(super) fn measure_share(
        &self,
        device: &dyn Device,
        part: &Part,
        x: &Tensor,
    ) -> Result<(), StepError> {
        let row = part.norm_row;
        let what = StepError::Invariant { what: "a share was measured where ranks have none" };
        let sum = rows(self.shares.as_ref().ok_or(what)?, row, row + 1)?;
        device.run(Reduction::ExactSquares { x, out: &sum })?;
        let row = self.row_of(part);
        let out = rows(&self.squares, row, row + 1)?;
        Ok(device.run(Reduction::RoundExact { x: &sum, out: &out, finite: &self.finite })?)
    }

    /// Has every rank know what all have found: whether everything is finite, and the squared norms of whole parts.
    /// `sharers` have shares of the same gradients, `replicas` the same weights.
    pub(super) fn agree(
        &self,
        device: &dyn Device,
        sharers: &dyn Communicator,
        replicas: &dyn Communicator,
    ) -> Result<(), StepError> {
        if replicas.is_alone() {
            return Ok(());
        }
        device.enter(Phase::Optimizer, None);
        if let Some(own) = self.shares.as_ref().filter(|_| self.norms.own() > 0) {
            let alloc = |name| device.alloc(DType::U8, own.shape().dims(), Tag::Communication, name);
            let (total, received) = (alloc(Numbers::TOTAL)?, alloc(Numbers::RECEIVED)?);
            device.write(&total, &mut |bytes| bytes.fill(0))?;
            device.run(Reduction::AddExact { x: own, out: &total })?;
            for (to, from) in sharers.rounds() {
                let (send, receive) = (Some((to, own)), Some((from, &received)));
                sharers.send_receive(device, Collective::AllReduce, send, receive)?;
                device.run(Reduction::AddExact { x: &received, out: &total })?;
            }
            for (out, own) in self.norms.own_runs().filter(|(out, _)| !out.is_empty()) {
                let x = &rows(&total, own.start, own.end)?;
                let (out, finite) = (&rows(&self.squares, out.start, out.end)?, &self.finite);
                device.run(Reduction::RoundExact { x, out, finite })?;
            }
        }
        self.agree_on_flag(device, replicas)
    }

    /// Where the squared norm of a part is.
    pub(super) fn row_of(&self, part: &Part) -> u64 {
        let row =
            |(rows, own): (Range<u64>, Range<u64>)| Some(rows.start + part.norm_row.checked_sub(own.start)?);
        self.norms.own_runs().filter_map(row).last().unwrap_or(part.norm_row)
    }

    /// Has the ranks of a whole model know the norms of all of it, when those with the same part have agreed.
    pub(super) fn agree_in_model(&self, device: &dyn Device, model: &Model<'_>) -> Result<(), StepError> {
        for round in 0..self.norms.parts.len() {
            let squares = |place: u32| {
                let rows = self.norms.rows(round, place as usize);
                self.squares.slice_rows(rows).filter(|rows| rows.elements() > 0)
            };
            model.ranks.all_gather(device, Collective::AllGather, &squares)?;
        }
        self.agree_on_flag(device, &*model.ranks)
    }

    /// Has every rank know whether everything that all have found is finite.
    pub(super) fn agree_on_flag(
        &self,
        device: &dyn Device,
        ranks: &dyn Communicator,
    ) -> Result<(), StepError> {
        if ranks.is_alone() {
            return Ok(());
        }
        let own = device.alloc(DType::F32, &[1], Tag::Communication, "flag.own")?;
        let received = device.alloc(DType::F32, &[1], Tag::Communication, "flag.received")?;
        device.run(Elementwise::Cast { x: &self.finite, out: &own, rounding: Rounding::Nearest })?;
        for (to, from) in ranks.rounds() {
            let (send, receive) = (Some((to, &own)), Some((from, &received)));
            ranks.send_receive(device, Collective::AllReduce, send, receive)?;
            device.run(Elementwise::ScaleBy { x: &self.finite, factor: &received })?;
        }
        Ok(())
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
