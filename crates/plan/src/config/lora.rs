//! `training.lora` and `training.quantization`: the adapters of LoRA and QLoRA, and how frozen weights are stored. Names
//! and defaults are PEFT's where it has them.

use std::collections::BTreeMap;

use plimsoll_device::DType;
use plimsoll_device::cpu::quantize::can_quantize;
use plimsoll_model::adapter::{AdapterBias, AdapterConfig, AdapterStart, TargetModules};
use serde::{Serialize, Serializer};

use super::document::{Input, Yaml};
use super::section::section;
use super::training::Method;
use super::value::{ConfigValue, Mismatch, because, choice, mismatch};
use super::{ConfigError, Entry, RawConfig};

/// Width of an adapter's middle where the user names none.
const RANK: u64 = 16;

choice! {
    /// Which biases are trained beside the adapters.
    pub enum LoraBias {
        /// None.
        None = "none",
        /// All of the model's.
        All = "all",
        /// Those of the adapted linears.
        LoraOnly = "lora_only",
    }
}

section! {
    /// The adapters of training.method lora and qlora.
    pub struct LoraOptions at "training.lora" {
        /// Width of the middle of each adapter.
        rank: u64 = RANK, COUNT;
        /// An adapter's product is multiplied by alpha / rank.
        alpha: f64, "twice the rank", POSITIVE;
        /// Probability with which an element of an adapter's input is dropped.
        dropout: f64 = 0.0, BELOW_ONE;
        /// Which linears have an adapter: names or what names end with, a regular expression for whole names, or all-linear.
        target_modules: Targets = Targets(TargetModules::AllLinear);
        /// Other ranks, by regular expressions for the ends of names.
        rank_pattern: Patterns<u64>, "none";
        /// Other alphas, by regular expressions for the ends of names.
        alpha_pattern: Patterns<f64>, "none";
        /// Whether the factor is alpha / sqrt(rank) instead (rsLoRA).
        use_rslora: bool = false;
        /// Whether rows of adapted weights have lengths of their own, which are trained (DoRA).
        use_dora: bool = false;
        /// Which biases are trained too.
        bias: LoraBias = LoraBias::None;
        /// Modules that are trained whole, such as embed_tokens or lm_head.
        modules_to_save: Names, "none";
        /// How A and B begin; with pissa as the largest singular values of the weight, beside which the rest of it is frozen.
        init_lora_weights: LoraInit = LoraInit(AdapterStart::Kaiming);
        /// B's learning rate as a multiple of A's (LoRA+).
        loraplus_lr_ratio: f64 = 1.0, POSITIVE;
    }
}

impl LoraOptions {
    /// The adapter as its file will say it.
    pub fn adapter_config(&self, base_model: Option<String>) -> AdapterConfig {
        let rank = self.rank();
        let patterns = self.rank_pattern.clone().unwrap_or_default().0;
        AdapterConfig {
            rank: rank as usize,
            alpha: self.alpha.unwrap_or(2.0 * rank as f64),
            dropout: self.dropout(),
            target_modules: self.target_modules().0,
            rank_pattern: patterns.into_iter().map(|(pattern, rank)| (pattern, rank as usize)).collect(),
            alpha_pattern: self.alpha_pattern.clone().unwrap_or_default().0,
            use_rslora: self.use_rslora(),
            use_dora: self.use_dora(),
            bias: match self.bias() {
                LoraBias::None => AdapterBias::None,
                LoraBias::All => AdapterBias::All,
                LoraBias::LoraOnly => AdapterBias::LoraOnly,
            },
            modules_to_save: self.modules_to_save.clone().unwrap_or_default().0,
            start: self.init_lora_weights().0,
            base_model,
            ..AdapterConfig::default()
        }
    }
}

/// The first values of A and B, by PEFT's names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoraInit(pub AdapterStart);

/// What stands before the number of power iterations.
const PISSA_NITER: &str = "pissa_niter_";

/// Iterations beyond which nothing changes.
const MOST_ITERATIONS: u32 = 1000;

