//! Steps of optimizers: the numbers of a step are worked out here, in f64, as the CPU's kernels do.

use super::parameters::{Emit, Launch, Rounding, View, plain, row_blocks, vector_blocks, wide_blocks};
use super::reduction::{Factors, Squared, channel_squares, squares};
use crate::cuda::CudaError;
use crate::{
    Adafactor, Adam, Apollo, BLOCK_8BIT, Channels, Codes, Lion, Rule, SecondMoment, Sgd, Tensor, Update,
};

plain! {
    /// `Weights` of the kernels.
    Weights { param: View, grad: View, master: u64, grad_scale: u64, n: u64, rounding: Rounding }
    /// `AdamNumbers` of the kernels.
    AdamNumbers {
        decay: f32,
        less1: f32,
        beta2: f32,
        less2: f32,
        root_of_correction2: f32,
        epsilon: f32,
        step_size: f32,
        unused: u32,
    }
    /// `Adam8Numbers` of the kernels.
    Adam8Numbers {
        beta1: f32,
        less1: f32,
        beta2: f32,
        less2: f32,
        epsilon: f32,
        step_size: f32,
        decay: f32,
        unused: u32,
    }
    /// `LionNumbers` of the kernels.
    LionNumbers { lr: f32, decay: f32, beta1: f32, less1: f32, beta2: f32, less2: f32 }
    /// `SgdNumbers` of the kernels.
    SgdNumbers { lr: f32, weight_decay: f32, momentum: f32, share: f32, ahead: f32, nesterov: u32 }
    /// `AdafactorNumbers` of the kernels.
    AdafactorNumbers {
        lr: f64,
        clip_threshold: f64,
        weight_decay: f64,
        least_scale: f64,
        beta1: f32,
        less1: f32,
        by_parameter: u32,
        unused: u32,
    }
}

/// The tables of states' codes, in shared memory: `States` of the kernels.
const STATES_BYTES: u64 = 4 * (512 + 514 + 2) + 2 * (24 * 32 + 4);

pub(super) fn update(op: Update<'_>, emit: &mut Emit<'_>) -> Result<(), CudaError> {
    let n = op.param.elements();
    if n == 0 {
        return Ok(());
    }
    let weights = Weights {
        param: emit.view(op.param),
        grad: emit.view(op.grad),
        master: emit.address(op.master),
        grad_scale: emit.address(op.grad_scale),
        n,
        rounding: op.rounding.into(),
    };
    let vectors = vector_blocks(n);
    let wide = wide_blocks(n);
    // Each warp has a block of a state at a time, and each block of threads such tables.
    let blocks = emit.at_once(n.div_ceil(8 * BLOCK_8BIT));
    let kernel = match op.rule {
        Rule::AdamW { m, v, hyper } => {
            let kernel = emit.kernel("adamw", wide).with(weights).with(emit.view(m)).with(emit.view(v));
            kernel.with(adam(hyper))
        }
        Rule::AdamW8bit { m, v, hyper } => {
            let kernel = emit.kernel("adamw_8bit", blocks).shared(STATES_BYTES).with(weights);
            let kernel = [m, v].into_iter().fold(kernel, |kernel, state| with_codes(emit, kernel, state));
            kernel.with(adam_8bit(hyper))
        }
        Rule::AdamMini { m, v, hyper } => {
            let (runs, run) = (v.elements(), n / v.elements().max(1));
            let moments = emit.kernel("adam_mini_moments", row_blocks(runs)).scratch::<f64>();
            let moments = moments.with(emit.view(op.grad)).with(emit.address(op.grad_scale));
            emit.launch(moments.with(emit.address(v)).with(runs).with(run).with(hyper.beta2))?;
            let kernel = emit.kernel("adam_mini", vectors).with(weights).with(emit.address(m));
            let kernel = kernel.with(emit.address(v)).with(run);
            let kernel = kernel.with((1.0 - hyper.lr * hyper.weight_decay) as f32);
            let kernel = kernel.with((1.0 - hyper.beta1) as f32).with(hyper.lr / hyper.correction1());
            kernel.with(hyper.root_of_correction2()).with(hyper.epsilon)
        }
        Rule::Lion { m, hyper } => {
            let numbers = lion(hyper, |beta| (1.0 - beta) as f32);
            emit.kernel("lion", wide).with(weights).with(emit.view(m)).with(numbers)
        }
        Rule::Lion8bit { m, hyper } => {
            let kernel = emit.kernel("lion_8bit", blocks).shared(STATES_BYTES).with(weights);
            // In f32, as bitsandbytes has it.
            let numbers = LionNumbers {
                decay: 1.0 - hyper.lr as f32 * hyper.weight_decay as f32,
                ..lion(hyper, |beta| 1.0 - beta as f32)
            };
            with_codes(emit, kernel, m).with(numbers)
        }
        Rule::Sgd { m, hyper } => {
            emit.kernel("sgd", wide).with(weights).with(emit.address(m)).with(sgd(hyper))
        }
        Rule::Adafactor { second, m, hyper } => return adafactor(emit, op, weights, second, m, hyper),
        Rule::Apollo { ratios, channels, norm, hyper } => {
            return apollo(emit, op, weights, ratios, channels, norm, hyper);
        }
    };
    emit.launch(kernel)
}

