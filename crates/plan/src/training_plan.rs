//! The plan of a training run: every decision, what every byte is for, how long a step takes, and what else could be done.

use std::collections::BTreeMap;

use plimsoll_device::Collective;
use plimsoll_memory::{AtPeak, ByteSize, Phase, Tag, TagBytes};
use plimsoll_model::{ModelSpec, Parameter, WeightSource};
use plimsoll_step::{Ranks, StepError, StepSettings};
use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::advice::{self, Alternative, Refusal};
use crate::config::RawConfig;
use crate::divide::{Divided, Division, divide};
use crate::dry_run::{DryRun, EvaluationPhase};
use crate::evaluating::evaluating;
use crate::expert_slots::ExpertReads;
use crate::limits::{Limits, PipelineBytes, load_line};
use crate::load_line::{LoadLine, ProcessLimits};
use crate::origin::ModelOrigin;
use crate::ranks::{RankGroup, rank_groups};
use crate::resolve::{Choice, check_model, choose, resolved_config};
use crate::run_needs::{DiskNeeds, Past, RunNeeds, SavedBytes, ValidationNeeds, Written, steps_in};
use crate::runs::DryRuns;
use crate::search::{Found, SearchReport, searched};
use crate::shortage::{Resource, Shortage};
use crate::time::Rates;
use crate::timeline::Timeline;

/// What the plan is made for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Machine {
    /// How fast it is.
    pub rates: Rates,
    /// What sets an end to this process.
    pub limits: ProcessLimits,
    /// What lies outside the arena (program, threads, packing buffers, tokenizer), in bytes, as measured.
    pub overhead_bytes: u64,
    /// Host memory that the data pipeline will hold for a micro-batch of one token, in bytes.
    pub host_bytes_per_token: u64,
    /// Host memory that each of its threads will take beside the batches, in bytes.
    pub worker_bytes: u64,
    /// What is free on the disk of the spill file, in bytes; `None` where nobody knows.
    pub disk_available: Option<u64>,
    /// What of that the checkpoints and the model of the run will take, in bytes; 0 where they go to another disk.
    pub disk_reserved: u64,
    /// Memory of the device, in bytes, where it has memory of its own.
    pub device_bytes: Option<u64>,
    /// Host memory that is a rank's, in bytes, where that is not the device's.
    pub host_bytes: Option<u64>,
}

impl Machine {
    /// What a thread of the data pipeline takes on any machine: its stack.
    pub const WORKER_BYTES: u64 = 256 << 10;

    /// Bytes of the disk that a spill file may have; as many as there can be where nobody knows.
    pub fn disk_room(&self) -> u64 {
        self.disk_available.map_or(u64::MAX, |free| free.saturating_sub(self.disk_reserved))
    }
}

/// A plan.
#[derive(Clone, Debug)]
pub struct TrainingPlan {
    /// The model.
    pub spec: ModelSpec,
    /// The configuration with every `auto` decided; it can be run again.
    pub config: RawConfig,
    /// The configuration that was asked for.
    pub asked: RawConfig,
    /// The step and its dry run.
    pub choice: Choice,
    /// The load line: what the device's arena and the overhead may take, and the host tier too, where that has no budget of
    /// its own.
    pub load_line: LoadLine,
    /// What lies outside the arena, in bytes.
    pub overhead_bytes: u64,
    /// The limits that the plan keeps to.
    pub limits: Limits,
    /// The machine that the plan is made for.
    pub machine: Machine,
    /// Other settings that need less memory or, where the plan does not fit, settings that fit. None of a plan that fits and was made
    /// [in brief](Self::in_brief).
    pub alternatives: Vec<Alternative>,
    /// What the run writes.
    pub saved: SavedBytes,
    /// What it would take to fit, where the plan does not.
    pub refusal: Option<Refusal>,
    /// What each of several ranks takes, as the first one knows it.
    pub ranks: Vec<RankGroup>,
    /// How the ranks were divided, where that was left to the planner.
    pub division: Option<Division>,
    /// What was searched for it, where a goal or a class of quality was named.
    pub search: Option<SearchReport>,
    /// Whether it is a rung that a run climbs to and does not begin on: a larger micro-batch than the plan's.
    pub is_above: bool,
}

