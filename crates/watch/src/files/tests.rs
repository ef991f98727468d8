use std::io::Write;

use plimsoll_monitor::{Owner, Record, Recorder};
use plimsoll_train::LOCK;

use super::*;
use crate::terminal::tests::metrics;

fn line(step: u64) -> String {
    serde_json::to_string(&metrics(step)).unwrap() + "\n"
}

struct Run {
    folder: tempfile::TempDir,
    files: RunFiles,
    view: View,
}

impl Run {
    fn new() -> Run {
        let folder = tempfile::tempdir().unwrap();
        let files = RunFiles::of(folder.path());
        Run { files, view: View::of("run"), folder }
    }

    fn write(&self, name: &str, text: &str) {
        std::fs::write(self.folder.path().join(name), text).unwrap();
    }

    fn append(&self, text: &str) {
        let path = self.folder.path().join(METRICS);
        let file = std::fs::OpenOptions::new().append(true).create(true).open(path);
        file.unwrap().write_all(text.as_bytes()).unwrap();
    }

    fn record(&self, ended: Option<&str>, time: f64) {
        let about = About { pid: 1, planned_bytes: Some(77), ..About::default() };
        let mut recorder = Recorder::begin(&self.folder.path().join(FLIGHT_RECORDER), about).unwrap();
        let owners = vec![Owner { name: "weights".into(), bytes: 5 }];
        recorder.record(&Record { time, step: Some(2), rss: 9, owners, ..Record::default() }).unwrap();
        if let Some(how) = ended {
            recorder.end(how).unwrap();
        }
    }

    fn report(&self, steps: u64, finished: bool) {
        let text = format!(
            r#"{{"planned":{{"device_peak_bytes":1,"overhead_bytes":1,"host_peak_bytes":0,"disk_bytes":0,"process_bytes":88,"step_seconds":1.0,"tokens_per_second":1.0}},
            "measured":{{"device_peak_bytes":1,"host_peak_bytes":0,"disk_bytes":0,"process_peak_rss_bytes":1,"step_seconds_median":1.0}},
            "tokens_per_second_median":1.0,"io":null,"rung_changes":0,"steps":{steps},"tokens":1,"first_loss":1.0,"last_loss":1.0,
            "validation_loss":null,"finished":{finished},"seconds":1.0}}"#
        );
        self.write(REPORT, &text);
    }

    fn look(&mut self, at: f64) -> &State {
        while self.files.look(&mut self.view, at) {}
        &self.view.state
    }

    fn events(&self) -> Vec<String> {
        self.view.events().map(ToString::to_string).collect()
    }
}

#[test]
fn a_run_is_followed_from_its_beginning_to_its_end() {
    let mut run = Run::new();
    let start = now();
    assert_eq!(run.look(start), &State::Waiting);
    run.record(None, start);
    assert_eq!(run.look(start + 1.0), &State::Waiting);
    run.append(&line(1));
    run.append(&line(2)[..50]);
    assert_eq!(run.look(start + 1.0), &State::Running);
    assert_eq!((run.view.steps_done(), run.view.rss_bytes()), (1, Some(9)));
    assert_eq!(run.view.planned_process_bytes(), Some(77));
    run.append(&line(2)[50..]);
    std::fs::create_dir(run.folder.path().join("checkpoint-2")).unwrap();
    run.look(start + 2.0);
    assert_eq!(run.view.steps_done(), 2);
    let said = run.events();
    assert!(said.iter().any(|event| event.starts_with("step 2: saved ")), "{said:?}");
    run.report(2, true);
    run.record(Some("the run is complete"), start + 2.0);
    assert_eq!(run.look(start + 60.0), &State::Finished);
    assert_eq!(run.view.planned_process_bytes(), Some(88));
}

#[test]
fn a_run_that_says_no_more_is_told_from_one_that_has_ended() {
    let mut run = Run::new();
    let start = now();
    run.append(&line(1));
    run.record(None, start);
    assert_eq!(run.look(start + 5.0), &State::Running);
    assert_eq!(run.look(start + 90.0), &State::Silent(90));
    run.record(Some("the disk is full"), start);
    assert_eq!(run.look(start + 90.0), &State::Ended("the disk is full".to_owned()));
    // Stopped, and then resumed: the report is still that of the part before.
    run.report(1, false);
    assert_eq!(run.look(start + 90.0), &State::Stopped);
    run.record(None, start + 90.0);
    assert_eq!(run.look(start + 91.0), &State::Running);
}

