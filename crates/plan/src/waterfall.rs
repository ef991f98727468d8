//! What each technique of a plan buys and costs: from the naive step to the chosen one, a technique at a time, each step of the way
//! run dry.
//!
//! The technique that comes next is the one that saves most bytes of the device's peak for the time that it adds, with those before it
//! at work. So the bytes add up from the first peak to the plan's.

use std::cmp::Ordering;
use std::collections::BTreeMap;

use plimsoll_device::cpu::at_once;
use plimsoll_step::StepError;
use serde::Serialize;

use crate::advice::{Alternative, Extent};
use crate::resolve::Choice;
use crate::runs::threads;
use crate::technique::{Technique, Techniques};
use crate::training_plan::TrainingPlan;

/// From the naive step to a plan's.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Waterfall {
    /// The naive step, and one technique more each time.
    pub entries: Vec<WaterfallEntry>,
    /// What would come next; `None` where nothing that was tried saves more, or where the plan does not fit.
    pub next: Option<FurtherStep>,
}

/// A technique on top of those before it. What it saves is negative where it takes more.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct WaterfallEntry {
    /// What is done, in words.
    pub change: String,
    /// The assignments that say it, as `--set` takes them; none of the naive step.
    pub set: Vec<String>,
    /// Bytes by which the peak of the device is lower than before.
    pub bytes_saved: i64,
    /// The same by tag, of what is live at both peaks; `gaps` are between allocations.
    pub by_tag: BTreeMap<&'static str, i64>,
    /// Seconds that it adds to a step.
    pub seconds_added: f64,
    /// The peak of the device with it, in bytes.
    pub device_peak_bytes: u64,
    /// What is live at that peak by tag, in bytes.
    pub at_peak: BTreeMap<&'static str, u64>,
    /// Bytes of host memory with it, beside the data pipeline.
    pub host_bytes: u64,
    /// Bytes of disk with it.
    pub disk_bytes: u64,
    /// Seconds of a step with it.
    pub step_seconds: f64,
}

/// A technique that the plan does not have.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FurtherStep {
    /// What would be done, in words.
    pub change: String,
    /// The assignments that would do it, as `--set` takes them.
    pub set: Vec<String>,
    /// Bytes by which the peak of the device would be lower.
    pub bytes_saved: i64,
    /// Seconds that it would add to a step of as many tokens.
    pub seconds_added: f64,
    /// The peak of the device, in bytes.
    pub device_peak_bytes: u64,
}

impl TrainingPlan {
    /// What each technique of the plan saves and costs, from the naive step on.
    ///
    /// # Errors
    /// The naive step cannot be run, not even dry.
    pub fn waterfall(&self) -> Result<Waterfall, StepError> {
        let techniques = Techniques::of(&self.asked, &self.config, &self.choice);
        let mut missing = techniques.all();
        let mut entries = vec![self.naive(&techniques, &mut missing)?];
        while let Some(before) = entries.last().filter(|_| !missing.is_empty()) {
            let (added, entry) = self.best(&techniques, &missing, before)?;
            missing.retain(|one| !added.contains(one));
            entries.push(entry);
        }
        Ok(Waterfall { entries, next: self.further_step() })
    }

    /// The step without any technique, or, where not even a dry run counts so many bytes, with the first that makes it possible.
    fn naive(
        &self,
        techniques: &Techniques<'_>,
        missing: &mut Vec<Technique>,
    ) -> Result<WaterfallEntry, StepError> {
        let mut change = techniques.naive_words();
        let mut run = self.run_without(techniques, missing);
        if run.is_err() {
            let tried = missing.iter().enumerate().find_map(|(place, _)| {
                let run = self.run_without(techniques, &others(missing, place)).ok()?;
                Some((place, run))
            });
            if let Some((place, possible)) = tried {
                change.push_str(&format!(", but {}", techniques.words(missing.remove(place))));
                run = Ok(possible);
            }
        }
        Ok(WaterfallEntry { change, ..WaterfallEntry::of(&run?) })
    }

    /// The technique that comes next, or all that are missing where none goes without the others.
    fn best(
        &self,
        techniques: &Techniques<'_>,
        missing: &[Technique],
        before: &WaterfallEntry,
    ) -> Result<(Vec<Technique>, WaterfallEntry), StepError> {
        let places: Vec<usize> = (0..missing.len()).collect();
        let tried = at_once(&places, threads(), |place| {
            let run = self.run_without(techniques, &others(missing, *place)).ok()?;
            Some((vec![*missing.get(*place)?], WaterfallEntry::of(&run).after(before)))
        });
        let mut best: Option<(Vec<Technique>, WaterfallEntry)> = None;
        for one in tried.into_iter().flatten() {
            if best.as_ref().is_none_or(|(_, best)| one.1.price().compare(best.price()).is_lt()) {
                best = Some(one);
            }
        }
        let (added, entry) = match best {
            Some(best) => best,
            None => {
                let run = self.run_without(techniques, &[])?;
                (missing.to_vec(), WaterfallEntry::of(&run).after(before))
            }
        };
        let words: Vec<String> = added.iter().map(|one| techniques.words(*one)).collect();
        let set = added.iter().flat_map(|one| techniques.assignments(*one)).collect();
        Ok((added, WaterfallEntry { change: words.join(", "), set, ..entry }))
    }

