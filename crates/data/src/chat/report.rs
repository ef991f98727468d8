//! What became of the samples: nothing is left out without being counted.

use std::fmt;

use serde::Serialize;

use crate::DataError;
use crate::records::RecordPlace;

/// Samples left out for one reason of which the report keeps the places.
const EXAMPLES: usize = 3;

/// Why a sample is left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum SkipReason {
    /// It cannot be read: not JSON, not UTF-8, not an object.
    Unreadable,
    /// None of its fields is one that samples have.
    OtherFields,
    /// Nothing is in it.
    Empty,
    /// Nobody answers.
    NoAssistant,
    /// An answer that is to be trained says nothing.
    EmptyAnswer,
    /// A speaker that neither chats nor the template know.
    UnknownRole,
    /// Its fields contradict what they should be.
    Malformed,
    /// It needs a model that sees or hears.
    Media,
    /// The chat template does not write it, or not so that its turns can be found.
    Template,
    /// It is longer than a sequence, where such are dropped.
    TooLong,
    /// No token of it counts in the loss.
    NothingTrained,
}

impl fmt::Display for SkipReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            SkipReason::Unreadable => "not readable as a record",
            SkipReason::OtherFields => "fields of something else",
            SkipReason::Empty => "empty",
            SkipReason::NoAssistant => "no assistant turn",
            SkipReason::EmptyAnswer => "an answer without a word",
            SkipReason::UnknownRole => "an unknown role",
            SkipReason::Malformed => "malformed",
            SkipReason::Media => "images, audio or video",
            SkipReason::Template => "not as the chat template wants it",
            SkipReason::TooLong => "longer than a sequence",
            SkipReason::NothingTrained => "nothing to train on",
        })
    }
}

impl SkipReason {
    /// Whether the record is no sample at all, and not only one that cannot be used.
    fn is_invalid(self) -> bool {
        matches!(self, SkipReason::Unreadable | SkipReason::OtherFields)
    }
}

/// A sample that is left out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Skip {
    /// Why.
    pub reason: SkipReason,
    /// The reason in detail.
    pub detail: String,
}

impl Skip {
    /// A reason with its detail.
    pub fn new(reason: SkipReason, detail: impl Into<String>) -> Skip {
        Skip { reason, detail: detail.into() }
    }
}

/// The samples that are left out for one reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Skipped {
    /// Why.
    pub reason: SkipReason,
    /// How many.
    pub samples: u64,
    /// The first ones: file, line and detail.
    pub examples: Vec<String>,
}

/// What became of the samples.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct SampleReport {
    /// Samples that were read.
    pub samples: u64,
    /// Of them, those that are trained on.
    pub kept: u64,
    /// Of them, those that were cut to the length of a sequence.
    pub truncated: u64,
    /// Of them, those whose tools the chat template does not write.
    pub tools_not_written: u64,
    /// Tokens of the samples that are trained on.
    pub tokens: u64,
    /// Of them, those that count in the loss.
    pub trained_tokens: u64,
    /// Those that are left out, by reason.
    pub skipped: Vec<Skipped>,
}

/// Counts a record that is left out.
pub(crate) fn count(skipped: &mut Vec<Skipped>, place: &RecordPlace, skip: Skip) {
    let example = format!("{place}: {}", skip.detail);
    match skipped.iter_mut().find(|skipped| skipped.reason == skip.reason) {
        Some(skipped) => {
            skipped.samples += 1;
            if skipped.examples.len() < EXAMPLES {
                skipped.examples.push(example);
            }
        }
        None => skipped.push(Skipped { reason: skip.reason, samples: 1, examples: vec![example] }),
    }
}

/// Refuses data of which too much is something else.
///
/// # Errors
/// More than `most`, a share of all, are no records or have none of the fields.
pub(crate) fn check_share(skipped: &[Skipped], records: u64, most: f64) -> Result<(), DataError> {
    let invalid: Vec<&Skipped> = skipped.iter().filter(|skipped| skipped.reason.is_invalid()).collect();
    let count: u64 = invalid.iter().map(|skipped| skipped.samples).sum();
    if count as f64 <= most * records as f64 {
        return Ok(());
    }
    let examples = invalid.iter().flat_map(|skipped| &skipped.examples);
    let examples = examples.map(|example| format!("\n  {example}")).collect();
    Err(DataError::TooManyInvalid { invalid: count, records, most, examples })
}

impl SampleReport {
    /// Counts a sample that is left out.
    pub(crate) fn skip(&mut self, place: &RecordPlace, skip: Skip) {
        self.samples += 1;
        count(&mut self.skipped, place, skip);
    }

    /// Samples that are left out.
    pub fn left_out(&self) -> u64 {
        self.samples - self.kept
    }
}

impl fmt::Display for SampleReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let share = 100.0 * self.trained_tokens as f64 / self.tokens.max(1) as f64;
        write!(
            f,
            "{} of {} samples, {} tokens, {} of them trained ({share:.0} %)",
            self.kept, self.samples, self.tokens, self.trained_tokens
        )?;
        if self.truncated > 0 {
            write!(f, "\n  {} cut to the length of a sequence", self.truncated)?;
        }
        if self.tools_not_written > 0 {
            write!(f, "\n  {} have tools, which the chat template does not write", self.tools_not_written)?;
        }
        self.skipped.iter().try_for_each(|skipped| write!(f, "\n  {skipped}"))
    }
}

impl fmt::Display for Skipped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} left out: {}", self.samples, self.reason)?;
        self.examples.iter().try_for_each(|example| write!(f, "\n    {example}"))
    }
}
