//! `monitor` watches what others run, says what it sees, and explains a run after its end.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::support::{folder, ok, plimsoll, text};
use serde_json::Value;

fn lines(out: &str) -> Vec<Value> {
    out.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{line}: {e}"))).collect()
}

#[test]
fn a_command_is_watched_and_its_exit_status_passed_on() {
    let folder = folder();
    let args = [
        "monitor",
        "--command",
        "echo said; sleep 0.5; exit 7",
        "--interval",
        "50ms",
        "--json",
        "--log",
        "log.jsonl",
    ];
    let output = plimsoll(folder.path(), &args);
    assert_eq!(output.status.code(), Some(7), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("said"));
    let all = lines(&text(&output.stdout));
    let (last, samples) = all.split_last().unwrap();
    assert_eq!(last["leak"]["suspected"], false);
    assert!(!samples.is_empty());
    for key in [
        "time",
        "pid",
        "rss_bytes",
        "anonymous_bytes",
        "file_bytes",
        "limit_bytes",
        "gpu",
        "status",
        "forecast_seconds",
        "growing",
    ] {
        assert!(samples[0].get(key).is_some(), "{key} of {}", samples[0]);
    }
    assert!(samples.iter().all(|line| line["status"].is_string() && line["limit_bytes"].as_u64() > Some(0)));
    let logged = std::fs::read_to_string(folder.path().join("log.jsonl")).unwrap();
    assert_eq!(lines(&logged), all);
    let output = plimsoll(folder.path(), &["monitor", "--command", "kill -TERM $$", "--interval", "50ms"]);
    assert_eq!(output.status.code(), Some(143));
}

/// A limit of one byte is passed at once.
#[test]
fn what_is_critical_is_told_by_a_command_and_a_signal() {
    let folder = folder();
    let output = plimsoll(
        folder.path(),
        &[
            "monitor",
            "--command",
            "trap 'echo asked > signalled; exit 5' USR1; while :; do sleep 0.05; done",
            "--limit",
            "1",
            "--interval",
            "300ms",
            "--on-critical",
            "echo $PLIMSOLL_STATUS > told",
            "--signal",
            "USR1",
            "--json",
        ],
    );
    let code = output.status.code();
    // The shell may not have set its trap yet when the first sample is taken.
    assert!(code == Some(5) || code == Some(128 + 10), "{code:?} {}", text(&output.stderr));
    assert_eq!(std::fs::read_to_string(folder.path().join("told")).unwrap(), "emergency\n");
}

#[test]
fn what_cannot_be_watched_is_said() {
    let folder = folder();
    let refused = |args: &[&str]| {
        let output = plimsoll(folder.path(), &[&["monitor"], args].concat());
        assert!(!output.status.success());
        text(&output.stderr)
    };
    assert!(refused(&["--pid", "4194304000"]).contains("--pid"));
    assert!(refused(&["--pid", "4194303"]).contains("no such process"));
    assert!(refused(&["--cgroup", "."]).contains("no memory control group"));
    assert!(refused(&["--cgroup", "/no/such/group"]).contains("/sys/fs/cgroup"));
    assert!(refused(&[]).contains("--pid"));
    assert!(refused(&["--pid", "1", "--warning-threshold", "0.99"]).contains("have to rise"));
    assert!(refused(&["--post-mortem", "c.yaml"]).contains("no flight recording"));
    assert!(refused(&["--post-mortem", "."]).contains("flight-recorder.bin"));
}

/// GPUs are read by the driver's library where the system finds one: here, one that a compiler has just made.
#[test]
fn gpus_are_watched_through_the_drivers_library() {
    const DRIVER: &str = r#"
typedef struct { unsigned long long total, free, used; } memory;
typedef struct { unsigned int pid; unsigned long long used; unsigned int gpu, compute; } process;
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { return "no"; }
int nvmlDeviceGetCount_v2(unsigned int *count) { *count = 1; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **out) { *out = 0; return 0; }
int nvmlDeviceGetMemoryInfo(void *d, memory *m) { m->total = 1000; m->used = 960; m->free = 40; return 0; }
int nvmlDeviceGetComputeRunningProcesses_v3(void *d, unsigned int *count, process *list) { *count = 1; list[0].pid = 5; list[0].used = 900; return 0; }
"#;
    let folder = folder();
    let args = ["monitor", "--gpu", "0", "--duration", "50ms", "--interval", "20ms", "--json"];
    std::fs::write(folder.path().join("driver.c"), DRIVER).unwrap();
    let library = folder.path().join("libnvidia-ml.so.1");
    let mut cc = Command::new("cc");
    let made = cc.args(["-shared", "-fPIC", "-o"]).arg(&library).arg(folder.path().join("driver.c")).status();
    if !made.is_ok_and(|made| made.success()) {
        return;
    }
    let mut monitor = Command::new(env!("CARGO_BIN_EXE_plimsoll"));
    let watch = |monitor: &mut Command, args: &[&str]| {
        monitor.args(args).env("LD_LIBRARY_PATH", folder.path()).output().unwrap()
    };
    let output = watch(&mut monitor, &args);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let first = &lines(&text(&output.stdout))[0];
    assert_eq!((&first["gpu"][0]["used_bytes"], &first["limit_bytes"]), (&960.into(), &1000.into()));
    assert_eq!((&first["status"], &first["gpu"][0]["processes"][0]["pid"]), (&"critical".into(), &5.into()));
    let output = watch(&mut Command::new(env!("CARGO_BIN_EXE_plimsoll")), &["monitor", "--gpu", "3"]);
    assert!(text(&output.stderr).contains("this machine has 1"), "{}", text(&output.stderr));
}

