//! Which tensors of a model have an adapter, and the parameters that it consists of: what a step allocates, what a
//! training run trains, and how that is written as PEFT's folder.
//!
//! An adapter belongs to a tensor as the family's checkpoints store it. Where that holds several linears (Phi-3's
//! `qkv_proj`, GPT-2's `c_attn`) they share A, which bears the first one's role, and each has its own rows of B.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::Path;

use plimsoll_device::DType;

use super::pissa::sides;
use super::{
    ADAPTER_CONFIG_NAME, ADAPTER_WEIGHTS_NAME, Adapter, AdapterBias, AdapterConfig, AdapterError,
    AdapterStart, HEAD, PREFIX, linears, name_of_base,
};
use crate::convert::{ConversionError, encode};
use crate::init;
use crate::layout::{StoredPart, StoredTensor};
use crate::parameters::{Adapted, BlockId, LoraPart, Parameter, Role};
use crate::safetensors::{NewTensor, StoredDType, write_tensors};
use crate::source::RowOrder;
use crate::spec::ModelSpec;

/// A tensor with an adapter.
#[derive(Clone, Debug, PartialEq)]
pub struct AdaptedModule {
    /// Its name without `.weight`.
    pub name: String,
    /// Its block.
    pub block: BlockId,
    /// The linears in it, in the order of their rows.
    pub parts: Vec<Adapted>,
    /// How many there are, where it stands for the same matrix of each expert of a layer; its name then leaves out the number.
    pub stack: Option<u64>,
    /// Width of the product's middle.
    pub rank: usize,
    /// The factor on the product.
    pub scale: f32,
}

impl AdaptedModule {
    /// Whether the module's adapter is a base tensor's, by that one's name.
    pub(super) fn is_for(&self, weight: &str) -> bool {
        let name = weight.strip_suffix(".weight").unwrap_or(weight);
        self.name == name || self.stack.is_some() && self.name == stack_name(name)
    }

    pub(super) fn is_embedding(&self) -> bool {
        self.parts == [Adapted::TokenEmbedding]
    }

    /// The role of A, which all parts share.
    pub fn a_role(&self) -> Option<Role> {
        self.parts.first().map(|part| Role::Lora(LoraPart::A, *part))
    }
}

/// The adapters of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct AdapterLayout {
    config: AdapterConfig,
    modules: Vec<AdaptedModule>,
    parameters: Vec<Parameter>,
    trained_base: Vec<Parameter>,
}

/// Refuses several adapters whose sum has no meaning.
pub(super) fn check_sum(adapters: &[(Adapter, f32)]) -> Result<(), AdapterError> {
    let whole =
        |a: &Adapter| !a.replaced().is_empty() || a.low_rank().values().any(|l| l.magnitudes.is_some());
    if adapters.len() > 1 && adapters.iter().any(|(adapter, _)| whole(adapter)) {
        return Err(AdapterError::Layout("adapters with DoRA's magnitudes, trained biases or whole modules cannot be added to others: use one of them alone, or merge them one after the other".into()));
    }
    Ok(())
}

