//! A note on a warm-up that is longer than its run.

use plimsoll_plan::config::RawConfig;

/// What to know of a run of so many steps whose learning rate still rises at its end. A warm-up that is a share of the steps is never
/// longer than they are.
pub fn note(config: &RawConfig, steps: u64) -> Option<String> {
    let warmup = config.training.warmup_steps();
    (warmup > steps).then(|| {
        let of_run = if steps == 1 { "a step".to_owned() } else { format!("{steps} steps") };
        format!(
            "note: training.warmup_steps is {warmup} and the run has {of_run}, so that the learning rate never reaches its peak, \
             training.learning_rate; lower training.warmup_steps, set training.warmup_ratio instead, or raise training.steps or \
             training.epochs"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_warm_up_that_is_longer_than_the_run_is_noted() {
        let config = |keys: &str| RawConfig::from_str(&format!("training: {{{keys}}}"), "c.yaml").unwrap();
        let text = note(&config("warmup_steps: 100"), 99).unwrap();
        for words in ["training.warmup_steps is 100", "99 steps", "never reaches its peak"] {
            assert!(text.contains(words), "{text}");
        }
        // The last step of the warm-up has all of the rate.
        assert_eq!(note(&config("warmup_steps: 100"), 100), None);
        assert_eq!(note(&config("warmup_ratio: 1.0"), 1), None);
        assert_eq!(note(&RawConfig::default(), 1), None);
    }
}
