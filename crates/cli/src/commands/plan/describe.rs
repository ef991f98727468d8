//! A plan for people.

use std::collections::BTreeMap;

use plimsoll_memory::{AtPeak, ByteSize, Tag};
use plimsoll_model::ModelSpec;
use plimsoll_plan::config::GradientCheckpointing;
use plimsoll_plan::{ExpertReads, TimeEstimate, TrainingPlan};
use plimsoll_step::{Adapters, Linears};

use super::ranks;
use crate::row;
use crate::speeds::PlanSpeeds;
use crate::table;
use crate::units::{count, seconds};

/// What a step is, as a line.
pub fn step(plan: &TrainingPlan) -> String {
    let settings = &plan.choice.settings;
    let precision = settings.precision;
    let master = if precision.master_weights { ", f32 master weights" } else { "" };
    let linears = if precision.linears == Linears::Fp8 { ", linear layers in 8-bit floats" } else { "" };
    format!(
        "step: {} x {} tokens{}, {} accumulated{}; {} weights{master}{linears}, {} gradients, checkpointing {}; logits of {} tokens at once\n",
        settings.batch_size,
        settings.sequence_length,
        settings.chunk_tokens().map_or(String::new(), |chunk| format!(" in chunks of {chunk}")),
        plan.choice.accumulation,
        if settings.micro_batches_per_pass > 1 {
            format!(", {} in a pass", settings.micro_batches_per_pass.min(plan.choice.accumulation))
        } else {
            String::new()
        },
        precision.weights,
        precision.gradients,
        checkpointing(plan),
        settings.loss_chunk_tokens
    )
}

/// Experts that come when a token is sent to them, in a line, where they do.
fn experts(plan: &TrainingPlan) -> String {
    let Some(ExpertReads { slots, experts, worst_bytes, even_bytes }) = plan.expert_reads() else {
        return String::new();
    };
    let (worst, even) = (ByteSize(worst_bytes), ByteSize(even_bytes));
    let even = if even.to_string() == worst.to_string() {
        String::new()
    } else {
        format!(", {even} where all are used alike")
    };
    format!(
        "experts: {slots} of {experts} in memory at a time; once that many are there, a step reads at most {worst} of them{even}\n"
    )
}

/// The model in a line.
pub fn model(spec: &ModelSpec) -> String {
    let active = match &spec.experts {
        Some(experts) => format!(
            " in all and {} active ({} of {} experts)",
            count(spec.active_parameter_count()),
            experts.per_token,
            experts.count
        ),
        None => String::new(),
    };
    format!(
        "{}: {}, {} parameters{active}, {} layers of width {}\n",
        spec.name,
        spec.architecture,
        count(spec.parameter_count()),
        spec.num_layers,
        spec.hidden_size
    )
}

