//! What a benchmark trains: a configuration, a model and a text, with defaults for all of them.

use std::path::Path;

use plimsoll_plan::config::RawConfig;

use super::rung::quoted;
use crate::args::{BenchRunArgs, ConfigSource};
use crate::failure::Failure;
use crate::session::{load_config, written_config};

/// The model of the benchmarks, and where `examples/get-smollm2` puts it.
const MODEL_FILE: &str = "models/SmolLM2-135M-Instruct.Q4_1.gguf";
/// The same model's dimensions, which are enough to plan.
const MODEL_NAME: &str = "smollm2-135m";
/// The text that comes with the program's source.
const DATA_FILE: &str = "examples/data/shakespeare.txt";

/// The user's configuration, and the arguments that give `plimsoll train` the same.
pub struct Base {
    pub config: RawConfig,
    pub train_arguments: Vec<String>,
}

impl Base {
    /// From the file, then what the benchmark sets, then every `--set`.
    pub fn new(args: &BenchRunArgs, mut set: Vec<String>, plan_only: bool) -> Result<Base, Failure> {
        set.extend([
            format!("training.steps={}", args.steps),
            "output.save_steps=0".to_owned(),
            "output.eval_steps=0".to_owned(),
            "output.final_model=false".to_owned(),
            "data.validation=".to_owned(),
        ]);
        match (&args.data, &args.config) {
            (Some(path), _) => set.push(format!("data.train={}", quoted(path)?)),
            (None, None) => set.push(format!("data.train={DATA_FILE}")),
            (None, Some(_)) => {}
        }
        set.extend(args.set.iter().cloned());
        let scratch = args.set.iter().any(|assignment| assignment.starts_with("model"));
        let model = match &args.model {
            Some(model) => Some(model.clone()),
            None if scratch || args.config.is_some() => None,
            None if Path::new(MODEL_FILE).exists() => Some(MODEL_FILE.to_owned()),
            None if plan_only => Some(MODEL_NAME.to_owned()),
            None => {
                return Err(Failure::usage(format!(
                    "{MODEL_FILE} is missing: fetch it with examples/get-smollm2, or give --model"
                )));
            }
        };
        if !plan_only && args.data.is_none() && args.config.is_none() && !Path::new(DATA_FILE).exists() {
            return Err(Failure::usage(format!(
                "{DATA_FILE} is missing: give --data with a text to train on"
            )));
        }
        let mut train_arguments = vec!["train".to_owned(), "--json".to_owned()];
        if let Some(path) = &args.config {
            train_arguments.push(
                path.to_str()
                    .map(str::to_owned)
                    .ok_or_else(|| Failure::usage(format!("{}: the path is not UTF-8", path.display())))?,
            );
        }
        if let Some(model) = &model {
            train_arguments.extend(["--model".to_owned(), model.clone()]);
        }
        if let Some(threads) = args.threads {
            train_arguments.extend(["--threads".to_owned(), threads.to_string()]);
        }
        for assignment in &set {
            train_arguments.extend(["--set".to_owned(), assignment.clone()]);
        }
        let source = ConfigSource { config: args.config.clone(), set, model, ..ConfigSource::default() };
        Ok(Base { config: load_config(&source)?, train_arguments })
    }
}

/// What the user has written, in the file and beside it.
pub fn written(args: &BenchRunArgs) -> Result<RawConfig, Failure> {
    let (config, set) = (args.config.clone(), args.set.clone());
    written_config(&ConfigSource { config, set, ..ConfigSource::default() })
}
