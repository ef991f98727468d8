//! A run of this process: the loop's events go into a view, which whoever draws looks at from a thread of its own.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use plimsoll_train::{Observer, RunEvent};

use crate::event::{Event, Kind};
use crate::plan::PlanView;
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
