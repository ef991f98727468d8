//! Folders as bitsandbytes writes them: linears in 4 or 8 bits, their state beside them.
//!
//! Tensors of one matrix follow each other, so that it is quantised once and forgotten; its state is padded with spaces
//! to where the next one is aligned. Sizes are known before any value is, so the state has one length.

use std::io::{self, Write};
use std::path::Path;

use plimsoll_device::DType;
use plimsoll_device::cpu::quantize::SIGNED_DYNAMIC_MAP;
use plimsoll_device::cpu::quantize::four_bit::{BLOCK, FourBit, Magnitudes, NESTED_BLOCK};
use plimsoll_device::cpu::quantize::quantize_rows_codes;
use serde_json::{Value, json};

use super::folder::{Folder, Piece, REST};
use super::{Target, Transcoder, of_tensor};
use crate::convert::check_finite;
use crate::layout::StoredTensor;
use crate::parameters::{Parameter, ParameterKind, Role};
use crate::safetensors::StoredDType;
use crate::save::{SaveError, SaveWriter};
use crate::source::RowOrder;
use crate::source::rows::{FourBitMatrix, stripes};
use crate::types_by_group::WeightGroup;

/// Bytes of a state, before padding: more than any takes.
const STATE: u64 = 256;
const TARGET: &str = "a bitsandbytes checkpoint";

#[derive(Clone, Copy, PartialEq)]
enum Content {
    /// As it is, in this type.
    Plain(DType),
    Codes,
    Magnitudes,
    Factors,
    Map,
    NestedMap,
    State,
    RowCodes,
    RowMagnitudes,
}

/// The matrix that is being written.
enum Current {
    Nothing,
    FourBit(String, FourBitMatrix),
    EightBit(String, Vec<u8>, Vec<f32>),
}

/// The groups whose linears are packed.
#[derive(Clone, Copy)]
pub(super) struct Packed([bool; WeightGroup::ALL.len()]);

impl Default for Packed {
    fn default() -> Packed {
        Packed([true; WeightGroup::ALL.len()])
    }
}

impl Packed {
    pub fn of(groups: &[WeightGroup]) -> Packed {
        Packed(WeightGroup::ALL.map(|group| groups.contains(&group)))
    }

    fn has(self, tensor: &StoredTensor) -> bool {
        let of = tensor.parts.first().and_then(|part| WeightGroup::of(&part.parameter));
        let group = of.and_then(|group| self.0.get(group as usize).copied()).unwrap_or(false);
        group && is_linear(tensor)
    }

    /// The modules that transformers must leave as they are, where these are not just those that it leaves by itself. Experts go by the
    /// module that has them.
    fn left_out<'t>(self, tensors: impl Iterator<Item = &'t StoredTensor>) -> Vec<String> {
        let mut left: Vec<String> = Vec::new();
        let mut linears = 0;
        for tensor in tensors.filter(|tensor| !self.has(tensor)) {
            let matrix = |role: Role| role.kind() == ParameterKind::Matrix;
            let Some(module) = tensor.name.strip_suffix(".weight").filter(|_| tensor.is_of(matrix)) else {
                continue;
            };
            linears += u64::from(is_linear(tensor));
            let module =
                module.split_once(".experts.").map_or(module.to_owned(), |(of, _)| format!("{of}.experts"));
            if left.last() != Some(&module) {
                left.push(module);
            }
        }
        if linears > 0 { left } else { Vec::new() }
    }
}

fn is_linear(tensor: &StoredTensor) -> bool {
    tensor.rows == RowOrder::Natural && tensor.is_of(Role::is_block_matrix)
}

fn f32_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|x| x.to_le_bytes()).collect()
}

