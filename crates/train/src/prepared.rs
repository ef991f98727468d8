//! From a configuration to a run: opens the model, reads the data, plans, and starts the loop.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use plimsoll_data::chat::{SampleReport, Skipped};
use plimsoll_data::{Batches, Dataset, DatasetOptions, Workers};
use plimsoll_device::Device;
use plimsoll_disk::{LowerTiers, SpillSettings};
use plimsoll_model::adapter::{Adapter, AdapterSet, FirstValues};
use plimsoll_model::convert::encode;
use plimsoll_model::tokenizer::Tokenizer;
use plimsoll_model::{AdapterLayout, ModelFiles, ModelSpec, Parameter, Role, SaveWriter, WeightSource, init};
use plimsoll_parallel::{Collectives, Communicator, Deal, Solo};
use plimsoll_plan::config::{NotFinite, RawConfig, TrainingLength};
use plimsoll_plan::hardware::process_memory;
use plimsoll_plan::{DiskNeeds, Machine, ModelOrigin, Past, TrainingPlan};
use plimsoll_step::{StepSettings, Trainer};

use crate::alike::{compare_beginnings, compare_data, part};
use crate::checkpoint::{Checkpoint, TrainerState, VERSION, copy_out, sweep_named};
use crate::metrics::MetricsFormats;
use crate::pressure::RungChange;
use crate::run::{Connections, PartEnd, Progress, RunSettings, Validated, micro_batch, run};
use crate::samples::sample_encoder;
use crate::tokenizer::{kept_of_run, tokenizer_of_first_rank, tokenizer_of_run};
use crate::{Observer, OutputFolder, Planned, Resumption, RunEvent, Schedule, StopFlag, TrainError, room};

/// Bytes between a file and the tokenizer, where the user does not say.
const DEFAULT_BUFFER: usize = 64 << 10;

/// The values that adapters began with, where those are a part of the weights.
const INITIAL_ADAPTER: &str = "initial_adapter";

/// What the folders of ranks but the first are called, within the run's; removed when these end.
const OF_RANK: &str = ".rank-";

/// The configuration as it was resolved, saved with the run.
/// The configuration of a run in its folder, with every `auto` decided.
pub const CONFIG_FILE: &str = "plimsoll.yaml";

/// A run that has its model and its data and needs a plan and a device.
pub struct Prepared {
    config: RawConfig,
    origin: ModelOrigin,
    tokenizer: Tokenizer,
    train: Arc<Dataset>,
    validation: Option<Dataset>,
    /// Where the run, or the next part of it, begins.
    pub(crate) resumed: Option<(Checkpoint, TrainerState)>,
    resumption: Option<Resumption>,
    /// The output folder is this run's alone until it ends.
    pub(crate) folder: OutputFolder,
}

/// Host memory that the data pipeline holds for each token of a micro-batch.
pub fn host_bytes_per_token(config: &RawConfig) -> u64 {
    config.data.host_bytes_per_token()
}

/// Bytes between files of records and their readers.
pub(crate) fn buffer_bytes(config: &RawConfig) -> usize {
    config.data.buffer_size().set().map_or(DEFAULT_BUFFER, |size| size.0 as usize)
}

impl Prepared {
    /// Opens the model and reads the data. The output folder is made, and locked until this value is dropped. A folder that
    /// holds a run is refused unless the run is to be resumed.
    pub fn new(config: RawConfig, resume: bool) -> Result<Prepared, TrainError> {
        config.training_data()?;
        let origin = ModelOrigin::find(&config)?;
        Prepared::with_model(config, origin, resume)
    }

    /// As [`Prepared::new`] with a model that was found already, wherever it came from.
    pub fn with_model(config: RawConfig, origin: ModelOrigin, resume: bool) -> Result<Prepared, TrainError> {
        Prepared::of_rank(config, origin, resume, &Solo)
    }

