//! A run that memory is taken away from: it steps down, climbs back, and ends with the model of a run that never moved.

use std::cell::Cell;
use std::path::Path;

use plimsoll_device::{Cpu, CpuOptions, Device, DeviceError, Lent, Op, Tensor};
use plimsoll_memory::{Arena, ByteSize, Loan, OutOfMemory, Tag, TagBytes, Tier};
use plimsoll_plan::config::RawConfig;
use plimsoll_plan::{Machine, TrainingPlan};
use plimsoll_train::{
    MemoryReading, Observer, Prepared, RunEvent, StopFlag, Surroundings, TrainError, TrainingOutcome,
    host_bytes_per_token,
};
use serde_json::Value;

use crate::common::{cpu, machine};

const STEPS: u64 = 24;

fn config(folder: &Path, out: &str, set: &[&str]) -> RawConfig {
    let words: String = (0..400).map(|i| format!("word{} ", i * 7 % 23)).collect();
    std::fs::write(folder.join("text.txt"), words).unwrap();
    let text = format!(
        "
model:
  from_scratch: {{hidden_size: 32, intermediate_size: 64, num_hidden_layers: 4, num_attention_heads: 2}}
data: {{train: '{}', sequence_length: 16}}
training: {{steps: {STEPS}, effective_batch_size: 8, batch_size: 8, learning_rate: 1e-2, mixed_precision: f32}}
memory: {{device_budget: 256MiB}}
output: {{dir: '{}', save_steps: 0}}
",
        folder.join("text.txt").display(),
        folder.join(out).display()
    );
    let mut config = RawConfig::from_str(&text, "test").unwrap();
    set.iter().for_each(|assignment| config.apply_set(assignment).unwrap());
    config
}

/// Notes the changes of rungs, and the steps that were taken on which.
#[derive(Default)]
struct Watcher {
    moves: Vec<(u64, usize, usize)>,
    batches: Vec<[u64; 2]>,
    statuses: Vec<String>,
    gave_back: Vec<u64>,
    whys: Vec<String>,
    now: Vec<String>,
    steps: u64,
}

impl Observer for Watcher {
    fn event(&mut self, event: RunEvent<'_>) {
        match event {
            RunEvent::Rung { step, from, to, why, now, batch_sizes, memory } => {
                self.moves.push((step, from, to));
                self.batches.push(batch_sizes);
                self.statuses.extend(memory.map(|memory| memory.status.to_string()));
                self.whys.push(why.to_owned());
                self.now.push(now.to_owned());
            }
            RunEvent::GaveBack { step, .. } => self.gave_back.push(step),
            RunEvent::Step(metrics) => self.steps = metrics.step,
            _ => {}
        }
    }
}

/// A run whose machine has what `free` says after each of its readings, on the rungs that `keep` keeps.
fn run(
    config: RawConfig,
    keep: impl Fn(&TrainingPlan) -> bool,
    free: &dyn Fn(u64, &[TrainingPlan]) -> u64,
    refuse: &dyn Fn(u64, &[TrainingPlan]) -> bool,
) -> (Watcher, TrainingOutcome, Vec<TrainingPlan>) {
    let prepared = Prepared::new(config, false).unwrap();
    let host_bytes_per_token = host_bytes_per_token(prepared.config());
    let plan = prepared.plan(&Machine { host_bytes_per_token, ..machine() }).unwrap();
    assert!(plan.fits());
    let ladder: Vec<TrainingPlan> = plan.ladder().unwrap().into_iter().filter(keep).collect();
    let (mut watcher, readings) = (Watcher::default(), Cell::new(0));
    let outcome = prepared
        .run(
            &ladder,
            Surroundings {
                device: &mut |bytes| {
                    if refuse(bytes, &ladder) {
                        return Err(refusal(bytes));
                    }
                    cpu(bytes)
                },
                memory: &mut || {
                    readings.set(readings.get() + 1);
                    let available = Some(free(readings.get(), &ladder));
                    MemoryReading { own_bytes: 0, container_free: None, available }
                },
                observer: &mut watcher,
                stop: StopFlag::new(),
                ranks: &plimsoll_parallel::Solo,
            },
        )
        .unwrap();
    (watcher, outcome, ladder)
}

fn refusal(bytes: u64) -> DeviceError {
    DeviceError::OutOfMemory(OutOfMemory {
        tier: Tier::Device,
        requested: bytes,
        tag: Tag::Weights,
        name: "test",
        capacity: 0,
        largest_free: 0,
        live: Box::<TagBytes>::default(),
    })
}

