//! Disks that are full, limits on file sizes, folders that cannot be written: the run ends with an error that says
//! what to do, leaves nothing half-written, and what was there before stays whole.
#![cfg(unix)]

use std::collections::BTreeSet;
use std::path::Path;
use std::process::{Command, Output};

/// A model of some 280 kB and as much again, twice, for its optimizer.
const CONFIG: &str = "
model:
  from_scratch: {hidden_size: 64, intermediate_size: 96, num_hidden_layers: 1, num_attention_heads: 2}
data: {train: text.txt, sequence_length: 12}
training: {steps: 4, batch_size: 2, learning_rate: 1e-2}
memory: {device_budget: 256MiB}
output: {dir: out, save_steps: 0, save_total_limit: 9}
";

/// What a run has written before it saves anything.
const BEFORE_SAVING: [&str; 3] = ["flight-recorder.bin", "metrics.jsonl", "plimsoll.yaml"];

fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let words: String = (0..200).map(|i| format!("word{} ", i * 7 % 23)).collect();
    std::fs::write(folder.path().join("text.txt"), words).unwrap();
    std::fs::write(folder.path().join("c.yaml"), CONFIG).unwrap();
    folder
}

/// Runs the program as `"$0" "$@"` of a shell script.
fn shell(folder: &Path, script: &str, arguments: &[&str]) -> Output {
    let mut command = Command::new("sh");
    command.env("XDG_CACHE_HOME", env!("CARGO_TARGET_TMPDIR"));
    command.current_dir(folder).args(["-c", script, env!("CARGO_BIN_EXE_plimsoll")]).args(arguments);
    command.output().unwrap()
}

