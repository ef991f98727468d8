//! Conversations in files: `{"messages": [{"role": ..., "content": ...}]}`, as sets of training data have them.

use std::path::Path;

use plimsoll_generate::Conversation;
use plimsoll_model::chat_template::ChatMessage;
use serde_json::{Value, json};

use crate::failure::Failure;
use crate::output::write_file;

/// Writes a conversation, whole or not at all.
pub fn save(conversation: &Conversation, path: &Path) -> Result<(), Failure> {
    let document = json!({ "messages": conversation.messages() });
    write_file("the conversation", path, format!("{document:#}\n").as_bytes())
}

/// Reads a conversation: an object with `messages`, or the messages themselves.
pub fn load(path: &Path) -> Result<Conversation, String> {
    let name = path.display();
    let bytes = std::fs::read(path).map_err(|e| format!("{name} could not be read: {e}"))?;
    let document: Value = serde_json::from_slice(&bytes).map_err(|e| format!("{name} is no JSON: {e}"))?;
    let messages = document.get("messages").unwrap_or(&document).clone();
    let messages: Vec<ChatMessage> = serde_json::from_value(messages)
        .map_err(|e| format!("{name} has no list of messages with role and content: {e}"))?;
    Conversation::from_messages(&messages).map_err(|e| format!("{name}: {e}"))
}
