//! Reading a parameter: converted from the file's map into the caller's bytes, without a second copy.

use std::ops::Range;

use plimsoll_device::DType;
use plimsoll_memory::FileMap;

use super::{ModelError, Places, RowOrder, StoredAt, WeightSource};
use crate::convert::{ConversionError, convert, encode};
use crate::parameters::Parameter;

/// Bytes of the file that are read before their pages are given back. Bounds what reading adds to the resident
/// set, and is large enough that giving back costs nothing to speak of.
const STRIPE: usize = 3 << 19;

impl WeightSource {
    /// [`read_into`](Self::read_into) of some rows alone, which `out` has room for: all of them, or as f32, bf16 or f16, or in the
    /// blocks that they are stored in.
    pub fn read_rows_into(
        &self,
        parameter: &Parameter,
        rows: Range<u64>,
        dtype: DType,
        out: &mut [u8],
    ) -> Result<(), ModelError> {
        if rows == parameter.all_rows() {
            return self.read_into(parameter, dtype, out);
        }
        let place = self.place(parameter)?;
        if self.read_stored_blocks(place, rows.clone(), dtype, out) {
            return Ok(());
        }
        self.read_by_rows(parameter, place, rows, dtype, out)
    }

    /// Writes a parameter's values into `out` as `dtype`, row by row in the parameter's own order: f32, bf16 or f16, to
    /// nearest, ties to even; blocks as they are stored; or quantised as it is read, a matrix whose rows are whole blocks.
    /// `out` has just its bytes, `dtype.bytes_for(parameter.elements())`.
    pub fn read_into(&self, parameter: &Parameter, dtype: DType, out: &mut [u8]) -> Result<(), ModelError> {
        let place = self.place(parameter)?;
        let Some(part) = place.single() else {
            return match self.read_stored_blocks(place, parameter.all_rows(), dtype, out) {
                true => Ok(()),
                false => self.read_by_rows(parameter, place, parameter.all_rows(), dtype, out),
            };
        };
        let Some(file) = self.files.get(part.file) else { return Ok(()) };
        let by_rows = matches!(part.rows, RowOrder::Alternating { .. });
        if by_rows || part.packed.is_some() || (dtype.is_block() && dtype != part.dtype) {
            if self.read_stored_blocks(place, parameter.all_rows(), dtype, out) {
                return Ok(());
            }
            return self.read_by_rows(parameter, place, parameter.all_rows(), dtype, out);
        }
        let read = match part.rows {
            RowOrder::Natural if !part.plus_one => read_plain(file, part, dtype, out),
            RowOrder::Natural | RowOrder::Alternating { .. } => Ok(()),
            RowOrder::Interleaved { head_dim } => read_heads(file, part, head_dim, dtype, out),
            RowOrder::Transposed { total, first, step } => {
                read_columns(file, part, [total, first, step], dtype, out)
            }
        };
        let read = match part.plus_one {
            true => read.and_then(|()| read_less_one(file, part, dtype, out)),
            false => read,
        };
        read.map_err(|source| ModelError::Conversion {
            path: self.path.clone(),
            tensor: parameter.name.clone(),
            dtype,
            source,
        })
    }

    /// Writes rows in the blocks that they are stored in, bits only moved. `false` where they are not stored so, or where blocks
    /// go from one row to the next; what `out` holds is then undefined.
    pub(crate) fn read_stored_rows_of(
        &self,
        parameter: &Parameter,
        rows: Range<u64>,
        dtype: DType,
        out: &mut [u8],
    ) -> Result<bool, ModelError> {
        Ok(self.read_stored_blocks(self.place(parameter)?, rows, dtype, out))
    }

    /// The same by places.
    fn read_stored_blocks(&self, place: &Places, rows: Range<u64>, dtype: DType, out: &mut [u8]) -> bool {
        if !dtype.is_block() || dtype != place.dtype() {
            return false;
        }
        let columns = place.parts.first().map_or(1, |part| part.columns);
        if dtype.bytes_for(rows.end.saturating_sub(rows.start) * columns) != Some(out.len() as u64) {
            return false;
        }
        let mut out = out;
        for (part, own) in place.of_rows(rows) {
            let bytes = dtype.bytes_for((own.end - own.start) * columns).unwrap_or(0) as usize;
            let Some((to, rest)) = std::mem::take(&mut out).split_at_mut_checked(bytes) else { return false };
            out = rest;
            let whole = own == part.own_rows();
            if let Some(packed) = part.packed.as_ref().filter(|packed| packed.matrix.keeps_rows()) {
                let rows = own.start - part.first..own.end - part.first;
                let row_bytes = bytes / (rows.end - rows.start).max(1) as usize;
                let mut to = to;
                for run in packed.runs(rows.clone()) {
                    let (own, rest) = std::mem::take(&mut to).split_at_mut(run.len() * row_bytes);
                    to = rest;
                    if packed.matrix.keep_rows(&self.files, run, own).is_none() {
                        return false;
                    }
                }
                packed.release(&self.files, rows);
                continue;
            }
            if let Some(packed) = &part.packed {
                if !whole || !part.is_whole(packed) || packed.matrix.keep(&self.files, dtype, to).is_none() {
                    return false;
                }
                packed.matrix.release(&self.files);
                continue;
            }
            if !part.is_as_it_is(dtype) || !whole && !columns.is_multiple_of(dtype.run_elements()) {
                return false;
            }
            let first = dtype.bytes_for((own.start - part.first) * columns).unwrap_or(0) as usize;
            let Some(stored) = self.bytes(part).get(first..first + bytes) else { return false };
            to.copy_from_slice(stored);
            if let Some(file) = self.files.get(part.file) {
                let start = part.bytes.start + first;
                file.release(start..start + bytes);
            }
        }
        true
    }
}

