//! What ends an answer: the flags of stop strings and stop tokens.

use clap::Args;
use plimsoll_generate::{Limits, StopStrings};
use plimsoll_model::tokenizer::{SpecialTokens, Tokenizer};

use crate::failure::Failure;

#[derive(Debug, Args)]
pub struct StoppingArgs {
    /// Stop before this text; may be given more than once
    #[arg(long = "stop", value_name = "TEXT", allow_hyphen_values = true)]
    pub strings: Vec<String>,
    /// Stop before this token, an id or a token's own text such as <|im_end|>; may be given more than once
    #[arg(long = "stop-token", value_name = "TOKEN")]
    pub tokens: Vec<String>,
}

impl StoppingArgs {
    /// What ends an answer: these, and `more`.
    pub fn limits(&self, tokenizer: &Tokenizer, max_tokens: usize, more: Limits) -> Result<Limits, Failure> {
        let strings = [more.stop_strings.strings(), &self.strings].concat();
        let stop_strings = StopStrings::new(strings).map_err(|e| Failure::usage(format!("--stop: {e}")))?;
        let mut stop_tokens = more.stop_tokens;
        for token in &self.tokens {
            stop_tokens.push(token_id(tokenizer, token)?);
        }
        // The text of a special token is never shown, so as a text it could not be found.
        let is_special = |id: &u32, text: &str| {
            let shown = |special| tokenizer.decode_with(&[*id], special).unwrap_or_default();
            shown(SpecialTokens::Skip).is_empty() && shown(SpecialTokens::Keep) == text
        };
        for text in stop_strings.strings() {
            stop_tokens.extend(tokenizer.token_to_id(text).filter(|id| is_special(id, text)));
        }
        Ok(Limits { max_tokens, stop_tokens, stop_strings })
    }
}

fn token_id(tokenizer: &Tokenizer, token: &str) -> Result<u32, Failure> {
    let id = match token.parse() {
        Ok(id) => Some(id).filter(|id| tokenizer.id_to_token(*id).is_some()),
        Err(_) => tokenizer.token_to_id(token),
    };
    id.ok_or_else(|| {
        Failure::usage(format!(
            "--stop-token {token}: {} has no such token; give an id below {} or a token as its vocabulary spells it, or use --stop for a text",
            tokenizer.origin(),
            tokenizer.vocab_size()
        ))
    })
}
