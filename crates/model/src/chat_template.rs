//! Chat templates: from messages to the text that a model was trained on, by the model's own Jinja template.
//!
//! The templates are written for `transformers`: Jinja with `trim_blocks`, `lstrip_blocks` and loop controls,
//! Python's methods of strings, lists and dictionaries, and the functions `raise_exception` and
//! `strftime_now`. The `{% generation %}` blocks that mark what the assistant said change no text;
//! [`ChatTemplate::render_marked`] says where they are. Two things are more lenient than in Python: a loop over `none` is empty, and nothing is ever
//! escaped for HTML. A template reads no files, and what it may do is bounded: instructions, bytes of everything that it
//! makes (64 MiB and 64 for each byte of the chat), bytes that it looks at. `rewrite` puts the counting (`meter`) into
//! the operators, `metered` into filters and methods.
//!
//! The text holds its special tokens: encode it with them recognised and none added
//! ([`EncodeOptions::default`](crate::tokenizer::EncodeOptions)).

mod clock;
mod error;
mod functions;
mod json;
mod meter;
mod metered;
mod rewrite;

use std::fs::File;
use std::io::{self, Read};
use std::ops::Range;
use std::path::Path;
use std::time::SystemTime;

use minijinja::Environment;
use minijinja::value::{Serde, Value};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value as Json};

pub use error::ChatTemplateError;
use meter::Meter;

use crate::tokenizer::Tokenizer;

/// Instructions that a template may take; those in use take some hundreds a message.
const FUEL: u64 = 10_000_000;
/// Bytes of a template's file; those in use have some tens of thousands.
const MOST_BYTES: u64 = 1 << 20;
/// What the template is called in its environment.
const NAME: &str = "chat_template";

/// A message of a chat, with whatever else its template knows (`tool_calls`, `name`).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ChatMessage {
    /// `system`, `user`, `assistant`, or another that the template knows.
    pub role: String,
    /// What was said: mostly a text.
    pub content: Json,
    /// The message's other keys.
    #[serde(flatten)]
    pub more: Map<String, Json>,
}

impl ChatMessage {
    /// A message that is a text.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> ChatMessage {
        ChatMessage { role: role.into(), content: Json::String(content.into()), more: Map::new() }
    }
}

/// What a template is rendered with, besides the messages.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ChatOptions {
    /// Whether the text ends with the beginning of the assistant's next message.
    pub add_generation_prompt: bool,
    /// The tools that the model may call: a list of JSON schemas.
    pub tools: Option<Json>,
    /// Other variables that the template knows (`enable_thinking`).
    pub variables: Map<String, Json>,
    /// What `strftime_now` takes for now; the clock where there is none. In UTC.
    pub now: Option<SystemTime>,
}

/// A chat template, read and ready.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    /// As it was written.
    source: String,
    /// What errors call it: a file's name.
    origin: String,
    /// `bos_token`, `eos_token` and the like, by name.
    special_tokens: Map<String, Json>,
    /// Whether it marks what the assistant says.
    marks_generation: bool,
}

/// A chat's text and the parts of it in `{% generation %}` blocks, as bytes, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MarkedText {
    /// The text, as [`ChatTemplate::render`] gives it.
    pub text: String,
    /// What the assistant says in it.
    pub generated: Vec<Range<usize>>,
}

impl ChatTemplate {
    /// The source of a template in a file, of 1 MiB at most.
    ///
    /// # Errors
    /// The file cannot be read, is no UTF-8, or is no template by its length.
    pub fn read_source(path: &Path) -> io::Result<String> {
        let mut source = String::new();
        File::open(path)?.take(MOST_BYTES + 1).read_to_string(&mut source)?;
        match source.len() as u64 > MOST_BYTES {
            true => {
                Err(io::Error::other(format!("longer than {} MiB; no chat template is", MOST_BYTES >> 20)))
            }
            false => Ok(source),
        }
    }

    /// Reads a template. `special_tokens` are the variables with which it writes the tokens around messages:
    /// `bos_token`, `eos_token`. `origin` is what errors call it.
    ///
    /// # Errors
    /// The source is no Jinja template; the line is named.
    pub fn new(
        source: &str,
        special_tokens: Map<String, Json>,
        origin: &str,
    ) -> Result<ChatTemplate, ChatTemplateError> {
        let failed = |e: minijinja::Error| ChatTemplateError::new(origin, &e);
        let mut environment = functions::environment(FUEL);
        metered::install(&mut environment);
        let (source, marks_generation) = functions::mark_generation(&source.replace("\r\n", "\n"));
        let rewritten = rewrite::rewrite(&source, NAME, functions::syntax()).map_err(failed)?;
        environment.add_template_owned(NAME, rewritten).map_err(failed)?;
        Ok(ChatTemplate { environment, source, origin: origin.to_owned(), special_tokens, marks_generation })
    }

    /// What errors call it: a file's name.
    pub fn origin(&self) -> &str {
        &self.origin
    }

    /// Whether a name is written in it anywhere: what it never names it cannot write.
    pub fn mentions(&self, name: &str) -> bool {
        self.source.contains(name)
    }

    /// Whether it has `{% generation %}` blocks.
    pub fn marks_generation(&self) -> bool {
        self.marks_generation
    }

