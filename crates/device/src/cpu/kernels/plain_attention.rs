//! Causal attention row by row, until the tiled kernels are called.

use super::{Exec, Floats, FloatsMut};
use crate::{AttentionShape, Rounding};

fn f32s(exec: Exec<'_>, x: Floats<'_>) -> Vec<f32> {
    let mut out = vec![0.0; x.len()];
    x.copy_to(exec.simd, 0..x.len(), &mut out);
    out
}

pub(in crate::cpu) fn forward(
    exec: Exec<'_>,
    [q, k, v]: [Floats<'_>; 3],
    mut out: FloatsMut<'_>,
    lse: &mut [f32],
    s: AttentionShape,
) {
    let (q, k, v) = (f32s(exec, q), f32s(exec, k), f32s(exec, v));
    let (heads, kv_heads, d) = (s.heads as usize, s.kv_heads as usize, s.head_dim as usize);
    let mut o = vec![0.0f32; q.len()];
    for b in 0..s.batch as usize {
        for h in 0..heads {
            let g = h / (heads / kv_heads);
            for i in 0..s.q_len as usize {
                let seen = (s.kv_len - s.q_len) as usize + i + 1;
                let qi = (b * s.q_len as usize + i) * heads * d + h * d;
                let at = |j: usize| (b * s.kv_capacity as usize + j) * kv_heads * d + g * d;
                let scores: Vec<f32> = (0..seen)
                    .map(|j| s.scale * q[qi..qi + d].iter().zip(&k[at(j)..]).map(|(a, b)| a * b).sum::<f32>())
                    .collect();
                let max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let sum: f32 = scores.iter().map(|x| (x - max).exp()).sum();
                for (j, score) in scores.iter().enumerate() {
                    let p = (score - max).exp() / sum;
                    for c in 0..d {
                        o[qi + c] += p * v[at(j) + c];
                    }
                }
                lse[(b * heads + h) * s.q_len as usize + i] = max + sum.ln();
            }
        }
    }
    out.convert(exec.simd, Floats::F32(&o), Rounding::Nearest, 0);
}

pub(in crate::cpu) fn backward(
    exec: Exec<'_>,
    [q, k, v, out, dout]: [Floats<'_>; 5],
    lse: &[f32],
    [mut dq, mut dk, mut dv]: [FloatsMut<'_>; 3],
    s: AttentionShape,
) {
    let [q, k, v, out, dout] = [q, k, v, out, dout].map(|x| f32s(exec, x));
    let (heads, kv_heads, d) = (s.heads as usize, s.kv_heads as usize, s.head_dim as usize);
    let (mut gq, mut gk, mut gv) = (vec![0.0f32; q.len()], vec![0.0f32; k.len()], vec![0.0f32; v.len()]);
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
    for b in 0..s.batch as usize {
        for h in 0..heads {
            let g = h / (heads / kv_heads);
            for i in 0..s.q_len as usize {
                let qi = (b * s.q_len as usize + i) * heads * d + h * d;
                let row = qi..qi + d;
                let delta = dot(&out[row.clone()], &dout[row.clone()]);
                for j in 0..=i {
                    let kj = (b * s.q_len as usize + j) * kv_heads * d + g * d;
                    let key = kj..kj + d;
                    let score = s.scale * dot(&q[row.clone()], &k[key.clone()]);
                    let p = (score - lse[(b * heads + h) * s.q_len as usize + i]).exp();
                    let ds = p * (dot(&dout[row.clone()], &v[key]) - delta) * s.scale;
                    for c in 0..d {
                        gv[kj + c] += p * dout[qi + c];
                        gq[qi + c] += ds * k[kj + c];
                        gk[kj + c] += ds * q[qi + c];
                    }
                }
            }
        }
    }
    dq.convert(exec.simd, Floats::F32(&gq), Rounding::Nearest, 0);
    dk.convert(exec.simd, Floats::F32(&gk), Rounding::Nearest, 0);
    dv.convert(exec.simd, Floats::F32(&gv), Rounding::Nearest, 0);
}
