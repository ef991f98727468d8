//! What a run writes of each optimizer step: `metrics.jsonl` always, `metrics.csv` and TensorBoard's events on request. Whole lines and
//! records only, continued or cut back when a run resumes.

mod appended;
mod csv;
mod tensorboard;

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use plimsoll_monitor::Status;
use plimsoll_step::{ExpertCounts, ExpertTraffic};
use serde::{Deserialize, Deserializer, Serialize};

use self::appended::Appended;
use self::csv::Csv;
use self::tensorboard::EventFile;
use crate::{Io, TrainError};

const FILE: &str = "metrics.jsonl";

/// Bytes of a line at most; a step takes a few hundred.
const LONGEST_LINE: u64 = 1 << 16;

/// One optimizer step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepMetrics {
    /// 1-based number of the step.
    pub step: u64,
    /// Mean loss over the step's target tokens, before the update.
    #[serde(deserialize_with = "number")]
    pub loss: f64,
    /// Global gradient norm before clipping.
    #[serde(deserialize_with = "number")]
    pub grad_norm: f64,
    /// Whether the update was left out because the scaled gradients overflowed; the norm is not a number then.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub skipped: bool,
    /// The factor on the loss of the next step, where there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loss_scale: Option<f64>,
    /// Learning rate.
    pub lr: f64,
    /// Tokens seen since the beginning of the run.
    pub tokens: u64,
    /// Tokens of this step over its time.
    #[serde(deserialize_with = "number")]
    pub tokens_per_second: f64,
    /// Sequences of the step, over all micro-batches.
    pub batch_size: u64,
    /// Memory.
    pub memory: MemoryMetrics,
    /// The plan that the step was taken with, by its place on the ladder: 0 for the one that needs most memory.
    #[serde(default)]
    pub rung: u64,
    /// Sequences of a micro-batch of that plan; 0 in runs of before.
    #[serde(default)]
    pub micro_batch_size: u64,
    /// Mean loss on the validation data, where the step measured it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub validation_loss: Option<f64>,
    /// What went between the device and the tiers below it in this step; `None` where everything stays on the device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub io: Option<Io>,
    /// Resident set of each of several ranks after the step, in bytes, by its number.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ranks_rss_bytes: Vec<u64>,
    /// How evenly a mixture of experts is used, layer by layer; of the tokens of the first rank.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub experts: Vec<ExpertLoad>,
    /// How frozen experts came; `None` where they come with their layers, or are in memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expert_reads: Option<ExpertReads>,
}

/// How often matrices of experts were used in a step, and read for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExpertReads {
    /// Times that a matrix of an expert was used for tokens of a micro-batch.
    pub used: u64,
    /// Times that it had to be read first.
    pub read: u64,
    /// Bytes of that.
    pub bytes: u64,
}

impl ExpertReads {
    /// What has come since an earlier moment.
    pub(crate) fn between(before: ExpertTraffic, now: ExpertTraffic) -> ExpertReads {
        ExpertReads {
            used: now.used - before.used,
            read: now.read - before.read,
            bytes: now.bytes - before.bytes,
        }
    }
}

/// How evenly the experts of a layer were used in a step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ExpertLoad {
    /// The layer.
    pub layer: u32,
    /// Entropy of the shares, as a part of what it is when all experts have as much to do: 1 is even, 0 one expert for all.
    pub entropy: f64,
    /// The share of the busiest expert, in even shares.
    pub busiest: f64,
    /// Experts without a token.
    pub idle: u32,
    /// The share of each expert.
    pub fractions: Vec<f32>,
    /// The share of all choices that no expert took, where experts take no more than their capacity.
    #[serde(default)]
    pub dropped: f64,
}

impl ExpertLoad {
    /// Of how often each expert of a layer was chosen.
    pub fn new(ExpertCounts { layer, chosen: counts, dropped }: &ExpertCounts) -> ExpertLoad {
        let total = counts.iter().copied().map(f64::from).sum::<f64>().max(1.0);
        let shares: Vec<f64> = counts.iter().map(|count| f64::from(*count) / total).collect();
        let entropy: f64 = shares.iter().filter(|share| **share > 0.0).map(|share| -share * share.ln()).sum();
        let even = (counts.len() as f64).ln();
        ExpertLoad {
            layer: *layer,
            dropped: f64::from(*dropped) / total,
            entropy: if even > 0.0 { entropy / even } else { 1.0 },
            busiest: shares.iter().copied().fold(0.0, f64::max) * counts.len() as f64,
            idle: counts.iter().filter(|count| **count == 0).count() as u32,
            fractions: shares.iter().map(|share| (*share * 1e4).round() as f32 / 1e4).collect(),
        }
    }
}

