//! A run that is asked to stop: wherever the wish comes, it ends after a step with a checkpoint of that step, and goes on from
//! there to the bits of a run that was never stopped. One that was at its last step has finished.

use std::path::Path;

use plimsoll_plan::config::RawConfig;
use plimsoll_train::{MemoryReading, Observer, Prepared, RunEvent, StopFlag, Surroundings, TrainingOutcome};

use crate::common::{cpu, machine};

const STEPS: u64 = 6;

fn config(folder: &Path, out: &str, set: &[&str]) -> RawConfig {
    let words: String = (0..200).map(|i| format!("word{} ", i * 7 % 23)).collect();
    std::fs::write(folder.join("text.txt"), words).unwrap();
    let text = format!(
        "
model:
  from_scratch: {{hidden_size: 16, intermediate_size: 24, num_hidden_layers: 1, num_attention_heads: 2}}
data: {{train: '{0}', validation: '{0}', sequence_length: 16}}
training: {{steps: {STEPS}, batch_size: 2, learning_rate: 1e-2, mixed_precision: f32}}
memory: {{device_budget: 256MiB}}
output: {{dir: '{1}', save_steps: 0, eval_steps: 1}}
",
        folder.join("text.txt").display(),
        folder.join(out).display()
    );
    let mut config = RawConfig::from_str(&text, "test").unwrap();
    set.iter().for_each(|assignment| config.apply_set(assignment).unwrap());
    config
}

/// Where in a run the wish comes.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Place {
    /// While the device is made, before there is anything to train.
    Device,
    Started,
    /// While the validation's result is told.
    Validated(u64),
    /// When the metrics are written.
    Step(u64),
    /// While the memory is judged.
    Judge(u64),
    /// When a checkpoint is written.
    Saved(u64),
    Nowhere,
}

/// Raises the flag at its place.
struct Watcher {
    place: Place,
    stop: StopFlag,
    step: u64,
    stopping: Vec<(u64, bool)>,
}

impl Watcher {
    fn pass(&self, place: Place) {
        if self.place == place {
            self.stop.raise();
        }
    }
}

impl Observer for Watcher {
    fn event(&mut self, event: RunEvent<'_>) {
        match event {
            RunEvent::Started { .. } => self.pass(Place::Started),
            RunEvent::Validated { step, .. } => self.pass(Place::Validated(step)),
            RunEvent::Step(metrics) => {
                self.step = metrics.step;
                self.pass(Place::Step(metrics.step));
            }
            RunEvent::Saved(_) => self.pass(Place::Saved(self.step)),
            RunEvent::Stopping { step, saving } => self.stopping.push((step, saving)),
            _ => {}
        }
    }
}

fn run(config: RawConfig, resume: bool, place: Place) -> (TrainingOutcome, Vec<(u64, bool)>) {
    let prepared = Prepared::new(config, resume).unwrap();
    let plan = prepared.plan(&machine()).unwrap();
    let stop = StopFlag::new();
    let mut watcher = Watcher { place, stop: stop.clone(), step: 0, stopping: Vec::new() };
    let mut judged = 0;
    let surroundings = Surroundings {
        device: &mut |bytes| {
            if place == Place::Device {
                stop.raise();
            }
            cpu(bytes)
        },
        memory: &mut || {
            judged += 1;
            if place == Place::Judge(judged) {
                stop.raise();
            }
            MemoryReading::default()
        },
        observer: &mut watcher,
        stop: stop.clone(),
        ranks: &plimsoll_parallel::Solo,
    };
    let outcome = prepared.run(&[plan], surroundings).unwrap();
    (outcome, watcher.stopping)
}

fn model(run: &Path) -> Vec<u8> {
    std::fs::read(run.join("model.safetensors")).unwrap()
}

