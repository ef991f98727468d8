//! Matrices that are stored as several tensors: what quantising libraries make of linears in Hugging Face checkpoints.
//!
//! `find` recognises their tensors by name; here their rows are decoded, from the memory map and a few at a time.
//!
//! - bitsandbytes, 4 bits (QLoRA, Dettmers et al. 2023): codes over the flat matrix, and the quantisation's state beside it.
//! - bitsandbytes, 8 bits (LLM.int8, Dettmers et al. 2022): signed bytes, and each row's largest magnitude, `SCB`.
//! - GPTQ (Frantar et al. 2022): `qweight [in * bits / 32, out]`, 32-bit words along the inputs; `qzeros [groups, out * bits
//!   / 32]`; `scales [groups, out]`; `g_idx [in]`, each input's group.
//! - MXFP4 of gpt-oss (OCP Microscaling Formats 1.0): `_blocks [E, out, in / 32, 16]`, bytes with a value in the lower half before that
//!   in the upper one, and `_scales [E, out, in / 32]`, exponents of two. A stack, where transformers has `[E, in, out]` in memory.
//! - 8-bit floats, compressed-tensors, NVIDIA's Model Optimizer: see `scaled`.
//! - AWQ (Lin et al. 2023): `qweight [in, out / 8]`, words along the outputs with the places 0 2 4 6 1 3 5 7; `qzeros` alike.

mod find;
mod scaled;

use std::ops::Range;

use half::{bf16, f16};
use plimsoll_device::DType;
use plimsoll_device::cpu::quantize::four_bit::{self, FourBit, Magnitudes};
use plimsoll_device::cpu::quantize::{SIGNED_DYNAMIC_MAP, int8_scale};
use plimsoll_memory::FileMap;

use crate::convert::convert;
use crate::safetensors::StoredDType;

pub(super) use find::{Found, find};
use scaled::Scaled;

/// A tensor in one of a model's files.
#[derive(Clone, Debug)]
pub(super) struct Span {
    pub file: usize,
    pub bytes: Range<usize>,
    pub dtype: StoredDType,
}

impl Span {
    fn of<'a>(&self, files: &'a [FileMap]) -> &'a [u8] {
        files.get(self.file).and_then(|file| file.bytes().get(self.bytes.clone())).unwrap_or_default()
    }

    /// Element `index` of a float tensor; 0 where there is none.
    fn float(&self, bytes: &[u8], index: usize) -> f32 {
        fn at<const N: usize>(bytes: &[u8], index: usize) -> [u8; N] {
            bytes.get(index * N..).and_then(|rest| rest.first_chunk()).copied().unwrap_or([0; N])
        }
        match self.dtype {
            StoredDType::F16 => f16::from_le_bytes(at(bytes, index)).to_f32(),
            StoredDType::BF16 => bf16::from_le_bytes(at(bytes, index)).to_f32(),
            StoredDType::F8_E4M3 => scaled::e4m3(at::<1>(bytes, index)[0]),
            StoredDType::F8_E8M0 | StoredDType::U8 => scaled::power_of_two(at::<1>(bytes, index)[0]),
            _ => f32::from_le_bytes(at(bytes, index)),
        }
    }

    fn floats(&self, files: &[FileMap]) -> Vec<f32> {
        let bytes = self.of(files);
        let count = bytes.len() / (self.dtype.bits() as usize / 8).max(1);
        (0..count).map(|index| self.float(bytes, index)).collect()
    }
}

fn word(bytes: &[u8], index: usize) -> u32 {
    bytes.get(index * 4..).and_then(|rest| rest.first_chunk()).copied().map_or(0, u32::from_le_bytes)
}

/// Elements of a block of [`DType::Int8`], and its bytes.
const INT8_BLOCK: (usize, usize) = (64, 68);

/// Writes signed bytes in blocks of [`DType::Int8`], with the scale of each by its first element; `None` where `out` is not just large
/// enough for whole blocks.
fn arrange_int8(codes: &[u8], scale: impl Fn(usize) -> f32, out: &mut [u8]) -> Option<()> {
    let (elements, bytes) = INT8_BLOCK;
    if !codes.len().is_multiple_of(elements) || out.len() != codes.len() / elements * bytes {
        return None;
    }
    for (i, (out, codes)) in out.chunks_exact_mut(bytes).zip(codes.chunks_exact(elements)).enumerate() {
        let (head, own) = out.split_first_chunk_mut::<4>()?;
        *head = scale(i * elements).to_le_bytes();
        own.copy_from_slice(codes);
    }
    Some(())
}

