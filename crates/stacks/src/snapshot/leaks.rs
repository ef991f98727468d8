//! Allocations that only grow, with the line of Python that makes them, and what such growth usually is.

use std::collections::BTreeMap;

use serde::Serialize;

use super::analysis::{Change, Peak};
use super::kinds::GuessedKind;
use super::records::{Snapshot, StackId};

/// Parts of a trace that are compared. What is alike in each step has the same least in all of them.
const PARTS: usize = 8;

/// Of the steps from a part to the next, so many must grow.
const GROWING: usize = 5;

/// A trace that is shorter shows no trend.
const SHORTEST: usize = 64;

/// A line whose allocations only grow.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Leak {
    /// By how much the least of them grew, from the first part of the trace to the last.
    pub bytes: u64,
    /// Allocations that the trace does not free.
    pub count: u64,
    /// What they are for.
    pub kind: GuessedKind,
    /// The line that a user can change.
    pub line: Option<String>,
    /// How many stacks lead through that line.
    pub stacks: u64,
    /// The stack that grew most, innermost frame first.
    pub stack: Vec<String>,
}

/// What growth, or a large part of the peak, usually is.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Pattern {
    /// `losses_kept_with_their_graph`, `tensors_kept_in_a_list`, `evaluation_with_gradients`, `growing_cache`, `hooks`.
    pub name: &'static str,
    /// Bytes that show it.
    pub bytes: u64,
    /// Where.
    pub line: Option<String>,
    /// What it is, and what to do.
    pub advice: &'static str,
}

/// A leak with what its pattern is seen by.
pub(super) struct Grown {
    pub leak: Leak,
    stacks: Vec<StackId>,
}

#[derive(Clone, Copy, Default)]
struct OfStack {
    live: i128,
    allocated: u64,
    freed: u64,
    part: u8,
    /// The least of each part so far.
    least: [i128; PARTS],
}

/// What each stack has live, part by part.
pub(super) struct Growth {
    stacks: Vec<OfStack>,
    entries: usize,
}

impl Growth {
    pub fn new(stacks: usize, entries: usize) -> Self {
        Growth { stacks: vec![OfStack::default(); stacks], entries }
    }

    pub fn change(&mut self, at: usize, change: Change) {
        let part = at * PARTS / self.entries.max(1);
        let Some(stack) = self.stacks.get_mut(change.stack.0 as usize) else { return };
        stack.begin(part.min(PARTS - 1));
        stack.live += change.bytes;
        *(if change.bytes > 0 { &mut stack.allocated } else { &mut stack.freed }) += 1;
        let least = &mut stack.least[stack.part as usize];
        *least = (*least).min(stack.live);
    }

    /// Lines that grow, the fastest first.
    pub fn leaks(mut self, snapshot: &Snapshot) -> Vec<Grown> {
        let mut lines: BTreeMap<String, Vec<(u64, u64, StackId)>> = BTreeMap::new();
        if self.entries >= SHORTEST {
            // Stack 0 is no stack: what has none cannot be told apart.
            for (at, stack) in self.stacks.iter_mut().enumerate().skip(1) {
                stack.begin(PARTS - 1);
                if let Some(bytes) = stack.grown() {
                    let id = StackId(at as u32);
                    let line = snapshot.user_line(id).unwrap_or_default();
                    lines.entry(line).or_default().push((
                        bytes,
                        stack.allocated.saturating_sub(stack.freed),
                        id,
                    ));
                }
            }
        }
        let mut leaks: Vec<Grown> =
            lines.into_iter().map(|(line, stacks)| Grown::of(snapshot, line, stacks)).collect();
        leaks.sort_by_key(|grown| std::cmp::Reverse(grown.leak.bytes));
        leaks
    }
}

impl OfStack {
    fn begin(&mut self, part: usize) {
        for next in self.part as usize + 1..=part {
            self.least[next] = self.live;
        }
        self.part = self.part.max(part as u8);
    }

    /// By how much the least of a part grew, if it never fell, grew often, and still did in the last quarter.
    fn grown(&self) -> Option<u64> {
        let steps = self.least.windows(2).map(|pair| pair[1] - pair[0]);
        let growing = steps.clone().filter(|step| *step > 0).count();
        let still = self.least[PARTS - 1] > self.least[PARTS - 3];
        let only_grows = steps.clone().all(|step| step >= 0) && growing >= GROWING && still;
        only_grows.then(|| u64::try_from(self.least[PARTS - 1] - self.least[0]).unwrap_or(u64::MAX))
    }
}

