//! What a run leaves on disk when the machine stops at any moment: files and folders are synced before they get the names that
//! readers look for, and nothing is removed before what replaces it has its name.
//!
//! A library that is loaded before the program's own (`durability/trace.c`) writes down every sync, rename and removal, and
//! ends the program before any one of them.
#![cfg(all(target_os = "linux", target_env = "gnu"))]

use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};

/// A checkpoint after every step, of which one is kept.
const CONFIG: &str = "
model:
  from_scratch: {hidden_size: 8, intermediate_size: 8, num_hidden_layers: 1, num_attention_heads: 1}
data: {train: text.txt, sequence_length: 12}
training: {steps: 3, batch_size: 2, learning_rate: 1e-2}
memory: {device_budget: 256MiB}
output: {dir: out, save_steps: 1, save_total_limit: 1}
";

struct Traced {
    folder: tempfile::TempDir,
    library: PathBuf,
}

#[derive(Clone, Debug, PartialEq)]
enum Action {
    Sync(u64),
    Rename(PathBuf, PathBuf),
    Remove(PathBuf),
}

impl Traced {
    fn new() -> Traced {
        let folder = tempfile::tempdir().unwrap();
        let library = folder.path().join("trace.so");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/durability/trace.c");
        let built = Command::new("cc")
            .args(["-shared", "-fPIC", "-O1", "-o"])
            .args([&library, &source])
            .arg("-ldl")
            .status();
        assert!(built.expect("the C compiler that links Rust programs").success());
        let words: String = (0..200).map(|i| format!("word{} ", i * 7 % 23)).collect();
        std::fs::write(folder.path().join("text.txt"), words).unwrap();
        std::fs::write(folder.path().join("c.yaml"), CONFIG).unwrap();
        Traced { folder, library }
    }

    fn out(&self) -> PathBuf {
        self.folder.path().join("out")
    }

    /// A run that ends before its action of this number.
    fn run(&self, resume: bool, end_at: Option<usize>) -> (ExitStatus, Vec<Action>) {
        let trace = self.folder.path().join("trace");
        let _ = std::fs::remove_file(&trace);
        let mut command = Command::new(env!("CARGO_BIN_EXE_plimsoll"));
        command.current_dir(self.folder.path()).args(["train", "c.yaml", "--threads", "1"]);
        command.args(resume.then_some("--resume"));
        command.env("LD_PRELOAD", &self.library).env("TRACE", &trace);
        command.stdout(Stdio::null()).stderr(Stdio::null());
        if let Some(end_at) = end_at {
            command.env("TRACE_END_AT", end_at.to_string());
        }
        let status = command.status().unwrap();
        let text = std::fs::read_to_string(&trace).unwrap_or_default();
        let here = |path: &str| self.folder.path().join(path);
        let actions = text.lines().map(|line| {
            let words: Vec<&str> = line.split(' ').collect();
            match words[..] {
                ["sync", inode] => Action::Sync(inode.parse().unwrap()),
                ["rename", from, to] => Action::Rename(here(from), here(to)),
                ["remove", path] => Action::Remove(here(path)),
                _ => panic!("{line}"),
            }
        });
        (status, actions.collect())
    }

    fn inode(&self, path: &Path) -> u64 {
        std::fs::metadata(path).unwrap().ino()
    }

    /// The files of a folder.
    fn files(&self, folder: &Path) -> BTreeSet<u64> {
        let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
        entries.map(|path| self.inode(&path)).collect()
    }
}

fn synced(actions: &[Action]) -> BTreeSet<u64> {
    let inode = |action: &Action| if let Action::Sync(inode) = action { Some(*inode) } else { None };
    actions.iter().filter_map(inode).collect()
}

fn renamed_to(actions: &[Action], path: &Path) -> usize {
    let is_it = |action: &Action| matches!(action, Action::Rename(_, to) if to == path);
    actions.iter().position(is_it).unwrap_or_else(|| panic!("nothing became {}", path.display()))
}

