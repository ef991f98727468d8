//! The life of a run as its user sees it: signals and exit codes, one owner of a folder, resuming with other settings, and
//! what a run will take, said beforehand.
#![cfg(unix)]

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use serde_json::Value;

const CONFIG: &str = "
model:
  from_scratch: {hidden_size: 16, intermediate_size: 24, num_hidden_layers: 2, num_attention_heads: 2}
data: {train: text.txt, sequence_length: 12}
training: {steps: 6, batch_size: 2, gradient_accumulation_steps: 2, learning_rate: 1e-2}
memory: {device_budget: 256MiB}
output: {dir: runs/out, save_steps: 2, save_total_limit: 9}
";

/// A run that does not end by itself.
const ENDLESS: [&str; 6] =
    ["train", "c.yaml", "--set", "training.steps=1000000", "--set", "output.save_steps=0"];

fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let words: String = (0..200).map(|i| format!("word{} ", i * 7 % 23)).collect();
    std::fs::write(folder.path().join("text.txt"), words).unwrap();
    std::fs::write(folder.path().join("c.yaml"), CONFIG).unwrap();
    folder
}

fn plimsoll(folder: &Path, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_plimsoll")).current_dir(folder).args(arguments).output().unwrap()
}

fn ok(folder: &Path, arguments: &[&str]) -> String {
    let output = plimsoll(folder, arguments);
    assert!(output.status.success(), "{arguments:?}: {}", text(&output.stderr));
    text(&output.stdout)
}

