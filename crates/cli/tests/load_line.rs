//! The load line as a promise of every command that computes: it is refused before it begins, or its process never takes
//! more than the line at any moment, from the first to the last.
#![cfg(target_os = "linux")]

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Output, Stdio};

use crate::support::{folder, ok, plimsoll, text};
use serde_json::Value;

/// From far too little to ample, in MiB.
const LINES: [u64; 8] = [1, 16, 24, 28, 30, 32, 40, 96];

/// A small model in `base` and a configuration that trains adapters of it.
fn base() -> tempfile::TempDir {
    let folder = folder();
    let path = folder.path();
    let sizes = "model.from_scratch.hidden_size=64";
    ok(path, &["train", "c.yaml", "--set", sizes, "--set", "output.dir=base"]);
    let template = "{% for m in messages %}{{ m.content }};{% endfor %}";
    std::fs::write(path.join("base/chat_template.jinja"), template).unwrap();
    let config = "
model: base
data: {train: text.txt, sequence_length: 12}
training: {method: lora, steps: 3, batch_size: 2, gradient_accumulation_steps: 1, lora: {rank: 4}}
output: {dir: adapter}
";
    std::fs::write(path.join("adapter.yaml"), config).unwrap();
    folder
}

/// Runs a command under many lines. Of the runs that are not refused, `bytes` reads from their standard output the most that
/// the process took and was planned to take.
fn holds(name: &str, run: impl Fn(&str) -> Output, bytes: impl Fn(&Value) -> (u64, u64)) {
    let mut least = None;
    for mib in LINES {
        let line = format!("{mib}MiB");
        let output = run(&line);
        let error = text(&output.stderr);
        match output.status.code() {
            Some(3) => {
                assert_eq!(least, None, "{name}: less was enough than {line}: {error}");
                assert!(error.contains(&format!("load line is {mib}.0")), "{name}, {line}: {error}");
                assert!(output.stdout.is_empty(), "{name}, {line}");
            }
            Some(0) => {
                let (taken, planned) = bytes(&serde_json::from_slice(&output.stdout).unwrap());
                println!("{name}, {line}: {taken} bytes taken, {planned} planned");
                assert!(
                    taken > 0 && taken <= planned,
                    "{name}, {line}: {taken} bytes taken, {planned} planned"
                );
                assert!(planned <= mib << 20, "{name}, {line}: {planned} bytes planned");
                least = least.or(Some(mib));
            }
            code => panic!("{name}, {line}: {code:?}, {error}"),
        }
    }
    assert!(least.is_some_and(|least| least > LINES[0]), "{name}: {least:?} was enough");
}

#[test]
fn what_answers_and_measures_keeps_to_the_line() {
    let folder = base();
    let long = "word7 ".repeat(100);
    let generate = ["generate", "--model", "base", "--max-tokens", "8", "--prompt"];
    let eval = ["eval", "--model", "base", "--data", "text.txt", "--sequence-length", "12"];
    for (name, arguments) in [
        ("generate", [&generate[..], &["a"]].concat()),
        ("generate after a long prompt", [&generate[..], &[&long, "--context", "700"]].concat()),
        ("eval", eval.to_vec()),
        ("eval in 4 bits", [&eval[..], &["--quantize", "nf4"]].concat()),
        ("eval through a cache", [&eval[..], &["--kv-cache", "f16"]].concat()),
    ] {
        let run = |line: &str| {
            let all = [&arguments[..], &["--threads", "2", "--json", "--memory", line]].concat();
            plimsoll(folder.path(), &all)
        };
        holds(name, run, |document| {
            let number = |key: &str| document["memory"][key].as_u64().unwrap();
            (number("process_peak_rss_bytes"), number("planned_bytes"))
        });
    }
}

#[test]
fn training_keeps_to_the_line() {
    let folder = base();
    for (method, config, set) in [
        ("full", "c.yaml", "training.steps=3"),
        ("LoRA", "adapter.yaml", "training.steps=3"),
        ("QLoRA", "adapter.yaml", "training.method=qlora"),
    ] {
        let run = |line: &str| {
            let output = format!("output.dir={method}-{line}");
            let set = ["--set", &output, "--set", set];
            let arguments = ["train", config, "--threads", "2", "--json", "--memory", line];
            plimsoll(folder.path(), &[&arguments[..], &set].concat())
        };
        holds(method, run, |report| {
            let taken = report["measured"]["process_peak_rss_bytes"].as_u64().unwrap();
            (taken, report["planned"]["process_bytes"].as_u64().unwrap())
        });
    }
}

