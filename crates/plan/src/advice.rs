//! What else could be done: changes of a configuration, each planned as it would be if it were made.
//!
//! A change that is said to fit does: what is said of it comes from the search that the planner makes with it.

use plimsoll_model::WeightSource;
use plimsoll_step::{AttentionKind, Compression};
use serde::Serialize;

use crate::config::{Auto, Method, OffloadTarget, Optimizer, RawConfig};
use crate::limits::Limits;
use crate::offload::TensorKind;
use crate::resolve::{Choice, lightest_of};
use crate::runs::DryRuns;
use crate::shortage::{Resource, Shortage};
use crate::training_plan::Machine;
use crate::waterfall::difference;

/// Tokens of a chunk of a sequence that is visited in chunks, at least: enough for thick products.
const CHUNK: u64 = 2048;
/// Chunks of a sequence at most: a plan takes every pair of them.
const CHUNKS: u64 = 32;

/// Pairs of changes that are tried at most.
const PAIRS: usize = 12;
/// Pairs that fit, from which on no others are tried.
const ENOUGH_PAIRS: usize = 3;
/// Logits of fewer tokens at once save next to nothing.
const LEAST_LOSS_CHUNK: u64 = 16;

/// How much a change alters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Extent {
    /// One thing, which may take several keys to say.
    Single,
    /// Several single changes at once.
    Bundle,
    /// Another way to train.
    Method,
}

/// A change, and the lightest step that it would give.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Alternative {
    /// What is changed, in words.
    pub what: String,
    /// How much that is.
    pub extent: Extent,
    /// The assignments that make it, as `--set` takes them.
    pub change: Vec<String>,
    /// Bytes of memory under the load line that it takes less than the plan does; negative where it takes more.
    pub bytes_saved: i64,
    /// How much longer a token takes than in the plan, as a share of that.
    pub slower: f64,
    /// Bytes of arena.
    pub peak_bytes: u64,
    /// Bytes of the host tier with the data pipeline.
    pub host_bytes: u64,
    /// Bytes of disk.
    pub disk_bytes: u64,
    /// Time of an optimizer step.
    pub step_seconds: f64,
    /// Tokens over that time.
    pub tokens_per_second: f64,
    /// Whether it fits the budgets.
    pub fits: bool,
    /// What there would still be too little of.
    pub shortages: Vec<Shortage>,
}

/// What a plan that does not fit would take.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Refusal {
    /// The disk with which it would fit as it is, where only that is short.
    pub with_more_disk: Option<MemoryAndDisk>,
    /// The least that the model takes by each method, where no change that was tried would fit.
    pub least: Vec<LeastNeed>,
}

/// Memory beside the overhead, and disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct MemoryAndDisk {
    /// Bytes of memory beside the overhead.
    pub memory_bytes: u64,
    /// Bytes of disk.
    pub disk_bytes: u64,
}

/// The least memory that a method takes.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LeastNeed {
    /// The method.
    pub method: Method,
    /// The assignments that lead there, as `--set` takes them.
    pub change: Vec<String>,
    /// With as much disk as it wants.
    pub with_disk: MemoryAndDisk,
    /// Without any.
    pub without_disk: MemoryAndDisk,
}

/// What is asked of a planner.
struct Question<'a> {
    config: &'a RawConfig,
    runs: &'a DryRuns<'a>,
    stored: Option<&'a WeightSource>,
    machine: &'a Machine,
}

/// A change of a configuration.
#[derive(Clone, Debug, PartialEq)]
struct Change {
    what: String,
    extent: Extent,
    sets: Vec<String>,
}

/// Ways to need less memory than `choice` or, where that does not fit, ways to fit.
pub(crate) fn alternatives(
    config: &RawConfig,
    runs: &DryRuns<'_>,
    stored: Option<&WeightSource>,
    machine: &Machine,
    choice: &Choice,
) -> Vec<Alternative> {
    let question = Question { config, runs, stored, machine };
    let limits = Limits::of(config, machine);
    let fits = limits.allow(choice);
    let (bundles, others): (Vec<Change>, Vec<Change>) = question
        .changes(choice, fits)
        .into_iter()
        .partition(|change| !fits && change.extent == Extent::Bundle);
    let runs = question.runs;
    let tried = |changes: &[Change]| runs.each(changes, |change| question.alternative(change, choice, fits));
    let mut list: Vec<Alternative> = tried(&others).into_iter().flatten().collect();
    // Several changes at once are for when none by itself is enough.
    let enough = |list: &[Alternative]| list.iter().any(|other| other.fits);
    if !fits && !list.iter().any(|other| other.fits && other.extent == Extent::Single) {
        let pairs = question.pairs(choice, &list);
        list.extend(pairs);
    }
    for some in bundles.chunks(runs.threads()) {
        if enough(&list) {
            break;
        }
        for other in tried(some).into_iter().flatten() {
            if !enough(&list) {
                list.push(other);
            }
        }
    }
    // Those that fit first, the fastest of them first.
    list.sort_by(|a, b| b.fits.cmp(&a.fits).then(b.tokens_per_second.total_cmp(&a.tokens_per_second)));
    list
}

