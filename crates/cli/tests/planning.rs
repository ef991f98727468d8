//! What `plan` says of machines and of what does not fit, and where its speeds come from.

mod support;

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;
use support::{folder, ok, plimsoll, text};

const SMALL: [&str; 5] = ["plan", "--model", "smollm2-135m", "--memory", "100MiB"];

fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn a_plan_that_does_not_fit_is_shown_and_ends_with_3() {
    let folder = folder();
    let own = ["plan", "c.yaml", "--memory", "4MiB"];
    for arguments in [&SMALL[..], &own] {
        let shown = plimsoll(folder.path(), arguments);
        let words = text(&shown.stdout);
        assert_eq!(shown.status.code(), Some(3), "{words}{}", text(&shown.stderr));
        assert!(words.contains("does NOT fit") && words.contains(" short"), "{words}");
        assert!(shown.stderr.is_empty(), "{}", text(&shown.stderr));
        let refusal = words.split("does NOT fit").nth(1).unwrap();
        let widest = refusal.lines().map(|line| line.chars().count()).max().unwrap();
        assert!(widest <= 100, "{widest}: {refusal}");
    }
    let document = plimsoll(folder.path(), &[&own[..], &["--json"]].concat());
    assert_eq!((document.status.code(), &json(&document)["fits"]), (Some(3), &Value::from(false)));
    assert!(!json(&document)["shortages"].as_array().unwrap().is_empty());
    assert_eq!(plimsoll(folder.path(), &["plan", "c.yaml"]).status.code(), Some(0));
}

#[test]
fn a_plan_for_another_machine_wants_its_memory_and_says_whose_speed_it_shows() {
    let folder = folder();
    let unsaid = plimsoll(folder.path(), &["plan", "--model", "smollm2-135m", "--elsewhere"]);
    assert_eq!(unsaid.status.code(), Some(2));
    assert!(text(&unsaid.stderr).contains("--memory"), "{}", text(&unsaid.stderr));
    let named = ok(folder.path(), &["plan", "--model", "smollm2-135m", "--memory", "24GiB"]);
    assert!(named.contains("at the speed of this machine's CPU"), "{named}");
    let here = ok(folder.path(), &["plan", "c.yaml"]);
    assert!(here.contains("on this machine's CPU") && !here.contains("at the speed of"), "{here}");
}

/// The number of ranks is known before anything is checked, and the division is planned where it is left open.
#[test]
fn a_plan_for_ranks_divides_them_as_it_is_told_or_as_is_fastest() {
    let folder = folder();
    let plan = |more: &[&str]| plimsoll(folder.path(), &[&["plan", "c.yaml"], more].concat());
    let shares = ["--set", "parallel.shard_size=2", "--set", "parallel.zero_stage=3"];
    let four = plan(&[&["--ranks", "4", "--json"], &shares[..]].concat());
    assert_eq!((four.status.code(), &json(&four)["ranks"]["world_size"]), (Some(0), &Value::from(4)));
    assert!(json(&four).get("search").is_none());
    for ranks in [&[][..], &["--ranks", "1"], &["--ranks", "3"]] {
        let refused = plan(&[ranks, &shares].concat());
        assert_eq!(refused.status.code(), Some(2));
        assert!(text(&refused.stderr).contains("fall into no groups of 2"), "{}", text(&refused.stderr));
    }
    let open = ["--set", "parallel.pipeline_parallel=auto", "--set", "parallel.zero_stage=auto"];
    let two = plan(&[&["--ranks", "2"], &open[..]].concat());
    let words = text(&two.stdout);
    let line = words.lines().find(|line| line.starts_with("divided: "));
    assert!(line.is_some_and(|line| line.contains(", ZeRO ") && line.contains(" ways")), "{words}");
    let two = json(&plan(&[&["--ranks", "2", "--json"], &open[..]].concat()));
    let (search, parallel) = (&two["search"], &two["config"]["parallel"]);
    let ways = ["data_parallel", "pipeline_parallel"].map(|key| search[key].as_u64().unwrap());
    assert_eq!(ways.iter().product::<u64>(), 2);
    assert_eq!(
        [&parallel["data_parallel"], &parallel["pipeline_parallel"]].map(|way| way.as_u64()),
        ways.map(Some)
    );
    assert_eq!(parallel["zero_stage"], search["zero_stage"]);
    // Four stages of data parallel ranks, and two of layers.
    assert_eq!((&search["candidates"], &search["exhaustive"]), (&Value::from(5), &Value::from(true)));
    let uncounted = plan(&open);
    assert_eq!(uncounted.status.code(), Some(2));
    assert!(text(&uncounted.stderr).contains("--ranks"), "{}", text(&uncounted.stderr));
}

