//! Chat templates: those of common families by hand, those that llama.cpp keeps against Jinja itself, hostile ones.

mod families;
mod hostile;
mod real;

use plimsoll_model::chat_template::ChatTemplate;
use serde_json::{Map, Value, json};

/// `bos_token` and `eos_token`.
fn special_tokens() -> Map<String, Value> {
    let tokens = json!({ "bos_token": "<s>", "eos_token": "</s>" });
    tokens.as_object().cloned().unwrap()
}

fn template(source: &str) -> ChatTemplate {
    ChatTemplate::new(source, special_tokens(), "model").unwrap()
}
