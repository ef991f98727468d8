//! Linears, plain and quantised, with and without a low-rank adapter, and norms.
//!
//! Follows `torch.nn.Linear`, `peft/tuners/lora/{layer,bnb}.py`, `bitsandbytes/autograd/_functions.py` and the norms of
//! transformers' modeling files.

use crate::eager::{Dims, Tensor, Torch};
use crate::estimate::Kind;
use crate::run::{Adapter, Quantization, Run, Sharding, Stack, TorchType};

/// A linear's matrix.
pub(crate) enum Weight {
    /// `[out, in]`
    Full(Tensor),
    /// `[in, out]`: GPT-2's `Conv1D`.
    Transposed(Tensor),
    /// Packed by bitsandbytes in 4 bits.
    FourBit(FourBit),
    /// Rows of 8 bits with a scale each, by bitsandbytes.
    Int8 { rows: Tensor, scales: Tensor },
}

/// A matrix of 4 bits: two codes to a byte, a scale for every 64 values, which may be quantised again.
pub(crate) struct FourBit {
    packed: Tensor,
    scales: Tensor,
    /// Scales of 256 scales each, the two code tables' one and the offset.
    nested: Option<Vec<Tensor>>,
    _codes: Tensor,
    compute: TorchType,
    /// Type that it was quantised from, to which it is dequantised.
    dtype: TorchType,
}

/// Values for each scale of 4-bit matrices, and scales for each scale of them.
pub(crate) const BLOCK: u64 = 64;
pub(crate) const NESTED_BLOCK: u64 = 256;

/// A low-rank adapter: `scale * B A`.
pub(crate) struct Lora {
    a: Tensor,
    b: Tensor,
    dropout: bool,
    /// DoRA's lengths of the weight's rows.
    magnitude: Option<Tensor>,
}

/// A linear layer.
pub(crate) struct Linear {
    name: String,
    /// `[out, in]`
    shape: [u64; 2],
    weight: Weight,
    bias: Option<Tensor>,
    lora: Option<Lora>,
}

/// How the parameters of a model are made: their types, and which of them are trained.
pub(crate) struct Maker<'a> {
    pub torch: &'a Torch,
    pub run: &'a Run,
}