    /// The same for one of several ranks. The first one opens the run; the others go on where it does, and write nothing
    /// beside a folder of their own, which they remove.
    pub fn of_rank(
        config: RawConfig,
        origin: ModelOrigin,
        resume: bool,
        ranks: &dyn Communicator,
    ) -> Result<Prepared, TrainError> {
        config.training_data()?;
        let output = config.output.dir();
        let (folder, resumed) = match ranks.rank() {
            0 => {
                let folder = OutputFolder::take(&output)?;
                let resumed = folder.beginning(resume)?;
                // The ranks of a run that was killed are gone, and those of this one wait for where it begins.
                sweep_named(folder.path(), &[OF_RANK])?;
                let path =
                    resumed.as_ref().map(|(checkpoint, _)| checkpoint.path.as_os_str().as_encoded_bytes());
                ranks.broadcast(path.unwrap_or_default().to_vec())?;
                ranks.barrier()?;
                (folder, resumed)
            }
            rank => {
                let path = ranks.broadcast(Vec::new())?;
                // On another machine the first rank does not see them. Nobody makes a folder before all have looked.
                OutputFolder::sweep_passing(&output, OF_RANK);
                ranks.barrier()?;
                let folder = OutputFolder::passing(&output.join(format!("{OF_RANK}{rank}")))?;
                let path = PathBuf::from(String::from_utf8_lossy(&path).into_owned());
                // This machine may have the run's folder elsewhere.
                let own = path.file_name().map(|name| output.join(name)).filter(|own| own.exists());
                let is_new = path.as_os_str().is_empty();
                let path = own.unwrap_or(path);
                (folder, if is_new { None } else { Some(Checkpoint::of_first_rank(&path)?) })
            }
        };
        let checkpoint = resumed.as_ref().map(|(checkpoint, _)| checkpoint);
        if let Err(error) = compare_beginnings(ranks, &config, &origin, checkpoint) {
            part(ranks, &error, folder);
            return Err(error);
        }
        let prepared = if ranks.rank() == 0 {
            let prepared = Prepared::open(config, origin, folder, resumed, None)?;
            // What is wrong with the data it has said by now.
            let is_alone = ranks.is_alone();
            ranks.broadcast(if is_alone { Vec::new() } else { kept_of_run(&prepared.origin, &output)? })?;
            prepared
        } else {
            let kept = ranks.broadcast(Vec::new())?;
            Prepared::open(config, origin, folder, resumed, Some(&kept))?
        };
        let validation = prepared.validation.as_ref().map(Dataset::identity).unwrap_or_default();
        let data = [("data.train", prepared.train.identity()), ("data.validation", validation)];
        if let Err(error) = compare_data(ranks, &data) {
            part(ranks, &error, prepared.folder);
            return Err(error);
        }
        Ok(prepared)
    }

    /// Opens the model and reads the data, in a folder that belongs to this value. `kept`: what the first rank tells of its tokenizer;
    /// `None` on that rank, whose folder is the run's.
    fn open(
        mut config: RawConfig,
        origin: ModelOrigin,
        folder: OutputFolder,
        resumed: Option<(Checkpoint, TrainerState)>,
        kept: Option<&[u8]>,
    ) -> Result<Prepared, TrainError> {
        let train_paths = config.training_data()?.patterns().to_vec();
        let output = config.output.dir();
        let resumption = match (&resumed, kept) {
            (Some((checkpoint, state)), None) => {
                Some(Resumption::of(&mut config, &output.join(CONFIG_FILE), checkpoint, state)?)
            }
            // The first rank decides, and others may not see how the run was begun.
            (Some((_, state)), Some(_)) => Some(Resumption { step: state.step, ..Resumption::default() }),
            (None, _) => None,
        };
        let tokenizer = match kept {
            None => {
                let steps_done = resumed.as_ref().map_or(0, |(_, state)| state.step);
                room::check_before_data(&config, &origin, steps_done)?;
                tokenizer_of_run(&config, &origin, &output, resumed.is_some())?
            }
            Some(kept) => tokenizer_of_first_rank(&config, &origin, kept, folder.path())?,
        };
        let encoder = sample_encoder(&config, &tokenizer)?;
        let open = |key, patterns: &[String], shuffle, document_mask| {
            if let Some(encoder) = &encoder {
                return Dataset::open_samples(patterns, encoder, shuffle, folder.path());
            }
            let options = DatasetOptions {
                key,
                patterns: patterns.to_vec(),
                text_field: config.data.text_field(),
                max_invalid_share: config.data.max_invalid_share(),
                append_eos: config.data.append_eos(),
                buffer_bytes: buffer_bytes(&config),
                sequence_length: config.data.sequence_length(),
                shuffle,
                document_mask,
            };
            Dataset::open(&options, &tokenizer, folder.path())
        };
        let order = config.data.shuffle().then(|| config.data.seed.unwrap_or(config.training.seed()));
        let train = Arc::new(open("data.train", &train_paths, order, config.data.document_mask())?);
        let validation = match &config.data.validation {
            // Texts are measured with the model's own attention, as evaluation does.
            Some(paths) => Some(open("data.validation", paths.patterns(), None, false)?),
            None => None,
        };
        drop(encoder);
        // What another rank has otherwise is compared with what the first one has.
        if let Some((checkpoint, state)) = resumed.as_ref().filter(|_| kept.is_none())
            && state.data != train.identity()
        {
            let reason = "the training data, the tokenizer or the way they are cut has changed since it was written; restore them or start a new run from its model".to_owned();
            return Err(TrainError::Checkpoint { path: checkpoint.path.clone(), reason });
        }
        Ok(Prepared { config, origin, tokenizer, train, validation, resumed, resumption, folder })
    }

