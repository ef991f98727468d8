//! Who allocated this byte: every allocation of a planned step with its name, place, birth and death. [`trace`] writes it
//! for Perfetto, [`picture`] draws it.
//!
//! A dry run loads the model, takes a step (two, where the first differs from the others) and evaluates: these are the parts
//! of a timeline. Iterations that are alike are in it once.

mod areas;
mod picture;
mod trace;

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use plimsoll_memory::{AtPeak, CountedEvents, Ledger, MemoryEvent, Phase, Tag, Tier};
use plimsoll_step::StepSettings;

use crate::config::GradientCheckpointing;
use crate::dry_run::DryRun;
use crate::training_plan::TrainingPlan;

/// The timeline of a plan.
#[derive(Clone, Debug)]
pub struct Timeline {
    /// The model's name.
    pub model: String,
    /// What kind of step it is, in words.
    pub settings: String,
    /// Device, host and disk.
    pub tiers: Vec<TierTimeline>,
    /// Loading, steps and evaluation, in order.
    pub parts: Vec<Part>,
    /// Phases and layers of the work, in order.
    pub stretches: Vec<Stretch<(Phase, Option<u32>)>>,
    /// Which events stand for iterations that were counted.
    pub counted: Vec<CountedEvents>,
    /// Whether moments are the plan's seconds; otherwise an event is a microsecond.
    pub has_seconds: bool,
}

/// What happens on a tier.
#[derive(Clone, Debug)]
pub struct TierTimeline {
    /// The tier.
    pub tier: Tier,
    /// In the order of their births.
    pub allocations: Vec<Allocation>,
    /// The tier's peak and what is in it.
    pub at_peak: AtPeak,
    /// When it is reached; `None` where there is nothing.
    pub peak_moment: Option<Moment>,
    /// Bytes that the tier may take, and who says so.
    pub line: Option<(u64, &'static str)>,
    /// Live bytes of a tag after each event.
    pub changes: Vec<LiveChange>,
}

/// An allocation.
#[derive(Clone, Debug, PartialEq)]
pub struct Allocation {
    /// Its name, such as `q` or `mlp.gate`.
    pub name: &'static str,
    /// What it is for.
    pub tag: Tag,
    /// The layer that it belongs to.
    pub layer: Option<u32>,
    /// The phase in which it is taken.
    pub phase: Phase,
    /// Where it is, in bytes from the arena's start.
    pub offset: u64,
    /// Its size.
    pub bytes: u64,
    /// When it is taken.
    pub birth: Moment,
    /// When it is given back, or the end of the timeline.
    pub death: Moment,
    /// Whether it lives on at the end.
    pub stays: bool,
}

/// A moment.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Moment {
    /// The number of the event that happens then; at the end of all, how many there are.
    pub event: u64,
    /// Microseconds since the beginning.
    pub micros: f64,
}

/// The mark at the end of all parts.
pub(crate) const END: &str = "end";

/// A part of the work and its name.
pub type Part = Stretch<&'static str>;

/// A stretch of the work, up to the beginning of the next.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Stretch<W> {
    /// What it is.
    pub what: W,
    /// When it begins.
    pub begin: Moment,
    /// When the next begins.
    pub end: Moment,
}

impl Part {
    /// What the part is, in words.
    pub fn words(&self) -> &'static str {
        match self.what {
            "load" => "the loading",
            "step" => "a step",
            "next step" => "a step after the first",
            "evaluation" => "an evaluation pass",
            other => other,
        }
    }
}

impl Allocation {
    /// Whether it lives at any time of a part.
    pub fn is_in(&self, part: &Part) -> bool {
        self.birth.event < part.end.event && self.death.event > part.begin.event
    }
}

/// What is live under a tag from a moment on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LiveChange {
    /// The moment.
    pub moment: Moment,
    /// The tag.
    pub tag: Tag,
    /// Bytes.
    pub live: u64,
}

/// How a timeline is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TimelineFormat {
    /// Chrome's trace events, which Perfetto and `chrome://tracing` open.
    Json,
    /// A picture.
    Svg,
}

/// A file that no timeline can be written to.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TimelineError {
    /// The name does not say how it is to be written.
    #[error(
        "{}: a timeline is written as a trace for Perfetto or as a picture; give the file a name that ends with .json or .svg",
        .0.display()
    )]
    Ending(PathBuf),
    /// There is no folder to write to.
    #[error("{}: {} is no folder; create it or choose another file", .file.display(), .folder.display())]
    NoFolder {
        /// The file.
        file: PathBuf,
        /// Where it would be.
        folder: PathBuf,
    },
    /// There is a folder of this name.
    #[error("{} is a folder; name a file", .0.display())]
    IsFolder(PathBuf),
}

