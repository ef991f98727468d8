//! The prompts that a command line names: one, standard input, or a file of many.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use serde_json::Value;

use crate::failure::Failure;

/// More than any prompts have.
const MOST_BYTES: u64 = 256 << 20;

/// What is to be continued.
#[derive(Debug, PartialEq)]
pub struct PromptText {
    /// What errors call it: empty for the only one.
    pub place: String,
    pub text: String,
}

/// `--prompt`: the text itself, or `-` for standard input without its last line break.
pub fn one(text: &str) -> Result<PromptText, Failure> {
    let text = match text {
        "-" => {
            let text = utf8(bounded(std::io::stdin().lock(), "standard input")?, "standard input")?;
            let text = text.strip_suffix('\n').unwrap_or(&text);
            text.strip_suffix('\r').unwrap_or(text).to_owned()
        }
        text => text.to_owned(),
    };
    Ok(PromptText { place: String::new(), text })
}

/// `--prompts`: a line a prompt, or an object a line where the file's name ends with `.jsonl`; empty lines are left out.
pub fn many(path: &Path) -> Result<Vec<PromptText>, Failure> {
    let name = path.display().to_string();
    let file = File::open(path).map_err(|e| Failure::usage(format!("--prompts {name}: {e}")))?;
    let text = utf8(bounded(file, &name)?, &name)?;
    let json = path.extension().is_some_and(|ending| ending == "jsonl" || ending == "ndjson");
    let mut prompts = Vec::new();
    for (number, line) in (1..).zip(text.lines()).filter(|(_, line)| !line.trim().is_empty()) {
        let place = format!("{name}, line {number}: ");
        let text = if json { json_prompt(line, &place)? } else { line.to_owned() };
        prompts.push(PromptText { place, text });
    }
    match prompts.is_empty() {
        true => Err(Failure::usage(format!("--prompts {name}: there is no prompt in it"))),
        false => Ok(prompts),
    }
}

fn json_prompt(line: &str, place: &str) -> Result<String, Failure> {
    let object: Value =
        serde_json::from_str(line).map_err(|e| Failure::usage(format!("{place}no JSON object: {e}")))?;
    match object.get("prompt").and_then(Value::as_str) {
        Some(prompt) => Ok(prompt.to_owned()),
        None => Err(Failure::usage(format!("{place}the object has no text called \"prompt\""))),
    }
}

/// All of it, if it comes to an end.
fn bounded(reader: impl Read, name: &str) -> Result<Vec<u8>, Failure> {
    let mut bytes = Vec::new();
    let read = reader.take(MOST_BYTES + 1).read_to_end(&mut bytes);
    read.map_err(|e| Failure::usage(format!("{name}: {e}")))?;
    match bytes.len() as u64 > MOST_BYTES {
        true => Err(Failure::usage(format!("{name}: longer than {} MiB", MOST_BYTES >> 20))),
        false => Ok(bytes),
    }
}

fn utf8(bytes: Vec<u8>, name: &str) -> Result<String, Failure> {
    let text = String::from_utf8(bytes).map_err(|e| {
        Failure::usage(format!("{name} is no UTF-8 text: byte {}", e.utf8_error().valid_up_to()))
    })?;
    // A byte-order mark is none of the text.
    Ok(text.strip_prefix('\u{feff}').map(str::to_owned).unwrap_or(text))
}
