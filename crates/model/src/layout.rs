//! How a model's files store its parameters: under which names, several in one tensor or one in several, rows reordered or
//! transposed.
//!
//! Both formats answer the same question, block by block: [`hf_block`] for Hugging Face checkpoints, `gguf::gguf_block` for
//! GGUF. Reading finds each parameter's parts of stored tensors by it, and saving writes by it.

mod columns;
mod experts;

use std::ops::Range;

use crate::parameters::{BlockId, Parameter, Role};
use crate::source::RowOrder;
use crate::spec::ModelSpec;
pub(crate) use columns::Columns;

/// Rows of a parameter that a stored tensor holds.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct StoredPart {
    pub parameter: Parameter,
    pub rows: Range<u64>,
}

impl StoredPart {
    /// All of a parameter.
    pub fn whole(parameter: Parameter) -> StoredPart {
        StoredPart { rows: parameter.all_rows(), parameter }
    }

    /// How many rows they are.
    pub fn count(&self) -> u64 {
        self.rows.end - self.rows.start
    }

    /// Their elements.
    pub fn elements(&self) -> u64 {
        self.count() * self.parameter.columns()
    }

    /// The parameter's role.
    pub fn role(&self) -> Role {
        self.parameter.role
    }
}

/// A tensor of a file, and the parameters in it: their rows, one after the other.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct StoredTensor {
    pub name: String,
    pub parts: Vec<StoredPart>,
    /// The order of each part's rows; of [`RowOrder::Transposed`] and [`RowOrder::Alternating`] that of the tensor as a whole, or of
    /// each matrix in it.
    pub rows: RowOrder,
    /// Whether what is stored is 1 + the parameter.
    pub plus_one: bool,
    /// The matrices in it, where it is a stack of several.
    pub stack: Option<u64>,
}

impl StoredTensor {
    /// A parameter as it is, under another name.
    pub fn plain(name: String, parameter: Parameter) -> StoredTensor {
        let stack = match parameter.shape[..] {
            [count, _, _] => Some(count),
            _ => None,
        };
        StoredTensor { stack, ..StoredTensor::of_rows(name, vec![StoredPart::whole(parameter)]) }
    }

    /// Rows of parameters as one matrix or vector.
    pub fn of_rows(name: String, parts: Vec<StoredPart>) -> StoredTensor {
        StoredTensor { name, parts, rows: RowOrder::Natural, plus_one: false, stack: None }
    }

    /// Rows of all parts together.
    pub fn total_rows(&self) -> u64 {
        self.parts.iter().map(StoredPart::count).sum()
    }

    /// Elements of a row.
    pub fn columns(&self) -> u64 {
        self.parts.first().map_or(1, |part| part.parameter.columns())
    }

    /// The shape in the file.
    pub fn shape(&self) -> Vec<u64> {
        let mut shape = match self.stack {
            Some(count) => vec![count, self.total_rows() / count.max(1)],
            None => vec![self.total_rows()],
        };
        if self.parts.first().is_some_and(|part| part.parameter.shape.len() > 1) {
            shape.push(self.columns());
        }
        match (self.rows, &mut shape[..]) {
            (RowOrder::Transposed { .. }, [.., inputs, outputs]) => std::mem::swap(inputs, outputs),
            (RowOrder::Alternating { of, .. }, [rows, columns]) => {
                (*rows, *columns) = (*rows / of.max(1), *columns * of);
            }
            _ => {}
        }
        shape
    }

    /// Whether every part has one of these roles.
    pub fn is_of(&self, is: impl Fn(Role) -> bool) -> bool {
        self.parts.iter().all(|part| is(part.role()))
    }
}

/// The prefix of a family's tensors, which checkpoints of a bare model, without a head, leave out.
pub(crate) fn hf_prefix(spec: &ModelSpec) -> &'static str {
    if spec.architecture == "gpt2" { "transformer." } else { "model." }
}

/// What a Hugging Face checkpoint stores of a block.
pub(crate) fn hf_block(spec: &ModelSpec, block: BlockId) -> Vec<StoredTensor> {
    let parameters = spec.block_parameters(block);
    match spec.architecture.as_str() {
        "gpt2" => fuse(parameters, gpt2_name, true),
        "phi3" => fuse(parameters, phi3_name, false),
        _ => match block.layer().and_then(|layer| spec.experts_of(layer)) {
            Some(experts) => experts::hf_layer(spec, experts, parameters),
            None => parameters.into_iter().map(|p| StoredTensor::plain(p.name.clone(), p)).collect(),
        },
    }
}