impl Maker<'_> {
    /// Type of what is neither quantised nor an adapter. PEFT's `prepare_model_for_kbit_training` makes it f32. torchtune, litgpt and
    /// Unsloth do not call that, and FSDP cannot: its flat parameters have one type.
    pub fn dtype(&self) -> TorchType {
        let run = self.run;
        let prepares = matches!(run.stack, Stack::Plain | Stack::Transformers)
            && matches!(run.sharding, Sharding::None | Sharding::Zero { .. });
        if run.quantization.is_some() && run.adapter.is_some() && prepares {
            TorchType::F32
        } else {
            run.weights
        }
    }

    /// A parameter of the model itself that is not trained.
    pub fn frozen(&self, shape: &[u64]) -> Tensor {
        self.torch.of_kind(Kind::Weights, || self.torch.empty(shape, self.dtype(), "empty"))
    }

    /// A parameter of the model itself.
    pub fn parameter(&self, name: &str, shape: &[u64]) -> Tensor {
        let tensor = self.frozen(shape);
        let whole = |adapter: &Adapter| adapter.trained_whole.iter().any(|trained| trained == name);
        let trained = self.run.adapter.as_ref().is_none_or(whole);
        if trained && self.run.phase == crate::run::Phase::Train { tensor.as_leaf() } else { tensor }
    }

    /// A linear of a block, quantised if the run says so.
    pub fn linear(&self, name: &str, [inner, outer]: [u64; 2], bias: bool) -> Linear {
        // Loading brings a matrix to the device as it is stored, and quantises it there.
        let stored = self.run.quantization.map(|_| {
            self.torch
                .of_kind(Kind::Weights, || self.torch.empty(&[outer, inner], self.run.weights, "_to_copy"))
        });
        let weight = match self.run.quantization {
            None => Weight::Full(self.parameter(name, &[outer, inner])),
            Some(Quantization::FourBit { double, compute }) => {
                Weight::FourBit(self.four_bit(outer * inner, double, compute))
            }
            Some(Quantization::Int8) => self.torch.of_kind(Kind::Weights, || Weight::Int8 {
                rows: self.torch.empty(&[outer, inner], TorchType::I8, "int8_vectorwise_quant"),
                scales: self.torch.empty(&[outer], TorchType::F32, "int8_vectorwise_quant"),
            }),
        };
        drop(stored);
        let bias = bias.then(|| self.parameter(name, &[outer]));
        Linear { name: name.into(), shape: [outer, inner], weight, bias, lora: None }
    }

    /// The head, which bitsandbytes' integration leaves as it is. Fabric's plugin replaces every linear, and litgpt has a head of its
    /// own for every model.
    pub fn head(&self, name: &str, [inner, outer]: [u64; 2], tied: Option<Tensor>) -> Linear {
        if self.run.stack == Stack::Litgpt {
            return self.linear(name, [inner, outer], false);
        }
        let weight = tied.unwrap_or_else(|| self.parameter(name, &[outer, inner]));
        Linear {
            name: name.into(),
            shape: [outer, inner],
            weight: Weight::Full(weight),
            bias: None,
            lora: None,
        }
    }

    /// GPT-2's.
    pub fn conv1d(&self, name: &str, [inner, outer]: [u64; 2]) -> Linear {
        let mut linear = self.linear(name, [inner, outer], true);
        if self.run.quantization.is_none() {
            linear.weight = Weight::Transposed(self.parameter(name, &[inner, outer]));
        }
        linear
    }

    fn four_bit(&self, elements: u64, double: bool, compute: TorchType) -> FourBit {
        // Fabric's plugin quantises from f16, whatever the precision (`_Linear4bit.quantize`).
        let dtype = if self.run.stack == Stack::Litgpt { TorchType::F16 } else { self.run.weights };
        self.torch.of_kind(Kind::Weights, || {
            let empty = |size: u64, dtype| self.torch.empty(&[size], dtype, "quantize_4bit");
            let blocks = elements.div_ceil(BLOCK);
            let nested = double.then(|| {
                let groups = blocks.div_ceil(NESTED_BLOCK);
                vec![empty(groups, TorchType::F32), empty(256, TorchType::F32), empty(1, TorchType::F32)]
            });
            let scales = empty(blocks, if double { TorchType::U8 } else { TorchType::F32 });
            let packed = empty(elements.div_ceil(2), TorchType::U8);
            FourBit { packed, scales, nested, _codes: empty(16, TorchType::F32), compute, dtype }
        })
    }
}

impl Linear {
    /// Gives it an adapter.
    pub fn adapt(&mut self, torch: &Torch, adapter: &Adapter) {
        let [outer, inner] = self.shape;
        let part = |shape: &[u64]| {
            torch.of_kind(Kind::Adapters, || torch.empty(shape, adapter.dtype, "empty")).as_leaf()
        };
        let (a, b) = (part(&[adapter.rank, inner]), part(&[outer, adapter.rank]));
        let magnitude = adapter.dora.then(|| {
            let weight = self.dequantised(torch, adapter.dtype);
            let product = torch.empty(&[outer, inner], adapter.dtype, "mm");
            drop(row_lengths(torch, &weight, &product));
            part(&[outer])
        });
        self.lora = Some(Lora { a, b, dropout: adapter.dropout, magnitude });
    }

    /// The weight as a matrix of this type (`dequantize_module_weight`).
    fn dequantised(&self, torch: &Torch, dtype: TorchType) -> Tensor {
        match &self.weight {
            Weight::Full(weight) | Weight::Transposed(weight) => torch.to(&weight.detach(), dtype),
            Weight::FourBit(weight) => torch.to(&weight.dequantised(torch, self.shape), dtype),
            Weight::Int8 { .. } => {
                torch.of_kind(Kind::WeightCopies, || torch.empty(&self.shape, dtype, "mul"))
            }
        }
    }

