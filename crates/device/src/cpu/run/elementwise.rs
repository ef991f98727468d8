//! Element by element on the CPU.

use plimsoll_memory::splitmix64;

use super::KernelCall;
use crate::cpu::kernels::elementwise::{accumulate_all, add, fill, scale};
use crate::cpu::kernels::{cast, dropout};
use crate::{DType, Elementwise, Rounding};

pub(super) fn run(op: Elementwise<'_>, KernelCall { exec, t, .. }: KernelCall<'_>) {
    match op {
        Elementwise::Fill { out, value } => fill(exec, t.floats_mut(out), value),
        Elementwise::Cast { x, out, .. } if x.dtype() == DType::U32 => {
            cast::copy(exec, t.u32s(x), t.u32s_mut(out));
        }
        Elementwise::Cast { x, out, .. } if x.dtype() == DType::U8 => {
            cast::copy(exec, t.bytes(x), t.bytes_mut(out));
        }
        Elementwise::Cast { x, out, rounding } => cast::cast(exec, t.floats(x), t.floats_mut(out), rounding),
        Elementwise::Add { a, b, out } => {
            add(exec, t.input(a, &[out]), t.input(b, &[out]), t.floats_mut(out));
        }
        Elementwise::AccumulateAll { terms, out, seed, number, first } => {
            let rounding = |term| Rounding::Stochastic { seed: splitmix64(seed, number + term), first };
            accumulate_all(exec, t.floats(terms), t.floats_mut(out), rounding);
        }
        Elementwise::Scale { x, factor } => scale(exec, t.floats_mut(x), factor),
        Elementwise::ScaleBy { x, factor } => {
            scale(exec, t.floats_mut(x), t.f32s(factor).iter().product());
        }
        Elementwise::Dropout { x, out, probability, seed, first, accumulate } => {
            let (x, words) = (t.input(x, &[out]), dropout::Words { seed, first });
            dropout::dropout(exec, x, t.floats_mut(out), probability, words, accumulate);
        }
    }
}
