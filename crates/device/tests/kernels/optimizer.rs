//! AdamW.

use plimsoll_device::cpu::Isa;
use plimsoll_device::{AdamW, DType, Op, Rounding, Tensor};

use crate::harness::{Expected, Operand, check, decode, noise, run, storages};
use crate::reference;

const HYPER: AdamW =
    AdamW { lr: 1e-3, beta1: 0.9, beta2: 0.999, epsilon: 1e-8, weight_decay: 0.1, step: 3, grad_scale: 0.5 };

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

fn op(t: &[Tensor], with_master: bool, hyper: AdamW, rounding: Rounding) -> Op<'_> {
    let master = with_master.then(|| &t[4]);
    Op::AdamW { param: &t[0], master, grad: &t[1], m: &t[2], v: &t[3], hyper, rounding }
}

#[test]
fn adamw() {
    for ([param, grad], n) in storages().flat_map(|t| [1, 7, 63, 1000, 40_000].map(|n| (t, n))) {
        for (with_master, step) in [(false, 1), (true, 3), (false, 1000)] {
            let operands = operands(n, param, grad);
            let hyper = AdamW { step, ..HYPER };
            let [params, grads, m, v, master] = operands.each_ref().map(|o| &o.values);
            let before = if with_master { master } else { params };
            let [after, m, v] = reference::adamw(&hyper, [0.9, 0.999], before, grads, m, v);
            let expect = |operand, values, tolerance| Expected { operand, values, tolerance };
            let mut expected = vec![expect(0, after.clone(), 3e-7), expect(2, m, 3e-7), expect(3, v, 3e-7)];
            if with_master {
                expected.push(expect(4, after, 3e-7));
            }
            check(
                &format!("{n} {param} {grad} {with_master} {step}"),
                &operands,
                |t| op(t, with_master, hyper, Rounding::Nearest),
                &expected,
            );
        }
    }
}

/// PyTorch 2.x's `torch.optim.AdamW` on the CPU, f32, from the same numbers: lr 1e-3, betas (0.9, 0.999), eps 1e-8,
/// weight decay 0.1, three steps with the gradients 0.1, -0.2, 0.3 for the parameter 1.
#[test]
fn adamw_over_three_steps() {
    let mut state = [1.0, 0.0, 0.0];
    for (step, grad) in [(1, 0.1), (2, -0.2), (3, 0.3)] {
        let hyper = AdamW { step, grad_scale: 1.0, ..HYPER };
        let operands = [state[0], grad, state[1], state[2]].map(|x| Operand::new(DType::F32, &[1], [x]));
        let after = run(Isa::detect(), 1, &operands, &|t| op(t, false, hyper, Rounding::Nearest)).unwrap();
        state = [0, 2, 3].map(|i| decode(DType::F32, &after[i])[0]);
    }
    let mut want = [1.0, 0.0, 0.0];
    for (step, grad) in [(1, 0.1), (2, -0.2), (3, 0.3)] {
        let hyper = AdamW { step, grad_scale: 1.0, ..HYPER };
        let after = reference::adamw(&hyper, [0.9, 0.999], &[want[0]], &[grad], &[want[1]], &[want[2]]);
        want = after.map(|x| x[0]);
    }
    for (got, want) in state.iter().zip(want) {
        assert!((got - want).abs() <= 2e-7 * want.abs(), "{got} instead of {want}");
    }
}

/// A parameter that nearest rounding would never move, moves on average as far as it should.
#[test]
fn stochastic_rounding_keeps_small_steps() {
    let n = 50_000;
    let hyper = AdamW { lr: 1e-4, weight_decay: 0.0, grad_scale: 1.0, step: 1, ..HYPER };
    let constant = |dtype, x: f64| Operand::new(dtype, &[n], vec![x; n]);
    let operands = [
        constant(DType::Bf16, 1.0),
        constant(DType::F32, 0.5),
        constant(DType::F32, 0.0),
        constant(DType::F32, 0.0),
    ];
    let mean = |isa, rounding| {
        let after = run(isa, 2, &operands, &|t| op(t, false, hyper, rounding)).unwrap();
        decode(DType::Bf16, &after[0]).iter().sum::<f64>() / n as f64
    };
    for isa in Isa::available() {
        assert_eq!(mean(isa, Rounding::Nearest), 1.0);
        let moved = 1.0 - mean(isa, Rounding::Stochastic { seed: 3 });
        assert!((moved - 1e-4).abs() < 1.5e-5, "{isa}: moved by {moved} on average");
    }
}
