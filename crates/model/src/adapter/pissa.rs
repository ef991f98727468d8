//! Adapters that begin with the largest singular values of their weights (PiSSA, Meng et al. 2024): with W = U S V^T,
//! A = sqrt(S_r / s) V_r^T and B = U_r sqrt(S_r / s), and what stays frozen is W - s B A. As PEFT has it, s is the factor
//! on the product.
//!
//! What was trained is written as PEFT converts it, for the base as it is: s (B A - B_0 A_0) is s [B, -B_0] [A; A_0].
//! The first values lie in a folder meanwhile, and take no memory.

use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

use plimsoll_device::DType;
use plimsoll_device::cpu::at_once;

use super::layout::FileTensor;
use super::svd::{Singular, SvdDevice};
use super::{
    ADAPTER_WEIGHTS_NAME, AdaptedModule, Adapter, AdapterError, AdapterLayout, AdapterStart, LowRank, Matrix,
    read_matrix, stored_place,
};
use crate::layout::StoredPart;
use crate::parameters::{LoraPart, Parameter, Role};
use crate::safetensors::SafetensorsFile;
use crate::source::rows::{encode_rows, threads};
use crate::source::{ModelError, WeightSource};
use crate::spec::ModelSpec;

/// The values that adapters begin with, in a PEFT folder.
#[derive(Debug)]
pub struct FirstValues {
    path: PathBuf,
    file: SafetensorsFile,
}

impl AdapterLayout {
    /// Writes the values that the adapters of a layout begin with into `folder`, and opens it. Singular values are
    /// found one matrix after the other, which is in memory in f32 meanwhile.
    ///
    /// # Errors
    /// The base cannot be read, or the folder cannot be written.
    pub fn first_folder(
        &self,
        folder: &Path,
        spec: &ModelSpec,
        base: &WeightSource,
        seed: u64,
    ) -> Result<FirstValues, AdapterError> {
        let singular = match self.config().start {
            AdapterStart::Pissa { power_iterations } => Some(power_iterations),
            _ => None,
        };
        let linears = || self.modules().iter().filter(|module| !module.is_embedding());
        let device = SvdDevice::new(
            linears().map(|module| sides(spec, module).iter().product()).max().unwrap_or(0),
            linears().map(|module| sides(spec, module).iter().sum()).max().unwrap_or(0),
            linears().map(|module| module.rank as u64).max().unwrap_or(0),
        )
        .map_err(io_error(folder))?;
        // A of a module comes before the parts of its B.
        let mut rest = Vec::new();
        self.write(folder, spec, |p| {
            let module = self.module_of(p);
            let (Some(iterations), Some(module), Role::Lora(part, _)) = (singular, module, p.role) else {
                return Ok(self.first_values(p, seed));
            };
            match part {
                LoraPart::A => {
                    let found = singular_values(&device, spec, module, base, iterations, seed)?;
                    let (a, b) = factors(&found, module, spec);
                    rest = b;
                    Ok(a)
                }
                LoraPart::B => {
                    let later = rest.split_off(rest.len().min(p.elements() as usize));
                    Ok(std::mem::replace(&mut rest, later))
                }
                // Lengths are computed where the weights are.
                _ => Ok(self.first_values(p, seed)),
            }
        })?;
        FirstValues::open(folder)
    }

    /// Writes what was trained from such values as PEFT's folder for the base as it is.
    pub fn write_converted(
        &self,
        folder: &Path,
        spec: &ModelSpec,
        first: &FirstValues,
        mut values: impl FnMut(&Parameter) -> io::Result<Vec<f32>>,
    ) -> Result<(), AdapterError> {
        let doubled = |mut file: FileTensor| {
            match file.part() {
                Some(LoraPart::A) => file.shape[0] *= 2,
                Some(LoraPart::B) => file.shape[1] *= 2,
                _ => {}
            }
            file
        };
        let files = || self.file_tensors(spec).map(doubled);
        self.write_tensors(folder, &self.config().doubled(), files, |file| {
            let trained = file.values(&mut |part| values(&part.parameter))?;
            let first = |part| -> io::Result<Matrix> {
                let matrix = first.matrix(&file.name).map_err(io::Error::other)?;
                match matrix.values.len() == trained.len() && part == file.part() {
                    true => Ok(matrix),
                    false => Err(io::Error::other(format!("{} has changed its size", first.path.display()))),
                }
            };
            Ok(match file.part() {
                Some(LoraPart::A) => [trained.clone(), first(Some(LoraPart::A))?.values].concat(),
                Some(LoraPart::B) => {
                    let first = first(Some(LoraPart::B))?;
                    let width = first.columns.max(1);
                    let mut both = Vec::with_capacity(2 * trained.len());
                    for (trained, first) in trained.chunks(width).zip(first.values.chunks(width)) {
                        both.extend(trained);
                        both.extend(first.iter().map(|x| -x));
                    }
                    both
                }
                _ => trained,
            })
        })
    }

    fn module_of(&self, p: &Parameter) -> Option<&AdaptedModule> {
        let Role::Lora(_, adapted) = p.role else { return None };
        let own = |m: &&AdaptedModule| m.block == p.block && m.parts.contains(&adapted);
        self.modules().iter().find(own).filter(|module| !module.is_embedding())
    }
}

