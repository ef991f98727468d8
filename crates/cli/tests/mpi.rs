//! The program on several ranks over MPI, as a user starts it.

#![cfg_attr(not(feature = "mpi"), allow(dead_code, unused_imports))]

use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

#[path = "../../device/tests/cuda/mock.rs"]
mod mock;

/// One micro-batch of four goes to each rank in turn.
const CONFIG: &str = "
model:
  from_scratch: {hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, num_attention_heads: 2}
data: {train: text.txt, validation: text.txt, sequence_length: 16}
training: {steps: 6, batch_size: 1, effective_batch_size: 6, learning_rate: 1e-2, mixed_precision: bf16}
memory: {device_budget: 256MiB}
parallel: {reproducible: true}
output: {save_steps: 2, eval_steps: 3}
";

fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let words: String = (0..900).map(|i| format!("word{} ", i * 7 % 23)).collect();
    std::fs::write(folder.path().join("text.txt"), words).unwrap();
    std::fs::write(folder.path().join("c.yaml"), CONFIG).unwrap();
    folder
}

fn train(folder: &Path, out: &str, more: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_plimsoll"));
    command.env("XDG_CACHE_HOME", env!("CARGO_TARGET_TMPDIR")).current_dir(folder);
    command.args(["train", "c.yaml", "--set", &format!("output.dir={out}")]).args(more);
    command
}

fn said(output: &Output) -> String {
    [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes)).concat()
}

fn ok(folder: &Path, out: &str, more: &[&str]) -> String {
    let output = train(folder, out, more).output().unwrap();
    assert!(output.status.success(), "{more:?}: {}", said(&output));
    said(&output)
}

fn model(folder: &Path, out: &str) -> Vec<u8> {
    std::fs::read(folder.join(out).join("model.safetensors")).unwrap()
}

#[cfg(not(feature = "mpi"))]
#[test]
fn ranks_need_the_feature() {
    println!("skipped: runs on several ranks; this program is built without the feature mpi");
    let folder = folder();
    let output = train(folder.path(), "out", &["--ranks", "2"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2), "{}", said(&output));
    assert!(said(&output).contains("--features mpi"), "{}", said(&output));
    assert!(!folder.path().join("out").exists());
    // Who shares is checked when the ranks have been counted.
    let shares = ["--ranks", "2", "--set", "parallel.shard_size=2", "--set", "parallel.zero_stage=3"];
    let output = train(folder.path(), "out", &shares).output().unwrap();
    assert!(said(&output).contains("--features mpi"), "{}", said(&output));
    let output = train(folder.path(), "out", &shares[2..]).output().unwrap();
    assert_eq!(output.status.code(), Some(2), "{}", said(&output));
    assert!(said(&output).contains("fall into no groups of 2"), "{}", said(&output));
}

/// Where the system's loader finds these.
fn folders_of(libraries: &[&Path]) -> String {
    let folders: Vec<String> =
        libraries.iter().map(|library| library.parent().unwrap().display().to_string()).collect();
    folders.join(":")
}

/// The same with a driver without a GPU, and NCCL without one if it is there.
fn train_on_cards(
    folder: &Path,
    out: &str,
    libraries: &[&Path],
    variables: &[(&str, &str)],
    more: &[&str],
) -> Output {
    let device: &[&str] = if more.contains(&"--device") { &[] } else { &["--device", "cuda"] };
    let short = [
        "--set",
        "memory.device_budget=1GiB",
        "--set",
        "training.steps=2",
        "--set",
        "training.effective_batch_size=4",
        "--set",
        "output.eval_steps=2",
    ];
    let card = [device, &short[..]].concat();
    let mut command = train(folder, out, &[&card[..], more].concat());
    command.env("LD_LIBRARY_PATH", folders_of(libraries)).envs(variables.iter().copied());
    command.output().unwrap()
}

#[cfg(feature = "mpi")]
mod over_mpi {
    use super::*;