impl Serialize for LoraInit {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.text())
    }
}

impl ConfigValue for LoraInit {
    fn read(input: Input<'_>) -> Result<Self, Mismatch> {
        let Yaml::Text(text) = &input.node.value else { return Err(mismatch::<Self>(input)) };
        let text = text.to_ascii_lowercase();
        Ok(LoraInit(match text.as_str() {
            "kaiming" | "default" => AdapterStart::Kaiming,
            "gaussian" => AdapterStart::Gaussian,
            "pissa" => AdapterStart::Pissa { power_iterations: None },
            other => {
                let count = other.strip_prefix(PISSA_NITER).and_then(|count| count.parse().ok());
                let count = count.filter(|count| *count <= MOST_ITERATIONS);
                let power_iterations = Some(count.ok_or_else(|| mismatch::<Self>(input))?);
                AdapterStart::Pissa { power_iterations }
            }
        }))
    }
    fn describe() -> String {
        "kaiming | gaussian | pissa | pissa_niter_N with N up to 1000".to_owned()
    }
    fn text(&self) -> String {
        match self.0 {
            AdapterStart::Kaiming => "kaiming".to_owned(),
            AdapterStart::Gaussian => "gaussian".to_owned(),
            AdapterStart::Pissa { power_iterations: None } => "pissa".to_owned(),
            AdapterStart::Pissa { power_iterations: Some(count) } => format!("{PISSA_NITER}{count}"),
        }
    }
}

/// Names of modules. Written as one name or a list of them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct Names(pub Vec<String>);

impl ConfigValue for Names {
    fn read(input: Input<'_>) -> Result<Self, Mismatch> {
        match &input.node.value {
            Yaml::List(items) => {
                let names = items.iter().map(|node| String::read(Input { node, ..input }));
                Ok(Names(names.collect::<Result<_, _>>()?))
            }
            Yaml::Text(text) => Ok(Names(text.split(',').map(|name| name.trim().to_owned()).collect())),
            _ => Err(mismatch::<Self>(input)),
        }
    }
    fn describe() -> String {
        "list of names".to_owned()
    }
    fn text(&self) -> String {
        self.0.join(", ")
    }
}

/// Which modules have an adapter.
#[derive(Clone, Debug, PartialEq)]
pub struct Targets(pub TargetModules);

impl Serialize for Targets {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match &self.0 {
            TargetModules::AllLinear => serializer.serialize_str("all-linear"),
            TargetModules::Pattern(pattern) => serializer.serialize_str(pattern),
            TargetModules::Names(names) => names.serialize(serializer),
        }
    }
}

impl ConfigValue for Targets {
    fn read(input: Input<'_>) -> Result<Self, Mismatch> {
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.' | ',' | ' ');
        Ok(Targets(match &input.node.value {
            Yaml::Text(text) if matches!(text.as_str(), "all-linear" | "all_linear" | "all") => {
                TargetModules::AllLinear
            }
            // Anything that no name has makes it an expression.
            Yaml::Text(text) if text.contains(|c| !plain(c)) => TargetModules::Pattern(text.clone()),
            _ => TargetModules::Names(Names::read(input).map_err(|_| mismatch::<Self>(input))?.0),
        }))
    }
    fn describe() -> String {
        "all-linear | list of names | regular expression".to_owned()
    }
    fn text(&self) -> String {
        match &self.0 {
            TargetModules::AllLinear => "all-linear".to_owned(),
            TargetModules::Pattern(pattern) => pattern.clone(),
            TargetModules::Names(names) => names.join(", "),
        }
    }
}

/// Values by patterns.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(transparent)]
pub struct Patterns<T>(pub BTreeMap<String, T>);