fn metrics(run: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn numbers(run: &Path, key: &str) -> Vec<f64> {
    metrics(run).iter().map(|line| line[key].as_f64().unwrap()).collect()
}

const PLENTY: u64 = 1 << 40;

fn never(_: u64, _: &[TrainingPlan]) -> bool {
    false
}

/// Room for the last rung alone from the sixth step on, and for all from the twelfth.
fn shrinking(step: u64, ladder: &[TrainingPlan]) -> u64 {
    match step {
        6..12 => ladder.last().unwrap().process_bytes() * 100 / 94,
        _ => PLENTY,
    }
}

#[test]
fn a_ladder_keeps_the_effective_batch_and_every_rung_is_smaller() {
    let folder = tempfile::tempdir().unwrap();
    let prepared = Prepared::new(config(folder.path(), "out", &[]), false).unwrap();
    let ladder = prepared.plan(&machine()).unwrap().ladder().unwrap();
    assert!(ladder.len() >= 3, "{}", ladder.len());
    assert!(ladder.windows(2).all(|pair| pair[1].process_bytes() < pair[0].process_bytes()));
    for plan in &ladder {
        assert_eq!(plan.choice.settings.batch_size * plan.choice.accumulation, 8);
        assert!(plan.fits());
    }
}

#[test]
fn where_only_checkpointing_changes_the_bits_are_those_of_a_run_that_never_moved() {
    let folder = tempfile::tempdir().unwrap();
    let same_batch = |plan: &TrainingPlan| plan.choice.settings.batch_size == 8;
    let (still, ..) = run(config(folder.path(), "still", &[]), same_batch, &|_, _| PLENTY, &never);
    assert_eq!(still.moves, []);
    let (moved, outcome, ladder) = run(config(folder.path(), "moved", &[]), same_batch, &shrinking, &never);
    let last = ladder.len() - 1;
    assert!(last > 0);
    assert_eq!(moved.moves, [(6, 0, last), (16, last, 0)], "{:?}", moved.whys);
    assert!(moved.whys[0].contains("the machine has"), "{:?}", moved.whys);
    let (still, moved) = (folder.path().join("still"), folder.path().join("moved"));
    for key in ["loss", "grad_norm", "lr", "tokens", "batch_size"] {
        assert_eq!(numbers(&moved, key), numbers(&still, key), "{key}");
    }
    assert!(
        std::fs::read(moved.join("model.safetensors")).unwrap()
            == std::fs::read(still.join("model.safetensors")).unwrap()
    );
    let rungs: Vec<f64> =
        (1..=STEPS).map(|step| if (7..=16).contains(&step) { last as f64 } else { 0.0 }).collect();
    assert_eq!(numbers(&moved, "rung"), rungs);
    assert_eq!(outcome.report.rung_changes, 2);
    assert_eq!(outcome.report.planned.device_peak_bytes, outcome.report.measured.device_peak_bytes);
}

#[test]
fn where_batches_are_split_the_losses_stay_within_the_order_of_sums() {
    let folder = tempfile::tempdir().unwrap();
    let (still, ..) = run(config(folder.path(), "still", &[]), |_| true, &|_, _| PLENTY, &never);
    let (moved, _, ladder) = run(config(folder.path(), "moved", &[]), |_| true, &shrinking, &never);
    assert_eq!((still.moves.len(), moved.moves.len()), (0, 2));
    assert!(ladder.last().unwrap().choice.settings.batch_size < 8);
    let (still, moved) = (folder.path().join("still"), folder.path().join("moved"));
    assert_eq!(numbers(&moved, "tokens"), numbers(&still, "tokens"));
    for (a, b) in numbers(&moved, "loss").into_iter().zip(numbers(&still, "loss")) {
        assert!((a - b).abs() < 2e-4, "{a} {b}");
    }
}

#[test]
fn memory_that_is_refused_is_survived_from_the_last_good_state() {
    let folder = tempfile::tempdir().unwrap();
    let same_batch = |plan: &TrainingPlan| plan.choice.settings.batch_size == 8;
    let whole = |bytes: u64, ladder: &[TrainingPlan]| bytes == ladder[0].peak_bytes();
    let (still, ..) = run(config(folder.path(), "still", &[]), same_batch, &|_, _| PLENTY, &never);
    // Refused from the beginning.
    let (moved, ..) = run(config(folder.path(), "moved", &[]), same_batch, &|_, _| PLENTY, &whole);
    assert_eq!((still.steps, moved.moves.clone()), (STEPS, vec![(0, 0, 1)]));
    assert!(moved.whys[0].starts_with("memory was refused"), "{:?}", moved.whys);
    assert_eq!(numbers(&folder.path().join("moved"), "loss"), numbers(&folder.path().join("still"), "loss"));
    // Given at first, and refused when the run wants to climb back: it stays where it is, and does not try again.
    let asked = Cell::new(0);
    let later = |bytes: u64, ladder: &[TrainingPlan]| {
        let first = bytes == ladder[0].peak_bytes();
        asked.set(asked.get() + u64::from(first));
        first && asked.get() > 1
    };
    let (again, ..) = run(config(folder.path(), "again", &[]), same_batch, &shrinking, &later);
    assert_eq!(asked.get(), 2);
    assert_eq!(again.moves.len(), 3, "{:?}", again.moves);
    assert_eq!(numbers(&folder.path().join("again"), "loss"), numbers(&folder.path().join("still"), "loss"));
}

/// How often a device was asked for, and how the run ended, where none is given.
fn without_a_device(refused: &dyn Fn(u64) -> DeviceError) -> (usize, usize, TrainError) {
    let folder = tempfile::tempdir().unwrap();
    let prepared = Prepared::new(config(folder.path(), "out", &[]), false).unwrap();
    let ladder = prepared.plan(&machine()).unwrap().ladder().unwrap();
    let (mut watcher, mut asked) = (Watcher::default(), 0);
    let mut device = |bytes| -> Result<Box<dyn Device>, DeviceError> {
        asked += 1;
        Err(refused(bytes))
    };
    let with = Surroundings {
        device: &mut device,
        memory: &mut MemoryReading::default,
        observer: &mut watcher,
        stop: StopFlag::new(),
        ranks: &plimsoll_parallel::Solo,
    };
    let error = prepared.run(&ladder, with).unwrap_err();
    assert_eq!(watcher.moves.len() + 1, asked);
    (asked, ladder.len(), error)
}

#[test]
fn only_refused_memory_is_a_reason_to_step_down_and_only_while_there_is_a_rung() {
    let (asked, rungs, error) = without_a_device(&refusal);
    assert_eq!(asked, rungs);
    assert!(matches!(error, TrainError::Device(DeviceError::OutOfMemory(_))), "{error}");
    let (asked, _, error) =
        without_a_device(&|_| DeviceError::Mismatch { op: "test", reason: "none here".to_owned() });
    assert_eq!(asked, 1);
    assert!(matches!(error, TrainError::Device(_)), "{error}");
}

#[test]
fn a_plan_that_a_run_goes_on_with_is_described() {
    let folder = tempfile::tempdir().unwrap();
    let (moved, _, ladder) = run(config(folder.path(), "moved", &[]), |_| true, &shrinking, &never);
    let words = |plan: &TrainingPlan| {
        let (settings, bytes) = (&plan.choice.settings, ByteSize(plan.process_bytes()));
        let away = if settings.offload.is_none() { "" } else { ", offloading" };
        let (batch, steps) = (settings.batch_size, plan.choice.accumulation);
        let form = plan.config.training.gradient_checkpointing().set().unwrap();
        format!("batch {batch} x {steps}, checkpointing {form}{away}, {bytes} in all")
    };
    assert_eq!(moved.now, [words(ladder.last().unwrap()), words(&ladder[0])]);
}

#[test]
fn a_run_without_a_checkpoint_may_be_started_again_and_a_finished_one_may_not() {
    let folder = tempfile::tempdir().unwrap();
    let open = |resume| Prepared::new(config(folder.path(), "out", &[]), resume).map(drop);
    std::fs::create_dir(folder.path().join("out")).unwrap();
    std::fs::write(folder.path().join("out/metrics.jsonl"), "{\"step\":1}\n").unwrap();
    // To resume is to begin anew there.
    open(true).unwrap();
    open(false).unwrap();
    run(config(folder.path(), "out", &[]), |_| true, &|_, _| PLENTY, &never);
    for resume in [false, true] {
        let refused = open(resume).unwrap_err().to_string();
        assert!(refused.contains("has finished") && !refused.contains("--resume"), "{refused}");
    }
}

/// A processor that refuses memory while it is told to.
struct Refusing<'r> {
    cpu: Cpu,
    refuse: &'r Cell<bool>,
}

