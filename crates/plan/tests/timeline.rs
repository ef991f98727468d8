//! The timeline of a plan: every allocation is in it once, what is live at the peak is what the ledger says, and pictures
//! stay small.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use plimsoll_memory::{Tag, Tier};
use plimsoll_model::{ModelSpec, catalogue};
use plimsoll_plan::config::RawConfig;
use plimsoll_plan::{DryRun, Moment, Timeline, TimelineError, TimelineFormat, TrainingPlan};
use serde_json::Value;

use crate::common::machine;

fn small() -> ModelSpec {
    ModelSpec { num_layers: 3, vocab_size: 2048, ..catalogue::find("smollm2-135m").unwrap() }
}

fn plan(spec: &ModelSpec, set: &[&str]) -> TrainingPlan {
    let text = "data: {sequence_length: 64}\nmemory: {device_budget: 100000GiB}\ntraining: {batch_size: 1, mixed_precision: f32}";
    let mut config = RawConfig::from_str(text, "test").unwrap();
    set.iter().for_each(|assignment| config.apply_set(assignment).unwrap());
    TrainingPlan::new(&config, spec, &machine()).unwrap()
}

const AWAY: &str = "memory.offload={optimizer: disk, gradients: host, activations: host, parameters: disk}";

/// Settings that differ in where things are and in what is counted.
const SETTINGS: [&[&str]; 4] = [
    &["training.gradient_accumulation_steps=1"],
    &["training.gradient_accumulation_steps=64", "training.gradient_checkpointing=full"],
    &[AWAY, "training.gradient_checkpointing=full"],
    &["training.optimizer_in_backward=true", "training.gradient_accumulation_steps=1"],
];

/// The document, and of it the events of a kind and a process.
fn document(timeline: &Timeline) -> Value {
    serde_json::from_slice(&timeline.to_json().unwrap()).unwrap()
}

fn process(document: &Value, name: &str) -> Option<u64> {
    let events = document["traceEvents"].as_array().unwrap();
    let named = |event: &&Value| event["name"] == "process_name" && event["args"]["name"] == name;
    events.iter().find(named).map(|event| event["pid"].as_u64().unwrap())
}

fn events<'a>(document: &'a Value, ph: &'a str, pid: Option<u64>) -> impl Iterator<Item = &'a Value> {
    let events = document["traceEvents"].as_array().unwrap().iter();
    events.filter(move |event| event["ph"] == ph && pid.is_some() && event["pid"].as_u64() == pid)
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("{value}"))
}

