//! Tokens around a text and in it, from a GGUF and from a Hugging Face folder, and after saving.

use std::path::Path;

use plimsoll_model::tokenizer::{EncodeOptions, GgufTokenizerFields, Tokenizer};
use serde_json::{Value, json};

use crate::vocabularies::{byte_level, every_kind, scored, spelled, tokenizer, unigram};

const AROUND: EncodeOptions = EncodeOptions { add_special: true, parse_special: true };
const PLAIN: EncodeOptions = EncodeOptions { add_special: false, parse_special: false };

fn check(tokenizer: &Tokenizer, options: EncodeOptions, text: &str, expected: &[&str]) {
    let ids = tokenizer.encode_with(text, options).unwrap();
    assert_eq!(spelled(tokenizer, &ids), expected, "{text:?}");
}

#[test]
fn metadata_decides_what_is_added() {
    let kind = |pre: &str, add_bos| GgufTokenizerFields { pre: Some(pre.into()), add_bos, ..byte_level() };
    check(&tokenizer(&kind("gpt-2", None)), AROUND, "he", &["he"]);
    check(&tokenizer(&kind("gpt-2", Some(true))), AROUND, "he", &["<|start|>", "he"]);
    check(&tokenizer(&kind("llama-bpe", None)), AROUND, "he", &["<|start|>", "he"]);
    check(&tokenizer(&kind("llama-bpe", Some(false))), AROUND, "he", &["he"]);
    check(&tokenizer(&scored()), AROUND, "a", &["<s>", "▁", "a"]);
    check(&tokenizer(&scored()), AROUND, "", &["<s>"]);
    let both = GgufTokenizerFields { add_eos: Some(true), ..scored() };
    check(&tokenizer(&both), AROUND, "a", &["<s>", "▁", "a", "</s>"]);
    check(&tokenizer(&both), EncodeOptions::default(), "a", &["▁", "a"]);
    assert_eq!(tokenizer(&both).special_tokens_around(), (&[1][..], &[2][..]));
    check(&tokenizer(&unigram()), AROUND, "a", &["▁a", "</s>"]);
}

#[test]
fn a_beginning_has_what_the_model_expects_there_once() {
    let begins = |fields: &GgufTokenizerFields, text: &str, expected: &[&str]| {
        let tokenizer = tokenizer(fields);
        let ids = tokenizer.encode_beginning(text).unwrap();
        assert_eq!(spelled(&tokenizer, &ids), expected, "{text:?}");
    };
    begins(&scored(), "a", &["<s>", "▁", "a"]);
    begins(&scored(), "<s>a", &["<s>", "▁", "a"]);
    begins(&scored(), "", &["<s>"]);
    begins(&byte_level(), "he", &["he"]);
    begins(&byte_level(), "", &[]);
    // What comes after a text ends it: a beginning goes on.
    begins(&GgufTokenizerFields { add_eos: Some(true), ..scored() }, "a", &["<s>", "▁", "a"]);
}

#[test]
fn all_ends_of_a_sequence_are_known_once() {
    let fields = GgufTokenizerFields { eot: Some(5), eom: Some(2), ..scored() };
    assert_eq!(tokenizer(&fields).eos_tokens(), [2, 5]);
}

#[test]
fn special_tokens_in_a_text_can_be_left_alone() {
    let bpe = tokenizer(&byte_level());
    check(&bpe, EncodeOptions::default(), "he<|end|>", &["he", "<|end|>"]);
    check(&bpe, PLAIN, "<|end|>", &["<", "|", "e", "n", "d", "|", ">"]);
    // A user-defined token is no special one.
    check(&bpe, PLAIN, "two words", &["two words"]);
    check(&tokenizer(&scored()), EncodeOptions::default(), "<s>a", &["<s>", "▁", "a"]);
    check(&tokenizer(&scored()), PLAIN, "<s>", &["▁", "<", "s", ">"]);
    check(
        &tokenizer(&scored()),
        PLAIN,
        "<unk><0x41>",
        &["▁", "<", "<0x75>", "<0x6E>", "<0x6B>", ">", "<", "<0x30>", "<0x78>", "<0x34>", "<0x31>", ">"],
    );
    // The table of a unigram model holds special tokens, too.
    check(&tokenizer(&unigram()), EncodeOptions::default(), "a</s>", &["▁a", "</s>"]);
    check(&tokenizer(&unigram()), PLAIN, "a</s>", &["▁a", "<", "/", "s", ">"]);
}

#[test]
fn white_space_after_phi_3s_tokens_is_theirs() {
    let fields = GgufTokenizerFields { model_name: Some("Phi-3 mini".into()), ..scored() };
    check(
        &tokenizer(&fields),
        EncodeOptions::default(),
        "</s>\n a<s> a",
        &["</s>", "▁", "a", "<s>", "▁▁", "a"],
    );
    check(&tokenizer(&scored()), EncodeOptions::default(), "</s> a", &["</s>", "▁▁", "a"]);
}

