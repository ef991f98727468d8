//! Conversations in files: `{"messages": [{"role": ..., "content": ...}]}`, as sets of training data have them.

use std::io::Write;
use std::path::Path;

use plimsoll_generate::Conversation;
use plimsoll_model::chat_template::ChatMessage;
use serde_json::{Value, json};

/// Writes a conversation aside, then in its place.
pub fn save(conversation: &Conversation, path: &Path) -> Result<(), String> {
    let failed = |e: std::io::Error| format!("{} could not be written: {e}", path.display());
    let document = json!({ "messages": conversation.messages() });
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut file = tempfile::NamedTempFile::new_in(folder).map_err(failed)?;
    writeln!(file, "{document:#}").map_err(failed)?;
    file.as_file().sync_all().map_err(failed)?;
    file.persist(path).map_err(|e| failed(e.error))?;
    Ok(())
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
