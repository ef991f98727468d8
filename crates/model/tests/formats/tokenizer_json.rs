//! `tokenizer.json` files beside a model that lie about themselves or do not belong to it.

use plimsoll_device::DType;
use plimsoll_model::ModelFiles;
use plimsoll_model::tokenizer::{SpecialTokens, Tokenizer};
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::support::{save_tiny, tiny_spec, write_file};

/// The ids of the built-in tokenizer as a `tokenizer.json`, changed, beside a model with 300 embeddings.
fn hugging_face(change: impl FnOnce(&mut Value)) -> Result<Tokenizer, String> {
    let folder = tempfile::tempdir().unwrap();
    let mut spec = tiny_spec();
    spec.vocab_size = 300;
    save_tiny(folder.path(), &spec, DType::F32);
    Tokenizer::byte_level().unwrap().save(folder.path()).unwrap();
    let path = folder.path().join("tokenizer.json");
    let mut document: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    change(&mut document);
    write_file(&path, document.to_string().as_bytes());
    let files = ModelFiles::open(folder.path()).unwrap();
    files.tokenizer().map_err(|error| {
        let text = error.to_string();
        assert!(text.contains(&*folder.path().to_string_lossy()), "{text}");
        text
    })
}

#[test]
fn a_tokenizer_json_is_checked_against_the_embedding() {
    let refused = |change: fn(&mut Value), expected: &str| {
        let error = hugging_face(change).expect_err(expected);
        assert!(error.contains(expected), "expected {expected:?} in {error:?}");
    };
    assert_eq!(hugging_face(|_| ()).unwrap().vocab_size(), 257);
    // One token more, but with an id far away.
    refused(
        |d| d["model"]["vocab"]["far"] = 5000.into(),
        "ids up to 5000, but the model has embeddings for 300",
    );
    refused(|d| d["model"] = json!({ "type": "Tape" }), "not a usable tokenizer");
    refused(|d| *d = json!([1, 2]), "not a usable tokenizer");
    refused(|d| d["model"]["merges"] = json!([["a", "nowhere"]]), "nowhere");
    refused(|d| d["model"]["vocab"] = json!({ "x".repeat(1 << 20): -1 }), "not a usable tokenizer");
}

/// A tokenizer that was saved while training keeps the length of the batches; documents are longer.
#[test]
fn truncation_and_padding_of_the_file_are_not_applied() {
    let tokenizer = hugging_face(|document| {
        document["truncation"] =
            json!({ "direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0 });
        document["padding"] = json!({
            "strategy": { "Fixed": 9 }, "direction": "Right", "pad_to_multiple_of": null,
            "pad_id": 0, "pad_type_id": 0, "pad_token": "!",
        });
    })
    .unwrap();
    assert_eq!(tokenizer.encode("hello world").unwrap().len(), 11);
    assert_eq!(tokenizer.encode("hi").unwrap().len(), 2);
}

/// A merge that leads to a token that is not there, and merges that would go on for ever.
#[test]
fn merges_with_holes_and_cycles_are_refused() {
    let with = |merges: Value, more: &'static [&'static str]| {
        hugging_face(|document| {
            for (i, token) in more.iter().enumerate() {
                document["model"]["vocab"][token] = (260 + i).into();
            }
            document["model"]["merges"] = merges;
        })
    };
    let refused = |merges: Value, more: &'static [&'static str], expected: &str| {
        let error = with(merges, more).expect_err(expected);
        assert!(error.contains(expected) && error.contains("tokenizer.json"), "{error}");
    };
    refused(json!([["h", "i"]]), &[], "hi");
    refused(json!([["h", "nowhere"]]), &["hnowhere"], "nowhere");
    refused(json!(["h i x"]), &["hi"], "Merges");
    // A part without text gives the token itself again.
    refused(json!([["h", ""]]), &[""], "merge");
    refused(json!([["", "h"]]), &[""], "merge 0 has a part without text");
    refused(json!(["h "]), &[""], "merge");
    refused(json!([["", ""]]), &[""], "merge");
    let tokenizer = with(json!([["h", "i"], ["h", "i"]]), &["hi"]).unwrap();
    assert_eq!(tokenizer.encode("hi").unwrap(), [260]);
}

