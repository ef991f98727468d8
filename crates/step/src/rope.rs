//! The table of rotary angles (Su et al. 2021).

use plimsoll_device::{DType, Device, Tensor};
use plimsoll_memory::Tag;
use plimsoll_model::{ModelSpec, RopeSpec};

use crate::StepError;
use crate::inputs::{Places, positions};

/// The tables of a model: none where positions are learned, a second one where layers with a window have their own.
#[derive(Debug)]
pub(crate) struct RopeTables {
    global: Option<RopeTable>,
    local: Option<RopeTable>,
    /// u32 `[N]`: the row that each token has, where it is not that of its position.
    rows: Option<Tensor>,
}

impl RopeTables {
    /// The tables for positions `0..positions`.
    pub fn new(device: &dyn Device, spec: &ModelSpec, positions: u64) -> Result<Self, StepError> {
        RopeTables::of_rows(device, spec, positions, (positions, &|row| row), None)
    }

    /// Those of some tokens: a row for each. `within` are their positions, where these are not their places.
    pub fn of_tokens(
        device: &dyn Device,
        spec: &ModelSpec,
        places: &Places,
        within: Option<&[u32]>,
    ) -> Result<Self, StepError> {
        let rows = positions(device, places.rows(), 0..)?;
        let position = |row: u64| match within {
            Some(within) => within.get(row as usize).copied().map_or(0, u64::from),
            None => places.of_row(row),
        };
        RopeTables::of_rows(device, spec, places.length, (places.rows(), &position), Some(rows))
    }

    fn of_rows(
        device: &dyn Device,
        spec: &ModelSpec,
        length: u64,
        tokens: (u64, &dyn Fn(u64) -> u64),
        rows: Option<Tensor>,
    ) -> Result<Self, StepError> {
        let table = |rope: &Option<RopeSpec>| -> Result<Option<RopeTable>, StepError> {
            rope.as_ref().map(|rope| RopeTable::new(device, rope, length, tokens)).transpose()
        };
        let (global, local) = (table(&spec.attention.rope)?, table(&spec.attention.local_rope)?);
        Ok(RopeTables { global, local, rows })
    }

    /// The rows of the tokens, where these are not their positions.
    pub fn rows(&self) -> Option<&Tensor> {
        self.rows.as_ref()
    }

    /// The table of layers with or without a window.
    pub fn of(&self, windowed: bool) -> Option<&RopeTable> {
        match &self.local {
            Some(local) if windowed => Some(local),
            _ => self.global.as_ref(),
        }
    }
}

/// cos and sin of every position and frequency, f32 [positions, dims / 2] each.
#[derive(Debug)]
pub(crate) struct RopeTable {
    pub cos: Tensor,
    pub sin: Tensor,
}

impl RopeTable {
    /// A row for each of so many tokens of a sequence of `length`, whose positions `position` knows.
    fn new(
        device: &dyn Device,
        rope: &RopeSpec,
        length: u64,
        (count, position): (u64, &dyn Fn(u64) -> u64),
    ) -> Result<Self, StepError> {
        let sizes = [count, rope.dims / 2];
        let cos = device.alloc(DType::F32, &sizes, Tag::Workspace, "rope.cos")?;
        let sin = device.alloc(DType::F32, &sizes, Tag::Workspace, "rope.sin")?;
        let (frequencies, magnitude) = rope.frequencies(length);
        for (table, function) in [(&cos, f64::cos as fn(f64) -> f64), (&sin, f64::sin)] {
            device.write(table, &mut |bytes| {
                let rows = bytes.chunks_exact_mut(4 * frequencies.len().max(1));
                for (token, row) in (0..).zip(rows) {
                    let position = position(token);
                    for (cell, frequency) in row.chunks_exact_mut(4).zip(&frequencies) {
                        // Angles are f32 products, as in the implementations that models were trained with.
                        let angle = f64::from(position as f32 * frequency);
                        cell.copy_from_slice(&((function(angle) * magnitude) as f32).to_ne_bytes());
                    }
                }
            })?;
        }
        Ok(RopeTable { cos, sin })
    }
}
