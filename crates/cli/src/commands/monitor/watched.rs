//! What the monitor watches: it is found or started, asked for samples, and waited for.

use std::fs::File;
use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus};
use std::time::{SystemTime, UNIX_EPOCH};

use plimsoll_memory::Nvml;
use plimsoll_monitor::{Sample, Sampler, Watched};
use rustix::process::{Pid, Signal, kill_process};

use crate::args::MonitorArgs;
use crate::failure::Failure;
use crate::output::{errln, outln};
use crate::signals::StopSignals;

/// Something that is watched.
pub struct Target {
    sampler: Sampler,
    watched: Watched,
    words: String,
    child: Option<Child>,
    status: Option<ExitStatus>,
    was_told_to_stop: bool,
}

impl Target {
    /// Finds what is to be watched, or starts it.
    pub fn begin(args: &MonitorArgs) -> Result<Target, Failure> {
        let gpus = gpus(args)?;
        let mut child = None;
        let (watched, words) = if let Some(pid) = args.pid {
            (Watched::Process(pid), format!("process {pid}"))
        } else if let Some(path) = &args.cgroup {
            let missing = |error: std::io::Error| {
                Failure::usage(format!(
                    "--cgroup {}: {error}; name a folder below /sys/fs/cgroup with memory.current or memory.usage_in_bytes",
                    path.display()
                ))
            };
            let folder = path.canonicalize().map_err(missing)?;
            (Watched::Group(folder), format!("group {}", path.display()))
        } else if let Some(command) = &args.command {
            let mut shell = Command::new("sh");
            shell.arg("-c").arg(command);
            if args.json {
                // Standard output is for JSON.
                shell.stdout(std::io::stderr());
            }
            let started = shell.spawn().map_err(|error| {
                Failure::other(format!("--command: the shell could not be started: {error}"))
            })?;
            let pid = started.id();
            child = Some(started);
            (Watched::Process(pid), command.clone())
        } else {
            (Watched::Gpus, "GPUs".to_owned())
        };
        let mut sampler = Sampler::new(watched.clone(), args.limit.map(|limit| limit.0));
        if let Some(nvml) = gpus {
            sampler = sampler.with_gpus(Box::new(nvml), args.gpu.clone());
        }
        let mut target = Target { sampler, watched, words, child, status: None, was_told_to_stop: false };
        if target.child.is_none() && target.sampler.sample().is_none() {
            return Err(Failure::usage(match &target.watched {
                Watched::Process(pid) => {
                    format!("--pid {pid}: there is no such process, or it may not be looked at")
                }
                _ => format!(
                    "--cgroup: {} is no memory control group; it lacks memory.current and memory.usage_in_bytes",
                    target.words
                ),
            }));
        }
        Ok(target)
    }

    /// What is watched, in words.
    pub fn words(&self) -> String {
        self.words.clone()
    }

    /// The process, where one is watched.
    pub fn pid(&self) -> Option<u32> {
        match self.watched {
            Watched::Process(pid) => Some(pid),
            _ => None,
        }
    }

