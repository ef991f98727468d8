//! TensorBoard's event files: records of TensorFlow's `TFRecord` format, each an `Event` of its protocol buffers with the scalars of a step
//! (tensorflow/core/util/event.proto and framework/summary.proto, lib/io/record_writer). Tags are those of transformers' `Trainer`.
//!
//! Each part of a run writes a file of its own into the folder `tensorboard`. The file begins with the mark of a new session, by which
//! TensorBoard drops what earlier files have of the same and later steps.

use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use super::StepMetrics;
use super::appended::Appended;
use crate::TrainError;

const FOLDER: &str = "tensorboard";

/// What the first record of a file says of its form.
const VERSION: &str = "brain.Event:2";

/// Field numbers of `Event`, `Summary`, `Summary.Value` and `SessionLog`.
const WALL_TIME: u32 = 1;
const STEP: u32 = 2;
const FILE_VERSION: u32 = 3;
const SUMMARY: u32 = 5;
const SESSION_LOG: u32 = 7;
const VALUE: u32 = 1;
const TAG: u32 = 1;
const SIMPLE_VALUE: u32 = 2;
const STATUS: u32 = 1;
/// `SessionLog.START`
const START: u64 = 1;

/// An event file, open for appending.
#[derive(Debug)]
pub(super) struct EventFile(Appended);

impl EventFile {
    /// A new file for a run that is continued behind so many steps.
    pub fn open(folder: &Path, steps_done: u64) -> Result<EventFile, TrainError> {
        let folder = folder.join(FOLDER);
        std::fs::create_dir_all(&folder).map_err(|error| TrainError::io("create", &folder, error))?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let (seconds, nanoseconds) = (now.as_secs(), now.subsec_nanos());
        // TensorBoard reads the files of a folder in the order of their names.
        let name =
            format!("events.out.tfevents.{seconds:010}.plimsoll.{}.{nanoseconds:09}", std::process::id());
        let mut version = Message::event(now.as_secs_f64());
        version.bytes(FILE_VERSION, VERSION.as_bytes());
        let mut session = Message::default();
        session.varint(STATUS, START);
        let mut start = Message::event(now.as_secs_f64());
        start.varint(STEP, steps_done + 1);
        start.bytes(SESSION_LOG, &session.0);
        let kept = [record(&version.0), record(&start.0)].concat();
        Ok(EventFile(Appended::after(folder.join(name), &kept)?))
    }

    pub fn append(&mut self, metrics: &StepMetrics) -> Result<(), TrainError> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        self.0.append(metrics.step, &record(&event(metrics, now.as_secs_f64()).0))
    }

    pub fn sync(&self) -> Result<(), TrainError> {
        self.0.sync()
    }
}

/// What a step says, by TensorBoard's tag.
fn scalars(metrics: &StepMetrics) -> impl Iterator<Item = (&'static str, f64)> {
    let memory = metrics.memory;
    let all = [
        ("train/loss", Some(metrics.loss)),
        ("train/grad_norm", Some(metrics.grad_norm)),
        ("train/learning_rate", Some(metrics.lr)),
        ("train/tokens_per_second", Some(metrics.tokens_per_second)),
        ("train/tokens", Some(metrics.tokens as f64)),
        ("train/loss_scale", metrics.loss_scale),
        ("eval/loss", metrics.validation_loss),
        ("memory/device_peak_bytes", Some(memory.device_peak_bytes as f64)),
        ("memory/host_peak_bytes", Some(memory.host_peak_bytes as f64)),
        ("memory/disk_bytes", Some(memory.disk_bytes as f64)),
        ("memory/process_rss_bytes", Some(memory.process_rss_bytes as f64)),
        ("memory/utilization", Some(memory.health.utilization)),
        ("memory/plan", Some(metrics.rung as f64)),
    ];
    all.into_iter().filter_map(|(tag, value)| Some((tag, value?)))
}

fn event(metrics: &StepMetrics, wall_time: f64) -> Message {
    let mut summary = Message::default();
    for (tag, number) in scalars(metrics) {
        let mut value = Message::default();
        value.bytes(TAG, tag.as_bytes());
        value.float(SIMPLE_VALUE, number as f32);
        summary.bytes(VALUE, &value.0);
    }
    let mut event = Message::event(wall_time);
    event.varint(STEP, metrics.step);
    event.bytes(SUMMARY, &summary.0);
    event
}

