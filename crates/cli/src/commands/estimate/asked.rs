//! The request of a command line: a file of its own or the stack's files, then the flags.

use std::path::Path;

use plimsoll_stacks::{DEEPSPEED, Imported, Request};
use serde_json::{Map, Value, json};

use super::lengths;
use crate::args::EstimateArgs;
use crate::failure::Failure;

/// Tokens of a sequence where nothing says how many.
const USUAL_LENGTH: u64 = 2048;

/// What was asked.
pub struct Asked {
    pub request: Request,
    /// The programs whose files were read.
    pub programs: Vec<String>,
    /// What of those files says nothing of memory here.
    pub left: Vec<String>,
    /// Keys that nothing says, and what was taken.
    pub assumed: Vec<String>,
}

impl Asked {
    pub fn new(args: &EstimateArgs) -> Result<Asked, Failure> {
        let mut asked = Asked {
            request: Request::default(),
            programs: Vec::new(),
            left: Vec::new(),
            assumed: Vec::new(),
        };
        let mut keys = match &args.request {
            Some(path) => request_file(path)?,
            None => asked.files(args)?,
        };
        for (key, value) in flags(args) {
            keys.insert(key.to_owned(), value);
        }
        lora_flags(args, &mut keys);
        version_flags(args, &mut keys);
        if let Some(path) = &args.data {
            asked.lengths(path, &mut keys)?;
        }
        if args.request.is_none() {
            asked.assume(&mut keys);
        }
        if !keys.contains_key("model") {
            return Err(Failure::usage(
                "which model? name it with --model, or give its config.json or a file that names it",
            ));
        }
        let text = Value::Object(keys).to_string();
        let origin = args.request.clone().unwrap_or_else(|| "the command line".into());
        asked.request = Request::parse(&origin, &text).map_err(|error| Failure::usage(error.to_string()))?;
        Ok(asked)
    }

    /// What the stack's own files say; what two of them say is refused where they do not agree.
    fn files(&mut self, args: &EstimateArgs) -> Result<Map<String, Value>, Failure> {
        let mut keys: Map<String, Value> = Map::new();
        let mut by: Vec<(String, String)> = Vec::new();
        for path in &args.files {
            let Imported { program, keys: own, left } = Imported::from_file(path)?;
            for (key, value) in own {
                // Every file of transformers' says the same stack; torchtune's and DeepSpeed's count.
                if key == "stack" && value == "hf" && keys.contains_key("stack") {
                    continue;
                }
                // DeepSpeed makes the optimizer that its file names.
                let of_deepspeed = |program: &str| key == "optimizer" && program == DEEPSPEED;
                if of_deepspeed(&program) {
                    by.retain(|(known, _)| *known != key);
                }
                let other = by.iter().find(|(known, _)| *known == key).map(|(_, program)| program);
                if other.is_some_and(|other| of_deepspeed(other)) {
                    continue;
                }
                if key == "precision"
                    && let Some(both) = keys.get(&key).and_then(|known| of_both(known, &value))
                {
                    keys.insert(key, both);
                    continue;
                }
                if let Some(other) = other
                    && keys.get(&key).is_some_and(|known| *known != value)
                    && key != "stack"
                {
                    return Err(Failure::usage(format!(
                        "{}: {key} is {value}, and {other} says {}; give --{} to decide",
                        path.display(),
                        keys[&key],
                        key.replace('_', "-")
                    )));
                }
                by.push((key.clone(), program.clone()));
                keys.insert(key, value);
            }
            self.programs.push(program);
            self.left.extend(left);
        }
        Ok(keys)
    }

    /// The lengths of the user's samples; without a length to cut at, the longest decides.
    fn lengths(&mut self, path: &Path, keys: &mut Map<String, Value>) -> Result<(), Failure> {
        let folder = keys.get("model").and_then(Value::as_str).map(Path::new);
        let lengths = lengths::of_samples(path, folder)?;
        let longest = lengths.iter().copied().max().unwrap_or(1);
        if !keys.contains_key("sequence_length") {
            self.assumed.push(format!("sequence_length {longest}, the longest of {}", path.display()));
            keys.insert("sequence_length".to_owned(), json!(longest));
        }
        keys.insert("lengths".to_owned(), json!(lengths));
        Ok(())
    }