impl AdapterLayout {
    /// The adapters that a configuration asks for.
    ///
    /// # Errors
    /// A target, a pattern or a module to save matches nothing: the message lists what there is.
    pub fn new(config: &AdapterConfig, spec: &ModelSpec) -> Result<AdapterLayout, AdapterError> {
        let mut config = config.clone();
        let stored: Vec<StoredTensor> = spec.blocks().flat_map(|block| linears(spec, block)).collect();
        let (mut modules, mut adapted) = (Vec::new(), Vec::new());
        for group in groups(&stored) {
            let Some((first, block, parts)) = group.first().and_then(adaptable) else { continue };
            let last = matches!(parts[..], [Adapted::TokenEmbedding | Adapted::LmHead]);
            let names: Vec<&str> = group.iter().filter_map(adaptable).map(|(name, ..)| name).collect();
            let mut wanted = Vec::new();
            for name in &names {
                if config.targets(name, last)? {
                    wanted.push((config.rank_of(name)?, config.scale(name, config.rank_of(name)?)?));
                }
            }
            let Some((rank, scale)) = wanted.first().copied() else { continue };
            let name = stack_name(first);
            if wanted.len() < names.len() || wanted.iter().any(|one| *one != (rank, scale)) {
                return Err(AdapterError::Layout(format!(
                    "{name}: the experts of a layer have adapters of one rank and factor, all of them or none; write target_modules, rank_pattern and alpha_pattern for any expert"
                )));
            }
            let stack = group.first().filter(|tensor| is_of_experts(tensor)).map(|_| group.len() as u64);
            adapted.extend(names);
            modules.push(AdaptedModule { name, block, parts, stack, rank, scale });
            config.fan_in_fan_out = matches!(group[0].rows, RowOrder::Transposed { .. });
        }
        check_targets(&config, &stored, &modules, &adapted)?;
        if config.start.changes_base() && modules.iter().any(|module| module.stack.is_some()) {
            return Err(AdapterError::Layout(
                "PiSSA of experts is not supported: leave their matrices out of target_modules, or take plain LoRA".into(),
            ));
        }
        let trained_base = trained_base(&config, spec, &stored, &modules)?;
        if config.use_dora && modules.iter().any(AdaptedModule::is_embedding) {
            return Err(AdapterError::Layout("DoRA of an embedding is not supported: leave embed_tokens out of target_modules, or train it whole by modules_to_save".into()));
        }
        if config.start.changes_base() {
            check_singular_values(spec, &modules)?;
        }
        let parameters = parameters_of(spec, &modules, config.use_dora);
        Ok(AdapterLayout { config, modules, parameters, trained_base })
    }

    /// The layout of adapters that were opened for one model, each with a weight: what each adds is added, so that
    /// their ranks stand side by side.
    ///
    /// # Errors
    /// Several of them where one has magnitudes (DoRA) or replaces tensors: their sum has no meaning.
    pub fn of_adapters(adapters: &[(Adapter, f32)], spec: &ModelSpec) -> Result<AdapterLayout, AdapterError> {
        check_sum(adapters)?;
        let mut modules = Vec::new();
        let stored: Vec<StoredTensor> = spec.blocks().flat_map(|block| linears(spec, block)).collect();
        let mut taken = 0;
        for group in groups(&stored) {
            let Some((first, block, parts)) = group.first().and_then(adaptable) else { continue };
            let rank_of = |(adapter, _): &(Adapter, f32)| {
                let of_it = group.iter().filter_map(|tensor| adapter.low_rank().get(&tensor.name));
                of_it.map(|low| low.a.rows).max().unwrap_or(0)
            };
            let has = |tensor: &StoredTensor| {
                adapters.iter().filter(|(adapter, _)| adapter.low_rank().contains_key(&tensor.name)).count()
            };
            taken += group.iter().map(has).sum::<usize>();
            let rank: usize = adapters.iter().map(rank_of).sum();
            let stack = group.first().filter(|tensor| is_of_experts(tensor)).map(|_| group.len() as u64);
            if rank > 0 {
                let name = stack_name(first);
                modules.push(AdaptedModule { name, block, parts, stack, rank, scale: 1.0 });
            }
        }
        if taken < adapters.iter().map(|(adapter, _)| adapter.low_rank().len()).sum() {
            return Err(AdapterError::Layout(
                "an adapter changes routers, which can be merged only: write a model with it by `plimsoll merge`, and use that".into(),
            ));
        }
        let uneven = |module: &AdaptedModule| {
            module.stack.is_some()
                && adapters.iter().any(|(adapter, _)| {
                    let tensors = stored.iter().filter(|tensor| {
                        tensor
                            .name
                            .strip_suffix(".weight")
                            .is_some_and(|name| stack_name(name) == module.name)
                    });
                    let mut ranks =
                        tensors.filter_map(|tensor| Some(adapter.low_rank().get(&tensor.name)?.a.rows));
                    let first = ranks.next();
                    ranks.any(|rank| Some(rank) != first)
                })
        };
        if let Some(module) = modules.iter().find(|module| uneven(module)) {
            let reason = "its experts have adapters of several ranks, which can be merged only: write a model with it by `plimsoll merge`, and use that";
            return Err(AdapterError::Layout(format!("{}: {reason}", module.name)));
        }
        // Adapters with lengths are alone.
        let lengths_of = |module: &AdaptedModule| {
            let all = adapters.iter().flat_map(|(adapter, _)| adapter.low_rank());
            let own = all.filter(|(weight, low)| module.is_for(weight) && low.magnitudes.is_some());
            own.count() as u64
        };
        let dora = adapters.iter().any(|(a, _)| a.low_rank().values().any(|low| low.magnitudes.is_some()));
        let lacks = |module: &&AdaptedModule| dora && lengths_of(module) < module.stack.unwrap_or(1);
        if let Some(AdaptedModule { name, .. }) = modules.iter().find(lacks) {
            let reason = "DoRA's lengths of rows are there for some matrices and not for all, which can be merged only: write a model with it by `plimsoll merge`, and use that";
            return Err(AdapterError::Layout(format!("{name}: {reason}")));
        }
        let config = adapters.first().map(|(adapter, _)| adapter.config().clone()).unwrap_or_default();
        let parameters = parameters_of(spec, &modules, dora);
        Ok(AdapterLayout { config, modules, parameters, trained_base: Vec::new() })
    }

