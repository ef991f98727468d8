//! Optimizers: the states that each makes in its first step, and what a step has for a while.
//!
//! Follows `torch/optim/adamw.py`, `bitsandbytes/optim/optimizer.py`, `torchao/optim`, `transformers/optimization.py`
//! and `torch/nn/utils/clip_grad.py`.

use std::rc::Rc;

use crate::eager::{Storage, Tensor, Torch};
use crate::estimate::Kind;
use crate::run::{Optimizer, TorchType};

/// bitsandbytes keeps states of tensors with fewer elements in 32 bits (`min_8bit_size`).
const MIN_8BIT: u64 = 4096;
/// Values for each scale of 8-bit states.
const STATE_BLOCK: u64 = 256;
/// Paged states of fewer elements stay on the device.
const MIN_PAGED: u64 = 100_000;
/// Elements that one thread block of a multi-tensor kernel takes (`aten/src/ATen/native/cuda/MultiTensorApply.cuh`).
const CHUNK: u64 = 65536;

/// The states of an optimizer.
pub(crate) struct States {
    optimizer: Optimizer,
    /// Tensors, for each parameter.
    tensors: Vec<Vec<Rc<Storage>>>,
    /// Tables that all parameters share.
    shared: Vec<Rc<Storage>>,
}

impl States {
    /// Those of an optimizer that has made no step.
    pub fn new(optimizer: Optimizer) -> States {
        States { optimizer, tensors: Vec::new(), shared: Vec::new() }
    }

    /// `optimizer.step()` for parameters with gradients.
    pub fn step(&mut self, torch: &Torch, parameters: &[Tensor]) {
        torch.no_grad(|| {
            if self.tensors.len() < parameters.len() {
                let first = self.tensors.len();
                self.restore(torch, &parameters[first..]);
            }
            self.temporaries(torch, parameters);
        });
    }

    /// `optimizer.load_state_dict()` with the states of a checkpoint.
    pub fn restore(&mut self, torch: &Torch, parameters: &[Tensor]) {
        for parameter in parameters {
            let states = torch.of_kind(Kind::OptimizerStates, || self.states_of(torch, parameter));
            self.tensors.push(states);
        }
    }

    /// Bytes of the states.
    pub fn bytes(&self) -> u64 {
        self.tensors.iter().flatten().chain(&self.shared).map(|state| state.size()).sum()
    }

    fn states_of(&mut self, torch: &Torch, parameter: &Tensor) -> Vec<Rc<Storage>> {
        let elements = parameter.shape().elements();
        let full =
            |dtype: TorchType| Rc::clone(torch.empty(&parameter.shape(), dtype, "zeros_like").storage());
        let list = |size: u64, dtype: TorchType| Rc::clone(torch.empty(&[size], dtype, "zeros").storage());
        let in_managed_memory = |paged: bool| paged && elements >= MIN_PAGED;
        let eight_bit = |count: u64, paged: bool| {
            if elements < MIN_8BIT {
                return (0..count).map(|_| full(TorchType::F32)).collect();
            }
            let scales = || list(elements.div_ceil(STATE_BLOCK), TorchType::F32);
            let pair = |_| match in_managed_memory(paged) {
                true => vec![scales()],
                false => vec![full(TorchType::U8), scales()],
            };
            (0..count).flat_map(pair).collect()
        };
        match self.optimizer {
            Optimizer::AdamWForLoop | Optimizer::AdamWForeach => {
                vec![full(parameter.dtype()), full(parameter.dtype())]
            }
            Optimizer::AdamWFused => {
                let step = Rc::clone(torch.empty(&[], TorchType::F32, "zeros").storage());
                vec![step, full(parameter.dtype()), full(parameter.dtype())]
            }
            Optimizer::AdamW8bit { paged } => {
                self.share_tables(torch, 2);
                eight_bit(2, paged)
            }
            Optimizer::PagedAdamW32bit if in_managed_memory(true) => Vec::new(),
            Optimizer::PagedAdamW32bit => vec![full(TorchType::F32), full(TorchType::F32)],
            Optimizer::TorchaoAdamW8bit => {
                let quantised = elements >= MIN_8BIT && elements.is_multiple_of(STATE_BLOCK);
                let state = |_| match quantised {
                    true => vec![
                        full(TorchType::U8),
                        list(elements / STATE_BLOCK, TorchType::F32),
                        list(256, TorchType::F32),
                    ],
                    false => vec![full(parameter.dtype())],
                };
                (0..2).flat_map(state).collect()
            }
            Optimizer::Sgd { momentum } => {
                if momentum {
                    vec![full(parameter.dtype())]
                } else {
                    Vec::new()
                }
            }
            Optimizer::Lion { eight_bit: true, paged } => {
                self.share_tables(torch, 1);
                eight_bit(1, paged)
            }
            Optimizer::Lion { paged, .. } if in_managed_memory(paged) => Vec::new(),
            Optimizer::Lion { .. } => vec![full(TorchType::F32)],
            Optimizer::Adafactor => match parameter.shape()[..] {
                [rows, columns] => vec![list(rows, TorchType::F32), list(columns, TorchType::F32)],
                _ => vec![full(TorchType::F32)],
            },
        }
    }

