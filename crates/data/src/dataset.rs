//! A data set: files tokenised into windows of equal length. Texts are one stream of tokens that is cut: documents are
//! joined by the end-of-text token where there is more than one, and a tail shorter than a window is left out. Samples of
//! chats are never cut in two.

use std::path::Path;

use plimsoll_model::tokenizer::Tokenizer;

use crate::batches::add_targets;
use crate::chat::{SampleEncoder, SampleReport, SampleWindows, SampleWriter, Skipped};
use crate::files::{Wanted, expand};
use crate::order;
use crate::token_file::{TokenFile, TokenWriter};
use crate::{Batch, DataError, IGNORED_TARGET, documents};

/// What a data set is made of, and how it is cut.
#[derive(Clone, Debug, PartialEq)]
pub struct DatasetOptions {
    /// The key of the configuration that names it, for messages.
    pub key: &'static str,
    /// Files, folders, patterns.
    pub patterns: Vec<String>,
    /// Field of a JSONL line that holds its text.
    pub text_field: String,
    /// The share of records that may have no text and are left out.
    pub max_invalid_share: f64,
    /// Whether an end-of-text token follows the last document too.
    pub append_eos: bool,
    /// Bytes between a file and the tokenizer.
    pub buffer_bytes: usize,
    /// Tokens of a window.
    pub sequence_length: u64,
    /// Seed of the order of windows; `None` takes them as they come.
    pub shuffle: Option<u64>,
    /// Whether documents of a window are told apart: the end of one does not predict the beginning of the next.
    pub document_mask: bool,
}

/// A data set.
#[derive(Debug)]
pub struct Dataset {
    content: Content,
    sequence_length: u64,
    shuffle: Option<u64>,
}

#[derive(Debug)]
enum Content {
    /// One stream of tokens. With `document_end`, documents are told apart.
    Texts { tokens: TokenFile, document_end: Option<u32>, left_out: Vec<Skipped> },
    /// Samples in windows.
    Samples { windows: Box<SampleWindows>, report: SampleReport },
}

impl Dataset {
    /// Reads and tokenises the files. Tokens are kept in an unnamed file in `folder`.
    pub fn open(
        options: &DatasetOptions,
        tokenizer: &Tokenizer,
        folder: &Path,
    ) -> Result<Dataset, DataError> {
        let files = expand(&options.patterns, Wanted::Texts)?;
        let mut writer = TokenWriter::new(folder)?;
        let end = tokenizer.eos_token();
        let DatasetOptions { text_field, buffer_bytes, max_invalid_share, .. } = options;
        let append = &mut |piece: &[u32]| writer.append(piece);
        let left_out =
            documents::tokens(&files, text_field, *buffer_bytes, *max_invalid_share, tokenizer, append)?;
        if options.append_eos {
            writer.append(&[end.ok_or(DataError::NoEndOfText)?])?;
        }
        let document_end = match options.document_mask {
            true => Some(end.ok_or(DataError::NoEndOfText)?),
            false => None,
        };
        let tokens = writer.finish()?;
        let sequence_length = options.sequence_length;
        if tokens.len() < sequence_length || sequence_length == 0 {
            let (key, files) = (options.key, options.patterns.join(", "));
            return Err(DataError::TooShort { key, files, tokens: tokens.len(), sequence_length });
        }
        let content = Content::Texts { tokens, document_end, left_out };
        Ok(Dataset { content, sequence_length, shuffle: options.shuffle })
    }

    /// Reads and encodes the samples of files, folders and patterns. Tokens are kept in unnamed files in `folder`;
    /// `shuffle` is the seed of the windows' order.
    pub fn open_samples(
        patterns: &[String],
        encoder: &SampleEncoder<'_>,
        shuffle: Option<u64>,
        folder: &Path,
    ) -> Result<Dataset, DataError> {
        let options = encoder.options();
        let sequence_length = options.sequence_length;
        let mut writer = SampleWriter::new(folder, sequence_length as usize, options.packing)?;
        let report = encoder.for_each(patterns, &mut |_, sample| writer.add(sample))?;
        let windows = Box::new(writer.finish(encoder.padding())?);
        Ok(Dataset { content: Content::Samples { windows, report }, sequence_length, shuffle })
    }

