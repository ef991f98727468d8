//! Checkpoints: folders `checkpoint-N` that are whole or absent, from which a run continues to the same bits.
//!
//! A checkpoint holds the model as an HF folder, `optimizer.safetensors` (`NAME.exp_avg`, `NAME.master` and whatever else
//! the optimizer remembers, bytes as they are) and `trainer_state.json`. It is written under another name, synced, and renamed.

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use plimsoll_device::DType;
use plimsoll_model::{AdapterError, NewTensor, SafetensorsFile, StoredDType, write_tensors};
use plimsoll_step::{LossScale, NamedTensor, StateKind, StepError, StepProgress, Trainer};
use serde::{Deserialize, Serialize};

use crate::TrainError;

/// Where a run stands.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TrainerState {
    /// Version of this layout.
    pub version: u32,
    /// Optimizer steps done.
    pub step: u64,
    /// Updates of the weights: steps less those that were skipped.
    pub updates: u64,
    /// Global gradient norm of the last update.
    pub grad_norm: Option<f64>,
    /// The loss scale, where there is one.
    pub loss_scale: Option<LossScaleState>,
    /// Training windows consumed since the beginning.
    pub windows: u64,
    /// Tokens seen.
    pub tokens: u64,
    /// What the data was, so that a resumed run sees the same.
    pub data: String,
    /// The optimizer whose states these are.
    #[serde(default = "first_optimizer")]
    pub optimizer: String,
}

/// The one optimizer that there was when states did not name theirs.
fn first_optimizer() -> String {
    "adamw".to_owned()
}

/// A dynamic loss scale: see [`LossScale`].
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct LossScaleState {
    pub scale: f64,
    pub good_steps: u64,
    pub skipped_steps: u64,
}

impl TrainerState {
    /// What the step itself needs to continue from here.
    pub(crate) fn progress(&self, fresh: StepProgress) -> StepProgress {
        let loss_scale = self.loss_scale.map(|LossScaleState { scale, good_steps, skipped_steps }| {
            LossScale { scale, good_steps, skipped_steps }
        });
        StepProgress {
            steps: self.updates,
            grad_norm: self.grad_norm,
            loss_scale: fresh.loss_scale.and(loss_scale).or(fresh.loss_scale),
        }
    }

    /// Takes over where the step stands.
    pub(crate) fn take(&mut self, progress: StepProgress) {
        self.updates = progress.steps;
        self.grad_norm = progress.grad_norm;
        self.loss_scale = progress.loss_scale.map(|LossScale { scale, good_steps, skipped_steps }| {
            LossScaleState { scale, good_steps, skipped_steps }
        });
    }
}

/// The layout that this version writes.
pub(crate) const VERSION: u32 = 2;

const PREFIX: &str = "checkpoint-";
/// What comes before the name of a checkpoint that is being replaced.
const ASIDE: &str = ".old-";
const OPTIMIZER: &str = "optimizer.safetensors";
const STATE: &str = "trainer_state.json";

/// A whole checkpoint on disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checkpoint {
    /// Its folder.
    pub path: PathBuf,
    /// Optimizer steps done.
    pub step: u64,
}

impl Checkpoint {
    /// The whole checkpoints of a run, oldest first. Half-written ones have another name and are not among them.
    pub fn list(run: &Path) -> Result<Vec<Checkpoint>, TrainError> {
        let entries = match std::fs::read_dir(run) {
            Ok(entries) => entries,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(e) => return Err(TrainError::io("list", run, e)),
        };
        let mut found = Vec::new();
        for entry in entries {
            let entry = entry.map_err(|e| TrainError::io("list", run, e))?;
            let name = entry.file_name();
            let step = name.to_str().and_then(|n| n.strip_prefix(PREFIX)).and_then(|n| n.parse().ok());
            if let Some(step) = step {
                found.push(Checkpoint { path: entry.path(), step });
            }
        }
        found.sort_by_key(|c| c.step);
        Ok(found)
    }

    /// Whether a run has none, not even one that was put aside for a new one.
    pub fn is_none_left(run: &Path) -> bool {
        let is_one = |entry: &std::fs::DirEntry| {
            let name = entry.file_name();
            let name = name.to_str().map(|name| name.strip_prefix(ASIDE).unwrap_or(name));
            name.is_some_and(|name| name.starts_with(PREFIX))
        };
        std::fs::read_dir(run).is_ok_and(|mut entries| !entries.any(|entry| entry.as_ref().is_ok_and(is_one)))
    }

