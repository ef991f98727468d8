//! The ways byte-level BPE vocabularies split text before merging: `tokenizer.ggml.pre`.
//!
//! Each kind is a row of regular expressions, applied one after the other to what the ones before left:
//! matches and the text between them both become pieces. The expressions are those of the models' own
//! `tokenizer.json`; the names are llama.cpp's.

use serde_json::{Value, json};

use super::byte_level;

/// One way to split, under all its names.
pub struct Splitting {
    names: &'static [&'static str],
    /// Applied in order.
    patterns: &'static [&'static str],
    /// Whether a piece that is a token as a whole is taken as that token, whatever the merges say.
    pub ignore_merges: bool,
    /// What `tokenizer.ggml.add_bos_token` is where the file does not say.
    pub add_bos: bool,
}

/// GPT-2's, which `ByteLevel` has built in.
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const DIGIT: &str = r"\p{N}";
const UP_TO_THREE_DIGITS: &str = r"\p{N}{1,3}";
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const DEEPSEEK3: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##;
const CJK_AND_KANA: &str = "[\u{4e00}-\u{9fa5}\u{3040}-\u{309f}\u{30a0}-\u{30ff}]+";
/// Chinese, and what lies between it and the Indic scripts, and Hangul.
const CJK_BLOCKS: &str = "[\u{4e00}-\u{9fa5}\u{800}-\u{4e00}\u{ac00}-\u{d7ff}]+";
/// The letters that have an upper and a lower case.
const CASED_LETTERS: &str = "\\s?[\
    A-Za-z\u{b5}\u{c0}-\u{d6}\u{d8}-\u{f6}\u{f8}-\u{1ba}\u{1bc}-\u{1bf}\u{1c4}-\u{293}\u{295}-\u{2af}\
    \u{370}-\u{373}\u{376}\u{377}\u{37b}-\u{37d}\u{37f}\u{386}\u{388}-\u{38a}\u{38c}\u{38e}-\u{3a1}\
    \u{3a3}-\u{3f5}\u{3f7}-\u{481}\u{48a}-\u{52f}\u{531}-\u{556}\u{10a0}-\u{10c5}\u{13a0}-\u{13f5}\
    \u{13f8}-\u{13fd}\u{1c90}-\u{1cba}\u{1cbd}-\u{1cbf}\u{1d00}-\u{1d2b}\u{1d6b}-\u{1d77}\
    \u{1d79}-\u{1d9a}\u{1e00}-\u{1f15}\u{1f18}-\u{1f1d}\u{1f20}-\u{1f45}\u{1f48}-\u{1f4d}\
    \u{1f50}-\u{1f57}\u{1f59}\u{1f5b}\u{1f5d}\u{1f5f}-\u{1f7d}\u{1f80}-\u{1fb4}\u{1fb6}-\u{1fbc}\u{1fbe}\
    \u{1fc2}-\u{1fc4}\u{1fc6}-\u{1fcc}\u{1fd0}-\u{1fd3}\u{1fd6}-\u{1fdb}\u{1fe0}-\u{1fec}\
    \u{1ff2}-\u{1ff4}\u{1ff6}-\u{1ffc}\u{2102}\u{2107}\u{210a}-\u{2113}\u{2115}\u{2119}-\u{211d}\u{2124}\
    \u{2126}\u{2128}\u{212a}-\u{212d}\u{212f}-\u{2134}\u{2139}\u{213c}-\u{213f}\u{2145}-\u{2149}\u{214e}\
    \u{2183}\u{2184}\u{2c00}-\u{2c7b}\u{2c7e}-\u{2ce4}\u{2ceb}-\u{2cee}\u{2cf2}\u{2cf3}\u{a640}-\u{a66d}\
    \u{a680}-\u{a69b}\u{a722}-\u{a76f}\u{a771}-\u{a787}\u{a78b}-\u{a78e}\u{ab70}-\u{abbf}\
    \u{fb00}-\u{fb06}\u{fb13}-\u{fb17}\u{ff21}-\u{ff3a}\u{ff41}-\u{ff5a}\u{10400}-\u{1044f}\
    \u{104b0}-\u{104d3}\u{104d8}-\u{104fb}\u{10c80}-\u{10cb2}\u{10cc0}-\u{10cf2}\u{118a0}-\u{118df}\
    \u{1e900}-\u{1e943}]+";
/// ASCII, fullwidth and Chinese punctuation.
const WIDE_PUNCTUATION: &str =
    "\\s?[!-/:-~\u{ff01}-\u{ff0f}\u{ff1a}-\u{ff5e}\u{2018}-\u{201f}\u{3000}-\u{3002}]+";
