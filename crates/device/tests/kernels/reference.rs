//! The kernels in f64, for reading. Matrices are row after row; gradients are of the sum of `dout * out`.

use plimsoll_device::Glu;

pub fn rms_norm(x: &[f64], weight: &[f64], epsilon: f64) -> (Vec<f64>, Vec<f64>) {
    let h = weight.len();
    let (mut out, mut rstds) = (Vec::new(), Vec::new());
    for row in x.chunks(h) {
        let mean_square = row.iter().map(|x| x * x).sum::<f64>() / h as f64;
        let rstd = 1.0 / (mean_square + epsilon).sqrt();
        out.extend(row.iter().zip(weight).map(|(x, w)| x * rstd * w));
        rstds.push(rstd);
    }
    (out, rstds)
}

/// dx and dweight.
pub fn rms_norm_backward(x: &[f64], weight: &[f64], rstds: &[f64], dout: &[f64]) -> (Vec<f64>, Vec<f64>) {
    let h = weight.len();
    let (mut dx, mut dweight) = (Vec::new(), vec![0.0; h]);
    for ((x, dout), rstd) in x.chunks(h).zip(dout.chunks(h)).zip(rstds) {
        let g: Vec<f64> = dout.iter().zip(weight).map(|(d, w)| d * w).collect();
        let mean = g.iter().zip(x).map(|(g, x)| g * x * rstd).sum::<f64>() / h as f64;
        for i in 0..h {
            dx.push(rstd * (g[i] - x[i] * rstd * mean));
            dweight[i] += dout[i] * x[i] * rstd;
        }
    }
    (dx, dweight)
}

/// out, mean and rstd.
pub fn layer_norm(x: &[f64], weight: &[f64], bias: &[f64], epsilon: f64) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
    let h = weight.len();
    let (mut out, mut means, mut rstds) = (Vec::new(), Vec::new(), Vec::new());
    for row in x.chunks(h) {
        let mean = row.iter().sum::<f64>() / h as f64;
        let variance = row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / h as f64;
        let rstd = 1.0 / (variance + epsilon).sqrt();
        out.extend((0..h).map(|i| (row[i] - mean) * rstd * weight[i] + bias[i]));
        means.push(mean);
        rstds.push(rstd);
    }
    (out, means, rstds)
}

/// dx, dweight and dbias.
pub fn layer_norm_backward(
    x: &[f64],
    weight: &[f64],
    means: &[f64],
    rstds: &[f64],
    dout: &[f64],
) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
    let h = weight.len();
    let (mut dx, mut dweight, mut dbias) = (Vec::new(), vec![0.0; h], vec![0.0; h]);
    for (row, (x, dout)) in x.chunks(h).zip(dout.chunks(h)).enumerate() {
        let xhat: Vec<f64> = x.iter().map(|x| (x - means[row]) * rstds[row]).collect();
        let g: Vec<f64> = dout.iter().zip(weight).map(|(d, w)| d * w).collect();
        let mean_g = g.iter().sum::<f64>() / h as f64;
        let mean_gx = g.iter().zip(&xhat).map(|(g, x)| g * x).sum::<f64>() / h as f64;
        for i in 0..h {
            dx.push(rstds[row] * (g[i] - mean_g - xhat[i] * mean_gx));
            dweight[i] += dout[i] * xhat[i];
            dbias[i] += dout[i];
        }
    }
    (dx, dweight, dbias)
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// The normal distribution's cumulative function.
fn normal_below(x: f64) -> f64 {
    let z = x.abs();
    let density = (-z * z / 2.0).exp() / (2.0 * std::f64::consts::PI).sqrt();
    let above = if z < 3.0 {
        // 1/2 + density * (z + z^3/3 + z^5/15 + ...)
        let mut term = z;
        let mut sum = z;
        for n in 1..100 {
            term *= z * z / (2 * n + 1) as f64;
            sum += term;
        }
        0.5 - density * sum
    } else {
        // Laplace's continued fraction, from the far end.
        density / (1..200).rev().fold(z, |tail, n| z + f64::from(n) / tail)
    };
    if x < 0.0 { above } else { 1.0 - above }
}

