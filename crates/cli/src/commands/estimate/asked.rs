//! The request of a command line: a file of its own or the stack's files, then the flags.

use std::path::Path;

use plimsoll_stacks::{Imported, Request, lay_over};
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
        let flags = flags(args);
        let Imported { programs, mut keys, left } = match &args.request {
            Some(path) => {
                let mut keys = request_file(path)?;
                lay_over(&mut keys, &flags);
                Imported { keys, ..Imported::default() }
            }
            None => Imported::from_files(&args.files, &flags)?,
        };
        let mut asked = Asked { request: Request::default(), programs, left, assumed: Vec::new() };
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
fn flags(args: &EstimateArgs) -> Map<String, Value> {
    let text = |key, value: &Option<String>| value.as_ref().map(|value| (key, json!(value)));
    let number = |key, value: Option<u64>| value.map(|value| (key, json!(value)));
    let switch = |key, on: bool| on.then_some((key, json!(true)));
    let of_lora = [
        number("rank", args.lora_rank),
        (!args.lora_targets.is_empty()).then(|| ("target_modules", json!(args.lora_targets))),
    ];
    let versions = [
        text("transformers", &args.transformers),
        text("torch", &args.torch),
        text("peft", &args.peft),
        text("bitsandbytes", &args.bitsandbytes),
        text("deepspeed", &args.deepspeed),
    ];
    keys([
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
        Some(("lora", Value::Object(keys(of_lora)))).filter(|_| args.lora_rank.is_some()),
        Some(("versions", Value::Object(keys(versions)))).filter(|(_, own)| *own != json!({})),
    ])
}

fn keys<const N: usize>(said: [Option<(&str, Value)>; N]) -> Map<String, Value> {
    said.into_iter().flatten().map(|(key, value)| (key.to_owned(), value)).collect()
}
