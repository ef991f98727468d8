//! Tokenizers in the metadata of GGUF files, both kinds built here: what they encode, and what is refused.

use std::sync::OnceLock;

use plimsoll_model::ModelFiles;
use plimsoll_model::tokenizer::{SpecialTokens, Tokenizer};
use proptest::prelude::*;

use crate::support::{Gguf, Stored, tiny_gguf, tiny_spec, write_file};

/// Token types of llama.cpp.
const NORMAL: i32 = 1;
const UNKNOWN: i32 = 2;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const BYTE: i32 = 6;

/// A model's GGUF whose embedding has `rows` rows, to which a tokenizer's keys are to be added.
fn model(rows: u64) -> Gguf {
    let mut spec = tiny_spec();
    spec.vocab_size = rows;
    tiny_gguf(&spec, Stored::F32)
        .without("tokenizer.ggml.bos_token_id")
        .without("tokenizer.ggml.eos_token_id")
}

fn open(file: &Gguf) -> Result<Tokenizer, String> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.gguf");
    write_file(&path, &file.bytes());
    ModelFiles::open(&path).and_then(|files| files.tokenizer()).map_err(|error| {
        let text = error.to_string();
        assert!(text.contains("tiny.gguf"), "{text}");
        text
    })
}

fn refused(file: Gguf, expected: &str) {
    let error = open(&file).expect_err(expected);
    assert!(error.contains(expected), "expected {expected:?} in {error:?}");
}

/// GPT-2's printable character for each byte, in the order of the bytes.
fn byte_chars() -> Vec<String> {
    let mut next = 0x100;
    (0..=255u8)
        .map(|byte| match byte {
            b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff => char::from(byte).to_string(),
            _ => {
                next += 1;
                char::from_u32(next - 1).unwrap().to_string()
            }
        })
        .collect()
}

const MERGES: [&str; 6] = ["h e", "l l", "he ll", "hell o", "Ġ w", "Ġw o"];

/// Tokens 0 to 255 are bytes, 256 to 261 what [`MERGES`] make, then a control token and an added one.
fn byte_level_keys(file: Gguf) -> Gguf {
    let mut tokens = byte_chars();
    tokens.extend(MERGES.map(|merge| merge.replace(' ', "")));
    tokens.extend(["<|end|>".to_owned(), "<think>".to_owned()]);
    let mut types = vec![NORMAL; 262];
    types.extend([CONTROL, USER_DEFINED]);
    let tokens: Vec<&str> = tokens.iter().map(String::as_str).collect();
    file.text("tokenizer.ggml.model", "gpt2")
        .text("tokenizer.ggml.pre", "gpt-2")
        .texts("tokenizer.ggml.tokens", &tokens)
        .array("tokenizer.ggml.token_type", 5, types.iter().map(|n| n.to_le_bytes()))
        .texts("tokenizer.ggml.merges", &MERGES)
        .u32("tokenizer.ggml.bos_token_id", 262)
        .u32("tokenizer.ggml.eos_token_id", 262)
}

fn byte_level() -> Gguf {
    byte_level_keys(model(270))
}

/// `<unk>`, `<s>`, `</s>`, the 256 bytes, then pieces from token 259 on.
fn sentence_piece() -> Gguf {
    let mut tokens: Vec<(String, f32, i32)> = vec![
        ("<unk>".to_owned(), 0.0, UNKNOWN),
        ("<s>".to_owned(), 0.0, CONTROL),
        ("</s>".to_owned(), 0.0, CONTROL),
    ];
    tokens.extend((0..=255u8).map(|byte| (format!("<0x{byte:02X}>"), 0.0, BYTE)));
    let pieces = ["he", "ll", "▁he", "llo", "▁hello", "▁", "h", "e", "l", "o", "w"];
    tokens.extend(pieces.iter().enumerate().map(|(i, piece)| (piece.to_string(), -(i as f32), NORMAL)));
    tokens.push(("<tool>".to_owned(), 0.0, USER_DEFINED));
    let texts: Vec<&str> = tokens.iter().map(|(text, ..)| text.as_str()).collect();
    model(300)
        .text("tokenizer.ggml.model", "llama")
        .texts("tokenizer.ggml.tokens", &texts)
        .array("tokenizer.ggml.scores", 6, tokens.iter().map(|(_, score, _)| score.to_le_bytes()))
        .array("tokenizer.ggml.token_type", 5, tokens.iter().map(|(.., kind)| kind.to_le_bytes()))
        .u32("tokenizer.ggml.bos_token_id", 1)
        .u32("tokenizer.ggml.eos_token_id", 2)
        .u32("tokenizer.ggml.unknown_token_id", 0)
}

