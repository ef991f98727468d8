//! Planning takes memory that does not depend on how much a step does. Alone in its process, whose memory it looks at.

use plimsoll_model::catalogue;
use plimsoll_plan::config::RawConfig;
use plimsoll_plan::{Machine, ProcessLimits, Rates, TrainingPlan};

/// The most that this process has had in memory so far, in KiB.
fn most_resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

#[test]
fn a_plan_takes_little_memory_whatever_is_planned() {
    let rates = Rates::of_cpu([1e11, 1e11], 1e10, 1e9);
    let limits = ProcessLimits::NONE;
    let disk_available = Some(1 << 60);
    let machine = Machine {
        rates,
        limits,
        overhead_bytes: 0,
        host_bytes_per_token: 32,
        worker_bytes: 0,
        disk_available,
        disk_reserved: 0,
        device_bytes: None,
        host_bytes: None,
    };
    let spec = catalogue::find("smollm2-135m").unwrap();
    let away = "memory.offload.gradients=disk";
    for assignments in [
        ["training.mlp_chunk_tokens=1", "training.batch_size=200", away],
        ["training.method=lora", "training.mlp_chunk_tokens=3", "training.batch_size=2"],
        ["training.loss_chunk_tokens=1", "training.batch_size=16777216", "data.sequence_length=512"],
        ["training.batch_size=1", "data.sequence_length=16777216", away],
        ["training.batch_size=1", "training.gradient_accumulation_steps=16777216", "training.seed=1"],
        ["training.optimizer=adalomo", "training.gradient_accumulation_steps=1000000", away],
    ] {
        let mut config = RawConfig::from_str("data: {sequence_length: 512}", "test").unwrap();
        config.apply_set("memory.device_budget=1TiB").unwrap();
        config.apply_set("training.mixed_precision=bf16").unwrap();
        config.apply_set("training.gradient_checkpointing=full").unwrap();
        assignments.iter().for_each(|assignment| config.apply_set(assignment).unwrap());
        let before = most_resident();
        let plan = TrainingPlan::new(&config, &spec, &machine).unwrap();
        assert!(plan.peak_bytes() > 0);
        // The system counts pages in batches, so that its maximum may fall a little.
        let grown = most_resident().saturating_sub(before);
        assert!(grown < 48 << 10, "{grown} KiB: {assignments:?}");
    }
}
