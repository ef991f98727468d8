//! Settings by name, to be changed during a chat.

use std::str::FromStr;

use super::{Sampler, SamplerError, SamplerSettings};

/// A setting that cannot be changed so.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SettingError {
    /// There is no such setting.
    #[error("there is no setting {name:?}; there are {}", NAMES.join(", "))]
    Unknown {
        /// The name.
        name: String,
    },
    /// Its value is not of its type.
    #[error("{name}: {value:?} is no {kind}")]
    Value {
        /// The setting.
        name: &'static str,
        /// What was given.
        value: String,
        /// What it must be.
        kind: &'static str,
    },
    /// Its value is outside of its range.
    #[error(transparent)]
    Range(#[from] SamplerError),
}

const NAMES: [&str; 10] = [
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "penalty_last_n",
    "seed",
];

impl SamplerSettings {
    /// Every setting that [`set`](Self::set) knows, with its value.
    pub fn named(&self) -> Vec<(&'static str, String)> {
        let last_n = self.penalty_last_n.map_or("all".to_owned(), |n| n.to_string());
        let values = [
            self.temperature.to_string(),
            self.top_k.to_string(),
            self.top_p.to_string(),
            self.min_p.to_string(),
            self.typical_p.to_string(),
            self.repetition_penalty.to_string(),
            self.presence_penalty.to_string(),
            self.frequency_penalty.to_string(),
            last_n,
            self.seed.to_string(),
        ];
        NAMES.into_iter().zip(values).collect()
    }

    /// Changes a setting; hyphens count as underscores.
    ///
    /// # Errors
    /// There is none of that name, or it cannot have that value; then nothing is changed.
    pub fn set(&mut self, name: &str, value: &str) -> Result<(), SettingError> {
        let wanted = name.replace('-', "_");
        let Some(name) = NAMES.into_iter().find(|known| *known == wanted) else {
            return Err(SettingError::Unknown { name: name.to_owned() });
        };
        let mut new = self.clone();
        match name {
            "temperature" => new.temperature = parse(name, value, "number")?,
            "top_k" => new.top_k = parse(name, value, "whole number")?,
            "top_p" => new.top_p = parse(name, value, "number")?,
            "min_p" => new.min_p = parse(name, value, "number")?,
            "typical_p" => new.typical_p = parse(name, value, "number")?,
            "repetition_penalty" => new.repetition_penalty = parse(name, value, "number")?,
            "presence_penalty" => new.presence_penalty = parse(name, value, "number")?,
            "frequency_penalty" => new.frequency_penalty = parse(name, value, "number")?,
            "penalty_last_n" if value == "all" => new.penalty_last_n = None,
            "penalty_last_n" => new.penalty_last_n = Some(parse(name, value, "whole number, nor `all`")?),
            _ => new.seed = parse(name, value, "whole number")?,
        }
        // A sampler knows what each number may be.
        Sampler::new(&new)?;
        *self = new;
        Ok(())
    }
}

fn parse<T: FromStr>(name: &'static str, value: &str, kind: &'static str) -> Result<T, SettingError> {
    value.parse().map_err(|_| SettingError::Value { name, value: value.to_owned(), kind })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_setting_can_be_set_to_what_it_is_and_wrong_ones_change_nothing() {
        let mut settings = SamplerSettings { temperature: 0.7, ..SamplerSettings::default() };
        let before = settings.clone();
        for (name, value) in before.named() {
            settings.set(name, &value).unwrap();
        }
        assert_eq!(settings, before);
        settings.set("top-k", "5").unwrap();
        settings.set("penalty_last_n", "64").unwrap();
        settings.set("seed", "9").unwrap();
        assert_eq!((settings.top_k, settings.penalty_last_n, settings.seed), (5, Some(64), 9));
        for (name, value, words) in [
            ("warmth", "1", "temperature"),
            ("top_k", "-1", "whole number"),
            ("temperature", "hot", "\"hot\""),
            ("top_p", "0", "above 0"),
            ("temperature", "nan", "0 or more"),
        ] {
            let before = settings.clone();
            let error = settings.set(name, value).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
            assert_eq!(settings, before);
        }
    }
}
