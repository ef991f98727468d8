//! What a chat says: answers on standard output, all else on standard error; or a JSON object a line for everything.

use plimsoll_generate::{Generated, StopReason};
use serde_json::{Value, json};

use crate::commands::generate::document::{guesses_document, merge};
use crate::failure::Failure;
use crate::output::{out, outln};

/// How it is said.
#[derive(Clone, Copy, Debug)]
pub struct Console {
    pub json: bool,
    /// Whether tokens are guessed.
    pub guesses: bool,
}

impl Console {
    /// Part of an answer, as it comes.
    pub fn piece(self, text: &str) -> Result<(), Failure> {
        if self.json { Ok(()) } else { out!("{text}") }
    }

    /// A whole answer, its text shown already where it is shown as it comes.
    pub fn answer(
        self,
        question: &str,
        prompt_tokens: usize,
        dropped_turns: usize,
        answer: &Generated,
    ) -> Result<(), Failure> {
        if !self.json {
            return outln!();
        }
        let mut line = json!({
            "user": question,
            "text": answer.text,
            "tokens": answer.tokens,
            "stop_reason": answer.stop_reason.name(),
            "prompt_tokens": prompt_tokens,
            "reused_tokens": answer.reused_tokens,
            "dropped_turns": dropped_turns,
            "prompt_seconds": answer.prompt_seconds,
            "tokens_per_second": answer.tokens_per_second(),
        });
        match &answer.stop_reason {
            StopReason::StopString(stop) => line["stop"] = stop.as_str().into(),
            StopReason::StopToken(stop) => line["stop"] = (*stop).into(),
            _ => {}
        }
        if self.guesses {
            merge(&mut line, guesses_document(&answer.drafted));
        }
        outln!("{line}")
    }

    /// Something besides the answers.
    pub fn note(self, text: &str) -> Result<(), Failure> {
        self.reply(text, json!({ "note": text }))
    }

    /// Something that went wrong.
    pub fn error(self, text: &str) -> Result<(), Failure> {
        self.reply(&format!("error: {text}"), json!({ "error": text }))
    }

    /// The same for people and for programs.
    pub fn reply(self, text: &str, document: Value) -> Result<(), Failure> {
        if self.json {
            return outln!("{document}");
        }
        eprintln!("{}", text.trim_end());
        Ok(())
    }
}
