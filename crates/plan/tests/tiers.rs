//! Which plan is made where memory, the host's budget or the disk are short.

use plimsoll_memory::Tier;
use plimsoll_model::{ModelSpec, catalogue};
use plimsoll_plan::config::{Auto, OffloadTarget, RawConfig};
use plimsoll_plan::{LimitedBy, TrainingPlan};
use plimsoll_step::Offload;

use crate::common::machine;

fn spec() -> ModelSpec {
    catalogue::find("smollm2-135m").unwrap()
}

fn config(budget: u64, set: &[&str]) -> RawConfig {
    let mut config = RawConfig::from_str("data: {sequence_length: 64}", "test").unwrap();
    config.apply_set(&format!("memory.device_budget={budget}")).unwrap();
    set.iter().for_each(|assignment| config.apply_set(assignment).unwrap());
    config
}

fn plan(budget: u64, set: &[&str]) -> TrainingPlan {
    TrainingPlan::new(&config(budget, set), &spec(), &machine()).unwrap()
}

const F32: [&str; 2] = ["training.mixed_precision=f32", "training.batch_size=1"];

/// The arena of the lightest step in f32, with everything at home or the optimizer's states on disk.
fn lightest(offload: &str) -> u64 {
    let set = ["training.gradient_checkpointing=full", offload];
    plan(u64::MAX / 4, &[&F32[..], &set].concat()).process_bytes()
}

#[test]
fn nothing_leaves_the_device_unasked_while_something_fits() {
    let plan = plan(64 << 30, &[]);
    assert!(plan.fits());
    assert_eq!(plan.choice.settings.offload, Offload::NONE);
    assert_eq!(plan.config.memory.offload.optimizer, Some(Auto::Set(OffloadTarget::Device)));
    assert_eq!((plan.disk_bytes(), plan.host_bytes()), (0, plan.pipeline_bytes()));
}

#[test]
fn the_optimizer_is_the_first_to_leave_and_what_was_said_stays() {
    let (home, away) =
        (lightest("memory.offload.optimizer=device"), lightest("memory.offload.optimizer=disk"));
    if away >= home {
        println!("skipped: the step keeps its optimizer on the device");
        return;
    }
    let short = plan((home + away) / 2, &F32);
    assert!(short.fits(), "{:?}", short.misfits());
    assert_eq!(short.choice.settings.offload, Offload { optimizer: Tier::Disk, ..Offload::NONE });
    assert!(short.disk_bytes() > 0);
    let stays = ["memory.offload.optimizer=device", "memory.offload.parameters=device"];
    let short = plan((home + away) / 2, &[&F32[..], &stays].concat());
    assert_eq!(
        (short.choice.settings.offload.optimizer, short.choice.settings.offload.parameters),
        (Tier::Device, Tier::Device)
    );
    let no_disk = plan((home + away) / 2, &[&F32[..], &["memory.disk_budget=4096"]].concat());
    assert!(!no_disk.fits());
    // What the user sends to a disk that is too small stays there, and the plan says what is short.
    let forced = ["memory.disk_budget=4096", "memory.offload.optimizer=disk"];
    let forced = plan(home, &[&F32[..], &forced].concat());
    assert!(
        forced.misfits().iter().any(|reason| reason.contains("memory.disk_budget is 4.00 KiB")),
        "{:?}",
        forced.misfits()
    );
}

#[test]
fn the_host_tier_and_the_pipeline_count_against_the_line_unless_they_have_a_budget() {
    let offload =
        "memory.offload={optimizer: host, gradients: device, activations: device, parameters: device}";
    let set = [&F32[..], &[offload, "training.gradient_checkpointing=full", "memory.prefetch=true"]].concat();
    let whole = plan(u64::MAX / 4, &set);
    let (arena, host) = (whole.peak_bytes(), whole.host_bytes());
    assert!(plan(arena + host, &set).fits());
    let over = plan(arena + host - 1, &set);
    assert!(!over.fits());
    assert!(over.misfits()[0].contains("the load line is"), "{:?}", over.misfits());
    let own = format!("memory.host_budget={host}");
    assert!(plan(arena, &[&set[..], &[&own]].concat()).fits());
    let less = format!("memory.host_budget={}", host - 1);
    let over = plan(arena, &[&set[..], &[&less]].concat());
    assert!(over.misfits()[0].contains("memory.host_budget"), "{:?}", over.misfits());
}

#[test]
fn a_containers_limit_is_kept_by_device_and_host_together() {
    let mut machine = machine();
    machine.limits.container = Some(2 << 30);
    let plan = TrainingPlan::new(&config(64 << 30, &[]), &spec(), &machine).unwrap();
    assert_eq!(plan.load_line.by, LimitedBy::Container);
    assert!(plan.load_line.bytes < 2 << 30);
    assert!(!plan.fits() || plan.process_bytes() <= plan.load_line.bytes);
}

#[test]
fn address_space_has_to_hold_the_checkpoint_too() {
    let mut machine = machine();
    let set = [
        &F32[..],
        &[
            "training.gradient_checkpointing=full",
            "memory.offload={optimizer: device, gradients: device, activations: device, parameters: device}",
        ],
    ]
    .concat();
    let needed = plan(u64::MAX / 4, &set).process_bytes();
    machine.limits.address_space = Some(needed + needed / 8);
    let plan = TrainingPlan::new(&config(64 << 30, &set), &spec(), &machine).unwrap();
    assert!(!plan.fits());
    assert!(plan.misfits()[0].contains("address space"), "{:?}", plan.misfits());
}

