//! The numbers of a step that stay on the device: sums, the factor of clipping, and the flag without which nothing is written.

use plimsoll_device::cpu::Isa;
use plimsoll_device::{
    Adam, Cpu, CpuOptions, DType, Device, DeviceExt, Dry, Elementwise, ExactSum, Reduction, Rounding, Rule,
    Tensor, Update,
};
use plimsoll_memory::Tag;

use crate::harness::{Expected, Operand, check, factor, noise, run, storages};

fn cpu() -> Cpu {
    Cpu::new(1 << 20, CpuOptions { threads: Some(2), isa: None }).unwrap()
}

fn f32s(cpu: &dyn Device, values: &[f32]) -> Tensor {
    let tensor = cpu.alloc(DType::F32, &[values.len() as u64], Tag::Workspace, "t").unwrap();
    cpu.write_f32(&tensor, values).unwrap();
    tensor
}

fn f64_of(cpu: &dyn Device, tensor: &Tensor) -> f64 {
    let mut value = 0.0;
    cpu.read(tensor, &mut |bytes| value = f64::from_ne_bytes(bytes.try_into().unwrap())).unwrap();
    value
}

#[test]
fn losses_add_up_in_f64_and_in_order() {
    let cpu = cpu();
    let total = cpu.alloc(DType::F64, &[1], Tag::Workspace, "total").unwrap();
    cpu.write(&total, &mut |bytes| bytes.fill(0)).unwrap();
    let finite = factor(&cpu, 1.0).unwrap();
    let mut expected = 0.0;
    for seed in 1..4 {
        let values: Vec<f32> = noise(seed).map(|x| x as f32).take(1001).collect();
        let x = f32s(&cpu, &values);
        cpu.run(Reduction::AddSum { x: &x, out: &total, finite: &finite }).unwrap();
        expected += values.into_iter().map(f64::from).sum::<f64>();
        assert_eq!(f64_of(&cpu, &total), expected);
    }
    assert_eq!(cpu.read_f32(&finite).unwrap(), [1.0]);
    for (values, sum_is_nan) in [([1.0, f32::NEG_INFINITY], false), ([1.0, f32::INFINITY], true)] {
        let x = f32s(&cpu, &values);
        cpu.run(Reduction::AddSum { x: &x, out: &total, finite: &finite }).unwrap();
        assert_eq!(f64_of(&cpu, &total).is_nan(), sum_is_nan);
        assert_eq!(cpu.read_f32(&finite).unwrap(), [0.0]);
    }
    // Nothing sets the flag again.
    cpu.write(&total, &mut |bytes| bytes.fill(0)).unwrap();
    let x = f32s(&cpu, &[1.0]);
    cpu.run(Reduction::AddSum { x: &x, out: &total, finite: &finite }).unwrap();
    assert_eq!((f64_of(&cpu, &total), cpu.read_f32(&finite).unwrap()), (1.0, vec![0.0]));
}

#[test]
fn squares_that_are_not_finite_clear_the_flag() {
    let cpu = cpu();
    for (values, flag) in [
        ([1.0, 2.0], 1.0),
        ([1.0, f32::NAN], 0.0),
        ([f32::INFINITY, 0.0], 0.0),
        // Its square is more than f32 can hold.
        ([1e30, 0.0], 0.0),
    ] {
        let (x, out, finite) = (f32s(&cpu, &values), f32s(&cpu, &[7.0]), factor(&cpu, 1.0).unwrap());
        cpu.run(Reduction::SumSquares { x: &x, out: &out, finite: Some(&finite) }).unwrap();
        assert_eq!(cpu.read_f32(&finite).unwrap(), [flag], "{values:?}");
    }
}

/// Whole runs of a tensor, measured by themselves, add up to what the tensor has.
#[test]
fn squares_of_shares_add_up_to_those_of_the_whole() {
    let cpu = Cpu::new(4 << 20, CpuOptions { threads: Some(2), isa: None }).unwrap();
    for dtype in [DType::F32, DType::Bf16] {
        let n = 150_001;
        let values: Vec<f32> = noise(1).map(|x| (x * 1e-3) as f32).take(n).collect();
        let (plain, x) = (f32s(&cpu, &values), cpu.alloc(dtype, &[n as u64], Tag::Workspace, "x").unwrap());
        cpu.run(Elementwise::Cast { x: &plain, out: &x, rounding: Rounding::Nearest }).unwrap();
        let (whole, finite) = (f32s(&cpu, &[7.0]), factor(&cpu, 1.0).unwrap());
        cpu.run(Reduction::SumSquares { x: &x, out: &whole, finite: None }).unwrap();
        let sums =
            |rows: u64| cpu.alloc(DType::U8, &[rows, ExactSum::BYTES as u64], Tag::Workspace, "s").unwrap();
        let total = sums(2);
        cpu.write(&total, &mut |bytes| bytes.fill(0)).unwrap();
        for share in [99_840..150_001, 0..256, 256..99_840] {
            let share = x.reshape(&[n as u64, 1]).unwrap().slice_rows(share).unwrap();
            let sum = sums(2);
            cpu.write(&sum, &mut |bytes| bytes.fill(0)).unwrap();
            let own = sum.slice_rows(1..2).unwrap();
            cpu.run(Reduction::ExactSquares { x: &share, out: &own }).unwrap();
            cpu.run(Reduction::AddExact { x: &sum, out: &total }).unwrap();
        }
        let rounded = f32s(&cpu, &[7.0, 7.0]);
        cpu.run(Reduction::RoundExact { x: &total, out: &rounded, finite: &finite }).unwrap();
        assert_eq!(cpu.read_f32(&rounded).unwrap(), [0.0, cpu.read_f32(&whole).unwrap()[0]]);
        assert_eq!(cpu.read_f32(&finite).unwrap(), [1.0]);
        let bad = f32s(&cpu, &[f32::NAN]);
        cpu.run(Reduction::ExactSquares { x: &bad, out: &total.slice_rows(0..1).unwrap() }).unwrap();
        cpu.run(Reduction::RoundExact { x: &total, out: &rounded, finite: &finite }).unwrap();
        assert_eq!(cpu.read_f32(&finite).unwrap(), [0.0]);
    }
}

