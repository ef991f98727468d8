//! A `tokenizer.json`, read in one pass: vocabulary and merges into their tables, the small parts as JSON values.
//!
//! What the engine would trust is checked here: parts that are no whole JSON, merges that lead back to themselves, and
//! character maps that lead out of themselves.

use std::fmt;

use serde::de::{DeserializeSeed, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value};
use tokenizers::models::bpe::{Merges, Vocab};
use tokenizers::{AddedToken, Tokenizer as Engine};

use super::{BpeSettings, ModelTables, Parts};
use crate::shown::short_reason;
use crate::tokenizer::TokenizerError;
use crate::tokenizer::gguf::check_charsmap;
use crate::tokenizer::guard::guarded;

/// The engine that a `tokenizer.json` describes. `origin` is what errors call the file.
///
/// # Errors
/// It is no tokenizer, or one that cannot work.
pub fn engine(text: Vec<u8>, origin: &str) -> Result<Engine, TokenizerError> {
    let fail = |reason: String| TokenizerError::invalid(origin, short_reason(&reason));
    let document: Document = serde_json::from_slice(&text).map_err(|e| fail(e.to_string()))?;
    if let Some(version) = document.version.filter(|version| version != "1.0") {
        return Err(fail(format!("its version {version:?} is unknown")));
    }
    check_normalizer(&document.normalizer).map_err(fail)?;
    match document.model.tables().map_err(fail)? {
        Some(model) => {
            drop(text);
            let parts = Parts {
                added_tokens: document.added_tokens.into_iter().map(|listed| listed.token).collect(),
                normalizer: document.normalizer,
                pre_tokenizer: document.pre_tokenizer,
                post_processor: document.post_processor,
                decoder: document.decoder,
                model,
            };
            parts.assemble(origin)
        }
        // Whole words and WordPiece, which no decoder of today has: the engine's own way.
        None => guarded(|| Engine::from_bytes(&text)).map_err(fail),
    }
}

/// The parts of `tokenizer.json`. What it says of truncation and padding is not applied.
#[derive(Deserialize)]
struct Document {
    #[serde(default)]
    version: Option<String>,
    #[serde(default)]
    added_tokens: Vec<ListedToken>,
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    pre_tokenizer: Value,
    #[serde(default)]
    post_processor: Value,
    #[serde(default)]
    decoder: Value,
    model: Model,
}

/// An added token. Where the vocabulary has its text, that id counts.
#[derive(Deserialize)]
struct ListedToken {
    #[serde(rename = "id")]
    _id: u32,
    #[serde(flatten)]
    token: AddedToken,
}

/// The model as it is written.
#[derive(Default)]
struct Model {
    kind: Option<String>,
    vocab: Option<Vocabulary>,
    merges: Option<Merges>,
    /// Everything else, which is small.
    settings: Map<String, Value>,
}

enum Vocabulary {
    /// Token to id.
    Ids(Vocab),
    /// Tokens with scores, in the order of ids.
    Scores(Vec<(String, f64)>),
}

impl Model {
    /// Its tables; `None` for a kind that is left to the engine.
    fn tables(self) -> Result<Option<ModelTables>, String> {
        let settings = Value::Object(self.settings);
        match (self.kind.as_deref(), self.vocab, self.merges) {
            // Files of old have no type.
            (Some("BPE") | None, Some(Vocabulary::Ids(vocab)), Some(merges)) => {
                let settings = BpeSettings::deserialize(settings).map_err(|e| e.to_string())?;
                Ok(Some(ModelTables::Bpe { vocab, merges, settings }))
            }
            (Some("Unigram"), Some(Vocabulary::Scores(vocab)), _) => {
                let settings = UnigramSettings::deserialize(settings).map_err(|e| e.to_string())?;
                let UnigramSettings { unk_id, byte_fallback } = settings;
                Ok(Some(ModelTables::Unigram { vocab, unk_id, byte_fallback }))
            }
            (Some("BPE"), ..) => Err("a BPE model needs `vocab`, tokens with ids, and `merges`".to_owned()),
            (Some("Unigram"), ..) => Err("a unigram model needs `vocab`, tokens with scores".to_owned()),
            _ => Ok(None),
        }
    }
}

/// What is said of a unigram model beside its table.
#[derive(Default, Deserialize)]
#[serde(default)]
struct UnigramSettings {
    unk_id: Option<usize>,
    byte_fallback: bool,
}

impl<'de> Deserialize<'de> for Model {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Model, D::Error> {
        deserializer.deserialize_map(ModelVisitor)
    }
}

struct ModelVisitor;

impl<'de> Visitor<'de> for ModelVisitor {
    type Value = Model;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a tokenizer's model")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Model, A::Error> {
        let mut model = Model::default();
        while let Some(key) = map.next_key::<String>()? {
            match key.as_str() {
                "type" => model.kind = Some(map.next_value()?),
                "vocab" => model.vocab = map.next_value()?,
                "merges" => model.merges = map.next_value_seed(MergesVisitor)?,
                _ => drop(model.settings.insert(key, map.next_value()?)),
            }
        }
        Ok(model)
    }
}

