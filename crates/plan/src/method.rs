//! Which weights are trained and how the others are stored: from `training.method`, `training.lora` and
//! `training.quantization` to what the step is told.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use plimsoll_device::DType;
use plimsoll_model::{
    AdapterConfig, AdapterError, AdapterLayout, BlockId, ModelSpec, Parameter, Role, StoredWeight,
    WeightSource,
};
use plimsoll_step::{Adapters, StepError, TrainingMethod};

use crate::config::{Method, Quantization, RawConfig};

/// The layouts of a model's adapters, for whoever asks for several methods: each is made once. A large mixture of experts has tens of
/// thousands of matrices, whose names are all looked at.
#[derive(Debug, Default)]
pub(crate) struct Layouts(Mutex<Vec<(AdapterConfig, AdapterLayout)>>);

impl Layouts {
    fn of(&self, config: AdapterConfig, spec: &ModelSpec) -> Result<AdapterLayout, StepError> {
        // Whoever wants the same meanwhile waits for it. Layouts are added whole.
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, layout)) = known.iter().find(|(of, _)| *of == config) {
            return Ok(layout.clone());
        }
        let layout = AdapterLayout::new(&config, spec).map_err(Box::new)?;
        known.push((config, layout.clone()));
        Ok(layout)
    }
}

/// What `config` trains of a model; `stored` is what its files hold, where they are at hand.
pub(crate) fn training_method(
    config: &RawConfig,
    spec: &ModelSpec,
    stored: Option<&WeightSource>,
) -> Result<TrainingMethod, StepError> {
    method_among(&Layouts::default(), config, spec, stored)
}

/// The same, with layouts of this model that are known.
pub(crate) fn method_among(
    layouts: &Layouts,
    config: &RawConfig,
    spec: &ModelSpec,
    stored: Option<&WeightSource>,
) -> Result<TrainingMethod, StepError> {
    let training = &config.training;
    if training.method() == Method::Full {
        return Ok(TrainingMethod::Full);
    }
    let layout = layouts.of(training.lora.adapter_config(config.model.path.clone()), spec)?;
    let in_file = |p: &Parameter| -> Option<DType> {
        let dtype = stored?.inference_dtype(p, DType::F32);
        dtype.is_block().then_some(dtype)
    };
    let parameters = spec.parameters();
    let quantization = training.quantization().set().unwrap_or_else(|| {
        let packed = parameters.iter().any(|p| p.role.is_block_matrix() && in_file(p).is_some());
        match training.method() {
            Method::Qlora if !packed => Quantization::As(DType::Nf4),
            _ => Quantization::Stored,
        }
    });
    let weight_type = |p: &Parameter| match quantization {
        Quantization::None => None,
        Quantization::Stored => in_file(p),
        Quantization::As(dtype) => quantized_as(p, dtype).or_else(|| in_file(p)),
    };
    if layout.config().start.changes_base() {
        let kept = |p: &&Parameter| layout.adapts(p) && in_file(p).is_some() && weight_type(p) == in_file(p);
        if let Some(p) = parameters.iter().find(kept) {
            let reason = format!(
                "init_lora_weights: pissa changes the frozen weights, and {} is kept in the blocks that the file has it in; set training.quantization to nf4, or to none, which stores what is left of them anew, or init_lora_weights to kaiming",
                p.name
            );
            return Err(StepError::Adapter(Box::new(AdapterError::Layout(reason))));
        }
    }
    let frozen = parameters.iter().filter(|p| !layout.trains_base(p.block, p.role));
    let weight_types: HashMap<_, _> =
        frozen.filter_map(|p| Some(((p.block, p.role), weight_type(p)?))).collect();
    let in_files = match stored {
        Some(stored) => {
            parameters.iter().filter_map(|p| in_files(p, stored, &layout, &weight_types)).collect()
        }
        None => HashMap::new(),
    };
    let dropout = training.lora.dropout() as f32;
    Ok(TrainingMethod::Adapters(Arc::new(Adapters { layout, dropout, weight_types, in_files })))
}

/// Where a file holds a frozen weight as it may be computed with.
fn in_files(
    p: &Parameter,
    stored: &WeightSource,
    layout: &AdapterLayout,
    weight_types: &HashMap<(BlockId, Role), DType>,
) -> Option<((BlockId, Role), StoredWeight)> {
    let key = (p.block, p.role);
    // Adapters that begin with a part of the weights leave the rest of them, which no file holds.
    let changed = layout.config().start.changes_base() && layout.adapts(p);
    if changed || layout.trains_base(p.block, p.role) {
        return None;
    }
    let usual = [DType::Bf16, DType::F32, DType::F16];
    let candidates = match weight_types.get(&key) {
        Some(dtype) => vec![*dtype],
        None => usual.to_vec(),
    };
    candidates.into_iter().find_map(|dtype| Some((key, stored.stored_as(p, dtype)?)))
}

/// What the matrix of a block's linear is stored as where it is to be quantised: the type, or the next wider one whose
/// blocks its rows are whole numbers of. Of a stack, whose matrices are read one by one, each is whole runs of it. `None`: it is no such
/// matrix, or too small.
pub fn quantized_as(p: &Parameter, dtype: DType) -> Option<DType> {
    if !p.role.is_block_matrix() {
        return None;
    }
    let columns = p.shape.last().copied().unwrap_or(1);
    let wider = match dtype {
        DType::Q4K => Some(DType::Q5_0),
        DType::Q6K => Some(DType::Q8_0),
        // Factors of their own for each block, and not factors of these for many.
        DType::Nf4 => Some(DType::Nf4F32),
        DType::Fp4 => Some(DType::Fp4F32),
        _ => None,
    };
    let matrix = p.elements() / p.experts();
    let is_whole = |dtype: &DType| {
        let apart = !p.is_of_experts() || matrix.is_multiple_of(dtype.run_elements());
        columns.is_multiple_of(dtype.row_multiple()) && apart
    };
    [Some(dtype), wider].into_iter().flatten().find(is_whole)
}