    /// `merge`: the product of both parts, and its sum with the weight, which takes the old one's place. A quantised weight is summed anew
    /// and quantised again by way of the host.
    pub fn merge(&self, torch: &Torch) {
        let Some(lora) = &self.lora else { return };
        let dtype = lora.a.dtype();
        let scaled = {
            let product = torch.empty(&self.shape, dtype, "mm");
            torch.scale(&product)
        };
        if let Weight::FourBit(_) | Weight::Int8 { .. } = &self.weight {
            let weight = self.dequantised(torch, dtype);
            drop(torch.add(&weight, &scaled));
        }
    }

    /// Whether an adapter is meant for it.
    pub fn is_target(&self, adapter: &Adapter) -> bool {
        adapter.targets.contains(&self.name)
    }

    /// What is trained of it, in the order of `parameters()`.
    pub fn trained(&self) -> Vec<Tensor> {
        let weight = match &self.weight {
            Weight::Full(weight) | Weight::Transposed(weight) => Some(weight),
            Weight::FourBit(_) | Weight::Int8 { .. } => None,
        };
        let lora = self.lora.iter().flat_map(|lora| [Some(&lora.a), Some(&lora.b), lora.magnitude.as_ref()]);
        let all = weight.into_iter().chain(&self.bias).chain(lora.flatten());
        all.filter(|tensor| tensor.requires_grad()).cloned().collect()
    }

    /// Whether its adapter drops elements of its input.
    pub fn drops(&self) -> bool {
        self.lora.as_ref().is_some_and(|lora| lora.dropout)
    }

    /// The layer's output, `[.., out]`.
    pub fn forward(&self, torch: &Torch, x: &Tensor) -> Tensor {
        torch.module(&self.name, || match (&self.lora, &self.weight) {
            (None, _) => self.base(torch, x),
            (Some(lora), Weight::FourBit(_) | Weight::Int8 { .. }) => self.over_quantised(torch, lora, x),
            (Some(lora), _) => {
                let mut result = self.base(torch, x);
                let dtype = result.dtype();
                let x = torch.to(x, lora.a.dtype());
                result = torch.add(&result, &self.of_adapter(torch, lora, &x, &result));
                torch.to(&result, dtype)
            }
        })
    }

    /// The product in another type than the weight's: `F.linear(x.type(dtype), weight.type(dtype))`.
    pub fn forward_in(&self, torch: &Torch, x: &Tensor, dtype: TorchType) -> Tensor {
        let x = torch.to(x, dtype);
        torch.module(&self.name, || match &self.weight {
            Weight::Full(weight) => torch.linear(&x, &torch.to(weight, dtype), self.bias.as_ref()),
            _ => self.base(torch, &x),
        })
    }

    /// The same where the adapter's input has lost its elements already: litgpt has one adapter for queries, keys and values
    /// (`LoRAQKVLinear`), and its types are those of the model.
    pub fn forward_dropped(&self, torch: &Torch, x: &Tensor, dropped: &Tensor) -> Tensor {
        torch.module(&self.name, || {
            let result = self.base(torch, x);
            match &self.lora {
                Some(lora) => torch.add(&result, &lora.product(torch, dropped.clone())),
                None => result,
            }
        })
    }

    /// `peft/tuners/lora/bnb.py`: over 4 bits the base's result is copied first; its types are left to autocast where
    /// that is on.
    fn over_quantised(&self, torch: &Torch, lora: &Lora, x: &Tensor) -> Tensor {
        let mut result = self.base(torch, x);
        if matches!(self.weight, Weight::FourBit(_)) {
            result = torch.clone_of(&result);
        }
        let dtype = result.dtype();
        let converts = torch.autocast_type().is_none();
        let x = if converts { torch.to(x, lora.a.dtype()) } else { x.clone() };
        if lora.magnitude.is_some() {
            let sum = torch.add(&result, &self.of_adapter(torch, lora, &x, &result));
            return if converts { torch.to(&sum, dtype) } else { sum };
        }
        let mut output = lora.forward(torch, &x);
        if converts {
            output = torch.to(&output, dtype);
        }
        torch.add(&result, &output)
    }

