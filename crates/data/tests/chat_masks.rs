//! Which tokens are trained, against `transformers`: chats with the masks of
//! `apply_chat_template(return_assistant_tokens_mask=True)`, made by `docs/bench/chat_masks.py`.

use std::path::{Path, PathBuf};

use plimsoll_data::chat::{Columns, PromptTemplate, SampleEncoder, SampleOptions, TrainOn, Truncation};
use plimsoll_data::{DataError, Dataset, IGNORED_TARGET, RecordPlace};
use plimsoll_model::tokenizer::Tokenizer;
use serde_json::{Value, json};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data")
}

fn tokenizer() -> Tokenizer {
    Tokenizer::from_hf_dir(&folder()).unwrap()
}

fn options() -> SampleOptions {
    SampleOptions {
        max_invalid_share: 0.2,
        columns: Columns::default(),
        train_on: TrainOn::Assistant,
        truncation: Truncation::Right,
        sequence_length: 512,
        packing: true,
        buffer_bytes: 4096,
    }
}

fn fixture() -> Value {
    serde_json::from_slice(&std::fs::read(folder().join("chat_masks.json")).unwrap()).unwrap()
}

fn encoder<'a>(tokenizer: &'a Tokenizer, template: &str, options: SampleOptions) -> SampleEncoder<'a> {
    let template = tokenizer.chat_template_from(template, "fixture").unwrap();
    SampleEncoder::new(tokenizer, PromptTemplate::Chat(Box::new(template)), options).unwrap()
}

/// The same template without what marks the assistant's words.
fn unmarked(template: &str) -> String {
    let tags = ["{% generation %}", "{% endgeneration %}", "{%- generation %}", "{%- endgeneration %}"];
    let plain = ["{% if true %}", "{% endif %}", "{%- if true %}", "{%- endif %}"];
    tags.iter().zip(plain).fold(template.to_owned(), |text, (tag, plain)| text.replace(tag, plain))
}

#[test]
fn trained_tokens_are_those_that_transformers_masks() {
    let (fixture, tokenizer) = (fixture(), tokenizer());
    let place = RecordPlace { path: "fixture".into(), unit: "case", number: 1 };
    for case in fixture["cases"].as_array().unwrap() {
        let template = fixture["templates"][case["template"].as_str().unwrap()].as_str().unwrap();
        let ids: Vec<u32> = serde_json::from_value(case["ids"].clone()).unwrap();
        let mask: Vec<u32> = serde_json::from_value(case["mask"].clone()).unwrap();
        for template in [template.to_owned(), unmarked(template)] {
            let encoder = encoder(&tokenizer, &template, options());
            let sample = encoder.encode(case.as_object().unwrap(), &place).unwrap().unwrap();
            assert_eq!(sample.text, case["text"].as_str().unwrap());
            assert_eq!(sample.tokens, ids, "{}", sample.text);
            let trained: Vec<u32> = sample.weights.iter().map(|weight| u32::from(*weight > 0.0)).collect();
            assert_eq!(trained, mask, "{template}\n{}", sample.text);
        }
    }
}

/// A data set of these lines, and what became of them.
fn dataset(lines: &[Value], options: SampleOptions) -> Result<Dataset, DataError> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("chats.jsonl");
    std::fs::write(&path, lines.iter().map(|line| format!("{line}\n")).collect::<String>()).unwrap();
    let (fixture, tokenizer) = (fixture(), tokenizer());
    let template = fixture["templates"]["chatml"].as_str().unwrap();
    let encoder = encoder(&tokenizer, template, options);
    Dataset::open_samples(&[path.to_str().unwrap().to_owned()], &encoder, None, folder.path())
}

fn chat(question: &str, answer: &str) -> Value {
    json!({ "conversations": [{ "from": "human", "value": question }, { "from": "gpt", "value": answer }] })
}

#[test]
fn what_is_left_out_is_counted_with_its_place() {
    let lines = [
        chat("What floats?", "A ship."),
        json!({ "messages": [{ "role": "user", "content": "nobody answers" }] }),
        json!({ "messages": [{ "role": "user" }] }),
        json!({ "instruction": "a", "output": "b" }),
        chat("long", &"word ".repeat(400)),
    ];
    let drop = SampleOptions { truncation: Truncation::Drop, sequence_length: 64, ..options() };
    let report = dataset(&lines, drop.clone()).unwrap().sample_report().unwrap().clone();
    assert_eq!((report.samples, report.kept, report.left_out(), report.truncated), (5, 2, 3, 0));
    let shown = report.to_string();
    for words in [
        "no assistant turn",
        "chats.jsonl: line 2: there are turns of user alone",
        "line 3: message 1: there is no content",
    ] {
        assert!(shown.contains(words), "{words} in {shown}");
    }
    assert!(shown.contains("line 5") && shown.contains("more than 64"), "{shown}");
    let cut = |truncation| dataset(&lines, SampleOptions { truncation, ..drop.clone() });
    assert_eq!(cut(Truncation::Right).unwrap().sample_report().unwrap().truncated, 1);
    assert_eq!(cut(Truncation::Left).unwrap().sample_report().unwrap().truncated, 1);
    let refused = cut(Truncation::Error).unwrap_err().to_string();
    assert!(
        refused.contains("chats.jsonl: line 5") && refused.contains("data.sequence_length=64"),
        "{refused}"
    );
    let nothing = dataset(&lines[1..3], drop.clone()).unwrap_err().to_string();
    assert!(nothing.starts_with("none of the 2 samples can be trained on; no assistant turn"), "{nothing}");
    let foreign = dataset(&[json!({ "text": "a" })], drop).unwrap_err().to_string();
    assert!(foreign.contains("line 1: no field messages"), "{foreign}");
}

