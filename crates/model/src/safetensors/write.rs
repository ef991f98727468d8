//! Writing a safetensors file by streaming: the header first, since all sizes are known, then one tensor after
//! the other from a callback, so that memory does not grow with the file.
//!
//! The file appears whole or not at all: it is written aside, synced, and renamed.

use std::collections::HashSet;
use std::io::{self, BufWriter, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::Path;

use serde_json::{Value, json};

use super::StoredDType;
use crate::counting::Counting;
use crate::save_error::SaveError;

/// Callers may write in small pieces; the system gets larger ones.
const BUFFER: usize = 256 << 10;

/// The entry that is no tensor.
const METADATA: &str = "__metadata__";

/// A tensor that is to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewTensor {
    /// Its name, unique in the file.
    pub name: String,
    /// Its element type.
    pub dtype: StoredDType,
    /// Its sizes, the slowest first.
    pub shape: Vec<u64>,
}

/// Writes `tensors` to `path`, which is replaced if it is there; its folder must exist. Returns the file's size.
///
/// `fill` is asked for each tensor's little-endian bytes in turn, in the file's order: that of `tensors`, except
/// that wider element types come before narrower ones, which keeps every tensor aligned for other readers. An
/// error of `fill` ends the writing and comes back as [`SaveError::Io`].
pub fn write_tensors(
    path: &Path,
    metadata: &[(&str, &str)],
    tensors: &[NewTensor],
    fill: impl FnMut(&NewTensor, &mut dyn Write) -> io::Result<()>,
) -> Result<u64, SaveError> {
    let mut order: Vec<&NewTensor> = tensors.iter().collect();
    order.sort_by_key(|tensor| std::cmp::Reverse(tensor.dtype.bits()));
    write_in_order(path, metadata, &order, fill)
}

/// The same in the given order, in which the caller sees to the alignment.
pub(crate) fn write_in_order(
    path: &Path,
    metadata: &[(&str, &str)],
    order: &[&NewTensor],
    mut fill: impl FnMut(&NewTensor, &mut dyn Write) -> io::Result<()>,
) -> Result<u64, SaveError> {
    write_placed(path, metadata, order, |file| {
        order.iter().enumerate().try_for_each(|(index, tensor)| {
            let whole = Span { tensor: index, bytes: 0..file.size(index) };
            file.fill(&[whole], |out| fill(tensor, out))
        })
    })
}

/// Some bytes of a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    /// Its place in the file's order.
    pub tensor: usize,
    /// Which, from its beginning.
    pub bytes: Range<u64>,
}

/// A file whose tensors are filled in any order.
pub(crate) struct Placed<'a> {
    pub(super) path: &'a Path,
    pub(super) order: &'a [&'a NewTensor],
    /// Where each tensor begins, and how long it is.
    pub(super) places: Vec<(u64, u64)>,
    pub(super) out: BufWriter<tempfile::NamedTempFile>,
    /// Where the next byte goes.
    pub(super) at: u64,
    pub(super) filled: u64,
}

impl Placed<'_> {
    /// Bytes of a tensor.
    pub fn size(&self, tensor: usize) -> u64 {
        self.places.get(tensor).map_or(0, |(_, size)| *size)
    }

    /// Fills spans, one behind the other, with what `write` writes: just as many bytes.
    pub fn fill(
        &mut self,
        spans: &[Span],
        write: impl FnOnce(&mut dyn Write) -> io::Result<()>,
    ) -> Result<(), SaveError> {
        let wanted = spans.iter().map(|span| span.bytes.end - span.bytes.start).sum();
        let mut scattered = Scattered { file: self, spans, written: 0, left: wanted, exceeded: false };
        let filled = write(&mut scattered);
        let (left, exceeded) = (scattered.left, scattered.exceeded);
        self.filled += wanted - left;
        if exceeded || (filled.is_ok() && left > 0) {
            let tensor = spans.first().and_then(|span| self.order.get(span.tensor));
            let tensor = tensor.map_or_else(String::new, |tensor| tensor.name.clone());
            let (path, missing) = (self.path.to_owned(), if exceeded { 0 } else { left });
            return Err(SaveError::Length { path, tensor, expected: wanted, missing });
        }
        filled.map_err(|source| SaveError::io("write", self.path, source))
    }
}

