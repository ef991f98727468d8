//! Samples in windows of equal length: one each, or as many as fit.
//!
//! On disk lie the tokens of all windows one after the other without their padding, the weight of each beside it, the
//! lengths of the samples, and for each window where its tokens and its samples begin. In memory are the windows that
//! are still open for further samples, of which there are few.

use std::path::Path;

use super::EncodedSample;
use crate::token_file::{TokenFile, TokenWriter};
use crate::{Batch, DataError, IGNORED_TARGET};

/// Windows that are open at once. More of them leave less padding.
const OPEN_WINDOWS: usize = 32;

/// Words of an entry of the index: a token and a sample of 64 bits each.
const ENTRY: usize = 4;

/// Windows being written.
pub struct SampleWriter {
    length: usize,
    packing: bool,
    open: Vec<Window>,
    tokens: TokenWriter,
    weights: TokenWriter,
    lengths: TokenWriter,
    index: TokenWriter,
    windows: u64,
}

/// Windows written.
#[derive(Debug)]
pub struct SampleWindows {
    length: usize,
    packing: bool,
    padding: u32,
    tokens: TokenFile,
    weights: TokenFile,
    lengths: TokenFile,
    index: TokenFile,
    windows: u64,
}

#[derive(Default)]
struct Window {
    tokens: Vec<u32>,
    /// The bits of f32.
    weights: Vec<u32>,
    lengths: Vec<u32>,
}

impl SampleWriter {
    /// Windows of `length` tokens, kept in unnamed files in `folder`.
    pub fn new(folder: &Path, length: usize, packing: bool) -> Result<SampleWriter, DataError> {
        let writer = || TokenWriter::new(folder);
        Ok(SampleWriter {
            length,
            packing,
            open: Vec::new(),
            tokens: writer()?,
            weights: writer()?,
            lengths: writer()?,
            index: writer()?,
            windows: 0,
        })
    }

    /// Puts a sample into the fullest window that it fits in; it is no longer than a window.
    pub fn add(&mut self, sample: &EncodedSample) -> Result<(), DataError> {
        let room = |window: &Window| self.length.checked_sub(window.tokens.len() + sample.tokens.len());
        let fitting = self.open.iter().enumerate().filter_map(|(i, window)| Some((room(window)?, i))).min();
        let place = match fitting {
            Some((_, place)) if self.packing => place,
            _ => {
                let most = if self.packing { OPEN_WINDOWS } else { 1 };
                if self.open.len() >= most {
                    let fullest = (0..self.open.len()).max_by_key(|i| self.open[*i].tokens.len());
                    self.close(fullest.unwrap_or(0))?;
                }
                self.open.push(Window::default());
                self.open.len() - 1
            }
        };
        if let Some(window) = self.open.get_mut(place) {
            window.tokens.extend_from_slice(&sample.tokens);
            window.weights.extend(sample.weights.iter().map(|weight| weight.to_bits()));
            window.lengths.push(sample.tokens.len() as u32);
            if window.tokens.len() == self.length {
                self.close(place)?;
            }
        }
        Ok(())
    }

    /// Writes a window.
    fn close(&mut self, place: usize) -> Result<(), DataError> {
        let window = self.open.remove(place);
        self.append_entry()?;
        self.tokens.append(&window.tokens)?;
        self.weights.append(&window.weights)?;
        self.lengths.append(&window.lengths)?;
        self.windows += 1;
        Ok(())
    }

    fn append_entry(&mut self) -> Result<(), DataError> {
        let words = |value: u64| [value as u32, (value >> 32) as u32];
        let (token, sample) = (words(self.tokens.len()), words(self.lengths.len()));
        self.index.append(&token)?;
        self.index.append(&sample)
    }

    /// Ends the writing. Windows are filled up with `padding`.
    pub fn finish(mut self, padding: u32) -> Result<SampleWindows, DataError> {
        while !self.open.is_empty() {
            self.close(0)?;
        }
        self.append_entry()?;
        Ok(SampleWindows {
            length: self.length,
            packing: self.packing,
            padding,
            tokens: self.tokens.finish()?,
            weights: self.weights.finish()?,
            lengths: self.lengths.finish()?,
            index: self.index.finish()?,
            windows: self.windows,
        })
    }
}

impl SampleWindows {
    /// Number of windows.
    pub fn count(&self) -> u64 {
        self.windows
    }

    /// Bytes of disk that all of it takes.
    pub fn disk_bytes(&self) -> u64 {
        [&self.tokens, &self.weights, &self.lengths, &self.index].map(|file| 4 * file.len()).iter().sum()
    }

    /// Tokens of all samples, without padding.
    pub fn tokens(&self) -> u64 {
        self.tokens.len()
    }

    /// A text that differs where the windows do.
    pub fn identity(&self) -> String {
        format!(
            "{:016x}, {:016x} and {:016x}, {} tokens in {} windows of {}",
            self.tokens.hash(),
            self.weights.hash(),
            self.lengths.hash(),
            self.tokens.len(),
            self.windows,
            self.length
        )
    }

