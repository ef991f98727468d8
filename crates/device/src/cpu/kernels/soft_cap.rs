//! The cap that Gemma 2 puts on scores and logits.

use super::math::tanh;
use super::simd::per_isa;

per_isa! {
    /// x = cap tanh(x * scale / cap) in place.
    pub(super) fn soft_cap(x: &mut [f32], scale: f32, cap: f32) = soft_cap_body
}

#[inline(always)]
fn soft_cap_body<const FMA: bool>(x: &mut [f32], scale: f32, cap: f32) {
    let factor = scale / cap;
    for value in x {
        *value = cap * tanh::<FMA>(*value * factor);
    }
}