#[test]
fn wherever_the_wish_comes_a_checkpoint_of_the_last_step_is_left_and_the_run_goes_on_from_it() {
    let folder = tempfile::tempdir().unwrap();
    let (finished, _) = run(config(folder.path(), "whole", &[]), false, Place::Nowhere);
    assert!(finished.report.finished);
    for (index, (place, step)) in [
        (Place::Validated(2), 2),
        (Place::Step(2), 2),
        // It was asked before: the wish is heard after the next step.
        (Place::Judge(2), 3),
    ]
    .into_iter()
    .enumerate()
    {
        let out = format!("stopped-{index}");
        let (outcome, stopping) = run(config(folder.path(), &out, &[]), false, place);
        let run_folder = folder.path().join(&out);
        assert!(!outcome.report.finished, "{place:?}");
        assert_eq!((outcome.report.steps, stopping), (step, vec![(step, true)]), "{place:?}");
        assert_eq!(outcome.checkpoint, Some(run_folder.join(format!("checkpoint-{step}"))), "{place:?}");
        assert!(!run_folder.join("model.safetensors").exists(), "{place:?}");
        let (outcome, _) = run(config(folder.path(), &out, &[]), true, Place::Nowhere);
        assert!(outcome.report.finished, "{place:?}");
        assert!(model(&run_folder) == model(&folder.path().join("whole")), "{place:?}: other bits");
    }
}

#[test]
fn a_wish_while_a_checkpoint_is_written_is_heard_after_the_next_step() {
    let folder = tempfile::tempdir().unwrap();
    let saving = config(folder.path(), "out", &["output.save_steps=2"]);
    let (outcome, stopping) = run(saving, false, Place::Saved(2));
    assert_eq!((outcome.report.steps, stopping), (3, vec![(3, true)]));
    assert!(folder.path().join("out/checkpoint-3").exists());
}

#[test]
fn a_wish_before_the_first_step_leaves_things_as_they_were() {
    let folder = tempfile::tempdir().unwrap();
    for place in [Place::Device, Place::Started] {
        let (outcome, stopping) = run(config(folder.path(), "out", &[]), false, place);
        assert_eq!((outcome.report.steps, outcome.report.finished), (0, false), "{place:?}");
        assert_eq!((outcome.checkpoint, stopping), (None, vec![(0, false)]), "{place:?}");
    }
    run(config(folder.path(), "out", &[]), false, Place::Step(4));
    let (outcome, stopping) = run(config(folder.path(), "out", &[]), true, Place::Device);
    assert_eq!((outcome.report.steps, outcome.report.finished), (4, false));
    assert_eq!(stopping, [(4, false)]);
    let (outcome, _) = run(config(folder.path(), "out", &[]), true, Place::Nowhere);
    assert_eq!((outcome.report.steps, outcome.report.finished), (STEPS, true));
}

#[test]
fn a_run_that_reached_its_last_step_has_finished() {
    let folder = tempfile::tempdir().unwrap();
    for (index, place) in
        [Place::Validated(STEPS), Place::Step(STEPS), Place::Saved(STEPS)].into_iter().enumerate()
    {
        let out = format!("out-{index}");
        let (outcome, stopping) = run(config(folder.path(), &out, &[]), false, place);
        assert!(outcome.report.finished && stopping.is_empty(), "{place:?}");
        assert!(folder.path().join(out).join("model.safetensors").exists(), "{place:?}");
    }
}

/// One that was ended between its last checkpoint and its model writes the model, whatever is wished for.
#[test]
fn a_run_whose_steps_are_all_done_has_finished_whatever_is_wished_for() {
    let folder = tempfile::tempdir().unwrap();
    let saving = || config(folder.path(), "out", &["output.save_steps=3"]);
    run(saving(), false, Place::Nowhere);
    let out = folder.path().join("out");
    std::fs::remove_file(out.join("report.json")).unwrap();
    std::fs::remove_file(out.join("model.safetensors")).unwrap();
    let (outcome, stopping) = run(saving(), true, Place::Device);
    assert_eq!((outcome.report.steps, outcome.report.finished, stopping), (STEPS, true, vec![]));
    assert!(out.join("model.safetensors").exists());
}