    /// What became of the samples, where there are some.
    pub fn sample_report(&self) -> Option<&SampleReport> {
        match &self.content {
            Content::Texts { .. } => None,
            Content::Samples { report, .. } => Some(report),
        }
    }

    /// Records that have no text and were left out, by reason.
    pub fn left_out(&self) -> &[Skipped] {
        match &self.content {
            Content::Texts { left_out, .. } => left_out,
            Content::Samples { report, .. } => &report.skipped,
        }
    }

    /// Tokens in all.
    pub fn tokens(&self) -> u64 {
        match &self.content {
            Content::Texts { tokens, .. } => tokens.len(),
            Content::Samples { windows, .. } => windows.tokens(),
        }
    }

    /// Bytes of disk that they take.
    pub fn disk_bytes(&self) -> u64 {
        match &self.content {
            Content::Texts { tokens, .. } => 4 * tokens.len(),
            Content::Samples { windows, .. } => windows.disk_bytes(),
        }
    }

    /// Tokens of a window.
    pub fn sequence_length(&self) -> u64 {
        self.sequence_length
    }

    /// The token that ends a document, where documents are told apart.
    pub fn document_end(&self) -> Option<u32> {
        match &self.content {
            Content::Texts { document_end, .. } => *document_end,
            Content::Samples { .. } => None,
        }
    }

    /// Whole windows: an epoch.
    pub fn windows(&self) -> u64 {
        match &self.content {
            Content::Texts { tokens, .. } => tokens.len() / self.sequence_length.max(1),
            Content::Samples { windows, .. } => windows.count(),
        }
    }

    /// A text that differs where the windows or their order do, for runs that are resumed.
    pub fn identity(&self) -> String {
        let order = self.shuffle.map_or("in order".to_owned(), |seed| format!("shuffled by {seed}"));
        match &self.content {
            Content::Texts { tokens, document_end, .. } => {
                let documents = if document_end.is_some() { ", documents apart" } else { "" };
                format!(
                    "{:016x}, {} tokens, windows of {}, {order}{documents}",
                    tokens.hash(),
                    tokens.len(),
                    self.sequence_length
                )
            }
            Content::Samples { windows, .. } => format!("{}, {order}", windows.identity()),
        }
    }

    /// `count` windows, beginning with the `position`-th since training began. After the last window the next epoch begins.
    pub fn batch(&self, position: u64, count: u64) -> Result<Batch, DataError> {
        let mut batch = self.buffer(count);
        self.fill(position, count, &mut batch)?;
        Ok(batch)
    }

    /// Memory for `count` windows, and none more.
    pub fn buffer(&self, count: u64) -> Batch {
        let words = (count * self.sequence_length) as usize;
        let (weighted, apart) = match &self.content {
            Content::Texts { .. } => (false, false),
            Content::Samples { windows, .. } => (true, windows.are_shared()),
        };
        Batch {
            tokens: Vec::with_capacity(words),
            targets: Vec::with_capacity(words),
            weights: weighted.then(|| Vec::with_capacity(words)),
            document_starts: apart.then(|| Vec::with_capacity(words)),
        }
    }

    /// As [`Dataset::batch`], in the memory of another batch.
    pub fn fill(&self, position: u64, count: u64, batch: &mut Batch) -> Result<(), DataError> {
        let length = self.sequence_length as usize;
        batch.clear();
        for position in position..position + count {
            let window = order::window(position, self.windows(), self.shuffle);
            match &self.content {
                Content::Texts { tokens, .. } => {
                    tokens.read(window * self.sequence_length, length, &mut batch.tokens)?;
                }
                Content::Samples { windows, .. } => windows.read(window, batch)?,
            }
        }
        if let Content::Texts { document_end, .. } = &self.content {
            add_targets(&batch.tokens, length, &mut batch.targets);
            if let Some(end) = document_end {
                let ends = batch.targets.iter_mut().zip(&batch.tokens).filter(|(_, token)| *token == end);
                ends.for_each(|(target, _)| *target = IGNORED_TARGET);
            }
        }
        Ok(())
    }

    /// Tells the system that what it keeps of the tokens' files in memory may go; they are read again from disk.
    pub fn release_cache(&self) {
        match &self.content {
            Content::Texts { tokens, .. } => tokens.release_cache(),
            Content::Samples { windows, .. } => windows.release_cache(),
        }
    }
}