#[test]
fn every_allocation_is_in_the_trace_once_and_the_peak_is_the_ledgers() {
    for set in SETTINGS {
        let plan = plan(&small(), set);
        let (settings, accumulation) = (&plan.choice.settings, plan.choice.accumulation);
        let run = DryRun::timeline(&small(), settings, accumulation, &machine().rates).unwrap();
        let document = document(&plan.timeline().unwrap());
        let tiers = [("device memory", &run.ledger), ("host memory", &run.host), ("disk", &run.disk)];
        for (name, ledger) in tiers {
            let pid = process(&document, name);
            assert_eq!(pid.is_some(), !ledger.events().is_empty(), "{set:?}: {name}");
            let all: Vec<&Value> = events(&document, "X", pid).collect();
            // Each begins with an event of its own, and those are all.
            let births: BTreeMap<u64, &Value> =
                all.iter().map(|event| (number(&event["args"]["birth"]), *event)).collect();
            let taken: Vec<_> = ledger.events().iter().filter(|event| event.delta > 0).collect();
            assert_eq!((births.len(), all.len()), (taken.len(), taken.len()));
            for event in &taken {
                let (own, args) = (births[&event.number], &births[&event.number]["args"]);
                assert_eq!(
                    (own["name"].as_str(), args["tag"].as_str()),
                    (Some(event.name), Some(event.tag.name()))
                );
                assert_eq!(
                    (number(&args["bytes"]), number(&args["offset"])),
                    (event.delta as u64, event.offset)
                );
                assert!(args["death"].is_null() || number(&args["death"]) > event.number);
                assert!(own["ts"].as_f64().unwrap() >= 0.0 && own["dur"].as_f64().unwrap() >= 0.0);
            }
            let released = ledger.events().iter().filter(|event| event.delta < 0).count();
            assert_eq!(all.iter().filter(|event| !event["args"]["death"].is_null()).count(), released);
            nobody_shares_a_row(&all);
            let Some(peak) = ledger.events().iter().rfind(|event| event.raised_peak) else { continue };
            let is_live = |event: &&&Value| {
                let (birth, death) = (number(&event["args"]["birth"]), event["args"]["death"].as_u64());
                birth <= peak.number && death.is_none_or(|death| death > peak.number)
            };
            let mut live: BTreeMap<&str, u64> = BTreeMap::new();
            let mut highest = 0;
            for event in all.iter().filter(is_live) {
                let args = &event["args"];
                *live.entry(args["tag"].as_str().unwrap()).or_default() += number(&args["bytes"]);
                highest = highest.max(number(&args["offset"]) + number(&args["bytes"]));
            }
            let expected: BTreeMap<&str, u64> =
                ledger.at_peak().by_tag.iter().map(|(tag, bytes)| (tag.name(), bytes)).collect();
            assert_eq!((live, highest), (expected.clone(), ledger.at_peak().peak), "{set:?}: {name}");
            // The counters say what is live behind all events of that moment.
            let moment = 1e6 * peak.seconds.unwrap_or(0.0);
            for tag in expected.keys() {
                let of_tag = ledger.events().iter().filter(|event| event.tag.name() == *tag);
                let until = of_tag.take_while(|event| 1e6 * event.seconds.unwrap_or(0.0) <= moment);
                let live: i64 = until.map(|event| event.delta).sum();
                let counters = events(&document, "C", pid).filter(|event| event["name"] == *tag);
                let until = counters.take_while(|event| event["ts"].as_f64().unwrap() <= moment);
                assert_eq!(number(&until.last().unwrap()["args"]["bytes"]), live as u64, "{set:?}: {tag}");
            }
        }
        assert_eq!(document["otherData"]["peaks"]["device"]["bytes"], plan.peak_bytes());
    }
}

/// On a row, what is born is born after what was there before has died.
fn nobody_shares_a_row(all: &[&Value]) {
    let mut rows: BTreeMap<u64, Vec<(u64, u64)>> = BTreeMap::new();
    for event in all {
        let args = &event["args"];
        let death = args["death"].as_u64().unwrap_or(u64::MAX);
        rows.entry(number(&event["tid"])).or_default().push((number(&args["birth"]), death));
    }
    for row in rows.values_mut() {
        row.sort_unstable();
        assert!(row.windows(2).all(|two| two[0].1 <= two[1].0), "{row:?}");
    }
}

#[test]
fn what_is_counted_is_said_with_how_often() {
    let counted = |set: &[&str]| document(&plan(&small(), set).timeline().unwrap())["otherData"].clone();
    let once = counted(SETTINGS[1]);
    let all = once["counted"].as_array().unwrap();
    // Micro-batches of a step: a few are run, the rest are like those of the events.
    let most = all.iter().map(|counted| number(&counted["times"])).max().unwrap();
    assert!((32..64).contains(&most), "{once}");
    assert!(all.iter().all(|counted| number(&counted["first"]) < number(&counted["end"])));
    assert!(once["iterations"].as_str().unwrap().contains("once"));
    let parts = |set: &[&str]| -> Vec<&str> {
        plan(&small(), set).timeline().unwrap().parts.iter().map(|p| p.what).collect()
    };
    assert_eq!(parts(SETTINGS[2]), ["load", "step", "next step"]);
    let evaluated = [SETTINGS[2], &["data.validation=text.txt"]].concat();
    assert_eq!(parts(&evaluated), ["load", "step", "next step", "evaluation"]);
}

#[test]
fn buffers_bear_the_name_of_what_they_hold() {
    let timeline = plan(&small(), SETTINGS[2]).timeline().unwrap();
    let device = timeline.tiers.iter().find(|tier| tier.tier == Tier::Device).unwrap();
    let staging = device.allocations.iter().filter(|allocation| allocation.tag == Tag::Staging);
    let names: BTreeSet<&str> = staging.map(|allocation| allocation.name).collect();
    for name in ["weights.staging", "gradients.staging", "states.staging", "activation"] {
        assert!(names.contains(name), "{name} is not among {names:?}");
    }
    // What leaves in a step belongs to the layer that it leaves.
    let host = timeline.tiers.iter().find(|tier| tier.tier == Tier::Host).unwrap();
    let saved = host.allocations.iter().filter(|allocation| allocation.tag == Tag::Activations);
    let layers: BTreeSet<Option<u32>> = saved.map(|allocation| allocation.layer).collect();
    assert!((0..2).all(|layer| layers.contains(&Some(layer))), "{layers:?}");
}

