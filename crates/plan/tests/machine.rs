//! What is said of a machine, and what is kept of its speed.

use std::path::Path;
use std::time::Duration;

use plimsoll_memory::{ByteSize, Tier};
use plimsoll_model::catalogue;
use plimsoll_plan::config::RawConfig;
use plimsoll_plan::hardware::{CgroupVersion, ContainerLimit, Cpu, Memory, disk_space};
use plimsoll_plan::{
    Catalogue, DiskName, DiskRates, Finder, LimitedBy, Measured, ModelOrigin, RatesFile, Resource, Sought,
    Target, TrainingPlan, fitting_devices,
};

fn cpu(allowed_cores: Option<usize>, logical_cores: Option<usize>) -> Cpu {
    Cpu {
        name: Some("Some CPU".to_owned()),
        architecture: "x86_64",
        logical_cores,
        allowed_cores,
        physical_cores: None,
        quota_cores: None,
        threads: 2,
        instruction_sets: vec!["AVX2"],
    }
}

#[test]
fn cores_are_counted_of_all_where_some_are_not_allowed() {
    for (allowed, logical, said) in [
        (Some(2), Some(4), "2 of 4 logical cores allowed"),
        (Some(4), Some(4), "4 logical cores"),
        (Some(8), Some(4), "8 logical cores"),
        (Some(3), None, "3 logical cores"),
        (None, Some(4), "4 logical cores"),
        (None, None, "unknown number of cores"),
    ] {
        let expected = format!("CPU        Some CPU (x86_64)\n           {said}: 2 threads\n           AVX2");
        assert_eq!(cpu(allowed, logical).to_string(), expected);
    }
}

#[test]
fn memory_is_shown_with_every_limit() {
    let size = |mib: u64| Some(ByteSize(mib << 20));
    let container = ContainerLimit {
        limit: ByteSize(1 << 30),
        free: None,
        version: CgroupVersion::V1,
        file: "/sys/fs/cgroup/memory/limit".into(),
    };
    let memory = Memory {
        total: size(4096),
        swap_total: size(512),
        swap_free: size(256),
        container: Some(container),
        data_limit: size(3072),
        ..Memory::default()
    };
    assert_eq!(
        memory.to_string(),
        "Memory     4.00 GiB in all, unknown available, 256.0 MiB of 512.0 MiB swap free\n           \
         1.00 GiB at most in the container (cgroup v1, /sys/fs/cgroup/memory/limit)\n           \
         3.00 GiB of private memory at most (ulimit -d)"
    );
    let none = Memory { swap_total: size(0), swap_free: size(0), ..Memory::default() };
    assert_eq!(none.to_string(), "Memory     unknown in all, unknown available, no swap");
    assert_eq!(Memory::default().to_string(), "Memory     unknown in all, unknown available");
}

#[cfg(target_os = "linux")]
#[test]
fn this_machine_has_memory_and_a_disk() {
    assert!(Memory::detect().total.is_some_and(|total| total.0 > 1 << 20));
    let space = disk_space(Path::new("/")).unwrap();
    assert!(space.total.0 > 1 << 20 && space.available <= space.total, "{space:?}");
}

#[test]
fn a_disk_is_known_by_both_of_its_rates() {
    let folder = tempfile::tempdir().unwrap();
    let file = RatesFile::at(folder.path().join("rates.json"));
    let name = DiskName { cpu: "c".to_owned(), folder: "/".into(), device: 1 };
    for (read, write, known) in [
        (2e9, 1e9, true),
        (0.0, 1e9, false),
        (2e9, 0.5, false),
        (-1.0, -1.0, false),
        (1.0, 1e18, true),
        (1.0, 2e18, false),
    ] {
        file.keep_disk(name.clone(), Measured::now(DiskRates { read, write })).unwrap();
        assert_eq!(file.disk(&name).is_some(), known, "{read} {write}");
    }
}

#[test]
fn a_measurement_has_an_age() {
    const YEAR: Duration = Duration::from_secs(365 * 24 * 3600);
    let old = Measured { rates: (), at: 0 };
    assert!(old.age() > 50 * YEAR && Measured::now(()).age() < YEAR);
    assert!(Measured::now(()).at > 50 * YEAR.as_secs());
}

