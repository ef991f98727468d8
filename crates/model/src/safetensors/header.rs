//! The header of a safetensors file: u64 length, JSON, then the tensors' bytes without gaps.
//!
//! Everything that a header can claim is checked here against the file's real size, so that later code may take
//! a tensor's byte range as true.

use std::fmt;
use std::path::Path;

use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};

use super::pairs::Pairs;
use super::{HeaderProblem, SafetensorsError, StoredDType, StoredTensor, TensorProblem};
use crate::shown::short_reason;

/// The longest header that the format's own implementation takes.
const MAX_HEADER: u64 = 100_000_000;

/// More sizes than any tensor has; bounds what a hostile header can make a reader allocate.
const MAX_RANK: usize = 16;

/// A checked header.
pub(super) struct Header {
    pub metadata: Vec<(String, String)>,
    /// In the order of their bytes.
    pub tensors: Vec<StoredTensor>,
}

/// Reads and checks the header of a whole file's bytes.
pub(super) fn parse(path: &Path, file: &[u8]) -> Result<Header, SafetensorsError> {
    let fail = |problem| SafetensorsError::Header { path: path.to_owned(), problem };
    let Some((length, rest)) = file.split_first_chunk::<8>() else {
        return Err(fail(HeaderProblem::TooShort { len: file.len() }));
    };
    let header = u64::from_le_bytes(*length);
    if header > rest.len() as u64 {
        return Err(fail(HeaderProblem::BeyondFile { header, available: rest.len() }));
    }
    if header > MAX_HEADER {
        return Err(fail(HeaderProblem::TooLong { header, limit: MAX_HEADER }));
    }
    let (json, data) = rest.split_at(header as usize);

    let mut raw = RawHeader::default();
    let mut parser = serde_json::Deserializer::from_slice(json);
    let parsed = (&mut raw).deserialize(&mut parser).and_then(|()| parser.end());
    if let Err(error) = parsed {
        let (line, column) = (error.line(), error.column());
        return Err(match raw.entry.take() {
            Some(tensor) => SafetensorsError::Tensor {
                path: path.to_owned(),
                tensor,
                problem: TensorProblem::Malformed(short_reason(&error.to_string())),
            },
            None => fail(HeaderProblem::Json { line, column, reason: without_place(&error) }),
        });
    }
    let data_start = 8 + json.len();
    let tensors = check_tensors(path, raw.tensors, data_start, data.len() as u64)?;
    Ok(Header { metadata: raw.metadata.unwrap_or_default(), tensors })
}

/// An error's message without serde_json's own mention of line and column.
pub(super) fn without_place(error: &serde_json::Error) -> String {
    let message = error.to_string();
    let place = format!(" at line {} column {}", error.line(), error.column());
    short_reason(message.strip_suffix(&place).unwrap_or(&message))
}

/// Checks every entry by itself, then that together they cover the data section exactly.
fn check_tensors(
    path: &Path,
    raw: Vec<(String, RawTensor)>,
    data_start: usize,
    available: u64,
) -> Result<Vec<StoredTensor>, SafetensorsError> {
    let mut tensors = Vec::with_capacity(raw.len());
    for (name, entry) in raw {
        match check_entry(&entry, available) {
            // The end is at most `available`, so both fit a usize.
            Ok((dtype, begin, end)) => tensors.push(StoredTensor {
                name,
                dtype,
                shape: entry.shape.0,
                bytes: data_start + begin as usize..data_start + end as usize,
            }),
            Err(problem) => {
                return Err(SafetensorsError::Tensor { path: path.to_owned(), tensor: name, problem });
            }
        }
    }
    let fail = |tensor: &StoredTensor, problem| {
        Err(SafetensorsError::Tensor { path: path.to_owned(), tensor: tensor.name.clone(), problem })
    };
    tensors.sort_by(|a, b| a.name.cmp(&b.name));
    if let Some((_, twice)) = tensors.iter().zip(tensors.iter().skip(1)).find(|(a, b)| a.name == b.name) {
        return fail(twice, TensorProblem::Duplicate);
    }
    tensors.sort_by_key(|t| (t.bytes.start, t.bytes.end));
    let mut covered = data_start;
    let mut before: Option<&StoredTensor> = None;
    for tensor in &tensors {
        if tensor.bytes.start < covered {
            let other = before.map(|t| t.name.clone()).unwrap_or_default();
            return fail(tensor, TensorProblem::Overlap { other });
        }
        if tensor.bytes.start > covered {
            return fail(tensor, TensorProblem::Gap { gap: (tensor.bytes.start - covered) as u64 });
        }
        covered = tensor.bytes.end;
        before = Some(tensor);
    }
    let extra = available - (covered - data_start) as u64;
    if extra > 0 {
        let problem = HeaderProblem::Trailing { extra };
        return Err(SafetensorsError::Header { path: path.to_owned(), problem });
    }
    Ok(tensors)
}

/// One entry's type and place in the data section.
fn check_entry(entry: &RawTensor, available: u64) -> Result<(StoredDType, u64, u64), TensorProblem> {
    let Some(dtype) = StoredDType::parse(&entry.dtype) else {
        return Err(TensorProblem::UnknownDType(entry.dtype.chars().take(32).collect()));
    };
    let shape = || entry.shape.0.clone();
    let Some(expected) = dtype.bytes_for(&entry.shape.0) else {
        return Err(TensorProblem::ImpossibleShape { shape: shape(), dtype: dtype.name() });
    };
    let [begin, end] = entry.data_offsets;
    let Some(found) = end.checked_sub(begin) else {
        return Err(TensorProblem::Backwards { begin, end });
    };
    if found != expected {
        return Err(TensorProblem::WrongLength { shape: shape(), dtype: dtype.name(), expected, found });
    }
    if end > available {
        return Err(TensorProblem::OutsideFile { end, available });
    }
    Ok((dtype, begin, end))
}

/// The header as written, duplicates kept so that they can be refused.
#[derive(Default)]
struct RawHeader {
    metadata: Option<Vec<(String, String)>>,
    tensors: Vec<(String, RawTensor)>,
    /// The tensor whose entry is being read.
    entry: Option<String>,
}

#[derive(Deserialize)]
struct RawTensor {
    dtype: String,
    shape: RawShape,
    data_offsets: [u64; 2],
}

struct RawShape(Vec<u64>);

impl<'de> DeserializeSeed<'de> for &mut RawHeader {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for &mut RawHeader {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(name) = map.next_key::<String>()? {
            if name == "__metadata__" {
                if self.metadata.replace(map.next_value::<Pairs>()?.0).is_some() {
                    return Err(A::Error::custom("__metadata__ is there twice"));
                }
                continue;
            }
            self.entry = Some(name);
            let tensor = map.next_value::<RawTensor>()?;
            if let Some(name) = self.entry.take() {
                self.tensors.push((name, tensor));
            }
        }
        Ok(())
    }
}

impl<'de> Deserialize<'de> for RawShape {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<RawShape, D::Error> {
        struct Sizes;
        impl<'de> Visitor<'de> for Sizes {
            type Value = RawShape;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of sizes")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<RawShape, A::Error> {
                let mut sizes = Vec::new();
                while let Some(size) = seq.next_element::<u64>()? {
                    if sizes.len() == MAX_RANK {
                        return Err(A::Error::custom(format_args!("more than {MAX_RANK} sizes")));
                    }
                    sizes.push(size);
                }
                Ok(RawShape(sizes))
            }
        }
        deserializer.deserialize_seq(Sizes)
    }
}