impl TimelineFormat {
    /// What a file is to be written as, by its ending. Nothing is written.
    ///
    /// # Errors
    /// Another ending, or no place for a file.
    pub fn of(file: &Path) -> Result<TimelineFormat, TimelineError> {
        let ending = file.extension().and_then(|ending| ending.to_str()).map(str::to_ascii_lowercase);
        let format = match ending.as_deref() {
            Some("json") => TimelineFormat::Json,
            Some("svg") => TimelineFormat::Svg,
            _ => return Err(TimelineError::Ending(file.to_owned())),
        };
        let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty());
        if let Some(folder) = folder.filter(|folder| !folder.is_dir()) {
            return Err(TimelineError::NoFolder { file: file.to_owned(), folder: folder.to_owned() });
        }
        if file.is_dir() {
            return Err(TimelineError::IsFolder(file.to_owned()));
        }
        Ok(format)
    }
}

impl Timeline {
    /// What a plan's recorded dry run found out.
    pub(crate) fn of(plan: &TrainingPlan, run: &DryRun) -> Timeline {
        let names = (plan.spec.name.clone(), words(&plan.choice.settings, plan.choice.accumulation, plan));
        Timeline::of_ledgers([&run.ledger, &run.host, &run.disk], &lines(plan), names)
    }

