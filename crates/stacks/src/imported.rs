//! Other programs' configuration files as keys of a request: TrainingArguments, accelerate, DeepSpeed, axolotl, LLaMA-Factory, torchtune,
//! PEFT's adapter_config, BitsAndBytesConfig, and the command line of a training script.
//!
//! How such files are read and known by their keys is `plimsoll_plan`'s; here stands what a key says about memory in *that* program.

mod joined;
mod keys;

use std::path::{Path, PathBuf};

use plimsoll_plan::config::{
    ACCELERATE, ConfigError, DEEPSPEED, ForeignFile, ForeignKey, NAMED_FILES, SixteenBits,
};
use serde_json::{Map, Value, json};

use joined::Joined;
use keys::{Draft, KEYS, Settled, is_true};

/// What the files of a run say of a request.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Imported {
    /// Whose files they are, without those that they name.
    pub programs: Vec<String>,
    /// Keys of [`Request`](crate::Request) with their values.
    pub keys: Map<String, Value>,
    /// What says nothing about memory here: its place, key and value.
    pub left: Vec<String>,
}

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

/// Switches of which one alone can be on.
const EXCLUSIVE: [[&[&str]; 2]; 2] =
    [[SixteenBits::SWITCHES[0].1, SixteenBits::SWITCHES[1].1], [&["load_in_4bit"], &["load_in_8bit"]]];

/// Beginnings of the keys of a file within another program's.
const WITHIN: [&str; 4] =
    ["deepspeed.", "fsdp_config.fsdp_", "fsdp_config.", "parallelism_config.parallelism_config_"];

/// Keys that only DeepSpeed has, in a file without its marks.
const OF_DEEPSPEED: [&str; 3] = ["bf16.enabled", "fp16.enabled", "optimizer.type"];

/// A file that says what model it is, and nothing else.
const MODEL: &str = "a model's config.json";

impl Imported {
    /// Reads the files of a run, each known by its keys, and those that they name. `flags` are keys of a request that go over all of
    /// them: what they say, no two files have to agree about.
    ///
    /// # Errors
    /// A file cannot be read or is none of these; a number is none; keys contradict each other; two files do not say the same.
    pub fn from_files(paths: &[PathBuf], flags: &Map<String, Value>) -> Result<Imported, ConfigError> {
        let (mut files, mut programs) = (Vec::new(), Vec::new());
        for path in paths {
            let file = Joined::read(path, NAMED_FILES, &mut files)?;
            programs.push(file.program.to_owned());
            files.push(file);
        }
        // A command goes over the file of its launcher, and DeepSpeed's has to agree with all others.
        files.sort_by_key(|file| [ACCELERATE, DEEPSPEED].iter().position(|last| *last == file.program));
        let mut all = Joined::default();
        for file in files {
            all.join(file.under(flags))?;
        }
        let (keys, left) = all.finish(flags)?;
        Ok(Imported { programs, keys, left })
    }
}

impl Joined {
    /// A file by itself. Those that it names, and those that they name, so many times, go to `files`.
    fn read(path: &Path, further: u32, files: &mut Vec<Joined>) -> Result<Joined, ConfigError> {
        let file = ForeignFile::read(path)?;
        let has = |key: &str| file.keys.iter().any(|one| one.key == key);
        if has("model_type") && !has("base_model") {
            let keys = [("model".to_owned(), json!(path.display().to_string()))].into_iter().collect();
            return Ok(Joined::settled(MODEL, Settled { keys, ..Settled::default() }, Vec::new(), &[]));
        }
        exclude(&file.keys)?;
        let program = program(&file);
        let mut draft = Draft::new(program, file.has_fsdp);
        let mut left = Vec::new();
        let folder = path.parent().unwrap_or(Path::new(""));
        for key in &file.keys {
            // transformers names DeepSpeed's file in its own, and a launcher accelerate's.
            if let Some(named) = key.named_file(folder).filter(|_| further > 0) {
                let mut named = Joined::read(&named, further - 1, files)?;
                // The stack is that of the file which names it.
                named.keys.remove("stack");
                named.program = if key.names_its_launchers() { ACCELERATE } else { named.program };
                files.push(named);
                continue;
            }
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
        Ok(Joined::settled(program, draft.finish(SixteenBits::switched_off(&file.keys)), left, &file.keys))
    }
}

/// Lays keys over others; of a mapping, those that stand in both mappings.
pub fn lay_over(keys: &mut Map<String, Value>, flags: &Map<String, Value>) {
    for (key, flag) in flags {
        match (keys.get_mut(key), flag) {
            (Some(Value::Object(own)), Value::Object(parts)) => lay_over(own, parts),
            _ => drop(keys.insert(key.clone(), flag.clone())),
        }
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
    let of_halves = || SixteenBits::SWITCHES.iter().any(|(_, names)| names.contains(&name.as_str()));
    if key.value == "null" || key.value == "auto" && !of_halves() {
        return Ok(true);
    }
    let Some((_, takes)) = KEYS.iter().find(|(theirs, _)| *theirs == name) else { return Ok(false) };
    draft.at(key);
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
