//! Positions: the tables of rotary embeddings, and masks.

use plimsoll_model::RopeSpec;

use crate::eager::{Tensor, Torch};
use crate::estimate::Kind;
use crate::resolve::is_first_qwen;
use crate::run::{Attention, Run, Sharding, Stack, TorchType};

/// `RotaryEmbedding`: its frequencies.
pub(crate) struct Rotary {
    frequencies: Tensor,
    _original: Tensor,
}

impl Rotary {
    pub fn new(torch: &Torch, rope: &RopeSpec) -> Rotary {
        let table = || torch.empty(&[rope.dims / 2], TorchType::F32, "div");
        Rotary { frequencies: table(), _original: table() }
    }

    /// cos and sin of `positions [1, S]`, in the type of the residual stream.
    pub fn forward(&self, torch: &Torch, positions: &Tensor, dtype: TorchType) -> (Tensor, Tensor) {
        torch.no_grad(|| {
            let rows = positions.size(1);
            let half = self.frequencies.size(0);
            let freqs = {
                let positions = torch.to(positions, TorchType::F32);
                let product = torch.empty(&[1, rows, half], TorchType::F32, "mul");
                drop(positions);
                product
            };
            let emb = torch.cat(&[&freqs, &freqs], 2);
            let table = |operation| {
                let values = torch.map(&emb, TorchType::F32, operation);
                torch.scale(&values)
            };
            let (cos, sin) = (table("cos"), table("sin"));
            (torch.to(&cos, dtype), torch.to(&sin, dtype))
        })
    }
}

/// From these versions of transformers on a family's layers have no tables of cos and sin, as the modeling files of the releases show.
const WITHOUT_TABLES: [(&str, (u32, u32)); 3] =
    [("llama", (4, 41)), ("mistral", (4, 42)), ("qwen2", (4, 45))];

/// Earlier ones had two tables in every layer, of all positions that the model knows (`cos_cached`).
pub(crate) fn position_tables(run: &Run) -> Option<Tables> {
    let (_, until) =
        WITHOUT_TABLES.iter().find(|(architecture, _)| *architecture == run.model.architecture)?;
    let rope = run.model.attention.rope.as_ref()?;
    let is_theirs = matches!(run.stack, Stack::Plain | Stack::Transformers | Stack::Unsloth);
    // The first Qwen is Llama's shape by code of its own, with one table for all layers.
    if !is_theirs || is_first_qwen(&run.model) || run.versions.transformers >= *until {
        return None;
    }
    // They have the type that the model is loaded in. A loop that quantises a model on its way into FSDP makes it of its configuration
    // alone, with buffers of PyTorch's default type.
    let is_fsdp =
        matches!(run.sharding, Sharding::FsdpWhole | Sharding::Fsdp1 { .. } | Sharding::Fsdp2 { .. });
    let dtype = match is_fsdp && run.quantization.is_some() && run.stack == Stack::Plain {
        true => TorchType::F32,
        false => run.weights,
    };
    Some(Tables { shape: [run.model.max_position_embeddings.max(run.sequence), rope.dims], dtype })
}

/// The tables of cos and sin in a layer.
#[derive(Clone, Copy)]
pub(crate) struct Tables {
    shape: [u64; 2],
    pub dtype: TorchType,
}

impl Tables {
    /// Those of one layer.
    pub fn make(&self, torch: &Torch) -> [Tensor; 2] {
        [(); 2].map(|()| torch.of_kind(Kind::Weights, || torch.empty(&self.shape, self.dtype, "_to_copy")))
    }
}

/// `cat((-x2, x1))`
fn rotate_half(torch: &Torch, x: &Tensor) -> Tensor {
    let last = x.shape().len() - 1;
    let half = x.shape().last() / 2;
    let (x1, x2) = (torch.slice(x, last, half), torch.slice(x, last, half));
    let negated = torch.negative(&x2);
    torch.cat(&[&negated, &x1], last)
}

/// `x * cos + rotate_half(x) * sin`; of a part of each head where not all of it is rotated (Phi-3 writes it so always).
pub(crate) fn apply_rotary(torch: &Torch, x: &Tensor, cos: &Tensor, sin: &Tensor, partial: bool) -> Tensor {
    let last = x.shape().len() - 1;
    let dims = cos.shape().last();
    let rotated = if partial { torch.slice(x, last, dims) } else { x.clone() };
    let passed = partial.then(|| torch.slice(x, last, x.shape().last() - dims));
    let direct = torch.mul(&rotated, cos);
    let turned = {
        let half = rotate_half(torch, &rotated);
        torch.mul(&half, sin)
    };
    let sum = torch.add(&direct, &turned);
    drop((direct, turned));
    match passed {
        Some(passed) => torch.cat(&[&sum, &passed], last),
        None => sum,
    }
}