    /// Appends a window to a batch: position i of a sample predicts its token i + 1, if that one counts.
    pub fn read(&self, window: u64, out: &mut Batch) -> Result<(), DataError> {
        let (mut entry, mut at) = ([0u32; 2 * ENTRY], 0);
        self.index.for_each(window * ENTRY as u64, 2 * ENTRY, |word| {
            entry[at] = word;
            at += 1;
        })?;
        let number = |i: usize| u64::from(entry[i]) | (u64::from(entry[i + 1]) << 32);
        let (start, end) = (number(0), number(ENTRY));
        let (first, last) = (number(2), number(ENTRY + 2));
        let count = |from: u64, to: u64| to.saturating_sub(from) as usize;
        let before = out.tokens.len();
        self.tokens.read(start, count(start, end), &mut out.tokens)?;
        let weights = out.weights.get_or_insert_default();
        self.weights.for_each(start, count(start, end), |bits| weights.push(f32::from_bits(bits)))?;
        let mut starts = self.packing.then(|| out.document_starts.get_or_insert_default());
        let mut sample = before;
        self.lengths.for_each(first, count(first, last), |length| {
            let length = length as usize;
            for i in 1..=length {
                let (place, next) = (sample + i - 1, sample + i);
                // The last position of a sample predicts nothing. A position has the weight of the token that it predicts.
                let weight = weights.get(next).copied().filter(|_| i < length).unwrap_or(0.0);
                if let Some(own) = weights.get_mut(place) {
                    *own = weight;
                }
                let predicted = out.tokens.get(next).copied().filter(|_| weight > 0.0);
                out.targets.push(predicted.unwrap_or(IGNORED_TARGET));
                // A sample alone is its own sequence; what comes after it is not seen.
                if let Some(starts) = &mut starts {
                    starts.push((sample - before) as u32);
                }
            }
            sample += length;
        })?;
        let (filled, whole) = ((sample - before) as u32, before + self.length);
        out.tokens.resize(whole, self.padding);
        out.targets.resize(whole, IGNORED_TARGET);
        weights.resize(whole, 0.0);
        // Padding is a document of its own.
        if let Some(starts) = starts {
            starts.resize(whole, filled);
        }
        Ok(())
    }

    /// Whether samples share windows, and are told apart.
    pub fn are_shared(&self) -> bool {
        self.packing
    }

    /// Tells the system that what it keeps of the files in memory may go.
    pub fn release_cache(&self) {
        [&self.tokens, &self.weights, &self.lengths, &self.index]
            .iter()
            .for_each(|file| file.release_cache());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn windows(samples: &[Vec<(u32, f32)>], length: usize, packing: bool) -> SampleWindows {
        let folder = tempfile::tempdir().unwrap();
        let mut writer = SampleWriter::new(folder.path(), length, packing).unwrap();
        for sample in samples {
            let (tokens, weights) = sample.iter().copied().unzip();
            writer.add(&EncodedSample { tokens, weights, ..EncodedSample::default() }).unwrap();
        }
        writer.finish(9).unwrap()
    }

    fn read(windows: &SampleWindows) -> Batch {
        let mut batch = Batch::default();
        (0..windows.count()).for_each(|i| windows.read(i, &mut batch).unwrap());
        batch
    }

    const NONE: u32 = IGNORED_TARGET;

    fn three() -> Vec<Vec<(u32, f32)>> {
        vec![
            vec![(1, 0.0), (2, 1.0), (3, 0.5)],
            vec![(4, 1.0), (5, 0.0), (6, 1.0), (7, 1.0)],
            vec![(8, 0.0), (8, 1.0)],
        ]
    }

    #[test]
    fn a_window_each_is_padded() {
        let batch = read(&windows(&three(), 5, false));
        assert_eq!(batch.tokens, [1, 2, 3, 9, 9, 4, 5, 6, 7, 9, 8, 8, 9, 9, 9]);
        let targets = [2, 3, NONE, NONE, NONE, NONE, 6, 7, NONE, NONE, 8, NONE, NONE, NONE, NONE];
        assert_eq!(batch.targets, targets);
        let weights = [1.0, 0.5, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0];
        assert_eq!(batch.weights.unwrap(), weights);
        assert_eq!(batch.document_starts, None);
    }

    #[test]
    fn packed_samples_are_documents() {
        let windows = windows(&three(), 6, true);
        let batch = read(&windows);
        assert_eq!(batch.tokens, [4, 5, 6, 7, 8, 8, 1, 2, 3, 9, 9, 9]);
        assert_eq!(batch.targets, [NONE, 6, 7, NONE, 8, NONE, 2, 3, NONE, NONE, NONE, NONE]);
        assert_eq!(batch.document_starts.unwrap(), [0, 0, 0, 0, 4, 4, 0, 0, 0, 3, 3, 3]);
        assert_eq!((windows.count(), windows.tokens()), (2, 9));
    }

    proptest! {
        #[test]
        fn every_sample_is_in_one_window(lengths in prop::collection::vec(1usize..20, 1..120), packing: bool) {
            let mut next = 10;
            let samples: Vec<Vec<(u32, f32)>> = lengths
                .iter()
                .map(|length| (0..*length).map(|_| { next += 1; (next, (next % 2) as f32) }).collect())
                .collect();
            let windows = windows(&samples, 20, packing);
            let batch = read(&windows);
            let mut seen: Vec<u32> = batch.tokens.iter().copied().filter(|token| *token != 9).collect();
            seen.sort_unstable();
            prop_assert_eq!(seen, (11..=next).collect::<Vec<_>>());
            let trained = batch.targets.iter().filter(|target| **target != NONE).count();
            let expected = samples.iter().flat_map(|s| &s[1..]).filter(|(_, weight)| *weight > 0.0).count();
            prop_assert_eq!(trained, expected);
            // Where a target is, the next token is it.
            for (i, target) in batch.targets.iter().enumerate().filter(|(_, target)| **target != NONE) {
                prop_assert_eq!(batch.tokens[i + 1], *target);
            }
        }
    }
}