impl Grown {
    fn of(snapshot: &Snapshot, line: String, mut stacks: Vec<(u64, u64, StackId)>) -> Grown {
        stacks.sort_by_key(|(bytes, _, stack)| (std::cmp::Reverse(*bytes), *stack));
        let most = stacks[0].2;
        let sum =
            |value: fn(&(u64, u64, StackId)) -> u64| stacks.iter().map(value).fold(0, u64::saturating_add);
        let leak = Leak {
            bytes: sum(|stack| stack.0),
            count: sum(|stack| stack.1),
            kind: snapshot.guess(most),
            line: Some(line).filter(|line| !line.is_empty()),
            stacks: stacks.len() as u64,
            stack: snapshot.stack(most).map(|frame| snapshot.words(frame)).collect(),
        };
        Grown { leak, stacks: stacks.into_iter().map(|(_, _, stack)| stack).collect() }
    }
}

/// Names of functions in which models are evaluated.
const EVALUATING: [&str; 6] = ["evaluat", "validat", "eval_step", "test_step", "predict", "inference"];

/// Stacks of one evaluation that live together, from which on its graph must be kept: without gradients a layer's input and output
/// and some temporaries live.
const KEPT_STACKS: usize = 12;

/// A share of the peak below which an evaluation is not worth a word.
const NOTICED: u64 = 10;

impl Pattern {
    /// What the leaks and the peak show.
    pub(super) fn of(snapshot: &Snapshot, leaks: &[Grown], peak: &Peak) -> Vec<Pattern> {
        let mut patterns: Vec<Pattern> =
            leaks.iter().map(|grown| Pattern::of_leak(snapshot, grown)).collect();
        // The graph of a loss is saved in many lines of a model; one word for all of them is enough.
        let mut merged: Vec<Pattern> = Vec::new();
        for pattern in patterns.drain(..) {
            match merged.iter_mut().find(|other| other.name == pattern.name && other.name == GRAPH) {
                Some(other) => other.bytes = other.bytes.saturating_add(pattern.bytes),
                None => merged.push(pattern),
            }
        }
        merged.extend(Pattern::of_evaluation(peak));
        merged.sort_by_key(|pattern| std::cmp::Reverse(pattern.bytes));
        merged
    }

    fn of_leak(snapshot: &Snapshot, grown: &Grown) -> Pattern {
        let any =
            |fits: fn(&str) -> bool| grown.stacks.iter().any(|stack| snapshot.has_function(*stack, fits));
        let (name, advice) = if any(|function| function.contains("hook")) {
            ("hooks", "a hook keeps what it sees: detach() and move it to the CPU there, or remove the hook")
        } else if grown.leak.kind == GuessedKind::KvCache
            || any(|function| function.contains("cache"))
            || grown.leak.count <= 2
        {
            ("growing_cache", "a cache grows with every step: bound it, or empty it between sequences")
        } else if grown.leak.kind == GuessedKind::Activations {
            (GRAPH, "a loss or an output is kept with its graph: keep loss.item() or loss.detach() instead")
        } else {
            (
                "tensors_kept_in_a_list",
                "a tensor of every step is kept: move it to the CPU or keep .item() of it",
            )
        };
        Pattern { name, bytes: grown.leak.bytes, line: grown.leak.line.clone(), advice }
    }

    /// Activations of an evaluation that live at the peak, of so many operations that their graph must be kept.
    fn of_evaluation(peak: &Peak) -> Option<Pattern> {
        let is_evaluation = |frame: &String| {
            let function = frame.rsplit(' ').next().unwrap_or_default();
            EVALUATING.iter().any(|part| function.contains(part))
        };
        let kept: Vec<_> = peak
            .live
            .iter()
            .filter(|live| live.kind == GuessedKind::Activations && live.stack.iter().any(is_evaluation))
            .collect();
        let bytes = kept.iter().map(|live| live.bytes).fold(0, u64::saturating_add);
        let shows = kept.len() >= KEPT_STACKS && bytes >= peak.allocated_bytes / NOTICED;
        shows.then(|| Pattern {
            name: "evaluation_with_gradients",
            bytes,
            line: kept[0].stack.iter().find(|frame| is_evaluation(frame)).cloned(),
            advice: "an evaluation keeps its graph: put it under torch.no_grad() or torch.inference_mode()",
        })
    }
}

const GRAPH: &str = "losses_kept_with_their_graph";
