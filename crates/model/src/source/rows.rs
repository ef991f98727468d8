//! A parameter's values row by row, whatever they are stored as: what converting, quantising and unpacking read.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use plimsoll_device::DType;
use plimsoll_device::cpu::quantize::four_bit::{self, FourBit, Magnitudes};
use plimsoll_device::cpu::quantize::{can_quantize, quantize};

use plimsoll_memory::usable_cores;

use super::{ModelError, Places, RowOrder, StoredAt, WeightSource};
use crate::convert::{ConversionError, check_finite, convert, encode};
use crate::parameters::Parameter;

/// Values that are read at a time, about.
const STRIPE: u64 = 1 << 20;

/// Rows of a stripe, in whole `multiple`s but for the last one.
pub(crate) fn stripes(rows: u64, columns: u64, multiple: u64) -> impl Iterator<Item = Range<u64>> {
    let each = (STRIPE / columns.max(1)).max(1).next_multiple_of(multiple.max(1));
    (0..rows.div_ceil(each)).map(move |i| i * each..rows.min((i + 1) * each))
}

/// Rows that are whole blocks of the flat matrix together.
pub(crate) fn rows_of_whole_blocks(columns: u64) -> u64 {
    let block = four_bit::BLOCK as u64;
    // A power of two has the largest common divisor with what it is no multiple of in its factors of two.
    block >> columns.trailing_zeros().min(block.trailing_zeros())
}

/// Threads for work on one stripe.
pub(crate) fn threads() -> usize {
    usable_cores()
}

impl WeightSource {
    /// Writes the f32 values of `rows` of a parameter, in the parameter's own order, into `out`; a vector's elements are
    /// rows. The file's pages that were read are given back.
    ///
    /// # Errors
    /// The parameter is another model's, or rows and `out` are not of one size.
    pub fn read_rows(
        &self,
        parameter: &Parameter,
        rows: Range<u64>,
        out: &mut [f32],
    ) -> Result<(), ModelError> {
        let place = self.place(parameter)?;
        let columns = parameter.columns();
        let count = rows.end.checked_sub(rows.start).and_then(|count| count.checked_mul(columns));
        if rows.end > parameter.rows() || count != Some(out.len() as u64) {
            let source = ConversionError::Length {
                from: place.dtype(),
                source_bytes: place.parts.iter().map(|part| part.bytes.len()).sum(),
                to: DType::F32,
                out_bytes: size_of_val(out),
            };
            return Err(self.conversion(parameter, DType::F32, source));
        }
        let mut out = out;
        for (part, own) in place.of_rows(rows) {
            let count = ((own.end - own.start) * columns) as usize;
            let (values, rest) = std::mem::take(&mut out).split_at_mut(count);
            out = rest;
            let own = own.start - part.first..own.end - part.first;
            if let Some(packed) = &part.packed {
                let mut values = &mut *values;
                for run in packed.runs(own.clone()) {
                    let (own, rest) = std::mem::take(&mut values).split_at_mut(run.len() * columns as usize);
                    values = rest;
                    packed.matrix.read_rows(&self.files, run, own);
                }
                packed.release(&self.files, own);
            } else {
                self.read_stored_rows(part, own, values)
                    .map_err(|source| self.conversion(parameter, DType::F32, source))?;
            }
            if part.plus_one {
                values.iter_mut().for_each(|value| *value -= 1.0);
            }
        }
        Ok(())
    }