    /// Each rank has a card of its own. What they send goes from card to card, or by way of the host where there is no NCCL.
    #[test]
    fn ranks_on_cards_leave_what_one_card_leaves() {
        let (Some(driver), Some(nccl)) = (mock::library(), mock::nccl()) else { return };
        let folder = folder();
        let folder = folder.path();
        let two = [("MOCK_CARDS", "2")];
        let log = folder.join("sent").display().to_string();
        let trains = |out: &str, libraries: &[&Path], more: &[&str]| {
            let output = train_on_cards(
                folder,
                out,
                libraries,
                &[&two[..], &[("MOCK_NCCL_LOG", &log)]].concat(),
                more,
            );
            assert!(output.status.success(), "{out}: {}", said(&output));
            said(&output)
        };
        trains("one", &[driver], &[]);
        for (name, set, alike) in [
            ("shards", &["parallel.zero_stage=3", "memory.offload.optimizer=host"][..], true),
            ("pipeline", &["parallel.pipeline_parallel=2"], true),
            ("tensor", &["parallel.tensor_parallel=2"], false),
        ] {
            let more: Vec<&str> = set.iter().flat_map(|set| ["--set", set]).collect();
            let more = [&["--ranks", "2"], &more[..]].concat();
            let by_host = trains("by host", &[driver], &more);
            assert!(by_host.contains("by way of the host"), "{by_host}");
            let asked =
                trains("asked", &[driver, nccl], &[&more[..], &["--no-nccl", "--no-cuda-graphs"]].concat());
            assert!(!asked.contains("by way of the host") && !Path::new(&log).exists(), "{asked}");
            assert!(model(folder, "by host") == model(folder, "asked"), "{name}");
            let by_link = trains("by link", &[driver, nccl], &more);
            assert!(!by_link.contains("by way of the host"), "{by_link}");
            assert!(model(folder, "by host") == model(folder, "by link"), "{name}");
            assert_eq!(model(folder, "one") == model(folder, "by link"), alike, "{name}");
            let report = |out: &str| -> Value {
                serde_json::from_slice(&std::fs::read(folder.join(out).join("report.json")).unwrap()).unwrap()
            };
            let by_link = report("by link");
            for rank in by_link["ranks"].as_array().unwrap() {
                let bytes = |which: &str| &rank[which]["device_peak_bytes"];
                assert_eq!(bytes("planned"), bytes("measured"), "{name}");
            }
            // Each rank says what went by the link; first a byte to the other one.
            let sent = std::fs::read_to_string(&log).unwrap();
            assert_eq!(sent.lines().count(), 2, "{sent}");
            for line in sent.lines() {
                let numbers: Vec<u64> = line.split(' ').map(|number| number.parse().unwrap()).collect();
                assert!(numbers[1] > 3 && numbers[2] > 1000, "{name}: {line}");
            }
            std::fs::remove_file(&log).unwrap();
            for out in ["by host", "asked", "by link"] {
                std::fs::remove_dir_all(folder.join(out)).unwrap();
            }
        }
    }

    #[test]
    fn ranks_without_cards_of_their_own_are_refused() {
        let Some(driver) = mock::library() else { return };
        let folder = folder();
        let folder = folder.path();
        let refused = |variables: &[(&str, &str)], more: &[&str]| {
            let output =
                train_on_cards(folder, "out", &[driver], variables, &[&["--ranks", "2"], more].concat());
            assert!(
                !output.status.success() && !folder.join("out/report.json").exists(),
                "{}",
                said(&output)
            );
            said(&output)
        };
        let one = refused(&[("MOCK_CARDS", "1")], &[]);
        assert!(one.contains("ranks 0 and 1 have the same card"), "{one}");
        let beyond = refused(&[("MOCK_CARDS", "2")], &["--device", "cuda:1"]);
        assert!(beyond.contains("there is no card 2"), "{beyond}");
        let unlike = refused(&[("MOCK_CARDS", "2"), ("MOCK_OTHERS", "80")], &[]);
        assert!(unlike.contains("another kind of card"), "{unlike}");
    }

    /// An answer of a model that is divided among cards is that of one card.
    #[test]
    fn cards_answer_together() {
        let (Some(driver), Some(nccl)) = (mock::library(), mock::nccl()) else { return };
        let folder = folder();
        let folder = folder.path();
        ok(folder, "model", &[]);
        let answers = |libraries: &[&Path], ranks: &[&str]| {
            let output = Command::new(env!("CARGO_BIN_EXE_plimsoll"))
                .env("XDG_CACHE_HOME", env!("CARGO_TARGET_TMPDIR"))
                .env("LD_LIBRARY_PATH", folders_of(libraries))
                .env("MOCK_CARDS", "2")
                .current_dir(folder)
                .args(["generate", "--model", "model", "--prompt", "word3 word10", "--max-tokens", "8"])
                .args(["--device", "cuda", "--memory", "1GiB", "--json"])
                .args(ranks)
                .output()
                .unwrap();
            assert!(output.status.success(), "{}", said(&output));
            let document: Value = serde_json::from_slice(&output.stdout).unwrap();
            document["text"].as_str().unwrap().to_owned()
        };
        let one = answers(&[driver], &[]);
        assert_eq!(one, answers(&[driver], &["--ranks", "2"]));
        assert_eq!(one, answers(&[driver, nccl], &["--ranks", "2"]));
    }

