//! A model from one format or type to another, a few rows at a time, so that memory does not grow with the model; with an
//! adapter merged into it on the way, where the rows come from [`MergeSet::merged`](crate::adapter::MergeSet::merged).

mod folder;
mod mxfp4;
mod packed;

use std::fmt;
use std::io::{self, Write};
use std::ops::Range;
use std::path::Path;

use plimsoll_device::DType;
use plimsoll_device::cpu::quantize::four_bit::FourBit;

use self::packed::Packed;
use crate::convert::ConversionError;
use crate::gguf::{
    Description, GgufValue, NewGgufTensor, describe, describe_tokenizer, gguf_block, write_gguf,
};
use crate::layout::{StoredPart, StoredTensor};
use crate::parameters::{Parameter, ParameterKind, Role};
use crate::save::{DEFAULT_SHARD_BYTES, SaveError, SaveWriter};
use crate::source::rows::{encode_stripe, stripes};
use crate::source::{ModelError, RowOrder, WeightSource};
use crate::spec::ModelSpec;
use crate::tokenizer::{GgufTokenizerFields, Tokenizer};
use crate::types_by_group::{TypesByGroup, WeightGroup};

/// Where a parameter's values come from.
pub trait RowSource {
    /// Writes the f32 values of some rows of a parameter into `out`, which has room for just them.
    fn rows(&self, parameter: &Parameter, rows: Range<u64>, out: &mut [f32]) -> Result<(), ModelError>;

    /// Writes some rows into `out` in the blocks that they are stored in, bits only moved, if they are stored in this type; else `false`.
    fn blocks(
        &self,
        _parameter: &Parameter,
        _rows: Range<u64>,
        _dtype: DType,
        _out: &mut [u8],
    ) -> Result<bool, ModelError> {
        Ok(false)
    }
}

impl RowSource for WeightSource {
    fn rows(&self, parameter: &Parameter, rows: Range<u64>, out: &mut [f32]) -> Result<(), ModelError> {
        self.read_rows(parameter, rows, out)
    }

    fn blocks(
        &self,
        parameter: &Parameter,
        rows: Range<u64>,
        dtype: DType,
        out: &mut [u8],
    ) -> Result<bool, ModelError> {
        self.read_stored_rows_of(parameter, rows, dtype, out)
    }
}

/// What a model is converted to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// A Hugging Face folder in f32, bf16 or f16.
    HuggingFace(DType),
    /// A Hugging Face folder whose linears bitsandbytes has in 4 bits; the rest is bf16.
    FourBit {
        /// Which.
        kind: FourBit,
        /// Whether magnitudes are quantised in turn.
        doubly: bool,
    },
    /// A Hugging Face folder whose linears bitsandbytes has in 8 bits, a scale for each row; the rest is bf16.
    EightBit,
    /// A Hugging Face folder of gpt-oss whose experts are MXFP4; the rest is bf16.
    Mxfp4,
    /// A GGUF file, its matrices in these types, bf16 where none is said. Where rows are not whole blocks of a type, in the next
    /// larger one that fits.
    Gguf(TypesByGroup),
}

/// Writes a model as a [`Target`].
pub struct Transcoder<'a> {
    spec: &'a ModelSpec,
    source: &'a dyn RowSource,
    shard_bytes: u64,
    tokenizer: Option<&'a Tokenizer>,
    packed: Packed,
    /// Told of values that were written, and how many there are.
    progress: &'a mut dyn FnMut(u64, u64),
    done: u64,
    substitutes: Vec<Substitute>,
}

/// Matrices that a GGUF file holds in another type than was asked for: their rows are no whole blocks of that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Substitute {
    /// What was asked for.
    pub wanted: DType,
    /// What they are in.
    pub used: DType,
    /// How many they are.
    pub matrices: usize,
}

impl fmt::Display for Substitute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Substitute { wanted, used, matrices } = self;
        let which =
            if *matrices == 1 { "a matrix is".to_owned() } else { format!("{matrices} matrices are") };
        let row = wanted.row_multiple();
        write!(f, "{which} in {used} instead of {wanted}, whose rows are multiples of {row}")
    }
}

impl Substitute {
    /// Counts a matrix that is in another type than was asked for.
    pub fn count(all: &mut Vec<Substitute>, wanted: DType, used: DType) {
        if wanted == used {
            return;
        }
        match all.iter_mut().find(|known| (known.wanted, known.used) == (wanted, used)) {
            Some(known) => known.matrices += 1,
            None => all.push(Substitute { wanted, used, matrices: 1 }),
        }
    }
}

