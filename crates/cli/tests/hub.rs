//! Models by hub id, from a server on loopback, through every command that takes a model.

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use crate::support::{folder, ok, text};

/// Serves a folder as the repository of every id, each file as a whole.
fn serve(files: PathBuf) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            // A client may go away before it has everything.
            drop(answer(stream, &files));
        }
    });
    address
}

fn answer(mut stream: TcpStream, files: &Path) -> std::io::Result<()> {
    let mut lines = BufReader::new(stream.try_clone()?).lines();
    let first = lines.next().unwrap_or(Ok(String::new()))?;
    for line in lines {
        if line?.is_empty() {
            break;
        }
    }
    let path = first.split(' ').nth(1).unwrap_or_default();
    let name = path.split_once("/resolve/main/").map_or("none", |(_, name)| name);
    let Ok(bytes) = std::fs::read(files.join(name)) else {
        return write!(stream, "HTTP/1.1 404 X\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
    };
    write!(
        stream,
        "HTTP/1.1 200 OK\r\nETag: \"{}-{}\"\r\nX-Repo-Commit: abc123\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        name.replace('.', "_"),
        bytes.len(),
        bytes.len()
    )?;
    stream.write_all(&bytes)
}

/// A folder with a trained model in `out`, and a hub that has it.
struct Setup {
    folder: tempfile::TempDir,
    endpoint: String,
}

impl Setup {
    fn new() -> Setup {
        let folder = folder();
        ok(folder.path(), &["train", "c.yaml"]);
        let endpoint = serve(folder.path().join("out"));
        Setup { folder, endpoint }
    }

    fn run(&self, variables: &[(&str, &str)], arguments: &[&str]) -> Output {
        Command::new(env!("CARGO_BIN_EXE_plimsoll"))
            .env("XDG_CACHE_HOME", env!("CARGO_TARGET_TMPDIR"))
            .current_dir(self.folder.path())
            .args(arguments)
            .env("HF_ENDPOINT", &self.endpoint)
            .env("HF_HOME", self.folder.path().join("hf"))
            .env_remove("HF_HUB_CACHE")
            .env_remove("HF_TOKEN")
            .env_remove("HF_HUB_OFFLINE")
            .env("NO_PROXY", "127.0.0.1")
            .envs(variables.iter().copied())
            .output()
            .unwrap()
    }

    fn ok(&self, variables: &[(&str, &str)], arguments: &[&str]) -> (String, String) {
        let output = self.run(variables, arguments);
        assert!(output.status.success(), "{arguments:?}: {}", text(&output.stderr));
        (text(&output.stdout), text(&output.stderr))
    }
}

#[test]
fn every_command_takes_a_hub_id() {
    let setup = Setup::new();
    let arguments = ["plan", "--model", "org/tiny", "--sequence-length", "12", "--budget", "256MiB"];
    let (plan, said) = setup.ok(&[], &arguments);
    assert!(plan.starts_with("tiny: llama"), "{plan}");
    assert!(said.contains("fetching org/tiny"), "{said}");
    let snapshot = setup.folder.path().join("hf/hub/models--org--tiny/snapshots/abc123");
    assert!(snapshot.join("model.safetensors").is_file());

    let loss = |model: &str| {
        let (document, _) = setup.ok(&[], &["eval", "--model", model, "--data", "text.txt", "--json"]);
        let mut document: serde_json::Value = serde_json::from_str(&document).unwrap();
        // What a process takes differs from run to run.
        assert!(document.as_object_mut().unwrap().remove("memory").is_some());
        document
    };
    assert_eq!(loss("org/tiny"), loss("out"));
    setup.ok(&[], &["generate", "--model", "org/tiny", "--prompt", "word", "--max-tokens", "2"]);
    let (inspected, said) = setup.ok(&[], &["inspect", "org/tiny", "--json"]);
    let inspected: serde_json::Value = serde_json::from_str(&inspected).unwrap();
    assert_eq!((&inspected["kind"], &inspected["name"]), (&"model".into(), &"tiny".into()));
    assert_eq!(said, "");
    setup.ok(
        &[],
        &[
            "train",
            "--model",
            "org/tiny",
            "--set",
            "data.train=text.txt",
            "--set",
            "data.sequence_length=12",
            "--set",
            "training.steps=1",
            "--set",
            "output.dir=tuned",
            "--budget",
            "256MiB",
        ],
    );
    let saved = std::fs::read_to_string(setup.folder.path().join("tuned/plimsoll.yaml")).unwrap();
    assert!(saved.contains("org/tiny"), "{saved}");

    // Later without the hub.
    let nobody = ("HF_ENDPOINT", "http://127.0.0.1:1");
    setup.ok(&[("HF_HUB_OFFLINE", "1"), nobody], &["inspect", "org/tiny"]);
    let (_, said) = setup.ok(&[nobody], &["inspect", "org/tiny"]);
    assert!(said.contains("cannot be reached"), "{said}");
}

#[test]
fn what_is_neither_here_nor_there_names_both_readings() {
    let setup = Setup::new();
    let fails = |variables: &[(&str, &str)], code: i32, model: &str| {
        let output = setup.run(variables, &["eval", "--model", model, "--data", "text.txt"]);
        assert_eq!(output.status.code(), Some(code), "{model}: {}", text(&output.stderr));
        text(&output.stderr)
    };
    for model in ["nowhere/model.gguf", "a/b/c", "./x", "noname", "org/na me"] {
        let error = fails(&[], 2, model);
        assert!(error.contains("no such file or folder here") && error.contains("hub id"), "{error}");
    }
    let error = fails(&[("HF_HUB_OFFLINE", "1")], 1, "org/other");
    assert!(error.contains("HF_HUB_OFFLINE is set") && error.contains("org/other"), "{error}");
    let error = fails(&[], 2, "org/tiny:none.gguf");
    assert!(error.contains("no file \"none.gguf\""), "{error}");
    let error = fails(&[("HF_ENDPOINT", "nonsense")], 2, "org/other");
    assert!(error.contains("HF_ENDPOINT"), "{error}");
    // What is on disk wins.
    std::fs::create_dir(setup.folder.path().join("org")).unwrap();
    std::fs::rename(setup.folder.path().join("out"), setup.folder.path().join("org/mine")).unwrap();
    setup.ok(&[("HF_ENDPOINT", "http://127.0.0.1:1")], &["inspect", "org/mine"]);
}
