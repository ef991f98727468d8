//! What a plan says when it does not fit: each suggestion, applied as it is said, fits, and what is called the least is.

use plimsoll_model::{ModelSpec, catalogue};
use plimsoll_plan::config::{Method, RawConfig, Started};
use plimsoll_plan::{Alternative, Extent, Machine, ProcessLimits, Rates, Resource, TrainingPlan};

fn spec() -> ModelSpec {
    ModelSpec { num_layers: 2, vocab_size: 4096, ..catalogue::find("smollm2-135m").unwrap() }
}

const OVERHEAD: u64 = 3 << 20;

fn machine(disk: u64) -> Machine {
    let rates = Rates::of_cpu([1e11, 1e11], 1e10, 1e9);
    let limits = ProcessLimits::NONE;
    Machine {
        rates,
        limits,
        overhead_bytes: OVERHEAD,
        host_bytes_per_token: 32,
        worker_bytes: 0,
        disk_available: Some(disk),
        disk_reserved: 0,
        device_bytes: None,
        host_bytes: None,
    }
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
    let two = "parallel.data_parallel=2";
    let cases: [(u64, u64, &[&str]); 12] = [
        (line, 1 << 40, &["memory.disk_budget=0"]),
        (line, 20 * MIB, &[]),
        (70, 0, &[]),
        (4, 1 << 40, &[]),
        (60, 0, &[home, "training.batch_size=8", "training.gradient_checkpointing=none"]),
        (100, 1 << 40, &["training.batch_size=16", "training.gradient_accumulation_steps=2", home]),
        (160, 1 << 40, &[on_host, "memory.host_budget=1MiB"]),
        (40, 1 << 40, &[on_host]),
        (20, 0, &["training.method=lora", "training.batch_size=4"]),
        // Each rank takes its part of the batch.
        (4, 1 << 40, &[two]),
        (4, 1 << 40, &[two, "training.batch_size=2", "training.effective_batch_size=8"]),
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

/// The assignments behind words of a suggestion; one sequence at a time with `effective` of them in a step.
fn assignments(words: &str, effective: u64) -> Vec<String> {
    let kinds = [
        ("optimizer states", "optimizer"),
        ("gradients", "gradients"),
        ("activations", "activations"),
        ("weights", "parameters"),
    ];
    for (kind, key) in kinds {
        if words == format!("{kind} on disk") {
            return vec![format!("memory.offload.{key}=disk")];
        }
        if words == format!("{kind} wherever there is room") {
            return vec![format!("memory.offload.{key}=auto"), format!("memory.kept_layers.{key}=auto")];
        }
    }
    if let Some(tokens) =
        words.strip_prefix("logits of ").and_then(|rest| rest.strip_suffix(" tokens at once"))
    {
        return vec![format!("training.loss_chunk_tokens={tokens}")];
    }
    let sets: &[&str] = match words {
        "checkpointing of all layers" => &["training.gradient_checkpointing=full"],
        "bf16" => &["training.mixed_precision=bf16"],
        "bf16 without master weights" => {
            &["training.mixed_precision=bf16", "training.master_weights=none", "training.gradient_dtype=bf16"]
        }
        "no prefetching" => &["memory.prefetch=false"],
        "half the sequence length" => &["data.sequence_length=128"],
        "8-bit optimizer states" => &["training.optimizer=adamw_8bit"],
        "saved activations in 8 bits" => &["training.activation_compression=int8"],
        "flash attention" => &["training.attention=flash"],
        "LoRA" => &["training.method=lora"],
        "QLoRA" => &["training.method=qlora"],
        "one sequence at a time" => {
            return vec![
                "training.batch_size=1".to_owned(),
                format!("training.gradient_accumulation_steps={effective}"),
                format!("training.effective_batch_size={effective}"),
            ];
        }
        other => panic!("{other}"),
    };
    sets.iter().map(|set| set.to_string()).collect()
}

/// Checks everything that a plan suggests: `+` before what fits, `-` before what does not.
#[track_caller]
fn check(mib: u64, disk: u64, set: &[&str], effective: u64, expected: &[&str]) -> TrainingPlan {
    let plan = plan(&config(mib * MIB, set), &machine(disk));
    let sign = |other: &Alternative| format!("{}{}", if other.fits { '+' } else { '-' }, other.what);
    let mut found: Vec<String> = plan.alternatives.iter().map(sign).collect();
    let mut expected: Vec<String> = expected.iter().map(|words| words.to_string()).collect();
    found.sort();
    expected.sort();
    assert_eq!(found, expected, "{set:?}");
    assert!(
        plan.alternatives
            .is_sorted_by(|a, b| { (a.fits, a.tokens_per_second) >= (b.fits, b.tokens_per_second) })
    );
    for other in &plan.alternatives {
        if other.what.starts_with("a larger") {
            continue;
        }
        let parts: Vec<&str> = other.what.split(" + ").collect();
        let change: Vec<String> = parts.iter().flat_map(|part| assignments(part, effective)).collect();
        assert_eq!(other.change, change, "{}", other.what);
        let extent = match parts[..] {
            ["LoRA" | "QLoRA"] => Extent::Method,
            [_] => Extent::Single,
            _ => Extent::Bundle,
        };
        assert_eq!(other.extent, extent, "{}", other.what);
    }
    plan
}

const HOME: &str =
    "memory.offload={optimizer: device, gradients: device, activations: device, parameters: device}";
/// What fits without prefetching is another question.
const PREFETCH: &str = "memory.prefetch=true";
const F32: &str = "training.mixed_precision=f32";
const NONE: &str = "training.gradient_checkpointing=none";

#[test]
fn what_would_need_less_is_listed_by_itself_and_together() {
    let ways = "optimizer states on disk + gradients on disk + activations on disk + weights on disk";
    let lossless = "checkpointing of all layers + one sequence at a time";
    let narrow = "bf16 without master weights";
    check(
        4096,
        1 << 40,
        &[HOME, F32, NONE, "training.batch_size=4"],
        4,
        &[
            "+checkpointing of all layers",
            "+one sequence at a time",
            "+optimizer states on disk",
            "+activations on disk",
            "+weights on disk",
            "+bf16 without master weights",
            "+half the sequence length",
            "+8-bit optimizer states",
            "+saved activations in 8 bits",
            "+logits of 256 tokens at once",
            &format!("+{lossless}"),
            &format!("+{ways}"),
            &format!("+{lossless} + {ways}"),
            &format!("+{lossless} + {narrow}"),
            &format!("+{lossless} + {ways} + {narrow}"),
            &format!("+{lossless} + {ways} + {narrow} + half the sequence length"),
        ],
    );
    // What is so already is not named, nor what saves nothing: this optimizer has no states.
    let full = "training.gradient_checkpointing=full";
    check(
        4096,
        1 << 40,
        &[HOME, F32, full, "training.batch_size=1", "training.optimizer=sgd"],
        1,
        &[
            "+activations on disk",
            "+weights on disk",
            "+bf16 without master weights",
            "+half the sequence length",
            "+saved activations in 8 bits",
            "+logits of 64 tokens at once",
            &format!("+{ways}"),
            &format!("+{ways} + {narrow}"),
            &format!("+{ways} + {narrow} + half the sequence length"),
        ],
    );
    // Half of 254 tokens is too short.
    let away = "memory.offload={optimizer: disk, gradients: disk, activations: device, parameters: device}";
    let set = [
        away,
        "training.mixed_precision=bf16",
        "training.master_weights=none",
        NONE,
        "training.batch_size=1",
        "data.sequence_length=254",
    ];
    check(
        4096,
        1 << 40,
        &set,
        1,
        &[
            "+checkpointing of all layers",
            "+no prefetching",
            "+activations on disk",
            "+weights on disk",
            "+8-bit optimizer states",
            "+saved activations in 8 bits",
            "+logits of 32 tokens at once",
            "+activations on disk + weights on disk",
            "+checkpointing of all layers + activations on disk + weights on disk",
        ],
    );
}

#[test]
fn what_would_fit_is_tried_from_one_change_to_several_and_to_other_methods() {
    let room = "optimizer states wherever there is room + gradients wherever there is room + activations wherever there is room + weights wherever there is room";
    let lossless = "checkpointing of all layers + one sequence at a time";
    let narrow = "bf16 without master weights";
    check(
        60,
        0,
        &[HOME, "training.batch_size=8", NONE],
        8,
        &[
            "-checkpointing of all layers",
            "-one sequence at a time",
            "-bf16 without master weights",
            "-half the sequence length",
            "-8-bit optimizer states",
            "-saved activations in 8 bits",
            "-logits of 512 tokens at once",
            &format!("-{lossless}"),
            &format!("-{lossless} + {room}"),
            &format!("-{lossless} + {narrow}"),
            &format!("-{lossless} + {room} + {narrow}"),
            &format!("-{lossless} + {room} + {narrow} + half the sequence length"),
            "-LoRA",
            "-QLoRA",
            &format!("+LoRA + {lossless} + {room}"),
        ],
    );
    // A batch that follows from two others is the user's; several changes are left out once one of them fits.
    let accumulate = "training.gradient_accumulation_steps=2";
    let singles = [
        "-checkpointing of all layers",
        "-bf16 without master weights",
        "-half the sequence length",
        "-optimizer states wherever there is room",
        "-activations wherever there is room",
        "-weights wherever there is room",
        "-8-bit optimizer states",
        "-saved activations in 8 bits",
    ];
    check(
        100,
        1 << 40,
        &["training.effective_batch_size=16", accumulate, NONE, HOME, PREFETCH],
        16,
        &[
            &singles[..],
            &[
                "-one sequence at a time",
                "-gradients wherever there is room",
                "-logits of 512 tokens at once",
                &format!("-{lossless}"),
                &format!("-{room}"),
                &format!("+{lossless} + {room}"),
                "-LoRA",
                "-QLoRA",
            ],
        ]
        .concat(),
    );
    // Pairs are for when no single change is enough, whatever other methods would do.
    let pairs = [
        "-logits of 64 tokens at once",
        "+8-bit optimizer states + bf16 without master weights",
        "+8-bit optimizer states + optimizer states wherever there is room",
        "+logits of 64 tokens at once + optimizer states wherever there is room",
        "+optimizer states wherever there is room + bf16 without master weights",
    ];
    let methods = ["+LoRA", "+QLoRA"];
    let expected = [&singles[..], &pairs, &methods].concat();
    check(100, 1 << 40, &[accumulate, NONE, HOME, PREFETCH], 16, &expected);
    let disk = check(
        needs_disk(),
        1 << 40,
        &["memory.disk_budget=0"],
        8,
        &[
            "+a larger disk budget",
            "-bf16 without master weights",
            "-half the sequence length",
            "-8-bit optimizer states",
            "-saved activations in 8 bits",
            "-logits of 64 tokens at once",
            "+LoRA",
            "+QLoRA",
        ],
    );
    let larger = disk.alternatives.iter().find(|other| other.what == "a larger disk budget").unwrap();
    assert_eq!(larger.change, [format!("memory.disk_budget={}", larger.disk_bytes)]);
}

#[test]
fn a_host_that_is_too_small_gets_the_budget_that_is_needed() {
    let on_host = "memory.offload={optimizer: host, gradients: host, activations: host, parameters: host}";
    let short = check(
        160,
        1 << 40,
        &[on_host, "memory.host_budget=1MiB", PREFETCH],
        8,
        &[
            "+a larger host budget",
            "-no prefetching",
            "-optimizer states wherever there is room",
            "-gradients wherever there is room",
            "-activations wherever there is room",
            "-bf16 without master weights",
            "-half the sequence length",
            "-8-bit optimizer states",
            "-saved activations in 8 bits",
            "-LoRA",
            "-QLoRA",
        ],
    );
    let larger = short.alternatives.iter().find(|other| other.fits).unwrap();
    assert_eq!(larger.change, [format!("memory.host_budget={}", short.host_bytes())]);
}

#[test]
fn the_least_is_named_for_the_method_and_for_those_that_need_less() {
    let bundle = "one sequence at a time + bf16";
    let lora = check(
        20,
        0,
        &["training.method=lora", "training.batch_size=4"],
        4,
        &[
            "-one sequence at a time",
            "-half the sequence length",
            "-8-bit optimizer states",
            "-saved activations in 8 bits",
            &format!("-{bundle}"),
            &format!("-{bundle} + half the sequence length"),
            "-QLoRA",
            "-QLoRA + one sequence at a time",
        ],
    );
    let auto = "{optimizer: auto, gradients: auto, activations: auto, parameters: auto}";
    let common = [
        "training.mixed_precision=bf16",
        "training.batch_size=1",
        "training.gradient_accumulation_steps=4",
        "training.effective_batch_size=4",
        "training.gradient_checkpointing=auto",
        &format!("memory.offload={auto}"),
        &format!("memory.kept_layers={auto}"),
    ];
    let least = lora.refusal.unwrap().least;
    let changes: Vec<&[String]> = least.iter().map(|least| &least.change[..]).collect();
    assert_eq!(changes, [&common[..], &[&["training.method=qlora"], &common[..]].concat()]);
    let methods: Vec<Method> = least.iter().map(|least| least.method).collect();
    assert_eq!(methods, [Method::Lora, Method::Qlora]);
    // Where something else fits, nobody asks for the least.
    let qlora = check(
        20,
        0,
        &["training.method=qlora", "training.batch_size=4"],
        4,
        &[
            "-one sequence at a time",
            "-half the sequence length",
            "-8-bit optimizer states",
            "-saved activations in 8 bits",
            "+one sequence at a time + half the sequence length",
        ],
    );
    assert!(qlora.refusal.unwrap().least.is_empty());
}

/// Each rank takes its part of the batch, also where the planner divides the ranks.
#[test]
fn the_least_is_named_where_the_planner_divides_the_ranks() {
    let raw = config(4 * MIB, &["parallel.tensor_parallel=auto", "training.effective_batch_size=4"]);
    let raw = raw.on_ranks(Started { ranks: 2, of_each_machine: None }).unwrap();
    let least = plan(&raw, &machine(1 << 40)).refusal.unwrap().least;
    let methods: Vec<Method> = least.iter().map(|least| least.method).collect();
    assert_eq!(methods, [Method::Full, Method::Lora, Method::Qlora]);
    assert!(least[0].change.contains(&"training.gradient_accumulation_steps=2".to_owned()));
}

/// Every method and optimizer under lines from next to nothing to almost enough: what is suggested fits, applied as it is said, and
/// saves what it says.
#[test]
fn suggestions_for_many_questions_fit_when_they_are_applied() {
    let questions: [&[&str]; 8] = [
        &[],
        &[HOME, F32],
        &[HOME, "training.batch_size=4", NONE],
        &["training.attention=standard", HOME, "data.sequence_length=512"],
        &["training.optimizer=lion", "training.effective_batch_size=16", HOME],
        &["training.method=lora", "training.batch_size=8", HOME],
        &["training.method=qlora", NONE, HOME, "training.batch_size=4"],
        &["training.optimizer_in_backward=true", "training.max_gradient_norm=0", HOME],
    ];
    let (mut refused, mut singles, mut pairs) = (0, 0, 0);
    for set in questions {
        let whole = plan(&config(1 << 40, set), &machine(0)).process_bytes();
        for (share, disk) in [(30, 0), (50, 0), (70, 0), (90, 0), (40, 60 * MIB)] {
            let (raw, machine) = (config(whole * share / 100, set), machine(disk));
            let asked = plan(&raw, &machine);
            if asked.fits() {
                continue;
            }
            refused += 1;
            for other in asked.alternatives.iter().filter(|other| other.fits) {
                let applied = plan(&with(&raw, &other.change), &machine);
                assert!(applied.fits(), "{share} %, {set:?}: {other:?}: {:?}", applied.misfits());
                let missing = asked.limits.shortages(&asked.choice).map(|shortage| shortage.bytes()).max();
                let over_memory = asked.shortages().iter().all(|short| short.resource == Resource::Memory);
                let is_budget = other.what.starts_with("a larger");
                assert!(
                    !over_memory || is_budget || other.bytes_saved >= missing.unwrap_or(0) as i64,
                    "{other:?}"
                );
                singles += usize::from(other.extent == Extent::Single);
                let parts: Vec<&str> = other.what.split(" + ").collect();
                pairs += usize::from(other.extent == Extent::Bundle && parts.len() == 2);
            }
            let one_fits =
                asked.alternatives.iter().any(|other| other.fits && other.extent == Extent::Single);
            let pair = |other: &&Alternative| {
                other.extent == Extent::Bundle && other.what.matches(" + ").count() == 1
            };
            let two_fit = asked.alternatives.iter().filter(pair).filter(|other| other.fits).count();
            assert!(!one_fits || two_fit == 0, "a pair is for when no change by itself is enough");
        }
    }
    assert!(refused >= 24 && singles > 20 && pairs > 5, "{refused} {singles} {pairs}");
}
