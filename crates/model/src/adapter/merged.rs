//! A base model's rows with the products of adapters added, as they are read: merging without a second copy.

use std::ops::Range;
use std::path::Path;

use super::layout::check_sum;
use super::{Adapter, AdapterError, LowRank, stored_place, stored_places};
use crate::parameters::{BlockId, Parameter, Role};
use crate::source::{ModelError, WeightSource};
use crate::spec::ModelSpec;
use crate::transcode::RowSource;

/// Adapters that are to be merged into a model, each with its weight.
#[derive(Clone, Debug)]
pub struct MergeSet {
    adapters: Vec<(Adapter, f32)>,
    spec: ModelSpec,
}

/// A base model and adapters.
#[derive(Clone, Copy, Debug)]
pub struct Merged<'a> {
    base: &'a WeightSource,
    set: &'a MergeSet,
}

impl MergeSet {
    /// Reads the adapter in each folder, with its weight, to merge it into a model of that shape. Where an adapter changes an embedding
    /// and not the head that is tied to it, or the other way round, the merged model has both, for in the library too the one stays as
    /// it was when the other is trained.
    ///
    /// # Errors
    /// As [`Adapter::open`]; several of them where one has magnitudes (DoRA) or replaces tensors.
    pub fn open(folders: &[(&Path, f32)], spec: &ModelSpec) -> Result<MergeSet, AdapterError> {
        let open = |spec: &ModelSpec| {
            let open = |(folder, weight): &(&Path, f32)| Ok((Adapter::open(folder, spec)?, *weight));
            let adapters = folders.iter().map(open).collect::<Result<Vec<_>, AdapterError>>()?;
            check_sum(&adapters)?;
            Ok(MergeSet { adapters, spec: spec.clone() })
        };
        if spec.tie_word_embeddings {
            let untied = ModelSpec { tie_word_embeddings: false, ..spec.clone() };
            let set = open(&untied)?;
            if set.adapters.iter().any(|(adapter, _)| adapter.parts_tables(&untied)) {
                return Ok(set);
            }
        }
        open(spec)
    }

    /// The shape of the merged model.
    pub fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    /// The adapters and their weights.
    pub fn adapters(&self) -> &[(Adapter, f32)] {
        &self.adapters
    }

    /// The weights of `base`, a model of the shape that the adapters were opened for, with the adapters in them. A head that
    /// the base does not have is its embedding.
    pub fn merged<'a>(&'a self, base: &'a WeightSource) -> Merged<'a> {
        Merged { base, set: self }
    }
}

impl Adapter {
    /// Whether it changes the embedding alone, or the head alone, of a model of that shape.
    fn parts_tables(&self, untied: &ModelSpec) -> bool {
        let tables = untied.blocks().flat_map(|block| untied.block_parameters(block));
        let names: Vec<String> =
            tables.filter(|p| p.is_table()).filter_map(|p| Some(stored_place(untied, &p)?.0)).collect();
        names.iter().any(|name| self.low_rank.contains_key(name))
            || names.iter().any(|a| self.replaced.get(a) != names.first().and_then(|b| self.replaced.get(b)))
    }
}

impl Adapter {
    /// Whether the adapter replaces some of these rows of a parameter, and whether it replaces all of them.
    pub(crate) fn replaces(
        &self,
        spec: &ModelSpec,
        parameter: &Parameter,
        rows: &Range<u64>,
    ) -> (bool, bool) {
        let places = stored_places(spec, parameter).into_iter();
        let own = places.filter(|place| place.rows.start < rows.end && rows.start < place.rows.end);
        let own: Vec<bool> = own.map(|place| self.replaced.contains_key(&place.tensor)).collect();
        (own.contains(&true), !own.is_empty() && !own.contains(&false))
    }

    /// Writes those rows of a parameter that the adapter replaces; of a stack, tensor by tensor.
    pub(crate) fn replace_rows(
        &self,
        spec: &ModelSpec,
        parameter: &Parameter,
        rows: Range<u64>,
        out: &mut [f32],
    ) {
        let columns = parameter.columns().max(1) as usize;
        for place in stored_places(spec, parameter) {
            let own = rows.start.max(place.rows.start)..rows.end.min(place.rows.end);
            let Some(matrix) = self.replaced.get(&place.tensor).filter(|_| !own.is_empty()) else { continue };
            let before = (own.start - rows.start) as usize;
            let lines = out.chunks_exact_mut(columns).skip(before).take((own.end - own.start) as usize);
            for (row, line) in ((own.start - place.rows.start) as usize..).zip(lines) {
                // A vector has the values of its parts one after the other.
                let from = match matrix.columns {
                    1 if columns > 1 => place.elements as usize + row * columns,
                    own => (place.first as usize + row) * if place.transposed { 1 } else { own },
                };
                let step = if place.transposed && matrix.columns > 1 { matrix.columns } else { 1 };
                let values = matrix.values.get(from..).unwrap_or_default().iter().step_by(step);
                line.iter_mut().zip(values).for_each(|(out, value)| *out = *value);
            }
        }
    }
}

impl RowSource for Merged<'_> {
    fn rows(&self, parameter: &Parameter, rows: Range<u64>, out: &mut [f32]) -> Result<(), ModelError> {
        let MergeSet { adapters, spec } = self.set;
        if !adapters.iter().any(|(adapter, _)| adapter.replaces(spec, parameter, &rows).1) {
            let tied = spec.block_parameters(BlockId::Embedding).into_iter().next();
            match tied.filter(|_| parameter.role == Role::LmHead && !self.base.has(parameter)) {
                Some(embedding) => self.base.read_rows(&embedding, rows.clone(), out)?,
                None => self.base.read_rows(parameter, rows.clone(), out)?,
            }
        }
        for (adapter, _) in adapters {
            adapter.replace_rows(spec, parameter, rows.clone(), out);
        }
        let columns = parameter.columns().max(1) as usize;
        for place in stored_places(spec, parameter) {
            let own = rows.start.max(place.rows.start)..rows.end.min(place.rows.end);
            if own.is_empty() {
                continue;
            }
            let stored = (place.first + own.start - place.rows.start) as usize;
            let before = (own.start - rows.start) as usize;
            for (adapter, weight) in adapters {
                let Some(low) = adapter.low_rank.get(&place.tensor) else { continue };
                let lines = out.chunks_exact_mut(columns).skip(before).take((own.end - own.start) as usize);
                for (row, out) in (stored..).zip(lines) {
                    low.add_to_row(row, *weight, out);
                }
            }
        }
        Ok(())
    }
}

impl LowRank {
    /// Adds its part of row `row` of the weight, so many times, to the row, and gives it DoRA's length.
    pub fn add_to_row(&self, row: usize, weight: f32, out: &mut [f32]) {
        let scale = self.scale * weight;
        if self.embedding {
            for (column, out) in out.iter_mut().enumerate() {
                let product: f32 =
                    self.b.row(column).iter().enumerate().map(|(r, b)| b * at(self.a.row(r), row)).sum();
                *out += scale * product;
            }
            return;
        }
        for (r, b) in self.b.row(row).iter().enumerate() {
            let factor = scale * b;
            for (out, a) in out.iter_mut().zip(self.a.row(r)) {
                *out += factor * a;
            }
        }
        if let Some(magnitudes) = &self.magnitudes {
            let length = out.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
            let factor = if length > 0.0 { (f64::from(at(magnitudes, row)) / length) as f32 } else { 0.0 };
            out.iter_mut().for_each(|x| *x *= factor);
        }
    }
}

fn at(values: &[f32], index: usize) -> f32 {
    values.get(index).copied().unwrap_or(0.0)
}
