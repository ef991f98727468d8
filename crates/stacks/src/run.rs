//! A run of another stack with every default decided: what a program of a step reads.

use plimsoll_model::ModelSpec;

use crate::allocator::Settings;

/// Whose loop, modules and optimizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Stack {
    /// A loop of one's own around a transformers model.
    Plain,
    /// transformers' `Trainer` (TRL's likewise), with accelerate.
    Transformers,
    /// torchtune's recipes and modules.
    Torchtune,
    /// litgpt's.
    Litgpt,
    /// Unsloth's patched models.
    Unsloth,
}

/// An element type of PyTorch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TorchType {
    /// `torch.float32`
    F32,
    /// `torch.bfloat16`
    Bf16,
    /// `torch.float16`
    F16,
    /// `torch.int64`: token ids.
    I64,
    /// `torch.int32`
    I32,
    /// `torch.uint8`
    U8,
    /// `torch.int8`
    I8,
    /// `torch.bool`, a byte.
    Bool,
}

impl TorchType {
    /// Bytes of an element.
    pub const fn bytes(self) -> u64 {
        match self {
            TorchType::I64 => 8,
            TorchType::F32 | TorchType::I32 => 4,
            TorchType::Bf16 | TorchType::F16 => 2,
            TorchType::U8 | TorchType::I8 | TorchType::Bool => 1,
        }
    }
}

/// What is asked of the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Phase {
    /// Loading, then steps until the peak repeats.
    Train,
    /// Loading, then a prompt and tokens behind it.
    Infer {
        /// Tokens of the answer, each sequence.
        generated: u64,
    },
    /// Loading alone.
    Load,
}

/// Mixed precision by autocast.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Autocast {
    /// Bf16 or F16.
    pub to: TorchType,
    /// Whether a `GradScaler` scales the loss.
    pub scaler: bool,
}

/// `attn_implementation`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Attention {
    /// Products and a softmax.
    Eager,
    /// `scaled_dot_product_attention`, with the back end that PyTorch takes on that card.
    Sdpa,
    /// The package flash-attn.
    Flash2,
}

/// Gradient checkpointing, a decoder layer at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Checkpointing {
    /// None.
    Off,
    /// `use_reentrant=True`
    Reentrant,
    /// `use_reentrant=False`
    NonReentrant,
    /// Layer inputs in pinned host memory (Unsloth).
    Offloaded,
}

/// A low-rank adapter.
#[derive(Clone, Debug, PartialEq)]
pub struct Adapter {
    /// `r`
    pub rank: u64,
    /// The names of the linear layers that have one, as the model's family has them: `q_proj`.
    pub targets: Vec<String>,
    /// `lora_dropout` above 0.
    pub dropout: bool,
    /// Type of A and B.
    pub dtype: TorchType,
    /// `use_dora`
    pub dora: bool,
    /// `modules_to_save`: trained whole.
    pub trained_whole: Vec<String>,
}

/// Quantised weights of the blocks' linear layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Quantization {
    /// bitsandbytes, 4 bits (NF4 or FP4: the same bytes).
    FourBit {
        /// `bnb_4bit_use_double_quant`
        double: bool,
        /// `bnb_4bit_compute_dtype`
        compute: TorchType,
    },
    /// bitsandbytes LLM.int8().
    Int8,
}

/// Optimizers, with the form that they run in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Optimizer {
    /// torch's AdamW, a parameter at a time.
    AdamWForLoop,
    /// torch's AdamW over lists of tensors.
    AdamWForeach,
    /// torch's AdamW in one kernel.
    AdamWFused,
    /// bitsandbytes AdamW8bit.
    AdamW8bit {
        /// States in managed memory.
        paged: bool,
    },
    /// bitsandbytes AdamW with 32-bit states in managed memory.
    PagedAdamW32bit,
    /// torchao's AdamW8bit, states in blocks of 256.
    TorchaoAdamW8bit,
    /// torch's SGD.
    Sgd {
        /// Momentum above 0.
        momentum: bool,
    },
    /// bitsandbytes Lion, 32 bits or 8.
    Lion {
        /// States of 8 bits.
        eight_bit: bool,
        /// States in managed memory.
        paged: bool,
    },
    /// transformers' Adafactor.
    Adafactor,
}

/// How logits become a loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Loss {
    /// `logits.float()` and a contiguous copy of the shifted logits within `forward` (transformers up to 4.44).
    UpcastShiftedEarly,
    /// 16-bit logits are kept; the loss upcasts and copies the shifted ones (4.45 to 4.48).
    UpcastShifted,
    /// The labels are shifted, the logits upcast (later).
    Upcast,
    /// Liger's fused product and loss in chunks.
    Liger,
    /// Cut cross-entropy.
    Cce,
    /// The logits stay in the model's type, the shifted ones are copied, and the loss takes them as they are: models whose code
    /// is older than the upcast (the first Qwen).
    Shifted,
    /// Chunks whose graph stays (torchtune).
    Chunked {
        /// Chunks of a sequence.
        chunks: u64,
        /// Whether the loss of a chunk is compiled; else its logits are upcast first.
        compiled: bool,
    },
    /// litgpt: the head in chunks of so many tokens, all of them made f32 behind the model and kept by the caller
    /// (`HalfPrecision.convert_output` of Fabric).
    ChunkedKept {
        /// Tokens of a chunk.
        tokens: u64,
    },
    /// litgpt where all weights are trained: the head at once, made f32 and kept; the shifted logits are copied, and the loss takes so many
    /// rows at a time (`finetune/full.py`).
    WholeKept {
        /// Rows of a chunk.
        rows: u64,
    },
}

