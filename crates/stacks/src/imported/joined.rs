//! The files of a run, each with those that it names: what they say together.

use std::collections::BTreeMap;

use plimsoll_plan::config::{ACCELERATE, ConfigError, DEEPSPEED, ForeignKey, SixteenBits};
use serde_json::{Map, Value, json};

use super::keys::Settled;
use super::{conflict, lay_over};
use crate::resolve::hardware::target;

/// What a file says, or several, before what only all of them and the flags decide.
#[derive(Default)]
pub struct Joined {
    /// Whose file it is.
    pub program: &'static str,
    pub keys: Map<String, Value>,
    /// By what each key was said, with its place, and whose file that is.
    said: BTreeMap<String, (String, &'static str)>,
    left: Vec<String>,
    /// The kinds of 16 bits that are switched off, where nothing else says the precision.
    off: Vec<&'static str>,
    /// DeepSpeed's `train_batch_size`, and the key.
    train_batch: Option<(u64, ForeignKey)>,
    /// Whether `devices` are those of one machine of several.
    is_of_machines: bool,
}

/// Arguments of launchers that say how many machines there are, where devices are said of each.
const MACHINES: [&str; 2] = ["nnodes", "num_nodes"];

/// The flags beside which `train_batch_size` need not be a product.
const OF_BATCH: [&str; 4] = ["batch_size", "gradient_accumulation_steps", "devices", "hardware"];

impl Joined {
    /// A file whose keys were taken.
    pub fn settled(program: &'static str, settled: Settled, left: Vec<String>, all: &[ForeignKey]) -> Joined {
        let Settled { keys, said, off, train_batch } = settled;
        let is_of_machines = all.iter().any(|key| MACHINES.contains(&key.key.as_str()) && key.value != "1");
        let said = said.into_iter().map(|(key, by)| (key, (by.argument(), program))).collect();
        Joined { program, keys, said, left, off, train_batch, is_of_machines }
    }

    /// The file with flags over what it says.
    pub fn under(mut self, flags: &Map<String, Value>) -> Joined {
        let mut own = flags.clone();
        own.retain(|key, _| self.keys.contains_key(key));
        lay_over(&mut self.keys, &own);
        if own.contains_key("precision") {
            self.off.clear();
        }
        self
    }

    /// By what a key was said, and whose file that is.
    fn said(&self, key: &str, value: &Value) -> (String, &'static str) {
        let by_itself = || (format!("{} by itself: {key}={value}", self.program), self.program);
        self.said.get(key).cloned().unwrap_or_else(by_itself)
    }

    /// Takes what another file says; what both say must agree.
    pub fn join(&mut self, file: Joined) -> Result<(), ConfigError> {
        for (key, value) in &file.keys {
            let (other, _) = file.said(key, value);
            let Some(known) = self.keys.get(key) else {
                if key == "precision" {
                    self.off.clone_from(&file.off);
                }
                self.keys.insert(key.clone(), value.clone());
                self.said.insert(key.clone(), (other, file.program));
                continue;
            };
            let (own, program) = self.said(key, known);
            // A command goes over the file of its launcher.
            let goes_over = file.program == ACCELERATE && program != ACCELERATE;
            let is_taken = match key.as_str() {
                "precision" => {
                    let bits = |value: &Value, off: &[&'static str]| SixteenBits {
                        precision: value.as_str().unwrap_or_default().to_owned(),
                        off: off.to_vec(),
                    };
                    let mut own = bits(known, &self.off);
                    let is_taken = own.join(&bits(value, &file.off), goes_over);
                    self.off = own.off;
                    is_taken
                }
                // Every file of transformers' says the same stack; torchtune's and DeepSpeed's count.
                "stack" => Some(value != "hf"),
                _ if known == value => Some(false),
                // An optimizer in DeepSpeed's file is the one that is made.
                "optimizer" if file.program == DEEPSPEED && program != DEEPSPEED => Some(true),
                // Each switch turns it on.
                "gradient_checkpointing" if goes_over => Some(value == true),
                _ => goes_over.then_some(false),
            };
            let is_taken = is_taken.ok_or_else(|| ConfigError::of_two_files(key, &other, &own))?;
            let is_same = match key.as_str() {
                "stack" => true,
                "precision" => plain(known) == plain(value),
                _ => known == value,
            };
            if !is_same {
                let (counts, lost) = if is_taken { (&other, &own) } else { (&own, &other) };
                self.left.push(format!("{lost} ({counts} counts)"));
            }
            if is_taken {
                self.keys.insert(key.clone(), value.clone());
                self.said.insert(key.clone(), (other, file.program));
            }
        }
        self.left.extend(file.left);
        self.train_batch = self.train_batch.take().or(file.train_batch);
        self.is_of_machines |= file.is_of_machines;
        Ok(())
    }

    /// The keys under the flags, with what DeepSpeed's batch of all devices and micro-batches says of one; and what says nothing here.
    pub fn finish(
        mut self,
        flags: &Map<String, Value>,
    ) -> Result<(Map<String, Value>, Vec<String>), ConfigError> {
        lay_over(&mut self.keys, flags);
        let (mut keys, mut left) = (self.keys, self.left);
        let Some((all, key)) = self.train_batch else { return Ok((keys, left)) };
        let number = |key: &str| keys.get(key).and_then(Value::as_u64);
        let [batch, steps] = ["batch_size", "gradient_accumulation_steps"].map(number);
        let is_of_machine = self.is_of_machines && !flags.contains_key("devices");
        // A card without a number says nothing of how many there are.
        let of_hardware = || {
            let name = keys.get("hardware").and_then(Value::as_str)?;
            target(name).ok().map(|target| target.devices()).filter(|devices| *devices > 1)
        };
        let devices = number("devices").or_else(of_hardware).filter(|_| !is_of_machine);
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
                let words = "of how many devices is not said; give devices or batch_size";
                left.push(format!("{}: {words}", key.shown()));
                None
            }
        };
        match found {
            None => {}
            Some((key, Some(value))) => drop(keys.insert(key.to_owned(), json!(value))),
            Some((_, None)) => {
                let reason = no_product(&key.shown(), batch, steps, devices);
                if batch.is_none() || !OF_BATCH.iter().any(|flag| flags.contains_key(*flag)) {
                    let remedy =
                        "it is the micro-batch of a device times gradient_accumulation_steps times devices";
                    return Err(conflict(reason, remedy));
                }
                left.push(format!("{reason}, and the flags count"));
            }
        }
        Ok((keys, left))
    }
}

/// A precision without its autocast.
fn plain(precision: &Value) -> Option<&str> {
    Some(precision.as_str()?.trim_end_matches("-amp"))
}

/// A number without these factors, where it is a product of them.
fn share(all: u64, factors: &[u64]) -> Option<u64> {
    let product = factors.iter().fold(1_u64, |product, factor| product.saturating_mul(*factor));
    let is_product = product > 0 && all > 0 && all.is_multiple_of(product);
    is_product.then(|| all / product)
}

fn no_product(shown: &str, batch: Option<u64>, steps: Option<u64>, devices: Option<u64>) -> String {
    let parts = [("sequences", batch), ("micro-batches", steps), ("devices", devices)];
    let parts: Vec<String> =
        parts.iter().filter_map(|(name, number)| Some(format!("{} {name}", (*number)?))).collect();
    format!("{shown}: this is no product of {}", parts.join(", "))
}
