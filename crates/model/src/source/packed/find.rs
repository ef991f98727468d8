//! Which tensors belong together as one packed matrix, and whether they fit.

use std::collections::HashMap;
use std::path::Path;

use plimsoll_device::DType;
use plimsoll_device::cpu::quantize::four_bit::FourBit;
use serde::Deserialize;

use super::scaled::{Blocks, Code, Global, Scaled, Zeros};
use super::{Packed, Packing, Span, StoredMagnitudes};
use crate::hf_config::{Grouping, Quantization};
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
            Quantization::Scaled(grouping) => {
                // Both are what codes are multiplied by.
                let suffixes = [".weight_scale_inv", ".weight_scale"];
                match suffixes.iter().find_map(|suffix| name.strip_suffix(suffix)) {
                    Some(linear) => {
                        Some((format!("{linear}.weight"), tensors.scaled(linear, name, *grouping)?))
                    }
                    None => {
                        if OF_ACTIVATIONS.iter().any(|suffix| name.ends_with(suffix)) {
                            tensors.optional(name);
                        }
                        None
                    }
                }
            }
        };
        if let Some((name, packed)) = packed {
            found.push(Found { name, packed });
        }
    }
    Ok((found, tensors.taken.into_iter().map(str::to_owned).collect()))
}

/// What is stored for activations and caches that are quantised as they are made, which are not here.
const OF_ACTIVATIONS: [&str; 17] = [
    ".input_scale",
    ".input_scale_ub",
    ".input_zero_point",
    ".input_global_scale",
    ".activation_scale",
    ".output_scale",
    ".output_zero_point",
    ".q_scale",
    ".k_scale",
    ".v_scale",
    ".output_global_scale",
    ".q_global_scale",
    ".k_global_scale",
    ".v_global_scale",
    ".q_zero_point",
    ".k_zero_point",
    ".v_zero_point",
];

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
        let groups_of = self.group_index(&format!("{linear}.g_idx"), name, columns, groups, None)?;
        let zero_offset = if second { 0 } else { 1 };
        let packing = Packing::Gptq { bits, words, zeros, scales, groups: groups_of, group, zero_offset };
        Ok(Packed { packing, rows, columns })
    }

    /// Each input's group, where a tensor says so; `none` in place of all of them says that there are none.
    fn group_index(
        &mut self,
        name: &str,
        of: &str,
        columns: usize,
        groups: usize,
        none: Option<u32>,
    ) -> Result<Option<Span>, ModelError> {
        if !self.by_name.contains_key(name) {
            return Ok(None);
        }
        let span = self.exactly(name, of, &[StoredDType::I32, StoredDType::U32], columns)?;
        let bytes = self.bytes(&span);
        let mut all = (0..columns).map(|i| super::word(bytes, i));
        if all.clone().all(|group| Some(group) == none) {
            return Ok(None);
        }
        match all.find(|group| *group as usize >= groups) {
            Some(other) => Err(self.fail(name, format!("names group {other} of {groups}"))),
            None => Ok(Some(span)),
        }
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

    /// A matrix in codes with factors.
    fn scaled(&mut self, linear: &str, name: &str, grouping: Grouping) -> Result<Packed, ModelError> {
        const BYTES: [StoredDType; 3] = [StoredDType::F8_E4M3, StoredDType::F8_E5M2, StoredDType::I8];
        let packed = format!("{linear}.weight_packed");
        let is_packed = self.by_name.contains_key(packed.as_str());
        let codes_name = if is_packed { packed } else { format!("{linear}.weight") };
        let (codes, tensor) = self.require(&codes_name, name)?;
        let [rows, width] = match &*tensor.shape {
            [rows, width] if *rows > 0 && *width > 0 => [*rows as usize, *width as usize],
            shape => return Err(self.fail(&codes_name, format!("is {shape:?}; codes are a matrix"))),
        };
        let (code, columns) = match (Code::of(tensor.dtype), tensor.dtype) {
            (Some(code), _) if !is_packed => (code, Some(width)),
            (None, StoredDType::U8) => (Code::E2m1, width.checked_mul(2)),
            (None, StoredDType::I32) if is_packed => {
                let columns = self.columns_of_words(linear, name, rows)?;
                let bits = [4, 8].into_iter().find(|bits| columns.div_ceil(32 / bits) == width);
                let bits = bits.ok_or_else(|| {
                    let reason =
                        format!("is [{rows}, {width}]; {columns} inputs fill other words in 4 and 8 bits");
                    self.fail(&codes_name, reason)
                })?;
                (Code::Words(bits), Some(columns))
            }
            _ => {
                let types = BYTES.map(StoredDType::name).join(", ");
                let reason =
                    format!("is in {}; beside {name:?} it is in {types}, U8 or packed in I32", tensor.dtype);
                return Err(self.fail(&codes_name, reason));
            }
        };
        let columns = columns.ok_or_else(|| self.fail(&codes_name, "is too large"))?;
        let (scales, blocks) = self.blocks(linear, name, [rows, columns], grouping)?;
        let zeros = self.zeros(linear, name, code, rows.div_ceil(blocks.rows), blocks.across)?;
        let global = match self.one(&format!("{linear}.weight_global_scale"))? {
            Some(global) => Global::Over(global),
            None => self.one(&format!("{linear}.weight_scale_2"))?.map_or(Global::One, Global::Times),
        };
        if code == Code::E2m1 && scales.dtype == StoredDType::F8_E4M3 && global == Global::One {
            let reason = "is in F8_E4M3, which needs weight_global_scale or weight_scale_2 beside it";
            return Err(self.fail(name, reason));
        }
        Ok(Packed {
            packing: Packing::Scaled(Scaled { codes, code, scales, blocks, zeros, global }),
            rows,
            columns,
        })
    }

    /// The inputs of a matrix in words, which its shape is stored for.
    fn columns_of_words(&mut self, linear: &str, of: &str, rows: usize) -> Result<usize, ModelError> {
        let name = format!("{linear}.weight_shape");
        let (span, tensor) = self.require(&name, of)?;
        let bytes = self.bytes(&span);
        let size = match tensor.dtype {
            StoredDType::I64 => 8,
            _ => 4,
        };
        let number = |chunk: &[u8]| {
            chunk.iter().rev().try_fold(0u64, |n, byte| Some(n.checked_mul(256)? + u64::from(*byte)))
        };
        let numbers: Vec<Option<u64>> = bytes.chunks(size).map(number).collect();
        match numbers[..] {
            [Some(own), Some(columns)]
                if own == rows as u64 && (1..=u64::from(u32::MAX)).contains(&columns) =>
            {
                Ok(columns as usize)
            }
            _ => {
                let reason = format!("is not the shape of a matrix of {rows} outputs");
                Err(self.fail(&name, reason))
            }
        }
    }

    /// A matrix's factors, and where each of them reaches.
    fn blocks(
        &mut self,
        linear: &str,
        name: &str,
        [rows, columns]: [usize; 2],
        Grouping { block, group }: Grouping,
    ) -> Result<(Span, Blocks), ModelError> {
        const FACTORS: [StoredDType; 6] = [
            StoredDType::F32,
            StoredDType::BF16,
            StoredDType::F16,
            StoredDType::F8_E4M3,
            StoredDType::F8_E8M0,
            StoredDType::U8,
        ];
        let (scales, tensor) = self.require(name, name)?;
        let shape = &*tensor.shape;
        let many: Vec<usize> = shape.iter().map(|size| usize::try_from(*size).unwrap_or(0)).collect();
        let blocked = block.filter(|[m, n]| many == [rows.div_ceil(*m), columns.div_ceil(*n)]);
        let found = match (blocked, &many[..]) {
            (Some([m, n]), [_, across]) => Some((m, n, *across)),
            (_, [] | [1] | [1, 1]) => Some((rows, columns, 1)),
            (_, [own] | [own, 1]) if *own == rows => Some((1, columns, 1)),
            (_, [own, across]) if *own == rows && *across > 0 => match group {
                // A last group may be smaller.
                Some(group) => (columns.div_ceil(group) == *across).then_some((1, group, *across)),
                None => columns.is_multiple_of(*across).then_some((1, columns / across, *across)),
            },
            _ => None,
        };
        let Some((block_rows, block_columns, across)) = found.filter(|_| FACTORS.contains(&tensor.dtype))
        else {
            let reason = format!(
                "is {shape:?} in {}; a matrix [{rows}, {columns}] has one factor, one for each row, for each group of a row{}",
                tensor.dtype,
                match (block, group) {
                    (Some([m, n]), _) => format!(" or for each block of {m} x {n}"),
                    (None, Some(group)) => format!(" of {group}"),
                    (None, None) => String::new(),
                },
            );
            return Err(self.fail(name, reason));
        };
        let index_name = format!("{linear}.weight_g_idx");
        // -1 where inputs were not put in order.
        let index = self.group_index(&index_name, name, columns, across, Some(u32::MAX))?;
        Ok((scales, Blocks { rows: block_rows, columns: block_columns, across, index }))
    }

    /// What is taken from the codes of a matrix with so many factors above and beside each other.
    fn zeros(
        &mut self,
        linear: &str,
        of: &str,
        code: Code,
        down: usize,
        across: usize,
    ) -> Result<Zeros, ModelError> {
        let name = format!("{linear}.weight_zero_point");
        if !self.by_name.contains_key(name.as_str()) {
            return Ok(Zeros::None);
        }
        if let Code::Words(bits) = code {
            let count = down.div_ceil(32 / bits) * across;
            return Ok(Zeros::Words(self.exactly(
                &name,
                of,
                &[StoredDType::I32, StoredDType::U32],
                count,
            )?));
        }
        let own = match code {
            Code::Int8 => StoredDType::I8,
            Code::E4m3 | Code::E5m2 | Code::E2m1 | Code::Words(_) => StoredDType::F8_E4M3,
        };
        let span = self.exactly(&name, of, &[own, StoredDType::I8], down * across)?;
        match self.bytes(&span).iter().all(|byte| *byte == 0) {
            true => Ok(Zeros::None),
            false if code == Code::Int8 => Ok(Zeros::Bytes(span)),
            false => Err(self.fail(&name, "is not 0; floats have no zero point")),
        }
    }

    /// The only element of a tensor of factors, if there is that tensor.
    fn one(&mut self, name: &str) -> Result<Option<f32>, ModelError> {
        if !self.by_name.contains_key(name) {
            return Ok(None);
        }
        let span = self.exactly(name, name, &[StoredDType::F32], 1)?;
        let factor = span.float(self.bytes(&span), 0);
        match factor.is_finite() && factor != 0.0 {
            true => Ok(Some(factor)),
            false => Err(self.fail(name, format!("is {factor}"))),
        }
    }
}