/// From these versions of transformers on a family's model makes cos and sin once for all layers; of those that are not listed, from
/// [`ONCE`] on.
const ONCE_BY_FAMILY: [(&str, (u32, u32)); 2] = [("llama", (4, 43)), ("qwen2", (4, 45))];
const ONCE: (u32, u32) = (4, 48);

/// Whether every layer makes its own cos and sin, which its rotations then save.
pub(crate) fn rotates_by_layer(torch: &Torch, run: &Run) -> bool {
    let known = ONCE_BY_FAMILY.iter().find(|(architecture, _)| *architecture == run.model.architecture);
    let once = known.map_or(ONCE, |(_, version)| *version);
    is_of_transformers(run) && torch.versions().transformers < once
}

/// Whether the model's code is that of transformers as it was released.
pub(crate) fn is_of_transformers(run: &Run) -> bool {
    matches!(run.stack, Stack::Plain | Stack::Transformers) && !is_first_qwen(&run.model)
}

/// The models of these families made a mask for every pass in transformers 4.38 and 4.39, also where all tokens count
/// (`_update_causal_mask`). 4.38 made it for all positions that the model knows.
const ALWAYS_MASKED: [&str; 2] = ["llama", "gemma"];
const MASKED_FROM: (u32, u32) = (4, 38);
const MASKED_UNTIL: (u32, u32) = (4, 40);

/// From this version on the mask for `scaled_dot_product_attention` knows of windows (`_prepare_4d_causal_attention_mask_for_sdpa`); before, no
/// model asked for one where all tokens count.
const WINDOWS_IN_MASKS: (u32, u32) = (4, 40);

/// From this version on a mask for `scaled_dot_product_attention` is boolean (`masking_utils.py`); before, what is added to the scores.
const BOOLEAN_MASKS: (u32, u32) = (4, 53);

/// A mask for `scaled_dot_product_attention`.
fn mask_for_sdpa(
    torch: &Torch,
    run: &Run,
    dtype: TorchType,
    [rows, columns]: [u64; 2],
    windowed: bool,
) -> Option<Tensor> {
    let version = torch.versions().transformers;
    let needed = run.padded || windowed && (!is_of_transformers(run) || version >= WINDOWS_IN_MASKS);
    let always = is_of_transformers(run)
        && ALWAYS_MASKED.contains(&run.model.architecture.as_str())
        && (MASKED_FROM..MASKED_UNTIL).contains(&version);
    if !needed && !always {
        return None;
    }
    if !is_of_transformers(run) || version >= BOOLEAN_MASKS {
        return Some(torch.empty(&[run.batch, 1, rows, columns], TorchType::Bool, "bitwise_and"));
    }
    let all = run.model.max_position_embeddings.max(columns);
    let [rows, columns] = if always && version == MASKED_FROM { [all, all] } else { [rows, columns] };
    let shape = [run.batch, 1, rows, columns];
    let one = torch.empty(&[rows, columns], dtype, "full");
    let upper = torch.map(&one, dtype, "triu");
    drop(one);
    let mask = torch.empty(&shape, dtype, "clone");
    drop(upper);
    // What is padding is found by a comparison, filled in a copy, and copied back.
    let padding = torch.empty(&shape, TorchType::Bool, "mul");
    drop((torch.empty(&shape, dtype, "masked_fill"), padding));
    Some(mask)
}

/// The mask that a model makes for its layers: `None` where the kernel knows that attention is causal.
pub(crate) fn causal_mask(
    torch: &Torch,
    run: &Run,
    dtype: TorchType,
    [rows, columns]: [u64; 2],
    windowed: bool,
) -> Option<Tensor> {
    match run.attention {
        Attention::Flash2 => None,
        Attention::Sdpa => mask_for_sdpa(torch, run, dtype, [rows, columns], windowed),
        Attention::Eager => {
            let allowed = torch.empty(&[1, 1, rows, columns], TorchType::Bool, "le");
            let mask = torch.empty(&[run.batch, 1, rows, columns], dtype, "where");
            drop(allowed);
            Some(mask)
        }
    }
}