/// Bytes by kind at the peak.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LayerBytes {
    /// The layer; `None` for what belongs to no layer.
    pub layer: Option<u32>,
    /// Bytes by tag.
    pub by_tag: BTreeMap<Tag, u64>,
}

/// When ways to need less memory are looked for.
#[derive(Clone, Copy, PartialEq)]
enum Alternatives {
    Always,
    WhereNothingFits,
}

impl TrainingPlan {
    /// Makes the plan for a model that is known by its shape alone.
    pub fn new(config: &RawConfig, spec: &ModelSpec, machine: &Machine) -> Result<TrainingPlan, StepError> {
        TrainingPlan::with(config, spec, None, machine, Alternatives::Always)
    }

    /// Makes the plan for a model, whose files say how frozen weights are stored.
    pub fn for_model(
        config: &RawConfig,
        origin: &ModelOrigin,
        machine: &Machine,
    ) -> Result<TrainingPlan, StepError> {
        TrainingPlan::with(config, origin.spec(), origin.weights(), machine, Alternatives::Always)
    }

    /// The same in less time: where it fits, [`alternatives`](Self::alternatives) are not looked for.
    ///
    /// # Errors
    /// As of [`for_model`](Self::for_model).
    pub fn in_brief(
        config: &RawConfig,
        origin: &ModelOrigin,
        machine: &Machine,
    ) -> Result<TrainingPlan, StepError> {
        TrainingPlan::with(config, origin.spec(), origin.weights(), machine, Alternatives::WhereNothingFits)
    }

    fn with(
        config: &RawConfig,
        spec: &ModelSpec,
        stored: Option<&WeightSource>,
        machine: &Machine,
        wanted: Alternatives,
    ) -> Result<TrainingPlan, StepError> {
        check_model(config, spec)?;
        let asked = config;
        if config.planning != Default::default() {
            let Found { config: best, report } = searched(config, spec, stored, machine)?;
            // Where nothing fits, it is said why as without a search.
            let mut config = best.unwrap_or_else(|| config.clone());
            config.planning = Default::default();
            let plan = TrainingPlan::with(&config, spec, stored, machine, wanted)?;
            return Ok(TrainingPlan { asked: asked.clone(), search: Some(report), ..plan });
        }
        let load_line = load_line(config, machine);
        let limits = Limits::of(config, machine);
        let Decided { config, runs, choice, division } = decided(config, spec, stored, machine)?;
        let config = &config;
        let resolved = resolved_config(config, &choice);
        let (alternatives, refusal) = match limits.allow(&choice) {
            true if wanted == Alternatives::WhereNothingFits => (Vec::new(), None),
            true => (advice::alternatives(&resolved, &runs, stored, machine, &choice), None),
            false => {
                let tried = advice::alternatives(config, &runs, stored, machine, &choice);
                let refusal = Refusal::new(config, &runs, stored, machine, &choice, &tried);
                (tried, Some(refusal))
            }
        };
        // Where it fits, each rank takes what its own stage needs.
        let choice = if refusal.is_none() { choice.of_own_stage(spec, &machine.rates)? } else { choice };
        let choice = evaluating(asked, spec, choice, &machine.rates, limits)?;
        let resolved = resolved_config(&resolved, &choice);
        Ok(TrainingPlan {
            saved: SavedBytes::of(spec, &choice.settings)?,
            spec: spec.clone(),
            config: resolved,
            asked: asked.clone(),
            load_line,
            overhead_bytes: machine.overhead_bytes,
            limits,
            machine: *machine,
            ranks: if config.rank == 0 {
                rank_groups(spec, &choice, machine.rates.wiring.device)?
            } else {
                Vec::new()
            },
            choice,
            alternatives,
            refusal,
            division,
            search: None,
            is_above: false,
        })
    }

    /// Every allocation of the step, on every tier, with its birth and death.
    pub fn timeline(&self) -> Result<Timeline, StepError> {
        let Choice { settings, accumulation, .. } = &self.choice;
        let rates = &self.machine.rates;
        Ok(Timeline::of(self, &DryRun::timeline(&self.spec, settings, *accumulation, rates)?))
    }