    /// Writes a checkpoint of `trainer` into the run's folder. `save_model` writes the model's files.
    pub fn write(
        run: &Path,
        state: &TrainerState,
        trainer: &Trainer<'_>,
        save_model: impl FnOnce(&Path) -> Result<(), TrainError>,
    ) -> Result<Checkpoint, TrainError> {
        let path = run.join(format!("{PREFIX}{}", state.step));
        // Dropped on any failure, and with it what was written.
        let aside = tempfile::Builder::new()
            .prefix(".writing-checkpoint-")
            .tempdir_in(run)
            .map_err(|e| TrainError::io("create a folder in", run, e))?;
        save_model(aside.path())?;
        let tensors: Vec<NamedTensor> =
            trainer.state()?.into_iter().filter(|t| t.kind != StateKind::Weight).collect();
        write_named(&aside.path().join(OPTIMIZER), trainer, &tensors)?;
        let json = serde_json::to_vec_pretty(state)
            .map_err(|e| TrainError::io("write", aside.path(), io::Error::other(e)))?;
        crate::write_whole(&aside.path().join(STATE), &json)?;
        make_public(aside.path());
        sync_folder(aside.path());
        let old = run.join(format!("{ASIDE}{PREFIX}{}", state.step));
        if path.exists() {
            // A resumed run may come by the same step again.
            std::fs::rename(&path, &old).map_err(|e| TrainError::io("replace", &path, e))?;
        }
        let aside = aside.keep();
        std::fs::rename(&aside, &path).map_err(|e| TrainError::io("rename a folder to", &path, e))?;
        sync_folder(run);
        if old.exists() {
            std::fs::remove_dir_all(&old).map_err(|e| TrainError::io("remove", &old, e))?;
        }
        Ok(Checkpoint { path, step: state.step })
    }

    /// The one in a folder; its state says which step it is of.
    pub(crate) fn at(path: &Path) -> Checkpoint {
        Checkpoint { path: path.to_owned(), step: 0 }
    }

    /// The same on a rank that is not the first one: where it cannot be read, this machine does not have what rank 0 has.
    pub(crate) fn of_first_rank(path: &Path) -> Result<(Checkpoint, TrainerState), TrainError> {
        let checkpoint = Checkpoint::at(path);
        let state = checkpoint.state().map_err(|error| match error {
            TrainError::BrokenCheckpoint { source, .. } => TrainError::UnseenCheckpoint { source },
            other => other,
        })?;
        Ok((Checkpoint { step: state.step, ..checkpoint }, state))
    }

    /// The files that a run reads to go on from it.
    pub(crate) fn files(&self) -> Result<Vec<PathBuf>, TrainError> {
        let failed = |e| TrainError::io("list", &self.path, e);
        let mut files = Vec::new();
        for entry in std::fs::read_dir(&self.path).map_err(failed)? {
            let path = entry.map_err(failed)?.path();
            let is_tensors = path.extension().is_some_and(|extension| extension == "safetensors");
            if is_tensors || path.file_name().is_some_and(|name| name == STATE) {
                files.push(path);
            }
        }
        files.sort();
        Ok(files)
    }

    /// The run's position at this checkpoint.
    pub fn state(&self) -> Result<TrainerState, TrainError> {
        let path = self.path.join(STATE);
        let bytes = std::fs::read(&path).map_err(|e| self.broken(TrainError::io("read", &path, e)))?;
        let state: TrainerState = serde_json::from_slice(&bytes).map_err(|e| {
            self.instead(TrainError::Checkpoint { path: path.clone(), reason: e.to_string() })
        })?;
        if state.version != VERSION {
            let reason = format!(
                "it was written by another version (layout {}, this one reads {VERSION}); start a new run from its model instead",
                state.version
            );
            return Err(TrainError::Checkpoint { path, reason });
        }
        Ok(state)
    }

    /// An error of loading it, with what else there is to resume from where one of its files is to blame.
    pub(crate) fn broken(&self, error: TrainError) -> TrainError {
        use TrainError::{Adapter, Io, Model, Safetensors};
        let is_of_file = match &error {
            // What was asked for is another thing than what is there.
            Adapter(AdapterError::Layout(_)) => false,
            Io { source, .. } => source.kind() != io::ErrorKind::PermissionDenied,
            Adapter(_) | Model(_) | Safetensors(_) => true,
            _ => false,
        };
        match is_of_file && error.to_string().contains(&*self.path.to_string_lossy()) {
            true => self.instead(error),
            false => error,
        }
    }

    /// An error of one of its files, with the checkpoint before it.
    fn instead(&self, error: TrainError) -> TrainError {
        let all = self.path.parent().and_then(|run| Checkpoint::list(run).ok()).unwrap_or_default();
        let earlier = all.into_iter().rev().find(|other| other.step < self.step).map(|other| other.path);
        TrainError::BrokenCheckpoint { path: self.path.clone(), source: Box::new(error), earlier }
    }