    /// What an adapter adds to the base's result.
    fn of_adapter(&self, torch: &Torch, lora: &Lora, x: &Tensor, result: &Tensor) -> Tensor {
        match &lora.magnitude {
            None => lora.forward(torch, x),
            Some(magnitude) => self.dora(torch, lora, magnitude, x, result),
        }
    }

    /// `DoraLinearLayer.forward`: the adapter as a matrix, by way of a unit matrix; the lengths of the rows of both; the base's result, made
    /// again where the input lost elements, and the adapter's, each scaled by row.
    fn dora(&self, torch: &Torch, lora: &Lora, magnitude: &Tensor, x: &Tensor, result: &Tensor) -> Tensor {
        let [_, inner] = self.shape;
        let dropped = lora.dropout.then(|| torch.dropout(x));
        let x = dropped.as_ref().unwrap_or(x);
        let matrix = {
            let unit = torch.empty(&[inner, inner], lora.a.dtype(), "eye");
            let product = torch.linear(&torch.linear(&unit, &lora.a, None), &lora.b, None);
            drop(unit);
            torch.to(&torch.transpose(&product, 0, 1), x.dtype())
        };
        let weight = self.dequantised(torch, x.dtype());
        let lengths = row_lengths(torch, &weight, &matrix.detach());
        // A quotient keeps what a product keeps: the second operand.
        let scale = torch.mul(magnitude, &lengths);
        let inner = torch.linear(x, &lora.a, None);
        let product = torch.linear(&inner, &lora.b, None);
        drop(inner);
        let base = match (&dropped, &self.bias) {
            (Some(_), _) => torch.linear(x, &weight, None),
            (None, Some(bias)) => torch.add(result, bias),
            (None, None) => result.clone(),
        };
        let of_base = torch.mul(&torch.shift(&scale), &base);
        let of_adapter = {
            let scaled = torch.mul(&scale, &product);
            torch.scale(&scaled)
        };
        torch.add(&of_base, &of_adapter)
    }

    /// Product and loss in one function, without logits: Liger's, or cut cross-entropy.
    pub fn fused_loss(&self, torch: &Torch, liger: bool, hidden: &Tensor, labels: &Tensor) -> Tensor {
        match &self.weight {
            Weight::Full(weight) if liger => torch.liger_fused_loss(hidden, weight, labels),
            Weight::Full(weight) => torch.cut_cross_entropy(hidden, weight, labels),
            _ => {
                let logits = self.forward(torch, hidden);
                let rows = logits.shape().elements() / logits.shape().last();
                torch.cross_entropy(&torch.reshape(&logits, &[rows, logits.shape().last()]), labels)
            }
        }
    }

    fn base(&self, torch: &Torch, x: &Tensor) -> Tensor {
        match &self.weight {
            Weight::Full(weight) => torch.linear(x, weight, self.bias.as_ref()),
            Weight::Transposed(weight) => torch.conv1d(x, weight, self.bias.as_ref()),
            Weight::FourBit(weight) => weight.forward(torch, self.shape, self.bias.as_ref(), x),
            Weight::Int8 { rows, scales } => torch.matmul_8bit(x, rows, scales),
        }
    }
}

impl Lora {
    fn forward(&self, torch: &Torch, x: &Tensor) -> Tensor {
        self.product(torch, if self.dropout { torch.dropout(x) } else { x.clone() })
    }

    fn product(&self, torch: &Torch, x: Tensor) -> Tensor {
        let inner = torch.linear(&x, &self.a, None);
        drop(x);
        let outer = torch.linear(&inner, &self.b, None);
        drop(inner);
        torch.scale(&outer)
    }
}

/// `get_weight_norm`: the lengths of the rows of `weight + scale * matrix`.
fn row_lengths(torch: &Torch, weight: &Tensor, matrix: &Tensor) -> Tensor {
    torch.no_grad(|| {
        let sum = {
            let scaled = torch.scale(matrix);
            torch.add(weight, &scaled)
        };
        torch.empty(&[sum.size(0)], sum.dtype(), "linalg_vector_norm")
    })
}

