//! The templates that llama.cpp keeps: `examples/get-vocabs` fetches them.
//!
//! `data/chat_template_hashes.json` has, for each template and each chat of `data/chats.json`, the FNV-1a
//! hash (64 bits) of the text that Jinja 3.1 with `transformers`' settings makes of it, `refused` where the
//! template raises. Not compared are `error`, where Jinja fails (loops over `none`, variables that are not
//! given), and `escaped`, where it escapes for HTML.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, UNIX_EPOCH};

use plimsoll_model::chat_template::{ChatMessage, ChatOptions, ChatTemplate, ChatTemplateError};
use serde::Deserialize;
use serde_json::Value;

use crate::special_tokens;

#[derive(Deserialize)]
struct Chat {
    messages: Vec<ChatMessage>,
    add_generation_prompt: bool,
    tools: Option<Value>,
}

fn fnv(text: &str) -> String {
    let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
    format!("{:016x}", text.bytes().fold(0xcbf2_9ce4_8422_2325, step))
}

fn render(source: &str, chat: &Chat) -> Result<String, ChatTemplateError> {
    let options = ChatOptions {
        add_generation_prompt: chat.add_generation_prompt,
        tools: chat.tools.clone(),
        // 2024-07-26 12:34:56
        now: Some(UNIX_EPOCH + Duration::from_secs(1_721_997_296)),
        ..ChatOptions::default()
    };
    ChatTemplate::new(source, special_tokens(), "template")?.render(&chat.messages, &options)
}

#[test]
fn templates_give_the_texts_that_jinja_gives() {
    let hashes: BTreeMap<String, Vec<String>> =
        serde_json::from_str(include_str!("../data/chat_template_hashes.json")).unwrap();
    let chats: Vec<Chat> = serde_json::from_str(include_str!("../data/chats.json")).unwrap();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/llamacpp_models/templates");
    if !folder.is_dir() {
        eprintln!("skipped: models/llamacpp_models is missing; examples/get-vocabs fetches it");
        return;
    }
    let (mut compared, mut differing) = (0, Vec::new());
    for (name, expected) in &hashes {
        let source = std::fs::read_to_string(folder.join(format!("{name}.jinja"))).unwrap();
        for (number, (chat, expected)) in chats.iter().zip(expected).enumerate() {
            if ["error", "escaped"].contains(&expected.as_str()) {
                continue;
            }
            compared += 1;
            let (found, text) = match render(&source, chat) {
                Ok(text) => (fnv(&text), text),
                Err(error @ ChatTemplateError::Refused { .. }) => ("refused".to_owned(), error.to_string()),
                Err(error) => ("error".to_owned(), error.to_string()),
            };
            if &found != expected {
                differing.push(format!("{name}, chat {number}: {found} instead of {expected}:\n{text}"));
            }
        }
    }
    eprintln!("{compared} texts compared");
    assert!(differing.is_empty(), "{} of {compared}:\n{}", differing.len(), differing.join("\n\n"));
}
