//! From the fields of a record to the turns of a chat, by the names that TRL, axolotl and LLaMA-Factory know.

use plimsoll_model::chat_template::ChatMessage;
use serde_json::{Map, Value, json};

use super::report::{Skip, SkipReason};
use super::{SkipReason as Reason, TrainOn};
use crate::records::Record;

/// The columns of a record where they are not called as usual.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Columns {
    /// The list of turns: `messages`, `conversations` or `conversation`.
    pub messages: Option<String>,
    /// Who speaks in a turn: `role` or `from`.
    pub role: Option<String>,
    /// What is said in a turn: `content` or `value`.
    pub content: Option<String>,
    /// The question of an instruction: `instruction`.
    pub instruction: Option<String>,
    /// What an instruction is about: `input`.
    pub input: Option<String>,
    /// The answer to an instruction: `output`.
    pub output: Option<String>,
    /// What the system says: `system`.
    pub system: Option<String>,
    /// Earlier instructions and answers, a list of pairs: `history`.
    pub history: Option<String>,
    /// What comes before a completion: `prompt`.
    pub prompt: Option<String>,
    /// What is trained after a prompt: `completion`.
    pub completion: Option<String>,
    /// The tools that the assistant may call: `tools`.
    pub tools: Option<String>,
}

/// What a record holds.
#[derive(Clone, Debug, PartialEq)]
pub enum Sample {
    /// A chat.
    Chat {
        /// What is said.
        turns: Vec<Turn>,
        /// The tools that the assistant may call: a list of JSON schemas.
        tools: Option<Value>,
    },
    /// A text and what comes after it, outside of any chat.
    Text {
        /// Not trained.
        prompt: String,
        /// Trained.
        completion: String,
    },
}

/// One turn of a chat.
#[derive(Clone, Debug, PartialEq)]
pub struct Turn {
    /// The message.
    pub message: ChatMessage,
    /// Weight of its tokens in the loss, where the record says so.
    pub weight: Option<f32>,
}

/// How records are read.
#[derive(Clone, Copy, Debug)]
pub struct Reading<'a> {
    /// Names of columns.
    pub columns: &'a Columns,
    /// Whether a prompt is trained as well.
    pub train_on: TrainOn,
    /// Whether an instruction's input stays a field of its own, which the template knows.
    pub separate_input: bool,
    /// Whether the template knows `tool_calls`; without, a call is text.
    pub tool_calls: bool,
}

/// Columns of what a text model cannot see.
const MEDIA: [&str; 6] = ["images", "image", "videos", "video", "audios", "audio"];

/// What the speakers of ShareGPT's files are called in templates. Others keep their names.
const ROLES: [(&str, &str); 13] = [
    ("human", "user"),
    ("prompter", "user"),
    ("gpt", "assistant"),
    ("model", "assistant"),
    ("bot", "assistant"),
    ("chatgpt", "assistant"),
    ("bing", "assistant"),
    ("bard", "assistant"),
    ("function_call", "assistant"),
    ("tool_call", "assistant"),
    ("observation", "tool"),
    ("function_response", "tool"),
    ("function", "tool"),
];

/// Who speaks in chats of any template.
const USUAL_ROLES: [&str; 5] = ["system", "developer", "user", "assistant", "tool"];

impl Turn {
    /// Whether it is an answer that would teach the model to say nothing. Thoughts and calls of tools are something, where the template
    /// knows them.
    fn is_wordless_answer(&self, known: &dyn Fn(&str) -> bool) -> bool {
        let ChatMessage { role, content, more } = &self.message;
        let wordless = |value: &Value| value.as_str().is_some_and(|text| text.trim().is_empty());
        let says_more = |(name, value): (&String, &Value)| {
            name != "name" && !is_nothing(value) && !wordless(value) && !value.is_boolean() && known(name)
        };
        role == "assistant" && self.weight != Some(0.0) && wordless(content) && !more.iter().any(says_more)
    }
}

fn malformed(detail: impl Into<String>) -> Skip {
    Skip::new(Reason::Malformed, detail)
}