    /// The code tables of 8-bit states, one for all parameters.
    fn share_tables(&mut self, torch: &Torch, count: usize) {
        if self.shared.is_empty() {
            let table = |_| Rc::clone(torch.empty(&[256], TorchType::F32, "_to_copy").storage());
            self.shared = (0..count).map(table).collect();
        }
    }

    fn temporaries(&self, torch: &Torch, parameters: &[Tensor]) {
        let like = |parameter: &Tensor, dtype: TorchType, name| torch.empty(&parameter.shape(), dtype, name);
        match self.optimizer {
            Optimizer::AdamWForeach => {
                // One list for each type: the root of every second moment at once. Up to torch 2.0 the sum with epsilon was
                // a second list.
                let sums = torch.versions().torch < (2, 1);
                for dtype in [TorchType::F32, TorchType::Bf16, TorchType::F16] {
                    let group = || parameters.iter().filter(|parameter| parameter.dtype() == dtype);
                    let _roots: Vec<Tensor> = group().map(|x| like(x, dtype, "_foreach_sqrt")).collect();
                    let _sums: Vec<Tensor> =
                        group().filter(|_| sums).map(|x| like(x, dtype, "_foreach_add")).collect();
                }
            }
            Optimizer::AdamWForLoop => {
                for parameter in parameters {
                    let root = like(parameter, parameter.dtype(), "sqrt");
                    let quotient = like(parameter, parameter.dtype(), "div");
                    drop((root, quotient));
                }
            }
            Optimizer::TorchaoAdamW8bit => {
                // `single_param_adam`, compiled for each parameter: gradient and states in f32 within the kernel.
            }
            Optimizer::Adafactor => {
                for parameter in parameters {
                    let upcast = |x: &Tensor| {
                        (x.dtype() != TorchType::F32).then(|| like(x, TorchType::F32, "_to_copy"))
                    };
                    let (grad, copy) = (upcast(parameter), upcast(parameter));
                    let squared = like(parameter, TorchType::F32, "pow");
                    let update = like(parameter, TorchType::F32, "add");
                    drop(squared);
                    let product = like(parameter, TorchType::F32, "mul");
                    drop((update, product, grad, copy));
                }
            }
            Optimizer::AdamWFused
            | Optimizer::AdamW8bit { .. }
            | Optimizer::PagedAdamW32bit
            | Optimizer::Sgd { .. }
            | Optimizer::Lion { .. } => {}
        }
    }
}

/// `clip_grad_norm_`: a norm of each gradient, partial sums within the kernel, the norm of norms.
pub(crate) fn clip_gradients(torch: &Torch, gradients: &[Tensor]) {
    let largest = gradients.iter().map(|grad| grad.shape().elements()).max().unwrap_or(0);
    let count = gradients.len() as u64;
    let partial = torch.scratch(count * largest.div_ceil(CHUNK) * 4, "_foreach_norm");
    let norms: Vec<Tensor> =
        gradients.iter().map(|grad| torch.empty(&[], grad.dtype(), "_foreach_norm")).collect();
    drop(partial);
    let stacked = torch.empty(&[count], TorchType::F32, "stack");
    let total = torch.empty(&[], TorchType::F32, "linalg_vector_norm");
    drop((stacked, norms, total));
}
