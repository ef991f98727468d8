//! What a report is asked of: the folder of a run, a document of `plan --json` or `estimate --json`, a request, or a configuration.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use plimsoll_memory::ByteSize;
use plimsoll_plan::config::{Imported, Override};
use plimsoll_stacks::Request;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::args::{ConfigSource, MachineArgs};
use crate::failure::Failure;

const METRICS: &str = "metrics.jsonl";

/// A document that is larger is not read.
const MOST_BYTES: u64 = 64 << 20;

/// The sections of a configuration.
const SECTIONS: [&str; 6] = ["model", "data", "training", "memory", "parallel", "output"];

/// What a report is asked of.
pub enum Source {
    /// A run's folder.
    Run(PathBuf),
    /// What `plan --json` wrote.
    Document(Box<PlanDocument>),
    /// A request of `estimate`, or the one in what `estimate --json` wrote.
    Request(Box<Request>),
    /// A configuration, or flags alone.
    Configuration,
}

/// A document of `plan --json`.
pub struct PlanDocument {
    /// The file.
    pub name: String,
    content: Map<String, Value>,
}

impl Source {
    /// Finds out what the user has named.
    pub fn of(asked: &ConfigSource) -> Result<Source, Failure> {
        let Some(path) = &asked.config else {
            return match asked.model {
                Some(_) => Ok(Source::Configuration),
                None => Err(Failure::usage(
                    "name the folder of a run, a configuration (YAML) or a document of plan --json; or a model with --model",
                )),
            };
        };
        if path.is_dir() {
            return match path.join(METRICS).is_file() {
                true => Ok(Source::Run(path.clone())),
                false => Err(Failure::usage(format!(
                    "{} is no folder of a run: there is no {METRICS} in it; name the folder that output.dir says, a configuration (YAML) or a document of plan --json",
                    path.display()
                ))),
            };
        }
        match text_of_json(path)? {
            Some(text) => of_json(path, &text),
            None => Ok(Source::Configuration),
        }
    }
}

/// The text of a file that is JSON: by its ending, or because it begins as an object. `None` of any other; what is wrong with
/// that one is said where it is read.
fn text_of_json(path: &Path) -> Result<Option<String>, Failure> {
    let Ok(file) = File::open(path) else { return Ok(None) };
    let named = path.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("json"));
    let mut bytes = Vec::new();
    let read = file.take(MOST_BYTES + 1).read_to_end(&mut bytes);
    read.map_err(|error| Failure::other(format!("could not read {}: {error}", path.display())))?;
    let begins = bytes.iter().find(|byte| !byte.is_ascii_whitespace()) == Some(&b'{');
    if !named && !begins {
        return Ok(None);
    }
    if bytes.len() as u64 > MOST_BYTES {
        return Err(no_plan(path, &format!("it is larger than {}", ByteSize(MOST_BYTES))));
    }
    let text = String::from_utf8(bytes).map_err(|_| no_plan(path, "it is no text"))?;
    // YAML may begin so, too.
    let is_yaml = !named && serde_json::from_str::<Value>(&text).is_err();
    Ok(Some(text).filter(|_| !is_yaml))
}

fn of_json(path: &Path, text: &str) -> Result<Source, Failure> {
    let content: Value = serde_json::from_str(text).map_err(|error| no_plan(path, &error.to_string()))?;
    let Value::Object(content) = content else { return Err(no_plan(path, "it is no JSON object")) };
    // A run of another stack is known by its key.
    let request = content.get("request").filter(|_| content.contains_key("allocated_peak_bytes"));
    if let Some(request) =
        request.cloned().or_else(|| content.contains_key("stack").then(|| content.clone().into()))
    {
        let request =
            Request::parse(path, &request.to_string()).map_err(|error| Failure::usage(error.to_string()))?;
        return Ok(Source::Request(Box::new(request)));
    }
    let is_plan = content.get("config").is_some_and(Value::is_object) && content.contains_key("fits");
    match is_plan {
        true => Ok(Source::Document(Box::new(PlanDocument { name: path.display().to_string(), content }))),
        false if content.keys().all(|key| SECTIONS.contains(&key.as_str())) => Ok(Source::Configuration),
        false => Err(no_plan(path, "it has neither config and fits nor the sections of a configuration")),
    }
}

fn no_plan(path: &Path, why: &str) -> Failure {
    Failure::usage(format!(
        "{} is no document of plan --json: {why}; write one with `plimsoll plan ... --json > plan.json`",
        path.display()
    ))
}

impl PlanDocument {
    /// Its configuration, as assignments that flags go over. A line that was left to this machine then is the one that it was.
    pub fn imported(&self, machine: &MachineArgs) -> Result<Imported, Failure> {
        let mut overrides = Vec::new();
        let sections = self.content.get("config").and_then(Value::as_object).into_iter().flatten();
        for (section, keys) in sections {
            for (key, value) in keys.as_object().into_iter().flatten().filter(|(_, value)| !value.is_null()) {
                overrides.push(self.assignment(format!("{section}.{key}"), value.to_string()));
            }
        }
        let budget = "memory.device_budget";
        let said = overrides.iter().any(|own| own.key == budget && own.value != "\"auto\"");
        let line = self.content.get("memory").and_then(|memory| memory["device"]["budget_bytes"].as_u64());
        if let (false, None, Some(line)) = (said, &machine.hardware, line) {
            overrides.retain(|own| own.key != budget);
            overrides.push(self.assignment(budget.to_owned(), line.to_string()));
        }
        Ok(Imported { overrides, ..Imported::default() })
    }

    fn assignment(&self, key: String, value: String) -> Override {
        let argument = format!("{}: config.{key}", self.name);
        Override { key, value, argument }
    }

    /// The machine that flags name, or the one that the document was planned for.
    pub fn machine(&self, flags: &MachineArgs) -> MachineArgs {
        let said = self.content.get("hardware").filter(|_| flags.hardware.is_none() && flags.ranks.is_none());
        let hardware = said.and_then(|said| said["name"].as_str()).map(str::to_owned);
        let host = said.and_then(|said| said["host_memory"].as_u64()).map(ByteSize);
        MachineArgs {
            hardware: hardware.or_else(|| flags.hardware.clone()),
            host_memory: flags.host_memory.or(host),
            ranks: flags.ranks,
        }
    }

    /// The device's peak that it names.
    pub fn peak_bytes(&self) -> Option<u64> {
        self.content.get("memory").and_then(|memory| memory["device"]["peak_bytes"].as_u64())
    }

    /// The entries of a list that the document may have.
    pub fn entries<T: DeserializeOwned>(&self, name: &str) -> Result<Vec<T>, Failure> {
        match self.content.get(name) {
            None | Some(Value::Null) => Ok(Vec::new()),
            Some(list) => serde_json::from_value(list.clone()).map_err(|error| {
                Failure::usage(format!(
                    "{}: {name} is not what plan --json writes: {error}; write the document anew",
                    self.name
                ))
            }),
        }
    }
}
