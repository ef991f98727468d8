//! How a model's files store its parameters: under which names, several in one tensor, rows reordered or transposed.
//!
//! Both formats answer the same question, block by block: [`hf_block`] for Hugging Face checkpoints, `gguf::gguf_block` for
//! GGUF. Reading finds each parameter's part of a stored tensor by it, and saving writes by it.

use crate::parameters::{BlockId, Parameter, Role};
use crate::source::RowOrder;
use crate::spec::ModelSpec;

/// A tensor of a file, and the parameters in it: their rows, one after the other.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct StoredTensor {
    pub name: String,
    pub parts: Vec<Parameter>,
    /// The order of each part's rows; [`RowOrder::Transposed`] for the tensor as a whole.
    pub rows: RowOrder,
    /// Whether what is stored is 1 + the parameter.
    pub plus_one: bool,
}

impl StoredTensor {
    /// A parameter as it is, under another name.
    pub fn plain(name: String, parameter: Parameter) -> StoredTensor {
        StoredTensor { name, parts: vec![parameter], rows: RowOrder::Natural, plus_one: false }
    }

    /// Rows of all parts together.
    pub fn total_rows(&self) -> u64 {
        self.parts.iter().map(Parameter::rows).sum()
    }

    /// The shape in the file.
    pub fn shape(&self) -> Vec<u64> {
        let mut shape = vec![self.total_rows()];
        shape.extend(self.parts.first().and_then(|part| part.shape.get(1)));
        if matches!(self.rows, RowOrder::Transposed { .. }) {
            shape.reverse();
        }
        shape
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
        _ => parameters.into_iter().map(|p| StoredTensor::plain(p.name.clone(), p)).collect(),
    }
}

impl ModelSpec {
    /// The name of the tensor that holds a parameter in Hugging Face's checkpoints of the family.
    pub fn hf_tensor_name(&self, parameter: &Parameter) -> String {
        let stored = hf_block(self, parameter.block);
        let holds = |tensor: &&StoredTensor| tensor.parts.iter().any(|part| part.role == parameter.role);
        stored.iter().find(holds).map_or_else(|| parameter.name.clone(), |tensor| tensor.name.clone())
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
            Some(tensor) => tensor.parts.push(parameter),
            None => tensors.push(StoredTensor::plain(name, parameter)),
        }
    }
    if transpose_matrices {
        for tensor in &mut tensors {
            if tensor.parts.iter().all(|part| part.role.is_block_matrix()) {
                tensor.rows = RowOrder::Transposed { total: tensor.total_rows(), first: 0 };
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
