//! Why a key has its value in a plan, for people.

use plimsoll_memory::ByteSize;
use plimsoll_plan::{Explanation, Neighbour, Outcome, Planned, Shortage};

use crate::commands::advice::wrapped;
use crate::row;
use crate::table;
use crate::units::seconds;

/// The reason, and a line for each value.
pub fn words(explanation: &Explanation) -> String {
    let Explanation { key, value, reason, own, neighbours, .. } = explanation;
    let reason = wrapped(reason, "");
    if neighbours.is_empty() {
        return reason;
    }
    let mut rows =
        vec![row![key, "device", "step", "tokens/s", "fits"], planned(&format!("{value} (the plan)"), own)];
    let mut refusals = String::new();
    for Neighbour { value, becomes, outcome } in neighbours {
        match outcome {
            Outcome::Planned(other) => {
                let taken = becomes.as_ref().map_or(String::new(), |taken| format!(" ({taken})"));
                rows.push(planned(&format!("{value}{taken}"), other));
            }
            Outcome::Refused { refused } => {
                refusals.push_str(&wrapped(&format!("{value} cannot be: {refused}"), "  "));
            }
        }
    }
    format!("{reason}\n{}{refusals}", table::render(&rows))
}

fn planned(value: &str, planned: &Planned) -> Vec<String> {
    let short = planned.shortages.iter().map(Shortage::bytes).max().unwrap_or(0);
    row![
        value,
        ByteSize(planned.device_peak_bytes),
        seconds(planned.step_seconds),
        format!("{:.0}", planned.tokens_per_second),
        if planned.fits { "yes".to_owned() } else { format!("no, {} short", ByteSize(short)) }
    ]
}