impl ModelSpec {
    /// The same with a tensor for each matrix of each expert, whichever form its own files have: the linears that adapters and
    /// packing are for.
    pub(crate) fn with_single_experts(&self) -> ModelSpec {
        let mut spec = self.clone();
        if let Some(experts) = &mut spec.experts {
            experts.stacked_files = false;
        }
        spec
    }

    /// The name of the tensor that holds a parameter in Hugging Face's checkpoints of the family, the first one where several do.
    pub fn hf_tensor_name(&self, parameter: &Parameter) -> String {
        let first = self.hf_tensors(parameter).into_iter().next();
        first.map_or_else(|| parameter.name.clone(), |(name, _)| name)
    }

    /// The tensors that hold a parameter in Hugging Face's checkpoints of the family, and which of its rows each holds: several where
    /// each expert has a tensor of its own, and one may come several times where experts are stacks of gates and ups.
    pub fn hf_tensors(&self, parameter: &Parameter) -> Vec<(String, Range<u64>)> {
        let of = |tensor: StoredTensor| {
            let own = tensor.parts.into_iter().filter(|part| part.role() == parameter.role);
            own.map(|part| (tensor.name.clone(), part.rows)).collect::<Vec<_>>()
        };
        hf_block(self, parameter.block).into_iter().flat_map(of).collect()
    }
}

/// Puts parameters of one stored name into one tensor, where the first of them stands.
pub(crate) fn fuse(
    parameters: Vec<Parameter>,
    name: fn(&Parameter) -> String,
    transpose_matrices: bool,
) -> Vec<StoredTensor> {
    let mut tensors: Vec<StoredTensor> = Vec::new();
    for parameter in parameters {
        let name = name(&parameter);
        match tensors.iter_mut().find(|tensor| tensor.name == name) {
            Some(tensor) => tensor.parts.push(StoredPart::whole(parameter)),
            None => tensors.push(StoredTensor::plain(name, parameter)),
        }
    }
    if transpose_matrices {
        for tensor in &mut tensors {
            if tensor.is_of(Role::is_block_matrix) {
                tensor.rows = RowOrder::Transposed { total: tensor.total_rows(), first: 0, step: 1 };
            }
        }
    }
    tensors
}

/// GPT-2's names; q, k and v are one tensor, and matrices are stored `[in, out]`.
fn gpt2_name(parameter: &Parameter) -> String {
    let part = match parameter.role {
        Role::TokenEmbedding => return "transformer.wte.weight".into(),
        Role::PositionEmbedding => return "transformer.wpe.weight".into(),
        Role::FinalNorm => return "transformer.ln_f.weight".into(),
        Role::FinalNormBias => return "transformer.ln_f.bias".into(),
        Role::AttentionNorm => "ln_1.weight",
        Role::AttentionNormBias => "ln_1.bias",
        Role::QProj | Role::KProj | Role::VProj => "attn.c_attn.weight",
        Role::QBias | Role::KBias | Role::VBias => "attn.c_attn.bias",
        Role::OProj => "attn.c_proj.weight",
        Role::OBias => "attn.c_proj.bias",
        Role::MlpNorm => "ln_2.weight",
        Role::MlpNormBias => "ln_2.bias",
        Role::UpProj => "mlp.c_fc.weight",
        Role::UpBias => "mlp.c_fc.bias",
        Role::DownProj => "mlp.c_proj.weight",
        Role::DownBias => "mlp.c_proj.bias",
        _ => return parameter.name.clone(),
    };
    match parameter.block {
        BlockId::Layer(i) => format!("transformer.h.{i}.{part}"),
        BlockId::Embedding | BlockId::Head => parameter.name.clone(),
    }
}

/// Phi-3's names: q, k and v are one tensor, and so are gate and up.
fn phi3_name(parameter: &Parameter) -> String {
    let renamed = |from: &str, to: &str| parameter.name.replace(from, to);
    match parameter.role {
        Role::QProj | Role::QBias => renamed(".q_proj.", ".qkv_proj."),
        Role::KProj | Role::KBias => renamed(".k_proj.", ".qkv_proj."),
        Role::VProj | Role::VBias => renamed(".v_proj.", ".qkv_proj."),
        Role::GateProj | Role::GateBias => renamed(".gate_proj.", ".gate_up_proj."),
        Role::UpProj | Role::UpBias => renamed(".up_proj.", ".gate_up_proj."),
        _ => parameter.name.clone(),
    }
}