    /// What became of the samples that are trained on, and of those that are validated on.
    pub fn sample_reports(&self) -> impl Iterator<Item = (&'static str, &SampleReport)> {
        let validation = self.validation.as_ref().map(|dataset| ("data.validation", dataset));
        let all = [("data.train", &*self.train)].into_iter().chain(validation);
        all.filter_map(|(key, dataset)| Some((key, dataset.sample_report()?)))
    }

    /// Where the run goes on, and with which other settings; `None` where it begins.
    pub fn resumption(&self) -> Option<&Resumption> {
        self.resumption.as_ref()
    }

    /// Optimizer steps of the whole run that a plan leads to.
    pub fn total_steps(&self, plan: &TrainingPlan) -> u64 {
        let sequences = plan.choice.sequences();
        match plan.config.training.length() {
            TrainingLength::Steps(steps) => steps,
            TrainingLength::Epochs(epochs) => {
                ((epochs * self.train.windows() as f64 / sequences as f64).ceil() as u64).max(1)
            }
        }
    }

    /// What the run that a plan leads to has still to write to its folder, at the moment when it is most.
    ///
    /// # Errors
    /// The folder cannot be listed.
    pub fn still_to_write(&self, plan: &TrainingPlan) -> Result<DiskNeeds, TrainError> {
        let checkpoints = Checkpoint::list(self.folder.path())?.len() as u64;
        let past = Past { steps: self.start_state().step, checkpoints };
        Ok(plan.still_to_write(self.total_steps(plan), past))
    }

    /// Sequences that the run is validated on; `None` where it is not.
    pub fn validation_sequences(&self) -> Option<u64> {
        self.validation.as_ref().map(Dataset::windows)
    }

    /// Records without a text that were left out of the texts that are trained on, and of those that are validated on.
    pub fn left_out_records(&self) -> impl Iterator<Item = (&'static str, &Skipped)> {
        let validation = self.validation.as_ref().map(|dataset| ("data.validation", dataset));
        let all = [("data.train", &*self.train)].into_iter().chain(validation);
        let texts = all.filter(|(_, dataset)| dataset.sample_report().is_none());
        texts.flat_map(|(key, dataset)| dataset.left_out().iter().map(move |skipped| (key, skipped)))
    }

    /// Bytes of disk that the tokens of the data take until the run ends. No file is to be seen of it.
    pub fn token_bytes(&self) -> u64 {
        [Some(&*self.train), self.validation.as_ref()].into_iter().flatten().map(Dataset::disk_bytes).sum()
    }

    /// The model's shape.
    pub fn spec(&self) -> &ModelSpec {
        self.origin.spec()
    }

    /// What the user wrote.
    pub fn config(&self) -> &RawConfig {
        &self.config
    }

    /// Replaces what the user wrote by what was decided of it elsewhere.
    pub fn decide(&mut self, config: RawConfig) {
        self.config = config;
    }

    /// Plans the run for a machine.
    pub fn plan(&self, machine: &Machine) -> Result<TrainingPlan, TrainError> {
        Ok(TrainingPlan::for_model(&self.config, &self.origin, machine)?)
    }