    /// Reads moments and masters back into `trainer`. Weights are the model folder's.
    pub fn read_optimizer(&self, trainer: &mut Trainer<'_>) -> Result<(), TrainError> {
        let path = self.path.join(OPTIMIZER);
        let file = SafetensorsFile::open(&path)?;
        let wanted: Vec<NamedTensor> =
            trainer.state()?.into_iter().filter(|t| t.kind != StateKind::Weight).collect();
        if file.tensors().len() != wanted.len() {
            let reason = format!(
                "it holds {} tensors, the run needs {}; was it written with other training.master_weights or training.optimizer_options? Its run's plimsoll.yaml says",
                file.tensors().len(),
                wanted.len()
            );
            return Err(TrainError::Checkpoint { path, reason });
        }
        for named in wanted {
            let name = stored_name(&named);
            let fail = |reason: String| TrainError::Checkpoint { path: path.clone(), reason };
            let stored = file.tensor(&name).ok_or_else(|| fail(format!("it has no {name}")))?;
            let bytes = file.bytes(&name).ok_or_else(|| fail(format!("it has no {name}")))?;
            if stored.dtype != stored_dtype(named.dtype) || bytes.len() as u64 != named.bytes() {
                let want = &named.shape;
                return Err(fail(format!("{name} is {:?}, the run needs {want:?}", stored.shape)));
            }
            let mut rest = bytes;
            trainer.write_state(&named, &mut |out| {
                let (part, later) = rest.split_at(out.len().min(rest.len()));
                out.iter_mut().zip(part).for_each(|(out, byte)| *out = *byte);
                rest = later;
            })?;
            file.release(stored);
        }
        Ok(())
    }
}

/// Removes the oldest checkpoints beyond `limit`, and what killed runs left half-written.
pub(crate) fn tidy(run: &Path, limit: Option<u64>) -> Result<(), TrainError> {
    let all = Checkpoint::list(run)?;
    let surplus = limit.map_or(0, |limit| all.len().saturating_sub(limit.max(1) as usize));
    for checkpoint in &all[..surplus] {
        std::fs::remove_dir_all(&checkpoint.path)
            .map_err(|e| TrainError::io("remove", &checkpoint.path, e))?;
    }
    Ok(())
}

/// Restores the name of a checkpoint that a killed run had put aside for a new one, where the new one is missing.
pub(crate) fn put_back(run: &Path) -> Result<(), TrainError> {
    let entries = std::fs::read_dir(run).map_err(|e| TrainError::io("list", run, e))?;
    for entry in entries.flatten() {
        let name = entry.file_name();
        let Some(name) = name.to_str().and_then(|name| name.strip_prefix(ASIDE)) else { continue };
        let (old, path) = (entry.path(), run.join(name));
        let step = name.strip_prefix(PREFIX).and_then(|step| step.parse().ok());
        let whole =
            |step| Checkpoint { path: old.clone(), step }.state().is_ok_and(|state| state.step == step);
        if step.is_some_and(whole) && !path.exists() {
            std::fs::rename(&old, &path).map_err(|e| TrainError::io("rename a folder to", &path, e))?;
        }
    }
    Ok(())
}

/// Removes what a killed run left behind under its working names.
pub(crate) fn sweep(run: &Path) -> Result<(), TrainError> {
    sweep_named(run, &[".writing-", ".saving-", ".old-checkpoint-"])
}

/// Removes files and folders of a run whose names begin so.
pub(crate) fn sweep_named(run: &Path, prefixes: &[&str]) -> Result<(), TrainError> {
    let entries = std::fs::read_dir(run).map_err(|e| TrainError::io("list", run, e))?;
    for entry in entries.flatten() {
        let name = entry.file_name();
        let Some(name) = name.to_str() else { continue };
        let path = entry.path();
        if prefixes.iter().any(|prefix| name.starts_with(prefix)) {
            let removed =
                if path.is_dir() { std::fs::remove_dir_all(&path) } else { std::fs::remove_file(&path) };
            removed.map_err(|e| TrainError::io("remove", &path, e))?;
        }
    }
    Ok(())
}

