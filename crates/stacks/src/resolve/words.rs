//! The words of requests, as tables: what is written, and what it is.

use crate::request::RequestError;
use crate::run::{Attention, Autocast, Optimizer, Outputs, Phase, TorchType};

/// What a word stands for; an error says all words of the table.
pub fn word<T: Copy>(key: &'static str, value: &str, table: &[(&str, T)]) -> Result<T, RequestError> {
    let wanted = plain(value);
    let found = table.iter().find(|(word, _)| plain(word) == wanted).map(|(_, meaning)| *meaning);
    found.ok_or_else(|| {
        let words: Vec<&str> = table.iter().map(|(word, _)| *word).collect();
        RequestError::Value { key, value: value.to_owned(), expected: words.join(", ") }
    })
}

/// Without case and marks, and without the module that a class is in.
fn plain(word: &str) -> String {
    let last = word.rsplit('.').next().unwrap_or(word);
    last.chars().filter(char::is_ascii_alphanumeric).collect::<String>().to_ascii_lowercase()
}

pub const TYPES: [(&str, TorchType); 9] = [
    ("f32", TorchType::F32),
    ("bf16", TorchType::Bf16),
    ("fp16", TorchType::F16),
    ("fp32", TorchType::F32),
    ("float32", TorchType::F32),
    ("bfloat16", TorchType::Bf16),
    ("f16", TorchType::F16),
    ("float16", TorchType::F16),
    ("half", TorchType::F16),
];

/// The type of weights as loaded, and autocast.
pub type Precision = (TorchType, Option<Autocast>);

const BF16_AMP: Option<Autocast> = Some(Autocast { to: TorchType::Bf16, scaler: false });
const FP16_AMP: Option<Autocast> = Some(Autocast { to: TorchType::F16, scaler: true });

pub const PRECISIONS: [(&str, Precision); 11] = [
    ("f32", (TorchType::F32, None)),
    ("bf16", (TorchType::Bf16, None)),
    ("fp16", (TorchType::F16, None)),
    ("bf16-amp", (TorchType::F32, BF16_AMP)),
    ("fp16-amp", (TorchType::F32, FP16_AMP)),
    ("fp32", (TorchType::F32, None)),
    ("f16", (TorchType::F16, None)),
    ("float32", (TorchType::F32, None)),
    ("bfloat16", (TorchType::Bf16, None)),
    ("float16", (TorchType::F16, None)),
    ("half", (TorchType::F16, None)),
];

pub const ATTENTIONS: [(&str, Attention); 4] = [
    ("eager", Attention::Eager),
    ("sdpa", Attention::Sdpa),
    ("flash_attention_2", Attention::Flash2),
    ("flash_attention_3", Attention::Flash2),
];

pub const OUTPUTS: [(&str, Outputs); 3] = [
    ("dropped", Outputs::Dropped),
    ("until_step", Outputs::UntilStep),
    ("until_next_forward", Outputs::UntilNextForward),
];

pub const PHASES: [(&str, Phase); 3] =
    [("train", Phase::Train), ("inference", Phase::Infer { generated: 1 }), ("load", Phase::Load)];

/// What an optimizer's name says; `TorchAdamW` is left to the version of PyTorch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Named {
    /// `torch.optim.AdamW` without `fused` and `foreach`.
    TorchAdamW,
    /// `torch.optim.SGD`
    TorchSgd,
    /// This one.
    Exactly(Optimizer),
}

const ADAMW_8BIT: Named = Named::Exactly(Optimizer::AdamW8bit { paged: false });
const PAGED_ADAMW_8BIT: Named = Named::Exactly(Optimizer::AdamW8bit { paged: true });
const PAGED_ADAMW: Named = Named::Exactly(Optimizer::PagedAdamW32bit);
const LION: Named = Named::Exactly(Optimizer::Lion { eight_bit: false, paged: false });

/// Names of `TrainingArguments.optim`, of torch's and bitsandbytes' classes. Apex' and DeepSpeed's FusedAdam update all tensors in a few
/// kernels without temporaries, as torch's fused form does.
pub const OPTIMIZERS: [(&str, Named); 26] = [
    ("adamw_torch", Named::TorchAdamW),
    ("adamw_torch_fused", Named::Exactly(Optimizer::AdamWFused)),
    ("adamw_bnb_8bit", ADAMW_8BIT),
    ("paged_adamw_8bit", PAGED_ADAMW_8BIT),
    ("paged_adamw_32bit", PAGED_ADAMW),
    ("adamw_torch_8bit", Named::Exactly(Optimizer::TorchaoAdamW8bit)),
    ("adafactor", Named::Exactly(Optimizer::Adafactor)),
    ("sgd", Named::TorchSgd),
    ("sgd_momentum", Named::Exactly(Optimizer::Sgd { momentum: true })),
    ("lion", LION),
    ("lion_8bit", Named::Exactly(Optimizer::Lion { eight_bit: true, paged: false })),
    ("paged_lion_32bit", Named::Exactly(Optimizer::Lion { eight_bit: false, paged: true })),
    ("paged_lion_8bit", Named::Exactly(Optimizer::Lion { eight_bit: true, paged: true })),
    ("adamw", Named::TorchAdamW),
    ("adam", Named::TorchAdamW),
    // transformers' own AdamW of old took a parameter at a time.
    ("adamw_hf", Named::Exactly(Optimizer::AdamWForLoop)),
    ("adamw_apex_fused", Named::Exactly(Optimizer::AdamWFused)),
    ("fused_adam", Named::Exactly(Optimizer::AdamWFused)),
    ("adamw_8bit", ADAMW_8BIT),
    ("adam_8bit", ADAMW_8BIT),
    ("8bit_adam", ADAMW_8BIT),
    ("8bit_adamw", ADAMW_8BIT),
    ("paged_adamw", PAGED_ADAMW),
    ("lion_32bit", LION),
    ("adamw_fused", Named::Exactly(Optimizer::AdamWFused)),
    ("adamw_foreach", Named::Exactly(Optimizer::AdamWForeach)),
];