    /// The same of a model that has no more than some of the layers, which are numbered anew: the first of them is layer 0.
    pub fn of_layers(&self, layers: &[u32]) -> AdapterLayout {
        let of = |block: BlockId| block.among(layers);
        let parameters = |all: &[Parameter]| {
            let own = |p: &Parameter| Some(Parameter { block: of(p.block)?, ..p.clone() });
            all.iter().filter_map(own).collect()
        };
        let module = |m: &AdaptedModule| Some(AdaptedModule { block: of(m.block)?, ..m.clone() });
        AdapterLayout {
            config: self.config.clone(),
            modules: self.modules.iter().filter_map(module).collect(),
            parameters: parameters(&self.parameters),
            trained_base: parameters(&self.trained_base),
        }
    }

    /// The same for no more than some of the blocks.
    pub fn of_blocks(&self, has: &dyn Fn(BlockId) -> bool) -> AdapterLayout {
        let parameters = |all: &[Parameter]| all.iter().filter(|p| has(p.block)).cloned().collect();
        AdapterLayout {
            config: self.config.clone(),
            modules: self.modules.iter().filter(|module| has(module.block)).cloned().collect(),
            parameters: parameters(&self.parameters),
            trained_base: parameters(&self.trained_base),
        }
    }

    /// The same for weights of other shapes, which are those of this model.
    pub fn of_shapes(&self, spec: &ModelSpec) -> AdapterLayout {
        let shaped = |p: &Parameter| {
            let own = spec.block_parameters(p.block).into_iter().find(|own| own.role == p.role);
            own.unwrap_or_else(|| p.clone())
        };
        AdapterLayout {
            config: self.config.clone(),
            modules: self.modules.clone(),
            parameters: parameters_of(spec, &self.modules, self.config.use_dora),
            trained_base: self.trained_base.iter().map(shaped).collect(),
        }
    }

    /// The configuration, as it will be written.
    pub fn config(&self) -> &AdapterConfig {
        &self.config
    }

    /// The tensors with adapters.
    pub fn modules(&self) -> &[AdaptedModule] {
        &self.modules
    }

    /// The adapters' own parameters, in the order of the blocks.
    pub fn parameters(&self) -> &[Parameter] {
        &self.parameters
    }

    /// Everything that is trained: the adapters, and what of the base model the configuration names.
    pub fn trained(&self) -> impl Iterator<Item = &Parameter> {
        self.parameters.iter().chain(&self.trained_base)
    }

