//! Progress for people: a bar on a terminal, plain lines elsewhere, nothing beside a JSON document.

use std::cmp::Ordering;
use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use plimsoll_hub::HubId;
use plimsoll_memory::ByteSize;
use plimsoll_monitor::Status;
use plimsoll_plan::Alternative;
use plimsoll_plan::config::OutputConfig;
use plimsoll_train::{MemoryHealth, Observer, RunEvent, RungMemory, StepMetrics};
use plimsoll_watch::{Event, TimeLeft};

use crate::screen::Restorer;
use crate::units::seconds;

/// Off a terminal there is a line after at most this time.
const LINE_EVERY: Duration = Duration::from_secs(30);

/// A bar that counts `what`; hidden beside JSON and off a terminal.
pub fn counter(length: u64, what: &str, quiet: bool) -> ProgressBar {
    if quiet || !std::io::stderr().is_terminal() {
        return ProgressBar::with_draw_target(Some(length), ProgressDrawTarget::hidden());
    }
    let style = ProgressStyle::with_template(&format!("{{bar:40}} {{pos}}/{{len}} {what}, {{eta}} left"))
        .unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::new(length).with_style(style)
}

/// Shows a training run.
pub struct TrainingProgress {
    bar: Option<ProgressBar>,
    total_steps: u64,
    logging_steps: u64,
    load_line: u64,
    overhead: u64,
    quiet: bool,
    /// The dashboard that is shown in their place, as long as it is.
    dashboard: Option<Restorer>,
    /// What else could be done, from dry runs; `None` where nothing is to be said of memory.
    advice: Option<Vec<Alternative>>,
    last_line: Instant,
    first_step: Option<u64>,
    begun: Instant,
    left: TimeLeft,
}

impl TrainingProgress {
    /// A display for a run that writes into `output`, whose memory is held against `load_line` bytes, with `overhead` planned
    /// outside the arena. `advice`: what else could be done, or `None` where nothing is to be said of memory.
    pub fn new(
        output: &OutputConfig,
        load_line: u64,
        overhead: u64,
        advice: Option<Vec<Alternative>>,
        quiet: bool,
    ) -> TrainingProgress {
        TrainingProgress {
            bar: None,
            total_steps: 0,
            logging_steps: output.logging_steps(),
            load_line,
            overhead,
            quiet,
            dashboard: None,
            advice,
            last_line: Instant::now(),
            first_step: None,
            begun: Instant::now(),
            left: TimeLeft::new(output.eval_steps(), output.save_steps()),
        }
    }

    /// The same, beside a dashboard.
    pub fn beside(self, dashboard: &Restorer) -> TrainingProgress {
        TrainingProgress { dashboard: Some(dashboard.clone()), ..self }
    }

    fn is_silent(&self) -> bool {
        self.dashboard.as_ref().is_some_and(Restorer::is_taken)
    }

    fn say(&self, text: &str) {
        match &self.bar {
            _ if self.is_silent() => {}
            Some(bar) => bar.println(text),
            // A run goes on where nobody reads its output any more.
            None if !self.quiet => drop(writeln!(std::io::stdout(), "{text}")),
            None => {}
        }
    }

    /// Says what somebody has to do something about, beside a JSON document too.
    fn warn(&self, text: &str) {
        match &self.bar {
            _ if self.is_silent() => {}
            Some(bar) => bar.println(text),
            None => drop(writeln!(std::io::stderr(), "{text}")),
        }
    }

