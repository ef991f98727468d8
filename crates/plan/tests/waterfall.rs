//! From the naive step to the plan's: every technique that a plan has is an entry, the entries add up, and each is what a dry run of
//! that step says.

use std::collections::BTreeMap;

use plimsoll_model::{ModelSpec, catalogue};
use plimsoll_plan::config::{RawConfig, Started};
use plimsoll_plan::{Catalogue, DryRun, TrainingPlan, Waterfall};
use plimsoll_step::{AttentionKind, Checkpointing, StepSettings};

use crate::common::machine;

fn spec() -> ModelSpec {
    ModelSpec { num_layers: 6, vocab_size: 4096, ..catalogue::find("smollm2-135m").unwrap() }
}

fn config(set: &[&str]) -> RawConfig {
    let mut config = RawConfig::from_str("model: m\ndata: {sequence_length: 128}", "test").unwrap();
    config.apply_set("memory.device_budget=64GiB").unwrap();
    set.iter().for_each(|assignment| config.apply_set(assignment).unwrap());
    config.validate().unwrap();
    config
}

fn plan(set: &[&str]) -> TrainingPlan {
    TrainingPlan::new(&config(set), &spec(), &machine()).unwrap()
}

fn changes(waterfall: &Waterfall) -> Vec<&str> {
    waterfall.entries.iter().skip(1).map(|entry| entry.change.as_str()).collect()
}

/// The entries lead from the first peak and time to the plan's, byte for byte, whatever the tag.
fn adds_up(plan: &TrainingPlan) -> Waterfall {
    let waterfall = plan.waterfall().unwrap();
    let naive = waterfall.entries.first().unwrap();
    let last = waterfall.entries.last().unwrap();
    assert_eq!(last.device_peak_bytes, plan.peak_bytes());
    assert_eq!(last.step_seconds, plan.choice.time.step_seconds);
    assert_eq!((last.host_bytes, last.disk_bytes), (plan.choice.dry_run.host_bytes(), plan.disk_bytes()));
    let (mut peak, mut seconds) = (naive.device_peak_bytes as i64, naive.step_seconds);
    let mut tags: BTreeMap<&str, i64> =
        naive.at_peak.iter().map(|(tag, bytes)| (*tag, *bytes as i64)).collect();
    for entry in &waterfall.entries {
        peak -= entry.bytes_saved;
        seconds += entry.seconds_added;
        assert_eq!(peak, entry.device_peak_bytes as i64, "{}", entry.change);
        assert_eq!(entry.by_tag.values().sum::<i64>(), entry.bytes_saved, "{}", entry.change);
        entry.by_tag.iter().for_each(|(tag, bytes)| *tags.entry(tag).or_default() -= bytes);
        let left: BTreeMap<&str, i64> = tags.clone().into_iter().filter(|(_, bytes)| *bytes != 0).collect();
        let at_peak: BTreeMap<&str, i64> =
            entry.at_peak.iter().map(|(tag, bytes)| (*tag, *bytes as i64)).collect();
        assert_eq!(left, at_peak, "{}", entry.change);
    }
    assert!((seconds - last.step_seconds).abs() < 1e-9 * seconds.abs());
    waterfall
}

#[test]
fn a_plan_with_every_technique_of_one_rank_has_an_entry_for_each() {
    let all = [
        "training.method=qlora",
        "training.optimizer=adamw_8bit",
        "training.batch_size=1",
        "training.effective_batch_size=8",
        "training.gradient_checkpointing=full",
        "training.activation_compression=int8",
        "training.loss_chunk_tokens=32",
        "training.mlp_chunk_tokens=64",
        "memory.offload={optimizer: disk, gradients: disk, activations: disk, parameters: disk}",
        "memory.kept_layers.parameters=2",
        "training.micro_batches_per_pass=2",
    ];
    let waterfall = adds_up(&plan(&all));
    let mut found = changes(&waterfall);
    found.sort_unstable();
    let mut wanted = [
        "flash attention",
        "bf16 for f32",
        "checkpointing full",
        "saved activations in 8 bits",
        "adamw_8bit for AdamW",
        "frozen weights in nf4",
        "optimizer states on the disk",
        "gradients on the disk",
        "activations on the disk",
        "weights on the disk but for 2 layers",
        "2 micro-batches in a pass",
        "logits of 32 tokens at once",
        "feed-forward parts of 64 tokens at once",
        "micro-batches of 1 sequence, 8 accumulated",
    ];
    wanted.sort_unstable();
    assert_eq!(found, wanted);
    let first = &waterfall.entries[0];
    assert_eq!(first.change, "the naive way: f32, AdamW, all 8 x 128 tokens at once, everything kept");
    assert!(first.set.is_empty() && waterfall.entries.iter().skip(1).all(|entry| !entry.set.is_empty()));
}

