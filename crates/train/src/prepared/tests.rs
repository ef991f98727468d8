//! What a configuration means to a run, in numbers.

use plimsoll_plan::{ProcessLimits, Rates};

use super::*;

fn config(text: &str) -> RawConfig {
    RawConfig::from_str(text, "test").unwrap()
}

/// Eight bytes of a token, twelve or sixteen of a token of samples: for every batch that is made ahead, and one in use.
#[test]
fn the_pipeline_holds_so_many_bytes_of_a_token() {
    let bytes = |data: &str| host_bytes_per_token(&config(&format!("data: {{{data}}}")));
    assert_eq!(bytes("prefetch_factor: 3"), 8 * 4);
    assert_eq!(bytes("prefetch_factor: 3, format: chat"), 16 * 4);
    assert_eq!(bytes("prefetch_factor: 3, format: chat, packing: false"), 12 * 4);
    assert_eq!(bytes("prefetch_factor: 2, num_workers: 8"), 8 * 17);
    assert_eq!(bytes("prefetch_factor: 3, num_workers: 0"), 8);
    assert_eq!(bytes("num_workers: 0, format: instruction"), 16);
}

#[test]
fn batches_are_made_ahead_unless_nobody_works() {
    let ahead = |data: &str| workers(&config(&format!("data: {{{data}}}"))).ahead();
    assert_eq!(ahead("prefetch_factor: 3"), 3);
    assert_eq!(ahead("prefetch_factor: 5, num_workers: 4"), 20);
    assert_eq!(ahead("prefetch_factor: 5, num_workers: 0"), 0);
}

#[test]
fn the_buffer_before_the_tokenizer_has_the_size_that_was_said() {
    let bytes = |data: &str| buffer_bytes(&config(&format!("data: {{{data}}}")));
    assert_eq!(bytes("buffer_size: 3MiB"), 3 << 20);
    assert_eq!(bytes("format: text"), 64 << 10);
}

/// What the process has taken at most is no less than what it has taken.
#[test]
#[cfg(target_os = "linux")]
fn the_most_that_the_process_has_taken_is_known() {
    let mine = std::hint::black_box(vec![1u8; 64 << 20]);
    assert!(highest_so_far() >= std::hint::black_box(&mine).len() as u64);
}

/// A run of two steps of six sequences.
fn prepared(folder: &Path, set: &[&str]) -> Prepared {
    let words: String = (0..200).map(|i| format!("word{} ", i * 7 % 23)).collect();
    std::fs::write(folder.join("text.txt"), words).unwrap();
    let mut config = config(&format!(
        "
model:
  from_scratch: {{hidden_size: 16, intermediate_size: 24, num_hidden_layers: 1, num_attention_heads: 2}}
data: {{train: '{}', sequence_length: 16}}
training: {{steps: 2, batch_size: 2, gradient_accumulation_steps: 3, learning_rate: 1e-2, mixed_precision: f32}}
memory: {{device_budget: 256MiB}}
output: {{dir: '{}'}}
",
        folder.join("text.txt").display(),
        folder.join("out").display()
    ));
    set.iter().for_each(|assignment| config.apply_set(assignment).unwrap());
    Prepared::new(config, false).unwrap()
}

fn machine() -> Machine {
    let rates = Rates::of_cpu([1e10, 1e10], 1e10, 1e8);
    let limits = ProcessLimits::NONE;
    Machine {
        rates,
        limits,
        overhead_bytes: 0,
        host_bytes_per_token: 40,
        worker_bytes: 0,
        disk_available: None,
        disk_reserved: 0,
        device_bytes: None,
        host_bytes: None,
    }
}

#[test]
fn the_settings_of_a_run_are_those_of_its_configuration() {
    let folder = tempfile::tempdir().unwrap();
    let settings = |set: &[&str]| {
        let prepared = prepared(folder.path(), set);
        assert_eq!(prepared.config().training.steps, Some(2));
        assert!(prepared.resumption().is_none());
        let plan = prepared.plan(&machine()).unwrap();
        let settings = prepared.run_settings(&plan, Path::new("elsewhere"));
        assert!(settings.planned.process_bytes >= plan.process_bytes().max(1 << 20));
        settings
    };
    let plain = settings(&["output.save_steps=0", "output.eval_steps=0"]);
    assert_eq!((plain.save_steps, plain.eval_steps), (None, None));
    assert_eq!((plain.accumulation, plain.schedule.total_steps), (3, 2));
    assert_eq!((plain.skip_not_finite, plain.silent, plain.final_model), (false, false, true));
    assert_eq!((plain.output.as_path(), plain.schedule.learning_rate), (Path::new("elsewhere"), 1e-2));
    let other = settings(&[
        "output.save_steps=1",
        "output.eval_steps=5",
        "training.not_finite=skip",
        "memory.silent_mode=true",
        // Six sequences a step are twice as many.
        "training.reference_batch_size=3",
        "training.learning_rate_scaling=linear",
    ]);
    assert_eq!((other.save_steps, other.eval_steps), (Some(1), Some(5)));
    assert_eq!((other.skip_not_finite, other.silent), (true, true));
    assert_eq!(other.schedule.learning_rate, 2e-2);
}
