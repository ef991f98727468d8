//! Why a key has its value: what is said of other values is what their plans say.

use plimsoll_model::{ModelSpec, catalogue};
use plimsoll_plan::config::{GradientCheckpointing, RawConfig};
use plimsoll_plan::{ChosenBy, Explanation, ModelOrigin, Outcome, Planned, TrainingPlan};

use crate::common::machine;

fn origin() -> ModelOrigin {
    let spec = catalogue::find("smollm2-135m").unwrap();
    ModelOrigin::Catalogue(Box::new(ModelSpec { num_layers: 4, vocab_size: 4096, ..spec }))
}

fn config(set: &[&str]) -> RawConfig {
    let mut config = RawConfig::from_str("model: m\ndata: {sequence_length: 128}", "test").unwrap();
    set.iter().for_each(|assignment| config.apply_set(assignment).unwrap());
    config.validate().unwrap();
    config
}

fn explained(set: &[&str], key: &str) -> (TrainingPlan, Explanation) {
    let plan = TrainingPlan::for_model(&config(set), &origin(), &machine()).unwrap();
    let explanation = plan.explain(key, &origin()).unwrap();
    (plan, explanation)
}

fn planned<'a>(explanation: &'a Explanation, value: &str) -> &'a Planned {
    let found = explanation.neighbours.iter().find(|other| other.value == value);
    match &found.unwrap_or_else(|| panic!("{value}: {explanation:?}")).outcome {
        Outcome::Planned(planned) => planned,
        refused => panic!("{value}: {refused:?}"),
    }
}

/// Every neighbour is the plan that its value would have.
#[track_caller]
fn neighbours_are_plans(set: &[&str], key: &str, values: &[&str]) -> Explanation {
    let (plan, explanation) = explained(set, key);
    for value in values {
        let own = format!("{key}={value}");
        let batch = format!("training.effective_batch_size={}", plan.choice.sequences());
        let keeps = key == "training.batch_size";
        let more: Vec<&str> = set.iter().copied().chain(keeps.then_some(&*batch)).chain([&*own]).collect();
        let other = TrainingPlan::for_model(&config(&more), &origin(), &machine()).unwrap();
        let said = planned(&explanation, value);
        assert_eq!(
            (said.device_peak_bytes, said.fits, &said.shortages, said.step_seconds),
            (
                other.peak_bytes(),
                other.fits(),
                &other.limits.shortages(&other.choice).collect(),
                other.choice.time.step_seconds
            ),
            "{key}={value}"
        );
    }
    explanation
}

/// A line that leaves room for one sequence at a time, and for no more.
fn narrow_line(set: &[&str]) -> String {
    let two = ["training.batch_size=2", "training.effective_batch_size=8", "memory.device_budget=64GiB"];
    let plan = TrainingPlan::for_model(&config(&[set, &two].concat()), &origin(), &machine()).unwrap();
    format!("memory.device_budget={}", plan.process_bytes() - 1)
}

#[test]
fn the_planner_took_what_is_fastest_and_fits() {
    let home =
        "memory.offload={optimizer: device, gradients: device, activations: device, parameters: device}";
    let alone = ["training.gradient_checkpointing=none", "training.mixed_precision=f32", home];
    let line = narrow_line(&alone);
    let set = [&alone[..], &[&*line]].concat();
    let explanation = neighbours_are_plans(&set, "training.batch_size", &["2"]);
    assert_eq!((&*explanation.value, explanation.chosen_by), ("1", ChosenBy::Planner));
    assert!(!planned(&explanation, "2").fits);
    let reason = explanation.reason;
    assert!(reason.starts_with("the planner took 1: no value next to it is faster and fits"), "{reason}");
    assert!(reason.contains("2 does not fit: ") && reason.contains(" of memory short"), "{reason}");
}

#[test]
fn a_rule_is_said_where_a_faster_value_is_not_taken() {
    let line = "memory.device_budget=64GiB";
    let offload = neighbours_are_plans(&[line], "memory.offload.optimizer", &["host", "disk"]);
    assert_eq!((&*offload.value, offload.chosen_by), ("device", ChosenBy::Planner));
    assert!(offload.reason.contains("only where nothing fits without"), "{}", offload.reason);
    assert!(offload.reason.contains("disk would be "), "{}", offload.reason);
    let precision = neighbours_are_plans(&[line], "training.mixed_precision", &["bf16", "fp16", "fp8"]);
    assert!(precision.reason.starts_with("the planner took f32: f32 loses nothing"), "{}", precision.reason);
    let forms = neighbours_are_plans(&[line], "training.gradient_checkpointing", &["full", "sqrt"]);
    assert_eq!((forms.neighbours.len(), forms.chosen_by), (6, ChosenBy::Planner));
}

