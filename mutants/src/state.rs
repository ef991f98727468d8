//! What is known between runs, in files of one folder: the mutants, those left out of the build, the programs, what
//! each test reaches, and the outcomes. Lines are appended as they come, so that a run can be stopped at any time.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::list::Mutant;
use crate::weave::LeftOut;

pub struct State {
    folder: PathBuf,
}

/// A mutant that is not in the build, and what the compiler said.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Without {
    pub reason: LeftOut,
    pub message: String,
}

/// A program of tests.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Program {
    pub package: String,
    pub target: String,
    pub folder: PathBuf,
    pub executable: PathBuf,
}

/// A test by itself, with no mutant on.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Reached {
    pub test: Test,
    pub passed: bool,
    pub seconds: f64,
    pub mutants: Vec<u32>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Test {
    pub package: String,
    pub target: String,
    pub name: String,
}

impl std::fmt::Display for Test {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{} {}", self.package, self.target, self.name)
    }
}

/// What became of a mutant. The last line about a mutant holds.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Outcome {
    pub mutant: String,
    /// Nothing while no test has failed.
    pub caught: Option<Caught>,
    /// The tests that passed with the mutant on.
    pub passed: Vec<Test>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Caught {
    pub by: String,
    pub how: How,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum How {
    Failed,
    TimeLimit,
    MemoryLimit,
}

impl State {
    pub fn open(folder: PathBuf) -> Result<Self> {
        fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
        Ok(Self { folder })
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    pub fn mutants(&self) -> Result<Vec<Mutant>> {
        read(&self.path("mutants.json"))
    }

    pub fn set_mutants(&self, mutants: &[Mutant]) -> Result<()> {
        write(&self.path("mutants.json"), &mutants)
    }

    pub fn left_out(&self) -> Result<BTreeMap<String, Without>> {
        read(&self.path("left_out.json"))
    }

    pub fn set_left_out(&self, left_out: &BTreeMap<String, Without>) -> Result<()> {
        write(&self.path("left_out.json"), left_out)
    }

    pub fn programs(&self) -> Result<Vec<Program>> {
        read(&self.path("programs.json"))
    }

    pub fn set_programs(&self, programs: &[Program]) -> Result<()> {
        write(&self.path("programs.json"), &programs)
    }

    pub fn reached(&self) -> Result<Vec<Reached>> {
        lines(&self.path("reached.jsonl"))
    }

    pub fn add_reached(&self, reached: &Reached) -> Result<()> {
        append(&self.path("reached.jsonl"), reached)
    }

    /// What tests reach is no longer known: the programs are others.
    pub fn forget_reached(&self) -> Result<()> {
        match fs::remove_file(self.path("reached.jsonl")) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error.into()),
            _ => Ok(()),
        }
    }

    pub fn outcomes(&self) -> Result<BTreeMap<String, Outcome>> {
        let all: Vec<Outcome> = lines(&self.path("outcomes.jsonl"))?;
        Ok(all.into_iter().map(|outcome| (outcome.mutant.clone(), outcome)).collect())
    }

    pub fn add_outcome(&self, outcome: &Outcome) -> Result<()> {
        append(&self.path("outcomes.jsonl"), outcome)
    }
}

fn read<T: DeserializeOwned + Default>(path: &Path) -> Result<T> {
    match fs::read(path) {
        Ok(bytes) => serde_json::from_slice(&bytes).with_context(|| path.display().to_string()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(T::default()),
        Err(error) => Err(error).with_context(|| path.display().to_string()),
    }
}

fn write<T: Serialize + ?Sized>(path: &Path, value: &T) -> Result<()> {
    let aside = path.with_extension("new");
    fs::write(&aside, serde_json::to_vec(value)?)?;
    fs::rename(&aside, path).with_context(|| path.display().to_string())
}

/// All whole lines: the last one may have been cut off.
fn lines<T: DeserializeOwned>(path: &Path) -> Result<Vec<T>> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(error).with_context(|| path.display().to_string()),
    }
}

fn append<T: Serialize>(path: &Path, value: &T) -> Result<()> {
    let mut line = serde_json::to_string(value)?;
    line.push('\n');
    let mut file = fs::OpenOptions::new().create(true).append(true).open(path)?;
    file.write_all(line.as_bytes()).with_context(|| path.display().to_string())
}