#[test]
fn a_picture_of_126_layers_is_small_and_says_what_it_leaves_out() {
    const MOST: usize = 600 << 10;
    let large = catalogue::find("llama-3.1-405b").unwrap();
    for (spec, set) in [(small(), SETTINGS[0]), (large.clone(), SETTINGS[1]), (large, SETTINGS[2])] {
        let timeline = plan(&spec, set).timeline().unwrap();
        let picture = timeline.to_svg();
        println!("{}: {} bytes", spec.name, picture.len());
        assert!(picture.len() < MOST, "{}: {}", spec.name, picture.len());
        assert!(picture.contains("load line") && picture.contains("peak ") && picture.contains("<title>"));
        assert!(picture.contains("are too small to be seen apart"), "{}", spec.name);
    }
}

/// Moments are the plan's seconds: a step is as long as the plan says, what happens later is later, and the axis says so.
#[test]
fn moments_are_the_plans_seconds() {
    for set in SETTINGS {
        let plan = plan(&small(), set);
        let timeline = plan.timeline().unwrap();
        assert!(timeline.has_seconds);
        let step = timeline.parts.iter().rfind(|part| part.what.ends_with("step")).unwrap();
        let seconds = 1e-6 * (step.end.micros - step.begin.micros);
        let planned = plan.choice.time.step_seconds;
        assert!((seconds - planned).abs() < 0.02 * planned, "{set:?}: {seconds} and {planned}");
        let mut moments: Vec<Moment> = timeline
            .tiers
            .iter()
            .flat_map(|tier| &tier.allocations)
            .flat_map(|own| [own.birth, own.death])
            .collect();
        moments.sort_by_key(|moment| moment.event);
        assert!(moments.windows(2).all(|two| two[0].micros <= two[1].micros), "{set:?}");
        let picture = timeline.to_svg();
        assert!(picture.contains(" s<") && !picture.contains("one after the other"), "{set:?}");
        assert!(!picture.contains("NaN") && !picture.contains("inf"), "{set:?}");
    }
}

/// Where nobody tells the time, the axis has the numbers of events.
#[test]
fn a_picture_may_do_without_seconds() {
    let mut timeline = plan(&small(), SETTINGS[0]).timeline().unwrap();
    timeline.has_seconds = false;
    let number = |moment: &mut Moment| moment.micros = moment.event as f64;
    for tier in &mut timeline.tiers {
        let allocations = tier.allocations.iter_mut();
        allocations.for_each(|own| [&mut own.birth, &mut own.death].into_iter().for_each(number));
    }
    for part in &mut timeline.parts {
        [&mut part.begin, &mut part.end].into_iter().for_each(number);
    }
    let picture = timeline.to_svg();
    assert!(picture.contains("one after the other") && !picture.contains(" s<"));
}

#[test]
fn a_file_says_by_its_ending_what_it_is_to_be() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| folder.path().join(name);
    std::fs::create_dir(file("there.svg")).unwrap();
    assert_eq!(TimelineFormat::of(&file("a.json")), Ok(TimelineFormat::Json));
    assert_eq!(TimelineFormat::of(Path::new("a.b.SVG")), Ok(TimelineFormat::Svg));
    for name in ["a.txt", "json", ".svg", "a.json ", "a."] {
        let refused = TimelineFormat::of(&file(name)).unwrap_err();
        assert_eq!(refused, TimelineError::Ending(file(name)));
        assert!(refused.to_string().contains(".json") && refused.to_string().contains(".svg"));
    }
    assert_eq!(TimelineFormat::of(&file("there.svg")), Err(TimelineError::IsFolder(file("there.svg"))));
    let missing = TimelineError::NoFolder { file: file("no/a.svg"), folder: file("no") };
    assert_eq!(TimelineFormat::of(&file("no/a.svg")), Err(missing));
}
