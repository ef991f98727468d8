//! Steps of optimizers on the CPU.

use super::KernelCall;
use crate::cpu::kernels::update::{
    CodesMut, Second, Weights, adafactor, adam_mini, adamw, adamw_8bit, apollo, lion, lion_8bit, sgd,
};
use crate::{Codes, Rule, SecondMoment, Update};

pub(super) fn run(step: Update<'_>, job: KernelCall<'_>) {
    let (exec, t) = (job.exec, job.t);
    let weights = Weights {
        param: t.floats_mut(step.param),
        master: step.master.map(|master| t.f32s_mut(master)),
        grad: t.floats(step.grad),
        grad_scale: step.grad_scale.map_or(1.0, |scale| t.f32s(scale).iter().product()),
        rounding: step.rounding,
    };
    let codes =
        |Codes { codes, absmax }: Codes<'_>| CodesMut { codes: t.u8s_mut(codes), absmax: t.f32s_mut(absmax) };
    match step.rule {
        Rule::AdamW { m, v, hyper } => adamw(exec, weights, [t.floats_mut(m), t.floats_mut(v)], hyper),
        Rule::AdamW8bit { m, v, hyper } => adamw_8bit(exec, weights, [codes(m), codes(v)], hyper),
        Rule::AdamMini { m, v, hyper } => adam_mini(exec, weights, t.f32s_mut(m), t.f32s_mut(v), hyper),
        Rule::Lion { m, hyper } => lion(exec, weights, t.floats_mut(m), hyper),
        Rule::Lion8bit { m, hyper } => lion_8bit(exec, weights, codes(m), hyper),
        Rule::Sgd { m, hyper } => sgd(exec, weights, m.map(|m| t.f32s_mut(m)), hyper),
        Rule::Adafactor { second, m, hyper } => {
            let second = match second {
                SecondMoment::Factored { rows, columns } => {
                    Second::Factored { rows: t.f32s_mut(rows), columns: t.f32s_mut(columns) }
                }
                SecondMoment::Full(v) => Second::Full(t.f32s_mut(v)),
            };
            adafactor(exec, weights, second, m.map(|m| t.f32s_mut(m)), hyper, job.workspace());
        }
        Rule::Apollo { ratios, channels, norm, hyper } => {
            let columns = step.param.columns() as usize;
            apollo(
                exec,
                weights,
                t.f32s(ratios),
                channels,
                columns,
                t.f32s_mut(norm),
                hyper,
                job.workspace(),
            );
        }
    }
}
