//! `report.json`: what was planned against what was measured.

use std::path::Path;

use plimsoll_disk::IoStatistics;
use plimsoll_plan::{Timeline, TimelineFormat};
use serde::{Deserialize, Serialize};

use crate::TrainError;

/// The report in the folder of a run.
pub const REPORT_FILE: &str = "report.json";

/// What the plan said.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Planned {
    /// High-water mark of the device arena.
    pub device_peak_bytes: u64,
    /// Everything outside the arena.
    pub overhead_bytes: u64,
    /// The host tier with the data pipeline.
    pub host_peak_bytes: u64,
    /// The data pipeline's part of it.
    #[serde(default)]
    pub pipeline_bytes: u64,
    /// Bytes on disk.
    pub disk_bytes: u64,
    /// Arena, overhead and host tier together: what the process should take.
    pub process_bytes: u64,
    /// Time of an optimizer step.
    pub step_seconds: f64,
    /// Tokens of a step over that time.
    pub tokens_per_second: f64,
}

impl Planned {
    /// With another plan that a part of the run went by: the larger of what each takes, and the first one's time.
    pub(crate) fn and(self, other: Planned) -> Planned {
        Planned {
            device_peak_bytes: self.device_peak_bytes.max(other.device_peak_bytes),
            overhead_bytes: self.overhead_bytes.max(other.overhead_bytes),
            host_peak_bytes: self.host_peak_bytes.max(other.host_peak_bytes),
            pipeline_bytes: self.pipeline_bytes.max(other.pipeline_bytes),
            disk_bytes: self.disk_bytes.max(other.disk_bytes),
            process_bytes: self.process_bytes.max(other.process_bytes),
            ..self
        }
    }
}

/// What came out.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// High-water mark of the device arena.
    pub device_peak_bytes: u64,
    /// High-water mark of the host tier, and the data pipeline.
    pub host_peak_bytes: u64,
    /// The data pipeline's part of it, as it has counted itself.
    #[serde(default)]
    pub pipeline_bytes: u64,
    /// High-water mark of the disk tier.
    pub disk_bytes: u64,
    /// Highest resident set of the process, as the kernel saw it.
    pub process_peak_rss_bytes: u64,
    /// Median time of an optimizer step.
    pub step_seconds_median: f64,
}

/// What went between the device and the tiers below it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Io {
    /// Bytes read.
    pub bytes_read: u64,
    /// Bytes written.
    pub bytes_written: u64,
    /// Seconds in which any request was under way.
    pub io_seconds: f64,
    /// Seconds for which the step waited for one.
    pub waited_seconds: f64,
    /// The share of the I/O's time in which nobody waited for it.
    pub hidden_share: Option<f64>,
}

impl Io {
    pub(crate) fn of(totals: IoStatistics) -> Io {
        let IoStatistics { bytes_read, bytes_written, io_seconds, waited_seconds } = totals;
        Io { bytes_read, bytes_written, io_seconds, waited_seconds, hidden_share: totals.hidden_share() }
    }

    /// With what an earlier part of the run moved.
    pub(crate) fn and(self, earlier: Option<Io>) -> Io {
        let Some(earlier) = earlier else { return self };
        Io::of(IoStatistics {
            bytes_read: self.bytes_read + earlier.bytes_read,
            bytes_written: self.bytes_written + earlier.bytes_written,
            io_seconds: self.io_seconds + earlier.io_seconds,
            waited_seconds: self.waited_seconds + earlier.waited_seconds,
        })
    }
}

/// The report of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// What the plan said.
    pub planned: Planned,
    /// What came out.
    pub measured: Measured,
    /// Median over the steps of this part of the run.
    pub tokens_per_second_median: f64,
    /// What went to and from host and disk in this part of the run; `None` where everything stayed on the device.
    pub io: Option<Io>,
    /// How often this part of the run went on with another plan because of memory.
    pub rung_changes: u64,
    /// Optimizer steps of the whole run so far.
    pub steps: u64,
    /// Tokens of the whole run so far.
    pub tokens: u64,
    /// Loss of the first and the last step of this part of the run.
    pub first_loss: Option<f64>,
    /// See `first_loss`.
    pub last_loss: Option<f64>,
    /// Last validation loss.
    pub validation_loss: Option<f64>,
    /// Whether the run came to its end or was stopped before.
    pub finished: bool,
    /// Seconds of training in this part of the run.
    pub seconds: f64,
    /// Each of several ranks.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ranks: Vec<RankReport>,
}

/// What one of several ranks was planned to take and took.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RankReport {
    /// Which.
    pub rank: u32,
    /// The name of its machine, where the system shows it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// What its plan said.
    pub planned: RankBytes,
    /// What came out.
    pub measured: RankBytes,
}

/// Bytes of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct RankBytes {
    /// High-water mark of the device arena.
    pub device_peak_bytes: u64,
    /// The host tier with the data pipeline.
    pub host_peak_bytes: u64,
    /// Bytes on disk.
    pub disk_bytes: u64,
    /// The whole process: planned, and the highest resident set.
    pub process_bytes: u64,
}

