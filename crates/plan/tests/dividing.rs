//! How the planner divides ranks that may divide the work in any way: beside every division, planned by itself.

use std::collections::BTreeSet;

use plimsoll_memory::Tier;
use plimsoll_model::{ModelSpec, catalogue};
use plimsoll_plan::config::{RawConfig, Started};
use plimsoll_plan::{Choice, Division, Limits, Machine, TrainingPlan};
use plimsoll_step::{Checkpointing, Group, StepSettings};

use crate::common::machine;

const HOME: &str =
    "memory.offload={optimizer: device, gradients: device, activations: device, parameters: device}";
const ALL: [&str; 5] = [
    "parallel.data_parallel=auto",
    "parallel.context_parallel=auto",
    "parallel.pipeline_parallel=auto",
    "parallel.tensor_parallel=auto",
    "parallel.zero_stage=auto",
];

/// Nine heads and three key-value heads: products can be shared among three.
fn spec() -> ModelSpec {
    ModelSpec { num_layers: 6, vocab_size: 4096, ..catalogue::find("smollm2-135m").unwrap() }
}

fn config(ranks: u32, set: &[&str]) -> RawConfig {
    let mut config = RawConfig::from_str("model: m\ndata: {sequence_length: 96}", "test").unwrap();
    config.apply_set("memory.device_budget=64GiB").unwrap();
    config.apply_set("parallel.overlap_communication=false").unwrap();
    set.iter().for_each(|assignment| config.apply_set(assignment).unwrap());
    config.on_ranks(Started { ranks, of_each_machine: None }).unwrap()
}

fn plan(config: &RawConfig, machine: &Machine) -> TrainingPlan {
    TrainingPlan::new(config, &spec(), machine).unwrap()
}

/// Forms of checkpointing that automatic choices are made of.
fn forms() -> Vec<Checkpointing> {
    let groups = |n| Checkpointing::Selective(Group::ALL.into_iter().take(n).collect());
    let some = (2..Group::ALL.len()).map(groups);
    [Checkpointing::None].into_iter().chain(some).chain([Checkpointing::Full, Checkpointing::Sqrt]).collect()
}

/// Of all steps of all divisions, that which is to be taken: its number.
fn best(steps: &[(usize, Choice)], limits: Limits) -> Option<usize> {
    let within = |room: u64| -> Vec<usize> {
        let limits = Limits { room_bytes: room, ..limits };
        (0..steps.len()).filter(|step| limits.allow(&steps[*step].1)).collect()
    };
    let fitting = [within(limits.target_bytes), within(limits.room_bytes)];
    let fitting = fitting.into_iter().find(|steps| !steps.is_empty())?;
    let seconds = |step: &usize| 1.0 / steps[*step].1.time.tokens_per_second;
    let fastest = fitting.iter().map(seconds).min_by(f64::total_cmp)?;
    let as_fast = fitting.into_iter().filter(|step| seconds(step) <= fastest * 1.01);
    as_fast.min_by_key(|step| (limits.memory(&steps[*step].1), steps[*step].0))
}

/// Every step of every division is run, and the search finds the best of them without running all.
#[test]
fn the_fastest_division_that_fits_is_chosen() {
    let f32 = "training.mixed_precision=f32";
    let one = "training.batch_size=1";
    let full = "training.gradient_checkpointing=full";
    let cases: [(u32, &[&str]); 6] = [
        (6, &[f32, one]),
        (6, &[f32, one, "training.gradient_accumulation_steps=16", full]),
        (6, &[f32, one, "training.method=lora", "training.gradient_accumulation_steps=3"]),
        (4, &["training.mixed_precision=bf16", one, "training.effective_batch_size=4"]),
        (6, &[f32, one, "training.optimizer=adamw_8bit", full]),
        (6, &[f32, one, "training.optimizer_in_backward=true", "training.max_gradient_norm=0"]),
    ];
    for (ranks, set) in cases {
        let open = config(ranks, &[set, &[HOME], &ALL].concat());
        let (mut steps, mut count) = (Vec::new(), 0);
        for own in open.divisions().unwrap() {
            // Heads that so many ranks do not divide, and the like.
            let Ok(plan) = TrainingPlan::new(&own, &spec(), &machine()) else { continue };
            let Choice { settings, accumulation, .. } = plan.choice;
            let forms = if set.contains(&full) { vec![settings.checkpointing] } else { forms() };
            for checkpointing in forms {
                let settings = StepSettings { checkpointing, ..settings.clone() };
                let choice = Choice::new(&spec(), settings, accumulation, &machine().rates).unwrap();
                steps.push((count, choice));
            }
            count += 1;
        }
        let most = steps.iter().map(|(_, choice)| choice.peak_bytes()).max().unwrap();
        let mut chosen = Vec::new();
        for eighths in [9, 6, 4, 3, 2, 1] {
            let mut open = open.clone();
            open.apply_set(&format!("memory.device_budget={}", most * eighths / 8)).unwrap();
            let found = plan(&open, &machine());
            let (limits, division) = (found.limits, found.division.clone().unwrap());
            let Division { candidates, fitting, not_fitting, slower, .. } = division;
            assert_eq!((candidates, fitting + not_fitting + slower), (count, count), "{set:?}");
            let Some(best) = best(&steps, limits).map(|best| &steps[best].1) else {
                assert!(!found.fits() && not_fitting == count, "{set:?} {eighths}");
                continue;
            };
            assert!(found.fits(), "{set:?} {eighths}");
            assert_eq!(found.choice.settings, best.settings, "{set:?} {eighths}: {division:?}");
            let may = steps.iter().filter(|(_, choice)| limits.allow(choice)).map(|(place, _)| *place);
            let may = may.collect::<BTreeSet<_>>().len();
            assert!(fitting <= may && not_fitting <= count - may, "{division:?}");
            assert!(division.exhaustive);
            chosen.push((division.tensor_parallel, division.pipeline_parallel, division.zero_stage));
        }
        assert!(chosen.iter().collect::<BTreeSet<_>>().len() > 1, "{set:?} {chosen:?}");
    }
}