    fn step(&mut self, metrics: &StepMetrics) {
        let first = *self.first_step.get_or_insert(metrics.step);
        self.left.stepped(self.begun.elapsed());
        let left = self.left.after(metrics.step, self.total_steps).as_secs_f64();
        let left = format!("{} left", seconds(left));
        // The system may not say what the process takes now.
        let now = match metrics.memory.process_rss_bytes {
            0 => String::new(),
            bytes => format!("{} now, ", ByteSize(bytes)),
        };
        let memory = format!(
            "{now}{} planned, line {}",
            ByteSize(metrics.memory.device_peak_bytes + self.overhead),
            ByteSize(self.load_line)
        );
        let text =
            format!("loss {:.4}  {:.0} tokens/s  memory {memory}", metrics.loss, metrics.tokens_per_second);
        if let Some(bar) = &self.bar {
            bar.set_message(format!("{text}  {left}"));
            bar.set_position(metrics.step);
            return;
        }
        let due = metrics.step.is_multiple_of(self.logging_steps.max(1))
            || metrics.step == self.total_steps
            || metrics.step == first
            || self.last_line.elapsed() > LINE_EVERY;
        if due {
            self.last_line = Instant::now();
            self.say(&format!(
                "step {}/{}  {text}  lr {:.2e}  grad norm {:.3}  {left}",
                metrics.step, self.total_steps, metrics.lr, metrics.grad_norm,
            ));
            // The system may not say what the process takes now.
            if let Some(advice) = self.advice.as_ref().filter(|_| metrics.memory.process_rss_bytes > 0) {
                self.say(&memory_line(metrics, advice));
            }
        }
    }
}

impl Observer for TrainingProgress {
    fn event(&mut self, event: RunEvent<'_>) {
        let words = Event::of(&event);
        let is_urgent = matches!(event, RunEvent::WaitingForSpace { .. });
        match event {
            RunEvent::Started { steps_done, total_steps, data_tokens } => {
                self.total_steps = total_steps;
                self.left.pass(self.begun.elapsed());
                self.say(&format!(
                    "training on {data_tokens} tokens, step {} of {total_steps} is next",
                    steps_done + 1
                ));
                if !self.quiet && self.dashboard.is_none() && std::io::stderr().is_terminal() {
                    let style = ProgressStyle::with_template("{bar:30} {pos}/{len}  {msg}")
                        .unwrap_or_else(|_| ProgressStyle::default_bar());
                    let bar = ProgressBar::new(total_steps).with_style(style).with_position(steps_done);
                    self.bar = Some(bar);
                }
            }
            RunEvent::Step(metrics) => {
                self.step(metrics);
                if metrics.step == self.total_steps
                    && let Some(bar) = self.bar.take()
                {
                    bar.finish();
                }
            }
            RunEvent::Validated { .. } => self.left.validated(),
            RunEvent::Saved(_) => self.left.saved(self.begun.elapsed()),
            RunEvent::Rung { step, from, to, batch_sizes, memory: Some(memory), .. } => {
                let RungMemory { used_bytes, limit_bytes, status } = memory;
                let line = used_of(step, used_bytes, limit_bytes, status);
                self.say(&format!("{line} - {}", change_of_batches(batch_sizes, to > from)));
            }
            _ => {}
        }
        match words {
            Some(event) if is_urgent => self.warn(&event.to_string()),
            Some(event) => self.say(&event.to_string()),
            None => {}
        }
    }
}

