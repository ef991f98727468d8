//! What others wrote: chats with foreign records, templates, devices in place of files, values that are wrong, readers
//! that go away.

use std::fmt::Write as _;
use std::io::Read;
use std::process::{Command, Stdio};

use crate::support::{folder, ok, plimsoll, text};
use serde_json::Value;

const INSTRUCTIONS: [&str; 8] = [
    "plan",
    "c.yaml",
    "--set",
    "data.train=chats.jsonl",
    "--set",
    "data.format=instruction",
    "--set",
    "data.sequence_length=512",
];

/// Thirty instructions with some lines more.
fn samples(more: &[&[u8]]) -> Vec<u8> {
    let mut all = String::new();
    for i in 0..30 {
        let _ = writeln!(all, "{{\"instruction\": \"count {i}\", \"output\": \"it is {i}\"}}");
    }
    more.iter().fold(all.into_bytes(), |mut all, line| {
        all.extend_from_slice(line);
        all.push(b'\n');
        all
    })
}

fn train(more: &[&str]) -> Vec<String> {
    let with = ["train", "--set", "training.steps=1"];
    let all = INSTRUCTIONS
        .iter()
        .map(|word| if *word == "plan" { "train" } else { word })
        .chain(with.into_iter().skip(1));
    all.chain(more.iter().copied()).map(str::to_owned).collect()
}

fn words(arguments: &[String]) -> Vec<&str> {
    arguments.iter().map(String::as_str).collect()
}

#[test]
fn foreign_records_are_left_out_counted_and_named() {
    let folder = folder();
    let foreign: [&[u8]; 5] = [
        b"{\"text\": \"x\"}",
        b"{\"instruction\": \"\\ud800\", \"output\": \"b\"}",
        b"{\"instruction\": \"\xff\", \"output\": \"b\"}",
        b"not JSON at all",
        b"{\"instruction\": \"a\", \"output\": \"\"}",
    ];
    std::fs::write(folder.path().join("chats.jsonl"), samples(&foreign)).unwrap();
    let said = ok(folder.path(), &words(&train(&[])));
    for part in [
        "data.train: 30 of 35 samples",
        "3 left out: not readable as a record",
        "chats.jsonl: line 32: not JSON: ",
        "chats.jsonl: line 33: not UTF-8",
        "1 left out: fields of something else",
        "chats.jsonl: line 31: no field messages",
        "1 left out: an answer without a word",
        "chats.jsonl: line 35: message 2: the assistant says nothing",
    ] {
        assert!(said.contains(part), "{part} in {said}");
    }
    let strict = train(&["--set", "data.max_invalid_share=0.1", "--set", "output.dir=strict"]);
    let refused = plimsoll(folder.path(), &words(&strict));
    let refused = (refused.status.code(), text(&refused.stderr));
    assert_eq!(refused.0, Some(1), "{}", refused.1);
    for part in ["4 of 35 records cannot be used", "data.max_invalid_share=0.1", "line 31", "line 32"] {
        assert!(refused.1.contains(part), "{part} in {}", refused.1);
    }
}

#[test]
fn texts_are_read_past_foreign_records() {
    let folder = folder();
    let mut lines = samples(&[b"{\"x\": 1}", b"7"]);
    let text_lines = String::from_utf8(lines.clone()).unwrap().replace("instruction", "text");
    lines = text_lines.into_bytes();
    std::fs::write(folder.path().join("texts.jsonl"), lines).unwrap();
    let arguments = ["train", "c.yaml", "--set", "data.train=texts.jsonl", "--set", "training.steps=1"];
    let said = ok(folder.path(), &arguments);
    assert!(said.contains("data.train: 1 left out: fields of something else"), "{said}");
    assert!(said.contains("texts.jsonl: line 31: no field \"text\""), "{said}");
    assert!(said.contains("data.train: 1 left out: not readable as a record"), "{said}");
}

#[test]
fn files_without_records_are_named() {
    let folder = folder();
    std::fs::write(folder.path().join("chats.jsonl"), "\n").unwrap();
    let refused = plimsoll(folder.path(), &words(&train(&[])));
    assert!(
        text(&refused.stderr).contains("chats.jsonl: there are no records in it"),
        "{}",
        text(&refused.stderr)
    );
}

#[test]
fn templates_of_strangers_keep_within_bounds() {
    let folder = folder();
    std::fs::write(folder.path().join("chats.jsonl"), samples(&[])).unwrap();
    for (template, words) in [
        ("{{ 'a'|indent(20000000000000) }}", "makes more than"),
        ("{% for i in range(90000) %}{% for j in range(90000) %}a{% endfor %}{% endfor %}", "takes too long"),
        (
            "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
            "makes more than",
        ),
        ("{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}", "takes too long"),
    ] {
        std::fs::write(folder.path().join("evil.jinja"), template).unwrap();
        let refused =
            plimsoll(folder.path(), &self::words(&train(&["--set", "data.chat_template=evil.jinja"])));
        let said = text(&refused.stderr);
        assert!(
            said.contains(words) && said.contains("evil.jinja: chat template, line 1"),
            "{template}: {said}"
        );
    }
    let endless = plimsoll(folder.path(), &words(&train(&["--set", "data.chat_template=/dev/zero"])));
    assert!(text(&endless.stderr).contains("longer than 1 MiB"), "{}", text(&endless.stderr));
}

