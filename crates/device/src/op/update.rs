//! One step of an optimizer on one parameter, as a value: the weights, the gradient, the rule and its states.
//!
//! Every rule needs the gradient of its own tensor alone. Numbers that hold for a whole step are f64, so that what is
//! worked out of them (1 - beta2, bias corrections) is as exact as in the packages that they come from.

use super::{Family, PIECE, Rounding};
use crate::check::Description;
use crate::{Cost, DType, Tensor};

/// Elements that share a scale in 8-bit states (bitsandbytes).
pub const BLOCK_8BIT: u64 = 256;

/// One optimizer step of one parameter.
#[derive(Clone, Copy, Debug)]
pub struct Update<'a> {
    /// The weights, f32 or bf16.
    pub param: &'a Tensor,
    /// f32 weights behind them. With a master the update happens there and `param` gets it rounded to nearest; without
    /// one, `param` itself is updated, bf16 with `rounding`.
    pub master: Option<&'a Tensor>,
    /// The gradient, f32 or bf16.
    pub grad: &'a Tensor,
    /// f32 `[1]`: factor on the gradient (the clipping coefficient); 1 where there is none.
    pub grad_scale: Option<&'a Tensor>,
    /// How bf16 states are rounded, and bf16 weights without a master.
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

impl<'a> Family<'a> for Update<'a> {
    fn describe(&self) -> Description<'a> {
        let Update { param, master, grad, grad_scale, rule, .. } = *self;
        let new = |name| {
            Description::new(name, [], [])
                .changing([param])
                .changing(master)
                .reading([grad])
                .reading(grad_scale)
                .f32_vectors(grad_scale, 1)
                .floats([param, grad])
                .same_size(param, [grad])
                .f32s(master)
                .same_size(param, master)
        };
        match rule {
            Rule::AdamW { m, v, .. } => new("adamw").state(param, [m, v]),
            Rule::AdamW8bit { m, v, .. } => new("adamw_8bit").codes(param, m).codes(param, v),
            Rule::AdamMini { m, v, .. } => {
                let runs = v.elements();
                new("adam_mini")
                    .f32_state(param, [m])
                    .changing([v])
                    .f32s([v])
                    .that(runs > 0 && param.elements().is_multiple_of(runs.max(1)), || {
                        format!("{param:?} does not fall into {runs} equal runs")
                    })
            }
            Rule::Lion { m, .. } => new("lion").state(param, [m]),
            Rule::Lion8bit { m, .. } => new("lion_8bit").codes(param, m),
            Rule::Sgd { m, .. } => new("sgd").f32_state(param, m),
            Rule::Adafactor { second: SecondMoment::Factored { rows, columns }, m, .. } => new("adafactor")
                .changing([rows, columns])
                .f32_vectors([rows], param.rows())
                .f32_vectors([columns], param.columns())
                .f32_state(param, m)
                .task_sums(param, param.columns())
                .task_sums(param, PIECE as u64),
            Rule::Adafactor { second: SecondMoment::Full(v), m, .. } => {
                new("adafactor").f32_state(param, [v]).f32_state(param, m).task_sums(param, PIECE as u64)
            }
            Rule::Apollo { ratios, channels, norm, .. } => new("apollo")
                .changing([norm])
                .reading([ratios])
                .f32_vectors([ratios], channels.count(param))
                .f32_vectors([norm], 1)
                .task_sums(param, param.columns()),
        }
    }

    /// Rules that need a sum before the update read the gradient more often.
    fn cost(&self, once: Cost) -> Cost {
        let weights = self.master.unwrap_or(self.param).bytes();
        let grad = self.grad.bytes();
        let again = match self.rule {
            Rule::AdamMini { .. } | Rule::Apollo { .. } => grad,
            Rule::Adafactor { second: SecondMoment::Factored { .. }, .. } => 3 * grad + weights,
            Rule::Adafactor { second: SecondMoment::Full(v), .. } => 2 * (grad + v.bytes()) + weights,
            _ => 0,
        };
        Cost { bytes: once.bytes + again, ..once }
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

impl<'a> Description<'a> {
    /// States of the parameter's size.
    fn state(self, param: &Tensor, states: impl IntoIterator<Item = &'a Tensor>) -> Self {
        states.into_iter().fold(self, |op, t| op.changing([t]).floats([t]).same_size(param, [t]))
    }

    /// The same, f32.
    fn f32_state(self, param: &Tensor, states: impl IntoIterator<Item = &'a Tensor>) -> Self {
        states.into_iter().fold(self, |op, t| op.changing([t]).f32s([t]).same_size(param, [t]))
    }

    fn codes(self, param: &Tensor, Codes { codes, absmax }: Codes<'a>) -> Self {
        self.changing([codes, absmax])
            .that(codes.dtype() == DType::U8, || format!("{codes:?} is not u8"))
            .same_size(param, [codes])
            .f32_vectors([absmax], param.elements().div_ceil(BLOCK_8BIT))
    }
}