    #[test]
    fn many_ranks_leave_what_one_leaves() {
        let folder = folder();
        let folder = folder.path();
        ok(folder, "one", &[]);
        for (ranks, stage, stages) in [(2, 0, 1), (3, 1, 1), (2, 2, 1), (2, 3, 1), (2, 0, 2), (4, 2, 2)] {
            let out = format!("out-{ranks}-{stage}-{stages}");
            let set =
                [format!("parallel.zero_stage={stage}"), format!("parallel.pipeline_parallel={stages}")];
            let number = ranks.to_string();
            let words = ok(folder, &out, &["--ranks", &number, "--set", &set[0], "--set", &set[1]]);
            // The first rank speaks for all.
            assert_eq!(words.matches("everything is in").count(), 1, "{words}");
            assert!(model(folder, &out) == model(folder, "one"), "{out}");
            let report = std::fs::read(folder.join(&out).join("report.json")).unwrap();
            let report: Value = serde_json::from_slice(&report).unwrap();
            let of_ranks = report["ranks"].as_array().unwrap();
            assert_eq!(of_ranks.len(), ranks);
            for rank in of_ranks {
                assert_eq!(rank["planned"]["device_peak_bytes"], rank["measured"]["device_peak_bytes"]);
            }
        }
    }

    /// The groups that share are groups of the ranks that were started.
    #[test]
    fn neighbours_that_share_leave_what_one_leaves() {
        let folder = folder();
        let folder = folder.path();
        ok(folder, "one", &[]);
        let shares = ["--set", "parallel.shard_size=2", "--set", "parallel.zero_stage=3"];
        for (out, how) in
            [("four", &shares[..]), ("hybrid", &["--set", "parallel.sharding_strategy=hybrid_shard"])]
        {
            ok(folder, out, &[&["--ranks", "4", "--set", "training.effective_batch_size=12"], how].concat());
        }
        assert!(model(folder, "four") == model(folder, "hybrid"));
        let output = train(folder, "alone", &shares).output().unwrap();
        assert!(said(&output).contains("fall into no groups of 2"), "{}", said(&output));
    }

    /// The first rank decides how the work is divided, and all take it.
    #[test]
    fn the_planner_divides_the_ranks_of_a_run() {
        let folder = folder();
        let folder = folder.path();
        let keys =
            ["data_parallel", "tensor_parallel", "pipeline_parallel", "context_parallel", "zero_stage"];
        let open: Vec<String> = keys.iter().map(|key| format!("parallel.{key}=auto")).collect();
        let open: Vec<&str> = open.iter().flat_map(|set| ["--set", set]).collect();
        let words = ok(folder, "open", &[&["--ranks", "2"], &open[..]].concat());
        assert!(words.contains("divided: ") && words.contains(" ways"), "{words}");
        let resolved = std::fs::read_to_string(folder.join("open/plimsoll.yaml")).unwrap();
        assert!(!resolved.contains("parallel: auto") && !resolved.contains("stage: auto"), "{resolved}");
        // As the run says that it was divided, it can be divided again.
        std::fs::write(folder.join("c.yaml"), resolved).unwrap();
        ok(folder, "again", &["--ranks", "2"]);
        assert!(model(folder, "open") == model(folder, "again"));
    }