#[test]
fn other_precisions_optimizers_and_timings_add_up() {
    let cases: [(&[&str], &[&str]); 6] = [
        (&["training.mixed_precision=bf16", "training.master_weights=none"], &["no f32 master weights"]),
        (&["training.mixed_precision=fp8"], &["linear layers in 8-bit floats"]),
        (
            &["training.mixed_precision=fp8", "training.master_weights=none"],
            &["linear layers in 8-bit floats", "no f32 master weights"],
        ),
        (&["training.mixed_precision=fp16", "training.optimizer=adafactor"], &["adafactor for AdamW"]),
        (
            &[
                "training.optimizer_in_backward=true",
                "training.max_gradient_norm=0",
                "training.optimizer=sgd",
            ],
            &["sgd for AdamW", "updates in the backward pass"],
        ),
        (
            &[
                "data.sequence_length=512",
                "training.sequence_chunk_tokens=128",
                "memory.offload.activations=disk",
            ],
            &["sequences in chunks of 128", "activations on the disk"],
        ),
    ];
    for (set, wanted) in cases {
        let waterfall = adds_up(&plan(set));
        let found = changes(&waterfall);
        assert!(wanted.iter().all(|change| found.contains(change)), "{set:?}: {found:?}");
        // What the user has fixed is no technique: there is nothing in f32 to begin with.
        assert!(
            !found.contains(&"bf16 for f32") || set[0].starts_with("data") || set[0].contains("backward")
        );
    }
}

/// A chunk of logits that is larger than all of them is no technique, and makes none of others.
#[test]
fn chunks_that_hold_everything_are_no_techniques() {
    let plan = plan(&[
        "training.mixed_precision=f32",
        "training.batch_size=2",
        "training.gradient_accumulation_steps=1",
        "training.loss_chunk_tokens=16384",
        "training.gradient_checkpointing=none",
        "training.attention=flash",
    ]);
    assert_eq!(changes(&adds_up(&plan)), ["flash attention"]);
}

#[test]
fn the_naive_step_is_the_one_that_is_named() {
    let plan =
        plan(&["training.mixed_precision=f32", "training.effective_batch_size=8", "training.batch_size=2"]);
    let own = &plan.choice.settings;
    let naive = StepSettings {
        batch_size: 8,
        attention: AttentionKind::Standard,
        loss_chunk_tokens: 8 * 128,
        checkpointing: Checkpointing::None,
        ..own.clone()
    };
    let run = DryRun::timed_training(&spec(), &naive, 1, &plan.machine.rates).unwrap();
    let waterfall = adds_up(&plan);
    assert_eq!(waterfall.entries[0].device_peak_bytes, run.peak_bytes());
    // What saves more for its time comes first: with micro-batches, flash attention has less left to save.
    assert_eq!(changes(&waterfall), ["micro-batches of 2 sequences, 4 accumulated", "flash attention"]);
    let flash = StepSettings { attention: own.attention, ..naive };
    let flash = DryRun::timed_training(&spec(), &flash, 1, &plan.machine.rates).unwrap();
    let seconds = |run: &DryRun| run.times.unwrap().elapsed;
    let added = seconds(&flash) - seconds(&run);
    let price = added / (run.peak_bytes() - flash.peak_bytes()) as f64;
    let first = &waterfall.entries[1];
    assert!(first.seconds_added / (first.bytes_saved as f64) < price, "{price} {first:?}");
}

#[test]
fn ranks_add_up_and_a_model_beyond_any_memory_has_a_naive_step() {
    let started = Started { ranks: 16, of_each_machine: Some(8) };
    let text = "model: m\ndata: {sequence_length: 512}\nparallel: {tensor_parallel: 2, pipeline_parallel: 2, zero_stage: 2}";
    let config = RawConfig::from_str(text, "test").unwrap().on_ranks(started).unwrap();
    let target = Catalogue::known().target("2x8xh100").unwrap();
    let spec = ModelSpec { num_layers: 8, ..catalogue::find("llama-3.1-405b").unwrap() };
    let plan = TrainingPlan::new(&config, &spec, &target.machine(32)).unwrap();
    let waterfall = adds_up(&plan);
    let found = changes(&waterfall);
    for change in ["ZeRO stage 2", "2 tensor parallel ranks for each", "2 pipeline stages"] {
        assert!(found.contains(&change), "{found:?}");
    }
    let long =
        ["data.sequence_length=131072", "training.effective_batch_size=64", "memory.device_budget=24GiB"];
    let spec = ModelSpec { num_layers: 4, ..spec };
    let plan = TrainingPlan::new(&self::config(&long), &spec, &machine()).unwrap();
    let waterfall = adds_up(&plan);
    assert!(waterfall.entries[0].device_peak_bytes > 1 << 50);
    assert_eq!(waterfall.next, None);
    // More bytes than 64 bits count: the way begins where it can.
    let longest = [&long[1..], &["data.sequence_length=16777216"]].concat();
    let plan = TrainingPlan::new(&self::config(&longest), &spec, &machine()).unwrap();
    let first = &adds_up(&plan).entries[0].change;
    assert!(first.ends_with("everything kept, but flash attention"), "{first}");
}

