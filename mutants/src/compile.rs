//! One build of all mutants, in a copy of the repository. What the compiler refuses is left out, until it builds.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::list::{self, Mutant};
use crate::state::{Program, State, Without};
use crate::weave::{LeftOut, Segment, weave};

const SWITCH: &str = include_str!("switch.rs");

/// Errors of borrows, moves and constants may come of the switch alone, and so may types that differ on its sides. Other
/// errors in a mutant's own text would be there without the switch.
const OTHER_TYPE: &str = "`if` and `else` have incompatible types";
const OF_SWITCH: [&str; 10] =
    ["E0015", "E0382", "E0499", "E0502", "E0503", "E0505", "E0506", "E0507", "E0597", "E0716"];

/// Weaves the mutants of `crates` into `copy`, a copy of `source`, and builds all tests.
pub fn compile(source: &Path, copy: &Path, state: &State, crates: &[String]) -> Result<()> {
    let mutants = list::list(source, crates)?;
    state.set_mutants(&mutants)?;
    let mut left_out = state.left_out()?;
    loop {
        let woven = write_copy(source, copy, &mutants, &mut left_out)?;
        state.set_left_out(&left_out)?;
        println!("{} mutants, {} left out: building", mutants.len(), count(&mutants, &left_out));
        match build(copy)? {
            Built::Programs { programs, changed } => {
                state.set_programs(&of_dependents(copy, crates, programs)?)?;
                return if changed { state.forget_reached() } else { Ok(()) };
            }
            Built::Errors(errors) => {
                let refused = refused(&errors, &woven, &mutants)?;
                ensure!(
                    !refused.is_empty(),
                    "the copy does not build, and no mutant is to blame:\n{}",
                    said(&errors)
                );
                left_out.extend(refused);
            }
        }
    }
}

fn count(mutants: &[Mutant], left_out: &BTreeMap<String, Without>) -> usize {
    mutants.iter().filter(|mutant| left_out.contains_key(&mutant.name)).count()
}

/// Writes what differs, so that the compiler sees no other change. Returns what was woven, by file.
fn write_copy(
    source: &Path,
    copy: &Path,
    mutants: &[Mutant],
    left_out: &mut BTreeMap<String, Without>,
) -> Result<HashMap<String, Vec<Segment>>> {
    let ids: HashSet<u32> = mutants.iter().filter(|m| left_out.contains_key(&m.name)).map(|m| m.id).collect();
    let mut by_file: HashMap<&str, Vec<&Mutant>> = HashMap::new();
    for mutant in mutants {
        by_file.entry(&mutant.file).or_default().push(mutant);
    }
    let roots: HashSet<PathBuf> = mutants.iter().filter_map(|mutant| root(&mutant.file)).collect();
    let mut woven = HashMap::new();
    for file in tracked(source)? {
        let original = fs::read(source.join(&file)).with_context(|| file.clone())?;
        let mut content = original;
        if let Some(of_file) = by_file.get(file.as_str()) {
            let text = String::from_utf8(content)?;
            let file_woven = weave(&text, of_file, &ids).with_context(|| file.clone())?;
            for (id, reason) in file_woven.left_out {
                if let Some(mutant) = of_file.iter().find(|mutant| mutant.id == id) {
                    let message = "no form behind a switch".to_owned();
                    left_out.entry(mutant.name.clone()).or_insert(Without { reason, message });
                }
            }
            woven.insert(file.clone(), file_woven.segments);
            content = file_woven.text.into_bytes();
        }
        if roots.contains(Path::new(&file)) {
            content.extend_from_slice(b"\nmod __mutants;\n");
        }
        write_if_other(&copy.join(&file), &content)?;
    }
    for root in &roots {
        write_if_other(&copy.join(root).with_file_name("__mutants.rs"), SWITCH.as_bytes())?;
    }
    Ok(woven)
}

/// The file that a crate's modules are declared in.
fn root(file: &str) -> Option<PathBuf> {
    let (package, _) = file.split_once("/src/")?;
    Some(Path::new(package).join("src/lib.rs"))
}

fn tracked(source: &Path) -> Result<Vec<String>> {
    let output =
        Command::new("git").args(["ls-files", "-z"]).current_dir(source).output().context("git ls-files")?;
    ensure!(output.status.success(), "git ls-files: {}", String::from_utf8_lossy(&output.stderr));
    let names = String::from_utf8(output.stdout)?;
    Ok(names.split_terminator('\0').filter(|name| source.join(name).is_file()).map(str::to_owned).collect())
}

fn write_if_other(path: &Path, content: &[u8]) -> Result<()> {
    if fs::read(path).is_ok_and(|there| there == content) {
        return Ok(());
    }
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    fs::write(path, content).with_context(|| path.display().to_string())
}

