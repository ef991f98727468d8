//! The table of ZeRO's stages, beside plans of the same.

use plimsoll_model::{ModelSpec, catalogue};
use plimsoll_plan::TrainingPlan;
use plimsoll_plan::config::RawConfig;

use crate::common::machine;

fn plan(set: &[&str]) -> TrainingPlan {
    let spec = ModelSpec { num_layers: 4, vocab_size: 4096, ..catalogue::find("smollm2-135m").unwrap() };
    let text = "model: m\ndata: {sequence_length: 96}\ntraining: {batch_size: 1, gradient_accumulation_steps: 2, \
        mixed_precision: f32, gradient_checkpointing: full}\nmemory: {device_budget: 64GiB}\nparallel: {overlap_communication: false}";
    let mut config = RawConfig::from_str(text, "test").unwrap();
    set.iter().for_each(|assignment| config.apply_set(assignment).unwrap());
    config.validate().unwrap();
    TrainingPlan::new(&config, &spec, &machine()).unwrap()
}

/// Every row is what a plan says of so many ranks, whatever else they share.
#[test]
fn a_row_is_the_plan_of_as_many_ranks() {
    for ways in [
        &[][..],
        &["parallel.tensor_parallel=3"],
        &["parallel.pipeline_parallel=2"],
        &["parallel.tensor_parallel=3", "parallel.pipeline_parallel=2", "parallel.context_parallel=2"],
    ] {
        let together = plan(ways).choice.settings.ranks.count();
        let rows = plan(&[ways, &["parallel.data_parallel=3", "parallel.zero_stage=1"]].concat());
        let rows = rows.zero_table().unwrap();
        let counts: Vec<u32> = rows.iter().map(|row| row.data_parallel).collect();
        assert_eq!(counts, [1, 2, 3, 4, 8, 64].repeat(4));
        for row in rows.iter().filter(|row| [2, 8].contains(&row.data_parallel)) {
            let of_row = [
                format!("parallel.data_parallel={}", row.data_parallel),
                format!("parallel.zero_stage={}", row.zero_stage),
            ];
            let of_row = plan(&[ways, &[&of_row[0], &of_row[1]]].concat());
            assert_eq!(row.device_peak_bytes, of_row.peak_bytes(), "{ways:?} {row:?}");
            assert_eq!(row.ranks, row.data_parallel * together);
            // What the formula has is there, and more.
            assert!(row.weights + row.gradients + row.states >= row.paper_bytes / 2, "{row:?}");
            assert!(row.paper_bytes > 0 && row.device_peak_bytes > row.paper_bytes / 2, "{row:?}");
        }
        let of =
            |stage: u32| rows.iter().find(|row| (row.zero_stage, row.data_parallel) == (stage, 8)).unwrap();
        assert!((1..4).all(|stage| of(stage).paper_bytes < of(stage - 1).paper_bytes));
    }
    // A stage of two has half of the formula's bytes.
    let of = |ways: &[&str]| plan(ways).zero_table().unwrap()[0].paper_bytes;
    assert_eq!(of(&["parallel.pipeline_parallel=2"]), of(&[]) / 2);
}
