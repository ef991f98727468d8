//! Which stages of a pipeline say what all of them take: of stages that do the same with as many micro-batches or fewer under way, one.

use plimsoll_model::{LayerKind, ModelSpec};
use plimsoll_step::{PipelineSchedule, Stage, StepSettings, TrainingMethod};

use crate::Network;

/// What a stage between the first and the last one does, beside the micro-batches that it has under way.
#[derive(PartialEq)]
struct Kind {
    layers: Vec<LayerKind>,
    /// Its place among the ranks of its machine: who else is there.
    of_machine: u32,
}

/// The ranks whose stages are to be run, the first stage first and then from the last one on. A stage in the middle has no more under way
/// than one of its kind before it, and does as much otherwise.
pub(crate) fn telling(spec: &ModelSpec, settings: &StepSettings, network: Option<Network>) -> Vec<u32> {
    let mesh = settings.ranks.mesh;
    let mut ranks = match mesh.pipeline {
        0 | 1 => return vec![settings.ranks.rank],
        _ => mesh.stage_group(settings.ranks.rank),
    };
    let in_order = !matches!(settings.pipeline_schedule, PipelineSchedule::Interleaved(rounds) if rounds > 1);
    // Adapters may be of some layers alone.
    if in_order && settings.method == TrainingMethod::Full {
        let count = mesh.pipeline;
        let of_machine = network.map_or(u32::MAX, |network| network.ranks_of_machine).max(1);
        let mut kinds: Vec<Kind> = Vec::new();
        let mut number = 0;
        ranks.retain(|rank| {
            let own = number;
            number += 1;
            if own == 0 || own + 1 == count {
                return true;
            }
            let part = Stage::part(spec, own, count);
            let layers = part.layers().map(|layer| spec.layer_kind(layer)).collect();
            let kind = Kind { layers, of_machine: rank % of_machine };
            let is_new = !kinds.contains(&kind);
            if is_new {
                kinds.push(kind);
            }
            is_new
        });
    }
    if let [_, later @ ..] = &mut ranks[..] {
        later.reverse();
    }
    ranks
}

#[cfg(test)]
mod tests {
    use plimsoll_model::catalogue;
    use plimsoll_step::StepError;

    use super::*;
    use crate::catalogue::Catalogue;
    use crate::config::{RawConfig, Started};
    use crate::resolve::{Choice, batches, checkpointings, offloads, precisions, step_settings};
    use crate::{Limits, Machine};

    /// Through every stage, and through those that are run.
    fn both(config: &RawConfig, spec: &ModelSpec, machine: &Machine) -> Result<usize, StepError> {
        let limits = Limits::of(config, machine);
        let mut checked = 0;
        let precision = precisions(&config.training, &TrainingMethod::Full, limits.narrow).remove(0);
        let batch = batches(config)[0][0];
        for offload in offloads(config, limits) {
            for form in checkpointings(&config.training).into_iter().step_by(3) {
                let settings = step_settings(config, spec, &TrainingMethod::Full, precision, form, batch.0);
                let settings = StepSettings { offload, ..settings };
                let rates = &machine.rates;
                let some = telling(spec, &settings, rates.wiring.network);
                let all = settings.ranks.mesh.stage_group(settings.ranks.rank);
                assert!(some.len() < all.len(), "{some:?}");
                let run = |ranks: Vec<u32>| Choice::through(ranks, spec, &settings, batch.1, rates, None);
                let (few, all) = (run(some)?, run(all)?);
                assert_eq!(few.peak_bytes(), all.peak_bytes(), "{settings:?}");
                assert_eq!(few.dry_run.host_bytes(), all.dry_run.host_bytes(), "{settings:?}");
                assert_eq!(few.dry_run.disk_bytes(), all.dry_run.disk_bytes(), "{settings:?}");
                assert_eq!(few.time.step_seconds, all.time.step_seconds, "{settings:?}");
                checked += 1;
            }
        }
        Ok(checked)
    }

    #[test]
    fn some_stages_say_what_all_of_them_take() {
        let target = Catalogue::known().target("4x8xh100").unwrap();
        let machine = target.machine(16);
        for (model, layers, set) in [
            ("llama-3.1-8b", 30, &["parallel.tensor_parallel=4", "parallel.pipeline_parallel=8"][..]),
            ("llama-3.1-8b", 22, &["parallel.pipeline_parallel=8", "parallel.pipeline_schedule=gpipe"]),
            ("gemma-3-12b", 48, &["parallel.tensor_parallel=8", "parallel.pipeline_parallel=4"]),
            ("olmoe-1b-7b", 16, &["parallel.pipeline_parallel=8"]),
        ] {
            let mut spec = ModelSpec { num_layers: layers, ..catalogue::find(model).unwrap() };
            // Half of the stages between the first and the last have experts.
            if let Some(experts) = &mut spec.experts {
                experts.layers = (0..layers).map(|layer| layer >= layers / 2).collect();
            }
            let mut config = RawConfig::from_str("model: m", "test").unwrap();
            let fixed = ["data.sequence_length=256", "training.gradient_accumulation_steps=12"];
            set.iter().chain(&fixed).for_each(|assignment| config.apply_set(assignment).unwrap());
            let config = config.on_ranks(Started { ranks: 32, of_each_machine: Some(8) }).unwrap();
            let checked = both(&config, &spec, &machine).unwrap();
            assert!(checked > 8, "{model}: {checked}");
        }
    }
}
