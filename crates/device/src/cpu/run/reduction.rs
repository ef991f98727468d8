//! Sums over whole tensors on the CPU.

use super::KernelCall;
use crate::cpu::kernels::sum_squares::sum_squares;
use crate::{ExactSum, Reduction};

pub(super) fn run(op: Reduction<'_>, job: KernelCall<'_>) {
    let (exec, t) = (job.exec, job.t);
    match op {
        Reduction::SumSquares { x, out, finite } => {
            let sum = sum_squares(exec, t.floats(x), job.workspace()).value() as f32;
            t.f32s_mut(out).fill(sum);
            if let Some(finite) = finite.filter(|_| !sum.is_finite()) {
                t.f32s_mut(finite).fill(0.0);
            }
        }
        Reduction::ExactSquares { x, out } => {
            sum_squares(exec, t.floats(x), job.workspace()).write(t.u8s_mut(out));
        }
        Reduction::AddExact { x, out } => {
            for (x, out) in exact_sums(t.bytes(x)).zip(t.u8s_mut(out).chunks_exact_mut(ExactSum::BYTES)) {
                let mut sum = ExactSum::read(out);
                sum.add_sum(x);
                sum.write(out);
            }
        }
        Reduction::RoundExact { x, out, finite } => {
            let out = t.f32s_mut(out);
            out.iter_mut().zip(exact_sums(t.bytes(x))).for_each(|(out, sum)| *out = sum.value() as f32);
            if !out.iter().all(|sum| sum.is_finite()) {
                t.f32s_mut(finite).fill(0.0);
            }
        }
        Reduction::AddSum { x, out, finite } => {
            let sum: f64 = t.f32s(x).iter().copied().map(f64::from).sum();
            let total = t.f64s_mut(out);
            total.iter_mut().for_each(|total| *total += sum);
            if !total.iter().all(|total| total.is_finite()) {
                t.f32s_mut(finite).fill(0.0);
            }
        }
        Reduction::ClipFactor { squares, max_norm, loss_scale, out } => {
            let squares: f64 = t.f32s(squares).iter().copied().map(f64::from).sum();
            let norm = squares.sqrt() / loss_scale;
            let clip = (max_norm / (norm + 1e-6)).min(1.0);
            t.f32s_mut(out).fill((clip / loss_scale) as f32);
        }
    }
}

/// The sums that lie one after the other.
fn exact_sums(bytes: &[u8]) -> impl Iterator<Item = ExactSum> {
    bytes.chunks_exact(ExactSum::BYTES).map(ExactSum::read)
}
