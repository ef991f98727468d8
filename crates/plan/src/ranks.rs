//! What each of several ranks takes.

use plimsoll_model::ModelSpec;
use plimsoll_step::{Ranks, StepError, StepSettings};
use serde::Serialize;

use crate::dry_run::DryRun;
use crate::resolve::Choice;

/// Ranks of which each is run dry, where they are so few. Of more, those between two of a stage that take the same are taken to be
/// alike: no rank has a larger share of anything than the rank before.
const FEW: u32 = 8;

/// Ranks that follow each other and take the same.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RankGroup {
    /// Their numbers.
    pub ranks: Vec<u32>,
    /// Peak of the device's arena.
    pub device_peak_bytes: u64,
    /// Of the host tier.
    pub host_peak_bytes: u64,
    /// Of the disk.
    pub disk_bytes: u64,
}

impl RankGroup {
    /// Whether another one takes the same.
    fn is_like(&self, other: &RankGroup) -> bool {
        let bytes = |group: &RankGroup| (group.device_peak_bytes, group.host_peak_bytes, group.disk_bytes);
        bytes(self) == bytes(other)
    }
}

/// The ranks of a step, by what they take; none where there is only one.
pub(crate) fn rank_groups(spec: &ModelSpec, choice: &Choice) -> Result<Vec<RankGroup>, StepError> {
    let count = choice.settings.ranks.count();
    if count <= 1 {
        return Ok(Vec::new());
    }
    let mesh = choice.settings.ranks.mesh;
    let alone = |rank| -> Result<RankGroup, StepError> {
        let ranks = Ranks { rank, mesh };
        let run = match ranks == choice.settings.ranks && mesh.pipeline <= 1 {
            true => &choice.dry_run,
            false => {
                let settings = StepSettings { ranks, ..choice.settings.clone() };
                &DryRun::training(spec, &settings, choice.accumulation)?
            }
        };
        Ok(RankGroup {
            ranks: vec![rank],
            device_peak_bytes: run.peak_bytes(),
            host_peak_bytes: run.host_bytes(),
            disk_bytes: run.disk_bytes(),
        })
    };
    let mut all = Vec::new();
    let of_stage = mesh.replicas().saturating_mul(mesh.tensor.max(1));
    for first in (0..count).step_by(of_stage as usize) {
        let end = count.min(first + of_stage);
        if count <= FEW {
            all.extend((first..end).map(alone).collect::<Result<Vec<_>, _>>()?);
            continue;
        }
        let mut of_stage = vec![alone(first)?];
        if end - first > 1 {
            let last = alone(end - 1)?;
            between(&mut of_stage, &last, &alone)?;
            of_stage.push(last);
        }
        all.append(&mut of_stage);
    }
    let mut groups: Vec<RankGroup> = Vec::new();
    for rank in all {
        match groups.last_mut().filter(|group| group.is_like(&rank)) {
            Some(group) => group.ranks.extend(rank.ranks),
            None => groups.push(rank),
        }
    }
    Ok(groups)
}

/// Adds the ranks between the last of `found` and `last`.
fn between(
    found: &mut Vec<RankGroup>,
    last: &RankGroup,
    alone: &impl Fn(u32) -> Result<RankGroup, StepError>,
) -> Result<(), StepError> {
    let (Some(first), Some(end)) = (found.last().cloned(), last.ranks.first().copied()) else {
        return Ok(());
    };
    let begin = first.ranks.last().map_or(0, |rank| rank + 1);
    if begin >= end {
        return Ok(());
    }
    if first.is_like(last) {
        found.push(RankGroup { ranks: (begin..end).collect(), ..first });
        return Ok(());
    }
    let middle = alone(begin + (end - begin) / 2)?;
    between(found, &middle, alone)?;
    found.push(middle);
    between(found, last, alone)
}
