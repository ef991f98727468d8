//! The optimizer: states of all parameters, over f32 master weights where there are any, updated one tensor at a time.
//!
//! A file for each rule says which states a parameter has and which operations make its step. No rule needs the
//! gradient of another tensor.

use std::collections::HashMap;

use plimsoll_device::{DType, Device, Op, Rounding, Rule, Tensor};
use plimsoll_memory::Phase;
use plimsoll_model::{BlockId, Parameter, Role};

use crate::StepError;
use crate::gradients::Gradients;
use crate::seed::{mix, parameter_number};
use crate::store::{BlockWeights, layer_of};

mod adafactor;
mod adam_mini;
mod adamw;
mod apollo;
mod eight_bit;
mod galore;
mod lion;
mod low_rank;
mod settings;
mod sgd;
mod state;
#[cfg(test)]
mod tests;

pub use settings::{
    AdafactorSettings, AdamSettings, ApolloChannels, EightBit, LionSettings, LowRankSettings, OptimizerKind,
    OptimizerSettings, ParameterGroup, SgdSettings,
};
pub use state::{OptimizerState, StateKind};

use state::NewState;

/// The optimizer's states, resident.
#[derive(Debug)]
pub(crate) struct Optimizer {
    kind: OptimizerKind,
    slots: HashMap<(BlockId, Role), Slot>,
    seed: u64,
}

/// A parameter's state, and its numbers.
#[derive(Debug)]
struct Slot {
    state: OptimizerState,
    lr_scale: f64,
    weight_decay: f64,
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
    /// Takes memory for the states of all parameters that are trained and sets them to those before the first step.
    pub fn allocate<D: Device>(
        device: &D,
        trained: &[Parameter],
        head_dim: u64,
        settings: &OptimizerSettings,
        needs_master: &dyn Fn(&Parameter) -> bool,
        seed: u64,
    ) -> Result<Self, StepError> {
        let parameters = trained;
        for group in &settings.groups {
            if !parameters.iter().any(|p| group.pattern.matches(&p.name)) {
                return Err(StepError::EmptyGroup { pattern: group.pattern.to_string() });
            }
        }
        let kind = settings.kind;
        let mut slots = HashMap::new();
        for p in parameters {
            device.arena().enter(Phase::Setup, layer_of(p.block));
            let mut new = NewState::new(device, p);
            match kind {
                OptimizerKind::AdamW(_) => adamw::allocate(&mut new, DType::F32),
                OptimizerKind::AdamWBf16(_) => adamw::allocate(&mut new, DType::Bf16),
                OptimizerKind::AdamW8bit(_, bits) => eight_bit::allocate_adamw(&mut new, bits),
                OptimizerKind::AdamMini(_) => adam_mini::allocate(&mut new, head_dim),
                OptimizerKind::Lion(_) => lion::allocate(&mut new),
                OptimizerKind::Lion8bit(_, bits) => eight_bit::allocate_lion(&mut new, bits),
                OptimizerKind::Adafactor(s) | OptimizerKind::AdaLomo(s) => adafactor::allocate(&mut new, &s),
                OptimizerKind::Sgd(s) => sgd::allocate(&mut new, &s),
                OptimizerKind::GaLore(s) => galore::allocate(&mut new, &s),
                OptimizerKind::Apollo(s, _) => apollo::allocate(&mut new, &s),
            }?;
            if needs_master(p) {
                new.master()?;
            }
            let (lr_scale, weight_decay) = settings.numbers_of(p);
            slots.insert((p.block, p.role), Slot { state: new.done(), lr_scale, weight_decay });
        }
        Ok(Optimizer { kind, slots, seed })
    }

    fn slot(&self, block: BlockId, role: Role) -> Result<&Slot, StepError> {
        self.slots.get(&(block, role)).ok_or(StepError::MissingWeight { block, role })
    }

    /// The state of a parameter, if it is trained.
    pub fn find(&self, block: BlockId, role: Role) -> Option<&OptimizerState> {
        self.slots.get(&(block, role)).map(|slot| &slot.state)
    }