/// The largest magnitudes of 4-bit blocks, as stored.
#[derive(Clone, Debug)]
pub(super) enum StoredMagnitudes {
    F32(Span),
    /// Places in a map, which in files of other versions of PyTorch may differ in last bits from this engine's.
    Coded {
        codes: Span,
        factors: Span,
        block: usize,
        offset: f32,
        map: Box<[f32; 256]>,
    },
}

/// How a matrix is stored.
#[derive(Clone, Debug)]
pub(super) enum Packing {
    FourBit {
        kind: FourBit,
        block: usize,
        codes: Span,
        magnitudes: StoredMagnitudes,
    },
    EightBit {
        codes: Span,
        magnitudes: Span,
    },
    Gptq {
        bits: usize,
        words: Span,
        zeros: Span,
        scales: Span,
        groups: Option<Span>,
        group: usize,
        /// What is added to a stored zero point: 1 in the format's first version.
        zero_offset: i32,
    },
    Awq {
        words: Span,
        zeros: Span,
        scales: Span,
        group: usize,
    },
    Mxfp4 {
        codes: Span,
        scales: Span,
        /// Matrices of the stack.
        stack: usize,
    },
    Scaled(Scaled),
}

/// A packed matrix `[rows, columns]`.
#[derive(Clone, Debug)]
pub(super) struct Packed {
    pub packing: Packing,
    pub rows: usize,
    pub columns: usize,
}

impl Packed {
    /// The storage that holds it without loss, f32 where only its values can be had.
    pub fn dtype(&self) -> DType {
        match &self.packing {
            Packing::FourBit { kind, block, magnitudes, .. } if block.is_multiple_of(four_bit::BLOCK) => {
                let same = *block == four_bit::BLOCK;
                let doubly = same
                    && matches!(magnitudes, StoredMagnitudes::Coded { block, map, .. }
                        if *block == four_bit::NESTED_BLOCK && **map == SIGNED_DYNAMIC_MAP);
                kind.dtype(doubly)
            }
            Packing::EightBit { .. } if self.columns.is_multiple_of(64) => DType::Int8,
            Packing::Mxfp4 { .. } => DType::Mxfp4,
            Packing::Scaled(scaled) if scaled.is_int8(self.columns) => DType::Int8,
            _ => DType::F32,
        }
    }

    /// Whether any of its rows can be had as they are stored: those of a stack whose matrices are stored the other way round than
    /// transformers has them.
    pub fn keeps_rows(&self) -> bool {
        matches!(self.packing, Packing::Mxfp4 { .. })
    }

    /// The shape of what it stands for in a checkpoint that is not packed.
    pub fn shape(&self) -> Vec<u64> {
        match self.packing {
            Packing::Mxfp4 { stack, .. } => {
                vec![stack as u64, self.columns as u64, (self.rows / stack.max(1)) as u64]
            }
            _ => vec![self.rows as u64, self.columns as u64],
        }
    }

    /// Writes rows as they are stored, bits only moved; `None` where they cannot be had so.
    pub fn keep_rows(&self, files: &[FileMap], rows: Range<usize>, out: &mut [u8]) -> Option<()> {
        let Packing::Mxfp4 { codes, scales, .. } = &self.packing else { return None };
        let blocks = self.mxfp4_blocks(&rows);
        let codes = codes.of(files).get(blocks.start * 16..blocks.end * 16)?;
        let scales = scales.of(files).get(blocks)?;
        let all =
            out.chunks_exact_mut(DType::Mxfp4.block_bytes() as usize).zip(codes.chunks_exact(16)).zip(scales);
        for ((out, codes), scale) in all {
            let (head, own) = out.split_first_mut()?;
            *head = *scale;
            let code = |place: usize| codes[place / 2] >> (place % 2 * 4) & 15;
            own.iter_mut().enumerate().for_each(|(i, byte)| *byte = code(i) | code(i + 16) << 4);
        }
        Some(())
    }

