//! Runs tests of one program, under limits of time and memory.

use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::process::{Pid, Signal, kill_process_group};

use crate::state::{How, Program};

/// More than any test takes without a mutant.
const MOST_MEMORY_BYTES: u64 = 5 << 30;

/// What a run of tests has for itself; emptied after each.
pub struct Room {
    folder: PathBuf,
}

pub struct Ran {
    pub seconds: f64,
    /// Nothing where all passed.
    pub failed: Option<How>,
    pub output: String,
}

/// What the switch in the program is set to.
pub enum Switch<'a> {
    Mutant(u32),
    Trace(&'a Path),
}

impl Room {
    pub fn new(folder: PathBuf) -> Self {
        Self { folder }
    }

    /// Runs `tests` one after the other.
    pub fn run(
        &self,
        program: &Program,
        tests: &[&str],
        switch: &Switch<'_>,
        limit: Duration,
    ) -> Result<Ran> {
        let arguments = ["--exact", "--test-threads=1"].into_iter().chain(tests.iter().copied());
        self.start(program, arguments, Some(switch), limit)
    }

    /// The names of all tests that are not ignored.
    pub fn tests(&self, program: &Program) -> Result<Vec<String>> {
        let names = |arguments: &[&str]| -> Result<Vec<String>> {
            let ran = self.start(program, arguments.iter().copied(), None, Duration::from_secs(60))?;
            Ok(ran.output.lines().filter_map(|line| line.strip_suffix(": test")).map(str::to_owned).collect())
        };
        let ignored = names(&["--list", "--format", "terse", "--ignored"])?;
        let mut all = names(&["--list", "--format", "terse"])?;
        all.retain(|name| !ignored.contains(name));
        Ok(all)
    }

    fn start<'a>(
        &self,
        program: &Program,
        arguments: impl Iterator<Item = &'a str>,
        switch: Option<&Switch<'_>>,
        limit: Duration,
    ) -> Result<Ran> {
        // A test that is killed leaves its files behind.
        let _ = fs::remove_dir_all(&self.folder);
        fs::create_dir_all(&self.folder).with_context(|| self.folder.display().to_string())?;
        let path = self.folder.join("output");
        let output = File::create(&path)?;
        let mut command = Command::new(&program.executable);
        command.args(arguments).current_dir(&program.folder).process_group(0);
        command.stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output);
        command.env("TMPDIR", &self.folder).env("CARGO_MANIFEST_DIR", &program.folder);
        command.env_remove("MUTANT").env_remove("MUTANT_TRACE").env("RUST_BACKTRACE", "0");
        match switch {
            Some(Switch::Mutant(id)) => drop(command.env("MUTANT", id.to_string())),
            Some(Switch::Trace(path)) => drop(command.env("MUTANT_TRACE", path)),
            None => {}
        }
        let begun = Instant::now();
        let mut child = command.spawn().with_context(|| program.executable.display().to_string())?;
        let failed = wait(&mut child, limit)?;
        let output = String::from_utf8_lossy(&fs::read(&path).unwrap_or_default()).into_owned();
        Ok(Ran { seconds: begun.elapsed().as_secs_f64(), failed, output })
    }
}

/// Waits for a program, and ends it and all that it started where it takes too long or too much.
fn wait(child: &mut Child, limit: Duration) -> Result<Option<How>> {
    let begun = Instant::now();
    let group = Pid::from_child(child);
    let mut pause = Duration::from_millis(1);
    let mut looked = begun;
    let how = loop {
        if let Some(status) = child.try_wait()? {
            break (!status.success()).then_some(How::Failed);
        }
        if begun.elapsed() > limit {
            break Some(How::TimeLimit);
        }
        if looked.elapsed() > Duration::from_millis(300) {
            looked = Instant::now();
            if memory_of_group(group) > MOST_MEMORY_BYTES {
                break Some(How::MemoryLimit);
            }
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(20));
    };
    // What the program started outlives it where it failed; where nothing is left, there is no such group.
    if how.is_some() {
        let _ = kill_process_group(group, Signal::KILL);
        let _ = child.wait();
    }
    Ok(how)
}

/// The resident memory of all processes of a group, without what is shared.
fn memory_of_group(group: Pid) -> u64 {
    let page = rustix::param::page_size() as u64;
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let of_process = |folder: PathBuf| {
        let stat = fs::read_to_string(folder.join("stat")).ok()?;
        // pid (name) state parent group ...
        let its_group: i32 = stat.rsplit_once(')')?.1.split_whitespace().nth(2)?.parse().ok()?;
        if its_group != group.as_raw_nonzero().get() {
            return None;
        }
        let memory = fs::read_to_string(folder.join("statm")).ok()?;
        let mut pages = memory.split_whitespace().skip(1).map(|pages| pages.parse::<u64>().unwrap_or(0));
        let (resident, shared) = (pages.next()?, pages.next()?);
        Some(resident.saturating_sub(shared) * page)
    };
    entries.filter_map(|entry| of_process(entry.path())).sum()
}