const BLOOM: &str = " ?[^(\\s|.,!?\u{2026}\u{3002}\u{ff0c}\u{3001}\u{964}\u{6d4}\u{60c})]+";
const BAILING: &str = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+";
const SEED_CODER: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+";
const MINICPM5: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}+| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const JAIS2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)|\s{1,2}(?!\S)|\s{1}";

/// Those no match of which goes on from a letter into a space, and that leave no letter and space together.
const WORD_BY_WORD: &[&str] =
    &[GPT2, LLAMA3, QWEN2, QWEN35, GPT4O, TEKKEN, DEEPSEEK3, BLOOM, BAILING, SEED_CODER, MINICPM5, JAIS2];

const fn splitting(names: &'static [&'static str], patterns: &'static [&'static str]) -> Splitting {
    Splitting { names, patterns, ignore_merges: false, add_bos: false }
}

impl Splitting {
    const fn whole_tokens_first(self) -> Splitting {
        Splitting { ignore_merges: true, ..self }
    }

    const fn bos_by_default(self) -> Splitting {
        Splitting { add_bos: true, ..self }
    }
}

/// All ways known.
const SPLITTINGS: &[Splitting] = &[
    splitting(&["default"], &[r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"]),
    splitting(
        &[
            "gpt-2",
            "gpt2",
            "phi-2",
            "mpt",
            "olmo",
            "jais",
            "trillion",
            "granite-docling",
            "exaone4",
            "gigachat",
            "a.x-4.0",
            "mellum",
            "modern-bert",
            "jina-es",
            "jina-de",
            "jina-v2-es",
            "jina-v2-de",
        ],
        &[GPT2],
    ),
    splitting(
        &["smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"],
        &[DIGIT, GPT2],
    ),
    splitting(
        &["llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"],
        &[LLAMA3],
    )
    .whole_tokens_first()
    .bos_by_default(),
    splitting(&["glm4", "glm5"], &[LLAMA3]).whole_tokens_first(),
    splitting(&["dbrx", "smaug-bpe", "chatglm-bpe"], &[LLAMA3]),
    splitting(
        &[
            "qwen2",
            "deepseek-r1-qwen",
            "stablelm2",
            "megrez",
            "hunyuan",
            "solar-open",
            "grok-2",
            "kormo",
            "f2llmv2",
        ],
        &[QWEN2],
    ),
    splitting(&["qwen35"], &[QWEN35]),
    splitting(&["falcon"], &[r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"]),
    splitting(
        &["deepseek-llm"],
        &["[\r\n]", CASED_LETTERS, WIDE_PUNCTUATION, r"\s+$", CJK_BLOCKS, r"\p{N}+"],
    ),
    splitting(&["deepseek-coder"], &["[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CJK_BLOCKS, DIGIT]),
    splitting(
        &["deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"],
        &[UP_TO_THREE_DIGITS, CJK_AND_KANA, DEEPSEEK3],
    ),
    splitting(&["tekken"], &[TEKKEN]).whole_tokens_first().bos_by_default(),
    splitting(&["gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"], &[GPT4O]),
    splitting(&["bloom", "poro-chat", "gpt3-finnish"], &[BLOOM]),
    splitting(&["viking"], &[BLOOM, DIGIT]),
    splitting(&["bailingmoe", "bailingmoe2", "llada-moe"], &[BAILING]),
    splitting(&["seed-coder"], &[SEED_CODER]),
    splitting(&["minicpm5"], &[UP_TO_THREE_DIGITS, MINICPM5]).whole_tokens_first(),
    splitting(&["jais-2"], &[JAIS2]),
];

/// The way of a name.
///
/// # Errors
/// The name is unknown; the text says which known one is nearest.
pub fn by_name(name: &str) -> Result<&'static Splitting, String> {
    if let Some(found) = SPLITTINGS.iter().find(|s| s.names.contains(&name)) {
        return Ok(found);
    }
    let names = SPLITTINGS.iter().flat_map(|s| s.names);
    let nearest =
        names.max_by(|a, b| strsim::jaro_winkler(a, name).total_cmp(&strsim::jaro_winkler(b, name)));
    let nearest = nearest.copied().unwrap_or("default");
    Err(format!(
        "{name:?} is not a known way to split text; nearest is {nearest:?}. Where the model splits as a known one does, set \
         the key to its name"
    ))
}

/// A name of the way that a `pre_tokenizer` of a `tokenizer.json` splits.
pub fn name_of(pre_tokenizer: &Value, ignore_merges: bool) -> Option<&'static str> {
    let wanted = normal(pre_tokenizer);
    let same = |way: &&Splitting| normal(&way.pre_tokenizer()) == wanted;
    let fits: Vec<&Splitting> = SPLITTINGS.iter().filter(same).collect();
    let best = fits.iter().find(|way| way.ignore_merges == ignore_merges).or(fits.first())?;
    best.names.first().copied()
}

/// A `pre_tokenizer` without what makes no difference here: spellings of the same rule.
fn normal(pre_tokenizer: &Value) -> Vec<String> {
    let steps = match pre_tokenizer["pretokenizers"].as_array() {
        Some(steps) => steps.clone(),
        None => vec![pre_tokenizer.clone()],
    };
    let one = |step: &Value| match step["type"].as_str() {
        Some("Split") => format!("split {}", step["pattern"]["Regex"].as_str().unwrap_or_default()),
        Some("ByteLevel") => format!("bytes {}", step["use_regex"].as_bool().unwrap_or(true)),
        Some("Digits") if step["individual_digits"].as_bool() == Some(true) => format!("split {DIGIT}"),
        other => format!("{other:?} {step}"),
    };
    steps.iter().map(one).collect()
}

/// Whether the expression is known to part a letter from a space after it, whatever the text, so that a text
/// may be cut there.
pub fn is_word_by_word(pattern: &str) -> bool {
    WORD_BY_WORD.contains(&pattern)
}

impl Splitting {
    /// Its `pre_tokenizer`.
    pub fn pre_tokenizer(&self) -> Value {
        let (patterns, built_in) = match self.patterns {
            [before @ .., last] if *last == GPT2 => (before, true),
            all => (all, false),
        };
        let mut steps: Vec<Value> = patterns
            .iter()
            .map(|pattern| {
                json!({ "type": "Split", "pattern": { "Regex": pattern }, "behavior": "Isolated", "invert": false })
            })
            .collect();
        steps.push(byte_level(built_in));
        match <[Value; 1]>::try_from(steps) {
            Ok([only]) => only,
            Err(steps) => json!({ "type": "Sequence", "pretokenizers": steps }),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use tokenizers::PreTokenizerWrapper;
    use tokenizers::tokenizer::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer};

    use super::*;

    /// Kind to texts, each in the pieces that Python's `regex` module finds with the same expressions.
    const PIECES: &str = include_str!("../../../tests/data/splits.json");

    fn pieces(way: &Splitting, text: &str) -> Vec<String> {
        let pre_tokenizer: PreTokenizerWrapper = serde_json::from_value(way.pre_tokenizer()).unwrap();
        let mut split = PreTokenizedString::from(text);
        pre_tokenizer.pre_tokenize(&mut split).unwrap();
        let places = split.get_splits(OffsetReferential::Original, OffsetType::Byte);
        places.into_iter().map(|(_, (start, end), _)| text[start..end].to_owned()).collect()
    }

    #[test]
    fn texts_are_split_as_the_expressions_say() {
        let kinds: BTreeMap<String, Vec<Vec<String>>> = serde_json::from_str(PIECES).unwrap();
        for (kind, texts) in &kinds {
            let way = by_name(kind).unwrap();
            for expected in texts {
                assert_eq!(&pieces(way, &expected.concat()), expected, "{kind}");
            }
        }
        let untested = SPLITTINGS.iter().filter(|s| !s.names.iter().any(|n| kinds.contains_key(*n)));
        let untested: Vec<&str> = untested.map(|s| s.names[0]).collect();
        // Other defaults for the same expression as a kind that is tested.
        assert_eq!(untested, ["glm4", "dbrx"]);
    }

    #[test]
    fn names_are_unique_and_unknown_ones_get_a_hint() {
        let mut names: Vec<&str> = SPLITTINGS.iter().flat_map(|s| s.names).copied().collect();
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
        let error = by_name("qwen3").err().unwrap();
        assert!(
            error.contains("\"qwen3\"") && error.contains("\"qwen2\"") || error.contains("\"qwen35\""),
            "{error}"
        );
    }

    /// Cutting a text after a letter or a digit and before a space or the end of a line changes no piece, for the kinds that say so.
    #[test]
    fn word_by_word_expressions_can_be_cut_between_words() {
        let kinds: BTreeMap<String, Vec<Vec<String>>> = serde_json::from_str(PIECES).unwrap();
        let texts: Vec<String> = kinds["gpt-2"].iter().map(|pieces| pieces.concat()).collect();
        let text =
            [" ", "\n", "7 ", " 42\n", "\n\n", "x  ", "9\r\n"].map(|between| texts.join(between)).join(" ");
        for way in SPLITTINGS.iter().filter(|way| way.patterns.iter().any(|p| is_word_by_word(p))) {
            let whole = pieces(way, &text);
            let mut parts = Vec::new();
            for part in crate::tokenizer::pieces::Cutter::new(8, Vec::new()).pieces(&text) {
                parts.extend(pieces(way, part));
            }
            assert_eq!(whole, parts, "{:?}", way.names);
        }
    }
}
