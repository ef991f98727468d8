//! Low-rank adapters (LoRA, Hu et al. 2021; DoRA, Liu et al. 2024) as PEFT's folders: `adapter_config.json` and
//! `adapter_model.safetensors`, in and out, and what they add to a model's weights.
//!
//! Keys: `base_model.model.MODULE.lora_A.weight [r, in]`, `.lora_B.weight [out, r]`, `.lora_embedding_A [r, vocabulary]`,
//! `.lora_embedding_B [hidden, r]`, `.lora_magnitude_vector [out]`; trained biases and whole modules under their own names. Each
//! matrix of each expert is a module, or a layer's stacks of them are two: `experts`.

mod config;
mod error;
mod experts;
mod layout;
mod merged;
mod pissa;
mod set;
mod svd;

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

pub use config::{AdapterBias, AdapterConfig, AdapterStart, TargetModules};
pub use error::AdapterError;
pub use layout::{AdaptedModule, AdapterLayout};
pub use merged::{MergeSet, Merged};
pub use pissa::{FirstValues, ResidualError};
pub use set::AdapterSet;

use experts::Stacks;
use plimsoll_device::DType;

use crate::convert::convert;
use crate::layout::{StoredTensor, hf_block};
use crate::parameters::{BlockId, Parameter};
use crate::safetensors::{NewTensor, SafetensorsFile, StoredDType, write_tensors};
use crate::source::RowOrder;
use crate::spec::ModelSpec;

/// The configuration's file.
pub const ADAPTER_CONFIG_NAME: &str = "adapter_config.json";
/// The weights' file.
pub const ADAPTER_WEIGHTS_NAME: &str = "adapter_model.safetensors";
/// The head's tensor.
const HEAD: &str = "lm_head.weight";
/// What every key begins with.
const PREFIX: &str = "base_model.model.";

/// A matrix in f32, row by row.
#[derive(Clone, Debug, PartialEq)]
pub struct Matrix {
    /// Rows.
    pub rows: usize,
    /// Width.
    pub columns: usize,
    /// The values.
    pub values: Vec<f32>,
}

impl Matrix {
    /// One row.
    pub fn row(&self, index: usize) -> &[f32] {
        self.values.get(index * self.columns..(index + 1) * self.columns).unwrap_or_default()
    }
}

/// What an adapter adds to one module: `scale * B A`.
#[derive(Clone, Debug, PartialEq)]
pub struct LowRank {
    /// `[r, in]`; of an embedding `[r, vocabulary]`.
    pub a: Matrix,
    /// `[out, r]`; of an embedding `[hidden, r]`.
    pub b: Matrix,
    /// The factor on the product.
    pub scale: f32,
    /// DoRA's lengths of the rows of the sum.
    pub magnitudes: Option<Vec<f32>>,
    /// Whether it is an embedding's, where the product is transposed.
    pub embedding: bool,
}

/// An adapter that was opened, and fits the model that it was opened for.
#[derive(Clone, Debug)]
pub struct Adapter {
    config: AdapterConfig,
    /// By the name of the base model's tensor.
    low_rank: BTreeMap<String, LowRank>,
    /// Tensors that take the place of the base model's, by their name.
    replaced: BTreeMap<String, Matrix>,
}