    /// Seconds since 1970.
    pub fn sampler_time(&self) -> f64 {
        SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64())
    }

    /// What is there now; `None` when it has ended.
    pub fn sample(&mut self) -> Option<Sample> {
        if self.has_ended() { None } else { self.sampler.sample() }
    }

    /// Whether a command that was started has ended.
    pub fn has_ended(&mut self) -> bool {
        if let (Some(child), None) = (&mut self.child, self.status) {
            self.status = child.try_wait().ok().flatten();
        }
        self.status.is_some()
    }

    /// Whether somebody asked to stop. A command that was started is told, and watched until it has ended.
    pub fn asked_to_stop(&mut self, signals: &StopSignals) -> bool {
        if !signals.flag().is_raised() {
            return false;
        }
        let Some(child) = &self.child else { return true };
        // A terminal's Ctrl-C goes to the command as well.
        let by_terminal = signals.exit_code() == 130;
        if !self.was_told_to_stop && !by_terminal {
            let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
            // One that has just ended is not there any more.
            let _ = pid.map(|pid| kill_process(pid, Signal::TERM));
        }
        self.was_told_to_stop = true;
        false
    }

    /// Says something to people: standard output belongs to a command that was started.
    pub fn say(&self, text: &str) -> Result<(), Failure> {
        match self.child {
            Some(_) => errln!("{text}"),
            None => outln!("{text}")?,
        }
        Ok(())
    }

    /// How it ended, where it did so by itself or only the monitor has ended.
    pub fn own_end(&mut self) -> Option<String> {
        match self.status {
            Some(status) => status.code().map(|code| format!("exit status {code}")),
            None => self.is_there().then(|| "the monitor was stopped".to_owned()),
        }
    }

    /// Whether what is watched is still there.
    pub fn is_there(&mut self) -> bool {
        self.sample().is_some()
    }

    /// The exit status of a command that was started becomes that of the monitor, as shells have it.
    pub fn end(self, signals: &StopSignals) -> Result<(), Failure> {
        let Some(mut child) = self.child else { return Ok(()) };
        let status = match self.status {
            Some(status) => status,
            None => {
                // The time is over: nobody watches any more, and the command goes on as it would without a monitor.
                if let Ok(None) = child.try_wait() {
                    errln!("the command goes on: process {}", child.id());
                    return Ok(());
                }
                child.wait().map_err(|error| Failure::other(format!("--command: {error}")))?
            }
        };
        let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal));
        match code.map(|code| u8::try_from(code).unwrap_or(u8::MAX)) {
            Some(0) => Ok(()),
            Some(code) => Err(Failure::stopped(code)),
            None => Err(Failure::stopped(signals.exit_code())),
        }
    }
}

/// The driver, where GPUs are to be watched. Where there is none, that is said; it ends the command only if nothing else is watched.
fn gpus(args: &MonitorArgs) -> Result<Option<Nvml>, Failure> {
    if args.gpu.is_empty() {
        return Ok(None);
    }
    let found = Nvml::load().and_then(|nvml| {
        let there = nvml.devices()?;
        Ok((nvml, there))
    });
    match found {
        Ok((nvml, there)) => match args.gpu.iter().find(|index| **index >= there) {
            None => Ok(Some(nvml)),
            Some(index) => {
                Err(Failure::usage(format!("--gpu {index}: this machine has {there}, numbered from 0")))
            }
        },
        Err(error) if args.pid.is_some() || args.cgroup.is_some() || args.command.is_some() => {
            errln!("--gpu: {error}");
            Ok(None)
        }
        Err(error) => Err(Failure::other(format!("--gpu: {error}"))),
    }
}

/// Steps that a file's lines count.
pub struct Steps {
    path: PathBuf,
    file: Option<File>,
    lines: u64,
}

impl Steps {
    /// Of a file, which need not be there yet. Lines that it has already count too.
    pub fn of(path: PathBuf) -> Steps {
        Steps { path, file: None, lines: 0 }
    }

    /// How many there are now.
    pub fn count(&mut self) -> u64 {
        if self.file.is_none() {
            self.file = File::open(&self.path).ok();
        }
        let mut buffer = [0; 1 << 16];
        while let Some(file) = &mut self.file {
            match file.read(&mut buffer) {
                Ok(0) | Err(_) => break,
                Ok(length) => {
                    let read = buffer.get(..length).unwrap_or_default();
                    self.lines += read.iter().filter(|byte| **byte == b'\n').count() as u64;
                }
            }
        }
        self.lines
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn lines_are_steps_from_when_the_file_is_there() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        let mut steps = Steps::of(path.clone());
        assert_eq!(steps.count(), 0);
        let mut file = File::create(&path).unwrap();
        file.write_all(b"one\ntwo\nthr").unwrap();
        assert_eq!(steps.count(), 2);
        file.write_all(b"ee\n").unwrap();
        assert_eq!(steps.count(), 3);
    }
}
