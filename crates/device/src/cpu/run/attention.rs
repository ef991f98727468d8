//! Attention and its cache on the CPU.

use super::KernelCall;
use crate::cpu::kernels::attention::{Geometry, Paged, backward, forward, paged};
use crate::cpu::kernels::{Exec, cache};
use crate::cpu::slices::Slices;
use crate::{Attention, Tensor};

pub(super) fn run(op: Attention<'_>, job: KernelCall<'_>) {
    let (exec, t) = (job.exec, job.t);
    match op {
        Attention::WriteCache { x, cache, first, head_dim } => {
            let (first, capacity) = ((first % cache.rows().max(1)) as usize, cache.rows() as usize);
            write(exec, t, [x, cache], head_dim, |row| (first + row) % capacity);
        }
        Attention::WriteRows { x, cache, rows, head_dim } => {
            write(exec, t, [x, cache], head_dim, |row| rows[row] as usize);
        }
        Attention::Paged { q, k, v, out, lse, runs, page, shape, compute } => {
            let cached = [k, v].map(|x| (t.bytes(x), x.dtype()));
            let (out, lse) = (t.floats_mut(out), t.f32s_mut(lse));
            let pages = Paged { runs, page, shape };
            paged(exec, t.floats(q), cached, out, lse, pages, compute, job.workspace());
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

/// Rows of x into the cache, each at its place. The operation's check has found the places to be different rows.
fn write(
    exec: Exec<'_>,
    t: Slices<'_>,
    [x, cache]: [&Tensor; 2],
    head_dim: u64,
    place: impl Fn(usize) -> usize + Sync,
) {
    let to = cache::Cache { dtype: cache.dtype(), rows: cache.rows() as usize, bytes: t.bytes_mut(cache) };
    // SAFETY: rows of a ring that has as many differ, and those that are named were found to.
    unsafe { cache::write(exec, t.floats(x), to, x.rows() as usize, place, head_dim as usize) }
}