fn with_codes(emit: &Emit<'_>, kernel: Launch, Codes { codes, absmax }: Codes<'_>) -> Launch {
    kernel.with(emit.address(codes)).with(emit.address(absmax))
}

fn adam(hyper: Adam) -> AdamNumbers {
    AdamNumbers {
        decay: (1.0 - hyper.lr * hyper.weight_decay) as f32,
        less1: (1.0 - hyper.beta1) as f32,
        beta2: hyper.beta2 as f32,
        less2: (1.0 - hyper.beta2) as f32,
        root_of_correction2: hyper.root_of_correction2() as f32,
        epsilon: hyper.epsilon as f32,
        step_size: (hyper.lr / hyper.correction1()) as f32,
        unused: 0,
    }
}

fn adam_8bit(hyper: Adam) -> Adam8Numbers {
    let (lr, beta1, beta2) = (hyper.lr as f32, hyper.beta1 as f32, hyper.beta2 as f32);
    let root = hyper.root_of_correction2() as f32;
    Adam8Numbers {
        beta1,
        less1: 1.0 - beta1,
        beta2,
        less2: 1.0 - beta2,
        epsilon: root * hyper.epsilon as f32,
        step_size: -lr * root / hyper.correction1() as f32,
        decay: 1.0 - lr * hyper.weight_decay as f32,
        unused: 0,
    }
}

fn lion(hyper: Lion, less: impl Fn(f64) -> f32) -> LionNumbers {
    LionNumbers {
        lr: hyper.lr as f32,
        decay: (1.0 - hyper.lr * hyper.weight_decay) as f32,
        beta1: hyper.beta1 as f32,
        less1: less(hyper.beta1),
        beta2: hyper.beta2 as f32,
        less2: less(hyper.beta2),
    }
}

fn sgd(hyper: Sgd) -> SgdNumbers {
    SgdNumbers {
        lr: hyper.lr as f32,
        weight_decay: hyper.weight_decay as f32,
        momentum: if hyper.first { 0.0 } else { hyper.momentum as f32 },
        share: if hyper.first { 1.0 } else { (1.0 - hyper.dampening) as f32 },
        ahead: hyper.momentum as f32,
        nesterov: u32::from(hyper.nesterov),
    }
}

