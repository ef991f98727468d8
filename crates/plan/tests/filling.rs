//! Automatic choices use the line: what was sent away comes back as far as there is room, and nothing is filled beyond
//! what may be.

use plimsoll_memory::Tier;
use plimsoll_model::{ModelSpec, catalogue};
use plimsoll_plan::config::RawConfig;
use plimsoll_plan::{LimitedBy, Machine, Resource, TrainingPlan};
use plimsoll_step::{KeptLayers, Offload};

use crate::common::machine;

fn spec() -> ModelSpec {
    ModelSpec { num_layers: 12, vocab_size: 8192, ..catalogue::find("smollm2-135m").unwrap() }
}

fn config(budget: u64, set: &[&str]) -> RawConfig {
    let mut config = RawConfig::from_str("data: {sequence_length: 128}", "test").unwrap();
    config.apply_set(&format!("memory.device_budget={budget}")).unwrap();
    set.iter().for_each(|assignment| config.apply_set(assignment).unwrap());
    config
}

fn plan_on(machine: &Machine, budget: u64, set: &[&str]) -> TrainingPlan {
    TrainingPlan::new(&config(budget, set), &spec(), machine).unwrap()
}

fn plan(budget: u64, set: &[&str]) -> TrainingPlan {
    plan_on(&machine(), budget, set)
}

const MIB: u64 = 1 << 20;
const ALL_ON_DISK: &str =
    "memory.offload={optimizer: disk, gradients: disk, activations: disk, parameters: disk}";
const F32: &str = "training.mixed_precision=f32";

#[test]
fn what_was_sent_away_comes_back_as_far_as_there_is_room() {
    for mib in [100, 140, 180, 220, 260] {
        let chosen = plan(mib * MIB, &[F32, "memory.target_utilization=0.95"]);
        let settings = &chosen.choice.settings;
        assert!(chosen.fits() && settings.offload != Offload::NONE, "{mib}");
        // What is left is too small for anything of another layer: its weights or gradients have 14 MiB.
        let (used, target) = (chosen.process_bytes(), mib * MIB * 95 / 100);
        assert!(used <= target && used > target - 14 * MIB, "{mib} {used} {settings:?}");
        // The plan can be run again.
        let again = TrainingPlan::new(&chosen.config, &spec(), &machine()).unwrap();
        assert_eq!(again.choice.settings, *settings);
        assert_eq!((again.peak_bytes(), again.disk_bytes()), (chosen.peak_bytes(), chosen.disk_bytes()));
    }
}

#[test]
fn what_the_user_sent_away_stays_away() {
    let away = plan(1 << 40, &[F32, ALL_ON_DISK]);
    assert_eq!(away.choice.settings.kept_layers, KeptLayers::NONE);
    let kept = plan(1 << 40, &[F32, ALL_ON_DISK, "memory.kept_layers.parameters=5"]);
    assert_eq!(kept.choice.settings.kept_layers, KeptLayers { parameters: 5, ..KeptLayers::NONE });
    assert!(kept.peak_bytes() > away.peak_bytes() && kept.disk_bytes() < away.disk_bytes());
    // A count that was said holds where the planner decides the rest.
    let fixed = plan(200 * MIB, &[F32, "memory.kept_layers.optimizer=1"]);
    assert_eq!(fixed.choice.settings.kept_layers.optimizer, 1);
}

#[test]
fn a_disk_that_is_too_small_for_everything_takes_a_part() {
    let [home, optimizer] = ["device", "disk"].map(|place| {
        let place = format!("memory.offload={{optimizer: {place}, gradients: device, activations: device, parameters: device}}");
        plan(u64::MAX / 4, &[F32, "training.batch_size=1", "training.gradient_checkpointing=full", &place])
    });
    let budget = home.process_bytes() - home.process_bytes() / 20;
    let disk = optimizer.disk_bytes() / 2;
    let machine = Machine { disk_available: Some(disk), ..machine() };
    let part = plan_on(&machine, budget, &[F32]);
    assert!(part.fits(), "{:?}", part.misfits());
    assert!(part.disk_bytes() > 0 && part.disk_bytes() <= disk);
    assert!(part.choice.settings.kept_layers.optimizer > 0);
    // What the checkpoints and the model of the run will take there is not to be had.
    let shared = Machine { disk_available: Some(2 * disk), disk_reserved: disk, ..machine };
    let beside = plan_on(&shared, budget, &[F32]);
    assert!(beside.fits(), "{:?}", beside.misfits());
    assert_eq!(beside.choice.settings, part.choice.settings);
    let full = Machine { disk_reserved: 2 * disk - 1, ..shared };
    let everything = ["memory.offload.optimizer=disk", "memory.kept_layers.optimizer=0"];
    let refused = plan_on(&full, budget, &[&[F32], &everything[..]].concat());
    let words = refused.misfits().join(" ");
    assert!(words.contains("for the checkpoints and the model of the run"), "{words}");
}