/// As PyTorch's `clip_grad_norm_` has it.
#[test]
fn gradients_are_clipped_to_a_norm() {
    let cpu = cpu();
    let clip = |squares: &[f32], max_norm, loss_scale| {
        let (squares, out) = (f32s(&cpu, squares), factor(&cpu, 9.0).unwrap());
        cpu.run(Reduction::ClipFactor { squares: &squares, max_norm, loss_scale, out: &out }).unwrap();
        cpu.read_f32(&out).unwrap()[0]
    };
    // A norm of 5, and of 5/4 without the scale.
    assert_eq!(clip(&[9.0, 16.0], 1.0, 1.0), (1.0 / (5.0 + 1e-6)) as f32);
    assert_eq!(clip(&[9.0, 16.0], 1.0, 4.0), (1.0 / (1.25 + 1e-6) / 4.0) as f32);
    // Short ones are only freed of the scale.
    assert_eq!(clip(&[9.0, 16.0], 6.0, 1.0), 1.0);
    assert_eq!(clip(&[9.0, 16.0], 6.0, 8.0), 0.125);
    assert_eq!(clip(&[0.0], 1.0, 1.0), 1.0);
}

#[test]
fn a_tensor_is_scaled_by_a_number_on_the_device() {
    for ([dtype], n) in storages().flat_map(|t| [1, 63, 40_000].map(|n| (t, n))) {
        let operands =
            [Operand::new(dtype, &[n], noise(1)), Operand::new(DType::F32, &[1], std::iter::once(0.75))];
        let values = operands[0].values.iter().map(|x| x * 0.75).collect();
        check(
            &format!("{dtype} {n}"),
            &operands,
            |cpu, t| cpu.run(Elementwise::ScaleBy { x: &t[0], factor: &t[1] }),
            &[Expected { operand: 0, values, tolerance: 0.0 }],
        );
    }
}

/// Whatever is 0 in the flag, weights and states keep every bit.
#[test]
fn nothing_is_written_where_the_flag_is_zero() {
    let n = 5000;
    let f32s = |seed| Operand::new(DType::F32, &[n], noise(seed).map(f64::abs));
    let operands = [Operand::new(DType::Bf16, &[n], noise(1)), f32s(2), f32s(3), f32s(4)];
    let hyper = Adam { lr: 1e-3, beta1: 0.9, beta2: 0.999, epsilon: 1e-8, weight_decay: 0.1, step: 3 };
    let step = |flag: Option<f32>| {
        run(Isa::detect(), 2, &operands, &|cpu, t| {
            let rule = Rule::AdamW { m: &t[2], v: &t[3], hyper };
            let rounding = Rounding::Stochastic { seed: 1, first: 0 };
            let update = Update { param: &t[0], master: None, grad: &t[1], grad_scale: None, rounding, rule };
            match flag {
                Some(flag) => cpu.run_unless_zero(&factor(cpu, flag)?, update),
                None => cpu.run(update),
            }
        })
        .unwrap()
    };
    let before = run(Isa::detect(), 2, &operands, &|_, _| Ok(())).unwrap();
    let after = step(None);
    assert!(after != before && step(Some(1.0)) == after);
    assert!(step(Some(0.0)) == before && step(Some(-0.0)) == before);
}

/// A plan refuses what a run would.
#[test]
fn a_flag_is_one_number_of_the_devices_own() {
    let (cpu, dry, other) = (cpu(), Dry::new(), Dry::new());
    let refused = |device: &dyn Device, flag: &Tensor| {
        let out = device.alloc(DType::F32, &[3], Tag::Workspace, "out").unwrap();
        let error = device.run_unless_zero(flag, Elementwise::Fill { out: &out, value: 1.0 });
        error.err().map(|error| error.to_string())
    };
    for device in [&cpu as &dyn Device, &dry] {
        let flag = |dtype, n| device.alloc(dtype, &[n], Tag::Workspace, "flag").unwrap();
        assert_eq!(refused(device, &flag(DType::U32, 1)).unwrap(), "fill: flag u32[1] is not f32 [1]");
        assert_eq!(refused(device, &flag(DType::F32, 2)).unwrap(), "fill: flag f32[2] is not f32 [1]");
        let foreign = other.alloc(DType::F32, &[1], Tag::Workspace, "flag").unwrap();
        assert_eq!(refused(device, &foreign).unwrap(), "fill: flag f32[1] belongs to another arena");
        let own = flag(DType::F32, 1);
        device.write_f32(&own, &[1.0]).unwrap();
        assert_eq!(refused(device, &own), None);
    }
}