impl Adapter {
    /// Reads the adapter in `folder` for a model of that shape.
    ///
    /// # Errors
    /// A file is missing or damaged; a rank is 0, a value NaN or infinite; a tensor's name or shape is not the model's.
    pub fn open(folder: &Path, spec: &ModelSpec) -> Result<Adapter, AdapterError> {
        let config = AdapterConfig::read(&folder.join(ADAPTER_CONFIG_NAME))?;
        let path = folder.join(ADAPTER_WEIGHTS_NAME);
        let file = SafetensorsFile::open(&path)?;
        let fail = |tensor: &str, reason: String| AdapterError::Tensor {
            path: path.clone(),
            tensor: tensor.to_owned(),
            reason,
        };
        let shapes: BTreeMap<String, Vec<u64>> = base_tensors(spec);
        let mut stacks = Stacks::of(spec);
        let mut parts: BTreeMap<String, BTreeMap<&'static str, Matrix>> = BTreeMap::new();
        let mut replaced = BTreeMap::new();
        // Copies of the base's tables that the library writes beside their adapters.
        let mut copies: Vec<String> = Vec::new();
        for tensor in file.tensors() {
            let bytes = file.bytes(&tensor.name).unwrap_or_default();
            let matrix = read_matrix(&tensor.shape, tensor.dtype, bytes)
                .map_err(|reason| fail(&tensor.name, reason))?;
            file.release(tensor);
            let Some(name) = tensor.name.strip_prefix(PREFIX) else {
                return Err(fail(&tensor.name, format!("its name does not begin with {PREFIX}")));
            };
            let Some(matrix) = stacks.take(name, matrix) else { continue };
            let renamed = experts::renamed(spec, name);
            let name = renamed.as_str();
            let split =
                config::SUFFIXES.iter().find_map(|suffix| Some((name.strip_suffix(suffix)?, *suffix)));
            if let Some((module, suffix)) = split {
                let weight = format!("{module}.weight");
                if !shapes.contains_key(&weight) {
                    let reason = format!("the model has no {weight}; the adapter belongs to another one");
                    return Err(fail(&tensor.name, reason));
                }
                parts.entry(weight).or_default().insert(suffix, matrix);
                continue;
            }
            // Whole modules and biases; some versions of the library keep its wrapper in their names.
            let plain = name.replace(".modules_to_save.default.", ".").replace(".base_layer.", ".");
            let plain = plain.replace(".modules_to_save.", ".");
            let Some(expected) = shapes.get(&plain) else {
                let reason = format!("the model has no {plain}; the adapter belongs to another one");
                return Err(fail(&tensor.name, reason));
            };
            if *expected != tensor.shape {
                let reason = format!("is {:?}; the model's is {expected:?}", tensor.shape);
                return Err(fail(&tensor.name, reason));
            }
            if name.contains(".base_layer.") {
                copies.push(plain.clone());
            }
            replaced.insert(plain, matrix);
        }
        let mut low_rank = BTreeMap::new();
        for (weight, parts) in parts {
            let found =
                low_rank_of(&config, &weight, parts, &shapes).map_err(|reason| fail(&weight, reason))?;
            low_rank.insert(weight, found);
        }
        low_rank.extend(stacks.split(&config).map_err(|(tensor, reason)| fail(&tensor, reason))?);
        if spec.tie_word_embeddings {
            // An adapter that trained the embedding and the head as one has both: one matrix, as in the model.
            let embedding = spec.block_parameters(BlockId::Embedding).first().map(|p| spec.hf_tensor_name(p));
            let embedding = embedding.unwrap_or_default();
            let own = replaced.get(&embedding).filter(|_| !copies.contains(&embedding));
            if own != replaced.get(HEAD) || low_rank.contains_key(HEAD) {
                let reason = "it is for the embedding or the head alone, and the model has one matrix for both, which the library keeps apart here; write a model with both by `plimsoll merge`, and use that".to_owned();
                return Err(fail(if own.is_some() { &embedding } else { HEAD }, reason));
            }
            replaced.remove(HEAD);
        }
        if low_rank.is_empty() && replaced.is_empty() {
            return Err(fail("", "the file holds no adapter".to_owned()));
        }
        Ok(Adapter { config, low_rank, replaced })
    }

    /// The configuration.
    pub fn config(&self) -> &AdapterConfig {
        &self.config
    }

    /// What is added to the tensors of the base model, by their names.
    pub fn low_rank(&self) -> &BTreeMap<String, LowRank> {
        &self.low_rank
    }

    /// The tensors that take the place of the base model's, by their names.
    pub fn replaced(&self) -> &BTreeMap<String, Matrix> {
        &self.replaced
    }

