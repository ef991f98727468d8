//! `metrics.csv`: the numbers of `metrics.jsonl` as a table, for spreadsheets and data frames. A cell without a number is empty.

use std::io::ErrorKind;
use std::path::Path;

use super::appended::Appended;
use super::{MemoryMetrics, StepMetrics};
use crate::TrainError;

const FILE: &str = "metrics.csv";

/// The columns; `step` is the first.
const COLUMNS: [&str; 16] = [
    "step",
    "loss",
    "validation_loss",
    "grad_norm",
    "lr",
    "tokens",
    "tokens_per_second",
    "batch_size",
    "skipped",
    "loss_scale",
    "device_peak_bytes",
    "host_peak_bytes",
    "disk_bytes",
    "process_rss_bytes",
    "utilization",
    "rung",
];

/// The table, open for appending.
#[derive(Debug)]
pub(super) struct Csv(Appended);

impl Csv {
    /// A new table, or that of a run that is continued behind so many steps.
    pub fn open(folder: &Path, steps_done: u64) -> Result<Csv, TrainError> {
        let path = folder.join(FILE);
        let mut text = COLUMNS.join(",") + "\n";
        if steps_done > 0 {
            let old = match std::fs::read_to_string(&path) {
                Err(error) if error.kind() == ErrorKind::NotFound => String::new(),
                read => read.map_err(|error| TrainError::io("read", &path, error))?,
            };
            // A line without an end was left by a run that was killed.
            let whole = old.split_inclusive('\n').filter(|line| line.ends_with('\n'));
            let step = |line: &&str| line.split(',').next().and_then(|step| step.parse::<u64>().ok());
            text.extend(whole.filter(|line| step(line).is_some_and(|step| step <= steps_done)));
        }
        Ok(Csv(Appended::after(path, text.as_bytes())?))
    }

    pub fn append(&mut self, metrics: &StepMetrics) -> Result<(), TrainError> {
        self.0.append(metrics.step, row(metrics).as_bytes())
    }

    pub fn sync(&self) -> Result<(), TrainError> {
        self.0.sync()
    }
}

fn row(metrics: &StepMetrics) -> String {
    let StepMetrics { step, tokens, batch_size, skipped, rung, lr, tokens_per_second, .. } = metrics;
    let MemoryMetrics { device_peak_bytes, host_peak_bytes, disk_bytes, process_rss_bytes, health } =
        metrics.memory;
    let utilization = health.utilization;
    let number = |number: Option<f64>| {
        number.filter(|number| number.is_finite()).map_or(String::new(), |number| number.to_string())
    };
    let (loss, norm) = (number(Some(metrics.loss)), number(Some(metrics.grad_norm)));
    let (validation, scale) = (number(metrics.validation_loss), number(metrics.loss_scale));
    let skipped = u8::from(*skipped);
    format!(
        "{step},{loss},{validation},{norm},{lr},{tokens},{tokens_per_second},{batch_size},{skipped},{scale},\
         {device_peak_bytes},{host_peak_bytes},{disk_bytes},{process_rss_bytes},{utilization},{rung}\n"
    )
}

#[cfg(test)]
mod tests {
    use super::super::tests::metrics;
    use super::*;

    #[test]
    fn a_row_has_a_cell_for_each_column() {
        let row = row(&StepMetrics { loss: f64::NAN, validation_loss: Some(2.5), ..metrics(3) });
        let cells: Vec<&str> = row.trim_end().split(',').collect();
        assert_eq!(cells.len(), COLUMNS.len());
        assert_eq!(cells[..6], ["3", "", "2.5", "2", "0.001", "192"]);
        assert_eq!(cells[10..], ["1", "2", "0", "3", "0.75", "0"]);
    }

    #[test]
    fn a_table_is_cut_back_to_where_a_run_continues() {
        let folder = tempfile::tempdir().unwrap();
        let mut csv = Csv::open(folder.path(), 0).unwrap();
        (1..=5).for_each(|step| csv.append(&metrics(step)).unwrap());
        let path = folder.path().join(FILE);
        // The run was killed while it wrote.
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, format!("{text}6,1.5,")).unwrap();
        let mut csv = Csv::open(folder.path(), 3).unwrap();
        csv.append(&metrics(4)).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        let steps: Vec<&str> = text.lines().map(|line| line.split(',').next().unwrap()).collect();
        assert_eq!(steps, ["step", "1", "2", "3", "4"]);
    }
}
