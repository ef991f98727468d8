//! One step of an optimizer on one parameter, as a value: the weights, the gradient, the rule and its states.
//!
//! Every rule needs the gradient of its own tensor alone. Numbers that hold for a whole step are f64, so that what is
//! worked out of them (1 - beta2, bias corrections) is as exact as in the packages that they come from.

use crate::check::{Access, Mismatch};
use crate::{DType, Rounding, Tensor};

/// Elements that share a scale in 8-bit states (bitsandbytes).
pub const BLOCK_8BIT: u64 = 256;

/// One optimizer step of one parameter.
#[derive(Clone, Copy, Debug)]
pub struct Update<'a> {
    /// The weights, f32 or bf16.
    pub param: &'a Tensor,
    /// f32 weights behind them. With a master the update happens there and `param` gets it rounded to nearest or as
    /// `rounding` says; without one, `param` itself is updated, bf16 with `rounding`.
    pub master: Option<&'a Tensor>,
    /// The gradient, f32 or bf16.
    pub grad: &'a Tensor,
    /// Factor on the gradient (the clipping coefficient).
    pub grad_scale: f32,
    /// How bf16 weights and bf16 states are rounded.
    pub rounding: Rounding,
    /// The optimizer.
    pub rule: Rule<'a>,
}

/// An 8-bit state: codes of a dynamic map (Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization") with
/// the largest magnitude of each block of [`BLOCK_8BIT`] elements.
#[derive(Clone, Copy, Debug)]
pub struct Codes<'a> {
    /// u8 of the parameter's shape.
    pub codes: &'a Tensor,
    /// f32, one for each block.
    pub absmax: &'a Tensor,
}

/// A second moment as Adafactor keeps it.
#[derive(Clone, Copy, Debug)]
pub enum SecondMoment<'a> {
    /// Of a matrix `[R, C]`: its means over rows and over columns.
    Factored {
        /// f32 `[R]`
        rows: &'a Tensor,
        /// f32 `[C]`
        columns: &'a Tensor,
    },
    /// Of anything else: element by element, f32.
    Full(&'a Tensor),
}

/// Which elements share a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Channels {
    /// Those of a row.
    Rows,
    /// Those of a column.
    Columns,
    /// All.
    Whole,
}

/// The numbers of a step of the Adam family.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adam {
    /// Learning rate of this step.
    pub lr: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub epsilon: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// 1-based number of the step, for bias correction.
    pub step: u64,
}

impl Adam {
    /// 1 - beta1^step
    pub fn correction1(&self) -> f64 {
        1.0 - self.beta1.powf(self.step as f64)
    }

    /// sqrt(1 - beta2^step)
    pub fn root_of_correction2(&self) -> f64 {
        (1.0 - self.beta2.powf(self.step as f64)).sqrt()
    }
}

/// The numbers of a step of Lion.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Lion {
    /// Learning rate of this step.
    pub lr: f64,
    /// Share of the momentum in the sign that is taken.
    pub beta1: f64,
    /// Decay of the momentum.
    pub beta2: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
}

/// The numbers of a step of SGD.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sgd {
    /// Learning rate of this step.
    pub lr: f64,
    /// Decay of the momentum buffer.
    pub momentum: f64,
    /// Share of the gradient that the buffer does not get.
    pub dampening: f64,
    /// Whether the step looks ahead by the momentum (Nesterov).
    pub nesterov: bool,
    /// Added to the gradient as a multiple of the weights: L2 regularisation, not decoupled.
    pub weight_decay: f64,
    /// Whether the buffer is empty: it becomes the gradient.
    pub first: bool,
}

/// The numbers of a step of Adafactor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adafactor {
    /// Learning rate of this step, before it is scaled by the parameter.
    pub lr: f64,
    /// Decay of the second moment at this step: 1 - step^-0.8 in the paper.
    pub beta2: f64,
    /// Decay of the momentum over updates, where there is one.
    pub beta1: f64,
    /// Added to the squared gradient.
    pub epsilon: f64,
    /// With a value, the rate is multiplied by the parameter's root mean square, at least this.
    pub scale_by_parameter: Option<f64>,
    /// The update's root mean square is at most this.
    pub clip_threshold: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
}

