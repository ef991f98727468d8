//! A run of this process: the loop's events go into a view, which whoever draws looks at from a thread of its own.

use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use plimsoll_train::{Observer, RunEvent};

use crate::event::{Event, Kind};
use crate::files::METRICS;
use crate::plan::PlanView;
use crate::tail::{Found, Tail};
use crate::time_left::TimeLeft;
use crate::view::{State, View};

/// Watches a run from within. An event costs the loop some microseconds, however slow whoever draws is.
#[derive(Clone, Debug)]
pub struct Live {
    view: Arc<Mutex<View>>,
    left: TimeLeft,
    begun: Instant,
}

impl Live {
    /// Watches a run that writes into the folder `name`, validates every `eval_steps` steps and saves every `save_steps`; 0: never.
    pub fn new(name: &str, plan: Option<PlanView>, eval_steps: u64, save_steps: u64) -> Live {
        let mut view = View::of(name);
        if let Some(plan) = plan {
            view.planned(Arc::new(plan));
        }
        Live {
            view: Arc::new(Mutex::new(view)),
            left: TimeLeft::new(eval_steps, save_steps),
            begun: Instant::now(),
        }
    }

    /// The same run after so many steps, which an earlier part of it has left in its folder.
    pub fn resumed(self, folder: &Path, steps_done: u64) -> Live {
        let mut tail = Tail::of(folder.join(METRICS));
        let mut view = self.look();
        let mut take = |found| match found {
            Found::Step(step) if step.step <= steps_done => view.step(&step),
            _ => {}
        };
        // What cannot be read is not shown.
        while matches!(tail.look(&mut take), Ok(true)) {}
        drop(view);
        self
    }

    /// What is known of the run, to be looked at for a moment.
    pub fn look(&self) -> MutexGuard<'_, View> {
        self.view.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Observer for Live {
    fn event(&mut self, event: RunEvent<'_>) {
        let now = self.begun.elapsed();
        match event {
            RunEvent::Step(_) => self.left.stepped(now),
            RunEvent::Validated { .. } => self.left.validated(),
            RunEvent::Saved(_) => self.left.saved(now),
            RunEvent::Started { .. } => self.left.pass(now),
            _ => {}
        }
        let mut view = self.look();
        match event {
            RunEvent::Started { steps_done, total_steps, data_tokens } => {
                view.total_steps = Some(total_steps);
                let tokens = plimsoll_report::count(data_tokens);
                let text =
                    format!("training on {tokens} tokens, step {} of {total_steps} is next", steps_done + 1);
                view.happened(Event::new(None, Kind::Begin, text));
            }
            RunEvent::Step(metrics) => {
                view.step(metrics);
                view.note_skipped(metrics);
                view.state = State::Running;
                let total = view.total_steps.unwrap_or(0);
                view.seconds_left = Some(self.left.after(metrics.step, total).as_secs_f64());
            }
            other => view.happened_at_all(Event::of(&other)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::terminal::tests::metrics;

    #[test]
    fn a_run_is_seen_by_its_events_from_its_first_part_on() {
        let folder = tempfile::tempdir().unwrap();
        let line = |step| serde_json::to_string(&metrics(step)).unwrap() + "\n";
        std::fs::write(folder.path().join(METRICS), (1..=6).map(line).collect::<String>()).unwrap();
        let mut live = Live::new("run", None, 0, 2).resumed(folder.path(), 4);
        let before = live.look().clone();
        assert_eq!((before.steps_done(), before.first_loss), (4, Some(4.0)));
        live.event(RunEvent::Started { steps_done: 4, total_steps: 8, data_tokens: 5000 });
        live.event(RunEvent::Step(&metrics(5)));
        live.event(RunEvent::Validated { step: 5, loss: 2.0 });
        live.event(RunEvent::Saved(folder.path()));
        let view = live.look();
        assert_eq!((view.steps_done(), view.curve.points(None).len(), &view.state), (5, 5, &State::Running));
        assert!(view.seconds_left.is_some() && view.share_done() == Some(0.625));
        let said: Vec<String> = view.events().map(ToString::to_string).collect();
        assert_eq!(
            said[..2],
            [
                "training on 5,000 tokens, step 5 of 8 is next",
                "step 5: validation loss 2.0000, perplexity 7.389"
            ]
        );
        assert_eq!(said[2], format!("saved {}", folder.path().display()));
    }
}