impl<T: ConfigValue + PartialOrd + From<u8>> ConfigValue for Patterns<T> {
    fn read(input: Input<'_>) -> Result<Self, Mismatch> {
        let Yaml::Map(entries) = &input.node.value else { return Err(mismatch::<Self>(input)) };
        let mut patterns = BTreeMap::new();
        for (key, node) in entries {
            let at = Input { node, ..input };
            let value = T::read(at).map_err(|inner| Mismatch { expected: Self::describe(), ..inner })?;
            if value <= T::from(0) {
                return Err(because::<Self>(at, format!("{} for {}", value.text(), key.value)));
            }
            patterns.insert(key.value.clone(), value);
        }
        Ok(Patterns(patterns))
    }
    fn describe() -> String {
        format!("{{pattern: {} above 0}}", T::describe())
    }
    fn text(&self) -> String {
        let entries = self.0.iter().map(|(pattern, value)| format!("{pattern}: {}", value.text()));
        format!("{{{}}}", entries.collect::<Vec<_>>().join(", "))
    }
}

/// How the frozen linears of the blocks are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quantization {
    /// In the type that products are computed in.
    None,
    /// As the model's file has them.
    Stored,
    /// As blocks of this type.
    As(DType),
}

impl Quantization {
    fn all() -> impl Iterator<Item = Quantization> {
        let types = DType::ALL.into_iter().filter(|dtype| can_quantize(*dtype)).map(Quantization::As);
        [Quantization::None, Quantization::Stored].into_iter().chain(types)
    }

    fn name(self) -> &'static str {
        match self {
            Quantization::None => "none",
            Quantization::Stored => "stored",
            Quantization::As(dtype) => dtype.name(),
        }
    }
}

impl std::fmt::Display for Quantization {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl Serialize for Quantization {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

impl ConfigValue for Quantization {
    fn read(input: Input<'_>) -> Result<Self, Mismatch> {
        let Yaml::Text(text) = &input.node.value else { return Err(mismatch::<Self>(input)) };
        let named = Quantization::all().find(|q| q.name().eq_ignore_ascii_case(text));
        named.ok_or_else(|| mismatch::<Self>(input))
    }
    fn describe() -> String {
        Quantization::all().map(Quantization::name).collect::<Vec<_>>().join(" | ")
    }
    fn text(&self) -> String {
        self.name().to_owned()
    }
}

impl RawConfig {
    /// Adapter settings without adapters, and adapters of what is not there yet.
    pub(super) fn check_lora(&self, errors: &mut Vec<ConfigError>) {
        let training = &self.training;
        let method = training.method();
        let mut conflict = |keys, reason: &str, remedy: &str| {
            errors.push(ConfigError::Conflict { keys, reason: reason.to_owned(), remedy: remedy.to_owned() });
        };
        if method != Method::Full {
            if self.model.path.is_none() && self.model.from_scratch != Default::default() {
                let keys = vec![self.conflicting("training.method", method)];
                conflict(
                    keys,
                    "adapters change a trained model, and this one begins from scratch",
                    "set model.path, or training.method to full",
                );
            }
            let fp8 = training.mixed_precision() == super::Auto::Set(super::MixedPrecision::Fp8);
            if fp8 && training.lora.dropout() > 0.0 {
                let keys = vec![
                    self.conflicting("training.mixed_precision", super::MixedPrecision::Fp8),
                    self.conflicting("training.lora.dropout", training.lora.dropout()),
                ];
                conflict(
                    keys,
                    "inputs that are kept in 8 bits cannot be dropped from",
                    "set training.lora.dropout to 0, or training.mixed_precision to bf16",
                );
            }
            return;
        }
        super::Section::visit(&training.lora, &mut |entry: Entry| {
            if let Some(value) = entry.value {
                let keys = vec![
                    self.conflicting("training.method", method),
                    self.conflicting(entry.path, value.text),
                ];
                conflict(keys, "only adapters have it", "set training.method to lora or qlora, or remove it");
            }
        });
        if let Some(super::Auto::Set(quantization)) = training.quantization
            && quantization != Quantization::None
        {
            let keys = vec![
                self.conflicting("training.method", method),
                self.conflicting("training.quantization", quantization),
            ];
            conflict(
                keys,
                "weights that are trained are not quantised",
                "set training.method to qlora, which trains adapters beside quantised weights, or training.quantization to none",
            );
        }
    }
}
