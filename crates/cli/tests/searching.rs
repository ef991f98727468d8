//! `plan --goal`: what it prints for people and machines, its picture, and the goals that ask for a number or a device.

use crate::support::{folder, ok, plimsoll, text};
use crate::svg::well_formed;
use serde_json::Value;

const MODEL: [&str; 5] = ["plan", "--model", "smollm2-135m", "--sequence-length", "256"];

fn json(arguments: &[&str]) -> Value {
    let folder = folder();
    let shown = ok(folder.path(), &[&MODEL[..], arguments, &["--json"]].concat());
    serde_json::from_str(&shown).unwrap()
}

#[test]
fn a_search_shows_its_front_and_draws_it() {
    let folder = folder();
    let file = folder.path().join("front.svg");
    let ask = ["--memory", "1GiB", "--goal", "fastest", "--quality", "proven"];
    let words = ok(folder.path(), &[&MODEL[..], &ask, &["--pareto", file.to_str().unwrap()]].concat());
    assert!(words.contains("searched: fastest, proven: ") && words.contains("were run dry"), "{words}");
    assert!(words.contains("memory against time") && words.contains("lossless"), "{words}");
    let picture = std::fs::read_to_string(file).unwrap();
    well_formed(&picture);
    assert!(picture.contains("the device's arena") && picture.contains("<circle"));
    let document = json(&ask);
    assert_eq!(document["search"]["goal"], "fastest");
    assert!(document["search"]["candidates"].as_f64().unwrap() > 1e6);
    assert_eq!(document["search"]["exhaustive"], false);
    let front = document["pareto"].as_array().unwrap();
    assert!(front.iter().all(|point| point["config"]["training"]["optimizer"].is_string()));
    assert!(document["config"].get("planning").is_none());
}

#[test]
fn goals_that_ask_for_a_number_or_a_device_are_answered() {
    let ask = ["--hardware", "rtx-3060", "--set", "memory.device_budget=2GiB", "--goal", "largest_batch"];
    let document = json(&ask);
    let batch: u64 = document["find"]["value"].as_str().unwrap().parse().unwrap();
    assert!(batch > 8 && document["config"]["training"]["batch_size"] == batch, "{batch}");
    assert_eq!(document["search"]["goal"], "largest_batch");
    let document = json(&["--goal", "smallest_device", "--set", "training.batch_size=8"]);
    let memory = document["hardware"]["device"]["memory"].as_u64();
    assert!(memory.is_some_and(|bytes| bytes > 1 << 30), "{}", document["hardware"]);
    assert_eq!(document["fits"], true);
    assert_eq!(document["search"]["goal"], "smallest_device");
}

#[test]
fn what_makes_no_sense_is_refused() {
    let folder = folder();
    let refused = |more: &[&str], words: &str| {
        let shown = plimsoll(folder.path(), &[&MODEL[..], more].concat());
        assert_eq!(shown.status.code(), Some(2), "{more:?}");
        assert!(text(&shown.stderr).contains(words), "{}", text(&shown.stderr));
    };
    refused(&["--goal", "best"], "planning.goal");
    refused(&["--goal", "fastest", "--find", "rank"], "--find");
    refused(&["--pareto", "front.svg"], "--goal");
    refused(&["--inference", "--goal", "fastest"], "--goal");
    refused(&["--find", "hardware", "--hardware", "rtx-4090"], "leave --hardware out");
    refused(&["--goal", "cheapest", "--memory", "8GiB"], "leave --memory out");
}

/// Ranks have a device each: a machine of so many is looked for, and paid for.
#[test]
fn devices_are_looked_for_by_as_many_as_there_are_ranks() {
    let ask = ["--find", "hardware", "--ranks", "4", "--tokens", "1B"];
    let found = json(&ask);
    let rows = found["compare"].as_array().unwrap();
    let of_card = |row: &&Value| row["hardware"]["device"]["name"] == "rtx-4090";
    let row = rows.iter().find(of_card).unwrap();
    assert_eq!(row["hardware"]["devices_of_machine"], 4);
    let named = json(&["--hardware", "rtx-4090", "--ranks", "4", "--tokens", "1B"]);
    assert_eq!(row["cost"]["dollars"], named["cost"]["dollars"]);
    assert!(row["cost"]["dollars"][0].as_f64().is_some_and(|dollars| dollars > 0.0), "{row}");
}

/// A file may leave everything to the command line, which names folders and no YAML; and a machine of one's own has a price.
#[test]
fn what_is_said_on_the_command_line_is_enough() {
    let folder = folder();
    std::fs::write(folder.path().join("empty.yaml"), "# nothing\n").unwrap();
    let words = ok(folder.path(), &["plan", "empty.yaml", "--model", "smollm2-135m", "--memory", "24GiB"]);
    assert!(words.contains("fits"), "{words}");
    ok(folder.path(), &["train", "c.yaml", "--set", "output.dir='a: b'"]);
    let words = ok(
        folder.path(),
        &["plan", "c.yaml", "--model", "a: b", "--tokens", "1M", "--price", "2", "--set", "output.dir=again"],
    );
    assert!(words.contains("1.0M tokens") && words.contains('$'), "{words}");
}
