//! What else could be done: the way from the naive step to the chosen one, and the choices that nothing beats.

use std::collections::{BTreeMap, BTreeSet};

use plimsoll_plan::{FrontPoint, TrainingPlan};
use plimsoll_step::StepError;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// A technique on the way from the naive step to the chosen one, with all before it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WaterfallEntry {
    /// What was changed, in words.
    pub change: String,
    /// Bytes of the device that it saves; less than 0 where it takes more.
    pub bytes_saved: i64,
    /// Seconds a step that it costs; less than 0 where it is faster.
    pub seconds_added: f64,
    /// The device's peak with it.
    pub device_peak_bytes: u64,
}

impl WaterfallEntry {
    /// The entries of a plan's waterfall.
    ///
    /// # Errors
    /// The steps on the way to the plan cannot be run dry.
    pub fn of(plan: &TrainingPlan) -> Result<Vec<WaterfallEntry>, StepError> {
        let entries = plan.waterfall()?.entries.into_iter();
        Ok(entries
            .map(|entry| WaterfallEntry {
                change: entry.change,
                bytes_saved: entry.bytes_saved,
                seconds_added: entry.seconds_added,
                device_peak_bytes: entry.device_peak_bytes,
            })
            .collect())
    }
}

/// A choice of settings that no other beats in memory, time and quality at once.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ParetoPoint {
    /// The device's peak.
    pub device_peak_bytes: u64,
    /// Time of a step.
    pub step_seconds: f64,
    /// The class of techniques that it keeps to: `lossless`, `proven`, `anything`.
    #[serde(default)]
    pub quality: String,
    /// The configuration that it is.
    #[serde(default)]
    pub config: Value,
}

impl ParetoPoint {
    /// The front that was found with a plan; empty where nothing was searched.
    pub fn of(plan: &TrainingPlan) -> Result<Vec<ParetoPoint>, serde_json::Error> {
        let front = plan.search.iter().flat_map(|search| &search.front);
        let point = |point: &FrontPoint| {
            Ok(ParetoPoint {
                device_peak_bytes: point.device_peak_bytes,
                step_seconds: point.step_seconds,
                quality: point.quality.name().to_owned(),
                config: serde_json::to_value(&point.config)?,
            })
        };
        front.map(point).collect()
    }
}

/// Of several configurations, the values in which they differ: for each, its own as `key: value`.
pub(crate) fn differences(configs: &[&Value]) -> Vec<Vec<String>> {
    let flat: Vec<BTreeMap<String, String>> = configs
        .iter()
        .map(|config| {
            let mut keys = BTreeMap::new();
            flatten(config, "", &mut keys);
            keys
        })
        .collect();
    let keys: BTreeSet<&String> = flat.iter().flat_map(BTreeMap::keys).collect();
    let differs = |key: &&&String| {
        let values: BTreeSet<Option<&String>> = flat.iter().map(|own| own.get(**key)).collect();
        values.len() > 1
    };
    let differing: Vec<&String> = keys.iter().filter(differs).copied().collect();
    let said = |own: &BTreeMap<String, String>| {
        let said = |key: &&String| own.get(*key).map(|value| format!("{key}: {value}"));
        differing.iter().filter_map(said).collect()
    };
    flat.iter().map(said).collect()
}

/// Values by dotted keys.
fn flatten(value: &Value, path: &str, out: &mut BTreeMap<String, String>) {
    match value {
        Value::Object(map) if !map.is_empty() => {
            for (key, value) in map {
                let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                flatten(value, &path, out);
            }
        }
        Value::Null if path.is_empty() => {}
        Value::String(text) => {
            out.insert(path.to_owned(), text.clone());
        }
        other => {
            out.insert(path.to_owned(), other.to_string());
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn only_what_differs_is_said() {
        let one = json!({"training": {"batch_size": 1, "optimizer": "adamw"}});
        let other = json!({"training": {"batch_size": 2, "optimizer": "adamw", "attention": "standard"}});
        assert_eq!(
            differences(&[&one, &other]),
            [
                vec!["training.batch_size: 1".to_owned()],
                vec!["training.attention: standard".to_owned(), "training.batch_size: 2".to_owned()]
            ]
        );
        assert_eq!(differences(&[&Value::Null, &Value::Null]), [Vec::<String>::new(), Vec::new()]);
    }
}
