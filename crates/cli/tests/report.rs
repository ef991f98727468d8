//! `plimsoll report`: a run, a plan and a configuration become a page; what is none of these is said with a remedy.

use std::path::Path;

use crate::support::{folder, ok, plimsoll, text};
use serde_json::Value;

fn read(folder: &Path, name: &str) -> String {
    std::fs::read_to_string(folder.join(name)).unwrap()
}

fn document(folder: &Path, arguments: &[&str]) -> Value {
    let arguments: Vec<&str> = ["report"].iter().chain(arguments).chain(&["--json"]).copied().collect();
    serde_json::from_str(&ok(folder, &arguments)).unwrap()
}

/// What a report is refused for.
fn refused(folder: &Path, arguments: &[&str]) -> (Option<i32>, String) {
    let arguments: Vec<&str> = ["report"].iter().chain(arguments).copied().collect();
    let output = plimsoll(folder, &arguments);
    assert!(output.stdout.is_empty(), "{}", text(&output.stdout));
    (output.status.code(), text(&output.stderr))
}

#[test]
fn a_configuration_and_a_document_of_its_plan_have_the_same_page() {
    let folder = folder();
    let here = folder.path();
    let words = ok(here, &["report", "c.yaml", "-o", "report.html"]);
    assert!(words.contains("Fits: ") && words.contains("report.html"), "{words}");
    let page = read(here, "report.html");
    assert!(page.starts_with("<!DOCTYPE html>") && page.contains("Memory through the step"));
    let plan: Value = serde_json::from_str(&ok(here, &["plan", "c.yaml", "--json"])).unwrap();
    let mut written = plan.clone();
    written["waterfall"] = serde_json::json!([
        {"change": "naive", "bytes_saved": 0, "seconds_added": 0.0, "device_peak_bytes": 9},
    ]);
    std::fs::write(here.join("plan.json"), written.to_string()).unwrap();
    let [by_file, by_plan] = ["c.yaml", "plan.json"].map(|source| document(here, &[source]));
    for report in [&by_file, &by_plan] {
        assert_eq!(report["plan"]["memory"]["device"]["peak_bytes"], plan["memory"]["device"]["peak_bytes"]);
        assert_eq!(report["timeline"]["tiers"][0]["peak_bytes"], plan["memory"]["device"]["peak_bytes"]);
        assert_eq!(report["notes"], serde_json::json!([]));
    }
    assert_eq!(by_file["configuration"], by_plan["configuration"]);
    // The waterfall of a document is shown as it is, and any other is made: it ends at the plan's peak.
    let last = by_file["waterfall"].as_array().and_then(|entries| entries.last()).unwrap();
    assert_eq!(last["device_peak_bytes"], plan["memory"]["device"]["peak_bytes"]);
    assert_eq!(by_plan["waterfall"], written["waterfall"]);
    // A flag goes over the document, and the page says that the plan is another.
    let other = document(here, &["plan.json", "--set", "data.sequence_length=8"]);
    assert!(other["notes"][0].as_str().unwrap().contains("planned again"), "{}", other["notes"]);
}

#[test]
fn a_plan_for_another_machine_is_planned_for_it_again() {
    let folder = folder();
    let here = folder.path();
    let plan = ["--model", "smollm2-135m", "--hardware", "2xrtx-3090", "--sequence-length", "128"];
    let written = ok(here, &[&["plan"], &plan[..], &["--json"]].concat());
    std::fs::write(here.join("plan.json"), &written).unwrap();
    let report = document(here, &["plan.json"]);
    assert_eq!(report["notes"], serde_json::json!([]));
    assert!(report["headline"].as_str().unwrap().contains("3090"), "{}", report["headline"]);
}