impl RankReport {
    /// Of what each rank tells: eight numbers, those planned first, and the names of their machines, as far as they are known.
    pub(crate) fn of_all(told: &[Vec<f64>], hosts: &[Vec<u8>]) -> Vec<RankReport> {
        let bytes = |numbers: &[f64]| {
            let number = |at: usize| numbers.get(at).map_or(0, |number| *number as u64);
            RankBytes {
                device_peak_bytes: number(0),
                host_peak_bytes: number(1),
                disk_bytes: number(2),
                process_bytes: number(3),
            }
        };
        let report = |(rank, numbers): (u32, &Vec<f64>)| {
            let (planned, measured) = numbers.split_at(numbers.len().min(4));
            let host = hosts.get(rank as usize).filter(|host| !host.is_empty());
            let host = host.map(|host| String::from_utf8_lossy(host).into_owned());
            RankReport { rank, host, planned: bytes(planned), measured: bytes(measured) }
        };
        (0..).zip(told).map(report).collect()
    }
}

impl Report {
    /// Whether its ranks were on several machines.
    pub fn has_several_hosts(&self) -> bool {
        let mut hosts = self.ranks.iter().map(|rank| &rank.host);
        hosts.next().is_some_and(|first| hosts.any(|host| host != first))
    }

    /// Whether a folder has the report of a run that came to its end.
    pub(crate) fn has_finished(run: &Path) -> bool {
        let report = std::fs::read(run.join(REPORT_FILE)).ok();
        let report = report.and_then(|bytes| serde_json::from_slice::<serde_json::Value>(&bytes).ok());
        report.is_some_and(|report| report.get("finished") == Some(&serde_json::Value::Bool(true)))
    }

    /// The report in a run's folder; `None` where the run has not come to an end yet.
    ///
    /// # Errors
    /// [`TrainError::Report`] where the file is no report; [`TrainError::Io`] where it cannot be read.
    pub fn of_run(run: &Path) -> Result<Option<Report>, TrainError> {
        let path = run.join(REPORT_FILE);
        let bytes = match std::fs::read(&path) {
            Ok(bytes) => bytes,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(TrainError::io("read", &path, e)),
        };
        serde_json::from_slice(&bytes).map(Some).map_err(|reason| TrainError::Report { path, reason })
    }

    /// Writes `report.json` into the run's folder.
    pub fn write(&self, run: &Path) -> Result<(), TrainError> {
        let path = run.join(REPORT_FILE);
        let json = serde_json::to_vec_pretty(self)
            .map_err(|e| TrainError::io("write", &path, std::io::Error::other(e)))?;
        crate::write_whole(&path, &json)
    }
}

/// Writes `memory_timeline.json` and `memory_timeline.svg`: every allocation of the planned step.
pub(crate) fn write_timeline(run: &Path, timeline: &Timeline) -> Result<(), TrainError> {
    for (name, format) in
        [("memory_timeline.json", TimelineFormat::Json), ("memory_timeline.svg", TimelineFormat::Svg)]
    {
        let path = run.join(name);
        let bytes = timeline.to_bytes(format);
        let bytes = bytes.map_err(|e| TrainError::io("write", &path, std::io::Error::other(e)))?;
        crate::write_whole(&path, &bytes)?;
    }
    Ok(())
}

/// The middle value; the mean of the two middle ones for an even number; 0 for none.
pub(crate) fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => 0.0,
        n if n % 2 == 1 => sorted[n / 2],
        n => 0.5 * (sorted[n / 2 - 1] + sorted[n / 2]),
    }
}

#[cfg(test)]
mod tests {
    use super::{Io, RankReport, median};

    #[test]
    fn ranks_have_the_names_of_their_machines() {
        let told = [vec![1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0], vec![9.0; 8], vec![0.0; 8]];
        let ranks = RankReport::of_all(&told, &[b"first".to_vec(), b"second".to_vec(), Vec::new()]);
        let json = serde_json::to_value(&ranks).unwrap();
        assert_eq!((json[0]["rank"].as_u64(), json[0]["host"].as_str()), (Some(0), Some("first")));
        assert_eq!((json[1]["host"].as_str(), &json[2]["host"]), (Some("second"), &serde_json::Value::Null));
        assert_eq!(json[0]["planned"]["process_bytes"], 4);
        assert_eq!(json[0]["measured"]["device_peak_bytes"], 5);
        // Reports that were written before name none.
        let mut old = json;
        old[0].as_object_mut().unwrap().remove("host");
        assert_eq!(serde_json::from_value::<Vec<RankReport>>(old).unwrap()[0].host, None);
    }

    #[test]
    fn what_was_moved_before_is_added() {
        let io = |bytes_read, bytes_written, io_seconds, waited_seconds| Io {
            bytes_read,
            bytes_written,
            io_seconds,
            waited_seconds,
            hidden_share: None,
        };
        let all = io(5, 7, 4.0, 0.5).and(Some(io(3, 2, 6.0, 2.0)));
        let Io { bytes_read, bytes_written, io_seconds, waited_seconds, hidden_share } = all;
        assert_eq!((bytes_read, bytes_written, io_seconds, waited_seconds), (8, 9, 10.0, 2.5));
        assert_eq!(hidden_share, Some(0.75));
        assert_eq!(io(5, 7, 4.0, 0.5).and(None).bytes_read, 5);
    }

    #[test]
    fn medians() {
        assert_eq!(
            [median(&[]), median(&[3.0]), median(&[4.0, 1.0]), median(&[9.0, 1.0, 2.0])],
            [0.0, 3.0, 2.5, 2.0]
        );
    }
}
