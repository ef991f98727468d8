//! What each kind makes of a text, by hand and against plain versions of its rule.

use plimsoll_model::tokenizer::GgufTokenizerFields;
use proptest::prelude::*;

use crate::vocabularies::{byte_level, every_kind, listed, scored, spelled, tokenizer, unigram};

fn check(fields: &GgufTokenizerFields, text: &str, expected: &[&str]) {
    let tokenizer = tokenizer(fields);
    let ids = tokenizer.encode(text).unwrap();
    assert_eq!(spelled(&tokenizer, &ids), expected, "{} {text:?}", fields.model);
    assert_eq!(tokenizer.vocab_size(), fields.tokens.len());
}

#[test]
fn byte_level_bpe_merges_within_pieces() {
    check(&byte_level(), "hello hello", &["hello", "Ġhello"]);
    check(&byte_level(), "hellhe", &["hell", "he"]);
    check(&byte_level(), "é\n", &["Ã", "©", "Ċ"]);
    check(&byte_level(), "<|start|>he", &["<|start|>", "he"]);
    check(&byte_level(), "hetwo words", &["he", "two words"]);
    check(&byte_level(), "", &[]);
}

#[test]
fn the_pre_tokenizer_decides_what_may_merge() {
    let kind = |pre: &str| GgufTokenizerFields { pre: Some(pre.into()), ..byte_level() };
    check(&kind("gpt-2"), "12", &["12"]);
    check(&kind("qwen2"), "12", &["1", "2"]);
    check(&kind("gpt-2"), "xyz", &["x", "y", "z"]);
    // Llama 3 takes a piece that is a token as it is, though no merge leads there.
    check(&kind("llama-bpe"), "xyz", &["xyz"]);
    check(&GgufTokenizerFields { pre: None, ..byte_level() }, "12", &["12"]);
}

#[test]
fn scored_pieces_merge_best_first_and_bytes_fill_in() {
    check(&scored(), "the", &["▁the"]);
    check(&scored(), "abc", &["▁", "abc"]);
    check(&scored(), "  a", &["▁▁", "▁", "a"]);
    check(&scored(), "xé", &["▁", "<0x78>", "é"]);
    check(&scored(), "中", &["▁", "<0xE4>", "<0xB8>", "<0xAD>"]);
    check(&scored(), "a<user>a", &["▁", "a", "<user>", "▁", "a"]);
    check(&GgufTokenizerFields { add_space_prefix: Some(false), ..scored() }, "a a", &["a", "▁", "a"]);
    check(&scored(), "", &[]);
}

#[test]
fn listed_merges_have_the_lists_order() {
    check(&listed(), "a bc\n\n\nthe", &["a", "▁", "bc", "\n\n", "\n", "t", "he"]);
    check(&listed(), "abc", &["abc"]);
    check(&listed(), "x the", &["<0x78>", "▁the"]);
    // The same under llama.cpp's other name for it.
    let other = GgufTokenizerFields { model: "gpt2".into(), pre: Some("gemma4".into()), ..listed() };
    check(&other, "x the", &["<0x78>", "▁the"]);
}

#[test]
fn unigram_takes_the_likeliest_way() {
    check(&unigram(), "abc", &["▁a", "bc"]);
    check(&unigram(), "  ab   c  ", &["▁", "ab", "▁", "c"]);
    check(&unigram(), "axa", &["▁a", "<unk>", "a"]);
    check(&unigram(), "xyz", &["▁", "<unk>"]);
    let kept = GgufTokenizerFields { remove_extra_whitespaces: None, ..unigram() };
    check(&kept, "a  c", &["▁a", "▁", "▁", "c"]);
}

#[test]
fn every_kind_gives_texts_back() {
    for fields in every_kind() {
        let tokenizer = tokenizer(&fields);
        let text = if fields.model == "t5" { "abc a <s>" } else { "abc the  <a b>\né" };
        assert_eq!(tokenizer.decode(&tokenizer.encode(text).unwrap()).unwrap(), text, "{}", fields.model);
    }
}

/// SentencePiece's rule, plainly: as long as two neighbours together are a token, merge the two of the best score.
fn merged_by_scores(fields: &GgufTokenizerFields, text: &str) -> Vec<String> {
    let score = |token: &str| fields.tokens.iter().position(|t| t == token).map(|id| fields.scores[id]);
    let text = format!(" {text}").replace(' ', "▁");
    let mut symbols: Vec<String> = text.chars().map(String::from).collect();
    loop {
        let pairs =
            symbols.windows(2).enumerate().filter_map(|(at, pair)| Some((at, score(&pair.concat())?)));
        let Some((at, _)) = pairs.reduce(|best, pair| if pair.1 > best.1 { pair } else { best }) else {
            break;
        };
        let right = symbols.remove(at + 1);
        symbols[at].push_str(&right);
    }
    symbols
}

/// The unigram model's rule, plainly: the best of all ways to cut the text into tokens.
fn best_cut(fields: &GgufTokenizerFields, text: &str) -> Option<f64> {
    if text.is_empty() {
        return Some(0.0);
    }
    let tokens = fields.tokens.iter().zip(&fields.scores).skip(3);
    let ways = tokens.filter_map(|(token, score)| {
        Some(f64::from(*score) + best_cut(fields, text.strip_prefix(token.as_str())?)?)
    });
    ways.reduce(f64::max)
}

proptest! {
    #[test]
    fn scores_merge_as_the_plain_rule_does(text in "[abcthe ]{1,30}") {
        let fields = scored();
        let tokenizer = tokenizer(&fields);
        let ids = tokenizer.encode(&text).unwrap();
        prop_assert_eq!(spelled(&tokenizer, &ids), merged_by_scores(&fields, &text));
    }

    #[test]
    fn no_cut_is_likelier_than_unigrams(words in prop::collection::vec("[abc]{1,4}", 1..4)) {
        let fields = unigram();
        let tokenizer = tokenizer(&fields);
        let ids = tokenizer.encode(&words.join(" ")).unwrap();
        let score: f64 = ids.iter().map(|id| f64::from(fields.scores[*id as usize])).sum();
        let text: String = words.iter().map(|word| format!("▁{word}")).collect();
        prop_assert_eq!(spelled(&tokenizer, &ids).concat(), text.as_str());
        prop_assert!((score - best_cut(&fields, &text).unwrap()).abs() < 1e-6);
    }
}
