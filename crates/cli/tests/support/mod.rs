//! What tests of the program share.

use std::path::Path;
use std::process::{Command, Output};

/// Runs the program in a folder.
pub fn plimsoll(folder: &Path, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_plimsoll"))
        .env("XDG_CACHE_HOME", env!("CARGO_TARGET_TMPDIR"))
        .current_dir(folder)
        .args(arguments)
        .output()
        .unwrap()
}

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Runs a command that must succeed; its standard output.
pub fn ok(folder: &Path, arguments: &[&str]) -> String {
    let output = plimsoll(folder, arguments);
    assert!(output.status.success(), "{arguments:?}: {}", text(&output.stderr));
    text(&output.stdout)
}

const CONFIG: &str = "
model:
  from_scratch: {hidden_size: 16, intermediate_size: 24, num_hidden_layers: 2, num_attention_heads: 2}
data: {train: text.txt, sequence_length: 12}
training: {steps: 4, batch_size: 2, gradient_accumulation_steps: 1, learning_rate: 1e-2}
memory: {device_budget: 256MiB}
output: {dir: out, save_steps: 2}
";

/// A folder with a text and a configuration whose run goes to `out`.
pub fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let words: String = (0..200).map(|i| format!("word{} ", i * 7 % 23)).collect();
    std::fs::write(folder.path().join("text.txt"), words).unwrap();
    std::fs::write(folder.path().join("c.yaml"), CONFIG).unwrap();
    folder
}
