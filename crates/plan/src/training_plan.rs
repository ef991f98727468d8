//! The plan of a training run: every decision, what every byte is for, how long a step takes, and what else could be done.

use std::collections::BTreeMap;

use plimsoll_memory::{Phase, Tag, TagBytes};
use plimsoll_model::{ModelSpec, Parameter, WeightSource};
use plimsoll_step::StepError;
use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::advice::{Alternative, alternatives};
use crate::config::{Auto, RawConfig};
use crate::method::training_method;
use crate::origin::ModelOrigin;
use crate::resolve::{Choice, Limits, choose, resolved_config};
use crate::time::Rates;

/// What the plan is made for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Machine {
    /// How fast it is.
    pub rates: Rates,
    /// Memory that may be used where the configuration names no budget, in bytes.
    pub memory_limit: u64,
    /// What lies outside the arena (program, threads, packing buffers, tokenizer), in bytes, as measured.
    pub overhead_bytes: u64,
    /// Host memory that the data pipeline will hold for a micro-batch of one token, in bytes.
    pub host_bytes_per_token: u64,
}

/// A plan.
#[derive(Clone, Debug)]
pub struct TrainingPlan {
    /// The model.
    pub spec: ModelSpec,
    /// The configuration with every `auto` decided; it can be run again.
    pub config: RawConfig,
    /// The step and its dry run.
    pub choice: Choice,
    /// The device budget in bytes.
    pub device_budget: u64,
    /// What lies outside the arena, in bytes.
    pub overhead_bytes: u64,
    /// The data pipeline's memory in bytes.
    pub host_bytes: u64,
    /// Other settings of the step that need less memory.
    pub alternatives: Vec<Alternative>,
}

/// Bytes by kind at the peak.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LayerBytes {
    /// The layer; `None` for what belongs to no layer.
    pub layer: Option<u32>,
    /// Bytes by tag.
    pub by_tag: BTreeMap<Tag, u64>,
}

impl TrainingPlan {
    /// Makes the plan for a model that is known by its shape alone.
    pub fn new(config: &RawConfig, spec: &ModelSpec, machine: &Machine) -> Result<TrainingPlan, StepError> {
        TrainingPlan::with(config, spec, None, machine)
    }

    /// Makes the plan for a model, whose files say how frozen weights are stored.
    pub fn for_model(
        config: &RawConfig,
        origin: &ModelOrigin,
        machine: &Machine,
    ) -> Result<TrainingPlan, StepError> {
        TrainingPlan::with(config, origin.spec(), origin.weights(), machine)
    }

    fn with(
        config: &RawConfig,
        spec: &ModelSpec,
        stored: Option<&WeightSource>,
        machine: &Machine,
    ) -> Result<TrainingPlan, StepError> {
        let device_budget = match config.memory.device_budget() {
            Auto::Set(size) => size.0,
            Auto::Auto => machine.memory_limit,
        };
        let target = (device_budget as f64 * config.memory.target_utilization()) as u64;
        let overhead_bytes = machine.overhead_bytes;
        let limits = Limits {
            arena_bytes: device_budget.saturating_sub(overhead_bytes),
            target_bytes: target.saturating_sub(overhead_bytes),
        };
        let method = training_method(config, spec, stored)?;
        let choice = choose(config, spec, &method, &machine.rates, limits)?;
        let alternatives = alternatives(spec, &choice, &machine.rates, limits)?;
        let tokens = choice.settings.batch_size * choice.settings.sequence_length;
        Ok(TrainingPlan {
            spec: spec.clone(),
            config: resolved_config(config, &choice),
            host_bytes: tokens * machine.host_bytes_per_token,
            choice,
            device_budget,
            overhead_bytes,
            alternatives,
        })
    }

    /// Bytes of arena.
    pub fn peak_bytes(&self) -> u64 {
        self.choice.peak_bytes()
    }

    /// Bytes that the process takes in all.
    pub fn process_bytes(&self) -> u64 {
        self.peak_bytes().saturating_add(self.overhead_bytes)
    }