/// `plan` and `train` are two processes, of which the second one holds more when it plans. What both count beside the arena is the same,
/// and the least line for which the first says that a run fits is enough for the second.
#[test]
fn whatever_plan_says_fits_train_accepts() {
    let folder = base();
    let samples: String = (0..300)
        .map(|i| {
            format!("{{\"prompt\": \"word{} word{}\", \"completion\": \"word{}\"}}\n", i % 23, i % 7, i % 11)
        })
        .collect();
    std::fs::write(folder.path().join("samples.jsonl"), samples).unwrap();
    let words: String = (0..200_000).map(|i: u64| format!("w{} ", i * i % 7919)).collect();
    std::fs::write(folder.path().join("long.txt"), words).unwrap();
    for (name, config, set) in [
        ("full", "c.yaml", &["training.steps=2"][..]),
        ("a longer text", "c.yaml", &["training.steps=2", "data.train=long.txt", "data.num_workers=2"]),
        ("a search", "c.yaml", &["training.steps=2", "training.batch_size=auto", "planning.goal=fastest"]),
        ("LoRA", "adapter.yaml", &["training.steps=2", "data.train=long.txt"]),
        (
            "samples",
            "adapter.yaml",
            &["training.steps=2", "data.train=samples.jsonl", "data.format=instruction"],
        ),
    ] {
        let asked = |command: &str, line: u64, further: &[&str]| {
            let line = line.to_string();
            let mut arguments = vec![command, config, "--memory", &line, "--json"];
            set.iter().for_each(|assignment| arguments.extend(["--set", assignment]));
            plimsoll(folder.path(), &[&arguments[..], further].concat())
        };
        let planned = |line: u64| -> Value {
            let output = asked("plan", line, &[]);
            serde_json::from_slice(&output.stdout)
                .unwrap_or_else(|_| panic!("{name}: {}", text(&output.stderr)))
        };
        let (mut less, mut enough) = (1 << 20, 128 << 20);
        assert_eq!(planned(enough)["fits"], true, "{name}");
        while enough - less > 64 << 10 {
            let line = (less + enough) / 2;
            *(if planned(line)["fits"] == true { &mut enough } else { &mut less }) = line;
        }
        let plan = planned(enough);
        for _ in 0..2 {
            let again = planned(enough);
            assert_eq!(again["memory"]["device"], plan["memory"]["device"], "{name}");
            assert_eq!(again["config"], plan["config"], "{name}");
        }
        for (line, folder) in [(enough, "at"), (enough + (100 << 10), "above")] {
            let output = format!("output.dir={name}-{folder}");
            let output = asked("train", line, &["--set", &output]);
            assert!(output.status.success(), "{name}, {line} bytes: {}", text(&output.stderr));
            let report: Value = serde_json::from_slice(&output.stdout).unwrap();
            let taken = report["measured"]["process_peak_rss_bytes"].as_u64().unwrap();
            println!("{name}: {line} bytes are enough, {taken} were taken");
            assert!(taken <= line, "{name}: {taken} bytes taken of {line}");
            let overhead = &report["planned"]["overhead_bytes"];
            assert_eq!(*overhead, plan["memory"]["device"]["overhead_bytes"], "{name}");
        }
    }
}

/// A chat waits for the next message, so that its process can be looked at.
#[test]
fn a_chat_keeps_to_the_line() {
    let folder = base();
    let mut least = None;
    for mib in LINES {
        let line = format!("{mib}MiB");
        let arguments =
            ["chat", "--model", "base", "--threads", "2", "--json", "--context", "64", "--memory", &line];
        let mut child = Command::new(env!("CARGO_BIN_EXE_plimsoll"))
            .current_dir(folder.path())
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut input = child.stdin.take().unwrap();
        // A program that refuses does not read.
        let _ = input.write_all(b"word1 word2\n");
        let mut answer = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut answer).unwrap();
        let status = std::fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap_or_default();
        drop(input);
        let output = child.wait_with_output().unwrap();
        let error = text(&output.stderr);
        match output.status.code() {
            Some(3) => assert!(least.is_none() && answer.is_empty(), "{line}: {error}"),
            Some(0) => {
                let peak = status.lines().find_map(|l| l.strip_prefix("VmHWM:")).unwrap();
                let kib: u64 = peak.trim().strip_suffix(" kB").unwrap().parse().unwrap();
                assert!(kib <= mib << 10, "{line}: {kib} KiB were taken");
                least = least.or(Some(mib));
            }
            code => panic!("{line}: {code:?}, {error}"),
        }
    }
    assert!(least.is_some_and(|least| least > LINES[0]), "{least:?}");
}

/// The tables of a large vocabulary are made without a tree of JSON values on the way, which took four times their memory.
#[test]
fn a_large_vocabulary_takes_little_more_than_its_tables() {
    let folder = folder();
    let path = folder.path();
    let rows = "model.from_scratch.vocab_size=40300";
    ok(path, &["train", "c.yaml", "--set", rows, "--set", "output.dir=base", "--set", "training.steps=1"]);
    let file = path.join("base/tokenizer.json");
    let mut tokenizer: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    let vocab = tokenizer["model"]["vocab"].as_object().unwrap();
    let bytes: Vec<String> =
        vocab.keys().filter(|token| token.chars().count() == 1).take(200).cloned().collect();
    let pairs = bytes.iter().flat_map(|left| bytes.iter().map(move |right| [left, right]));
    let pairs: Vec<[&String; 2]> = pairs.collect();
    let mut ids = 257..;
    for [left, right] in &pairs {
        tokenizer["model"]["vocab"][format!("{left}{right}")] = ids.next().unwrap().into();
    }
    tokenizer["model"]["merges"] = serde_json::to_value(&pairs).unwrap();
    std::fs::write(&file, tokenizer.to_string()).unwrap();
    let arguments =
        ["generate", "--model", "base", "--prompt", "a", "--max-tokens", "2", "--threads", "2", "--json"];
    let document: Value = serde_json::from_str(&ok(path, &arguments)).unwrap();
    let taken = document["memory"]["process_peak_rss_bytes"].as_u64().unwrap();
    println!("{taken} bytes taken");
    assert!(taken < 44 << 20, "{taken} bytes were taken");
}
