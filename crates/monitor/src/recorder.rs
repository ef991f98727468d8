//! The flight recorder: the last minutes of memory in a small file that outlives the process.
//!
//! A header, then slots of one size, written in turns. A slot has a number, a checksum and a record as JSON; one that was being
//! written when everything ended is told by its checksum and passed over. The file is written with plain writes into the page cache,
//! which survive SIGKILL as a mapped file does; but a full disk or a file that was cut is an error here, and a signal there. All of
//! it is taken when the file is made. When a machine loses its power, what the kernel has not written back yet is lost, half a minute
//! by its defaults.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::health::Status;

const MAGIC: &[u8; 8] = b"PLIMFLT1";
const HEADER_BYTES: usize = 4096;
const SLOT_BYTES: usize = 1024;
/// Number, length and checksum before the record.
const SLOT_HEAD: usize = 8 + 4 + 8;
/// Records of a file: five minutes at four a second.
const SLOTS: usize = 1200;
/// The name of the file in a run's folder.
pub const FLIGHT_RECORDER: &str = "flight-recorder.bin";

/// Bytes that belong to somebody.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Owner {
    /// Who.
    pub name: String,
    /// Bytes.
    pub bytes: u64,
}

/// Memory at a moment. Sizes are in bytes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// Seconds since 1970.
    pub time: f64,
    /// The step that was done last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step: Option<u64>,
    /// How near the limit was.
    pub status: Status,
    /// The resident set.
    pub rss: u64,
    /// The tightest limit of the container, and what was used of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub container: Option<[u64; 2]>,
    /// The machine's memory, and what it could still give.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machine: Option<[u64; 2]>,
    /// Who has what.
    pub owners: Vec<Owner>,
}

/// What a recording is of.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct About {
    /// The process.
    pub pid: u32,
    /// What runs, in words.
    pub what: String,
    /// The machine's name.
    pub host: String,
    /// What the machine calls the time since it was started.
    pub boot: String,
    /// The folder of the control group.
    pub group: Option<PathBuf>,
    /// Processes that the kernel had ended for memory before: in the group, and on the machine.
    pub oom_kills: [u64; 2],
    /// When it began, in seconds since 1970.
    pub began: f64,
    /// Bytes that the process was planned to take, where somebody has planned it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub planned_bytes: Option<u64>,
    /// How it ended; `None` while it goes on, or when nobody could say.
    pub ended: Option<String>,
}

/// Why a recording cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum RecorderError {
    /// The system's answer.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The answer.
        source: io::Error,
    },
    /// It is something else.
    #[error("{} is no flight recording: {reason}; give the folder of a run, or a file that `plimsoll monitor --record` wrote", path.display())]
    NotARecording {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: &'static str,
    },
}

/// Writes a recording.
#[derive(Debug)]
pub struct Recorder {
    file: File,
    about: About,
    /// The number of the next record; it begins at 1.
    next: u64,
}

/// A recording that was read.
#[derive(Clone, Debug, PartialEq)]
pub struct Recording {
    /// What it is of.
    pub about: About,
    /// The records since it began, in order.
    pub records: Vec<Record>,
    /// Slots that hold no whole record.
    pub torn: usize,
}

impl Recorder {
    /// Begins a recording; one that the file holds already is followed by this one.
    ///
    /// # Errors
    /// The system's, where the file cannot be made or has no room.
    pub fn begin(path: &Path, about: About) -> io::Result<Recorder> {
        let before = Recording::slots(path).ok().map(|(_, slots, _)| slots);
        let last = before.as_ref().and_then(|slots| slots.last()).map_or(0, |(number, _)| *number);
        if before.is_none() {
            let mut file = OpenOptions::new().write(true).create(true).truncate(true).open(path)?;
            file.write_all(&vec![0; Recording::FILE_BYTES])?;
        }
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        let mut recorder = Recorder { file, about, next: last.saturating_add(1) };
        recorder.write_header()?;
        Ok(recorder)
    }

