//! The tokens that may come next, with their logits.

/// A token and its logit, which is neither NaN nor minus zero.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Candidate {
    pub token: u32,
    pub logit: f64,
}

/// Candidates: by token until a step sorts them, then the likeliest first.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidates {
    all: Vec<Candidate>,
}

/// The likeliest first; of equal ones the lower token.
fn likelier(left: &Candidate, right: &Candidate) -> std::cmp::Ordering {
    right.logit.total_cmp(&left.logit).then(left.token.cmp(&right.token))
}

/// A logit with an order: no number is minus infinity, and minus zero is zero.
fn comparable(logit: f64) -> f64 {
    if logit.is_nan() { f64::NEG_INFINITY } else { logit + 0.0 }
}

/// The likeliest token; the first of equal ones. Logits that are no number count as minus infinity.
pub fn likeliest(logits: &[f32]) -> Option<u32> {
    const LANES: usize = 16;
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let higher = |best: &mut f32, logit: &f32| *best = if *logit > *best { *logit } else { *best };
    let chunks = logits.chunks_exact(LANES);
    let rest = chunks.remainder();
    chunks.for_each(|chunk| lanes.iter_mut().zip(chunk).for_each(|(best, logit)| higher(best, logit)));
    let mut best = f32::NEG_INFINITY;
    lanes.iter().chain(rest).for_each(|logit| higher(&mut best, logit));
    let is_best = |logit: &f32| *logit == best || (logit.is_nan() && best == f32::NEG_INFINITY);
    (0..).zip(logits).find(|(_, logit)| is_best(logit)).map(|(token, _)| token)
}

impl Candidates {
    pub fn new(logits: &[f32]) -> Candidates {
        let all = (0..).zip(logits).map(|(token, l)| Candidate { token, logit: comparable(f64::from(*l)) });
        Candidates { all: all.collect() }
    }

    /// Changes every logit.
    pub fn map(&mut self, mut change: impl FnMut(Candidate) -> f64) {
        for candidate in &mut self.all {
            candidate.logit = comparable(change(*candidate));
        }
    }

    /// Drops all but those that `keep`; at least the likeliest one stays.
    pub fn retain(&mut self, mut keep: impl FnMut(Candidate) -> bool) {
        let best = self.best();
        self.all.retain(|candidate| keep(*candidate) || Some(*candidate) == best);
    }

    /// Drops all but the likeliest.
    pub fn keep_best(&mut self) {
        self.all = self.best().into_iter().collect();
    }

    /// Drops all but the `most` likeliest.
    pub fn keep_likeliest(&mut self, most: usize) {
        let most = most.max(1);
        if most < self.all.len() {
            self.all.select_nth_unstable_by(most, likelier);
            self.all.truncate(most);
        }
        self.all.sort_unstable_by(likelier);
    }

    /// Sorts the candidates, the lowest `key` first, and keeps the first ones that together have the
    /// probability `mass`.
    pub fn keep_mass_by(&mut self, mass: f64, key: impl Fn(f64) -> f64) {
        let probabilities = self.probabilities();
        let mut sorted: Vec<(f64, f64, Candidate)> =
            (probabilities.iter().zip(&self.all)).map(|(p, candidate)| (key(*p), *p, *candidate)).collect();
        sorted.sort_unstable_by(|a, b| a.0.total_cmp(&b.0).then(likelier(&a.2, &b.2)));
        let mut sum = 0.0;
        let enough = sorted.iter().position(|(_, p, _)| {
            sum += p;
            sum >= mass
        });
        sorted.truncate(enough.map_or(usize::MAX, |last| last + 1));
        self.all = sorted.into_iter().map(|(_, _, candidate)| candidate).collect();
    }

    /// The likeliest one; of equal ones the lowest token.
    pub fn best(&self) -> Option<Candidate> {
        self.all.iter().copied().min_by(likelier)
    }

    /// The token, where there is but one.
    pub fn only(&self) -> Option<u32> {
        match self.all.as_slice() {
            [only] => Some(only.token),
            _ => None,
        }
    }

    /// Softmax, in the candidates' order. Infinite logits share all of it; where all are minus infinity, all
    /// are alike.
    pub fn probabilities(&self) -> Vec<f64> {
        let best = self.best().map_or(0.0, |best| best.logit);
        let weight = |candidate: &Candidate| match best.is_finite() {
            true => (candidate.logit - best).exp(),
            false => f64::from(u8::from(candidate.logit == best)),
        };
        let weights: Vec<f64> = self.all.iter().map(weight).collect();
        let total: f64 = weights.iter().sum();
        weights.into_iter().map(|weight| weight / total).collect()
    }

    /// The token at a place in [0, 1) of the candidates' probabilities laid end to end.
    pub fn draw(&self, place: f64) -> Option<u32> {
        let mut left = place;
        for (probability, candidate) in self.probabilities().iter().zip(&self.all) {
            left -= probability;
            if left < 0.0 {
                return Some(candidate.token);
            }
        }
        // Rounding may leave a little.
        self.best().map(|best| best.token)
    }

    #[cfg(test)]
    pub fn as_slice(&self) -> &[Candidate] {
        &self.all
    }
}