#[test]
fn automatic_choices_fill_the_target_and_no_more() {
    let home =
        "memory.offload={optimizer: device, gradients: device, activations: device, parameters: device}";
    let plan = |share: &str| plan(1600 * MIB, &[F32, home, "data.sequence_length=2048", share]);
    let whole = plan("memory.target_utilization=1").process_bytes();
    for share in [0.6, 0.8, 0.95] {
        let chosen = plan(&format!("memory.target_utilization={share}")).process_bytes();
        let target = (1600.0 * share) as u64 * MIB;
        assert!(chosen <= target && whole > target, "{share} {chosen} {whole}");
    }
}

#[test]
fn a_single_micro_batch_is_turned_to_where_updates_come_in_the_backward_pass() {
    let set = [
        "training.optimizer=adalomo",
        "training.optimizer_in_backward=true",
        "training.max_gradient_norm=0",
        "training.mixed_precision=bf16",
        "training.master_weights=none",
        "memory.offload={optimizer: device, gradients: device, activations: device, parameters: device}",
    ];
    let roomy = plan(1 << 34, &set);
    assert_eq!(roomy.choice.settings.batch_size * roomy.choice.accumulation, 8);
    let accumulate =
        [&set[..], &["training.batch_size=1", "training.gradient_accumulation_steps=8"]].concat();
    let single = [&set[..], &["training.batch_size=1", "training.gradient_accumulation_steps=1"]].concat();
    let [eight, one] = [accumulate, single]
        .map(|set| plan(1 << 34, &[&set[..], &["training.gradient_checkpointing=full"]].concat()));
    assert!(one.process_bytes() < eight.process_bytes(), "{} {}", one.process_bytes(), eight.process_bytes());
    let short = plan(one.process_bytes(), &set);
    assert!(short.fits(), "{:?}", short.misfits());
    assert_eq!(short.choice.accumulation, 1);
    assert!(short.choice.settings.batch_size < 8);
    // Eight sequences at once have no sum either.
    let together = ["training.batch_size=8", "training.gradient_accumulation_steps=1"];
    let full = "training.gradient_checkpointing=full";
    let together = plan(1 << 34, &[&set[..], &together, &[full]].concat()).process_bytes();
    assert!(together < eight.process_bytes());
    let chosen = plan(together, &[&set[..], &["memory.target_utilization=1"]].concat());
    assert_eq!((chosen.choice.settings.batch_size, chosen.choice.accumulation), (8, 1));
    // What is said is kept to.
    let said = [&set[..], &["training.effective_batch_size=8", "training.batch_size=1"]].concat();
    assert!(!plan(one.process_bytes(), &said).fits());
}

#[test]
fn device_and_host_tier_together_keep_to_what_is_enforced_whatever_the_host_budget() {
    let host = "memory.offload={optimizer: host, gradients: device, activations: device, parameters: device}";
    let set = [
        F32,
        host,
        "training.batch_size=1",
        "training.gradient_checkpointing=full",
        "memory.host_budget=8GiB",
        "memory.prefetch=true",
    ];
    let roomy = plan(1 << 34, &set);
    assert_eq!(roomy.choice.settings.offload.optimizer, Tier::Host);
    let (arena, all) = (roomy.peak_bytes(), roomy.process_bytes());
    assert!(all > arena + 32 * MIB);
    let limited = |bytes: u64| {
        let mut machine = machine();
        // The margin is 16 MiB at least and a thirty-second part.
        machine.limits.container = Some(bytes + (16 * MIB).max(bytes.div_ceil(31)));
        plan_on(&machine, arena, &set)
    };
    let fits = limited(all);
    assert!(fits.fits(), "{:?}", fits.misfits());
    let over = limited(all - MIB);
    let [shortage] = over.shortages()[..] else { panic!("{:?}", over.shortages()) };
    assert_eq!((shortage.resource, shortage.needed_bytes), (Resource::Process, all));
    assert!(over.misfits()[0].contains("device and host tier together"), "{:?}", over.misfits());
    assert_ne!(over.load_line.by, LimitedBy::Container, "the line itself is kept");
}

#[test]
fn address_space_has_room_for_all_that_a_checkpoint_holds() {
    let home =
        "memory.offload={optimizer: device, gradients: device, activations: device, parameters: device}";
    let set = [F32, home, "training.batch_size=1", "training.gradient_checkpointing=full"];
    let lora = [&set[..], &["training.method=lora"]].concat();
    // Weights and two moments of full training; adapters and theirs of LoRA.
    for set in [&set[..], &lora] {
        let roomy = plan(1 << 40, set);
        let checkpoint = 12 * roomy.trainable_parameters();
        let needed = roomy.process_bytes() + checkpoint;
        let limited = |bytes: u64| {
            let mut machine = machine();
            machine.limits.address_space = Some(bytes);
            // The line is stated, and below what the limit leaves after its margin.
            plan_on(&machine, roomy.process_bytes(), set)
        };
        let fits = limited(needed + MIB);
        assert!(fits.fits(), "{:?}", fits.misfits());
        let over = limited(needed - MIB);
        let [shortage] = over.shortages()[..] else { panic!("{:?}", over.shortages()) };
        assert_eq!(shortage.resource, Resource::AddressSpace, "{set:?}");
    }
}
