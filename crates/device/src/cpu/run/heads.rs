//! Columns of heads on the CPU.

use super::KernelCall;
use crate::cpu::kernels::heads::{Layout, Work, heads as run_heads};
use crate::{HeadColumns, Heads};

pub(super) fn run(op: Heads<'_>, KernelCall { exec, t, .. }: KernelCall<'_>) {
    let layout = |HeadColumns { tensor, first, stride }: HeadColumns<'_>| Layout {
        columns: tensor.columns() as usize,
        first: first as usize,
        stride: stride as usize,
    };
    let (work, from, to, heads, width) = match op {
        Heads::Copy { from, to, heads, width } => (Work::Copy, from, to, heads, width),
        Heads::Sum { from, to, heads, width } => (Work::Sum, from, to, heads, width),
    };
    let (read, written) = ((t.floats(from.tensor), layout(from)), (t.floats_mut(to.tensor), layout(to)));
    run_heads(exec, work, read, written, heads as usize, width as usize);
}
