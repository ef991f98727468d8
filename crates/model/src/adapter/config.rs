//! `adapter_config.json`.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;

use regex::Regex;
use serde_json::{Map, Value, json};

use super::AdapterError;
use crate::safetensors::new_file_builder;
use crate::save_error::SaveError;

/// What the names of an adapter's own tensors end with.
pub(super) const SUFFIXES: [&str; 7] = [
    ".lora_A.weight",
    ".lora_B.weight",
    ".lora_B.bias",
    ".lora_embedding_A",
    ".lora_embedding_B",
    ".lora_magnitude_vector",
    ".lora_magnitude_vector.weight",
];

/// A configuration is a few kilobytes.
const MAX_LENGTH: u64 = 4 << 20;

/// Which modules an adapter is for.
#[derive(Clone, Debug, PartialEq)]
pub enum TargetModules {
    /// Full names, or what names end with after a dot.
    Names(Vec<String>),
    /// A regular expression for the whole name.
    Pattern(String),
    /// Every linear but the head.
    AllLinear,
}

/// Which biases were trained.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdapterBias {
    /// None.
    None,
    /// All of the model's.
    All,
    /// Those of the adapted modules.
    LoraOnly,
}

/// The values that an adapter begins its training with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AdapterStart {
    /// A uniform within 1 / sqrt(inputs), as Kaiming's initialisation has it in PEFT; B zero.
    #[default]
    Kaiming,
    /// A normal with deviation 1 / rank; B zero.
    Gaussian,
    /// Both from the largest singular values of the weight, which is trained beside the rest of it (PiSSA, Meng et al. 2024).
    Pissa {
        /// Found by so many power iterations on random vectors (Halko et al. 2011); to f32's precision without.
        power_iterations: Option<u32>,
    },
}

impl AdapterStart {
    /// Whether the frozen weights are less what the adapter begins with.
    pub fn changes_base(self) -> bool {
        matches!(self, AdapterStart::Pissa { .. })
    }
}

/// What an adapter is.
#[derive(Clone, Debug, PartialEq)]
pub struct AdapterConfig {
    /// Width of the product's middle.
    pub rank: usize,
    /// The product's factor is alpha / rank.
    pub alpha: f64,
    /// Probability with which an input of A is dropped in training.
    pub dropout: f64,
    /// The modules.
    pub target_modules: TargetModules,
    /// Other ranks by patterns of module names.
    pub rank_pattern: BTreeMap<String, usize>,
    /// Other alphas by patterns of module names.
    pub alpha_pattern: BTreeMap<String, f64>,
    /// The factor is alpha / sqrt(rank) instead (Kalajdzievski 2023).
    pub use_rslora: bool,
    /// Rows have lengths of their own (Liu et al. 2024).
    pub use_dora: bool,
    /// Which biases were trained.
    pub bias: AdapterBias,
    /// Modules that were trained whole.
    pub modules_to_save: Vec<String>,
    /// How training begins.
    pub start: AdapterStart,
    /// Whether the base's matrices are stored `[in, out]`.
    pub fan_in_fan_out: bool,
    /// The base model.
    pub base_model: Option<String>,
    /// Keys of the file that are not known here and say something, and are without effect.
    pub unknown: Vec<String>,
}

impl Default for AdapterConfig {
    /// PEFT's defaults.
    fn default() -> AdapterConfig {
        AdapterConfig {
            rank: 8,
            alpha: 8.0,
            dropout: 0.0,
            target_modules: TargetModules::AllLinear,
            rank_pattern: BTreeMap::new(),
            alpha_pattern: BTreeMap::new(),
            use_rslora: false,
            use_dora: false,
            bias: AdapterBias::None,
            modules_to_save: Vec::new(),
            start: AdapterStart::Kaiming,
            fan_in_fan_out: false,
            base_model: None,
            unknown: Vec::new(),
        }
    }
}

/// Keys that are read, or say nothing about what an adapter computes.
const KNOWN: [&str; 25] = [
    "peft_type",
    "task_type",
    "r",
    "lora_alpha",
    "lora_dropout",
    "target_modules",
    // The tensors of such adapters are known by their names.
    "target_parameters",
    "rank_pattern",
    "alpha_pattern",
    "use_rslora",
    "use_dora",
    "bias",
    "modules_to_save",
    "fan_in_fan_out",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "init_lora_weights",
    "auto_mapping",
    "peft_version",
    "megatron_core",
    "qalora_group_size",
    "loftq_config",
    "exclude_modules",
    "layers_pattern",
];