    /// The text of a chat.
    ///
    /// # Errors
    /// The template refuses the messages, uses what there is not, or takes too long; its line is named.
    pub fn render(
        &self,
        messages: &[ChatMessage],
        options: &ChatOptions,
    ) -> Result<String, ChatTemplateError> {
        self.render_with(messages, options, ["", ""])
    }

    /// The text of a chat, and where its `{% generation %}` blocks are.
    ///
    /// # Errors
    /// As [`ChatTemplate::render`]; or the template changes a block's text after it was written.
    pub fn render_marked(
        &self,
        messages: &[ChatMessage],
        options: &ChatOptions,
    ) -> Result<MarkedText, ChatTemplateError> {
        // A template that writes the date must write the same one twice.
        let now = Some(options.now.unwrap_or_else(SystemTime::now));
        let options = ChatOptions { now, ..options.clone() };
        let text = self.render(messages, &options)?;
        // Two characters of private use that the text does not have, so that no message can pretend to be a mark.
        let mut free = ('\u{f0000}'..='\u{ffffd}').filter(|c| !text.contains(*c));
        let (Some(begins), Some(ends)) = (free.next(), free.next()) else {
            return Err(self.unmarkable("the text has every character of private use"));
        };
        let marked = self.render_with(messages, &options, [&begins.to_string(), &ends.to_string()])?;
        let (mut plain, mut open, mut generated) = (String::with_capacity(text.len()), None, Vec::new());
        for c in marked.chars() {
            if c == begins {
                open = Some(plain.len());
            } else if c != ends {
                plain.push(c);
            } else if let Some(start) = open.take() {
                generated.push(start..plain.len());
            }
        }
        if plain != text || open.is_some() {
            return Err(self.unmarkable("its {% generation %} blocks are changed after they are written"));
        }
        Ok(MarkedText { text, generated })
    }

    fn unmarkable(&self, reason: &str) -> ChatTemplateError {
        ChatTemplateError::Render { origin: self.origin.clone(), line: 0, reason: reason.to_owned() }
    }

    /// The text with something written where generation blocks begin and end.
    fn render_with(
        &self,
        messages: &[ChatMessage],
        options: &ChatOptions,
        marks: [&str; 2],
    ) -> Result<String, ChatTemplateError> {
        let failed = |e: minijinja::Error| ChatTemplateError::new(&self.origin, &e);
        let mut variables = self.special_tokens.clone();
        variables.extend(options.variables.clone());
        variables.insert("add_generation_prompt".to_owned(), options.add_generation_prompt.into());
        variables.insert("tools".to_owned(), options.tools.clone().unwrap_or(Json::Null));
        variables.entry("documents").or_insert(Json::Null);
        for (name, mark) in functions::GENERATION_MARKS.into_iter().zip(marks) {
            variables.insert(name.to_owned(), mark.into());
        }
        let now = options.now.unwrap_or_else(SystemTime::now);
        let input = messages.iter().map(message_bytes).sum::<u64>() + object_bytes(&variables);
        let functions = [
            ("messages", Value::from(Serde(messages))),
            ("strftime_now", functions::strftime_now(now)),
            Meter::variable(input),
        ];
        let variables = variables.iter().map(|(name, value)| (name.as_str(), Value::from(Serde(value))));
        let context = Value::from_pairs(variables.chain(functions));
        self.environment.get_template(NAME).and_then(|template| template.render(context)).map_err(failed)
    }
}

fn message_bytes(message: &ChatMessage) -> u64 {
    message.role.len() as u64 + json_bytes(&message.content) + object_bytes(&message.more)
}

fn object_bytes(object: &Map<String, Json>) -> u64 {
    object.iter().map(|(name, value)| name.len() as u64 + json_bytes(value)).sum()
}

/// About what a document takes in memory.
fn json_bytes(value: &Json) -> u64 {
    meter::ITEM
        + match value {
            Json::String(text) => text.len() as u64,
            Json::Array(items) => items.iter().map(json_bytes).sum(),
            Json::Object(object) => object_bytes(object),
            _ => 0,
        }
}

impl Tokenizer {
    /// The chat template of a name, or the default one; `None` where the tokenizer has no template of its own.
    ///
    /// # Errors
    /// There is none of that name, or no default among several, or it is no Jinja template.
    pub fn chat_template(&self, name: Option<&str>) -> Result<Option<ChatTemplate>, ChatTemplateError> {
        let templates = self.chat_templates();
        if name.is_none() && templates.iter().next().is_none() {
            return Ok(None);
        }
        let template = templates.get(name).ok_or_else(|| ChatTemplateError::Missing {
            origin: self.origin().to_owned(),
            name: name.unwrap_or("default").to_owned(),
            known: templates.iter().map(|known| known.name.as_str()).collect::<Vec<_>>().join(", "),
        })?;
        self.chat_template_from(&template.source, &template.origin).map(Some)
    }

    /// A chat template of somebody else, written with this tokenizer's special tokens. `origin` is what errors call it.
    ///
    /// # Errors
    /// The source is no Jinja template.
    pub fn chat_template_from(&self, source: &str, origin: &str) -> Result<ChatTemplate, ChatTemplateError> {
        let special = [
            ("bos_token", self.bos_token()),
            ("eos_token", self.eos_token()),
            ("pad_token", self.pad_token()),
        ];
        let special = special
            .into_iter()
            .filter_map(|(name, id)| Some((name.to_owned(), Json::String(self.id_to_token(id?)?))));
        ChatTemplate::new(source, special.collect(), origin)
    }
}