/// The answer says nothing of `auto`, and is the same when it is planned again.
#[test]
fn what_was_chosen_can_be_planned_again() {
    let open = config(6, &[&[HOME][..], &ALL].concat());
    let first = plan(&open, &machine());
    let yaml = first.config.to_yaml().unwrap();
    let parallel: String = yaml.lines().skip_while(|line| !line.starts_with("parallel")).collect();
    assert!(parallel.contains("tensor_parallel") && !parallel.contains("auto"), "{yaml}");
    let again = plan(&RawConfig::from_str(&yaml, "again").unwrap(), &machine());
    assert_eq!(
        (again.choice.settings.clone(), again.division.clone()),
        (first.choice.settings.clone(), None)
    );
    let search = &first.to_json()["search"];
    assert_eq!(search["candidates"], first.division.as_ref().unwrap().candidates);
    assert!(search["exhaustive"].as_bool().unwrap() && search["seconds"].is_number(), "{search}");
    // A key that is fixed stays so.
    let fixed = config(6, &[HOME, "parallel.pipeline_parallel=2", "parallel.tensor_parallel=auto"]);
    let division = plan(&fixed, &machine()).division.unwrap();
    assert_eq!((division.pipeline_parallel, division.zero_stage), (2, 0));
    assert_eq!(division.candidates, 2);
}

/// No division sends tensors away where another one fits without.
#[test]
fn a_division_that_needs_no_disk_comes_before_one_that_does() {
    let f32 = "training.mixed_precision=f32";
    let alone = |stage: &str| {
        let set = [f32, HOME, "training.gradient_checkpointing=full", "training.batch_size=1", stage];
        plan(&config(6, &set), &machine()).process_bytes()
    };
    let (whole, shared) = (alone("parallel.zero_stage=0"), alone("parallel.zero_stage=3"));
    assert!(shared < whole);
    let budget = format!("memory.device_budget={}", shared.midpoint(whole));
    let open = |more: &str| plan(&config(6, &[f32, &budget, more, "parallel.zero_stage=auto"]), &machine());
    let home = |plan: &TrainingPlan| plan.choice.settings.offload.optimizer == Tier::Device;
    let by_itself = plan(&config(6, &[f32, &budget]), &machine());
    assert!(by_itself.fits() && !home(&by_itself));
    let divided = open("parallel.data_parallel=6");
    assert!(divided.fits() && home(&divided) && divided.division.unwrap().zero_stage > 0);
    // Where each has to, the plan says that it did not try everything.
    let tight = format!("memory.device_budget={}", shared * 3 / 4);
    let tight = plan(&config(6, &[f32, &tight, "parallel.zero_stage=auto"]), &machine());
    assert!(tight.fits() && !home(&tight), "{:?} {:?}", tight.misfits(), tight.division);
    assert!(!tight.division.unwrap().exhaustive);
}

#[test]
fn what_cannot_be_divided_so_is_said() {
    let unknown = RawConfig::from_str("model: m\nparallel: {tensor_parallel: auto}", "test").unwrap();
    let words = TrainingPlan::new(&unknown, &spec(), &machine()).unwrap_err().to_string();
    assert!(words.contains("--ranks"), "{words}");
    // What the planner leaves out of its own accord is refused where it is asked for.
    let two = TrainingPlan::new(&config(2, &["parallel.tensor_parallel=2"]), &spec(), &machine());
    assert!(two.unwrap_err().to_string().contains("attention heads"));
    let five = config(5, &["parallel.data_parallel=1", "parallel.tensor_parallel=auto"]);
    let words = TrainingPlan::new(&five, &spec(), &machine()).unwrap_err().to_string();
    assert!(words.contains("attention heads") && words.contains("parallel.tensor_parallel"), "{words}");
}

/// What is suggested where all ranks hold everything was planned, and fits when it is applied.
#[test]
fn ranks_that_hold_too_much_are_told_what_they_may_share() {
    let f32 = "training.mixed_precision=f32";
    let set = [f32, HOME, "training.gradient_checkpointing=full", "training.batch_size=1"];
    let of = |stage: &str| plan(&config(4, &[&set[..], &[stage]].concat()), &machine()).process_bytes();
    let [one, two, three] = [1, 2, 3].map(|stage| of(&format!("parallel.zero_stage={stage}")));
    assert!(three < two && two < one);
    for (budget, stage) in [(one + (1 << 20), 1), (two + (1 << 20), 2), (three + (1 << 20), 3)] {
        let budget = format!("memory.device_budget={budget}");
        let refused = plan(&config(4, &[&set[..], &[&budget]].concat()), &machine());
        assert!(!refused.fits());
        let advice = refused.alternatives.iter().find(|other| other.change == ["parallel.zero_stage=auto"]);
        let advice = advice.unwrap();
        assert!(advice.fits && advice.what.ends_with(&format!("in stage {stage}")), "{}", advice.what);
        let applied = plan(&config(4, &[&set[..], &[&budget, &advice.change[0]]].concat()), &machine());
        assert!(applied.fits() && applied.division.unwrap().zero_stage >= stage);
    }
    // Whoever says what ranks share is told nothing of it.
    let said = plan(
        &config(4, &[&set[..], &["memory.device_budget=20MiB", "parallel.zero_stage=0"]].concat()),
        &machine(),
    );
    assert!(
        !said.alternatives.iter().any(|other| other.change.contains(&"parallel.zero_stage=auto".to_owned()))
    );
}