/// A run that was killed has left its lock. That of a process on another machine says nothing here.
#[test]
#[cfg(target_os = "linux")]
fn a_run_that_was_killed_has_ended() {
    let mut run = Run::new();
    let (start, host) = (now(), std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap());
    let numbering = std::fs::read_link("/proc/self/ns/pid").unwrap();
    let lock = |process: u32, host: &str| format!("{process} {} {}\n", host.trim(), numbering.display());
    let killed = State::Ended(KILLED.to_owned());
    run.write(LOCK, &lock(u32::MAX, &host));
    assert_eq!(run.look(start), &killed);
    run.append(&line(1));
    run.record(None, start);
    assert_eq!(run.look(start + 5.0), &State::Running);
    assert_eq!(run.look(start + 90.0), &killed);
    for other in [lock(std::process::id(), &host), lock(u32::MAX, "another"), format!("{} {host}", u32::MAX)]
    {
        run.write(LOCK, &other);
        assert!(matches!(run.look(start + 90.0), State::Silent(_)), "{other}");
    }
}

/// A run that resumes writes the lines up to its checkpoint into another file of the same name.
#[test]
fn a_run_that_resumes_forgets_the_steps_behind_its_checkpoint() {
    let mut run = Run::new();
    (1..=5).for_each(|step| run.append(&line(step)));
    run.look(now());
    assert_eq!(run.view.steps_done(), 5);
    run.write("aside", &(line(1) + &line(2)));
    std::fs::rename(run.folder.path().join("aside"), run.folder.path().join(METRICS)).unwrap();
    run.append(&line(3));
    run.look(now());
    assert_eq!((run.view.steps_done(), run.view.curve.points(None).len()), (3, 3));
    assert!(run.events().contains(&"the run was begun anew or resumed".to_owned()), "{:?}", run.events());
}

#[test]
fn hostile_files_are_told_once_and_harm_nothing() {
    let mut run = Run::new();
    run.write(FLIGHT_RECORDER, &"x".repeat(5000));
    run.write(REPORT, "{");
    run.append(&"\u{1b}[2J\n".repeat(50));
    run.append(&line(3));
    for _ in 0..3 {
        run.look(now());
    }
    let said = run.events();
    assert_eq!(run.view.steps_done(), 3);
    assert_eq!(said.iter().filter(|event| event.contains("says no step")).count(), 5, "{said:?}");
    assert_eq!(said.iter().filter(|event| event.contains("no flight recording")).count(), 1, "{said:?}");
    assert_eq!(said.iter().filter(|event| event.contains("report.json")).count(), 1, "{said:?}");
    // What is no file at all.
    let mut run = Run::new();
    for name in [METRICS, REPORT, FLIGHT_RECORDER] {
        std::fs::create_dir(run.folder.path().join(name)).unwrap();
    }
    run.look(now());
    assert!(!RunFiles::are_in(run.folder.path()));
}

#[test]
fn steps_tell_what_happened() {
    let mut run = Run::new();
    let of = |step: u64, rung: u64| StepMetrics { rung, ..metrics(step) };
    for (step, rung) in [(19, 0), (20, 0), (21, 1), (22, 0)] {
        run.append(&(serde_json::to_string(&of(step, rung)).unwrap() + "\n"));
    }
    run.look(now());
    let said = run.events();
    for text in [
        "step 19: memory is near the load line: 240.0 MiB of 256.0 MiB",
        "step 20: validation loss 2.5000, perplexity 12.182",
        "step 21: went on by plan 1, which needs less memory",
        "step 22: went on by plan 0, which needs more memory",
    ] {
        assert!(said.contains(&text.to_owned()), "{text} is not in {said:?}");
    }
    assert_eq!(run.view.rungs, [(21, 1), (22, 0)]);
}
