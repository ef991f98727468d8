//! A tokenizer made for the data: byte-level BPE (Sennrich et al. 2016, as GPT-2 has it), by the tokenizers library.
//!
//! The same texts and the same size give the same tokenizer.

use serde_json::Value;
use tokenizers::AddedToken;
use tokenizers::models::TrainerWrapper;
use tokenizers::models::bpe::BpeTrainer;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;

use super::byte_level::END_OF_TEXT;
use super::engine::{ModelTables, Parts};
use super::{Specials, Tokenizer, TokenizerError};

/// The token that ends a text in every tokenizer that is trained here.
pub const BPE_END_OF_TEXT: u32 = 0;

/// Pairs that occur less often are not joined: they would be learnt by heart.
const RAREST_PAIR: u64 = 2;

impl Tokenizer {
    /// Trains byte-level BPE with `vocab_size` tokens at most: every byte, `<|endoftext|>`, and pairs that were joined.
    ///
    /// # Errors
    /// The library refuses.
    pub fn train_bpe(
        vocab_size: u64,
        texts: impl Iterator<Item = String> + Send,
    ) -> Result<Tokenizer, TokenizerError> {
        let origin = "the tokenizer that is trained";
        let (vocab, merges, settings) = Default::default();
        let untrained = Parts {
            added_tokens: Vec::new(),
            normalizer: Value::Null,
            pre_tokenizer: super::gguf::byte_level(true),
            post_processor: Value::Null,
            decoder: super::gguf::byte_level(true),
            model: ModelTables::Bpe { vocab, merges, settings },
        };
        let mut engine = untrained.assemble(origin)?;
        let trainer = BpeTrainer::builder()
            .vocab_size(usize::try_from(vocab_size).unwrap_or(usize::MAX))
            .min_frequency(RAREST_PAIR)
            .show_progress(false)
            .special_tokens(vec![AddedToken::from(END_OF_TEXT, true)])
            .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
            .build();
        let mut trainer = TrainerWrapper::BpeTrainer(trainer);
        engine.train(&mut trainer, texts).map_err(|e| TokenizerError::invalid(origin, e))?;
        let end = engine.token_to_id(END_OF_TEXT);
        let specials = Specials { bos: end, eos: end.into_iter().collect(), pad: end, ..Specials::default() };
        Tokenizer::new(engine, origin.to_owned(), specials)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trained(vocab_size: u64) -> Tokenizer {
        let lines = (0..200).map(|i| format!("the ship {i} floats above the line é\n"));
        Tokenizer::train_bpe(vocab_size, lines).unwrap()
    }

    #[test]
    fn frequent_words_become_tokens() {
        let tokenizer = trained(300);
        assert!(tokenizer.vocab_size() <= 300 && tokenizer.vocab_size() > 280);
        assert_eq!(
            (tokenizer.eos_token(), tokenizer.bos_token()),
            (Some(BPE_END_OF_TEXT), Some(BPE_END_OF_TEXT))
        );
        let text = "the ship floats, 中 é";
        let ids = tokenizer.encode(text).unwrap();
        assert!(ids.len() < text.len() && tokenizer.decode(&ids).unwrap() == text);
        assert!(tokenizer.token_to_id("Ġship").is_some());
        // Without a pair that occurs twice there are the bytes alone.
        assert_eq!(Tokenizer::train_bpe(500, ["ab".to_owned()].into_iter()).unwrap().vocab_size(), 257);
    }

    #[test]
    fn a_document_that_comes_in_parts_has_the_tokens_of_the_whole() {
        let tokenizer = trained(300);
        let lines = "the ship floats above the line\n".repeat(3000);
        let text = format!("{lines}{}{END_OF_TEXT}{}{lines}", "é".repeat(40_000), "word,".repeat(20_000));
        let whole = tokenizer.encode(&text).unwrap();
        assert_eq!(tokenizer.encode_with_offsets(&text).unwrap().ids, whole);
        assert_eq!(whole.iter().filter(|id| **id == BPE_END_OF_TEXT).count(), 1);
        for bytes in [7, 5000, 200_000] {
            let (mut ids, mut rest) = (Vec::new(), text.as_str());
            let mut document = tokenizer.document();
            let sink = &mut |piece: &[u32]| {
                ids.extend_from_slice(piece);
                Ok::<(), TokenizerError>(())
            };
            while !rest.is_empty() {
                let (part, after) = rest.split_at(rest.ceil_char_boundary(bytes.min(rest.len())));
                document.push(part, sink).unwrap();
                rest = after;
            }
            document.finish(sink).unwrap();
            // What stands before a text comes first.
            assert_eq!(
                ids.strip_prefix(tokenizer.special_tokens_around().0).unwrap_or(&ids),
                whole,
                "{bytes}"
            );
        }
    }

    #[test]
    fn the_same_texts_give_the_same_tokenizer_that_loads_again() {
        let folder = tempfile::tempdir().unwrap();
        let file =
            |name: &str| std::fs::read_to_string(folder.path().join(name).join("tokenizer.json")).unwrap();
        for name in ["one", "two"] {
            std::fs::create_dir(folder.path().join(name)).unwrap();
            trained(320).save(&folder.path().join(name)).unwrap();
        }
        assert_eq!(file("one"), file("two"));
        let again = Tokenizer::from_hf_dir(&folder.path().join("one")).unwrap();
        assert_eq!(again.eos_token(), Some(BPE_END_OF_TEXT));
        let text = "the ship <|endoftext|>";
        assert_eq!(again.encode(text).unwrap(), trained(320).encode(text).unwrap());
    }
}
