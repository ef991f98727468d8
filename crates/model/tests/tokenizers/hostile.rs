//! Metadata from strangers: used, or refused with the key's name.

use plimsoll_model::tokenizer::{EncodeOptions, GgufTokenizerFields, Tokenizer, TokenizerError};
use proptest::prelude::*;

use crate::vocabularies::{byte_level, every_kind, scored, unigram};

fn check_error(fields: &GgufTokenizerFields, key: &str, words: &[&str]) {
    let error = Tokenizer::from_gguf(fields, "bad.gguf").unwrap_err();
    let TokenizerError::Field { origin, key: found, reason } = &error else { panic!("{error}") };
    assert_eq!((origin.as_str(), *found), ("bad.gguf", key), "{reason}");
    assert!(words.iter().all(|word| reason.contains(word)), "{reason}");
}

#[test]
fn lists_of_other_lengths() {
    check_error(&GgufTokenizerFields { tokens: vec![], ..scored() }, "tokenizer.ggml.tokens", &["empty"]);
    check_error(
        &GgufTokenizerFields { token_types: vec![1; 3], ..scored() },
        "tokenizer.ggml.token_type",
        &["3", "278"],
    );
    check_error(
        &GgufTokenizerFields { scores: vec![0.0; 300], ..scored() },
        "tokenizer.ggml.scores",
        &["300", "278"],
    );
    check_error(
        &GgufTokenizerFields { scores: vec![], ..scored() },
        "tokenizer.ggml.scores",
        &["SentencePiece"],
    );
    check_error(&GgufTokenizerFields { scores: vec![], ..unigram() }, "tokenizer.ggml.scores", &["unigram"]);
}

#[test]
fn tokens_twice_or_too_long() {
    let mut fields = byte_level();
    fields.tokens[7] = "hello".to_owned();
    check_error(&fields, "tokenizer.ggml.tokens", &["\"hello\"", "token 7"]);
    let mut fields = scored();
    fields.tokens[270] = "a".repeat(5000);
    check_error(&fields, "tokenizer.ggml.tokens", &["270", "5000", "4096"]);
}

#[test]
fn merges_that_lead_nowhere() {
    let check_merge = |merge: &str, words: &[&str]| {
        let mut fields = byte_level();
        fields.merges.push(merge.to_owned());
        check_error(&fields, "tokenizer.ggml.merges", words);
    };
    check_merge("h x", &["merge 6", "\"hx\"", "not a token"]);
    check_merge("hello zz", &["\"zz\""]);
    check_merge("hello", &["not two tokens"]);
    // An empty part would make a token out of itself, again and again.
    check_merge("hello ", &["not two tokens"]);
    check_merge("", &["not two tokens"]);
    // The same merge again changes nothing.
    let mut fields = byte_level();
    fields.merges.extend(["h e", "h e"].map(str::to_owned));
    let tokenizer = Tokenizer::from_gguf(&fields, "twice").unwrap();
    assert_eq!(tokenizer.encode("hello").unwrap(), [259]);
}

#[test]
fn ids_outside_of_the_vocabulary() {
    let far = Some(1 << 20);
    check_error(
        &GgufTokenizerFields { bos: far, ..scored() },
        "tokenizer.ggml.bos_token_id",
        &["1048576", "278"],
    );
    check_error(&GgufTokenizerFields { eos: far, ..scored() }, "tokenizer.ggml.eos_token_id", &["1048576"]);
    check_error(&GgufTokenizerFields { eot: far, ..scored() }, "tokenizer.ggml.eot_token_id", &["1048576"]);
    check_error(&GgufTokenizerFields { eom: far, ..scored() }, "tokenizer.ggml.eom_token_id", &["1048576"]);
    check_error(
        &GgufTokenizerFields { unknown: far, ..scored() },
        "tokenizer.ggml.unknown_token_id",
        &["1048576"],
    );
    check_error(
        &GgufTokenizerFields { padding: far, ..scored() },
        "tokenizer.ggml.padding_token_id",
        &["1048576"],
    );
    let missing = GgufTokenizerFields { bos: None, add_bos: Some(true), ..scored() };
    check_error(&missing, "tokenizer.ggml.bos_token_id", &["missing"]);
}

#[test]
fn kinds_that_are_not_supported() {
    let kind = |model: &str| GgufTokenizerFields { model: model.into(), ..scored() };
    check_error(&kind("bert"), "tokenizer.ggml.model", &["bert", "WordPiece", "t5"]);
    check_error(&kind("rwkv"), "tokenizer.ggml.model", &["rwkv", "gpt2"]);
    check_error(&kind("klingon"), "tokenizer.ggml.model", &["klingon", "unknown", "gpt2", "llama", "t5"]);
    let pre = GgufTokenizerFields { pre: Some("qwen-2".into()), ..byte_level() };
    check_error(&pre, "tokenizer.ggml.pre", &["\"qwen-2\"", "\"qwen2\""]);
}