    /// The layers that the rank has which the plan is for.
    pub fn own_layers(&self) -> Vec<u32> {
        let ranks = Ranks { rank: self.choice.rank, ..self.choice.settings.ranks };
        StepSettings { ranks, ..self.choice.settings.clone() }.of_stage(&self.spec).0.layers().collect()
    }

    /// Bytes of arena.
    pub fn peak_bytes(&self) -> u64 {
        self.choice.peak_bytes()
    }

    /// Bytes of the data pipeline.
    pub fn pipeline_bytes(&self) -> u64 {
        self.pipeline().bytes()
    }

    /// What the data pipeline takes on the host, by what for.
    pub fn pipeline(&self) -> PipelineBytes {
        self.limits.pipeline(&self.choice)
    }

    /// Bytes of the arena in a step, and what the evaluation of a batch takes between steps, where there is one. The plan's peak is the
    /// larger.
    ///
    /// # Errors
    /// The step cannot be run.
    pub fn phases(&self) -> Result<(u64, Option<EvaluationPhase>), StepError> {
        if !self.validates() {
            return Ok((self.peak_bytes(), None));
        }
        let Choice { settings, accumulation, .. } = &self.choice;
        let rates = &self.machine.rates;
        let alone = StepSettings { evaluation_batch_size: Some(0), ..settings.clone() };
        let step = DryRun::timed_training(&self.spec, &alone, *accumulation, rates)?.peak_bytes();
        Ok((step, Some(DryRun::evaluation_phase(&self.spec, settings, rates)?)))
    }

    /// Whether the run is validated.
    pub fn validates(&self) -> bool {
        self.choice.settings.evaluated() > 0
    }

    /// How often a run of `steps` steps is validated, on `sequences` sequences, and how long that takes.
    ///
    /// # Errors
    /// The evaluation cannot be run.
    pub fn validation(&self, steps: u64, sequences: u64) -> Result<ValidationNeeds, StepError> {
        let settings = &self.choice.settings;
        let phase = DryRun::evaluation_phase(&self.spec, settings, &self.machine.rates)?;
        let mesh = settings.ranks.mesh;
        // Ranks take batches in turn, but for those that share sequences or have different experts. The last batch may be a part of one.
        let at_once = u64::from(mesh.data / mesh.expert.max(1)).max(1);
        let rounds = sequences.div_ceil(at_once) as f64 / settings.evaluated().max(1) as f64;
        let times = match self.config.output.eval_steps() {
            0 => 1,
            // And at the end.
            every => steps.div_ceil(every),
        };
        Ok(ValidationNeeds { times, seconds: times as f64 * rounds * phase.seconds })
    }

    /// Bytes of host memory: the tier below the device, and the data pipeline.
    pub fn host_bytes(&self) -> u64 {
        self.limits.host_tier(&self.choice)
    }

    /// Bytes of disk.
    pub fn disk_bytes(&self) -> u64 {
        self.choice.dry_run.disk_bytes()
    }

    /// Bytes of memory that the process takes in all.
    pub fn process_bytes(&self) -> u64 {
        self.limits.memory(&self.choice).saturating_add(self.overhead_bytes)
    }

    /// Whether it keeps to every budget.
    pub fn fits(&self) -> bool {
        self.limits.allow(&self.choice)
    }

    /// The bytes that the load line is held against.
    pub fn bytes_under_the_line(&self) -> u64 {
        match self.limits.host_bytes {
            None => self.process_bytes(),
            Some(_) => self.peak_bytes().saturating_add(self.overhead_bytes),
        }
    }

    /// The time of a whole run, and the disk that it fills. `steps` is the run's length, where that is known better than the
    /// configuration says it.
    pub fn run_needs(&self, steps: Option<u64>) -> RunNeeds {
        let steps = steps.or_else(|| steps_in(&self.config));
        let written = Written::new(&self.config.output, self.saved, steps, Past::default());
        written.needs(steps, self.choice.time.step_seconds)
    }

    /// What a run of `steps` steps in all has still to write to the disk of its output folder, at the moment when it is most.
    pub fn still_to_write(&self, steps: u64, past: Past) -> DiskNeeds {
        Written::new(&self.config.output, self.saved, Some(steps), past).most()
    }

