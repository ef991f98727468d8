//! Views as a page for a browser. The page itself is still; its script asks again and again for what it shows, which is made here:
//! everything in it is escaped, and a policy lets the browser load and run nothing else.

use plimsoll_memory::ByteSize;
use plimsoll_plan::byte_ticks;
use plimsoll_report::{
    Area, LineChart, PageError, TierChart, count, page_environment, policy_hash, seconds, stacked,
    style_sheet,
};
use serde::Serialize;

use crate::band::{Held, Moment};
use crate::event::Event;
use crate::view::{State, Tier, View};

const SCRIPT: &str = include_str!("page/watch.js");
const STYLE: &str = include_str!("page/watch.css");

/// Events that are listed.
const MOST_EVENTS: usize = 40;
/// Columns of memory over time.
const COLUMNS: usize = 240;

/// The page, and what its policy is, for the header that says it too.
#[derive(Clone, Debug)]
pub struct Page {
    /// The page.
    pub html: String,
    /// Its `Content-Security-Policy`.
    pub policy: String,
}

#[derive(Serialize)]
struct Shell {
    style: String,
    script: &'static str,
    policy: String,
    version: &'static str,
}

/// The page without any run in it.
///
/// # Errors
/// A fault of this program.
pub fn page() -> Result<Page, PageError> {
    let style = format!("{}\n{STYLE}", style_sheet());
    let policy = format!(
        "default-src 'none'; style-src '{}'; script-src '{}'; connect-src 'self'; base-uri 'none'; form-action 'none'",
        policy_hash(&style),
        policy_hash(SCRIPT)
    );
    let shell = Shell { style, script: SCRIPT, policy: policy.clone(), version: env!("CARGO_PKG_VERSION") };
    // Who may show the page in a frame is heard in the header alone.
    Ok(Page { html: rendered("watch.html", &shell)?, policy: format!("{policy}; frame-ancestors 'none'") })
}

/// What the page shows of the last `window` steps, or of all.
///
/// # Errors
/// A fault of this program.
pub fn runs(views: &[View], window: Option<u64>) -> Result<String, PageError> {
    let runs: Vec<Run<'_>> = (0..).zip(views).map(|(number, view)| Run::of(number, view, window)).collect();
    rendered("runs.html", &Runs { runs })
}

fn rendered(template: &str, value: &impl Serialize) -> Result<String, PageError> {
    let mut environment = page_environment()?;
    environment.add_template("watch.html", include_str!("page/watch.html"))?;
    environment.add_template("runs.html", include_str!("page/runs.html"))?;
    let value = minijinja::Value::from(minijinja::value::Serde(value));
    Ok(environment.get_template(template)?.render(value)?)
}

#[derive(Serialize)]
struct Runs<'a> {
    runs: Vec<Run<'a>>,
}

/// A run, as the template reads it.
#[derive(Serialize)]
struct Run<'a> {
    number: usize,
    title: &'a str,
    name: &'a str,
    settings: Option<&'a str>,
    state: String,
    is_over: bool,
    is_silent: bool,
    done: Option<f64>,
    facts: Vec<[String; 3]>,
    lines: Vec<LineChart>,
    band: Option<BandChart>,
    status: &'static str,
    step: Option<TierChart>,
    part: Option<&'static str>,
    step_words: String,
    tiers: Vec<Tier>,
    io: Option<Io>,
    ranks: Vec<Rank>,
    events: Vec<&'a Event>,
    notes: &'a [String],
}

/// Memory by owner over time.
#[derive(Serialize)]
struct BandChart {
    columns: usize,
    areas: Vec<Area>,
    sizes: Vec<At>,
    line: Option<f64>,
    words: String,
    legend: Vec<Part>,
    since: String,
}

#[derive(Serialize)]
struct At {
    at: f64,
    text: String,
}

#[derive(Serialize)]
struct Part {
    class: &'static str,
    what: String,
    bytes: u64,
}

#[derive(Serialize)]
struct Io {
    bytes_read: u64,
    bytes_written: u64,
    hidden_share: Option<f64>,
    hidden_of_all: Option<f64>,
}

#[derive(Serialize)]
struct Rank {
    rank: usize,
    rss_bytes: u64,
    planned_device_bytes: Option<u64>,
}