    /// Whether a parameter of the base model is the weight of a linear with an adapter.
    pub fn adapts(&self, parameter: &Parameter) -> bool {
        let own = |m: &AdaptedModule| {
            m.block == parameter.block && m.parts.iter().any(|part| part.role() == parameter.role)
        };
        self.modules.iter().any(|module| own(module) && !module.is_embedding())
    }

    /// Whether experts have lengths of rows (DoRA), which are of their whole matrices.
    pub fn has_lengths_of_experts(&self) -> bool {
        let is_length = |p: &Parameter| matches!(p.role, Role::Lora(LoraPart::Magnitude, _));
        self.parameters.iter().any(|p| is_length(p) && p.is_of_experts())
    }

    /// Whether a parameter of the base model is trained too.
    pub fn trains_base(&self, block: BlockId, role: Role) -> bool {
        self.trained_base.iter().any(|p| p.block == block && p.role == role)
    }

    /// Writes [`first_values`](Self::first_values) as `dtype` (f32, bf16 or f16) into `out`.
    pub fn write_first_values(
        &self,
        parameter: &Parameter,
        seed: u64,
        dtype: DType,
        out: &mut [u8],
    ) -> Result<(), ConversionError> {
        encode(&self.first_values(parameter, seed), dtype, out)
    }

    /// The first values of an adapter's parameter: A uniform within 1 / sqrt(in) as PEFT's Kaiming
    /// initialisation, or normal with deviation 1 / r; B zero. Of an embedding A is zero and B normal.
    pub fn first_values(&self, parameter: &Parameter, seed: u64) -> Vec<f32> {
        let n = parameter.elements() as usize;
        let Role::Lora(part, adapted) = parameter.role else { return vec![0.0; n] };
        let embedding = adapted == Adapted::TokenEmbedding;
        match (part, embedding) {
            (LoraPart::A, false) if self.config.start == AdapterStart::Gaussian => {
                let rank = match parameter.shape[..] {
                    [.., rank, _] => rank.max(1) as f64,
                    _ => 1.0,
                };
                init::normal_values(&parameter.name, seed, n, 1.0 / rank)
            }
            (LoraPart::A, false) => {
                let inputs = parameter.columns().max(1) as f64;
                init::uniform_values(&parameter.name, seed, n, 1.0 / inputs.sqrt())
            }
            (LoraPart::B, true) => init::normal_values(&parameter.name, seed, n, 1.0),
            _ => vec![0.0; n],
        }
    }

    /// Writes PEFT's folder; `values` gives a trained parameter's.
    pub fn write(
        &self,
        folder: &Path,
        spec: &ModelSpec,
        mut values: impl FnMut(&Parameter) -> io::Result<Vec<f32>>,
    ) -> Result<(), AdapterError> {
        let mut recent = Recent::default();
        self.write_tensors(
            folder,
            &self.config,
            || self.file_tensors(spec),
            |file| file.values(&mut |part| recent.part(part, &mut values)),
        )
    }

    /// Writes tensors and a configuration as a folder. Tensors are listed twice: experts have very many, of which the names and sizes are
    /// enough to begin with.
    pub(super) fn write_tensors<I: Iterator<Item = FileTensor>>(
        &self,
        folder: &Path,
        config: &AdapterConfig,
        files: impl Fn() -> I,
        mut content: impl FnMut(&FileTensor) -> io::Result<Vec<f32>>,
    ) -> Result<(), AdapterError> {
        std::fs::create_dir_all(folder)
            .map_err(|source| AdapterError::Io { path: folder.to_owned(), source })?;
        let headers: Vec<NewTensor> = files()
            .map(|FileTensor { name, shape, .. }| NewTensor { name, dtype: StoredDType::F32, shape })
            .collect();
        let mut next = files();
        write_tensors(&folder.join(ADAPTER_WEIGHTS_NAME), &[("format", "pt")], &headers, |_, out| {
            let Some(file) = next.next() else { return Ok(()) };
            content(&file)?.iter().try_for_each(|x| out.write_all(&x.to_le_bytes()))
        })?;
        config.write(&folder.join(ADAPTER_CONFIG_NAME))
    }