#[test]
fn numbers_that_are_none() {
    let mut fields = unigram();
    fields.scores[4] = f32::NAN;
    check_error(&fields, "tokenizer.ggml.scores", &["token 4", "NaN"]);
    // Merges by scores have an order for these, too.
    let mut fields = scored();
    (fields.scores[260], fields.scores[261]) = (f32::NAN, f32::NEG_INFINITY);
    Tokenizer::from_gguf(&fields, "odd").unwrap().encode("the").unwrap();
}

#[test]
fn character_maps_that_lead_out_of_themselves() {
    let check_map = |map: &[u8], words: &[&str]| {
        let fields = GgufTokenizerFields { precompiled_charsmap: map.to_vec(), ..unigram() };
        check_error(&fields, "tokenizer.ggml.precompiled_charsmap", words);
    };
    check_map(&[1, 2], &["shorter"]);
    check_map(&[255, 255, 0, 0, 1], &["65535", "1"]);
    check_map(&[3, 0, 0, 0, 1, 2, 3], &["3 bytes"]);
    // A root whose children would be outside of the array.
    check_map(&[4, 0, 0, 0, 0, 0, 255, 255], &["entry 0", "leads out"]);
    let mut whole = vec![0; 4 + 1024];
    whole[1] = 4;
    whole.extend(b"\xff");
    check_map(&whole, &["UTF-8"]);
}

/// A map that makes "A" an "a": the root's children begin at 256, the value of "A" is at 512.
#[test]
fn a_whole_character_map_is_used() {
    let mut units = vec![0u32; 768];
    let a = usize::from(b'A');
    units[0] = 256 << 10;
    units[256 ^ a] = (a | 1 << 8 | (256 ^ a ^ 512) << 10) as u32;
    units[512] = 1 << 31;
    let size = 4 * units.len() as u32;
    let units = units.iter().flat_map(|unit| unit.to_le_bytes());
    let map: Vec<u8> = size.to_le_bytes().into_iter().chain(units).chain(*b"a\0").collect();
    let fields = GgufTokenizerFields { precompiled_charsmap: map, ..unigram() };
    let tokenizer = Tokenizer::from_gguf(&fields, "map").unwrap();
    assert_eq!(tokenizer.encode("AbcA").unwrap(), tokenizer.encode("abca").unwrap());
    let folder = tempfile::tempdir().unwrap();
    tokenizer.save(folder.path()).unwrap();
    let saved = Tokenizer::from_hf_dir(folder.path()).unwrap();
    assert_eq!(saved.encode("AbcA").unwrap(), tokenizer.encode("abca").unwrap());
    // The same map, spoilt in the saved file.
    let file = folder.path().join("tokenizer.json");
    let text = std::fs::read_to_string(&file).unwrap();
    std::fs::write(&file, text.replacen("AAwAAAAABA", "AAwAA//8BA", 1)).unwrap();
    let error = Tokenizer::from_hf_dir(folder.path()).unwrap_err().to_string();
    assert!(error.contains("tokenizer.json") && error.contains("precompiled_charsmap"), "{error}");
}

/// Empty tokens keep their place and never come out of a text.
#[test]
fn empty_tokens_are_named() {
    for mut fields in every_kind() {
        fields.tokens[3] = String::new();
        let tokenizer = Tokenizer::from_gguf(&fields, "empty").unwrap();
        assert_eq!(tokenizer.vocab_size(), fields.tokens.len());
        assert!(!tokenizer.encode("abc the").unwrap().contains(&3));
    }
}

fn any_token() -> impl Strategy<Value = String> {
    prop_oneof![
        "[abĠ▁<>sé ]{0,4}",
        "\\PC{0,3}",
        Just("<s>".to_owned()),
        Just("<0x41>".to_owned()),
        (0u8..=255).prop_map(|byte| format!("<0x{byte:02X}>")),
    ]
}

