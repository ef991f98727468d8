//! Rotary embeddings on the CPU.

use super::{KernelCall, in_table};
use crate::Position;
use crate::cpu::kernels::rope::{Angles, rope};

pub(super) fn run(op: Position<'_>, KernelCall { exec, t, .. }: KernelCall<'_>) -> Result<(), String> {
    let Position::Rope { x, positions, cos, sin, heads, inverse } = op;
    in_table("position", t.u32s(positions), cos.rows(), None, cos)?;
    let angles = Angles { cos: t.f32s(cos), sin: t.f32s(sin), pairs: cos.columns() as usize };
    rope(exec, t.floats_mut(x), t.u32s(positions), angles, heads, inverse);
    Ok(())
}
