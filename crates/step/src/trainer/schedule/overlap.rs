//! Exchanges between ranks that are under way while the step computes: an exchange is begun where its bytes are there, and what
//! needs its outcome comes behind the work on the next unit. One unit's exchange is under way at a time, and sums are taken in the
//! same order as without.

use super::{Action, BetweenRanks};
use crate::tier::Unit;

/// The same actions with their exchanges behind the computation, where ranks do that:
///
/// - what follows the gradients of a unit (their sum, their norm, an update) comes behind the backward pass of the next unit;
/// - what others have updated of a unit is waited for behind the next unit's update.
pub(super) fn overlapped(actions: Vec<Action>, ranks: BetweenRanks) -> Vec<Action> {
    if !ranks.overlap {
        return actions;
    }
    let mut all = Vec::with_capacity(actions.len());
    // What waits for the exchange under way, and the unit of which more of that may follow.
    let (mut behind, mut followed) = (Vec::new(), None);
    for action in actions {
        match action {
            Action::Reduce { unit } => {
                all.append(&mut behind);
                all.push(Action::BeginReduce { unit });
                behind.push(Action::EndReduce { unit });
                followed = Some(unit);
            }
            action if followed.is_some_and(|unit| follows(&action, unit)) => behind.push(action),
            Action::AllGather { unit } => {
                all.append(&mut behind);
                all.push(Action::BeginAllGather { unit });
                behind.push(Action::EndAllGather);
                followed = None;
            }
            action => {
                all.push(action);
                followed = None;
            }
        }
    }
    all.append(&mut behind);
    all
}

/// Whether an action needs the summed gradients of a unit.
fn follows(action: &Action, unit: Unit) -> bool {
    match *action {
        Action::Measure { unit: of }
        | Action::Update { unit: of, .. }
        | Action::AllGather { unit: of }
        | Action::Free { unit: of } => of == unit,
        _ => false,
    }
}