impl Device for Refusing<'_> {
    fn arena(&self) -> &Arena {
        self.cpu.arena()
    }

    fn execute(&self, op: Op<'_>, unless_zero: Option<&Tensor>) -> Result<(), DeviceError> {
        if self.refuse.take() { Err(refusal(1)) } else { self.cpu.execute(op, unless_zero) }
    }

    fn write(&self, out: &Tensor, fill: &mut dyn FnMut(&mut [u8])) -> Result<(), DeviceError> {
        self.cpu.write(out, fill)
    }

    fn read(&self, x: &Tensor, look: &mut dyn FnMut(&[u8])) -> Result<(), DeviceError> {
        self.cpu.read(x, look)
    }

    fn lend(&self, tensor: Tensor) -> Result<Lent, DeviceError> {
        self.cpu.lend(tensor)
    }

    fn reclaim(&self, memory: Loan) -> Result<Tensor, DeviceError> {
        self.cpu.reclaim(memory)
    }
}

/// Memory that is refused in the middle of a step takes a run back to its last checkpoint, or to its beginning.
#[test]
fn a_step_that_gets_no_memory_is_taken_again_from_the_last_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let same_batch = |plan: &TrainingPlan| plan.choice.settings.batch_size == 8;
    run(config(folder.path(), "still", &[]), same_batch, &|_, _| PLENTY, &never);
    let still = numbers(&folder.path().join("still"), "loss");
    for (save_steps, back_to) in [(0, 0), (4, 4), (5, 5)] {
        let out = format!("back-to-{back_to}");
        let config = config(folder.path(), &out, &[&format!("output.save_steps={save_steps}")]);
        let prepared = Prepared::new(config, false).unwrap();
        let ladder: Vec<TrainingPlan> =
            prepared.plan(&machine()).unwrap().ladder().unwrap().into_iter().filter(same_batch).collect();
        let (mut watcher, refuse, readings) = (Watcher::default(), Cell::new(false), Cell::new(0));
        let outcome = prepared
            .run(
                &ladder,
                Surroundings {
                    device: &mut |bytes| {
                        Ok(Box::new(Refusing {
                            cpu: Cpu::new(bytes, CpuOptions::default())?,
                            refuse: &refuse,
                        }))
                    },
                    memory: &mut || {
                        readings.set(readings.get() + 1);
                        // The eighth step is refused.
                        refuse.set(readings.get() == 7);
                        MemoryReading::default()
                    },
                    observer: &mut watcher,
                    stop: StopFlag::new(),
                    ranks: &plimsoll_parallel::Solo,
                },
            )
            .unwrap();
        assert_eq!(watcher.moves, [(back_to, 0, 1)], "{:?}", watcher.whys);
        let run = folder.path().join(&out);
        assert_eq!(numbers(&run, "loss"), still, "{save_steps}");
        let steps: Vec<f64> = (1..=STEPS).map(|step| step as f64).collect();
        assert_eq!(numbers(&run, "step"), steps);
        assert_eq!((outcome.report.steps, outcome.report.tokens), (STEPS, STEPS * 8 * 16));
    }
}

