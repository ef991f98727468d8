//! Bytes and opcodes of a pickle (Python's `pickletools`, protocols 0 to 5): where they are read from, and what is wrong with them.

use std::io::{ErrorKind, Read};

/// What is wrong with a pickle.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Problem {
    /// The file ends within an object.
    #[error("the file ends in the middle of an object; was it copied whole?")]
    Truncated,
    /// It could not be read.
    #[error("{0}")]
    Io(String),
    /// An opcode that imports or calls something.
    #[error("opcode {0} would run code, which snapshots have no need of; nothing of it was run")]
    RunsCode(&'static str),
    /// No opcode of protocols 0 to 5.
    #[error("0x{0:02x} is no opcode of a pickle; is this a snapshot of torch.cuda.memory._dump_snapshot?")]
    Opcode(u8),
    /// A newer protocol.
    #[error("protocol {0} is newer than 5")]
    Protocol(u8),
    /// An opcode that takes more than there is.
    #[error("an opcode takes a value or a mark that is not there")]
    Underflow,
    /// A reference to nothing.
    #[error("entry {0} of the memo does not exist")]
    Memo(u64),
    /// An opcode on a value of another type.
    #[error("{0}")]
    Type(&'static str),
    /// A number that is none.
    #[error("{0:?} is no number")]
    Number(String),
    /// A length that the file cannot have.
    #[error("a string of {0} bytes reaches beyond the end of the file")]
    Length(u64),
    /// More than the limit.
    #[error("reading it takes more than {0} bytes of memory")]
    TooLarge(u64),
    /// A pickle of something else.
    #[error("this is no memory snapshot: {0}")]
    NoSnapshot(&'static str),
}

/// A pickle that cannot be read, with the place.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("byte {offset}: {problem}")]
pub struct PickleError {
    /// Offset of the opcode in the file.
    pub offset: u64,
    /// What is wrong.
    pub problem: Problem,
}

const BUFFER: usize = 1 << 20;

/// Bytes that come from a file, a mebibyte at a time.
pub(super) struct Bytes<R> {
    source: R,
    buffer: Vec<u8>,
    at: usize,
    /// Offset of the buffer's first byte.
    base: u64,
    /// Length of the file.
    length: u64,
}

impl<R: Read> Bytes<R> {
    pub fn new(source: R, length: u64) -> Self {
        Bytes { source, buffer: Vec::new(), at: 0, base: 0, length }
    }

    pub fn offset(&self) -> u64 {
        self.base + self.at as u64
    }

    /// Makes `count` bytes be in the buffer; `count` is at most a buffer.
    fn fill(&mut self, count: usize) -> Result<(), Problem> {
        if self.buffer.len() - self.at >= count {
            return Ok(());
        }
        self.base += self.at as u64;
        self.buffer.drain(..self.at);
        self.at = 0;
        let mut filled = self.buffer.len();
        self.buffer.resize(BUFFER.max(count), 0);
        while filled < count {
            match self.source.read(&mut self.buffer[filled..]) {
                Ok(0) => {
                    self.buffer.truncate(filled);
                    return Err(Problem::Truncated);
                }
                Ok(read) => filled += read,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => {
                    self.buffer.truncate(filled);
                    return Err(Problem::Io(error.to_string()));
                }
            }
        }
        self.buffer.truncate(filled);
        Ok(())
    }

    pub fn byte(&mut self) -> Result<u8, Problem> {
        if self.at == self.buffer.len() {
            self.fill(1)?;
        }
        self.at += 1;
        Ok(self.buffer[self.at - 1])
    }

    pub fn array<const N: usize>(&mut self) -> Result<[u8; N], Problem> {
        self.fill(N)?;
        let mut bytes = [0; N];
        bytes.copy_from_slice(&self.buffer[self.at..self.at + N]);
        self.at += N;
        Ok(bytes)
    }

    /// The next `count` bytes, which the file must have.
    pub fn take(&mut self, count: u64) -> Result<&[u8], Problem> {
        if count > self.length.saturating_sub(self.offset()) {
            return Err(Problem::Length(count));
        }
        let count = usize::try_from(count).map_err(|_| Problem::Length(count))?;
        self.fill(count)?;
        self.at += count;
        Ok(&self.buffer[self.at - count..self.at])
    }

    /// Passes `count` bytes over, without keeping them.
    pub fn skip(&mut self, count: u64) -> Result<(), Problem> {
        let mut left = count;
        while left > 0 {
            let part = left.min(BUFFER as u64);
            self.take(part).map_err(|problem| match problem {
                Problem::Length(_) => Problem::Length(count),
                other => other,
            })?;
            left -= part;
        }
        Ok(())
    }

    /// Bytes up to the end of the line, without it.
    pub fn line(&mut self) -> Result<Vec<u8>, Problem> {
        let mut line = Vec::new();
        loop {
            match self.byte()? {
                b'\n' => return Ok(line),
                // Numbers and indices; a string of protocol 0 is a line too.
                byte => line.push(byte),
            }
            if line.len() > BUFFER {
                return Err(Problem::Length(line.len() as u64));
            }
        }
    }
}

/// A number of protocol 0: decimal, perhaps with an `L` behind it; `None` beyond 64 bits.
pub(super) fn decimal(line: &[u8]) -> Result<Option<i64>, Problem> {
    let text = std::str::from_utf8(line).ok().map(|text| text.trim_end_matches(['L', '\r']));
    let is_number = |text: &&str| {
        let digits = text.strip_prefix('-').unwrap_or(text);
        !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit())
    };
    match text.filter(is_number) {
        Some(text) => Ok(text.parse().ok()),
        None => Err(Problem::Number(String::from_utf8_lossy(&line[..line.len().min(40)]).into_owned())),
    }
}

/// A signed little-endian number of any length; `None` beyond 64 bits.
pub(super) fn little_endian(bytes: &[u8]) -> Option<i64> {
    let sign = if bytes.last().is_some_and(|byte| byte & 0x80 != 0) { 0xff } else { 0 };
    if bytes.iter().skip(8).any(|byte| *byte != sign) {
        return None;
    }
    let mut whole = [sign; 8];
    let count = bytes.len().min(8);
    whole[..count].copy_from_slice(&bytes[..count]);
    let number = i64::from_le_bytes(whole);
    ((number < 0) == (sign != 0)).then_some(number)
}

/// `\uXXXX` and `\UXXXXXXXX` in a string of protocol 0; other bytes are Latin-1.
pub(super) fn raw_unicode(line: &[u8]) -> String {
    let mut text = String::with_capacity(line.len());
    let mut rest = line;
    while let Some((&byte, tail)) = rest.split_first() {
        rest = tail;
        let digits = match (byte, tail.first()) {
            (b'\\', Some(b'u')) => 4,
            (b'\\', Some(b'U')) => 8,
            _ => 0,
        };
        let code = tail.get(1..=digits).and_then(|hex| std::str::from_utf8(hex).ok());
        let code = code.filter(|_| digits > 0).and_then(|hex| u32::from_str_radix(hex, 16).ok());
        match code {
            Some(code) => {
                text.push(char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER));
                rest = &tail[digits + 1..];
            }
            None => text.push(char::from(byte)),
        }
    }
    text
}