    /// What there is too little of.
    pub fn shortages(&self) -> Vec<Shortage> {
        let mut all: Vec<Shortage> = self.limits.shortages(&self.choice).collect();
        // Whoever goes over the line goes over what encloses it as well.
        let over = |resource| all.iter().any(|shortage| shortage.resource == resource);
        let (line, process) = (over(Resource::Memory) || over(Resource::Host), over(Resource::Process));
        all.retain(|shortage| match shortage.resource {
            Resource::Process => !line,
            Resource::AddressSpace => !line && !process,
            Resource::Memory | Resource::Arena | Resource::Host | Resource::Disk => true,
        });
        all
    }

    /// Why the plan does not fit, each reason in a sentence of its own; none if it fits.
    pub fn misfits(&self) -> Vec<String> {
        self.shortages().iter().map(|shortage| self.sentence(shortage)).collect()
    }

    /// A shortage in words: what is needed, what there is and who says so, and the difference.
    pub fn sentence(&self, shortage: &Shortage) -> String {
        let Shortage { resource, needed_bytes, allowed_bytes } = *shortage;
        let [needed, allowed] = [needed_bytes, allowed_bytes].map(ByteSize);
        let [in_all, of_all] =
            [needed_bytes, allowed_bytes].map(|bytes| ByteSize(bytes.saturating_add(self.overhead_bytes)));
        let short = ByteSize(shortage.bytes());
        match resource {
            Resource::Memory => {
                let LoadLine { bytes, by } = self.load_line;
                // The overhead alone may be over a line.
                let short = ByteSize(in_all.0.saturating_sub(bytes));
                let line = ByteSize(bytes);
                format!("the plan needs {in_all} of memory and the load line is {line} ({by}): {short} short")
            }
            Resource::Arena => format!(
                "the step needs {needed} of the arena in the lightest form of checkpointing and training.gradient_checkpointing says {{auto: {allowed}}}: {short} short"
            ),
            Resource::Host => {
                let said = self.config.memory.host_budget().set().is_some();
                let there = if said { "memory.host_budget is" } else { "a rank's host memory is" };
                format!("the plan needs {needed} on the host and {there} {allowed}: {short} short")
            }
            Resource::Process => {
                let by = self.machine.limits.enforced().map_or(self.load_line.by, |line| line.by);
                format!("device and host tier together need {in_all} and {by} leaves {of_all}: {short} short")
            }
            Resource::AddressSpace => format!(
                "the plan needs {needed} of address space, with that for reading its checkpoints, and ulimit -v leaves {allowed}: {short} short; raise it"
            ),
            Resource::Disk => {
                let folder = self.config.disk_path();
                let said = self.config.memory.disk_budget().set().is_some_and(|b| b.0 == allowed_bytes);
                let there = match said {
                    true => format!("memory.disk_budget is {allowed}: {short} short"),
                    false => {
                        let kept = match self.machine.disk_reserved {
                            0 => String::new(),
                            bytes => format!(
                                " beside {} for the checkpoints and the model of the run",
                                ByteSize(bytes)
                            ),
                        };
                        format!(
                            "{allowed} are free there{kept}: {short} short; free some, or set memory.disk_path to a folder of another disk"
                        )
                    }
                };
                format!("the plan needs {needed} of disk in {} and {there}", folder.display())
            }
        }
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

    /// Bytes of optimizer states of all ranks together; master weights are not among them.
    pub(crate) fn state_bytes_whole(&self) -> u64 {
        let masters = match self.choice.settings.precision.master_weights {
            true => self.trainable_parameters().saturating_mul(4),
            false => 0,
        };
        self.saved.checkpoint.saturating_sub(self.saved.model).saturating_sub(masters)
    }

    /// Bytes of optimizer states, on whatever tier.
    fn state_bytes(&self) -> u64 {
        let DryRun { ledger, host, disk, .. } = &self.choice.dry_run;
        [ledger, host, disk].into_iter().map(|ledger| ledger.at_peak().by_tag.get(Tag::Optimizer)).sum()
    }

    /// Bytes of optimizer states, which live all the time, for each parameter that is trained; master weights are not among them.
    pub fn state_bytes_per_parameter(&self) -> f64 {
        // Of several ranks none has all.
        let bytes = match self.choice.settings.ranks.count() {
            1 => self.state_bytes(),
            _ => self.state_bytes_whole(),
        };
        bytes as f64 / self.trainable_parameters().max(1) as f64
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

    /// What the data pipeline costs, and why.
    fn pipeline_json(&self) -> Value {
        let (data, bytes) = (&self.config.data, self.pipeline());
        json!({
            "num_workers": data.workers(),
            "prefetch_factor": data.prefetch_factor(),
            "persistent_workers": data.persistent_workers(),
            "batches_ahead": data.batches_ahead(),
            "batch_bytes": self.choice.settings.batch_size
                * self.choice.settings.sequence_length
                * self.choice.settings.host_bytes_per_token(),
            "ahead_bytes": bytes.ahead,
            "step_bytes": bytes.step,
            "evaluation_bytes": bytes.evaluation,
            "worker_bytes": bytes.workers,
            "bytes": bytes.bytes(),
            "buffer_bytes_while_reading": self.limits.reading_bytes,
        })
    }

    fn disk_json(&self) -> Value {
        let budget = self.config.memory.disk_budget().set().map(|size| size.0);
        let mut disk = tier_json(budget, self.disk_bytes(), self.choice.dry_run.disk.at_peak(), 0);
        if let Value::Object(map) = &mut disk {
            map.insert("available_bytes".to_owned(), json!(self.machine.disk_available));
            if self.machine.disk_reserved > 0 {
                map.insert("reserved_bytes".to_owned(), json!(self.machine.disk_reserved));
            }
            map.insert("path".to_owned(), json!(self.config.disk_path()));
        }
        disk
    }

    /// What a step reads of experts that come by themselves; `None` where they do not.
    pub fn expert_reads(&self) -> Option<ExpertReads> {
        ExpertReads::of(&self.spec, &self.choice)
    }

    /// The document of `plan --json`.
    pub fn to_json(&self) -> Value {
        let time = &self.choice.time;
        let (phase, layer) = self.peak_place();
        let parameters = self.parameters();
        let mut document = json!({
            "model": {
                "name": self.spec.name,
                "architecture": self.spec.architecture,
                "parameters": parameters,
                "trainable_parameters": self.trainable_parameters(),
            },
            "config": self.config,
            "optimizer": {
                "name": self.config.training.optimizer(),
                "state_bytes": self.state_bytes(),
                "state_bytes_per_parameter": self.state_bytes_per_parameter(),
            },
            "fits": self.fits(),
            "memory": {
                "device": {
                    "budget_bytes": self.load_line.bytes,
                    "limited_by": self.load_line.by,
                    "peak_bytes": self.peak_bytes(),
                    "overhead_bytes": self.overhead_bytes,
                    "at_peak": tags_json(&self.at_peak(), self.choice.dry_run.at_peak().gaps()),
                    "peak_phase": phase,
                    "peak_layer": layer,
                    "layers": self.layers(),
                },
                "host": tier_json(
                    self.limits.host_bytes,
                    self.host_bytes(),
                    self.choice.dry_run.host.at_peak(),
                    self.pipeline_bytes(),
                ),
                "disk": self.disk_json(),
            },
            "time": {
                "step_seconds": time.step_seconds,
                "disk_seconds": time.disk_seconds,
                "waiting_seconds": time.waiting_seconds,
                "tokens_per_second": time.tokens_per_second,
                "flops_per_step": time.flops_per_step,
            },
            "pipeline": self.pipeline_json(),
            "run": self.run_needs(None),
            "alternatives": self.alternatives,
            "shortages": self.shortages(),
            "refusal": self.refusal,
        });
        let moved = self.choice.dry_run.moved;
        if moved.read + moved.written > 0 {
            document["io"] = json!({ "bytes_read": moved.read, "bytes_written": moved.written });
        }
        if let Some(reads) = self.expert_reads() {
            document["memory"]["experts"] = json!(reads);
        }
        if self.spec.experts.is_some() {
            document["model"]["active_parameters"] = self.spec.active_parameter_count().into();
        }
        if let (Value::Object(map), Ok((step, Some(evaluation)))) = (&mut document, self.phases()) {
            let phases = json!({
                "step_peak_bytes": step,
                "evaluation_peak_bytes": evaluation.peak_bytes,
                "evaluation_seconds": evaluation.seconds,
                "evaluation_batch_size": self.choice.settings.evaluated(),
            });
            map.insert("phases".to_owned(), phases);
        }
        if let (Value::Object(map), Some(division)) = (&mut document, &self.division) {
            map.insert("search".to_owned(), division.to_json());
        }
        if let (Value::Object(map), Some(search)) = (&mut document, &self.search) {
            map.insert("search".to_owned(), search.to_json());
            map.insert("pareto".to_owned(), json!(search.front));
        }
        if let (Value::Object(map), false) = (&mut document, self.ranks.is_empty()) {
            map.insert("ranks".to_owned(), self.ranks_json());
            map.insert("communication".to_owned(), self.communication_json());
        }
        document
    }

    /// The rank that takes most of the device.
    pub fn largest_rank(&self) -> Option<&RankGroup> {
        // Of several, the first.
        self.ranks.iter().rev().max_by_key(|group| group.device_peak_bytes)
    }

    fn ranks_json(&self) -> Value {
        let largest = self.largest_rank().map(|group| {
            json!({
                "rank": group.ranks.first(),
                "device": { "peak_bytes": group.device_peak_bytes },
                "host": { "peak_bytes": group.host_peak_bytes },
                "disk": { "peak_bytes": group.disk_bytes },
            })
        });
        json!({
            "world_size": self.choice.settings.ranks.count(),
            "largest": largest,
            "groups": self.ranks,
        })
    }

    /// What the rank that the plan is for sends in a step.
    fn communication_json(&self) -> Value {
        let sent = self.choice.dry_run.moved.sent;
        let of = |number: &dyn Fn(Collective) -> u64| -> Map<String, Value> {
            let used = Collective::ALL.into_iter().filter(|within| sent.messages(*within) > 0);
            used.map(|within| (within.name().to_owned(), number(within).into())).collect()
        };
        json!({
            "bytes_per_step": of(&|within| sent.bytes(within)),
            "calls": of(&|within| sent.messages(within)),
            "bytes_between_machines": sent.between_machines(),
        })
    }
}

/// The step that is chosen for a configuration, and how its ranks are divided: the search without what comes after it.
pub(crate) fn decided<'a>(
    config: &RawConfig,
    spec: &'a ModelSpec,
    stored: Option<&WeightSource>,
    machine: &'a Machine,
) -> Result<Decided<'a>, StepError> {
    if config.parallel.has_open_ways() || config.parallel.has_open_stage() {
        let Divided { config, runs, choice, division } = divide(config, spec, stored, machine)?;
        return Ok(Decided { config, runs, choice, division: Some(division) });
    }
    let runs = DryRuns::new(spec, &machine.rates);
    let method = runs.method(config, stored)?;
    let choice = choose(config, &method, &runs, Limits::of(config, machine))?;
    Ok(Decided { config: config.clone(), runs, choice, division: None })
}

/// A configuration with its ranks divided, and the step that was chosen for it.
pub(crate) struct Decided<'a> {
    pub config: RawConfig,
    runs: DryRuns<'a>,
    pub choice: Choice,
    division: Option<Division>,
}

/// A tier below the device; `data` bytes of it are the pipeline's.
fn tier_json(budget: Option<u64>, peak_bytes: u64, at_peak: &AtPeak, data: u64) -> Value {
    let mut by_tag = tags_json(&at_peak.by_tag, at_peak.gaps());
    if let (Value::Object(map), true) = (&mut by_tag, data > 0) {
        map.insert(Tag::Data.name().to_owned(), data.into());
    }
    json!({ "budget_bytes": budget, "peak_bytes": peak_bytes, "overhead_bytes": 0, "at_peak": by_tag })
}

/// Bytes by tag; gaps between allocations, where there are any, under a name of their own.
pub fn tags_json(tags: &TagBytes, gaps: u64) -> Value {
    let mut map: Map<String, Value> = tags.iter().map(|(t, b)| (t.name().to_owned(), b.into())).collect();
    if gaps > 0 {
        map.insert("gaps".to_owned(), gaps.into());
    }
    Value::Object(map)
}
