//! A GGUF's tokenizer metadata, written as lines of text, so that the fuzzer need not learn the container: used, or
//! refused with the key's name; ids are inside the vocabulary.
//!
//! `m` model, `p` pre-tokenizer, `t` token, `s` score, `k` token type, `g` merge, `b` bos, `e` eos, `u` unknown, `f` flags,
//! `c` bytes of the character map, `x` text to encode.

#![no_main]

use libfuzzer_sys::fuzz_target;
use plimsoll_model::tokenizer::{EncodeOptions, GgufTokenizerFields, Tokenizer};

fuzz_target!(|text: &str| {
    let mut fields = GgufTokenizerFields::default();
    let mut sample = "Hello, wörld 123 <s>".to_owned();
    for line in text.lines() {
        let Some(kind) = line.chars().next() else { continue };
        let value = line[kind.len_utf8()..].to_owned();
        match kind {
            'm' => fields.model = value,
            'p' => fields.pre = Some(value),
            't' => fields.tokens.push(value),
            's' => fields.scores.extend(value.parse::<f32>()),
            'k' => fields.token_types.extend(value.parse::<i64>()),
            'g' => fields.merges.push(value),
            'b' => fields.bos = value.parse().ok(),
            'e' => fields.eos = value.parse().ok(),
            'u' => fields.unknown = value.parse().ok(),
            'f' => {
                fields.add_bos = Some(value.contains('b'));
                fields.add_eos = Some(value.contains('e'));
                fields.add_space_prefix = Some(value.contains('s'));
            }
            'c' => fields.precompiled_charsmap.extend(value.bytes()),
            'x' => sample = value,
            _ => {}
        }
    }
    let tokenizer = match Tokenizer::from_gguf(&fields, "fuzzed.gguf") {
        Ok(tokenizer) => tokenizer,
        Err(error) => return assert!(error.to_string().contains("fuzzed.gguf"), "{error}"),
    };
    assert_eq!(tokenizer.vocab_size(), fields.tokens.len());
    for parse_special in [false, true] {
        if let Ok(ids) = tokenizer.encode_with(&sample, EncodeOptions { add_special: true, parse_special }) {
            assert!(ids.iter().all(|id| (*id as usize) < fields.tokens.len()));
            let _ = tokenizer.decode(&ids);
        }
    }
});