    /// Rows of one place, by their numbers there.
    fn read_stored_rows(
        &self,
        place: &StoredAt,
        rows: Range<u64>,
        out: &mut [f32],
    ) -> Result<(), ConversionError> {
        let Some(file) = self.files.get(place.file) else { return Ok(()) };
        let bytes = self.bytes(place);
        let columns = place.columns as usize;
        let row_bytes = bytes.len() / place.count.max(1) as usize;
        let read = |bytes: &[u8], out: &mut [f32]| {
            convert(place.dtype, bytes, DType::F32, bytemuck::cast_slice_mut(out))
        };
        let missing = || ConversionError::Length {
            from: place.dtype,
            source_bytes: bytes.len(),
            to: DType::F32,
            out_bytes: size_of::<f32>(),
        };
        match place.rows {
            RowOrder::Natural => {
                let own = rows.start as usize * row_bytes..rows.end as usize * row_bytes;
                read(bytes.get(own.clone()).ok_or_else(missing)?, out)?;
                file.release(place.bytes.start + own.start..place.bytes.start + own.end);
            }
            RowOrder::Interleaved { head_dim } => {
                for (row, out) in rows.clone().zip(out.chunks_exact_mut(columns.max(1))) {
                    let stored = place.rows.stored_row(row) as usize;
                    read(bytes.get(stored * row_bytes..(stored + 1) * row_bytes).ok_or_else(missing)?, out)?;
                }
                // Whole heads: what came before them is done with.
                let done = rows.end / head_dim.max(1) * head_dim;
                let start = rows.start / head_dim.max(1) * head_dim;
                file.release(
                    place.bytes.start + start as usize * row_bytes
                        ..place.bytes.start + done as usize * row_bytes,
                );
            }
            RowOrder::Alternating { of, first } => {
                let mut line = vec![0.0; columns * of as usize];
                read(bytes, &mut line)?;
                let own = line.iter().skip(first as usize).step_by(of.max(1) as usize);
                out.iter_mut().zip(own).for_each(|(out, value)| *out = *value);
                file.release(place.bytes.clone());
            }
            RowOrder::Transposed { total, first, step } if place.dtype.is_block() => {
                let mut all = vec![0.0; columns * total as usize];
                read(bytes, &mut all)?;
                for (row, out) in rows.zip(out.chunks_exact_mut(columns.max(1))) {
                    let own = all.iter().skip((first + row * step) as usize).step_by(total.max(1) as usize);
                    out.iter_mut().zip(own).for_each(|(out, value)| *out = *value);
                }
                file.release(place.bytes.clone());
            }
            RowOrder::Transposed { total, first, step } => {
                let size = place.dtype.block_bytes() as usize;
                let (count, step) = ((rows.end - rows.start) as usize, step.max(1) as usize);
                let mut line = vec![0.0; count.saturating_sub(1) * step + 1];
                for (column, stored) in bytes.chunks_exact((total as usize * size).max(1)).enumerate() {
                    let at = (first as usize + rows.start as usize * step) * size;
                    read(stored.get(at..at + line.len() * size).ok_or_else(missing)?, &mut line)?;
                    let own = line.iter().step_by(step);
                    for (value, row) in own.zip(out.chunks_exact_mut(columns.max(1))) {
                        if let Some(out) = row.get_mut(column) {
                            *out = *value;
                        }
                    }
                }
                file.release(place.bytes.clone());
            }
        }
        Ok(())
    }

    /// Rows of a parameter, a stripe at a time; all of them where it is packed or to be quantised.
    pub(super) fn read_by_rows(
        &self,
        parameter: &Parameter,
        place: &Places,
        rows: Range<u64>,
        to: DType,
        out: &mut [u8],
    ) -> Result<(), ModelError> {
        if let Some(part) = place.single()
            && let Some(packed) = part.packed.as_ref().filter(|packed| part.is_whole(packed))
            && rows == parameter.all_rows()
            && to == part.dtype
            && to.is_block()
            && packed.matrix.keep(&self.files, to, out).is_some()
        {
            packed.matrix.release(&self.files);
            return Ok(());
        }
        let fail = |source| self.conversion(parameter, to, source);
        let read = |rows, values: &mut [f32]| self.read_rows(parameter, rows, values);
        encode_rows(parameter, rows.clone(), place.dtype(), to, out, Some(&self.offsets), fail, read)?;
        place.of_rows(rows).for_each(|(part, _)| self.release_part(part));
        Ok(())
    }

    pub(crate) fn conversion(
        &self,
        parameter: &Parameter,
        dtype: DType,
        source: ConversionError,
    ) -> ModelError {
        ModelError::Conversion { path: self.path.clone(), tensor: parameter.name.clone(), dtype, source }
    }
}

/// Rows of a parameter, which `read` gives in f32 a stripe at a time, as `to`: plain, or quantised. They were `from` before,
/// which errors name. A type that looks at the whole matrix needs all rows; or the place for what it found there, of which rows that
/// are whole runs then have the bits that they have among all.
#[allow(clippy::too_many_arguments)]
pub(crate) fn encode_rows<E>(
    parameter: &Parameter,
    rows: Range<u64>,
    from: DType,
    to: DType,
    out: &mut [u8],
    offsets: Option<&Offsets>,
    fail: impl Fn(ConversionError) -> E,
    mut read: impl FnMut(Range<u64>, &mut [f32]) -> Result<(), E>,
) -> Result<(), E> {
    let columns = parameter.columns();
    let is_run = |row: u64| row.saturating_mul(columns).is_multiple_of(to.run_elements());
    let runs = offsets.is_some() && is_run(rows.start) && is_run(rows.end);
    let fits = FourBit::of(to).is_none() || rows == parameter.all_rows() || runs;
    if !(to.is_float() || can_quantize(to) && columns.is_multiple_of(to.row_multiple()) && fits) {
        return Err(fail(ConversionError::Unsupported { from, to }));
    }
    let count = rows.end.saturating_sub(rows.start).saturating_mul(columns);
    if to.bytes_for(count) != Some(out.len() as u64) {
        let source_bytes = from.bytes_for(count).unwrap_or(0) as usize;
        return Err(fail(ConversionError::Length { from, source_bytes, to, out_bytes: out.len() }));
    }
    if let Some(kind) = FourBit::of(to) {
        let mut read = |rows: Range<u64>, values: &mut [f32]| {
            read(rows, values)?;
            check_finite(values, to).map_err(&fail)
        };
        let (doubly, whole) = (!to.has_rows(), rows == parameter.all_rows());
        let (codes, magnitudes) = FourBitMatrix::code(parameter, rows, kind, &mut read)?;
        let magnitudes = match offsets {
            Some(offsets) if doubly && !whole => {
                Magnitudes::around(magnitudes, Some(offsets.of(parameter, kind, &mut read)?))
            }
            _ => Magnitudes::new(magnitudes, doubly),
        };
        let arranged = four_bit::arrange(to, count as usize, &codes, &magnitudes, out);
        debug_assert!(arranged.is_some());
        return Ok(());
    }
    let mut values = Vec::new();
    let mut out = out;
    for part in stripes(rows.end.saturating_sub(rows.start), columns, 1) {
        let count = (part.end - part.start) * columns;
        values.resize(count as usize, 0.0);
        read(rows.start + part.start..rows.start + part.end, &mut values)?;
        let bytes = to.bytes_for(count).unwrap_or(0) as usize;
        let (own, rest) = std::mem::take(&mut out).split_at_mut(bytes);
        out = rest;
        encode_stripe(&values, to, own).map_err(&fail)?;
    }
    Ok(())
}