fn target(name: &str) -> Target {
    Catalogue::known().target(name).unwrap()
}

/// The plan of a model for a machine of the catalogue.
fn plan_for(target: &Target, model: &str, set: &[&str]) -> TrainingPlan {
    let mut config = RawConfig::default();
    for assignment in ["data.sequence_length=512", "training.effective_batch_size=4"].iter().chain(set) {
        config.apply_set(assignment).unwrap();
    }
    TrainingPlan::new(&config, &catalogue::find(model).unwrap(), &target.machine(0)).unwrap()
}

/// The device's memory is the line, the host has its own, and the disk comes last.
#[test]
fn what_does_not_fit_a_device_goes_to_its_host_before_the_disk() {
    let card = target("rtx-4090");
    let plan = plan_for(&card, "tinyllama-1.1b", &[]);
    assert!(
        plan.fits() && plan.host_bytes() == plan.pipeline_bytes() && plan.disk_bytes() == 0,
        "{:?}",
        plan.misfits()
    );
    assert_eq!((plan.load_line.bytes, plan.load_line.by), (24_564 << 20, LimitedBy::Device));
    assert!(plan.peak_bytes() + plan.overhead_bytes <= 24_564 << 20);

    let plan = plan_for(&card, "llama-3.2-3b", &[]);
    assert!(plan.fits() && plan.disk_bytes() == 0, "{:?}", plan.misfits());
    let offload = plan.choice.settings.offload;
    assert!([offload.optimizer, offload.gradients].contains(&Tier::Host), "{offload:?}");
    assert!(plan.host_bytes() > 8 << 30 && plan.host_bytes() <= 64 << 30, "{}", plan.host_bytes());
    assert!(plan.bytes_under_the_line() > 20 << 30, "what has room is on the device again");

    // With no host to speak of, the disk serves.
    let poor = target("rtx-4090").with_host_memory(ByteSize(20 << 20));
    let plan = plan_for(&poor, "llama-3.2-3b", &[]);
    assert!(
        plan.fits() && plan.disk_bytes() > 8 << 30 && plan.host_bytes() <= 20 << 20,
        "{:?}",
        plan.misfits()
    );

    let short = plan_for(&poor, "llama-3.2-3b", &["memory.offload.optimizer=host"]);
    let host = short.shortages().into_iter().find(|shortage| shortage.resource == Resource::Host).unwrap();
    assert!(short.sentence(&host).contains("a rank's host memory is 20.0 MiB"), "{}", short.sentence(&host));
}

/// Products of few rows leave most of a card idle: it has more logits at once, as far as there is room and nobody says otherwise.
#[test]
fn a_card_has_more_logits_at_once_where_there_is_room() {
    let set = ["training.batch_size=2", "data.sequence_length=2048", "training.mixed_precision=bf16"];
    let of = |more: &[&str]| plan_for(&target("h100"), "tinyllama-1.1b", &[&set[..], more].concat());
    let plan = of(&[]);
    assert_eq!(plan.choice.settings.loss_chunk_tokens, 4096);
    let few = of(&["training.loss_chunk_tokens=256"]);
    assert_eq!(few.choice.settings.loss_chunk_tokens, 256);
    assert!(few.choice.time.step_seconds > plan.choice.time.step_seconds);
    // Where only the fewest have room, these it is.
    let budget = format!("memory.device_budget={}B", few.peak_bytes() + few.overhead_bytes + (1 << 20));
    let share = ["memory.target_utilization=1", "training.gradient_checkpointing=none", &budget];
    let tight = of(&share);
    assert!(tight.choice.settings.loss_chunk_tokens < 4096 && tight.fits(), "{:?}", tight.misfits());
}

/// A budget that is stated counts where it is smaller than the device.
#[test]
fn a_budget_below_the_devices_memory_is_the_line() {
    let stated = |budget: &str| {
        plan_for(&target("rtx-4090"), "smollm2-135m", &[&format!("memory.device_budget={budget}")]).load_line
    };
    assert_eq!((stated("8GiB").bytes, stated("8GiB").by), (8 << 30, LimitedBy::Budget));
    assert_eq!((stated("80GiB").bytes, stated("80GiB").by), (24_564 << 20, LimitedBy::Device));
}