#[test]
fn a_run_is_shown_whole_whatever_its_end() {
    let folder = folder();
    let here = folder.path();
    ok(here, &["train", "c.yaml", "--set", "training.steps=2"]);
    ok(here, &["train", "c.yaml", "--set", "training.steps=4", "--resume"]);
    let report = document(here, &["out", "-o", "run.html"]);
    assert_eq!((&report["run"]["state"], &report["run"]["steps"]), (&"finished".into(), &4.into()));
    assert_eq!(report["run"]["buckets"].as_array().unwrap().len(), 4);
    let device = &report["compared"][0];
    assert_eq!((device["exact"].as_bool(), &device["planned"]), (Some(true), &device["measured"]));
    assert!(report["headline"].as_str().unwrap().contains("to the byte"));
    assert!(read(here, "run.html").contains("Planned and measured"));
    std::fs::write(here.join("out/report.json"), "{").unwrap();
    let (code, error) = refused(here, &["out", "-o", "run.html"]);
    assert!(code == Some(1) && error.contains("report.json") && error.contains("remove the file"), "{error}");
    // Killed in the middle of a line, before any report.
    let metrics = here.join("out/metrics.jsonl");
    let whole = std::fs::read_to_string(&metrics).unwrap();
    std::fs::write(&metrics, &whole[..whole.len() - 20]).unwrap();
    std::fs::remove_file(here.join("out/report.json")).unwrap();
    let open = document(here, &["out"]);
    assert_eq!((&open["run"]["state"], &open["run"]["steps"]), (&"open".into(), &3.into()));
    assert_eq!(open["compared"][0]["planned"], device["planned"]);
    // Without a configuration there is no plan, and the rest is shown.
    std::fs::remove_file(here.join("out/plimsoll.yaml")).unwrap();
    let bare = document(here, &["out"]);
    assert!(
        bare["timeline"].is_null() && bare["notes"][0].as_str().unwrap().contains("could not be made again")
    );
    std::fs::write(&metrics, "").unwrap();
    assert_eq!(document(here, &["out"])["run"]["state"], "empty");
    std::fs::write(&metrics, whole.replacen("{\"step\":2", "{\"step\":two", 1)).unwrap();
    let (code, error) = refused(here, &["out", "-o", "run.html"]);
    assert_eq!(code, Some(1));
    assert!(error.contains("metrics.jsonl, line 2") && error.contains("take the line out"), "{error}");
    assert!(read(here, "run.html").contains("Planned and measured"), "the page before is as it was");
}

#[test]
fn what_is_no_run_and_no_plan_is_said_with_a_remedy() {
    let folder = folder();
    let here = folder.path();
    std::fs::create_dir(here.join("empty")).unwrap();
    std::fs::write(here.join("other.json"), "{\"epochs\": 3}").unwrap();
    std::fs::write(here.join("cut.json"), "{\"model\": {\"name\"").unwrap();
    std::fs::write(here.join("list.json"), "[]").unwrap();
    std::fs::write(here.join("odd.json"), r#"{"fits": true, "config": {"training": {"speed": 3}}}"#).unwrap();
    for (arguments, words) in [
        (&["empty", "-o", "r.html"][..], &["metrics.jsonl", "output.dir"][..]),
        (&["other.json", "-o", "r.html"], &["other.json", "plan ... --json"]),
        (&["cut.json", "-o", "r.html"], &["cut.json", "line 1", "plan ... --json"]),
        (&["list.json", "-o", "r.html"], &["no JSON object"]),
        (&["odd.json", "-o", "r.html"], &["training.speed"]),
        (&["missing.yaml", "-o", "r.html"], &["missing.yaml"]),
        (&["-o", "r.html"], &["--model"]),
        (&["c.yaml"], &["--output"]),
        (&["c.yaml", "-o", "none/r.html"], &["none is no folder"]),
        (&["c.yaml", "-o", "empty"], &["is a folder"]),
    ] {
        let (code, error) = refused(here, arguments);
        assert_eq!(code, Some(2), "{arguments:?}: {error}");
        assert!(words.iter().all(|word| error.contains(word)), "{arguments:?}: {error}");
        assert!(!here.join("r.html").exists());
    }
}

/// A request and the document of its answer have the same page; a flag of plan is refused there.
#[test]
fn an_estimate_of_another_stack_has_a_page() {
    let folder = folder();
    let here = folder.path();
    let flags =
        ["--model", "smollm2-135m", "--lora-rank", "8", "--batch-size", "4", "--hardware", "t4", "--json"];
    let estimate = ok(here, &[&["estimate", "--stack", "peft"][..], &flags].concat());
    let answer: Value = serde_json::from_str(&estimate).unwrap();
    std::fs::write(here.join("estimate.json"), &estimate).unwrap();
    std::fs::write(here.join("request.json"), answer["request"].to_string()).unwrap();
    let [by_answer, by_request] = ["estimate.json", "request.json"].map(|source| document(here, &[source]));
    assert_eq!(by_answer["memory"], by_request["memory"]);
    assert_eq!(by_answer["memory"][0]["bytes"], answer["device_used_bytes"]);
    assert_eq!(by_answer["estimated"]["phases"], answer["phases"]);
    ok(here, &["report", "estimate.json", "-o", "page.html"]);
    let page = read(here, "page.html");
    for part in [
        "Estimate of another stack",
        "saved for backward",
        "What would make it smaller",
        "plimsoll estimate --request",
    ] {
        assert!(page.contains(part), "{part}");
    }
    let (code, words) = refused(here, &["request.json", "--batch-size", "2", "-o", "page.html"]);
    assert_eq!(code, Some(2));
    assert!(words.contains("estimate"), "{words}");
}
