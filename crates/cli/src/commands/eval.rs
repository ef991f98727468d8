//! `plimsoll eval`: the mean loss of a text, window by window, each window scored alone; or of samples.

mod passes;
mod samples;

use plimsoll_data::chat::Skipped;
use plimsoll_data::{EvalWindows, bytes_of};
use plimsoll_device::DType;
use plimsoll_memory::Tier;
use plimsoll_model::tokenizer::Tokenizer;
use plimsoll_model::{ModelSpec, Parameter};
use plimsoll_parallel::{Collectives, Communicator, DryRanks};
use plimsoll_plan::{DryRun, loss_chunk_tokens};
use plimsoll_step::{DecodeSettings, Decoder, MicroBatch};
use serde_json::json;

use crate::args::EvalArgs;
use crate::failure::Failure;
use crate::load_line::PlannedProcess;
use crate::output::{errln, outln};
use crate::progress;
use crate::ranks::{self, Stopping};
use crate::session::{Engine, cache_type};
use crate::streaming::{self, Streaming};
use crate::weights::{self, Weights};
use passes::{Passes, Windows};

/// What `--format` is without being said.
const TEXT: &str = "text";

/// What `--set` may say of texts.
const OF_TEXTS: [&str; 2] = ["data.text_field", "data.max_invalid_share"];

/// Whether an assignment says something of texts.
fn of_texts(assignment: &str) -> bool {
    let key = assignment.split('=').next().unwrap_or_default();
    OF_TEXTS.contains(&key.trim())
}

/// Tokens of a window where nobody says.
const WINDOW_TOKENS: u64 = 512;

/// Tokens of a window that are taken together where a cache holds the others.
const CACHED_CHUNK_TOKENS: u64 = 128;

/// What is measured, and by whom.
struct Task<'t> {
    args: &'t EvalArgs,
    model: &'t Weights,
    /// Each has some of the layers, and all go through the same windows.
    ranks: &'t dyn Communicator,
}

impl Task<'_> {
    /// This rank without wires.
    fn dry(&self) -> DryRanks {
        DryRanks::new(self.ranks.rank(), self.ranks.size())
    }

    /// The machine, its threads started, and the card if one computes.
    fn start(&self) -> Result<Engine, Failure> {
        Engine::of_rank(self.ranks, self.args.threads, self.args.device)
    }

    /// Whether nothing is said but what comes out, or not even that.
    fn quiet(&self) -> bool {
        self.args.json || self.ranks.rank() > 0
    }
}

pub fn run(args: &EvalArgs) -> Result<(), Failure> {
    if ranks::starts(args.ranks) {
        check(args)?;
    }
    ranks::on_each(Stopping::AtOnce, args.ranks, |ranks| run_rank(args, ranks))
}

/// Refuses what all ranks would, before any has started: it is said once.
fn check(args: &EvalArgs) -> Result<(), Failure> {
    check_length(args)?;
    cache_type(args.kv_cache.as_deref())?;
    let records = args.format.as_deref().is_some_and(|format| format != TEXT);
    bytes_of(&[args.data.to_string_lossy().into_owned()], records)?;
    weights::check(&args.weights, "evaluate", args.json)
}

fn check_length(args: &EvalArgs) -> Result<(), Failure> {
    match args.sequence_length {
        Some(0 | 1) => {
            Err(Failure::usage("--sequence-length must be at least 2: the first token is context"))
        }
        _ => Ok(()),
    }
}

/// One rank, or the only one.
fn run_rank(args: &EvalArgs, ranks: &dyn Communicator) -> Result<(), Failure> {
    if ranks.rank() > 0 {
        ranks::be_quiet()?;
    }
    check_length(args)?;
    let mut model = Weights::open(&args.weights, "evaluate", args.json || ranks.rank() > 0)?;
    model.divide(ranks)?;
    let model = &model;
    let length = window_tokens(args.sequence_length, model.spec())?;
    let task = &Task { args, model, ranks };
    let cache = cache_type(args.kv_cache.as_deref())?;
    let mut left_out = Vec::new();
    let Evaluated { loss, targets, streaming, planned } = match args.format.as_deref().filter(|f| *f != TEXT)
    {
        None => {
            let data = samples::configured(args, length, TEXT)?.data;
            if let Some(set) = args.set.iter().find(|set| !of_texts(set)) {
                let [field, share] = OF_TEXTS;
                return Err(Failure::usage(format!(
                    "--set {set}: of a text only {field} and {share} can be set; samples take --format chat or instruction"
                )));
            }
            let windows = {
                let tokenizer: Tokenizer = model.files.tokenizer()?;
                let (field, share) = (data.text_field(), data.max_invalid_share());
                EvalWindows::read(&args.data, &field, share, &tokenizer, length as usize)?
            };
            left_out.extend_from_slice(windows.left_out());
            tell(task, &left_out);
            let engine = task.start()?;
            match cache {
                None => whole_windows(task, &engine, &windows)?,
                Some(cache) => through_the_cache(task, &engine, cache, &windows)?,
            }
        }
        Some(_) if cache.is_some() => {
            return Err(Failure::usage("--kv-cache is for texts; leave it out, or --format"));
        }
        Some(format) => {
            let samples = samples::read(args, model, length, format)?;
            left_out.extend(samples.sample_report().into_iter().flat_map(|report| report.skipped.clone()));
            tell(task, &left_out);
            samples::measure(task, &task.start()?, &samples)?
        }
    };
    let mean = if targets > 0.0 { loss / targets } else { 0.0 };
    // Weights of samples are 0 or 1 unless a chat says otherwise.
    let tokens = targets.round() as u64;
    if args.json {
        let mut document = json!({
            "tokens": tokens, "loss": mean, "perplexity": mean.exp(), "memory": planned.document(),
            "left_out": left_out,
        });
        if let Some(streaming) = streaming {
            document["streaming"] = streaming.document();
        }
        outln!("{document}")?;
    } else {
        outln!("loss {mean:.6}, perplexity {:.4}, over {tokens} tokens", mean.exp())?;
        if let Some(streaming) = streaming.filter(|_| ranks.rank() == 0) {
            streaming.report();
        }
    }
    // All ranks have found the same, and one says it.
    if mean.is_finite() || ranks.rank() > 0 {
        return Ok(());
    }
    Err(Failure::other(format!(
        "the loss is {mean}: some weights or activations are not finite; look for the adapter or the conversion that they come from, or try --dtype f32"
    )))
}

