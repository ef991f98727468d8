//! What a plan is asked for: a configuration with its model, and the machine that it is for.

use plimsoll_plan::config::{Imported, RawConfig, Started};
use plimsoll_plan::{Catalogue, DiskRates, Machine, ModelOrigin, ProcessLimits, Target, TrainingPlan};

use crate::args::{ConfigSource, MachineArgs};
use crate::failure::Failure;
use crate::models::{self, Need};
use crate::overhead::{Progress, tokenizer_bytes};
use crate::session::{DiskUse, Engine, load_config_on, load_config_over};
use crate::speeds::PlanSpeeds;

/// What a plan is asked for.
pub struct Asked {
    pub config: RawConfig,
    pub origin: ModelOrigin,
    /// A machine of the catalogue or of a file; this one where there is none.
    pub target: Option<Target>,
    /// Whether this machine stands for one of which nothing but its memory is known.
    elsewhere: bool,
}

impl Asked {
    /// What a command line says, over what a file of another program says. Progress of a download is not shown where `quiet` is set.
    pub fn new(
        source: &ConfigSource,
        imported: &Imported,
        machine: &MachineArgs,
        quiet: bool,
    ) -> Result<Asked, Failure> {
        let target = target(machine)?;
        if machine.host_memory.is_some() && target.is_none() {
            return Err(Failure::usage("--host-memory is of a machine that --hardware or --compare names"));
        }
        let config = load_config_for((source, imported), target.as_ref(), machine.ranks)?;
        Asked::on(target, config, quiet)
    }

    /// A run with this configuration on a machine.
    pub fn on(target: Option<Target>, config: RawConfig, quiet: bool) -> Result<Asked, Failure> {
        let origin = models::origin(&config, Need::Shape, quiet)?;
        // A model that is known by its dimensions alone is not trained here.
        let elsewhere = matches!(origin, ModelOrigin::Catalogue(_)) && has_budget(&config);
        Ok(Asked { config, origin, target, elsewhere })
    }

    /// The same for another machine, of which the configuration has the memory and nothing is known besides.
    pub fn elsewhere(self) -> Result<Asked, Failure> {
        if !has_budget(&self.config) {
            return Err(Failure::usage(
                "--elsewhere plans for another machine, whose memory has to be given, for example --memory 24GiB",
            ));
        }
        Ok(Asked { elsewhere: true, ..self })
    }

    /// The plan that the planner makes, and whose speeds its time is made of.
    pub fn plan(&self) -> Result<(TrainingPlan, PlanSpeeds), Failure> {
        self.plan_by(&mut |machine| Ok(TrainingPlan::for_model(&self.config, &self.origin, machine)?))
    }

    /// The same without ways to need less memory, where it fits.
    pub fn plan_in_brief(&self) -> Result<(TrainingPlan, PlanSpeeds), Failure> {
        self.plan_by(&mut |machine| Ok(TrainingPlan::in_brief(&self.config, &self.origin, machine)?))
    }

    /// The same by another way of planning for a machine.
    pub fn plan_by(
        &self,
        make: &mut dyn FnMut(&Machine) -> Result<TrainingPlan, Failure>,
    ) -> Result<(TrainingPlan, PlanSpeeds), Failure> {
        let disk_use = |plan: &TrainingPlan| DiskUse::of(plan, plan.run_needs(None).most_bytes);
        self.planned(Progress::Planning, &disk_use, make)
    }

    /// A plan of any kind, and whose speeds its time is made of; `disk_use` says whether a disk's are among them.
    pub fn planned<P>(
        &self,
        progress: Progress,
        disk_use: &dyn Fn(&P) -> Option<DiskUse>,
        make: &mut dyn FnMut(&Machine) -> Result<P, Failure>,
    ) -> Result<(P, PlanSpeeds), Failure> {
        if let Some(target) = &self.target {
            let machine = machine_of(target, &self.config, &self.origin, progress);
            return Ok((make(&machine)?, PlanSpeeds::of_catalogue(target)));
        }
        let engine = Engine::for_ranks(self.ranks_here())?;
        let mut machine = engine.machine(&self.config, self.origin.spec().vocab_size, progress);
        if self.elsewhere {
            (machine.limits, machine.disk_available) = (ProcessLimits::NONE, None);
            machine.rates.disk = DiskRates::USUAL;
        }
        let plan = engine.plan(&self.config, &machine, disk_use, make)?;
        let folder = (disk_use(&plan).is_some() && !self.elsewhere).then(|| self.config.disk_path());
        let speeds = PlanSpeeds::of(&engine, folder.as_deref(), self.elsewhere);
        Ok((plan, speeds))
    }

    /// Ranks that are to share this machine.
    fn ranks_here(&self) -> u32 {
        if self.elsewhere { 1 } else { self.config.ranks() }
    }
}

fn has_budget(config: &RawConfig) -> bool {
    config.memory.device_budget().set().is_some()
}

/// What the planner needs to know of a machine of the catalogue or of a file. On a CPU a tokenizer is in the same memory.
pub fn machine_of(target: &Target, config: &RawConfig, origin: &ModelOrigin, progress: Progress) -> Machine {
    let machine = target.machine(plimsoll_train::host_bytes_per_token(config));
    let tokenizer =
        target.device.cpu.as_ref().map_or(0, |_| tokenizer_bytes(origin.spec().vocab_size, progress));
    Machine { overhead_bytes: machine.overhead_bytes.saturating_add(tokenizer), ..machine }
}

/// The machine that a command line names.
fn target(machine: &MachineArgs) -> Result<Option<Target>, Failure> {
    machine.hardware.as_deref().map(|name| target_named(name, machine)).transpose()
}

/// The machine of a name, or of so many of its devices where the name is that of one.
pub fn target_named(name: &str, machine: &MachineArgs) -> Result<Target, Failure> {
    let found = Catalogue::known().target(name)?;
    let target = match machine.ranks.map(u64::from) {
        None => found,
        Some(ranks) if ranks == found.devices() => found,
        Some(ranks) if found.devices() == 1 => {
            Catalogue::known().target_of(name, u32::try_from(ranks).unwrap_or(u32::MAX))?
        }
        Some(ranks) => {
            return Err(Failure::usage(format!(
                "--ranks {ranks}: {name} has {} devices, and each is a rank; leave --ranks away",
                found.devices()
            )));
        }
    };
    Ok(match machine.host_memory {
        Some(bytes) => target.with_host_memory(bytes),
        None => target,
    })
}

/// The configuration of a run on every device of a machine, on so many ranks, or on as many as it says itself; over what a file of another
/// program says.
pub fn load_config_for(
    (source, imported): (&ConfigSource, &Imported),
    target: Option<&Target>,
    ranks: Option<u32>,
) -> Result<RawConfig, Failure> {
    let imported = &imported.overrides;
    let count = |devices: u64| u32::try_from(devices).unwrap_or(u32::MAX);
    let config = match (target, ranks) {
        (Some(target), _) => {
            let of_each_machine = Some(count(target.devices_of_machine));
            load_config_on(source, imported, Started { ranks: count(target.devices()), of_each_machine })?
        }
        // They are to share this machine.
        (None, Some(ranks)) => {
            load_config_on(source, imported, Started { ranks, of_each_machine: Some(ranks) })?
        }
        (None, None) => load_config_over(source, imported, &[])?,
    };
    config.divisions()?;
    Ok(config)
}