/// The sample of a record.
pub fn sample(record: &Record, reading: Reading<'_>) -> Result<Sample, Skip> {
    let columns = reading.columns;
    if let Some(name) = MEDIA.iter().find(|name| record.get(**name).is_some_and(|value| !is_nothing(value))) {
        return Err(Skip::new(Reason::Media, format!("it has {name}, which a text model cannot see")));
    }
    let field = |own: &Option<String>, usual: &str| record.get(own.as_deref().unwrap_or(usual));
    let list = match &columns.messages {
        Some(name) => record.get(name),
        None => ["messages", "conversations", "conversation"].iter().find_map(|name| record.get(*name)),
    };
    let prompt = field(&columns.prompt, "prompt").zip(field(&columns.completion, "completion"));
    let mut turns = if let Some(list) = list {
        turns(list, reading)?
    } else if let Some((prompt, completion)) = prompt {
        match (prompt, completion) {
            (Value::String(prompt), Value::String(completion)) => {
                let (prompt, completion) = (prompt.clone(), completion.clone());
                return Ok(Sample::Text { prompt, completion });
            }
            _ => {
                let mut all = turns(prompt, reading)?;
                if reading.train_on == TrainOn::Assistant {
                    all.iter_mut().for_each(|turn| turn.weight = turn.weight.or(Some(0.0)));
                }
                all.extend(turns(completion, reading)?);
                all
            }
        }
    } else if let Some(instruction) = field(&columns.instruction, "instruction") {
        let input = field(&columns.input, "input");
        let output = field(&columns.output, "output");
        instruction_turns(instruction, input, output, field(&columns.history, "history"), reading)?
    } else {
        let keys: Vec<String> = record.keys().take(12).map(|key| format!("{key:?}")).collect();
        let detail = format!(
            "no field messages, conversations, instruction, or prompt and completion; it has {}; name its fields in data.columns",
            keys.join(", ")
        );
        return Err(Skip::new(Reason::OtherFields, detail));
    };
    if let Some(Value::String(system)) = field(&columns.system, "system")
        && !system.is_empty()
        && turns.first().is_some_and(|turn| turn.message.role != "system")
    {
        turns.insert(0, Turn { message: ChatMessage::new("system", system.as_str()), weight: None });
    }
    Ok(Sample::Chat { turns, tools: tools(field(&columns.tools, "tools"))? })
}

/// Whether a field is as good as not there.
fn is_nothing(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        _ => false,
    }
}

fn tools(value: Option<&Value>) -> Result<Option<Value>, Skip> {
    match value {
        Some(Value::String(text)) if !text.trim().is_empty() => {
            let tools: Value = serde_json::from_str(text)
                .map_err(|e| malformed(format!("tools is a text, but not of JSON: {e}")))?;
            Ok(Some(tools).filter(|tools| !is_nothing(tools)))
        }
        Some(list @ Value::Array(items)) if !items.is_empty() => Ok(Some(list.clone())),
        _ => Ok(None),
    }
}

fn instruction_turns(
    instruction: &Value,
    input: Option<&Value>,
    output: Option<&Value>,
    history: Option<&Value>,
    reading: Reading<'_>,
) -> Result<Vec<Turn>, Skip> {
    let plain = |role: &str, text: &str| Turn { message: ChatMessage::new(role, text), weight: None };
    let text = |name: &str, value: &Value| match value {
        Value::String(text) => Ok(text.clone()),
        _ => Err(malformed(format!("{name} is not a text"))),
    };
    let mut turns = Vec::new();
    for (i, pair) in history.and_then(Value::as_array).into_iter().flatten().enumerate() {
        let [question, answer] = pair.as_array().map(Vec::as_slice).unwrap_or_default() else {
            return Err(malformed(format!("history[{i}] is not a pair of an instruction and an answer")));
        };
        turns.push(plain("user", &text("history", question)?));
        turns.push(plain("assistant", &text("history", answer)?));
    }
    let instruction = text("instruction", instruction)?;
    let input = input.filter(|value| !is_nothing(value)).map(|value| text("input", value)).transpose()?;
    let mut question = plain("user", &instruction);
    match input {
        Some(input) if reading.separate_input => {
            question.message.more.insert("input".to_owned(), input.into());
        }
        Some(input) if instruction.is_empty() => question.message.content = input.into(),
        Some(input) => question.message.content = format!("{instruction}\n{input}").into(),
        None => {}
    }
    turns.push(question);
    match output {
        None | Some(Value::Null) => {
            return Err(Skip::new(Reason::NoAssistant, "there is no output"));
        }
        Some(output) => turns.push(plain("assistant", &text("output", output)?)),
    }
    Ok(turns)
}

fn turns(list: &Value, reading: Reading<'_>) -> Result<Vec<Turn>, Skip> {
    match list {
        Value::Array(list) => list.iter().enumerate().map(|(i, item)| turn(i, item, reading)).collect(),
        _ => Err(malformed("the messages are not a list")),
    }
}

