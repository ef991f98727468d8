//! Tokenizers in GGUF files, whole and spoilt.

use plimsoll_model::tokenizer::{GgufTokenizerFields, Tokenizer};
use proptest::prelude::*;

use crate::vocabularies::{byte_level, every_kind, scored, unigram};

/// GGUF's numbers of types.
const I8: u32 = 1;
const U32: u32 = 4;
const I32: u32 = 5;
const F32: u32 = 6;
const BOOL: u32 = 7;
const STRING: u32 = 8;
const ARRAY: u32 = 9;

#[derive(Default)]
struct Metadata {
    bytes: Vec<u8>,
    entries: u64,
}

impl Metadata {
    fn text(&mut self, text: &[u8]) {
        self.bytes.extend((text.len() as u64).to_le_bytes());
        self.bytes.extend(text);
    }

    fn entry(&mut self, key: &str, kind: u32, value: &[u8]) {
        self.entries += 1;
        self.text(key.as_bytes());
        self.bytes.extend(kind.to_le_bytes());
        self.bytes.extend(value);
    }

    fn string(&mut self, key: &str, value: &[u8]) {
        self.entry(key, STRING, &[]);
        self.text(value);
    }

    fn array(&mut self, key: &str, kind: u32, count: usize, values: impl IntoIterator<Item = u8>) {
        self.entry(key, ARRAY, &kind.to_le_bytes());
        self.bytes.extend((count as u64).to_le_bytes());
        self.bytes.extend(values);
    }

    fn strings(&mut self, key: &str, values: &[Vec<u8>]) {
        self.array(key, STRING, values.len(), []);
        values.iter().for_each(|value| self.text(value));
    }

    fn file(self) -> Vec<u8> {
        let mut file = b"GGUF\x03\0\0\0".to_vec();
        file.extend(0u64.to_le_bytes());
        file.extend(self.entries.to_le_bytes());
        file.extend(self.bytes);
        file
    }
}

fn metadata(fields: &GgufTokenizerFields) -> Metadata {
    let bytes = |texts: &[String]| texts.iter().map(|t| t.clone().into_bytes()).collect::<Vec<_>>();
    let mut metadata = Metadata::default();
    metadata.string("tokenizer.ggml.model", fields.model.as_bytes());
    metadata.strings("tokenizer.ggml.tokens", &bytes(&fields.tokens));
    if !fields.merges.is_empty() {
        metadata.strings("tokenizer.ggml.merges", &bytes(&fields.merges));
    }
    let types = fields.token_types.iter().flat_map(|t| (*t as i32).to_le_bytes());
    metadata.array("tokenizer.ggml.token_type", I32, fields.token_types.len(), types);
    if !fields.scores.is_empty() {
        let scores = fields.scores.iter().flat_map(|score| score.to_le_bytes());
        metadata.array("tokenizer.ggml.scores", F32, fields.scores.len(), scores);
    }
    for (key, id) in [("bos", fields.bos), ("eos", fields.eos), ("unknown", fields.unknown)] {
        if let Some(id) = id {
            metadata.entry(&format!("tokenizer.ggml.{key}_token_id"), U32, &id.to_le_bytes());
        }
    }
    metadata
}

fn read(file: &[u8]) -> Result<Tokenizer, String> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("small.gguf");
    std::fs::write(&path, file).unwrap();
    Tokenizer::from_gguf_file(&path).map_err(|e| e.to_string())
}

#[test]
fn files_say_what_their_fields_say() {
    for mut fields in every_kind() {
        fields.pre = None;
        let from_file = read(&metadata(&fields).file()).unwrap();
        let from_fields = Tokenizer::from_gguf(&fields, "fields").unwrap();
        let text = "abc the <s>hello";
        assert_eq!(from_file.encode(text).unwrap(), from_fields.encode(text).unwrap());
        assert_eq!(from_file.special_tokens_around(), from_fields.special_tokens_around());
    }
}

#[test]
fn every_key_is_read() {
    let mut metadata = metadata(&unigram());
    metadata.entry("tokenizer.ggml.add_eos_token", BOOL, &[0]);
    metadata.entry("tokenizer.ggml.add_space_prefix", BOOL, &[0]);
    metadata.entry("tokenizer.ggml.eot_token_id", U32, &2u32.to_le_bytes());
    // No such token, as files with signed and with unsigned ids say it.
    metadata.entry("tokenizer.ggml.eom_token_id", I32, &(-1i32).to_le_bytes());
    metadata.entry("tokenizer.ggml.padding_token_id", U32, &u32::MAX.to_le_bytes());
    metadata.string("tokenizer.chat_template", b"one");
    metadata.string("tokenizer.chat_template.rag", b"two");
    let tokenizer = read(&metadata.file()).unwrap();
    assert_eq!((tokenizer.eos_tokens(), tokenizer.pad_token()), (&[1, 2][..], None));
    assert_eq!(tokenizer.special_tokens_around(), (&[][..], &[][..]));
    assert_eq!(tokenizer.encode("a").unwrap(), [tokenizer.token_to_id("a").unwrap()]);
    let source = |name| tokenizer.chat_templates().get(name).map(|t| t.source.as_str());
    assert_eq!((source(None), source(Some("rag"))), (Some("one"), Some("two")));
}

#[test]
fn a_character_map_of_signed_bytes() {
    let mut metadata = metadata(&unigram());
    metadata.array("tokenizer.ggml.precompiled_charsmap", I8, 6, [255, 0, 0, 0, 1, 2]);
    let error = read(&metadata.file()).unwrap_err();
    assert!(error.contains("tokenizer.ggml.precompiled_charsmap") && error.contains("255 bytes"), "{error}");
}

#[test]
fn tokens_that_are_no_text() {
    let mut metadata = Metadata::default();
    metadata.string("tokenizer.ggml.model", b"gpt2");
    metadata.strings("tokenizer.ggml.tokens", &[b"a".to_vec(), b"\xff\xfe".to_vec()]);
    let error = read(&metadata.file()).unwrap_err();
    for word in ["small.gguf", "tokenizer.ggml.tokens", "UTF-8"] {
        assert!(error.contains(word), "{error:?} has no {word:?}");
    }
    let mut metadata = Metadata::default();
    metadata.string("tokenizer.ggml.model", b"gpt2");
    metadata.array("tokenizer.ggml.tokens", U32, 1, [0; 4]);
    assert!(read(&metadata.file()).unwrap_err().contains("tokenizer.ggml.tokens"));
    assert!(read(&Metadata::default().file()).unwrap_err().contains("tokenizer.ggml.model"));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn spoilt_files_are_read_or_refused(
        kind in 0usize..2, changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..8),
        text in "[abcthe ]{0,10}",
    ) {
        let mut file = metadata(&[byte_level(), scored()][kind]).file();
        for (place, value) in changes {
            let place = place.index(file.len());
            file[place] = value;
        }
        match read(&file) {
            Ok(tokenizer) => {
                let ids = tokenizer.encode(&text).unwrap();
                tokenizer.decode(&ids).unwrap();
            }
            Err(error) => prop_assert!(error.contains("small.gguf"), "{}", error),
        }
    }
}