impl Refusal {
    /// For a configuration of which nothing fits; `tried` is what else was.
    pub(crate) fn new(
        config: &RawConfig,
        runs: &DryRuns<'_>,
        stored: Option<&WeightSource>,
        machine: &Machine,
        choice: &Choice,
        tried: &[Alternative],
    ) -> Refusal {
        let question = Question { config, runs, stored, machine };
        let limits = Limits::of(config, machine);
        let any_disk = Limits { disk_bytes: u64::MAX, ..limits };
        let found = question.lightest(config, any_disk).filter(|found| any_disk.allow(found));
        let need = |found: &Choice| MemoryAndDisk {
            memory_bytes: limits.memory(found),
            disk_bytes: found.dry_run.disk_bytes(),
        };
        let none_fits = tried.iter().all(|other| !other.fits);
        let lightest = if none_fits { question.lightest_changes(choice) } else { Vec::new() };
        let least = runs.each(&lightest, |change| {
            let other = question.with(change)?;
            // With no room at all the nearest is the smallest.
            let nothing = Limits { room_bytes: 0, host_bytes: None, disk_bytes: u64::MAX, ..limits };
            let with_disk = need(&question.lightest(&other, nothing)?);
            let without_disk = need(&question.lightest(&other, Limits { disk_bytes: 0, ..nothing })?);
            let (method, change) = (other.training.method(), change.clone());
            Some(LeastNeed { method, change, with_disk, without_disk })
        });
        Refusal { with_more_disk: found.as_ref().map(need), least: least.into_iter().flatten().collect() }
    }
}