fn turn(index: usize, item: &Value, reading: Reading<'_>) -> Result<Turn, Skip> {
    let wrong = |what: String| malformed(format!("message {}: {what}", index + 1));
    let Value::Object(fields) = item else { return Err(wrong("not an object".to_owned())) };
    let mut fields = fields.clone();
    fields.retain(|_, value| !value.is_null());
    let mut take = |own: &Option<String>, usual: [&str; 2]| match own {
        Some(name) => fields.shift_remove(name),
        None => usual.iter().find_map(|name| fields.shift_remove(*name)),
    };
    let role = match take(&reading.columns.role, ["role", "from"]) {
        Some(Value::String(role)) => role,
        _ => return Err(wrong("there is no text that says whose it is (role, from)".to_owned())),
    };
    let content = take(&reading.columns.content, ["content", "value"]);
    let weight = weight(&mut fields).map_err(wrong)?;
    let content = match content {
        Some(Value::Array(parts)) => joined(parts, &mut fields)
            .map_err(|skip| Skip { detail: format!("message {}: {}", index + 1, skip.detail), ..skip })?,
        Some(Value::String(text)) => text,
        // A call of a tool may come without words.
        None if fields.contains_key("tool_calls") => String::new(),
        None => return Err(wrong("there is no content".to_owned())),
        Some(_) => return Err(wrong("the content is not a text".to_owned())),
    };
    let known = ROLES.iter().find(|(name, _)| role == *name).map_or(role.as_str(), |(_, known)| known);
    let mut message = ChatMessage { role: known.to_owned(), content: content.into(), more: fields };
    if matches!(role.as_str(), "function_call" | "tool_call") && reading.tool_calls {
        message = call(message);
    }
    if let Some(calls) = message.more.get_mut("tool_calls").and_then(Value::as_array_mut) {
        calls.iter_mut().for_each(read_arguments);
    }
    Ok(Turn { message, weight })
}

/// What a turn counts in the loss: a number, or whether it is trained at all.
fn weight(fields: &mut Map<String, Value>) -> Result<Option<f32>, String> {
    let mut found = None;
    for name in ["weight", "loss_weight", "train", "training"] {
        let Some(value) = fields.shift_remove(name) else { continue };
        let weight = match &value {
            Value::Bool(trained) => Some(f32::from(u8::from(*trained))),
            Value::Number(number) => number.as_f64().map(|number| number as f32),
            _ => None,
        };
        match weight.filter(|weight| weight.is_finite() && *weight >= 0.0) {
            Some(weight) => found = found.or(Some(weight)),
            None => return Err(format!("{name} is {value}; a weight is a number from 0 on, true or false")),
        }
    }
    Ok(found)
}

/// The text of a content that comes in parts.
fn joined(parts: Vec<Value>, fields: &mut Map<String, Value>) -> Result<String, Skip> {
    let (mut text, mut reasoning) = (String::new(), String::new());
    for part in &parts {
        let kind = part.get("type").and_then(Value::as_str).unwrap_or_default();
        let said = ["text", "value"].iter().find_map(|key| part.get(*key)?.as_str());
        match (kind, said) {
            ("text", Some(said)) => text.push_str(said),
            ("reasoning", Some(said)) => reasoning.push_str(said),
            ("image" | "image_url" | "audio" | "input_audio" | "video", _) => {
                return Err(Skip::new(Reason::Media, format!("a part of type {kind}")));
            }
            _ => return Err(malformed(format!("a part of the content of unknown type {kind:?}"))),
        }
    }
    if !reasoning.is_empty() {
        fields.insert("reasoning_content".to_owned(), reasoning.into());
    }
    Ok(text)
}

/// A turn whose text is a call of a tool, or a list of them, as templates know it.
fn call(mut message: ChatMessage) -> ChatMessage {
    let calls = match message.content.as_str().map(serde_json::from_str::<Value>) {
        Some(Ok(Value::Array(calls))) => calls,
        Some(Ok(call @ Value::Object(_))) => vec![call],
        _ => return message,
    };
    if calls.iter().any(|call| call.get("name").is_none()) {
        return message;
    }
    let calls = calls.into_iter().map(|call| json!({ "type": "function", "function": call })).collect();
    message.content = String::new().into();
    message.more.insert("tool_calls".to_owned(), Value::Array(calls));
    message
}