#[test]
fn windows_hold_the_samples_their_weights_and_their_beginnings() {
    let lines = [
        chat("What floats?", "A ship."),
        json!({ "messages": [
            { "role": "user", "content": "a" },
            { "role": "assistant", "content": "b", "weight": 0 },
            { "role": "user", "content": "c" },
            { "role": "assistant", "content": "d", "weight": 0.5 },
        ] }),
    ];
    let packed = dataset(&lines, SampleOptions { sequence_length: 128, ..options() }).unwrap();
    assert_eq!(packed.windows(), 1);
    let batch = packed.batch(0, 1).unwrap();
    let starts = batch.document_starts.unwrap();
    let second = starts.iter().position(|start| *start > 0).unwrap();
    assert_eq!(starts[second] as usize, second);
    // What predicts nothing weighs nothing; what is trained is the answer with its end, in order.
    let tokenizer = tokenizer();
    let (mut trained, mut weights) = (Vec::new(), Vec::new());
    for (target, weight) in batch.targets.iter().zip(batch.weights.unwrap()) {
        assert_eq!(*target == IGNORED_TARGET, weight == 0.0);
        if weight > 0.0 {
            trained.push(*target);
            weights.push(weight);
        }
    }
    let special = plimsoll_model::tokenizer::SpecialTokens::Keep;
    assert_eq!(tokenizer.decode_with(&trained, special).unwrap(), "A ship.<|im_end|>d<|im_end|>");
    assert_eq!(weights[weights.len() - 2..], [0.5, 0.5]);
    assert!(weights[..weights.len() - 2].iter().all(|weight| *weight == 1.0));

    let alone = dataset(&lines, SampleOptions { sequence_length: 128, packing: false, ..options() }).unwrap();
    assert_eq!((alone.windows(), alone.batch(0, 2).unwrap().document_starts), (2, None));
    assert_ne!(alone.identity(), packed.identity());
    let all = SampleOptions { train_on: TrainOn::All, sequence_length: 128, ..options() };
    assert_ne!(dataset(&lines, all).unwrap().identity(), packed.identity());
}

#[test]
fn instructions_without_a_template_are_plain_text() {
    let tokenizer = tokenizer();
    let encoder = SampleEncoder::new(&tokenizer, PromptTemplate::Alpaca, options()).unwrap();
    let place = RecordPlace { path: "x".into(), unit: "line", number: 1 };
    let check = |record: Value, text: &str, trained: &str| {
        let sample = encoder.encode(record.as_object().unwrap(), &place).unwrap().unwrap();
        assert_eq!(sample.text, text);
        let ids: Vec<u32> =
            sample.tokens.iter().zip(&sample.weights).filter(|(_, w)| **w > 0.0).map(|(id, _)| *id).collect();
        let special = plimsoll_model::tokenizer::SpecialTokens::Keep;
        assert_eq!(tokenizer.decode_with(&ids, special).unwrap(), trained);
    };
    check(
        json!({ "instruction": "Add.", "input": "1 2", "output": "3" }),
        "Below is an instruction that describes a task, paired with an input that provides further context. Write a response that appropriately completes the request.\n\n### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:\n3<|im_end|>",
        "3<|im_end|>",
    );
    check(
        json!({ "instruction": "Go.", "input": "", "output": "Gone.", "system": "Be brief.", "history": [] }),
        "Be brief.\n\n### Instruction:\nGo.\n\n### Response:\nGone.<|im_end|>",
        "Gone.<|im_end|>",
    );
    check(json!({ "prompt": "Once", "completion": " more" }), "Once more<|im_end|>", " more<|im_end|>");
}

#[test]
fn rows_of_parquet_are_samples() {
    let place_of = |name: &str| folder().join(name).to_str().unwrap().to_owned();
    let (fixture, tokenizer) = (fixture(), tokenizer());
    let encoder = encoder(&tokenizer, fixture["templates"]["chatml"].as_str().unwrap(), options());
    let mut texts = Vec::new();
    let report = encoder
        .for_each(&[place_of("chats.parquet")], &mut |place, sample| {
            texts.push((place.number, sample.text.clone()));
            Ok(())
        })
        .unwrap();
    // The file has the chats of the fixture, and last one that nobody answers.
    let chats = fixture["cases"].as_array().unwrap();
    let expected =
        chats.iter().filter(|case| case["template"] == "chatml").map(|case| case["text"].as_str().unwrap());
    let expected: Vec<(u64, String)> = (1..).zip(expected.map(str::to_owned)).collect();
    assert_eq!(texts, expected);
    assert_eq!((report.samples, report.kept), (7, 6));
    assert!(report.skipped[0].examples[0].contains("chats.parquet: row 7"));
}

#[test]
fn damaged_parquet_is_an_error_or_other_samples() {
    let (fixture, tokenizer) = (fixture(), tokenizer());
    let encoder = encoder(&tokenizer, fixture["templates"]["chatml"].as_str().unwrap(), options());
    let whole = std::fs::read(folder().join("chats.parquet")).unwrap();
    let scratch = tempfile::tempdir().unwrap();
    let path = scratch.path().join("damaged.parquet");
    let patterns = [path.to_str().unwrap().to_owned()];
    let read = |bytes: &[u8]| {
        std::fs::write(&path, bytes).unwrap();
        if let Err(error) = encoder.for_each(&patterns, &mut |_, _| Ok(())) {
            assert!(!error.to_string().is_empty());
        }
    };
    for i in 0..whole.len() {
        for flip in [0x01, 0x80, 0xff] {
            let mut damaged = whole.clone();
            damaged[i] ^= flip;
            read(&damaged);
        }
    }
    for length in (0..whole.len()).step_by(7) {
        read(&whole[..length]);
    }
}