    /// What nothing says.
    fn assume(&mut self, keys: &mut Map<String, Value>) {
        // TrainingArguments have 8; every other program wants it said.
        let of_trainer = self.programs.iter().any(|program| program == "TrainingArguments");
        let batch_size = if of_trainer { 8 } else { 1 };
        let defaults = [
            ("stack", json!("hf")),
            ("batch_size", json!(batch_size)),
            ("sequence_length", json!(USUAL_LENGTH)),
            ("precision", json!("bf16")),
        ];
        for (key, value) in defaults {
            if !keys.contains_key(key) {
                self.assumed
                    .push(format!("{key} {}", value.as_str().map_or(value.to_string(), str::to_owned)));
                keys.insert(key.to_owned(), value);
            }
        }
    }
}

fn request_file(path: &Path) -> Result<Map<String, Value>, Failure> {
    let wrong = |reason: String| Failure::usage(format!("{}: {reason}", path.display()));
    let text = std::fs::read_to_string(path).map_err(|error| wrong(error.to_string()))?;
    serde_json::from_str(&text).map_err(|error| wrong(error.to_string()))
}

/// The keys that flags set.
fn flags(args: &EstimateArgs) -> Vec<(&'static str, Value)> {
    let text = |key, value: &Option<String>| value.as_ref().map(|value| (key, json!(value)));
    let number = |key, value: Option<u64>| value.map(|value| (key, json!(value)));
    let switch = |key, on: bool| on.then_some((key, json!(true)));
    [
        text("stack", &args.stack),
        text("model", &args.model),
        number("batch_size", args.batch_size),
        number("sequence_length", args.sequence_length),
        number("eval_batch_size", args.eval_batch_size),
        switch("resume", args.resume),
        switch("merge", args.merge),
        number("data_workers", args.data_workers),
        text("precision", &args.precision),
        text("optimizer", &args.optimizer),
        switch("gradient_checkpointing", args.gradient_checkpointing),
        number("gradient_accumulation_steps", args.gradient_accumulation_steps),
        text("attention", &args.attention),
        text("quantization", &args.quantization),
        switch("double_quantization", args.double_quantization),
        text("loss", &args.loss),
        number("devices", args.devices),
        number("zero_stage", args.zero_stage.map(u64::from)),
        text("fsdp", &args.fsdp),
        text("offload", &args.offload),
        text("hardware", &args.hardware),
        text("phase", &args.phase),
        number("generated_tokens", args.generated_tokens),
        text("allocator", &args.allocator),
    ]
    .into_iter()
    .flatten()
    .collect()
}

fn lora_flags(args: &EstimateArgs, keys: &mut Map<String, Value>) {
    let Some(rank) = args.lora_rank else { return };
    let lora = keys.entry("lora").or_insert(json!({}));
    if lora.is_null() {
        *lora = json!({});
    }
    lora["rank"] = json!(rank);
    if !args.lora_targets.is_empty() {
        lora["target_modules"] = json!(args.lora_targets);
    }
}

fn version_flags(args: &EstimateArgs, keys: &mut Map<String, Value>) {
    let named = [
        ("transformers", &args.transformers),
        ("torch", &args.torch),
        ("peft", &args.peft),
        ("bitsandbytes", &args.bitsandbytes),
        ("deepspeed", &args.deepspeed),
    ];
    for (library, version) in named {
        let Some(version) = version else { continue };
        let versions = keys.entry("versions").or_insert(json!({}));
        if versions.is_null() {
            *versions = json!({});
        }
        versions[library] = json!(version);
    }
}

/// The precision that two files of a run come to: a switch that is off says nothing against one that is on, and DeepSpeed's `bf16` is the
/// trainer's. `None` where they do not agree.
fn of_both(one: &Value, other: &Value) -> Option<Value> {
    let (one, other) = (one.as_str()?, other.as_str()?);
    let plain = |precision: &str| precision.strip_suffix("-amp").unwrap_or(precision).to_owned();
    match (one, other) {
        ("f32", on) | (on, "f32") => Some(json!(on)),
        _ if one == other => Some(json!(one)),
        _ if plain(one) == plain(other) => Some(json!(if one.len() > other.len() { one } else { other })),
        _ => None,
    }
}
