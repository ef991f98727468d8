//! Which tensors belong together as one packed matrix, and whether they fit.

use std::collections::HashMap;
use std::path::Path;

use plimsoll_device::DType;
use plimsoll_device::cpu::quantize::four_bit::FourBit;
use serde::Deserialize;

use super::{Packed, Packing, Span, StoredMagnitudes};
use crate::hf_config::Quantization;
use crate::safetensors::{SafetensorsFile, StoredDType, StoredTensor};
use crate::source::ModelError;

/// A packed matrix and the tensors that it takes.
pub(in crate::source) struct Found {
    /// The matrix's name, `....weight`.
    pub name: String,
    pub packed: Packed,
}

/// All tensors of a checkpoint, by name.
struct Tensors<'a> {
    files: &'a [SafetensorsFile],
    by_name: HashMap<&'a str, (usize, &'a StoredTensor)>,
    taken: Vec<&'a str>,
}

/// The packed matrices of a checkpoint, and the names of all tensors in them.
pub(in crate::source) fn find(
    files: &[SafetensorsFile],
    quantization: &Quantization,
) -> Result<(Vec<Found>, Vec<String>), ModelError> {
    let by_name: HashMap<&str, (usize, &StoredTensor)> = files
        .iter()
        .enumerate()
        .flat_map(|(file, opened)| opened.tensors().iter().map(move |t| (t.name.as_str(), (file, t))))
        .collect();
    let mut names: Vec<&str> = by_name.keys().copied().collect();
    names.sort_unstable();
    let mut tensors = Tensors { files, by_name, taken: Vec::new() };
    let mut found = Vec::new();
    for name in names {
        let packed = match quantization {
            Quantization::BitsAndBytes => {
                let state = [
                    (".quant_state.bitsandbytes__nf4", FourBit::Nf4),
                    (".quant_state.bitsandbytes__fp4", FourBit::Fp4),
                ]
                .into_iter()
                .find_map(|(suffix, kind)| Some((name.strip_suffix(suffix)?, kind)));
                if let Some((weight, kind)) = state {
                    Some((weight.to_owned(), tensors.four_bit(weight, name, kind)?))
                } else if let Some(linear) = name.strip_suffix(".SCB") {
                    Some((format!("{linear}.weight"), tensors.eight_bit(linear, name)?))
                } else {
                    None
                }
            }
            Quantization::Gptq { bits, second_version } => match name.strip_suffix(".qweight") {
                Some(linear) => {
                    Some((format!("{linear}.weight"), tensors.gptq(linear, name, *bits, *second_version)?))
                }
                None => None,
            },
            Quantization::Awq => match name.strip_suffix(".qweight") {
                Some(linear) => Some((format!("{linear}.weight"), tensors.awq(linear, name)?)),
                None => None,
            },
            Quantization::Mxfp4 => match name.strip_suffix("_blocks") {
                Some(stack) => Some((stack.to_owned(), tensors.mxfp4(stack, name)?)),
                None => None,
            },
        };
        if let Some((name, packed)) = packed {
            found.push(Found { name, packed });
        }
    }
    Ok((found, tensors.taken.into_iter().map(str::to_owned).collect()))
}

/// The JSON of a 4-bit matrix's state.
#[derive(Deserialize)]
struct State {
    blocksize: usize,
    shape: Vec<usize>,
    nested_blocksize: Option<usize>,
    nested_offset: Option<f32>,
}

/// A state is a few hundred bytes.
const MAX_STATE: usize = 64 << 10;

impl<'a> Tensors<'a> {
    fn fail(&self, name: &str, reason: impl Into<String>) -> ModelError {
        let file = self.by_name.get(name).and_then(|(file, _)| self.files.get(*file));
        let path = file.or(self.files.first()).map_or(Path::new(""), SafetensorsFile::path).to_owned();
        ModelError::Packed { path, tensor: name.to_owned(), reason: reason.into() }
    }

    fn optional(&mut self, name: &str) -> Option<(Span, &'a StoredTensor)> {
        let (file, tensor) = *self.by_name.get(name)?;
        self.taken.push(&tensor.name);
        Some((Span { file, bytes: tensor.bytes.clone(), dtype: tensor.dtype }, tensor))
    }

    /// A tensor that a packed matrix cannot do without; `of` is the one that asks for it.
    fn require(&mut self, name: &str, of: &str) -> Result<(Span, &'a StoredTensor), ModelError> {
        self.optional(name)
            .ok_or_else(|| self.fail(of, format!("{name:?}, which belongs to it, is not in the checkpoint")))
    }

    /// The same, of given types and elements.
    fn exactly(
        &mut self,
        name: &str,
        of: &str,
        types: &[StoredDType],
        count: usize,
    ) -> Result<Span, ModelError> {
        let (span, tensor) = self.require(name, of)?;
        let elements = tensor.shape.iter().try_fold(1u64, |product, n| product.checked_mul(*n));
        if !types.contains(&tensor.dtype) || elements != Some(count as u64) {
            let names: Vec<&str> = types.iter().map(|dtype| dtype.name()).collect();
            let reason = format!(
                "is {:?} in {}; a matrix of this size needs {count} elements in {}",
                tensor.shape,
                tensor.dtype,
                names.join(" or ")
            );
            return Err(self.fail(name, reason));
        }
        Ok(span)
    }

