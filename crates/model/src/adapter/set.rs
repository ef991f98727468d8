//! Adapters that were opened for one model, as the values of a layout's parameters: what a run that goes on, and what
//! generation and evaluation, load.

use std::ops::Range;
use std::path::Path;

use plimsoll_device::DType;

use super::{Adapter, AdapterError, AdapterLayout, LowRank};
use crate::convert::encode;
use crate::parameters::{Adapted, LoraPart, Parameter, Role};
use crate::source::{ModelError, WeightSource};
use crate::spec::ModelSpec;

/// An adapter's values of the parameters of a layout.
fn adapter_values(
    adapters: &[(Adapter, f32)],
    spec: &ModelSpec,
    layout: &AdapterLayout,
    parameter: &Parameter,
) -> Vec<f32> {
    let Role::Lora(kind, adapted) = parameter.role else { return Vec::new() };
    let base = spec.block_parameters(parameter.block);
    let Some(weight) = base.iter().find(|p| p.role == adapted.role()) else { return Vec::new() };
    let module = layout.modules().iter().find(|m| m.block == parameter.block && m.parts.contains(&adapted));
    if weight.is_of_experts() {
        let scale = module.map_or(1.0, |module| module.scale);
        return stack_values(adapters, &super::stored_places(spec, weight), kind, scale);
    }
    let place = super::stored_place(spec, weight);
    let Some((tensor, first)) = place else { return vec![0.0; parameter.elements() as usize] };
    let scale = |low: &LowRank, weight: f32| low.scale * weight / module.map_or(1.0, |m| m.scale);
    let lows: Vec<(&LowRank, f32)> = adapters
        .iter()
        .filter_map(|(adapter, weight)| Some((adapter.low_rank().get(&tensor)?, *weight)))
        .collect();
    let embedding = adapted == Adapted::TokenEmbedding;
    match kind {
        LoraPart::A if embedding => {
            // [vocabulary, r]: the ranks of all of them side by side.
            let rows = parameter.rows() as usize;
            let mut values = Vec::with_capacity(parameter.elements() as usize);
            for token in 0..rows {
                for (low, _) in &lows {
                    values.extend((0..low.a.rows).map(|r| low.a.row(r).get(token).copied().unwrap_or(0.0)));
                }
            }
            values
        }
        LoraPart::A => lows.iter().flat_map(|(low, _)| low.a.values.iter().copied()).collect(),
        LoraPart::B => {
            let mut values = Vec::with_capacity(parameter.elements() as usize);
            for row in first as usize..(first + parameter.rows()) as usize {
                for (low, weight) in &lows {
                    let scale = scale(low, *weight);
                    // A factor of 1 leaves the bits alone.
                    values.extend(low.b.row(row).iter().map(|b| if scale == 1.0 { *b } else { b * scale }));
                }
            }
            values
        }
        LoraPart::Magnitude => {
            let rows = first as usize..(first + parameter.rows()) as usize;
            let magnitudes = lows.first().and_then(|(low, _)| low.magnitudes.as_ref());
            magnitudes.and_then(|m| m.get(rows)).map(<[f32]>::to_vec).unwrap_or_default()
        }
        LoraPart::Squares | LoraPart::Offsets => Vec::new(),
    }
}

/// The same of a stack, whose experts' matrices are in `places`: what an adapter has nothing for is zero.
fn stack_values(
    adapters: &[(Adapter, f32)],
    places: &[super::Place],
    kind: LoraPart,
    module_scale: f32,
) -> Vec<f32> {
    let rank_of = |adapter: &Adapter| {
        places.iter().filter_map(|place| adapter.low_rank().get(&place.tensor)).map(|low| low.a.rows).max()
    };
    let ranks: Vec<usize> = adapters.iter().map(|(adapter, _)| rank_of(adapter).unwrap_or(0)).collect();
    let any = adapters
        .iter()
        .find_map(|(adapter, _)| places.iter().find_map(|place| adapter.low_rank().get(&place.tensor)));
    let columns = any.map_or(0, |low| low.a.columns);
    let mut values = Vec::new();
    for place in places {
        let lows = || {
            let of = |(adapter, weight): &(Adapter, f32)| {
                (adapter.low_rank().get(&place.tensor).cloned(), *weight)
            };
            adapters.iter().map(of).zip(&ranks)
        };
        if kind == LoraPart::Magnitude {
            // Adapters with lengths are alone.
            let own = adapters.iter().find_map(|(adapter, _)| adapter.low_rank().get(&place.tensor));
            values.extend(own.and_then(|low| low.magnitudes.as_deref()).unwrap_or_default());
            continue;
        }
        if kind == LoraPart::A {
            for ((low, _), rank) in lows() {
                let zeros = || vec![0.0; rank * columns];
                values.extend(low.map_or_else(zeros, |low| low.a.values));
            }
            continue;
        }
        let lows: Vec<_> = lows().collect();
        for row in 0..(place.rows.end - place.rows.start) as usize {
            for ((low, weight), rank) in &lows {
                match low {
                    Some(low) => {
                        let scale = low.scale * weight / module_scale;
                        values
                            .extend(low.b.row(row).iter().map(|b| if scale == 1.0 { *b } else { b * scale }));
                    }
                    None => values.resize(values.len() + **rank, 0.0),
                }
            }
        }
    }
    values
}

