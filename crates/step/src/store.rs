//! Where weights are while a step runs. The step gathers a block, uses it, and releases it; whether the block was
//! there all along, came from a file or from other ranks is the store's affair.

use std::collections::HashMap;

use plimsoll_device::{DType, Device, DeviceError, Tensor};
use plimsoll_memory::{Phase, Tag};
use plimsoll_model::{BlockId, ModelSpec, NormSpec, Parameter, Role};

use crate::StepError;
use crate::linear::Linear;
use crate::norm::Norm;

/// The weights of one block, for as long as the step works on it.
#[derive(Clone, Debug)]
pub struct BlockWeights {
    block: BlockId,
    tensors: Vec<(Role, Tensor)>,
}

impl BlockWeights {
    /// Weights of a block, by role.
    pub fn new(block: BlockId, tensors: Vec<(Role, Tensor)>) -> BlockWeights {
        BlockWeights { block, tensors }
    }

    /// The block that they belong to.
    pub fn block(&self) -> BlockId {
        self.block
    }

    /// One weight.
    pub fn get(&self, role: Role) -> Result<&Tensor, StepError> {
        self.find(role).ok_or(StepError::MissingWeight { block: self.block, role })
    }

    /// One weight, if the block has it.
    pub fn find(&self, role: Role) -> Option<&Tensor> {
        self.tensors.iter().find(|(r, _)| *r == role).map(|(_, tensor)| tensor)
    }

    pub(crate) fn linear(&self, weight: Role, bias: Role) -> Result<Linear<'_>, StepError> {
        Ok(Linear {
            block: self.block,
            role: weight,
            weight: self.get(weight)?,
            bias_role: bias,
            bias: self.find(bias),
        })
    }

    /// A norm that the block may have.
    pub(crate) fn optional_norm(
        &self,
        weight: Role,
        bias: Option<Role>,
        spec: &NormSpec,
    ) -> Result<Option<Norm<'_>>, StepError> {
        self.find(weight).map(|_| self.norm(weight, bias, spec)).transpose()
    }

    pub(crate) fn norm(
        &self,
        weight: Role,
        bias: Option<Role>,
        spec: &NormSpec,
    ) -> Result<Norm<'_>, StepError> {
        Ok(Norm {
            block: self.block,
            role: weight,
            weight: self.get(weight)?,
            bias: bias.and_then(|role| Some((role, self.find(role)?))),
            epsilon: spec.epsilon as f32,
            weight_offset: if spec.one_plus_weight { 1.0 } else { 0.0 },
        })
    }
}

/// A source of weights, block by block.
pub trait WeightStore {
    /// Makes the block's weights available.
    fn gather(&mut self, block: BlockId) -> Result<BlockWeights, StepError>;

    /// The step is done with the block for now.
    fn release(&mut self, block: BlockId);
}

/// A store that has everything in the arena all the time.
#[derive(Debug)]
pub struct ResidentStore {
    blocks: HashMap<BlockId, BlockWeights>,
}

impl ResidentStore {
    /// Takes memory for all weights of the model, in one type; their values are to be written by the caller.
    pub fn allocate<D: Device>(
        device: &D,
        spec: &ModelSpec,
        dtype: DType,
        tag: Tag,
    ) -> Result<Self, StepError> {
        ResidentStore::allocate_typed(device, spec, &|_| dtype, tag)
    }

    /// The same with a type for each weight, which may be one of blocks where nothing but products and the embedding
    /// read it.
    pub fn allocate_typed<D: Device>(
        device: &D,
        spec: &ModelSpec,
        weight_types: &dyn Fn(&Parameter) -> DType,
        tag: Tag,
    ) -> Result<Self, StepError> {
        spec.check()?;
        let mut blocks = HashMap::new();
        for block in spec.blocks() {
            device.arena().enter(Phase::Setup, layer_of(block));
            let tensors = spec
                .block_parameters(block)
                .into_iter()
                .map(|p| Ok((p.role, device.alloc(weight_types(&p), &p.shape, tag, role_name(p.role))?)))
                .collect::<Result<Vec<_>, DeviceError>>()?;
            blocks.insert(block, BlockWeights::new(block, tensors));
        }
        Ok(ResidentStore { blocks })
    }

    /// Sets every weight; `fill` writes a parameter's values in the given type and is not called on a dry device.
    pub fn load<D: Device, E: From<StepError>>(
        &self,
        device: &D,
        spec: &ModelSpec,
        mut fill: impl FnMut(&Parameter, DType, &mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        for p in spec.parameters() {
            let tensor = self.tensor(&p)?;
            let mut outcome = Ok(());
            device
                .write(tensor, &mut |bytes| outcome = fill(&p, tensor.dtype(), bytes))
                .map_err(StepError::from)?;
            outcome?;
        }
        Ok(())
    }

    /// The tensor of a parameter.
    pub fn tensor(&self, parameter: &Parameter) -> Result<&Tensor, StepError> {
        let missing = StepError::MissingWeight { block: parameter.block, role: parameter.role };
        self.blocks.get(&parameter.block).ok_or(missing)?.get(parameter.role)
    }
}

impl WeightStore for ResidentStore {
    fn gather(&mut self, block: BlockId) -> Result<BlockWeights, StepError> {
        let missing = StepError::MissingWeight { block, role: Role::TokenEmbedding };
        self.blocks.get(&block).cloned().ok_or(missing)
    }

    fn release(&mut self, _: BlockId) {}
}

/// The layer number of a block, for the ledger.
pub(crate) fn layer_of(block: BlockId) -> Option<u32> {
    match block {
        BlockId::Layer(i) => Some(i),
        BlockId::Embedding | BlockId::Head => None,
    }
}

/// What the ledger calls a weight.
pub(crate) fn role_name(role: Role) -> &'static str {
    match role {
        Role::TokenEmbedding => "embed_tokens",
        Role::PositionEmbedding => "embed_positions",
        Role::AttentionNorm | Role::AttentionNormBias => "input_layernorm",
        Role::QProj | Role::QBias => "q_proj",
        Role::KProj | Role::KBias => "k_proj",
        Role::VProj | Role::VBias => "v_proj",
        Role::OProj | Role::OBias => "o_proj",
        Role::QNorm => "q_norm",
        Role::KNorm => "k_norm",
        Role::PostAttentionNorm => "attention_out_layernorm",
        Role::MlpNorm | Role::MlpNormBias => "mlp_layernorm",
        Role::PostMlpNorm => "mlp_out_layernorm",
        Role::GateProj | Role::GateBias => "gate_proj",
        Role::UpProj | Role::UpBias => "up_proj",
        Role::DownProj | Role::DownBias => "down_proj",
        Role::FinalNorm | Role::FinalNormBias => "norm",
        Role::LmHead => "lm_head",
    }
}
