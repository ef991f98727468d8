//! AdamW (Loshchilov and Hutter 2019) with f32 states, over f32 master weights where there are any, updated block by block.

use std::collections::HashMap;

use plimsoll_device::{AdamW, DType, Device, Op, Rounding, Tensor};
use plimsoll_memory::{Phase, Tag};
use plimsoll_model::{BlockId, ModelSpec, Parameter, ParameterKind, Role};

use crate::StepError;
use crate::gradients::Gradients;
use crate::settings::AdamWSettings;
use crate::store::{BlockWeights, layer_of, role_name};

/// State of one parameter, f32 of the parameter's shape each.
#[derive(Clone, Debug)]
pub struct OptimizerState {
    /// First moment.
    pub m: Tensor,
    /// Second moment.
    pub v: Tensor,
    /// Master weight.
    pub master: Option<Tensor>,
}

/// The optimizer's states, resident.
#[derive(Debug)]
pub(crate) struct Optimizer {
    settings: AdamWSettings,
    states: HashMap<(BlockId, Role), OptimizerState>,
    seed: u64,
}

/// The numbers of one update.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Update {
    pub lr: f64,
    /// Factor on the gradients.
    pub grad_scale: f64,
    /// 1-based.
    pub step: u64,
}

impl Optimizer {
    /// Takes memory for the states of all weights and sets the moments to zero.
    pub fn allocate<D: Device>(
        device: &D,
        spec: &ModelSpec,
        settings: AdamWSettings,
        master_weights: bool,
        seed: u64,
    ) -> Result<Self, StepError> {
        let mut states = HashMap::new();
        for p in spec.parameters() {
            device.arena().enter(Phase::Setup, layer_of(p.block));
            let alloc = |tag| device.alloc(DType::F32, &p.shape, tag, role_name(p.role));
            let (m, v) = (alloc(Tag::Optimizer)?, alloc(Tag::Optimizer)?);
            for moment in [&m, &v] {
                device.run(Op::Fill { out: moment, value: 0.0 })?;
            }
            let master = if master_weights { Some(alloc(Tag::MasterWeights)?) } else { None };
            states.insert((p.block, p.role), OptimizerState { m, v, master });
        }
        Ok(Optimizer { settings, states, seed })
    }

    /// The state of a parameter.
    pub fn state(&self, block: BlockId, role: Role) -> Result<&OptimizerState, StepError> {
        self.states.get(&(block, role)).ok_or(StepError::MissingWeight { block, role })
    }

    /// Updates the weights of one block from their gradients.
    pub fn update_block<D: Device>(
        &self,
        device: &D,
        weights: &BlockWeights,
        parameters: &[Parameter],
        gradients: &Gradients,
        update: Update,
    ) -> Result<(), StepError> {
        for (index, p) in parameters.iter().enumerate() {
            let OptimizerState { m, v, master } = self.state(p.block, p.role)?;
            let decays = self.settings.decay_norms_and_biases
                || matches!(p.role.kind(), ParameterKind::Matrix | ParameterKind::Embedding);
            let hyper = AdamW {
                lr: update.lr as f32,
                beta1: self.settings.beta1 as f32,
                beta2: self.settings.beta2 as f32,
                epsilon: self.settings.epsilon as f32,
                weight_decay: if decays { self.settings.weight_decay as f32 } else { 0.0 },
                step: update.step,
                grad_scale: update.grad_scale as f32,
            };
            let seed = mix(mix(self.seed, update.step), (block_number(p.block) << 8) + index as u64);
            device.run(Op::AdamW {
                param: weights.get(p.role)?,
                master: master.as_ref(),
                grad: gradients.get(p.block, p.role)?,
                m,
                v,
                hyper,
                rounding: Rounding::Stochastic { seed },
            })?;
        }
        Ok(())
    }
}

fn block_number(block: BlockId) -> u64 {
    match block {
        BlockId::Embedding => 0,
        BlockId::Head => 1,
        BlockId::Layer(i) => 2 + u64::from(i),
    }
}

/// SplitMix64's finaliser over a sum: well-mixed seeds from counters.
fn mix(a: u64, b: u64) -> u64 {
    let mut z = a.wrapping_add(b.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
