//! What `plan` says of machines and of what does not fit, and where its speeds come from.

use std::path::Path;
use std::process::{Command, Output};

use crate::support::{folder, ok, plimsoll, text};
use serde_json::Value;

const SMALL: [&str; 5] = ["plan", "--model", "smollm2-135m", "--memory", "80MiB"];

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
    // Without a budget the ranks share what is free.
    let lines = [&[][..], &["--ranks", "2"]].map(|ranks: &[&str]| {
        json(&plan(&[ranks, &["--set", "memory.device_budget=auto", "--json"]].concat()))["memory"]["device"]
            ["budget_bytes"]
            .as_f64()
            .unwrap()
    });
    assert!(lines[1] < lines[0], "{lines:?}");
    assert!(text(&plan(&["--ranks", "2"]).stdout).contains("for each of 2 ranks"));
    let open = [
        "--set",
        "parallel.pipeline_parallel=auto",
        "--set",
        "parallel.zero_stage=auto",
        "--set",
        "parallel.overlap_communication=false",
    ];
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

/// What calibration finds is what plans go by from then on: here, and with its file anywhere.
#[test]
fn a_machine_that_was_calibrated_is_planned_for_here_and_elsewhere() {
    let (folder, cache) = (folder(), tempfile::tempdir().unwrap());
    let run = |arguments: &[&str]| with_cache(folder.path(), cache.path(), arguments);
    let found = run(&["calibrate", "-o", "here.yaml", "--disk", ".", "--json"]);
    assert!(found.status.success(), "{}", text(&found.stderr));
    let found = json(&found);
    assert!(found["samples"].as_array().unwrap().len() > 40, "{found}");
    assert!(found["disk"]["read"].as_f64().unwrap() > 1e6, "{found}");
    let doctor = json(&run(&["doctor", "--json"]));
    assert_eq!(doctor["rates"], found["rates"]);
    assert_eq!(doctor["mpi"]["built_in"], cfg!(feature = "mpi"));
    let plan =
        |more: &[&str]| json(&run(&[&["plan", "c.yaml", "--memory", "256MiB", "--json"], more].concat()));
    let (here, elsewhere) = (plan(&[]), plan(&["--hardware", "here.yaml"]));
    assert_eq!(here["time"], elsewhere["time"]);
    let bytes = |plan: &Value, of: &str| plan["memory"]["device"][of].as_u64().unwrap();
    assert_eq!(bytes(&here, "peak_bytes"), bytes(&elsewhere, "peak_bytes"));
    // What was measured here may be more than what is stated.
    assert!(bytes(&here, "overhead_bytes") >= bytes(&elsewhere, "overhead_bytes"), "{here} {elsewhere}");
    assert!(bytes(&elsewhere, "overhead_bytes") >= 30 << 20, "{elsewhere}");
    let words = run(&["hardware", "here.yaml"]);
    assert!(words.status.success(), "{}", text(&words.stderr));
    let nowhere = run(&["calibrate", "-o", "no/such/folder/here.yaml"]);
    assert_eq!(nowhere.status.code(), Some(1));
    assert!(text(&nowhere.stderr).contains("no/such/folder"), "{}", text(&nowhere.stderr));
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

#[test]
fn a_plan_for_a_machine_by_name_has_a_rank_for_each_device() {
    let folder = folder();
    let plan = |more: &[&str]| {
        let all = [&["plan", "--model", "tinyllama-1.1b", "--sequence-length", "512"], more].concat();
        plimsoll(folder.path(), &all)
    };
    let words = text(&plan(&["--hardware", "RTX 4090"]).stdout);
    assert!(words.contains("on GeForce RTX 4090") && words.contains("the device's memory"), "{words}");
    assert!(words.contains("the plan's claim"), "{words}");
    let document = json(&plan(&["--hardware", "8xh100", "--json"]));
    assert_eq!(document["hardware"]["name"], "8xh100");
    assert_eq!(document["hardware"]["device"]["name"], "h100");
    assert_eq!(document["ranks"]["world_size"], 8);
    assert_eq!(document["memory"]["device"]["limited_by"], "device memory");
    assert_eq!(document["memory"]["host"]["budget_bytes"], 256u64 << 30);
    let tensor = ["--hardware", "8xh100", "--json", "--set", "parallel.tensor_parallel=4"];
    assert_eq!(json(&plan(&tensor))["config"]["parallel"]["data_parallel"], 2);
    let less = json(&plan(&["--hardware", "rtx-4090", "--host-memory", "8GiB", "--json"]));
    assert_eq!(less["memory"]["host"]["budget_bytes"], 8u64 << 30);
    for (more, words) in [
        (&["--hardware", "8xh100", "--set", "parallel.data_parallel=4"][..], "8 ranks were started"),
        (
            &["--hardware", "8xh100", "--set", "parallel.tensor_parallel=3"],
            "among 3 ranks, and 8 ranks were started",
        ),
        (&["--hardware", "toaster"], "plimsoll hardware lists them"),
        (&["--hardware", "nowhere.yaml"], "nowhere.yaml"),
    ] {
        let refused = plan(more);
        let said = text(&refused.stderr);
        assert!(refused.status.code() == Some(2) && said.contains(words), "{more:?}: {said}");
    }
}

#[test]
fn devices_are_listed_with_their_sources() {
    let folder = folder();
    let list = ok(folder.path(), &["hardware"]);
    assert!(["rtx-4090", "a100-80", "mi300x", "dgx-h100"].iter().all(|name| list.contains(name)), "{list}");
    let one = ok(folder.path(), &["hardware", "2x8xh100"]);
    assert!(one.contains("to other machines") && one.contains("nvidia:") && one.contains("dollars"), "{one}");
    let document: Value = serde_json::from_str(&ok(folder.path(), &["hardware", "--json"])).unwrap();
    assert!(document["devices"].as_array().unwrap().len() >= 25 && document["sources"].is_object());
}

#[test]
fn machines_are_compared_with_their_hours_and_dollars() {
    let folder = folder();
    let plan = |more: &[&str]| {
        let qlora = "training.method=qlora";
        let all = ["plan", "--model", "tinyllama-1.1b", "--sequence-length", "512", "--set", qlora];
        plimsoll(folder.path(), &[&all, more].concat())
    };
    let words = text(&plan(&["--compare", "t4,rtx-4090,8xh100", "--tokens", "300M"]).stdout);
    assert!(["t4", "rtx-4090", "8xh100", "of 300", "$"].iter().all(|part| words.contains(part)), "{words}");
    let document =
        json(&plan(&["--compare", "rtx-3060,rtx-4090", "--tokens", "1e9", "--price", "0.5", "--json"]));
    let rows = document["compare"].as_array().unwrap();
    assert_eq!((rows.len(), &rows[1]["hardware"]["name"]), (2, &Value::from("rtx-4090")));
    let [hours, dollars] = ["hours", "dollars"].map(|key| &rows[1]["cost"][key]);
    assert!((dollars[0].as_f64().unwrap() - 0.5 * hours.as_f64().unwrap()).abs() < 1e-9);
    let devices = text(&plan(&["--find", "hardware"]).stdout);
    assert!(devices.contains("laptop-4060") && devices.contains("b200"), "{devices}");
    let batch = json(&plan(&["--hardware", "rtx-3060", "--find", "batch_size", "--json"]));
    let value = batch["find"]["value"].as_str().unwrap();
    assert_eq!(batch["config"]["training"]["batch_size"], value.parse::<u64>().unwrap());
    assert!(batch["find"]["next"]["short_bytes"].as_u64().unwrap() > 0 && batch["fits"] == true);
    let model = plimsoll(folder.path(), &["plan", "--hardware", "rtx-3060", "--find", "model", "--json"]);
    assert!(json(&model)["model"]["parameters"].as_u64().unwrap() > 1 << 30, "{}", text(&model.stderr));
    let here = text(&plan(&["--memory", "2GiB", "--find", "rank"]).stdout);
    assert!(here.starts_with("the largest rank that fits: "), "{here}");
    for (more, code, said) in [
        (&["--find", "speed"][..], 2, "batch_size, sequence_length"),
        (&["--compare", "toaster"], 2, "error: hardware \"toaster\": there is no such device"),
        (&["--compare", "8xh100", "--ranks", "3"], 2, "error: --ranks 3: 8xh100 has 8 devices"),
        (&["--tokens", "many"], 2, "300M, 15B"),
        (&["--price", "-1"], 2, "'--price <DOLLARS>': write dollars an hour"),
        (&["--price", "NaN"], 2, "dollars an hour"),
        (&["--price", "inf"], 2, "dollars an hour"),
        (&["--price", "1e300"], 2, "from 0 to 1000000000"),
        (&["--host-memory", "1GiB"], 2, "--hardware or --compare"),
        (&["--memory", "64MiB", "--find", "batch_size"], 3, "no batch size fits"),
    ] {
        let refused = plan(more);
        assert!(refused.status.code() == Some(code), "{more:?}: {}", text(&refused.stderr));
        assert!(text(&refused.stderr).contains(said), "{more:?}: {}", text(&refused.stderr));
    }
}

#[test]
fn a_log_of_memory_that_ran_out_is_read_and_the_run_planned_for_its_device() {
    let folder = folder();
    let log = "  3%|x| 12/400 [00:31<16:12,  2.5s/it]\nTraceback (most recent call last):\n  File \"t.py\", in training_step\n\
               torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.69 GiB \
               of which 1.00 GiB is free. Of the allocated memory 19.00 GiB is allocated by PyTorch, and 3.00 GiB is reserved by \
               PyTorch but unallocated.\n";
    std::fs::write(folder.path().join("train.log"), log).unwrap();
    let words = ok(folder.path(), &["doctor", "train.log"]);
    assert!(words.contains("line 4: PyTorch's allocator ran out of memory, step 12"), "{words}");
    assert!(words.contains("fragmentation") && words.contains("expandable_segments"), "{words}");
    let model = ["doctor", "train.log", "--model", "llama-2-7b", "--set", "data.sequence_length=512"];
    let planned = ok(folder.path(), &model);
    assert!(
        planned.contains("as Plimsoll would run it on a device of 23.7 GiB with the rates of")
            && planned.contains("and fits"),
        "{planned}"
    );
    let stays =
        [&model[..], &["--set", "memory.offload={optimizer: device, parameters: device, gradients: device}"]]
            .concat();
    let refused = ok(folder.path(), &stays);
    assert!(refused.contains(" short") && refused.contains("training.method=qlora"), "{refused}");
    let document: Value =
        serde_json::from_str(&ok(folder.path(), &[&model[..], &["--json"]].concat())).unwrap();
    assert_eq!(
        (&document["diagnosis"]["scene"]["step"], &document["plan"]["fits"]),
        (&Value::from(12), &Value::from(true))
    );
    std::fs::write(folder.path().join("fine.log"), "step 1: loss 2\n").unwrap();
    for (arguments, code, said) in [
        (&["doctor", "fine.log"][..], 1, "says nothing of memory that ran out"),
        (&["doctor", "none.log"], 1, "none.log"),
        (&["doctor", "train.log", "--model", "nobody-7b"], 2, "nobody-7b"),
        (&["doctor", "--model", "llama-2-7b"], 2, "<LOG>"),
    ] {
        let refused = plimsoll(folder.path(), arguments);
        let words = text(&refused.stderr);
        assert!(refused.status.code() == Some(code) && words.contains(said), "{arguments:?}: {words}");
    }
}

/// The technique of each line, and the reason of a value, from the program itself.
#[test]
fn a_plan_says_what_techniques_buy_and_why_a_value_was_taken() {
    let folder = folder();
    let machine = ["plan", "--model", "smollm2-135m", "--hardware", "rtx-3060", "--sequence-length", "256"];
    let shown = ok(folder.path(), &[&machine[..], &["--waterfall"]].concat());
    assert!(shown.contains("the naive way: f32, AdamW, all 8 x 256 tokens at once"), "{shown}");
    assert!(shown.contains("flash attention") && shown.contains("\nnext: "), "{shown}");
    let document = json(&plimsoll(folder.path(), &[&machine[..], &["--waterfall", "--json"]].concat()));
    let number = |entry: &Value, key: &str| entry[key].as_i64().unwrap();
    let entries = document["waterfall"].as_array().unwrap();
    let saved: i64 = entries.iter().map(|entry| number(entry, "bytes_saved")).sum();
    let naive = number(&entries[0], "device_peak_bytes");
    assert_eq!(naive - saved, number(&document["memory"]["device"], "peak_bytes"));
    assert!(entries.iter().all(|entry| entry["change"].is_string() && entry["seconds_added"].is_f64()));
    let explain =
        |key: &str| plimsoll(folder.path(), &[&machine[..], &["--json", "--explain", key]].concat());
    let found = &json(&explain("training.batch_size"))["explain"];
    assert_eq!((&found["key"], &found["chosen_by"]), (&"training.batch_size".into(), &"planner".into()));
    assert!(found["neighbours"][0]["device_peak_bytes"].is_u64(), "{found}");
    let words = ok(folder.path(), &[&machine[..], &["--explain", "training.learning_rate"]].concat());
    assert!(words.starts_with("planning does not decide training.learning_rate"), "{words}");
    let wrong = explain("training.batchsize");
    assert_eq!(wrong.status.code(), Some(2));
    assert!(text(&wrong.stderr).contains("did you mean 'training.batch_size'?"), "{}", text(&wrong.stderr));
}

/// Inference: where layers are, what is where and how fast it goes; each change that a refusal suggests, applied as it is said, fits.
#[test]
fn a_plan_of_inference_says_what_is_where_and_what_would_fit() {
    let folder = folder();
    let plan = |more: &[&str]| {
        let model = ["plan", "--inference", "--model", "llama-3.2-1b", "--hardware", "rtx-3060", "--json"];
        plimsoll(folder.path(), &[&model[..], more].concat())
    };
    let fits = plan(&["--context", "2048", "--parallel", "2"]);
    let document = json(&fits);
    assert_eq!((fits.status.code(), &document["fits"]), (Some(0), &Value::from(true)));
    let (memory, inference, time) = (&document["memory"], &document["inference"], &document["time"]);
    assert_eq!((&inference["parallel"], &inference["layers"]["device"]), (&Value::from(2), &Value::from(16)));
    // Sixteen layers of keys and values of 8 heads of 64, in two bytes.
    assert_eq!(memory["device"]["at_peak"]["kv_cache"], 2 * 2048 * 16 * 2 * 8 * 64 * 2);
    assert_eq!(memory["device"]["budget_bytes"], 12_u64 << 30);
    assert!(memory["device"]["at_peak"]["weights"].as_u64() > Some(2_400_000_000));
    let seconds = time["token"]["seconds"].as_f64().unwrap();
    assert!((time["tokens_per_second"].as_f64().unwrap() * seconds - 2.0).abs() < 1e-6);
    assert_eq!(document["changes"], serde_json::json!([]));

    let short = ["--memory", "3GiB", "--host-memory", "0"];
    let question = [&short[..], &["--kv-cache", "bf16", "--context", "4096", "--parallel", "8"]].concat();
    let refused = plan(&question);
    assert_eq!((refused.status.code(), &json(&refused)["fits"]), (Some(3), &Value::from(false)));
    let changes = json(&refused)["changes"].as_array().unwrap().clone();
    assert!(changes.len() > 2, "{changes:?}");
    for change in &changes {
        let (flag, value) = (change["flag"].as_str().unwrap(), change["value"].as_str().unwrap());
        let mut changed = question.clone();
        match changed.iter().position(|word| *word == flag) {
            Some(at) => changed[at + 1] = value,
            None => changed.extend([flag, value]),
        }
        assert_eq!(plan(&changed).status.code(), Some(0), "{change}");
    }

    let refusal = |arguments: &[&str]| {
        let output = plimsoll(folder.path(), &[&["plan", "--model", "llama-3.2-1b"], arguments].concat());
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        text(&output.stderr)
    };
    assert!(refusal(&["--context", "64"]).contains("--inference"));
    assert!(refusal(&["--inference", "--find", "model"]).contains("--find"));
    assert!(refusal(&["--inference", "--hardware", "64xh100"]).contains("the model has 16 layers"));
}

/// A front is a picture, and its file says so by its name, before anything is searched.
#[test]
fn a_front_is_drawn_to_a_picture_only() {
    let folder = folder();
    for file in ["front.png", "front"] {
        let shown = plimsoll(folder.path(), &[&SMALL[..], &["--goal", "fastest", "--pareto", file]].concat());
        let error = text(&shown.stderr);
        assert_eq!(shown.status.code(), Some(2), "{error}");
        assert!(error.contains(file) && error.contains(".svg"), "{error}");
        assert!(shown.stdout.is_empty() && !folder.path().join(file).exists());
    }
}
