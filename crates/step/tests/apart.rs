//! A device with memory of its own: what moves between that and a disk goes through the host, in the bytes that a plan for such
//! a device says, and changes no bit.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::common::watched::Watched;
use crate::common::*;
use plimsoll_device::{Cpu, CpuOptions, Device, DeviceTraits, Dry, TRANSFER_BYTES, Transferred};
use plimsoll_disk::{LowerTiers, SpillSettings};
use plimsoll_memory::{Arena, Tag, Tier};
use plimsoll_model::{AdapterConfig, AdapterLayout, ModelSpec, Parameter};
use plimsoll_parallel::Solo;
use plimsoll_step::{
    AdamSettings, Adapters, Checkpointing, Compression, EightBit, NormSource, Offload, OptimizerKind,
    OptimizerSettings, StepError, StepSettings, Trainer, TrainingMethod, UpdateTiming,
};

const APART: DeviceTraits = DeviceTraits { unified: false, alignment: 256, cuda: false };

/// What lies between such a device and a disk: two pieces of 4 MiB in each direction.
const STAGING: u64 = 16 << 20;

/// The losses of three steps.
fn steps(trainer: &mut Trainer<'_>, settings: &StepSettings) -> Vec<f64> {
    (0..3).map(|step| one_step(trainer, settings, step)).collect()
}

/// Peaks of the device, the host and the disk, and what three steps move.
fn planned(traits: DeviceTraits, spec: &ModelSpec, settings: &StepSettings) -> ([u64; 3], Transferred) {
    let (dry, tiers) = (Dry::new().standing_for(traits), Arc::new(LowerTiers::dry()));
    let (own, step) = (spec.clone(), settings.clone());
    let mut trainer = Trainer::new(&dry, Arc::clone(&tiers), own, step, &Solo).unwrap();
    trainer.load::<StepError>(|_, _, _, _| Ok(())).unwrap();
    trainer.reset_magnitudes().unwrap();
    steps(&mut trainer, settings);
    ([dry.arena().high_water(), tiers.host().high_water(), tiers.disk().high_water()], dry.moved())
}

/// The losses and the state that a device ends with in the memory that was planned; and what is copied meanwhile.
fn trained(spec: &ModelSpec, settings: &StepSettings) -> (Vec<f64>, Vec<Vec<u8>>) {
    let (peaks, moved) = planned(APART, spec, settings);
    let [device_bytes, host_bytes, disk_bytes] = peaks;
    let cpu = Cpu::new(device_bytes, CpuOptions { threads: Some(2), isa: None }).unwrap();
    let device = Watched::new(cpu.standing_for(APART));
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let spill = SpillSettings { folder: folder.path().to_owned(), budget: None, direct: true };
    let host = device.host_memory(host_bytes).unwrap();
    let tiers = Arc::new(LowerTiers::open(host, disk_bytes, &spill).unwrap());
    let (own, step) = (spec.clone(), settings.clone());
    let mut trainer = Trainer::new(&device, Arc::clone(&tiers), own, step, &Solo).unwrap();
    trainer.load(fill).unwrap();
    trainer.reset_magnitudes().unwrap();
    let losses = steps(&mut trainer, settings);
    let state = state(&trainer);
    // What was prefetched for a further step arrives.
    drop(trainer);
    let found = [device.arena(), tiers.host(), tiers.disk()].map(Arena::high_water);
    assert_eq!(found, peaks, "{settings:?}");
    assert!(device.most.get() <= TRANSFER_BYTES, "{} bytes at once", device.most.get());
    let copied = [0, 1].map(|way| device.copied[way].load(Ordering::Relaxed));
    assert_eq!(copied, [moved.copied_in, moved.copied_out], "{settings:?}");
    (losses, state)
}