    /// Sums are made in another order, which is all that differs.
    #[test]
    fn ranks_that_share_sequences_or_products_come_near_one() {
        let folder = folder();
        let folder = folder.path();
        let more = ["--set", "training.mixed_precision=f32"];
        ok(folder, "one", &more);
        for (ranks, ways) in [
            ("4", &["parallel.context_parallel=2"][..]),
            ("2", &["parallel.tensor_parallel=2"]),
            ("4", &["parallel.tensor_parallel=2", "parallel.pipeline_parallel=2"]),
        ] {
            let set = ways.iter().flat_map(|way| ["--set", way]);
            let shared: Vec<&str> = ["--ranks", ranks].into_iter().chain(set).collect();
            ok(folder, &ways.join("-"), &[&more[..], &shared].concat());
        }
        let losses = |out: &str| -> Vec<f64> {
            let lines = std::fs::read_to_string(folder.join(out).join("metrics.jsonl")).unwrap();
            let line = |line: &str| serde_json::from_str::<Value>(line).unwrap();
            let loss = |line: Value| line["loss"].as_f64().unwrap();
            lines.lines().map(line).map(loss).collect()
        };
        let one = losses("one");
        let ways = ["parallel.context_parallel=2", "parallel.tensor_parallel=2"];
        for out in ways.into_iter().chain(["parallel.tensor_parallel=2-parallel.pipeline_parallel=2"]) {
            let shared = losses(out);
            assert_eq!((one.len(), shared.len()), (6, 6));
            assert!(one.iter().zip(&shared).all(|(a, b)| (a - b).abs() < 2e-5 * a), "{one:?} {shared:?}");
        }
    }

    /// Every rank has some of the layers, and all draw the same tokens.
    #[test]
    fn a_model_that_is_divided_says_what_it_says_on_one_rank() {
        let folder = folder();
        let folder = folder.path();
        ok(folder, "one", &[]);
        let said = |more: &[&str]| {
            let mut command = Command::new(env!("CARGO_BIN_EXE_plimsoll"));
            command.env("XDG_CACHE_HOME", env!("CARGO_TARGET_TMPDIR")).current_dir(folder);
            command.args(["generate", "--model", "one", "--prompt", "word1 word", "--max-tokens", "6"]);
            let output = command.args(more).output().unwrap();
            assert!(output.status.success(), "{}", said(&output));
            String::from_utf8_lossy(&output.stdout).into_owned()
        };
        let alone = said(&[]);
        assert_eq!(said(&["--ranks", "2"]), alone);
        assert!(alone.contains("word1 word"), "{alone}");
    }

    /// Every rank has some of the layers, and one speaks for all.
    #[test]
    fn a_model_that_is_divided_is_measured_as_on_one_rank() {
        let folder = folder();
        let folder = folder.path();
        ok(folder, "one", &[]);
        let chat = r#"{"messages": [{"role": "user", "content": "word1"}, {"role": "assistant", "content": "word2 word3"}]}"#;
        std::fs::write(folder.join("chats.jsonl"), format!("{chat}\n{chat}\n{chat}\n")).unwrap();
        let measured = |data: &str, more: &[&str]| -> Value {
            let mut command = Command::new(env!("CARGO_BIN_EXE_plimsoll"));
            command.env("XDG_CACHE_HOME", env!("CARGO_TARGET_TMPDIR")).current_dir(folder);
            command.args(["eval", "--model", "one", "--data", data, "--json"]).args(more);
            let output = command.output().unwrap();
            assert!(output.status.success(), "{}", said(&output));
            // One document and nothing else.
            let mut document: Value = serde_json::from_slice(&output.stdout).unwrap();
            assert!(document["memory"].is_object() && document["loss"].as_f64().unwrap() > 0.0);
            // Each rank has a memory of its own.
            document["memory"] = Value::Null;
            document
        };
        let chats = ["--format", "chat", "--set", "data.chat_template=alpaca", "--sequence-length", "256"];
        for (data, how) in [
            ("text.txt", &["--sequence-length", "16"][..]),
            ("text.txt", &["--sequence-length", "13", "--dtype", "bf16"]),
            ("text.txt", &["--sequence-length", "16", "--kv-cache", "int8"]),
            ("chats.jsonl", &chats),
        ] {
            assert_eq!(measured(data, &[how, &["--ranks", "2"]].concat()), measured(data, how), "{how:?}");
        }
    }

    /// So many ranks of Open MPI's own launcher; `None` where that is another's.
    fn mpirun(folder: &Path, ranks: &str, bound_to: &str, arguments: &[&str]) -> Option<Output> {
        let version = Command::new("mpirun").arg("--version").output().unwrap();
        if !said(&version).contains("Open MPI") {
            return None;
        }
        let mut command = Command::new("mpirun");
        command.env("XDG_CACHE_HOME", env!("CARGO_TARGET_TMPDIR")).current_dir(folder);
        command.args(["--allow-run-as-root", "--oversubscribe", "-n", ranks, "--bind-to", bound_to]);
        let output = command.arg(env!("CARGO_BIN_EXE_plimsoll")).args(arguments).output().unwrap();
        assert!(output.status.success(), "{arguments:?}: {}", said(&output));
        Some(output)
    }

