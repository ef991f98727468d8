//! AdamW and Lion with block-wise 8-bit states, in the order of operations of bitsandbytes' kernels, without fusing:
//! codes are then the same on every instruction set.

use super::dynamic_map::{BLOCK, DynamicMap, SIGNED, UNSIGNED};
use super::{FLAT, Weights, update};
use crate::cpu::kernels::simd::per_isa;
use crate::cpu::kernels::split::Shared;
use crate::cpu::kernels::{Exec, Simd};
use crate::{Adam, Lion};

/// An 8-bit state to update: a code for each element, a scale for each block.
pub(in crate::cpu) struct CodesMut<'a> {
    pub codes: &'a mut [u8],
    pub absmax: &'a mut [f32],
}

impl<'a> CodesMut<'a> {
    fn shared(self) -> (Shared<'a, u8>, Shared<'a, f32>) {
        (Shared::new(self.codes, FLAT), Shared::new(self.absmax, FLAT / BLOCK))
    }
}

/// One update of AdamW.
pub(in crate::cpu) fn adamw_8bit(
    exec: Exec<'_>,
    weights: Weights<'_>,
    [m, v]: [CodesMut<'_>; 2],
    hyper: Adam,
) {
    let (lr, beta1, beta2) = (hyper.lr as f32, hyper.beta1 as f32, hyper.beta2 as f32);
    let c2 = hyper.root_of_correction2() as f32;
    let factors = AdamFactors {
        grad_scale: weights.grad_scale,
        beta1,
        less1: 1.0 - beta1,
        beta2,
        less2: 1.0 - beta2,
        epsilon: c2 * hyper.epsilon as f32,
        step_size: -lr * c2 / hyper.correction1() as f32,
        decay: 1.0 - lr * hyper.weight_decay as f32,
    };
    update(exec, weights, FLAT, [m.shared(), v.shared()], |[m, v], span, param, grad| {
        let blocks = param.chunks_mut(BLOCK).zip(grad.chunks(BLOCK));
        let codes = m.0[span.part.clone()].chunks_mut(BLOCK).zip(v.0[span.part.clone()].chunks_mut(BLOCK));
        let first = span.part.start / BLOCK;
        let scales = m.1[first..].iter_mut().zip(&mut v.1[first..]);
        let mut states = [[0.0; BLOCK]; 2];
        for (((param, grad), (m, v)), (m_max, v_max)) in blocks.zip(codes).zip(scales) {
            adam_block(exec.simd, param, grad, m, v, [m_max, v_max], &mut states, factors);
        }
    });
}

/// One update of Lion.
pub(in crate::cpu) fn lion_8bit(exec: Exec<'_>, weights: Weights<'_>, m: CodesMut<'_>, hyper: Lion) {
    let (lr, beta1, beta2) = (hyper.lr as f32, hyper.beta1 as f32, hyper.beta2 as f32);
    let factors = LionFactors {
        grad_scale: weights.grad_scale,
        lr,
        beta1,
        less1: 1.0 - beta1,
        beta2,
        less2: 1.0 - beta2,
        decay: 1.0 - lr * hyper.weight_decay as f32,
    };
    update(exec, weights, FLAT, m.shared(), |(codes, absmax), span, param, grad| {
        let first = span.part.start / BLOCK;
        let states = codes[span.part].chunks_mut(BLOCK).zip(&mut absmax[first..]);
        let mut state = [0.0; BLOCK];
        for ((param, grad), (m, max)) in param.chunks_mut(BLOCK).zip(grad.chunks(BLOCK)).zip(states) {
            lion_block(exec.simd, param, grad, m, max, &mut state, factors);
        }
    });
}

#[derive(Clone, Copy)]
struct AdamFactors {
    grad_scale: f32,
    beta1: f32,
    less1: f32,
    beta2: f32,
    less2: f32,
    epsilon: f32,
    step_size: f32,
    decay: f32,
}

#[derive(Clone, Copy)]
struct LionFactors {
    grad_scale: f32,
    lr: f32,
    beta1: f32,
    less1: f32,
    beta2: f32,
    less2: f32,
    decay: f32,
}

/// Updates a block of AdamW's.
fn adam_block(
    simd: Simd,
    param: &mut [f32],
    grad: &[f32],
    m: &mut [u8],
    v: &mut [u8],
    [m_max, v_max]: [&mut f32; 2],
    [first, second]: &mut [[f32; BLOCK]; 2],
    factors: AdamFactors,
) {
    decode(simd, &SIGNED, m, *m_max, first);
    decode(simd, &UNSIGNED, v, *v_max, second);
    let n = param.len();
    [*m_max, *v_max] = adam_step(simd, param, grad, &mut first[..n], &mut second[..n], factors);
    encode(simd, &SIGNED, first, *m_max, m, 255);
    encode(simd, &UNSIGNED, second, *v_max, v, 0);
}

per_isa! {
    /// Returns the largest magnitude of each state.
    fn adam_step(param: &mut [f32], grad: &[f32], m: &mut [f32], v: &mut [f32], factors: AdamFactors) -> [f32; 2]
        = adam_step_body
}

/// A gradient that is not finite leaves the weight and empties the states.
#[inline(always)]
fn adam_step_body<const FMA: bool>(
    param: &mut [f32],
    grad: &[f32],
    m: &mut [f32],
    v: &mut [f32],
    f: AdamFactors,
) -> [f32; 2] {
    let mut largest = [0; 2];
    for (((param, grad), s1), s2) in param.iter_mut().zip(grad).zip(m).zip(v) {
        let good = grad.is_finite();
        let g = grad * f.grad_scale;
        let new2 = *s2 * f.beta2 + f.less2 * g * g;
        let new1 = *s1 * f.beta1 + f.less1 * g;
        *s2 = if good { new2 } else { 0.0 };
        *s1 = if good { new1 } else { 0.0 };
        let stepped = (*param + f.step_size * (new1 / (new2.sqrt() + f.epsilon))) * f.decay;
        *param = if good { stepped } else { *param };
        largest = [largest[0].max(magnitude_bits(*s1)), largest[1].max(magnitude_bits(*s2))];
    }
    largest.map(f32::from_bits)
}

/// In the order of the magnitudes.
#[inline(always)]
fn magnitude_bits(x: f32) -> u32 {
    x.abs().to_bits()
}

/// Updates a block of Lion's.
fn lion_block(
    simd: Simd,
    param: &mut [f32],
    grad: &[f32],
    m: &mut [u8],
    absmax: &mut f32,
    first: &mut [f32; BLOCK],
    factors: LionFactors,
) {
    decode(simd, &SIGNED, m, *absmax, first);
    *absmax = lion_step(simd, param, grad, &mut first[..param.len()], factors);
    encode(simd, &SIGNED, first, *absmax, m, 255);
}

per_isa! {
    /// Returns the largest magnitude of the state.
    fn lion_step(param: &mut [f32], grad: &[f32], m: &mut [f32], factors: LionFactors) -> f32 = lion_step_body
}

#[inline(always)]
fn lion_step_body<const FMA: bool>(param: &mut [f32], grad: &[f32], m: &mut [f32], f: LionFactors) -> f32 {
    let mut largest = 0;
    for ((param, grad), s1) in param.iter_mut().zip(grad).zip(m) {
        let good = grad.is_finite();
        let g = grad * f.grad_scale;
        let between = *s1 * f.beta1 + f.less1 * g;
        let by = if between == 0.0 { 0.0 } else { f.lr.copysign(between) };
        *param = if good { *param * f.decay - by } else { *param };
        *s1 = if good { *s1 * f.beta2 + f.less2 * g } else { 0.0 };
        largest = largest.max(magnitude_bits(*s1));
    }
    f32::from_bits(largest)
}

/// The values of up to a block of codes.
fn decode<const SIGNED: bool>(
    simd: Simd,
    map: &DynamicMap<SIGNED>,
    codes: &[u8],
    absmax: f32,
    out: &mut [f32; BLOCK],
) {
    match codes.try_into() {
        Ok(codes) => map.decode_block(simd, codes, absmax, out),
        Err(_) => {
            let mut whole = [0; BLOCK];
            whole[..codes.len()].copy_from_slice(codes);
            map.decode_block(simd, &whole, absmax, out);
        }
    }
}

/// Codes of as many of x, whose largest magnitude is given; `of_zeros` where there are only zeros, whose quotient is
/// not a number: the code that bitsandbytes' search then ends at.
fn encode<const SIGNED: bool>(
    simd: Simd,
    map: &DynamicMap<SIGNED>,
    x: &[f32; BLOCK],
    absmax: f32,
    codes: &mut [u8],
    of_zeros: u8,
) {
    if absmax == 0.0 {
        codes.fill(of_zeros);
    } else if let Ok(codes) = (&mut *codes).try_into() {
        map.encode_block(simd, x, absmax, codes);
    } else {
        let mut whole = [0; BLOCK];
        map.encode_block(simd, x, absmax, &mut whole);
        codes.copy_from_slice(&whole[..codes.len()]);
    }
}
