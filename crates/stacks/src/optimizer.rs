//! Optimizers: the states that each makes in its first step, and what a step has for a while.
//!
//! Follows `torch/optim/adamw.py`, `bitsandbytes/optim/optimizer.py`, `torchao/optim`, `transformers/optimization.py`
//! and `torch/nn/utils/clip_grad.py`.

use std::cell::RefCell;
use std::collections::BTreeSet;
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

/// Bytes of the tensor that `triton.testing.do_bench` writes between two measurements.
const FLUSHED: u64 = 256_000_000;

/// The states of an optimizer.
pub(crate) struct States {
    optimizer: Optimizer,
    /// Tensors, for each parameter.
    tensors: Vec<Vec<Rc<Storage>>>,
    /// Tables that all parameters share.
    shared: Vec<Rc<Storage>>,
    /// Shapes whose compiled update has been measured by Inductor's autotuner, in this process.
    tuned: Rc<RefCell<BTreeSet<Vec<u64>>>>,
}

impl States {
    /// Those of an optimizer that has made no step.
    pub fn new(optimizer: Optimizer) -> States {
        States { optimizer, tensors: Vec::new(), shared: Vec::new(), tuned: Rc::default() }
    }

    /// Those of another optimizer of the same process, as where each parameter has its own.
    pub fn another(&self) -> States {
        States { tuned: Rc::clone(&self.tuned), ..States::new(self.optimizer) }
    }

    /// `optimizer.step()` for parameters with gradients.
    pub fn step(&mut self, torch: &Torch, parameters: &[Tensor]) {
        torch.no_grad(|| {
            if self.optimizer == Optimizer::TorchaoAdamW8bit {
                for (at, parameter) in parameters.iter().enumerate() {
                    if self.tensors.len() <= at {
                        self.restore(torch, std::slice::from_ref(parameter));
                    }
                    self.compiled_update(torch, parameter);
                }
                return;
            }
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
                let state = |_| match has_blocks(elements) {
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

    /// torchao's `single_param_adam`, which is compiled for each shape. Inductor makes one reduction of it, which goes over each block of 256
    /// twice, for the scale and for the codes; what lies between is a buffer of the parameter's size in f32. A shape's first call
    /// measures six forms of the kernel (`triton_heuristics.reduction` without a hint): what the kernel changes is cloned for
    /// each (`clone_args`), parameter, codes and scales twice, as they are its inputs and its outputs, beside the tensor with which
    /// Triton's `do_bench` flushes the cache. Read off the code that torch 2.5.1 writes for torchao 0.6.1.
    fn compiled_update(&self, torch: &Torch, parameter: &Tensor) {
        let elements = parameter.shape().elements();
        if !has_blocks(elements) {
            return;
        }
        let like = |dtype: TorchType| torch.empty(&parameter.shape(), dtype, "single_param_adam");
        let buffer = like(TorchType::F32);
        if self.tuned.borrow_mut().insert(parameter.shape().to_vec()) {
            let scales = || torch.empty(&[elements / STATE_BLOCK], TorchType::F32, "clone_preserve_strides");
            let clones =
                |_| [like(parameter.dtype()), like(TorchType::U8), like(TorchType::U8), scales(), scales()];
            let clones: Vec<_> = (0..2).map(clones).collect();
            drop((torch.empty(&[FLUSHED], TorchType::I8, "do_bench"), clones));
        }
        drop(buffer);
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
            // Parameter by parameter: `compiled_update`.
            Optimizer::TorchaoAdamW8bit
            | Optimizer::AdamWFused
            | Optimizer::AdamW8bit { .. }
            | Optimizer::PagedAdamW32bit
            | Optimizer::Sgd { .. }
            | Optimizer::Lion { .. } => {}
        }
    }
}

/// Whether torchao keeps the states of so many elements in 8 bits.
fn has_blocks(elements: u64) -> bool {
    elements >= MIN_8BIT && elements.is_multiple_of(STATE_BLOCK)
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
