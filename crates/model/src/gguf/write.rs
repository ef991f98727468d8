//! Writing a GGUF file of version 3 by streaming: metadata and tensor infos first, since all sizes are known, then one
//! tensor after the other from a callback. The file appears whole or not at all.

use std::io::{self, BufWriter, Write};
use std::path::Path;

use plimsoll_device::DType;

use crate::counting::Counting;
use crate::safetensors::{new_file_builder, sync_folder};
use crate::save::remove_left_over;
use crate::save_error::SaveError;

/// Where data and every tensor begin.
const ALIGNMENT: u64 = 32;
const BUFFER: usize = 256 << 10;

/// A value of the metadata.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub enum GgufValue {
    U32(u32),
    F32(f32),
    Bool(bool),
    String(String),
    Strings(Vec<String>),
    F32s(Vec<f32>),
    I32s(Vec<i32>),
    U8s(Vec<u8>),
}

/// A tensor that is to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewGgufTensor {
    /// Its name.
    pub name: String,
    /// Its type.
    pub dtype: DType,
    /// Its sizes, the slowest first.
    pub shape: Vec<u64>,
}

/// ggml's number of a type, where it has one.
pub fn ggml_type(dtype: DType) -> Option<u32> {
    match dtype {
        DType::F32 => Some(0),
        DType::F16 => Some(1),
        DType::Q4_0 => Some(2),
        DType::Q4_1 => Some(3),
        DType::Q5_0 => Some(6),
        DType::Q5_1 => Some(7),
        DType::Q8_0 => Some(8),
        DType::Q2K => Some(10),
        DType::Q3K => Some(11),
        DType::Q4K => Some(12),
        DType::Q5K => Some(13),
        DType::Q6K => Some(14),
        DType::Q8K => Some(15),
        DType::Iq4Nl => Some(20),
        DType::Bf16 => Some(30),
        DType::Mxfp4 => Some(39),
        DType::F64
        | DType::U32
        | DType::I8
        | DType::U8
        | DType::F8E4m3
        | DType::F8E5m2
        | DType::Nf4
        | DType::Fp4
        | DType::Nf4F32
        | DType::Fp4F32
        | DType::Int8 => None,
    }
}

/// What files are called that are being written.
const WRITING: &str = ".writing-gguf-";

/// Writes a file, which is replaced if it is there. `fill` is asked for each tensor's bytes in turn. Returns its size.
pub fn write_gguf(
    path: &Path,
    entries: &[(String, GgufValue)],
    tensors: &[NewGgufTensor],
    mut fill: impl FnMut(usize, &mut dyn Write) -> io::Result<()>,
) -> Result<u64, SaveError> {
    let (header, sizes) = header(path, entries, tensors)?;
    let fail = |action| move |source| SaveError::io(action, path, source);
    let folder = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    std::fs::create_dir_all(folder).map_err(|source| SaveError::io("create", folder, source))?;
    remove_left_over(folder, WRITING);
    let aside = new_file_builder()
        .prefix(WRITING)
        .tempfile_in(folder)
        .map_err(|source| SaveError::io("create a file in", folder, source))?;
    // Whoever finds the lock free knows that nobody writes here any more. A file system without locks goes without.
    let _ = aside.as_file().try_lock();
    let mut out = Counting { inner: BufWriter::with_capacity(BUFFER, aside), written: 0 };
    out.write_all(&header).map_err(fail("write"))?;
    for (index, (tensor, size)) in tensors.iter().zip(&sizes).enumerate() {
        let start = out.written;
        fill(index, &mut out).map_err(fail("write"))?;
        let given = out.written - start;
        if given != *size {
            let (tensor, missing) = (tensor.name.clone(), size.saturating_sub(given));
            return Err(SaveError::Length { path: path.to_owned(), tensor, expected: *size, missing });
        }
        let padding = out.written.next_multiple_of(ALIGNMENT) - out.written;
        out.write_all(&[0; ALIGNMENT as usize][..padding as usize]).map_err(fail("write"))?;
    }
    let written = out.written;
    let aside = out.inner.into_inner().map_err(|error| SaveError::io("write", path, error.into_error()))?;
    aside.as_file().sync_all().map_err(fail("write"))?;
    aside.persist(path).map_err(|error| SaveError::io("rename a file to", path, error.error))?;
    sync_folder(folder);
    Ok(written)
}

fn header(
    path: &Path,
    entries: &[(String, GgufValue)],
    tensors: &[NewGgufTensor],
) -> Result<(Vec<u8>, Vec<u64>), SaveError> {
    let mut out = Vec::new();
    out.extend(b"GGUF");
    out.extend(3u32.to_le_bytes());
    out.extend((tensors.len() as u64).to_le_bytes());
    out.extend((entries.len() as u64).to_le_bytes());
    for (key, value) in entries {
        put_string(&mut out, key);
        put_value(&mut out, value);
    }
    let mut offset = 0u64;
    let mut sizes = Vec::with_capacity(tensors.len());
    for tensor in tensors {
        let fail = |reason| SaveError::Tensor { path: path.to_owned(), tensor: tensor.name.clone(), reason };
        let id = ggml_type(tensor.dtype).ok_or_else(|| fail("GGUF has no such type"))?;
        let columns = tensor.shape.last().copied().unwrap_or(1);
        if !columns.is_multiple_of(tensor.dtype.block_elements()) {
            return Err(fail("its rows are not whole blocks of the type"));
        }
        let elements = tensor.shape.iter().try_fold(1u64, |product, size| product.checked_mul(*size));
        let size =
            elements.and_then(|n| tensor.dtype.bytes_for(n)).ok_or_else(|| fail("its size overflows"))?;
        put_string(&mut out, &tensor.name);
        out.extend((tensor.shape.len() as u32).to_le_bytes());
        tensor.shape.iter().rev().for_each(|size| out.extend(size.to_le_bytes()));
        out.extend(id.to_le_bytes());
        out.extend(offset.to_le_bytes());
        let end = offset.checked_add(size).filter(|end| *end < 1 << 62);
        offset = end.ok_or_else(|| fail("the file's size overflows"))?.next_multiple_of(ALIGNMENT);
        sizes.push(size);
    }
    out.resize(out.len().next_multiple_of(ALIGNMENT as usize), 0);
    Ok((out, sizes))
}

fn put_string(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

fn put_value(out: &mut Vec<u8>, value: &GgufValue) {
    let head = |out: &mut Vec<u8>, element: u32, count: usize| {
        out.extend(9u32.to_le_bytes());
        out.extend(element.to_le_bytes());
        out.extend((count as u64).to_le_bytes());
    };
    match value {
        GgufValue::U32(n) => out.extend([4u32.to_le_bytes(), n.to_le_bytes()].concat()),
        GgufValue::F32(x) => out.extend([6u32.to_le_bytes(), x.to_le_bytes()].concat()),
        GgufValue::Bool(truth) => {
            out.extend(7u32.to_le_bytes());
            out.push(u8::from(*truth));
        }
        GgufValue::String(text) => {
            out.extend(8u32.to_le_bytes());
            put_string(out, text);
        }
        GgufValue::Strings(list) => {
            head(out, 8, list.len());
            list.iter().for_each(|text| put_string(out, text));
        }
        GgufValue::F32s(list) => {
            head(out, 6, list.len());
            list.iter().for_each(|x| out.extend(x.to_le_bytes()));
        }
        GgufValue::I32s(list) => {
            head(out, 5, list.len());
            list.iter().for_each(|n| out.extend(n.to_le_bytes()));
        }
        GgufValue::U8s(list) => {
            head(out, 0, list.len());
            out.extend(list);
        }
    }
}