/// What is bound by products takes as much less as the products are faster; the bytes are the same.
#[test]
fn the_same_step_takes_its_time_on_each_device() {
    let set =
        ["training.mixed_precision=bf16", "training.gradient_checkpointing=none", "training.batch_size=4"];
    let [a100, h100] = ["a100-80", "h100"].map(|name| plan_for(&target(name), "tinyllama-1.1b", &set));
    assert_eq!(a100.peak_bytes(), h100.peak_bytes());
    let ratio = a100.choice.time.step_seconds / h100.choice.time.step_seconds;
    assert!((1.6..3.2).contains(&ratio), "{ratio}");
    let link = |name: &str| {
        plan_for(&target(name), "tinyllama-1.1b", &[&set[..], &["parallel.data_parallel=8"]].concat())
            .choice
            .time
            .waiting_seconds
    };
    assert!(link("8xa100-80") * 4.0 < link("8xl40s"), "neighbours with NVLink wait less than those without");
}

fn origin(model: &str) -> ModelOrigin {
    ModelOrigin::Catalogue(Box::new(catalogue::find(model).unwrap()))
}

fn configured(set: &[&str]) -> RawConfig {
    let mut config = RawConfig::default();
    config.apply_set("model.path=smollm2-360m").unwrap();
    set.iter().for_each(|assignment| config.apply_set(assignment).unwrap());
    config
}

/// Whatever is found fits when it is set, and the next one does not.
#[test]
fn the_largest_that_fits_is_the_last_that_does() {
    let card = Target { disk: None, ..target("rtx-3060") };
    let machine = card.machine(0);
    let stay =
        "memory.offload={optimizer: device, parameters: device, gradients: device, activations: device}";
    let adapters = ["training.method=lora", "training.mixed_precision=bf16", stay];
    for (sought, key, set) in [
        (Sought::BatchSize, "training.batch_size", &["data.sequence_length=256", stay][..]),
        (Sought::SequenceLength, "data.sequence_length", &["training.batch_size=64", stay]),
        (Sought::Rank, "training.lora.rank", &adapters),
    ] {
        let (config, origin) = (configured(set), origin("smollm2-360m"));
        let found =
            Finder { config: &config, origin: &origin, machine: &machine }.largest(sought).unwrap().unwrap();
        assert!(found.plan.fits(), "{sought:?} {}", found.value);
        let value: u64 = found.value.parse().unwrap();
        let resolved = serde_json::to_value(&found.plan.config).unwrap();
        let set_to = key.split('.').fold(&resolved, |value, part| &value[part]);
        assert_eq!(*set_to, value, "{sought:?}");
        let Some((next, shortages)) = found.next else {
            // As many positions as the model has, or as many ranks as it is wide.
            assert!(value == 8192 || value == 960, "{sought:?} {value}");
            continue;
        };
        assert!(!shortages.is_empty());
        let mut over = configured(set);
        over.training.effective_batch_size = None;
        over.apply_set(&format!("{key}={next}")).unwrap();
        let plan = TrainingPlan::for_model(&over, &origin, &machine).unwrap();
        assert!(!plan.fits(), "{sought:?} {next}");
    }
    // Of a batch that is given in all, a micro-batch is a part.
    for whole in [6, 4096] {
        let whole = format!("training.effective_batch_size={whole}");
        let set = [whole.as_str(), "data.sequence_length=256", stay];
        let (config, origin) = (configured(&set), origin("smollm2-360m"));
        let question = Finder { config: &config, origin: &origin, machine: &machine };
        let found = question.largest(Sought::BatchSize).unwrap().unwrap();
        let with = |value: &str| {
            let mut config = configured(&set);
            config.apply_set(&format!("training.batch_size={value}")).unwrap();
            TrainingPlan::for_model(&config, &origin, &machine).unwrap().fits()
        };
        assert!(with(&found.value), "{whole} {}", found.value);
        assert!(found.next.is_none_or(|(next, _)| !with(&next)), "{whole} {}", found.value);
        assert!(whole.ends_with("=6") && found.value == "6" || whole.ends_with("=4096"), "{}", found.value);
    }
    let (config, origin) =
        (configured(&["training.batch_size=1", "data.sequence_length=256", stay]), origin("gpt2"));
    let question = Finder { config: &config, origin: &origin, machine: &machine };
    let found = question.largest(Sought::Model).unwrap().unwrap();
    let (larger, _) = found.next.unwrap();
    let parameters = |name: &str| catalogue::find(name).unwrap().parameter_count();
    assert!(found.plan.fits() && parameters(&found.value) <= parameters(&larger), "{} {larger}", found.value);
    assert!(parameters(&found.value) > 300_000_000, "{}", found.value);
    // A full fine-tuning has no rank, and nothing fits no memory.
    assert!(question.largest(Sought::Rank).unwrap_err().to_string().contains("lora or qlora"));
    let tiny = Finder { machine: &Target { host_memory: ByteSize(0), ..card }.machine(0), ..question };
    let small = configured(&["memory.device_budget=300MiB", stay]);
    let nothing = Finder { config: &small, ..tiny }.largest(Sought::BatchSize).unwrap();
    assert!(nothing.is_none());
}