impl AdapterConfig {
    /// Reads the file.
    pub fn read(path: &Path) -> Result<AdapterConfig, AdapterError> {
        let io = |source| AdapterError::Io { path: path.to_owned(), source };
        let length = match std::fs::metadata(path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                let reason =
                    "is not there; name an adapter's folder, as PEFT and training with lora leave one"
                        .to_owned();
                return Err(AdapterError::Config { path: path.to_owned(), reason });
            }
            found => found.map_err(io)?.len(),
        };
        if length > MAX_LENGTH {
            let reason = format!("has {length} bytes; a configuration has a few thousand");
            return Err(AdapterError::Config { path: path.to_owned(), reason });
        }
        let text = std::fs::read(path).map_err(io)?;
        parse(&text).map_err(|reason| AdapterError::Config { path: path.to_owned(), reason })
    }

    /// Writes the file in PEFT's keys, sorted.
    pub fn write(&self, path: &Path) -> Result<(), AdapterError> {
        let text = format!("{:#}\n", self.to_json());
        let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let attempt = || -> std::io::Result<()> {
            let mut aside = new_file_builder().prefix(".writing-").tempfile_in(folder)?;
            aside.write_all(text.as_bytes())?;
            aside.as_file().sync_all()?;
            aside.persist(path).map_err(|error| error.error)?;
            Ok(())
        };
        Ok(attempt().map_err(|source| SaveError::io("write", path, source))?)
    }

    /// As PEFT writes it.
    pub fn to_json(&self) -> Value {
        json!({
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "inference_mode": true,
            "base_model_name_or_path": self.base_model,
            "r": self.rank,
            "lora_alpha": self.alpha,
            "lora_dropout": self.dropout,
            "target_modules": match &self.target_modules {
                TargetModules::Names(names) => json!(names),
                TargetModules::Pattern(pattern) => json!(pattern),
                TargetModules::AllLinear => json!("all-linear"),
            },
            "rank_pattern": self.rank_pattern,
            "alpha_pattern": self.alpha_pattern,
            "use_rslora": self.use_rslora,
            "use_dora": self.use_dora,
            "bias": match self.bias {
                AdapterBias::None => "none",
                AdapterBias::All => "all",
                AdapterBias::LoraOnly => "lora_only",
            },
            "modules_to_save": (!self.modules_to_save.is_empty()).then_some(&self.modules_to_save),
            "fan_in_fan_out": self.fan_in_fan_out,
            "init_lora_weights": match self.start {
                AdapterStart::Gaussian => json!("gaussian"),
                // What is written is an adapter of the base as it is: see `doubled`.
                AdapterStart::Kaiming | AdapterStart::Pissa { .. } => json!(true),
            },
        })
    }

    /// The same with twice the ranks and the same factors on the products, for [A; A_0] and [B, -B_0] side by side: what
    /// was trained from values that are not zero, as an adapter of the base as it is.
    pub fn doubled(&self) -> AdapterConfig {
        // The factor is alpha / r, or alpha / sqrt(r).
        let factor = if self.use_rslora { std::f64::consts::SQRT_2 } else { 2.0 };
        let mut config = AdapterConfig { rank: 2 * self.rank, alpha: factor * self.alpha, ..self.clone() };
        config.rank_pattern.values_mut().for_each(|rank| *rank *= 2);
        config.alpha_pattern.values_mut().for_each(|alpha| *alpha *= factor);
        config.start = AdapterStart::Kaiming;
        config
    }

    /// The rank of a module's adapter.
    pub fn rank_of(&self, module: &str) -> Result<usize, AdapterError> {
        Ok(by_pattern(&self.rank_pattern, module)?.copied().unwrap_or(self.rank))
    }

    /// The factor on the product of a module's adapter of that rank.
    pub fn scale(&self, module: &str, rank: usize) -> Result<f32, AdapterError> {
        let alpha = by_pattern(&self.alpha_pattern, module)?.copied().unwrap_or(self.alpha);
        let rank = rank.max(1) as f64;
        Ok((alpha / if self.use_rslora { rank.sqrt() } else { rank }) as f32)
    }

    /// Whether a pattern of `rank_pattern` or `alpha_pattern` is for a module.
    pub fn pattern_matches(&self, pattern: &str, module: &str) -> bool {
        expression(&module_pattern(pattern)).is_ok_and(|expression| expression.is_match(module))
    }

    /// Whether a linear with that name is adapted; `is_head` says that it is the model's head.
    pub fn targets(&self, module: &str, is_head: bool) -> Result<bool, AdapterError> {
        Ok(match &self.target_modules {
            TargetModules::AllLinear => !is_head,
            TargetModules::Pattern(pattern) => expression(&format!("^(?:{pattern})$"))?.is_match(module),
            TargetModules::Names(names) => {
                let ends = |name: &String| {
                    module
                        .strip_suffix(name.as_str())
                        .is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
                };
                names.iter().any(ends)
            }
        })
    }
}

/// The value whose pattern is the module's name or its end.
fn by_pattern<'v, T>(patterns: &'v BTreeMap<String, T>, module: &str) -> Result<Option<&'v T>, AdapterError> {
    for (pattern, value) in patterns {
        if expression(&module_pattern(pattern))?.is_match(module) {
            return Ok(Some(value));
        }
    }
    Ok(None)
}

fn module_pattern(pattern: &str) -> String {
    format!(r"^(?:.*\.)?(?:{pattern})$")
}

