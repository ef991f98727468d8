//! A base model's rows with an adapter's product added, as they are read: merging without a second copy.

use std::ops::Range;
use std::path::Path;

use super::{Adapter, AdapterError, LowRank, stored_place, stored_places};
use crate::parameters::{BlockId, Parameter, Role};
use crate::source::{ModelError, WeightSource};
use crate::spec::ModelSpec;
use crate::transcode::RowSource;

/// A base model and an adapter.
#[derive(Clone, Copy, Debug)]
pub struct Merged<'a> {
    spec: &'a ModelSpec,
    base: &'a WeightSource,
    adapter: &'a Adapter,
}

impl Adapter {
    /// Reads the adapter in `folder` to merge it into a model of that shape, and says which shape the merged model has:
    /// where an adapter changes an embedding and not the head that is tied to it, or the other way round, that has both,
    /// for in the library too the one stays as it was when the other is trained.
    ///
    /// # Errors
    /// As [`Adapter::open`].
    pub fn open_to_merge(folder: &Path, spec: &ModelSpec) -> Result<(Adapter, ModelSpec), AdapterError> {
        if spec.tie_word_embeddings {
            let untied = ModelSpec { tie_word_embeddings: false, ..spec.clone() };
            let adapter = Adapter::open(folder, &untied)?;
            let tables = untied.blocks().flat_map(|block| untied.block_parameters(block));
            let names: Vec<String> =
                tables.filter(|p| p.is_table()).filter_map(|p| Some(stored_place(&untied, &p)?.0)).collect();
            let apart = names.iter().any(|name| adapter.low_rank.contains_key(name))
                || names
                    .iter()
                    .any(|a| adapter.replaced.get(a) != names.first().and_then(|b| adapter.replaced.get(b)));
            if apart {
                return Ok((adapter, untied));
            }
        }
        Ok((Adapter::open(folder, spec)?, spec.clone()))
    }

    /// The weights of `base`, a model of the shape that the adapter was opened for, with the adapter in them. A head that
    /// the base does not have is its embedding.
    pub fn merged<'a>(&'a self, spec: &'a ModelSpec, base: &'a WeightSource) -> Merged<'a> {
        Merged { spec, base, adapter: self }
    }
}

impl Adapter {
    /// Writes rows of a parameter that the adapter replaces; `false`, and nothing done, where it replaces none of it.
    pub(crate) fn replace_rows(
        &self,
        spec: &ModelSpec,
        parameter: &Parameter,
        rows: Range<u64>,
        out: &mut [f32],
    ) -> bool {
        let place = stored_place(spec, parameter);
        let Some((matrix, first)) = place.and_then(|(name, first)| Some((self.replaced.get(&name)?, first)))
        else {
            return false;
        };
        let columns = parameter.columns() as usize;
        // Biases and matrices alike; a matrix stored transposed has other columns.
        for (row, out) in ((first + rows.start) as usize..).zip(out.chunks_exact_mut(columns.max(1))) {
            if matrix.columns == columns {
                out.copy_from_slice(matrix.row(row));
            } else {
                for (column, out) in out.iter_mut().enumerate() {
                    *out = matrix.row(column).get(row).copied().unwrap_or(0.0);
                }
            }
        }
        true
    }
}

impl RowSource for Merged<'_> {
    fn rows(&self, parameter: &Parameter, rows: Range<u64>, out: &mut [f32]) -> Result<(), ModelError> {
        if !self.adapter.replace_rows(self.spec, parameter, rows.clone(), out) {
            let tied = self.spec.block_parameters(BlockId::Embedding).into_iter().next();
            match tied.filter(|_| parameter.role == Role::LmHead && !self.base.has(parameter)) {
                Some(embedding) => self.base.read_rows(&embedding, rows.clone(), out)?,
                None => self.base.read_rows(parameter, rows.clone(), out)?,
            }
        }
        let columns = parameter.columns().max(1) as usize;
        for place in stored_places(self.spec, parameter) {
            let own = rows.start.max(place.rows.start)..rows.end.min(place.rows.end);
            let Some(low) = self.adapter.low_rank.get(&place.tensor).filter(|_| !own.is_empty()) else {
                continue;
            };
            let stored = (place.first + own.start - place.rows.start) as usize;
            let before = (own.start - rows.start) as usize;
            let lines = out.chunks_exact_mut(columns).skip(before).take((own.end - own.start) as usize);
            for (row, out) in (stored..).zip(lines) {
                low.add_to_row(row, out);
            }
        }
        Ok(())
    }
}

impl LowRank {
    /// Adds its part of row `row` of the weight to the row, and gives it DoRA's length.
    pub fn add_to_row(&self, row: usize, out: &mut [f32]) {
        if self.embedding {
            for (column, out) in out.iter_mut().enumerate() {
                let product: f32 =
                    self.b.row(column).iter().enumerate().map(|(r, b)| b * at(self.a.row(r), row)).sum();
                *out += self.scale * product;
            }
            return;
        }
        for (r, b) in self.b.row(row).iter().enumerate() {
            let factor = self.scale * b;
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