/// Fails where a file would get more than 30 or 60 kB: shells count in units of 512 or of 1024 bytes.
fn with_small_files(folder: &Path, arguments: &[&str]) -> Output {
    shell(folder, r#"ulimit -f 60 && exec "$0" "$@""#, arguments)
}

/// Runs the program with a file system of its own mounted on `disk` with these options; after it, standard output
/// lists the run's folder there. `None`, and a word of it, where the system does not let users mount.
fn with_own_disk(folder: &Path, options: &str, arguments: &[&str]) -> Option<Output> {
    let script = r#""$0" "$@" > /dev/null; code=$?; ls -A disk/out; exit $code"#;
    on_own_disk(folder, options, script, arguments)
}

/// Runs the program as `"$0" "$@"` of a shell script that has such a file system.
fn on_own_disk(folder: &Path, options: &str, script: &str, arguments: &[&str]) -> Option<Output> {
    std::fs::create_dir_all(folder.join("disk")).unwrap();
    let mount = format!("mount -t tmpfs -o {options} tmpfs disk");
    let unshared = |script: &str| {
        let mut command = Command::new("unshare");
        command.current_dir(folder).args(["-r", "-m", "sh", "-c", script, env!("CARGO_BIN_EXE_plimsoll")]);
        command
    };
    if !unshared(&mount).output().is_ok_and(|output| output.status.success()) {
        println!("skipped: this system does not let a user mount a file system of its own (unshare -r -m)");
        return None;
    }
    Some(unshared(&format!("{mount} && {script}")).args(arguments).output().unwrap())
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// The error of a program that ended by itself, with the code for errors.
fn error(output: &Output) -> String {
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(!error.contains("panicked"), "{error}");
    error
}

fn names(folder: &Path) -> BTreeSet<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

fn check_contains(error: &str, words: &[&str]) {
    for word in words {
        assert!(error.contains(word), "{error:?} has no {word:?}");
    }
}

#[test]
fn a_model_beyond_the_limit_of_file_sizes_is_an_error_that_leaves_nothing() {
    let folder = folder();
    let output = with_small_files(folder.path(), &["train", "c.yaml"]);
    check_contains(&error(&output), &["could not write", "model.safetensors", "ulimit -f"]);
    assert_eq!(names(&folder.path().join("out")), BEFORE_SAVING.map(str::to_owned).into());
}

#[test]
fn a_failed_checkpoint_leaves_the_earlier_ones_and_the_model_whole() {
    let folder = folder();
    let out = folder.path().join("out");
    let train = ["train", "c.yaml", "--set", "output.save_steps=2"];
    let resume = [&train[..], &["--resume"]].concat();
    assert!(shell(folder.path(), r#""$0" "$@""#, &train).status.success());
    let model = std::fs::read(out.join("model.safetensors")).unwrap();
    std::fs::remove_dir_all(out.join("checkpoint-4")).unwrap();
    let before = names(&out);

    let output = with_small_files(folder.path(), &resume);
    check_contains(&error(&output), &["could not write", "ulimit -f"]);
    assert_eq!(names(&out), before);
    assert_eq!(std::fs::read(out.join("model.safetensors")).unwrap(), model);

    assert!(shell(folder.path(), r#""$0" "$@""#, &resume).status.success());
    assert_eq!(std::fs::read(out.join("model.safetensors")).unwrap(), model, "the same bits as unbroken");
}

#[test]
fn output_that_cannot_be_written_is_an_error_and_no_reason_to_stop_a_run() {
    let folder = folder();
    if !Path::new("/dev/full").exists() {
        println!("skipped: this system has no /dev/full");
        return;
    }
    let output = shell(folder.path(), r#"exec "$0" "$@" > /dev/full"#, &["config"]);
    check_contains(&error(&output), &["could not write to standard output", "No space left"]);
    let output = shell(folder.path(), r#"exec "$0" "$@" > /dev/full"#, &["train", "c.yaml"]);
    check_contains(&error(&output), &["could not write to standard output"]);
    assert!(folder.path().join("out/model.safetensors").exists());
    // Nobody reads standard error, so that the exit code has to say it.
    assert_eq!(shell(folder.path(), r#"exec "$0" "$@" 2> /dev/full"#, &["plan"]).status.code(), Some(2));

    // A reader that has seen enough.
    let output = shell(folder.path(), r#"{ "$0" "$@"; echo "code $?" >&2; } | true"#, &["config"]);
    assert_eq!(text(&output.stderr), "code 0\n");
}

#[test]
fn what_a_killed_run_left_is_swept_away() {
    let folder = folder();
    let left = folder.path().join("out/.saving-killed");
    std::fs::create_dir_all(&left).unwrap();
    std::fs::write(left.join("model.safetensors"), "half").unwrap();
    assert!(shell(folder.path(), r#""$0" "$@""#, &["train", "c.yaml"]).status.success());
    assert!(!left.exists());
}

#[test]
fn a_full_disk_is_an_error_that_leaves_nothing() {
    let folder = folder();
    // Room for the configuration, not for the model; then for nothing.
    for (size, words) in [
        ("size=200k", &["the run would write", "(its model)", "has room for", "free some space"][..]),
        ("size=4k", &["No space left", "free some space"]),
    ] {
        let sets = ["--set", "output.dir=disk/out", "--set", "training.mixed_precision=f32"];
        let arguments = [&["train", "c.yaml"][..], &sets].concat();
        let Some(output) = with_own_disk(folder.path(), size, &arguments) else { return };
        check_contains(&error(&output), words);
        for name in text(&output.stdout).lines() {
            assert!(BEFORE_SAVING.contains(&name), "{size}: {name} was left");
        }
    }
}

#[test]
fn room_is_asked_for_before_much_data_is_read() {
    let folder = folder();
    // Tokens of that much text would fill the disk first.
    std::fs::File::create(folder.path().join("long.txt")).unwrap().set_len(33 << 20).unwrap();
    let arguments = ["train", "c.yaml", "--set", "output.dir=disk/out", "--set", "data.train=long.txt"];
    let Some(output) = with_own_disk(folder.path(), "size=100k", &arguments) else { return };
    check_contains(&error(&output), &["the run would write", "(its model)", "has room for"]);
}

#[test]
fn room_is_asked_for_all_checkpoints_that_are_there_at_once() {
    let folder = folder();
    // A checkpoint takes 0.8 MiB. Two are kept, and the third is written before the first is removed.
    let arguments = [
        "train",
        "c.yaml",
        "--set",
        "output.dir=disk/out",
        "--set",
        "output.save_steps=1",
        "--set",
        "output.save_total_limit=2",
        "--set",
        "training.mixed_precision=f32",
    ];
    let Some(output) = with_own_disk(folder.path(), "size=2m", &arguments) else { return };
    check_contains(&error(&output), &["3 checkpoints at once", "output.save_total_limit"]);
    assert!(!text(&output.stdout).contains("metrics"), "nothing was begun");
    let Some(output) = with_own_disk(folder.path(), "size=4m", &arguments) else { return };
    assert!(output.status.success(), "{}", text(&output.stderr));
}

/// One whose disk is full when the last step is done.
const FILLED: &str = r#"
    page=4096
    pages() { echo $(( ($1 + page - 1) / page )); }
    room=$(( $(stat -f -c %a disk) * $(stat -f -c %S disk) ))
    # The configuration, the tokens and the weights fit, not these, the metrics and the model's other six files.
    head -c $(( room - 5 * page - $(pages $WEIGHTS) * page )) /dev/zero > disk/filler
    "$0" "$@" > /dev/null 2> errors &
    tries=0
    until grep -q "waits for space" errors || [ $tries -gt 600 ]; do sleep 0.1; tries=$((tries + 1)); done
    rm disk/filler
    wait $!; code=$?; cat errors >&2; cp disk/out/model.safetensors . ; exit $code"#;

#[test]
fn a_run_without_a_checkpoint_waits_for_space() {
    let folder = folder();
    assert!(shell(folder.path(), r#""$0" "$@""#, &["train", "c.yaml"]).status.success());
    let model = std::fs::read(folder.path().join("out/model.safetensors")).unwrap();
    let header = model.first_chunk().map(|length| u64::from_le_bytes(*length)).unwrap();
    let weights = model.len() as u64 - 8 - header;

    let arguments = ["train", "c.yaml", "--set", "output.dir=disk/out"];
    let script = FILLED.replace("$WEIGHTS", &weights.to_string());
    let Some(output) = on_own_disk(folder.path(), "size=4m", &format!("{{ {script}\n}}"), &arguments) else {
        return;
    };
    let said = text(&output.stderr);
    assert!(output.status.success(), "{said}");
    check_contains(&said, &["No space left", "waits for space"]);
    assert!(std::fs::read(folder.path().join("model.safetensors")).unwrap() == model, "another model");
}

#[test]
fn a_folder_that_cannot_be_written_is_named() {
    use std::os::unix::fs::PermissionsExt;
    let folder = folder();
    let arguments = ["train", "c.yaml", "--set", "output.dir=disk/out"];
    if let Some(output) = with_own_disk(folder.path(), "ro", &arguments) {
        check_contains(
            &error(&output),
            &["disk/out", "Read-only", "choose an output.dir that you may write to"],
        );
    }
    let disk = folder.path().join("disk");
    std::fs::create_dir_all(&disk).unwrap();
    std::fs::set_permissions(&disk, std::fs::Permissions::from_mode(0o555)).unwrap();
    if std::fs::write(disk.join("probe"), "").is_ok() {
        println!("skipped: this user may write everywhere");
        return;
    }
    let output = shell(folder.path(), r#""$0" "$@""#, &arguments);
    check_contains(&error(&output), &["disk/out", "choose an output.dir that you may write to"]);
}
