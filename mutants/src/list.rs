//! The mutants of some crates, as `cargo mutants --list --json` gives them.

use std::ops::Range;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};

/// A mutant. Its number is its place in the list, from 1 on: 0 is the program as it is.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Mutant {
    #[serde(default)]
    pub id: u32,
    pub name: String,
    pub package: String,
    pub file: String,
    pub genre: Genre,
    pub replacement: String,
    pub function: Option<Function>,
    pub span: Span,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Genre {
    FnValue,
    BinaryOperator,
    UnaryOperator,
    MatchArm,
    MatchArmGuard,
    StructField,
    #[serde(other)]
    Other,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Function {
    pub return_type: String,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Span {
    start: Position,
    end: Position,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Position {
    line: usize,
    column: usize,
}

impl Mutant {
    /// Whether a value of a type without a name is returned: no other type can then be returned beside it.
    pub fn returns_opaque(&self) -> bool {
        self.function.as_ref().is_some_and(|function| function.return_type.contains("impl "))
    }

    /// The crate's name without the project's.
    pub fn krate(&self) -> &str {
        self.package.strip_prefix("plimsoll-").unwrap_or(&self.package)
    }
}

impl Span {
    /// The bytes of `text`, whose lines and characters the span counts from 1.
    pub fn bytes(&self, text: &str) -> Option<Range<usize>> {
        Some(byte(text, self.start)?..byte(text, self.end)?)
    }
}

fn byte(text: &str, position: Position) -> Option<usize> {
    let line = text.split_inclusive('\n').nth(position.line.checked_sub(1)?)?;
    let start = line.as_ptr() as usize - text.as_ptr() as usize;
    let within: usize = line.chars().take(position.column.checked_sub(1)?).map(char::len_utf8).sum();
    Some(start + within)
}

/// All mutants of `crates`, in their order.
pub fn list(source: &Path, crates: &[String]) -> Result<Vec<Mutant>> {
    let mut all: Vec<Mutant> = Vec::new();
    for name in crates {
        let output = Command::new("cargo")
            .args(["mutants", "--list", "--json", "-p", &format!("plimsoll-{name}")])
            .current_dir(source)
            .output()
            .context("cargo mutants: `cargo install cargo-mutants --locked`")?;
        let words = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "cargo mutants --list: {words}");
        let mut of_crate: Vec<Mutant> = serde_json::from_slice(&output.stdout)?;
        ensure!(!of_crate.is_empty(), "no mutants of {name}");
        all.append(&mut of_crate);
    }
    for (mutant, id) in all.iter_mut().zip(1..) {
        mutant.id = id;
    }
    Ok(all)
}