    /// Writes what the run will do into its folder.
    pub(crate) fn write_plan(&self, plan: &TrainingPlan, output: &Path) -> Result<(), TrainError> {
        crate::write_whole(&output.join(CONFIG_FILE), plan.config.to_yaml()?.as_bytes())?;
        if plan.config.memory.profile() {
            crate::report::write_timeline(output, &plan.timeline()?)?;
        }
        Ok(())
    }

    /// Where the run, or the next part of it, begins.
    pub(crate) fn start_state(&self) -> TrainerState {
        match &self.resumed {
            Some((_, state)) => state.clone(),
            None => TrainerState {
                version: VERSION,
                step: 0,
                updates: 0,
                grad_norm: None,
                loss_scale: None,
                windows: 0,
                tokens: 0,
                data: self.train.identity(),
                optimizer: self.config.training.optimizer().to_string(),
            },
        }
    }

    /// The checkpoint that the run, or this part of it, began at.
    pub(crate) fn resumed_from(&self) -> Option<Checkpoint> {
        self.resumed.as_ref().map(|(checkpoint, _)| checkpoint.clone())
    }

    /// Trains on one rung, on a device whose arena has the plan's size.
    pub(crate) fn run_rung(
        &self,
        device: &dyn Device,
        plan: &TrainingPlan,
        progress: &mut Progress,
        judge: &mut dyn FnMut() -> Option<RungChange>,
        observer: &mut dyn Observer,
        stop: StopFlag,
        ranks: &dyn Communicator,
    ) -> Result<PartEnd, TrainError> {
        let output = plan.config.output.dir();
        let settings = self.run_settings(plan, &output);
        let document_end = self.train.document_end();
        let step = StepSettings { document_end, ..plan.choice.settings.clone() };
        let tiers = Arc::new(open_tiers(device, plan)?);
        let mut trainer = Trainer::new(device, tiers, plan.spec.clone(), step, ranks)?;
        if let Some(file) = trainer.tiers().buffered_file() {
            observer.event(RunEvent::BufferedDisk(file.path()));
        }
        self.load(&mut trainer, plan)?;

        let Prepared { tokenizer, train, validation, .. } = self;
        let batch_size = plan.choice.settings.batch_size;
        let workers = workers(&plan.config);
        let (place, mesh) = (plan.choice.settings.ranks.place(), plan.choice.settings.ranks.mesh);
        let (own, together) = (plan.choice.accumulation, plan.choice.settings.micro_batches_per_pass);
        let deal = Deal { rank: place.data, ranks: mesh.data, own, together };
        let position = progress.state.windows;
        let mut batches = Batches::dealt(Arc::clone(train), batch_size, workers, position, deal)?;
        let mut measure = |trainer: &mut Trainer<'_>| match validation {
            Some(dataset) => validation_loss(trainer, dataset, ranks).map(Some),
            None => Ok(None),
        };
        let dtype = plan.choice.settings.precision.weights;
        let save_model = |trainer: &Trainer<'_>, folder: &Path| -> Result<(), TrainError> {
            if let Some(adapters) = plan.choice.settings.method.adapters() {
                let read = |p: &Parameter| trainer.values(p).map_err(std::io::Error::other);
                let layout = &adapters.layout;
                if layout.config().start.changes_base() {
                    let first = FirstValues::open(&output.join(INITIAL_ADAPTER))?;
                    layout.write_converted(folder, &plan.spec, &first, read)?;
                } else {
                    layout.write(folder, &plan.spec, read)?;
                }
                return Ok(tokenizer.save(folder)?);
            }
            SaveWriter::new(&plan.spec, dtype)
                .with_tokenizer(Some(tokenizer))
                .write(folder, |parameter, out| copy_out(|look| trainer.read_weight(parameter, look), out))?;
            Ok(())
        };
        let process_memory = || {
            let memory = process_memory().unwrap_or_default();
            (memory.resident.unwrap_or_default().0, memory.peak_resident.unwrap_or_default().0)
        };
        let connections = Connections {
            batches: &mut batches,
            validate: &mut measure,
            save_model: &save_model,
            process_memory: &process_memory,
            judge,
            observer,
            stop,
            ranks,
        };
        run(device, &mut trainer, &settings, progress, connections)
    }

    /// Sets the weights: from the checkpoint, from the model's files, or drawn at random.
    fn load(&self, trainer: &mut Trainer<'_>, plan: &TrainingPlan) -> Result<(), TrainError> {
        self.loaded(trainer, plan).map_err(|error| match &self.resumed {
            Some((checkpoint, _)) => checkpoint.broken(error),
            None => error,
        })
    }

    fn loaded(&self, trainer: &mut Trainer<'_>, plan: &TrainingPlan) -> Result<(), TrainError> {
        if let (Some(adapters), Some(base)) = (plan.choice.settings.method.adapters(), self.origin.weights())
        {
            return self.load_adapters(trainer, &adapters.layout, base);
        }
        if let Some((checkpoint, _)) = &self.resumed {
            let files = ModelFiles::open(&checkpoint.path)?;
            trainer.load::<TrainError>(|p, rows, dtype, out| {
                Ok(files.weights().read_rows_into(p, rows, dtype, out)?)
            })?;
            return checkpoint.read_optimizer(trainer);
        }
        match &self.origin {
            ModelOrigin::Files(files) => {
                trainer.load(|p, rows, dtype, out| Ok(files.weights().read_rows_into(p, rows, dtype, out)?))
            }
            ModelOrigin::Scratch(spec, _) | ModelOrigin::Catalogue(spec) => {
                let seed = self.config.training.seed();
                trainer.load(|p, rows, dtype, out| Ok(init::fill(p, rows, spec, seed, dtype, out)?))
            }
        }
    }

    /// Sets the frozen weights from the model's files, and the adapters from the checkpoint or to their first values.
    fn load_adapters(
        &self,
        trainer: &mut Trainer<'_>,
        layout: &AdapterLayout,
        base: &WeightSource,
    ) -> Result<(), TrainError> {
        let spec = self.origin.spec();
        if layout.config().start.changes_base() {
            return self.load_beside_residuals(trainer, layout, base);
        }
        if let Some((checkpoint, _)) = &self.resumed {
            let set = AdapterSet::for_layout(&checkpoint.path, spec, layout)?;
            trainer.load::<TrainError>(|p, rows, dtype, out| {
                Ok(set.read_rows_into(spec, base, p, rows, dtype, out)?)
            })?;
            return checkpoint.read_optimizer(trainer);
        }
        let seed = self.config.training.seed();
        trainer.load::<TrainError>(|p, rows, dtype, out| {
            if matches!(p.role, Role::Lora(..)) {
                return Ok(layout.write_first_values(p, seed, dtype, out)?);
            }
            Ok(base.read_rows_into(p, rows, dtype, out)?)
        })?;
        Ok(trainer.reset_magnitudes()?)
    }

    /// The same where the adapters begin with a part of the weights, of which the frozen ones are what is left. The first
    /// values lie in the run's folder, for what is written as an adapter is what was trained less them.
    fn load_beside_residuals(
        &self,
        trainer: &mut Trainer<'_>,
        layout: &AdapterLayout,
        base: &WeightSource,
    ) -> Result<(), TrainError> {
        let spec = self.origin.spec();
        let folder = self.folder.path().join(INITIAL_ADAPTER);
        if let Some((checkpoint, _)) = &self.resumed {
            let (trained, first) = Adapter::open(&checkpoint.path, spec)?.split(layout)?;
            first.save(&folder)?;
            let first = FirstValues::open(&folder)?;
            let set = AdapterSet::of(trained, &checkpoint.path, layout)?;
            trainer.load::<TrainError>(|p, rows, dtype, out| {
                if layout.adapts(p) {
                    return Ok(first.residual_rows_into(layout, spec, base, p, rows, dtype, out)?);
                }
                Ok(set.read_rows_into(spec, base, p, rows, dtype, out)?)
            })?;
            return checkpoint.read_optimizer(trainer);
        }
        let first = layout.first_folder(&folder, spec, base, self.config.training.seed())?;
        trainer.load::<TrainError>(|p, rows, dtype, out| {
            if matches!(p.role, Role::Lora(..)) {
                return Ok(encode(&first.values(layout, spec, p)?, dtype, out)?);
            }
            Ok(first.residual_rows_into(layout, spec, base, p, rows, dtype, out)?)
        })?;
        Ok(trainer.reset_magnitudes()?)
    }

    fn run_settings(&self, plan: &TrainingPlan, output: &Path) -> RunSettings {
        let training = &plan.config.training;
        let sequences = plan.choice.sequences();
        let every = |steps: u64| (steps > 0).then_some(steps);
        let time = &plan.choice.time;
        RunSettings {
            output: output.to_owned(),
            schedule: Schedule::of(&plan.config, sequences, self.total_steps(plan)),
            accumulation: plan.choice.accumulation,
            skip_not_finite: training.not_finite() == NotFinite::Skip,
            save_steps: every(plan.config.output.save_steps()),
            save_total_limit: Some(plan.config.output.save_total_limit()),
            eval_steps: every(plan.config.output.eval_steps()),
            metrics: MetricsFormats {
                csv: plan.config.output.csv(),
                tensorboard: plan.config.output.tensorboard(),
            },
            final_model: plan.config.output.final_model(),
            data_tokens: self.train.tokens(),
            load_line: plan.load_line.bytes,
            silent: plan.config.memory.silent_mode(),
            planned: Planned {
                device_peak_bytes: plan.peak_bytes(),
                overhead_bytes: plan.overhead_bytes,
                host_peak_bytes: plan.host_bytes(),
                pipeline_bytes: plan.pipeline_bytes(),
                disk_bytes: plan.disk_bytes(),
                // Reading a tokenizer and measuring the machine took memory for a moment.
                process_bytes: plan.process_bytes().max(highest_so_far()),
                step_seconds: time.step_seconds,
                tokens_per_second: time.tokens_per_second,
            },
        }
    }
}