    fn bytes(&self, span: &Span) -> &'a [u8] {
        let of = |file: &'a SafetensorsFile| file.tensors().iter().find(|t| t.bytes == span.bytes);
        self.files
            .get(span.file)
            .and_then(|file| of(file).and_then(|tensor| file.bytes(&tensor.name)))
            .unwrap_or_default()
    }

    fn four_bit(&mut self, weight: &str, state_name: &str, kind: FourBit) -> Result<Packed, ModelError> {
        let (state, _) = self.require(state_name, state_name)?;
        let text = self.bytes(&state);
        if text.len() > MAX_STATE {
            return Err(
                self.fail(state_name, format!("has {} bytes; a state is JSON of a few hundred", text.len()))
            );
        }
        let state: State = serde_json::from_slice(text)
            .map_err(|error| self.fail(state_name, format!("is no state: {error}")))?;
        let [rows, columns] = <[usize; 2]>::try_from(&*state.shape)
            .map_err(|_| self.fail(state_name, format!("shape {:?} is no matrix's", state.shape)))?;
        let elements = rows.checked_mul(columns).filter(|n| *n > 0);
        let elements = elements
            .ok_or_else(|| self.fail(state_name, format!("shape {:?} is impossible", state.shape)))?;
        if !state.blocksize.is_power_of_two() || !(32..=4096).contains(&state.blocksize) {
            let reason =
                format!("blocksize {}: bitsandbytes has powers of two from 32 to 4096", state.blocksize);
            return Err(self.fail(state_name, reason));
        }
        let (codes, stored) = self.require(weight, state_name)?;
        if codes.bytes.len() != elements.div_ceil(2) {
            let reason = format!(
                "is {:?} in {}, {} bytes; its state says [{rows}, {columns}], which are {} bytes",
                stored.shape,
                stored.dtype,
                codes.bytes.len(),
                elements.div_ceil(2)
            );
            return Err(self.fail(weight, reason));
        }
        let map_name = format!("{weight}.quant_map");
        let map = self.exactly(&map_name, state_name, &[StoredDType::F32], 16)?;
        let bytes = self.bytes(&map);
        if !kind.values().iter().enumerate().all(|(i, value)| map.float(bytes, i) == *value) {
            let reason = "is not the table of its type; tables of one's own are not supported";
            return Err(self.fail(&map_name, reason));
        }
        let blocks = elements.div_ceil(state.blocksize);
        let name = format!("{weight}.absmax");
        let magnitudes = match state.nested_blocksize {
            None => StoredMagnitudes::F32(self.exactly(&name, state_name, &[StoredDType::F32], blocks)?),
            Some(block) => {
                if block == 0 {
                    return Err(self.fail(state_name, "nested_blocksize is 0"));
                }
                let offset = state.nested_offset.filter(|offset| offset.is_finite()).ok_or_else(|| {
                    self.fail(state_name, "has a nested_blocksize, but no finite nested_offset")
                })?;
                let codes = self.exactly(&name, state_name, &[StoredDType::U8], blocks)?;
                let factors = format!("{weight}.nested_absmax");
                let factors =
                    self.exactly(&factors, state_name, &[StoredDType::F32], blocks.div_ceil(block))?;
                let map_name = format!("{weight}.nested_quant_map");
                let map = self.exactly(&map_name, state_name, &[StoredDType::F32], 256)?;
                let bytes = self.bytes(&map);
                let map = Box::new(std::array::from_fn(|i| map.float(bytes, i)));
                StoredMagnitudes::Coded { codes, factors, block, offset, map }
            }
        };
        Ok(Packed {
            packing: Packing::FourBit { kind, block: state.blocksize, codes, magnitudes },
            rows,
            columns,
        })
    }

    fn eight_bit(&mut self, linear: &str, magnitudes: &str) -> Result<Packed, ModelError> {
        let weight = format!("{linear}.weight");
        let (codes, stored) = self.require(&weight, magnitudes)?;
        let (rows, columns) = match (stored.dtype, &*stored.shape) {
            (StoredDType::I8, [rows, columns]) => (*rows as usize, *columns as usize),
            _ => {
                let reason =
                    format!("is {:?} in {}; with SCB it is a matrix in I8", stored.shape, stored.dtype);
                return Err(self.fail(&weight, reason));
            }
        };
        let magnitudes = self.exactly(magnitudes, magnitudes, &[StoredDType::F32], rows)?;
        // 0: rows as they are; others are arrangements for kinds of GPUs.
        let format_name = format!("{linear}.weight_format");
        if let Some((format, _)) = self.optional(&format_name)
            && self.bytes(&format).iter().any(|byte| *byte != 0)
        {
            return Err(self.fail(&format_name, "is another arrangement than row, the only one supported"));
        }
        Ok(Packed { packing: Packing::EightBit { codes, magnitudes }, rows, columns })
    }

    /// `[a, b]` of 32-bit words.
    fn words(&mut self, name: &str, of: &str) -> Result<(Span, usize, usize), ModelError> {
        let (span, tensor) = self.require(name, of)?;
        match (tensor.dtype, &*tensor.shape) {
            (StoredDType::I32 | StoredDType::U32, [a, b]) if *a > 0 && *b > 0 => {
                Ok((span, *a as usize, *b as usize))
            }
            _ => {
                let reason =
                    format!("is {:?} in {}; packed codes are a matrix in I32", tensor.shape, tensor.dtype);
                Err(self.fail(name, reason))
            }
        }
    }

    /// `[groups, rows]` of floats; gives the size of a group, too.
    fn scales(
        &mut self,
        linear: &str,
        of: &str,
        rows: usize,
        columns: usize,
    ) -> Result<(Span, usize), ModelError> {
        const FLOATS: [StoredDType; 3] = [StoredDType::F16, StoredDType::BF16, StoredDType::F32];
        let name = format!("{linear}.scales");
        let (span, tensor) = self.require(&name, of)?;
        match &*tensor.shape {
            [groups, width]
                if FLOATS.contains(&tensor.dtype)
                    && *width == rows as u64
                    && (1..=columns as u64).contains(groups) =>
            {
                Ok((span, columns.div_ceil(*groups as usize)))
            }
            shape => {
                let reason = format!(
                    "is {shape:?} in {}; a matrix [{rows}, {columns}] has scales [groups, {rows}] in floats",
                    tensor.dtype
                );
                Err(self.fail(&name, reason))
            }
        }
    }

    fn gptq(&mut self, linear: &str, name: &str, bits: usize, second: bool) -> Result<Packed, ModelError> {
        let (words, packed, rows) = self.words(name, name)?;
        let per_word = 32 / bits;
        let columns = packed.checked_mul(per_word).ok_or_else(|| self.fail(name, "is too large"))?;
        let (scales, group) = self.scales(linear, name, rows, columns)?;
        let groups = columns.div_ceil(group);
        if !rows.is_multiple_of(per_word) {
            return Err(self.fail(name, format!("has {rows} outputs, which do not fill words of {per_word}")));
        }
        let zeros = format!("{linear}.qzeros");
        let types = [StoredDType::I32, StoredDType::U32];
        let zeros = self.exactly(&zeros, name, &types, groups * (rows / per_word))?;
        let index = format!("{linear}.g_idx");
        let groups_of = if self.by_name.contains_key(index.as_str()) {
            let span = self.exactly(&index, name, &types, columns)?;
            let bytes = self.bytes(&span);
            if let Some(other) = (0..columns).map(|i| super::word(bytes, i)).find(|g| *g as usize >= groups) {
                return Err(self.fail(&index, format!("names group {other} of {groups}")));
            }
            Some(span)
        } else {
            None
        };
        let zero_offset = if second { 0 } else { 1 };
        let packing = Packing::Gptq { bits, words, zeros, scales, groups: groups_of, group, zero_offset };
        Ok(Packed { packing, rows, columns })
    }

    fn mxfp4(&mut self, stack: &str, name: &str) -> Result<Packed, ModelError> {
        let (codes, tensor) = self.require(name, name)?;
        let sizes = match (tensor.dtype, &tensor.shape[..]) {
            (StoredDType::U8, [stack, rows, blocks, 16]) => Some([*stack, *rows, *blocks]),
            _ => None,
        };
        let usable = sizes.and_then(|[stack, rows, blocks]| {
            let all = stack.checked_mul(rows)?;
            all.checked_mul(blocks).filter(|count| *count > 0)?;
            Some([stack, all, blocks].map(|size| size as usize))
        });
        let Some([count, rows, blocks]) = usable else {
            let reason = format!(
                "is {:?} in {}; blocks of MXFP4 are [experts, outputs, inputs / 32, 16] in U8",
                tensor.shape, tensor.dtype
            );
            return Err(self.fail(name, reason));
        };
        let scales = self.exactly(&format!("{stack}_scales"), name, &[StoredDType::U8], rows * blocks)?;
        let packing = Packing::Mxfp4 { codes, scales, stack: count };
        Ok(Packed { packing, rows, columns: blocks * DType::Mxfp4.block_elements() as usize })
    }

    fn awq(&mut self, linear: &str, name: &str) -> Result<Packed, ModelError> {
        let (words, columns, packed) = self.words(name, name)?;
        let rows = packed.checked_mul(8).ok_or_else(|| self.fail(name, "is too large"))?;
        let (scales, group) = self.scales(linear, name, rows, columns)?;
        let zeros = format!("{linear}.qzeros");
        let types = [StoredDType::I32, StoredDType::U32];
        let zeros = self.exactly(&zeros, name, &types, columns.div_ceil(group) * packed)?;
        Ok(Packed { packing: Packing::Awq { words, zeros, scales, group }, rows, columns })
    }
}