/// The workspace holds, in f64: two sums of squares, a mean, and from the fifth number on what they are made of.
fn adafactor(
    emit: &mut Emit<'_>,
    op: Update<'_>,
    weights: Weights,
    second: SecondMoment<'_>,
    m: Option<&Tensor>,
    hyper: Adafactor,
) -> Result<(), CudaError> {
    let [of_update, of_weights, mean, sums] = [0, 8, 16, 32].map(|offset| emit.workspace(offset));
    let scale = emit.address(op.grad_scale);
    let by = match second {
        SecondMoment::Factored { rows, columns } => {
            for (of_rows, means, each) in
                [(true, rows, columns.elements()), (false, columns, rows.elements())]
            {
                emit.needs(8 * (means.elements() + 4))?;
                let kernel = channel_squares(emit, op.grad, of_rows, sums);
                emit.launch(kernel)?;
                let kernel = emit.kernel("adafactor_means", vector_blocks(means.elements())).with(sums);
                let kernel = kernel.with(scale).with(emit.address(means)).with(means.elements());
                emit.launch(kernel.with(each).with(hyper.beta2).with(hyper.epsilon))?;
            }
            let kernel = emit.kernel("mean_of", [1, 1]).scratch::<f64>().with(emit.address(rows));
            emit.launch(kernel.with(rows.elements()).with(mean))?;
            let (rows, columns) = (emit.address(rows), emit.address(columns));
            Factors { rows, columns, width: op.param.columns(), whole: 0, unused: 0 }
        }
        SecondMoment::Full(v) => {
            let n = v.elements();
            let kernel = emit.kernel("adafactor_full", vector_blocks(n)).with(emit.view(op.grad)).with(scale);
            let kernel = kernel.with(emit.address(v)).with(n).with(hyper.beta2 as f32);
            emit.launch(kernel.with((1.0 - hyper.beta2) as f32).with(hyper.epsilon as f32))?;
            Factors { rows: 0, columns: emit.address(v), width: n, whole: 1, unused: 0 }
        }
    };
    squares(emit, Squared::Divided, op.grad, op.grad_scale, by, mean, [sums, of_update])?;
    let values = op.master.unwrap_or(op.param);
    squares(emit, Squared::Values, values, None, by, mean, [sums, of_weights])?;
    let numbers = AdafactorNumbers {
        lr: hyper.lr,
        clip_threshold: hyper.clip_threshold,
        weight_decay: hyper.weight_decay,
        least_scale: hyper.scale_by_parameter.unwrap_or(0.0),
        beta1: hyper.beta1 as f32,
        less1: (1.0 - hyper.beta1) as f32,
        by_parameter: u32::from(hyper.scale_by_parameter.is_some()),
        unused: 0,
    };
    let kernel = emit.kernel("adafactor", vector_blocks(weights.n)).with(weights).with(by).with(mean);
    emit.launch(kernel.with(of_update).with(emit.address(m)).with(numbers))
}

fn apollo(
    emit: &mut Emit<'_>,
    op: Update<'_>,
    weights: Weights,
    ratios: &Tensor,
    channels: Channels,
    norm: &Tensor,
    hyper: Apollo,
) -> Result<(), CudaError> {
    let [sum, shorter, partials] = [0, 8, 32].map(|offset| emit.workspace(offset));
    let ratios = emit.address(ratios);
    let by = match channels {
        Channels::Rows => {
            Factors { rows: ratios, columns: 0, width: op.param.columns(), whole: 0, unused: 0 }
        }
        Channels::Columns => {
            Factors { rows: 0, columns: ratios, width: op.param.columns(), whole: 0, unused: 0 }
        }
        // A row of all elements.
        Channels::Whole => Factors { rows: ratios, columns: 0, width: weights.n, whole: 0, unused: 0 },
    };
    squares(emit, Squared::Scaled, op.grad, op.grad_scale, by, 0, [partials, sum])?;
    let kernel = emit.kernel("apollo_norm", [1, 1]).with(sum).with(emit.address(norm));
    emit.launch(kernel.with(hyper.growth_limit).with(shorter))?;
    let kernel = emit.kernel("apollo", vector_blocks(weights.n)).with(weights).with(by).with(shorter);
    emit.launch(kernel.with(hyper.lr).with((1.0 - hyper.decay) as f32))
}
