//! What the kernels know of codes: `Tables` of `kernels/prelude.cuh`, from the tables of the CPU's kernels.

use crate::cpu::quantize::{FP4_VALUES, NF4_VALUES, SIGNED_DYNAMIC_MAP};
use crate::cpu::state_maps;

/// The bytes of all tables.
pub(super) fn bytes() -> Vec<u8> {
    let [(signed, signed_limits), (unsigned, unsigned_limits)] = state_maps();
    let parts: [&[f32]; 7] =
        [&SIGNED_DYNAMIC_MAP, &NF4_VALUES, &FP4_VALUES, signed, unsigned, signed_limits, unsigned_limits];
    parts.iter().flat_map(|part| bytemuck::cast_slice(part)).copied().collect()
}
