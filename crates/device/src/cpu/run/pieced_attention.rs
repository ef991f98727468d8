//! Attention by pieces of the keys on the CPU.

use super::KernelCall;
use crate::PiecedAttention;
use crate::cpu::kernels::attention::{Geometry, add_piece, add_piece_gradients, deltas, finish};

pub(super) fn run(op: PiecedAttention<'_>, KernelCall { exec, t, .. }: KernelCall<'_>) {
    match op {
        PiecedAttention::Add { q, k, v, documents, running, piece, compute } => {
            let inputs = [q, k, v].map(|x| t.floats(x));
            let state = [running.sums, running.most, running.total].map(|x| t.f32s_mut(x));
            let g = Geometry::of_piece(piece, documents.map(|x| t.u32s(x)));
            add_piece(exec, inputs, state, g, compute);
        }
        PiecedAttention::Finish { running, out, lse, shape } => {
            let state = [running.sums, running.most, running.total].map(|x| t.f32s(x));
            finish(exec, state, t.floats_mut(out), t.f32s_mut(lse), Geometry::new(shape, None));
        }
        PiecedAttention::Deltas { out, dout, delta, shape } => {
            deltas(exec, t.floats(out), t.floats(dout), t.f32s_mut(delta), Geometry::new(shape, None));
        }
        PiecedAttention::Backward { q, k, v, documents, lse, delta, dout, dq, dk, dv, piece, compute } => {
            let inputs = [q, k, v, dout].map(|x| t.floats(x));
            let gradients = [dq, dk, dv].map(|x| t.f32s_mut(x));
            let g = Geometry::of_piece(piece, documents.map(|x| t.u32s(x)));
            add_piece_gradients(exec, inputs, [t.f32s(lse), t.f32s(delta)], gradients, g, compute);
        }
    }
}