    fn write_header(&mut self) -> io::Result<()> {
        let mut payload = serde_json::to_vec(&self.about)?;
        if payload.len() > HEADER_BYTES - SLOT_HEAD - MAGIC.len() {
            // A command line of many kilobytes.
            let about = About { what: self.about.what.chars().take(256).collect(), ..self.about.clone() };
            payload = serde_json::to_vec(&about)?;
        }
        let mut header = MAGIC.to_vec();
        header.extend(slot(self.next, &payload));
        if header.len() > HEADER_BYTES {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "what is recorded has too long a name"));
        }
        self.file.seek(SeekFrom::Start(0))?;
        self.file.write_all(&header)
    }

    /// Writes a record. Owners beyond what a slot has room for become one, the smallest first.
    ///
    /// # Errors
    /// The system's.
    pub fn record(&mut self, record: &Record) -> io::Result<()> {
        let mut payload = serde_json::to_vec(record)?;
        if payload.len() > SLOT_BYTES - SLOT_HEAD {
            let mut shorter = record.clone();
            shorter.owners.sort_by_key(|owner| std::cmp::Reverse(owner.bytes));
            let mut rest = 0;
            while payload.len() > SLOT_BYTES - SLOT_HEAD {
                let Some(owner) = shorter.owners.pop() else {
                    return Err(io::Error::new(io::ErrorKind::InvalidInput, "a record is too long"));
                };
                rest += owner.bytes;
                let mut written = shorter.clone();
                written.owners.push(Owner { name: "the rest".to_owned(), bytes: rest });
                payload = serde_json::to_vec(&written)?;
            }
        }
        let place = (self.next % SLOTS as u64) * SLOT_BYTES as u64;
        self.file.seek(SeekFrom::Start(HEADER_BYTES as u64 + place))?;
        self.file.write_all(&slot(self.next, &payload))?;
        self.next = self.next.saturating_add(1);
        Ok(())
    }

    /// Says how it ended.
    ///
    /// # Errors
    /// The system's.
    pub fn end(mut self, how: &str) -> io::Result<()> {
        self.about.ended = Some(how.chars().take(1000).collect());
        // Records of this recording begin after the header's number.
        let next = std::mem::replace(&mut self.next, 0);
        self.next = self.first_number().unwrap_or(next);
        self.write_header()
    }

    /// The number in the header.
    fn first_number(&mut self) -> io::Result<u64> {
        let mut number = [0; 8];
        self.file.seek(SeekFrom::Start(MAGIC.len() as u64))?;
        self.file.read_exact(&mut number)?;
        Ok(u64::from_le_bytes(number))
    }
}

/// A slot's bytes.
fn slot(number: u64, payload: &[u8]) -> Vec<u8> {
    let mut bytes = number.to_le_bytes().to_vec();
    bytes.extend((payload.len() as u32).to_le_bytes());
    bytes.extend(checksum(number, payload).to_le_bytes());
    bytes.extend(payload);
    bytes
}

