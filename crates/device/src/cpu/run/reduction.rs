//! Sums over whole tensors on the CPU.

use super::KernelCall;
use crate::Reduction;
use crate::cpu::kernels::sum_squares::sum_squares;

pub(super) fn run(op: Reduction<'_>, job: KernelCall<'_>) {
    let (exec, t) = (job.exec, job.t);
    match op {
        Reduction::SumSquares { x, out } => {
            let sum = sum_squares(exec, t.floats(x), job.workspace());
            t.f32s_mut(out).fill(sum as f32);
        }
    }
}