impl<'a> Transcoder<'a> {
    /// Of a model of that shape, its values from `source`.
    pub fn new(
        spec: &'a ModelSpec,
        source: &'a dyn RowSource,
        progress: &'a mut dyn FnMut(u64, u64),
    ) -> Transcoder<'a> {
        Transcoder {
            spec,
            source,
            shard_bytes: DEFAULT_SHARD_BYTES,
            tokenizer: None,
            packed: Packed::default(),
            progress,
            done: 0,
            substitutes: Vec::new(),
        }
    }

    /// What was written in another type than was asked for.
    pub fn substitutes(&self) -> &[Substitute] {
        &self.substitutes
    }

    /// Begins a further file of a folder where one would get more bytes of weights than this.
    pub fn shard_bytes(self, shard_bytes: u64) -> Transcoder<'a> {
        Transcoder { shard_bytes, ..self }
    }

    /// Writes a tokenizer's files beside those of a folder.
    pub fn with_tokenizer(self, tokenizer: Option<&'a Tokenizer>) -> Transcoder<'a> {
        Transcoder { tokenizer, ..self }
    }

    /// Packs the linears of these groups alone, where a [`Target`] packs linears as bitsandbytes does.
    pub fn packing(self, groups: &[WeightGroup]) -> Transcoder<'a> {
        Transcoder { packed: Packed::of(groups), ..self }
    }

    /// Writes a folder's configuration and weights, and the tokenizer that was given. Returns the bytes without the tokenizer's.
    pub fn write_folder(&mut self, folder: &Path, target: Target) -> Result<u64, SaveError> {
        match target {
            Target::HuggingFace(dtype) => SaveWriter::new(self.spec, dtype)
                .shard_bytes(self.shard_bytes)
                .with_tokenizer(self.tokenizer)
                .write(folder, |parameter, out| self.stream(parameter, parameter.role.saved_as(dtype), out)),
            Target::FourBit { .. } | Target::EightBit => self.write_packed(folder, target),
            Target::Mxfp4 => self.write_mxfp4(folder),
            Target::Gguf(_) => Err(SaveError::Inexpressible {
                model: self.spec.name.clone(),
                target: "a folder",
                reason: "GGUF is one file".to_owned(),
            }),
        }
    }

    /// Writes a GGUF file with llama.cpp's tensor names, row order and metadata; `tokenizer` is carried over.
    pub fn write_gguf(
        &mut self,
        path: &Path,
        types: impl Into<TypesByGroup>,
        tokenizer: Option<&GgufTokenizerFields>,
    ) -> Result<u64, SaveError> {
        let wanted = types.into();
        // Some tokens are read by the model's name, from which that of its file may differ.
        let name = tokenizer.and_then(|tokenizer| tokenizer.model_name.as_deref()).unwrap_or(&self.spec.name);
        let Description { mut entries, factors } = describe(self.spec, name)?;
        entries.push(("general.quantization_version".to_owned(), GgufValue::U32(2)));
        entries.extend(tokenizer.into_iter().flat_map(describe_tokenizer));
        let stored: Vec<StoredTensor> =
            self.spec.blocks().flat_map(|block| gguf_block(self.spec, block)).collect();
        let mut tensors = Vec::with_capacity(stored.len() + factors.len());
        tensors.extend(factors.iter().map(|(name, values)| {
            let shape = vec![values.len() as u64];
            NewGgufTensor { name: (*name).to_owned(), dtype: DType::F32, shape }
        }));
        tensors.extend(stored.iter().map(|tensor| {
            let mut shape = tensor.shape();
            if tensor.is_of(|role| role == Role::SharedRouter) {
                shape.remove(0);
            }
            let [wanted, dtype] = gguf_dtype(tensor, &wanted);
            Substitute::count(&mut self.substitutes, wanted, dtype);
            NewGgufTensor { name: tensor.name.clone(), dtype, shape }
        }));
        let types: Vec<DType> = tensors.iter().map(|tensor| tensor.dtype).collect();
        write_gguf(path, &entries, &tensors, |index, out| match factors.get(index) {
            Some((_, values)) => values.iter().try_for_each(|x| out.write_all(&x.to_le_bytes())),
            None => match stored.get(index - factors.len()) {
                Some(tensor) => self.stream_stored(tensor, types[index], out),
                None => Ok(()),
            },
        })
    }

    /// A parameter's values in order.
    fn stream(&mut self, parameter: &Parameter, dtype: DType, out: &mut dyn Write) -> io::Result<()> {
        self.stream_rows(&StoredPart::whole(parameter.clone()), RowOrder::Natural, false, dtype, out)
    }

    /// A stored tensor's values, part after part.
    fn stream_stored(&mut self, tensor: &StoredTensor, dtype: DType, out: &mut dyn Write) -> io::Result<()> {
        if let RowOrder::Alternating { of, .. } = tensor.rows {
            return tensor
                .parts
                .chunks(of.max(1) as usize)
                .try_for_each(|parts| self.stream_by_turns(parts, dtype, out));
        }
        if let RowOrder::Transposed { .. } = tensor.rows {
            // Each part is one matrix of the stack.
            return tensor.parts.chunks(1).try_for_each(|part| self.stream_by_turns(part, dtype, out));
        }
        tensor
            .parts
            .iter()
            .try_for_each(|part| self.stream_rows(part, tensor.rows, tensor.plus_one, dtype, out))
    }

    /// Elements of the rows of some parts by turns: the rows of a matrix become columns.
    fn stream_by_turns(&mut self, parts: &[StoredPart], dtype: DType, out: &mut dyn Write) -> io::Result<()> {
        let mut values = Vec::new();
        for part in parts {
            let start = values.len();
            values.resize(start + part.elements() as usize, 0.0f32);
            self.source
                .rows(&part.parameter, part.rows.clone(), &mut values[start..])
                .map_err(io::Error::other)?;
        }
        let columns = parts.first().map_or(1, |part| part.parameter.columns()).max(1) as usize;
        let column = |first: usize| values.iter().skip(first).step_by(columns);
        let ordered: Vec<f32> = (0..columns).flat_map(column).copied().collect();
        let mut bytes = vec![0; dtype.bytes_for(ordered.len() as u64).unwrap_or(0) as usize];
        let name = parts.first().map_or("", |part| part.parameter.name.as_str());
        encode_stripe(&ordered, dtype, &mut bytes).map_err(of_tensor(name))?;
        self.advance(ordered.len() as u64);
        out.write_all(&bytes)
    }

    fn stream_rows(
        &mut self,
        part: &StoredPart,
        order: RowOrder,
        plus_one: bool,
        dtype: DType,
        out: &mut dyn Write,
    ) -> io::Result<()> {
        let parameter = &part.parameter;
        let columns = parameter.columns();
        let head = match order {
            RowOrder::Interleaved { head_dim } => head_dim,
            _ => 1,
        };
        let (mut values, mut ordered, mut bytes) = (Vec::new(), Vec::new(), Vec::new());
        for rows in stripes(part.count(), columns, head) {
            let rows = part.rows.start + rows.start..part.rows.start + rows.end;
            let first = rows.start;
            let count = ((rows.end - rows.start) * columns) as usize;
            if dtype.is_block() && order == RowOrder::Natural && !plus_one {
                bytes.resize(dtype.bytes_for(count as u64).unwrap_or(0) as usize, 0);
                let stored = self.source.blocks(parameter, rows.clone(), dtype, &mut bytes);
                if stored.map_err(io::Error::other)? {
                    out.write_all(&bytes)?;
                    self.advance(count as u64);
                    continue;
                }
            }
            values.resize(count, 0.0f32);
            self.source.rows(parameter, rows, &mut values).map_err(io::Error::other)?;
            if plus_one {
                values.iter_mut().for_each(|value| *value += 1.0);
            }
            if head > 1 {
                // Stripes are whole heads, inside which rows are moved.
                ordered.resize(count, 0.0);
                for (row, from) in (first..).zip(values.chunks_exact(columns.max(1) as usize)) {
                    let at = ((order.stored_row(row) - first) * columns) as usize;
                    if let Some(to) = ordered.get_mut(at..at + from.len()) {
                        to.copy_from_slice(from);
                    }
                }
                std::mem::swap(&mut values, &mut ordered);
            }
            bytes.resize(dtype.bytes_for(count as u64).unwrap_or(0) as usize, 0);
            encode_stripe(&values, dtype, &mut bytes).map_err(of_tensor(&parameter.name))?;
            out.write_all(&bytes)?;
            self.advance(count as u64);
        }
        Ok(())
    }

    fn advance(&mut self, count: u64) {
        self.done += count;
        (self.progress)(self.done, self.spec.parameters().iter().map(Parameter::elements).sum());
    }
}