impl Transcoder<'_> {
    pub(super) fn write_packed(&mut self, folder: &Path, target: Target) -> Result<u64, SaveError> {
        // The library packs linears, which experts are one by one alone.
        let spec = self.spec.with_single_experts();
        let (spec, packed) = (&spec, self.packed);
        let fail = |reason: &str| Folder::refusal(spec, TARGET, reason);
        if spec.architecture == "gpt_oss" {
            return Err(fail("transformers has its experts as stacks, which the library does not pack"));
        }
        let writer = SaveWriter::new(spec, REST).shard_bytes(self.shard_bytes);
        let shards = writer.shards(|tensor| pieces(tensor, target, packed).iter().map(Piece::bytes).sum());
        if !shards.iter().flatten().any(is_linear) {
            return Err(fail("its linears are stored transposed, which the library does not pack"));
        }
        let odd =
            |tensor: &&StoredTensor| packed.has(tensor) && tensor.shape().iter().product::<u64>() % 4 != 0;
        if let Some(tensor) = shards.iter().flatten().find(odd) {
            return Err(fail(&format!(
                "{} has {:?} elements, no multiple of 4",
                tensor.name,
                tensor.shape()
            )));
        }
        let mut quantization = quantization_config(target);
        let left = packed.left_out(shards.iter().flatten());
        if !left.is_empty() {
            quantization["llm_int8_skip_modules"] = left.into();
        }
        let folder = Folder { path: folder, spec, target: TARGET, quantization, shards: &shards };
        let mut current = Current::Nothing;
        self.write_pieces(
            &folder,
            |tensor| pieces(tensor, target, packed),
            // Packed ones first, each a multiple of 8 bytes; then wider types before narrower ones.
            |content| match content {
                Content::Plain(dtype) => u8::MAX - dtype.block_bytes() as u8,
                _ => 0,
            },
            |transcoder, piece, out| transcoder.write_piece(piece, target, &mut current, out),
        )
    }

    fn write_piece(
        &mut self,
        piece: &Piece<'_, Content>,
        target: Target,
        current: &mut Current,
        out: &mut dyn Write,
    ) -> io::Result<()> {
        if let Content::Plain(dtype) = piece.content {
            return self.stream_stored(piece.of, dtype, out);
        }
        // A fused tensor's parts are rows of one matrix.
        let matrix = Parameter { shape: piece.of.shape(), ..first_part(piece.of)?.clone() };
        let name = &piece.of.name;
        if !matches!(&*current, Current::FourBit(of, _) | Current::EightBit(of, ..) if of == name) {
            *current = match target {
                Target::FourBit { kind, doubly } => {
                    let read = |rows, values: &mut [f32]| {
                        self.read_fused(piece.of, rows, values)?;
                        check_finite(values, kind.dtype(doubly)).map_err(of_tensor(name))
                    };
                    Current::FourBit(name.clone(), FourBitMatrix::of(&matrix, kind, doubly, read)?)
                }
                _ => {
                    let (codes, magnitudes) = self.eight_bit(piece.of, &matrix)?;
                    Current::EightBit(name.clone(), codes, magnitudes)
                }
            };
            self.advance(matrix.elements());
        }
        match (&*current, piece.content) {
            (Current::FourBit(_, coded), content) => {
                let kind = match target {
                    Target::FourBit { kind, .. } => kind,
                    _ => FourBit::Nf4,
                };
                match (content, &coded.magnitudes) {
                    (Content::Codes, _) => out.write_all(&coded.codes),
                    (Content::Magnitudes, Magnitudes::F32(values)) => out.write_all(&f32_bytes(values)),
                    (Content::Magnitudes, Magnitudes::Coded { codes, .. }) => out.write_all(codes),
                    (Content::Factors, Magnitudes::Coded { factors, .. }) => {
                        out.write_all(&f32_bytes(factors))
                    }
                    (Content::Map, _) => out.write_all(&f32_bytes(kind.values())),
                    (Content::NestedMap, _) => out.write_all(&f32_bytes(&SIGNED_DYNAMIC_MAP)),
                    (Content::State, magnitudes) => {
                        let mut state = json!({
                            "quant_type": name_of(kind), "blocksize": BLOCK, "dtype": "bfloat16", "shape": matrix.shape,
                        });
                        if let Magnitudes::Coded { offset, .. } = magnitudes {
                            state["nested_blocksize"] = NESTED_BLOCK.into();
                            state["nested_dtype"] = "float32".into();
                            state["nested_offset"] = f64::from(*offset).into();
                        }
                        let mut text = state.to_string().into_bytes();
                        let length = piece.tensor.shape.first().copied().unwrap_or(0) as usize;
                        text.resize(length.max(text.len()), b' ');
                        out.write_all(&text)
                    }
                    _ => Ok(()),
                }
            }
            (Current::EightBit(_, codes, _), Content::RowCodes) => out.write_all(codes),
            (Current::EightBit(_, _, magnitudes), Content::RowMagnitudes) => {
                out.write_all(&f32_bytes(magnitudes))
            }
            (Current::EightBit(..), _) | (Current::Nothing, _) => Ok(()),
        }
    }

    /// Rows of a tensor of several parts.
    fn read_fused(
        &mut self,
        tensor: &StoredTensor,
        rows: std::ops::Range<u64>,
        values: &mut [f32],
    ) -> io::Result<()> {
        let columns = tensor.columns();
        let (mut first, mut values) = (0, values);
        for part in &tensor.parts {
            let (start, end) = (rows.start.max(first), rows.end.min(first + part.count()));
            if start < end {
                let count = ((end - start) * columns) as usize;
                let (own, rest) = std::mem::take(&mut values).split_at_mut(count);
                values = rest;
                let at = part.rows.start;
                let rows = at + start - first..at + end - first;
                self.source.rows(&part.parameter, rows, own).map_err(io::Error::other)?;
            }
            first += part.count();
        }
        Ok(())
    }

    fn eight_bit(&mut self, tensor: &StoredTensor, matrix: &Parameter) -> io::Result<(Vec<u8>, Vec<f32>)> {
        let columns = matrix.columns();
        let mut codes = vec![0; matrix.elements() as usize];
        let mut magnitudes = vec![0.0; matrix.rows() as usize];
        let mut values = Vec::new();
        for rows in stripes(matrix.rows(), columns, 1) {
            let own = rows.start as usize..rows.end as usize;
            let codes = &mut codes[own.start * columns as usize..own.end * columns as usize];
            values.resize(codes.len(), 0.0);
            self.read_fused(tensor, rows, &mut values)?;
            check_finite(&values, DType::Int8).map_err(of_tensor(&matrix.name))?;
            quantize_rows_codes(&values, columns as usize, codes, &mut magnitudes[own])
                .ok_or_else(|| io::Error::other("rows and codes differ in size"))?;
        }
        Ok((codes, magnitudes))
    }
}