    /// Bytes of the tensors that [`write`](Self::write) writes, or where the adapters begin with a part of the weights,
    /// [`write_converted`](Self::write_converted).
    pub fn file_bytes(&self, spec: &ModelSpec) -> u64 {
        let doubled = |file: &FileTensor| match file.part() {
            Some(LoraPart::A | LoraPart::B) if self.config.start.changes_base() => 2,
            _ => 1,
        };
        self.file_tensors(spec).map(|file| 4 * doubled(&file) * file.shape.iter().product::<u64>()).sum()
    }

    /// The tensors of the adapter's file, made as they are asked for.
    pub(super) fn file_tensors<'a>(&'a self, spec: &'a ModelSpec) -> impl Iterator<Item = FileTensor> + 'a {
        let of_modules = self.modules.iter().flat_map(|module| self.file_tensors_of(spec, module));
        let stored = spec.blocks().flat_map(|block| linears(spec, block));
        of_modules.chain(stored.flat_map(|tensor| self.file_tensors_of_base(spec, tensor)))
    }

    fn file_tensors_of(&self, spec: &ModelSpec, module: &AdaptedModule) -> Vec<FileTensor> {
        if module.stack.is_some() {
            let parts = [LoraPart::A, LoraPart::B, LoraPart::Magnitude];
            return parts.iter().flat_map(|part| self.file_tensors_of_stack(spec, module, *part)).collect();
        }
        let find = |role| self.parameters.iter().find(|p| p.block == module.block && p.role == role).cloned();
        let of_part = |part: LoraPart, roles: &[Adapted]| -> Vec<Parameter> {
            roles.iter().filter_map(|role| find(Role::Lora(part, *role))).collect()
        };
        let embedding = module.is_embedding();
        let [a, b] = if embedding {
            [".lora_embedding_A", ".lora_embedding_B"]
        } else {
            [".lora_A.weight", ".lora_B.weight"]
        };
        let first = &module.parts[..module.parts.len().min(1)];
        let all = [
            (a, of_part(LoraPart::A, first), embedding),
            (b, of_part(LoraPart::B, &module.parts), false),
            (".lora_magnitude_vector", of_part(LoraPart::Magnitude, &module.parts), false),
        ];
        let files = all.into_iter().filter(|(_, parts, _)| !parts.is_empty());
        files
            .map(|(suffix, parts, transposed)| {
                let name = format!("{PREFIX}{}{suffix}", module.name);
                FileTensor::new(name, parts.into_iter().map(StoredPart::whole).collect(), transposed)
            })
            .collect()
    }

    /// A tensor of the base model, where it is trained.
    fn file_tensors_of_base(&self, spec: &ModelSpec, tensor: StoredTensor) -> Vec<FileTensor> {
        let trained = tensor.parts.iter().all(|p| self.trains_base(p.parameter.block, p.role()));
        if !trained || tensor.parts.is_empty() {
            return Vec::new();
        }
        let transposed = matches!(tensor.rows, RowOrder::Transposed { .. });
        let has_adapter = |name: &str| self.modules.iter().any(|module| module.name == name);
        let file = FileTensor::new(name_of_base(&tensor.name, has_adapter), tensor.parts, transposed);
        // The library would untie a trained embedding: the head is written as well.
        let is_head_too = spec.tie_word_embeddings
            && file.parts.first().is_some_and(|part| part.role() == Role::TokenEmbedding);
        let head = is_head_too.then(|| FileTensor { name: format!("{PREFIX}{HEAD}"), ..file.clone() });
        head.into_iter().chain([file]).collect()
    }