enum Built {
    Programs { programs: Vec<Program>, changed: bool },
    Errors(Vec<Value>),
}

fn build(copy: &Path) -> Result<Built> {
    let output = Command::new("cargo")
        .args(["test", "--release", "--workspace", "--locked", "--no-run", "--message-format", "json"])
        .current_dir(copy)
        .stderr(Stdio::inherit())
        .output()
        .context("cargo test --no-run")?;
    let (mut programs, mut errors, mut changed) = (Vec::new(), Vec::new(), false);
    for line in String::from_utf8_lossy(&output.stdout).lines() {
        let Ok(message) = serde_json::from_str::<Value>(line) else { continue };
        match message["reason"].as_str() {
            Some("compiler-message") if message["message"]["level"] == "error" => {
                errors.push(message["message"].clone())
            }
            Some("compiler-artifact") => {
                changed |= message["fresh"] == false;
                programs.extend(program(&message));
            }
            _ => {}
        }
    }
    match errors.is_empty() {
        true if output.status.success() => Ok(Built::Programs { programs, changed }),
        true => bail!("cargo test --no-run failed without an error of the compiler"),
        false => Ok(Built::Errors(errors)),
    }
}

fn program(artifact: &Value) -> Option<Program> {
    let manifest = Path::new(artifact["manifest_path"].as_str()?);
    let executable = artifact["executable"].as_str()?.into();
    let folder = manifest.parent()?.to_owned();
    let package = folder.file_name()?.to_str()?.to_owned();
    let target = artifact["target"]["name"].as_str()?.to_owned();
    (artifact["profile"]["test"] == true).then_some(Program { package, target, folder, executable })
}

/// The programs of `crates`, in this order, and then of what depends on them.
fn of_dependents(copy: &Path, crates: &[String], programs: Vec<Program>) -> Result<Vec<Program>> {
    let output = Command::new("cargo")
        .args(["metadata", "--format-version", "1", "--no-deps", "--locked"])
        .current_dir(copy)
        .stderr(Stdio::inherit())
        .output()
        .context("cargo metadata")?;
    let metadata: Value = serde_json::from_slice(&output.stdout)?;
    let of = |value: &Value| value["name"].as_str().unwrap_or_default().to_owned();
    let uses: Vec<(String, Vec<String>)> = (metadata["packages"].as_array().into_iter().flatten())
        .map(|package| {
            (of(package), package["dependencies"].as_array().into_iter().flatten().map(of).collect())
        })
        .collect();
    let mut reached: Vec<String> = crates.iter().map(|name| format!("plimsoll-{name}")).collect();
    while let Some((next, _)) = (uses.iter())
        .find(|(name, used)| !reached.contains(name) && used.iter().any(|used| reached.contains(used)))
    {
        reached.push(next.clone());
    }
    let place = |program: &Program| {
        let manifest = fs::read_to_string(program.folder.join("Cargo.toml")).unwrap_or_default();
        reached.iter().position(|name| manifest.contains(&format!("name = \"{name}\"\n")))
    };
    let mut placed: Vec<(usize, Program)> =
        programs.into_iter().filter_map(|p| Some((place(&p)?, p))).collect();
    placed.sort_by(|(a, p), (b, q)| a.cmp(b).then(p.target.cmp(&q.target)));
    Ok(placed.into_iter().map(|(_, program)| program).collect())
}

/// The mutants that errors of the compiler are about.
fn refused(
    errors: &[Value],
    woven: &HashMap<String, Vec<Segment>>,
    mutants: &[Mutant],
) -> Result<BTreeMap<String, Without>> {
    let mut refused = BTreeMap::new();
    for error in errors {
        let spans = error["spans"].as_array().map(Vec::as_slice).unwrap_or_default();
        let primary = spans.iter().filter(|span| span["is_primary"] == true);
        let found = primary.chain(spans).find_map(|span| {
            let start = span["byte_start"].as_u64()? as usize;
            let segments = woven.get(span["file_name"].as_str()?)?;
            segments.iter().filter(|s| s.bytes.contains(&start)).min_by_key(|s| s.bytes.len())
        });
        let Some(segment) = found else { continue };
        let code = error["code"]["code"].as_str().unwrap_or_default();
        let message = error["message"].as_str().unwrap_or_default().to_owned();
        let of_switch = OF_SWITCH.contains(&code) || message.contains(OTHER_TYPE);
        let reason = if segment.own && !of_switch { LeftOut::Unviable } else { LeftOut::Alone };
        for id in &segment.mutants {
            let mutant = mutants.get(*id as usize - 1).context("a mutant that is not in the list")?;
            refused.insert(mutant.name.clone(), Without { reason, message: message.clone() });
        }
    }
    Ok(refused)
}

fn said(errors: &[Value]) -> String {
    errors.iter().filter_map(|error| error["rendered"].as_str()).collect()
}
