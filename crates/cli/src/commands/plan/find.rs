//! The largest of something that fits.

use plimsoll_memory::ByteSize;
use plimsoll_plan::{FindError, Found, Shortage, Sought};
use serde_json::{Value, json};

use crate::failure::Failure;

impl From<FindError> for Failure {
    fn from(error: FindError) -> Failure {
        match error {
            FindError::Config(error) => error.into(),
            FindError::Step(error) => error.into(),
            error @ FindError::Pointless(_) => Failure::usage(error.to_string()),
        }
    }
}

/// Nothing fits, not even the least.
pub fn nothing(sought: Sought) -> Failure {
    Failure::does_not_fit(format!(
        "no {} fits; plimsoll plan without --find says what is missing and what would help",
        sought.name().replace('_', " ")
    ))
}

/// What was found, in a line.
pub fn words(sought: Sought, found: &Found) -> String {
    let what = match sought {
        Sought::Model => "model of the catalogue".to_owned(),
        other => other.name().replace('_', " "),
    };
    let next = match &found.next {
        None if sought == Sought::SequenceLength => " (the model has no more positions)".to_owned(),
        None => String::new(),
        Some((next, shortages)) => format!(" ({next} is {} short)", ByteSize(short(shortages))),
    };
    format!("the largest {what} that fits: {}{next}; {} were tried\n\n", found.value, found.tried)
}

/// The same for machines.
pub fn document(sought: Sought, found: &Found) -> Value {
    let next = found.next.as_ref();
    json!({
        "key": sought.name(),
        "value": found.value,
        "next": next.map(|(value, shortages)| json!({ "value": value, "short_bytes": short(shortages) })),
        "tried": found.tried,
    })
}

/// The most that anything is short of.
fn short(shortages: &[Shortage]) -> u64 {
    shortages.iter().map(Shortage::bytes).max().unwrap_or(0)
}
