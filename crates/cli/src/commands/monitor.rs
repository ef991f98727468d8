//! `plimsoll monitor`: watches processes, groups and GPUs, ours or not; says what is near its limit, what grows and what leaks.

mod lines;
mod post_mortem;
mod prometheus;
mod watched;

use std::fs::OpenOptions;
use std::io::Write;
use std::process::Command;
use std::time::{Duration, Instant};

use plimsoll_monitor::{
    Conditions, Judgement, Owner, Record, Recorder, Sample, Status, Thresholds, Unit, Watch,
};
use plimsoll_plan::hardware::SystemFiles;
use rustix::process::{Pid, Signal, kill_process};

use self::prometheus::Page;
use self::watched::{Steps, Target};
use crate::args::MonitorArgs;
use crate::failure::Failure;
use crate::output::{errln, outln};
use crate::signals::StopSignals;

/// For people there is a line after this time, and whenever something changes.
const LINE_EVERY: Duration = Duration::from_secs(10);
/// How often it looks whether it is to stop.
const GLANCE: Duration = Duration::from_millis(50);

pub fn run(args: &MonitorArgs) -> Result<(), Failure> {
    if let Some(path) = &args.post_mortem {
        return post_mortem::run(path, args.json);
    }
    let thresholds = thresholds(args)?;
    let page = args.prometheus.map(|address| {
        let page = Page::default();
        page.serve(address).map(|bound| {
            errln!("serving http://{bound}/metrics");
            page
        })
    });
    let page = page.transpose()?;
    let log = args.log.as_ref().map(|path| {
        let open = OpenOptions::new().create(true).append(true).open(path);
        open.map_err(|error| {
            Failure::other(format!("--log {}: {error}; name a file that you may write to", path.display()))
        })
    });
    let log = log.transpose()?;
    let signals = StopSignals::listen(false)?;
    // Whatever could be wrong with the arguments is said before anything is started.
    let mut target = Target::begin(args)?;
    let unit = if args.steps.is_some() { Unit::Steps } else { Unit::Seconds };
    let recorder = args.record.as_ref().map(|path| {
        let files = SystemFiles::of_this_machine();
        let pid = target.pid().unwrap_or_else(std::process::id);
        let about = Conditions::about(&files, pid, target.words(), target.sampler_time());
        let begun = Recorder::begin(path, about);
        begun.map_err(|error| {
            Failure::other(format!("--record {}: {error}; name a file that you may write to", path.display()))
        })
    });
    let mut session = Session {
        args,
        watch: Watch::new(thresholds, unit),
        steps: args.steps.clone().map(Steps::of),
        page,
        log,
        recorder: recorder.transpose()?,
        begun: Instant::now(),
        last_line: None,
        said: Status::Normal,
    };
    session.watch_until_the_end(&mut target, &signals)?;
    session.conclude(&mut target)?;
    target.end(&signals)
}

/// Those of the profile, changed by flags.
fn thresholds(args: &MonitorArgs) -> Result<Thresholds, Failure> {
    let [target, warning, critical, emergency] = args.profile.shares();
    let thresholds = Thresholds {
        target: args.target_utilization.unwrap_or(target),
        warning: args.warning_threshold.unwrap_or(warning),
        critical: args.critical_threshold.unwrap_or(critical),
        emergency: args.emergency_threshold.unwrap_or(emergency),
    };
    if thresholds.rise() {
        return Ok(thresholds);
    }
    let Thresholds { target, warning, critical, emergency } = thresholds;
    Err(Failure::usage(format!(
        "thresholds have to rise from target to warning to critical to emergency, above 0: {target} {warning} {critical} {emergency} do not"
    )))
}

/// A watch that goes on.
struct Session<'a> {
    args: &'a MonitorArgs,
    watch: Watch,
    steps: Option<Steps>,
    page: Option<Page>,
    log: Option<std::fs::File>,
    recorder: Option<Recorder>,
    begun: Instant,
    last_line: Option<Instant>,
    said: Status,
}