    /// The state of a parameter.
    pub fn state(&self, block: BlockId, role: Role) -> Result<&OptimizerState, StepError> {
        self.slot(block, role).map(|slot| &slot.state)
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
        for p in parameters {
            self.update(device, p, weights.get(p.role)?, gradients.get(p.block, p.role)?, update)?;
        }
        Ok(())
    }

    /// Updates one parameter from its gradient.
    pub fn update<D: Device>(
        &self,
        device: &D,
        parameter: &Parameter,
        weight: &Tensor,
        grad: &Tensor,
        update: Update,
    ) -> Result<(), StepError> {
        let Slot { state, lr_scale, weight_decay } = self.slot(parameter.block, parameter.role)?;
        let own_seed = mix(self.seed, parameter_number(parameter.block, parameter.role));
        let job = Job {
            device,
            parameter,
            weight,
            grad,
            state,
            lr: update.lr * lr_scale,
            weight_decay: *weight_decay,
            grad_scale: update.grad_scale as f32,
            step: update.step,
            own_seed,
        };
        match self.kind {
            OptimizerKind::AdamW(adam) | OptimizerKind::AdamWBf16(adam) => adamw::update(&job, adam),
            OptimizerKind::AdamW8bit(adam, _) => eight_bit::update_adamw(&job, adam),
            OptimizerKind::AdamMini(adam) => adam_mini::update(&job, adam),
            OptimizerKind::Lion(numbers) => lion::update(&job, numbers),
            OptimizerKind::Lion8bit(numbers, _) => eight_bit::update_lion(&job, numbers),
            OptimizerKind::Adafactor(s) | OptimizerKind::AdaLomo(s) => adafactor::update(&job, &s),
            OptimizerKind::Sgd(s) => sgd::update(&job, &s),
            OptimizerKind::GaLore(s) => galore::update(&job, &s),
            OptimizerKind::Apollo(s, channels) => apollo::update(&job, &s, channels),
        }
    }
}

/// One parameter's step: what a rule is given.
struct Job<'a, D: Device> {
    device: &'a D,
    parameter: &'a Parameter,
    weight: &'a Tensor,
    grad: &'a Tensor,
    state: &'a OptimizerState,
    lr: f64,
    weight_decay: f64,
    grad_scale: f32,
    /// 1-based.
    step: u64,
    /// Of the parameter, the same at every step.
    own_seed: u64,
}

impl<'a, D: Device> Job<'a, D> {
    fn find(&self, kind: StateKind) -> Option<&'a Tensor> {
        self.state.find(kind)
    }

    /// A state that the rule has allocated.
    fn state(&self, kind: StateKind) -> Result<&'a Tensor, StepError> {
        self.find(kind).ok_or(self.missing())
    }

    fn missing(&self) -> StepError {
        StepError::MissingWeight { block: self.parameter.block, role: self.parameter.role }
    }

    /// Random numbers of this step.
    fn seed(&self) -> u64 {
        mix(self.own_seed, self.step)
    }

    /// Updates the weights by a rule.
    fn run(&self, rule: Rule<'_>) -> Result<(), StepError> {
        Ok(self.device.run(Op::Update(plimsoll_device::Update {
            param: self.weight,
            master: self.state.master(),
            grad: self.grad,
            grad_scale: self.grad_scale,
            rounding: Rounding::Stochastic { seed: self.seed(), first: 0 },
            rule,
        }))?)
    }
}

/// Learning rate and decay with which a rule that decays weights before its step does what `lr` and `weight_decay`
/// would if they decayed after it: (p - lr u)(1 - lr w) = p (1 - lr' w') - lr' u.
fn decay_after_step(lr: f64, weight_decay: f64) -> (f64, f64) {
    let shorter = lr * (1.0 - lr * weight_decay);
    (shorter, if shorter == 0.0 { 0.0 } else { lr * weight_decay / shorter })
}