/// Adapters that were opened for one model, to be used together.
#[derive(Clone, Debug)]
pub struct AdapterSet {
    adapters: Vec<(Adapter, f32)>,
    layout: AdapterLayout,
}

impl AdapterSet {
    /// Opens each folder, with its weight, for a model of that shape.
    ///
    /// # Errors
    /// As [`Adapter::open`] and [`AdapterLayout::of_adapters`].
    pub fn open(folders: &[(&Path, f32)], spec: &ModelSpec) -> Result<AdapterSet, AdapterError> {
        let open = |(folder, weight): &(&Path, f32)| Ok((Adapter::open(folder, spec)?, *weight));
        let adapters = folders.iter().map(open).collect::<Result<Vec<_>, AdapterError>>()?;
        let layout = AdapterLayout::of_adapters(&adapters, spec)?;
        Ok(AdapterSet { adapters, layout })
    }

    /// One folder, for a layout that is known: a run that goes on.
    ///
    /// # Errors
    /// As [`Adapter::open`]; the adapter has other modules or ranks than the layout.
    pub fn for_layout(
        folder: &Path,
        spec: &ModelSpec,
        layout: &AdapterLayout,
    ) -> Result<AdapterSet, AdapterError> {
        AdapterSet::of(Adapter::open(folder, spec)?, folder, layout)
    }

    /// An adapter that was opened, from `folder`, for a layout that is known.
    ///
    /// # Errors
    /// It has other modules or ranks than the layout.
    pub fn of(adapter: Adapter, folder: &Path, layout: &AdapterLayout) -> Result<AdapterSet, AdapterError> {
        let module = |weight: &str| layout.modules().iter().find(|module| module.is_for(weight));
        let count: u64 = layout.modules().iter().map(|module| module.stack.unwrap_or(1)).sum();
        let fits = adapter.low_rank().len() as u64 == count
            && adapter.low_rank().iter().all(|(weight, low)| {
                module(weight).is_some_and(|m| m.rank == low.a.rows)
                    && low.magnitudes.is_some() == layout.config().use_dora
            });
        if !fits {
            return Err(AdapterError::Layout(format!(
                "{} has other modules or ranks than training.lora asks for; its run's plimsoll.yaml says which",
                folder.display()
            )));
        }
        Ok(AdapterSet { adapters: vec![(adapter, 1.0)], layout: layout.clone() })
    }

    /// Which tensors have an adapter.
    pub fn layout(&self) -> &AdapterLayout {
        &self.layout
    }

    /// The adapters and their weights.
    pub fn adapters(&self) -> &[(Adapter, f32)] {
        &self.adapters
    }

    /// Whether [`read_rows_into`](Self::read_rows_into) gives other values of a parameter than the base model's.
    pub fn replaces(&self, spec: &ModelSpec, parameter: &Parameter) -> bool {
        let rows = parameter.all_rows();
        self.adapters.iter().any(|(adapter, _)| adapter.replaces(spec, parameter, &rows).0)
    }

    /// Writes the values of some rows of a parameter as `dtype` into `out`: an adapter's own, of which there are only all
    /// rows, a tensor that an adapter replaces, or else what `base` has.
    pub fn read_rows_into(
        &self,
        spec: &ModelSpec,
        base: &WeightSource,
        parameter: &Parameter,
        rows: Range<u64>,
        dtype: DType,
        out: &mut [u8],
    ) -> Result<(), ModelError> {
        let wrong = |source| ModelError::Conversion {
            path: base.folder_or_file().to_owned(),
            tensor: parameter.name.clone(),
            dtype,
            source,
        };
        if matches!(parameter.role, Role::Lora(..)) {
            let values = adapter_values(&self.adapters, spec, &self.layout, parameter);
            return encode(&values, dtype, out).map_err(wrong);
        }
        let mut own =
            self.adapters.iter().map(|(adapter, _)| (adapter, adapter.replaces(spec, parameter, &rows)));
        if let Some((adapter, (_, all))) = own.find(|(_, (some, _))| *some) {
            let count = rows.end.saturating_sub(rows.start).saturating_mul(parameter.columns());
            let mut values = vec![0.0; count as usize];
            if !all {
                base.read_rows(parameter, rows.clone(), &mut values)?;
            }
            adapter.replace_rows(spec, parameter, rows.clone(), &mut values);
            return encode(&values, dtype, out).map_err(wrong);
        }
        base.read_rows_into(parameter, rows, dtype, out)
    }
}