/// The numbers of a step of APOLLO.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Apollo {
    /// Learning rate of this step, with bias correction and the optimizer's scale.
    pub lr: f64,
    /// Multiple of the weights that is taken off after the update.
    pub decay: f64,
    /// The norm of the scaled gradient grows by this factor at most from one step to the next.
    pub growth_limit: f64,
}

/// An optimizer's rule with the states of a parameter.
#[derive(Clone, Copy, Debug)]
pub enum Rule<'a> {
    /// AdamW (Loshchilov and Hutter 2019), with PyTorch's order of operations. m, v f32 or bf16.
    AdamW {
        /// First moment.
        m: &'a Tensor,
        /// Second moment.
        v: &'a Tensor,
        /// Numbers.
        hyper: Adam,
    },
    /// AdamW with 8-bit states (Dettmers et al. 2022), as bitsandbytes computes it: weights decay after the step.
    AdamW8bit {
        /// First moment, in the signed map.
        m: Codes<'a>,
        /// Second moment, in the unsigned map.
        v: Codes<'a>,
        /// Numbers.
        hyper: Adam,
    },
    /// Adam-mini (Zhang et al. 2024): one second moment for a run of elements. v f32 `[B]`, for B runs of equal length.
    AdamMini {
        /// First moment, f32.
        m: &'a Tensor,
        /// Second moments of the runs.
        v: &'a Tensor,
        /// Numbers.
        hyper: Adam,
    },
    /// Lion (Chen et al. 2023). m f32 or bf16.
    Lion {
        /// Momentum.
        m: &'a Tensor,
        /// Numbers.
        hyper: Lion,
    },
    /// Lion with an 8-bit momentum.
    Lion8bit {
        /// Momentum, in the signed map.
        m: Codes<'a>,
        /// Numbers.
        hyper: Lion,
    },
    /// SGD with or without momentum, as PyTorch computes it.
    Sgd {
        /// Momentum buffer, f32.
        m: Option<&'a Tensor>,
        /// Numbers.
        hyper: Sgd,
    },
    /// Adafactor (Shazeer and Stern 2018), as transformers computes it.
    Adafactor {
        /// Second moment.
        second: SecondMoment<'a>,
        /// Momentum over updates, f32.
        m: Option<&'a Tensor>,
        /// Numbers.
        hyper: Adafactor,
    },
    /// APOLLO's last part (Zhu et al. 2024): the gradient, each channel scaled by `ratios`, its norm held by the limiter
    /// of Fira (Chen et al. 2024).
    Apollo {
        /// f32, one for each channel.
        ratios: &'a Tensor,
        /// What a channel is.
        channels: Channels,
        /// f32 `[1]`: the norm of the last scaled gradient, 0 before the first.
        norm: &'a Tensor,
        /// Numbers.
        hyper: Apollo,
    },
}

