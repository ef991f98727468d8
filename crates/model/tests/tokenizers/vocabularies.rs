//! A small vocabulary of every kind.

use plimsoll_model::tokenizer::{GgufTokenizerFields, Tokenizer};

pub const NORMAL: i64 = 1;
pub const UNKNOWN: i64 = 2;
pub const CONTROL: i64 = 3;
pub const USER_DEFINED: i64 = 4;
pub const BYTE: i64 = 6;

pub fn tokenizer(fields: &GgufTokenizerFields) -> Tokenizer {
    Tokenizer::from_gguf(fields, "small.gguf").unwrap()
}

/// The tokens of a text, as the vocabulary spells them.
pub fn spelled(tokenizer: &Tokenizer, ids: &[u32]) -> Vec<String> {
    ids.iter().map(|id| tokenizer.id_to_token(*id).unwrap()).collect()
}

/// `gpt2`: the 256 bytes (ids 0 to 255), some merges, a control and a user-defined token.
pub fn byte_level() -> GgufTokenizerFields {
    let bytes = Tokenizer::byte_level().unwrap();
    let mut tokens: Vec<String> = (0..256).map(|id| bytes.id_to_token(id).unwrap()).collect();
    for token in ["he", "ll", "hell", "hello", "Ġhello", "xyz", "12"] {
        tokens.push(token.to_owned());
    }
    let mut token_types = vec![NORMAL; tokens.len()];
    for (token, kind) in [("<|end|>", CONTROL), ("<|start|>", CONTROL), ("two words", USER_DEFINED)] {
        tokens.push(token.to_owned());
        token_types.push(kind);
    }
    let merges = ["h e", "l l", "he ll", "hell o", "Ġ hello", "1 2"];
    let id = |token: &str| tokens.iter().position(|t| t == token).map(|id| id as u32);
    GgufTokenizerFields {
        model: "gpt2".into(),
        pre: Some("gpt-2".into()),
        bos: id("<|start|>"),
        eos: id("<|end|>"),
        tokens,
        token_types,
        merges: merges.map(str::to_owned).to_vec(),
        ..GgufTokenizerFields::default()
    }
}

/// `llama`: unknown, begin, end, the 256 bytes (ids 3 to 258), pieces with falling scores, a user-defined token.
pub fn scored() -> GgufTokenizerFields {
    let mut tokens: Vec<String> = ["<unk>", "<s>", "</s>"].map(str::to_owned).to_vec();
    let mut token_types = vec![UNKNOWN, CONTROL, CONTROL];
    tokens.extend((0..256).map(|byte| format!("<0x{byte:02X}>")));
    token_types.extend([BYTE; 256]);
    let pieces =
        ["▁t", "he", "▁the", "ab", "bc", "abc", "▁▁", "▁", "a", "b", "c", "t", "h", "e", "<", "s", ">", "é"];
    tokens.extend(pieces.map(str::to_owned));
    token_types.extend([NORMAL; 18]);
    tokens.push("<user>".to_owned());
    token_types.push(USER_DEFINED);
    let scores = (0..tokens.len()).map(|id| if id < 259 { 0.0 } else { -(id as f32) }).collect();
    GgufTokenizerFields {
        model: "llama".into(),
        tokens,
        scores,
        token_types,
        bos: Some(1),
        eos: Some(2),
        unknown: Some(0),
        ..GgufTokenizerFields::default()
    }
}

/// `gemma4`: as [`scored`], with a list of merges.
pub fn listed() -> GgufTokenizerFields {
    let mut fields = GgufTokenizerFields { model: "gemma4".into(), ..scored() };
    fields.tokens.extend(["\n", "\n\n"].map(str::to_owned));
    fields.token_types.extend([NORMAL; 2]);
    fields.scores = Vec::new();
    fields.merges = ["▁ t", "h e", "▁t he", "b c", "a bc", "a b", "▁ ▁", "\n \n"].map(str::to_owned).to_vec();
    fields
}

/// `t5`: pad, end, unknown, pieces with logarithms of probabilities.
pub fn unigram() -> GgufTokenizerFields {
    let special = [("<pad>", CONTROL), ("</s>", CONTROL), ("<unk>", UNKNOWN)];
    let pieces = [
        ("▁", -3.0),
        ("a", -4.0),
        ("b", -4.5),
        ("c", -5.0),
        ("ab", -6.0),
        ("bc", -5.5),
        ("▁abc", -12.0),
        ("▁a", -5.0),
        ("<", -6.0),
        ("/", -6.0),
        ("s", -6.0),
        (">", -6.0),
    ];
    let types = special.iter().map(|(_, kind)| *kind).chain([NORMAL; 12]);
    GgufTokenizerFields {
        model: "t5".into(),
        tokens: special
            .iter()
            .map(|(t, _)| *t)
            .chain(pieces.iter().map(|(t, _)| *t))
            .map(str::to_owned)
            .collect(),
        scores: [0.0; 3].into_iter().chain(pieces.iter().map(|(_, s)| *s)).collect(),
        token_types: types.collect(),
        eos: Some(1),
        unknown: Some(2),
        padding: Some(0),
        remove_extra_whitespaces: Some(true),
        ..GgufTokenizerFields::default()
    }
}

/// All of them.
pub fn every_kind() -> Vec<GgufTokenizerFields> {
    vec![byte_level(), scored(), listed(), unigram()]
}