/// The plan for people.
pub fn describe(plan: &TrainingPlan, speeds: &PlanSpeeds) -> String {
    let settings = &plan.choice.settings;
    let mut out = disk_needed(plan);
    out.push_str(&model(&plan.spec));
    if let Some(adapters) = settings.method.adapters() {
        let (trained, all) = (plan.trainable_parameters(), plan.parameters());
        out.push_str(&format!(
            "trained: {} of {} parameters, {:.3} %; adapters of {} modules beside frozen weights{}\n",
            count(trained),
            count(all),
            100.0 * trained as f64 / all.max(1) as f64,
            adapters.layout.modules().len(),
            frozen_types(adapters),
        ));
    }
    out.push_str(&step(plan));
    out.push_str(&experts(plan));
    out.push_str(&plan.division.as_ref().map_or(String::new(), ranks::division));
    out.push_str(&ranks::words(plan));
    let at_peak = plan.at_peak();
    out.push_str(&format!(
        "optimizer {}: {:.3} bytes of state a parameter\n\n",
        plan.config.training.optimizer(),
        plan.state_bytes_per_parameter()
    ));
    let mut rows: Vec<Vec<String>> =
        at_peak.iter().map(|(tag, bytes)| row![words(tag), ByteSize(bytes), share(bytes, plan)]).collect();
    let gaps = plan.choice.dry_run.at_peak().gaps();
    if gaps > 0 {
        rows.push(row!["gaps", ByteSize(gaps), share(gaps, plan)]);
    }
    rows.push(row![
        "overhead (outside the arena)",
        ByteSize(plan.overhead_bytes),
        share(plan.overhead_bytes, plan)
    ]);
    let host = &plan.choice.dry_run.host;
    rows.extend(tier_rows("on the host: ", host.at_peak(), plan));
    if plan.pipeline_bytes() > 0 {
        rows.push(row!["data pipeline", ByteSize(plan.pipeline_bytes()), share(plan.pipeline_bytes(), plan)]);
    }
    rows.push(row!["in all", ByteSize(plan.process_bytes()), share(plan.process_bytes(), plan)]);
    if let Some(budget) = plan.limits.host_bytes {
        rows.push(row!["of it on the host", ByteSize(plan.host_bytes()), ""]);
        rows.push(row!["host budget", ByteSize(budget), ""]);
    }
    let line = plan.load_line;
    rows.push(row![format!("load line ({})", line.by), ByteSize(line.bytes), ""]);
    for row in tier_rows("on disk: ", plan.choice.dry_run.disk.at_peak(), plan) {
        rows.push(row.into_iter().take(2).chain([String::new()]).collect());
    }
    out.push_str(&table::render(&rows));
    let (phase, layer) = plan.peak_place();
    let place =
        layer.map_or(format!("in the {phase} phase"), |l| format!("in the {phase} pass of layer {l}"));
    let time = &plan.choice.time;
    out.push_str(&format!(
        "\nthe peak is {place}; a layer holds {} there\nabout {} a step{}, {:.0} tokens/s {}\n{}\n{}\n",
        per_layer(plan),
        seconds(time.step_seconds),
        waiting(time, settings.ranks.count()),
        time.tokens_per_second,
        speeds.place(),
        speeds.words,
        if plan.fits() { "fits" } else { "does NOT fit" }
    ));
    out.push_str(&pipeline(plan));
    out
}

/// What the data pipeline is made of, where it is more than usual, and what an evaluation takes.
fn pipeline(plan: &TrainingPlan) -> String {
    let (data, bytes, settings) = (&plan.config.data, plan.pipeline(), &plan.choice.settings);
    let mut out = String::new();
    if data.workers() > 1 {
        out.push_str(&format!(
            "data pipeline: {} workers make {} batches of {} x {} tokens ahead each, {}; batches of a step {}; the workers {}\n",
            data.workers(),
            data.prefetch_factor(),
            settings.batch_size,
            settings.sequence_length,
            ByteSize(bytes.ahead),
            ByteSize(bytes.step),
            ByteSize(bytes.workers),
        ));
    }
    if let Ok((step, Some(evaluation))) = plan.phases() {
        out.push_str(&format!(
            "evaluation in batches of {}: {} of the arena, a step {}; on the host {}\n",
            settings.evaluated(),
            ByteSize(evaluation.peak_bytes),
            ByteSize(step),
            ByteSize(bytes.evaluation),
        ));
    }
    out
}

/// What of a step is waiting, where that is a hundredth of it or more.
fn waiting(time: &TimeEstimate, ranks: u32) -> String {
    if time.waiting_seconds < 0.01 * time.step_seconds || time.waiting_seconds <= 0.0 {
        return String::new();
    }
    let what = match (time.disk_seconds > 0.0, ranks > 1) {
        (true, true) => "the disk and other ranks",
        (true, false) => "the disk",
        (false, true) => "other ranks",
        (false, false) => "the host's memory",
    };
    format!(" ({} of it waiting for {what})", seconds(time.waiting_seconds))
}