impl Question<'_> {
    /// The configuration with a change; `None` where that cannot be.
    fn with(&self, sets: &[String]) -> Option<RawConfig> {
        let mut config = self.config.clone();
        for set in sets {
            config.apply_set(set).ok()?;
        }
        (config.validate().is_ok() || self.config.validate().is_err()).then_some(config)
    }

    /// The lightest step of a configuration that fits, or the nearest; `None` where the model cannot be trained so.
    fn lightest(&self, config: &RawConfig, limits: Limits) -> Option<Choice> {
        let method = self.runs.method(config, self.stored).ok()?;
        let runs = &self.runs.one_at_a_time();
        lightest_of(&config.divisions().ok()?, &method, runs, limits).ok()
    }

    /// What a change leads to; `None` where it helps nothing.
    fn alternative(&self, change: &Change, choice: &Choice, fits: bool) -> Option<Alternative> {
        let other = self.with(&change.sets)?;
        let limits = Limits::of(&other, self.machine);
        let found = self.lightest(&other, limits)?;
        let shortages: Vec<Shortage> = limits.shortages(&found).collect();
        let lighter = found.peak_bytes() < choice.peak_bytes();
        let helps = lighter || (!fits && shortages.is_empty());
        let what = match other.parallel.has_open_stage() {
            true => format!("{}, in stage {}", change.what, found.settings.sharding.stage.number()),
            false => change.what.clone(),
        };
        helps.then(|| Alternative {
            what,
            extent: change.extent,
            change: change.sets.clone(),
            bytes_saved: difference(limits.spared(choice), limits.spared(&found)),
            slower: choice.time.tokens_per_second / found.time.tokens_per_second - 1.0,
            peak_bytes: found.peak_bytes(),
            host_bytes: limits.host_tier(&found),
            disk_bytes: found.dry_run.disk_bytes(),
            step_seconds: found.time.step_seconds,
            tokens_per_second: found.time.tokens_per_second,
            fits: shortages.is_empty(),
            shortages,
        })
    }

    /// Pairs of changes that fit, where none does by itself: first those whose savings add up to what is missing, the fastest of them
    /// first.
    fn pairs(&self, choice: &Choice, tried: &[Alternative]) -> Vec<Alternative> {
        let limits = Limits::of(self.config, self.machine);
        let missing: u64 = limits.shortages(choice).map(|shortage| shortage.bytes()).max().unwrap_or(0);
        let singles: Vec<&Alternative> =
            tried.iter().filter(|other| other.extent == Extent::Single && other.bytes_saved > 0).collect();
        let mut pairs: Vec<(bool, f64, Change)> = Vec::new();
        for (place, one) in singles.iter().enumerate() {
            for other in singles.iter().skip(place + 1).filter(|other| go_together(one, other)) {
                let saved = one.bytes_saved.saturating_add(other.bytes_saved).unsigned_abs();
                let changes = [one, other].map(|own| single(&own.what, own.change.clone()));
                let pair = bundle(&[&changes]).map(|pair| (saved < missing, one.slower + other.slower, pair));
                pairs.extend(pair);
            }
        }
        pairs.sort_by(|a, b| a.0.cmp(&b.0).then(a.1.total_cmp(&b.1)));
        pairs.truncate(PAIRS);
        let mut fitting: Vec<Alternative> = Vec::new();
        for some in pairs.chunks(self.runs.threads()) {
            if fitting.len() >= ENOUGH_PAIRS {
                break;
            }
            let found = self.runs.each(some, |(.., pair)| self.alternative(pair, choice, false));
            fitting.extend(found.into_iter().flatten().filter(|other| other.fits));
        }
        fitting
    }

    /// The changes that are worth a try.
    fn changes(&self, choice: &Choice, fits: bool) -> Vec<Change> {
        // What the user's keys say already changes nothing.
        let news = |mut changes: Vec<Change>| {
            changes.retain(|change| self.with(&change.sets).is_none_or(|other| other != *self.config));
            changes
        };
        let lossless = news([self.checkpointing(), self.batch(choice)].into_iter().flatten().collect());
        let places = news(self.places(fits));
        let waiting = news(self.waiting(choice).into_iter().collect());
        let narrow = news(vec![self.narrow()]);
        let smaller = news(self.smaller(choice));
        let shorter = news(self.shorter().into_iter().collect());
        let chunks = news(self.chunks(choice).into_iter().collect());
        let shares = if fits { Vec::new() } else { self.shares(choice).into_iter().collect() };
        let budgets = if fits { Vec::new() } else { self.budgets(choice) };
        let mut list =
            [&budgets[..], &shares, &lossless, &smaller, &places, &waiting, &narrow, &shorter, &chunks]
                .concat();
        let mut bundles = vec![
            bundle(&[&lossless]),
            bundle(&[&places]),
            bundle(&[&lossless, &places]),
            bundle(&[&lossless, &narrow]),
            bundle(&[&lossless, &places, &narrow]),
            bundle(&[&lossless, &places, &narrow, &shorter]),
        ];
        if !shares.is_empty() {
            bundles.extend([bundle(&[&shares, &lossless]), bundle(&[&shares, &lossless, &narrow])]);
        }
        if !chunks.is_empty() {
            bundles.extend([bundle(&[&places, &chunks]), bundle(&[&places, &narrow, &chunks])]);
        }
        let methods = if fits { Vec::new() } else { self.methods() };
        for method in &methods {
            list.push(method.clone());
            bundles.push(bundle(&[std::slice::from_ref(method), &lossless, &places]));
        }
        for bundle in bundles.into_iter().flatten() {
            if list.iter().all(|other| other.sets != bundle.sets) {
                list.push(bundle);
            }
        }
        list
    }

    /// Ranks that hold the same share it, where the user says nothing of that.
    fn shares(&self, choice: &Choice) -> Option<Change> {
        let parallel = &self.config.parallel;
        let says = parallel.zero_stage.is_some() || parallel.sharding_strategy.is_some();
        let several = choice.settings.ranks.mesh.replicas() > 1;
        (several && !says)
            .then(|| single("ranks that share (ZeRO)", vec![set("parallel.zero_stage", "auto")]))
    }

    /// One buffer for each kind of tensor that comes and goes, where there are more of them and not the planner decides that.
    fn waiting(&self, choice: &Choice) -> Option<Change> {
        let offload = choice.settings.offload;
        let said = self.config.memory.prefetch().set().is_some();
        (said && offload.prefetch && !offload.is_none())
            .then(|| single("no prefetching", vec![set("memory.prefetch", "false")]))
    }

    /// Nothing kept for the backward pass but the inputs of layers, where the user keeps more.
    fn checkpointing(&self) -> Option<Change> {
        self.config.training.gradient_checkpointing().set()?;
        Some(single("checkpointing of all layers", vec![set("training.gradient_checkpointing", "full")]))
    }

    /// One sequence at a time, where the user takes several.
    fn batch(&self, choice: &Choice) -> Option<Change> {
        let training = &self.config.training;
        let said = training.batch_size().set().is_some()
            || training.gradient_accumulation_steps().set().is_some()
                && training.effective_batch_size.is_some();
        let sets = one_at_a_time(choice);
        (said && choice.settings.batch_size > 1).then(|| single("one sequence at a time", sets))
    }

    /// Other places for tensors: the disk or, where it does not fit, wherever there is room.
    fn places(&self, fits: bool) -> Vec<Change> {
        let place = |kind: TensorKind| {
            let Auto::Set(target) = kind.said(&self.config.memory.offload) else { return None };
            let name = kind.name();
            let key = format!("memory.offload.{name}");
            if !fits {
                let sets = vec![set(&key, "auto"), set(&format!("memory.kept_layers.{name}"), "auto")];
                return Some(single(&format!("{} wherever there is room", kind.words()), sets));
            }
            let sets = vec![set(&key, "disk")];
            (target == OffloadTarget::Device).then(|| single(&format!("{} on disk", kind.words()), sets))
        };
        TensorKind::IN_ORDER.into_iter().filter_map(place).collect()
    }

    /// Types of two bytes, without anything of four behind them.
    fn narrow(&self) -> Change {
        match self.config.training.method() {
            Method::Full => single("bf16 without master weights", narrow_sets()),
            Method::Lora | Method::Qlora => single("bf16", vec![set("training.mixed_precision", "bf16")]),
        }
    }

    /// Less of one kind of tensor.
    fn smaller(&self, choice: &Choice) -> Vec<Change> {
        let training = &self.config.training;
        let states = match training.optimizer() {
            Optimizer::AdamW | Optimizer::AdamWBf16 => Some(Optimizer::AdamW8bit),
            Optimizer::Lion => Some(Optimizer::Lion8bit),
            _ => None,
        };
        let states = states.map(|optimizer| {
            single("8-bit optimizer states", vec![set("training.optimizer", optimizer.name())])
        });
        let scores = training.attention().set().filter(|attention| attention.0 == AttentionKind::Standard);
        let scores = scores.map(|_| single("flash attention", vec![set("training.attention", "flash")]));
        let is_plain = training.activation_compression().0 == Compression::None;
        let int8 = vec![set("training.activation_compression", "int8")];
        let compressed = is_plain.then(|| single("saved activations in 8 bits", int8));
        let quarter = choice.settings.loss_chunk_tokens / 4;
        let logits = (quarter >= LEAST_LOSS_CHUNK).then(|| {
            // Products stay on whole tiles.
            let chunk = 1u64 << quarter.ilog2();
            let sets = vec![set("training.loss_chunk_tokens", &chunk.to_string())];
            single(&format!("logits of {chunk} tokens at once"), sets)
        });
        [scores, states, compressed, logits].into_iter().flatten().collect()
    }

    /// Sequences of half the length.
    fn shorter(&self) -> Option<Change> {
        let half = self.config.data.sequence_length() / 2;
        let sets = vec![set("data.sequence_length", &half.to_string())];
        (half >= 128).then(|| single("half the sequence length", sets))
    }

    /// Long sequences in chunks: the same but for the order of sums.
    fn chunks(&self, choice: &Choice) -> Option<Change> {
        let training = &self.config.training;
        let length = self.config.data.sequence_length();
        if training.sequence_chunk_tokens.is_some() || length < 2 * CHUNK {
            return None;
        }
        let chunk = length.div_ceil(CHUNKS).next_multiple_of(CHUNK);
        let mut sets = one_at_a_time(choice);
        if training.gradient_checkpointing().set().is_some() {
            sets.push(set("training.gradient_checkpointing", "full"));
        }
        if self.config.memory.offload.activations() == Auto::Set(OffloadTarget::Device) {
            sets.push(set("memory.offload.activations", "auto"));
        }
        sets.push(set("training.sequence_chunk_tokens", &chunk.to_string()));
        Some(single("sequences in chunks", sets))
    }

    /// Larger budgets for what there is enough of.
    fn budgets(&self, choice: &Choice) -> Vec<Change> {
        let limits = Limits::of(self.config, self.machine);
        let mut list = Vec::new();
        let short = limits.shortages(choice).find(|shortage| shortage.resource == Resource::Host);
        if let Some(Shortage { needed_bytes, .. }) = short {
            let sets = vec![set("memory.host_budget", &needed_bytes.to_string())];
            list.push(single("a larger host budget", sets));
        }
        if self.config.memory.disk_budget().set().is_some() {
            let limits = Limits { disk_bytes: self.machine.disk_room(), ..limits };
            let found = self.lightest(self.config, limits).filter(|found| limits.allow(found));
            list.extend(found.map(|found| {
                let bytes = found.dry_run.disk_bytes().to_string();
                single("a larger disk budget", vec![set("memory.disk_budget", &bytes)])
            }));
        }
        list
    }

    /// Methods that need less than the user's.
    fn methods(&self) -> Vec<Change> {
        let lora = method("LoRA", Method::Lora);
        let qlora = method("QLoRA", Method::Qlora);
        // There is nothing to adapt before a model was trained.
        if self.config.model.from_scratch != Default::default() {
            return Vec::new();
        }
        match self.config.training.method() {
            Method::Full => vec![lora, qlora],
            Method::Lora => vec![qlora],
            Method::Qlora => Vec::new(),
        }
    }

    /// What leads to the least memory, by the user's method and by those that need less.
    fn lightest_changes(&self, choice: &Choice) -> Vec<Vec<String>> {
        let mut common = one_at_a_time(choice);
        common.push(set("training.gradient_checkpointing", "auto"));
        common.push(set(
            "memory.offload",
            "{optimizer: auto, gradients: auto, activations: auto, parameters: auto}",
        ));
        if self.runs.spec.experts.is_some() {
            common.push(set("memory.expert_slots", "auto"));
        }
        if self.config.memory.prefetch().set() == Some(true) {
            common.push(set("memory.prefetch", "auto"));
        }
        common.push(set(
            "memory.kept_layers",
            "{optimizer: auto, gradients: auto, activations: auto, parameters: auto}",
        ));
        let own = [self.narrow().sets, common.clone()].concat();
        let others = self.methods().into_iter().map(|method| {
            [method.sets, vec![set("training.mixed_precision", "bf16")], common.clone()].concat()
        });
        std::iter::once(own).chain(others).collect()
    }
}

