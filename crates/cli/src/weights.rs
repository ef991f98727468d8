//! The weights that a command answers or measures with: a model's files, the type that each is kept in, and adapters.

use std::io::ErrorKind;
use std::ops::Range;
use std::path::Path;

use plimsoll_device::DType;
use plimsoll_memory::Tier;
use plimsoll_model::adapter::{ADAPTER_CONFIG_NAME, Adapter, AdapterSet};
use plimsoll_model::{
    AdapterLayout, BlockId, LoraPart, ModelFiles, ModelSpec, Parameter, Role, StoredWeights, Substitute,
    TypesByGroup,
};
use plimsoll_parallel::{Collectives, Communicator};
use plimsoll_plan::quantized_as;
use plimsoll_step::{Precision, Residency, Stage, WeightOffload, WeightStorage};
use plimsoll_train::TrainError;

use crate::args::WeightArgs;
use crate::by_group::quantized_types;
use crate::failure::Failure;
use crate::models;
use crate::output::errln;
use crate::session::inference_precision;

/// What is read, and as what.
pub struct Weights {
    pub files: Box<ModelFiles>,
    pub precision: Precision,
    /// What `--quantize` says.
    quantized: TypesByGroup,
    adapters: Option<AdapterSet>,
    in_files: StoredWeights,
    /// The layers that this rank has, and adapters of theirs, where there are others.
    part: Option<(ModelSpec, Option<AdapterLayout>)>,
}

impl Weights {
    /// Opens the files and reads the adapters. `purpose` says what they are for; a model of the hub is fetched without a
    /// word where `quiet`.
    pub fn open(args: &WeightArgs, purpose: &'static str, quiet: bool) -> Result<Weights, Failure> {
        let precision = inference_precision(&args.dtype, args.quantize_activations)?;
        let files = models::with_weights(&args.model, purpose, quiet)?;
        let quantized = quantized_types(args.quantize.as_deref(), files.spec())?;
        let adapters = match args.adapter.as_slice() {
            [] => None,
            given => {
                let folders = folders_and_weights(given)?;
                Some(AdapterSet::open(&folders, files.spec()).map_err(TrainError::from)?)
            }
        };
        if let Some(set) = adapters.as_ref().filter(|_| !quiet) {
            for (adapter, _) in set.adapters().iter().filter(|(a, _)| !a.config().unknown.is_empty()) {
                let keys = adapter.config().unknown.join(", ");
                errln!("note: adapter_config.json has keys that are not known here: {keys}");
            }
        }
        for (adapter, _) in adapters.iter().flat_map(|set| set.adapters()).filter(|_| !quiet) {
            if let Some(base) = another_base(adapter, &args.model) {
                errln!("note: an adapter was trained on {base}, and the model is {}", args.model);
            }
        }
        let mut substitutes = Vec::new();
        for p in files.spec().parameters().iter().filter(|_| !quiet) {
            let Some(wanted) = quantized.of(p).filter(|_| p.role.is_block_matrix()) else { continue };
            match quantized_as(p, wanted) {
                Some(used @ (DType::Q5_0 | DType::Q8_0)) => Substitute::count(&mut substitutes, wanted, used),
                Some(_) => {}
                None => {
                    let stored = files.weights().inference_dtype(p, precision.weights);
                    Substitute::count(&mut substitutes, wanted, stored);
                }
            }
        }
        substitutes.iter().for_each(|substitute| errln!("note: {substitute}"));
        let in_files = StoredWeights::new();
        let mut weights = Weights { files, precision, quantized, adapters, in_files, part: None };
        weights.in_files = weights.find_in_files();
        Ok(weights)
    }

    pub fn spec(&self) -> &ModelSpec {
        self.files.spec()
    }

    /// Takes this rank's part of the layers.
    pub fn divide(&mut self, ranks: &dyn Communicator) -> Result<(), Failure> {
        let (spec, count) = (self.spec(), ranks.size());
        if ranks.is_alone() {
            return Ok(());
        }
        if spec.num_layers < count {
            return Err(Failure::usage(format!(
                "--ranks {count}: the model has {} layers; take {} or fewer",
                spec.num_layers, spec.num_layers
            )));
        }
        let part = Stage::part(spec, ranks.rank(), count);
        let blocks: Vec<BlockId> = part.blocks().collect();
        let own = |set: &AdapterSet| set.layout().of_blocks(&|block| blocks.contains(&block));
        self.part = Some((part, self.adapters.as_ref().map(own)));
        Ok(())
    }