fn write_named(path: &Path, trainer: &Trainer<'_>, tensors: &[NamedTensor]) -> Result<(), TrainError> {
    let new: Vec<NewTensor> = tensors
        .iter()
        .map(|t| NewTensor { name: stored_name(t), dtype: stored_dtype(t.dtype), shape: t.shape.clone() })
        .collect();
    let by_name: std::collections::HashMap<String, &NamedTensor> =
        tensors.iter().map(|t| (stored_name(t), t)).collect();
    write_tensors(path, &[("format", "pt")], &new, |tensor, out| match by_name.get(&tensor.name) {
        Some(named) => copy_out(|look| trainer.read_state(named, look), out),
        None => Err(io::Error::other("no such tensor")),
    })?;
    Ok(())
}

/// Writes bytes as they are shown, part by part.
pub(crate) fn copy_out(
    show: impl FnOnce(&mut dyn FnMut(&[u8])) -> Result<(), StepError>,
    out: &mut dyn Write,
) -> io::Result<()> {
    let mut outcome = Ok(());
    show(&mut |bytes| {
        if outcome.is_ok() {
            outcome = out.write_all(bytes);
        }
    })
    .map_err(io::Error::other)?;
    outcome
}

/// What a checkpoint calls a tensor: by its parameter, and by what the tensor is to that.
fn stored_name(tensor: &NamedTensor) -> String {
    let kind = match tensor.kind {
        StateKind::Weight => "weight",
        StateKind::Master => "master",
        StateKind::FirstMoment => "exp_avg",
        StateKind::SecondMoment => "exp_avg_sq",
        StateKind::FirstMomentAbsmax => "exp_avg_absmax",
        StateKind::SecondMomentAbsmax => "exp_avg_sq_absmax",
        StateKind::SecondMomentRows => "exp_avg_sq_row",
        StateKind::SecondMomentColumns => "exp_avg_sq_col",
        StateKind::Projection => "projection",
        StateKind::UpdateNorm => "update_norm",
    };
    format!("{}.{kind}", tensor.name)
}

fn stored_dtype(dtype: DType) -> StoredDType {
    StoredDType::from_device(dtype).unwrap_or(StoredDType::F32)
}

/// Temporary folders are the owner's alone; a checkpoint has the permissions of any other folder.
fn make_public(path: &Path) {
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        // Where this is refused the checkpoint stays private, which loses nothing.
        let _ = std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755));
    }
    #[cfg(not(unix))]
    let _ = path;
}

/// Makes the names in a folder outlive a power cut.
pub(crate) fn sync_folder(folder: &Path) {
    if let Ok(folder) = std::fs::File::open(folder) {
        // Some file systems cannot sync folders; the files themselves are already synced.
        let _ = folder.sync_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder with a checkpoint's state, or without one.
    fn left(run: &Path, name: &str, step: Option<u64>) {
        let folder = run.join(name);
        std::fs::create_dir(&folder).unwrap();
        std::fs::write(folder.join("from"), name).unwrap();
        let Some(step) = step else { return };
        let state = TrainerState {
            version: VERSION,
            step,
            updates: step,
            grad_norm: None,
            loss_scale: None,
            windows: 0,
            tokens: 0,
            data: String::new(),
            optimizer: first_optimizer(),
        };
        std::fs::write(folder.join(STATE), serde_json::to_vec(&state).unwrap()).unwrap();
    }

    /// Whole, of the step that its name says, and with nothing in its place.
    #[test]
    fn what_was_put_aside_comes_back_where_it_is_whole_and_nothing_took_its_place() {
        let run = tempfile::tempdir().unwrap();
        left(run.path(), ".old-checkpoint-1", Some(1));
        left(run.path(), ".old-checkpoint-2", Some(2));
        left(run.path(), "checkpoint-2", Some(2));
        left(run.path(), ".old-checkpoint-3", None);
        left(run.path(), ".old-checkpoint-4", Some(5));
        left(run.path(), ".old-something", Some(1));
        put_back(run.path()).unwrap();
        let found = Checkpoint::list(run.path()).unwrap();
        let from = |checkpoint: &Checkpoint| {
            (checkpoint.step, std::fs::read_to_string(checkpoint.path.join("from")).unwrap())
        };
        let expected = [(1, ".old-checkpoint-1".to_owned()), (2, "checkpoint-2".to_owned())];
        assert_eq!(found.iter().map(from).collect::<Vec<_>>(), expected);
        for name in ["checkpoint-2", "checkpoint-3", "checkpoint-4"] {
            assert!(run.path().join(format!("{ASIDE}{name}")).exists(), "{name}");
        }
    }

    #[test]
    #[cfg(unix)]
    fn a_checkpoint_may_be_read_by_others() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o700)).unwrap();
        make_public(folder.path());
        assert_eq!(std::fs::metadata(folder.path()).unwrap().permissions().mode() & 0o777, 0o755);
    }
}
