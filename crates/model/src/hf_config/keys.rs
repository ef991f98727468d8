//! Typed access to a JSON object from a file, with errors that name file and key.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::ConfigError;

/// No configuration comes near this.
const MAX_LENGTH: u64 = 16 << 20;

/// An object, and where it came from.
pub(super) struct Keys {
    path: PathBuf,
    /// The keys that lead to this object, each followed by a dot.
    prefix: String,
    object: Map<String, Value>,
}

impl Keys {
    pub(super) fn read(path: &Path) -> Result<Keys, ConfigError> {
        let io = |source| ConfigError::Io { path: path.to_owned(), source };
        let len = std::fs::metadata(path).map_err(io)?.len();
        if len > MAX_LENGTH {
            return Err(ConfigError::TooLong { path: path.to_owned(), len, limit: MAX_LENGTH });
        }
        Keys::parse(path, &std::fs::read_to_string(path).map_err(io)?)
    }

    pub(super) fn parse(path: &Path, text: &str) -> Result<Keys, ConfigError> {
        let object = serde_json::from_str(text)
            .map_err(|source| ConfigError::Json { path: path.to_owned(), source })?;
        Ok(Keys { path: path.to_owned(), prefix: String::new(), object })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// An error about a key.
    pub(super) fn refuse(&self, key: &str, reason: String) -> ConfigError {
        ConfigError::Key { path: self.path.clone(), key: format!("{}{key}", self.prefix), reason }
    }

    /// The value, or an error that says that it is missing.
    pub(super) fn require<T>(&self, key: &str, value: Option<T>) -> Result<T, ConfigError> {
        value.ok_or_else(|| self.refuse(key, "is missing".to_owned()))
    }

    /// The value of a key that is there and not null.
    fn get(&self, key: &str) -> Option<&Value> {
        self.object.get(key).filter(|value| !value.is_null())
    }

    fn typed<'a, T>(
        &'a self,
        key: &str,
        wanted: &str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ConfigError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        read(value).map(Some).ok_or_else(|| self.wrong_type(key, value, wanted))
    }

    fn wrong_type(&self, key: &str, value: &Value, wanted: &str) -> ConfigError {
        let mut found = value.to_string();
        if found.chars().count() > 60 {
            found = found.chars().take(57).collect::<String>() + "...";
        }
        self.refuse(key, format!("{found} is not {wanted}"))
    }

    pub(super) fn u64(&self, key: &str) -> Result<Option<u64>, ConfigError> {
        self.typed(key, "a whole number of at least 0", Value::as_u64)
    }

    pub(super) fn f64(&self, key: &str) -> Result<Option<f64>, ConfigError> {
        self.typed(key, "a number", Value::as_f64)
    }

    pub(super) fn bool(&self, key: &str) -> Result<Option<bool>, ConfigError> {
        self.typed(key, "true or false", Value::as_bool)
    }

    pub(super) fn str(&self, key: &str) -> Result<Option<&str>, ConfigError> {
        self.typed(key, "a string", Value::as_str)
    }

    pub(super) fn f64s(&self, key: &str) -> Result<Option<Vec<f64>>, ConfigError> {
        self.typed(key, "a list of numbers", |value| value.as_array()?.iter().map(Value::as_f64).collect())
    }

    pub(super) fn numbers(&self, key: &str) -> Result<Option<Vec<u64>>, ConfigError> {
        let read = |value: &Value| value.as_array()?.iter().map(Value::as_u64).collect();
        self.typed(key, "a list of whole numbers", read)
    }

    pub(super) fn strings(&self, key: &str) -> Result<Option<Vec<&str>>, ConfigError> {
        self.typed(key, "a list of strings", |value| value.as_array()?.iter().map(Value::as_str).collect())
    }

    /// Whether the key is there, even if it is null.
    pub(super) fn has(&self, key: &str) -> bool {
        self.object.contains_key(key)
    }

    /// One integer or a list of them; an empty list where the key is absent.
    pub(super) fn integers(&self, key: &str) -> Result<Vec<i64>, ConfigError> {
        let read = |value: &Value| match value {
            Value::Array(list) => list.iter().map(Value::as_i64).collect(),
            one => Some(vec![one.as_i64()?]),
        };
        Ok(self.typed(key, "a token id or a list of them", read)?.unwrap_or_default())
    }

    /// A nested object.
    pub(super) fn object(&self, key: &str) -> Result<Option<Keys>, ConfigError> {
        let object = self.typed(key, "an object", Value::as_object)?;
        Ok(object.map(|object| Keys {
            path: self.path.clone(),
            prefix: format!("{}{key}.", self.prefix),
            object: object.clone(),
        }))
    }

    /// The objects in a nested object, whatever their names are.
    pub(super) fn objects(&self, key: &str) -> Result<Vec<Keys>, ConfigError> {
        let Some(outer) = self.object(key)? else { return Ok(Vec::new()) };
        outer.object.keys().filter_map(|name| outer.object(name).transpose()).collect()
    }

    pub(super) fn require_u64(&self, key: &str) -> Result<u64, ConfigError> {
        self.require(key, self.u64(key)?)
    }

    pub(super) fn require_f64(&self, key: &str) -> Result<f64, ConfigError> {
        self.require(key, self.f64(key)?)
    }
}
