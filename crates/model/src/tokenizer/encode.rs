//! Text to ids: whether special tokens are added around it, and whether those written in it are recognised.

use tokenizers::tokenizer::normalizer::Range;
use tokenizers::tokenizer::{Encoding, Model, NormalizedString, OffsetType, PreTokenizer};
use tokenizers::{AddedVocabulary, ModelWrapper, Tokenizer as Engine};

use super::guard::guarded;
use super::{Tokenizer, TokenizerError};

/// How a text is encoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EncodeOptions {
    /// Whether the tokens that the model expects around a text are added (beginning, end of sequence). A chat
    /// template writes them itself.
    pub add_special: bool,
    /// Whether special tokens written in the text (`<|im_end|>`) are recognised. They should not be in text
    /// from users. Tokens that the vocabulary adds without calling them special are recognised always.
    pub parse_special: bool,
}

impl Default for EncodeOptions {
    /// Nothing is added, and what is written is recognised.
    fn default() -> EncodeOptions {
        EncodeOptions { add_special: false, parse_special: true }
    }
}

/// A text's tokens and where each comes from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EncodedText {
    /// Token ids.
    pub ids: Vec<u32>,
    /// The bytes of the text that each token stands for. Tokens that share a character have the whole of it each; one
    /// that a normaliser adds may have none.
    pub offsets: Vec<std::ops::Range<usize>>,
}

/// The texts of a vocabulary that the engine would find in a text though they do not stand for it.
#[derive(Debug)]
pub struct Hidden {
    /// The added tokens, with special ones to be left alone.
    plain: AddedVocabulary,
    /// Special tokens that are in a unigram model's table, where their text would be found as well.
    specials: Vec<String>,
    /// Whether the model's table has tokens for bytes.
    bytes: bool,
}

impl Hidden {
    pub fn of(engine: &Engine) -> Hidden {
        let mut plain = engine.get_added_vocabulary().clone();
        plain.set_encode_special_tokens(true);
        let unigram = match engine.get_model() {
            ModelWrapper::Unigram(unigram) => Some(unigram),
            _ => None,
        };
        let special = plain.get_added_tokens_decoder().values().filter(|token| token.special);
        let specials = special.map(|token| token.content.clone()).filter(|_| unigram.is_some()).collect();
        Hidden { specials, bytes: unigram.is_some_and(|u| u.byte_fallback()), plain }
    }
}

impl Tokenizer {
    /// The ids of a text. No special token is added; those written in the text are recognised.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        self.encode_with(text, EncodeOptions::default())
    }

    /// The ids of a text.
    pub fn encode_with(&self, text: &str, options: EncodeOptions) -> Result<Vec<u32>, TokenizerError> {
        let around = &self.shared.around;
        let mut ids = Vec::new();
        if options.add_special {
            ids.extend_from_slice(&around.before);
        }
        self.encode_pieces::<TokenizerError>(text, options.parse_special, &mut |piece| {
            ids.extend_from_slice(piece);
            Ok(())
        })?;
        if options.add_special {
            ids.extend_from_slice(&around.after);
        }
        Ok(ids)
    }

    /// As [`encode`](Self::encode), with the place in the text that each token comes from.
    ///
    /// # Errors
    /// As `encode`.
    pub fn encode_with_offsets(&self, text: &str) -> Result<EncodedText, TokenizerError> {
        let mut encoded = EncodedText::default();
        let mut before = 0;
        for piece in self.pieces(text) {
            let tokens = self.encode_guarded(piece, true, OffsetType::Byte)?;
            encoded.ids.extend_from_slice(tokens.get_ids());
            let offsets = tokens.get_offsets().iter();
            encoded.offsets.extend(offsets.map(|(start, end)| before + start..before + end));
            before += piece.len();
        }
        Ok(encoded)
    }

    /// The ids of a text that stands at the beginning of a sequence: after the tokens that the model expects before one
    /// (`<bos>` of Llama's and Gemma's), unless the text begins with them itself.
    ///
    /// # Errors
    /// As [`encode`](Self::encode).
    pub fn encode_beginning(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        let mut ids = Vec::new();
        let sink = &mut |piece: &[u32]| {
            ids.extend_from_slice(piece);
            Ok::<(), TokenizerError>(())
        };
        let mut document = self.document();
        document.push(text, sink)?;
        document.finish(sink)?;
        Ok(ids)
    }

    /// A text that stands at the beginning of a sequence and comes bit by bit, as [`encode_beginning`](Self::encode_beginning) has it.
    pub fn document(&self) -> DocumentEncoder<'_> {
        DocumentEncoder { tokenizer: self, held: String::new(), begun: self.shared.around.before.is_empty() }
    }

    fn encode_pieces<E: From<TokenizerError>>(
        &self,
        text: &str,
        parse_special: bool,
        sink: &mut dyn FnMut(&[u32]) -> Result<(), E>,
    ) -> Result<(), E> {
        for piece in self.pieces(text) {
            sink(self.encode_guarded(piece, parse_special, OffsetType::None)?.get_ids())?;
        }
        Ok(())
    }

    /// The text in parts that can be encoded alone.
    fn pieces<'a>(&'a self, text: &'a str) -> Box<dyn Iterator<Item = &'a str> + 'a> {
        match &self.shared.cutter {
            Some(cutter) => Box::new(cutter.pieces(text)),
            None => Box::new(Some(text).filter(|text| !text.is_empty()).into_iter()),
        }
    }

    fn encode_guarded(
        &self,
        piece: &str,
        parse_special: bool,
        offsets: OffsetType,
    ) -> Result<Encoding, TokenizerError> {
        guarded(|| self.encode_piece(piece, parse_special, offsets))
            .map_err(|reason| TokenizerError::Encode { origin: self.shared.origin.clone(), reason })
    }

    /// The engine's steps one by one: added tokens, normalizer, pre-tokenizer, model.
    fn encode_piece(
        &self,
        text: &str,
        parse_special: bool,
        offsets: OffsetType,
    ) -> tokenizers::Result<Encoding> {
        let (engine, hidden) = (&self.shared.engine, &self.shared.hidden);
        let added = if parse_special { engine.get_added_vocabulary() } else { &hidden.plain };
        let mut pieces = added.extract_and_normalize(engine.get_normalizer(), text);
        if let Some(pre_tokenizer) = engine.get_pre_tokenizer() {
            pre_tokenizer.pre_tokenize(&mut pieces)?;
        }
        let specials: &[String] = if parse_special { &[] } else { &hidden.specials };
        if hidden.bytes || !specials.is_empty() {
            pieces.split(|_, piece| Ok(apart(&piece, specials, hidden.bytes)))?;
        }
        let model = engine.get_model();
        pieces.tokenize(|piece| model.tokenize(piece.get()))?;
        pieces.into_encoding(None, 0, offsets)
    }
}

