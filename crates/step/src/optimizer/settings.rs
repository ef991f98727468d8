//! Which optimizer, with which numbers, on which parameters. Numbers that change from step to step are not here.

use glob::Pattern;
use plimsoll_model::{Parameter, ParameterKind};

/// The optimizer of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct OptimizerSettings {
    /// The rule.
    pub kind: OptimizerKind,
    /// Weight decay of matrices and embeddings.
    pub weight_decay: f64,
    /// Whether norms and biases decay too.
    pub decay_norms_and_biases: bool,
    /// Parameters with numbers of their own. Of several groups that a parameter is in, the first counts.
    pub groups: Vec<ParameterGroup>,
}

/// Parameters, by their names, with numbers of their own.
#[derive(Clone, Debug, PartialEq)]
pub struct ParameterGroup {
    /// Which names: `*` stands for any text, `?` for a character.
    pub pattern: Pattern,
    /// Factor on the learning rate.
    pub lr_scale: f64,
    /// Weight decay; what the settings say of the parameter where `None`.
    pub weight_decay: Option<f64>,
}

/// Numbers of Adam.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamSettings {
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub epsilon: f64,
}

/// Numbers of Lion.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LionSettings {
    /// Share of the momentum in the sign that is taken.
    pub beta1: f64,
    /// Decay of the momentum.
    pub beta2: f64,
}

/// Which states of an 8-bit optimizer stay in f32. Those of less than [`EightBit::LEAST_ELEMENTS`] always do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EightBit {
    /// Whether states of embeddings are kept in 8 bits too.
    pub embeddings: bool,
}

impl EightBit {
    /// Smaller parameters have f32 states (`min_8bit_size` of bitsandbytes).
    pub const LEAST_ELEMENTS: u64 = 4096;

    /// Whether the parameter's states are kept in 8 bits.
    pub(super) fn holds(self, p: &Parameter) -> bool {
        p.elements() >= Self::LEAST_ELEMENTS && (self.embeddings || p.role.kind() != ParameterKind::Embedding)
    }
}

/// Numbers of SGD.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SgdSettings {
    /// Decay of the momentum buffer; without one at 0.
    pub momentum: f64,
    /// Share of the gradient that the buffer does not get.
    pub dampening: f64,
    /// Whether the step looks ahead by the momentum.
    pub nesterov: bool,
}

/// Numbers of Adafactor and AdaLomo.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdafactorSettings {
    /// Added to the squared gradient.
    pub epsilon: f64,
    /// With a value, the learning rate is multiplied by the parameter's root mean square, at least this.
    pub scale_by_parameter: Option<f64>,
    /// The update's root mean square is at most this.
    pub clip_threshold: f64,
    /// The second moment's decay at step t is 1 - t^this.
    pub decay_rate: f64,
    /// Decay of a momentum over updates, if there is one.
    pub beta1: Option<f64>,
}

/// Numbers of GaLore and APOLLO.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LowRankSettings {
    /// Of the projected gradient. Parameters without as many rows and columns have AdamW's states.
    pub rank: u64,
    /// Steps from one projection to the next.
    pub update_proj_gap: u64,
    /// Factor on the update: GaLore's alpha; of APOLLO's its root.
    pub scale: f64,
    /// Adam in the projected space.
    pub adam: AdamSettings,
}

/// An optimizer's rule with its numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum OptimizerKind {
    /// AdamW (Loshchilov and Hutter 2019): f32 states.
    AdamW(AdamSettings),
    /// AdamW with bf16 states, rounded stochastically.
    AdamWBf16(AdamSettings),
    /// AdamW with block-wise 8-bit states (Dettmers et al. 2022).
    AdamW8bit(AdamSettings, EightBit),
    /// Adam-mini (Zhang et al. 2024).
    AdamMini(AdamSettings),
    /// Lion (Chen et al. 2023): f32 momentum.
    Lion(LionSettings),
    /// Lion with block-wise 8-bit momentum.
    Lion8bit(LionSettings, EightBit),
    /// Adafactor (Shazeer and Stern 2018).
    Adafactor(AdafactorSettings),
    /// AdaLomo (Lv et al. 2023): Adafactor's second moment, without momentum.
    AdaLomo(AdafactorSettings),
    /// SGD.
    Sgd(SgdSettings),
    /// GaLore (Zhao et al. 2024).
    GaLore(LowRankSettings),
    /// APOLLO (Zhu et al. 2024); APOLLO-Mini where `per_tensor`.
    Apollo(LowRankSettings, ApolloChannels),
}

impl OptimizerKind {
    /// Whether ranks share the rows of every parameter; else they share some parameters as a whole.
    pub fn shares_rows(&self) -> bool {
        self.is_local() && !matches!(self, OptimizerKind::AdamMini(_))
    }

    /// Whether its states are of single elements, and in no blocks.
    pub fn has_states_of_elements(&self) -> bool {
        use OptimizerKind::{AdamW, AdamWBf16, Lion, Sgd};
        matches!(self, AdamW(_) | AdamWBf16(_) | Lion(_) | Sgd(_))
    }

    /// Whether any whole blocks of rows of a parameter can be updated by themselves.
    pub(crate) fn takes_rows(&self, parameter: &Parameter) -> bool {
        match self {
            OptimizerKind::AdamMini(_) => parameter.is_table(),
            kind => kind.is_local(),
        }
    }

    /// Whether it treats every element of a table of the vocabulary, or every short run of them, by itself.
    pub(crate) fn is_local(&self) -> bool {
        match self {
            OptimizerKind::AdamW(_)
            | OptimizerKind::AdamWBf16(_)
            | OptimizerKind::AdamW8bit(..)
            | OptimizerKind::AdamMini(_)
            | OptimizerKind::Lion(_)
            | OptimizerKind::Lion8bit(..)
            | OptimizerKind::Sgd(_) => true,
            OptimizerKind::Adafactor(_)
            | OptimizerKind::AdaLomo(_)
            | OptimizerKind::GaLore(_)
            | OptimizerKind::Apollo(..) => false,
        }
    }
}

/// What APOLLO scales as one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ApolloChannels {
    /// Each row of a tall matrix, each column of a wide one.
    Channel,
    /// The whole tensor (APOLLO-Mini).
    Tensor,
}

impl Default for AdamSettings {
    fn default() -> Self {
        AdamSettings { beta1: 0.9, beta2: 0.999, epsilon: 1e-8 }
    }
}

impl Default for OptimizerSettings {
    fn default() -> Self {
        OptimizerSettings {
            kind: OptimizerKind::AdamW(AdamSettings::default()),
            weight_decay: 0.01,
            decay_norms_and_biases: false,
            groups: Vec::new(),
        }
    }
}

impl OptimizerSettings {
    /// The factor on the learning rate of a parameter, and its weight decay.
    pub(super) fn numbers_of(&self, p: &Parameter) -> (f64, f64) {
        let decays = self.decay_norms_and_biases
            || matches!(p.role.kind(), ParameterKind::Matrix | ParameterKind::Embedding);
        let decay = if decays { self.weight_decay } else { 0.0 };
        let group = self.groups.iter().find(|group| group.pattern.matches(&p.name));
        group.map_or((1.0, decay), |group| (group.lr_scale, group.weight_decay.unwrap_or(decay)))
    }
}