/// `[Step 300] Memory: 22.8/24.0 GiB (95%), Status: critical`.
fn used_of(step: u64, used: u64, limit: u64, status: Status) -> String {
    let units = [("GiB", 1u64 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];
    let (unit, bytes) = units.into_iter().find(|(_, bytes)| limit >= *bytes).unwrap_or(("B", 1));
    let share = 100.0 * used as f64 / limit.max(1) as f64;
    let [used, limit] = [used, limit].map(|size| size as f64 / bytes as f64);
    format!("[Step {step}] Memory: {used:.1}/{limit:.1} {unit} ({share:.0}%), Status: {status}")
}

/// What a change of plans does to the micro-batch.
fn change_of_batches([before, now]: [u64; 2], less: bool) -> String {
    match now.cmp(&before) {
        Ordering::Less => format!("reducing batch size from {before} to {now}"),
        Ordering::Greater => format!("increasing batch size from {before} to {now}"),
        Ordering::Equal if less => "going on with less memory".to_owned(),
        Ordering::Equal => "going on with more memory".to_owned(),
    }
}

/// `[Step 300] Memory: 22.8/24.0 GiB (95%), Status: critical - training.batch_size=1 saves 1.20 GiB, 8 % slower`.
fn memory_line(metrics: &StepMetrics, advice: &[Alternative]) -> String {
    let MemoryHealth { status, limit_bytes, forecast_steps, .. } = metrics.memory.health;
    let mut text = used_of(metrics.step, metrics.memory.process_rss_bytes, limit_bytes, status);
    if let Some(steps) = forecast_steps {
        text.push_str(&format!(" - at this rate the line is reached in {steps} steps"));
    }
    if status != Status::Normal
        && let Some(other) = recommended(advice)
    {
        let saved = ByteSize(other.bytes_saved.unsigned_abs());
        let price = 100.0 * other.slower;
        let price = if price > 0.5 { format!("{price:.0} % slower") } else { "no slower".to_owned() };
        text.push_str(&format!(" - {} saves {saved}, {price}", other.change.join(" ")));
    }
    text
}

/// The change that costs least time among those that fit and save memory.
fn recommended(advice: &[Alternative]) -> Option<&Alternative> {
    let saving = advice.iter().filter(|other| other.fits && other.bytes_saved > 0);
    saving.min_by(|a, b| a.slower.total_cmp(&b.slower))
}

/// Shows files that are fetched; on standard error, since commands print their results on the other.
pub struct FetchProgress {
    model: String,
    bar: ProgressBar,
    lines: bool,
    begun: Instant,
    bytes: u64,
}

impl FetchProgress {
    /// A display for one model.
    pub fn new(id: &HubId, quiet: bool) -> FetchProgress {
        FetchProgress {
            model: id.to_string(),
            bar: ProgressBar::hidden(),
            lines: !quiet,
            begun: Instant::now(),
            bytes: 0,
        }
    }

    fn say(&self, text: &str) {
        if !self.bar.is_hidden() {
            self.bar.println(text);
        } else if self.lines {
            // A fetch goes on where nobody reads.
            drop(writeln!(std::io::stderr(), "{text}"));
        }
    }
}

impl plimsoll_hub::Progress for FetchProgress {
    fn event(&mut self, event: plimsoll_hub::FetchEvent<'_>) {
        use plimsoll_hub::FetchEvent;
        match event {
            FetchEvent::Started { files, bytes, already } => {
                let plural = if files == 1 { "" } else { "s" };
                let kept = match already {
                    0 => String::new(),
                    bytes => format!(", {} of them here already", ByteSize(bytes)),
                };
                self.say(&format!(
                    "fetching {}: {files} file{plural}, {}{kept}",
                    self.model,
                    ByteSize(bytes)
                ));
                (self.begun, self.bytes) = (Instant::now(), bytes);
                if self.lines && std::io::stderr().is_terminal() {
                    let style = ProgressStyle::with_template(
                        "{bar:30} {binary_bytes}/{binary_total_bytes}  {binary_bytes_per_sec}  {eta} left  {msg}",
                    );
                    self.bar = ProgressBar::new(bytes)
                        .with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
                }
            }
            FetchEvent::File { name } => self.bar.set_message(name.to_owned()),
            FetchEvent::Bytes(n) if n >= 0 => self.bar.inc(n.unsigned_abs()),
            FetchEvent::Bytes(n) => {
                self.bar.set_position(self.bar.position().saturating_sub(n.unsigned_abs()));
            }
            FetchEvent::Waiting { name } => self.say(&format!("waiting: another process fetches {name}")),
            FetchEvent::Retrying { name, reason, pause } => {
                self.say(&format!("{name}: {reason}; again in {:.1} s", pause.as_secs_f64()));
            }
            FetchEvent::Unreachable { reason, snapshot } => {
                self.say(&format!("the hub cannot be reached ({reason}); using {}", snapshot.display()));
            }
            FetchEvent::Done => {
                self.bar.finish_and_clear();
                self.bar = ProgressBar::hidden();
                let taken = self.begun.elapsed().as_secs_f64();
                let (bytes, time) = (ByteSize(self.bytes), seconds(taken));
                self.say(&format!("fetched {bytes} in {time}"));
            }
        }
    }
}