/// Memory during a step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct MemoryMetrics {
    /// High-water mark of the device arena so far.
    pub device_peak_bytes: u64,
    /// High-water mark of the host tier so far, and the data pipeline.
    pub host_peak_bytes: u64,
    /// High-water mark of the disk tier so far.
    pub disk_bytes: u64,
    /// Resident set of the process now.
    pub process_rss_bytes: u64,
    /// What the monitor says of it; runs of before have nothing of it.
    #[serde(flatten, default)]
    pub health: MemoryHealth,
}

/// How near to the load line a process is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct MemoryHealth {
    /// In a word.
    pub status: Status,
    /// The share of the load line in use.
    pub utilization: f64,
    /// The load line.
    pub limit_bytes: u64,
    /// Steps until the line is reached at the present trend, if that is within as many steps as were seen.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub forecast_steps: Option<u64>,
    /// Bytes that a step adds at that trend.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub growing_bytes_per_step: Option<f64>,
}

/// What is written beside `metrics.jsonl`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MetricsFormats {
    /// `metrics.csv`
    pub csv: bool,
    /// The folder `tensorboard`.
    pub tensorboard: bool,
}

/// The files of a run's metrics, open for appending.
#[derive(Debug)]
pub struct MetricsLog {
    lines: Appended,
    csv: Option<Csv>,
    tensorboard: Option<EventFile>,
}

impl MetricsLog {
    /// New files, or those of a run that is continued behind `steps_done` steps, without what came later.
    pub fn open(folder: &Path, steps_done: u64, formats: MetricsFormats) -> Result<MetricsLog, TrainError> {
        let path = folder.join(FILE);
        let kept = if steps_done == 0 { Vec::new() } else { lines_up_to(&path, steps_done)? };
        Ok(MetricsLog {
            lines: Appended::after(path, &kept)?,
            csv: formats.csv.then(|| Csv::open(folder, steps_done)).transpose()?,
            tensorboard: formats.tensorboard.then(|| EventFile::open(folder, steps_done)).transpose()?,
        })
    }

    /// Appends one step to each file that does not have it yet, whole or not at all.
    pub fn append(&mut self, metrics: &StepMetrics) -> Result<(), TrainError> {
        let mut line =
            serde_json::to_vec(metrics).map_err(|e| TrainError::io("write", self.lines.path(), e.into()))?;
        line.push(b'\n');
        self.lines.append(metrics.step, &line)?;
        if let Some(csv) = &mut self.csv {
            csv.append(metrics)?;
        }
        if let Some(events) = &mut self.tensorboard {
            events.append(metrics)?;
        }
        Ok(())
    }

    /// Makes what was written so far outlive a power cut.
    pub fn sync(&self) -> Result<(), TrainError> {
        self.lines.sync()?;
        self.csv.as_ref().map_or(Ok(()), Csv::sync)?;
        self.tensorboard.as_ref().map_or(Ok(()), EventFile::sync)
    }
}

/// A number; JSON has no other word than null for what is none.
fn number<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    Ok(Option::<f64>::deserialize(deserializer)?.unwrap_or(f64::NAN))
}

