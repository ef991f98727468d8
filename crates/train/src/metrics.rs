//! `metrics.jsonl`: one line per optimizer step, whole lines only, continued or cut back when a run resumes.

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::TrainError;

/// One optimizer step.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StepMetrics {
    /// 1-based number of the step.
    pub step: u64,
    /// Mean loss over the step's target tokens, before the update.
    pub loss: f64,
    /// Global gradient norm before clipping.
    pub grad_norm: f64,
    /// Whether the update was left out because the scaled gradients overflowed; the norm is not a number then.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub skipped: bool,
    /// The factor on the loss of the next step, where there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loss_scale: Option<f64>,
    /// Learning rate.
    pub lr: f64,
    /// Tokens seen since the beginning of the run.
    pub tokens: u64,
    /// Tokens of this step over its time.
    pub tokens_per_second: f64,
    /// Sequences of the step, over all micro-batches.
    pub batch_size: u64,
    /// Memory.
    pub memory: MemoryMetrics,
    /// The plan that the step was taken with: 0 for the one that the run began with, higher for those that need less memory.
    pub rung: u64,
    /// Mean loss on the validation data, where the step measured it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub validation_loss: Option<f64>,
}

/// Memory during a step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct MemoryMetrics {
    /// High-water mark of the device arena so far.
    pub device_peak_bytes: u64,
    /// High-water mark of the host tier so far, and the data pipeline.
    pub host_peak_bytes: u64,
    /// High-water mark of the disk tier so far.
    pub disk_bytes: u64,
    /// Resident set of the process now.
    pub process_rss_bytes: u64,
}

/// The file, open for appending.
#[derive(Debug)]
pub struct MetricsFile {
    path: PathBuf,
    file: File,
    /// Bytes of whole lines.
    length: u64,
}

impl MetricsFile {
    /// A new file, or one whose lines after `steps_done` are dropped, if `steps_done` is not 0.
    pub fn open(folder: &Path, steps_done: u64) -> Result<MetricsFile, TrainError> {
        let path = folder.join("metrics.jsonl");
        let kept = if steps_done == 0 { Vec::new() } else { lines_up_to(&path, steps_done)? };
        crate::write_whole(&path, &kept)?;
        let file =
            OpenOptions::new().append(true).open(&path).map_err(|e| TrainError::io("open", &path, e))?;
        Ok(MetricsFile { path, file, length: kept.len() as u64 })
    }

    /// Appends one step, whole or not at all.
    pub fn append(&mut self, metrics: &StepMetrics) -> Result<(), TrainError> {
        let mut line = serde_json::to_vec(metrics)
            .map_err(|e| TrainError::io("write", &self.path, std::io::Error::other(e)))?;
        line.push(b'\n');
        if let Err(error) = self.file.write_all(&line) {
            // Part of the line may have been written.
            let _ = self.file.set_len(self.length);
            return Err(TrainError::io("write", &self.path, error));
        }
        self.length += line.len() as u64;
        Ok(())
    }

    /// Makes the lines so far outlive a power cut.
    pub fn sync(&self) -> Result<(), TrainError> {
        self.file.sync_data().map_err(|e| TrainError::io("sync", &self.path, e))
    }
}

/// The file's whole lines whose step is at most `last`; nothing if there is no file.
fn lines_up_to(path: &Path, last: u64) -> Result<Vec<u8>, TrainError> {
    #[derive(Deserialize)]
    struct Numbered {
        step: u64,
    }
    let file = match File::open(path) {
        Ok(file) => file,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(TrainError::io("open", path, e)),
    };
    let mut kept = Vec::new();
    for line in BufReader::new(file).split(b'\n') {
        let line = line.map_err(|e| TrainError::io("read", path, e))?;
        // A line that a killed run left unfinished belongs to no step.
        if serde_json::from_slice::<Numbered>(&line).is_ok_and(|n| n.step <= last) {
            kept.extend_from_slice(&line);
            kept.push(b'\n');
        }
    }
    Ok(kept)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn metrics(step: u64) -> StepMetrics {
        StepMetrics {
            step,
            loss: 1.5,
            grad_norm: 2.0,
            skipped: false,
            loss_scale: None,
            lr: 1e-3,
            tokens: 64 * step,
            tokens_per_second: 100.0,
            batch_size: 2,
            memory: MemoryMetrics {
                device_peak_bytes: 1,
                host_peak_bytes: 2,
                disk_bytes: 0,
                process_rss_bytes: 3,
            },
            rung: 0,
            validation_loss: None,
        }
    }

    #[test]
    fn a_resumed_run_continues_where_its_checkpoint_was() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let mut file = MetricsFile::open(folder.path(), 0).unwrap();
        (1..=3).for_each(|step| file.append(&metrics(step)).unwrap());
        std::fs::write(&path, [std::fs::read(&path).unwrap(), b"{\"step\":4,\"lo".to_vec()].concat())
            .unwrap();
        let mut file = MetricsFile::open(folder.path(), 2).unwrap();
        file.append(&metrics(3)).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        let steps: Vec<u64> = text
            .lines()
            .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap()["step"].as_u64().unwrap())
            .collect();
        assert_eq!(steps, [1, 2, 3]);
        assert!(
            text.starts_with(r#"{"step":1,"loss":1.5,"grad_norm":2.0,"lr":0.001,"tokens":64,"#),
            "{text}"
        );
    }

    /// What a line that could not be written is cut back to.
    #[test]
    fn the_length_of_whole_lines_is_known() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let mut file = MetricsFile::open(folder.path(), 0).unwrap();
        for step in 1..=3 {
            file.append(&metrics(step)).unwrap();
            assert_eq!(file.length, std::fs::metadata(&path).unwrap().len(), "{step}");
        }
        assert_eq!(MetricsFile::open(folder.path(), 3).unwrap().length, file.length);
    }

    #[test]
    fn a_missing_file_has_no_lines_and_one_that_cannot_be_opened_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        assert!(lines_up_to(&folder.path().join("metrics.jsonl"), 3).unwrap().is_empty());
        // A file is no folder.
        let file = folder.path().join("file");
        std::fs::write(&file, "").unwrap();
        let error = lines_up_to(&file.join("metrics.jsonl"), 3).unwrap_err();
        assert!(matches!(error, TrainError::Io { .. }), "{error}");
    }

    /// Nothing of `/dev/null` outlives anything, and the system says so.
    #[test]
    #[cfg(target_os = "linux")]
    fn lines_that_cannot_be_made_to_last_are_an_error() {
        let path = PathBuf::from("/dev/null");
        let file = OpenOptions::new().append(true).open(&path).unwrap();
        let error = MetricsFile { path, file, length: 0 }.sync().unwrap_err();
        assert!(error.to_string().contains("/dev/null"), "{error}");
    }
}
