//! The bytes of one tensor of the training state, wherever they live: on the device, or in parts of homes. They are shown,
//! set and loaded a part at a time, so that no more memory is taken than a part needs.

use std::ops::Range;
use std::sync::Arc;

use plimsoll_device::{DType, Device, Tensor};
use plimsoll_disk::{ALIGNMENT, DiskError, Home, LowerTiers};
use plimsoll_memory::Region;
use plimsoll_model::Parameter;

use crate::StepError;

/// Bytes that are copied at once between a home and somebody else.
const PART: usize = 1 << 20;

/// Where the bytes are.
#[derive(Clone, Debug)]
pub(crate) enum Contents {
    /// In these tensors, one after the other.
    Device(Vec<Tensor>),
    /// In these, one after the other.
    Homes(Vec<HomePart>),
}

/// Some bytes of a home.
#[derive(Clone, Debug)]
pub(crate) struct HomePart {
    pub home: Arc<Home>,
    /// The first of them.
    pub start: u64,
    pub bytes: u64,
}

impl Contents {
    /// Shows the bytes, in order, part by part. Nothing is shown in a dry run.
    pub fn read(
        &self,
        device: &dyn Device,
        tiers: &LowerTiers,
        look: &mut dyn FnMut(&[u8]),
    ) -> Result<(), StepError> {
        let parts = match self {
            Contents::Device(tensors) => {
                let mut views = tensors.iter().flat_map(|tensor| transfers(device, tensor));
                return Ok(views.try_for_each(|view| device.read(&view, look))?);
            }
            Contents::Homes(parts) => parts,
        };
        each_part(tiers, parts, |home, start, out| {
            tiers.read_now(home, start, out)?;
            look(out);
            Ok(())
        })
    }

    /// Has the bytes written, in order, part by part.
    pub fn write(
        &self,
        device: &dyn Device,
        tiers: &LowerTiers,
        fill: &mut dyn FnMut(&mut [u8]),
    ) -> Result<(), StepError> {
        let parts = match self {
            Contents::Device(tensors) => {
                let mut views = tensors.iter().flat_map(|tensor| transfers(device, tensor));
                return Ok(views.try_for_each(|view| device.write(&view, fill))?);
            }
            Contents::Homes(parts) => parts,
        };
        each_part(tiers, parts, |home, start, out| {
            fill(out);
            Ok(tiers.write_now(home, start, out)?)
        })
    }

    /// Sets the bytes to the values of a parameter. `fill` writes those of rows: where all of them are on the device, as many as go there
    /// at once; else a part of a table at a time, so that none of its size is ever in memory.
    pub fn load<E: From<StepError>>(
        &self,
        device: &dyn Device,
        tiers: &LowerTiers,
        values: Values<'_>,
        fill: &mut impl FnMut(&Parameter, Range<u64>, DType, &mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let Values { parameter: p, rows, dtype, .. } = &values;
        if let (Contents::Device(tensors), true) = (self, values.is_all()) {
            for tensor in tensors {
                for (part, view) in row_transfers(device, tensor, rows) {
                    let mut filled = Ok(());
                    device
                        .write(&view, &mut |bytes| filled = fill(p, part.clone(), *dtype, bytes))
                        .map_err(StepError::from)?;
                    filled?;
                }
            }
            return Ok(());
        }
        let mut outcome = Ok(());
        let mut parts = values.parts().map(|(rows, wanted)| -> Result<(Region, Range<usize>), E> {
            let bytes = dtype.bytes_for((rows.end - rows.start) * p.columns()).unwrap_or(0);
            let mut memory = Region::new(bytes).map_err(|e| StepError::from(DiskError::from(e)))?;
            fill(p, rows, *dtype, memory.bytes_mut())?;
            Ok((memory, wanted))
        });
        let mut part: Option<(Region, Range<usize>)> = None;
        self.write(device, tiers, &mut |mut out| {
            while !out.is_empty() && outcome.is_ok() {
                let left = part.as_ref().and_then(|(part, wanted)| part.bytes().get(wanted.clone()));
                let left = left.unwrap_or_default();
                if left.is_empty() {
                    match parts.next() {
                        Some(Ok(next)) => part = Some(next),
                        Some(Err(error)) => outcome = Err(error),
                        None => return,
                    }
                    continue;
                }
                let count = out.len().min(left.len());
                out.iter_mut().zip(left).for_each(|(out, byte)| *out = *byte);
                out = out.get_mut(count..).unwrap_or_default();
                if let Some((_, wanted)) = &mut part {
                    wanted.start += count;
                }
            }
        })?;
        outcome
    }
}

/// Some bytes of the values of a parameter in a type.
#[derive(Clone, Debug)]
pub(crate) struct Values<'p> {
    pub parameter: &'p Parameter,
    pub rows: Range<u64>,
    pub dtype: DType,
    /// Which bytes, of those of the rows.
    pub bytes: Range<u64>,
}

