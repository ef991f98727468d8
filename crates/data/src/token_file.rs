//! Tokens on disk: u32 little-endian, one after the other, in an unlinked temporary file. Memory does not grow with the
//! data, and nothing is left behind however the run ends.

use std::fs::File;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{BufWriter, Write};
use std::path::Path;

use crate::DataError;

/// Bytes that are read at once, which lie on the stack of whoever reads.
const PIECE: usize = 16 << 10;

/// Tokens being written.
pub struct TokenWriter {
    file: BufWriter<File>,
    folder: std::path::PathBuf,
    tokens: u64,
    hasher: DefaultHasher,
}

/// Tokens written.
#[derive(Debug)]
pub struct TokenFile {
    file: File,
    folder: std::path::PathBuf,
    tokens: u64,
    hash: u64,
}

impl TokenWriter {
    /// A file in `folder`, readable by its owner alone and without a name.
    pub fn new(folder: &Path) -> Result<TokenWriter, DataError> {
        let file =
            tempfile::tempfile_in(folder).map_err(DataError::io("create a temporary file in", folder))?;
        Ok(TokenWriter {
            file: BufWriter::new(file),
            folder: folder.to_owned(),
            tokens: 0,
            hasher: DefaultHasher::new(),
        })
    }

    /// Appends tokens.
    pub fn append(&mut self, tokens: &[u32]) -> Result<(), DataError> {
        for token in tokens {
            token.hash(&mut self.hasher);
            self.file
                .write_all(&token.to_le_bytes())
                .map_err(DataError::io("write the tokens to a temporary file in", &self.folder))?;
        }
        self.tokens += tokens.len() as u64;
        Ok(())
    }

    /// Number of tokens so far.
    pub fn len(&self) -> u64 {
        self.tokens
    }

    /// Ends the writing.
    pub fn finish(self) -> Result<TokenFile, DataError> {
        let file = self.file.into_inner().map_err(|e| DataError::Io {
            action: "write the tokens to a temporary file in",
            path: self.folder.clone(),
            source: e.into_error(),
        })?;
        Ok(TokenFile { file, folder: self.folder, tokens: self.tokens, hash: self.hasher.finish() })
    }
}

impl TokenFile {
    /// Number of tokens.
    pub fn len(&self) -> u64 {
        self.tokens
    }

    /// A number that differs where the tokens do.
    pub fn hash(&self) -> u64 {
        self.hash
    }

    /// Appends the `count` tokens from `start` on to `out`; they must be inside the file.
    pub fn read(&self, start: u64, count: usize, out: &mut Vec<u32>) -> Result<(), DataError> {
        self.for_each(start, count, |token| out.push(token))
    }

    /// Goes over the `count` tokens from `start` on, which must be inside the file. Takes no memory beside the stack.
    pub fn for_each(&self, start: u64, count: usize, mut each: impl FnMut(u32)) -> Result<(), DataError> {
        use std::os::unix::fs::FileExt;
        let mut bytes = [0; PIECE];
        let (mut place, mut left) = (4 * start, 4 * count);
        while left > 0 {
            let piece = &mut bytes[..left.min(PIECE)];
            self.file
                .read_exact_at(piece, place)
                .map_err(DataError::io("read the tokens from a temporary file in", &self.folder))?;
            piece.chunks_exact(4).for_each(|b| each(u32::from_le_bytes([b[0], b[1], b[2], b[3]])));
            (place, left) = (place + piece.len() as u64, left - piece.len());
        }
        Ok(())
    }

    /// Tells the system that what it keeps of the file in memory may go.
    pub fn release_cache(&self) {
        #[cfg(any(target_os = "linux", target_os = "android"))]
        {
            // It is only advice: a system that does not take it keeps its cache.
            let _ = rustix::fs::fadvise(&self.file, 0, None, rustix::fs::Advice::DontNeed);
        }
    }
}