    /// A launcher that binds a rank to one core of many says nothing of it.
    #[test]
    fn a_rank_that_is_bound_to_too_few_cores_is_told_of() {
        let cores = std::thread::available_parallelism().unwrap().get();
        let folder = folder();
        let folder = folder.path();
        let note = |bound_to: &str, more: &[&str]| {
            let short = ["train", "c.yaml", "--set", "training.steps=1", "--set", "output.save_steps=0"];
            let output = mpirun(folder, "1", bound_to, &[&short, more].concat())?;
            let words = String::from_utf8_lossy(&output.stderr).into_owned();
            Some(words.matches("rank 0 is bound to 1 of").count())
        };
        let Some(bound) = note("hwthread", &["--set", "output.dir=bound"]) else { return };
        assert_eq!(bound, usize::from(cores > 1));
        assert_eq!(note("hwthread", &["--set", "output.dir=told", "--threads", "1"]), Some(0));
        assert_eq!(note("none", &["--set", "output.dir=free"]), Some(0));
    }

    /// The first rank speaks for all of what they see of their machines.
    #[test]
    fn ranks_show_their_machines_once() {
        let folder = folder();
        let folder = folder.path();
        let Some(output) = mpirun(folder, "2", "none", &["doctor"]) else { return };
        let table = String::from_utf8_lossy(&output.stdout).into_owned();
        let first: Vec<&str> = table.lines().filter_map(|line| line.split_whitespace().next()).collect();
        assert_eq!(first, ["rank", "0", "1"], "{table}");
        let output = mpirun(folder, "2", "none", &["doctor", "--json"]).unwrap();
        let document: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(document["ranks"][1]["rank"], 1);
    }

    /// Whoever reads what ranks say may stop to: they train on to the end, as one process does.
    #[test]
    fn ranks_whose_words_nobody_reads_go_on() {
        let folder = folder();
        let folder = folder.path();
        let more = ["--ranks", "2", "--set", "training.steps=200", "--set", "output.save_steps=0"];
        let mut run = train(folder, "out", &more).stdout(Stdio::piped()).spawn().unwrap();
        drop(run.stdout.take());
        assert!(run.wait().unwrap().success());
        let report = std::fs::read(folder.join("out/report.json")).unwrap();
        let report: Value = serde_json::from_slice(&report).unwrap();
        assert_eq!((&report["finished"], &report["steps"]), (&true.into(), &200.into()));
    }