    /// Whether it keeps to the budget.
    pub fn fits(&self) -> bool {
        let host = match self.config.memory.host_budget() {
            Auto::Set(size) => self.host_bytes <= size.0,
            Auto::Auto => true,
        };
        host && self.process_bytes() <= self.device_budget
    }

    /// Live bytes by tag at the peak.
    pub fn at_peak(&self) -> TagBytes {
        self.choice.dry_run.tags_at_peak()
    }

    /// Elements of what is trained.
    pub fn trainable_parameters(&self) -> u64 {
        self.choice.settings.method.trained(&self.spec).iter().map(Parameter::elements).sum()
    }

    /// Elements of the model and its adapters.
    pub fn parameters(&self) -> u64 {
        let adapters = self.choice.settings.method.adapters();
        let own = adapters.map_or(&[][..], |adapters| adapters.layout.parameters());
        self.spec.parameter_count() + own.iter().map(Parameter::elements).sum::<u64>()
    }

    /// Bytes of optimizer states, which live all the time, for each parameter that is trained; master weights are not among them.
    pub fn state_bytes_per_parameter(&self) -> f64 {
        let states = self.at_peak().get(Tag::Optimizer);
        states as f64 / self.trainable_parameters().max(1) as f64
    }

    /// Where in the step the peak is.
    pub fn peak_place(&self) -> (Phase, Option<u32>) {
        let at_peak = self.choice.dry_run.at_peak();
        (at_peak.phase, at_peak.layer)
    }

    /// Live bytes at the peak by layer.
    pub fn layers(&self) -> Vec<LayerBytes> {
        let by_layer = self.choice.dry_run.ledger.at_peak_by_layer();
        by_layer
            .into_iter()
            .map(|(layer, tags)| LayerBytes { layer, by_tag: tags.iter().collect() })
            .collect()
    }

    /// The document of `plan --json`.
    pub fn to_json(&self) -> Value {
        let time = &self.choice.time;
        let (phase, layer) = self.peak_place();
        let parameters = self.parameters();
        json!({
            "model": {
                "name": self.spec.name,
                "architecture": self.spec.architecture,
                "parameters": parameters,
                "trainable_parameters": self.trainable_parameters(),
            },
            "config": self.config,
            "optimizer": {
                "name": self.config.training.optimizer(),
                "state_bytes": self.at_peak().get(Tag::Optimizer),
                "state_bytes_per_parameter": self.state_bytes_per_parameter(),
            },
            "fits": self.fits(),
            "memory": {
                "device": {
                    "budget_bytes": self.device_budget,
                    "peak_bytes": self.peak_bytes(),
                    "overhead_bytes": self.overhead_bytes,
                    "at_peak": tags_json(&self.at_peak(), self.choice.dry_run.at_peak().gaps()),
                    "peak_phase": phase,
                    "peak_layer": layer,
                    "layers": self.layers(),
                },
                "host": tier_json(&self.config.memory.host_budget(), self.host_bytes),
                "disk": tier_json(&self.config.memory.disk_budget(), 0),
            },
            "time": {
                "step_seconds": time.step_seconds,
                "tokens_per_second": time.tokens_per_second,
                "flops_per_step": time.flops_per_step,
            },
            "alternatives": self.alternatives,
        })
    }
}

/// Bytes by tag; gaps between allocations, where there are any, under a name of their own.
pub fn tags_json(tags: &TagBytes, gaps: u64) -> Value {
    let mut map: Map<String, Value> = tags.iter().map(|(t, b)| (t.name().to_owned(), b.into())).collect();
    if gaps > 0 {
        map.insert("gaps".to_owned(), gaps.into());
    }
    Value::Object(map)
}

fn tier_json(budget: &Auto<plimsoll_memory::ByteSize>, peak_bytes: u64) -> Value {
    let budget_bytes = match budget {
        Auto::Set(size) => Some(size.0),
        Auto::Auto => None,
    };
    json!({ "budget_bytes": budget_bytes, "peak_bytes": peak_bytes, "overhead_bytes": 0, "at_peak": {"data": peak_bytes} })
}