    /// What this rank has of the model.
    pub fn own_spec(&self) -> &ModelSpec {
        self.part.as_ref().map_or(self.spec(), |(spec, _)| spec)
    }

    /// Which of this rank's tensors have adapters.
    fn adapters(&self) -> Option<&AdapterLayout> {
        match &self.part {
            Some((_, own)) => own.as_ref(),
            None => self.adapters.as_ref().map(AdapterSet::layout),
        }
    }

    /// The type in which a weight is kept: linears of the blocks as `--quantize` says, where their rows are whole blocks
    /// of it; all else as the files suggest.
    pub fn weight_type(&self, p: &Parameter) -> DType {
        let p = &self.spec().original(p);
        let quantized = self.quantized.of(p).and_then(|dtype| quantized_as(p, dtype));
        quantized.unwrap_or_else(|| self.files.weights().inference_dtype(p, self.precision.weights))
    }

    /// Whether weights can be streamed. With DoRA they cannot: the lengths of the rows of all weights are taken before the
    /// first token.
    pub fn can_stream(&self) -> bool {
        let lengths = |p: &Parameter| matches!(p.role, Role::Lora(LoraPart::Magnitude, _));
        self.adapters.as_ref().is_none_or(|set| !set.layout().parameters().iter().any(lengths))
    }

    /// Where the files hold weights as they are computed with.
    fn find_in_files(&self) -> StoredWeights {
        let replaced = |p: &Parameter| self.adapters.as_ref().is_some_and(|set| set.replaces(self.spec(), p));
        let parameters = self.spec().parameters().into_iter().filter(|p| !replaced(p));
        let stored = |p: Parameter| {
            let stored = self.files.weights().stored_as(&p, self.weight_type(&p))?;
            Some(((p.block, p.role), stored))
        };
        parameters.filter_map(stored).collect()
    }

    /// The same.
    pub fn in_files(&self) -> &StoredWeights {
        &self.in_files
    }

    /// How the weights are held, in these types: all in memory, or but for those that stay on disk.
    pub fn storage<'s>(
        &'s self,
        types: &'s dyn Fn(&Parameter) -> DType,
        residency: Option<Residency>,
    ) -> WeightStorage<'s> {
        let in_files = Some(&self.in_files);
        let offload = residency.map(|residency| WeightOffload {
            tier: Tier::Disk,
            in_files,
            residency,
            host_layers: 0,
        });
        WeightStorage { types, adapters: self.adapters(), trained: false, offload }
    }

    /// Writes the values of some rows of a parameter, of this rank's part or of the model.
    pub fn read_rows_into(
        &self,
        p: &Parameter,
        rows: Range<u64>,
        dtype: DType,
        out: &mut [u8],
    ) -> Result<(), TrainError> {
        let (base, p) = (self.files.weights(), &self.spec().original(p));
        let read = match &self.adapters {
            Some(set) => set.read_rows_into(self.spec(), base, p, rows, dtype, out),
            None => base.read_rows_into(p, rows, dtype, out),
        };
        base.release_all();
        Ok(read?)
    }
}

/// Refuses what [`Weights::open`] would refuse, as far as that is seen at once: before ranks are started that would all say it. A model
/// of the hub is not fetched for that.
pub fn check(args: &WeightArgs, purpose: &'static str, quiet: bool) -> Result<(), Failure> {
    inference_precision(&args.dtype, args.quantize_activations)?;
    if !models::is_of_hub(&args.model) {
        let files = models::with_weights(&args.model, purpose, quiet)?;
        quantized_types(args.quantize.as_deref(), files.spec())?;
    }
    folders_and_weights(&args.adapter).map(drop)
}

/// What `--adapter` says, once or several times.
///
/// # Errors
/// A folder is not there, or is no adapter's; or a weight is none.
pub fn folders_and_weights(given: &[String]) -> Result<Vec<(&Path, f32)>, Failure> {
    let mut all = Vec::with_capacity(given.len());
    for text in given {
        let (folder, weight) = folder_and_weight(text)?;
        if let Some(fault) = no_adapter(folder) {
            return Err(Failure::usage(format!(
                "--adapter {}: {fault}; name an adapter's folder, as PEFT and training with lora leave one",
                folder.display()
            )));
        }
        all.push((folder, weight));
    }
    Ok(all)
}