/// Says which records of the data are not measured, and why.
fn tell(task: &Task<'_>, left_out: &[Skipped]) {
    for skipped in left_out.iter().filter(|_| !task.quiet()) {
        errln!("--data: {skipped}");
    }
}

/// Tokens of a window, as they were asked for. Where positions are learned, there are none beyond.
fn window_tokens(asked: Option<u64>, spec: &ModelSpec) -> Result<u64, Failure> {
    let learned = spec.attention.rope.is_none().then_some(spec.max_position_embeddings);
    match (asked, learned) {
        (Some(asked), Some(learned)) if asked > learned => Err(Failure::usage(format!(
            "--sequence-length {asked}: {} has learned {learned} positions and none beyond",
            spec.name
        ))),
        (Some(asked), _) => Ok(asked),
        (None, learned) => Ok(learned.map_or(WINDOW_TOKENS, |learned| learned.clamp(2, WINDOW_TOKENS))),
    }
}

/// The sum of the losses and their number, or the sum of their weights, and what was streamed for them.
struct Evaluated {
    loss: f64,
    targets: f64,
    streaming: Option<Streaming>,
    planned: PlannedProcess,
}

/// Every window at once, several together.
fn whole_windows(task: &Task<'_>, engine: &Engine, windows: &EvalWindows) -> Result<Evaluated, Failure> {
    let lengths = Windows { count: windows.len() as u64, longest: windows.longest() as u64, samples: false };
    let passes = Passes::of_windows(task, engine, lengths)?;
    let device = engine.device(&passes.dry_run, engine.line(task.args.memory))?;
    let most = passes.together;
    let (mut evaluator, streaming) = passes.evaluator(task, &*device, lengths)?;

    let bar = progress::counter(windows.len() as u64, "windows", task.quiet());
    let (mut loss, mut targets) = (0.0, 0);
    let mut next = 0;
    while next < windows.len() {
        // Windows of one length go together; only the last may be shorter.
        let length = windows.window(next).len();
        let together = (next..windows.len())
            .take(most as usize)
            .take_while(|i| windows.window(*i).len() == length)
            .count();
        let tokens: Vec<u32> =
            (next..next + together).flat_map(|i| windows.window(i).iter().copied()).collect();
        let labels = plimsoll_data::targets(&tokens, length);
        let batch = MicroBatch::new(&tokens, &labels);
        let (sum, count) = evaluator.losses(together as u64, &batch)?;
        loss += sum;
        targets += count;
        next += together;
        bar.inc(together as u64);
    }
    bar.finish_and_clear();
    let loss = task.ranks.sum(loss)?;
    Ok(Evaluated { loss, targets: targets as f64, streaming, planned: passes.planned })
}

/// The same token by token's way: each window in chunks that read the others from a cache.
fn through_the_cache(
    task: &Task<'_>,
    engine: &Engine,
    cache: DType,
    windows: &EvalWindows,
) -> Result<Evaluated, Failure> {
    let Task { model, ranks, .. } = *task;
    let (files, precision) = (&model.files, model.precision);
    let context = windows.longest().max(1) as u64;
    let settings = DecodeSettings {
        precision,
        cache,
        cache_tier: Tier::Device,
        context,
        prompt_chunk_tokens: CACHED_CHUNK_TOKENS,
        sequences: 1,
        pages: None,
        drafted_tokens: 0,
    };
    let chunk = loss_chunk_tokens(files.spec().vocab_size, CACHED_CHUNK_TOKENS);
    let passes = Passes::plan(task, engine, 1, |_, storage| {
        DryRun::cached_evaluation(engine.traits(), model.own_spec(), settings, storage, chunk)
    })?;
    let device = engine.device(&passes.dry_run, engine.line(task.args.memory))?;
    let (tiers, streaming) = passes.tiers(task, &*device)?;
    let types = |p: &Parameter| model.weight_type(p);
    let storage = passes.storage(model, &types);
    let mut decoder = Decoder::new(&*device, &tiers, model.own_spec().clone(), settings, storage)?;
    streaming::report_buffered(&tiers);
    decoder.load(|p, rows, dtype, out| model.read_rows_into(p, rows, dtype, out))?;
    if !ranks.is_alone() {
        decoder.join(ranks::everybody(ranks)?);
    }
    let bar = progress::counter(windows.len() as u64, "windows", task.quiet());
    let (mut loss, mut targets) = (0.0, 0);
    for i in 0..windows.len() {
        let tokens = windows.window(i);
        let labels = plimsoll_data::targets(tokens, tokens.len());
        decoder.truncate(0);
        let (sum, count) = decoder.append_losses(&MicroBatch::new(tokens, &labels), chunk)?;
        loss += sum;
        targets += count;
        bar.inc(1);
    }
    bar.finish_and_clear();
    Ok(Evaluated { loss, targets: targets as f64, streaming, planned: passes.planned })
}