/// The elements in order, a stripe at a time.
fn read_plain(file: &FileMap, place: &StoredAt, to: DType, out: &mut [u8]) -> Result<(), ConversionError> {
    let bytes = &file.bytes()[place.bytes.clone()];
    check_length(place, bytes, to, out)?;
    let (from_bytes, from_elements) =
        (place.dtype.block_bytes() as usize, place.dtype.block_elements() as usize);
    // Whole blocks: those of `to` are single elements or the same ones.
    let blocks = STRIPE / from_bytes;
    let stripe = blocks * from_bytes;
    let stripe_out = blocks * from_elements / to.block_elements() as usize * to.block_bytes() as usize;
    let mut start = place.bytes.start;
    for (bytes, out) in bytes.chunks(stripe).zip(out.chunks_mut(stripe_out)) {
        convert(place.dtype, bytes, to, out)?;
        file.release(start..start + bytes.len());
        start += bytes.len();
    }
    Ok(())
}

/// A stored 1 + x, less 1.
fn read_less_one(file: &FileMap, place: &StoredAt, to: DType, out: &mut [u8]) -> Result<(), ConversionError> {
    let bytes = &file.bytes()[place.bytes.clone()];
    check_length(place, bytes, to, out)?;
    let mut values = vec![0.0f32; place.elements() as usize];
    convert(place.dtype, bytes, DType::F32, bytemuck::cast_slice_mut(&mut values))?;
    values.iter_mut().for_each(|value| *value -= 1.0);
    encode(&values, to, out)
}

/// Columns `first`, `first + step` and so on of a matrix of `total` columns, as rows.
fn read_columns(
    file: &FileMap,
    place: &StoredAt,
    [total, first, step]: [u64; 3],
    to: DType,
    out: &mut [u8],
) -> Result<(), ConversionError> {
    let bytes = &file.bytes()[place.bytes.clone()];
    if !to.is_float() || place.dtype.block_elements() != 1 {
        return Err(ConversionError::Unsupported { from: place.dtype, to });
    }
    let (rows, columns) = (place.count as usize, place.columns as usize);
    let (from_size, to_size) = (place.dtype.block_bytes() as usize, to.block_bytes() as usize);
    if bytes.len() != columns * total as usize * from_size || out.len() != rows * columns * to_size {
        let (from, source_bytes) = (place.dtype, bytes.len());
        return Err(ConversionError::Length { from, source_bytes, to, out_bytes: out.len() });
    }
    let mut line = Vec::new();
    for (column, stored) in bytes.chunks_exact(total as usize * from_size).enumerate() {
        let own = &stored[first as usize * from_size..];
        let span = (rows.saturating_sub(1) * step as usize + 1) * from_size;
        line.resize(span / from_size * to_size, 0);
        convert(place.dtype, &own[..span], to, &mut line)?;
        let values = line.chunks_exact(to_size).step_by(step.max(1) as usize);
        for (value, row) in values.zip(out.chunks_exact_mut(columns * to_size)) {
            row[column * to_size..][..to_size].copy_from_slice(value);
        }
    }
    file.release(place.bytes.clone());
    Ok(())
}

/// The rows of every head put back in order, a head at a time.
fn read_heads(
    file: &FileMap,
    place: &StoredAt,
    head_dim: u64,
    to: DType,
    out: &mut [u8],
) -> Result<(), ConversionError> {
    let bytes = &file.bytes()[place.bytes.clone()];
    check_length(place, bytes, to, out)?;
    let rows = place.count.max(1) as usize;
    let (row_bytes, row_out) = (bytes.len() / rows, out.len() / rows);
    let mut released = place.bytes.start;
    for (row, out) in out.chunks_exact_mut(row_out.max(1)).enumerate() {
        let stored = place.rows.stored_row(row as u64) as usize;
        convert(place.dtype, &bytes[stored * row_bytes..(stored + 1) * row_bytes], to, out)?;
        let head_start = place.bytes.start + row / head_dim as usize * head_dim as usize * row_bytes;
        if head_start - released > STRIPE {
            file.release(released..head_start);
            released = head_start;
        }
    }
    file.release(released..place.bytes.end);
    Ok(())
}

/// Refuses a type that is not computed on, and bytes that are too few or too many, before any is written.
fn check_length(place: &StoredAt, bytes: &[u8], to: DType, out: &[u8]) -> Result<(), ConversionError> {
    if !to.is_float() && to != place.dtype {
        return Err(ConversionError::Unsupported { from: place.dtype, to });
    }
    let elements = place.elements();
    if to.bytes_for(elements) != Some(out.len() as u64) {
        let (from, source_bytes) = (place.dtype, bytes.len());
        return Err(ConversionError::Length { from, source_bytes, to, out_bytes: out.len() });
    }
    Ok(())
}
