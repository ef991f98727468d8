//! `metrics.jsonl` while it grows: whole lines only, from where the last look ended. A file that was cut or replaced, by a run that
//! resumes or begins anew, is read from its beginning.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::PathBuf;

use plimsoll_train::StepMetrics;

/// Bytes of a line at most; a step takes a few hundred.
const LONGEST_LINE: usize = 1 << 16;
/// Bytes that are read at a look at most, so that nobody waits for a long file.
const AT_ONCE: u64 = 4 << 20;

/// What is found in the file.
#[derive(Debug)]
pub enum Found {
    /// The file is another one, or shorter than it was: what follows is all of it.
    Anew,
    /// A step.
    Step(Box<StepMetrics>),
    /// A line that says no step, by its number.
    NoStep(u64),
}

/// Where the last look ended.
#[derive(Debug)]
pub struct Tail {
    path: PathBuf,
    /// Which file it was: device and inode.
    identity: Option<(u64, u64)>,
    offset: u64,
    /// The beginning of a line whose end is not there yet.
    partial: Vec<u8>,
    /// Whether that line is too long to be one of ours.
    overlong: bool,
    lines: u64,
}

impl Tail {
    /// Of a file that need not be there yet.
    pub fn of(path: PathBuf) -> Tail {
        Tail { path, identity: None, offset: 0, partial: Vec::new(), overlong: false, lines: 0 }
    }

    /// Takes what is new; whether there is more.
    pub fn look(&mut self, mut take: impl FnMut(Found)) -> io::Result<bool> {
        let metadata = std::fs::metadata(&self.path)?;
        if !metadata.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "is not a regular file"));
        }
        let mut file = File::open(&self.path)?;
        let metadata = file.metadata()?;
        let identity = identity_of(&metadata);
        if self.identity != Some(identity) || metadata.len() < self.offset {
            if self.identity.is_some() {
                take(Found::Anew);
            }
            *self = Tail { identity: Some(identity), ..Tail::of(std::mem::take(&mut self.path)) };
        }
        file.seek(SeekFrom::Start(self.offset))?;
        let mut bytes = Vec::new();
        file.take(AT_ONCE).read_to_end(&mut bytes)?;
        self.offset = self.offset.saturating_add(bytes.len() as u64);
        for piece in bytes.split_inclusive(|byte| *byte == b'\n') {
            let (is_whole, text) = match piece.split_last() {
                Some((b'\n', text)) => (true, text),
                _ => (false, piece),
            };
            self.overlong |= self.partial.len() + text.len() > LONGEST_LINE;
            if !self.overlong {
                self.partial.extend(text);
            }
            if is_whole {
                self.lines = self.lines.saturating_add(1);
                let step = serde_json::from_slice(&self.partial).ok().filter(|_| !self.overlong);
                take(step.map_or(Found::NoStep(self.lines), |step| Found::Step(Box::new(step))));
                self.partial.clear();
                self.overlong = false;
            }
        }
        Ok(self.offset < metadata.len())
    }
}

#[cfg(unix)]
fn identity_of(metadata: &std::fs::Metadata) -> (u64, u64) {
    use std::os::unix::fs::MetadataExt;
    (metadata.dev(), metadata.ino())
}

#[cfg(not(unix))]
fn identity_of(_: &std::fs::Metadata) -> (u64, u64) {
    (0, 0)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    pub fn line(step: u64) -> String {
        format!(
            r#"{{"step":{step},"loss":2.5,"grad_norm":1.0,"lr":0.001,"tokens":{},"tokens_per_second":64.0,"batch_size":2,"memory":{{"device_peak_bytes":1,"host_peak_bytes":0,"disk_bytes":0,"process_rss_bytes":3}}}}"#,
            64 * step
        ) + "\n"
    }

    fn looked(tail: &mut Tail) -> String {
        let mut said = Vec::new();
        let more = tail.look(|found| {
            said.push(match found {
                Found::Anew => "anew".to_owned(),
                Found::Step(step) => step.step.to_string(),
                Found::NoStep(line) => format!("no step in line {line}"),
            });
        });
        assert!(!more.unwrap());
        said.join(", ")
    }

    #[test]
    fn lines_are_read_when_they_are_whole() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let mut tail = Tail::of(path.clone());
        assert_eq!(tail.look(|_| ()).unwrap_err().kind(), io::ErrorKind::NotFound);
        let mut file = File::create(&path).unwrap();
        let text = line(1) + &line(2);
        let (early, late) = text.split_at(line(1).len() + 40);
        file.write_all(early.as_bytes()).unwrap();
        assert_eq!(looked(&mut tail), "1");
        assert_eq!(looked(&mut tail), "");
        file.write_all(late.as_bytes()).unwrap();
        assert_eq!(looked(&mut tail), "2");
    }

    #[test]
    fn a_file_that_was_cut_or_replaced_is_read_anew() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        std::fs::write(&path, line(1) + &line(2) + &line(3)).unwrap();
        let mut tail = Tail::of(path.clone());
        assert_eq!(looked(&mut tail), "1, 2, 3");
        std::fs::write(&path, line(1)).unwrap();
        assert_eq!(looked(&mut tail), "anew, 1");
        // As a run that resumes does: another file under the same name, which is longer.
        let aside = folder.path().join("aside");
        std::fs::write(&aside, line(1) + &line(2) + &line(3) + &line(4)).unwrap();
        std::fs::rename(&aside, &path).unwrap();
        assert_eq!(looked(&mut tail), "anew, 1, 2, 3, 4");
    }

    #[test]
    fn what_is_no_step_is_told_by_its_line() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let mut text = b"\n{\n\xff\xfe\x1b[2J\n{\"step\":-1}\n".to_vec();
        text.extend(line(7).as_bytes());
        text.extend(vec![b'x'; 3 * LONGEST_LINE]);
        text.push(b'\n');
        text.extend(line(8).as_bytes());
        std::fs::write(&path, &text).unwrap();
        let mut tail = Tail::of(path);
        assert_eq!(
            looked(&mut tail),
            "no step in line 1, no step in line 2, no step in line 3, no step in line 4, 7, no step in line 6, 8"
        );
        assert!(tail.partial.capacity() <= 2 * LONGEST_LINE);
    }

    #[test]
    fn a_long_file_is_read_in_pieces_and_what_is_no_file_not_at_all() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let steps = AT_ONCE / line(1).len() as u64 * 2;
        std::fs::write(&path, (1..=steps).map(line).collect::<String>()).unwrap();
        let mut tail = Tail::of(path);
        let (mut steps_read, mut looks) = (Vec::new(), 0);
        while tail
            .look(|found| match found {
                Found::Step(step) => steps_read.push(step.step),
                other => panic!("{other:?}"),
            })
            .unwrap()
        {
            looks += 1;
        }
        assert!(looks >= 1 && steps_read == (1..=steps).collect::<Vec<_>>());
        let mut tail = Tail::of(folder.path().to_owned());
        assert_eq!(tail.look(|_| ()).unwrap_err().kind(), io::ErrorKind::InvalidInput);
    }
}
