//! What an allocation is for, guessed from the stack that made it.

use super::records::{Snapshot, StackId};

/// A guess.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum GuessedKind {
    /// Made while a model was built, loaded or moved.
    Weights,
    /// Made in the backward pass.
    Gradients,
    /// Made by an optimizer.
    OptimizerStates,
    /// Made in a forward pass.
    Activations,
    /// Keys and values of earlier tokens.
    KvCache,
    /// cuBLAS and the like.
    Workspace,
    /// Made by torch.distributed, DeepSpeed or NCCL.
    Communication,
    /// Batches on their way to the device.
    Data,
    /// The stack says nothing, or there is none.
    Unknown,
}

/// How many kinds there are.
pub const KINDS: usize = GuessedKind::ALL.len();

impl GuessedKind {
    /// All of them.
    pub const ALL: [GuessedKind; 9] = [
        GuessedKind::Weights,
        GuessedKind::Gradients,
        GuessedKind::OptimizerStates,
        GuessedKind::Activations,
        GuessedKind::KvCache,
        GuessedKind::Workspace,
        GuessedKind::Communication,
        GuessedKind::Data,
        GuessedKind::Unknown,
    ];

    /// As in JSON.
    pub const fn name(self) -> &'static str {
        match self {
            GuessedKind::Weights => "weights",
            GuessedKind::Gradients => "gradients",
            GuessedKind::OptimizerStates => "optimizer_states",
            GuessedKind::Activations => "activations",
            GuessedKind::KvCache => "kv_cache",
            GuessedKind::Workspace => "workspace",
            GuessedKind::Communication => "communication",
            GuessedKind::Data => "data",
            GuessedKind::Unknown => "unknown",
        }
    }
}

/// The first rule with a frame that fits decides; a part of the file's name, and of the function's.
const RULES: &[(GuessedKind, &[(&str, &str)])] = &[
    (
        GuessedKind::Workspace,
        &[("", "CUDABlasWorkspace"), ("CublasHandlePool", ""), ("", "cudnn"), ("", "CuDNN")],
    ),
    (GuessedKind::KvCache, &[("cache_utils.py", ""), ("", "past_key_value")]),
    (
        GuessedKind::Communication,
        &[
            ("torch/distributed/", ""),
            ("deepspeed/runtime/zero", ""),
            ("ProcessGroupNCCL", ""),
            ("deepspeed/comm", ""),
        ],
    ),
    (
        GuessedKind::OptimizerStates,
        &[
            ("torch/optim/", ""),
            ("bitsandbytes/optim/", ""),
            ("transformers/optimization", ""),
            ("torchao/optim", ""),
        ],
    ),
    (
        GuessedKind::Gradients,
        &[
            ("torch/autograd/graph.py", "_engine_run_backward"),
            ("torch/autograd/__init__.py", "backward"),
            ("torch/_tensor.py", "backward"),
            ("", "torch::autograd::Engine"),
        ],
    ),
    (
        GuessedKind::Weights,
        &[
            ("torch/nn/modules/module.py", "_apply"),
            ("torch/nn/modules/module.py", "load_state_dict"),
            ("torch/nn/init.py", ""),
            ("", "reset_parameters"),
            ("", "from_pretrained"),
            ("", "_load_state_dict"),
            ("safetensors/", ""),
            ("torch/serialization.py", ""),
            ("bitsandbytes/functional.py", "quantize_"),
            ("torch/nn/modules/", "__init__"),
        ],
    ),
    (
        GuessedKind::Activations,
        &[("torch/nn/modules/module.py", "_call_impl"), ("torch/nn/functional.py", ""), ("", "forward")],
    ),
    (
        GuessedKind::Data,
        &[("torch/utils/data/", ""), ("", "collate"), ("", "send_to_device"), ("", "_prepare_input")],
    ),
];

impl Snapshot {
    /// What the allocations of a stack are for.
    pub fn guess(&self, stack: StackId) -> GuessedKind {
        let fits = |(file, function): &(&str, &str)| {
            self.stack(stack)
                .any(|frame| self.filename(frame).contains(file) && self.name(frame).contains(function))
        };
        RULES.iter().find(|(_, rules)| rules.iter().any(fits)).map_or(GuessedKind::Unknown, |(kind, _)| *kind)
    }

    /// The line that a user can change: the innermost frame of Python outside of libraries, or of any Python.
    pub fn user_line(&self, stack: StackId) -> Option<String> {
        let is_python =
            |file: &str| file.ends_with(".py") || file.contains("<ipython") || file.contains("ipykernel_");
        let is_library = |file: &str| {
            ["site-packages/", "dist-packages/", "/torch/", "/lib/python3", "<frozen"]
                .iter()
                .any(|part| file.contains(part))
        };
        let python = || self.stack(stack).filter(|frame| is_python(self.filename(frame)));
        let line = python().find(|frame| !is_library(self.filename(frame))).or_else(|| python().next());
        line.map(|frame| self.words(frame))
    }

    pub(super) fn has_function(&self, stack: StackId, fits: impl Fn(&str) -> bool) -> bool {
        self.stack(stack).any(|frame| fits(self.name(frame)))
    }
}