/// Arguments that are a text of JSON, as OpenAI writes them, are what is in it for templates.
fn read_arguments(call: &mut Value) {
    let arguments = match call.get_mut("function") {
        Some(function) => function.get_mut("arguments"),
        None => call.get_mut("arguments"),
    };
    if let Some(arguments) = arguments
        && let Some(Ok(read @ Value::Object(_))) = arguments.as_str().map(serde_json::from_str::<Value>)
    {
        *arguments = read;
    }
}

impl Sample {
    /// Refuses chats in which nobody answers, in which an answer has no word, or in which somebody speaks who is neither
    /// usual nor `known` to the template: what a misspelt `assistant` says would not be trained.
    pub fn check(&self, known: &dyn Fn(&str) -> bool) -> Result<(), Skip> {
        match self {
            Sample::Chat { turns, .. } if turns.is_empty() => {
                Err(Skip::new(SkipReason::Empty, "there are no messages"))
            }
            Sample::Chat { turns, .. } => {
                for (turn, number) in turns.iter().zip(1..) {
                    let role = turn.message.role.as_str();
                    if !USUAL_ROLES.contains(&role) && (role.is_empty() || !known(role)) {
                        let usual = USUAL_ROLES.join(", ");
                        let detail = format!(
                            "message {number}: role {role:?} is none of {usual}, and the chat template does not name it"
                        );
                        return Err(Skip::new(SkipReason::UnknownRole, detail));
                    }
                    if turn.is_wordless_answer(known) {
                        let calls =
                            turn.message.more.get("tool_calls").is_some_and(|calls| !is_nothing(calls));
                        let what = if calls {
                            " but calls of tools, which the chat template does not write"
                        } else {
                            ""
                        };
                        let detail = format!("message {number}: the assistant says nothing{what}");
                        return Err(Skip::new(SkipReason::EmptyAnswer, detail));
                    }
                }
                let answers = |turn: &Turn| turn.message.role == "assistant" || turn.weight > Some(0.0);
                match turns.iter().any(answers) {
                    true => Ok(()),
                    false => {
                        let roles: Vec<&str> =
                            turns.iter().map(|turn| turn.message.role.as_str()).take(8).collect();
                        Err(Skip::new(
                            SkipReason::NoAssistant,
                            format!("there are turns of {} alone", roles.join(", ")),
                        ))
                    }
                }
            }
            Sample::Text { completion, .. } if completion.is_empty() => {
                Err(Skip::new(SkipReason::Empty, "the completion is empty"))
            }
            Sample::Text { .. } => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(record: Value) -> Result<Sample, Skip> {
        let columns = Columns::default();
        let reading = Reading {
            columns: &columns,
            train_on: TrainOn::Assistant,
            separate_input: false,
            tool_calls: true,
        };
        sample(record.as_object().unwrap(), reading)
    }

    /// `role: content (weight)` of every turn.
    fn turns_of(record: Value) -> Vec<String> {
        let Ok(Sample::Chat { turns, .. }) = read(record) else { panic!("no chat") };
        let show = |turn: &Turn| {
            let weight = turn.weight.map_or(String::new(), |w| format!(" ({w})"));
            format!("{}: {}{weight}", turn.message.role, turn.message.content.as_str().unwrap())
        };
        turns.iter().map(show).collect()
    }

    #[test]
    fn every_known_shape_becomes_turns() {
        let messages = json!({ "messages": [
            { "role": "user", "content": "a", "name": null },
            { "role": "assistant", "content": [{ "type": "text", "text": "b" }], "weight": 0 },
            { "role": "assistant", "content": "c", "train": true, "name": "x" },
        ] });
        assert_eq!(turns_of(messages), ["user: a", "assistant: b (0)", "assistant: c (1)"]);
        let sharegpt = json!({ "system": "s", "tools": "", "conversations": [
            { "from": "human", "value": "a" }, { "from": "gpt", "value": "b" },
            { "from": "observation", "value": "c" },
        ] });
        assert_eq!(turns_of(sharegpt), ["system: s", "user: a", "assistant: b", "tool: c"]);
        let alpaca = json!({ "instruction": "i", "input": "x", "output": "o", "history": [["p", "q"]] });
        assert_eq!(turns_of(alpaca), ["user: p", "assistant: q", "user: i\nx", "assistant: o"]);
        let pair = json!({ "prompt": [{ "role": "user", "content": "a" }],
            "completion": [{ "role": "assistant", "content": "b" }] });
        assert_eq!(turns_of(pair), ["user: a (0)", "assistant: b"]);
        let text = read(json!({ "prompt": "a", "completion": "b" })).unwrap();
        assert_eq!(text, Sample::Text { prompt: "a".to_owned(), completion: "b".to_owned() });
    }

    #[test]
    fn calls_of_tools_become_what_templates_know() {
        let record = json!({ "tools": "[{\"name\": \"f\"}]", "conversations": [
            { "from": "human", "value": "a" },
            { "from": "function_call", "value": "{\"name\": \"f\", \"arguments\": {\"x\": 1}}" },
        ] });
        let Sample::Chat { turns, tools } = read(record).unwrap() else { panic!() };
        assert_eq!(tools, Some(json!([{ "name": "f" }])));
        let calls = json!([{ "type": "function", "function": { "name": "f", "arguments": { "x": 1 } } }]);
        assert_eq!(turns[1].message.more["tool_calls"], calls);
        assert_eq!(turns[1].message.role, "assistant");
    }

    #[test]
    fn what_is_no_sample_says_why() {
        let known = |name: &str| ["narrator", "tool_calls"].contains(&name);
        let why = |record: Value| match read(record).and_then(|sample| sample.check(&known)) {
            Err(Skip { reason: Reason::OtherFields, detail }) => detail,
            Err(skip) => format!("{}: {}", skip.reason, skip.detail),
            Ok(()) => "a sample".to_owned(),
        };
        let assistant = |content: &str| json!({ "role": "assistant", "content": content });
        let user = json!({ "role": "user", "content": "a" });
        for (record, words) in [
            (json!({ "messages": [user] }), "no assistant turn: there are turns of user alone"),
            (json!({ "messages": [] }), "empty: there are no messages"),
            (json!({ "messages": 7 }), "malformed: the messages are not a list"),
            (json!({ "messages": [user, 3] }), "malformed: message 2: not an object"),
            (
                json!({ "messages": [{ "content": "x" }] }),
                "malformed: message 1: there is no text that says whose it is (role, from)",
            ),
            (json!({ "messages": [{ "role": "user" }] }), "malformed: message 1: there is no content"),
            (
                json!({ "messages": [{ "role": "user", "content": "a", "weight": -1 }] }),
                "malformed: message 1: weight is -1; a weight is a number from 0 on, true or false",
            ),
            (
                json!({ "messages": [user], "images": ["a.png"] }),
                "images, audio or video: it has images, which a text model cannot see",
            ),
            (
                json!({ "messages": [user, { "role": "asistant", "content": "b" }] }),
                "an unknown role: message 2: role \"asistant\" is none of system, developer, user, assistant, tool, and the chat template does not name it",
            ),
            (
                json!({ "messages": [user, { "role": "narrator", "content": "b" }, assistant("c")] }),
                "a sample",
            ),
            (
                json!({ "messages": [user, assistant(" \n")] }),
                "an answer without a word: message 2: the assistant says nothing",
            ),
            (
                json!({ "instruction": "a", "output": "" }),
                "an answer without a word: message 2: the assistant says nothing",
            ),
            (
                json!({ "messages": [user, { "role": "assistant", "content": "", "weight": 0 }, assistant("c")] }),
                "a sample",
            ),
            (
                json!({ "messages": [user, { "role": "assistant", "content": "", "tool_calls": [{ "name": "f" }] }] }),
                "a sample",
            ),
            (json!({ "instruction": "a" }), "no assistant turn: there is no output"),
            (json!({ "prompt": "a", "completion": "" }), "empty: the completion is empty"),
            (
                json!({ "text": "a" }),
                "no field messages, conversations, instruction, or prompt and completion; it has \"text\"; name its fields in data.columns",
            ),
        ] {
            assert_eq!(why(record), words);
        }
    }

    #[test]
    fn a_call_of_a_tool_that_the_template_does_not_write_is_an_answer_without_a_word() {
        let call = json!({ "role": "assistant", "content": null, "tool_calls": [{ "name": "f" }] });
        let record = json!({ "messages": [{ "role": "user", "content": "a" }, call] });
        let skip = read(record).unwrap().check(&|_| false).unwrap_err();
        assert_eq!(skip.reason, Reason::EmptyAnswer);
        assert!(
            skip.detail.contains("calls of tools, which the chat template does not write"),
            "{}",
            skip.detail
        );
        let silent = json!({ "role": "assistant", "content": "", "tool_calls": [] });
        let record = json!({ "messages": [{ "role": "user", "content": "a" }, silent] });
        let skip = read(record).unwrap().check(&|_| false).unwrap_err();
        assert_eq!(skip.detail, "message 2: the assistant says nothing");
    }
}