#[test]
fn devices_that_fit_come_from_the_smallest_on() {
    let set = [
        "training.method=qlora",
        "data.sequence_length=512",
        "training.batch_size=1",
        "memory.offload.parameters=device",
    ];
    let found = fitting_devices(&configured(&set), &origin("llama-2-70b"), 0).unwrap();
    assert!(found.iter().all(|(_, plan)| plan.fits()));
    let memory: Vec<u64> = found.iter().map(|(target, _)| target.device.memory.0).collect();
    assert!(memory.is_sorted() && memory[0] > 35 << 30, "{memory:?}");
    assert!(found.iter().any(|(target, _)| target.name == "a6000"), "36 GiB of weights fit in 48");
}

#[test]
fn a_run_costs_its_hours() {
    let eight = target("8xa100-80");
    let plan =
        plan_for(&eight, "tinyllama-1.1b", &["parallel.data_parallel=8", "training.effective_batch_size=16"]);
    let of_step = 16 * 512;
    let cost = plan.cost(Some(1_000_000_000), eight.devices(), eight.dollars_an_hour()).unwrap();
    assert_eq!(cost.steps, 1_000_000_000_u64.div_ceil(of_step));
    assert_eq!(cost.tokens, cost.steps * of_step);
    let hours = cost.steps as f64 * plan.choice.time.step_seconds / 3600.0;
    assert!((cost.hours - hours).abs() < 1e-9 && (cost.device_hours - 8.0 * hours).abs() < 1e-9);
    let [low, high] = cost.dollars.unwrap();
    assert!((low - 0.78 * 8.0 * hours).abs() < 1e-6 && (high - 3.0 * 8.0 * hours).abs() < 1e-6);
    assert!(plan.cost(None, 8, None).is_none(), "nobody has said how long the run is");
    let steps = plan_for(
        &eight,
        "tinyllama-1.1b",
        &["parallel.data_parallel=8", "training.effective_batch_size=16", "training.steps=10"],
    );
    assert_eq!(steps.cost(None, 8, None).map(|cost| (cost.steps, cost.dollars)), Some((10, None)));
}

/// Ranks that share products are neighbours: what they send stays in the machine, and sums over data parallel ranks leave it.
#[test]
fn messages_to_other_machines_take_the_network() {
    let set = [
        "parallel.tensor_parallel=2",
        "training.mixed_precision=bf16",
        "parallel.overlap_communication=false",
    ];
    let on = |name: &str, data: &str| {
        let plan = plan_for(&target(name), "tinyllama-1.1b", &[&set[..], &[data]].concat());
        let sent = plan.choice.dry_run.moved.sent;
        (sent.total_bytes(), sent.between_machines(), plan.choice.time.waiting_seconds)
    };
    let (all, far, waiting) = on("2x2xh100", "parallel.data_parallel=2");
    assert!(far > 0 && far < all, "{far} of {all}");
    let (same, none, less) = on("4xh100", "parallel.data_parallel=2");
    assert_eq!((same, none), (all, 0));
    assert!(less < waiting, "{less} {waiting}");
    let (all, far, _) = on("2x1xh100", "parallel.data_parallel=1");
    // Squared norms of layers that are counted are not told apart.
    assert!(far > 0 && all - far < 4096, "{far} of {all}");
}
