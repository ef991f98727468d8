//! What each of several ranks takes.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use plimsoll_device::DeviceTraits;
use plimsoll_model::ModelSpec;
use plimsoll_step::{Ranks, Stage, StepError, StepSettings};
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
pub(crate) fn rank_groups(
    spec: &ModelSpec,
    choice: &Choice,
    device: DeviceTraits,
) -> Result<Vec<RankGroup>, StepError> {
    let Ranks { mesh, .. } = choice.settings.ranks;
    if mesh.size() <= 1 {
        return Ok(Vec::new());
    }
    let alone = |rank| -> Result<RankGroup, StepError> {
        let ranks = Ranks { rank, mesh };
        let run = match ranks == choice.settings.ranks && mesh.pipeline <= 1 {
            true => &choice.dry_run,
            false => {
                let settings = StepSettings { ranks, ..choice.settings.clone() };
                &DryRun::training_for(device, spec, &settings, choice.accumulation)?
            }
        };
        Ok(RankGroup {
            ranks: vec![rank],
            device_peak_bytes: run.peak_bytes(),
            host_peak_bytes: run.host_bytes(),
            disk_bytes: run.disk_bytes(),
        })
    };
    let mut of_kinds: HashMap<Kind, Vec<RankGroup>> = HashMap::new();
    let mut groups: Vec<RankGroup> = Vec::new();
    for rank in 0..mesh.size() {
        let (kind, replica) = (Kind::of(spec, &choice.settings, rank), mesh.replica(rank));
        let of_kind = match of_kinds.entry(kind) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => {
                let place = mesh.place(rank);
                let rank = |replica| mesh.rank(place.stage, replica, place.part());
                new.insert(replicas(mesh.replicas(), mesh.size() <= FEW, &|replica| alone(rank(replica)))?)
            }
        };
        let what = StepError::Invariant { what: "a rank of a plan takes nothing" };
        let found = of_kind.get(replica as usize).cloned().ok_or(what)?;
        match groups.last_mut().filter(|group| group.is_like(&found)) {
            Some(group) => group.ranks.push(rank),
            None => groups.push(RankGroup { ranks: vec![rank], ..found }),
        }
    }
    Ok(groups)
}

/// Ranks of which those that hold the same share of everything take the same.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Kind {
    stage: u32,
    /// Whether it takes the norms of what all that have parts of the same layers have alike.
    leads: bool,
    /// Rows of the tables.
    table_rows: u64,
}

impl Kind {
    fn of(spec: &ModelSpec, settings: &StepSettings, rank: u32) -> Kind {
        let place = settings.ranks.mesh.place(rank);
        let table_rows = Stage::table_rows(spec, place.tensor, settings.ranks.mesh.tensor);
        Kind { stage: place.stage, leads: place.part() == 0, table_rows }
    }
}

/// What each of so many replicas takes. Unless all are run, those between two that take the same are taken to be alike.
fn replicas(
    count: u32,
    all: bool,
    alone: &impl Fn(u32) -> Result<RankGroup, StepError>,
) -> Result<Vec<RankGroup>, StepError> {
    if all {
        return (0..count).map(alone).collect();
    }
    let mut found = vec![alone(0)?];
    if count > 1 {
        between(&mut found, (count - 1, &alone(count - 1)?), alone)?;
    }
    Ok(found)
}

/// Adds the replicas behind the last of `found` up to `last`, whose number comes with it.
fn between(
    found: &mut Vec<RankGroup>,
    (end, last): (u32, &RankGroup),
    alone: &impl Fn(u32) -> Result<RankGroup, StepError>,
) -> Result<(), StepError> {
    let (begin, Some(first)) = (found.len() as u32, found.last()) else { return Ok(()) };
    if begin > end {
        return Ok(());
    }
    if begin == end || first.is_like(last) {
        found.extend((begin..=end).map(|_| last.clone()));
        return Ok(());
    }
    let middle = begin + (end - begin) / 2;
    between(found, (middle, &alone(middle)?), alone)?;
    between(found, (end, last), alone)
}