#[test]
fn a_checkpoint_is_on_the_disk_before_it_has_its_name_and_its_name_before_the_old_one_goes() {
    let traced = Traced::new();
    let (status, actions) = traced.run(false, None);
    assert!(status.success());
    let out = traced.out();
    let last = out.join("checkpoint-3");
    let named = renamed_to(&actions, &last);
    let (before, after) = actions.split_at(named + 1);
    let metrics = traced.inode(&out.join("metrics.jsonl"));
    let wanted: BTreeSet<u64> = traced.files(&last).into_iter().chain([metrics]).collect();
    let missing: Vec<u64> = wanted.difference(&synced(before)).copied().collect();
    assert_eq!(missing, Vec::<u64>::new(), "not synced before the checkpoint got its name");
    // The names in a folder are synced with the folder: after the last file has its name.
    let is_sync_of = |action: &Action, inodes: &BTreeSet<u64>| matches!(action, Action::Sync(inode) if inodes.contains(inode));
    let files = traced.files(&last);
    let last_file = before.iter().rposition(|action| is_sync_of(action, &files)).unwrap();
    assert!(synced(&before[last_file..]).contains(&traced.inode(&last)), "its folder is not synced");
    // The name itself lies in the run's folder.
    let is_removal = |action: &Action| matches!(action, Action::Remove(path) if path.starts_with(out.join("checkpoint-2")));
    let removal = after.iter().position(is_removal).expect("the checkpoint before is removed after");
    assert!(synced(&after[..removal]).contains(&traced.inode(&out)), "the name is not synced");
    assert!(!before.iter().any(is_removal), "the checkpoint before was removed too early");
    // The final model's files and what else is left get their names one by one.
    let missing: Vec<u64> =
        ["model.safetensors", "config.json", "tokenizer.json", "report.json", "plimsoll.yaml"]
            .iter()
            .map(|name| traced.inode(&out.join(name)))
            .filter(|inode| !synced(&actions).contains(inode))
            .collect();
    assert_eq!(missing, Vec::<u64>::new(), "not synced at all");
}

#[test]
fn a_checkpoint_that_is_written_again_is_kept_until_the_new_one_has_its_name() {
    let traced = Traced::new();
    let out = traced.out();
    let all_kept = CONFIG.replace("save_total_limit: 1", "save_total_limit: 9");
    std::fs::write(traced.folder.path().join("c.yaml"), all_kept).unwrap();
    assert!(traced.run(false, None).0.success());
    // The run goes on from the last folder, and comes by step 3 again.
    std::fs::rename(out.join("checkpoint-2"), out.join("checkpoint-9")).unwrap();
    let (status, actions) = traced.run(true, None);
    assert!(status.success());
    let (path, aside) = (out.join("checkpoint-3"), out.join(".old-checkpoint-3"));
    let (moved, named) = (renamed_to(&actions, &aside), renamed_to(&actions, &path));
    assert!(moved < named);
    let removals = |actions: &[Action]| {
        let is_it = |action: &&Action| matches!(action, Action::Remove(gone) if gone.starts_with(&path) || gone.starts_with(&aside));
        actions.iter().filter(is_it).count()
    };
    assert_eq!(removals(&actions[..named]), 0, "removed before the new one had its name");
    assert!(removals(&actions[named..]) > 0 && !aside.exists());
    assert!(path.join("trainer_state.json").exists());

    // Ended between the two renames: the old one gets its name back.
    std::fs::rename(&path, &aside).unwrap();
    std::fs::remove_dir_all(out.join("checkpoint-9")).unwrap();
    std::fs::remove_dir_all(out.join("checkpoint-1")).unwrap();
    assert!(traced.run(true, None).0.success());
    assert!(path.exists() && !aside.exists());
}

/// The program is ended before each of its actions, and resumed: it always comes to the end, with the same model, and what is
/// called a checkpoint is always whole.
#[test]
fn a_run_that_ends_before_any_of_its_actions_can_be_resumed_to_the_same_bits() {
    let traced = Traced::new();
    let (status, actions) = traced.run(false, None);
    assert!(status.success());
    let out = traced.out();
    let model = std::fs::read(out.join("model.safetensors")).unwrap();
    // From one checkpoint to the next: the removal of the one before, and its own writing. Without a power cut it makes no
    // difference whether what was written is synced, and one file of a folder is removed like another.
    let first = renamed_to(&actions, &out.join("checkpoint-2"));
    let last = renamed_to(&actions, &out.join("checkpoint-3"));
    let is_of_interest = |index: &usize| match &actions[*index] {
        Action::Sync(_) => false,
        Action::Rename(..) => true,
        Action::Remove(path) => path.parent() == Some(&out) || index.is_multiple_of(4),
    };
    let wanted: Vec<usize> = (first..=last + 1).filter(is_of_interest).collect();
    assert!(wanted.len() >= 3, "{actions:?}");
    for end_at in wanted {
        std::fs::remove_dir_all(&out).unwrap();
        let (status, _) = traced.run(false, Some(end_at));
        assert_eq!(status.code(), Some(86), "{end_at}");
        let checkpoints: Vec<PathBuf> = std::fs::read_dir(&out)
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .filter(|path| path.file_name().unwrap().to_str().unwrap().starts_with("checkpoint-"))
            .collect();
        assert!(
            end_at == first || !checkpoints.is_empty(),
            "{end_at}: {:?} left no checkpoint",
            actions[end_at]
        );
        let (status, _) = traced.run(true, None);
        assert!(status.success(), "{end_at}: before {:?}", actions[end_at]);
        assert!(std::fs::read(out.join("model.safetensors")).unwrap() == model, "{end_at}: other bits");
        let names: Vec<_> =
            std::fs::read_dir(&out).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert!(
            !names.iter().any(|name| name.to_str().unwrap().starts_with('.')),
            "{end_at}: before {:?}: {names:?} left over",
            actions[end_at]
        );
    }
}
