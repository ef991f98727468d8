use std::collections::HashSet;

use plimsoll_device::DType;
use plimsoll_memory::ByteSize;

use super::*;
use crate::measured::Measured;
use crate::time::{DiskRates, Rates};

fn known(name: &str) -> Target {
    Catalogue::known().target(name).unwrap_or_else(|error| panic!("{error}"))
}

fn refused(name: &str) -> String {
    Catalogue::known().target(name).unwrap_err().to_string()
}

#[test]
fn every_device_has_its_figures_and_their_sources() {
    let content = file::parse(TEXT).unwrap();
    let names: HashSet<&str> = content.devices.iter().map(|device| device.name.as_str()).collect();
    assert_eq!(names.len(), content.devices.len());
    for device in &content.devices {
        let cited = device.source.iter().chain(device.price.as_ref().map(|price| &price.source));
        for source in cited {
            assert!(content.sources.contains_key(source), "{}: {source}", device.name);
        }
        assert!(
            !device.source.is_empty() && device.overhead_bytes(1) < device.memory.0 / 8,
            "{}",
            device.name
        );
        assert!(device.half >= device.f32, "{}", device.name);
        assert_eq!(known(&device.name).device, *device);
        assert_eq!(known(&device.title.to_uppercase().replace(' ', "_")).device.name, device.name);
    }
    assert_eq!(Catalogue::known().machines().count(), content.machines.len());
}

#[test]
fn machines_are_counted_before_the_name() {
    for (name, devices, of_machine, memory) in [
        ("rtx-4090", 1, 1, 64),
        ("4090", 1, 1, 64),
        ("8xh100", 8, 8, 2048),
        ("16x8xh100", 128, 8, 2048),
        ("dgx-h100", 8, 8, 2048),
        ("4xdgx-h100", 32, 8, 2048),
        ("2xRTX 3090", 2, 2, 128),
        ("workstation-3090", 2, 2, 64),
    ] {
        let target = known(name);
        assert_eq!((target.devices(), target.devices_of_machine), (devices, of_machine), "{name}");
        assert_eq!(target.host_memory, ByteSize(memory << 30), "{name}");
        assert_eq!(target.name, name);
    }
}

#[test]
fn what_is_no_machine_is_refused_with_what_is_like_it() {
    assert!(refused("rtx-4091").ends_with("; did you mean rtx-4090?"), "{}", refused("rtx-4091"));
    assert!(refused("a100").contains("a100-80"), "{}", refused("a100"));
    for (name, words) in [
        ("0xh100", "1 to 65536"),
        ("99999999999999999999xh100", "1 to 65536"),
        ("2x3x4xh100", "too many numbers"),
        ("65536x8xh100", "more than 65536"),
        ("2x4xdgx-h100", "as many devices as it has"),
        ("", "no such device"),
        ("x", "no such device"),
        ("toaster", "plimsoll hardware lists them"),
    ] {
        assert!(refused(name).contains(words), "{name}: {}", refused(name));
    }
}

#[test]
fn a_file_describes_any_other_machine() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("mine.yaml");
    let of = |text: &str| {
        std::fs::write(&path, text).unwrap();
        Catalogue::known().target(path.to_str().unwrap()).map_err(|error| error.to_string())
    };
    let named =
        of("device: 4090\ndevices: 2\nhost_memory: 96GiB\nlink: 10e9\nprice: {low: 0.1, high: 0.1}\n")
            .unwrap();
    assert_eq!((named.devices(), named.link, named.host_memory), (2, 10e9, ByteSize(96 << 30)));
    assert_eq!(named.dollars_an_hour(), Some([0.2, 0.2]));
    assert_eq!(named.machine(0).host_bytes, Some(48 << 30));
    let own = of("name: mine\ndevice: {memory: 10GiB, bandwidth: 1e11, f32: 1e12, half: 2e12, multiprocessors: 10, host_link: 1e10, \
                  host_memory: 8GiB, network: 1e8}\ndisk: {size: 1TB, read: 2e9, write: 1e9}\n")
    .unwrap();
    assert_eq!((own.name.as_str(), own.machine(0).device_bytes), ("mine", Some(10 << 30)));
    for (text, words) in [
        ("device: 4090\ncolour: red\n", "colour"),
        ("device: toaster\n", "toaster"),
        ("device: 4090\ndevices: 0\n", "devices is 0"),
        ("device: 4090\nlink: -1\n", "link is no rate"),
        ("device: 4090\nprice: {low: 2, high: 1}\n", "price goes from 2.0 to 1.0"),
        ("device: 4090\nprice: {low: 1, high: 1e300}\n", "price goes from 1.0 to 1e300"),
        ("device: 4090\ndisk: {size: 1TB, read: 0, write: 1e9}\n", "no rate"),
        (
            "device: {memory: 10GiB, bandwidth: 1e11, f32: 1e12, half: 2e12, multiprocessors: 10, host_link: 1e10, \
              host_memory: 8GiB, network: 1e8, reached: {products: 9, bandwidth: 1}}\n",
            "reached is 9",
        ),
        ("device: [\n", "line"),
        ("", "mine.yaml"),
    ] {
        let error = of(text).unwrap_err();
        assert!(error.contains(words) && error.contains("mine.yaml"), "{text}: {error}");
    }
    assert!(refused("/nowhere/at/all.yaml").contains("/nowhere/at/all.yaml"));
}

