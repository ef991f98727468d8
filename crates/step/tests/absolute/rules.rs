//! Rules of optimizers as their papers and packages have them, in f64, one element after the other.

use plimsoll_step::{AdafactorSettings, AdamSettings, LionSettings, SgdSettings};

/// A rule with the states of one parameter.
pub trait Rule {
    /// The weights after a step; `step` is 1 at first.
    fn step(&mut self, w: &[f64], g: &[f64], lr: f64, weight_decay: f64, step: i32) -> Vec<f64>;
}

/// AdamW (Loshchilov and Hutter 2019). Runs of elements that share a second moment: as many as elements, but for
/// Adam-mini.
pub struct Adam {
    pub numbers: AdamSettings,
    pub m: Vec<f64>,
    pub v: Vec<f64>,
    pub decay_after: bool,
}

impl Adam {
    pub fn new(numbers: AdamSettings, elements: u64, runs: u64) -> Adam {
        Adam { numbers, m: vec![0.0; elements as usize], v: vec![0.0; runs as usize], decay_after: false }
    }
}

impl Rule for Adam {
    fn step(&mut self, w: &[f64], g: &[f64], lr: f64, weight_decay: f64, step: i32) -> Vec<f64> {
        let AdamSettings { beta1, beta2, epsilon } = self.numbers;
        let run = g.len() / self.v.len();
        for (v, g) in self.v.iter_mut().zip(g.chunks(run)) {
            let mean = g.iter().map(|g| g * g).sum::<f64>() / run as f64;
            *v = beta2 * *v + (1.0 - beta2) * mean;
        }
        let mut out = Vec::new();
        for (i, (w, g)) in w.iter().zip(g).enumerate() {
            self.m[i] = beta1 * self.m[i] + (1.0 - beta1) * g;
            let m = self.m[i] / (1.0 - beta1.powi(step));
            let v = self.v[i / run] / (1.0 - beta2.powi(step));
            let direction = lr * m / (v.sqrt() + epsilon);
            let shrink = 1.0 - lr * weight_decay;
            out.push(if self.decay_after { (w - direction) * shrink } else { w * shrink - direction });
        }
        out
    }
}

/// Lion (Chen et al. 2023).
pub struct Lion {
    pub numbers: LionSettings,
    pub m: Vec<f64>,
}

impl Rule for Lion {
    fn step(&mut self, w: &[f64], g: &[f64], lr: f64, weight_decay: f64, _: i32) -> Vec<f64> {
        let LionSettings { beta1, beta2 } = self.numbers;
        let sign = |x: f64| if x == 0.0 { 0.0 } else { x.signum() };
        let mut out = Vec::new();
        for ((w, g), m) in w.iter().zip(g).zip(&mut self.m) {
            out.push(w * (1.0 - lr * weight_decay) - lr * sign(beta1 * *m + (1.0 - beta1) * g));
            *m = beta2 * *m + (1.0 - beta2) * g;
        }
        out
    }
}

/// SGD as PyTorch has it: weight decay is a part of the gradient.
pub struct Sgd {
    pub numbers: SgdSettings,
    /// Empty before the first step.
    pub m: Vec<f64>,
}

impl Rule for Sgd {
    fn step(&mut self, w: &[f64], g: &[f64], lr: f64, weight_decay: f64, _: i32) -> Vec<f64> {
        let SgdSettings { momentum, dampening, nesterov } = self.numbers;
        let g: Vec<f64> = w.iter().zip(g).map(|(w, g)| g + weight_decay * w).collect();
        if self.m.is_empty() {
            self.m.clone_from(&g);
        } else {
            self.m.iter_mut().zip(&g).for_each(|(m, g)| *m = momentum * *m + (1.0 - dampening) * g);
        }
        let direction = |(g, m): (&f64, &f64)| match (momentum > 0.0, nesterov) {
            (false, _) => *g,
            (true, false) => *m,
            (true, true) => g + momentum * m,
        };
        w.iter().zip(g.iter().zip(&self.m).map(direction)).map(|(w, d)| w - lr * d).collect()
    }
}

/// Adafactor (Shazeer and Stern 2018) in the order of transformers' implementation.
pub struct Adafactor {
    pub numbers: AdafactorSettings,
    /// Of rows, and of columns; one of elements and nothing where there are no rows.
    second: [Vec<f64>; 2],
    m: Vec<f64>,
    columns: usize,
}

impl Adafactor {
    pub fn new(numbers: AdafactorSettings, shape: &[u64]) -> Adafactor {
        let n = shape.iter().product::<u64>() as usize;
        let (second, columns) = match *shape {
            [rows, columns] => ([vec![0.0; rows as usize], vec![0.0; columns as usize]], columns as usize),
            _ => ([vec![0.0; n], Vec::new()], 1),
        };
        Adafactor { numbers, second, m: vec![0.0; n], columns }
    }
}

impl Rule for Adafactor {
    fn step(&mut self, w: &[f64], g: &[f64], lr: f64, weight_decay: f64, step: i32) -> Vec<f64> {
        let AdafactorSettings { decay_rate, beta1, epsilon, scale_by_parameter, clip_threshold } =
            self.numbers;
        let root_mean = |x: &[f64]| (x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64).sqrt();
        let beta2 = 1.0 - f64::from(step).powf(decay_rate);
        let square = |i: usize| g[i] * g[i] + epsilon;
        let [rows, columns] = &mut self.second;
        let (height, width) = (rows.len(), self.columns);
        let average = |state: &mut f64, mean: f64| *state = beta2 * *state + (1.0 - beta2) * mean;
        let mut update = Vec::new();
        if columns.is_empty() {
            for (i, (g, v)) in g.iter().zip(rows).enumerate() {
                average(v, square(i));
                update.push(g / v.sqrt());
            }
        } else {
            for (row, v) in rows.iter_mut().enumerate() {
                average(v, (0..width).map(|c| square(row * width + c)).sum::<f64>() / width as f64);
            }
            for (column, v) in columns.iter_mut().enumerate() {
                average(v, (0..height).map(|r| square(r * width + column)).sum::<f64>() / height as f64);
            }
            let mean = rows.iter().sum::<f64>() / height as f64;
            for (i, g) in g.iter().enumerate() {
                update.push(g / (rows[i / width] / mean * columns[i % width]).sqrt());
            }
        }
        let clip = (root_mean(&update) / clip_threshold).max(1.0);
        let lr = scale_by_parameter.map_or(lr, |least| lr * root_mean(w).max(least));
        for (m, update) in self.m.iter_mut().zip(&update) {
            let update = lr * update / clip;
            *m = beta1.map_or(update, |beta1| beta1 * *m + (1.0 - beta1) * update);
        }
        w.iter().zip(&self.m).map(|(w, m)| w * (1.0 - lr * weight_decay) - m).collect()
    }
}
