//! Lengths of rows and factors of columns on the CPU.

use super::KernelCall;
use crate::Magnitude;
use crate::cpu::kernels::dora::{ColumnFactors, Sum, column_dots, row_lengths, row_squares, scale_columns};

pub(super) fn run(op: Magnitude<'_>, job: KernelCall<'_>) {
    let (exec, t) = (job.exec, job.t);
    match op {
        Magnitude::RowSquares { x, out } => {
            row_squares(exec, t.bytes(x), x.dtype(), t.f32s_mut(out), x.columns() as usize);
        }
        Magnitude::RowLengths { squares, cross, gram, b, scale, lengths } => {
            let [squares, cross, gram, b] = [squares, cross, gram, b].map(|tensor| t.f32s(tensor));
            row_lengths(exec, Sum { squares, cross, gram, b, scale }, t.f32s_mut(lengths));
        }
        Magnitude::ScaleColumns { x, factors, divisors, bias, out, accumulate } => {
            let divisors = divisors.map(|divisors| t.f32s(divisors));
            let factors = ColumnFactors { factors: t.f32s(factors), divisors };
            let bias = bias.map(|bias| t.floats(bias));
            scale_columns(exec, t.floats(x), factors, bias, t.floats_mut(out), accumulate);
        }
        Magnitude::ColumnDots { a, b, divisors, out, accumulate } => {
            let (a, b, divisors) = (t.floats(a), t.floats(b), t.f32s(divisors));
            column_dots(exec, a, b, divisors, t.floats_mut(out), accumulate, job.workspace());
        }
    }
}