    /// The plan's step without some of its techniques.
    fn run_without(&self, techniques: &Techniques<'_>, missing: &[Technique]) -> Result<Choice, StepError> {
        let (settings, accumulation) = techniques.without(missing);
        let rates = &self.machine.rates;
        let run = Choice::new(&self.spec, settings, accumulation, rates)?;
        // As the plan has it: of a pipeline, the stage of its rank.
        if self.fits() { run.of_own_stage(&self.spec, rates) } else { Ok(run) }
    }

    /// What would come next.
    fn further_step(&self) -> Option<FurtherStep> {
        if !self.fits() {
            return None;
        }
        let time = &self.choice.time;
        let tokens = time.step_seconds * time.tokens_per_second;
        let step = |other: &Alternative| FurtherStep {
            change: other.what.clone(),
            set: other.change.clone(),
            bytes_saved: difference(self.peak_bytes(), other.peak_bytes),
            seconds_added: tokens / other.tokens_per_second - time.step_seconds,
            device_peak_bytes: other.peak_bytes,
        };
        // Shorter sequences are another task.
        let same_task = |other: &&Alternative| other.change.iter().all(|set| !set.starts_with("data."));
        let single = self.alternatives.iter().filter(|other| other.fits && other.extent == Extent::Single);
        let steps = single.filter(same_task).map(step).filter(|step| step.bytes_saved > 0);
        steps.min_by(|a, b| a.price().compare(b.price()))
    }
}

impl FurtherStep {
    fn price(&self) -> Price {
        Price::of(self.bytes_saved, self.seconds_added)
    }
}

impl WaterfallEntry {
    fn of(run: &Choice) -> WaterfallEntry {
        let at_peak = run.dry_run.at_peak();
        let tags = at_peak.by_tag.iter().map(|(tag, bytes)| (tag.name(), bytes));
        WaterfallEntry {
            change: String::new(),
            set: Vec::new(),
            bytes_saved: 0,
            by_tag: BTreeMap::new(),
            seconds_added: 0.0,
            device_peak_bytes: run.peak_bytes(),
            at_peak: tags.chain([("gaps", at_peak.gaps())]).filter(|(_, bytes)| *bytes > 0).collect(),
            host_bytes: run.dry_run.host_bytes(),
            disk_bytes: run.dry_run.disk_bytes(),
            step_seconds: run.time.step_seconds,
        }
    }

    /// The same beside what was before.
    fn after(self, before: &WaterfallEntry) -> WaterfallEntry {
        let of = |entry: &WaterfallEntry, tag: &str| entry.at_peak.get(tag).copied().unwrap_or(0);
        let tags = before.at_peak.keys().chain(self.at_peak.keys());
        let saved = tags.map(|tag| (*tag, difference(of(before, tag), of(&self, tag))));
        WaterfallEntry {
            bytes_saved: difference(before.device_peak_bytes, self.device_peak_bytes),
            by_tag: saved.filter(|(_, bytes)| *bytes != 0).collect(),
            seconds_added: self.step_seconds - before.step_seconds,
            ..self
        }
    }

    fn price(&self) -> Price {
        Price::of(self.bytes_saved, self.seconds_added)
    }
}

/// How much time is lost for what is saved.
#[derive(Clone, Copy)]
enum Price {
    /// So many bytes for no time.
    Free(i64),
    /// So many seconds for a byte.
    PerByte(f64),
    /// So many seconds for nothing.
    Nothing(f64),
}

impl Price {
    fn of(bytes_saved: i64, seconds_added: f64) -> Price {
        match bytes_saved {
            ..=0 => Price::Nothing(seconds_added),
            bytes if seconds_added <= 0.0 => Price::Free(bytes),
            bytes => Price::PerByte(seconds_added / bytes as f64),
        }
    }

    /// Less is better.
    fn compare(self, other: Price) -> Ordering {
        match (self, other) {
            (Price::Free(one), Price::Free(other)) => other.cmp(&one),
            (Price::PerByte(one), Price::PerByte(other)) | (Price::Nothing(one), Price::Nothing(other)) => {
                one.total_cmp(&other)
            }
            (Price::Free(_), _) | (_, Price::Nothing(_)) => Ordering::Less,
            (_, Price::Free(_)) | (Price::Nothing(_), _) => Ordering::Greater,
        }
    }
}

/// All techniques but one.
fn others(all: &[Technique], place: usize) -> Vec<Technique> {
    all.iter().enumerate().filter(|(other, _)| *other != place).map(|(_, one)| *one).collect()
}

/// Bytes that are there before and not after.
pub(crate) fn difference(before: u64, after: u64) -> i64 {
    let bytes = i128::from(before) - i128::from(after);
    i64::try_from(bytes).unwrap_or(if bytes < 0 { i64::MIN } else { i64::MAX })
}