/// The most that the process has taken so far; 0 where the system does not say.
fn highest_so_far() -> u64 {
    process_memory().and_then(|memory| memory.peak_resident).map_or(0, |size| size.0)
}

/// Mean loss over all windows of a data set, whose batches the ranks take in turn; those that share sequences or
/// layers take the same. With it the bytes of a batch.
fn validation_loss(
    trainer: &mut Trainer<'_>,
    dataset: &Dataset,
    ranks: &dyn Communicator,
) -> Result<Validated, TrainError> {
    let (mut sum, mut weight) = (0.0, 0.0);
    let batch_size = trainer.settings().evaluated();
    let mut batch = dataset.buffer(batch_size);
    let batches = dataset.windows().div_ceil(batch_size.max(1));
    let (place, mesh) = (trainer.settings().ranks.place(), trainer.settings().ranks.mesh);
    // Ranks with different experts take the same, since the last batch may have fewer sequences than others.
    let experts = mesh.expert.max(1);
    let (rank, size) = (u64::from(place.data / experts), u64::from(mesh.data / experts));
    for round in 0..batches.div_ceil(size) {
        // Weights that ranks share come together on all of them: who has no batch left takes the last one without counting it.
        let number = round * size + rank;
        let first = number.min(batches - 1) * batch_size;
        let end = (first + batch_size).min(dataset.windows());
        dataset.fill(first, end - first, &mut batch)?;
        let micro_batch = micro_batch(&batch);
        let (loss, _) = trainer.evaluate(end - first, &micro_batch)?;
        if number < batches {
            let counted = if place.leads() && place.expert == 0 { micro_batch.target_weight() } else { 0.0 };
            (sum, weight) = (sum + loss, weight + counted);
        }
    }
    let (sum, weight) = (ranks.sum(sum)?, ranks.sum(weight)?);
    Ok((if weight > 0.0 { sum / weight } else { 0.0 }, batch.bytes()))
}

/// The tiers below the device, of the planned sizes.
fn open_tiers(device: &dyn Device, plan: &TrainingPlan) -> Result<LowerTiers, TrainError> {
    let (host, disk) = (plan.choice.dry_run.host_bytes(), plan.disk_bytes());
    if plan.choice.settings.offload.is_none() {
        return Ok(LowerTiers::default());
    }
    let budget = plan.config.memory.disk_budget().set().map(|size| size.0);
    let spill = SpillSettings { folder: plan.config.disk_path(), budget, direct: true };
    Ok(LowerTiers::open(device.host_memory(host)?, disk, &spill)?)
}

/// The threads of the data pipeline.
fn workers(config: &RawConfig) -> Workers {
    let data = &config.data;
    Workers {
        count: data.workers(),
        prefetch_factor: data.prefetch_factor(),
        persistent: data.persistent_workers(),
    }
}

/// What a thread takes is what plans say that it takes.
const _: () = assert!(Workers::STACK_BYTES == Machine::WORKER_BYTES);

#[cfg(test)]
mod tests;
