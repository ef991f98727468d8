//! A dense model as a mixture of experts (Sparse Upcycling, Komatsuzaki et al. 2022): each expert of a layer begins as a copy of the
//! layer's feed-forward part, and its router at random. A token's weights add up to 1, so that at first the mixture computes what the
//! dense model does.

use std::ops::Range;

use plimsoll_device::DType;

use crate::convert::ConversionError;
use crate::init;
use crate::parameters::{Parameter, Role};
use crate::source::{ModelError, WeightSource};
use crate::spec::{ExpertsSpec, ModelSpec, RouterSpec, Scoring, SpecError};
use crate::transcode::RowSource;

/// Experts of a token, where there are as many.
const PER_TOKEN: u64 = 2;

/// A model that cannot become a mixture.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UpcycleError {
    /// Its family has no mixtures.
    #[error(
        "{model}: a {architecture:?} model of this shape has no family of mixtures that it could become; llama and mistral without biases, and qwen3, have"
    )]
    Family {
        /// The model.
        model: String,
        /// Its family.
        architecture: String,
    },
    /// The mixture cannot be.
    #[error(transparent)]
    Spec(#[from] SpecError),
}

/// The weights of a mixture, from those of a dense model.
#[derive(Debug)]
pub struct Upcycled<'a> {
    spec: ModelSpec,
    dense: &'a ModelSpec,
    base: &'a WeightSource,
    seed: u64,
}

impl<'a> Upcycled<'a> {
    /// A mixture of `experts` copies of the feed-forward parts of `base`, which is a model of the shape `dense`.
    ///
    /// # Errors
    /// The model is a mixture already, or its family has none.
    pub fn new(
        dense: &'a ModelSpec,
        base: &'a WeightSource,
        experts: u64,
        seed: u64,
    ) -> Result<Upcycled<'a>, UpcycleError> {
        let family = match dense.architecture.as_str() {
            "llama" | "mistral" if !dense.mlp.bias && !dense.attention.qkv_bias => "mixtral",
            "qwen3" => "qwen3_moe",
            _ => {
                let (model, architecture) = (dense.name.clone(), dense.architecture.clone());
                return Err(UpcycleError::Family { model, architecture });
            }
        };
        let experts = ExpertsSpec {
            count: experts,
            per_token: PER_TOKEN.min(experts),
            intermediate_size: dense.mlp.intermediate_size,
            shared: None,
            zero_computation: None,
            router: RouterSpec {
                scoring: Scoring::Softmax,
                normalise: true,
                scale: 1.0,
                groups: None,
                correction: false,
                bias: false,
                balance_loss: 0.0,
            },
            layers: vec![true; dense.num_layers as usize],
            stacked_files: false,
        };
        let spec = ModelSpec { architecture: family.to_owned(), experts: Some(experts), ..dense.clone() };
        spec.check()?;
        Ok(Upcycled { spec, dense, base, seed })
    }

    /// The mixture's shape.
    pub fn spec(&self) -> &ModelSpec {
        &self.spec
    }
}

impl RowSource for Upcycled<'_> {
    fn rows(&self, parameter: &Parameter, rows: Range<u64>, out: &mut [f32]) -> Result<(), ModelError> {
        if parameter.role == Role::Router {
            let fail = |source: ConversionError| self.base.conversion(parameter, DType::F32, source);
            let bytes = bytemuck::cast_slice_mut(out);
            return init::fill(parameter, rows, &self.spec, self.seed, DType::F32, bytes).map_err(fail);
        }
        let copied = self.dense.block_parameters(parameter.block);
        let Some(one) = copied.iter().find(|p| p.role == parameter.role && parameter.is_of_experts()) else {
            return self.base.read_rows(parameter, rows, out);
        };
        let (each, columns) = (one.rows().max(1), one.columns());
        let (mut at, mut out) = (rows.start, out);
        while at < rows.end {
            let own = at % each;
            let count = (each - own).min(rows.end - at);
            let Some((now, rest)) = out.split_at_mut_checked((count * columns) as usize) else { break };
            self.base.read_rows(one, own..own + count, now)?;
            (at, out) = (at + count, rest);
        }
        Ok(())
    }
}