    /// Writes the folder as PEFT does, values in f32.
    pub fn save(&self, folder: &Path) -> Result<(), AdapterError> {
        std::fs::create_dir_all(folder)
            .map_err(|source| AdapterError::Io { path: folder.to_owned(), source })?;
        let mut tensors: Vec<(NewTensor, &[f32])> = Vec::new();
        let mut add = |name: String, shape: Vec<u64>, values| {
            tensors.push((NewTensor { name, dtype: StoredDType::F32, shape }, values));
        };
        for (weight, low) in &self.low_rank {
            let module = weight.strip_suffix(".weight").unwrap_or(weight);
            let [a, b] = if low.embedding {
                [".lora_embedding_A", ".lora_embedding_B"]
            } else {
                [".lora_A.weight", ".lora_B.weight"]
            };
            for (suffix, matrix) in [(a, &low.a), (b, &low.b)] {
                let shape = vec![matrix.rows as u64, matrix.columns as u64];
                add(format!("{PREFIX}{module}{suffix}"), shape, matrix.values.as_slice());
            }
            if let Some(magnitudes) = &low.magnitudes {
                let name = format!("{PREFIX}{module}.lora_magnitude_vector");
                add(name, vec![magnitudes.len() as u64], magnitudes.as_slice());
            }
        }
        for (name, matrix) in &self.replaced {
            let shape = if matrix.columns == 1 {
                vec![matrix.rows as u64]
            } else {
                vec![matrix.rows as u64, matrix.columns as u64]
            };
            let has_adapter = |module: &str| self.low_rank.contains_key(&format!("{module}.weight"));
            add(name_of_base(name, has_adapter), shape, matrix.values.as_slice());
        }
        let headers: Vec<NewTensor> = tensors.iter().map(|(tensor, _)| tensor.clone()).collect();
        let mut next = tensors.iter();
        write_tensors(
            &folder.join(ADAPTER_WEIGHTS_NAME),
            &[("format", "pt")],
            &headers,
            |_, out| match next.next() {
                Some((_, values)) => values.iter().try_for_each(|x| out.write_all(&x.to_le_bytes())),
                None => Ok(()),
            },
        )?;
        self.config.write(&folder.join(ADAPTER_CONFIG_NAME))
    }
}

/// The name in an adapter's file of a tensor of the base: a module that has an adapter has its layer of the base, and that one's bias and a
/// table's copy, within it.
fn name_of_base(name: &str, has_adapter: impl Fn(&str) -> bool) -> String {
    let within = |kind: &str| {
        let module = name.strip_suffix(kind).filter(|module| has_adapter(module))?;
        Some(format!("{PREFIX}{module}.base_layer{kind}"))
    };
    within(".weight").or_else(|| within(".bias")).unwrap_or_else(|| format!("{PREFIX}{name}"))
}

/// What a checkpoint stores of a block with a tensor for each matrix of each expert: adapters have the names of these.
fn linears(spec: &ModelSpec, block: BlockId) -> Vec<StoredTensor> {
    match &spec.experts {
        Some(experts) if experts.stacked_files => hf_block(&spec.with_single_experts(), block),
        _ => hf_block(spec, block),
    }
}

/// The base model's tensors and their shapes, a tied head included.
fn base_tensors(spec: &ModelSpec) -> BTreeMap<String, Vec<u64>> {
    let spec = &spec.with_single_experts();
    let stored = spec.blocks().flat_map(|block| hf_block(spec, block));
    let shape = |tensor: &StoredTensor| match tensor.shape().as_slice() {
        // The bias of a single expert is a row of its stack.
        [1, columns] if tensor.name.ends_with(".bias") => vec![*columns],
        shape => shape.to_vec(),
    };
    let mut shapes: BTreeMap<String, Vec<u64>> =
        stored.map(|tensor| (tensor.name.clone(), shape(&tensor))).collect();
    if spec.tie_word_embeddings {
        shapes.entry(HEAD.to_owned()).or_insert_with(|| vec![spec.vocab_size, spec.hidden_size]);
    }
    shapes
}

fn read_matrix(shape: &[u64], stored: StoredDType, bytes: &[u8]) -> Result<Matrix, String> {
    let dtype = stored.device().filter(|dtype| dtype.is_float());
    let dtype = dtype.ok_or_else(|| format!("is stored as {stored}; F32, BF16 and F16 are read"))?;
    let (rows, columns) = match shape {
        [rows] => (*rows as usize, 1),
        [rows, columns] => (*rows as usize, *columns as usize),
        _ => return Err(format!("has shape {shape:?}; matrices and vectors are read")),
    };
    let mut values = vec![0.0f32; bytes.len() / dtype.block_bytes() as usize];
    convert(dtype, bytes, DType::F32, bytemuck::cast_slice_mut(&mut values)).map_err(|e| e.to_string())?;
    if let Some(place) = values.iter().position(|x| !x.is_finite()) {
        return Err(format!(
            "element {place} is {}; the adapter is damaged or its training diverged",
            values[place]
        ));
    }
    Ok(Matrix { rows, columns, values })
}