/// A run that was resumed, and gets no memory before it has written anything, begins again where it was resumed.
#[test]
fn a_resumed_run_that_gets_no_memory_begins_where_it_was_resumed() {
    let folder = tempfile::tempdir().unwrap();
    let (first, more) = (["training.steps=3", "output.save_steps=3"], ["training.steps=5"]);
    run(config(folder.path(), "out", &first), |_| true, &|_, _| PLENTY, &never);
    let prepared = Prepared::new(config(folder.path(), "out", &more), true).unwrap();
    let ladder = prepared.plan(&machine()).unwrap().ladder().unwrap();
    let mut watcher = Watcher::default();
    let whole = ladder[0].peak_bytes();
    let with = Surroundings {
        device: &mut |bytes| {
            if bytes == whole { Err(refusal(bytes)) } else { cpu(bytes) }
        },
        memory: &mut MemoryReading::default,
        observer: &mut watcher,
        stop: StopFlag::new(),
        ranks: &plimsoll_parallel::Solo,
    };
    let outcome = prepared.run(&ladder, with).unwrap();
    assert_eq!((watcher.moves, outcome.report.steps), (vec![(3, 0, 1)], 5));
}

/// Batches of 2 to 8 sequences of 8, which grow after two steps of room. Other plans are left out.
const DYNAMIC: [&str; 3] = [
    "training.dynamic_batching={enabled: true, min_batch_size: 2, max_batch_size: 8, adjustment_frequency: 2}",
    "training.batch_size=4",
    "memory.ladder=false",
];