    /// Gives the pages of some rows back to the system.
    pub fn release_rows(&self, files: &[FileMap], rows: Range<usize>) {
        if let Packing::Scaled(Scaled { codes, .. }) = &self.packing {
            let (start, row) = (codes.bytes.start, codes.bytes.len() / self.rows.max(1));
            if let Some(file) = files.get(codes.file) {
                file.release(start + rows.start * row..start + rows.end * row);
            }
            return;
        }
        let Packing::Mxfp4 { codes, scales, .. } = &self.packing else { return };
        let blocks = self.mxfp4_blocks(&rows);
        for (span, size) in [(codes, 16), (scales, 1)] {
            if let Some(file) = files.get(span.file) {
                let start = span.bytes.start;
                file.release(start + blocks.start * size..start + blocks.end * size);
            }
        }
    }

    fn mxfp4_blocks(&self, rows: &Range<usize>) -> Range<usize> {
        let each = self.columns / DType::Mxfp4.block_elements() as usize;
        rows.start * each..rows.end * each
    }

    /// The tensor with the codes.
    pub fn codes(&self) -> &Span {
        match &self.packing {
            Packing::FourBit { codes, .. } | Packing::EightBit { codes, .. } => codes,
            Packing::Mxfp4 { codes, .. } => codes,
            Packing::Scaled(scaled) => &scaled.codes,
            Packing::Gptq { words, .. } | Packing::Awq { words, .. } => words,
        }
    }

    fn spans(&self) -> Vec<&Span> {
        match &self.packing {
            Packing::FourBit { codes, magnitudes: StoredMagnitudes::F32(magnitudes), .. } => {
                vec![codes, magnitudes]
            }
            Packing::FourBit {
                codes: all,
                magnitudes: StoredMagnitudes::Coded { codes, factors, .. },
                ..
            } => vec![all, codes, factors],
            Packing::EightBit { codes, magnitudes } => vec![codes, magnitudes],
            Packing::Mxfp4 { codes, scales, .. } => vec![codes, scales],
            Packing::Scaled(scaled) => scaled.spans().collect(),
            Packing::Gptq { words, zeros, scales, groups, .. } => {
                [words, zeros, scales].into_iter().chain(groups).collect()
            }
            Packing::Awq { words, zeros, scales, .. } => vec![words, zeros, scales],
        }
    }

    /// Bytes of all its tensors.
    pub fn stored_bytes(&self) -> u64 {
        self.spans().iter().map(|span| span.bytes.len() as u64).sum()
    }

    /// Gives its pages back to the system.
    pub fn release(&self, files: &[FileMap]) {
        for span in self.spans() {
            if let Some(file) = files.get(span.file) {
                file.release(span.bytes.clone());
            }
        }
    }

    /// Writes the whole matrix in its own [`dtype`](Packed::dtype), bits only moved, or of one in 4 bits with magnitudes in f32.
    /// `None`, and nothing done, where `dtype` is another or `out` is not just large enough.
    pub fn keep(&self, files: &[FileMap], dtype: DType, out: &mut [u8]) -> Option<()> {
        let elements = self.rows * self.columns;
        match &self.packing {
            Packing::FourBit { kind, block, codes, magnitudes } => {
                if self.dtype() == DType::F32 || (dtype != self.dtype() && dtype != kind.dtype(false)) {
                    return None;
                }
                let kept = if dtype.has_rows() {
                    // Larger blocks are several with one magnitude.
                    let all = self.decoded(files, magnitudes);
                    let place = |i: usize| all.get(i * four_bit::BLOCK / block).copied().unwrap_or(0.0);
                    Magnitudes::F32((0..elements.div_ceil(four_bit::BLOCK)).map(place).collect())
                } else if let StoredMagnitudes::Coded { codes, factors, offset, .. } = magnitudes {
                    let (codes, factors) = (codes.of(files).to_vec(), factors.floats(files));
                    Magnitudes::Coded { codes, factors, offset: *offset }
                } else {
                    return None;
                };
                four_bit::arrange(dtype, elements, codes.of(files), &kept, out)
            }
            Packing::EightBit { codes, magnitudes } if [self.dtype(), dtype] == [DType::Int8; 2] => {
                let magnitudes = magnitudes.floats(files);
                let scale = |first: usize| {
                    int8_scale(magnitudes.get(first / self.columns.max(1)).copied().unwrap_or(0.0))
                };
                arrange_int8(codes.of(files), scale, out)
            }
            Packing::Scaled(scaled) if dtype == DType::Int8 => scaled.keep_int8(files, self.columns, out),
            _ => None,
        }
    }