#[test]
fn what_the_user_has_fixed_is_said_with_what_the_planner_would_take() {
    let line = "memory.device_budget=64GiB";
    let set = ["training.gradient_checkpointing=full", line];
    let forms = neighbours_are_plans(&set, "training.gradient_checkpointing", &["none", "auto"]);
    assert_eq!(forms.chosen_by, ChosenBy::User);
    let place = "--set training.gradient_checkpointing=full";
    assert!(forms.place.as_ref().is_some_and(|found| found.contains(place)), "{forms:?}");
    assert!(
        forms.reason.starts_with("training.gradient_checkpointing is full because you set it"),
        "{forms:?}"
    );
    let open = forms.neighbours.iter().find(|other| other.value == "auto").unwrap();
    let left_open = TrainingPlan::for_model(&config(&[line]), &origin(), &machine()).unwrap();
    let form = GradientCheckpointing::Form(left_open.choice.settings.checkpointing).to_string();
    assert_eq!(open.becomes.as_ref(), Some(&form));
    let words = format!("left open, it would be {form}, and the step would ");
    assert!(forms.reason.contains(&words), "{forms:?}");
    // All three of a batch: the two others follow.
    let three = [
        "training.batch_size=2",
        "training.gradient_accumulation_steps=4",
        "training.effective_batch_size=8",
    ];
    let (_, batch) = explained(&[&three[..], &[line]].concat(), "training.batch_size");
    assert!(planned(&batch, "4").fits && planned(&batch, "1").fits && planned(&batch, "auto").fits);
    assert_eq!(batch.neighbours.len(), 3);
}

#[test]
fn other_keys_get_a_word() {
    let line = "memory.device_budget=64GiB";
    let (_, rate) = explained(&[line], "training.learning_rate");
    assert_eq!((rate.chosen_by, rate.neighbours.len()), (ChosenBy::Default, 0));
    assert!(rate.reason.starts_with("planning does not decide training.learning_rate"), "{}", rate.reason);
    assert!(rate.reason.ends_with("a step takes the same memory and time."), "{}", rate.reason);
    let (_, width) = explained(&[line], "model.from_scratch.hidden_size");
    assert!(width.neighbours.is_empty() && !width.reason.contains("same memory"), "{}", width.reason);
    // What no list names may shape the plan all the same.
    let (plan, budget) = explained(&[line], "memory.device_budget");
    assert!(budget.reason.starts_with("memory.device_budget is "), "{}", budget.reason);
    assert_eq!(budget.chosen_by, ChosenBy::User);
    let narrow = format!("memory.device_budget={}", plan.process_bytes() / 2);
    let (_, budget) = explained(&[&narrow], "memory.device_budget");
    assert!(!budget.neighbours.is_empty(), "{budget:?}");
    let (_, workers) = explained(&[line, "data.num_workers=8"], "data.num_workers");
    assert!(planned(&workers, "16").host_bytes > workers.own.host_bytes, "{workers:?}");
    assert!(workers.reason.contains(" more on the host"), "{}", workers.reason);
    let (_, optimizer) = explained(&[line], "training.optimizer");
    assert!(optimizer.reason.starts_with("planning does not decide training.optimizer: it is adamw"));
    assert!(planned(&optimizer, "adamw_8bit").device_peak_bytes < optimizer.own.device_peak_bytes);
    // A value that does not go with the rest says why.
    let (_, sequence) =
        explained(&[line, "training.activation_compression=int8"], "training.sequence_chunk_tokens");
    assert!(sequence.neighbours.is_empty());
    let (_, master) = explained(&[line, "training.mixed_precision=fp16"], "training.master_weights");
    let refused = master.neighbours.iter().find(|other| other.value == "none").unwrap();
    assert!(matches!(&refused.outcome, Outcome::Refused { refused } if !refused.is_empty()), "{master:?}");
    let unknown = RawConfig::default().check_key("training.batchsize", "--explain training.batchsize");
    let unknown = unknown.unwrap_err().to_string();
    assert!(unknown.contains("unknown key") && unknown.contains("training.batch_size"), "{unknown}");
    let section = RawConfig::default().check_key("memory.offload", "test").unwrap_err().to_string();
    assert!(section.contains("memory.offload.optimizer"), "{section}");
}

#[test]
fn what_is_nearest_where_nothing_fits_is_said_to_be() {
    let (plan, explanation) =
        explained(&["memory.device_budget=8MiB", "memory.disk_budget=0"], "training.batch_size");
    assert!(!plan.fits() && !explanation.own.fits);
    assert!(explanation.reason.contains("nearest to fitting"), "{}", explanation.reason);
}