impl Adapter {
    /// What was trained and what it began with, of a folder that
    /// [`write_converted`](AdapterLayout::write_converted) wrote.
    ///
    /// # Errors
    /// It has other modules or ranks than the layout.
    pub fn split(self, layout: &AdapterLayout) -> Result<(Adapter, Adapter), AdapterError> {
        let [mut trained, mut first] = [self.clone(), self];
        first.replaced.clear();
        for adapter in [&mut trained, &mut first] {
            adapter.config = layout.config().clone();
        }
        for (weight, low) in &mut trained.low_rank {
            let module = layout.modules().iter().find(|m| format!("{}.weight", m.name) == *weight);
            let Some(module) = module.filter(|m| 2 * m.rank == low.a.rows) else {
                return Err(AdapterError::Layout(format!(
                    "{weight} has rank {}, which is not twice that of training.lora; its run's plimsoll.yaml says which",
                    low.a.rows
                )));
            };
            let rank = module.rank;
            let half = |low: &LowRank, second: bool| {
                let (skip, sign) = if second { (rank, -1.0) } else { (0, 1.0) };
                let a = low.a.values.iter().skip(skip * low.a.columns).take(rank * low.a.columns);
                let rows = low.b.values.chunks_exact(2 * rank);
                let b = rows.flat_map(|row| row.iter().skip(skip).take(rank)).map(|x| sign * x).collect();
                LowRank {
                    a: Matrix { rows: rank, columns: low.a.columns, values: a.copied().collect() },
                    b: Matrix { rows: low.b.rows, columns: rank, values: b },
                    scale: module.scale,
                    ..low.clone()
                }
            };
            if let Some(other) = first.low_rank.get_mut(weight) {
                // Lengths are none of the first values, and are written as zeros.
                let magnitudes = low.magnitudes.as_ref().map(|lengths| vec![0.0; lengths.len()]);
                *other = LowRank { magnitudes, ..half(low, true) };
            }
            *low = half(low, false);
        }
        Ok((trained, first))
    }
}

impl FirstValues {
    /// Opens a folder that [`AdapterLayout::first_folder`] or [`Adapter::save`] wrote.
    ///
    /// # Errors
    /// Its weights cannot be read.
    pub fn open(folder: &Path) -> Result<FirstValues, AdapterError> {
        let path = folder.join(ADAPTER_WEIGHTS_NAME);
        Ok(FirstValues { file: SafetensorsFile::open(&path)?, path })
    }

    fn matrix(&self, name: &str) -> Result<Matrix, AdapterError> {
        let fail = |reason| AdapterError::Tensor { path: self.path.clone(), tensor: name.to_owned(), reason };
        // Folders of earlier versions have a bias beside the layer, not within it.
        let earlier = name.replace(".base_layer.", ".");
        let name = if self.file.tensor(name).is_some() { name } else { &earlier };
        let (tensor, bytes) = (self.file.tensor(name), self.file.bytes(name));
        let (Some(tensor), Some(bytes)) = (tensor, bytes) else {
            return Err(fail("it is missing; the folder has changed".to_owned()));
        };
        let matrix = read_matrix(&tensor.shape, tensor.dtype, bytes).map_err(fail);
        self.file.release(tensor);
        matrix
    }

    /// The first values of an adapter's parameter, in its own order.
    ///
    /// # Errors
    /// The folder has changed.
    pub fn values(
        &self,
        layout: &AdapterLayout,
        spec: &ModelSpec,
        parameter: &Parameter,
    ) -> Result<Vec<f32>, AdapterError> {
        for file in layout.file_tensors(spec) {
            let Some(at) = file.parts.iter().position(|part| part.parameter == *parameter) else { continue };
            let before: u64 = file.parts.iter().take(at).map(StoredPart::elements).sum();
            let matrix = self.matrix(&file.name)?;
            let values = match file.transposed {
                true => super::layout::transposed(&matrix.values, matrix.rows, matrix.columns),
                false => matrix.values,
            };
            return Ok(values
                .into_iter()
                .skip(before as usize)
                .take(parameter.elements() as usize)
                .collect());
        }
        Err(AdapterError::Layout(format!("{} is no parameter of the adapter", parameter.name)))
    }