    /// The tensors of one part of the adapters of a stack: one for each expert.
    fn file_tensors_of_stack(
        &self,
        spec: &ModelSpec,
        module: &AdaptedModule,
        part: LoraPart,
    ) -> Vec<FileTensor> {
        let Some(adapted) = module.parts.first() else { return Vec::new() };
        let own = |p: &&Parameter| p.block == module.block && p.role == Role::Lora(part, *adapted);
        let Some(parameter) = self.parameters.iter().find(own) else { return Vec::new() };
        let each = parameter.rows() / module.stack.unwrap_or(1).max(1);
        let suffix = match part {
            LoraPart::A => ".lora_A.weight",
            LoraPart::B => ".lora_B.weight",
            LoraPart::Magnitude | LoraPart::Squares | LoraPart::Offsets => ".lora_magnitude_vector",
        };
        let singles = linears(spec, module.block);
        let of_stack = singles.iter().filter(|tensor| tensor.is_of(|role| role == adapted.role()));
        (0..)
            .zip(of_stack.filter_map(adaptable))
            .map(|(expert, (name, ..))| {
                let rows = expert * each..(expert + 1) * each;
                let parts = vec![StoredPart { parameter: parameter.clone(), rows }];
                FileTensor::new(format!("{PREFIX}{name}{suffix}"), parts, false)
            })
            .collect()
    }
}

/// The values of the stack that parts were asked of last: its parts follow each other.
#[derive(Default)]
struct Recent(Option<(Parameter, Vec<f32>)>);

impl Recent {
    fn part(
        &mut self,
        part: &StoredPart,
        values: &mut impl FnMut(&Parameter) -> io::Result<Vec<f32>>,
    ) -> io::Result<Vec<f32>> {
        if part.rows == part.parameter.all_rows() {
            return values(&part.parameter);
        }
        if self.0.as_ref().is_none_or(|(of, _)| *of != part.parameter) {
            self.0 = Some((part.parameter.clone(), values(&part.parameter)?));
        }
        let columns = part.parameter.columns() as usize;
        let own = part.rows.start as usize * columns..part.rows.end as usize * columns;
        let all = self.0.as_ref().map(|(_, values)| values.as_slice()).unwrap_or_default();
        all.get(own).map(<[f32]>::to_vec).ok_or_else(|| io::Error::other("a stack has too few values"))
    }
}

/// A tensor of the adapter's file.
#[derive(Clone, Debug)]
pub(super) struct FileTensor {
    pub name: String,
    pub shape: Vec<u64>,
    pub parts: Vec<StoredPart>,
    pub transposed: bool,
}

impl FileTensor {
    fn new(name: String, parts: Vec<StoredPart>, transposed: bool) -> FileTensor {
        let first = parts.first().map(|part| &part.parameter);
        // Lengths of the rows of a stack have a row for each expert.
        let is_vector = first.is_some_and(|p| p.role.kind().is_vector());
        let columns = first.filter(|p| p.shape.len() > 1).map(Parameter::columns);
        let rows: u64 = parts.iter().map(StoredPart::count).sum();
        let mut shape: Vec<u64> = match columns {
            Some(columns) if is_vector => vec![rows * columns],
            columns => std::iter::once(rows).chain(columns).collect(),
        };
        if transposed {
            shape.reverse();
        }
        FileTensor { name, shape, parts, transposed }
    }

    /// Its values, from those of its parts.
    pub fn values(
        &self,
        values: &mut impl FnMut(&StoredPart) -> io::Result<Vec<f32>>,
    ) -> io::Result<Vec<f32>> {
        let mut whole = Vec::new();
        for part in &self.parts {
            whole.extend(values(part)?);
        }
        Ok(match (self.transposed, &self.shape[..]) {
            (true, [rows, columns]) => transposed(&whole, *columns as usize, *rows as usize),
            _ => whole,
        })
    }
}

/// `[columns, rows]` of `[rows, columns]`.
pub(super) fn transposed(values: &[f32], rows: usize, columns: usize) -> Vec<f32> {
    let mut out = vec![0.0; values.len()];
    for row in 0..rows {
        for column in 0..columns {
            out[column * rows + row] = values[row * columns + column];
        }
    }
    out
}

fn is_of_experts(tensor: &StoredTensor) -> bool {
    tensor.parts.iter().any(|part| part.parameter.is_of_experts())
}

