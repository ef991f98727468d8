//! Attention and its cache on the CPU.

use super::KernelCall;
use crate::Attention;
use crate::cpu::kernels::attention::{Geometry, backward, forward};
use crate::cpu::kernels::cache;

pub(super) fn run(op: Attention<'_>, job: KernelCall<'_>) {
    let (exec, t) = (job.exec, job.t);
    match op {
        Attention::WriteCache { x, cache, first, head_dim } => {
            let to =
                cache::Cache { dtype: cache.dtype(), rows: cache.rows() as usize, bytes: t.bytes_mut(cache) };
            cache::write(exec, t.floats(x), to, x.rows() as usize, first, head_dim as usize);
        }
        Attention::Forward { q, k, v, documents, out, lse, probabilities, shape, compute } => {
            let cached = [k, v].map(|x| (t.bytes(x), x.dtype()));
            let (out, lse) = (t.floats_mut(out), t.f32s_mut(lse));
            let probabilities = probabilities.map(|x| t.f32s_mut(x));
            let g = Geometry::new(shape, documents.map(|x| t.u32s(x)));
            forward(exec, t.floats(q), cached, out, lse, probabilities, g, compute, job.workspace());
        }
        Attention::Backward {
            q,
            k,
            v,
            documents,
            out,
            lse,
            probabilities,
            dout,
            delta,
            sums,
            dq,
            dk,
            dv,
            shape,
            compute,
        } => {
            let inputs = [q, k, v, out, dout].map(|x| t.floats(x));
            let gradients = [dq, dk, dv].map(|x| t.floats_mut(x));
            let (lse, delta, sums) = (t.f32s(lse), t.f32s_mut(delta), sums.map(|x| t.f32s_mut(x)));
            let probabilities = probabilities.map(|x| t.f32s(x));
            let g = Geometry::new(shape, documents.map(|x| t.u32s(x)));
            backward(exec, inputs, lse, delta, gradients, sums, probabilities, g, compute);
        }
    }
}
