//! What a tokenizer is, for people who look at a model.

use std::fmt;

use tokenizers::ModelWrapper;

use super::Tokenizer;

/// How a tokenizer makes tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenizerKind {
    /// Byte-pair encoding: pairs are merged in an order that was learnt.
    Bpe {
        /// Whether bytes that no token has become tokens of a byte each.
        byte_fallback: bool,
    },
    /// The most likely of all ways to cut a text (SentencePiece).
    Unigram,
    /// The longest piece that is known, again and again (BERT).
    WordPiece,
    /// Whole words.
    WordLevel,
}

impl fmt::Display for TokenizerKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            TokenizerKind::Bpe { byte_fallback: false } => "BPE",
            TokenizerKind::Bpe { byte_fallback: true } => "BPE with byte fallback",
            TokenizerKind::Unigram => "unigram",
            TokenizerKind::WordPiece => "WordPiece",
            TokenizerKind::WordLevel => "words",
        })
    }
}

/// A token with a meaning of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpecialToken {
    /// Its id.
    pub id: u32,
    /// Its text.
    pub text: String,
}

impl Tokenizer {
    /// How it makes tokens.
    pub fn kind(&self) -> TokenizerKind {
        match self.shared.engine.get_model() {
            ModelWrapper::BPE(bpe) => TokenizerKind::Bpe { byte_fallback: bpe.byte_fallback },
            ModelWrapper::Unigram(_) => TokenizerKind::Unigram,
            ModelWrapper::WordPiece(_) => TokenizerKind::WordPiece,
            ModelWrapper::WordLevel(_) => TokenizerKind::WordLevel,
        }
    }

    /// The special tokens by their ids.
    pub fn all_special_tokens(&self) -> Vec<SpecialToken> {
        let added = self.shared.engine.get_added_vocabulary().get_added_tokens_decoder();
        let special = added.iter().filter(|(_, token)| token.special);
        let mut all: Vec<SpecialToken> =
            special.map(|(id, token)| SpecialToken { id: *id, text: token.content.clone() }).collect();
        all.sort_by_key(|token| token.id);
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_byte_tokenizer_has_one_special_token() {
        let tokenizer = Tokenizer::byte_level().unwrap();
        assert_eq!(tokenizer.kind(), TokenizerKind::Bpe { byte_fallback: false });
        let specials = tokenizer.all_special_tokens();
        assert_eq!(specials.len(), 1);
        assert_eq!(Some(specials[0].id), tokenizer.eos_token());
    }
}