/// The type that is asked for of a GGUF's tensor where matrices are to be as `wanted` says, and the one that it gets: f32 for vectors, for
/// which nothing else is read, and for routers.
fn gguf_dtype(tensor: &StoredTensor, wanted: &TypesByGroup) -> [DType; 2] {
    let role = tensor.parts.first().map(StoredPart::role);
    let matrix = role.is_some_and(|role| {
        role != Role::PositionEmbedding
            && !role.is_small_matrix()
            && !matches!(role.kind(), ParameterKind::Norm | ParameterKind::Bias)
    });
    if !matrix {
        return [DType::F32; 2];
    }
    let first = tensor.parts.first();
    let wanted = first.and_then(|part| wanted.of(&part.parameter)).unwrap_or(DType::Bf16);
    let columns = tensor.shape().last().copied().unwrap_or(1);
    let fits = |dtype: &DType| columns.is_multiple_of(dtype.row_multiple());
    // As llama.cpp falls back.
    let larger = match wanted {
        DType::Q4K => DType::Q5_0,
        DType::Q6K => DType::Q8_0,
        other => other,
    };
    [wanted, [wanted, larger].into_iter().find(fits).unwrap_or(DType::F16)]
}

/// An error of converting that names the tensor.
fn of_tensor(name: &str) -> impl Fn(ConversionError) -> io::Error {
    move |error| io::Error::other(format!("{name}: {error}"))
}
