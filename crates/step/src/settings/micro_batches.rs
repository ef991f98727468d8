//! The data of a step: its micro-batches.

/// One forward and backward pass's worth of tokens, sequence after sequence. A device without memory takes empty slices for
/// any number of tokens: a plan needs no contents.
#[derive(Clone, Copy, Debug)]
pub struct MicroBatch<'a> {
    /// Token ids, `batch_size * sequence_length`.
    pub tokens: &'a [u32],
    /// What each position predicts; [`IGNORED_TARGET`](plimsoll_device::IGNORED_TARGET) where nothing.
    pub targets: &'a [u32],
    /// What each target counts in the loss, which is `sum(weight * loss) / sum(weight)`; `None`: one each. 0 or more,
    /// finite.
    pub weights: Option<&'a [f32]>,
    /// For every token the place in its sequence where its document begins: a token sees nothing before it, and
    /// positions are counted from it. `None` leaves this to [`StepSettings::document_end`](super::StepSettings::document_end).
    pub document_starts: Option<&'a [u32]>,
}

impl<'a> MicroBatch<'a> {
    /// Tokens and targets that count alike, in sequences of one document each.
    pub fn new(tokens: &'a [u32], targets: &'a [u32]) -> MicroBatch<'a> {
        MicroBatch { tokens, targets, weights: None, document_starts: None }
    }

    /// Positions that count in the loss.
    pub fn target_count(&self) -> u64 {
        self.targets.iter().filter(|t| **t != plimsoll_device::IGNORED_TARGET).count() as u64
    }

    /// What they count in all: the sum of their weights, their number where there are none.
    pub fn target_weight(&self) -> f64 {
        let Some(weights) = self.weights else { return self.target_count() as f64 };
        let counted = self.targets.iter().zip(weights);
        let counted = counted.filter(|(target, _)| **target != plimsoll_device::IGNORED_TARGET);
        counted.map(|(_, weight)| f64::from(*weight)).sum()
    }
}

/// The micro-batches of an optimizer step.
#[derive(Clone, Copy, Debug)]
pub(crate) enum MicroBatches<'a> {
    These(&'a [MicroBatch<'a>]),
    /// One, so many times: what a plan is made with.
    Alike(&'a MicroBatch<'a>, u64),
}

impl<'a> MicroBatches<'a> {
    pub fn len(&self) -> u64 {
        match self {
            MicroBatches::These(all) => all.len() as u64,
            MicroBatches::Alike(_, times) => *times,
        }
    }

    /// Some of them, from `first` on; fewer than `most` at the end.
    pub fn group(&self, first: u64, most: u64) -> Vec<MicroBatch<'a>> {
        let end = first.saturating_add(most).min(self.len());
        match self {
            MicroBatches::These(all) => (first..end).filter_map(|i| all.get(i as usize).copied()).collect(),
            MicroBatches::Alike(one, _) => (first..end).map(|_| **one).collect(),
        }
    }

    /// Positions that count in the loss.
    pub fn target_count(&self) -> u64 {
        match self {
            MicroBatches::These(all) => all.iter().map(MicroBatch::target_count).sum(),
            MicroBatches::Alike(one, times) => one.target_count().saturating_mul(*times),
        }
    }

    /// What they count in all.
    pub fn target_weight(&self) -> f64 {
        match self {
            MicroBatches::These(all) => all.iter().map(MicroBatch::target_weight).sum(),
            MicroBatches::Alike(one, times) => one.target_weight() * *times as f64,
        }
    }
}