/// What makes a rung need this share of the machine.
fn leaving(plan: &TrainingPlan, share: f64) -> u64 {
    (plan.process_bytes() as f64 / share) as u64
}

#[test]
fn dynamic_batches_begin_where_they_were_told_to_and_have_all_sizes() {
    let folder = tempfile::tempdir().unwrap();
    let prepared = Prepared::new(config(folder.path(), "out", &DYNAMIC), false).unwrap();
    let ladder = prepared.plan(&machine()).unwrap().ladder().unwrap();
    let sizes =
        |plan: &TrainingPlan| (plan.choice.settings.batch_size, plan.choice.accumulation, plan.is_above);
    assert_eq!(ladder.iter().map(sizes).collect::<Vec<_>>(), [(8, 1, true), (4, 2, false), (2, 4, false)]);
    let form = |plan: &TrainingPlan| (plan.choice.settings.checkpointing, plan.choice.settings.offload);
    assert!(ladder.iter().all(|plan| plan.fits() && form(plan) == form(&ladder[0])));
    assert!(ladder.windows(2).all(|pair| pair[1].process_bytes() < pair[0].process_bytes()));
    // Below them come plans that recompute and offload, with micro-batches that are not smaller.
    let mut whole = config(folder.path(), "whole", &DYNAMIC[..2]);
    whole.apply_set("memory.ladder=true").unwrap();
    let longer = Prepared::new(whole, false).unwrap().plan(&machine()).unwrap().ladder().unwrap();
    assert!(longer.len() > 3 && longer.iter().all(|plan| plan.choice.settings.batch_size >= 2));
}

/// A machine that gives less and less, and then all again: the micro-batch goes down and up, and nothing else changes.
#[test]
fn dynamic_batches_follow_the_memory_that_there_is() {
    let folder = tempfile::tempdir().unwrap();
    // The largest batch is there from the fourth step on. From the eighth it would be critical, from the twelfth the second is an
    // emergency.
    let stairs = |step: u64, ladder: &[TrainingPlan]| match step {
        0..8 => PLENTY,
        8..12 => leaving(&ladder[0], 0.955),
        12..16 => leaving(&ladder[1], 0.99).min(leaving(&ladder[2], 0.85)),
        _ => PLENTY,
    };
    let fixed = ["training.dynamic_batching.enabled=false", "memory.ladder=false"];
    let (still, ..) = run(config(folder.path(), "still", &fixed), |_| true, &|_, _| PLENTY, &never);
    assert_eq!(still.moves, []);
    let (moved, outcome, ladder) = run(config(folder.path(), "moved", &DYNAMIC), |_| true, &stairs, &never);
    let steps: Vec<(usize, usize)> = moved.moves.iter().map(|(_, from, to)| (*from, *to)).collect();
    assert_eq!(steps, [(1, 0), (0, 1), (1, 2), (2, 1), (1, 0)], "{:?} {:?}", moved.moves, moved.whys);
    assert_eq!(moved.batches, [[4, 8], [8, 4], [4, 2], [2, 4], [4, 8]]);
    assert_eq!(moved.statuses[1..3], ["critical", "emergency"], "{:?}", moved.statuses);
    assert!(moved.gave_back.contains(&moved.moves[2].0), "{:?} {:?}", moved.gave_back, moved.moves);
    let (still, moved) = (folder.path().join("still"), folder.path().join("moved"));
    for key in ["lr", "tokens", "batch_size"] {
        assert_eq!(numbers(&moved, key), numbers(&still, key), "{key}");
    }
    for (a, b) in numbers(&moved, "loss").into_iter().zip(numbers(&still, "loss")) {
        assert!((a - b).abs() <= 2e-5 * b.abs(), "{a} {b}");
    }
    let of_rung = |rung: f64| ladder[rung as usize].choice.settings.batch_size as f64;
    let expected: Vec<f64> = numbers(&moved, "rung").into_iter().map(of_rung).collect();
    assert_eq!(numbers(&moved, "micro_batch_size"), expected);
    assert_eq!(outcome.report.planned.device_peak_bytes, outcome.report.measured.device_peak_bytes);
}