/// A protocol buffer's message: fields one after the other, each behind its number and kind.
#[derive(Default)]
struct Message(Vec<u8>);

impl Message {
    fn event(wall_time: f64) -> Message {
        let mut event = Message::default();
        event.key(WALL_TIME, 1);
        event.0.extend(wall_time.to_le_bytes());
        event
    }

    fn key(&mut self, field: u32, kind: u32) {
        self.number(u64::from(field << 3 | kind));
    }

    /// Seven bits a byte, the lowest first.
    fn number(&mut self, mut number: u64) {
        while number >= 0x80 {
            self.0.push(number as u8 | 0x80);
            number >>= 7;
        }
        self.0.push(number as u8);
    }

    fn varint(&mut self, field: u32, number: u64) {
        self.key(field, 0);
        self.number(number);
    }

    fn float(&mut self, field: u32, number: f32) {
        self.key(field, 5);
        self.0.extend(number.to_le_bytes());
    }

    fn bytes(&mut self, field: u32, bytes: &[u8]) {
        self.key(field, 2);
        self.number(bytes.len() as u64);
        self.0.extend(bytes);
    }
}

/// A record: its length and the data, each with a checksum behind it.
fn record(data: &[u8]) -> Vec<u8> {
    let length = (data.len() as u64).to_le_bytes();
    let parts: [&[u8]; 4] = [&length, &checksum(&length).to_le_bytes(), data, &checksum(data).to_le_bytes()];
    parts.concat()
}

/// CRC-32C, rotated and shifted as TFRecord has it, so that a checksum of data with checksums in it differs.
fn checksum(data: &[u8]) -> u32 {
    crc32c::crc32c(data).rotate_right(15).wrapping_add(0xa282_ead8)
}

#[cfg(test)]
mod tests {
    use super::super::tests::metrics;
    use super::*;

    /// The records of a file, with their checksums checked.
    fn records(mut file: &[u8]) -> Vec<Vec<u8>> {
        let mut all = Vec::new();
        while !file.is_empty() {
            let (length, rest) = file.split_at(8);
            let (sum, rest) = rest.split_at(4);
            assert_eq!(sum, checksum(length).to_le_bytes());
            let (data, rest) = rest.split_at(u64::from_le_bytes(length.try_into().unwrap()) as usize);
            let (sum, rest) = rest.split_at(4);
            assert_eq!(sum, checksum(data).to_le_bytes());
            all.push(data.to_vec());
            file = rest;
        }
        all
    }

    /// What TensorBoard's own `RecordWriter` writes.
    #[test]
    fn a_record_has_the_bytes_that_tensorboard_writes() {
        let wanted =
            [3, 0, 0, 0, 0, 0, 0, 0, 0xb0, 0x99, 0x49, 0x0e, b'a', b'b', b'c', 0x6e, 0x57, 0xf1, 0x21];
        assert_eq!(record(b"abc"), wanted);
    }

    #[test]
    fn numbers_have_seven_bits_a_byte() {
        let mut message = Message::default();
        message.varint(2, 300);
        assert_eq!(message.0, [0x10, 0xac, 0x02]);
    }

    #[test]
    fn each_part_of_a_run_has_a_file_that_begins_a_session() {
        let folder = tempfile::tempdir().unwrap();
        for steps_done in [0, 3] {
            let mut events = EventFile::open(folder.path(), steps_done).unwrap();
            (steps_done + 1..=5).for_each(|step| events.append(&metrics(step)).unwrap());
        }
        let files = std::fs::read_dir(folder.path().join(FOLDER)).unwrap();
        let mut files: Vec<_> = files.map(|entry| entry.unwrap().path()).collect();
        files.sort();
        let read = |path| records(&std::fs::read(path).unwrap());
        let [first, second] = &files[..] else { panic!("{files:?}") };
        let (first, second) = (read(first), read(second));
        assert_eq!((first.len(), second.len()), (2 + 5, 2 + 2));
        assert!(first[0].ends_with(VERSION.as_bytes()));
        // Step 4 and the start of a session.
        assert!(second[1].ends_with(&[0x10, 4, 0x3a, 2, 8, 1]), "{:?}", second[1]);
        assert!(second[2].windows(10).any(|bytes| bytes == b"train/loss"));
    }
}