/// FNV-1a of the number and the bytes.
fn checksum(number: u64, payload: &[u8]) -> u64 {
    let bytes = number.to_le_bytes().into_iter().chain(payload.iter().copied());
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

/// The number and the contents of a slot; `None` for one that is empty or torn.
fn read_slot(bytes: &[u8]) -> Option<(u64, &[u8])> {
    let number = u64::from_le_bytes(*bytes.first_chunk()?);
    let length = u32::from_le_bytes(*bytes.get(8..)?.first_chunk()?) as usize;
    let sum = u64::from_le_bytes(*bytes.get(12..)?.first_chunk()?);
    let payload = bytes.get(SLOT_HEAD..SLOT_HEAD.checked_add(length)?)?;
    (number > 0 && checksum(number, payload) == sum).then_some((number, payload))
}

/// Reads a recording while it is being written: what is new, slot by slot.
#[derive(Clone, Debug)]
pub struct Follower {
    path: PathBuf,
    /// The number of the first record of the recording that was read last.
    first: u64,
    /// The number of the record that comes next.
    next: u64,
}

/// What has come to a recording since it was looked at last.
#[derive(Clone, Debug, PartialEq)]
pub struct News {
    /// What it is of.
    pub about: About,
    /// Whether it is another recording than the one before: records of that one are no part of it.
    pub begins_anew: bool,
    /// The records, in order.
    pub records: Vec<Record>,
}

impl Follower {
    /// Follows a file that need not be there yet.
    pub fn of(path: PathBuf) -> Follower {
        Follower { path, first: 0, next: 0 }
    }

    /// What is new. A record that is being written is read the next time.
    ///
    /// # Errors
    /// [`RecorderError`] with the file and what is wrong with it.
    pub fn news(&mut self) -> Result<News, RecorderError> {
        let io = |source| RecorderError::Io { path: self.path.clone(), source };
        if !std::fs::metadata(&self.path).map_err(io)?.is_file() {
            return Err(io(io::Error::new(io::ErrorKind::InvalidInput, "is not a regular file")));
        }
        let mut file = File::open(&self.path).map_err(io)?;
        let mut header = vec![0; HEADER_BYTES];
        file.read_exact(&mut header).map_err(io)?;
        let (first, about) = Recording::header(&header)
            .map_err(|reason| RecorderError::NotARecording { path: self.path.clone(), reason })?;
        let begins_anew = first != self.first;
        let mut records = Vec::new();
        if begins_anew || !self.is_there(&mut file) {
            // All that the file has: what was followed was overwritten meanwhile.
            let ((_, _), slots, _) = Recording::slots(&self.path)?;
            let since = if begins_anew { first } else { self.next };
            let own = slots.into_iter().filter(|(number, _)| *number >= since);
            let mut last = since.saturating_sub(1);
            records.extend(own.map(|(number, record)| {
                last = number;
                record
            }));
            (self.first, self.next) = (first, last.saturating_add(1));
        } else {
            while let Some(record) = slot_at(&mut file, self.next) {
                records.push(record);
                self.next = self.next.saturating_add(1);
            }
        }
        Ok(News { about, begins_anew, records })
    }

    /// Whether the record before the next one is still in its place.
    fn is_there(&self, file: &mut File) -> bool {
        self.next == self.first || slot_at(file, self.next.saturating_sub(1)).is_some()
    }
}

/// The record of a number, where its slot has it.
fn slot_at(file: &mut File, number: u64) -> Option<Record> {
    let place = (number % SLOTS as u64) * SLOT_BYTES as u64;
    let mut bytes = [0; SLOT_BYTES];
    file.seek(SeekFrom::Start(HEADER_BYTES as u64 + place)).ok()?;
    file.read_exact(&mut bytes).ok()?;
    let (found, payload) = read_slot(&bytes)?;
    if found == number { serde_json::from_slice(payload).ok() } else { None }
}

/// The header with the number of its first record, the slots in order of their numbers, and how many are torn.
pub type Slots = ((u64, About), Vec<(u64, Record)>, usize);

impl Recording {
    /// The size of every recording's file.
    pub const FILE_BYTES: usize = HEADER_BYTES + SLOTS * SLOT_BYTES;

    /// Reads a recording.
    ///
    /// # Errors
    /// [`RecorderError`] with the file and what is wrong with it.
    pub fn read(path: &Path) -> Result<Recording, RecorderError> {
        let ((first, about), slots, torn) = Recording::slots(path)?;
        let own = slots.into_iter().filter(|(number, _)| *number >= first);
        Ok(Recording { about, records: own.map(|(_, record)| record).collect(), torn })
    }

    fn slots(path: &Path) -> Result<Slots, RecorderError> {
        let bytes = read_file(path).map_err(|source| RecorderError::Io { path: path.to_owned(), source })?;
        Recording::parse(&bytes)
            .map_err(|reason| RecorderError::NotARecording { path: path.to_owned(), reason })
    }

    /// The number of the first record, and what the recording is of.
    fn header(bytes: &[u8]) -> Result<(u64, About), &'static str> {
        let header = bytes.get(..HEADER_BYTES).ok_or("it is too short")?;
        let header = header.strip_prefix(MAGIC).ok_or("it does not begin as one")?;
        let (first, about) = read_slot(header).ok_or("its header is damaged")?;
        Ok((first, serde_json::from_slice(about).map_err(|_| "its header is damaged")?))
    }

    /// Reads a recording's bytes.
    ///
    /// # Errors
    /// What is wrong with them.
    pub fn parse(bytes: &[u8]) -> Result<Slots, &'static str> {
        let (first, about) = Recording::header(bytes)?;
        let slots = bytes.get(HEADER_BYTES..).unwrap_or_default();
        if slots.len() != SLOTS * SLOT_BYTES {
            return Err("it was cut");
        }
        let mut records = Vec::new();
        let mut torn = 0;
        for (place, bytes) in (0..).zip(slots.chunks_exact(SLOT_BYTES)) {
            let found = read_slot(bytes).filter(|(number, _)| number % SLOTS as u64 == place);
            match found.and_then(|(number, payload)| Some((number, serde_json::from_slice(payload).ok()?))) {
                Some(record) => records.push(record),
                None => torn += usize::from(bytes.iter().any(|byte| *byte != 0)),
            }
        }
        records.sort_by_key(|(number, _): &(u64, Record)| *number);
        Ok(((first, about), records, torn))
    }
}