/// Why a path is no adapter's, where that is seen from outside.
fn no_adapter(folder: &Path) -> Option<String> {
    match std::fs::metadata(folder) {
        Err(error) if error.kind() == ErrorKind::NotFound => Some("there is no such folder".to_owned()),
        Err(error) if error.kind() == ErrorKind::NotADirectory => {
            Some("it lies below a file, not a folder".to_owned())
        }
        Ok(found) if !found.is_dir() => Some("it is a file, not a folder".to_owned()),
        Ok(_) if matches!(folder.join(ADAPTER_CONFIG_NAME).try_exists(), Ok(false)) => {
            Some(format!("there is no {ADAPTER_CONFIG_NAME} in it"))
        }
        // What else the system refuses is said where the files are opened.
        _ => None,
    }
}

/// `DIR` or `DIR=WEIGHT`.
fn folder_and_weight(text: &str) -> Result<(&Path, f32), Failure> {
    let whole = Path::new(text);
    let Some((folder, weight)) = text.rsplit_once('=').filter(|_| !whole.exists()) else {
        return Ok((whole, 1.0));
    };
    let folder = Path::new(folder);
    match weight.parse().ok().filter(|weight: &f32| weight.is_finite()) {
        Some(weight) => Ok((folder, weight)),
        None if folder.exists() => Err(Failure::usage(format!(
            "--adapter {text}: {weight:?} is no weight; write a number, as in {}=0.5",
            folder.display()
        ))),
        None => Ok((whole, 1.0)),
    }
}

/// Where an adapter says that it belongs to another model than this one, as far as that is on this machine.
pub fn another_base<'a>(adapter: &'a Adapter, model: &str) -> Option<&'a str> {
    let base = adapter.config().base_model.as_deref()?;
    let [own, given] = [base, model].map(|path| std::fs::canonicalize(path).ok());
    (own? != given?).then_some(base)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn weighted(text: &str) -> (&Path, f32) {
        folder_and_weight(text).unwrap()
    }

    #[test]
    fn a_weight_is_a_number_after_the_last_equals_sign() {
        assert_eq!(weighted("runs/a"), (Path::new("runs/a"), 1.0));
        assert_eq!(weighted("runs/a=0.5"), (Path::new("runs/a"), 0.5));
        assert_eq!(weighted("runs/x=y"), (Path::new("runs/x=y"), 1.0));
        assert_eq!(weighted("runs/x=y=-1"), (Path::new("runs/x=y"), -1.0));
        let folder = tempfile::tempdir().unwrap();
        let (plain, odd) = (folder.path().join("a"), folder.path().join("a=2"));
        std::fs::create_dir(&plain).unwrap();
        let text = |path: &Path, rest: &str| format!("{}{rest}", path.display());
        for bad in ["=half", "=nan", "="] {
            let error = folder_and_weight(&text(&plain, bad)).unwrap_err().to_string();
            assert!(error.contains("is no weight; write a number"), "{error}");
        }
        assert_eq!(weighted(&text(&odd, "")), (plain.as_path(), 2.0));
        std::fs::create_dir(&odd).unwrap();
        assert_eq!(weighted(&text(&odd, "")), (odd.as_path(), 1.0));
    }

    #[test]
    fn a_path_that_is_no_adapters_is_bad_usage() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        std::fs::write(at("file"), "").unwrap();
        std::fs::create_dir(at("empty")).unwrap();
        std::fs::create_dir(at("adapter")).unwrap();
        std::fs::write(at("adapter").join(ADAPTER_CONFIG_NAME), "{}").unwrap();
        let given = |name: &str| [format!("{}=0.5", at(name).display())];
        for (name, words) in [
            ("none", "there is no such folder"),
            ("file", "it is a file"),
            ("file/below", "it lies below a file"),
            ("empty", "there is no adapter_config.json in it"),
        ] {
            let failure = folders_and_weights(&given(name)).unwrap_err();
            assert_eq!(failure.exit_code(), crate::failure::USAGE, "{failure}");
            let named = format!("--adapter {}: {words}", at(name).display());
            assert!(failure.to_string().starts_with(&named), "{failure}");
        }
        assert_eq!(folders_and_weights(&given("adapter")).unwrap(), [(at("adapter").as_path(), 0.5)]);
    }
}
