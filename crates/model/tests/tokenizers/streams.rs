//! Text as tokens come in.

use plimsoll_model::tokenizer::{SpecialTokens, Tokenizer, TokenizerError};
use proptest::prelude::*;

use crate::vocabularies::{byte_level, every_kind, scored, tokenizer};

fn pieces(tokenizer: &Tokenizer, ids: &[u32], special: SpecialTokens) -> Vec<String> {
    let mut stream = tokenizer.stream_decoder(special);
    let mut pieces: Vec<String> = ids.iter().map(|id| stream.push(*id).unwrap()).collect();
    pieces.push(stream.finish().unwrap());
    pieces
}

#[test]
fn parts_of_characters_are_held_back() {
    let bytes = Tokenizer::byte_level().unwrap();
    let ids: Vec<u32> = "é中!".bytes().map(u32::from).collect();
    assert_eq!(pieces(&bytes, &ids, SpecialTokens::Skip), ["", "é", "", "", "中", "!", ""]);
    let cut: Vec<u32> = ids[..3].to_vec();
    assert_eq!(pieces(&bytes, &cut, SpecialTokens::Skip), ["", "é", "", "\u{fffd}"]);
    // An invalid byte shows as soon as it is known to be one.
    assert_eq!(pieces(&bytes, &[0xe4, 0x41, 0xff], SpecialTokens::Skip), ["", "\u{fffd}A", "\u{fffd}", ""]);
}

#[test]
fn special_tokens_are_skipped_or_kept() {
    let tokenizer = tokenizer(&byte_level());
    let ids = tokenizer.encode("<|start|>hello<|end|>two words").unwrap();
    assert_eq!(tokenizer.decode(&ids).unwrap(), "hellotwo words");
    assert_eq!(tokenizer.decode_with(&ids, SpecialTokens::Keep).unwrap(), "<|start|>hello<|end|>two words");
}

#[test]
fn the_space_before_a_text_is_taken_off_once() {
    let tokenizer = tokenizer(&scored());
    let ids = tokenizer.encode(" a the").unwrap();
    assert_eq!(tokenizer.decode(&ids).unwrap(), " a the");
    let piece = |token: &str| tokenizer.token_to_id(token).unwrap();
    assert_eq!(pieces(&tokenizer, &[piece("▁the"), piece("▁the")], SpecialTokens::Skip), ["the", " the", ""]);
    assert_eq!(pieces(&tokenizer, &[1, piece("▁"), piece("a")], SpecialTokens::Skip), ["", "", "a", ""]);
}

#[test]
fn unknown_ids_are_named() {
    let tokenizer = tokenizer(&scored());
    let error = tokenizer.decode(&[1, 4000]).unwrap_err();
    assert!(matches!(error, TokenizerError::UnknownId { id: 4000, .. }), "{error}");
}

proptest! {
    #[test]
    fn bytes_decode_as_lossy_utf8(bytes in prop::collection::vec(any::<u8>(), 0..40)) {
        let expected = String::from_utf8_lossy(&bytes).into_owned();
        let plain = Tokenizer::byte_level().unwrap();
        let ids: Vec<u32> = bytes.iter().map(|byte| u32::from(*byte)).collect();
        prop_assert_eq!(plain.decode(&ids).unwrap(), expected.as_str());
        // SentencePiece's byte tokens begin with id 3; the first space of a text is not its own.
        let pieces = tokenizer(&scored());
        let ids: Vec<u32> = bytes.iter().map(|byte| u32::from(*byte) + 3).collect();
        prop_assert_eq!(pieces.decode(&ids).unwrap(), expected.strip_prefix(' ').unwrap_or(&expected));
    }

    #[test]
    fn pieces_together_are_the_text(
        kind in 0usize..4, ids in prop::collection::vec(any::<prop::sample::Index>(), 0..40), keep in any::<bool>(),
    ) {
        let tokenizer = tokenizer(&every_kind()[kind]);
        let ids: Vec<u32> = ids.iter().map(|id| id.index(tokenizer.vocab_size()) as u32).collect();
        let special = if keep { SpecialTokens::Keep } else { SpecialTokens::Skip };
        let whole = tokenizer.decode_with(&ids, special).unwrap();
        prop_assert_eq!(pieces(&tokenizer, &ids, special).concat(), whole);
    }

    #[test]
    fn texts_come_back(text in "\\PC{0,40}") {
        for fields in [byte_level(), scored()] {
            let tokenizer = tokenizer(&fields);
            prop_assert_eq!(tokenizer.decode_with(&tokenizer.encode(&text).unwrap(), SpecialTokens::Keep).unwrap(), text.as_str());
        }
    }
}