/// Values as `to`: plain, or blocks that need nothing but themselves.
pub(crate) fn encode_stripe(values: &[f32], to: DType, out: &mut [u8]) -> Result<(), ConversionError> {
    if to.is_float() {
        return encode(values, to, out);
    }
    check_finite(values, to)?;
    quantize(to, values, out, threads()).ok_or(ConversionError::Unsupported { from: DType::F32, to })
}

/// The offsets of doubly quantised matrices of which parts were asked for, by the parameters' names: each is the mean over a whole
/// matrix, which is read for it once.
#[derive(Debug, Default)]
pub(crate) struct Offsets(Mutex<HashMap<String, f32>>);

impl Offsets {
    fn of<E>(
        &self,
        parameter: &Parameter,
        kind: FourBit,
        read: &mut impl FnMut(Range<u64>, &mut [f32]) -> Result<(), E>,
    ) -> Result<f32, E> {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(offset) = known.get(&parameter.name) {
            return Ok(*offset);
        }
        let mut magnitudes =
            Vec::with_capacity(parameter.elements().div_ceil(four_bit::BLOCK as u64) as usize);
        for rows in stripes(parameter.rows(), parameter.columns(), rows_of_whole_blocks(parameter.columns()))
        {
            magnitudes.extend(FourBitMatrix::code(parameter, rows, kind, read)?.1);
        }
        let offset = Magnitudes::offset(&magnitudes);
        known.insert(parameter.name.clone(), offset);
        Ok(offset)
    }
}

/// A matrix in 4 bits, as bitsandbytes has it in memory.
pub(crate) struct FourBitMatrix {
    /// Two to a byte.
    pub codes: Vec<u8>,
    pub magnitudes: Magnitudes,
}

impl FourBitMatrix {
    /// Quantises a matrix, reading it once and a stripe at a time.
    pub fn of<E>(
        parameter: &Parameter,
        kind: FourBit,
        doubly: bool,
        mut read: impl FnMut(Range<u64>, &mut [f32]) -> Result<(), E>,
    ) -> Result<FourBitMatrix, E> {
        let (codes, magnitudes) = FourBitMatrix::code(parameter, parameter.all_rows(), kind, &mut read)?;
        Ok(FourBitMatrix { codes, magnitudes: Magnitudes::new(magnitudes, doubly) })
    }

    /// Codes and magnitudes of rows, of which the first begins a block.
    fn code<E>(
        parameter: &Parameter,
        rows: Range<u64>,
        kind: FourBit,
        read: &mut impl FnMut(Range<u64>, &mut [f32]) -> Result<(), E>,
    ) -> Result<(Vec<u8>, Vec<f32>), E> {
        let columns = parameter.columns();
        let total = rows.end.saturating_sub(rows.start);
        let elements = (total * columns) as usize;
        let mut codes = vec![0; elements.div_ceil(2)];
        let mut magnitudes = vec![0.0; elements.div_ceil(four_bit::BLOCK)];
        let mut values = Vec::new();
        for part in stripes(total, columns, rows_of_whole_blocks(columns)) {
            let (start, count) =
                ((part.start * columns) as usize, ((part.end - part.start) * columns) as usize);
            values.resize(count, 0.0);
            read(rows.start + part.start..rows.start + part.end, &mut values)?;
            // A stripe begins on a block.
            let (codes, magnitudes) = (&mut codes[start / 2..], &mut magnitudes[start / four_bit::BLOCK..]);
            let (codes, magnitudes) =
                (&mut codes[..count.div_ceil(2)], &mut magnitudes[..count.div_ceil(four_bit::BLOCK)]);
            let coded = four_bit::code(kind, &values, codes, magnitudes, threads());
            debug_assert!(coded.is_some());
        }
        Ok((codes, magnitudes))
    }
}