pub fn act(activation: Glu, x: f64) -> f64 {
    match activation {
        Glu::Silu => x * sigmoid(x),
        Glu::Gelu => x * normal_below(x),
        Glu::GeluTanh => {
            let u = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
            // 1 + tanh u, without the cancellation where tanh u is nearly -1.
            x * sigmoid(2.0 * u)
        }
    }
}

pub fn act_slope(activation: Glu, x: f64) -> f64 {
    match activation {
        Glu::Silu => sigmoid(x) * (1.0 + x * (1.0 - sigmoid(x))),
        Glu::Gelu => normal_below(x) + x * (-x * x / 2.0).exp() / (2.0 * std::f64::consts::PI).sqrt(),
        Glu::GeluTanh => {
            let root = (2.0 / std::f64::consts::PI).sqrt();
            let tanh = (root * (x + 0.044715 * x.powi(3))).tanh();
            0.5 * (1.0 + tanh) + 0.5 * x * (1.0 - tanh * tanh) * root * (1.0 + 3.0 * 0.044715 * x * x)
        }
    }
}

/// Pairs (i, i + D/2) of each head, by the angles of each row's position.
pub fn rope(
    x: &[f64],
    columns: usize,
    positions: &[u32],
    cos: &[f64],
    sin: &[f64],
    pairs: usize,
    inverse: bool,
) -> Vec<f64> {
    let mut out = x.to_vec();
    for (row, position) in out.chunks_mut(columns).zip(positions) {
        for head in row.chunks_mut(2 * pairs) {
            for i in 0..pairs {
                let at = *position as usize * pairs + i;
                let (c, s) = (cos[at], if inverse { -sin[at] } else { sin[at] });
                let (a, b) = (head[i], head[i + pairs]);
                head[i] = a * c - b * s;
                head[i + pairs] = b * c + a * s;
            }
        }
    }
    out
}

/// Losses, and the gradient of `scale` times their sum.
pub fn cross_entropy(logits: &[f64], vocabulary: usize, targets: &[u32], scale: f64) -> (Vec<f64>, Vec<f64>) {
    let (mut losses, mut gradient) = (Vec::new(), Vec::new());
    for (row, target) in logits.chunks(vocabulary).zip(targets) {
        let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = row.iter().map(|x| (x - max).exp()).sum();
        let ignored = *target == plimsoll_device::IGNORED_TARGET;
        let target = *target as usize;
        losses.push(if ignored { 0.0 } else { max + sum.ln() - row[target] });
        gradient.extend(row.iter().enumerate().map(|(i, x)| match ignored {
            true => 0.0,
            false => ((x - max).exp() / sum - f64::from(u8::from(i == target))) * scale,
        }));
    }
    (losses, gradient)
}

/// Parameters, first and second moments after one step of AdamW (Loshchilov and Hutter 2019, algorithm 2).
pub fn adamw(
    hyper: &plimsoll_device::Adam,
    grad_scale: f64,
    param: &[f64],
    grad: &[f64],
    m: &[f64],
    v: &[f64],
) -> [Vec<f64>; 3] {
    let plimsoll_device::Adam { lr, beta1, beta2, epsilon, weight_decay, step } = *hyper;
    let [mut params, mut ms, mut vs] = [vec![], vec![], vec![]];
    for i in 0..param.len() {
        let g = grad[i] * grad_scale;
        let m = beta1 * m[i] + (1.0 - beta1) * g;
        let v = beta2 * v[i] + (1.0 - beta2) * g * g;
        let m_hat = m / (1.0 - beta1.powf(step as f64));
        let v_hat = v / (1.0 - beta2.powf(step as f64));
        params.push(param[i] - lr * weight_decay * param[i] - lr * m_hat / (v_hat.sqrt() + epsilon));
        ms.push(m);
        vs.push(v);
    }
    [params, ms, vs]
}
