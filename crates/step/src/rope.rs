//! The table of rotary angles (Su et al. 2021).

use plimsoll_device::{DType, Device, Tensor};
use plimsoll_memory::Tag;
use plimsoll_model::{ModelSpec, RopeSpec};

use crate::StepError;

/// The tables of a model: none where positions are learned, a second one where layers with a window have their own.
#[derive(Debug)]
pub(crate) struct RopeTables {
    global: Option<RopeTable>,
    local: Option<RopeTable>,
}

impl RopeTables {
    /// The tables for positions `0..positions`.
    pub fn new(device: &dyn Device, spec: &ModelSpec, positions: u64) -> Result<Self, StepError> {
        let table = |rope: &Option<RopeSpec>| -> Result<Option<RopeTable>, StepError> {
            rope.as_ref().map(|rope| RopeTable::new(device, rope, positions)).transpose()
        };
        Ok(RopeTables { global: table(&spec.attention.rope)?, local: table(&spec.attention.local_rope)? })
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
    /// The table for positions `0..positions`.
    pub fn new(device: &dyn Device, rope: &RopeSpec, positions: u64) -> Result<Self, StepError> {
        let sizes = [positions, rope.dims / 2];
        let cos = device.alloc(DType::F32, &sizes, Tag::Workspace, "rope.cos")?;
        let sin = device.alloc(DType::F32, &sizes, Tag::Workspace, "rope.sin")?;
        let (frequencies, magnitude) = rope.frequencies(positions);
        for (table, function) in [(&cos, f64::cos as fn(f64) -> f64), (&sin, f64::sin)] {
            device.write(table, &mut |bytes| {
                let rows = bytes.chunks_exact_mut(4 * frequencies.len().max(1));
                for (position, row) in rows.enumerate() {
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