/// A context takes more on larger devices, and communicators come with the second.
#[test]
fn a_rank_has_its_part_of_the_machine() {
    let (one, eight) = (known("h100").machine(7), known("dgx-h100").machine(7));
    assert_eq!(eight.overhead_bytes - one.overhead_bytes, 1100 << 20);
    assert_eq!((eight.host_bytes, eight.disk_available), (Some(256 << 30), Some(3_750_000_000_000)));
    assert_eq!((eight.device_bytes, eight.host_bytes_per_token), (Some(81_559 << 20), 7));
    assert!(eight.rates.wiring.rank_link > known("8x4090").machine(0).rates.wiring.rank_link);
    assert_eq!(eight.rates.wiring.network, None);
    let network = known("2x8xh100").machine(0).rates.wiring.network.unwrap();
    assert!(network.ranks_of_machine == 8 && network.rate < eight.rates.wiring.rank_link);
}

/// Products of 8-bit floats go at their own rate where a device has one.
#[test]
fn products_of_8_bit_floats_are_as_fast_as_the_device_makes_them() {
    let rates = |name: &str| known(name).machine(0).rates;
    assert!(rates("h100").matmul_fp8 > 1.9 * rates("h100").matmul_bf16);
    assert_eq!(rates("rtx-3090").matmul_fp8, rates("rtx-3090").matmul_bf16);
}

/// What a file of a calibrated CPU says is planned for as that CPU is.
#[test]
fn a_calibrated_cpu_comes_back_from_its_file() {
    let rates =
        Rates { thin_bf16: 3e9, seconds_per_operation: 2e-6, ..Rates::of_cpu([1e11, 2e11], 3e10, 1e9) };
    let cpu = MeasuredCpu {
        units_for_bf16: None,
        threads: 2,
        overhead: ByteSize(40 << 20),
        measured: Measured { rates, at: 1_700_000_000 },
    };
    let disk = Spill { size: ByteSize(1 << 40), read: 3e9, write: 2e9 };
    let here = Target::of_cpu("Some CPU", ByteSize(16 << 30), cpu.clone(), Some(disk));
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("here.yaml");
    let text = here.to_yaml().unwrap();
    std::fs::write(&file, &text).unwrap();
    let name = file.to_str().unwrap();
    assert_eq!(known(name), here);
    let machine = known(name).machine(0);
    assert_eq!(machine.rates, Rates { disk: DiskRates { read: 3e9, write: 2e9 }, ..rates });
    assert_eq!((machine.device_bytes, machine.host_bytes), (Some(16 << 30), None));
    assert_eq!(machine.overhead_bytes, 40 << 20);
    // With units for bf16 it is trained in that by default, as GPUs are.
    let cpu =
        MeasuredCpu { measured: Measured { rates: Rates { matmul_bf16: 4e11, ..rates }, at: 0 }, ..cpu };
    // What the file says of units counts; where it says nothing, the speeds do.
    for (units_for_bf16, narrow) in
        [(None, Some(DType::Bf16)), (Some(true), Some(DType::Bf16)), (Some(false), None)]
    {
        let cpu = MeasuredCpu { units_for_bf16, ..cpu.clone() };
        let text = Target::of_cpu("AMX", ByteSize(16 << 30), cpu, None).to_yaml().unwrap();
        std::fs::write(&file, text).unwrap();
        assert_eq!(known(name).machine(0).rates.wiring.narrow, narrow);
    }
    for (good, bad, words) in [
        ("thin_bf16: 3e", "thin_bf16: -3e", "thin_bf16"),
        ("thin_bf16: 3000000000", "thin_bf16: 0", "thin_bf16"),
        ("seconds_per_operation", "seconds_for_an_operation", "seconds_per_operation"),
    ] {
        if text.contains(good) {
            std::fs::write(&file, text.replace(good, bad)).unwrap();
            assert!(refused(name).contains(words), "{}", refused(name));
        }
    }
    assert!(text.contains("seconds_per_operation"), "{text}");
}