impl StepMetrics {
    /// The steps in a run's folder, in order; none where the run has not taken a step yet. A last line without an end, which a
    /// run that is going or was killed leaves, is no step.
    ///
    /// # Errors
    /// [`TrainError::Metrics`] with the line that says no step; [`TrainError::Io`] where the file cannot be read.
    pub fn of_run(folder: &Path) -> Result<Vec<StepMetrics>, TrainError> {
        let path = folder.join(FILE);
        let file = match File::open(&path) {
            Ok(file) => file,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(e) => return Err(TrainError::io("open", &path, e)),
        };
        let mut steps: Vec<StepMetrics> = Vec::new();
        let (mut reader, mut text) = (BufReader::new(file), Vec::new());
        for line in 1.. {
            text.clear();
            let most = &mut (&mut reader).take(LONGEST_LINE);
            let read = most.read_until(b'\n', &mut text).map_err(|e| TrainError::io("read", &path, e))?;
            let is_whole = text.last() == Some(&b'\n');
            if read == 0 || (!is_whole && text.len() < LONGEST_LINE as usize) {
                break;
            }
            let step: StepMetrics = serde_json::from_slice(&text).map_err(|reason| TrainError::Metrics {
                path: path.clone(),
                line,
                reason,
            })?;
            // A run that was resumed has taken these steps anew.
            while steps.last().is_some_and(|last| last.step >= step.step) {
                steps.pop();
            }
            steps.push(step);
        }
        Ok(steps)
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

    const JSONL: MetricsFormats = MetricsFormats { csv: false, tensorboard: false };

    pub(super) fn metrics(step: u64) -> StepMetrics {
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
                health: MemoryHealth { utilization: 0.75, limit_bytes: 4, ..MemoryHealth::default() },
            },
            rung: 0,
            micro_batch_size: 2,
            validation_loss: None,
            io: None,
            ranks_rss_bytes: Vec::new(),
            experts: Vec::new(),
            expert_reads: None,
        }
    }

    #[test]
    fn loads_are_told_in_even_shares() {
        let load = |chosen: &[u32], dropped| {
            ExpertLoad::new(&ExpertCounts { layer: 3, chosen: chosen.to_vec(), dropped })
        };
        let ExpertLoad { entropy, busiest, idle, fractions, dropped, .. } = load(&[6, 2, 0, 0], 2);
        assert_eq!(dropped, 0.25);
        assert!((entropy - 0.4056).abs() < 1e-4 && busiest == 3.0 && idle == 2);
        assert_eq!(fractions, [0.75, 0.25, 0.0, 0.0]);
        assert_eq!(load(&[5, 5], 0).entropy, 1.0);
        assert_eq!(load(&[0, 0], 0).idle, 2);
    }

    #[test]
    fn a_resumed_run_continues_where_its_checkpoint_was() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let mut file = MetricsLog::open(folder.path(), 0, JSONL).unwrap();
        (1..=3).for_each(|step| file.append(&metrics(step)).unwrap());
        std::fs::write(&path, [std::fs::read(&path).unwrap(), b"{\"step\":4,\"lo".to_vec()].concat())
            .unwrap();
        let mut file = MetricsLog::open(folder.path(), 2, JSONL).unwrap();
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

    /// A run that is going has a last line without an end; one that went bad has numbers that are none.
    #[test]
    fn steps_are_read_again() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(StepMetrics::of_run(folder.path()).unwrap(), []);
        let mut file = MetricsLog::open(folder.path(), 0, JSONL).unwrap();
        (1..=3).for_each(|step| file.append(&metrics(step)).unwrap());
        file.append(&StepMetrics { loss: f64::NAN, skipped: true, ..metrics(4) }).unwrap();
        // As if the run had gone back to its second step.
        file.append(&StepMetrics { loss: 0.5, validation_loss: Some(0.75), ..metrics(3) }).unwrap();
        file.lines.write(b"{\"step\":4,\"lo").unwrap();
        let steps = StepMetrics::of_run(folder.path()).unwrap();
        assert_eq!(steps[..2], [metrics(1), metrics(2)]);
        assert_eq!(steps[2..], [StepMetrics { loss: 0.5, validation_loss: Some(0.75), ..metrics(3) }]);
        file.append(&metrics(9)).unwrap();
        let error = StepMetrics::of_run(folder.path()).unwrap_err().to_string();
        assert!(error.contains("metrics.jsonl, line 6") && error.contains("take the line out"), "{error}");
        std::fs::write(folder.path().join("metrics.jsonl"), vec![b'x'; 1 << 20]).unwrap();
        assert!(matches!(StepMetrics::of_run(folder.path()), Err(TrainError::Metrics { line: 1, .. })));
    }

    /// What a line that could not be written is cut back to.
    #[test]
    fn the_length_of_whole_lines_is_known() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let mut file = MetricsLog::open(folder.path(), 0, JSONL).unwrap();
        for step in 1..=3 {
            file.append(&metrics(step)).unwrap();
            assert_eq!(file.lines.length(), std::fs::metadata(&path).unwrap().len(), "{step}");
        }
        assert_eq!(MetricsLog::open(folder.path(), 3, JSONL).unwrap().lines.length(), file.lines.length());
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
}
