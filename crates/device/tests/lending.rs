//! Memory that is lent to another thread while the device computes, and views of it when it is back.

use plimsoll_device::{
    Cpu, CpuOptions, DType, Device, DeviceError, DeviceExt, Dry, Elementwise, Lent, Tensor,
};
use plimsoll_memory::{Loan, Region, Tag};

fn cpu() -> Cpu {
    Cpu::new(1 << 20, CpuOptions { threads: Some(2), isa: None }).unwrap()
}

fn staging<D: Device>(device: &D, bytes: u64) -> Tensor {
    device.alloc(DType::U8, &[bytes], Tag::Staging, "staging").unwrap()
}

fn memory(lent: Lent) -> Region {
    match lent {
        Lent::Memory(Loan::Region(region)) => region,
        elsewhere => panic!("{elsewhere:?}"),
    }
}

#[test]
fn another_thread_fills_what_is_lent_while_the_device_computes() {
    let cpu = cpu();
    let tensor = staging(&cpu, 4096);
    let mut region = memory(cpu.lend(tensor).unwrap());
    let x = cpu.alloc(DType::F32, &[1 << 14], Tag::Workspace, "x").unwrap();
    let filling = std::thread::spawn(move || {
        for (i, word) in region.bytes_mut().as_chunks_mut::<4>().0.iter_mut().enumerate() {
            *word = (i as f32).to_ne_bytes();
        }
        region
    });
    for _ in 0..50 {
        cpu.run(Elementwise::Fill { out: &x, value: 2.0 }).unwrap();
        cpu.run(Elementwise::Scale { x: &x, factor: 0.5 }).unwrap();
    }
    let staging = cpu.reclaim(Loan::Region(filling.join().unwrap())).unwrap();
    let view = staging.view(8, DType::F32, &[2, 3]).unwrap();
    assert_eq!(cpu.read_f32(&view).unwrap(), [2.0, 3.0, 4.0, 5.0, 6.0, 7.0]);
    assert!(!staging.is_alone());
    assert!(cpu.read_f32(&x).unwrap().iter().all(|x| *x == 1.0));
}

#[test]
fn what_others_still_see_is_not_lent() {
    let (cpu, other) = (cpu(), cpu());
    let tensor = staging(&cpu, 64);
    let view = tensor.view(0, DType::F32, &[16]).unwrap();
    assert!(matches!(cpu.lend(tensor), Err(DeviceError::Mismatch { op: "lend", .. })));
    drop(view);
    assert_eq!(cpu.arena().ledger().live().total(), 0);
    assert!(cpu.lend(staging(&other, 64)).is_err());
    // What is lent stays taken, and comes back whole or not at all.
    let region = memory(cpu.lend(staging(&cpu, 64)).unwrap());
    assert_eq!(cpu.arena().ledger().live().get(Tag::Staging), 64);
    let (first, second) = region.split_at(10);
    assert!(cpu.reclaim(Loan::Region(first)).is_err());
    assert!(other.reclaim(Loan::Region(second)).is_err());
    assert_eq!(cpu.arena().ledger().live().total(), 0);
    assert!(cpu.reclaim(Loan::Region(Region::new(64).unwrap())).is_err());
}

#[test]
fn a_plan_lends_what_a_run_would_and_nothing_else() {
    fn refused<D: Device>(device: &D, other: &D) -> [String; 2] {
        let tensor = staging(device, 64);
        let view = tensor.view(0, DType::F32, &[16]).unwrap();
        let shared = device.lend(tensor).unwrap_err();
        drop(view);
        assert!(device.lend(staging(device, 64)).is_ok());
        [shared, device.lend(staging(other, 64)).unwrap_err()].map(|error| error.to_string())
    }
    let run = refused(&cpu(), &cpu());
    assert_eq!(run, refused(&Dry::new(), &Dry::new()));
    assert!(run[0].contains("views") && run[1].contains("another arena"), "{run:?}");
}

#[test]
fn views_lie_within_and_begin_where_their_type_can() {
    let dry = Dry::new();
    let tensor = staging(&dry, 256);
    for (start, dtype, sizes, possible) in [
        (0, DType::F32, [8, 8], true),
        (4, DType::F32, [8, 8], false),
        (2, DType::F32, [1, 8], false),
        (2, DType::Bf16, [1, 8], true),
        (3, DType::U8, [1, 253], true),
        (4, DType::Q4_0, [2, 32], true),
        (6, DType::Q4_0, [2, 32], false),
        (0, DType::Q4_0, [2, 31], false),
        (u64::MAX - 3, DType::F32, [1, 1], false),
    ] {
        assert_eq!(tensor.view(start, dtype, &sizes).is_some(), possible, "{start} {dtype} {sizes:?}");
    }
    let floats = dry.alloc(DType::F32, &[4], Tag::Staging, "x").unwrap();
    assert!(floats.view(0, DType::F32, &[2]).is_none());
    assert!(matches!(dry.lend(tensor), Ok(Lent::Nothing(_))));
}