impl Session<'_> {
    /// Takes samples until what is watched has ended, the time is over, or somebody asks to stop.
    fn watch_until_the_end(&mut self, target: &mut Target, signals: &StopSignals) -> Result<(), Failure> {
        let mut next = Instant::now();
        loop {
            let Some(sample) = target.sample() else { return Ok(()) };
            self.take(&sample, target)?;
            if self.args.duration.is_some_and(|duration| self.begun.elapsed() >= duration) {
                return Ok(());
            }
            next = (next + self.args.interval).max(Instant::now());
            while Instant::now() < next {
                if target.asked_to_stop(signals) {
                    return Ok(());
                }
                if target.has_ended() {
                    return Ok(());
                }
                std::thread::sleep(GLANCE.min(next.saturating_duration_since(Instant::now())));
            }
        }
    }

    /// Judges a sample and tells everybody.
    fn take(&mut self, sample: &Sample, target: &Target) -> Result<(), Failure> {
        let step = self.steps.as_mut().map(Steps::count);
        let at = step.map_or_else(|| self.begun.elapsed().as_secs_f64(), |step| step as f64);
        let judged = self.watch.judge(at, sample);
        let unit = self.watch.unit();
        if self.args.json || self.log.is_some() {
            let document = lines::json_of(sample, &judged, unit, step).to_string();
            self.write_json(&document)?;
        }
        if !self.args.json {
            self.say(sample, &judged, target, step)?;
        }
        if let Some(page) = &self.page {
            page.show(sample, &judged);
        }
        if judged.has_risen && judged.status >= Status::Critical {
            self.act(sample, &judged, target);
        }
        if let Some(recorder) = &mut self.recorder
            && let Err(error) = recorder.record(&record_of(sample, &judged, step, target.pid()))
        {
            errln!("--record: {error}; nothing more is recorded");
            self.recorder = None;
        }
        Ok(())
    }

    fn write_json(&mut self, line: &str) -> Result<(), Failure> {
        if let Some(log) = &mut self.log
            && let Err(error) = log.write_all(format!("{line}\n").as_bytes())
        {
            errln!("--log: {error}; nothing more is logged");
            self.log = None;
        }
        if self.args.json { outln!("{line}") } else { Ok(()) }
    }

    /// A line for people, where there is news or none was said for some time.
    fn say(
        &mut self,
        sample: &Sample,
        judged: &Judgement,
        target: &Target,
        step: Option<u64>,
    ) -> Result<(), Failure> {
        let due = self.last_line.is_none_or(|last| last.elapsed() >= LINE_EVERY);
        let leak = judged.leak.as_ref().map(|leak| lines::leak_line(Some(leak)));
        if due || leak.is_some() || judged.status != self.said {
            (self.last_line, self.said) = (Some(Instant::now()), judged.status);
            let text = lines::line(sample, judged, self.watch.unit(), step);
            for text in std::iter::once(text).chain(leak) {
                target.say(&text)?;
            }
        }
        Ok(())
    }

    /// What was asked for when memory becomes critical.
    fn act(&self, sample: &Sample, judged: &Judgement, target: &Target) {
        let pid = target.pid();
        if let (Some(number), Some(pid)) = (self.args.signal, pid) {
            let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
            if let (Some(pid), Some(signal)) = (pid, Signal::from_named_raw(number))
                && let Err(error) = kill_process(pid, signal)
            {
                errln!("--signal: {error}");
            }
        }
        let Some(command) = &self.args.on_critical else { return };
        let room = sample.room.map_or([0, 0], |room| [room.used_bytes, room.limit_bytes]);
        let mut shell = Command::new("sh");
        shell.arg("-c").arg(command).env("PLIMSOLL_STATUS", judged.status.name());
        shell.env("PLIMSOLL_PID", pid.map_or(String::new(), |pid| pid.to_string()));
        shell
            .env("PLIMSOLL_USED_BYTES", room[0].to_string())
            .env("PLIMSOLL_LIMIT_BYTES", room[1].to_string());
        if self.args.json {
            // Standard output is for JSON.
            shell.stdout(std::io::stderr());
        }
        match shell.spawn() {
            // Whoever waits for it is a thread of its own: samples go on.
            Ok(mut child) => drop(std::thread::spawn(move || child.wait())),
            Err(error) => errln!("--on-critical: {error}"),
        }
    }

    /// The report on leaks, and the end of the recording. A process that was not started here leaves nobody its exit status, and a
    /// signal is what a post-mortem is for: their recordings stay open.
    fn conclude(&mut self, target: &mut Target) -> Result<(), Failure> {
        if let (Some(recorder), Some(how)) = (self.recorder.take(), target.own_end())
            && let Err(error) = recorder.end(&how)
        {
            errln!("--record: {error}");
        }
        let leak = match target.is_there() {
            true => self.watch.leak(),
            false => self.watch.leak_after_the_end(),
        };
        let document = lines::leak_json(leak.as_ref(), self.watch.unit()).to_string();
        self.write_json(&document)?;
        if !self.args.json {
            errln!("{}", lines::leak_line(leak.as_ref()));
        }
        Ok(())
    }
}

/// A sample as the flight recorder keeps it: processes are the owners.
fn record_of(sample: &Sample, judged: &Judgement, step: Option<u64>, pid: Option<u32>) -> Record {
    let (container, machine) =
        Conditions::room(&SystemFiles::of_this_machine(), pid.unwrap_or_else(std::process::id));
    let several = sample.processes.len() > 1;
    let mut owners: Vec<Owner> = Vec::new();
    if several {
        owners.extend(sample.processes.iter().map(|process| Owner {
            name: format!("{} ({})", process.name, process.pid),
            bytes: process.rss_bytes,
        }));
    } else {
        let own = [
            ("anonymous memory", sample.anonymous_bytes),
            ("mapped files", sample.file_bytes),
            ("shared memory", sample.shared_bytes),
        ];
        owners.extend(own.into_iter().map(|(name, bytes)| Owner { name: name.to_owned(), bytes }));
    }
    owners.push(Owner { name: "swapped out".to_owned(), bytes: sample.swap_bytes });
    for gpu in &sample.gpu {
        owners.push(Owner { name: format!("GPU {}", gpu.index), bytes: gpu.used_bytes });
    }
    let mut others = |name: &str, used: Option<u64>| {
        let bytes = used.map_or(0, |used| used.saturating_sub(sample.rss_bytes));
        owners.push(Owner { name: name.to_owned(), bytes });
    };
    others("others in the container", container.map(|[_, used]| used));
    others("others on the machine", machine.map(|[total, free]| total.saturating_sub(free)));
    owners.retain(|owner| owner.bytes > 0);
    Record {
        time: sample.time,
        step,
        status: judged.status,
        rss: sample.rss_bytes,
        container,
        machine,
        owners,
    }
}