impl<'de> Deserialize<'de> for Vocabulary {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Vocabulary, D::Error> {
        deserializer.deserialize_any(VocabularyVisitor)
    }
}

struct VocabularyVisitor;

impl<'de> Visitor<'de> for VocabularyVisitor {
    type Value = Vocabulary;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a vocabulary: tokens with ids, or a list of tokens with scores")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Vocabulary, A::Error> {
        let mut vocab = Vocab::new();
        while let Some((token, id)) = map.next_entry()? {
            vocab.insert(token, id);
        }
        Ok(Vocabulary::Ids(vocab))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Vocabulary, A::Error> {
        let mut vocab = Vec::new();
        while let Some(entry) = list.next_element()? {
            vocab.push(entry);
        }
        Ok(Vocabulary::Scores(vocab))
    }
}

/// A list of merges, each a pair of tokens, or in files of old a line of two with a space between. Both have text: one
/// without would give the other itself, again and again.
struct MergesVisitor;

impl<'de> DeserializeSeed<'de> for MergesVisitor {
    type Value = Option<Merges>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Option<Merges>, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for MergesVisitor {
    type Value = Option<Merges>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of merges")
    }

    fn visit_unit<E: Error>(self) -> Result<Option<Merges>, E> {
        Ok(None)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Option<Merges>, A::Error> {
        let mut merges = Merges::new();
        let mut number = 0u64;
        while let Some(merge) = list.next_element::<Merge>()? {
            let (left, right) = match merge {
                Merge::Pair(left, right) => (left, right),
                // The first line of the merge files that such lists were made from.
                Merge::Line(line) if line.starts_with("#version") => continue,
                Merge::Line(line) => match line.split_once(' ') {
                    Some((left, right)) if !right.contains(' ') => (left.to_owned(), right.to_owned()),
                    _ => {
                        return Err(Error::custom(format_args!(
                            "Merges: merge {number} is not two tokens with a space between them"
                        )));
                    }
                },
            };
            if left.is_empty() || right.is_empty() {
                return Err(Error::custom(format_args!(
                    "merge {number} has a part without text, so that it leads back to itself"
                )));
            }
            merges.push((left, right));
            number += 1;
        }
        Ok(Some(merges))
    }
}

enum Merge {
    Pair(String, String),
    Line(String),
}

impl<'de> Deserialize<'de> for Merge {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Merge, D::Error> {
        deserializer.deserialize_any(MergeVisitor)
    }
}

struct MergeVisitor;

impl<'de> Visitor<'de> for MergeVisitor {
    type Value = Merge;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a merge: a list of two tokens")
    }

    fn visit_str<E: Error>(self, line: &str) -> Result<Merge, E> {
        Ok(Merge::Line(line.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut pair: A) -> Result<Merge, A::Error> {
        let (left, right) = (pair.next_element()?, pair.next_element()?);
        match (left, right, pair.next_element::<IgnoredAny>()?) {
            (Some(left), Some(right), None) => Ok(Merge::Pair(left, right)),
            _ => Err(Error::custom("a merge is a list of two tokens")),
        }
    }
}

fn check_normalizer(normalizer: &Value) -> Result<(), String> {
    if let Some(map) = normalizer.get("precompiled_charsmap").and_then(Value::as_str) {
        let bytes = base64_bytes(map).ok_or("precompiled_charsmap: no base64")?;
        check_charsmap(&bytes).map_err(|reason| format!("precompiled_charsmap: {reason}"))?;
    }
    let steps = normalizer.get("normalizers").and_then(Value::as_array);
    steps.into_iter().flatten().try_for_each(check_normalizer)
}

/// The bytes of standard base64 (RFC 4648).
fn base64_bytes(text: &str) -> Option<Vec<u8>> {
    let digits = text.trim_end_matches('=').bytes().map(|digit| match digit {
        b'A'..=b'Z' => Some(digit - b'A'),
        b'a'..=b'z' => Some(digit - b'a' + 26),
        b'0'..=b'9' => Some(digit - b'0' + 52),
        b'+' => Some(62),
        b'/' => Some(63),
        _ => None,
    });
    let digits: Vec<u8> = digits.collect::<Option<_>>()?;
    let mut bytes = Vec::with_capacity(digits.len() / 4 * 3 + 3);
    for chunk in digits.chunks(4) {
        let group =
            chunk.iter().fold(0u32, |bits, digit| bits << 6 | u32::from(*digit)) << (6 * (4 - chunk.len()));
        bytes.extend(group.to_be_bytes().into_iter().skip(1).take(chunk.len() - 1));
    }
    Some(bytes)
}