/// How long the whole run takes, of so many steps where that is known better than the configuration says it, and what it
/// leaves on disk. `validation` is how many sequences it is validated on, where that is known, and `tokens` how many bytes of disk the
/// tokens of its data take meanwhile.
pub fn whole_run(plan: &TrainingPlan, steps: Option<u64>, validation: Option<u64>, tokens: u64) -> String {
    let needs = plan.run_needs(steps);
    let mut time = match (needs.steps, needs.seconds) {
        (Some(1), Some(time)) => format!("the whole run, a step: about {}", seconds(time)),
        (Some(steps), Some(time)) => format!("the whole run, {steps} steps: about {}", seconds(time)),
        _ => "how many steps the run has depends on the data".to_owned(),
    };
    if let (true, Some(steps)) = (plan.validates(), needs.steps) {
        time.push_str(&match validation.map(|sequences| (sequences, plan.validation(steps, sequences))) {
            Some((sequences, Ok(needs))) => {
                let often = if needs.times == 1 { String::new() } else { format!("{} times ", needs.times) };
                let s = if sequences == 1 { "" } else { "s" };
                format!(", and {} to validate {often}on {sequences} sequence{s}", seconds(needs.seconds))
            }
            _ => ", without validation".to_owned(),
        });
    }
    let mut left = Vec::new();
    match needs.checkpoints {
        0 => {}
        1 => left.push(format!("a checkpoint of {}", ByteSize(needs.checkpoint_bytes))),
        n => left.push(format!("{n} checkpoints of {} each", ByteSize(needs.checkpoint_bytes))),
    }
    if needs.model_bytes > 0 {
        left.push(format!("the model of {}", ByteSize(needs.model_bytes)));
    }
    let meanwhile = match tokens {
        0 => String::new(),
        bytes => format!("until it ends, the tokens of its data take {} of that disk too\n", ByteSize(bytes)),
    };
    if left.is_empty() {
        return format!("{time}; it leaves no model behind\n{meanwhile}");
    }
    let most = if needs.most_bytes > needs.left_bytes {
        format!(", at most {} at once", ByteSize(needs.most_bytes))
    } else {
        String::new()
    };
    let (bytes, left) = (ByteSize(needs.left_bytes), left.join(" and "));
    format!("{time}\nit leaves {bytes} on disk{most}:\n  {left}\n{meanwhile}")
}

/// The types of quantised weights, the most frequent first.
fn frozen_types(adapters: &Adapters) -> String {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    adapters.weight_types.values().for_each(|dtype| *counts.entry(dtype.name()).or_default() += 1);
    let mut names: Vec<(&str, usize)> = counts.into_iter().collect();
    names.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
    let names: Vec<&str> = names.into_iter().map(|(name, _)| name).collect();
    if names.is_empty() { String::new() } else { format!(", quantised as {}", names.join(", ")) }
}

/// The disk that the run takes and what is there, before everything else; nothing where it takes none.
fn disk_needed(plan: &TrainingPlan) -> String {
    if plan.disk_bytes() == 0 {
        return String::new();
    }
    let reserved = match plan.machine.disk_reserved {
        0 => String::new(),
        bytes => format!(", {} of them for the checkpoints and the model of the run", ByteSize(bytes)),
    };
    let free = |b| format!(", {} are free there{reserved}", ByteSize(b));
    let free = plan.machine.disk_available.map_or(String::new(), free);
    let budget =
        plan.config.memory.disk_budget().set().map_or(String::new(), |b| format!(", the budget is {b}"));
    let folder = plan.config.disk_path();
    format!("disk: {} in {}{free}{budget}\n", ByteSize(plan.disk_bytes()), folder.display())
}

/// What lives on a lower tier at its peak.
fn tier_rows(place: &str, at_peak: &AtPeak, plan: &TrainingPlan) -> Vec<Vec<String>> {
    let tags = at_peak.by_tag.iter().map(|(tag, bytes)| (words(tag), bytes));
    let gaps = Some(("gaps".to_owned(), at_peak.gaps())).filter(|(_, bytes)| *bytes > 0);
    let row =
        |(name, bytes): (String, u64)| row![format!("{place}{name}"), ByteSize(bytes), share(bytes, plan)];
    tags.chain(gaps).map(row).collect()
}

/// The form of checkpointing.
pub fn checkpointing(plan: &TrainingPlan) -> String {
    GradientCheckpointing::Form(plan.choice.settings.checkpointing).to_string()
}

/// Bytes of a middle layer at the peak, by tag.
fn per_layer(plan: &TrainingPlan) -> String {
    let own = plan.own_layers();
    let middle = own.get(own.len() / 2).copied();
    let layers = plan.layers();
    let Some(layer) = layers.iter().find(|l| middle.is_some() && l.layer == middle) else {
        return "nothing".to_owned();
    };
    let parts: Vec<String> =
        layer.by_tag.iter().map(|(tag, bytes)| format!("{} {}", words(*tag), ByteSize(*bytes))).collect();
    parts.join(", ")
}

/// A kind of memory in words.
pub fn words(tag: Tag) -> String {
    tag.name().replace('_', " ")
}

fn share(bytes: u64, plan: &TrainingPlan) -> String {
    format!("{:.1} %", 100.0 * bytes as f64 / plan.process_bytes().max(1) as f64)
}
