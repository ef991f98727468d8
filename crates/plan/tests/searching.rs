//! A search as users meet it: its plan and every point of its front can be run again and take those very bytes, what the user has
//! said stays, and a class allows what it says.

use plimsoll_model::{ModelSpec, catalogue};
use plimsoll_plan::config::{Auto, GradientCheckpointing, MixedPrecision, Optimizer, Quality, RawConfig};
use plimsoll_plan::{Machine, TrainingPlan};
use plimsoll_step::Checkpointing;

use crate::common::machine;

fn spec() -> ModelSpec {
    ModelSpec { num_layers: 6, vocab_size: 4096, ..catalogue::find("smollm2-135m").unwrap() }
}

fn config(set: &[&str]) -> RawConfig {
    let mut config = RawConfig::from_str("model: m\ndata: {sequence_length: 128}", "test").unwrap();
    set.iter().for_each(|assignment| config.apply_set(assignment).unwrap());
    config.validate().unwrap();
    config
}

fn plan(set: &[&str]) -> TrainingPlan {
    TrainingPlan::new(&config(set), &spec(), &machine()).unwrap()
}

fn bytes_of(machine: &Machine, config: &RawConfig) -> (u64, f64, bool) {
    let plan = TrainingPlan::new(config, &spec(), machine).unwrap();
    assert!(plan.search.is_none());
    (plan.peak_bytes(), plan.choice.time.step_seconds, plan.fits())
}

#[test]
fn every_point_of_a_front_can_be_run_and_takes_what_it_says() {
    let plan = plan(&["planning.goal=fastest", "planning.quality=anything", "memory.device_budget=220MiB"]);
    let search = plan.search.clone().unwrap();
    assert!(plan.fits() && search.front.len() > 4, "{}", search.front.len());
    assert!(search.dry_runs > 50 && search.candidates > 1e6 && !search.exhaustive);
    for point in &search.front {
        let found = bytes_of(&machine(), &point.config);
        assert_eq!(found, (point.device_peak_bytes, point.step_seconds, true), "{:#?}", point.config);
    }
    // So can the document that `plan --json` prints.
    let again = RawConfig::from_str(&plan.config.to_json().unwrap(), "config").unwrap();
    assert_eq!(bytes_of(&machine(), &again).0, plan.peak_bytes());
    let document = plan.to_json();
    assert_eq!(document["search"]["goal"], "fastest");
    assert_eq!(document["pareto"].as_array().unwrap().len(), search.front.len());
    let picture = search.to_svg("a <model>", plan.peak_bytes());
    assert_eq!(picture.matches("<circle").count(), search.front.len());
    assert!(picture.contains("a &lt;model&gt;"));
}

#[test]
fn a_search_is_no_slower_than_the_plan_without_one() {
    for budget in ["memory.device_budget=150MiB", "memory.device_budget=250MiB", "memory.device_budget=2GiB"]
    {
        let f32 = "training.mixed_precision=f32";
        let usual = plan(&[f32, budget]);
        let best = plan(&[f32, budget, "planning.goal=fastest"]);
        assert!(best.fits() || !usual.fits());
        let rate = |plan: &TrainingPlan| plan.choice.time.tokens_per_second;
        assert!(rate(&best) >= rate(&usual) * 0.99, "{budget}: {} {}", rate(&best), rate(&usual));
        let least = plan(&[f32, budget, "planning.goal=least_memory"]);
        assert!(least.peak_bytes() <= best.peak_bytes());
    }
}

#[test]
fn a_search_gives_up_prefetching_where_nothing_fits_with_it_and_for_the_least_memory() {
    let away = "memory.offload={optimizer: disk, gradients: disk, activations: disk, parameters: disk}";
    let set = [away, "training.mixed_precision=f32", "training.batch_size=1", "data.sequence_length=64"];
    let of = |more: &[&str]| plan(&[&set[..], more].concat());
    let (fastest, least) = ("planning.goal=fastest", "planning.goal=least_memory");
    let prefetched = of(&["memory.prefetch=true", least]);
    let open = of(&[least]);
    assert!(prefetched.choice.settings.offload.prefetch && !open.choice.settings.offload.prefetch);
    assert!(open.peak_bytes() < prefetched.peak_bytes());
    // What is least is so within half a per cent.
    let between = open.process_bytes().midpoint(prefetched.process_bytes());
    let tight = format!("memory.device_budget={between}");
    assert!(!of(&["memory.prefetch=true", fastest, &tight]).fits());
    let waits = of(&[fastest, &tight]);
    assert!(waits.fits() && !waits.choice.settings.offload.prefetch);
    assert!(waits.search.is_some());
}

#[test]
fn what_the_user_has_said_stays_and_a_class_allows_what_it_says() {
    let tight = "memory.device_budget=200MiB";
    let lossless = plan(&[tight, "planning.goal=fastest"]);
    let training = &lossless.config.training;
    assert_eq!(training.mixed_precision(), Auto::Set(MixedPrecision::F32));
    assert_eq!(training.optimizer(), Optimizer::AdamW);
    assert!(lossless.search.unwrap().front.iter().all(|point| point.quality == Quality::Lossless));
    let said = [
        "training.gradient_checkpointing={every: 3}",
        "training.optimizer=lion",
        "training.batch_size=2",
        "training.effective_batch_size=4",
        "training.loss_chunk_tokens=100",
        "training.activation_compression=none",
        "training.optimizer_in_backward=false",
        "memory.offload.optimizer=device",
    ];
    let plan = plan(&[&said[..], &[tight, "planning.quality=anything"]].concat());
    let (training, memory) = (&plan.config.training, &plan.config.memory);
    let form = GradientCheckpointing::Form(Checkpointing::Every(3));
    assert_eq!(training.gradient_checkpointing(), Auto::Set(form));
    assert_eq!(training.optimizer(), Optimizer::Lion);
    assert_eq!((training.batch_size(), training.gradient_accumulation_steps()), (Auto::Set(2), Auto::Set(2)));
    assert_eq!(training.loss_chunk_tokens(), Auto::Set(100));
    assert_eq!(memory.offload.optimizer().set().map(|target| target.name()), Some("device"));
    // With every axis fixed there is one configuration.
    let whole = TrainingPlan::new(&plan.config, &spec(), &machine()).unwrap().config;
    let mut again = whole.clone();
    for set in ["training.mlp_chunk_tokens=64", "planning.goal=fastest"] {
        again.apply_set(set).unwrap();
    }
    let search = TrainingPlan::new(&again, &spec(), &machine()).unwrap().search.unwrap();
    assert!(search.exhaustive && search.dry_runs == 1, "{search:?}");
}

#[test]
fn where_nothing_fits_it_is_refused_as_without_a_search() {
    let plan = plan(&["memory.device_budget=1MiB", "planning.goal=fastest"]);
    assert!(!plan.fits() && plan.refusal.is_some());
    assert!(plan.search.unwrap().front.is_empty());
}