/// How long what `model(...)` returned lives, and with it logits and the graph's nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Outputs {
    /// Only the loss leaves the function that calls the model.
    Dropped,
    /// To the end of the step.
    UntilStep,
    /// Until the next forward pass has ended and its result takes the name.
    UntilNextForward,
}

/// What goes to the host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Offload {
    /// Optimizer states (and the master weights).
    pub optimizer: bool,
    /// Weights.
    pub parameters: bool,
}

/// How ranks share the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Sharding {
    /// Each has all: DDP where there are several.
    None,
    /// FSDP's `NO_SHARD`: each has all, in flat parameters.
    FsdpWhole,
    /// DeepSpeed ZeRO.
    Zero {
        /// 1, 2 or 3.
        stage: u8,
        /// What is on the host.
        offload: Offload,
    },
    /// `FullyShardedDataParallel`
    Fsdp1 {
        /// `SHARD_GRAD_OP`: weights stay gathered from forward to backward.
        keep_gathered: bool,
        /// What is on the host.
        offload: Offload,
    },
    /// `fully_shard`
    Fsdp2 {
        /// `reshard_after_forward=False`
        keep_gathered: bool,
        /// What is on the host.
        offload: Offload,
    },
}

/// Versions where they change what is allocated: `(major, minor)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Versions {
    /// PyTorch.
    pub torch: (u32, u32),
    /// transformers.
    pub transformers: (u32, u32),
    /// PEFT.
    pub peft: (u32, u32),
    /// bitsandbytes.
    pub bitsandbytes: (u32, u32),
    /// DeepSpeed.
    pub deepspeed: (u32, u32),
}

/// What of a card decides about memory.
#[derive(Clone, Debug, PartialEq)]
pub struct Card {
    /// What it is called.
    pub name: String,
    /// Bytes that the driver shows.
    pub memory: u64,
    /// CUDA's compute capability.
    pub capability: (u32, u32),
    /// Streaming multiprocessors.
    pub multiprocessors: u64,
}

/// A run.
#[derive(Clone, Debug, PartialEq)]
pub struct Run {
    /// Whose loop.
    pub stack: Stack,
    /// What of it.
    pub phase: Phase,
    /// The model.
    pub model: ModelSpec,
    /// Sequences of a micro-batch, on each device.
    pub batch: u64,
    /// Tokens of each, padding included.
    pub sequence: u64,
    /// Tokens of each micro-batch in the order of the run, where they differ; none is longer than `sequence`.
    pub lengths: Vec<u64>,
    /// Whether the batch has padding, so that a mask exists.
    pub padded: bool,
    /// Sequences of a batch in evaluation, if the run evaluates.
    pub eval_batch: Option<u64>,
    /// Whether weights and states of the optimizer come from a checkpoint.
    pub resume: bool,
    /// Whether adapters are merged at the end.
    pub merge: bool,
    /// Processes that make batches.
    pub data_workers: u64,
    /// Micro-batches of a step.
    pub accumulation: u64,
    /// Type of the weights as loaded.
    pub weights: TorchType,
    /// Autocast, if it is on.
    pub autocast: Option<Autocast>,
    /// How attention is computed.
    pub attention: Attention,
    /// Whether layers are computed again.
    pub checkpointing: Checkpointing,
    /// `config.use_cache` in training.
    pub use_cache: bool,
    /// LoRA; `None`: all weights are trained.
    pub adapter: Option<Adapter>,
    /// Quantised weights.
    pub quantization: Option<Quantization>,
    /// The optimizer.
    pub optimizer: Optimizer,
    /// Whether the optimizer runs within the backward pass, a parameter at a time (torchtune).
    pub optimizer_in_backward: bool,
    /// Whether gradients are clipped.
    pub clip: bool,
    /// The loss.
    pub loss: Loss,
    /// How long logits live.
    pub outputs: Outputs,
    /// Liger's norms, rotations and SwiGLU.
    pub liger_layers: bool,
    /// Ranks, each with a device.
    pub devices: u64,
    /// Of these, so many share out among them.
    pub shard_devices: u64,
    /// DeepSpeed's buffer of gradients, where its size is said: elements.
    pub reduce_bucket: Option<u64>,
    /// Such buffers.
    pub reduce_buckets: u64,
    /// How they share the model.
    pub sharding: Sharding,
    /// Versions of the libraries.
    pub versions: Versions,
    /// The card.
    pub card: Card,
    /// Settings of the caching allocator.
    pub allocator: Settings,
}