/// A batch that does not fit gives way to a smaller one before anything else does.
#[test]
fn a_batch_that_was_said_and_does_not_fit_is_the_first_to_give_way() {
    let folder = tempfile::tempdir().unwrap();
    let plan = |set: &[&str]| {
        let out = format!("out-{}", set.len());
        let prepared = Prepared::new(config(folder.path(), &out, set), false).unwrap();
        prepared.plan(&machine()).unwrap()
    };
    let fixed = [
        "training.gradient_checkpointing=none",
        "memory.offload={parameters: device, optimizer: device, gradients: device, activations: device}",
    ];
    let whole = plan(&fixed);
    let tight = format!("memory.device_budget={}", whole.process_bytes() - 1);
    let set: Vec<&str> =
        fixed.iter().copied().chain(DYNAMIC).chain(["training.batch_size=8", &tight]).collect();
    let smaller = plan(&set);
    assert!(smaller.fits());
    assert_eq!((smaller.choice.settings.batch_size, smaller.choice.accumulation), (4, 2));
}

/// A pass of evaluation may take more than a step. Where nothing is evaluated, no plan has it.
#[test]
fn what_is_not_evaluated_is_not_planned() {
    let folder = tempfile::tempdir().unwrap();
    let validation = format!("data.validation={}", folder.path().join("text.txt").display());
    let common = ["training.batch_size=1", "training.eval_batch_size=128", "memory.ladder=false"];
    let peak = |out: &str, set: &[&str]| {
        let config = config(folder.path(), out, &[&common[..], set].concat());
        let (_, outcome, ladder) = run(config, |_| true, &|_, _| PLENTY, &never);
        let report = outcome.report;
        assert_eq!(report.planned.device_peak_bytes, report.measured.device_peak_bytes, "{out}");
        assert_eq!(report.planned.host_peak_bytes, report.measured.host_peak_bytes, "{out}");
        let (step, evaluation) = ladder[0].phases().unwrap();
        assert_eq!(evaluation.is_some(), ladder[0].validates());
        (report.measured.device_peak_bytes, step)
    };
    let (alone, step) = peak("alone", &[]);
    let (evaluated, same_step) = peak("evaluated", &[&validation]);
    assert_eq!((alone, step), (step, same_step));
    assert!(evaluated > alone, "{evaluated} {alone}");
}

/// The pipeline counts its batches itself, and its threads change neither their order nor the plan's exactness; an evaluation takes
/// the memory that the plan has for it.
#[test]
fn what_the_pipeline_and_an_evaluation_take_is_what_was_planned() {
    let folder = tempfile::tempdir().unwrap();
    let validation = format!("data.validation={}", folder.path().join("text.txt").display());
    let common = [&validation, "output.eval_steps=8", "training.batch_size=2", "memory.ladder=false"];
    let one = [&common[..], &["data.num_workers=0"]].concat();
    run(config(folder.path(), "one", &one), |_| true, &|_, _| PLENTY, &never);
    let losses = |out: &str| {
        (numbers(&folder.path().join(out), "loss"), numbers(&folder.path().join(out), "grad_norm"))
    };
    for (workers, evaluated) in
        [("data.num_workers=8", "auto"), ("data.num_workers=1", "1"), ("data.num_workers=3", "64")]
    {
        let evaluation = format!("training.eval_batch_size={evaluated}");
        let set = [&common[..], &[workers, "data.persistent_workers=false", &evaluation]].concat();
        let (_, outcome, ladder) =
            run(config(folder.path(), evaluated, &set), |_| true, &|_, _| PLENTY, &never);
        assert_eq!(losses(evaluated), losses("one"));
        let (planned, measured) = (&outcome.report.planned, &outcome.report.measured);
        assert_eq!(planned.device_peak_bytes, measured.device_peak_bytes, "{evaluated}");
        assert_eq!(planned.pipeline_bytes, measured.pipeline_bytes, "{evaluated}");
        assert_eq!(planned.host_peak_bytes, measured.host_peak_bytes, "{evaluated}");
        let plan = &ladder[0];
        let size = plan.choice.settings.evaluated();
        let (step, evaluation) = plan.phases().unwrap();
        assert_eq!(plan.peak_bytes(), step.max(evaluation.unwrap().peak_bytes), "{evaluated}");
        match evaluated {
            "auto" => assert!(size > 2 && plan.peak_bytes() == step, "{size}"),
            said => assert_eq!(size.to_string(), said),
        }
        let of_workers = plan.config.data.workers() * 2 * 8 * 2 * 16;
        assert_eq!(plan.pipeline().ahead, of_workers);
    }
}
