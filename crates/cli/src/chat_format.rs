//! Which chat template a conversation is written in.

use std::path::Path;

use plimsoll_generate::{Limits, StopStrings};
use plimsoll_model::chat_template::ChatTemplate;
use plimsoll_model::tokenizer::Tokenizer;

use crate::failure::Failure;

/// What `--chat-template plain` is, for models that were never trained to talk: a transcript, as they know it from
/// texts.
const PLAIN: &str = r"
{%- for message in messages -%}
  {%- if message.role == 'system' -%}{{ message.content | trim ~ '\n\n' }}
  {%- elif message.role == 'user' -%}{{ 'User: ' ~ message.content | trim ~ '\n' }}
  {%- else -%}{{ 'Assistant: ' ~ message.content | trim ~ '\n' }}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}Assistant:{%- endif -%}";

/// Where an answer ends in a plain transcript.
const PLAIN_STOP: &str = "\nUser:";

/// Refuses a file of `--chat-template` that cannot be read.
pub fn check(choice: Option<&str>) -> Result<(), Failure> {
    match choice {
        Some("plain") | None => Ok(()),
        Some(path) => read(path).map(drop),
    }
}

/// The source of a template in a file.
fn read(path: &str) -> Result<String, Failure> {
    if path.is_empty() {
        return Err(Failure::usage(
            "--chat-template is empty; name a Jinja file, or plain for a transcript of `User:` and `Assistant:`",
        ));
    }
    ChatTemplate::read_source(Path::new(path))
        .map_err(|e| Failure::usage(format!("--chat-template {path}: {e}")))
}

/// A template and what ends an answer in it.
pub struct ChatFormat {
    pub template: ChatTemplate,
    pub ends: Limits,
}

impl ChatFormat {
    /// The template of `choice` (a Jinja file, or `plain`), else the model's own. An answer ends at `end_tokens`.
    pub fn new(
        tokenizer: &Tokenizer,
        choice: Option<&str>,
        end_tokens: &[u32],
    ) -> Result<ChatFormat, Failure> {
        let mut ends = Limits { stop_tokens: end_tokens.to_vec(), ..Limits::default() };
        let template = match choice {
            Some("plain") => {
                ends.stop_strings =
                    StopStrings::new(vec![PLAIN_STOP.to_owned()]).map_err(|e| Failure::other(e.to_string()))?;
                tokenizer.chat_template_from(PLAIN, "--chat-template plain")?
            }
            Some(path) => tokenizer.chat_template_from(&read(path)?, path)?,
            None => tokenizer.chat_template(None)?.ok_or_else(|| {
                Failure::usage(format!(
                    "{} has no chat template; give one with --chat-template FILE, or --chat-template plain for a transcript of `User:` and `Assistant:`",
                    tokenizer.origin()
                ))
            })?,
        };
        Ok(ChatFormat { template, ends })
    }
}
