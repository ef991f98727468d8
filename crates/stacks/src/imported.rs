//! Other programs' configuration files as keys of a request: TrainingArguments, accelerate, DeepSpeed, axolotl, LLaMA-Factory, torchtune,
//! PEFT's adapter_config, BitsAndBytesConfig, and the command line of a training script.
//!
//! How such files are read and known by their keys is `plimsoll_plan`'s; here stands what a key says about memory in *that* program.

mod joined;
mod keys;

use std::path::Path;

use plimsoll_plan::config::{ConfigError, ForeignFile, ForeignKey, NAMED_FILES};
use serde_json::{Map, Value, json};

use joined::Joined;
use keys::{Draft, KEYS, is_true};

/// What a file says of a request.
#[derive(Clone, Debug, PartialEq)]
pub struct Imported {
    /// Whose file it is.
    pub program: String,
    /// Keys of [`Request`](crate::Request) with their values.
    pub keys: Map<String, Value>,
    /// What says nothing about memory here: its place, key and value.
    pub left: Vec<String>,
}

/// Whose file it is that has an optimizer which counts before that of others.
pub const DEEPSPEED: &str = "DeepSpeed's JSON";

/// What makes adapters of one model unlike each other, and what is taken instead.
const UNIFORM: [(&str, &str); 5] = [
    ("layers_to_transform", "adapters are counted in every layer"),
    ("layers_pattern", "adapters are counted in every layer"),
    ("exclude_modules", "adapters are counted in all of target_modules"),
    ("rank_pattern", "every adapter is counted with r"),
    ("target_parameters", "adapters of parameters are not counted"),
];

/// Values that say nothing.
const NOTHING: [&str; 5] = ["", "{}", "[]", "null", "None"];

/// The switches of 16 bits, each by its names.
const HALVES: [&[&str]; 2] = [&["bf16", "bf16.enabled"], &["fp16", "fp16.enabled"]];

/// Switches of which one alone can be on.
const EXCLUSIVE: [[&[&str]; 2]; 2] = [HALVES, [&["load_in_4bit"], &["load_in_8bit"]]];

/// Beginnings of the keys of a file within another program's.
const WITHIN: [&str; 4] =
    ["deepspeed.", "fsdp_config.fsdp_", "fsdp_config.", "parallelism_config.parallelism_config_"];

/// Keys that only DeepSpeed has, in a file without its marks.
const OF_DEEPSPEED: [&str; 3] = ["bf16.enabled", "fp16.enabled", "optimizer.type"];

/// A file that says what model it is, and nothing else.
const MODEL: &str = "a model's config.json";

impl Imported {
    /// Reads a file, which is known by its keys. A DeepSpeed file that it names is read too, from its folder on.
    ///
    /// # Errors
    /// The file cannot be read or is none of these; a number is none; keys contradict each other.
    pub fn from_file(path: &Path) -> Result<Imported, ConfigError> {
        Joined::read(path, NAMED_FILES)?.finish()
    }
}

impl Joined {
    /// A file with files that it names, and those that they name, so many times.
    fn read(path: &Path, further: u32) -> Result<Joined, ConfigError> {
        let file = ForeignFile::read(path)?;
        let has = |key: &str| file.keys.iter().any(|one| one.key == key);
        if has("model_type") && !has("base_model") {
            let keys = [("model".to_owned(), json!(path.display().to_string()))].into_iter().collect();
            return Ok(Joined::of(Imported { program: MODEL.to_owned(), keys, left: Vec::new() }));
        }
        exclude(&file.keys)?;
        let program = program(&file);
        let mut draft = Draft::new(program, file.has_fsdp);
        let mut left = Vec::new();
        for key in &file.keys {
            let of_key = |name: &str| key.key.split('.').next() == Some(name);
            let note = UNIFORM.iter().find(|(name, _)| of_key(name)).map(|(_, note)| *note);
            match note.filter(|_| !NOTHING.contains(&key.value.as_str())) {
                Some(note) => left.push(format!("{}: {note}", key.shown())),
                None if take(&mut draft, key)? => {}
                None => left.push(key.shown()),
            }
        }
        if let Some(key) = draft.lacks() {
            let remedy =
                format!("{}: it trains adapters, and {program} has no rank of its own", path.display());
            return Err(ConfigError::Missing { key, remedy });
        }
        let mut joined = Joined::settled(program, draft.finish(), left, &file.keys);
        // transformers names DeepSpeed's file in its own, and a launcher accelerate's.
        let folder = path.parent().unwrap_or(Path::new(""));
        let named = file.keys.iter().filter_map(|one| Some((one, one.named_file(folder)?)));
        for (named, inner) in named.filter(|_| further > 0) {
            let own = Joined::read(&inner, further - 1)?;
            joined.join(own, &inner, named)?;
        }
        Ok(joined)
    }
}

/// Whose file it is, where its keys say more than their marks.
fn program(file: &ForeignFile) -> &'static str {
    let has = |keys: &[&str]| file.keys.iter().any(|one| keys.contains(&one.key.as_str()));
    let of_trainer = has(&["per_device_train_batch_size", "output_dir", "num_train_epochs"]);
    match file.program {
        "TrainingArguments" if of_trainer => file.program,
        "TrainingArguments" if has(&["bnb_4bit_quant_type", "load_in_4bit", "load_in_8bit"]) => {
            "BitsAndBytesConfig"
        }
        "TrainingArguments" if has(&OF_DEEPSPEED) => DEEPSPEED,
        known => known,
    }
}

/// Keys that contradict each other, or a value that is none.
fn conflict(reason: String, remedy: &str) -> ConfigError {
    ConfigError::Conflict { keys: Vec::new(), reason, remedy: remedy.to_owned() }
}

/// Refuses two switches that exclude each other.
fn exclude(keys: &[ForeignKey]) -> Result<(), ConfigError> {
    let is_on = |key: &&ForeignKey, names: &[&str]| {
        let name = key.key.strip_prefix("deepspeed.").unwrap_or(&key.key);
        names.contains(&name) && is_true(&key.value)
    };
    for names in EXCLUSIVE {
        if let [Some(one), Some(other)] = names.map(|names| keys.iter().find(|key| is_on(key, names))) {
            let reason = format!("{} and {} exclude each other", one.shown(), other.shown());
            return Err(conflict(reason, "turn one of the two off"));
        }
    }
    Ok(())
}

/// Takes what a key says; `false` where that is nothing.
fn take(draft: &mut Draft, key: &ForeignKey) -> Result<bool, ConfigError> {
    // DeepSpeed's batch of all devices is another one than a script's own.
    let mut within = WITHIN.iter().filter_map(|prefix| key.key.strip_prefix(prefix));
    let name = within.find(|name| *name != "train_batch_size").unwrap_or(&key.key);
    let of_fsdp = name.len() < key.key.len() && key.key.starts_with("fsdp_config.");
    let name = if of_fsdp { format!("fsdp_{}", name.trim_start_matches("fsdp_")) } else { name.to_owned() };
    // 16 bits that something else decides about are not off.
    let of_halves = || HALVES.iter().any(|names| names.contains(&name.as_str()));
    if key.value == "null" || key.value == "auto" && !of_halves() {
        return Ok(true);
    }
    let Some((_, takes)) = KEYS.iter().find(|(theirs, _)| *theirs == name) else { return Ok(false) };
    let is_taken = takes(draft, &key.value).is_some();
    match draft.expected() {
        None => Ok(is_taken),
        Some(expected) => Err(conflict(
            format!("{}: this is not {expected}", key.shown()),
            "correct it, or leave the key out",
        )),
    }
}

#[cfg(test)]
mod tests;
