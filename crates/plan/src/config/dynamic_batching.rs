//! `training.dynamic_batching`: micro-batches that grow and shrink with the memory that there is, while the effective batch stays. Which
//! sizes there are follows from these keys; when a run goes from one to another is left to the run.

use super::error::conflicts;
use super::section::section;
use super::{Auto, ConfigError, RawConfig};

section! {
    /// Micro-batches that grow and shrink with the memory that there is.
    pub struct DynamicBatching at "training.dynamic_batching" {
        /// Whether a run goes to smaller micro-batches where memory gets short, and to larger ones where there is room. The
        /// effective batch and the order of the data stay.
        enabled: bool = false;
        /// The smallest micro-batch.
        min_batch_size: u64 = 1, COUNT;
        /// The largest micro-batch.
        max_batch_size: u64, "the sequences of an optimizer step", COUNT;
        /// The share of what there is that a larger micro-batch may fill.
        target_memory_utilization: f64, "memory.target_utilization", SHARE;
        /// Steps for which there has to be room before the micro-batch grows.
        adjustment_frequency: u64 = 100, AT_LEAST_ONE;
        /// Whether the micro-batch goes one size at a time; at emergency it goes to the size that fits.
        smooth_transitions: bool = true;
    }
}

/// Sizes of micro-batches between which a run goes, at most: each is a plan.
const MOST_SIZES: usize = 12;

impl DynamicBatching {
    /// Whether micro-batches of so many sequences are within the limits.
    pub fn allows(&self, batch_size: u64) -> bool {
        batch_size >= self.min_batch_size() && self.max_batch_size.is_none_or(|most| batch_size <= most)
    }

    /// The micro-batches that make up `effective` sequences, the largest first: all where they are few, else some of them that lie
    /// evenly among them, with the first and the last.
    pub fn sizes(&self, effective: u64) -> Vec<u64> {
        let root = (1..).take_while(|n: &u64| n.saturating_mul(*n) <= effective);
        let pairs = root.filter(|n| effective.is_multiple_of(*n)).flat_map(|n| [n, effective / n]);
        let mut all: Vec<u64> = pairs.filter(|size| self.allows(*size)).collect();
        all.sort_unstable_by(|a, b| b.cmp(a));
        all.dedup();
        let (count, last) = (all.len(), all.len().saturating_sub(1));
        if count <= MOST_SIZES {
            return all;
        }
        (0..MOST_SIZES).filter_map(|i| all.get(i * last / (MOST_SIZES - 1)).copied()).collect()
    }
}

impl RawConfig {
    /// The keys of dynamic batches, where they are on. Several ranks keep the plan that they begin with.
    pub fn dynamic_batching(&self) -> Option<&DynamicBatching> {
        let alone = self.started.is_none_or(|started| started.ranks <= 1);
        Some(&self.training.dynamic_batching).filter(|dynamic| alone && dynamic.enabled())
    }

    pub(super) fn check_dynamic_batching(&self, errors: &mut Vec<ConfigError>) {
        let Some(dynamic) = self.dynamic_batching() else { return };
        let least = dynamic.min_batch_size();
        let min = self.conflicting("training.dynamic_batching.min_batch_size", least);
        if let Some(most) = dynamic.max_batch_size.filter(|most| *most < least) {
            let max = self.conflicting("training.dynamic_batching.max_batch_size", most);
            let mut conflict = conflicts(min, errors);
            conflict(max, "no micro-batch is at least one and at most the other", "swap them");
            return;
        }
        let enabled = self.conflicting("training.dynamic_batching.enabled", true);
        if let Auto::Set(batch) = self.training.batch_size()
            && !dynamic.allows(batch)
        {
            // What is no micro-batch is said already.
            if errors.iter().any(|error| error.is_range_of("training.batch_size")) {
                return;
            }
            let batch = self.conflicting("training.batch_size", batch);
            let mut conflict = conflicts(enabled, errors);
            let reason = "a run begins with a micro-batch between min_batch_size and max_batch_size";
            conflict(batch, reason, "set it to a number between them, or to auto");
            return;
        }
        let effective = self.batch_settings().ok().and_then(|batch| batch.effective_batch_size);
        if let Some(effective) = effective.filter(|effective| dynamic.sizes(*effective).is_empty()) {
            let whole = self.conflicting("training.effective_batch_size", effective);
            let mut conflict = conflicts(enabled, errors);
            let reason = "no number between min_batch_size and max_batch_size divides the effective batch";
            conflict(whole, reason, "set a smaller min_batch_size, or a larger max_batch_size");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(text: &str) -> RawConfig {
        RawConfig::from_str(text, "test").unwrap()
    }

    #[test]
    fn sizes_divide_the_effective_batch() {
        let sizes = |keys: &str, effective| {
            config(&format!("training: {{dynamic_batching: {{{keys}}}}}"))
                .training
                .dynamic_batching
                .sizes(effective)
        };
        assert_eq!(sizes("min_batch_size: 4, max_batch_size: 16", 48), [16, 12, 8, 6, 4]);
        assert_eq!(sizes("", 12), [12, 6, 4, 3, 2, 1]);
        assert_eq!(sizes("min_batch_size: 2", 7), [7]);
        assert_eq!(sizes("min_batch_size: 5, max_batch_size: 6", 8), [0; 0]);
        let many = sizes("", 5040);
        assert_eq!((many.len(), many[0], many[MOST_SIZES - 1]), (MOST_SIZES, 5040, 1));
        assert!(many.is_sorted_by(|a, b| a > b));
    }

    #[test]
    fn what_cannot_be_is_refused_with_its_keys() {
        let wrong = |keys: &str| {
            let text = format!(
                "model: m\ntraining: {{dynamic_batching: {{enabled: true, min_batch_size: 4, max_batch_size: 16}}, {keys}}}"
            );
            config(&text).validate().err().map(|error| error.to_string())
        };
        assert_eq!(wrong("batch_size: 12, gradient_accumulation_steps: 4"), None);
        assert_eq!(wrong("effective_batch_size: 48"), None);
        assert!(wrong("batch_size: 2").unwrap().contains("training.batch_size"));
        assert!(wrong("effective_batch_size: 3").unwrap().contains("divides the effective batch"));
        let text =
            "model: m\ntraining: {dynamic_batching: {enabled: true, min_batch_size: 4, max_batch_size: 2}}";
        assert!(config(text).validate().unwrap_err().to_string().contains("swap them"));
        // Off, they say nothing.
        config(&text.replace("true", "false")).validate().unwrap();
    }
}
