//! Settings outside of their range.

/// A setting outside of its range.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{name} is {value}; it must be {range}")]
pub struct SamplerError {
    /// The setting.
    pub name: &'static str,
    /// Its value.
    pub value: f64,
    /// What it may be.
    pub range: &'static str,
}