#[test]
fn micro_batches_share_a_pass_where_that_saves_traffic_and_changes_no_bit() {
    let untied = ModelSpec { tie_word_embeddings: false, ..spec() };
    let away = "memory.offload={parameters: disk, gradients: disk, optimizer: disk, activations: disk}";
    let set =
        [&F32[..], &[away, "training.gradient_accumulation_steps=8", "training.gradient_checkpointing=full"]]
            .concat();
    let with = |spec: &ModelSpec, budget: u64, more: &[&str]| {
        let config = config(budget, &[&set[..], more].concat());
        TrainingPlan::new(&config, spec, &machine()).unwrap()
    };
    let one = with(&untied, 4 << 30, &["training.micro_batches_per_pass=1"]);
    let chosen = with(&untied, 4 << 30, &[]);
    let together = chosen.choice.settings.micro_batches_per_pass;
    assert_eq!((one.choice.settings.micro_batches_per_pass, together), (1, 8));
    assert_eq!(chosen.config.training.micro_batches_per_pass, Some(Auto::Set(8)));
    assert!(chosen.choice.time.step_seconds < 0.8 * one.choice.time.step_seconds);
    // Gradients of a layer are written once a pass, and its weights read twice.
    let [of_one, of_chosen] = [&one, &chosen].map(|plan| plan.choice.dry_run.moved);
    assert!(
        of_chosen.written < of_one.written / 2 && of_chosen.read < of_one.read / 2,
        "{of_chosen:?} {of_one:?}"
    );
    // What there is no room for is not chosen, nor what changes bits, nor what saves nothing.
    let least = one.process_bytes() + (256 << 10);
    assert!(with(&untied, least, &[]).choice.settings.micro_batches_per_pass < 8);
    assert!(with(&untied, least, &[]).fits());
    let of = |plan: TrainingPlan| plan.choice.settings.micro_batches_per_pass;
    assert_eq!(of(with(&spec(), 4 << 30, &[])), 1);
    let home = "memory.offload={parameters: device, gradients: device, optimizer: disk, activations: device}";
    assert_eq!(of(with(&untied, 64 << 30, &[home])), 1);
    assert_eq!(of(with(&spec(), 4 << 30, &["training.micro_batches_per_pass=3"])), 3);
}

/// A step holds the tokens and targets of all of its micro-batches.
#[test]
fn accumulation_takes_memory_of_the_host() {
    let host = |steps: u64| {
        let set = [F32[0], F32[1], &format!("training.gradient_accumulation_steps={steps}")];
        plan(4 << 30, &set).host_bytes()
    };
    assert_eq!([host(1), host(1000) - host(1)], [32 * 64, 999 * 64 * 8]);
}

/// Frozen experts of weights that are away come by themselves: the plan finds how many of them are there at a time, and what they make
/// a step read.
#[test]
fn frozen_experts_have_slots_where_weights_are_away() {
    let spec = catalogue::find("qwen3-30b-a3b").unwrap().of_layers(&[0, 1, 2, 3]);
    let base = [
        "training.method=qlora",
        "training.lora.target_modules=[q_proj, k_proj, v_proj, o_proj]",
        "training.batch_size=1",
        "training.gradient_accumulation_steps=4",
        "training.gradient_checkpointing=full",
        "memory.offload={parameters: disk, gradients: device, optimizer: device, activations: device}",
        "memory.kept_layers.parameters=0",
    ];
    let with = |budget: u64, set: &[&str]| {
        TrainingPlan::new(&config(budget, &[&base[..], set].concat()), &spec, &machine()).unwrap()
    };
    let few = with(64 << 30, &["memory.expert_slots=8", "training.micro_batches_per_pass=1"]);
    let all = with(64 << 30, &["memory.expert_slots=128"]);
    let [of_few, of_all] = [&few, &all].map(|plan| plan.expert_reads().unwrap());
    assert_eq!((of_few.slots, of_all.slots, of_all.experts), (8, 128, 4 * 128));
    // Four micro-batches share a pass and what it reads.
    assert_eq!(all.choice.settings.micro_batches_per_pass, 4);
    assert!(of_all.worst_bytes * 4 < of_few.worst_bytes, "{of_all:?} {of_few:?}");
    assert!(of_all.even_bytes < of_all.worst_bytes && of_all.even_bytes > of_all.worst_bytes / 10 * 9);
    assert_eq!(all.to_json()["memory"]["experts"]["slots"], 128);
    // As many as there is room for, which is what the configuration then says.
    let one = ["training.micro_batches_per_pass=1"];
    let all_of_one = with(64 << 30, &[&one[..], &["memory.expert_slots=128"]].concat());
    let [least, most] = [few.process_bytes(), all_of_one.process_bytes()];
    let some = with(least.midpoint(most), &[&one[..], &["memory.target_utilization=1"]].concat());
    let slots = some.expert_reads().unwrap().slots;
    assert!(some.fits() && slots > 40 && slots < 128, "{slots}");
    assert_eq!(some.config.memory.expert_slots, Some(Auto::Set(u64::from(slots))));
    let again = TrainingPlan::new(&some.config, &spec, &machine()).unwrap();
    assert_eq!(again.choice.settings, some.choice.settings);
    // Where every expert of a layer has room, whole layers come ahead of their use if that is faster.
    let open = with(64 << 30, &[]);
    assert!(open.choice.time.step_seconds <= all.choice.time.step_seconds);
    // With their layers, where that is asked for or experts are trained.
    let layers = with(64 << 30, &["memory.expert_slots=0"]);
    assert!(layers.expert_reads().is_none() && layers.process_bytes() > few.process_bytes());
    assert!(with(64 << 30, &["training.method=full"]).expert_reads().is_none());
}