    fn decoded(&self, files: &[FileMap], magnitudes: &StoredMagnitudes) -> Vec<f32> {
        match magnitudes {
            StoredMagnitudes::F32(span) => span.floats(files),
            StoredMagnitudes::Coded { codes, factors, block, offset, map } => {
                let factors = factors.floats(files);
                let one = |(i, code): (usize, &u8)| {
                    let factor = factors.get(i / block).copied().unwrap_or(0.0);
                    map[usize::from(*code)] * factor + offset
                };
                codes.of(files).iter().enumerate().map(one).collect()
            }
        }
    }

    /// The values of `rows`, which exist; `out` has room for just them.
    pub fn read_rows(&self, files: &[FileMap], rows: Range<usize>, out: &mut [f32]) {
        match &self.packing {
            Packing::FourBit { kind, block, codes, magnitudes } => {
                let (codes, values) = (codes.of(files), kind.values());
                let first = rows.start * self.columns;
                let magnitude = |index: usize| match magnitudes {
                    StoredMagnitudes::F32(span) => span.float(span.of(files), index),
                    StoredMagnitudes::Coded { codes, factors, block, offset, map } => {
                        let code = codes.of(files).get(index).copied().unwrap_or(0);
                        let factor = factors.float(factors.of(files), index / block);
                        map[usize::from(code)] * factor + offset
                    }
                };
                let mut current = (usize::MAX, 0.0);
                for (index, out) in (first..).zip(out) {
                    if index / block != current.0 {
                        current = (index / block, magnitude(index / block));
                    }
                    let pair = codes.get(index / 2).copied().unwrap_or(0);
                    let code = if index % 2 == 0 { pair >> 4 } else { pair & 15 };
                    *out = values[usize::from(code)] * current.1;
                }
            }
            Packing::EightBit { codes, magnitudes } => {
                let codes = codes.of(files);
                let all = magnitudes.of(files);
                for (row, out) in rows.zip(out.chunks_exact_mut(self.columns.max(1))) {
                    let scale = int8_scale(magnitudes.float(all, row));
                    let codes = codes.get(row * self.columns..).unwrap_or_default();
                    for (code, out) in codes.iter().zip(out) {
                        *out = f32::from(code.cast_signed()) * scale;
                    }
                }
            }
            Packing::Mxfp4 { .. } => {
                let dtype = DType::Mxfp4;
                let mut stored = vec![0; dtype.bytes_for(out.len() as u64).unwrap_or(0) as usize];
                let kept = self.keep_rows(files, rows, &mut stored);
                let read = kept.map(|()| convert(dtype, &stored, DType::F32, bytemuck::cast_slice_mut(out)));
                if !matches!(read, Some(Ok(()))) {
                    out.fill(f32::NAN);
                }
            }
            Packing::Scaled(scaled) => scaled.read_rows(files, self.columns, rows, out),
            Packing::Gptq { bits, words, zeros, scales, groups, group, zero_offset } => {
                let (words, zeros, all_scales) = (words.of(files), zeros.of(files), scales.of(files));
                let groups = groups.as_ref().map(|span| span.of(files));
                let (per_word, mask) = (32 / bits, (1u32 << bits) - 1);
                for column in 0..self.columns {
                    let group = groups.map_or(column / group, |groups| word(groups, column) as usize);
                    for (i, row) in rows.clone().enumerate() {
                        let code =
                            word(words, column / per_word * self.rows + row) >> (column % per_word * bits);
                        let zero = word(zeros, group * (self.rows / per_word) + row / per_word)
                            >> (row % per_word * bits);
                        let steps = (code & mask).cast_signed() - ((zero & mask).cast_signed() + zero_offset);
                        out[i * self.columns + column] =
                            steps as f32 * scales.float(all_scales, group * self.rows + row);
                    }
                }
            }
            Packing::Awq { words, zeros, scales, group } => {
                // Where the value of each eighth column lies in its word.
                const PLACE: [usize; 8] = [0, 4, 1, 5, 2, 6, 3, 7];
                let (words, zeros, all_scales) = (words.of(files), zeros.of(files), scales.of(files));
                for column in 0..self.columns {
                    let group = column / group;
                    for (i, row) in rows.clone().enumerate() {
                        let shift = 4 * PLACE[row % 8];
                        let code = word(words, (column * self.rows + row) / 8) >> shift & 15;
                        let zero = word(zeros, (group * self.rows + row) / 8) >> shift & 15;
                        out[i * self.columns + column] = (code.cast_signed() - zero.cast_signed()) as f32
                            * scales.float(all_scales, group * self.rows + row);
                    }
                }
            }
        }
    }
}
