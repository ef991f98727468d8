//! A type for each group of a model's weights: experts in 4 bits, attention in 8. What a format or a computation can hold is left to
//! those who write or compute.

use plimsoll_device::DType;

use crate::parameters::{Parameter, ParameterGroup, Role};
use crate::spec::ModelSpec;

/// A group of matrices that can have a type of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightGroup {
    /// Tokens to vectors.
    Embedding,
    /// The linears of attention.
    Attention,
    /// Those of dense feed-forward parts.
    Mlp,
    /// Those of experts that tokens are sent to.
    Experts,
    /// Those of experts that every token goes to.
    SharedExperts,
    /// What sends tokens to experts.
    Router,
    /// Vectors to logits, where that is not the embedding again.
    Head,
}

impl WeightGroup {
    /// All of them.
    pub const ALL: [WeightGroup; 7] = [
        WeightGroup::Embedding,
        WeightGroup::Attention,
        WeightGroup::Mlp,
        WeightGroup::Experts,
        WeightGroup::SharedExperts,
        WeightGroup::Router,
        WeightGroup::Head,
    ];

    /// Those of a block's linears.
    pub const LINEARS: [WeightGroup; 4] =
        [WeightGroup::Attention, WeightGroup::Mlp, WeightGroup::Experts, WeightGroup::SharedExperts];

    /// As users write it.
    pub fn name(self) -> &'static str {
        match self {
            WeightGroup::Embedding => "embedding",
            WeightGroup::Attention => "attention",
            WeightGroup::Mlp => "mlp",
            WeightGroup::Experts => "experts",
            WeightGroup::SharedExperts => "shared_experts",
            WeightGroup::Router => "router",
            WeightGroup::Head => "head",
        }
    }

    /// The group of that name.
    pub fn named(name: &str) -> Option<WeightGroup> {
        WeightGroup::ALL.into_iter().find(|group| group.name() == name)
    }

    /// A parameter's group; norms and adapters have none.
    pub fn of(parameter: &Parameter) -> Option<WeightGroup> {
        match parameter.group() {
            ParameterGroup::Embedding => Some(WeightGroup::Embedding),
            ParameterGroup::Attention => Some(WeightGroup::Attention),
            ParameterGroup::FeedForward => match parameter.role {
                Role::SharedGateProj | Role::SharedUpProj | Role::SharedDownProj => {
                    Some(WeightGroup::SharedExperts)
                }
                _ => Some(WeightGroup::Mlp),
            },
            ParameterGroup::Experts => Some(WeightGroup::Experts),
            ParameterGroup::Routers => Some(WeightGroup::Router),
            ParameterGroup::Head => Some(WeightGroup::Head),
            ParameterGroup::Norms | ParameterGroup::Adapters => None,
        }
    }

    /// The groups that a model has.
    pub fn in_model(spec: &ModelSpec) -> Vec<WeightGroup> {
        let found: Vec<WeightGroup> = spec.parameters().iter().filter_map(WeightGroup::of).collect();
        WeightGroup::ALL.into_iter().filter(|group| found.contains(group)).collect()
    }
}

/// A type for some groups, and one for all others where there is one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TypesByGroup {
    rest: Option<DType>,
    named: [Option<DType>; WeightGroup::ALL.len()],
}

impl From<DType> for TypesByGroup {
    fn from(dtype: DType) -> TypesByGroup {
        TypesByGroup { rest: Some(dtype), ..TypesByGroup::default() }
    }
}

impl TypesByGroup {
    /// The same with another type for a group.
    pub fn with(mut self, group: WeightGroup, dtype: DType) -> TypesByGroup {
        if let Some(named) = self.named.get_mut(group as usize) {
            *named = Some(dtype);
        }
        self
    }

    /// The same with a type for the groups that are not named.
    pub fn with_rest(self, dtype: DType) -> TypesByGroup {
        TypesByGroup { rest: Some(dtype), ..self }
    }

    /// The type of the groups that are not named.
    pub fn rest(&self) -> Option<DType> {
        self.rest
    }

    /// The groups that have a type of their own.
    pub fn named(&self) -> impl Iterator<Item = (WeightGroup, DType)> {
        WeightGroup::ALL.into_iter().zip(self.named).filter_map(|(group, dtype)| Some((group, dtype?)))
    }

    /// The type of a group.
    pub fn of_group(&self, group: WeightGroup) -> Option<DType> {
        self.named.get(group as usize).copied().flatten().or(self.rest)
    }

    /// The type of a parameter, where one was said.
    pub fn of(&self, parameter: &Parameter) -> Option<DType> {
        WeightGroup::of(parameter).map_or(self.rest, |group| self.of_group(group))
    }
}
