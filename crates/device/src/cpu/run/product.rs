//! Matrix products and biases on the CPU.

use super::KernelCall;
use crate::Product;
use crate::cpu::kernels::column_sums::bias_backward;
use crate::cpu::kernels::elementwise::add_rows;

pub(super) fn run(op: Product<'_>, job: KernelCall<'_>) {
    let (exec, t) = (job.exec, job.t);
    match op {
        Product::Linear { x, weight, bias, out, accumulate, compute } => {
            if let Some(bias) = bias {
                add_rows(exec, t.floats(bias), t.floats_mut(out), accumulate);
            }
            let accumulate = accumulate || bias.is_some();
            job.matmul(compute, t.matrix(x), t.transposed(weight), t.output(out), accumulate);
        }
        Product::LinearBackwardInput { dout, weight, dx, accumulate, compute } => {
            job.matmul(compute, t.matrix(dout), t.matrix(weight), t.output(dx), accumulate);
        }
        Product::LinearBackwardWeight { dout, x, dweight, accumulate, rounding, compute } => {
            let sums = t.sums(dweight, rounding);
            job.matmul(compute, t.transposed(dout), t.matrix(x), sums, accumulate);
        }
        Product::BiasBackward { dout, dbias, accumulate } => {
            bias_backward(exec, t.floats(dout), t.floats_mut(dbias), accumulate, job.workspace());
        }
    }
}