/// A file of the size that recordings have, and a byte more where it is longer.
fn read_file(path: &Path) -> io::Result<Vec<u8>> {
    if !std::fs::metadata(path)?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "is not a regular file"));
    }
    let mut bytes = Vec::new();
    File::open(path)?.take((Recording::FILE_BYTES + 1) as u64).read_to_end(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn record(step: u64) -> Record {
        let owners =
            vec![Owner { name: "weights".into(), bytes: 5 }, Owner { name: "heap".into(), bytes: step }];
        Record {
            time: step as f64,
            step: Some(step),
            rss: 7,
            container: Some([9, 8]),
            owners,
            ..Record::default()
        }
    }

    fn about(what: &str) -> About {
        About { pid: 1, what: what.into(), ..About::default() }
    }

    fn recorded(steps: impl Iterator<Item = u64>) -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(FLIGHT_RECORDER);
        let mut recorder = Recorder::begin(&path, about("train")).unwrap();
        steps.for_each(|step| recorder.record(&record(step)).unwrap());
        (folder, path)
    }

    #[test]
    fn the_last_records_are_read_in_order() {
        let (_folder, path) = recorded(1..=3000);
        let recording = Recording::read(&path).unwrap();
        let steps: Vec<u64> = recording.records.iter().filter_map(|record| record.step).collect();
        assert_eq!(steps, (1801..=3000).collect::<Vec<_>>());
        assert_eq!((recording.records[0].clone(), recording.torn), (record(1801), 0));
        assert_eq!(recording.about, about("train"));
        assert_eq!(std::fs::metadata(&path).unwrap().len(), Recording::FILE_BYTES as u64);
    }

    #[test]
    fn a_recording_that_follows_another_is_read_alone() {
        let (_folder, path) = recorded(1..=50);
        let mut recorder = Recorder::begin(&path, about("again")).unwrap();
        (60..=70).for_each(|step| recorder.record(&record(step)).unwrap());
        recorder.end("it was stopped").unwrap();
        let recording = Recording::read(&path).unwrap();
        assert_eq!(recording.records.len(), 11);
        assert_eq!(recording.about, About { ended: Some("it was stopped".into()), ..about("again") });
    }

    #[test]
    fn a_recording_is_followed_while_it_is_written() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(FLIGHT_RECORDER);
        let mut follower = Follower::of(path.clone());
        assert!(matches!(follower.news(), Err(RecorderError::Io { .. })));
        let mut recorder = Recorder::begin(&path, about("train")).unwrap();
        let write = |recorder: &mut Recorder, steps: std::ops::RangeInclusive<u64>| {
            steps.for_each(|step| recorder.record(&record(step)).unwrap());
        };
        let steps = |news: &News| news.records.iter().filter_map(|own| own.step).collect::<Vec<_>>();
        let empty = follower.news().unwrap();
        assert_eq!((empty.begins_anew, steps(&empty)), (true, vec![]));
        write(&mut recorder, 1..=3);
        assert_eq!(steps(&follower.news().unwrap()), [1, 2, 3]);
        assert_eq!(steps(&follower.news().unwrap()), [0; 0]);
        // Around the end of the file, and farther than the file is long.
        write(&mut recorder, 4..=1300);
        let news = follower.news().unwrap();
        assert_eq!((news.begins_anew, steps(&news)), (false, (101..=1300).collect()));
        write(&mut recorder, 1301..=1302);
        assert_eq!(steps(&follower.news().unwrap()), [1301, 1302]);
        recorder.end("done").unwrap();
        assert_eq!(follower.news().unwrap().about.ended.as_deref(), Some("done"));
        let mut recorder = Recorder::begin(&path, about("again")).unwrap();
        write(&mut recorder, 7..=8);
        let news = follower.news().unwrap();
        assert_eq!((news.begins_anew, steps(&news), news.about), (true, vec![7, 8], about("again")));
        std::fs::write(&path, vec![b'x'; Recording::FILE_BYTES]).unwrap();
        assert!(matches!(follower.news(), Err(RecorderError::NotARecording { .. })));
    }

    #[test]
    fn a_torn_record_is_passed_over() {
        let (_folder, path) = recorded(1..=20);
        let mut bytes = std::fs::read(&path).unwrap();
        bytes[HEADER_BYTES + 20 * SLOT_BYTES + 40] ^= 1;
        std::fs::write(&path, &bytes).unwrap();
        let recording = Recording::read(&path).unwrap();
        assert_eq!((recording.records.len(), recording.torn), (19, 1));
    }

    #[test]
    fn too_many_owners_become_one() {
        let (_folder, path) = recorded(std::iter::empty());
        let mut recorder = Recorder::begin(&path, about("many")).unwrap();
        let owners = (0..200).map(|n| Owner { name: format!("owner number {n}"), bytes: n }).collect();
        recorder.record(&Record { owners, ..Record::default() }).unwrap();
        let recording = Recording::read(&path).unwrap();
        let owners = &recording.records[0].owners;
        assert_eq!(owners.iter().map(|owner| owner.bytes).sum::<u64>(), 199 * 200 / 2);
        assert_eq!((owners[0].bytes, owners.last().unwrap().name.as_str()), (199, "the rest"));
    }

    #[test]
    fn other_files_are_refused_and_replaced() {
        let (folder, path) = recorded(1..=20);
        let good = std::fs::read(&path).unwrap();
        let refused = |bytes: &[u8]| {
            std::fs::write(&path, bytes).unwrap();
            Recording::read(&path).unwrap_err().to_string()
        };
        assert!(refused(b"short").contains("too short"));
        assert!(refused(&[b'x'; 5000]).contains("does not begin as one"));
        assert!(refused(&good[..good.len() - 1]).contains("was cut"));
        let mut damaged = good.clone();
        damaged[30] ^= 1;
        assert!(refused(&damaged).contains("header is damaged"));
        let error = Recording::read(folder.path()).unwrap_err().to_string();
        assert!(error.contains("not a regular file"), "{error}");
        Recorder::begin(&path, about("new")).unwrap().record(&record(1)).unwrap();
        assert_eq!(Recording::read(&path).unwrap().records, [record(1)]);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn any_bytes_are_read_or_refused(changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..40)) {
            let (_folder, path) = recorded(1..=5);
            let mut bytes = std::fs::read(&path).unwrap();
            for (place, byte) in changes {
                // The beginning is where a reader looks.
                let place = place.index(HEADER_BYTES + 6 * SLOT_BYTES);
                bytes[place] = byte;
            }
            if let Ok((_, records, _)) = Recording::parse(&bytes) {
                prop_assert!(records.len() <= SLOTS);
            }
        }
    }
}