/// Whatever the file is called that it was read from.
#[test]
fn a_gguf_of_phi_3s_tokens_has_a_name_that_says_so() {
    let phi_3 = GgufTokenizerFields { model_name: Some("Phi-3 mini".into()), ..scored() };
    for (fields, called, named, tokens) in [
        (&phi_3, "copy", "Phi-3 copy", &["</s>", "▁", "a"]),
        (&phi_3, "Phi-3-small", "Phi-3-small", &["</s>", "▁", "a"]),
        (&scored(), "copy", "copy", &["</s>", "▁▁", "a"]),
        (&scored(), "phi-3-like", "model", &["</s>", "▁▁", "a"]),
    ] {
        let written = tokenizer(fields).to_gguf(called).unwrap();
        assert_eq!(written.model_name.as_deref(), Some(named), "{called}");
        check(&tokenizer(&written), EncodeOptions::default(), "</s> a", tokens);
    }
}

#[test]
fn saving_keeps_everything() {
    for fields in every_kind() {
        let fields = GgufTokenizerFields {
            add_bos: fields.bos.map(|_| true),
            add_eos: Some(true),
            chat_template: Some("default one".into()),
            named_chat_templates: vec![("tool_use".into(), "other one".into())],
            ..fields
        };
        let before = tokenizer(&fields);
        let folder = tempfile::tempdir().unwrap();
        before.save(folder.path()).unwrap();
        let after = Tokenizer::from_hf_dir(folder.path()).unwrap();
        for text in ["abc the", "  hello\n", "<s>a</s>", "<|end|>é中"] {
            for options in [AROUND, PLAIN, EncodeOptions::default()] {
                let ids = before.encode_with(text, options).unwrap();
                assert_eq!(
                    after.encode_with(text, options).unwrap(),
                    ids,
                    "{} {text:?} {options:?}",
                    fields.model
                );
                assert_eq!(after.decode(&ids).unwrap(), before.decode(&ids).unwrap());
            }
        }
        assert_eq!(after.special_tokens_around(), before.special_tokens_around());
        assert_eq!(after.eos_token(), before.eos_token());
        let templates = |t: &Tokenizer| {
            t.chat_templates().iter().map(|t| (t.name.clone(), t.source.clone())).collect::<Vec<_>>()
        };
        assert_eq!(templates(&after), templates(&before));
        assert_eq!(templates(&after)[1], ("tool_use".to_owned(), "other one".to_owned()));
    }
}

/// A folder with the small SentencePiece tokenizer and a changed configuration.
fn folder(path: &Path, changes: Value) {
    tokenizer(&scored()).save(path).unwrap();
    let file = path.join("tokenizer_config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    config.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
    std::fs::write(file, config.to_string()).unwrap();
}

#[test]
fn tokenizer_config_decides_what_is_added() {
    let check_config = |changes: Value, expected: &[&str]| {
        let dir = tempfile::tempdir().unwrap();
        folder(dir.path(), changes);
        check(&Tokenizer::from_hf_dir(dir.path()).unwrap(), AROUND, "a", expected);
    };
    check_config(json!({}), &["<s>", "▁", "a"]);
    check_config(json!({ "add_bos_token": false }), &["▁", "a"]);
    check_config(json!({ "add_bos_token": true, "add_eos_token": true }), &["<s>", "▁", "a", "</s>"]);
    check_config(json!({ "add_bos_token": null, "add_eos_token": false }), &["<s>", "▁", "a"]);
}

#[test]
fn wrong_configurations_are_named() {
    let check_error = |changes: Value, words: &[&str]| {
        let dir = tempfile::tempdir().unwrap();
        folder(dir.path(), changes);
        let error = Tokenizer::from_hf_dir(dir.path()).unwrap_err().to_string();
        assert!(words.iter().all(|word| error.contains(word)), "{error}");
    };
    check_error(json!({ "add_bos_token": "yes" }), &["tokenizer_config.json", "add_bos_token", "yes"]);
    check_error(json!({ "add_bos_token": true, "bos_token": "<none>" }), &["bos_token", "no token"]);
    check_error(json!({ "chat_template": 3 }), &["tokenizer_config.json", "chat_template"]);
    check_error(json!({ "chat_template": [{ "name": "x" }] }), &["chat_template", "template"]);
}

#[test]
fn templates_are_found_where_they_are_kept() {
    let dir = tempfile::tempdir().unwrap();
    let check_found = |name: Option<&str>, expected: Option<(&str, &str)>| {
        let tokenizer = Tokenizer::from_hf_dir(dir.path()).unwrap();
        let found = tokenizer.chat_templates().get(name);
        assert_eq!(found.map(|t| t.source.as_str()), expected.map(|(source, _)| source));
        if let (Some(found), Some((_, file))) = (found, expected) {
            assert!(found.origin.ends_with(file), "{}", found.origin);
        }
    };
    let config = ["default", "rag"].map(|name| json!({ "name": name, "template": format!("the {name}") }));
    folder(dir.path(), json!({ "chat_template": config }));
    check_found(None, Some(("the default", "tokenizer_config.json")));
    check_found(Some("rag"), Some(("the rag", "tokenizer_config.json")));
    check_found(Some("other"), None);
    // Files of their own count more.
    std::fs::write(dir.path().join("chat_template.jinja"), "file").unwrap();
    check_found(None, Some(("file", "chat_template.jinja")));
    check_found(Some("rag"), None);
    std::fs::create_dir(dir.path().join("additional_chat_templates")).unwrap();
    std::fs::write(dir.path().join("additional_chat_templates/tool_use.jinja"), "tools").unwrap();
    check_found(Some("tool_use"), Some(("tools", "tool_use.jinja")));
}