    /// Writes a weight of the base, less the product that its adapter begins with, as `dtype` into `out`: rounded or
    /// quantised after the subtraction. Other parameters are the base's.
    ///
    /// # Errors
    /// As [`WeightSource::read_rows_into`]; the folder has changed.
    pub fn residual_rows_into(
        &self,
        layout: &AdapterLayout,
        spec: &ModelSpec,
        base: &WeightSource,
        parameter: &Parameter,
        rows: Range<u64>,
        dtype: DType,
        out: &mut [u8],
    ) -> Result<(), ResidualError> {
        let place = stored_place(spec, parameter);
        let module = place.as_ref().and_then(|(tensor, first)| {
            let own = |m: &&AdaptedModule| format!("{}.weight", m.name) == *tensor && !m.is_embedding();
            Some((layout.modules().iter().find(own)?, *first))
        });
        let Some((module, first)) = module else {
            return Ok(base.read_rows_into(parameter, rows, dtype, out)?);
        };
        let name = |suffix: &str| format!("{}{}{suffix}", super::PREFIX, module.name);
        let low = LowRank {
            a: self.matrix(&name(".lora_A.weight"))?,
            b: self.matrix(&name(".lora_B.weight"))?,
            scale: -module.scale,
            magnitudes: None,
            embedding: false,
        };
        let columns = parameter.columns().max(1) as usize;
        let from = base.inference_dtype(parameter, DType::F32);
        let fail = |source| base.conversion(parameter, dtype, source);
        encode_rows(parameter, rows, from, dtype, out, None, fail, |rows, values| {
            base.read_rows(parameter, rows.clone(), values)?;
            subtract(&low, (first + rows.start) as usize, columns, values);
            Ok(())
        })?;
        Ok(base.release(parameter)?)
    }
}

/// A weight's residual that could not be had.
#[derive(Debug, thiserror::Error)]
pub enum ResidualError {
    /// The base's weight could not be read.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The first values could not.
    #[error(transparent)]
    Adapter(#[from] AdapterError),
}

/// Adds the product's part of the rows from `first` on. Each row is one thread's.
fn subtract(low: &LowRank, first: usize, columns: usize, values: &mut [f32]) {
    let rows = values.len() / columns;
    let each = rows.div_ceil(threads().max(1)).max(1);
    at_once(values.chunks_mut(each * columns).enumerate(), threads(), |(part, values)| {
        for (row, out) in (first + part * each..).zip(values.chunks_exact_mut(columns)) {
            low.add_to_row(row, 1.0, out);
        }
    });
}

fn singular_values(
    device: &SvdDevice,
    spec: &ModelSpec,
    module: &AdaptedModule,
    base: &WeightSource,
    iterations: Option<u32>,
    seed: u64,
) -> io::Result<Singular> {
    let mut outcome = Ok(());
    let parts = weights(spec, module);
    let mut fill = |out: &mut [u8]| {
        let mut rest = out;
        for part in &parts {
            let bytes = (4 * part.elements() as usize).min(rest.len());
            let (own, later) = std::mem::take(&mut rest).split_at_mut(bytes);
            rest = later;
            if outcome.is_ok() {
                outcome = base.read_into(part, DType::F32, own);
            }
        }
    };
    // The random vectors of an exact search change nothing but the last bits.
    let key = (module.name.as_str(), seed);
    let shape = sides(spec, module);
    let found = device.largest(shape, module.rank, iterations, key, &mut fill).map_err(io::Error::other)?;
    outcome.map_err(io::Error::other)?;
    if let Some(value) = found.values.iter().find(|value| !value.is_finite()) {
        let reason =
            format!("{}.weight has the singular value {value}: the base holds NaN or infinity", module.name);
        return Err(io::Error::other(reason));
    }
    Ok(found)
}

/// A `[r, in]` and B `[out, r]` of the singular values.
fn factors(found: &Singular, module: &AdaptedModule, spec: &ModelSpec) -> (Vec<f32>, Vec<f32>) {
    let [rows, columns] = sides(spec, module).map(|n| n as usize);
    let (mut a, mut b) = (vec![0.0; module.rank * columns], vec![0.0; rows * module.rank]);
    // A matrix of a lower rank leaves zeros.
    for (i, value) in found.values.iter().enumerate().take(module.rank) {
        let root = (value / f64::from(module.scale)).sqrt();
        let (Some(left), Some(right)) = (found.left.iter().nth(i), found.right.iter().nth(i)) else { break };
        let row = a.chunks_exact_mut(columns).nth(i).into_iter().flatten();
        row.zip(right).for_each(|(a, right)| *a = (root * right) as f32);
        let column = b.iter_mut().skip(i).step_by(module.rank);
        column.zip(left).for_each(|(b, left)| *b = (root * left) as f32);
    }
    (a, b)
}

/// The linears of a module, in the order of their rows.
fn weights(spec: &ModelSpec, module: &AdaptedModule) -> Vec<Parameter> {
    let base = spec.block_parameters(module.block);
    module.parts.iter().filter_map(|part| base.iter().find(|p| p.role == part.role()).cloned()).collect()
}

/// Outputs and inputs of a module.
pub(super) fn sides(spec: &ModelSpec, module: &AdaptedModule) -> [u64; 2] {
    let parts = weights(spec, module);
    let columns = parts.first().and_then(|p| p.shape.get(1)).copied().unwrap_or(1);
    [parts.iter().map(Parameter::rows).sum(), columns]
}

fn io_error(folder: &Path) -> impl Fn(plimsoll_device::DeviceError) -> AdapterError {
    move |error| AdapterError::Io { path: folder.to_owned(), source: io::Error::other(error) }
}

impl FileTensor {
    /// Which part of adapters it holds.
    pub(super) fn part(&self) -> Option<LoraPart> {
        match self.parts.first()?.role() {
            Role::Lora(part, _) => Some(part),
            _ => None,
        }
    }
}