impl<'a> Run<'a> {
    fn of(number: usize, view: &'a View, window: Option<u64>) -> Run<'a> {
        let progress = view.progress(window);
        let plan = view.plan.as_deref();
        let mut lines = Vec::new();
        if !progress.buckets.is_empty() {
            let planned = view.planned_process_bytes().map(|bytes| bytes as f64);
            lines = LineChart::of_run(&progress, plan.map(|plan| plan.tokens_per_second), planned);
            lines.extend(LineChart::of_learning_rate(&progress));
        }
        let device = plan.and_then(|plan| plan.timeline.tiers.first().map(|tier| (&plan.timeline, tier)));
        let last = view.last.as_ref();
        Run {
            number,
            title: view.title(),
            name: &view.name,
            settings: plan.map(|plan| plan.settings.as_str()),
            state: view.state.words(),
            is_over: view.state.is_over(),
            is_silent: matches!(view.state, State::Silent(_)),
            done: view.share_done(),
            facts: facts(view),
            lines,
            band: BandChart::of(view, window),
            status: view.status().name(),
            step: device.map(|(timeline, tier)| TierChart::of(timeline, tier)),
            part: device.map(|(timeline, _)| timeline.part),
            step_words: step_words(view),
            tiers: view.tiers(),
            io: last.and_then(|last| last.io).map(|io| Io {
                bytes_read: io.bytes_read,
                bytes_written: io.bytes_written,
                hidden_share: io.hidden_share,
                hidden_of_all: view.io.hidden_share(),
            }),
            ranks: ranks(view),
            events: view.events().rev().take(MOST_EVENTS).collect(),
            notes: &view.notes,
        }
    }
}

/// What is seen first: what it is, the number, what it is measured against.
fn facts(view: &View) -> Vec<[String; 3]> {
    let mut facts = Vec::new();
    let mut fact = |what: &str, value: String, beside: String| facts.push([what.to_owned(), value, beside]);
    let of = view.total_steps.map_or(String::new(), |total| format!("of {}", count(total)));
    fact("Step", count(view.steps_done()), of);
    if let Some(last) = &view.last {
        let first = view.first_loss.map_or(String::new(), |first| format!("from {first:.3}"));
        fact("Loss", format!("{:.4}", last.loss), first);
        if let Some((step, loss)) = view.validation.last() {
            fact("Validation", format!("{loss:.4}"), format!("at step {}", count(*step)));
        }
        let planned = view.plan.as_ref().map(|plan| count(plan.tokens_per_second.round() as u64));
        let beside = planned.map_or(String::new(), |planned| format!("{planned} planned"));
        fact("Tokens/s", count(last.tokens_per_second.round() as u64), beside);
        fact("Learning rate", format!("{:.2e}", last.lr), format!("grad norm {:.2}", last.grad_norm));
        fact(
            "Tokens",
            count(last.tokens),
            match view.skipped {
                0 => String::new(),
                skipped => format!("{} steps left out", count(skipped)),
            },
        );
    }
    if let Some(left) = view.left() {
        fact("Left", seconds(left), String::new());
    }
    facts
}

fn step_words(view: &View) -> String {
    let planned = view.plan.as_ref().map(|plan| format!("planned {}", seconds(plan.step_seconds)));
    let taken = view.step_seconds().map(|took| format!("takes {}", seconds(took)));
    [planned, taken].into_iter().flatten().collect::<Vec<_>>().join(", ")
}

fn ranks(view: &View) -> Vec<Rank> {
    let all = view.last.as_ref().map_or(&[][..], |last| last.ranks_rss_bytes.as_slice());
    let planned = |rank: usize| view.plan.as_ref()?.ranks_device_bytes.get(rank).copied();
    let rank = |(rank, rss_bytes): (usize, &u64)| Rank {
        rank,
        rss_bytes: *rss_bytes,
        planned_device_bytes: planned(rank),
    };
    all.iter().enumerate().map(rank).collect()
}

impl BandChart {
    fn of(view: &View, window: Option<u64>) -> Option<BandChart> {
        let moments = view.moments(window);
        let (first, last) = (moments.first()?, moments.last()?);
        let size = moments.len().div_ceil(COLUMNS).max(1);
        let shown: Vec<_> =
            moments.chunks(size).filter_map(|some| some.iter().max_by_key(|moment| moment.total())).collect();
        let highest = shown.iter().map(|moment| moment.total()).max().unwrap_or(0);
        let line = view.line_bytes().filter(|line| *line <= highest.saturating_mul(3));
        let top = 1.06 * line.unwrap_or(0).max(highest).max(1) as f64;
        let of = |moment: &Moment, kind: Held| {
            moment.by_kind.iter().find(|(own, _)| *own == kind).map_or(0, |(_, bytes)| *bytes)
        };
        let kinds: Vec<(Held, Vec<u64>)> =
            Held::all().map(|kind| (kind, shown.iter().map(|moment| of(moment, kind)).collect())).collect();
        let from_above = |bytes: f64| 1.0 - bytes / top;
        let now = view.band.last()?;
        let legend = now.by_kind.iter().rev();
        Some(BandChart {
            columns: shown.len(),
            areas: stacked(kinds.iter().map(|(kind, bytes)| (kind.class(), bytes)), top),
            sizes: byte_ticks(top, 3.0)
                .into_iter()
                .filter(|bytes| *bytes > 0.0)
                .map(|bytes| At { at: from_above(bytes), text: ByteSize(bytes as u64).to_string() })
                .collect(),
            line: line.map(|line| from_above(line as f64)),
            words: match (view.rss_bytes(), view.line_bytes()) {
                (Some(rss), Some(line)) => {
                    let share = 100.0 * rss as f64 / line.max(1) as f64;
                    format!("{} of {} ({share:.0} %)", ByteSize(rss), ByteSize(line))
                }
                (Some(rss), None) => ByteSize(rss).to_string(),
                _ => String::new(),
            },
            legend: legend
                .map(|(kind, bytes)| Part { class: kind.class(), what: kind.words(), bytes: *bytes })
                .collect(),
            since: seconds((last.time - first.time).max(0.0)),
        })
    }
}

#[cfg(test)]
mod tests;