/// The engine indexes with this number unchecked.
#[test]
fn what_the_engine_panics_at_is_an_error() {
    let tokenizer = hugging_face(|document| {
        document["decoder"] = json!({ "type": "Strip", "content": "a", "start": 0, "stop": 1000 });
    })
    .unwrap();
    let error = tokenizer.decode(&[b'a'.into()]).unwrap_err().to_string();
    assert!(error.contains("could not be decoded: the tokenizer contradicts itself"), "{error}");
    let mut stream = tokenizer.stream_decoder(SpecialTokens::Skip);
    stream.push(b'a'.into()).unwrap();
    assert!(stream.finish().is_err());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Values changed anywhere in a `tokenizer.json`: it works or is refused by name.
    #[test]
    fn damaged_tokenizer_jsons(changes in prop::collection::vec((any::<prop::sample::Index>(), 0usize..9), 1..4)) {
        let odd = [
            json!(null), json!(-1), json!(0), json!(u64::MAX), json!(1e300), json!(""), json!("Ġ"), json!([]), json!({}),
        ];
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokenizer.json");
        let mut document = many_parts();
        for (at, which) in changes {
            let mut paths = Vec::new();
            value_paths(&document, String::new(), &mut paths);
            *document.pointer_mut(&paths[at.index(paths.len())]).unwrap() = odd[which].clone();
        }
        write_file(&path, document.to_string().as_bytes());
        match Tokenizer::from_hf_dir(folder.path()) {
            Ok(tokenizer) => {
                let ids = tokenizer.encode("hello wo <s> <|end|> ü").unwrap_or_default();
                let _ = tokenizer.decode(&ids);
                let _ = tokenizer.save(folder.path());
            }
            Err(error) => prop_assert!(error.to_string().contains("tokenizer.json"), "{}", error),
        }
    }
}

#[test]
fn a_tokenizer_json_of_many_parts_is_read() {
    let folder = tempfile::tempdir().unwrap();
    write_file(&folder.path().join("tokenizer.json"), many_parts().to_string().as_bytes());
    let tokenizer = Tokenizer::from_hf_dir(folder.path()).unwrap();
    assert_eq!(tokenizer.encode("e").unwrap(), [2]);
    // An empty path is the whole document.
    let mut paths = Vec::new();
    value_paths(&many_parts(), String::new(), &mut paths);
    assert!(paths.len() > 100 && paths.iter().all(|path| many_parts().pointer(path).is_some()));
}

/// A `tokenizer.json` with many of the parts that there are.
fn many_parts() -> Value {
    json!({
        "version": "1.0",
        "truncation": { "direction": "Right", "max_length": 9, "strategy": "LongestFirst", "stride": 1 },
        "padding": {
            "strategy": { "Fixed": 9 }, "direction": "Right", "pad_to_multiple_of": 2,
            "pad_id": 0, "pad_type_id": 0, "pad_token": "h",
        },
        "added_tokens": [
            { "id": 7, "content": "<s>", "single_word": false, "lstrip": true, "rstrip": false, "normalized": false, "special": true },
        ],
        "normalizer": { "type": "Sequence", "normalizers": [
            { "type": "NFC" }, { "type": "Replace", "pattern": { "Regex": "[xy]+" }, "content": "z" },
            { "type": "Strip", "strip_left": true, "strip_right": false }, { "type": "Prepend", "prepend": "h" },
        ] },
        "pre_tokenizer": { "type": "Sequence", "pretokenizers": [
            { "type": "Split", "pattern": { "Regex": "\\s+" }, "behavior": "Isolated", "invert": false },
            { "type": "Digits", "individual_digits": true },
            { "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true },
        ] },
        "post_processor": { "type": "TemplateProcessing",
            "single": [{ "SpecialToken": { "id": "<s>", "type_id": 0 } }, { "Sequence": { "id": "A", "type_id": 0 } }],
            "pair": [{ "Sequence": { "id": "A", "type_id": 0 } }, { "Sequence": { "id": "B", "type_id": 1 } }],
            "special_tokens": { "<s>": { "id": "<s>", "ids": [7], "tokens": ["<s>"] } },
        },
        "decoder": { "type": "Sequence", "decoders": [
            { "type": "ByteFallback" }, { "type": "Fuse" }, { "type": "Strip", "content": "h", "start": 1, "stop": 0 },
        ] },
        "model": {
            "type": "BPE", "dropout": null, "unk_token": "h", "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": true, "ignore_merges": false,
            "vocab": { "h": 0, "e": 1, "he": 2, "l": 3, "o": 4, "Ġ": 5, "<0x48>": 6, "<s>": 7 },
            "merges": [["h", "e"]],
        },
    })
}

/// The paths (RFC 6901) of everything below a value.
fn value_paths(value: &Value, path: String, paths: &mut Vec<String>) {
    let children: Vec<(String, &Value)> = match value {
        Value::Object(object) => object.iter().map(|(key, value)| (key.clone(), value)).collect(),
        Value::Array(list) => list.iter().enumerate().map(|(i, value)| (i.to_string(), value)).collect(),
        _ => Vec::new(),
    };
    for (key, child) in children {
        value_paths(child, format!("{path}/{key}"), paths);
    }
    paths.push(path);
}