impl<'a> Update<'a> {
    pub(crate) fn name(&self) -> &'static str {
        match self.rule {
            Rule::AdamW { .. } => "adamw",
            Rule::AdamW8bit { .. } => "adamw_8bit",
            Rule::AdamMini { .. } => "adam_mini",
            Rule::Lion { .. } => "lion",
            Rule::Lion8bit { .. } => "lion_8bit",
            Rule::Sgd { .. } => "sgd",
            Rule::Adafactor { .. } => "adafactor",
            Rule::Apollo { .. } => "apollo",
        }
    }

    /// What is both read and written: weights and states.
    fn state(&self) -> Vec<&'a Tensor> {
        let mut state = vec![self.param];
        state.extend(self.master);
        match self.rule {
            Rule::AdamW { m, v, .. } | Rule::AdamMini { m, v, .. } => state.extend([m, v]),
            Rule::AdamW8bit { m, v, .. } => state.extend([m.codes, m.absmax, v.codes, v.absmax]),
            Rule::Lion { m, .. } => state.push(m),
            Rule::Lion8bit { m, .. } => state.extend([m.codes, m.absmax]),
            Rule::Sgd { m, .. } => state.extend(m),
            Rule::Adafactor { second, m, .. } => {
                match second {
                    SecondMoment::Factored { rows, columns } => state.extend([rows, columns]),
                    SecondMoment::Full(v) => state.push(v),
                }
                state.extend(m);
            }
            Rule::Apollo { norm, .. } => state.push(norm),
        }
        state
    }

    pub(crate) fn access(&self) -> Access<'a> {
        let writes = self.state();
        let mut reads = writes.clone();
        reads.push(self.grad);
        if let Rule::Apollo { ratios, .. } = self.rule {
            reads.push(ratios);
        }
        let in_place = writes.iter().map(|t| (*t, *t)).collect();
        Access { reads, writes, in_place }
    }

    /// Bytes that are moved beyond one pass over everything: rules that need a sum before the update read the gradient
    /// more often.
    pub(crate) fn further_bytes(&self) -> u64 {
        let weights = self.master.unwrap_or(self.param).bytes();
        let grad = self.grad.bytes();
        match self.rule {
            Rule::AdamMini { .. } | Rule::Apollo { .. } => grad,
            Rule::Adafactor { second: SecondMoment::Factored { .. }, .. } => 3 * grad + weights,
            Rule::Adafactor { second: SecondMoment::Full(v), .. } => 2 * (grad + v.bytes()) + weights,
            _ => 0,
        }
    }

    pub(crate) fn check(&self, check: &mut Mismatch) {
        let (param, n) = (self.param, self.param.elements());
        [param, self.grad].into_iter().for_each(|t| check.float(t));
        check.same_size(param, self.grad);
        if let Some(master) = self.master {
            check.f32(master);
            check.same_size(param, master);
        }
        match self.rule {
            Rule::AdamW { m, v, .. } => {
                for state in [m, v] {
                    check.float(state);
                    check.same_size(param, state);
                }
            }
            Rule::AdamW8bit { m, v, .. } => [m, v].into_iter().for_each(|codes| check.codes(param, codes)),
            Rule::AdamMini { m, v, .. } => {
                check.f32(m);
                check.same_size(param, m);
                check.f32(v);
                check.that(v.elements() > 0 && n.is_multiple_of(v.elements().max(1)), || {
                    format!("{param:?} does not fall into {} equal runs", v.elements())
                });
            }
            Rule::Lion { m, .. } => {
                check.float(m);
                check.same_size(param, m);
            }
            Rule::Lion8bit { m, .. } => check.codes(param, m),
            Rule::Sgd { m, .. } => {
                if let Some(m) = m {
                    check.f32(m);
                    check.same_size(param, m);
                }
            }
            Rule::Adafactor { second, m, .. } => {
                match second {
                    SecondMoment::Factored { rows, columns } => {
                        check.f32_vector(rows, param.rows());
                        check.f32_vector(columns, param.columns());
                    }
                    SecondMoment::Full(v) => {
                        check.f32(v);
                        check.same_size(param, v);
                    }
                }
                if let Some(m) = m {
                    check.f32(m);
                    check.same_size(param, m);
                }
            }
            Rule::Apollo { ratios, channels, norm, .. } => {
                check.f32_vector(ratios, channels.count(param));
                check.f32_vector(norm, 1);
            }
        }
    }
}

impl Channels {
    /// Number of channels of a tensor.
    pub(crate) fn count(self, t: &Tensor) -> u64 {
        match self {
            Channels::Rows => t.rows(),
            Channels::Columns => t.columns(),
            Channels::Whole => 1,
        }
    }
}

impl Mismatch {
    fn codes(&mut self, param: &Tensor, Codes { codes, absmax }: Codes<'_>) {
        self.that(codes.dtype() == DType::U8, || format!("{codes:?} is not u8"));
        self.same_size(param, codes);
        self.f32_vector(absmax, param.elements().div_ceil(BLOCK_8BIT));
    }
}
