//! The tensor infos: name, sizes, type and place of each, checked against the file's real size.

use std::collections::HashSet;
use std::ops::Range;

use plimsoll_device::DType;

use super::cursor::{Cursor, Reading};
use super::{GgufError, GgufTensorProblem};

/// Dimensions that ggml has at most.
const MAX_DIMENSIONS: u32 = 4;

/// More than any model has; bounds what a hostile file can make a reader allocate.
const MAX_TENSORS: u64 = 1 << 20;

/// A tensor in a GGUF file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GgufTensor {
    /// Its name: `blk.0.attn_q.weight`.
    pub name: String,
    /// How it is stored.
    pub dtype: DType,
    /// Its sizes, the slowest first (the file has them the other way round): `[out, in]`.
    pub shape: Vec<u64>,
    /// Its bytes in the file.
    pub bytes: Range<usize>,
    /// Where its info is in the file.
    pub info_offset: usize,
}

/// An info as written; its place is relative to the data section, whose start is not known before the last one.
struct Info {
    tensor: GgufTensor,
    offset: u64,
    size: u64,
}

/// Reads all infos. The data section begins at the next multiple of `alignment`.
pub(super) fn read(
    cursor: &mut Cursor<'_>,
    count: u64,
    alignment: u64,
) -> Result<Vec<GgufTensor>, GgufError> {
    // A name's length, a number of dimensions, a type and an offset.
    cursor.check_count(count, 8 + 4 + 4 + 8, Reading::Header("tensor list"), MAX_TENSORS)?;
    let mut infos = Vec::new();
    for index in 0..count {
        infos.push(read_info(cursor, index, alignment)?);
    }
    let file_len = cursor.file_len() as u64;
    let data_start = (cursor.position() as u64).next_multiple_of(alignment).min(file_len);
    let available = file_len - data_start;
    let fail = |tensor: &GgufTensor, problem| {
        Err(GgufError::Tensor {
            path: cursor.path().to_owned(),
            offset: tensor.info_offset,
            tensor: tensor.name.clone(),
            problem,
        })
    };

    let mut names = HashSet::new();
    for Info { tensor, offset, size } in &infos {
        if !names.insert(tensor.name.as_str()) {
            return fail(tensor, GgufTensorProblem::Duplicate);
        }
        if offset.checked_add(*size).is_none_or(|end| end > available) {
            let problem = GgufTensorProblem::OutsideFile { offset: *offset, size: *size, available };
            return fail(tensor, problem);
        }
    }
    let mut order: Vec<&Info> = infos.iter().collect();
    order.sort_by_key(|info| (info.offset, info.size));
    let mut covered = 0;
    let mut before: Option<&Info> = None;
    for info in order {
        if info.offset < covered {
            let other = before.map(|info| info.tensor.name.clone()).unwrap_or_default();
            return fail(&info.tensor, GgufTensorProblem::Overlap { other });
        }
        if info.offset - covered >= alignment {
            return fail(&info.tensor, GgufTensorProblem::Gap { gap: info.offset - covered });
        }
        covered = info.offset + info.size;
        before = Some(info);
    }
    Ok(infos
        .into_iter()
        .map(|Info { mut tensor, offset, size }| {
            let start = (data_start + offset) as usize;
            tensor.bytes = start..start + size as usize;
            tensor
        })
        .collect())
}

fn read_info(cursor: &mut Cursor<'_>, index: u64, alignment: u64) -> Result<Info, GgufError> {
    let info_offset = cursor.position();
    let name = cursor.string(Reading::TensorName(index))?;
    let place = Reading::TensorInfo(name);
    let fail = |cursor: &Cursor<'_>, problem| {
        let path = cursor.path().to_owned();
        GgufError::Tensor { path, offset: info_offset, tensor: name.to_owned(), problem }
    };

    let dimensions = cursor.u32(place)?;
    if dimensions > MAX_DIMENSIONS {
        return Err(fail(cursor, GgufTensorProblem::TooManyDimensions(dimensions)));
    }
    let mut shape = Vec::with_capacity(dimensions as usize);
    for _ in 0..dimensions {
        shape.push(cursor.u64(place)?);
    }
    let columns = shape.first().copied().unwrap_or(1);
    shape.reverse();
    let type_id = cursor.u32(place)?;
    let offset = cursor.u64(place)?;

    let dtype =
        stored_type(type_id).map_err(|name| fail(cursor, GgufTensorProblem::UnsupportedType(name)))?;
    let elements = shape.iter().try_fold(1u64, |product, size| product.checked_mul(*size));
    let elements = elements.filter(|elements| *elements > 0);
    let Some(elements) = elements else {
        return Err(fail(cursor, GgufTensorProblem::ImpossibleShape(shape)));
    };
    if !columns.is_multiple_of(dtype.block_elements()) {
        let problem = GgufTensorProblem::PartialBlocks { columns, dtype: dtype.name() };
        return Err(fail(cursor, problem));
    }
    let Some(size) = dtype.bytes_for(elements) else {
        return Err(fail(cursor, GgufTensorProblem::ImpossibleShape(shape)));
    };
    if !offset.is_multiple_of(alignment) {
        return Err(fail(cursor, GgufTensorProblem::Unaligned { offset, alignment }));
    }
    let tensor = GgufTensor { name: name.to_owned(), dtype, shape, bytes: 0..0, info_offset };
    Ok(Info { tensor, offset, size })
}

/// The type of a ggml type number, or the name of one that is not read.
fn stored_type(id: u32) -> Result<DType, String> {
    let name = match id {
        0 => return Ok(DType::F32),
        1 => return Ok(DType::F16),
        2 => return Ok(DType::Q4_0),
        3 => return Ok(DType::Q4_1),
        6 => return Ok(DType::Q5_0),
        7 => return Ok(DType::Q5_1),
        8 => return Ok(DType::Q8_0),
        10 => return Ok(DType::Q2K),
        11 => return Ok(DType::Q3K),
        12 => return Ok(DType::Q4K),
        13 => return Ok(DType::Q5K),
        14 => return Ok(DType::Q6K),
        15 => return Ok(DType::Q8K),
        20 => return Ok(DType::Iq4Nl),
        30 => return Ok(DType::Bf16),
        39 => return Ok(DType::Mxfp4),
        9 => "Q8_1",
        16 => "IQ2_XXS",
        17 => "IQ2_XS",
        18 => "IQ3_XXS",
        19 => "IQ1_S",
        21 => "IQ3_S",
        22 => "IQ2_S",
        23 => "IQ4_XS",
        24 => "I8",
        25 => "I16",
        26 => "I32",
        27 => "I64",
        28 => "F64",
        29 => "IQ1_M",
        34 => "TQ1_0",
        35 => "TQ2_0",
        other => return Err(format!("the unknown type {other}")),
    };
    Err(name.to_owned())
}
