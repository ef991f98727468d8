//! What was read of another program's configuration, and what the planner decides beside it.

use std::path::Path;

use plimsoll_plan::config::{Imported, KeyChange};
use serde_json::{Value, json};

use crate::args::ConfigSource;
use crate::failure::Failure;
use crate::session::written_config;

/// Reads a file with those that it names. What the flags set, these need not agree about.
pub fn read(path: &Path, source: &ConfigSource) -> Result<Imported, Failure> {
    let flags = written_config(&ConfigSource { config: None, ..source.clone() })?;
    Ok(Imported::from_file(path, &flags)?)
}

/// The keys that were read, those that were not, and what the planner changes or decides.
pub fn words(imported: &Imported, changes: &[KeyChange]) -> String {
    let mut out = "read:\n".to_owned();
    for one in &imported.overrides {
        out.push_str(&format!("  {}: {}\n", one.key, one.value));
    }
    if !imported.left.is_empty() {
        out.push_str("not known here, and without effect on the plan:\n");
        imported.left.iter().for_each(|left| out.push_str(&format!("  {left}\n")));
    }
    // That a kind of tensor stays where it is used is nothing to read about.
    let changes: Vec<&KeyChange> =
        changes.iter().filter(|change| !matches!(change.after.as_str(), "device" | "0")).collect();
    if !changes.is_empty() {
        out.push_str("decided by the planner:\n");
        changes.iter().for_each(|change| out.push_str(&format!("  {change}\n")));
    }
    out.push('\n');
    out
}

pub fn document(imported: &Imported) -> Value {
    let read = imported.overrides.iter();
    let read: Vec<Value> =
        read.map(|one| json!({ "key": one.key, "value": one.value, "from": one.argument })).collect();
    json!({ "read": read, "left": imported.left })
}
