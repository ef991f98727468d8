//! From a configuration to a run: opens the model, reads the data, plans, and starts the loop.

use std::path::{Path, PathBuf};

use plimsoll_data::{Batches, Dataset, DatasetOptions};
use plimsoll_device::{DType, Device};
use plimsoll_memory::ByteSize;
use plimsoll_model::tokenizer::Tokenizer;
use plimsoll_model::{ModelFiles, SaveWriter, init};
use plimsoll_parallel::Solo;
use plimsoll_plan::config::{LrSchedule, RawConfig, TrainingLength};
use plimsoll_plan::hardware::process_memory;
use plimsoll_plan::{Machine, ModelOrigin, OriginError, TrainingPlan};
use plimsoll_step::{MicroBatch, Trainer};

use crate::checkpoint::{Checkpoint, TrainerState, copy_out};
use crate::run::{Connections, RunSettings, TrainingOutcome, run};
use crate::{Decay, Observer, Planned, Schedule, StopFlag, TrainError};

/// The configuration as it was resolved, saved with the run.
const CONFIG_FILE: &str = "plimsoll.yaml";

/// A run that has its model and its data and needs a plan and a device.
pub struct Prepared {
    config: RawConfig,
    origin: ModelOrigin,
    tokenizer: Tokenizer,
    train: Dataset,
    validation: Option<Dataset>,
    resumed: Option<(Checkpoint, TrainerState)>,
}

/// Host memory that the data pipeline holds for each token of a micro-batch.
pub fn host_bytes_per_token(config: &RawConfig) -> u64 {
    // A batch holds a token and a target of 4 bytes each; as many are ready as the pipeline works ahead, one is being
    // made and the step holds its own.
    let ahead = if config.data.num_workers().set() == Some(0) { 0 } else { config.data.prefetch_factor() + 1 };
    8 * (ahead + 1)
}

impl Prepared {
    /// Opens the model and reads the data. The output folder is made; one that holds a run is refused unless it is to
    /// be continued.
    pub fn new(config: RawConfig, resume: bool) -> Result<Prepared, TrainError> {
        let train_paths = config.training_data()?.patterns().to_vec();
        let origin = ModelOrigin::find(&config)?;
        let tokenizer = match &origin {
            ModelOrigin::Files(files) => files.tokenizer()?,
            ModelOrigin::Scratch(_, tokenizer) => (**tokenizer).clone(),
            ModelOrigin::Catalogue(spec) => {
                return Err(OriginError::NoWeights { name: spec.name.clone(), purpose: "train" }.into());
            }
        };
        let output = config.output.dir();
        let resumed = open_output(&output, resume)?;
        let options = |patterns: Vec<String>, shuffle| DatasetOptions {
            patterns,
            text_field: config.data.text_field(),
            append_eos: config.data.append_eos(),
            sequence_length: config.data.sequence_length(),
            shuffle,
            seed: config.data.seed.unwrap_or(config.training.seed()),
        };
        let train = Dataset::open(options(train_paths, config.data.shuffle()), &tokenizer, &output)?;
        let validation = match &config.data.validation {
            Some(paths) => Some(Dataset::open(options(paths.patterns().to_vec(), false), &tokenizer, &output)?),
            None => None,
        };
        if let Some((checkpoint, state)) = &resumed
            && state.data != train.identity()
        {
            let reason = "the training data, the tokenizer or the way they are cut has changed since it was written; restore them or start a new run from its model".to_owned();
            return Err(TrainError::Checkpoint { path: checkpoint.path.clone(), reason });
        }
        Ok(Prepared { config, origin, tokenizer, train, validation, resumed })
    }

    /// Host memory of the data pipeline for each token of a micro-batch.
    pub fn host_bytes_per_token(&self) -> u64 {
        host_bytes_per_token(&self.config)
    }

    /// Plans the run for a machine.
    pub fn plan(&self, machine: &Machine) -> Result<TrainingPlan, TrainError> {
        Ok(TrainingPlan::new(&self.config, self.origin.spec(), machine)?)
    }

    /// Trains on a device whose arena has the plan's size.
    pub fn run<D: Device>(
        self,
        device: &D,
        plan: &TrainingPlan,
        observer: &mut dyn Observer,
        stop: StopFlag,
    ) -> Result<TrainingOutcome, TrainError> {
        let output = plan.config.output.dir();
        let yaml = plan.config.to_yaml()?;
        crate::write_whole(&output.join(CONFIG_FILE), yaml.as_bytes())?;
        let settings = self.run_settings(plan, &output);
        let mut trainer = Trainer::new(device, plan.spec.clone(), plan.choice.settings.clone(), &Solo)?;
        self.load(device, &mut trainer)?;

        let batch_size = plan.choice.settings.batch_size as usize;
        let data = &plan.config.data;
        let ahead = if data.num_workers().set() == Some(0) { 0 } else { data.prefetch_factor() as usize };
        let start = self.resumed.map(|(_, state)| state);
        let windows = start.as_ref().map_or(0, |state| state.windows);
        let mut batches = Batches::start(self.train, batch_size, ahead, windows)?;
        let mut next_batch = || Ok(batches.next_batch()?);
        let mut validate = |trainer: &mut Trainer<'_, D>, set: &Dataset| validation_loss(trainer, set, batch_size);
        let mut validation = self.validation;
        let mut measure = |trainer: &mut Trainer<'_, D>| match &mut validation {
            Some(set) => validate(trainer, set),
            None => Ok(f64::NAN),
        };
        let has_validation = plan.config.data.validation.is_some();
        let tokenizer = &self.tokenizer;
        let spec = &plan.spec;
        let dtype = plan.choice.settings.precision.weights;
        let save_model = |trainer: &Trainer<'_, D>, folder: &Path| -> Result<(), TrainError> {
            SaveWriter::new(spec, dtype).write(folder, |parameter, out| {
                let tensor = trainer.weight(parameter).map_err(std::io::Error::other)?;
                copy_out(device, tensor, out)
            })?;
            Ok(tokenizer.save(folder)?)
        };
        let process_memory = || {
            let memory = process_memory().unwrap_or_default();
            (memory.resident.unwrap_or_default().0, memory.peak_resident.unwrap_or_default().0)
        };
        let connections = Connections {
            next_batch: &mut next_batch,
            validate: if has_validation { Some(&mut measure) } else { None },
            save_model: &save_model,
            process_memory: &process_memory,
            observer,
            stop,
        };
        run(device, &mut trainer, &settings, start, connections)
    }
}