/// Tensors that have an adapter together: the same matrix of each expert of a layer, and every other one by itself.
fn groups(stored: &[StoredTensor]) -> impl Iterator<Item = &[StoredTensor]> {
    let key = |tensor: &StoredTensor| {
        tensor.parts.first().map(|part| (part.parameter.block, part.role())).filter(|_| is_of_experts(tensor))
    };
    stored.chunk_by(move |a, b| key(a).is_some() && key(a) == key(b))
}

/// The name of a module without the number of its expert, if it has one.
pub(super) fn stack_name(module: &str) -> String {
    let Some((before, rest)) = module.split_once(".experts.") else { return module.to_owned() };
    match rest.split_once('.') {
        Some((number, part)) if number.parse::<u64>().is_ok() => format!("{before}.experts.{part}"),
        _ => module.to_owned(),
    }
}

/// A stored tensor's name without `.weight`, its block and its linears, if it can have an adapter.
fn adaptable(tensor: &StoredTensor) -> Option<(&str, BlockId, Vec<Adapted>)> {
    let name = tensor.name.strip_suffix(".weight")?;
    let parts: Option<Vec<Adapted>> = tensor.parts.iter().map(|part| Adapted::of(part.role())).collect();
    let block = tensor.parts.first()?.parameter.block;
    Some((name, block, parts?))
}

fn parameters_of(spec: &ModelSpec, modules: &[AdaptedModule], dora: bool) -> Vec<Parameter> {
    let mut parameters = Vec::new();
    for module in modules {
        let rank = module.rank as u64;
        let base = spec.block_parameters(module.block);
        let find = |part: &Adapted| base.iter().find(|p| p.role == part.role());
        let embedding = module.is_embedding();
        let mut add = |kind: LoraPart, part: Adapted, name: String, shape: Vec<u64>| {
            parameters.push(Parameter { name, block: module.block, role: Role::Lora(kind, part), shape });
        };
        for (number, part) in module.parts.iter().enumerate() {
            let Some(weight) = find(part) else { continue };
            let (rows, columns) = (weight.rows(), weight.columns());
            let name = &module.name;
            if module.stack.is_some() {
                // A rank may have some of them.
                let experts = weight.shape.first().copied().unwrap_or(1);
                let each = rows / experts.max(1);
                add(LoraPart::A, *part, format!("{name}.lora_A.weight"), vec![experts, rank, columns]);
                add(LoraPart::B, *part, format!("{name}.lora_B.weight"), vec![experts, each, rank]);
                if dora {
                    let name = format!("{name}.lora_magnitude_vector");
                    add(LoraPart::Magnitude, *part, name, vec![experts, each]);
                }
                continue;
            }
            // Parts of one tensor are told apart by their own names.
            let own = match module.parts.len() {
                1 => String::new(),
                _ => format!(
                    ".{}",
                    weight.name.trim_end_matches(".weight").rsplit('.').next().unwrap_or_default()
                ),
            };
            if embedding {
                add(LoraPart::A, *part, format!("{name}.lora_embedding_A"), vec![rows, rank]);
                add(LoraPart::B, *part, format!("{name}.lora_embedding_B"), vec![columns, rank]);
                continue;
            }
            if number == 0 {
                add(LoraPart::A, *part, format!("{name}.lora_A.weight"), vec![rank, columns]);
            }
            add(LoraPart::B, *part, format!("{name}.lora_B.weight{own}"), vec![rows, rank]);
            if dora {
                add(LoraPart::Magnitude, *part, format!("{name}.lora_magnitude_vector{own}"), vec![rows]);
            }
        }
    }
    parameters
}

/// The last parts of the names of what can have an adapter.
fn choices(stored: &[StoredTensor]) -> String {
    let names: BTreeSet<&str> =
        stored.iter().filter_map(adaptable).filter_map(|(name, ..)| name.rsplit('.').next()).collect();
    names.into_iter().collect::<Vec<_>>().join(", ")
}