fn adapters(spec: &ModelSpec) -> TrainingMethod {
    let config = AdapterConfig { rank: 3, use_dora: true, ..AdapterConfig::default() };
    let layout = AdapterLayout::new(&config, spec).unwrap();
    let (weight_types, in_files) = (HashMap::new(), HashMap::new());
    TrainingMethod::Adapters(Arc::new(Adapters { layout, dropout: 0.0, weight_types, in_files }))
}

fn cases(spec: &ModelSpec) -> Vec<StepSettings> {
    let base = settings(4, 24);
    vec![
        base.clone(),
        StepSettings { method: adapters(spec), ..base.clone() },
        StepSettings {
            precision: PURE_BF16,
            checkpointing: Checkpointing::Full,
            update: UpdateTiming::InBackward(NormSource::SecondBackward),
            ..base.clone()
        },
        StepSettings {
            precision: BF16_WITH_MASTERS,
            checkpointing: Checkpointing::Every(2),
            compression: Compression::Int8 { block: 32 },
            ..base
        },
    ]
}

#[test]
fn what_comes_from_a_disk_in_two_hops_gives_the_same_bits_in_the_planned_memory() {
    let offloads = [
        Offload::all_on(Tier::Disk),
        Offload::all_on(Tier::Host),
        Offload { prefetch: false, ..Offload::all_on(Tier::Disk) },
        Offload { gradients: Tier::Host, activations: Tier::Disk, ..Offload::NONE },
    ];
    // Tables of several pieces.
    for spec in [llama(), biased()].map(|spec| ModelSpec { vocab_size: 3101, ..spec }) {
        for settings in cases(&spec) {
            let resident = trained(&spec, &settings);
            for offload in offloads {
                let away = StepSettings { offload, ..settings.clone() };
                assert!(trained(&spec, &away) == resident, "{} {away:?}", spec.name);
                let ([_, host, disk], moved) = planned(DeviceTraits::CPU, &spec, &away);
                let ([_, staged_host, same_disk], hops) = planned(APART, &spec, &away);
                let staging = if offload.uses(Tier::Disk) { STAGING } else { 0 };
                assert_eq!((staged_host, same_disk), (host + staging, disk));
                // Each byte of a disk's is copied too.
                let Transferred { read, written, copied_in, copied_out, .. } = moved;
                let expected =
                    Transferred { copied_in: copied_in + read, copied_out: copied_out + written, ..moved };
                assert_eq!(hops, expected);
            }
        }
    }
}

#[test]
fn tables_and_their_states_go_to_a_device_apart_part_by_part() {
    let spec = ModelSpec { vocab_size: 180_000, ..llama() };
    let table = spec.parameters().iter().map(Parameter::elements).max().unwrap();
    assert!(table > TRANSFER_BYTES);
    let eight_bit = OptimizerKind::AdamW8bit(AdamSettings::default(), EightBit { embeddings: true });
    let optimizer = OptimizerSettings { kind: eight_bit, ..OptimizerSettings::default() };
    let settings = StepSettings { optimizer, ..settings(1, 8) };
    let resident = trained(&spec, &settings);
    let away = StepSettings { offload: Offload::all_on(Tier::Host), ..settings };
    assert!(trained(&spec, &away) == resident);
}

/// Of a device apart alone, and where something is on a disk.
#[test]
fn staging_is_planned_on_the_host() {
    let most = |traits, tier| {
        let (dry, tiers) = (Dry::new().standing_for(traits), Arc::new(LowerTiers::dry()));
        let settings = StepSettings { offload: Offload::all_on(tier), ..settings(2, 9) };
        Trainer::new(&dry, Arc::clone(&tiers), llama(), settings, &Solo).unwrap();
        tiers.host().ledger().most(Tag::Staging)
    };
    assert_eq!([Tier::Host, Tier::Disk].map(|tier| most(APART, tier)), [0, STAGING]);
    assert_eq!([Tier::Host, Tier::Disk].map(|tier| most(DeviceTraits::CPU, tier)), [0, 0]);
}
