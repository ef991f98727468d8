//! `plan --timeline` and a run with `memory.profile` write every allocation of a step; what cannot be written is said, and
//! nothing is lost.

use std::path::Path;
use std::process::Command;

use crate::support::{folder, ok, plimsoll, text};
use crate::svg::well_formed;
use serde_json::Value;

fn read(folder: &Path, name: &str) -> String {
    std::fs::read_to_string(folder.join(name)).unwrap()
}

/// Whether a trace has a step's allocations.
fn is_whole(trace: &str) {
    let trace: Value = serde_json::from_str(trace).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let has = |name: &str| events.iter().any(|event| event["cat"] == "allocation" && event["name"] == name);
    assert!(has("q") && has("logits"), "{:?}", events.iter().map(|e| &e["name"]).collect::<Vec<_>>());
    assert!(trace["otherData"]["peaks"]["device"]["bytes"].as_u64().unwrap() > 0);
}

#[test]
fn a_plan_writes_its_timeline_as_its_name_says() {
    let folder = folder();
    let here = folder.path();
    let words = ok(here, &["plan", "c.yaml", "--timeline", "t.json"]);
    assert!(words.contains("t.json") && words.contains("fits"), "{words}");
    is_whole(&read(here, "t.json"));
    let document = ok(here, &["plan", "c.yaml", "--json", "--timeline", "t.svg"]);
    assert!(serde_json::from_str::<Value>(&document).is_ok());
    let away = "memory.offload={optimizer: disk, gradients: host, activations: host, parameters: disk}";
    ok(here, &["plan", "c.yaml", "--set", away, "--timeline", "away.svg"]);
    for name in ["t.svg", "away.svg"] {
        let picture = read(here, name);
        well_formed(&picture);
        assert!(picture.len() < 600 << 10 && picture.contains("load line"), "{}", picture.len());
    }
    assert!(read(here, "away.svg").contains("weights.staging"));
    // A plan that does not fit has one, too: it shows where the peak is.
    let short = plimsoll(here, &["plan", "c.yaml", "--memory", "4MiB", "--timeline", "short.svg"]);
    assert_eq!(short.status.code(), Some(3), "{}", text(&short.stderr));
    well_formed(&read(here, "short.svg"));
}

#[test]
fn what_cannot_be_written_is_said_and_nothing_is_lost() {
    let folder = folder();
    let here = folder.path();
    std::fs::create_dir(here.join("folder.json")).unwrap();
    std::fs::write(here.join("t.txt"), "mine").unwrap();
    let refused = [
        ("t.txt", ".json or .svg"),
        ("none", ".json or .svg"),
        ("missing/t.json", "missing is no folder"),
        ("text.txt/t.json", "text.txt is no folder"),
        ("folder.json", "is a folder"),
    ];
    for (file, why) in refused {
        let output = plimsoll(here, &["plan", "c.yaml", "--timeline", file]);
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{file}: {error}");
        assert!(error.contains(file) && error.contains(why), "{error}");
        assert!(output.stdout.is_empty(), "nothing was planned");
    }
    assert_eq!(read(here, "t.txt"), "mine");
    // Nobody writes there. The plan is shown all the same.
    let nowhere = "/proc/timeline.json";
    let output = plimsoll(here, &["plan", "c.yaml", "--timeline", nowhere]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stdout).contains("load line") && text(&output.stderr).contains(nowhere));
    // A disk without room: what was there stays whole, and nothing else is left behind.
    ok(here, &["plan", "c.yaml", "--timeline", "t.json"]);
    let (before, names) = (read(here, "t.json"), names(here));
    let full = Command::new("sh")
        .args(["-c", "ulimit -f 1; exec \"$0\" plan c.yaml --timeline t.json --set training.batch_size=1"])
        .arg(env!("CARGO_BIN_EXE_plimsoll"))
        .env("XDG_CACHE_HOME", env!("CARGO_TARGET_TMPDIR"))
        .current_dir(here)
        .output()
        .unwrap();
    assert_eq!(full.status.code(), Some(1), "{}", text(&full.stderr));
    assert!(text(&full.stderr).contains("t.json"), "{}", text(&full.stderr));
    assert_eq!((read(here, "t.json"), self::names(here)), (before, names));
}

fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

#[test]
fn a_run_with_a_profile_writes_both() {
    let folder = folder();
    ok(folder.path(), &["train", "c.yaml", "--set", "memory.profile=true"]);
    is_whole(&read(folder.path(), "out/memory_timeline.json"));
    well_formed(&read(folder.path(), "out/memory_timeline.svg"));
}