/// What is multiplied as f16 goes at the rate of bf16, where there are kernels for it: on cards of 8.0 and later.
#[test]
fn products_of_f16_are_as_fast_as_those_of_bf16() {
    use plimsoll_device::{Pace, Tally};

    let seconds = |name: &str, tally: Tally| known(name).machine(0).rates.operations(&tally);
    let flops = 1_000_000_000_000_000;
    let (f16, bf16) =
        (Tally { matmul_f16: flops, ..Tally::default() }, Tally { matmul_bf16: flops, ..Tally::default() });
    let f32 = Tally { matmul_f32: flops, ..Tally::default() };
    for name in ["a100-80", "rtx-4090", "mi300x"] {
        assert_eq!(seconds(name, f16), seconds(name, bf16), "{name}");
        assert!(seconds(name, f16) < seconds(name, f32), "{name}");
    }
    for name in ["t4", "v100"] {
        assert_eq!(seconds(name, f16), seconds(name, f32), "{name}");
        assert_eq!(seconds(name, bf16), seconds(name, f32), "{name}");
    }
    let cpu = Rates::of_cpu([1e9, 4e9], 1e9, 1e9);
    assert_eq!(cpu.operations(&f16), cpu.operations(&f32));
}

/// Programs see less than all of a card's memory; a laptop's card is nobody's first guess.
#[test]
fn a_message_of_24_gib_comes_from_a_desktop_card() {
    // What PyTorch says of an RTX 3090, an RTX 4090, an RTX 3060 and an A100.
    for (mib, name) in [(24_258, "rtx-3090"), (24_210, "rtx-3090"), (12_045, "rtx-3060"), (81_000, "a100-80")]
    {
        let found = Catalogue::known().like(mib << 20).unwrap().device;
        assert_eq!((found.name.as_str(), found.memory), (name, ByteSize(mib << 20)));
    }
}

/// Cards as their drivers call them, in MiB as drivers count them.
#[test]
fn a_driver_calls_devices_by_other_names() {
    for (name, mib, multiprocessors, expected) in [
        ("NVIDIA H200", 143_156, 132, Some("h200")),
        ("NVIDIA H100 80GB HBM3", 81_079, 132, Some("h100")),
        ("NVIDIA H100 PCIe", 81_079, 114, Some("h100-pcie")),
        ("NVIDIA A100-SXM4-40GB", 40_326, 108, Some("a100-40")),
        ("NVIDIA A100-SXM4-80GB", 81_043, 108, Some("a100-80")),
        ("NVIDIA A100 80GB PCIe", 81_043, 108, Some("a100-80")),
        ("NVIDIA A10G", 22_503, 80, Some("a10g")),
        ("NVIDIA A10", 22_500, 72, Some("a10")),
        ("NVIDIA L40S", 45_372, 142, Some("l40s")),
        ("NVIDIA L40", 45_372, 142, None),
        ("NVIDIA L4", 22_478, 58, Some("l4")),
        ("Tesla T4", 14_930, 40, Some("t4")),
        ("Tesla V100-SXM2-32GB", 32_500, 80, Some("v100")),
        ("NVIDIA RTX A4000", 16_108, 48, None),
        ("NVIDIA RTX A6000", 48_551, 84, Some("a6000")),
        ("NVIDIA RTX 6000 Ada Generation", 48_499, 142, Some("rtx-6000-ada")),
        ("NVIDIA GeForce RTX 3060", 12_037, 28, Some("rtx-3060")),
        ("NVIDIA GeForce RTX 3090", 24_154, 82, Some("rtx-3090")),
        ("NVIDIA GeForce RTX 3090 Ti", 24_154, 84, Some("rtx-3090-ti")),
        ("NVIDIA GeForce RTX 4070 SUPER", 11_994, 56, None),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", 16_075, 66, Some("rtx-4070-ti-super")),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 16_075, 76, Some("laptop-4090")),
        ("NVIDIA GeForce RTX 4090", 24_111, 128, Some("rtx-4090")),
        ("", 24_111, 128, None),
    ] {
        let found = Catalogue::known().of_driver(name, mib << 20, multiprocessors);
        assert_eq!(found.map(|device| device.name.as_str()), expected, "{name}");
    }
}