impl<'p> Values<'p> {
    /// All values of some rows.
    pub fn all(parameter: &'p Parameter, rows: &Range<u64>, dtype: DType) -> Values<'p> {
        let bytes = 0..dtype.bytes_for((rows.end - rows.start) * parameter.columns()).unwrap_or(0);
        Values { parameter, rows: rows.clone(), dtype, bytes }
    }

    fn is_all(&self) -> bool {
        self.bytes == Values::all(self.parameter, &self.rows, self.dtype).bytes
    }

    /// The rows that are had at once, and which of their bytes are wanted.
    fn parts(&self) -> impl Iterator<Item = (Range<u64>, Range<usize>)> {
        let (rows, wanted, dtype, columns) =
            (self.rows.clone(), self.bytes.clone(), self.dtype, self.parameter.columns());
        self.parameter.parts(dtype, 1).filter_map(move |part| {
            let part = part.start.max(rows.start)..part.end.min(rows.end);
            if part.is_empty() {
                return None;
            }
            let byte = |row: u64| dtype.bytes_for(row.saturating_sub(rows.start) * columns).unwrap_or(0);
            let (first, end) = (byte(part.start), byte(part.end));
            let bytes = wanted.start.clamp(first, end) - first..wanted.end.clamp(first, end) - first;
            (!bytes.is_empty()).then_some((part, bytes.start as usize..bytes.end as usize))
        })
    }
}

/// Sets all bytes of a tensor to zero.
pub(crate) fn clear(device: &dyn Device, tensor: &Tensor) -> Result<(), StepError> {
    let mut views = transfers(device, tensor);
    Ok(views.try_for_each(|view| device.write(&view, &mut |bytes| bytes.fill(0)))?)
}

/// A tensor's bytes, in order, as much at a time as goes between host and device at once.
fn transfers(device: &dyn Device, tensor: &Tensor) -> impl Iterator<Item = Tensor> {
    let (all, each) = (tensor.bytes(), device.traits().transfer_bytes(tensor.bytes()));
    let views = (0..all).step_by(each.max(1) as usize);
    views.filter_map(move |start| tensor.bytes_from(start..all.min(start.saturating_add(each))))
}

/// The same of a tensor of these rows of a parameter, by whole rows; all of them where none can be had by itself.
fn row_transfers(device: &dyn Device, tensor: &Tensor, rows: &Range<u64>) -> Vec<(Range<u64>, Tensor)> {
    let count = rows.end.saturating_sub(rows.start);
    let row_bytes = tensor.bytes().checked_div(count).unwrap_or(0).max(1);
    let each = (device.traits().transfer_bytes(tensor.bytes()) / row_bytes).max(1);
    let whole = || vec![(rows.clone(), tensor.clone())];
    if each >= count || tensor.rows() != count {
        return whole();
    }
    let parts = (0..count).step_by(each as usize).map(|first| first..count.min(first + each));
    let views = parts.map(|part| {
        let view = tensor.slice_rows(part.clone())?;
        Some((rows.start + part.start..rows.start + part.end, view))
    });
    views.collect::<Option<Vec<_>>>().unwrap_or_else(whole)
}

/// Goes through parts of homes with memory of at most [`PART`] bytes; every piece but the last of a part begins and ends
/// with a page. In a dry run there is nothing to go through.
fn each_part(
    tiers: &LowerTiers,
    parts: &[HomePart],
    mut work: impl FnMut(&Home, u64, &mut [u8]) -> Result<(), StepError>,
) -> Result<(), StepError> {
    const { assert!((PART as u64).is_multiple_of(ALIGNMENT)) };
    if tiers.is_dry() {
        return Ok(());
    }
    let longest = parts.iter().map(|part| part.bytes).max().unwrap_or(0).min(PART as u64);
    let mut memory = vec![0; longest as usize];
    for HomePart { home, start, bytes } in parts {
        let mut done = 0;
        while done < *bytes {
            let length = (*bytes - done).min(PART as u64) as usize;
            work(home, start + done, memory.get_mut(..length).unwrap_or_default())?;
            done += length as u64;
        }
    }
    Ok(())
}