fn any_fields() -> impl Strategy<Value = GgufTokenizerFields> {
    let model = prop::sample::select(vec!["gpt2", "llama", "gemma4", "t5", "bert"]);
    let pre = prop::option::of(prop::sample::select(vec![
        "default",
        "gpt-2",
        "llama-bpe",
        "tekken",
        "gemma4",
        "?",
    ]));
    let tokens = prop::collection::vec(any_token(), 0..12);
    let id = || prop::option::of(0u32..14);
    let lists = (
        prop::collection::vec(any::<f32>(), 0..14),
        prop::collection::vec(-2i64..9, 0..14),
        prop::collection::vec("[ab]{0,2} ?[ab]{0,2}", 0..6),
        prop::collection::vec(any::<u8>(), 0..12),
    );
    let flags =
        (prop::option::of(any::<bool>()), prop::option::of(any::<bool>()), prop::option::of(any::<bool>()));
    (model, pre, tokens, any::<bool>(), lists, (id(), id(), id(), id()), flags).prop_map(
        |(model, pre, tokens, fitting, (mut scores, mut token_types, merges, map), ids, flags)| {
            if fitting {
                scores.resize(tokens.len(), -1.5);
                token_types.resize(tokens.len(), 1);
            }
            GgufTokenizerFields {
                model: model.into(),
                pre: pre.map(str::to_owned),
                tokens,
                scores,
                token_types,
                merges: if fitting { Vec::new() } else { merges },
                bos: ids.0,
                eos: ids.1,
                unknown: ids.2,
                eot: ids.3,
                add_bos: flags.0,
                add_space_prefix: flags.1,
                remove_extra_whitespaces: flags.2,
                precompiled_charsmap: if fitting { Vec::new() } else { map },
                ..GgufTokenizerFields::default()
            }
        },
    )
}

/// Small vocabularies of every kind with one thing wrong.
fn spoilt_fields() -> impl Strategy<Value = GgufTokenizerFields> {
    (0usize..4, any::<prop::sample::Index>(), any_token(), -2i64..9, any::<f32>(), any_token()).prop_map(
        |(kind, place, token, token_type, score, merge)| {
            let mut fields = every_kind().swap_remove(kind);
            let place = place.index(fields.tokens.len());
            fields.tokens[place] = token;
            fields.token_types[place] = token_type;
            if let Some(old) = fields.scores.get_mut(place) {
                *old = score;
            }
            if merge.len() > 3 {
                fields.merges.push(merge);
            }
            fields
        },
    )
}

fn used_or_refused(fields: &GgufTokenizerFields, text: &str) -> Result<(), TestCaseError> {
    let tokenizer = match Tokenizer::from_gguf(fields, "odd.gguf") {
        Ok(tokenizer) => tokenizer,
        Err(error) => {
            prop_assert!(error.to_string().contains("odd.gguf: tokenizer.ggml."), "{}", error);
            return Ok(());
        }
    };
    prop_assert_eq!(tokenizer.vocab_size(), fields.tokens.len());
    for add_special in [false, true] {
        for parse_special in [false, true] {
            match tokenizer.encode_with(text, EncodeOptions { add_special, parse_special }) {
                Ok(ids) => {
                    prop_assert!(ids.iter().all(|id| (*id as usize) < fields.tokens.len()));
                    tokenizer.decode(&ids).unwrap();
                }
                Err(error) => prop_assert!(error.to_string().contains("odd.gguf"), "{}", error),
            }
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn any_metadata_is_used_or_refused(fields in any_fields(), text in "[ab<s>é ]{0,12}|\\PC{0,8}") {
        used_or_refused(&fields, &text)?;
    }

    #[test]
    fn spoilt_vocabularies_are_used_or_refused(fields in spoilt_fields(), text in "[abcthe <s>]{0,12}|\\PC{0,8}") {
        used_or_refused(&fields, &text)?;
    }

    #[test]
    fn any_character_map_is_used_or_refused(
        units in prop::collection::vec(prop_oneof![any::<u32>(), 0u32..0x800], 256..=512),
        texts in prop::collection::vec(prop_oneof![Just(0u8), any::<u8>()], 0..8),
        text in "\\PC{0,12}",
    ) {
        let size = 4 * units.len() as u32;
        let units = units.iter().flat_map(|unit| unit.to_le_bytes());
        let map: Vec<u8> = size.to_le_bytes().into_iter().chain(units).chain(texts).collect();
        used_or_refused(&GgufTokenizerFields { precompiled_charsmap: map, ..unigram() }, &text)?;
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn a_spoilt_tokenizer_json_is_read_or_refused(
        kind in 0usize..4, changes in prop::collection::vec((any::<prop::sample::Index>(), 0u8..128), 0..4),
        text in "[abcthe <s>]{0,12}|\\PC{0,8}",
    ) {
        let folder = tempfile::tempdir().unwrap();
        Tokenizer::from_gguf(&every_kind()[kind], "whole").unwrap().save(folder.path()).unwrap();
        let file = folder.path().join("tokenizer.json");
        let mut bytes = std::fs::read(&file).unwrap();
        for (place, value) in changes {
            let place = place.index(bytes.len());
            bytes[place] = value;
        }
        std::fs::write(&file, bytes).unwrap();
        match Tokenizer::from_hf_dir(folder.path()) {
            Ok(tokenizer) => {
                if let Ok(ids) = tokenizer.encode(&text) {
                    tokenizer.decode(&ids).unwrap();
                }
            }
            Err(error) => prop_assert!(error.to_string().contains("tokenizer"), "{}", error),
        }
    }
}