    /// What the ledgers of device, host and disk recorded, with what each tier may take, for a model and settings.
    fn of_ledgers(
        [device, host, disk]: [&Ledger; 3],
        lines: &[(Tier, u64, &'static str)],
        (model, settings): (String, String),
    ) -> Timeline {
        let ledgers = [(Tier::Device, device), (Tier::Host, host), (Tier::Disk, disk)];
        let all = || ledgers.iter().flat_map(|(_, ledger)| ledger.events());
        let has_seconds = all().any(|event| event.seconds.is_some());
        let at = |event: u64, seconds: Option<f64>| {
            let micros = if has_seconds { 1e6 * seconds.unwrap_or(0.0) } else { event as f64 };
            Moment { event, micros }
        };
        let moment = |event: &MemoryEvent| at(event.number, event.seconds);
        let last = all()
            .max_by_key(|event| event.number)
            .map_or(Moment::default(), |last| at(last.number + 1, last.seconds));
        let mut marks: Vec<_> =
            device.marks().iter().map(|mark| (mark.name, at(mark.event, mark.seconds))).collect();
        // What goes on behind the last event takes time.
        let end = marks.pop_if(|(name, _)| *name == END).map_or(last, |(_, end)| end);
        let marks = marks.into_iter();
        let parts = until_the_next(marks.map(|(what, begin)| Stretch { what, begin, end }));
        let loaded = parts.get(1).map_or(end.event, |step| step.begin.event);
        // The tiers below are not told of every phase: there, the device's counts.
        let phases = device.events().iter().map(|event| ((event.phase, event.layer), moment(event)));
        let mut stretches: Vec<_> = phases.map(|(what, begin)| Stretch { what, begin, end }).collect();
        stretches.dedup_by_key(|stretch| stretch.what);
        let stretches = until_the_next(stretches.into_iter());
        let place = |event: &MemoryEvent| {
            let behind = stretches.partition_point(|stretch| stretch.begin.event <= event.number);
            let around = behind.checked_sub(1).and_then(|index| stretches.get(index));
            let around = around.filter(|_| event.number >= loaded);
            around.map_or((event.phase, event.owner), |around| around.what)
        };
        let tiers = ledgers.iter().map(|&(tier, ledger)| {
            let own = |event: &MemoryEvent| (event.phase, event.owner);
            let allocations = match tier {
                Tier::Device => pair(ledger, end, moment, own),
                Tier::Host | Tier::Disk => pair(ledger, end, moment, place),
            };
            let peak = ledger.events().iter().rfind(|event| event.raised_peak);
            TierTimeline {
                tier,
                allocations,
                at_peak: ledger.at_peak().clone(),
                peak_moment: peak.map(moment),
                line: lines.iter().find(|(of, ..)| *of == tier).map(|(_, bytes, words)| (*bytes, *words)),
                changes: changes(ledger, moment),
            }
        });
        Timeline {
            tiers: tiers.collect(),
            model,
            settings,
            parts,
            counted: device.counted().to_vec(),
            has_seconds,
            stretches,
        }
    }

    /// The part that pictures show: the last step, or where the peak is, if the last step does not reach it.
    pub fn shown(&self) -> Part {
        let device = self.tiers.iter().find(|tier| tier.tier == Tier::Device);
        let peak_event = device.and_then(|tier| tier.peak_moment).map_or(0, |moment| moment.event);
        let reaches = |part: &Part| {
            device.is_some_and(|tier| {
                let mut inside = tier.allocations.iter().filter(|allocation| allocation.is_in(part));
                inside.any(|allocation| allocation.offset + allocation.bytes == tier.at_peak.peak)
            })
        };
        let mut steps = self.parts.iter().filter(|part| part.what.ends_with("step"));
        let around = |part: &&Part| (part.begin.event..part.end.event).contains(&peak_event);
        let found = steps.next_back().filter(|part| reaches(part)).or_else(|| self.parts.iter().find(around));
        let nothing = Part { what: "step", begin: Moment::default(), end: Moment { event: 1, micros: 1.0 } };
        found.copied().unwrap_or(nothing)
    }

    /// The trace as JSON, which Perfetto and `chrome://tracing` open.
    ///
    /// # Errors
    /// None that depends on the timeline.
    pub fn to_json(&self) -> serde_json::Result<Vec<u8>> {
        trace::write(self)
    }

    /// The picture as SVG.
    pub fn to_svg(&self) -> String {
        picture::draw(self)
    }

    /// The content of a file of a format.
    ///
    /// # Errors
    /// None that depends on the timeline.
    pub fn to_bytes(&self, format: TimelineFormat) -> serde_json::Result<Vec<u8>> {
        match format {
            TimelineFormat::Json => self.to_json(),
            TimelineFormat::Svg => Ok(self.to_svg().into_bytes()),
        }
    }
}

/// Lets every stretch end where the next begins.
fn until_the_next<W>(stretches: impl Iterator<Item = Stretch<W>>) -> Vec<Stretch<W>> {
    let mut all: Vec<Stretch<W>> = stretches.collect();
    let begins: Vec<Moment> = all.iter().skip(1).map(|next| next.begin).collect();
    all.iter_mut().zip(begins).for_each(|(stretch, next)| stretch.end = next);
    all
}

/// The allocations of a ledger, each of its two events.
fn pair(
    ledger: &Ledger,
    end: Moment,
    moment: impl Fn(&MemoryEvent) -> Moment,
    place: impl Fn(&MemoryEvent) -> (Phase, Option<u32>),
) -> Vec<Allocation> {
    let mut all: Vec<Allocation> = Vec::new();
    // What is live, by its offset.
    let mut live: HashMap<u64, usize> = HashMap::new();
    for event in ledger.events() {
        match u64::try_from(event.delta) {
            Ok(bytes) => {
                let (phase, layer) = place(event);
                live.insert(event.offset, all.len());
                all.push(Allocation {
                    name: event.name,
                    tag: event.tag,
                    layer,
                    phase,
                    offset: event.offset,
                    bytes,
                    birth: moment(event),
                    death: end,
                    stays: true,
                });
            }
            Err(_) => {
                let died = live.remove(&event.offset).and_then(|index| all.get_mut(index));
                if let Some(allocation) = died {
                    (allocation.death, allocation.stays) = (moment(event), false);
                }
            }
        }
    }
    all
}

/// Live bytes of the tag that an event changes, after it; of several events at one time the last.
fn changes(ledger: &Ledger, moment: impl Fn(&MemoryEvent) -> Moment) -> Vec<LiveChange> {
    let mut live: HashMap<Tag, u64> = HashMap::new();
    let mut last: HashMap<Tag, usize> = HashMap::new();
    let mut all: Vec<LiveChange> = Vec::new();
    for event in ledger.events() {
        let bytes = live.entry(event.tag).or_default();
        *bytes = bytes.saturating_add_signed(event.delta);
        let change = LiveChange { moment: moment(event), tag: event.tag, live: *bytes };
        let before = last.get(&event.tag).and_then(|index| all.get_mut(*index));
        match before.filter(|before| before.moment.micros == change.moment.micros) {
            Some(before) => *before = change,
            None => {
                last.insert(event.tag, all.len());
                all.push(change);
            }
        }
    }
    all
}

/// What each tier may take of its budget.
fn lines(plan: &TrainingPlan) -> Vec<(Tier, u64, &'static str)> {
    // The line is drawn for the arena: the rest of what counts against it is taken away.
    let beside = plan.bytes_under_the_line().saturating_sub(plan.peak_bytes());
    let mut lines =
        vec![(Tier::Device, plan.load_line.bytes.saturating_sub(beside), "load line, less the overhead")];
    if let Some(budget) = plan.limits.host_bytes {
        let budget = budget.saturating_sub(plan.pipeline_bytes());
        lines.push((Tier::Host, budget, "memory.host_budget"));
    }
    if let Some(budget) = plan.config.memory.disk_budget().set() {
        lines.push((Tier::Disk, budget.0, "memory.disk_budget"));
    }
    lines
}

/// What kind of step it is.
fn words(settings: &StepSettings, accumulation: u64, plan: &TrainingPlan) -> String {
    let accumulated = if accumulation > 1 { format!(", {accumulation} accumulated") } else { String::new() };
    let method = settings.method.adapters().map_or("", |_| ", adapters");
    format!(
        "{} x {} tokens{accumulated}; {} weights{method}; {}; checkpointing {}",
        settings.batch_size,
        settings.sequence_length,
        settings.precision.weights,
        plan.config.training.optimizer(),
        GradientCheckpointing::Form(settings.checkpointing)
    )
}
