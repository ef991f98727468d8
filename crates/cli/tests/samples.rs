//! Measuring chats and instructions, and the tokenizer of a GGUF file for a model from scratch, as a user does it.

use std::path::Path;

use crate::support::{folder, ok, plimsoll, text};
use serde_json::{Value, json};

const TEMPLATE: &str =
    "{% for m in messages %}<{{ m.role }}>{% generation %}{{ m.content }}{% endgeneration %}\n{% endfor %}";

fn write_lines(path: &Path, lines: impl Iterator<Item = Value>) {
    let lines: String = lines.map(|line| format!("{line}\n")).collect();
    std::fs::write(path, lines).unwrap();
}

fn read(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

#[test]
fn samples_are_measured_as_in_validation() {
    let folder = folder();
    let path = folder.path();
    std::fs::write(path.join("chat.jinja"), TEMPLATE).unwrap();
    write_lines(
        &path.join("instructions.jsonl"),
        (0..17).map(
            |i| json!({ "instruction": format!("count {i}"), "output": format!("{} {}", i + 1, i + 2) }),
        ),
    );
    let turn = |role: &str, content: String| json!({ "role": role, "content": content });
    write_lines(
        &path.join("chats.jsonl"),
        (0..13).map(|i| {
            json!({ "messages": [turn("user", format!("say {i}")), turn("assistant", format!("{i}, {i}"))] })
        }),
    );
    for (format, file, further) in [
        ("instruction", "instructions.jsonl", vec![]),
        ("instruction", "instructions.jsonl", vec!["data.packing=false", "data.train_on=all"]),
        ("chat", "chats.jsonl", vec!["data.chat_template=chat.jinja"]),
    ] {
        let name = format!("{format}{}", further.len());
        let mut train: Vec<String> = vec!["train".into(), "c.yaml".into()];
        let settings = [
            format!("output.dir={name}"),
            format!("data.train={file}"),
            format!("data.validation={file}"),
            format!("data.format={format}"),
            "data.sequence_length=160".to_owned(),
            "training.mixed_precision=f32".to_owned(),
        ];
        for setting in settings.into_iter().chain(further.iter().map(|s| (*s).to_owned())) {
            train.extend(["--set".to_owned(), setting]);
        }
        ok(path, &train.iter().map(String::as_str).collect::<Vec<_>>());
        let wanted = read(&path.join(&name).join("report.json"))["validation_loss"].as_f64().unwrap();
        let mut eval = vec!["eval", "--model", &name, "--data", file, "--format", format];
        eval.extend(["--sequence-length", "160", "--json"]);
        further.iter().for_each(|setting| eval.extend(["--set", setting]));
        let measured: Value = serde_json::from_str(&ok(path, &eval)).unwrap();
        let loss = measured["loss"].as_f64().unwrap();
        assert!((loss - wanted).abs() < 1e-6, "{name}: {loss}, in training {wanted}");
        assert!(measured["tokens"].as_u64().unwrap() > 40, "{name}: {measured}");
    }
    let fails = |more: &[&str]| {
        let eval = ["eval", "--model", "chat1", "--data", "chats.jsonl"];
        let output = plimsoll(path, &[&eval[..], more].concat());
        assert!(!output.status.success(), "{more:?}");
        text(&output.stderr)
    };
    assert!(fails(&["--format", "sonnet"]).contains("data.format"));
    assert!(fails(&["--format", "chat", "--set", "training.steps=3"]).contains("data."));
    assert!(fails(&["--set", "data.train_on=all"]).contains("--format"));
    assert!(fails(&["--format", "chat", "--kv-cache", "bf16"]).contains("--kv-cache"));
}

#[test]
fn a_model_from_scratch_takes_the_tokenizer_of_a_gguf_file() {
    let folder = folder();
    let path = folder.path();
    ok(path, &["train", "c.yaml"]);
    ok(path, &["convert", "--model", "out", "--output", "out.gguf", "--dtype", "f32"]);
    let scratch = ["train", "c.yaml", "--set", "model.from_scratch.tokenizer=out.gguf"];
    ok(path, &[&scratch[..], &["--set", "output.dir=again"]].concat());
    let [first, again] = ["out", "again"].map(|run| {
        let metrics = std::fs::read_to_string(path.join(run).join("metrics.jsonl")).unwrap();
        let loss = |line: &str| serde_json::from_str::<Value>(line).unwrap()["loss"].clone();
        metrics.lines().map(loss).collect::<Vec<_>>()
    });
    assert_eq!(first, again);
    std::fs::write(path.join("none.gguf"), b"GGUF").unwrap();
    let none =
        ["train", "c.yaml", "--set", "model.from_scratch.tokenizer=none.gguf", "--set", "output.dir=none"];
    let error = text(&plimsoll(path, &none).stderr);
    assert!(error.contains("none.gguf"), "{error}");
}

/// A file of records is measured by its texts, with what training has between them, and not by its braces.
#[test]
fn records_are_measured_by_their_texts() {
    let folder = folder();
    ok(folder.path(), &["train", "c.yaml", "--set", "output.dir=model"]);
    let texts = ["the first words of all", "and others after them"];
    let lines = |field: &str| texts.map(|text| format!("{{\"{field}\": \"{text}\"}}\n")).concat();
    let write = |name: &str, content: &str| std::fs::write(folder.path().join(name), content).unwrap();
    write("t.jsonl", &lines("text"));
    write("other.jsonl", &lines("content"));
    write("broken.jsonl", &("no record\n".repeat(3) + &lines("text")));
    write("braces.txt", &lines("text"));
    let eval = |data: &str, more: &[&str]| -> Value {
        let given = [&["eval", "--model", "model", "--data", data, "--json"], more].concat();
        serde_json::from_str(&ok(folder.path(), &given)).unwrap()
    };
    let found = eval("t.jsonl", &[]);
    assert!(found["tokens"].as_u64() < eval("braces.txt", &[])["tokens"].as_u64());
    assert_eq!(eval("other.jsonl", &["--set", "data.text_field=content"])["loss"], found["loss"]);
    let refused = |data: &str| {
        let output = plimsoll(folder.path(), &["eval", "--model", "model", "--data", data]);
        assert_eq!(output.status.code(), Some(1), "{data}");
        text(&output.stderr)
    };
    assert!(refused("other.jsonl").contains("data.text_field"));
    assert!(refused("broken.jsonl").contains("broken.jsonl"));
}