#[test]
fn without_a_method_the_plan_says_what_each_would_need() {
    let folder = folder();
    let arguments = ["plan", "--model", "smollm2-135m", "--memory", "24GiB"];
    let words = ok(folder.path(), &arguments);
    let shown = ok(folder.path(), &["inspect", "smollm2-135m"]);
    let table = |words: &str| -> Vec<String> {
        words
            .lines()
            .filter(|line| line.contains("fine-tune: ") || line.contains("LoRA: "))
            .map(str::to_owned)
            .collect()
    };
    assert_eq!(table(&words).len(), 4, "{words}");
    assert_eq!(table(&words), table(&shown));
    let chosen = ok(folder.path(), &[&arguments[..], &["--set", "training.method=lora"]].concat());
    assert!(table(&chosen).is_empty(), "{chosen}");
}

/// The program with a cache folder of its own.
fn with_cache(folder: &Path, cache: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_plimsoll"));
    command.current_dir(folder).env("XDG_CACHE_HOME", cache).args(arguments).output().unwrap()
}

#[test]
fn speeds_are_measured_once_and_a_plan_depends_on_what_was_kept() {
    let (folder, cache) = (folder(), tempfile::tempdir().unwrap());
    let on_disk = ["plan", "c.yaml", "--json", "--set", "memory.offload.optimizer=disk"];
    let plan = || json(&with_cache(folder.path(), cache.path(), &on_disk));
    let first = plan();
    let file = cache.path().join("plimsoll/rates.json");
    assert_eq!(first["speeds"]["file"], file.to_str().unwrap());
    assert!(first["speeds"]["disk"]["rates"]["read"].as_f64().unwrap() > 0.0, "{}", first["speeds"]);
    let kept = std::fs::read(&file).unwrap();
    for _ in 0..3 {
        let again = plan();
        assert_eq!(again["speeds"], first["speeds"]);
        assert_eq!(again["time"], first["time"]);
        assert_eq!(again["config"], first["config"]);
    }
    assert_eq!(std::fs::read(&file).unwrap(), kept);

    // What is kept is what counts.
    let text_of_file = String::from_utf8(kept.clone()).unwrap();
    let mut slower: Value = serde_json::from_str(&text_of_file).unwrap();
    let rates = &mut slower["machines"][0]["measured"]["rates"];
    for key in ["matmul_f32", "matmul_bf16", "memory_bandwidth", "exps"] {
        rates[key] = Value::from(1e6);
    }
    slower["machines"][0]["measured"]["at"] = Value::from(1_000_000_000);
    std::fs::write(&file, slower.to_string()).unwrap();
    let seconds = |plan: &Value| plan["time"]["step_seconds"].as_f64().unwrap();
    assert!(seconds(&plan()) > 2.0 * seconds(&first));
    let words = with_cache(folder.path(), cache.path(), &["plan", "c.yaml"]);
    let words = text(&words.stdout);
    assert!(
        words.contains("days ago") && words.contains("they are old: plimsoll doctor --measure"),
        "{words}"
    );

    // Nonsense is measured anew, and so is what is asked for.
    std::fs::write(&file, "{").unwrap();
    assert!(seconds(&plan()) > 0.0);
    assert!(serde_json::from_slice::<Value>(&std::fs::read(&file).unwrap()).is_ok());
    std::fs::write(&file, slower.to_string()).unwrap();
    let measured = with_cache(folder.path(), cache.path(), &["doctor", "--measure", "--json"]);
    assert!(measured.status.success());
    assert!(json(&measured)["rates"]["matmul_f32"].as_f64().unwrap() > 1e6);
    let now: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    assert!(now["machines"][0]["measured"]["at"].as_u64().unwrap() > 1_000_000_000);
    assert!(now["disks"].as_array().unwrap().is_empty());
}

#[test]
fn where_nothing_can_be_kept_the_plan_is_made_all_the_same() {
    let folder = folder();
    std::fs::write(folder.path().join("file"), "").unwrap();
    let nowhere = folder.path().join("file");
    let output = with_cache(folder.path(), &nowhere, &["plan", "c.yaml"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(text(&output.stdout).contains("not kept: "), "{}", text(&output.stdout));
}
