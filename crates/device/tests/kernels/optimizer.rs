//! AdamW.

use plimsoll_device::cpu::Isa;
use plimsoll_device::{Adam, DType, Device, DeviceError, DeviceExt, Rounding, Rule, Tensor, Update};

use crate::harness::{Expected, Operand, check, decode, factor, noise, run, storages};
use crate::reference;

const HYPER: Adam = Adam { lr: 1e-3, beta1: 0.9, beta2: 0.999, epsilon: 1e-8, weight_decay: 0.1, step: 3 };

/// Parameter, gradient, first and second moment, master weights.
fn operands(n: usize, param: DType, grad: DType) -> [Operand; 5] {
    let param = Operand::new(param, &[n], noise(1));
    let master = Operand::new(DType::F32, &[n], param.values.iter().zip(noise(5)).map(|(p, x)| p + x * 1e-3));
    [
        param,
        Operand::new(grad, &[n], noise(2).map(|x| x * 0.1)),
        Operand::new(DType::F32, &[n], noise(3).map(|x| x * 0.1)),
        Operand::new(DType::F32, &[n], noise(4).map(|x| (x * 0.1).powi(2))),
        master,
    ]
}

fn adamw_step(
    cpu: &dyn Device,
    t: &[Tensor],
    with_master: bool,
    hyper: Adam,
    grad_scale: f32,
    rounding: Rounding,
) -> Result<(), DeviceError> {
    let master = with_master.then(|| &t[4]);
    let rule = Rule::AdamW { m: &t[2], v: &t[3], hyper };
    let factor = factor(cpu, grad_scale)?;
    cpu.run(Update { param: &t[0], master, grad: &t[1], grad_scale: Some(&factor), rounding, rule })
}

#[test]
fn adamw() {
    for ([param, grad], n) in storages().flat_map(|t| [1, 7, 63, 1000, 40_000].map(|n| (t, n))) {
        for (with_master, step) in [(false, 1), (true, 3), (false, 1000)] {
            let operands = operands(n, param, grad);
            let hyper = Adam { step, ..HYPER };
            let [params, grads, m, v, master] = operands.each_ref().map(|o| &o.values);
            let before = if with_master { master } else { params };
            let [after, m, v] = reference::adamw(&hyper, 0.5, before, grads, m, v);
            let expect = |operand, values, tolerance| Expected { operand, values, tolerance };
            let mut expected = vec![expect(0, after.clone(), 3e-7), expect(2, m, 3e-7), expect(3, v, 3e-7)];
            if with_master {
                expected.push(expect(4, after, 3e-7));
            }
            check(
                &format!("{n} {param} {grad} {with_master} {step}"),
                &operands,
                |cpu, t| adamw_step(cpu, t, with_master, hyper, 0.5, Rounding::Nearest),
                &expected,
            );
        }
    }
}

/// Parameters, first and second moments after three steps of PyTorch 2.15's `torch.optim.AdamW` on a CPU in f32: lr
/// 1e-3, betas (0.9, 0.999), eps 1e-8, weight decay 0.1. Its three implementations (one by one, foreach, fused) give
/// these bits, but for a last one in one second moment.
#[test]
fn as_pytorch_does() {
    let start = [1.0, -0.5, 0.03125, 2.5e-4, -3.0, 0.7];
    let grads = [
        [0.1, -2.0, 3e-5, 0.5, -0.01, 0.0],
        [-0.2, 1.5, 1e-5, -0.25, 0.02, 1e-12],
        [0.3, 0.1, -7e-6, 0.125, 0.04, -4.0],
    ];
    let pytorch = [
        [0x3f7fac4f, 0xbeff57e5, 0x3cec5a4a, 0xbab1d06d, 0xc03ff246, 0x3f334f4d],
        [0x3ca4a8c2, 0xbc8b4393, 0x36307f0d, 0x3cf9db23, 0x3ba38327, 0xbecccccd],
        [0x3912bcdd, 0x3bcccabd, 0x2b935dc9, 0x39abbcbb, 0x360ce36c, 0x3c83126f],
    ];
    for isa in Isa::available() {
        let mut state = [start.to_vec(), vec![0.0; 6], vec![0.0; 6]];
        for (step, grad) in (1..).zip(grads) {
            let hyper = Adam { step, ..HYPER };
            let [param, m, v] = state;
            let operands = [param, grad.to_vec(), m, v].map(|x| Operand::new(DType::F32, &[6], x));
            let after =
                run(isa, 1, &operands, &|cpu, t| adamw_step(cpu, t, false, hyper, 1.0, Rounding::Nearest))
                    .unwrap();
            state = [0, 2, 3].map(|i| decode(DType::F32, &after[i]));
        }
        for (got, want) in state.iter().zip(pytorch) {
            let bits: Vec<u32> = got.iter().map(|x| (*x as f32).to_bits()).collect();
            let apart = bits.iter().zip(want).map(|(a, b)| a.abs_diff(b)).max();
            // Plain code may have no fused multiply-add.
            let allowed = if isa == Isa::Portable { 4 } else { 0 };
            assert!(apart <= Some(allowed), "{isa}: {bits:x?} instead of {want:x?}");
        }
    }
}

#[test]
fn moments_fade_to_zero() {
    let operands = [0.5, 0.0, 1e-38, 1.1e-38].map(|x| Operand::new(DType::F32, &[40], [x; 40]));
    for isa in Isa::available() {
        let after =
            run(isa, 1, &operands, &|cpu, t| adamw_step(cpu, t, false, HYPER, 0.5, Rounding::Nearest))
                .unwrap();
        assert_eq!(decode(DType::F32, &after[2]), [0.0; 40], "{isa}");
        assert_eq!(decode(DType::F32, &after[3]), [0.0; 40], "{isa}");
    }
}

/// A parameter that nearest rounding would never move, moves on average as far as it should.
#[test]
fn stochastic_rounding_keeps_small_steps() {
    let n = 50_000;
    let hyper = Adam { lr: 1e-4, weight_decay: 0.0, step: 1, ..HYPER };
    let constant = |dtype, x: f64| Operand::new(dtype, &[n], vec![x; n]);
    let operands = [
        constant(DType::Bf16, 1.0),
        constant(DType::F32, 0.5),
        constant(DType::F32, 0.0),
        constant(DType::F32, 0.0),
    ];
    let mean = |isa, rounding| {
        let after =
            run(isa, 2, &operands, &|cpu, t| adamw_step(cpu, t, false, hyper, 1.0, rounding)).unwrap();
        decode(DType::Bf16, &after[0]).iter().sum::<f64>() / n as f64
    };
    for isa in Isa::available() {
        assert_eq!(mean(isa, Rounding::Nearest), 1.0);
        let moved = 1.0 - mean(isa, Rounding::Stochastic { seed: 3, first: 0 });
        assert!((moved - 1e-4).abs() < 1.5e-5, "{isa}: moved by {moved} on average");
    }
}