/// A matrix has as many singular values as its shorter side is long.
fn check_singular_values(spec: &ModelSpec, modules: &[AdaptedModule]) -> Result<(), AdapterError> {
    let most = |module: &AdaptedModule| sides(spec, module).into_iter().min().unwrap_or(0);
    let linears = modules.iter().filter(|module| !module.is_embedding());
    match linears.into_iter().find(|module| module.rank as u64 > most(module)) {
        Some(module) => Err(AdapterError::Layout(format!(
            "init_lora_weights: {} has rank {} and no more than {} singular values; take a lower rank for it, by rank_pattern",
            module.name,
            module.rank,
            most(module)
        ))),
        None => Ok(()),
    }
}

fn check_targets(
    config: &AdapterConfig,
    stored: &[StoredTensor],
    modules: &[AdaptedModule],
    adapted: &[&str],
) -> Result<(), AdapterError> {
    use super::TargetModules::{AllLinear, Names, Pattern};
    let nothing = |what: &str| {
        let choices = choices(stored);
        Err(AdapterError::Layout(format!(
            "target_modules: {what} matches no tensor of the model; it has {choices}, or take all-linear"
        )))
    };
    match &config.target_modules {
        AllLinear => {}
        Pattern(pattern) if modules.is_empty() => return nothing(&format!("{pattern:?}")),
        Pattern(_) => {}
        Names(names) if names.is_empty() => return nothing("an empty list"),
        Names(names) => {
            let matched = |name: &String| adapted.iter().any(|module| ends_with_name(module, name));
            if let Some(name) = names.iter().find(|name| !matched(name)) {
                return nothing(&format!("{name:?}"));
            }
        }
    }
    for (key, patterns) in [
        ("rank_pattern", config.rank_pattern.keys().collect::<Vec<_>>()),
        ("alpha_pattern", config.alpha_pattern.keys().collect()),
    ] {
        for pattern in patterns {
            if !adapted.iter().any(|module| config.pattern_matches(pattern, module)) {
                return Err(AdapterError::Layout(format!("{key}: {pattern:?} matches no adapted module")));
            }
        }
    }
    Ok(())
}

fn ends_with_name(module: &str, name: &str) -> bool {
    module.strip_suffix(name).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
}

/// What of the base model is trained: the biases that are named, and whole modules.
fn trained_base(
    config: &AdapterConfig,
    spec: &ModelSpec,
    stored: &[StoredTensor],
    modules: &[AdaptedModule],
) -> Result<Vec<Parameter>, AdapterError> {
    let mut whole: BTreeMap<&str, bool> =
        config.modules_to_save.iter().map(|n| (n.as_str(), false)).collect();
    let mut trained = Vec::new();
    for tensor in stored {
        let module = tensor.name.trim_end_matches(".weight").trim_end_matches(".bias");
        let mut named = false;
        for (name, found) in &mut whole {
            // By what the name ends with, as PEFT does it. A tied head is the embedding.
            let tied = *name == "lm_head"
                && spec.tie_word_embeddings
                && tensor.parts.iter().any(|part| part.role() == Role::TokenEmbedding);
            if module.ends_with(name) || tied {
                (named, *found) = (true, true);
            }
        }
        // Of a mixture of experts there are too many tensors to compare each with all modules.
        let of_adapted = || modules.iter().any(|adapted| adapted.is_for(module));
        if named && of_adapted() {
            return Err(AdapterError::Layout(format!(
                "{module} is in target_modules and in modules_to_save; name it in one of them"
            )));
        }
        let bias = match config.bias {
            AdapterBias::None => false,
            AdapterBias::All => tensor.name.ends_with(".bias"),
            AdapterBias::LoraOnly => tensor.name.ends_with(".bias") && of_adapted(),
        };
        if named || bias {
            for part in &tensor.parts {
                let known = trained
                    .iter()
                    .any(|p: &Parameter| (p.block, p.role) == (part.parameter.block, part.role()));
                if !known {
                    trained.push(part.parameter.clone());
                }
            }
        }
    }
    match whole.iter().find(|(_, found)| !**found) {
        Some((name, _)) => Err(AdapterError::Layout(format!(
            "modules_to_save: {name:?} matches no module of the model; embed_tokens, lm_head and the names of norms do"
        ))),
        None => Ok(trained),
    }
}
