//! The dashboard of `train`: the run that this process trains, drawn by a thread of its own. The loop hands over its events and waits for
//! nobody.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use plimsoll_monitor::{FLIGHT_RECORDER, Follower};
use plimsoll_train::{Observer, RunEvent};
use plimsoll_watch::terminal::{Look, Wish, draw};
use plimsoll_watch::{Event, Live};
use rustix::process::{Signal, getpid, kill_process};

use crate::progress::TrainingProgress;
use crate::screen::{self, Restorer, Screen};

/// From one picture to the next.
const EVERY: Duration = Duration::from_millis(500);
/// How often keys are looked for.
const GLANCE: Duration = Duration::from_millis(100);
/// The thread's stack.
const STACK: usize = 1 << 20;

/// A dashboard that is shown, until it is closed or left.
pub struct Dashboard {
    live: Live,
    restorer: Restorer,
    done: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Dashboard {
    /// Shows a run that writes into `folder`.
    pub fn begin(live: Live, folder: &Path, restorer: Restorer) -> io::Result<Dashboard> {
        let screen = Screen::take(&restorer)?;
        let (done, recorder) = (Arc::new(AtomicBool::new(false)), Follower::of(folder.join(FLIGHT_RECORDER)));
        let (of_thread, ended) = (live.clone(), Arc::clone(&done));
        let show = move || {
            // Where the terminal is gone the run goes on without it.
            let _ = shown(screen, &of_thread, recorder, &ended);
        };
        let thread =
            std::thread::Builder::new().name("dashboard".to_owned()).stack_size(STACK).spawn(show)?;
        Ok(Dashboard { live, restorer, done, thread: Some(thread) })
    }

    /// Gives the terminal back. What happened in the run, to be read where it stays.
    pub fn close(mut self) -> Vec<Event> {
        self.end();
        let view = self.live.look();
        view.events().cloned().collect()
    }

    fn end(&mut self) {
        self.done.store(true, Ordering::SeqCst);
        if let Some(thread) = self.thread.take() {
            // A thread that has panicked has said so.
            let _ = thread.join();
        }
        self.restorer.restore();
    }
}

impl Drop for Dashboard {
    fn drop(&mut self) {
        self.end();
    }
}

/// Draws and reads keys until the run ends or somebody leaves.
fn shown(mut screen: Screen, live: &Live, mut recorder: Follower, done: &AtomicBool) -> io::Result<()> {
    let mut look = Look::new(screen::colours(), true);
    let mut picture = live.look().clone();
    let (mut drawn, mut is_due) = (None::<Instant>, true);
    while !done.load(Ordering::SeqCst) {
        if drawn.is_none_or(|drawn| drawn.elapsed() >= EVERY) {
            // It is there when the run has begun.
            if let Ok(news) = recorder.news() {
                let mut view = live.look();
                news.records.iter().for_each(|record| view.record(record));
            }
            if !look.paused {
                picture = live.look().clone();
            }
            is_due = true;
        }
        if is_due {
            screen.draw(|frame| draw(frame, std::slice::from_ref(&picture), &look))?;
            drawn = Some(Instant::now());
        }
        let (keys, is_other_size) = screen.keys(GLANCE)?;
        is_due = !keys.is_empty() || is_other_size;
        for key in keys {
            match look.press(key, 1) {
                Wish::Look => {}
                Wish::Leave => return Ok(()),
                // The run hears of it as of Ctrl-C without a dashboard.
                Wish::Stop => kill_process(getpid(), Signal::INT)?,
            }
        }
    }
    Ok(())
}

/// Tells the dashboard of a run, and the lines beside it, which are silent while the dashboard is shown.
pub struct Watching {
    /// What the dashboard shows.
    pub live: Live,
    /// Lines.
    pub lines: TrainingProgress,
}

impl Observer for Watching {
    fn event(&mut self, event: RunEvent<'_>) {
        self.live.event(event.clone());
        self.lines.event(event);
    }
}
