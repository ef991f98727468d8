//! `plimsoll plan --inference`: what it takes to run a model.

use plimsoll_memory::{ByteSize, Tag, Tier};
use plimsoll_model::ModelSpec;
use plimsoll_plan::config::Imported;
use plimsoll_plan::{
    DryRun, InferenceChange, InferencePlan, InferenceQuestion, InferenceStage, LayerPlaces, ModelOrigin,
    Resource, cache_name,
};
use serde_json::Value;

use super::describe::words;
use crate::args::PlanArgs;
use crate::asked::Asked;
use crate::by_group::quantized_types;
use crate::failure::Failure;
use crate::output::{out, outln};
use crate::overhead::Progress;
use crate::row;
use crate::session::{DiskUse, cache_type, inference_precision};
use crate::speeds::PlanSpeeds;
use crate::table;
use crate::units::seconds;

/// Tokens of a context that nobody has named.
const CONTEXT: u64 = 4096;

pub fn run(args: &PlanArgs) -> Result<(), Failure> {
    let wanted = &args.inference;
    let cache = cache_type(wanted.kv_cache.as_deref())?;
    let mut asked = Asked::new(&args.source, &Imported::default(), &args.machine, args.json)?;
    if args.elsewhere {
        asked = asked.elsewhere()?;
    }
    let spec = asked.origin.spec();
    let quantize = quantized_types(wanted.quantize.as_deref(), spec)?;
    let context = context(wanted.context, spec)?;
    let ranks = ranks(&asked, args.machine.ranks)?;
    let dtype = wanted.dtype.as_deref();
    let dtype = dtype.unwrap_or(if asked.target.is_some() { "bf16" } else { "f32" });
    let precision = inference_precision(dtype, wanted.quantize_activations)?;
    // What answers will have it in memory, so that its memory belongs to the plan.
    let _tokenizer = match &asked.origin {
        ModelOrigin::Files(files) => files.tokenizer().ok(),
        ModelOrigin::Catalogue(_) | ModelOrigin::Scratch(..) => None,
    };
    let disk_use = |plan: &InferencePlan| (plan.moved_per_token().read > 0).then(DiskUse::default);
    let (plan, speeds) = asked.planned(Progress::PlanningAnswers, &disk_use, &mut |machine| {
        let question = InferenceQuestion {
            origin: &asked.origin,
            config: &asked.config,
            machine,
            ranks,
            precision,
            quantize,
            cache,
            context,
            sequences: wanted.parallel.unwrap_or(1),
        };
        Ok(question.plan()?)
    })?;
    match args.json {
        true => {
            let mut document = plan.to_json();
            if let Value::Object(map) = &mut document {
                map.insert("speeds".to_owned(), speeds.json.clone());
                map.insert("hardware".to_owned(), serde_json::to_value(&asked.target)?);
            }
            outln!("{}", serde_json::to_string_pretty(&document)?)?;
        }
        false => out!("{}", describe(&plan, &speeds))?,
    }
    if plan.fits() { Ok(()) } else { Err(Failure::shown_not_to_fit()) }
}

/// The context that was asked for, where the model has as many positions.
fn context(asked: Option<usize>, spec: &ModelSpec) -> Result<u64, Failure> {
    let most = spec.max_position_embeddings.max(1);
    match asked.map(|tokens| tokens as u64) {
        None => Ok(CONTEXT.min(most)),
        Some(0) => Err(Failure::usage("--context must be at least 1")),
        Some(tokens) if spec.attention.rope.is_none() && tokens > most => Err(Failure::usage(format!(
            "--context {tokens}: {} has learned {most} positions and none beyond",
            spec.name
        ))),
        Some(tokens) => Ok(tokens),
    }
}