#[test]
fn byte_level_merges_are_applied() {
    let tokenizer = open(&byte_level()).unwrap();
    assert_eq!(
        (tokenizer.vocab_size(), tokenizer.bos_token(), tokenizer.eos_token()),
        (264, Some(262), Some(262))
    );
    let check = |text: &str, expected: &[u32]| {
        let ids = tokenizer.encode(text).unwrap();
        assert_eq!(ids, expected, "{text:?}");
    };
    check("hello", &[259]);
    check("hell", &[258]);
    check("hel", &[256, b'l'.into()]);
    check("hello wo", &[259, 261]);
    check("ü", &[0xc3, 0xbc]);
    check("a<|end|>b", &[b'a'.into(), 262, b'b'.into()]);
    check("<think>he", &[263, 256]);
    assert_eq!(tokenizer.decode(&[259, 261, 262, 263]).unwrap(), "hello wo<think>");
    let error = tokenizer.decode(&[264]).unwrap_err().to_string();
    assert!(error.contains("there is no token 264; the vocabulary has 264"), "{error}");
}

#[test]
fn sentence_piece_scores_are_followed() {
    let tokenizer = open(&sentence_piece()).unwrap();
    assert_eq!((tokenizer.bos_token(), tokenizer.eos_token()), (Some(1), Some(2)));
    let piece = |text: &str| tokenizer.token_to_id(text).unwrap();
    let check = |text: &str, expected: &[u32]| {
        let ids = tokenizer.encode(text).unwrap();
        assert_eq!(ids, expected, "{text:?}");
    };
    check("hello", &[piece("▁hello")]);
    check("he", &[piece("▁he")]);
    check("who", &[piece("▁"), piece("w"), piece("h"), piece("o")]);
    // What no piece has falls back to bytes: 3 is the first of them.
    check("hex", &[piece("▁he"), 3 + u32::from(b'x')]);
    check("heü", &[piece("▁he"), 3 + 0xc3, 3 + 0xbc]);
    assert_eq!(tokenizer.decode(&[1, piece("▁hello"), 3 + 0xc3, 3 + 0xbc, 2]).unwrap(), "helloü");
    assert!(tokenizer.encode("he<tool>").unwrap().contains(&piece("<tool>")));
    assert!(tokenizer.encode("<s>he").unwrap().starts_with(&[1]));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Both kinds have a token for every byte, so that any text comes back.
    #[test]
    fn any_text_comes_back(text in prop_oneof!["[helo w]{0,30}", "\\PC{0,30}", any::<String>()]) {
        static BOTH: OnceLock<[Tokenizer; 2]> = OnceLock::new();
        let tokenizers = BOTH.get_or_init(|| [byte_level(), sentence_piece()].map(|file| open(&file).unwrap()));
        // SentencePiece writes a space as this character and cannot tell the two apart.
        let text = text.replace('▁', "_");
        for tokenizer in tokenizers {
            let ids = tokenizer.encode(&text).unwrap();
            prop_assert_eq!(&tokenizer.decode(&ids).unwrap(), &text);
            let mut stream = tokenizer.stream_decoder(SpecialTokens::Skip);
            let streamed: String = ids.iter().map(|id| stream.push(*id).unwrap()).collect();
            prop_assert_eq!(streamed, text.as_str());
        }
    }
}