/// Bytes that are added to a piece that waits for its end.
const MORE: usize = 4 << 10;

/// A text that is encoded as it comes. Where the tokenizer can be cut, no more than a piece of it is held: byte-level ones can; others take
/// the text as a whole.
#[derive(Debug)]
pub struct DocumentEncoder<'t> {
    tokenizer: &'t Tokenizer,
    /// What waits for the end of its piece.
    held: String,
    /// Whether what the model expects before a text has been handed on.
    begun: bool,
}

impl DocumentEncoder<'_> {
    /// Takes more of the text, and hands on the ids of the pieces that it ends.
    ///
    /// # Errors
    /// The tokenizer refuses, or whatever `sink` answers.
    pub fn push<E: From<TokenizerError>>(
        &mut self,
        text: &str,
        sink: &mut dyn FnMut(&[u32]) -> Result<(), E>,
    ) -> Result<(), E> {
        let Some(cutter) = &self.tokenizer.shared.cutter else {
            self.held.push_str(text);
            return Ok(());
        };
        let (mut rest, mut held) = (text, std::mem::take(&mut self.held));
        // What waited goes first, with as much more as ends its piece.
        while !held.is_empty() && !rest.is_empty() {
            let (more, after) = rest.split_at(rest.ceil_char_boundary(MORE.min(rest.len())));
            held.push_str(more);
            rest = after;
            let mut done = 0;
            while let Some(end) = held.get(done..).and_then(|left| cutter.end_of_piece(left)) {
                self.encode(held.get(done..done + end).unwrap_or_default(), sink)?;
                done += end;
            }
            held.drain(..done);
        }
        while let Some((piece, after)) = cutter.end_of_piece(rest).and_then(|end| rest.split_at_checked(end))
        {
            self.encode(piece, sink)?;
            rest = after;
        }
        held.push_str(rest);
        self.held = held;
        Ok(())
    }

    /// Hands on the rest.
    ///
    /// # Errors
    /// As of [`push`](Self::push).
    pub fn finish<E: From<TokenizerError>>(
        mut self,
        sink: &mut dyn FnMut(&[u32]) -> Result<(), E>,
    ) -> Result<(), E> {
        let rest = std::mem::take(&mut self.held);
        if !rest.is_empty() {
            self.encode(&rest, sink)?;
        }
        // An empty text has no piece.
        if self.begun { Ok(()) } else { sink(&self.tokenizer.shared.around.before) }
    }

    fn encode<E: From<TokenizerError>>(
        &mut self,
        piece: &str,
        sink: &mut dyn FnMut(&[u32]) -> Result<(), E>,
    ) -> Result<(), E> {
        let encoding = self.tokenizer.encode_guarded(piece, true, OffsetType::None)?;
        let before = &self.tokenizer.shared.around.before;
        if !self.begun && !encoding.get_ids().starts_with(before) {
            sink(before)?;
        }
        self.begun = true;
        sink(encoding.get_ids())
    }
}

/// The piece cut after the first character of every special token's text, and of every byte token's, so that
/// the model cannot find them.
fn apart(piece: &NormalizedString, specials: &[String], bytes: bool) -> Vec<NormalizedString> {
    let text = piece.get();
    let mut cuts = vec![0, text.len()];
    for special in specials {
        if let Some(first) = special.chars().next() {
            cuts.extend(text.match_indices(special.as_str()).map(|(at, _)| at + first.len_utf8()));
        }
    }
    if bytes {
        let is_byte =
            |at: usize| text.get(at..at + 6).is_some_and(|token| super::decode::byte_token(token).is_some());
        cuts.extend(text.match_indices("<0x").filter(|(at, _)| is_byte(*at)).map(|(at, _)| at + 1));
    }
    cuts.sort_unstable();
    cuts.dedup();
    let ends = cuts.iter().skip(1);
    cuts.iter().zip(ends).filter_map(|(start, end)| piece.slice(Range::Normalized(*start..*end))).collect()
}