fn set(key: &str, value: &str) -> String {
    format!("{key}={value}")
}

fn single(what: &str, sets: Vec<String>) -> Change {
    Change { what: what.to_owned(), extent: Extent::Single, sets }
}

fn method(what: &str, method: Method) -> Change {
    let sets = vec![set("training.method", method.name())];
    Change { what: what.to_owned(), extent: Extent::Method, sets }
}

/// Whether two changes say nothing against each other.
fn go_together(one: &Alternative, other: &Alternative) -> bool {
    let key = |set: &str| set.split_once('=').map(|(key, _)| key.to_owned());
    let against = |set: &String| other.change.iter().any(|own| key(own) == key(set) && own != set);
    !one.change.iter().any(against)
}

/// Micro-batches of one sequence, and as many of them as the step has sequences: each rank takes its part of those.
fn one_at_a_time(choice: &Choice) -> Vec<String> {
    let effective = choice.sequences();
    let own = effective / u64::from(choice.settings.ranks.mesh.data).max(1);
    vec![
        set("training.batch_size", "1"),
        set("training.gradient_accumulation_steps", &own.to_string()),
        set("training.effective_batch_size", &effective.to_string()),
    ]
}

fn narrow_sets() -> Vec<String> {
    let bf16 = set("training.mixed_precision", "bf16");
    vec![bf16, set("training.master_weights", "none"), set("training.gradient_dtype", "bf16")]
}

/// Several changes as one; `None` where they are not several.
fn bundle(parts: &[&[Change]]) -> Option<Change> {
    let parts = parts.concat();
    let words: Vec<&str> = parts.iter().map(|part| part.what.as_str()).collect();
    let what = words.join(" + ");
    let several = parts.len() > 1;
    several.then(|| Change {
        what,
        extent: Extent::Bundle,
        sets: parts.into_iter().flat_map(|part| part.sets).collect(),
    })
}
