use std::fmt::Write as _;

use plimsoll_monitor::{Owner, Record, Status};
use plimsoll_train::{Io, MemoryHealth, MemoryMetrics, StepMetrics};
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::{KeyCode, KeyEvent};

use super::*;
use crate::event::{Event, Kind};
use crate::view::State;

const MIB: u64 = 1 << 20;

pub fn metrics(step: u64) -> StepMetrics {
    StepMetrics {
        step,
        loss: 2.0 + 2.0 / step as f64,
        grad_norm: 1.25,
        skipped: false,
        loss_scale: None,
        lr: 1e-3 * (step as f64 / 10.0).min(1.0),
        tokens: 512 * step,
        tokens_per_second: 256.0,
        batch_size: 2,
        memory: MemoryMetrics {
            device_peak_bytes: 200 * MIB,
            host_peak_bytes: 8 * MIB,
            disk_bytes: 0,
            process_rss_bytes: 240 * MIB,
            health: MemoryHealth {
                status: Status::Warning,
                utilization: 0.9375,
                limit_bytes: 256 * MIB,
                forecast_steps: Some(12),
                growing_bytes_per_step: Some(1e6),
            },
        },
        rung: 0,
        micro_batch_size: 2,
        validation_loss: (step == 20).then_some(2.5),
        io: Some(Io {
            bytes_read: 3 * MIB,
            bytes_written: MIB,
            io_seconds: 1.0,
            waited_seconds: 0.25,
            hidden_share: Some(0.75),
        }),
        ranks_rss_bytes: vec![240 * MIB, 200 * MIB],
        experts: Vec::new(),
        expert_reads: None,
    }
}

/// A run of 40 steps, whose plan is not known.
pub fn view() -> View {
    let mut view = View::of("runs/demo");
    view.total_steps = Some(100);
    view.state = State::Running;
    (1..=40).for_each(|step| view.step(&metrics(step)));
    for step in 1..=40u64 {
        let owners = [("weights", 100), ("activations", 60 + step), ("program, threads and heap", 30)];
        let owners = owners.map(|(name, mib)| Owner { name: name.to_owned(), bytes: mib * MIB });
        view.record(&Record {
            time: step as f64,
            step: Some(step),
            rss: 240 * MIB,
            owners: owners.to_vec(),
            ..Record::default()
        });
    }
    view.happened(Event::evaluation(20, 2.5));
    view.happened(Event::new(Some(20), Kind::Saved, "saved runs/demo/checkpoint-20"));
    view.happened(Event::memory(31, Status::Warning, 240 * MIB, 256 * MIB));
    view
}

fn shown(runs: &[View], look: &Look, (width, height): (u16, u16)) -> String {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| draw(frame, runs, look)).unwrap();
    let buffer = terminal.backend().buffer();
    let mut text = String::new();
    for y in 0..height {
        let row: String = (0..width).map(|x| buffer[(x, y)].symbol()).collect();
        let _ = writeln!(text, "{}", row.trim_end());
    }
    text
}

fn look(keys: &str) -> Look {
    let mut look = Look::new(Colours::None, false);
    for key in keys.chars() {
        look.press(KeyEvent::from(KeyCode::Char(key)), 1);
    }
    look
}

/// What is kept in `shown/`: a name, the keys that were pressed, and the size of the terminal.
const KEPT: [(&str, &str, (u16, u16)); 4] = [
    ("small", "", (80, 24)),
    ("large", "", (160, 50)),
    ("memory", "4++++", (80, 24)),
    ("keys", "?", (80, 24)),
];

fn kept_in(name: &str) -> String {
    format!("{}/src/terminal/shown/{name}.txt", env!("CARGO_MANIFEST_DIR"))
}

#[test]
fn what_is_shown_is_what_is_kept() {
    for (name, keys, size) in KEPT {
        let kept = std::fs::read_to_string(kept_in(name)).unwrap_or_default();
        let shown = shown(&[view()], &look(keys), size);
        assert!(kept == shown, "{name}.txt has\n{kept}\nshown is\n{shown}");
    }
}

#[test]
#[ignore = "writes what is kept anew, to be read before it is committed"]
fn keep_what_is_shown() {
    for (name, keys, size) in KEPT {
        std::fs::write(kept_in(name), shown(&[view()], &look(keys), size)).unwrap();
    }
}

/// Nothing is drawn outside, and nothing panics, whatever the size, the keys, and what is known.
#[test]
fn every_size_and_state_can_be_drawn() {
    let mut broken = View::of("\u{1b}[2J\n名前");
    let bad = StepMetrics {
        step: u64::MAX,
        loss: f64::NAN,
        lr: f64::INFINITY,
        tokens_per_second: 0.0,
        ..metrics(1)
    };
    broken.step(&bad);
    broken.state = State::Ended("\u{1b}]0;x\u{7}".to_owned());
    broken.happened(Event::new(Some(u64::MAX), Kind::Warning, "\u{1b}[31mred\nline\u{0}"));
    broken.notes.push("\u{9b}2J".to_owned());
    let one = StepMetrics { loss: f64::MAX, ..metrics(1) };
    let mut huge = View::default();
    huge.step(&one);
    huge.step(&StepMetrics { loss: f64::MIN, ..metrics(2) });
    for view in [view(), View::default(), broken, huge] {
        for size in [(1, 1), (20, 5), (44, 14), (45, 60), (80, 24), (81, 25), (250, 16)] {
            for keys in ["", "1", "2", "3", "4", "5", "6", "7", "?", "p+++++"] {
                for colours in [Colours::None, Colours::Table, Colours::True] {
                    let mut look = look(keys);
                    look.colours = colours;
                    let text = shown(std::slice::from_ref(&view), &look, size);
                    assert!(!text.chars().any(|c| c.is_control() && c != '\n'), "{size:?} {keys}: {text:?}");
                }
            }
        }
    }
}