/// The parts of one module, checked against each other and the base tensor.
fn low_rank_of(
    config: &AdapterConfig,
    weight: &str,
    mut parts: BTreeMap<&'static str, Matrix>,
    shapes: &BTreeMap<String, Vec<u64>>,
) -> Result<LowRank, String> {
    let embedding = parts.contains_key(".lora_embedding_A") || parts.contains_key(".lora_embedding_B");
    let [a_name, b_name] = if embedding {
        [".lora_embedding_A", ".lora_embedding_B"]
    } else {
        [".lora_A.weight", ".lora_B.weight"]
    };
    let mut take = |name: &str| parts.remove(name).ok_or_else(|| format!("the adapter has no {name} for it"));
    let (a, b) = (take(a_name)?, take(b_name)?);
    let magnitudes = parts.remove(".lora_magnitude_vector").or(parts.remove(".lora_magnitude_vector.weight"));
    if let Some(other) = parts.keys().next() {
        return Err(format!("{other} beside {a_name} is not supported"));
    }
    let rank = a.rows;
    if rank == 0 || b.columns != rank {
        return Err(format!("A has rank {rank}, B {}; both must be the same and not 0", b.columns));
    }
    let base = shapes.get(weight).map(Vec::as_slice).unwrap_or_default();
    let [mut out, mut inp] = <[u64; 2]>::try_from(base).map_err(|_| "it is no matrix".to_owned())?;
    // Tables hold a row for each token, matrices of GPT-2 a row for each input.
    if embedding || config.fan_in_fan_out {
        (out, inp) = (inp, out);
    }
    if [a.columns as u64, b.rows as u64] != [inp, out] {
        return Err(format!(
            "A is [{rank}, {}] and B [{}, {rank}], but the model's is [{out}, {inp}]; the adapter belongs to another one",
            a.columns, b.rows
        ));
    }
    let magnitudes = magnitudes.map(|matrix| matrix.values);
    if let Some(magnitudes) = &magnitudes
        && (magnitudes.len() as u64 != out || embedding)
    {
        return Err(format!("its magnitude vector has {} elements, not {out}", magnitudes.len()));
    }
    if config.use_dora && magnitudes.is_none() {
        return Err("use_dora is true, but it has no magnitude vector".to_owned());
    }
    let module = weight.strip_suffix(".weight").unwrap_or(weight);
    let stated = config.rank_of(module).map_err(|error| error.to_string())?;
    if stated != rank {
        return Err(format!("A has rank {rank}, and the configuration says r is {stated} for it"));
    }
    let scale = config.scale(module, rank).map_err(|error| error.to_string())?;
    if !scale.is_finite() {
        return Err(format!("its factor, of lora_alpha and r, is {scale}"));
    }
    Ok(LowRank { a, b, scale, magnitudes, embedding })
}

/// A tensor with rows of a parameter.
struct Place {
    tensor: String,
    /// The parameter's rows in it.
    rows: Range<u64>,
    /// The tensor's row that is the first of these.
    first: u64,
    /// Elements of the tensor before it.
    elements: u64,
    /// Whether the tensor has the rows as columns.
    transposed: bool,
}

/// The tensors of a parameter: several of a stack.
fn stored_places(spec: &ModelSpec, parameter: &Parameter) -> Vec<Place> {
    let mut places = Vec::new();
    for tensor in linears(spec, parameter.block) {
        let (mut first, mut elements) = (0, 0);
        let transposed = matches!(tensor.rows, RowOrder::Transposed { .. });
        for part in &tensor.parts {
            if part.role() == parameter.role {
                let (tensor, rows) = (tensor.name.clone(), part.rows.clone());
                places.push(Place { tensor, rows, first, elements, transposed });
            }
            first += part.count();
            elements += part.elements();
        }
    }
    places
}

/// The stored tensor of a parameter, and the row of it that is the parameter's first; the first one of a stack.
fn stored_place(spec: &ModelSpec, parameter: &Parameter) -> Option<(String, u64)> {
    stored_places(spec, parameter).into_iter().next().map(|place| (place.tensor, place.first))
}