#[test]
fn what_comes_next_saves_what_it_says() {
    let set = ["training.effective_batch_size=8", "training.batch_size=2", "data.sequence_length=256"];
    let plan = plan(&set);
    let next = plan.waterfall().unwrap().next.unwrap();
    let mut other = plan.config.clone();
    next.set.iter().for_each(|set| other.apply_set(set).unwrap());
    let other = TrainingPlan::new(&other, &spec(), &machine()).unwrap();
    assert_eq!(other.peak_bytes(), next.device_peak_bytes);
    assert_eq!(next.bytes_saved, plan.peak_bytes() as i64 - other.peak_bytes() as i64);
    assert!(next.bytes_saved > 0);
    // That is the cheapest of what does not change the task, however much shorter sequences would save.
    let shorter = plan.alternatives.iter().find(|other| other.what == "half the sequence length").unwrap();
    assert!(!next.set.iter().any(|set| shorter.change.contains(set)), "{next:?}");
}

/// What a technique saves is the difference to the same step without it, and everything is either allocated, a gap, or free.
#[test]
fn a_breakdown_adds_up_and_each_technique_saves_what_a_run_without_it_takes_more() {
    let plan = plan(&[
        "training.gradient_checkpointing=full",
        "training.mixed_precision=f32",
        "training.batch_size=4",
    ]);
    let found = plan.breakdown();
    assert_eq!(found.allocated_bytes + found.gap_bytes, plan.peak_bytes());
    assert_eq!(found.reserved_bytes, plan.peak_bytes() + plan.overhead_bytes);
    assert_eq!(found.by_tag.values().sum::<u64>(), found.allocated_bytes);
    let of_layers: u64 = found.by_layer.iter().flat_map(|layer| layer.by_tag.values()).sum();
    assert_eq!(of_layers, found.allocated_bytes);
    assert_eq!(found.by_phase.values().max(), Some(&plan.peak_bytes()));
    assert_eq!(found.free_bytes, plan.load_line.bytes - plan.process_bytes());
    let all = plan.optimizations();
    let on: Vec<&str> = all.iter().filter(|one| one.enabled).flat_map(|one| one.keys.clone()).collect();
    assert!(on.contains(&"training.gradient_checkpointing") && on.contains(&"training.attention"), "{on:?}");
    assert!(all.iter().filter(|one| !one.enabled).all(|one| one.bytes_saved.is_none()));
    let settings = &plan.choice.settings;
    let without = StepSettings { checkpointing: Checkpointing::None, ..settings.clone() };
    let more = DryRun::training(&spec(), &without, plan.choice.accumulation).unwrap().peak_bytes();
    let checkpointing = all.iter().find(|one| one.keys == ["training.gradient_checkpointing"]).unwrap();
    assert_eq!(checkpointing.bytes_saved, Some((more - plan.peak_bytes()) as i64));
    assert!(checkpointing.seconds_added.unwrap() > 0.0);
}

#[test]
fn activations_are_known_for_any_shape() {
    let plan = plan(&["training.mixed_precision=f32", "training.batch_size=2"]);
    let all = plan.activations(4, 256).unwrap();
    let find = |checkpointing, flash| {
        let same = |one: &&plimsoll_plan::ActivationMemory| {
            (one.gradient_checkpointing, one.flash_attention) == (checkpointing, flash)
        };
        *all.iter().find(same).unwrap()
    };
    let (kept, again) = (find(false, true), find(true, true));
    assert!(
        again.activation_bytes < kept.activation_bytes
            && find(false, false).activation_bytes > kept.activation_bytes
    );
    assert_eq!(again.saved_by_checkpointing_bytes, (kept.activation_bytes - again.activation_bytes) as i64);
    assert_eq!(kept.saved_by_checkpointing_bytes, 0);
    // Twice the batch is about twice the activations.
    let twice = plan.activations(8, 256).unwrap()[0].activation_bytes as f64 / kept.activation_bytes as f64;
    assert!((1.9..2.1).contains(&twice), "{twice}");
    let shape = |text: &str| plan.config.batch_shape(text);
    assert_eq!((shape("8x2048"), shape("3")), (Ok((8, 2048)), Ok((3, 128))));
    for wrong in ["", "x", "8x", "0x8", "8x1", "8x99999999999", "a"] {
        assert!(shape(wrong).unwrap_err().contains("is no shape"), "{wrong}");
    }
}