/// Devices that have some layers each.
fn ranks(asked: &Asked, ranks: Option<u32>) -> Result<u32, Failure> {
    let devices = asked.target.as_ref().map(|target| u32::try_from(target.devices()).unwrap_or(u32::MAX));
    let (count, layers) = (devices.or(ranks).unwrap_or(1), asked.origin.spec().num_layers);
    match count > layers {
        true => Err(Failure::usage(format!(
            "{count} devices: the model has {layers} layers, and a device has one at least; name a machine of {layers} or fewer"
        ))),
        false => Ok(count),
    }
}

/// The plan for people.
fn describe(plan: &InferencePlan, speeds: &PlanSpeeds) -> String {
    let Some(largest) = plan.largest() else { return String::new() };
    let (spec, settings) = (&plan.spec, largest.generation.settings);
    let mut out = super::describe::model(spec);
    let types: Vec<&str> = plan.weight_types.iter().map(|dtype| dtype.name()).collect();
    out.push_str(&format!(
        "inference: {} x {} tokens; linears in {}, {} of weights; {} activations; key-value cache in {}, {}{}; passes of {} tokens\n",
        settings.sequences,
        settings.context,
        types.join(" and "),
        ByteSize(plan.weight_bytes),
        settings.precision.activations,
        cache_name(settings.cache),
        ByteSize(plan.cache_bytes()),
        match settings.cache_tier {
            Tier::Device => "",
            Tier::Host => " on the host",
            Tier::Disk => " on disk",
        },
        settings.prompt_chunk_tokens,
    ));
    out.push_str(&places(plan));
    out.push_str(&format!("\n{}\n", memory(plan, &largest.generation.dry_run)));
    if plan.fits() {
        out.push_str(&speed(plan, speeds));
    }
    out.push_str(match plan.fits() {
        true => "fits\n",
        false => "does NOT fit\n",
    });
    for short in &plan.shortages {
        let what = match short.resource {
            Resource::Host => "of host memory",
            Resource::Disk => "of disk",
            _ if plan.limits.is_apart => "of the device's memory",
            _ => "of memory",
        };
        out.push_str(&format!(
            "\n{} {what} are missing, with as little there as can be\n",
            ByteSize(short.bytes())
        ));
    }
    out.push_str(&changes(plan));
    out
}

/// Where the layers are.
fn places(plan: &InferencePlan) -> String {
    let LayerPlaces { device, host, disk } = plan.layers();
    let devices = plan.stages.len();
    let on_devices = match devices {
        1 => "on the device".to_owned(),
        _ => format!("on {devices} devices, one after the other"),
    };
    let lower = [(host, "on the host"), (disk, "on disk")];
    let lower = lower.into_iter().filter(|(layers, _)| *layers > 0);
    let lower: String = lower.map(|(layers, place)| format!(", {layers} {place}")).collect();
    let slots: u32 = plan.stages.iter().map(InferenceStage::expert_slots).sum();
    let experts = match slots {
        0 => String::new(),
        slots => format!("; without experts, {slots} of which are there at a time"),
    };
    format!("layers: {device} of {} {on_devices}{lower}{experts}\n", plan.spec.num_layers)
}

/// What is in memory at the peak of the device that takes most.
fn memory(plan: &InferencePlan, run: &DryRun) -> String {
    let all = run.peak_bytes().saturating_add(plan.overhead_bytes);
    let share = |bytes: u64| format!("{:.1} %", 100.0 * bytes as f64 / all.max(1) as f64);
    let mut rows: Vec<Vec<String>> = run
        .tags_at_peak()
        .iter()
        .map(|(tag, bytes)| row![words(tag), ByteSize(bytes), share(bytes)])
        .collect();
    let gaps = run.at_peak().gaps();
    if gaps > 0 {
        rows.push(row!["gaps", ByteSize(gaps), share(gaps)]);
    }
    rows.push(row![
        "overhead (outside the arena)",
        ByteSize(plan.overhead_bytes),
        share(plan.overhead_bytes)
    ]);
    let whose = if plan.stages.len() > 1 { "in all, of the device that takes most" } else { "in all" };
    rows.push(row![whose, ByteSize(all), share(all)]);
    let line = plan.load_line;
    rows.push(row![format!("load line ({})", line.by), ByteSize(line.bytes), ""]);
    for (place, ledger) in [("on the host", &run.host), ("on disk", &run.disk)] {
        let tags = ledger.at_peak().by_tag;
        rows.extend(
            tags.iter().map(|(tag, bytes)| row![format!("{place}: {}", words(tag)), ByteSize(bytes), ""]),
        );
    }
    if let Some(budget) = plan.limits.host_bytes.filter(|_| run.host_bytes() > 0) {
        rows.push(row!["host memory", ByteSize(budget), ""]);
    }
    table::render(&rows)
}