fn first_part(tensor: &StoredTensor) -> io::Result<&Parameter> {
    let part = tensor.parts.first().ok_or_else(|| io::Error::other("a tensor without parameters"))?;
    Ok(&part.parameter)
}

fn name_of(kind: FourBit) -> &'static str {
    match kind {
        FourBit::Nf4 => "nf4",
        FourBit::Fp4 => "fp4",
    }
}

fn quantization_config(target: Target) -> Value {
    match target {
        Target::FourBit { kind, doubly } => json!({
            "quant_method": "bitsandbytes",
            "load_in_4bit": true,
            "load_in_8bit": false,
            "bnb_4bit_quant_type": name_of(kind),
            "bnb_4bit_use_double_quant": doubly,
            "bnb_4bit_compute_dtype": "bfloat16",
            "bnb_4bit_quant_storage": "uint8",
        }),
        _ => json!({
            "quant_method": "bitsandbytes",
            "load_in_4bit": false,
            "load_in_8bit": true,
            "llm_int8_threshold": 6.0,
        }),
    }
}

/// The tensors of a file that hold one of the layout's.
fn pieces(tensor: &StoredTensor, target: Target, packed: Packed) -> Vec<Piece<'_, Content>> {
    let piece = |name, dtype, shape, content| Piece::new(tensor, name, dtype, shape, content);
    if !packed.has(tensor) {
        let dtype = tensor.parts.first().map_or(REST, |part| part.role().saved_as(REST));
        let stored = StoredDType::from_device(dtype).unwrap_or(StoredDType::BF16);
        return vec![piece(tensor.name.clone(), stored, tensor.shape(), Content::Plain(dtype))];
    }
    let shape = tensor.shape();
    let elements: u64 = shape.iter().product();
    let name = |suffix: &str| format!("{}.{suffix}", tensor.name);
    match target {
        Target::FourBit { kind, doubly } => {
            let (blocks, codes) = (elements.div_ceil(BLOCK as u64), elements.div_ceil(2));
            let mut all = Vec::new();
            let mut add = |name, dtype, shape, content| all.push(piece(name, dtype, shape, content));
            let magnitudes = if doubly {
                let factors = blocks.div_ceil(NESTED_BLOCK as u64);
                add(name("nested_absmax"), StoredDType::F32, vec![factors], Content::Factors);
                add(name("nested_quant_map"), StoredDType::F32, vec![256], Content::NestedMap);
                (StoredDType::U8, blocks + 4 * factors)
            } else {
                (StoredDType::F32, 4 * blocks)
            };
            add(name("quant_map"), StoredDType::F32, vec![16], Content::Map);
            add(name("absmax"), magnitudes.0, vec![blocks], Content::Magnitudes);
            let others = magnitudes.1 + codes;
            let state = STATE + others.next_multiple_of(8) - others;
            let state_name = name(&format!("quant_state.bitsandbytes__{}", name_of(kind)));
            add(state_name, StoredDType::U8, vec![state], Content::State);
            add(tensor.name.clone(), StoredDType::U8, vec![codes, 1], Content::Codes);
            all
        }
        _ => {
            let linear = tensor.name.strip_suffix(".weight").unwrap_or(&tensor.name);
            let rows = shape.first().copied().unwrap_or(1);
            // Without a `weight_format` rows are as they are.
            vec![
                piece(format!("{linear}.SCB"), StoredDType::F32, vec![rows], Content::RowMagnitudes),
                piece(tensor.name.clone(), StoredDType::I8, shape, Content::RowCodes),
            ]
        }
    }
}