#[test]
fn merges_that_cannot_be_are_refused() {
    let with = |merge: &str| {
        let merges = [&MERGES[..], &[merge]].concat();
        byte_level().without("tokenizer.ggml.merges").texts("tokenizer.ggml.merges", &merges)
    };
    assert!(open(&with("hello Ġwo")).is_err(), "what it makes is no token");
    refused(
        with("hello Ġwo"),
        r#"tokenizer.ggml.merges: merge 6 "hello Ġwo" needs "helloĠwo", which is not a token"#,
    );
    refused(with("hex o"), r#"needs "hex", which is not a token"#);
    refused(with("hello"), "is not two tokens with a space between them");
    refused(with(""), "is not two tokens with a space between them");
    // With an empty token a merge would make one of its own parts, again and again.
    refused(with("hello "), "is not two tokens with a space between them");
    refused(with(" hello"), "is not two tokens with a space between them");
}

#[test]
fn missing_keys_are_named() {
    let byte_level = |key: &str| byte_level().without(key);
    refused(byte_level("tokenizer.ggml.model"), "metadata key tokenizer.ggml.model is missing");
    refused(byte_level("tokenizer.ggml.tokens"), "metadata key tokenizer.ggml.tokens is missing");
    refused(byte_level("tokenizer.ggml.merges"), "metadata key tokenizer.ggml.merges is missing");
    refused(
        sentence_piece().without("tokenizer.ggml.scores"),
        "tokenizer.ggml.scores: a SentencePiece vocabulary needs them",
    );
    for key in ["tokenizer.ggml.token_type", "tokenizer.ggml.pre", "tokenizer.ggml.bos_token_id"] {
        assert!(open(&byte_level(key)).is_ok(), "{key}");
    }
}

#[test]
fn keys_of_a_wrong_type_or_value_are_named() {
    let with = |file: Gguf, key: &str| file.without(key);
    let list = |key: &str, element: u32, count: usize, value: &[u8]| {
        with(byte_level(), key).array(key, element, std::iter::repeat_n(value, count))
    };
    refused(
        with(byte_level(), "tokenizer.ggml.model").u32("tokenizer.ggml.model", 1),
        "is 1 (u32) instead of a string",
    );
    refused(
        with(byte_level(), "tokenizer.ggml.model").text("tokenizer.ggml.model", "rwkv"),
        r#"tokenizer.ggml.model: "rwkv" is not supported"#,
    );
    refused(
        with(byte_level(), "tokenizer.ggml.pre").text("tokenizer.ggml.pre", "odd"),
        r#"tokenizer.ggml.pre: "odd" is not a known way"#,
    );
    refused(list("tokenizer.ggml.tokens", 5, 3, &[0; 4]), "is a list of 3 i32 instead of a list of strings");
    refused(list("tokenizer.ggml.token_type", 6, 264, &[0; 4]), "instead of a list of integers");
    refused(
        list("tokenizer.ggml.token_type", 5, 3, &[0; 4]),
        "tokenizer.ggml.token_type: 3 entries for 264 tokens",
    );
    refused(list("tokenizer.ggml.scores", 5, 264, &[0; 4]), "instead of a list of f32");
    refused(list("tokenizer.ggml.scores", 6, 1, &[0; 4]), "tokenizer.ggml.scores: 1 entries for 264 tokens");
    refused(list("tokenizer.ggml.merges", 4, 1, &[0; 4]), "instead of a list of strings");
    refused(list("tokenizer.ggml.tokens", 8, 0, &[]), "tokenizer.ggml.tokens: the vocabulary is empty");
    let twice = with(byte_level(), "tokenizer.ggml.tokens").texts("tokenizer.ggml.tokens", &["a", "b", "a"]);
    refused(twice.without("tokenizer.ggml.token_type"), r#"token 2 "a" is token 0 already"#);
    let spoilt = [&2u64.to_le_bytes()[..], &[0xff, 0xfe]].concat();
    refused(
        list("tokenizer.ggml.tokens", 8, 264, &spoilt),
        r#"the value of metadata key "tokenizer.ggml.tokens" is not valid UTF-8"#,
    );

    let eos =
        |id: u32| with(byte_level(), "tokenizer.ggml.eos_token_id").u32("tokenizer.ggml.eos_token_id", id);
    refused(eos(270), "tokenizer.ggml.eos_token_id is 270, but the embedding has 270 rows");
    refused(eos(264), "tokenizer.ggml.eos_token_id: 264 is not below 264");
    assert_eq!(open(&eos(u32::MAX)).unwrap().eos_token(), None, "-1 as unsigned is no token");
    let unknown = |id| {
        with(sentence_piece(), "tokenizer.ggml.unknown_token_id").u32("tokenizer.ggml.unknown_token_id", id)
    };
    refused(unknown(299), "tokenizer.ggml.unknown_token_id: 299 is not below 271");
}

#[test]
fn a_vocabulary_larger_than_the_embedding_is_refused() {
    refused(byte_level_keys(model(263)), "ids up to 263, but the model has embeddings for 263 only");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Bytes changed anywhere in the keys of a tokenizer: it works or is refused by name.
    #[test]
    fn damaged_gguf_tokenizers(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..5), which in any::<bool>(),
    ) {
        static FILES: OnceLock<[Vec<u8>; 2]> = OnceLock::new();
        let files = FILES.get_or_init(|| [byte_level(), sentence_piece()].map(|file| file.bytes()));
        let mut bytes = files[usize::from(which)].clone();
        let start = bytes.windows(14).position(|window| window == b"tokenizer.ggml").unwrap() - 8;
        let end = bytes.windows(10).position(|window| window == b"token_embd").unwrap();
        for (at, byte) in changes {
            bytes[start + at.index(end - start)] = byte;
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tiny.gguf");
        write_file(&path, &bytes);
        match ModelFiles::open(&path).and_then(|files| files.tokenizer()) {
            Ok(tokenizer) => {
                let ids = tokenizer.encode("hello wo <s> <|end|> ü").unwrap_or_default();
                let _ = tokenizer.decode(&ids);
            }
            Err(error) => prop_assert!(error.to_string().contains("tiny.gguf"), "{}", error),
        }
    }
}