#[test]
fn a_damaged_table_is_one_error() {
    let folder = folder();
    let whole = concat!(env!("CARGO_MANIFEST_DIR"), "/../data/tests/data/chats.parquet");
    let mut bytes = std::fs::read(whole).unwrap();
    // A type in the description of a column, at which the library panics.
    bytes[1012] = 53;
    std::fs::write(folder.path().join("chats.parquet"), bytes).unwrap();
    let more = ["--set", "data.train=chats.parquet", "--set", "data.chat_template=alpaca"];
    let refused = plimsoll(folder.path(), &words(&train(&more)));
    let said = text(&refused.stderr);
    assert_eq!(refused.status.code(), Some(1));
    assert_eq!(said, "error: chats.parquet: not readable as Parquet: the file contradicts itself\n");
}

#[test]
fn wrong_values_are_named_as_values() {
    let folder = folder();
    for (arguments, words) in [
        (vec!["plan", "c.yaml", "--memory", "-5GiB"], "--memory -5GiB: memory.device_budget: expected"),
        (
            vec!["eval", "--model", "out", "--data", "text.txt", "--memory", "-5GiB"],
            "invalid value '-5GiB' for '--memory <SIZE>'",
        ),
        (vec!["generate", "--model", "out", "--prompt", "a", "--temperature", "-1"], "temperature"),
        (
            vec!["generate", "--model", "out", "--prompt", "a", "--top-k", "-1"],
            "invalid value '-1' for '--top-k <N>'",
        ),
        (vec!["plan", "c.yaml", "--batch-size", "-4"], "--batch-size -4: training.batch_size: expected"),
    ] {
        let refused = plimsoll(folder.path(), &arguments);
        let said = text(&refused.stderr);
        assert_eq!(refused.status.code(), Some(2), "{arguments:?}: {said}");
        assert!(said.contains(words) && !said.contains("unexpected argument"), "{arguments:?}: {said}");
    }
}

#[test]
fn the_command_line_mends_the_file() {
    let folder = folder();
    let broken = std::fs::read_to_string(folder.path().join("c.yaml"))
        .unwrap()
        .replace("batch_size: 2", "batch_size: two");
    std::fs::write(folder.path().join("broken.yaml"), broken).unwrap();
    let refused = plimsoll(folder.path(), &["plan", "broken.yaml"]);
    assert!(text(&refused.stderr).contains("broken.yaml:5:"), "{}", text(&refused.stderr));
    for mending in [["--set", "training.batch_size=2"], ["--batch-size", "2"]] {
        let plan: Value = serde_json::from_str(&ok(
            folder.path(),
            &[&["plan", "broken.yaml", "--json"], &mending[..]].concat(),
        ))
        .unwrap();
        assert_eq!(plan["config"]["training"]["batch_size"], 2);
    }
}

#[cfg(unix)]
#[test]
fn a_device_is_no_data() {
    let folder = folder();
    ok(folder.path(), &["train", "c.yaml"]);
    for arguments in [
        vec!["eval", "--model", "out", "--data", "/dev/zero"],
        vec![
            "eval",
            "--model",
            "out",
            "--data",
            "/dev/zero",
            "--format",
            "chat",
            "--set",
            "data.chat_template=alpaca",
        ],
        vec!["train", "c.yaml", "--set", "data.train=/dev/zero", "--set", "output.dir=other"],
    ] {
        let refused = plimsoll(folder.path(), &arguments);
        assert_eq!(refused.status.code(), Some(1));
        assert!(
            text(&refused.stderr).contains("/dev/zero: a device, not a file"),
            "{}",
            text(&refused.stderr)
        );
    }
}

#[cfg(unix)]
#[test]
fn a_reader_that_has_seen_enough_is_no_error() {
    let folder = folder();
    for arguments in [vec!["--help"], vec!["train", "--help"], vec!["--version"], vec!["config"]] {
        let mut child = Command::new(env!("CARGO_BIN_EXE_plimsoll"))
            .current_dir(folder.path())
            .args(&arguments)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        // Closed before the program writes, or while it does.
        drop(child.stdout.take());
        let mut said = String::new();
        child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        assert_eq!((child.wait().unwrap().code(), said.as_str()), (Some(0), ""), "{arguments:?}");
    }
}
