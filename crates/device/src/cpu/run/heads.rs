//! Columns of heads on the CPU.

use super::KernelCall;
use crate::cpu::kernels::heads::{Layout, copy, sum};
use crate::{HeadColumns, Heads};

pub(super) fn run(op: Heads<'_>, KernelCall { exec, t, .. }: KernelCall<'_>) {
    let layout = |HeadColumns { tensor, first, stride }: HeadColumns<'_>| Layout {
        columns: tensor.columns() as usize,
        first: first as usize,
        stride: stride as usize,
    };
    let (Heads::Copy { from, to, heads, width } | Heads::Sum { from, to, heads, width }) = op;
    let run = if matches!(op, Heads::Copy { .. }) { copy } else { sum };
    let (read, written) = ((t.floats(from.tensor), layout(from)), (t.floats_mut(to.tensor), layout(to)));
    run(exec, read, written, heads as usize, width as usize);
}