fn fails(folder: &Path, code: i32, arguments: &[&str]) -> String {
    let output = plimsoll(folder, arguments);
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {error}");
    error
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn steps(run: &Path) -> usize {
    std::fs::read_to_string(run.join("metrics.jsonl")).map_or(0, |text| text.lines().count())
}

fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten();
    let mut names: Vec<String> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// A run that has taken a step, started through a shell's words; it is ended with the value.
struct Running {
    child: Child,
    run: PathBuf,
}

impl Running {
    fn start(folder: &Path, words: &str, arguments: &[&str]) -> Running {
        let run = folder.join("runs/out");
        let before = steps(&run);
        let mut command = Command::new("sh");
        command.current_dir(folder).args(["-c", words, env!("CARGO_BIN_EXE_plimsoll")]).args(arguments);
        let mut running = Running { child: command.stdout(Stdio::null()).spawn().unwrap(), run };
        while steps(&running.run) <= before {
            assert!(running.child.try_wait().unwrap().is_none(), "it ended by itself");
            std::thread::sleep(Duration::from_millis(20));
        }
        running
    }

    fn signal(&self, signal: &str) {
        let id = self.child.id().to_string();
        assert!(Command::new("kill").args([signal, &id]).status().unwrap().success());
    }

    fn wait_for_step(&mut self) {
        let before = steps(&self.run);
        while steps(&self.run) <= before {
            assert!(self.child.try_wait().unwrap().is_none(), "it ended");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn code(&mut self) -> Option<i32> {
        self.child.wait().unwrap().code()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Signals do what they do by default, whatever the test was started to ignore (`nohup`, a script's background job). A shell
/// cannot say so itself.
const EXEC: &str = r#"env --default-signal=HUP true 2>/dev/null && exec env --default-signal=HUP,INT,TERM "$0" "$@"
    exec "$0" "$@""#;

#[test]
fn every_signal_that_asks_for_an_end_leaves_a_checkpoint_and_says_which_it_was() {
    for (signal, code) in [("-INT", 130), ("-TERM", 143), ("-HUP", 129)] {
        let folder = folder();
        let mut running = Running::start(folder.path(), EXEC, &ENDLESS);
        running.signal(signal);
        assert_eq!(running.code(), Some(code), "{signal}");
        let last = steps(&running.run);
        let names = names(&running.run);
        let checkpoint = format!("checkpoint-{last}");
        assert_eq!(
            names,
            [&checkpoint, "flight-recorder.bin", "metrics.jsonl", "plimsoll.yaml", "report.json"],
            "{signal}"
        );
    }
}

/// Launchers and shells pass signals on that their children got too.
#[test]
fn a_second_wish_that_is_no_ctrl_c_does_not_end_the_run_before_its_checkpoint() {
    let folder = folder();
    let mut running = Running::start(folder.path(), EXEC, &ENDLESS);
    ["-TERM", "-HUP", "-TERM", "-HUP"].iter().for_each(|signal| running.signal(signal));
    assert!(matches!(running.code(), Some(129 | 143)));
    assert!(names(&running.run).contains(&format!("checkpoint-{}", steps(&running.run))));
}

#[cfg(target_os = "linux")]
#[test]
fn a_signal_that_the_run_was_started_to_ignore_stays_ignored() {
    let folder = folder();
    let mut running = Running::start(
        folder.path(),
        r#"trap '' HUP
    env --default-signal=INT true 2>/dev/null && exec env --default-signal=INT "$0" "$@"
    exec "$0" "$@""#,
        &ENDLESS,
    );
    running.signal("-HUP");
    running.wait_for_step();
    running.wait_for_step();
    running.signal("-INT");
    assert_eq!(running.code(), Some(130));
}

#[test]
fn a_folder_has_one_run_at_a_time() {
    let folder = folder();
    let mut running = Running::start(folder.path(), EXEC, &ENDLESS);
    let id = running.child.id();
    // What a live run is writing.
    let writing = running.run.join(".writing-checkpoint-alive");
    std::fs::create_dir(&writing).unwrap();
    for arguments in [&["train", "c.yaml"][..], &["train", "c.yaml", "--resume"]] {
        let error = fails(folder.path(), 2, arguments);
        assert!(error.contains(&format!("in use by process {id}")), "{error}");
    }
    ok(folder.path(), &["train", "c.yaml", "--set", "output.dir=other"]);
    let convert = ["convert", "--model", "other", "--output", "runs/out", "--dtype", "f32", "--force"];
    let error = fails(folder.path(), 2, &convert);
    assert!(error.contains(&format!("in use by process {id}")), "{error}");
    assert!(writing.exists(), "a live run's folder was tidied");
    running.wait_for_step();
    // A lock goes with its process, however that ends.
    running.signal("-KILL");
    running.code();
    ok(folder.path(), &["train", "c.yaml", "--resume"]);
    assert!(!writing.exists(), "a dead run's folder was not tidied");
    assert!(!names(&running.run).iter().any(|name| name.contains("lock")), "{:?}", names(&running.run));
}

#[test]
fn a_run_that_was_killed_before_its_first_checkpoint_begins_anew() {
    let folder = folder();
    let mut running = Running::start(folder.path(), EXEC, &ENDLESS);
    running.signal("-KILL");
    running.code();
    let said = ok(folder.path(), &["train", "c.yaml", "--resume"]);
    assert!(said.contains("no checkpoint to resume from: the run begins anew"), "{said}");
    assert_eq!(steps(&running.run), 6);
    // One that was never begun begins too.
    ok(folder.path(), &["train", "c.yaml", "--resume", "--set", "output.dir=new"]);
}

#[test]
fn a_warm_up_that_is_longer_than_the_run_is_noted() {
    let folder = folder();
    let longer = ["c.yaml", "--set", "training.warmup_steps=100"];
    let said = |command: &[&str]| {
        let output = plimsoll(folder.path(), &[command, &longer].concat());
        assert!(output.status.success(), "{command:?}: {}", text(&output.stderr));
        let note = |said: &[u8]| text(said).contains("note: training.warmup_steps is 100");
        (note(&output.stdout), note(&output.stderr))
    };
    assert_eq!(said(&["plan"]), (true, false));
    assert_eq!(said(&["plan", "--json"]), (false, true));
    assert_eq!(said(&["train"]), (true, false));
    assert_eq!(said(&["train", "--json", "--set", "output.dir=again"]), (false, true));
    assert!(!ok(folder.path(), &["plan", "c.yaml", "--set", "training.warmup_steps=1"]).contains("note: "));
}

#[test]
fn what_fails_before_it_begins_leaves_nothing() {
    let folder = folder();
    std::fs::write(folder.path().join("short.txt"), "short").unwrap();
    let error = fails(folder.path(), 1, &["train", "c.yaml", "--set", "data.train=short.txt"]);
    assert!(
        error.contains("data.train: short.txt: 5 tokens") && error.contains("sequence_length=5"),
        "{error}"
    );
    let error = fails(folder.path(), 1, &["train", "c.yaml", "--set", "data.validation=short.txt"]);
    assert!(
        error.contains("data.validation: short.txt: ") && error.contains("leave data.validation out"),
        "{error}"
    );
    assert!(!folder.path().join("runs").exists(), "after the data");
    fails(folder.path(), 3, &["train", "c.yaml", "--memory", "1MiB"]);
    assert!(!folder.path().join("runs").exists(), "after the plan");
    std::fs::create_dir(folder.path().join("runs")).unwrap();
    fails(folder.path(), 1, &["train", "c.yaml", "--set", "data.train=short.txt"]);
    assert_eq!(names(&folder.path().join("runs")), [""; 0], "what was there stays");
}

#[test]
fn a_finished_run_without_a_checkpoint_is_left_as_it_is() {
    let folder = folder();
    let train = ["train", "c.yaml", "--set", "output.save_steps=0"];
    ok(folder.path(), &train);
    let before = names(&folder.path().join("runs/out"));
    let resume = [&train[..], &["--resume"]].concat();
    assert!(ok(folder.path(), &resume).contains("is finished: nothing is left to do"));
    let report: Value =
        serde_json::from_str(&ok(folder.path(), &[&resume[..], &["--json"]].concat())).unwrap();
    assert_eq!(report["finished"], true);
    assert_eq!(names(&folder.path().join("runs/out")), before);
    for other in ["training.steps=9", "training.epochs=9", "training.seed=9", "data.train=other.txt"] {
        let other = [&resume[..], &["--set", other]].concat();
        assert!(fails(folder.path(), 2, &other).contains("left no checkpoint to continue from"));
    }
}

#[test]
fn a_broken_checkpoint_names_the_one_before_it() {
    let folder = folder();
    ok(folder.path(), &["train", "c.yaml", "--set", "training.steps=4"]);
    let run = folder.path().join("runs/out");
    let resume = ["train", "c.yaml", "--resume"];
    for (file, lost) in [
        ("model.safetensors", false),
        ("optimizer.safetensors", true),
        ("trainer_state.json", true),
        ("trainer_state.json", false),
    ] {
        let file = run.join("checkpoint-4").join(file);
        let bytes = std::fs::read(&file).unwrap();
        match lost {
            true => std::fs::remove_file(&file).unwrap(),
            false => std::fs::write(&file, &bytes[..bytes.len() / 2]).unwrap(),
        }
        let error = fails(folder.path(), 1, &resume);
        for words in ["checkpoint-4", "move runs/out/checkpoint-4 away", "goes on from runs/out/checkpoint-2"]
        {
            assert!(error.contains(words), "{error}");
        }
        std::fs::write(&file, &bytes).unwrap();
    }
    std::fs::remove_dir_all(run.join("checkpoint-4")).unwrap();
    ok(folder.path(), &resume);
}

#[test]
fn a_resumed_run_takes_other_choices_with_a_word_and_refuses_to_become_another_run() {
    let folder = folder();
    let run = folder.path().join("runs/out");
    ok(folder.path(), &["train", "c.yaml", "--set", "training.steps=4"]);
    let error = fails(
        folder.path(),
        2,
        &["train", "c.yaml", "--resume", "--set", "training.seed=7", "--set", "data.sequence_length=10"],
    );
    for words in ["data.sequence_length: 12 -> 10", "training.seed: 42 -> 7", "plimsoll.yaml"] {
        assert!(error.contains(words), "{error}");
    }
    let said = ok(
        folder.path(),
        &[
            "train",
            "c.yaml",
            "--resume",
            "--set",
            "training.learning_rate=1e-3",
            "--set",
            "training.lr_schedule=constant",
        ],
    );
    for words in [
        "resuming after step 4\n",
        "from here on: training.steps: 4 -> 6\n",
        "from here on: training.learning_rate: 0.01 -> 0.001\n",
        "from here on: training.lr_schedule: linear -> constant\n",
    ] {
        assert!(said.contains(words), "{said}");
    }
    assert_eq!(said.matches("from here on").count(), 3, "{said}");
    let metrics = std::fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    let rates: Vec<f64> = metrics
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap()["lr"].as_f64().unwrap())
        .collect();
    assert_eq!(rates[4..], [1e-3, 1e-3]);
    // Nothing changes: nothing is said.
    let same = [
        "train",
        "c.yaml",
        "--resume",
        "--set",
        "training.learning_rate=1e-3",
        "--set",
        "training.lr_schedule=constant",
    ];
    assert!(!ok(folder.path(), &same).contains("from here on"));
}

#[test]
fn the_time_and_the_disk_of_the_whole_run_are_said_beforehand_and_kept() {
    let folder = folder();
    let set = ["--set", "output.save_total_limit=2", "--set", "training.mixed_precision=f32"];
    let plan = ok(folder.path(), &[&["plan", "c.yaml", "--json"][..], &set].concat());
    let plan: Value = serde_json::from_str(&plan).unwrap();
    let run = &plan["run"];
    let number = |value: &Value| value.as_u64().unwrap();
    assert_eq!((&run["steps"], &run["checkpoints"]), (&6.into(), &2.into()));
    let seconds = 6.0 * plan["time"]["step_seconds"].as_f64().unwrap();
    assert!((run["seconds"].as_f64().unwrap() - seconds).abs() < 1e-9 * seconds);
    // f32 weights, and two moments of each in a checkpoint.
    let weights = 4 * number(&plan["model"]["parameters"]);
    assert_eq!([number(&run["model_bytes"]), number(&run["checkpoint_bytes"])], [weights, 3 * weights]);
    assert_eq!([number(&run["left_bytes"]), number(&run["most_bytes"])], [7 * weights, 9 * weights]);

    let said = ok(folder.path(), &[&["train", "c.yaml"][..], &set].concat());
    assert!(said.contains("the whole run, 6 steps: about ") && said.contains("2 checkpoints of "), "{said}");
    let out = folder.path().join("runs/out");
    let tensors = |name: &str| {
        let file = std::fs::read(out.join(name)).unwrap();
        file.len() as u64 - 8 - u64::from_le_bytes(*file.first_chunk().unwrap())
    };
    let checkpoint = |step: u64| {
        ["model", "optimizer"]
            .map(|file| tensors(&format!("checkpoint-{step}/{file}.safetensors")))
            .iter()
            .sum::<u64>()
    };
    assert_eq!(tensors("model.safetensors") + checkpoint(4) + checkpoint(6), number(&run["left_bytes"]));
    // The length of an epoch is known when the data is read.
    let epoch = ["--set", "training.epochs=2", "--set", "output.dir=epochs"];
    assert!(ok(folder.path(), &[&["plan", "c.yaml"][..], &epoch].concat()).contains("depends on the data"));
    assert!(ok(folder.path(), &[&["train", "c.yaml"][..], &epoch].concat()).contains("the whole run, "));
}

/// Adapters are written in f32, whatever is beside them; those that begin with singular values at twice their rank.
#[test]
fn the_disk_of_adapters_is_that_of_their_files() {
    let folder = folder();
    ok(folder.path(), &["train", "c.yaml", "--set", "output.dir=base"]);
    for lora in [
        "{rank: 2}",
        "{rank: 2, init_lora_weights: pissa}",
        "{rank: 2, use_dora: true, modules_to_save: [lm_head]}",
    ] {
        let out = format!("adapters-{}", lora.len());
        let set = [format!("training.lora={lora}"), format!("output.dir={out}")];
        let arguments = |command| {
            let mut arguments = vec![command, "c.yaml", "--model", "base", "--set", "training.method=lora"];
            set.iter().for_each(|assignment| arguments.extend(["--set", assignment]));
            arguments
        };
        ok(folder.path(), &arguments("train"));
        let plan = ok(folder.path(), &[&arguments("plan")[..], &["--json"]].concat());
        let plan: Value = serde_json::from_str(&plan).unwrap();
        let file = std::fs::read(folder.path().join(out).join("adapter_model.safetensors")).unwrap();
        let tensors = file.len() as u64 - 8 - u64::from_le_bytes(*file.first_chunk().unwrap());
        assert_eq!(plan["run"]["model_bytes"].as_u64(), Some(tensors), "{lora}");
    }
}
