//! A run that is followed by its files, with the plan of its configuration, made again where that can be.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::SystemTime;

use plimsoll_plan::config::Imported;
use plimsoll_train::{CONFIG_FILE, LOCK};
use plimsoll_watch::{PlanView, RunFiles, View, now};

use crate::args::{ConfigSource, MachineArgs};
use crate::asked::Asked;
use crate::failure::Failure;

/// A run, and what is known of it.
pub struct Followed {
    pub view: View,
    files: RunFiles,
    configuration: PathBuf,
    /// When the configuration was written that the plan was made of, and for how many ranks the plan was made.
    planned: (Option<SystemTime>, Option<u32>),
    /// The plan that is being made, away from whoever looks.
    planning: Option<Receiver<Result<PlanView, String>>>,
}

impl Followed {
    /// Begins to follow the run in a folder.
    pub fn begin(folder: &Path) -> Result<Followed, Failure> {
        if !RunFiles::are_in(folder) && !folder.join(LOCK).exists() {
            return Err(Failure::usage(format!(
                "{} is no folder of a run: nothing in it is a run's; name the folder that output.dir says",
                folder.display()
            )));
        }
        Ok(Followed {
            view: View::of(folder.display().to_string()),
            files: RunFiles::of(folder),
            configuration: folder.join(CONFIG_FILE),
            planned: (None, None),
            planning: None,
        })
    }

    /// Brings the view up to date, as far as that is a matter of a moment.
    pub fn look(&mut self) {
        self.files.look(&mut self.view, now());
        let written = std::fs::metadata(&self.configuration).and_then(|file| file.modified()).ok();
        let ranks = self.view.last.as_ref().map_or(0, |last| last.ranks_rss_bytes.len());
        let asked = (written, u32::try_from(ranks).ok().filter(|ranks| *ranks > 1));
        if written.is_some() && asked != self.planned && self.planning.is_none() {
            self.planned = asked;
            let (done, planning) = channel();
            let configuration = self.configuration.clone();
            // A plan takes a part of a second, and a model of hundreds of layers longer.
            std::thread::spawn(move || {
                let _ = done.send(planned(&configuration, asked.1).map_err(|failure| failure.to_string()));
            });
            self.planning = Some(planning);
        }
        if let Some(made) = self.planning.as_ref().and_then(|planning| planning.try_recv().ok()) {
            self.take(made);
        }
    }

    /// The same, all of it.
    pub fn read_all(&mut self) {
        while self.files.look(&mut self.view, now()) {}
        self.look();
        if let Some(made) = self.planning.take().and_then(|planning| planning.recv().ok()) {
            self.take(made);
        }
    }

    fn take(&mut self, made: Result<PlanView, String>) {
        self.planning = None;
        match made {
            Ok(plan) => self.view.planned(Arc::new(plan)),
            Err(why) => {
                let why = why.lines().next().unwrap_or_default().to_owned();
                self.view.notes =
                    vec![format!("the plan could not be made again, so that there is no time line: {why}")];
            }
        }
    }
}

/// The plan of a run's configuration, for a machine of which only the run's own budget counts.
fn planned(configuration: &Path, ranks: Option<u32>) -> Result<PlanView, Failure> {
    let source = ConfigSource { config: Some(configuration.to_owned()), ..ConfigSource::default() };
    let machine = MachineArgs { ranks, ..MachineArgs::default() };
    let asked = Asked::new(&source, &Imported::default(), &machine, true)?;
    let has_budget = asked.config.memory.device_budget().set().is_some();
    let asked = if has_budget { asked.elsewhere()? } else { asked };
    let (plan, _) = asked.plan_in_brief()?;
    Ok(PlanView::of(&plan)?)
}