fn expression(pattern: &str) -> Result<Regex, AdapterError> {
    Regex::new(pattern).map_err(|error| {
        AdapterError::Layout(format!("a pattern of modules is no regular expression: {error}"))
    })
}

fn parse(text: &[u8]) -> Result<AdapterConfig, String> {
    let object: Map<String, Value> =
        serde_json::from_slice(text).map_err(|e| format!("is no JSON object: {e}"))?;
    let get = |key: &str| object.get(key).filter(|value| !value.is_null());
    let wrong = |key: &str, value: &Value, wanted: &str| format!("{key}: {value} is not {wanted}");
    let truth = |key: &str| match get(key) {
        None => Ok(false),
        Some(value) => value.as_bool().ok_or_else(|| wrong(key, value, "true or false")),
    };
    let number = |key: &str, usual: f64| match get(key) {
        None => Ok(usual),
        Some(value) => value.as_f64().filter(|x| x.is_finite()).ok_or_else(|| wrong(key, value, "a number")),
    };
    let rank = |key: &str, value: &Value| {
        let rank = value.as_u64().filter(|rank| (1..=1 << 20).contains(rank));
        rank.map(|rank| rank as usize).ok_or_else(|| wrong(key, value, "a rank of at least 1"))
    };
    let strings = |key: &str, value: &Value| -> Result<Vec<String>, String> {
        let list = value.as_array().ok_or_else(|| wrong(key, value, "a list of names"))?;
        list.iter()
            .map(|name| name.as_str().map(str::to_owned).ok_or_else(|| wrong(key, value, "a list of names")))
            .collect()
    };
    match get("peft_type").map(|value| value.as_str().unwrap_or_default()) {
        Some("LORA") => {}
        Some(other) => return Err(format!("peft_type: {other:?} is not supported; LORA is")),
        None => return Err("peft_type is missing; LORA is supported".to_owned()),
    }
    let patterns = |key: &str| match get(key) {
        None => Ok(Vec::new()),
        Some(Value::Object(patterns)) => Ok(patterns.iter().map(|(k, v)| (k.clone(), v.clone())).collect()),
        Some(value) => Err(wrong(key, value, "an object")),
    };
    let mut config = AdapterConfig {
        rank: get("r").map_or(Ok(8), |value| rank("r", value))?,
        alpha: number("lora_alpha", 8.0)?,
        dropout: number("lora_dropout", 0.0)?,
        use_rslora: truth("use_rslora")?,
        use_dora: truth("use_dora")?,
        fan_in_fan_out: truth("fan_in_fan_out")?,
        start: match get("init_lora_weights").and_then(Value::as_str) {
            Some("gaussian") => AdapterStart::Gaussian,
            _ => AdapterStart::Kaiming,
        },
        base_model: get("base_model_name_or_path").and_then(|value| value.as_str().map(str::to_owned)),
        ..AdapterConfig::default()
    };
    config.target_modules = match get("target_modules") {
        None => TargetModules::Names(Vec::new()),
        Some(Value::String(all)) if all == "all-linear" => TargetModules::AllLinear,
        Some(Value::String(pattern)) => TargetModules::Pattern(pattern.clone()),
        Some(list) => TargetModules::Names(strings("target_modules", list)?),
    };
    for (pattern, value) in patterns("rank_pattern")? {
        config.rank_pattern.insert(pattern, rank("rank_pattern", &value)?);
    }
    for (pattern, value) in patterns("alpha_pattern")? {
        let alpha = value.as_f64().ok_or_else(|| wrong("alpha_pattern", &value, "a number"))?;
        config.alpha_pattern.insert(pattern, alpha);
    }
    config.bias = match get("bias").map(|value| value.as_str().unwrap_or_default()) {
        None | Some("none") => AdapterBias::None,
        Some("all") => AdapterBias::All,
        Some("lora_only") => AdapterBias::LoraOnly,
        Some(other) => return Err(format!("bias: {other:?} is not none, all or lora_only")),
    };
    if let Some(list) = get("modules_to_save") {
        config.modules_to_save = strings("modules_to_save", list)?;
    }
    // These change the base's weights before the training, which the file does not tell.
    if let Some(start) = get("init_lora_weights").and_then(Value::as_str)
        && ["pissa", "olora", "corda", "loftq", "lora_ga"].iter().any(|name| start.starts_with(name))
    {
        return Err(format!(
            "init_lora_weights: {start:?} begins from another base than the one at hand; save the adapter again as plain \
             LoRA (PEFT's path_initial_model_for_weight_conversion), or merge it with PEFT"
        ));
    }
    let says = |value: &Value| !matches!(value, Value::Null | Value::Bool(false));
    let empty = |value: &Value| {
        value.as_object().is_some_and(Map::is_empty) || value.as_array().is_some_and(Vec::is_empty)
    };
    config.unknown = object
        .iter()
        .filter(|(key, value)| !KNOWN.contains(&key.as_str()) && says(value) && !empty(value))
        .map(|(key, _)| key.clone())
        .collect();
    Ok(config)
}
