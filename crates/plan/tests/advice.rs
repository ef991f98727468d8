//! What a plan says when it does not fit: each suggestion, applied as it is said, fits, and what is called the least is.

use plimsoll_model::{ModelSpec, catalogue};
use plimsoll_plan::config::RawConfig;
use plimsoll_plan::{DiskRates, Machine, ProcessLimits, Rates, Resource, TrainingPlan};

fn spec() -> ModelSpec {
    ModelSpec { num_layers: 2, vocab_size: 4096, ..catalogue::find("smollm2-135m").unwrap() }
}

const OVERHEAD: u64 = 3 << 20;

fn machine(disk: u64) -> Machine {
    let rates = Rates {
        matmul_f32: 1e11,
        matmul_bf16: 1e11,
        memory_bandwidth: 1e10,
        exps: 1e9,
        disk: DiskRates::USUAL,
    };
    let limits = ProcessLimits::NONE;
    Machine { rates, limits, overhead_bytes: OVERHEAD, host_bytes_per_token: 32, disk_available: Some(disk) }
}

fn config(budget: u64, set: &[&str]) -> RawConfig {
    let text = "model: smollm2-135m\ndata: {sequence_length: 256}";
    let mut config = RawConfig::from_str(text, "test").unwrap();
    config.apply_set(&format!("memory.device_budget={budget}")).unwrap();
    set.iter().for_each(|assignment| config.apply_set(assignment).unwrap());
    config.validate().unwrap();
    config
}

fn with(config: &RawConfig, sets: &[String]) -> RawConfig {
    let mut config = config.clone();
    sets.iter().for_each(|set| config.apply_set(set).unwrap());
    config.validate().unwrap();
    config
}

fn plan(config: &RawConfig, machine: &Machine) -> TrainingPlan {
    TrainingPlan::new(config, &spec(), machine).unwrap()
}

const MIB: u64 = 1 << 20;

/// A line under which nothing fits without a disk.
fn needs_disk() -> u64 {
    let away = "memory.offload={optimizer: disk, gradients: disk, activations: disk, parameters: disk}";
    let set = [
        "training.mixed_precision=f32",
        "training.batch_size=1",
        "training.gradient_checkpointing=full",
        away,
    ];
    plan(&config(1 << 40, &set), &machine(1 << 40)).process_bytes().div_ceil(MIB) + 1
}

#[test]
fn whatever_a_refusal_suggests_fits_when_it_is_applied() {
    let on_host = "memory.offload={optimizer: host, gradients: host, activations: host, parameters: host}";
    let home =
        "memory.offload={optimizer: device, gradients: device, activations: device, parameters: device}";
    let line = needs_disk();
    let cases: [(u64, u64, &[&str]); 10] = [
        (line, 1 << 40, &["memory.disk_budget=0"]),
        (line, 20 * MIB, &[]),
        (70, 0, &[]),
        (4, 1 << 40, &[]),
        (60, 0, &[home, "training.batch_size=8", "training.gradient_checkpointing=none"]),
        (100, 1 << 40, &["training.batch_size=16", "training.gradient_accumulation_steps=2", home]),
        (160, 1 << 40, &[on_host, "memory.host_budget=1MiB"]),
        (40, 1 << 40, &[on_host]),
        (20, 0, &["training.method=lora", "training.batch_size=4"]),
        (
            80,
            4096,
            &[
                "memory.offload.optimizer=disk",
                "training.optimizer_in_backward=true",
                "training.max_gradient_norm=0",
            ],
        ),
    ];
    let (mut suggested, mut larger_disks, mut leasts) = (0, 0, 0);
    for (mib, disk, set) in cases {
        let (raw, machine) = (config(mib * MIB, set), machine(disk));
        let refused = plan(&raw, &machine);
        assert!(!refused.fits() && !refused.shortages().is_empty(), "{mib} MiB, {set:?}");
        let refusal = refused.refusal.as_ref().unwrap();
        for other in &refused.alternatives {
            let applied = plan(&with(&raw, &other.change), &machine);
            assert_eq!(applied.fits(), other.fits, "{mib} MiB, {set:?}: {other:?}: {:?}", applied.misfits());
            assert_eq!(other.fits, other.shortages.is_empty());
            suggested += usize::from(other.fits);
        }
        if let Some(need) = refusal.with_more_disk {
            let larger = Machine { disk_available: Some(need.disk_bytes), ..machine };
            let applied = plan(&with(&raw, &["memory.disk_budget=auto".to_owned()]), &larger);
            assert!(applied.fits(), "{mib} MiB, {set:?}: {need:?}: {:?}", applied.misfits());
            assert!(need.disk_bytes > refused.limits.disk_bytes, "a larger disk is the change");
            larger_disks += 1;
        }
        let some_fits = refused.alternatives.iter().any(|other| other.fits);
        assert!(some_fits || !refusal.least.is_empty(), "{mib} MiB, {set:?}");
        for least in &refusal.least {
            for (need, disk) in [(least.with_disk, u64::MAX / 4), (least.without_disk, 0)] {
                let fits = |bytes: u64| {
                    let sets = [
                        &least.change[..],
                        &[
                            format!("memory.device_budget={}", bytes + OVERHEAD),
                            "memory.host_budget=auto".to_owned(),
                            format!("memory.disk_budget={disk}"),
                        ],
                    ];
                    let machine = Machine { disk_available: None, ..machine };
                    plan(&with(&raw, &sets.concat()), &machine).fits()
                };
                assert!(fits(need.memory_bytes), "{set:?} {least:?}");
                assert!(!fits(need.memory_bytes - 1), "{set:?} {least:?}");
                leasts += 1;
            }
        }
    }
    assert!(suggested > 10 && larger_disks > 1 && leasts > 2, "{suggested} {larger_disks} {leasts}");
}

#[test]
fn what_is_short_is_named_with_what_is_missing() {
    let line = needs_disk() * MIB;
    let short = plan(&config(line, &["memory.disk_budget=0"]), &machine(1 << 40));
    let [shortage] = short.shortages()[..] else { panic!("{:?}", short.shortages()) };
    assert_eq!(shortage.resource, Resource::Memory);
    assert_eq!(shortage.bytes(), short.process_bytes() - line);
    let sentence = &short.misfits()[0];
    assert!(sentence.contains("MiB (the budget): ") && sentence.ends_with("short"), "{sentence}");
    // The disk is why nothing fits, and that is what it says.
    let need = short.refusal.unwrap().with_more_disk.unwrap();
    assert!(need.memory_bytes + OVERHEAD <= line && need.disk_bytes > 0);
    assert!(
        short.alternatives.iter().any(|other| {
            other.fits && other.change == [format!("memory.disk_budget={}", need.disk_bytes)]
        })
    );
}

#[test]
fn a_plan_that_fits_lists_what_would_need_less() {
    let fits = plan(&config(4 << 30, &[]), &machine(1 << 40));
    assert!(fits.fits() && fits.refusal.is_none() && !fits.alternatives.is_empty());
    let lighter = |other: &plimsoll_plan::Alternative| other.peak_bytes < fits.peak_bytes();
    assert!(fits.alternatives.iter().all(lighter));
    for other in &fits.alternatives {
        let applied = plan(&with(&fits.config, &other.change), &machine(1 << 40));
        assert_eq!(
            (applied.peak_bytes(), applied.disk_bytes()),
            (other.peak_bytes, other.disk_bytes),
            "{other:?}"
        );
    }
}