    /// Answers that nobody reads are not computed: mpirun is ended, and nothing is wrong with that.
    #[test]
    fn ranks_whose_answers_nobody_reads_end() {
        let folder = folder();
        let folder = folder.path();
        ok(folder, "out", &["--set", "training.steps=1"]);
        std::fs::write(folder.join("prompts.txt"), "a\n".repeat(2000)).unwrap();
        let mut answers = Command::new(env!("CARGO_BIN_EXE_plimsoll"));
        let more = ["--max-tokens", "30", "--parallel", "1", "--threads", "1", "--ranks", "2"];
        answers
            .args(["generate", "--model", "out", "--prompts", "prompts.txt"])
            .args(more)
            .current_dir(folder);
        let mut answers = answers.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop(answers.stdout.take());
        let ended = answers.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&ended.stderr);
        assert!(ended.status.success(), "{said}");
        assert!(!said.contains("2000 answers"), "all were computed: {said}");
    }

    /// The first rank reads the lines, and the others compute with it.
    #[test]
    fn a_chat_over_ranks_is_the_chat_of_one() {
        let folder = folder();
        let folder = folder.path();
        ok(folder, "one", &[]);
        let lines =
            "word1 word2\n/tokens\n/undo\nword5\n/system word3\n/retry\n/set max_tokens 3\nword7\n/tokens\n";
        std::fs::write(folder.join("lines.txt"), lines).unwrap();
        let talked = |more: &[&str], lines: &str| {
            let mut command = Command::new(env!("CARGO_BIN_EXE_plimsoll"));
            command.env("XDG_CACHE_HOME", env!("CARGO_TARGET_TMPDIR")).current_dir(folder);
            command.args(["chat", "--model", "one", "--chat-template", "plain", "--max-tokens", "6"]);
            command.args(["--context", "200", "--seed", "7"]).args(more);
            let output = command.stdin(std::fs::File::open(folder.join(lines)).unwrap()).output().unwrap();
            (output.status.code(), String::from_utf8_lossy(&output.stdout).into_owned())
        };
        let texts = |said: &str| -> Vec<Value> {
            let line = |line: &str| {
                let mut line: Value = serde_json::from_str(line).unwrap();
                // How long it took is another matter.
                line["prompt_seconds"] = Value::Null;
                line["tokens_per_second"] = Value::Null;
                line
            };
            said.lines().map(line).collect()
        };
        let (code, alone) = talked(&["--json"], "lines.txt");
        assert_eq!(code, Some(0), "{alone}");
        let (code, divided) = talked(&["--json", "--ranks", "2"], "lines.txt");
        assert_eq!(code, Some(0), "{divided}");
        assert_eq!(texts(&divided), texts(&alone));
        assert!(alone.lines().filter(|line| line.contains("prompt_tokens")).count() == 4, "{alone}");
        assert_eq!(talked(&["--ranks", "2"], "lines.txt"), talked(&[], "lines.txt"));
        // A wrong command ends all ranks, where nobody can try again.
        std::fs::write(folder.join("wrong.txt"), "word1\n/frobnicate\nword2\n").unwrap();
        let (code, said) = talked(&["--ranks", "2"], "wrong.txt");
        assert_eq!(code, Some(2), "{said}");
    }

    /// The processes below one, and their command lines.
    fn ranks_below(launcher: &Child) -> Vec<u32> {
        let parent = |id: u32| -> Option<u32> {
            let status = std::fs::read_to_string(format!("/proc/{id}/status")).ok()?;
            status.lines().find_map(|line| line.strip_prefix("PPid:")?.trim().parse().ok())
        };
        let all = std::fs::read_dir("/proc").unwrap().flatten();
        let ids: Vec<u32> = all.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
        // The launcher has started mpirun, and mpirun the ranks.
        let below =
            |above: u32| ids.iter().copied().filter(move |id| parent(*id) == Some(above)).collect::<Vec<_>>();
        below(launcher.id()).into_iter().flat_map(below).collect()
    }

    const LONG: [&str; 6] =
        ["--set", "training.steps=60", "--set", "output.eval_steps=0", "--set", "parallel.zero_stage=2"];

    /// By itself such a run would go on for hours.
    const ENDLESS: [&str; 4] = ["--set", "training.steps=1000000", "--set", "output.eval_steps=0"];

    /// Starts ranks, and waits until they have written a checkpoint.
    fn started(folder: &Path, ranks: &str) -> Child {
        until_saved(folder, train(folder, "out", &[&["--ranks", ranks], &LONG[..]].concat()))
    }

    fn until_saved(folder: &Path, mut run: Command) -> Child {
        let mut run = run.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        // Of a long run the first ones may be gone by then.
        let is_saved = |entry: std::fs::DirEntry| {
            let name = entry.file_name().into_string().unwrap_or_default();
            name.strip_prefix("checkpoint-")
                .and_then(|step| step.parse().ok())
                .is_some_and(|step: u64| step >= 4)
        };
        while !std::fs::read_dir(folder.join("out")).is_ok_and(|all| all.flatten().any(is_saved)) {
            assert!(run.try_wait().unwrap().is_none(), "it ended by itself");
            std::thread::sleep(Duration::from_millis(5));
        }
        run
    }

    fn signal(name: &str, process: u32) {
        assert!(Command::new("kill").args([name, &process.to_string()]).status().unwrap().success());
    }

    /// Both ways of ending before the end, and then the rest on other ranks.
    #[test]
    fn a_run_that_is_stopped_or_loses_a_rank_goes_on_with_others() {
        let folder = folder();
        let folder = folder.path();
        // Who starts tests in the background ignores Ctrl-C, and so would the run.
        let run = started(folder, "2");
        signal("-TERM", run.id());
        let output = run.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(143), "{}", said(&output));
        let checkpoints = std::fs::read_dir(folder.join("out")).unwrap().flatten();
        assert!(checkpoints.count() > 1);
        std::fs::remove_dir_all(folder.join("out")).unwrap();
        // A rank is killed.
        let run = started(folder, "3");
        let ranks = ranks_below(&run);
        assert_eq!(ranks.len(), 3, "{ranks:?}");
        signal("-9", ranks[1]);
        let output = run.wait_with_output().unwrap();
        assert!(!output.status.success());
        // Which rank and where, says the launcher.
        assert!(said(&output).contains("rank 1"), "{}", said(&output));
        ok(folder, "out", &[&["--ranks", "2", "--resume"], &LONG[..]].concat());
        ok(folder, "unbroken", &LONG);
        assert!(model(folder, "out") == model(folder, "unbroken"));
    }

    /// Whoever starts ranks by mpirun learns that they were stopped. Folders of ranks that were killed are gone with the next start.
    #[test]
    fn ranks_of_others_say_that_they_were_stopped() {
        let folder = folder();
        let mut run = Command::new("mpirun");
        run.args(["-n", "2", "--oversubscribe", "--bind-to", "none", "--allow-run-as-root"]);
        run.arg(env!("CARGO_BIN_EXE_plimsoll"))
            .args(["train", "c.yaml", "--set", "output.dir=out"])
            .args(ENDLESS);
        run.env("XDG_CACHE_HOME", env!("CARGO_TARGET_TMPDIR")).current_dir(folder.path());
        let left = folder.path().join("out/.rank-7");
        std::fs::create_dir_all(&left).unwrap();
        let run = until_saved(folder.path(), run);
        assert!(!left.exists());
        signal("-USR1", run.id());
        let output = run.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(138), "{}", said(&output));
    }

    /// The ranks do not outlive the program that has started them.
    #[cfg(target_os = "linux")]
    #[test]
    fn ranks_end_with_the_program_that_started_them() {
        let folder = folder();
        let endless = [&["--ranks", "2"], &ENDLESS[..]].concat();
        let mut run = until_saved(folder.path(), train(folder.path(), "out", &endless));
        let ranks = ranks_below(&run);
        assert_eq!(ranks.len(), 2, "{ranks:?}");
        run.kill().unwrap();
        run.wait().unwrap();
        let lives = |rank: &u32| {
            let status = std::fs::read_to_string(format!("/proc/{rank}/status")).unwrap_or_default();
            status.lines().any(|line| line.starts_with("State:") && !line.contains('Z'))
        };
        let most = Instant::now() + Duration::from_secs(300);
        while ranks.iter().any(lives) {
            assert!(Instant::now() < most, "ranks go on");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// A run that has come to its end without a checkpoint is finished, on ranks as on one.
    #[test]
    fn a_finished_run_without_checkpoints_is_finished() {
        let folder = folder();
        let set = ["--ranks", "2", "--set", "output.save_steps=0"];
        ok(folder.path(), "out", &set);
        let words = ok(folder.path(), "out", &[&set[..], &["--resume"]].concat());
        assert!(words.contains("nothing is left to do"), "{words}");
    }

    /// Whenever a stop comes: before there are ranks, before they listen, and where the run would go on for hours.
    #[test]
    fn a_stop_is_heard_however_early_it_comes() {
        use std::os::unix::process::ExitStatusExt;
        let folder = folder();
        for (number, pause) in [20, 70, 150, 400].into_iter().enumerate() {
            let out = format!("early-{number}");
            let steps = ["--ranks", "2", "--set", "training.steps=1000000"];
            let mut run = train(folder.path(), &out, &steps);
            let run = run.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
            std::thread::sleep(Duration::from_millis(pause));
            signal("-TERM", run.id());
            let output = run.wait_with_output().unwrap();
            // Before it listens itself, the signal ends it.
            let by_signal = output.status.code() == Some(143) || output.status.signal() == Some(15);
            assert!(by_signal, "{pause}: {:?} {}", output.status, said(&output));
        }
    }

    /// As under `nohup`.
    #[test]
    fn a_signal_that_was_ignored_stays_ignored() {
        let folder = folder();
        let mut run = Command::new("sh");
        run.args([
            "-c",
            "trap '' HUP; exec \"$0\" \"$@\"",
            env!("CARGO_BIN_EXE_plimsoll"),
            "train",
            "c.yaml",
        ]);
        run.args(["--set", "output.dir=out", "--ranks", "2"]).args(LONG);
        run.env("XDG_CACHE_HOME", env!("CARGO_TARGET_TMPDIR")).current_dir(folder.path());
        let run = until_saved(folder.path(), run);
        signal("-HUP", run.id());
        let output = run.wait_with_output().unwrap();
        assert!(output.status.success(), "{:?} {}", output.status, said(&output));
    }

    /// Two ranks with words of their own, as on two machines that share no folder.
    fn each_with(folder: &Path, first: &[&str], second: &[&str]) -> Output {
        let mut run = Command::new("mpirun");
        run.env("XDG_CACHE_HOME", env!("CARGO_TARGET_TMPDIR")).current_dir(folder);
        run.args(["--oversubscribe", "--bind-to", "none", "--allow-run-as-root", "-n", "1"]);
        run.args([env!("CARGO_BIN_EXE_plimsoll"), "train", "c.yaml"]).args(first);
        run.args([":", "-n", "1", env!("CARGO_BIN_EXE_plimsoll"), "train", "c.yaml"]).args(second);
        run.output().unwrap()
    }

    /// The rank that is unlike rank 0 says so, once, with its machine, and no rank leaves a folder.
    #[test]
    fn ranks_that_are_not_alike_are_told_before_they_train() {
        let folder = folder();
        let folder = folder.path();
        for (set, code, words) in [
            ("training.seed=7", 2, "training.seed is 7 here and"),
            ("data.sequence_length=8", 2, "data.sequence_length is 8 here and 16 on rank 0"),
            (
                "model.from_scratch.hidden_size=48",
                2,
                "model.from_scratch.hidden_size is 48 here and 32 on rank 0",
            ),
            ("data.train=other.txt", 1, "data.train is other data here than on rank 0"),
        ] {
            std::fs::write(folder.join("other.txt"), "something else ".repeat(200)).unwrap();
            let first = ["--set", "output.dir=first/out"];
            let output = each_with(folder, &first, &["--set", "output.dir=second/out", "--set", set]);
            let said = said(&output);
            assert_eq!(output.status.code(), Some(code), "{said}");
            assert!(said.contains(words) && said.contains("error: rank 1 on "), "{said}");
            assert_eq!(said.matches("error: rank").count(), 1, "{said}");
            assert!(!folder.join("first").exists() && !folder.join("second").exists(), "{said}");
        }
    }

    #[test]
    fn a_folder_of_its_own_is_enough_for_each_machine() {
        let folder = folder();
        let folder = folder.path();
        let tokenizer = ["--set", "model.from_scratch.tokenizer={train: bpe, vocab_size: 280}"];
        let with = |out: &'static str| [&tokenizer[..], &["--set", out]].concat();
        let output = each_with(folder, &with("output.dir=first"), &with("output.dir=second/out"));
        assert!(output.status.success(), "{}", said(&output));
        assert!(!folder.join("second").exists());
        ok(folder, "one", &[&["--ranks", "2"], &tokenizer[..]].concat());
        assert_eq!(model(folder, "first"), model(folder, "one"));
        let report = std::fs::read(folder.join("first/report.json")).unwrap();
        let report: Value = serde_json::from_slice(&report).unwrap();
        let ranks = report["ranks"].as_array().unwrap();
        assert_eq!(ranks.len(), 2);
        assert!(!cfg!(target_os = "linux") || ranks.iter().all(|rank| rank["host"].is_string()), "{report}");
    }

    #[test]
    fn what_cannot_be_is_said_once_with_the_rank_and_ends_all() {
        let folder = folder();
        let output =
            train(folder.path(), "out", &["--ranks", "2", "--set", "parallel.data_parallel=3"]).output();
        let output = output.unwrap();
        assert_eq!(output.status.code(), Some(2), "{}", said(&output));
        let words = said(&output);
        assert!(words.contains("parallel.data_parallel is 3, and 2 ranks were started"), "{words}");
        // What is wrong in the configuration is said before any rank is there.
        let output =
            train(folder.path(), "out", &["--ranks", "2", "--set", "training.steps=-1"]).output().unwrap();
        assert_eq!(
            (output.status.code(), said(&output).matches("training.steps").count()),
            (Some(2), 2),
            "{}",
            said(&output)
        );
        // A run is there already.
        ok(folder.path(), "out", &["--ranks", "2"]);
        let output = train(folder.path(), "out", &["--ranks", "2"]).output().unwrap();
        assert!(!output.status.success());
        assert!(said(&output).contains("already holds a run"), "{}", said(&output));
    }
}