/// How fast it goes, and why.
fn speed(plan: &InferencePlan, speeds: &PlanSpeeds) -> String {
    let sequences = plan.largest().map_or(1, |stage| stage.generation.settings.sequences);
    let moved = plan.moved_per_token();
    let from = [(moved.copied_in.saturating_sub(moved.read), "from the host"), (moved.read, "from disk")];
    let from = from.into_iter().filter(|(bytes, _)| *bytes > 0);
    let from: Vec<String> = from.map(|(bytes, place)| format!("{} {place}", ByteSize(bytes))).collect();
    let brought = match from.is_empty() {
        true => String::new(),
        false => format!(" and brings {}", from.join(" and ")),
    };
    let (token, each) = match sequences {
        1 => ("a token", String::new()),
        n => {
            let each = rate(plan.tokens_per_second() / n as f64);
            ("a token in every sequence", format!(" ({each} in each of {n} sequences)"))
        }
    };
    let working = |run: fn(&InferenceStage) -> &DryRun| {
        let bytes = plan.largest().map_or(0, |stage| {
            let tags = run(stage).tags_at_peak();
            tags.iter().filter(|(tag, _)| !at_rest(*tag)).map(|(_, bytes)| bytes).sum()
        });
        ByteSize(bytes)
    };
    format!(
        "a prompt of {} tokens takes about {}, {:.0} tokens/s; a pass of it works in {}\n\
         {token} after that takes about {}{brought}; it works in {}\n\
         {} tokens/s{each} {}\n{}\n",
        plan.prompt_tokens,
        seconds(plan.prompt_seconds()),
        plan.prompt_tokens_per_second(),
        working(|stage| &stage.prompt),
        seconds(plan.token_seconds()),
        working(|stage| &stage.token),
        rate(plan.tokens_per_second()),
        speeds.place(),
        speeds.words
    )
}

/// Tokens a second with as many figures as matter.
fn rate(tokens: f64) -> String {
    match tokens {
        tokens if tokens >= 100.0 => format!("{tokens:.0}"),
        tokens if tokens >= 1.0 => format!("{tokens:.1}"),
        tokens => format!("{tokens:.2}"),
    }
}

/// Whether memory of this kind is taken between passes too.
fn at_rest(tag: Tag) -> bool {
    matches!(tag, Tag::Weights | Tag::Adapters | Tag::KvCache | Tag::Staging)
}

/// What else would fit.
fn changes(plan: &InferencePlan) -> String {
    if plan.changes.is_empty() {
        return match plan.fits() {
            true => String::new(),
            false => {
                "\nno single change of the context, the sequences, the cache or the storage of weights fits\n"
                    .to_owned()
            }
        };
    }
    let title = match plan.fits() {
        true => "all of it would be on the device with",
        false => "single changes that would fit",
    };
    let mut rows = vec![row!["", "tokens/s", "arena", ""]];
    rows.extend(plan.changes.iter().map(|change| {
        let InferenceChange { flag, value, tokens_per_second, device_peak_bytes, all_on_device } = change;
        let place = if *all_on_device { "" } else { "some of it below the device" };
        row![
            format!("{flag} {value}"),
            format!("{tokens_per_second:.1}"),
            ByteSize(*device_peak_bytes),
            place
        ]
    }));
    format!("\n{title}\n{}", table::render(&rows))
}
