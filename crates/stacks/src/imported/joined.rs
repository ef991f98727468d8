//! A file of another program with the files that it names: what they say together.

use std::path::Path;

use plimsoll_plan::config::{ConfigError, ForeignKey};
use serde_json::{Value, json};

use super::keys::Settled;
use super::{DEEPSPEED, Imported, conflict};

/// What a file and those that it names say, before what only all of them decide.
pub struct Joined {
    imported: Imported,
    /// The kinds of 16 bits that are switched off, where nothing else says the precision.
    off: Vec<&'static str>,
    /// DeepSpeed's `train_batch_size`, and how it is shown.
    train_batch: Option<(u64, String)>,
    /// Whether `devices` are those of one machine of several.
    is_of_machines: bool,
}

/// Arguments of launchers that say how many machines there are, where devices are said of each.
const MACHINES: [&str; 2] = ["nnodes", "num_nodes"];

impl Joined {
    /// A file that says nothing but its keys.
    pub fn of(imported: Imported) -> Joined {
        Joined { imported, off: Vec::new(), train_batch: None, is_of_machines: false }
    }

    /// A file whose keys were taken.
    pub fn settled(program: &str, settled: Settled, left: Vec<String>, all: &[ForeignKey]) -> Joined {
        let Settled { keys, off, train_batch } = settled;
        let is_batch = |key: &&ForeignKey| key.key.trim_start_matches("deepspeed.") == "train_batch_size";
        let shown = all.iter().find(is_batch).map(ForeignKey::shown);
        Joined {
            imported: Imported { program: program.to_owned(), keys, left },
            off,
            train_batch: train_batch.zip(shown),
            is_of_machines: all.iter().any(|key| MACHINES.contains(&key.key.as_str()) && key.value != "1"),
        }
    }

    /// Takes what a file says that `named` names; what both say must agree.
    pub fn join(&mut self, inner: Joined, path: &Path, named: &ForeignKey) -> Result<(), ConfigError> {
        let of_deepspeed = inner.imported.program == DEEPSPEED;
        // A command goes over the file of its launcher (`accelerate launch`).
        let goes_over = named.key == "config_file";
        self.imported.left.retain(|line| *line != named.shown());
        self.imported.left.extend(inner.imported.left);
        if !self.imported.keys.contains_key("precision") {
            self.off.clone_from(&inner.off);
        }
        for (key, value) in inner.imported.keys {
            let Some(own) = self.imported.keys.get(&key) else {
                self.imported.keys.insert(key, value);
                continue;
            };
            let is_taken = match key.as_str() {
                // An optimizer in DeepSpeed's file is the one that is made.
                "optimizer" if of_deepspeed => Some(true),
                // Each switch turns it on.
                "gradient_checkpointing" if goes_over => Some(value == true),
                "precision" => takes_precision(own, &self.off, &value, &inner.off, goes_over),
                _ => (*own == value || key == "stack" || goes_over).then_some(false),
            };
            match is_taken {
                Some(true) => drop(self.imported.keys.insert(key, value)),
                Some(false) => {}
                None => return Err(disagree(path, &key, &value, named, own)),
            }
        }
        self.off.retain(|_| self.imported.keys.get("precision").is_some_and(|own| own == "f32"));
        self.train_batch = self.train_batch.take().or(inner.train_batch);
        self.is_of_machines |= inner.is_of_machines;
        Ok(())
    }

    /// With what DeepSpeed's batch of all devices and micro-batches says of one.
    pub fn finish(mut self) -> Result<Imported, ConfigError> {
        let Some((all, shown)) = self.train_batch else { return Ok(self.imported) };
        let keys = &mut self.imported.keys;
        let number = |key: &str| keys.get(key).and_then(Value::as_u64);
        let [batch, steps] = ["batch_size", "gradient_accumulation_steps"].map(number);
        let devices = number("devices").filter(|_| !self.is_of_machines);
        let found = match (batch, steps, devices) {
            (None, _, Some(devices)) => Some(("batch_size", share(all, &[steps.unwrap_or(1), devices]))),
            (Some(batch), None, Some(devices)) => {
                Some(("gradient_accumulation_steps", share(all, &[batch, devices])))
            }
            (Some(batch), Some(steps), Some(devices)) => {
                let rest = share(all, &[batch, steps, devices]).filter(|rest| *rest == 1);
                Some(("batch_size", rest.map(|_| batch)))
            }
            // What is left is how many devices there are.
            (Some(batch), Some(steps), None) => {
                Some(("batch_size", share(all, &[batch, steps]).map(|_| batch)))
            }
            (Some(_), None, None) => None,
            (None, _, None) => {
                self.imported.left.push(format!("{shown}: of how many devices is not said; give batch_size"));
                None
            }
        };
        match found {
            None => {}
            Some((key, Some(value))) => drop(keys.insert(key.to_owned(), json!(value))),
            Some((_, None)) => return Err(no_product(&shown, batch, steps, devices)),
        }
        Ok(self.imported)
    }
}

/// A number without these factors, where it is a product of them.
fn share(all: u64, factors: &[u64]) -> Option<u64> {
    let product = factors.iter().fold(1_u64, |product, factor| product.saturating_mul(*factor));
    let is_product = product > 0 && all > 0 && all.is_multiple_of(product);
    is_product.then(|| all / product)
}

/// Whether the precision of a file that is named is taken; `None` where it contradicts one's own. 16 bits that are off say nothing of the
/// other kind, and DeepSpeed's engine has no autocast.
fn takes_precision(
    own: &Value,
    own_off: &[&str],
    value: &Value,
    value_off: &[&str],
    goes_over: bool,
) -> Option<bool> {
    let [own, value] = [own, value].map(|one| one.as_str().unwrap_or_default().trim_end_matches("-amp"));
    if own == value || !value_off.is_empty() && !value_off.contains(&own) {
        return Some(false);
    }
    if !own_off.is_empty() && (goes_over || !own_off.contains(&value)) {
        return Some(true);
    }
    goes_over.then_some(false)
}

fn disagree(path: &Path, key: &str, value: &Value, named: &ForeignKey, own: &Value) -> ConfigError {
    let reason = format!("{}: {key} is {value}, and the file that names it says {own}", path.display());
    conflict(format!("{reason} ({})", named.place), "make the two agree, or set one to auto")
}

fn no_product(shown: &str, batch: Option<u64>, steps: Option<u64>, devices: Option<u64>) -> ConfigError {
    let parts = [("sequences", batch), ("micro-batches", steps), ("devices", devices)];
    let parts: Vec<String> =
        parts.iter().filter_map(|(name, number)| Some(format!("{} {name}", (*number)?))).collect();
    conflict(
        format!("{shown}: this is no product of {}", parts.join(", ")),
        "it is the micro-batch of a device times gradient_accumulation_steps times devices",
    )
}