impl FourBit {
    /// In the type that it was quantised from.
    fn dequantised(&self, torch: &Torch, shape: [u64; 2]) -> Tensor {
        let form = crate::eager::FourBitForm { shape, dtype: self.dtype, nested: self.nested.is_some() };
        torch.dequantize_4bit(&self.scales, form, false)
    }

    /// `Linear4bit.forward`: in the compute type, and back to the input's.
    fn forward(&self, torch: &Torch, shape: [u64; 2], bias: Option<&Tensor>, x: &Tensor) -> Tensor {
        let dtype = x.dtype();
        let x = torch.to(x, self.compute);
        let bias = bias.map(|bias| torch.to(bias, self.compute));
        let nested: &[Tensor] = self.nested.as_deref().unwrap_or_default();
        let form = crate::eager::FourBitForm { shape, dtype: self.dtype, nested: !nested.is_empty() };
        let out = torch.matmul_4bit(&x, &self.packed, &self.scales, bias.as_ref(), form);
        torch.to(&out, dtype)
    }
}

/// The forms of norms in transformers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NormForm {
    /// `weight * x32.to(dtype)`
    Llama,
    /// `(x32 * (1 + weight32)).to(dtype)`
    Gemma,
    /// `nn.LayerNorm`
    Layer,
    /// Liger's fused RMSNorm.
    Liger,
}

/// A norm.
pub(crate) struct Norm {
    name: &'static str,
    form: NormForm,
    weight: Tensor,
    bias: Option<Tensor>,
}

impl Maker<'_> {
    pub fn norm(&self, name: &'static str, form: NormForm, width: u64) -> Norm {
        let weight = self.parameter(name, &[width]);
        let bias = (form == NormForm::Layer).then(|| self.parameter(name, &[width]));
        Norm { name, form, weight, bias }
    }
}

impl Norm {
    pub fn trained(&self) -> Vec<Tensor> {
        [Some(&self.weight), self.bias.as_ref()]
            .into_iter()
            .flatten()
            .filter(|x| x.requires_grad())
            .cloned()
            .collect()
    }

    pub fn forward(&self, torch: &Torch, x: &Tensor) -> Tensor {
        torch.module(self.name, || match (self.form, &self.bias) {
            (NormForm::Layer, Some(bias)) => torch.layer_norm(x, &self.weight, bias),
            (NormForm::Liger, _) => torch.liger_rms_norm(x, &self.weight),
            (NormForm::Gemma, _) => {
                let normed = {
                    let x = torch.to(x, TorchType::F32);
                    normalised(torch, &x)
                };
                let weight = {
                    let weight = torch.to(&self.weight, TorchType::F32);
                    torch.shift(&weight)
                };
                let output = torch.mul(&normed, &weight);
                drop((normed, weight));
                torch.to(&output, x.dtype())
            }
            _ => {
                let mut hidden_states = torch.to(x, TorchType::F32);
                let variance = torch.mean_last(&torch.square(&hidden_states));
                let deviation = {
                    let shifted = torch.shift(&variance);
                    torch.rsqrt(&shifted)
                };
                hidden_states = torch.mul(&hidden_states, &deviation);
                drop(deviation);
                let cast = torch.to(&hidden_states, x.dtype());
                torch.mul(&self.weight, &cast)
            }
        })
    }
}

/// `x * rsqrt(mean(x^2) + eps)`
fn normalised(torch: &Torch, x: &Tensor) -> Tensor {
    let mean = {
        let square = torch.square(x);
        torch.mean_last(&square)
    };
    let shifted = torch.shift(&mean);
    drop(mean);
    let deviation = torch.rsqrt(&shifted);
    drop(shifted);
    torch.mul(x, &deviation)
}

/// Sizes of heads: `[B, S, heads, D]`.
pub(crate) fn by_heads(x: &Tensor, width: u64) -> Dims {
    let [batch, rows, total] = [x.size(0), x.size(1), x.size(2)];
    Dims::new(&[batch, rows, total / width, width])
}
