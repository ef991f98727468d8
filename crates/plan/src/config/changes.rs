//! The keys in which two configurations differ.

use std::collections::BTreeMap;
use std::fmt;

use super::RawConfig;

/// A key that has another value than before.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyChange {
    /// The dotted path: `training.learning_rate`.
    pub key: &'static str,
    /// The value before, or in words what stood for it.
    pub before: String,
    /// The value now.
    pub after: String,
}

impl fmt::Display for KeyChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let KeyChange { key, before, after } = self;
        write!(f, "{key}: {before} -> {after}")
    }
}

impl RawConfig {
    /// The keys that have other values than in an earlier configuration, where a key that is left out has its default.
    /// A value that is left to the planner is no change.
    pub fn changes_since(&self, earlier: &RawConfig) -> Vec<KeyChange> {
        let mut before = BTreeMap::new();
        earlier.visit(&mut |entry| {
            before.insert(entry.path, entry.value.map_or_else(entry.default, |value| value.text));
        });
        let mut changes = Vec::new();
        self.visit(&mut |entry| {
            // How ranks divide the work is left to the planner only where that is said; when they exchange what they do is its own choice.
            let divides =
                entry.path.starts_with("parallel.") && entry.path != "parallel.overlap_communication";
            let left_out = entry.value.is_none() && !divides;
            let open = (left_out || entry.value.as_ref().is_some_and(|value| value.text == "auto"))
                && (entry.values)().contains(" | auto");
            let after = entry.value.map_or_else(entry.default, |value| value.text);
            let Some(before) = before.get(entry.path) else { return };
            if after != *before && !open {
                changes.push(KeyChange { key: entry.path, before: before.clone(), after });
            }
        });
        changes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_count_and_what_is_left_to_the_planner_does_not() {
        let earlier = "training: {learning_rate: 1e-3, batch_size: 4, effective_batch_size: 8, steps: 10, warmup_steps: 0}\ndata: {train: a.txt}";
        let earlier = RawConfig::from_str(earlier, "earlier").unwrap();
        let now = "training: {batch_size: auto, steps: 20}\ndata: {train: [a.txt, b.txt], shuffle: false}";
        let now = RawConfig::from_str(now, "now").unwrap();
        let changes: Vec<String> = now.changes_since(&earlier).iter().map(KeyChange::to_string).collect();
        assert_eq!(
            changes,
            [
                "data.train: a.txt -> a.txt, b.txt",
                "data.shuffle: true -> false",
                "training.steps: 10 -> 20",
                "training.learning_rate: 0.001 -> 5e-5",
            ]
        );
        assert_eq!(now.changes_since(&now), []);
        let ranks = RawConfig::from_str("parallel: {data_parallel: 2, overlap_communication: true}", "ranks");
        let same = RawConfig::from_str("parallel: {data_parallel: 2}", "same").unwrap();
        assert_eq!(same.changes_since(&ranks.unwrap()), []);
    }

    #[test]
    fn what_ranks_share_is_no_longer_shared_where_nothing_is_said_of_it() {
        let of = |text: &str| RawConfig::from_str(text, "test").unwrap();
        let earlier = of("parallel: {zero_stage: 2, tensor_parallel: 2}");
        let changes = |now: &str| -> Vec<String> {
            of(now).changes_since(&earlier).iter().map(KeyChange::to_string).collect()
        };
        let words = ["parallel.zero_stage: 2 -> 0", "parallel.tensor_parallel: 2 -> 1"];
        assert_eq!(
            changes("model: m"),
            ["model.path: none; from_scratch is given instead -> m", words[0], words[1]]
        );
        assert_eq!(changes("parallel: {zero_stage: auto, tensor_parallel: auto}"), [""; 0]);
    }
}