/// The same in any order: `write` fills every tensor of the file.
pub(crate) fn write_placed(
    path: &Path,
    metadata: &[(&str, &str)],
    order: &[&NewTensor],
    write: impl FnOnce(&mut Placed<'_>) -> Result<(), SaveError>,
) -> Result<u64, SaveError> {
    let header = Header::new(path, metadata, order)?;
    let io = |action| move |source| SaveError::io(action, path, source);
    let folder = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let aside = new_file_builder()
        .prefix(".writing-")
        .tempfile_in(folder)
        .map_err(|source| SaveError::io("create a file in", folder, source))?;
    let mut out = BufWriter::with_capacity(BUFFER, aside);
    let first = header.write(&mut out).map_err(io("write"))?;
    let mut end = first;
    let places = header.sizes.iter().map(|size| {
        let begin = end;
        end += size;
        (begin, *size)
    });
    let places = places.collect();
    let mut file = Placed { path, order, places, out, at: first, filled: 0 };
    write(&mut file)?;
    let missing = (end - first).saturating_sub(file.filled);
    if missing > 0 {
        let (path, tensor, expected) = (path.to_owned(), String::new(), end - first);
        return Err(SaveError::Length { path, tensor, expected, missing });
    }
    let aside = file.out.into_inner().map_err(|error| SaveError::io("write", path, error.into_error()))?;
    aside.as_file().sync_all().map_err(io("write"))?;
    aside.persist(path).map_err(|error| SaveError::io("rename a file to", path, error.error))?;
    sync_folder(folder);
    Ok(end)
}

/// Temporary files get the permissions that any new file gets; by themselves they would be the owner's alone.
pub(crate) fn new_file_builder() -> tempfile::Builder<'static, 'static> {
    let mut builder = tempfile::Builder::new();
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    builder
}

/// Makes renames in a folder durable. Some file systems cannot, and the files themselves are already synced.
pub(crate) fn sync_folder(folder: &Path) {
    if let Ok(folder) = std::fs::File::open(folder) {
        let _ = folder.sync_all();
    }
}

/// What stands before the tensors. It is written entry by entry: a file may have very many tensors.
struct Header<'a> {
    metadata: &'a [(&'a str, &'a str)],
    order: &'a [&'a NewTensor],
    /// Each tensor's bytes.
    sizes: Vec<u64>,
}

impl<'a> Header<'a> {
    fn new(
        path: &Path,
        metadata: &'a [(&'a str, &'a str)],
        order: &'a [&'a NewTensor],
    ) -> Result<Header<'a>, SaveError> {
        let fail = |tensor: &NewTensor, reason: &'static str| SaveError::Tensor {
            path: path.to_owned(),
            tensor: tensor.name.clone(),
            reason,
        };
        let mut names = HashSet::with_capacity(order.len() + 1);
        names.insert(METADATA);
        let mut sizes = Vec::with_capacity(order.len());
        let mut end = 0u64;
        for tensor in order {
            let size =
                tensor.dtype.bytes_for(&tensor.shape).ok_or_else(|| fail(tensor, "its size overflows"))?;
            end = end.checked_add(size).ok_or_else(|| fail(tensor, "the file's size overflows"))?;
            if !names.insert(&tensor.name) {
                return Err(fail(tensor, "its name is taken"));
            }
            sizes.push(size);
        }
        Ok(Header { metadata, order, sizes })
    }

    /// Writes the length prefix and the JSON, padded so that data starts at a multiple of 8; returns how many bytes.
    fn write(&self, out: &mut dyn Write) -> io::Result<u64> {
        let mut counting = Counting { inner: io::sink(), written: 0 };
        self.write_json(&mut counting)?;
        let padded = counting.written.next_multiple_of(8);
        out.write_all(&padded.to_le_bytes())?;
        self.write_json(out)?;
        (counting.written..padded).try_for_each(|_| out.write_all(b" "))?;
        Ok(size_of::<u64>() as u64 + padded)
    }

    fn write_json(&self, mut out: &mut dyn Write) -> io::Result<()> {
        let mut separator = "{";
        if !self.metadata.is_empty() {
            let pairs = self.metadata.iter().map(|(key, value)| (key.to_string(), Value::from(*value)));
            let pairs = Value::Object(pairs.collect());
            write!(out, "{separator}\"{METADATA}\":{pairs}")?;
            separator = ",";
        }
        let mut begin = 0;
        for (tensor, size) in self.order.iter().zip(&self.sizes) {
            write!(out, "{separator}")?;
            serde_json::to_writer(&mut out, &tensor.name)?;
            let entry = json!({
                "dtype": tensor.dtype.name(),
                "shape": tensor.shape,
                "data_offsets": [begin, begin + size],
            });
            write!(out, ":{entry}")?;
            (separator, begin) = (",", begin + size);
        }
        if separator == "{" {
            write!(out, "{separator}")?;
        }
        write!(out, "}}")
    }
}

/// Lets through just as many bytes as spans have, each to its place.
struct Scattered<'s, 'a> {
    file: &'s mut Placed<'a>,
    spans: &'s [Span],
    /// Bytes of the first span that are written.
    written: u64,
    left: u64,
    exceeded: bool,
}

impl Write for Scattered<'_, '_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if bytes.len() as u64 > self.left {
            self.exceeded = true;
            return Err(io::Error::other("more bytes than the tensor has"));
        }
        while let [first, rest @ ..] = self.spans
            && self.written == first.bytes.end - first.bytes.start
        {
            (self.spans, self.written) = (rest, 0);
        }
        let Some(span) = self.spans.first() else { return Ok(0) };
        let (begin, _) = self.file.places.get(span.tensor).copied().unwrap_or_default();
        let at = begin + span.bytes.start + self.written;
        if at != self.file.at {
            self.file.out.seek(SeekFrom::Start(at))?;
        }
        let count = (span.bytes.end - span.bytes.start - self.written).min(bytes.len() as u64);
        let written = self.file.out.write(&bytes[..count as usize])?;
        self.file.at = at + written as u64;
        self.written += written as u64;
        self.left -= written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.out.flush()
    }
}