#[test]
fn the_last_sample_is_served_to_prometheus() {
    let folder = folder();
    let mut monitor = Command::new(env!("CARGO_BIN_EXE_plimsoll"))
        .current_dir(folder.path())
        .args([
            "monitor",
            "--pid",
            &std::process::id().to_string(),
            "--prometheus",
            "0",
            "--duration",
            "60s",
            "--json",
        ])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = String::new();
    BufReader::new(monitor.stderr.as_mut().unwrap()).read_line(&mut said).unwrap();
    let address = said.trim().trim_start_matches("serving http://").trim_end_matches("/metrics").to_owned();
    assert!(address.starts_with("127.0.0.1:"), "{said}");
    let get = |path: &str| {
        let mut client = TcpStream::connect(&address).unwrap();
        write!(client, "GET {path} HTTP/1.0\r\n\r\n").unwrap();
        let mut answer = String::new();
        client.read_to_string(&mut answer).unwrap();
        answer
    };
    // The first sample is there soon.
    let served = (0..600).map(|_| get("/metrics")).find(|page| {
        std::thread::sleep(Duration::from_millis(20));
        page.contains("plimsoll_rss_bytes ")
    });
    let page = served.unwrap();
    assert!(
        page.starts_with("HTTP/1.1 200 OK") && page.contains("# TYPE plimsoll_limit_bytes gauge"),
        "{page}"
    );
    assert!(get("/secret").starts_with("HTTP/1.1 404"));
    monitor.kill().unwrap();
    monitor.wait().unwrap();
}

/// A run writes its recording; after SIGKILL it says what there was.
#[test]
fn a_run_that_was_killed_is_explained() {
    let folder = folder();
    let mut run = Command::new(env!("CARGO_BIN_EXE_plimsoll"))
        .env("XDG_CACHE_HOME", env!("CARGO_TARGET_TMPDIR"))
        .current_dir(folder.path())
        .args(["train", "c.yaml", "--set", "training.steps=1000000", "--set", "output.save_steps=0"])
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let seen = || -> Option<Value> {
        std::thread::sleep(Duration::from_millis(50));
        let output = plimsoll(folder.path(), &["monitor", "--post-mortem", "out", "--json"]);
        serde_json::from_slice(&output.stdout).ok()
    };
    let going =
        (0..1200).find_map(|_| seen().filter(|found| found["last"]["step"].as_u64() > Some(0))).unwrap();
    assert_eq!(going["cause"], "running");
    run.kill().unwrap();
    run.wait().unwrap();
    let found = seen().unwrap();
    assert_eq!(found["cause"], "not_memory", "{found}");
    let owners = found["last"]["owners"].as_array().unwrap();
    assert!(owners.iter().any(|owner| owner["name"] == "weights"), "{found}");
    let own = owners.iter().filter(|owner| !owner["name"].as_str().unwrap().starts_with("others"));
    let named: u64 = own.filter_map(|owner| owner["bytes"].as_u64()).sum();
    assert!(named as f64 >= 0.99 * found["last"]["rss"].as_f64().unwrap(), "{found}");
    let said = ok(folder.path(), &["monitor", "--post-mortem", "out"]);
    assert!(said.contains("a signal") && said.contains("last seen after step"), "{said}");

    // A run that ends by itself says so.
    let said = ok(
        folder.path(),
        &["train", "c.yaml", "--set", "output.dir=whole", "--set", "output.logging_steps=1"],
    );
    assert!(said.contains("[Step 3] Memory: ") && said.contains("Status: normal"), "{said}");
    let found = ok(folder.path(), &["monitor", "--post-mortem", "whole"]);
    assert!(found.contains("the run is complete"), "{found}");
    let metrics = std::fs::read_to_string(folder.path().join("whole/metrics.jsonl")).unwrap();
    let memory = &lines(&metrics)[3]["memory"];
    assert_eq!((&memory["status"], &memory["limit_bytes"]), (&"normal".into(), &(256 << 20).into()));
    assert!(memory["utilization"].as_f64() > Some(0.0));
    let silent = ["train", "c.yaml", "--set", "output.dir=silent", "--set", "memory.silent_mode=true"];
    assert!(!ok(folder.path(), &silent).contains("Memory: "));
}

/// Whatever a monitor was killed with, what it recorded is there.
#[test]
fn a_monitor_records_what_others_do() {
    let folder = folder();
    // The shell goes on until its child was seen; the child outlives it, so that the last record has both.
    let command = "sleep 9 >/dev/null 2>&1 & for i in $(seq 600); do grep -q '\"sleep\"' log && break; sleep 0.05; done";
    let args = ["--interval", "20ms", "--record", "flight", "--log", "log", "--json"];
    ok(folder.path(), &[&["monitor", "--command", command][..], &args].concat());
    let found = ok(folder.path(), &["monitor", "--post-mortem", "flight"]);
    assert!(found.starts_with(&format!("{command}: it ended by itself: exit status 0")), "{found}");
    assert!(found.contains("  sleep (") && found.contains("others on the machine"), "{found}");
}
